//! A tenant's keyrings in the kernel, which outlive its processes (keyrings(7), user-keyring(7), persistent-keyring(7)). Only the uid
//! itself may clear them, so this program does it as the uid, in a process of its own.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use linux_keyutils::{Key, KeyRing, KeyRingIdentifier, KeySerialId};
use nix::unistd::getuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding};

use super::accounts::TenantAccount;
use crate::bounded_tool::{SHORT_LIMIT, Tool};
use crate::cleanup_checks::finding;

/// The flag that makes the agent's program revoke the current user's keyrings and exit.
pub const FLAG: &str = "--forget-keyrings";

/// The keys and quotas by uid: a uid without keys has no line.
const USERS: &str = "/proc/key-users";
/// The keys that the reading process may see: id, flags, usage, time left, permissions, uid, gid, type, name.
const KEYS: &str = "/proc/keys";
/// How long the kernel may take to collect revoked keys: a worker of its own does it, which waits for a processor on a busy machine.
const COLLECTED_WITHIN: Duration = Duration::from_secs(10);
const LOOKS_EVERY: Duration = Duration::from_millis(20);

/// Clears and revokes the account's keyrings with the agent's own `program`; [`check_removed`] shows what is left.
pub fn revoke(account: &TenantAccount, program: &Path) {
    if !matches!(of(account), Ok(Some(_))) {
        return;
    }
    // By its descriptor: the tenant may not be able to reach the program's folder.
    let Ok(opened) = File::open(program) else { return };
    let tool = Tool::new(format!("/proc/self/fd/{}", opened.as_raw_fd())).named("gpuaas-agent").arg(FLAG);
    let _ = tool.by_tenant(account.uid).run_to_end(SHORT_LIMIT);
    let until = Instant::now() + COLLECTED_WITHIN;
    while matches!(of(account), Ok(Some(_))) && Instant::now() < until {
        std::thread::sleep(LOOKS_EVERY);
    }
}

/// Checks for keys of the account.
#[must_use]
pub fn check_removed(account: &TenantAccount) -> CleanupFinding {
    let looked_for = format!("keys of uid {} in {USERS}", account.uid);
    finding(CleanupCheck::SessionFiles, looked_for, of(account).map(|line| line.into_iter().collect()))
}

/// The account's line in the kernel's list.
fn of(account: &TenantAccount) -> io::Result<Option<String>> {
    let users = match fs::read_to_string(USERS) {
        Ok(users) => users,
        // This kernel has no keyrings.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let is_of = |line: &&str| line.split(':').next().and_then(|uid| uid.trim().parse().ok()) == Some(account.uid);
    Ok(users.lines().find(is_of).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")))
}

/// Revokes every key and keyring of the current user.
///
/// # Errors
/// The list of keys cannot be read.
pub fn revoke_own() -> io::Result<()> {
    // In reach, it can be revoked; it is created if there is none.
    let _ = KeyRing::get_persistent(KeyRingIdentifier::Process);
    for id in revocation_order(&fs::read_to_string(KEYS)?, getuid().as_raw()) {
        // A key that cannot be revoked by itself is removed with its keyring.
        let _ = Key::from_id(KeySerialId::new(id)).invalidate();
    }
    Ok(())
}

/// The keys of `uid` in the kernel's list. The process's own keyring comes last: the persistent one is reached through it, and the kernel
/// numbers and lists them in no particular order.
fn revocation_order(keys: &str, uid: u32) -> Vec<i32> {
    let uid = uid.to_string();
    let (of_process, others): (Vec<_>, Vec<_>) = keys.lines().partition(|line| line.contains(" _pid: "));
    let of_uid = |line: &str| {
        let mut fields = line.split_whitespace();
        let (id, of) = (fields.next().and_then(|id| i32::from_str_radix(id, 16).ok()), fields.nth(4));
        id.filter(|_| of == Some(uid.as_str()))
    };
    others.into_iter().chain(of_process).filter_map(of_uid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyring_that_links_to_others_is_revoked_last() {
        let listed = "36dc16a1 I--Q---     1 perm 3f010000 70000 70000 keyring   _pid: 1\n\
                      37dc16a1 I--Q---     1 perm 3f010000     0     0 keyring   _uid.0: empty\n\
                      38e31de2 I------     2   3d 1f030000 70000 65534 keyring   _persistent.70000: empty\n";
        assert_eq!(revocation_order(listed, 70000), [0x38e3_1de2, 0x36dc_16a1]);
    }
}

//! What a tenant keeps in the kernel: keyrings of its uid, which outlive its processes (keyrings(7), user-keyring(7),
//! persistent-keyring(7)). Nobody but the uid itself may empty them, so this program does it as the uid, in a process of its own.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use linux_keyutils::{Key, KeyRing, KeyRingIdentifier, KeySerialId};
use nix::unistd::getuid;
use wire::proof::{Checked, Finding};

use super::accounts::Account;
use crate::tenant::finding;

/// The flag by which the agent's own program is told to do this and end.
pub const FLAG: &str = "--forget-keyrings";

/// Whose keys count against whose quota: a uid that has none has no line.
const USERS: &str = "/proc/key-users";
/// Those that whoever reads it may see: id, flags, usage, time left, permissions, uid, gid, type, name.
const KEYS: &str = "/proc/keys";
/// How long the kernel may take to collect what was given up.
const COLLECTED_WITHIN: Duration = Duration::from_secs(2);
const LOOKS_EVERY: Duration = Duration::from_millis(20);

/// Empties and gives up what the account has, by the agent's own `program`; [`look`] tells whether that was all.
pub fn forget(account: &Account, program: &Path) {
    if !matches!(of(account), Ok(Some(_))) {
        return;
    }
    // By its descriptor: the tenant need not be able to reach the folder that it lies in.
    let Ok(opened) = File::open(program) else { return };
    let mut command = Command::new(format!("/proc/self/fd/{}", opened.as_raw_fd()));
    command.arg0("gpuaas-agent").arg(FLAG).env_clear().current_dir("/").uid(account.uid).gid(account.uid);
    let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let until = Instant::now() + COLLECTED_WITHIN;
    while matches!(of(account), Ok(Some(_))) && Instant::now() < until {
        std::thread::sleep(LOOKS_EVERY);
    }
}

/// Looks for keys of the account.
#[must_use]
pub fn look(account: &Account) -> Finding {
    let looked_for = format!("keys of uid {} in {USERS}", account.uid);
    finding(Checked::SessionFiles, looked_for, of(account).map(|line| line.into_iter().collect()))
}

/// The account's line in the kernel's list.
fn of(account: &Account) -> io::Result<Option<String>> {
    let users = match fs::read_to_string(USERS) {
        Ok(users) => users,
        // This kernel has no keyrings.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let is_of = |line: &&str| line.split(':').next().and_then(|uid| uid.trim().parse().ok()) == Some(account.uid);
    Ok(users.lines().find(is_of).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")))
}

/// Gives up every key and keyring of whoever runs this.
///
/// # Errors
/// The list of keys cannot be read.
pub fn forget_own() -> io::Result<()> {
    // In reach, it may be given up; it is made where there is none.
    let _ = KeyRing::get_persistent(KeyRingIdentifier::Process);
    for id in in_order(&fs::read_to_string(KEYS)?, getuid().as_raw()) {
        // What may not be given up by itself goes with the keyring that it is in.
        let _ = Key::from_id(KeySerialId::new(id)).invalidate();
    }
    Ok(())
}

/// The keys of `uid` in the kernel's list. The process's own keyring comes last: through it the persistent one is in reach, and the kernel
/// numbers and lists them by chance.
fn in_order(keys: &str, uid: u32) -> Vec<i32> {
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
    fn the_keyring_through_which_another_is_in_reach_is_given_up_last() {
        let listed = "36dc16a1 I--Q---     1 perm 3f010000 70000 70000 keyring   _pid: 1\n\
                      37dc16a1 I--Q---     1 perm 3f010000     0     0 keyring   _uid.0: empty\n\
                      38e31de2 I------     2   3d 1f030000 70000 65534 keyring   _persistent.70000: empty\n";
        assert_eq!(in_order(listed, 70000), [0x38e3_1de2, 0x36dc_16a1]);
    }
}

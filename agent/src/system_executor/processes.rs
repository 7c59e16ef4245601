//! Ends every process of a uid, even if it forks endlessly, and the processes that it started as root through sudo.
//!
//! A process that is killed while it waits in the kernel, for a device or a mount that does not answer, stays until that answers. It runs
//! nothing of its own from then on, so a tenant's end does not wait for it; a GPU that it holds is not proved.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};

use super::accounts::TenantAccount;
use crate::bounded_tool::Tool;
use crate::process_attributes::live_thread;

const GIVE_UP_AFTER: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);
/// How long killed processes that wait in the kernel are waited for: a disk that is slow answers within it.
const KERNEL_WAIT: Duration = Duration::from_secs(2);
/// The bit of SIGKILL in a mask of signals.
const KILL_BIT: u64 = 1 << (Signal::SIGKILL as i32 - 1);
/// How long the signal to all may take.
const SIGNAL_LIMIT: Duration = Duration::from_secs(3);

/// Kills until two scans in a row find nothing, and returns how many processes were found.
pub fn end_all(account: &TenantAccount) -> usize {
    let (begun, mut seen, mut quiet) = (Instant::now(), BTreeSet::new(), false);
    while begun.elapsed() < GIVE_UP_AFTER {
        let Ok(found) = find(account.uid) else { break };
        let only_waits = || begun.elapsed() >= KERNEL_WAIT && found.iter().all(|pid| waits_in_kernel(*pid));
        if found.is_empty() || only_waits() {
            seen.extend(found);
            if quiet {
                break;
            }
            quiet = true;
        } else {
            quiet = false;
            kill_everything_of(account.uid);
            for pid in &found {
                let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            seen.extend(found);
            thread::sleep(PAUSE);
        }
    }
    seen.len()
}

/// The processes of the account that are killed and wait in the kernel.
#[must_use]
pub fn killed(account: &TenantAccount) -> BTreeSet<u32> {
    let found = find(account.uid).unwrap_or_default().into_iter().filter(|pid| waits_in_kernel(*pid));
    found.map(i32::cast_unsigned).collect()
}

/// Checks that no process is left.
#[must_use]
pub fn check_removed(account: &TenantAccount) -> CleanupFinding {
    let (outcome, detail) = match find(account.uid) {
        Ok(pids) if pids.is_empty() => (FindingOutcome::Gone, None),
        Ok(pids) if pids.iter().all(|pid| waits_in_kernel(*pid)) => {
            let detail = format!("processes {pids:?} are killed, and wait in the kernel for what does not answer");
            (FindingOutcome::Gone, Some(detail))
        }
        Ok(pids) => (FindingOutcome::Present, Some(format!("processes {pids:?}"))),
        Err(error) => (FindingOutcome::Unknown, Some(error.to_string())),
    };
    CleanupFinding { what: CleanupCheck::Processes, looked_for: format!("uid {}", account.uid), outcome, detail }
}

/// Sends one signal to all processes of the uid at once, from a process that is one of them: the kernel delivers it to each of them
/// before another fork can complete, which no scan of the process table can guarantee.
fn kill_everything_of(uid: u32) {
    // The shell's built-in `kill`: it needs no program that the tenant's limits could prevent from starting.
    // The tenant's processes may stop or end it: what they leave is killed one by one.
    let _ = Tool::new("/bin/sh").args(["-c", "kill -s KILL -- -1"]).by_tenant(uid).run_to_end(SIGNAL_LIMIT);
}

/// Every process with the uid in any of its four uid fields, and what it started through sudo.
fn find(uid: u32) -> io::Result<BTreeSet<i32>> {
    let mark = format!("SUDO_UID={uid}");
    let mut found = BTreeSet::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // It may exit while it is read.
        if is_of(&entry.path(), uid, mark.as_bytes()).unwrap_or(false) {
            found.insert(pid);
        }
    }
    found.remove(&Pid::this().as_raw());
    Ok(found)
}

/// Whether the process is killed and cannot end yet: each of its threads waits in the kernel, uninterruptible, and finds the signal before
/// it would run anything of its own.
fn waits_in_kernel(pid: i32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let waits = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
        let state = field("State:")?.chars().next()?;
        let pending = u64::from_str_radix(field("SigPnd:")?.trim_end(), 16).ok()?;
        Some(matches!(state, 'Z' | 'X') || (state == 'D' && pending & KILL_BIT != 0))
    };
    // A thread that has just ended leaves it open: the next scan decides.
    tasks.is_ok_and(|tasks| tasks.flatten().all(|task| waits(task).unwrap_or(false)))
}

fn is_of(process: &Path, uid: u32, mark: &[u8]) -> io::Result<bool> {
    let status = fs::read_to_string(process.join("status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let is_ended = field("State:").is_some_and(|state| state.trim_start().starts_with(['Z', 'X']));
    let threads: u32 = field("Threads:").and_then(|threads| threads.trim().parse().ok()).unwrap_or(0);
    // A zombie runs nothing and holds nothing. One with other threads is a program whose main thread has ended: the rest of it runs.
    if is_ended && threads <= 1 {
        return Ok(false);
    }
    let uids = field("Uid:").unwrap_or_default();
    if uids.split_whitespace().any(|field| field.parse() == Ok(uid)) {
        return Ok(true);
    }
    let environment = fs::read(live_thread(process, is_ended)?.join("environ"))?;
    Ok(environment.split(|byte| *byte == 0).any(|variable| variable == mark))
}

//! Ends every process of a uid, even if it forks endlessly, and the processes that it started as root through sudo.
//!
//! A process that is killed while it waits in the kernel, for a device or a mount that does not answer, stays until that answers. It runs
//! nothing of its own from then on, so a tenant's end does not wait for it; a GPU that it holds is not proved.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
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

/// The processes of one tenant, and of its neighbours.
#[derive(Debug, Clone, Copy)]
pub struct TenantProcesses<'a> {
    pub account: &'a TenantAccount,
    /// The uids of all tenants.
    pub tenants: &'a RangeInclusive<u32>,
}

impl TenantProcesses<'_> {
    /// Kills until two scans in a row find nothing, and returns how many processes were found.
    pub fn end_all(self) -> usize {
        let (begun, mut seen, mut quiet) = (Instant::now(), BTreeSet::new(), false);
        while begun.elapsed() < GIVE_UP_AFTER {
            let Ok(found) = self.find() else { break };
            let only_waits = || begun.elapsed() >= KERNEL_WAIT && found.iter().all(|pid| waits_in_kernel(*pid));
            if found.is_empty() || only_waits() {
                seen.extend(found);
                if quiet {
                    break;
                }
                quiet = true;
            } else {
                quiet = false;
                kill_everything_of(self.account.uid);
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
    pub fn killed(self) -> BTreeSet<u32> {
        let found = self.find().unwrap_or_default().into_iter().filter(|pid| waits_in_kernel(*pid));
        found.map(i32::cast_unsigned).collect()
    }

    /// Checks that no process is left.
    #[must_use]
    pub fn check_removed(self) -> CleanupFinding {
        let (outcome, detail) = match self.find() {
            Ok(pids) if pids.is_empty() => (FindingOutcome::Gone, None),
            Ok(pids) if pids.iter().all(|pid| waits_in_kernel(*pid)) => {
                let detail = format!("processes {pids:?} are killed, and wait in the kernel for what does not answer");
                (FindingOutcome::Gone, Some(detail))
            }
            Ok(pids) => (FindingOutcome::Present, Some(format!("processes {pids:?}"))),
            Err(error) => (FindingOutcome::Unknown, Some(error.to_string())),
        };
        CleanupFinding {
            what: CleanupCheck::Processes,
            looked_for: format!("uid {}", self.account.uid),
            outcome,
            detail,
        }
    }

    fn find(self) -> io::Result<BTreeSet<i32>> {
        let mut found = find_in(Path::new("/proc"), self)?;
        found.remove(&Pid::this().as_raw());
        Ok(found)
    }
}

/// Sends one signal to all processes of the uid at once, from a process that is one of them: the kernel delivers it to each of them
/// before another fork can complete, which no scan of the process table can guarantee.
fn kill_everything_of(uid: u32) {
    // The shell's built-in `kill`: it needs no program that the tenant's limits could prevent from starting.
    // The tenant's processes may stop or end it: what they leave is killed one by one.
    let _ = Tool::new("/bin/sh").args(["-c", "kill -s KILL -- -1"]).by_tenant(uid).run_to_end(SIGNAL_LIMIT);
}

/// Every process with the uid in any of its four uid fields, and what it started through sudo.
fn find_in(proc: &Path, of: TenantProcesses<'_>) -> io::Result<BTreeSet<i32>> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // It may exit while it is read.
        if is_of(&entry.path(), of).unwrap_or(false) {
            found.insert(pid);
        }
    }
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

fn is_of(process: &Path, TenantProcesses { account, tenants }: TenantProcesses<'_>) -> io::Result<bool> {
    let status = fs::read_to_string(process.join("status"))?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let is_ended = field("State:").is_some_and(|state| state.trim_start().starts_with(['Z', 'X']));
    let threads: u32 = field("Threads:").and_then(|threads| threads.trim().parse().ok()).unwrap_or(0);
    // A zombie runs nothing and holds nothing. One with other threads is a program whose main thread has ended: the rest of it runs.
    if is_ended && threads <= 1 {
        return Ok(false);
    }
    let uids: Vec<u32> =
        field("Uid:").unwrap_or_default().split_whitespace().filter_map(|field| field.parse().ok()).collect();
    if uids.contains(&account.uid) {
        return Ok(true);
    }
    // A neighbour's: its environment is memory, which it may have mapped to a file that never answers its reader.
    if !uids.is_empty() && uids.iter().all(|uid| tenants.contains(uid)) {
        return Ok(false);
    }
    let environment = fs::read(live_thread(process, is_ended)?.join("environ"))?;
    let mark = format!("SUDO_UID={}", account.uid);
    Ok(environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn processes_are_found_by_uid_and_sudo_whatever_a_neighbours_memory_does() {
        let proc = tempfile::tempdir().unwrap();
        let process = |pid: i32, uids: &str, environment: Option<&str>| {
            let folder = proc.path().join(pid.to_string());
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("status"), format!("State:\tS (sleeping)\nThreads:\t1\nUid:\t{uids}\n")).unwrap();
            match environment {
                Some(text) => fs::write(folder.join("environ"), text).unwrap(),
                // As memory that is mapped to a file that never answers: who opens it for reading waits.
                None => nix::unistd::mkfifo(&folder.join("environ"), Mode::S_IRWXU).unwrap(),
            }
        };
        process(2, "70001 70001 70001 70001", None);
        process(3, "70002 70002 70002 70002", None);
        process(4, "0 0 0 0", Some("HOME=/root\0SUDO_UID=70001\0"));
        process(5, "0 0 0 0", Some("SUDO_UID=70002\0"));
        // A program that sudo has started, and that has given up the rights of root.
        process(6, "42 42 42 42", Some("SUDO_UID=70001\0"));
        // A neighbour's program with the rights of another user.
        process(7, "70002 0 0 0", Some("SUDO_UID=70002\0"));
        let (sender, found) = mpsc::channel();
        let path = proc.path().to_owned();
        std::thread::spawn(move || {
            let account = TenantAccount { name: "gpu-1".into(), uid: 70_001 };
            let tenants = 70_000..=99_999;
            let _ = sender.send(find_in(&path, TenantProcesses { account: &account, tenants: &tenants }).unwrap());
        });
        let found = found.recv_timeout(Duration::from_secs(60)).expect("a neighbour's memory is waited for");
        assert_eq!(found, BTreeSet::from([2, 4, 6]));
    }
}

//! The identity of a member's process, by which a later process on the same machine can tell whether it has ended.

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use persistence::membership::Member;
use serde::{Deserialize, Serialize};

/// A process on one machine since its last boot, distinguished from a later one with the same PID by its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    boot_id: String,
    /// PIDs are unique within it alone.
    pid_namespace: String,
    pid: i32,
    /// In ticks since the boot: field 22 of `proc_pid_stat(5)`.
    started_at_ticks: u64,
}

/// This process; `None` where `/proc` cannot be read.
#[must_use]
pub fn current() -> Option<ProcessIdentity> {
    let pid = i32::try_from(std::process::id()).ok()?;
    Some(ProcessIdentity {
        boot_id: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().to_owned(),
        pid_namespace: std::fs::read_link("/proc/self/ns/pid").ok()?.to_string_lossy().into_owned(),
        pid,
        started_at_ticks: stat(pid)?.started_at_ticks,
    })
}

/// Whether the member's process has certainly ended. A process on another machine, in another PID namespace, or of a release that does
/// not write its identity may still run.
#[must_use]
pub fn has_ended(member: &Member) -> bool {
    let Ok(process) = strict_json::from_value::<ProcessIdentity>(member.details["process"].clone()) else {
        return false;
    };
    current().is_some_and(|this| process.has_ended(&this))
}

impl ProcessIdentity {
    fn has_ended(&self, this: &Self) -> bool {
        if (&self.boot_id, &self.pid_namespace) != (&this.boot_id, &this.pid_namespace) {
            return false;
        }
        if kill(Pid::from_raw(self.pid), None) == Err(Errno::ESRCH) {
            return true;
        }
        // Unreadable: it may be another user's.
        stat(self.pid).is_some_and(|now| now.is_zombie || now.started_at_ticks != self.started_at_ticks)
    }
}

struct ProcessStat {
    /// It has ended, and waits for its parent to reap it.
    is_zombie: bool,
    started_at_ticks: u64,
}

fn stat(pid: i32) -> Option<ProcessStat> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name may contain anything, parentheses too.
    let fields: Vec<_> = text.rsplit_once(") ")?.1.split(' ').collect();
    Some(ProcessStat {
        is_zombie: matches!(*fields.first()?, "Z" | "X"),
        started_at_ticks: fields.get(19)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn member(process: Value) -> Member {
        let started_at = domain::Timestamp::UNIX_EPOCH;
        let id = domain::MemberId(uuid::Uuid::from_u128(1));
        Member { id, name: "one".into(), started_at, details: json!({ "process": process }) }
    }

    #[test]
    fn process_that_runs_or_cannot_be_inspected_has_not_ended() {
        let this = current().unwrap();
        let elsewhere = ProcessIdentity { boot_id: "another".into(), pid: i32::MAX, ..this.clone() };
        let contained = ProcessIdentity { pid_namespace: "pid:[1]".into(), pid: i32::MAX, ..this.clone() };
        for process in [json!(this), json!(elsewhere), json!(contained), Value::Null, json!({ "pid": 1 })] {
            assert!(!has_ended(&member(process.clone())), "{process}");
        }
    }

    #[test]
    fn process_that_is_gone_a_zombie_or_whose_pid_was_reused_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let process =
            ProcessIdentity { pid, started_at_ticks: stat(pid).unwrap().started_at_ticks, ..current().unwrap() };
        let ended = |process: &ProcessIdentity| has_ended(&member(json!(process)));
        assert!(!ended(&process));
        let earlier = ProcessIdentity { started_at_ticks: process.started_at_ticks - 1, ..process.clone() };
        assert!(ended(&earlier), "the number was given again");
        child.kill().unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !ended(&process) && std::time::Instant::now() < until {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert!(ended(&process), "it is a zombie");
        child.wait().unwrap();
        assert!(ended(&process));
    }
}

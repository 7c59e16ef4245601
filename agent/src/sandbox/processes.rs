//! A tenant's processes: finding them in `/proc` and terminating them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};

use crate::executor::tenant_setup::MARKER;
use crate::process_attributes::live_thread;

/// How long a process may take to exit after SIGTERM.
const GRACE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(10);

/// The kernel's process table.
pub struct ProcessTable {
    pub(super) proc: PathBuf,
    /// How long processes are killed before they are reported as present.
    pub(super) give_up_after: Duration,
}

impl Default for ProcessTable {
    fn default() -> Self {
        Self { proc: PathBuf::from("/proc"), give_up_after: Duration::from_secs(10) }
    }
}

/// The result of terminating a tenant's processes.
#[derive(Debug, Clone, Default)]
pub struct Termination {
    /// Every process of the tenant that was found.
    pub seen: BTreeSet<i32>,
    /// Why the table could not be read.
    pub unreadable: Option<String>,
}

struct Process {
    pid: i32,
    parent: i32,
    session: i32,
    marked: bool,
}

impl ProcessTable {
    /// Sends SIGTERM to every process of the allocation, then SIGKILL, until two scans in a row find none: the first may have missed a
    /// process that forked while the table was read.
    #[must_use]
    pub fn end_all(&self, allocation_id: Uuid, folder: &Path) -> Termination {
        let mut ended = Termination::default();
        let (begun, mut quiet) = (Instant::now(), false);
        loop {
            let found = match self.find(allocation_id, folder) {
                Ok(found) => found,
                Err(error) => return Termination { unreadable: Some(error.to_string()), ..ended },
            };
            if found.is_empty() {
                if quiet || ended.seen.is_empty() {
                    return ended;
                }
                quiet = true;
                continue;
            }
            quiet = false;
            let signal = if begun.elapsed() < GRACE { Signal::SIGTERM } else { Signal::SIGKILL };
            for pid in &found {
                // SIGTERM once for each, SIGKILL repeatedly. It is fine if a process has exited already.
                if ended.seen.insert(*pid) || signal == Signal::SIGKILL {
                    let _ = kill(Pid::from_raw(*pid), signal);
                }
            }
            if begun.elapsed() > self.give_up_after {
                return ended;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Checks that no process is left.
    #[must_use]
    pub fn check_removed(&self, allocation_id: Uuid, folder: &Path, ended: &Termination) -> CleanupFinding {
        let found = match &ended.unreadable {
            Some(why) => Err(why.clone()),
            None => self.find(allocation_id, folder).map_err(|error| error.to_string()),
        };
        let (outcome, detail) = match found {
            Ok(pids) if pids.is_empty() => (FindingOutcome::Gone, None),
            Ok(pids) => (FindingOutcome::Present, Some(format!("processes {pids:?}"))),
            Err(why) => (FindingOutcome::Unknown, Some(why)),
        };
        CleanupFinding {
            what: CleanupCheck::Processes,
            looked_for: format!("{MARKER}={allocation_id}"),
            outcome,
            detail,
        }
    }

    /// Processes that carry the mark or work in the folder, their descendants, and the sessions they lead.
    fn find(&self, allocation_id: Uuid, folder: &Path) -> std::io::Result<BTreeSet<i32>> {
        let mark = format!("{MARKER}={allocation_id}");
        let mut table = Vec::new();
        for entry in fs::read_dir(&self.proc)? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // It may exit while it is read.
            if let Some(process) = read_process(&entry.path(), pid, mark.as_bytes(), folder) {
                table.push(process);
            }
        }
        let own = own_ancestors(&table);
        let mut found: BTreeSet<i32> =
            table.iter().filter(|process| process.marked).map(|process| process.pid).collect();
        loop {
            let before = found.len();
            for process in &table {
                if found.contains(&process.parent) || found.contains(&process.session) {
                    found.insert(process.pid);
                }
            }
            found.retain(|pid| !own.contains(pid));
            if found.len() == before {
                return Ok(found);
            }
        }
    }
}

/// The agent and its ancestors, which are never a tenant's.
fn own_ancestors(table: &[Process]) -> BTreeSet<i32> {
    let mut line = BTreeSet::new();
    let mut pid = Pid::this().as_raw();
    while pid > 0 && line.insert(pid) {
        pid = table.iter().find(|process| process.pid == pid).map_or(0, |process| process.parent);
    }
    line
}

fn read_process(path: &Path, pid: i32, mark: &[u8], folder: &Path) -> Option<Process> {
    let stat = fs::read_to_string(path.join("stat")).ok()?;
    // The name in parentheses may contain spaces and parentheses.
    let mut fields = stat.get(stat.rfind(')')? + 2..)?.split(' ');
    let is_dead = matches!(fields.next()?, "Z" | "X");
    let parent = fields.next()?.parse().ok()?;
    let _group = fields.next()?;
    let session = fields.next()?.parse().ok()?;
    // As proc(5) counts: `session` is field 6, `num_threads` field 20.
    let threads = fields.nth(13).and_then(|count| count.parse().ok()).unwrap_or(1);
    // A program whose main thread has ended looks as if it were dead, and the rest of it runs.
    if is_dead && threads <= 1 {
        return None;
    }
    let path = live_thread(path, is_dead).ok()?;
    // Not readable for processes of other users, which cannot be a tenant's here: the executor gives no root.
    let environment = fs::read(path.join("environ")).unwrap_or_default();
    let marked = environment.split(|byte| *byte == 0).any(|variable| variable == mark)
        || fs::read_link(path.join("cwd")).is_ok_and(|cwd| cwd.starts_with(folder));
    Some(Process { pid, parent, session, marked })
}

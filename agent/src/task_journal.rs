//! The journal of accepted, started, finished and reported tasks on disk, so that kill -9 at any moment loses no effect and repeats none
//! that must not be repeated.
//!
//! Append-only JSON lines. A line that decides whether an effect may happen (`started`, `done`) is synced before the agent continues;
//! lines that wait together share one sync. A torn last line is what a crash leaves, and is dropped; a broken line elsewhere is
//! corruption, and stops the agent.
//!
//! A disk that takes no line, or does not answer, keeps no tenant: a release, which may be executed any number of times, begins without its line,
//! and the results of all tasks count in memory. No other task begins. The whole file is rewritten as soon as the disk takes it.
//!
//! So the file may lack later lines of a task, and a task that it has as unfinished may be over: the next agent goes on with releases alone.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use uuid::Uuid;
use wire::task::{OpenTerminal, TASK_TYPES, Task, TaskPayload, TaskResult, TaskStatus};

use crate::atomic_file::{self, FileError};
use crate::bounded_reading::LATE_AFTER;
use crate::finding_log::{Condition, late_readings};
use crate::server_clock::ServerClock;
use writer::{JournalWriter, PendingEntry};

mod writer;

/// How long past its expiry a task is remembered. A copy of it that arrives later is refused as expired; the margin covers clocks that
/// are set back.
const REMEMBERED_AFTER_EXPIRY: TimeDelta = TimeDelta::minutes(10);
/// Why the file lacks lines, where that is no error.
const NO_ANSWER: &str = "the disk of the journal does not answer";

/// One task, at the latest attempt that this agent has accepted.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskRecord {
    pub attempt: u32,
    pub payload: TaskPayload,
    pub phase: Phase,
}

/// The phase of an attempt.
#[derive(Debug, Clone, PartialEq)]
pub enum Phase {
    /// Verified; its effect has not begun.
    Accepted,
    /// Its effect may have begun.
    Started,
    /// Its effect is complete, or has failed; the control plane may not know.
    Done(TaskResult),
    /// The control plane has the result, or refuses to take it.
    Reported(TaskResult),
}

/// One line of the file.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum JournalEntry {
    Accepted { payload: TaskPayload },
    Started { task_id: Uuid, attempt: u32, at: DateTime<Utc> },
    Done { task_id: Uuid, result: TaskResult },
    Reported { task_id: Uuid, attempt: u32, ended: ReportOutcome, at: DateTime<Utc> },
}

/// How the reporting of a result ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportOutcome {
    /// The control plane has it.
    Recorded,
    /// The control plane will never take it.
    GivenUp,
}

impl JournalEntry {
    /// Whether the agent has to wait until the line is durable.
    fn needs_sync(&self) -> bool {
        match self {
            Self::Started { .. } | Self::Done { .. } => true,
            // Losing `accepted` means that the control plane redispatches, losing `reported` that the result is resent; both are
            // harmless.
            Self::Accepted { .. } | Self::Reported { .. } => false,
        }
    }

    /// Whether the agent goes on where the disk does not take the line. What is done must be reported; and that a release has begun need not
    /// outlive the process: the next one begins it again.
    fn may_wait(&self, records: &Records) -> bool {
        match self {
            Self::Started { task_id, .. } => {
                records.get(task_id).is_some_and(|record| matches!(record.payload.task, Task::Release(_)))
            }
            Self::Accepted { .. } | Self::Done { .. } | Self::Reported { .. } => true,
        }
    }
}

/// Why the journal cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error(transparent)]
    Store(#[from] FileError),
    #[error(
        "line {line} of the journal {} is damaged; move the file away to start without it, and look at the node's allocations \
         before giving it work",
        path.display()
    )]
    Damaged {
        line: usize,
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("the journal could not be written")]
    Write(#[source] Arc<io::Error>),
    #[error("the journal's writer has ended")]
    Closed,
}

type Records = BTreeMap<Uuid, TaskRecord>;

/// The journal of one agent. Cheap to share behind an `Arc`; its writer is a thread that ends with the last handle.
#[derive(Debug)]
pub struct Journal {
    records: Arc<Mutex<Records>>,
    unwritten: Arc<Mutex<Option<String>>>,
    writer: mpsc::Sender<PendingEntry>,
    /// How long a line is waited for.
    late_after: Duration,
    /// As the probe of the state folder names it.
    folder: String,
}

impl Journal {
    /// Opens or creates the journal at `path`, and compacts it to what is still needed if the control plane's time is known. Where the disk has
    /// no room for that, what is read counts all the same.
    ///
    /// # Errors
    /// [`JournalError`] when it cannot be read, or is corrupt.
    pub fn open(path: &Path, clock: &ServerClock) -> Result<Self, JournalError> {
        let content = atomic_file::read_bytes_if_there(path)?.unwrap_or_default();
        let mut records = read(&content, path)?;
        forget(&mut records, clock);
        let records = Arc::new(Mutex::new(records));
        let unwritten = Arc::default();
        let writer = JournalWriter::open(path, (Arc::clone(&records), Arc::clone(&unwritten)), clock);
        let (sender, lines) = mpsc::channel();
        std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.write_until_closed(&lines))
            .map_err(|error| JournalError::Write(Arc::new(error)))?;
        let folder = atomic_file::folder_of(path).display().to_string();
        Ok(Self { records, unwritten, writer: sender, late_after: LATE_AFTER, folder })
    }

    /// The condition that the disk does not take what this journal has, which names why, or does not answer.
    #[must_use]
    pub fn condition(&self) -> Option<Condition> {
        let why = lock(&self.unwritten).clone()?;
        if why == NO_ANSWER {
            return late_readings("state", std::iter::once(self.folder.as_str()));
        }
        let detail = format!("{why}; tenants are released all the same, and no other task begins until there is room");
        Some(Condition::of_machine("disk", "full", detail))
    }

    /// Forgets what is over, once the control plane's time is known.
    pub fn forget_past(&self, clock: &ServerClock) {
        forget(&mut lock(&self.records), clock);
    }

    /// The record of a task.
    #[must_use]
    pub fn record(&self, task_id: Uuid) -> Option<TaskRecord> {
        lock(&self.records).get(&task_id).cloned()
    }

    /// Tasks whose result the control plane does not have yet, oldest id first.
    #[must_use]
    pub fn unreported(&self) -> Vec<TaskRecord> {
        let open = |record: &&TaskRecord| !matches!(record.phase, Phase::Reported(_));
        lock(&self.records).values().filter(open).cloned().collect()
    }

    /// Whether this agent has cleaned the allocation up. A provision task that arrives after that is late: the GPUs may belong to another
    /// allocation by now.
    #[must_use]
    pub fn has_released(&self, allocation_id: Uuid) -> bool {
        lock(&self.records).values().any(|record| releases(record, allocation_id))
    }

    /// Whether this agent has begun to clean the allocation up: from then on nothing opens it.
    #[must_use]
    pub fn is_in_clean_up(&self, allocation_id: Uuid) -> bool {
        lock(&self.records).values().any(|record| {
            let begun = record.phase != Phase::Accepted;
            begun && matches!(&record.payload.task, Task::Release(release) if release.allocation_id == allocation_id)
        })
    }

    /// The terminal sessions that were started and whose lifetime was not over at that time.
    #[must_use]
    pub fn terminals_begun(&self, at: DateTime<Utc>) -> Vec<OpenTerminal> {
        lock(&self.records).values().filter_map(|record| terminal_of(record, at)).cloned().collect()
    }

    /// Appends a line. Returns when it is written, and durable if an effect depends on it; or, where the disk does not take it or does not answer,
    /// and it may wait, when it counts in memory. A disk that has not answered is not waited for again until it has.
    ///
    /// # Errors
    /// [`JournalError`]; the caller must not continue as if the line were written.
    pub async fn append(&self, line: JournalEntry) -> Result<(), JournalError> {
        let (written, mut answer) = oneshot::channel();
        let pending = PendingEntry::new(line.clone(), written);
        let is_over = Arc::clone(&pending.is_over);
        self.writer.send(pending).map_err(|_| JournalError::Closed)?;
        let wait = if lock(&self.unwritten).as_deref() == Some(NO_ANSWER) { Duration::ZERO } else { self.late_after };
        if let Ok(answer) = tokio::time::timeout(wait, &mut answer).await {
            return answer.map_err(|_| JournalError::Closed)?;
        }
        let mut records = lock(&self.records);
        // The writer answers while it has the records.
        if let Ok(answer) = answer.try_recv() {
            return answer;
        }
        is_over.store(true, Ordering::Relaxed);
        writer::note_unwritten(&self.unwritten, NO_ANSWER.to_owned());
        if line.may_wait(&records) {
            apply(&mut records, line);
            Ok(())
        } else {
            Err(JournalError::Write(Arc::new(io::Error::new(io::ErrorKind::TimedOut, NO_ANSWER))))
        }
    }
}

fn releases(record: &TaskRecord, allocation_id: Uuid) -> bool {
    let succeeded = match &record.phase {
        Phase::Done(result) | Phase::Reported(result) => result.status == TaskStatus::Succeeded,
        Phase::Accepted | Phase::Started => false,
    };
    succeeded && matches!(&record.payload.task, Task::Release(release) if release.allocation_id == allocation_id)
}

/// The session that the record started, during its lifetime.
fn terminal_of(record: &TaskRecord, now: DateTime<Utc>) -> Option<&OpenTerminal> {
    let Task::OpenTerminal(open) = &record.payload.task else { return None };
    let begun = match &record.phase {
        Phase::Done(result) | Phase::Reported(result) => result.status == TaskStatus::Succeeded,
        Phase::Accepted | Phase::Started => false,
    };
    (begun && now < open.ends_at).then_some(open)
}

fn read(content: &[u8], path: &Path) -> Result<Records, JournalError> {
    let mut records = Records::new();
    // What follows the last line feed was being written when the agent crashed, perhaps up to the middle of a character.
    let whole = content.iter().rposition(|byte| *byte == b'\n').map_or(&[][..], |end| &content[..=end]);
    for (index, line) in whole.split_inclusive(|byte| *byte == b'\n').enumerate() {
        match serde_json::from_slice(line) {
            Ok(line) => apply(&mut records, line),
            Err(_) if is_of_newer_type(line) => {}
            Err(source) => return Err(JournalError::Damaged { line: index + 1, path: path.to_owned(), source }),
        }
    }
    Ok(records)
}

/// A task of a type that this agent does not know: a newer agent accepted it, before this one was put back.
fn is_of_newer_type(line: &[u8]) -> bool {
    let Ok(line) = serde_json::from_slice::<serde_json::Value>(line) else { return false };
    let kind = line.pointer("/payload/task/type").and_then(serde_json::Value::as_str);
    line["event"] == "accepted" && kind.is_some_and(|kind| !TASK_TYPES.contains(&kind))
}

/// A line of an attempt that a later one has replaced changes nothing.
fn apply(records: &mut Records, line: JournalEntry) {
    match line {
        JournalEntry::Accepted { payload } => {
            let known = records.get(&payload.task_id).is_some_and(|record| record.attempt > payload.attempt);
            if !known {
                let record = TaskRecord { attempt: payload.attempt, payload, phase: Phase::Accepted };
                records.insert(record.payload.task_id, record);
            }
        }
        JournalEntry::Started { task_id, attempt, .. } => {
            if let Some(record) = records.get_mut(&task_id).filter(|record| record.attempt == attempt) {
                record.phase = Phase::Started;
            }
        }
        JournalEntry::Done { task_id, result } => {
            if let Some(record) = records.get_mut(&task_id).filter(|record| record.attempt == result.attempt) {
                record.phase = Phase::Done(result);
            }
        }
        JournalEntry::Reported { task_id, attempt, .. } => {
            if let Some(record) = records.get_mut(&task_id).filter(|record| record.attempt == attempt)
                && let Phase::Done(result) = &record.phase
            {
                record.phase = Phase::Reported(result.clone());
            }
        }
    }
}

/// Drops what is over by the control plane's time; nothing while that is not known. By a wrong clock, a task that was executed would be
/// forgotten and executed again.
fn forget(records: &mut Records, clock: &ServerClock) {
    if let Some(now) = clock.known_now() {
        records.retain(|_, record| is_needed(record, now));
    }
}

fn is_needed(record: &TaskRecord, now: DateTime<Utc>) -> bool {
    if terminal_of(record, now).is_some() {
        return true;
    }
    match record.phase {
        Phase::Done(_) => true,
        // Its outcome is reported by the agent that runs afterwards, however long that takes.
        Phase::Started if matches!(record.payload.task, Task::UpdateAgent(_)) => true,
        Phase::Accepted | Phase::Started | Phase::Reported(_) => {
            record.payload.expires_at + REMEMBERED_AFTER_EXPIRY > now
        }
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use wire::task::Release;

    use super::*;
    use crate::bounded_reading::hanging_mount::OwnMounts;
    use crate::server_clock::since_boot;
    use crate::terminal::skipped_tests;

    fn payload(task: u128, attempt: u32, expires_at: DateTime<Utc>) -> TaskPayload {
        TaskPayload {
            node_id: Uuid::nil(),
            task_id: Uuid::from_u128(task),
            attempt,
            issued_at: expires_at - TimeDelta::minutes(5),
            expires_at,
            origin: None,
            task: Task::Validate { load: None },
        }
    }

    fn result(attempt: u32) -> TaskResult {
        TaskResult {
            attempt,
            status: TaskStatus::Succeeded,
            output: serde_json::Map::new(),
            error: None,
            proof: None,
            started_at: DateTime::UNIX_EPOCH,
            finished_at: DateTime::UNIX_EPOCH,
        }
    }

    /// The clock of a node whose control plane has this time.
    fn clock(now: DateTime<Utc>) -> ServerClock {
        let clock = ServerClock::unknown();
        clock.learn(now, since_boot());
        clock
    }

    fn soon() -> DateTime<Utc> {
        Utc::now() + TimeDelta::minutes(5)
    }

    /// A new journal, in a folder of its own.
    fn opened() -> (tempfile::TempDir, PathBuf, Journal) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        (folder, path, journal)
    }

    async fn walk(journal: &Journal, task: u128, attempt: u32, steps: usize) {
        let task_id = Uuid::from_u128(task);
        let at = Utc::now();
        let lines = [
            JournalEntry::Accepted { payload: payload(task, attempt, soon()) },
            JournalEntry::Started { task_id, attempt, at },
            JournalEntry::Done { task_id, result: result(attempt) },
            JournalEntry::Reported { task_id, attempt, ended: ReportOutcome::Recorded, at },
        ];
        for line in lines.into_iter().take(steps) {
            journal.append(line).await.unwrap();
        }
    }

    fn phase(journal: &Journal, task: u128) -> Phase {
        journal.record(Uuid::from_u128(task)).unwrap().phase
    }

    #[tokio::test]
    async fn allocation_in_clean_up_is_never_opened_again() {
        let (_folder, _, journal) = opened();
        let allocation_id = Uuid::from_u128(9);
        let release = Release { allocation_id, user_name: "gpu-9".to_owned(), devices: Vec::new() };
        let payload = TaskPayload { task: Task::Release(release), ..payload(1, 1, soon()) };
        let task_id = payload.task_id;
        journal.append(JournalEntry::Accepted { payload }).await.unwrap();
        assert!(!journal.is_in_clean_up(allocation_id));
        journal.append(JournalEntry::Started { task_id, attempt: 1, at: Utc::now() }).await.unwrap();
        assert!(journal.is_in_clean_up(allocation_id) && !journal.is_in_clean_up(Uuid::from_u128(10)));
    }

    #[tokio::test]
    async fn started_terminal_is_remembered_until_its_lifetime_ends() {
        let (_folder, path, journal) = opened();
        let ends_at = Utc::now() + TimeDelta::hours(4);
        for (task, status) in [(1, TaskStatus::Succeeded), (2, TaskStatus::Failed)] {
            let open = OpenTerminal {
                session_id: Uuid::from_u128(task),
                allocation_id: Uuid::nil(),
                user_name: "gpu-9".to_owned(),
                ends_at,
                recording: wire::recording::RecordTerms::default(),
            };
            let payload = TaskPayload { task: Task::OpenTerminal(open), ..payload(task, 1, soon()) };
            let task_id = payload.task_id;
            journal.append(JournalEntry::Accepted { payload }).await.unwrap();
            journal.append(JournalEntry::Done { task_id, result: TaskResult { status, ..result(1) } }).await.unwrap();
            let ended = JournalEntry::Reported { task_id, attempt: 1, ended: ReportOutcome::Recorded, at: Utc::now() };
            journal.append(ended).await.unwrap();
        }
        drop(journal);
        let begun = |now: DateTime<Utc>| {
            let journal = Journal::open(&path, &clock(now)).unwrap();
            journal.terminals_begun(now).iter().map(|open| open.session_id).collect::<Vec<_>>()
        };
        assert_eq!(begun(ends_at - TimeDelta::seconds(1)), [Uuid::from_u128(1)]);
        assert!(begun(ends_at).is_empty());
    }

    #[tokio::test]
    async fn nothing_is_forgotten_until_the_time_of_the_control_plane_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let journal = Journal::open(&path, &ServerClock::unknown()).unwrap();
        walk(&journal, 1, 1, 4).await;
        drop(journal);
        let later = clock(soon() + TimeDelta::days(30));
        let journal = Journal::open(&path, &ServerClock::unknown()).unwrap();
        journal.forget_past(&ServerClock::unknown());
        assert!(journal.record(Uuid::from_u128(1)).is_some(), "by a clock that may be wrong");
        journal.forget_past(&clock(Utc::now()));
        assert!(journal.record(Uuid::from_u128(1)).is_some(), "it is not over");
        journal.forget_past(&later);
        assert_eq!(journal.record(Uuid::from_u128(1)), None);
        drop(journal);
        let journal = Journal::open(&path, &later).unwrap();
        assert_eq!(journal.record(Uuid::from_u128(1)), None);
    }

    #[tokio::test]
    async fn allocation_is_released_from_its_successful_clean_up_on() {
        let (_folder, _, journal) = opened();
        let allocation_id = Uuid::from_u128(9);
        let release = Release { allocation_id, user_name: "gpu-9".to_owned(), devices: Vec::new() };
        let payload = TaskPayload { task: Task::Release(release), ..payload(1, 1, soon()) };
        let task_id = payload.task_id;
        journal.append(JournalEntry::Accepted { payload }).await.unwrap();
        assert!(!journal.has_released(allocation_id));
        journal.append(JournalEntry::Done { task_id, result: result(1) }).await.unwrap();
        assert!(journal.has_released(allocation_id));
        assert!(!journal.has_released(Uuid::from_u128(10)));
    }

    #[tokio::test]
    async fn each_phase_survives_a_restart() {
        let (_folder, path, journal) = opened();
        for steps in 1..=4 {
            walk(&journal, steps as u128, 1, steps).await;
        }
        drop(journal);
        // Twice: the second time from the rewritten file.
        for _ in 0..2 {
            let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
            assert_eq!(phase(&journal, 1), Phase::Accepted);
            assert_eq!(phase(&journal, 2), Phase::Started);
            assert_eq!(phase(&journal, 3), Phase::Done(result(1)));
            assert_eq!(phase(&journal, 4), Phase::Reported(result(1)));
            assert_eq!(journal.unreported().len(), 3);
        }
    }

    #[tokio::test]
    async fn journal_truncated_anywhere_opens_to_a_prefix() {
        let (_folder, path, journal) = opened();
        walk(&journal, 1, 1, 4).await;
        drop(journal);
        let whole = fs::read(&path).unwrap();
        let mut phases = Vec::new();
        for length in 0..=whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
            phases.push(match journal.record(Uuid::from_u128(1)).map(|record| record.phase) {
                None => 0,
                Some(Phase::Accepted) => 1,
                Some(Phase::Started) => 2,
                Some(Phase::Done(_)) => 3,
                Some(Phase::Reported(_)) => 4,
            });
        }
        assert!(phases.is_sorted());
        assert_eq!(phases.last(), Some(&4));
    }

    #[tokio::test]
    async fn append_after_a_torn_line_does_not_join_two_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        fs::write(&path, "{\"event\":\"acc").unwrap();
        let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        walk(&journal, 1, 1, 2).await;
        drop(journal);
        assert_eq!(phase(&Journal::open(&path, &clock(Utc::now())).unwrap(), 1), Phase::Started);
    }

    #[test]
    fn broken_line_in_the_middle_is_corruption() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        fs::write(&path, "nonsense\n{}\n").unwrap();
        assert!(matches!(Journal::open(&path, &clock(Utc::now())), Err(JournalError::Damaged { line: 1, .. })));
    }

    #[tokio::test]
    async fn later_attempt_replaces_an_earlier_one_and_not_vice_versa() {
        let (_folder, _, journal) = opened();
        walk(&journal, 1, 1, 2).await;
        walk(&journal, 1, 2, 2).await;
        // The first attempt ends late.
        let task_id = Uuid::from_u128(1);
        journal.append(JournalEntry::Done { task_id, result: result(1) }).await.unwrap();
        assert_eq!(phase(&journal, 1), Phase::Started);
        walk(&journal, 1, 1, 1).await;
        assert_eq!(journal.record(task_id).unwrap().attempt, 2);
    }

    #[tokio::test]
    async fn only_tasks_that_may_be_resent_are_remembered() {
        let (_folder, path, journal) = opened();
        walk(&journal, 1, 1, 4).await;
        walk(&journal, 2, 1, 3).await;
        drop(journal);
        let journal = Journal::open(&path, &clock(soon() + TimeDelta::hours(1))).unwrap();
        assert_eq!(journal.record(Uuid::from_u128(1)), None);
        // Its result was never delivered.
        assert_eq!(phase(&journal, 2), Phase::Done(result(1)));
    }

    #[tokio::test]
    async fn update_in_progress_is_remembered_until_its_outcome() {
        let (_folder, path, journal) = opened();
        let digest = wire::package::Digest::of(b"new");
        let update = Task::UpdateAgent(wire::task::UpdateAgent { digest, force: false, commit_seconds: 3600 });
        let payload = TaskPayload { task: update, ..payload(1, 1, soon()) };
        let task_id = payload.task_id;
        journal.append(JournalEntry::Accepted { payload }).await.unwrap();
        journal.append(JournalEntry::Started { task_id, attempt: 1, at: Utc::now() }).await.unwrap();
        drop(journal);
        let journal = Journal::open(&path, &clock(soon() + TimeDelta::days(30))).unwrap();
        assert_eq!(phase(&journal, 1), Phase::Started);
    }

    #[tokio::test]
    async fn tasks_of_a_newer_agent_do_not_stop_the_one_that_is_put_back() {
        let (_folder, path, journal) = opened();
        walk(&journal, 1, 1, 2).await;
        walk(&journal, 2, 1, 2).await;
        drop(journal);
        let ours = serde_json::to_string(&Task::Validate { load: None }).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        // All of the second task, and none of the first.
        let newer = |line: &str| match line.contains(&Uuid::from_u128(2).to_string()) {
            true => line.replace(&ours, r#"{"type":"node.sing","song":7}"#),
            false => line.to_owned(),
        };
        let text: String = text.lines().map(|line| newer(line) + "\n").collect();
        assert!(text.contains("node.sing"), "{text}");
        fs::write(&path, &text).unwrap();
        let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        assert_eq!((phase(&journal, 1), journal.record(Uuid::from_u128(2))), (Phase::Started, None));
        drop(journal);
        // A type that this agent knows is damage all the same.
        fs::write(&path, text.replace("node.sing", "node.reboot")).unwrap();
        assert!(matches!(Journal::open(&path, &clock(Utc::now())), Err(JournalError::Damaged { .. })));
    }

    #[tokio::test]
    async fn journal_without_room_takes_releases_and_results_begins_nothing_else_and_is_written_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        // No file can be written where this folder is.
        let in_the_way = folder.path().join(".journal.new");
        fs::create_dir(&in_the_way).unwrap();
        let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        assert!(journal.condition().unwrap().detail.contains("could not write"), "{:?}", journal.condition());
        let release = Release { allocation_id: Uuid::from_u128(9), user_name: "gpu-9".to_owned(), devices: Vec::new() };
        let release = TaskPayload { task: Task::Release(release), ..payload(1, 1, soon()) };
        let (of_release, other) = (release.task_id, payload(2, 1, soon()));
        let of_other = other.task_id;
        let started = |task_id| JournalEntry::Started { task_id, attempt: 1, at: Utc::now() };
        for payload in [release, other] {
            journal.append(JournalEntry::Accepted { payload }).await.unwrap();
        }
        journal.append(started(of_release)).await.unwrap();
        assert!(journal.is_in_clean_up(Uuid::from_u128(9)));
        let refused = journal.append(started(of_other)).await;
        assert!(matches!(refused, Err(JournalError::Write(_))), "{refused:?}");
        for task_id in [of_release, of_other] {
            journal.append(JournalEntry::Done { task_id, result: result(1) }).await.unwrap();
        }
        fs::remove_dir(&in_the_way).unwrap();
        let (attempt, ended, at) = (1, ReportOutcome::Recorded, Utc::now());
        journal.append(JournalEntry::Reported { task_id: of_other, attempt, ended, at }).await.unwrap();
        assert_eq!(journal.condition(), None);
        drop(journal);
        let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        assert!(journal.has_released(Uuid::from_u128(9)));
        assert_eq!(phase(&journal, 2), Phase::Reported(result(1)));
    }

    #[tokio::test]
    async fn journal_that_does_not_answer_takes_releases_and_results_begins_nothing_else_and_is_written_later() {
        let Some(mounts) = OwnMounts::of_this_thread(skipped_tests::report_skipped) else { return };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        // The file is rewritten with the next line.
        let in_the_way = folder.path().join(".journal.new");
        fs::create_dir(&in_the_way).unwrap();
        let mut journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        journal.late_after = Duration::from_millis(50);
        fs::remove_dir(&in_the_way).unwrap();
        let hanging = mounts.hang(folder.path());
        let release = Release { allocation_id: Uuid::from_u128(9), user_name: "gpu-9".to_owned(), devices: Vec::new() };
        let release = TaskPayload { task: Task::Release(release), ..payload(1, 1, soon()) };
        let (of_release, other) = (release.task_id, payload(2, 1, soon()));
        let of_other = other.task_id;
        let started = |task_id| JournalEntry::Started { task_id, attempt: 1, at: Utc::now() };
        for payload in [release, other] {
            journal.append(JournalEntry::Accepted { payload }).await.unwrap();
        }
        journal.append(started(of_release)).await.unwrap();
        assert!(journal.is_in_clean_up(Uuid::from_u128(9)));
        let refused = journal.append(started(of_other)).await;
        assert!(matches!(refused, Err(JournalError::Write(_))), "{refused:?}");
        for task_id in [of_release, of_other] {
            journal.append(JournalEntry::Done { task_id, result: result(1) }).await.unwrap();
        }
        let condition = journal.condition().unwrap();
        assert_eq!((condition.key.probe, condition.key.code.as_str()), ("reading", "state"));
        assert!(condition.detail.ends_with(folder.path().to_str().unwrap()), "{}", condition.detail);
        // The disk answers again.
        drop(hanging);
        journal.late_after = Duration::from_secs(60);
        while journal.condition().is_some() {
            walk(&journal, 3, 1, 1).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        walk(&journal, 4, 1, 2).await;
        let phases = |journal: &Journal| [1, 2, 4].map(|task| phase(journal, task));
        let wanted = [Phase::Done(result(1)), Phase::Done(result(1)), Phase::Started];
        assert_eq!(phases(&journal), wanted);
        drop(journal);
        let journal = Journal::open(&path, &clock(Utc::now())).unwrap();
        assert_eq!(phases(&journal), wanted);
        assert!(journal.has_released(Uuid::from_u128(9)));
    }

    #[tokio::test]
    async fn long_journal_is_compacted_while_in_use() {
        let (_folder, path, journal) = opened();
        walk(&journal, 1, 1, 1).await;
        let line = JournalEntry::Accepted { payload: payload(1, 1, soon()) };
        for _ in 0..writer::SLACK_LINES + 10 {
            journal.append(line.clone()).await.unwrap();
        }
        assert!(fs::read_to_string(&path).unwrap().lines().count() < 100);
        assert_eq!(phase(&journal, 1), Phase::Accepted);
    }
}

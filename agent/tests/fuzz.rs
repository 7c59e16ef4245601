//! Fuzz targets for the agent's journal: what a crash, a full disk or another program leaves of it
//! (`deploy/docs/src/contribute/testing.md`).

#![allow(clippy::unwrap_used, clippy::expect_used)]

use agent::server_clock::ServerClock;
use agent::task_journal::{Journal, JournalEntry, JournalError, ReportOutcome, TaskRecord};
use chrono::{DateTime, TimeDelta, Utc};
use std::path::Path;
use std::time::Duration;
use uuid::Uuid;
use wire::task::{Task, TaskError, TaskPayload, TaskResult, TaskStatus};

/// The time of a target in an ordinary run; `BOLERO_RANDOM_TEST_TIME_MS` sets another.
const BUDGET: Duration = Duration::from_millis(700);
const TASKS: u128 = 4;

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000, 0).unwrap()
}

fn payload(task_id: Uuid, attempt: u32) -> TaskPayload {
    TaskPayload {
        node_id: Uuid::nil(),
        task_id,
        attempt,
        issued_at: now(),
        expires_at: now() + TimeDelta::minutes(5),
        origin: None,
        task: Task::Validate { load: None },
    }
}

fn failed(attempt: u32) -> TaskResult {
    TaskResult {
        attempt,
        status: TaskStatus::Failed,
        output: serde_json::Map::new(),
        // Not ASCII, and with what JSON escapes.
        error: Some(TaskError { code: "ungültig".to_owned(), message: "\"schloß\"\n…".to_owned() }),
        proof: None,
        started_at: now(),
        finished_at: now(),
    }
}

/// The lines of a journal: a byte for each, which chooses the task, the attempt and the event.
fn lines_of(input: &[u8]) -> Vec<String> {
    let entry = |byte: &u8| {
        let (task_id, attempt) = (Uuid::from_u128(u128::from(*byte) % TASKS), u32::from(byte / 16 % 2) + 1);
        match byte / 32 % 4 {
            0 => JournalEntry::Accepted { payload: payload(task_id, attempt) },
            1 => JournalEntry::Started { task_id, attempt, at: now() },
            2 => JournalEntry::Done { task_id, result: failed(attempt) },
            _ => JournalEntry::Reported { task_id, attempt, ended: ReportOutcome::Recorded, at: now() },
        }
    };
    input.iter().take(16).map(|byte| serde_json::to_string(&entry(byte)).unwrap() + "\n").collect()
}

/// The records of a journal with this content, which has all lines that the agent before went on with.
fn records(path: &Path, content: &[u8]) -> Result<Vec<Option<TaskRecord>>, JournalError> {
    std::fs::write(path, content).unwrap();
    std::fs::write(path.with_extension("complete"), "").unwrap();
    let journal = Journal::open(path, &ServerClock::unknown())?;
    Ok((0..TASKS).map(|task| journal.record(Uuid::from_u128(task))).collect())
}

#[test]
fn fuzz_journal_that_is_cut_off_anywhere_has_its_whole_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    bolero::check!().with_test_time(BUDGET).with_max_len(64).for_each(|input: &[u8]| {
        let [high, low, rest @ ..] = input else { return };
        let content = lines_of(rest).concat().into_bytes();
        let cut = usize::from(u16::from_be_bytes([*high, *low])) % (content.len() + 1);
        let whole = content[..cut].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let expected = records(&path, &content[..whole]).unwrap();
        assert_eq!(records(&path, &content[..cut]).unwrap(), expected, "cut off at {cut}");
    });
}

#[test]
fn fuzz_journal_with_any_tail_has_its_whole_lines() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    bolero::check!().with_test_time(BUDGET).with_max_len(64).for_each(|input: &[u8]| {
        let (entries, tail) = input.split_at(input.len() / 2);
        let content = lines_of(entries).concat().into_bytes();
        let tail: Vec<u8> = tail.iter().copied().filter(|byte| *byte != b'\n').collect();
        let expected = records(&path, &content).unwrap();
        assert_eq!(records(&path, &[content, tail].concat()).unwrap(), expected);
    });
}

#[test]
fn fuzz_journal_with_a_damaged_line_names_it_and_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    bolero::check!().with_test_time(BUDGET).with_max_len(64).for_each(|input: &[u8]| {
        let [at, rest @ ..] = input else { return };
        let mut lines = lines_of(rest);
        let at = usize::from(*at) % (lines.len() + 1);
        // The rest of the input, as a line that is no entry.
        let damaged: Vec<u8> = rest.iter().copied().filter(|byte| *byte != b'\n').chain(*b"}\n").collect();
        let after = lines.split_off(at).concat();
        let content = [lines.concat().as_bytes(), &damaged, after.as_bytes()].concat();
        match records(&path, &content) {
            Err(JournalError::Damaged { line, .. }) => assert_eq!(line, at + 1),
            other => panic!("{other:?}"),
        }
        assert_eq!(std::fs::read(&path).unwrap(), content);
    });
}

#[test]
fn journal_that_is_cut_off_inside_a_character_opens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    let content = lines_of(&[0, 64]).concat().into_bytes();
    // Between the two bytes of `ü`.
    let cut = content.iter().position(|byte| !byte.is_ascii()).unwrap() + 1;
    assert!(std::str::from_utf8(&content[..cut]).is_err());
    let whole = lines_of(&[0]).concat();
    assert_eq!(records(&path, &content[..cut]).unwrap(), records(&path, whole.as_bytes()).unwrap());
}

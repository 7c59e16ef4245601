//! What the next process of the agent must know of a session, beside its output: one versioned record at the beginning of the session's
//! file.
//!
//! A record fits into one page and is written by one call, so that no process that is killed leaves half of one.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tracing::warn;
use wire::recording::RecordTerms;
use wire::task::OpenTerminal;
use wire::terminal::INPUT_WINDOW;

/// The smallest page of any machine.
const PAGE: usize = 4096;
const MAGIC: [u8; 8] = *b"gputerm\n";
/// Magic, version, length, checksum.
const HEADER: usize = 8 + 2 + 2 + 8;
/// Changes with the meaning of a record. An agent ends the sessions whose records it does not know.
const VERSION: u16 = 1;
/// The input that the program has not taken lies behind the record.
const INPUT_AT: u64 = PAGE as u64;
const MAX_INPUT: usize = 2 * INPUT_WINDOW as usize;
/// The output begins behind both, at a page of any machine.
pub(super) const RECORD_AREA: u64 = 256 * 1024;

/// See the module's documentation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::terminal) struct SessionRecord {
    pub(super) task: OpenTerminal,
    /// The position up to which a user has acknowledged the output.
    pub(super) acknowledged: u64,
    /// The bytes of input that the program has not taken.
    pub(super) input: u32,
    pub(in crate::terminal) recording: RecordingPoint,
}

/// How far the recording is. A write to the spool is announced before it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::terminal) struct RecordingPoint {
    /// The session's beginning on the machine's monotonic clock, in microseconds.
    pub(in crate::terminal) began_micros: u64,
    /// The terminal's size before the first frame.
    pub(in crate::terminal) size: (u16, u16),
    /// The longest that it may be.
    pub(in crate::terminal) most: u64,
    /// Without the write that may be in progress.
    pub(in crate::terminal) before: CommitPoint,
    /// With it.
    pub(in crate::terminal) after: CommitPoint,
}

/// The state of a recording between two writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::terminal) struct CommitPoint {
    /// The newest chunk, and how long it is.
    pub(in crate::terminal) chunk: u32,
    pub(in crate::terminal) length: u64,
    /// Everything that was ever written.
    pub(in crate::terminal) recorded: u64,
    /// The output up to here is recorded, or is not to be.
    pub(in crate::terminal) position: u64,
    /// The time of the last frame; `None`: there is none.
    pub(in crate::terminal) micros: Option<u64>,
    pub(in crate::terminal) terms: RecordTerms,
    pub(in crate::terminal) state: RecordingState,
}

/// The state of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::terminal) enum RecordingState {
    On,
    /// It has reached its limit. It continues if the limit is raised.
    Full,
    /// The control plane refuses it, or its writer is gone.
    Over,
    /// Its last frame is written.
    Ended,
}

/// Why a record is not read.
#[derive(Debug, thiserror::Error)]
pub(in crate::terminal) enum RecordError {
    #[error("it is of version {found}; this agent reads version {VERSION}")]
    Version { found: u16 },
    #[error("it is damaged")]
    Damaged,
    #[error("it does not parse")]
    Malformed(#[source] serde_json::Error),
    #[error("it has {0} bytes, more than a page")]
    TooLong(usize),
    #[error("it cannot be read or written")]
    Io(#[from] io::Error),
}

impl SessionRecord {
    fn encode(&self) -> Result<Vec<u8>, RecordError> {
        let text = serde_json::to_vec(self).map_err(RecordError::Malformed)?;
        let length = u16::try_from(text.len()).ok().filter(|length| HEADER + usize::from(*length) <= PAGE);
        let length = length.ok_or(RecordError::TooLong(text.len()))?;
        let parts: [&[u8]; 5] =
            [&MAGIC, &VERSION.to_be_bytes(), &length.to_be_bytes(), &Sha256::digest(&text)[..8], &text];
        Ok(parts.concat())
    }

    fn decode(page: &[u8]) -> Result<Self, RecordError> {
        let (header, rest) = page.split_at_checked(HEADER).ok_or(RecordError::Damaged)?;
        let [.., v0, v1, l0, l1, _, _, _, _, _, _, _, _] = header else { return Err(RecordError::Damaged) };
        if header[..MAGIC.len()] != MAGIC {
            return Err(RecordError::Damaged);
        }
        let version = u16::from_be_bytes([*v0, *v1]);
        if version != VERSION {
            return Err(RecordError::Version { found: version });
        }
        let text = rest.get(..usize::from(u16::from_be_bytes([*l0, *l1]))).ok_or(RecordError::Damaged)?;
        if Sha256::digest(text)[..8] != header[HEADER - 8..] {
            return Err(RecordError::Damaged);
        }
        serde_json::from_slice(text).map_err(RecordError::Malformed)
    }
}

/// The record of a running session; its parts share it.
#[derive(Debug, Clone)]
pub(in crate::terminal) struct RecordFile(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    file: Arc<File>,
    record: SessionRecord,
}

impl RecordFile {
    /// # Errors
    /// The record is too long, or cannot be written.
    pub(in crate::terminal) fn create(
        file: Arc<File>,
        task: OpenTerminal,
        recording: RecordingPoint,
    ) -> Result<Self, RecordError> {
        let record = SessionRecord { task, acknowledged: 0, input: 0, recording };
        file.write_all_at(&record.encode()?, 0)?;
        Ok(Self(Arc::new(Mutex::new(Inner { file, record }))))
    }

    /// # Errors
    /// [`RecordError`]
    pub(in crate::terminal) fn read(file: Arc<File>) -> Result<(Self, SessionRecord), RecordError> {
        let mut page = [0; PAGE];
        file.read_exact_at(&mut page, 0)?;
        let record = SessionRecord::decode(&page)?;
        Ok((Self(Arc::new(Mutex::new(Inner { file, record: record.clone() }))), record))
    }

    pub(in crate::terminal) fn acknowledge(&self, position: u64) {
        self.change(|record| record.acknowledged = position);
    }

    pub(in crate::terminal) fn record(&self, point: RecordingPoint) {
        self.change(|record| record.recording = point);
    }

    /// Stores input that the program has not taken, for the next process.
    pub(in crate::terminal) fn leave_input(&self, bytes: &[u8]) {
        let stored = bytes.len() <= MAX_INPUT && self.lock().file.write_all_at(bytes, INPUT_AT).is_ok();
        if stored {
            self.change(|record| record.input = u32::try_from(bytes.len()).unwrap_or(0));
        }
    }

    /// Takes the input that an earlier process left.
    pub(super) fn take_input(&self) -> Vec<u8> {
        let length = usize::try_from(self.lock().record.input).unwrap_or(0).min(MAX_INPUT);
        let mut bytes = vec![0; length];
        let read = self.lock().file.read_exact_at(&mut bytes, INPUT_AT);
        // Typed twice would be worse than not at all.
        self.change(|record| record.input = 0);
        read.map(|()| bytes).unwrap_or_default()
    }

    fn change(&self, change: impl FnOnce(&mut SessionRecord)) {
        let mut inner = self.lock();
        change(&mut inner.record);
        let written = inner.record.encode().and_then(|page| Ok(inner.file.write_all_at(&page, 0)?));
        if let Err(error) = written {
            warn!(error = crate::chain(&error), "a terminal session's record cannot be written");
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const _: () = assert!(INPUT_AT + MAX_INPUT as u64 <= RECORD_AREA, "the input ends before the output begins");

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::{DateTime, TimeDelta};
    use proptest::prelude::*;
    use uuid::Uuid;
    use wire::recording::RecordMode;

    fn points() -> impl Strategy<Value = CommitPoint> {
        use RecordingState::{Ended, Full, On, Over};
        let modes = prop::sample::select(vec![RecordMode::Off, RecordMode::BestEffort, RecordMode::Strict]);
        let states = prop::sample::select(vec![On, Full, Over, Ended]);
        let numbers = (any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>());
        (numbers, any::<Option<u64>>(), modes, states).prop_map(|(numbers, micros, mode, state)| {
            let (chunk, length, recorded, position, most_bytes) = numbers;
            CommitPoint { chunk, length, recorded, position, micros, terms: RecordTerms { mode, most_bytes }, state }
        })
    }

    fn records() -> impl Strategy<Value = SessionRecord> {
        let numbers = (any::<u128>(), any::<u64>(), any::<u32>(), any::<u64>(), any::<u64>(), 0..i32::MAX);
        // The longest user name that an agent accepts, and characters that JSON escapes.
        (numbers, "[a-z\"\\\\\n\u{1}]{0,32}", any::<(u16, u16)>(), points(), points()).prop_map(
            |(numbers, user_name, size, before, after)| {
                let (id, acknowledged, input, began_micros, most, seconds) = numbers;
                let task = OpenTerminal {
                    session_id: Uuid::from_u128(id),
                    allocation_id: Uuid::from_u128(id / 2),
                    user_name,
                    ends_at: DateTime::UNIX_EPOCH + TimeDelta::seconds(seconds.into()),
                    recording: after.terms,
                };
                let recording = RecordingPoint { began_micros, size, most, before, after };
                SessionRecord { task, acknowledged, input, recording }
            },
        )
    }

    fn padded(record: &SessionRecord) -> Vec<u8> {
        let mut page = record.encode().unwrap();
        page.resize(PAGE, 0);
        page
    }

    proptest! {
        #[test]
        fn record_survives_its_encoding_in_one_page(record in records()) {
            prop_assert_eq!(SessionRecord::decode(&padded(&record)).unwrap(), record);
        }

        #[test]
        fn changed_or_cut_record_is_refused(record in records(), at in 0..1500_usize, bit in 0..8_u32) {
            let mut page = record.encode().unwrap();
            let at = at % page.len();
            let cut = SessionRecord::decode(&page[..at]);
            prop_assert!(cut.is_err());
            page[at] ^= 1 << bit;
            prop_assert!(SessionRecord::decode(&page).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..PAGE)) {
            prop_assert!(SessionRecord::decode(&bytes).is_err());
            prop_assert!(SessionRecord::decode(&[&MAGIC, &VERSION.to_be_bytes()[..], &bytes].concat()).is_err());
        }

        #[test]
        fn record_of_another_version_is_refused_by_name(record in records(), version in any::<u16>()) {
            let mut page = padded(&record);
            page[8..10].copy_from_slice(&version.to_be_bytes());
            match SessionRecord::decode(&page) {
                Err(RecordError::Version { found }) => prop_assert!(found == version && version != VERSION),
                other => prop_assert!(version == VERSION, "{other:?}"),
            }
        }
    }
}

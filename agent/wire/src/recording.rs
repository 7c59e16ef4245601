//! What an agent records of a terminal session, as it travels and as it is kept: frames, one after the other, in chunks that are counted
//! from 0 (`PUT …/terminals/{session_id}/recording/{seq}`).
//!
//! A frame is a byte for its kind, the microseconds since the session's beginning, the length of what follows, and that. Numbers are
//! big-endian. What is typed has no frame.

use serde::{Deserialize, Serialize};

/// A chunk that is longer gets no further frame.
pub const CHUNK_FULL: usize = 64 * 1024;

/// The longest chunk.
pub const CHUNK_MOST: usize = 128 * 1024;

/// What a chunk counts beside its frames.
pub const CHUNK_COST: u64 = 128;

/// The longest content of a frame.
pub const FRAME_MOST: usize = 64 * 1024;

/// What stands before a frame's content.
pub const HEAD: usize = 1 + 8 + 4;

/// No session lives so long.
pub const LATEST_MICROS: u64 = 8 * 86_400 * 1_000_000;

/// Whether a session is recorded, and what happens where it cannot be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    #[default]
    Off,
    BestEffort,
    Strict,
}

/// On which terms a session is recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    pub mode: Mode,
    /// The longest recording, in bytes of frames.
    pub most_bytes: u64,
}

/// Something at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Since the session's beginning.
    pub micros: u64,
    pub what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// The first frame of all: the terminal's size.
    Begin {
        columns: u16,
        rows: u16,
    },
    /// What the program said.
    Output(Vec<u8>),
    Resize {
        columns: u16,
        rows: u16,
    },
    /// So much of the output could not be recorded.
    Gap {
        bytes: u64,
    },
    /// From here on it is not recorded, because that was not wanted.
    Paused,
    Resumed,
    /// The last frame of all.
    End(Ended),
}

/// How a recording ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// With its session.
    Session,
    /// The agent that made it died; the next one has sent what it left.
    Agent,
    /// It had reached its longest.
    Full,
}

/// Bytes that are no frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} does not begin a frame")]
pub struct Malformed {
    pub at: usize,
}

const BEGIN: u8 = 1;
const OUTPUT: u8 = 2;
const RESIZE: u8 = 3;
const GAP: u8 = 4;
const PAUSED: u8 = 5;
const RESUMED: u8 = 6;
const END: u8 = 7;

impl Frame {
    /// Adds the frame to `bytes`. Content over [`FRAME_MOST`] is cut into several.
    pub fn write(&self, bytes: &mut Vec<u8>) {
        let mut write = |kind: u8, content: &[u8]| {
            bytes.push(kind);
            bytes.extend_from_slice(&self.micros.to_be_bytes());
            bytes.extend_from_slice(&u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(content);
        };
        match &self.what {
            What::Begin { columns, rows } => write(BEGIN, &size(*columns, *rows)),
            What::Output(output) => output.chunks(FRAME_MOST).for_each(|part| write(OUTPUT, part)),
            What::Resize { columns, rows } => write(RESIZE, &size(*columns, *rows)),
            What::Gap { bytes: lost } => write(GAP, &lost.to_be_bytes()),
            What::Paused => write(PAUSED, &[]),
            What::Resumed => write(RESUMED, &[]),
            What::End(Ended::Session) => write(END, &[0]),
            What::End(Ended::Agent) => write(END, &[1]),
            What::End(Ended::Full) => write(END, &[2]),
        }
    }
}

fn size(columns: u16, rows: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (columns.to_be_bytes(), rows.to_be_bytes());
    [a, b, c, d]
}

/// The frames of a chunk, one by one. After one that is malformed there is none.
#[derive(Debug, Clone)]
pub struct Frames<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Frames<'a> {
    #[must_use]
    pub const fn of(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// How many bytes have been read as frames.
    #[must_use]
    pub const fn whole(&self) -> usize {
        self.at
    }

    fn read(&self) -> Option<(Frame, usize)> {
        let (head, rest) = self.bytes.get(self.at..)?.split_first_chunk::<HEAD>()?;
        let [kind, micros @ .., a, b, c, d] = *head;
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok().filter(|length| *length <= FRAME_MOST)?;
        let content = rest.get(..length)?;
        let of_size = |content: &[u8]| match *content {
            [a, b, c, d] => Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))),
            _ => None,
        };
        let what = match (kind, content) {
            (BEGIN, _) => of_size(content).map(|(columns, rows)| What::Begin { columns, rows })?,
            (OUTPUT, output) if !output.is_empty() => What::Output(output.to_vec()),
            (RESIZE, _) => of_size(content).map(|(columns, rows)| What::Resize { columns, rows })?,
            (GAP, lost) => What::Gap { bytes: u64::from_be_bytes(lost.try_into().ok()?) },
            (PAUSED, []) => What::Paused,
            (RESUMED, []) => What::Resumed,
            (END, [0]) => What::End(Ended::Session),
            (END, [1]) => What::End(Ended::Agent),
            (END, [2]) => What::End(Ended::Full),
            _ => return None,
        };
        let micros = u64::from_be_bytes(micros);
        (micros <= LATEST_MICROS).then_some((Frame { micros, what }, self.at + HEAD + length))
    }
}

impl Iterator for Frames<'_> {
    type Item = Result<Frame, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.bytes.len() {
            return None;
        }
        match self.read() {
            Some((frame, next)) => {
                self.at = next;
                Some(Ok(frame))
            }
            None => {
                self.bytes = self.bytes.get(..self.at).unwrap_or_default();
                Some(Err(Malformed { at: self.at }))
            }
        }
    }
}

/// The answer to a chunk that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkAnswer {
    pub recorded: crate::task::Recorded,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_frame() -> impl Strategy<Value = Frame> {
        let what = prop_oneof![
            (any::<u16>(), any::<u16>()).prop_map(|(columns, rows)| What::Begin { columns, rows }),
            prop::collection::vec(any::<u8>(), 1..200).prop_map(What::Output),
            (any::<u16>(), any::<u16>()).prop_map(|(columns, rows)| What::Resize { columns, rows }),
            any::<u64>().prop_map(|bytes| What::Gap { bytes }),
            Just(What::Paused),
            Just(What::Resumed),
            prop_oneof![Just(Ended::Session), Just(Ended::Agent), Just(Ended::Full)].prop_map(What::End),
        ];
        (0..=LATEST_MICROS, what).prop_map(|(micros, what)| Frame { micros, what })
    }

    fn written(frames: &[Frame]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        bytes
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(frames in prop::collection::vec(a_frame(), 0..20)) {
            let bytes = written(&frames);
            let read: Vec<Frame> = Frames::of(&bytes).map(Result::unwrap).collect();
            prop_assert_eq!(read, frames);
        }

        #[test]
        fn of_what_was_cut_off_every_whole_frame_is_read(frames in prop::collection::vec(a_frame(), 1..10), cut in 1..12_usize) {
            let bytes = written(&frames);
            let mut reading = Frames::of(&bytes[..bytes.len() - cut]);
            let read: Vec<Frame> = reading.by_ref().map_while(Result::ok).collect();
            let rest = written(&frames[..frames.len() - 1]).len();
            prop_assert_eq!((&read[..], reading.whole()), (&frames[..frames.len() - 1], rest));
        }

        #[test]
        fn rubbish_ends_and_has_one_form(rubbish in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut reading = Frames::of(&rubbish);
            let read: Vec<Frame> = reading.by_ref().map_while(Result::ok).collect();
            prop_assert_eq!(written(&read), &rubbish[..reading.whole()]);
            prop_assert!(reading.next().is_none());
        }
    }

    #[test]
    fn long_output_is_cut_into_frames_that_fit() {
        let bytes = written(&[Frame { micros: 1, what: What::Output(vec![b'x'; FRAME_MOST + 1]) }]);
        assert_eq!(Frames::of(&bytes).map(Result::unwrap).count(), 2);
    }

    #[test]
    fn the_bytes_are_as_reviewed() {
        let hex = |what| hex::encode(written(&[Frame { micros: 258, what }]));
        assert_eq!(hex(What::Begin { columns: 80, rows: 24 }), "0100000000000001020000000400500018");
        assert_eq!(hex(What::Output(b"ls".to_vec())), "020000000000000102000000026c73");
        assert_eq!(hex(What::Gap { bytes: 3 }), "040000000000000102000000080000000000000003");
        assert_eq!(hex(What::End(Ended::Agent)), "0700000000000001020000000101");
    }
}

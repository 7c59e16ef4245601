//! The recording of a terminal session, as it is transmitted and stored: frames, one after the other, in chunks that are numbered from 0
//! (`PUT …/terminals/{session_id}/recording/{seq}`).
//!
//! A frame is a byte for its kind, the microseconds since the session's beginning, the length of its content, and the content. Numbers
//! are big-endian. Input is not recorded.

use serde::{Deserialize, Serialize};

/// A chunk that is longer gets no further frame.
pub const CHUNK_FULL: usize = 64 * 1024;

/// The longest chunk.
pub const CHUNK_MAX: usize = 128 * 1024;

/// What a chunk counts in addition to its frames.
pub const CHUNK_COST: u64 = 128;

/// The longest content of a frame.
pub const FRAME_MAX: usize = 64 * 1024;

/// The length of a frame's header.
pub const HEAD: usize = 1 + 8 + 4;

/// An upper bound of a session's lifetime.
pub const MAX_MICROS: u64 = 8 * 86_400 * 1_000_000;

/// Whether a session is recorded, and what happens if it cannot be.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecordMode {
    #[default]
    Off,
    BestEffort,
    Strict,
}

/// The terms on which a session is recorded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordTerms {
    pub mode: RecordMode,
    /// The longest recording, in bytes of frames.
    pub most_bytes: u64,
}

/// An event of the session with its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Since the session's beginning.
    pub micros: u64,
    pub what: FrameContent,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameContent {
    /// The first frame of all: the terminal's size.
    Begin {
        columns: u16,
        rows: u16,
    },
    /// Output of the program.
    Output(Vec<u8>),
    Resize {
        columns: u16,
        rows: u16,
    },
    /// This much output could not be recorded.
    Gap {
        bytes: u64,
    },
    /// Recording is switched off from here on.
    Paused,
    Resumed,
    /// The last frame of all.
    End(RecordingEnd),
}

/// How a recording ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordingEnd {
    /// The session ended.
    Session,
    /// The agent that recorded it crashed; the next one has uploaded what it left.
    Agent,
    /// It had reached its limit.
    Full,
}

/// Bytes that are not frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} does not begin a frame")]
pub struct MalformedFrame {
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
    /// Appends the frame to `bytes`. Content over [`FRAME_MAX`] is split into several frames.
    pub fn write(&self, bytes: &mut Vec<u8>) {
        let mut write = |kind: u8, content: &[u8]| {
            bytes.push(kind);
            bytes.extend_from_slice(&self.micros.to_be_bytes());
            bytes.extend_from_slice(&u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(content);
        };
        match &self.what {
            FrameContent::Begin { columns, rows } => write(BEGIN, &size(*columns, *rows)),
            FrameContent::Output(output) => output.chunks(FRAME_MAX).for_each(|part| write(OUTPUT, part)),
            FrameContent::Resize { columns, rows } => write(RESIZE, &size(*columns, *rows)),
            FrameContent::Gap { bytes: lost } => write(GAP, &lost.to_be_bytes()),
            FrameContent::Paused => write(PAUSED, &[]),
            FrameContent::Resumed => write(RESUMED, &[]),
            FrameContent::End(RecordingEnd::Session) => write(END, &[0]),
            FrameContent::End(RecordingEnd::Agent) => write(END, &[1]),
            FrameContent::End(RecordingEnd::Full) => write(END, &[2]),
        }
    }
}

fn size(columns: u16, rows: u16) -> [u8; 4] {
    let ([a, b], [c, d]) = (columns.to_be_bytes(), rows.to_be_bytes());
    [a, b, c, d]
}

/// The frames of a chunk, one by one. It ends after a malformed one.
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

    /// How many bytes have been read as whole frames.
    #[must_use]
    pub const fn whole(&self) -> usize {
        self.at
    }

    fn read(&self) -> Option<(Frame, usize)> {
        let (head, rest) = self.bytes.get(self.at..)?.split_first_chunk::<HEAD>()?;
        let [kind, micros @ .., a, b, c, d] = *head;
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).ok().filter(|length| *length <= FRAME_MAX)?;
        let content = rest.get(..length)?;
        let of_size = |content: &[u8]| match *content {
            [a, b, c, d] => Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))),
            _ => None,
        };
        let what = match (kind, content) {
            (BEGIN, _) => of_size(content).map(|(columns, rows)| FrameContent::Begin { columns, rows })?,
            (OUTPUT, output) if !output.is_empty() => FrameContent::Output(output.to_vec()),
            (RESIZE, _) => of_size(content).map(|(columns, rows)| FrameContent::Resize { columns, rows })?,
            (GAP, lost) => FrameContent::Gap { bytes: u64::from_be_bytes(lost.try_into().ok()?) },
            (PAUSED, []) => FrameContent::Paused,
            (RESUMED, []) => FrameContent::Resumed,
            (END, [0]) => FrameContent::End(RecordingEnd::Session),
            (END, [1]) => FrameContent::End(RecordingEnd::Agent),
            (END, [2]) => FrameContent::End(RecordingEnd::Full),
            _ => return None,
        };
        let micros = u64::from_be_bytes(micros);
        (micros <= MAX_MICROS).then_some((Frame { micros, what }, self.at + HEAD + length))
    }
}

impl Iterator for Frames<'_> {
    type Item = Result<Frame, MalformedFrame>;

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
                Some(Err(MalformedFrame { at: self.at }))
            }
        }
    }
}

/// The answer to a chunk that is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkAnswer {
    pub recorded: crate::task::ResultReceipt,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_frame() -> impl Strategy<Value = Frame> {
        let what = prop_oneof![
            (any::<u16>(), any::<u16>()).prop_map(|(columns, rows)| FrameContent::Begin { columns, rows }),
            prop::collection::vec(any::<u8>(), 1..200).prop_map(FrameContent::Output),
            (any::<u16>(), any::<u16>()).prop_map(|(columns, rows)| FrameContent::Resize { columns, rows }),
            any::<u64>().prop_map(|bytes| FrameContent::Gap { bytes }),
            Just(FrameContent::Paused),
            Just(FrameContent::Resumed),
            prop_oneof![Just(RecordingEnd::Session), Just(RecordingEnd::Agent), Just(RecordingEnd::Full)]
                .prop_map(FrameContent::End),
        ];
        (0..=MAX_MICROS, what).prop_map(|(micros, what)| Frame { micros, what })
    }

    fn written(frames: &[Frame]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        bytes
    }

    proptest! {
        #[test]
        fn frames_round_trip(frames in prop::collection::vec(a_frame(), 0..20)) {
            let bytes = written(&frames);
            let read: Vec<Frame> = Frames::of(&bytes).map(Result::unwrap).collect();
            prop_assert_eq!(read, frames);
        }

        #[test]
        fn truncated_chunk_yields_every_whole_frame(frames in prop::collection::vec(a_frame(), 1..10), cut in 1..12_usize) {
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
        let bytes = written(&[Frame { micros: 1, what: FrameContent::Output(vec![b'x'; FRAME_MAX + 1]) }]);
        assert_eq!(Frames::of(&bytes).map(Result::unwrap).count(), 2);
    }

    #[test]
    fn the_bytes_are_as_reviewed() {
        let hex = |what| hex::encode(written(&[Frame { micros: 258, what }]));
        assert_eq!(hex(FrameContent::Begin { columns: 80, rows: 24 }), "0100000000000001020000000400500018");
        assert_eq!(hex(FrameContent::Output(b"ls".to_vec())), "020000000000000102000000026c73");
        assert_eq!(hex(FrameContent::Gap { bytes: 3 }), "040000000000000102000000080000000000000003");
        assert_eq!(hex(FrameContent::End(RecordingEnd::Agent)), "0700000000000001020000000101");
    }
}

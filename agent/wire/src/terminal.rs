//! The messages of a terminal session between the agent, which has the shell and buffers its output, and the attached user. Each message
//! is one binary WebSocket message on the stream of the session (`…/terminals/{session_id}/stream`).
//!
//! Positions are bytes of output since the session's beginning. So a side that was cut off names its position, and continues from there
//! as long as the agent still buffers it. Numbers are big-endian; no field is text.

use crate::recording::{RecordMode, RecordTerms};
use serde::{Deserialize, Serialize};

/// Output that may be in flight without acknowledgement. Above it the shell is read no further, and its program waits.
pub const OUTPUT_WINDOW: u64 = 128 * 1024;

/// Output that the agent buffers, acknowledged or not, for a user who attaches again.
pub const RETAINED_OUTPUT: usize = 256 * 1024;

/// Input that may be in flight without having been taken by the program.
pub const INPUT_WINDOW: u64 = 64 * 1024;

/// The most bytes of input or output in one message.
pub const CHUNK: usize = 16 * 1024;

/// The longest message, with the header of its bytes.
pub const MESSAGE: usize = CHUNK + 64;

/// How often either side sends a message, and after how much silence it counts as gone.
pub const KEEPALIVE_SECONDS: u64 = 5;
pub const SILENCE_TIMEOUT_SECONDS: u64 = 15;

/// To the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalCommand {
    /// The connection of this number attaches, and requests the output from this position on; `None`: from the last acknowledged
    /// position.
    Attach {
        attachment: u32,
        from: Option<u64>,
    },
    /// It is gone.
    Detach {
        attachment: u32,
    },
    /// Input of the user.
    Input {
        attachment: u32,
        bytes: Vec<u8>,
    },
    /// The attached client has the output up to here.
    Ack {
        attachment: u32,
        position: u64,
    },
    /// In reply to a [`TerminalEvent::Output`] without bytes: the user's own client confirms all output up to here.
    Received {
        attachment: u32,
        position: u64,
    },
    Resize {
        columns: u16,
        rows: u16,
    },
    /// The session is over: its processes are to end.
    Close,
    /// From now on it is recorded on these terms.
    Record {
        terms: RecordTerms,
    },
}

/// From the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminalEvent {
    /// In reply to [`TerminalCommand::Attach`]: output follows from this position on; `lost` bytes before it were requested and are
    /// dropped.
    Attached { attachment: u32, position: u64, lost: u64 },
    /// Without bytes it asks whether all output has arrived: nothing more will follow.
    Output { attachment: u32, position: u64, bytes: Vec<u8> },
    /// The program has taken this much of the connection's input.
    Taken { attachment: u32, bytes: u64 },
    /// The program exited, and all of its output was sent before.
    Exited { exit: ProgramExit },
    /// The mode in which output is recorded from here on.
    Recording { mode: RecordMode },
    /// The agent was stopped or restarted: the program ended with it, and its exit status is unknown.
    Lost,
}

/// The exit of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProgramExit {
    Code(i32),
    Signal(i32),
}

/// A message that does not parse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes are no terminal message")]
pub struct MalformedMessage(pub usize);

const ATTACH: u8 = 1;
const ATTACH_FROM: u8 = 2;
const DETACH: u8 = 3;
const INPUT: u8 = 4;
const ACK: u8 = 5;
const RESIZE: u8 = 6;
const CLOSE: u8 = 7;
const RECORD: u8 = 8;
const RECEIVED: u8 = 9;
const ATTACHED: u8 = 129;
const OUTPUT: u8 = 130;
const TAKEN: u8 = 131;
const EXIT_CODE: u8 = 132;
const EXIT_SIGNAL: u8 = 133;
const RECORDING: u8 = 134;
const LOST: u8 = 140;

impl TerminalCommand {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Attach { attachment, from: None } => joined(ATTACH, &[&attachment.to_be_bytes()]),
            Self::Attach { attachment, from: Some(from) } => {
                joined(ATTACH_FROM, &[&attachment.to_be_bytes(), &from.to_be_bytes()])
            }
            Self::Detach { attachment } => joined(DETACH, &[&attachment.to_be_bytes()]),
            Self::Input { attachment, bytes } => joined(INPUT, &[&attachment.to_be_bytes(), bytes]),
            Self::Ack { attachment, position } => joined(ACK, &[&attachment.to_be_bytes(), &position.to_be_bytes()]),
            Self::Received { attachment, position } => {
                joined(RECEIVED, &[&attachment.to_be_bytes(), &position.to_be_bytes()])
            }
            Self::Resize { columns, rows } => joined(RESIZE, &[&columns.to_be_bytes(), &rows.to_be_bytes()]),
            Self::Close => vec![CLOSE],
            Self::Record { terms } => joined(RECORD, &[&[byte_of(terms.mode)], &terms.most_bytes.to_be_bytes()]),
        }
    }

    /// # Errors
    /// [`MalformedMessage`]
    pub fn decode(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut reader = Reader::of(message)?;
        let read = match reader.kind {
            ATTACH => Self::Attach { attachment: reader.u32()?, from: None },
            ATTACH_FROM => Self::Attach { attachment: reader.u32()?, from: Some(reader.u64()?) },
            DETACH => Self::Detach { attachment: reader.u32()? },
            INPUT => Self::Input { attachment: reader.u32()?, bytes: reader.rest() },
            ACK => Self::Ack { attachment: reader.u32()?, position: reader.u64()? },
            RECEIVED => Self::Received { attachment: reader.u32()?, position: reader.u64()? },
            RESIZE => Self::Resize { columns: reader.u16()?, rows: reader.u16()? },
            CLOSE => Self::Close,
            RECORD => Self::Record { terms: RecordTerms { mode: reader.mode()?, most_bytes: reader.u64()? } },
            _ => return Err(MalformedMessage(message.len())),
        };
        reader.end().map(|()| read)
    }
}

impl TerminalEvent {
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Attached { attachment, position, lost } => {
                joined(ATTACHED, &[&attachment.to_be_bytes(), &position.to_be_bytes(), &lost.to_be_bytes()])
            }
            Self::Output { attachment, position, bytes } => {
                joined(OUTPUT, &[&attachment.to_be_bytes(), &position.to_be_bytes(), bytes])
            }
            Self::Taken { attachment, bytes } => joined(TAKEN, &[&attachment.to_be_bytes(), &bytes.to_be_bytes()]),
            Self::Exited { exit: ProgramExit::Code(code) } => joined(EXIT_CODE, &[&code.to_be_bytes()]),
            Self::Exited { exit: ProgramExit::Signal(signal) } => joined(EXIT_SIGNAL, &[&signal.to_be_bytes()]),
            Self::Recording { mode } => vec![RECORDING, byte_of(*mode)],
            Self::Lost => vec![LOST],
        }
    }

    /// # Errors
    /// [`MalformedMessage`]
    pub fn decode(message: &[u8]) -> Result<Self, MalformedMessage> {
        let mut reader = Reader::of(message)?;
        let read = match reader.kind {
            ATTACHED => Self::Attached { attachment: reader.u32()?, position: reader.u64()?, lost: reader.u64()? },
            OUTPUT => Self::Output { attachment: reader.u32()?, position: reader.u64()?, bytes: reader.rest() },
            TAKEN => Self::Taken { attachment: reader.u32()?, bytes: reader.u64()? },
            EXIT_CODE => Self::Exited { exit: ProgramExit::Code(i32::from_be_bytes(reader.take()?)) },
            EXIT_SIGNAL => Self::Exited { exit: ProgramExit::Signal(i32::from_be_bytes(reader.take()?)) },
            RECORDING => Self::Recording { mode: reader.mode()? },
            LOST => Self::Lost,
            _ => return Err(MalformedMessage(message.len())),
        };
        reader.end().map(|()| read)
    }
}

const fn byte_of(mode: RecordMode) -> u8 {
    match mode {
        RecordMode::Off => 0,
        RecordMode::BestEffort => 1,
        RecordMode::Strict => 2,
    }
}

fn joined(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut message = Vec::with_capacity(1 + parts.iter().map(|part| part.len()).sum::<usize>());
    message.push(kind);
    parts.iter().for_each(|part| message.extend_from_slice(part));
    message
}

struct Reader<'a> {
    kind: u8,
    left: &'a [u8],
    whole: usize,
}

impl<'a> Reader<'a> {
    fn of(message: &'a [u8]) -> Result<Self, MalformedMessage> {
        let whole = message.len();
        match message.split_first() {
            Some((kind, left)) if whole <= MESSAGE => Ok(Self { kind: *kind, left, whole }),
            Some(_) | None => Err(MalformedMessage(whole)),
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], MalformedMessage> {
        let (taken, left) = self.left.split_first_chunk().ok_or(MalformedMessage(self.whole))?;
        self.left = left;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, MalformedMessage> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, MalformedMessage> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, MalformedMessage> {
        self.take().map(u64::from_be_bytes)
    }

    fn mode(&mut self) -> Result<RecordMode, MalformedMessage> {
        match self.take()? {
            [0] => Ok(RecordMode::Off),
            [1] => Ok(RecordMode::BestEffort),
            [2] => Ok(RecordMode::Strict),
            [_] => Err(MalformedMessage(self.whole)),
        }
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.left).to_vec()
    }

    fn end(&self) -> Result<(), MalformedMessage> {
        if self.left.is_empty() { Ok(()) } else { Err(MalformedMessage(self.whole)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_mode() -> impl Strategy<Value = RecordMode> {
        prop_oneof![Just(RecordMode::Off), Just(RecordMode::BestEffort), Just(RecordMode::Strict)]
    }

    fn a_down() -> impl Strategy<Value = TerminalCommand> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..200);
        prop_oneof![
            (any::<u32>(), any::<Option<u64>>())
                .prop_map(|(attachment, from)| TerminalCommand::Attach { attachment, from }),
            any::<u32>().prop_map(|attachment| TerminalCommand::Detach { attachment }),
            (any::<u32>(), bytes()).prop_map(|(attachment, bytes)| TerminalCommand::Input { attachment, bytes }),
            (any::<u32>(), any::<u64>())
                .prop_map(|(attachment, position)| TerminalCommand::Ack { attachment, position }),
            (any::<u32>(), any::<u64>())
                .prop_map(|(attachment, position)| TerminalCommand::Received { attachment, position }),
            (any::<u16>(), any::<u16>()).prop_map(|(columns, rows)| TerminalCommand::Resize { columns, rows }),
            Just(TerminalCommand::Close),
            (a_mode(), any::<u64>())
                .prop_map(|(mode, most_bytes)| TerminalCommand::Record { terms: RecordTerms { mode, most_bytes } }),
        ]
    }

    fn an_up() -> impl Strategy<Value = TerminalEvent> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..200);
        prop_oneof![
            (any::<u32>(), any::<u64>(), any::<u64>())
                .prop_map(|(attachment, position, lost)| TerminalEvent::Attached { attachment, position, lost }),
            (any::<u32>(), any::<u64>(), bytes()).prop_map(|(attachment, position, bytes)| TerminalEvent::Output {
                attachment,
                position,
                bytes
            }),
            (any::<u32>(), any::<u64>()).prop_map(|(attachment, bytes)| TerminalEvent::Taken { attachment, bytes }),
            any::<i32>().prop_map(|code| TerminalEvent::Exited { exit: ProgramExit::Code(code) }),
            any::<i32>().prop_map(|signal| TerminalEvent::Exited { exit: ProgramExit::Signal(signal) }),
            a_mode().prop_map(|mode| TerminalEvent::Recording { mode }),
            Just(TerminalEvent::Lost),
        ]
    }

    proptest! {
        #[test]
        fn messages_round_trip(down in a_down(), up in an_up()) {
            prop_assert_eq!(TerminalCommand::decode(&down.encode()), Ok(down.clone()));
            prop_assert_eq!(TerminalEvent::decode(&up.encode()), Ok(up.clone()));
            prop_assert!(TerminalEvent::decode(&down.encode()).is_err() && TerminalCommand::decode(&up.encode()).is_err());
        }

        #[test]
        fn rubbish_is_refused_and_nothing_breaks(rubbish in prop::collection::vec(any::<u8>(), 0..64)) {
            // What parses is encoded to the same bytes: no message has two forms.
            if let Ok(down) = TerminalCommand::decode(&rubbish) {
                prop_assert_eq!(&down.encode(), &rubbish);
            }
            if let Ok(up) = TerminalEvent::decode(&rubbish) {
                prop_assert_eq!(&up.encode(), &rubbish);
            }
        }
    }

    #[test]
    fn the_bytes_are_as_reviewed() {
        let hex = |message: Vec<u8>| hex::encode(message);
        assert_eq!(hex(TerminalCommand::Attach { attachment: 1, from: None }.encode()), "0100000001");
        assert_eq!(
            hex(TerminalCommand::Attach { attachment: 1, from: Some(258) }.encode()),
            "02000000010000000000000102"
        );
        assert_eq!(hex(TerminalCommand::Input { attachment: 1, bytes: b"ls".to_vec() }.encode()), "04000000016c73");
        assert_eq!(hex(TerminalCommand::Resize { columns: 80, rows: 24 }.encode()), "0600500018");
        assert_eq!(
            hex(TerminalCommand::Received { attachment: 1, position: 258 }.encode()),
            "09000000010000000000000102"
        );
        assert_eq!(
            hex(TerminalEvent::Output { attachment: 1, position: 2, bytes: b"x".to_vec() }.encode()),
            "8200000001000000000000000278"
        );
        assert_eq!(hex(TerminalEvent::Exited { exit: ProgramExit::Code(-1) }.encode()), "84ffffffff");
    }

    #[test]
    fn an_endless_message_is_refused() {
        assert_eq!(TerminalCommand::decode(&vec![INPUT; MESSAGE + 1]), Err(MalformedMessage(MESSAGE + 1)));
        assert_eq!(TerminalEvent::decode(&[]), Err(MalformedMessage(0)));
    }
}

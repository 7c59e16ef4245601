//! What the two ends of a terminal say to each other: the agent, which has the shell and keeps its output, and whoever is connected to
//! it. Each message is one binary WebSocket message on the stream of the session (`…/terminals/{session_id}/stream`).
//!
//! Output is counted in bytes from the session's beginning. So an end that was cut off says how far it came, and goes on from there as
//! long as the agent still has it. Numbers are big-endian; a text in the fields is none.

use crate::recording::{Mode, Terms};
use serde::{Deserialize, Serialize};

/// Output that may be on its way without being acknowledged. Past it the shell is read no further, and its program waits.
pub const OUTPUT_WINDOW: u64 = 128 * 1024;

/// Output that the agent keeps, acknowledged or not, for one who comes back.
pub const KEPT: usize = 256 * 1024;

/// Input that may be on its way without having been taken by the program.
pub const INPUT_WINDOW: u64 = 64 * 1024;

/// The most bytes of input or output in one message.
pub const CHUNK: usize = 16 * 1024;

/// The longest message, with what stands around its bytes.
pub const MESSAGE: usize = CHUNK + 64;

/// How often either end says something, and after how long a silence it counts as gone.
pub const SAYS_EVERY_SECONDS: u64 = 5;
pub const SILENT_AFTER_SECONDS: u64 = 15;

/// To the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Down {
    /// The connection of this number is there, and wants the output from this position on; `None`: what nobody has acknowledged.
    Attach {
        attachment: u32,
        from: Option<u64>,
    },
    /// It is gone.
    Detach {
        attachment: u32,
    },
    /// What was typed.
    Input {
        attachment: u32,
        bytes: Vec<u8>,
    },
    /// Whoever is connected has the output up to here.
    Ack {
        attachment: u32,
        position: u64,
    },
    /// To an [`Up::Output`] without bytes: the user's own end says that all up to here has come there.
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
        terms: Terms,
    },
}

/// From the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Up {
    /// To [`Down::Attach`]: output follows from this position on; so many bytes before it were wanted and are gone.
    Attached { attachment: u32, position: u64, lost: u64 },
    /// Without bytes it asks: nothing more will be said, has all of it come?
    Output { attachment: u32, position: u64, bytes: Vec<u8> },
    /// So much of this connection's input was taken by the program.
    Taken { attachment: u32, bytes: u64 },
    /// The program ended, and all that it said was sent before.
    Exited { exit: Exit },
    /// What is shown from here on is recorded so.
    Recording { mode: Mode },
    /// The agent was stopped, or started anew: the program went with it, and nobody knows how it ended.
    Lost,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

/// A message that is not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes are no terminal message")]
pub struct Malformed(pub usize);

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

impl Down {
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
    /// [`Malformed`]
    pub fn decode(message: &[u8]) -> Result<Self, Malformed> {
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
            RECORD => Self::Record { terms: Terms { mode: reader.mode()?, most_bytes: reader.u64()? } },
            _ => return Err(Malformed(message.len())),
        };
        reader.end().map(|()| read)
    }
}

impl Up {
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
            Self::Exited { exit: Exit::Code(code) } => joined(EXIT_CODE, &[&code.to_be_bytes()]),
            Self::Exited { exit: Exit::Signal(signal) } => joined(EXIT_SIGNAL, &[&signal.to_be_bytes()]),
            Self::Recording { mode } => vec![RECORDING, byte_of(*mode)],
            Self::Lost => vec![LOST],
        }
    }

    /// # Errors
    /// [`Malformed`]
    pub fn decode(message: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::of(message)?;
        let read = match reader.kind {
            ATTACHED => Self::Attached { attachment: reader.u32()?, position: reader.u64()?, lost: reader.u64()? },
            OUTPUT => Self::Output { attachment: reader.u32()?, position: reader.u64()?, bytes: reader.rest() },
            TAKEN => Self::Taken { attachment: reader.u32()?, bytes: reader.u64()? },
            EXIT_CODE => Self::Exited { exit: Exit::Code(i32::from_be_bytes(reader.take()?)) },
            EXIT_SIGNAL => Self::Exited { exit: Exit::Signal(i32::from_be_bytes(reader.take()?)) },
            RECORDING => Self::Recording { mode: reader.mode()? },
            LOST => Self::Lost,
            _ => return Err(Malformed(message.len())),
        };
        reader.end().map(|()| read)
    }
}

const fn byte_of(mode: Mode) -> u8 {
    match mode {
        Mode::Off => 0,
        Mode::BestEffort => 1,
        Mode::Strict => 2,
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
    fn of(message: &'a [u8]) -> Result<Self, Malformed> {
        let whole = message.len();
        match message.split_first() {
            Some((kind, left)) if whole <= MESSAGE => Ok(Self { kind: *kind, left, whole }),
            Some(_) | None => Err(Malformed(whole)),
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, left) = self.left.split_first_chunk().ok_or(Malformed(self.whole))?;
        self.left = left;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.take().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_be_bytes)
    }

    fn mode(&mut self) -> Result<Mode, Malformed> {
        match self.take()? {
            [0] => Ok(Mode::Off),
            [1] => Ok(Mode::BestEffort),
            [2] => Ok(Mode::Strict),
            [_] => Err(Malformed(self.whole)),
        }
    }

    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.left).to_vec()
    }

    fn end(&self) -> Result<(), Malformed> {
        if self.left.is_empty() { Ok(()) } else { Err(Malformed(self.whole)) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_mode() -> impl Strategy<Value = Mode> {
        prop_oneof![Just(Mode::Off), Just(Mode::BestEffort), Just(Mode::Strict)]
    }

    fn a_down() -> impl Strategy<Value = Down> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..200);
        prop_oneof![
            (any::<u32>(), any::<Option<u64>>()).prop_map(|(attachment, from)| Down::Attach { attachment, from }),
            any::<u32>().prop_map(|attachment| Down::Detach { attachment }),
            (any::<u32>(), bytes()).prop_map(|(attachment, bytes)| Down::Input { attachment, bytes }),
            (any::<u32>(), any::<u64>()).prop_map(|(attachment, position)| Down::Ack { attachment, position }),
            (any::<u32>(), any::<u64>()).prop_map(|(attachment, position)| Down::Received { attachment, position }),
            (any::<u16>(), any::<u16>()).prop_map(|(columns, rows)| Down::Resize { columns, rows }),
            Just(Down::Close),
            (a_mode(), any::<u64>()).prop_map(|(mode, most_bytes)| Down::Record { terms: Terms { mode, most_bytes } }),
        ]
    }

    fn an_up() -> impl Strategy<Value = Up> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..200);
        prop_oneof![
            (any::<u32>(), any::<u64>(), any::<u64>()).prop_map(|(attachment, position, lost)| Up::Attached {
                attachment,
                position,
                lost
            }),
            (any::<u32>(), any::<u64>(), bytes()).prop_map(|(attachment, position, bytes)| Up::Output {
                attachment,
                position,
                bytes
            }),
            (any::<u32>(), any::<u64>()).prop_map(|(attachment, bytes)| Up::Taken { attachment, bytes }),
            any::<i32>().prop_map(|code| Up::Exited { exit: Exit::Code(code) }),
            any::<i32>().prop_map(|signal| Up::Exited { exit: Exit::Signal(signal) }),
            a_mode().prop_map(|mode| Up::Recording { mode }),
            Just(Up::Lost),
        ]
    }

    proptest! {
        #[test]
        fn what_is_said_is_understood(down in a_down(), up in an_up()) {
            prop_assert_eq!(Down::decode(&down.encode()), Ok(down.clone()));
            prop_assert_eq!(Up::decode(&up.encode()), Ok(up.clone()));
            prop_assert!(Up::decode(&down.encode()).is_err() && Down::decode(&up.encode()).is_err());
        }

        #[test]
        fn rubbish_is_refused_and_nothing_breaks(rubbish in prop::collection::vec(any::<u8>(), 0..64)) {
            // What is understood is said the same way again: no message has two forms.
            if let Ok(down) = Down::decode(&rubbish) {
                prop_assert_eq!(&down.encode(), &rubbish);
            }
            if let Ok(up) = Up::decode(&rubbish) {
                prop_assert_eq!(&up.encode(), &rubbish);
            }
        }
    }

    #[test]
    fn the_bytes_are_as_reviewed() {
        let hex = |message: Vec<u8>| hex::encode(message);
        assert_eq!(hex(Down::Attach { attachment: 1, from: None }.encode()), "0100000001");
        assert_eq!(hex(Down::Attach { attachment: 1, from: Some(258) }.encode()), "02000000010000000000000102");
        assert_eq!(hex(Down::Input { attachment: 1, bytes: b"ls".to_vec() }.encode()), "04000000016c73");
        assert_eq!(hex(Down::Resize { columns: 80, rows: 24 }.encode()), "0600500018");
        assert_eq!(hex(Down::Received { attachment: 1, position: 258 }.encode()), "09000000010000000000000102");
        assert_eq!(
            hex(Up::Output { attachment: 1, position: 2, bytes: b"x".to_vec() }.encode()),
            "8200000001000000000000000278"
        );
        assert_eq!(hex(Up::Exited { exit: Exit::Code(-1) }.encode()), "84ffffffff");
    }

    #[test]
    fn an_endless_message_is_refused() {
        assert_eq!(Down::decode(&vec![INPUT; MESSAGE + 1]), Err(Malformed(MESSAGE + 1)));
        assert_eq!(Up::decode(&[]), Err(Malformed(0)));
    }
}

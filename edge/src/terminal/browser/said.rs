//! What a client and the gateway say to each other in text frames.

use axum::extract::ws::Message;
use domain::terminal_session::Exit;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What a client says in a text frame.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum FromUser {
    Resize {
        #[serde(alias = "cols")]
        columns: u16,
        rows: u16,
    },
    // With braces: without them serde lets fields pass that it does not have.
    Ping {},
    /// It has the output up to this position, drawn and done with.
    Ack {
        position: u64,
    },
    /// It wants the session to end.
    Exit {},
}

/// What a client is told in a text frame.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToUser {
    /// Output follows from `position` on. `lost_bytes` before it were wanted and are gone.
    Attached {
        session_id: Uuid,
        attachment: u32,
        position: u64,
        lost_bytes: u64,
        expires_at: String,
        /// Whether what is shown is recorded: `off`, `best-effort` or `strict`. What is typed never is.
        recording: &'static str,
    },
    /// From here on it is recorded so.
    Recording {
        mode: &'static str,
    },
    Pong,
    /// The program ended.
    Exit {
        code: Option<i32>,
        signal: Option<i32>,
    },
}

pub(super) fn exit_of(exit: Exit) -> ToUser {
    match exit {
        Exit::Code(code) => ToUser::Exit { code: Some(code), signal: None },
        Exit::Signal(signal) => ToUser::Exit { code: None, signal: Some(signal) },
    }
}

pub(super) fn text(message: &ToUser) -> Message {
    Message::Text(serde_json::to_string(message).unwrap_or_default().into())
}

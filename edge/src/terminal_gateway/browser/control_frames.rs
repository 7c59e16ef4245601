//! The control messages of clients and of the gateway, in text frames.

use axum::extract::ws::Message;
use domain::terminal_session::ShellExit;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A client's control message.
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

/// A control message to the client.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToUser {
    /// Output follows from `position` on. `lost_bytes` before it were requested and are no longer stored.
    Attached {
        session_id: Uuid,
        attachment: u32,
        position: u64,
        lost_bytes: u64,
        expires_at: String,
        /// Whether output is recorded: `off`, `best-effort` or `strict`. Input never is.
        recording: &'static str,
    },
    /// From here on it is recorded so.
    Recording {
        mode: &'static str,
    },
    /// The node is not in contact, or has not begun the session: what is typed and shown waits for it, until `Attached` follows.
    WaitingForNode,
    Pong,
    /// The program ended.
    Exit {
        code: Option<i32>,
        signal: Option<i32>,
    },
}

pub(super) fn exit_of(exit: ShellExit) -> ToUser {
    match exit {
        ShellExit::Code(code) => ToUser::Exit { code: Some(code), signal: None },
        ShellExit::Signal(signal) => ToUser::Exit { code: None, signal: Some(signal) },
    }
}

pub(super) fn text(message: &ToUser) -> Message {
    Message::Text(serde_json::to_string(message).unwrap_or_default().into())
}

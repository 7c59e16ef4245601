//! Terminal sessions at the fake control plane: it is the user at the other end, and the store of their recordings.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::ws::{Message, WebSocket};
use axum::extract::{Path, State, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use uuid::Uuid;
use wire::recording::{ChunkAnswer, FrameContent, Frames, RecordingEnd};
use wire::task::ResultReceipt;
use wire::terminal::{ProgramExit, TerminalCommand, TerminalEvent};

use super::{Shared, refuse};

/// What came of one session.
#[derive(Default)]
pub struct SeenTerminal {
    /// Output, each byte once.
    pub output: Vec<u8>,
    /// Bytes that never came.
    pub missing: u64,
    pub exit: Option<ProgramExit>,
    pub is_lost: bool,
    /// The streams that the agent opened.
    pub streams: u32,
    /// Input that is sent next.
    pub input: VecDeque<Vec<u8>>,
    chunks: BTreeMap<u32, Vec<u8>>,
    /// A chunk came twice with another content.
    pub has_conflict: bool,
}

impl SeenTerminal {
    fn is_over(&self) -> bool {
        self.exit.is_some() || self.is_lost
    }

    /// The recorded output, the gaps in bytes, and how the recording ended.
    pub fn recording(&self) -> (Vec<u8>, u64, Option<RecordingEnd>) {
        let (mut output, mut gaps, mut end) = (Vec::new(), 0, None);
        for (index, (seq, chunk)) in self.chunks.iter().enumerate() {
            assert_eq!(index, *seq as usize, "a chunk is missing");
            for frame in Frames::of(chunk) {
                match frame.unwrap().what {
                    FrameContent::Output(bytes) => output.extend(bytes),
                    FrameContent::Gap { bytes } => gaps += bytes,
                    FrameContent::End(how) => end = Some(how),
                    _ => {}
                }
            }
        }
        (output, gaps, end)
    }
}

pub(super) async fn stream(
    State(shared): State<Arc<Shared>>,
    Path(session_id): Path<Uuid>,
    upgrade: WebSocketUpgrade,
) -> Response {
    let is_over = shared.seen.lock().unwrap().terminals.entry(session_id).or_default().is_over();
    if is_over {
        return refuse(StatusCode::CONFLICT, "state_conflict", "exited");
    }
    upgrade.on_upgrade(move |socket| async move {
        let _ = carry(&shared, session_id, socket).await;
    })
}

/// Attaches as a user does who has all of the output so far.
async fn carry(shared: &Shared, session_id: Uuid, mut socket: WebSocket) -> Result<(), axum::Error> {
    let (attachment, from) = with(shared, session_id, |seen| {
        seen.streams += 1;
        (seen.streams, seen.output.len() as u64)
    });
    let send = |command: TerminalCommand| Message::Binary(command.encode().into());
    socket.send(send(TerminalCommand::Attach { attachment, from: Some(from) })).await?;
    let mut look = tokio::time::interval(std::time::Duration::from_millis(20));
    loop {
        let message = tokio::select! {
            message = socket.recv() => message,
            _ = look.tick() => {
                if shared.behaviour.lock().unwrap().page.is_some() {
                    return Ok(());
                }
                while let Some(bytes) = with(shared, session_id, |seen| seen.input.pop_front()) {
                    socket.send(send(TerminalCommand::Input { attachment, bytes })).await?;
                }
                continue;
            }
        };
        let Some(message) = message else { return Ok(()) };
        let Message::Binary(bytes) = message? else { continue };
        match TerminalEvent::decode(&bytes).unwrap() {
            TerminalEvent::Attached { lost, .. } => with(shared, session_id, |seen| seen.missing += lost),
            TerminalEvent::Output { position, bytes, .. } if bytes.is_empty() => {
                socket.send(send(TerminalCommand::Received { attachment, position })).await?;
            }
            TerminalEvent::Output { position, bytes, .. } => {
                let position = with(shared, session_id, |seen| seen.take(position, &bytes));
                socket.send(send(TerminalCommand::Ack { attachment, position })).await?;
            }
            TerminalEvent::Exited { exit } => {
                with(shared, session_id, |seen| seen.exit = Some(exit));
                socket.send(send(TerminalCommand::Close)).await?;
            }
            TerminalEvent::Lost => {
                with(shared, session_id, |seen| seen.is_lost = true);
                socket.send(send(TerminalCommand::Close)).await?;
            }
            TerminalEvent::Taken { .. } | TerminalEvent::Recording { .. } => {}
        }
    }
}

impl SeenTerminal {
    /// Takes what it does not have, as the gateway does, and returns the position after it.
    fn take(&mut self, position: u64, bytes: &[u8]) -> u64 {
        let end = self.output.len() as u64;
        self.missing += position.saturating_sub(end);
        let known = usize::try_from(end.saturating_sub(position)).unwrap().min(bytes.len());
        self.output.extend_from_slice(&bytes[known..]);
        self.output.len() as u64
    }
}

fn with<T>(shared: &Shared, session_id: Uuid, act: impl FnOnce(&mut SeenTerminal) -> T) -> T {
    act(shared.seen.lock().unwrap().terminals.entry(session_id).or_default())
}

pub(super) async fn store_chunk(
    State(shared): State<Arc<Shared>>,
    Path((session_id, seq)): Path<(Uuid, u32)>,
    frames: Bytes,
) -> Response {
    let recorded = with(&shared, session_id, |seen| match seen.chunks.get(&seq) {
        None => {
            seen.chunks.insert(seq, frames.to_vec());
            Some(ResultReceipt::New)
        }
        Some(known) if *known == frames => Some(ResultReceipt::Already),
        Some(_) => {
            seen.has_conflict = true;
            None
        }
    });
    match recorded {
        Some(recorded) => Json(ChunkAnswer { recorded }).into_response(),
        None => refuse(StatusCode::CONFLICT, "state_conflict", "chunk"),
    }
}

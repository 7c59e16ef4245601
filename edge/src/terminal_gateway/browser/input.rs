//! From the user to the agent.

use super::LinkEnd;
use super::byte_positions::Progress;
use super::control_frames::FromUser;
use crate::http::request_body::integers::from_json;
use crate::http::websocket::{Controls, MISUSED, TOO_BIG, is_too_big};
use axum::extract::ws::Message;
use futures::{Stream, StreamExt as _};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use wire::terminal::{CHUNK, TerminalCommand};

/// After this silence the client counts as gone: three ping intervals.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(45);

/// Runs until the user or the link is gone.
pub(super) async fn carry(
    down: &mpsc::Sender<TerminalCommand>,
    attachment: u32,
    progress: &Progress,
    stream: &mut (impl Stream<Item = Result<Message, axum::Error>> + Unpin),
) -> LinkEnd {
    let mut input = Input { down, attachment, progress, controls: Controls::default() };
    loop {
        // Counted from when a message could be read: a program may be slow to read earlier input.
        let silent_at = Instant::now() + SILENCE_TIMEOUT;
        let message = tokio::select! {
            message = stream.next() => message,
            () = sleep_until(silent_at) => return LinkEnd::User,
        };
        if let Err(link_end) = input.receive(message).await {
            return link_end;
        }
    }
}

struct Input<'a> {
    down: &'a mpsc::Sender<TerminalCommand>,
    attachment: u32,
    progress: &'a Progress,
    controls: Controls,
}

impl Input<'_> {
    async fn receive(&mut self, message: Option<Result<Message, axum::Error>>) -> Result<(), LinkEnd> {
        match message {
            Some(Err(error)) if is_too_big(&error) => Err(LinkEnd::Close(TOO_BIG)),
            None | Some(Err(_) | Ok(Message::Close(_))) => Err(LinkEnd::User),
            Some(Ok(Message::Binary(bytes))) => self.forward_input(&bytes).await,
            Some(Ok(Message::Ping(_))) => self.count(),
            Some(Ok(Message::Pong(echo))) => {
                self.count()?;
                self.confirm(&echo).await
            }
            Some(Ok(Message::Text(text))) => self.control(&text).await,
        }
    }

    /// Forwards the user's input.
    async fn forward_input(&mut self, bytes: &[u8]) -> Result<(), LinkEnd> {
        if bytes.is_empty() {
            return self.count();
        }
        let attachment = self.attachment;
        for chunk in bytes.chunks(CHUNK) {
            self.progress.make_room(self.down, attachment, chunk.len() as u64).await;
            self.send(TerminalCommand::Input { attachment, bytes: chunk.to_vec() }).await?;
        }
        Ok(())
    }

    /// The echo of a ping that asks for confirmation up to a position. It follows the output in order: the client has received it.
    async fn confirm(&self, echo: &[u8]) -> Result<(), LinkEnd> {
        let Ok(position) = echo.try_into().map(u64::from_be_bytes) else { return Ok(()) };
        let position = position.min(self.progress.delivered.load(Ordering::Relaxed));
        self.send(TerminalCommand::Received { attachment: self.attachment, position }).await
    }

    async fn control(&mut self, text: &str) -> Result<(), LinkEnd> {
        let understood = from_json::<FromUser>(text.as_bytes());
        if let Ok(FromUser::Ack { position }) = understood {
            return match self.progress.acknowledge(position) {
                // These follow the output, and are no more frequent than that.
                Some(position) => self.send(TerminalCommand::Ack { attachment: self.attachment, position }).await,
                None => self.count(),
            };
        }
        self.count()?;
        match understood {
            Ok(FromUser::Resize { columns, rows }) => self.send(TerminalCommand::Resize { columns, rows }).await,
            Ok(FromUser::Exit {}) => self.send(TerminalCommand::Close).await,
            Ok(FromUser::Ping {}) => {
                // A client that pings faster than it reads is answered once.
                self.progress.pinged.notify_one();
                Ok(())
            }
            Ok(FromUser::Ack { .. }) => Ok(()),
            Err(_) => Err(LinkEnd::Close(MISUSED)),
        }
    }

    fn count(&mut self) -> Result<(), LinkEnd> {
        if self.controls.take() { Ok(()) } else { Err(LinkEnd::Close(MISUSED)) }
    }

    async fn send(&self, down: TerminalCommand) -> Result<(), LinkEnd> {
        self.down.send(down).await.map_err(|_| LinkEnd::Link)
    }
}

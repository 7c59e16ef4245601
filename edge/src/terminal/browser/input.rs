//! What a user's end says, to the agent.

use super::Parted;
use super::progress::Progress;
use super::said::FromUser;
use crate::body::whole::from_json;
use crate::websocket::{Controls, MISUSED, TOO_BIG, is_too_big};
use axum::extract::ws::Message;
use futures::{Stream, StreamExt as _};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use wire::terminal::{CHUNK, Down};

/// After how long a silence the user's end counts as gone: three times as long as from one question to the next.
const SILENT_AFTER: Duration = Duration::from_secs(45);

/// Until the user is gone, or the link is.
pub(super) async fn carry(
    down: &mpsc::Sender<Down>,
    attachment: u32,
    progress: &Progress,
    stream: &mut (impl Stream<Item = Result<Message, axum::Error>> + Unpin),
) -> Parted {
    let mut input = Input { down, attachment, progress, controls: Controls::default() };
    loop {
        // Counted from when it could be heard: a program may be slow to take what was typed before.
        let silent_at = Instant::now() + SILENT_AFTER;
        let message = tokio::select! {
            message = stream.next() => message,
            () = sleep_until(silent_at) => return Parted::User,
        };
        if let Err(parted) = input.hear(message).await {
            return parted;
        }
    }
}

struct Input<'a> {
    down: &'a mpsc::Sender<Down>,
    attachment: u32,
    progress: &'a Progress,
    controls: Controls,
}

impl Input<'_> {
    async fn hear(&mut self, message: Option<Result<Message, axum::Error>>) -> Result<(), Parted> {
        match message {
            Some(Err(error)) if is_too_big(&error) => Err(Parted::Close(TOO_BIG)),
            None | Some(Err(_) | Ok(Message::Close(_))) => Err(Parted::User),
            Some(Ok(Message::Binary(bytes))) => self.pass_on(&bytes).await,
            Some(Ok(Message::Ping(_))) => self.count(),
            Some(Ok(Message::Pong(echo))) => {
                self.count()?;
                self.confirm(&echo).await
            }
            Some(Ok(Message::Text(said))) => self.control(&said).await,
        }
    }

    /// What was typed.
    async fn pass_on(&mut self, bytes: &[u8]) -> Result<(), Parted> {
        if bytes.is_empty() {
            return self.count();
        }
        let attachment = self.attachment;
        for chunk in bytes.chunks(CHUNK) {
            self.progress.make_room(self.down, attachment, chunk.len() as u64).await;
            self.tell(Down::Input { attachment, bytes: chunk.to_vec() }).await?;
        }
        Ok(())
    }

    /// The echo of a question whether all up to a position has come. It came in the order of the output: it has.
    async fn confirm(&self, echo: &[u8]) -> Result<(), Parted> {
        let Ok(position) = echo.try_into().map(u64::from_be_bytes) else { return Ok(()) };
        let position = position.min(self.progress.delivered.load(Ordering::Relaxed));
        self.tell(Down::Received { attachment: self.attachment, position }).await
    }

    async fn control(&mut self, said: &str) -> Result<(), Parted> {
        let understood = from_json::<FromUser>(said.as_bytes());
        if let Ok(FromUser::Ack { position }) = understood {
            return match self.progress.acknowledge(position) {
                // Such come with the output, and are no more than that.
                Some(position) => self.tell(Down::Ack { attachment: self.attachment, position }).await,
                None => self.count(),
            };
        }
        self.count()?;
        match understood {
            Ok(FromUser::Resize { columns, rows }) => self.tell(Down::Resize { columns, rows }).await,
            Ok(FromUser::Exit {}) => self.tell(Down::Close).await,
            Ok(FromUser::Ping {}) => {
                // Who asks faster than it listens is answered once.
                self.progress.pinged.notify_one();
                Ok(())
            }
            Ok(FromUser::Ack { .. }) => Ok(()),
            Err(_) => Err(Parted::Close(MISUSED)),
        }
    }

    fn count(&mut self) -> Result<(), Parted> {
        if self.controls.take() { Ok(()) } else { Err(Parted::Close(MISUSED)) }
    }

    async fn tell(&self, down: Down) -> Result<(), Parted> {
        self.down.send(down).await.map_err(|_| Parted::Link)
    }
}

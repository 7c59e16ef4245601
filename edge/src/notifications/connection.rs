//! One who listens, from their upgrade to their close.

use super::message::{pong, ready};
use super::{Figures, Listening};
use crate::auth::Caller;
use crate::body::whole::from_json;
use crate::error::Code;
use crate::places::Place;
use crate::services::Services;
use crate::websocket::{CLOSES_WITHIN, Close, Controls, MISUSED, REVOKED, TOO_BIG, frame, is_too_big};
use axum::extract::ws::{Message, Utf8Bytes, WebSocket};
use chrono::Utc;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};

/// The access token has ended: come again with another.
const EXPIRED: Close = (4408, "token_expired");
/// The user has as many connections as one may have.
pub(crate) const FULL: Close = (4429, "too_many_connections");
const SLOW: Close = (4413, "too_slow: messages were lost");
const RESTARTS: Close = (1012, "connect again");
const AWAY: Close = (1013, "the service cannot say whether you may listen; connect again later");

/// How often the other end is asked whether it is there, and the access token looked at again; and after how long a silence it counts as
/// gone.
const ASKS_EVERY: Duration = Duration::from_secs(15);
const SILENT_AFTER: Duration = Duration::from_secs(45);
/// Messages that are written together, at most.
const AT_ONCE: usize = 16;

/// What a client may say in a text frame.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum FromUser {
    // With braces: without them serde lets fields pass that it does not have.
    Ping {},
}

/// A connection that was let in.
pub(crate) struct Connection {
    pub(crate) services: Services,
    pub(crate) listening: Listening,
    /// By what the caller was known; it is looked at again now and then.
    pub(crate) token: SecretString,
    pub(crate) caller: Caller,
    pub(crate) place: Place,
}

type Sink = SplitSink<WebSocket, Message>;

impl Connection {
    pub(crate) async fn run(mut self, socket: WebSocket) {
        let figures = self.services.notifications.figures().clone();
        figures.connections.inc();
        let (mut sink, mut stream) = socket.split();
        if let Some(why) = self.live(&mut sink, &mut stream, &figures).await {
            let _ = timeout(CLOSES_WITHIN, sink.send(frame(why))).await;
        }
        drop(self.place);
        figures.connections.dec();
    }

    /// Until it ends; `None` where the other end is gone.
    async fn live(&mut self, sink: &mut Sink, stream: &mut SplitStream<WebSocket>, figures: &Figures) -> Option<Close> {
        let left = (self.caller.token_expires_at - Utc::now()).to_std().unwrap_or_default();
        let end = Instant::now() + left;
        let (stopping, slow) = (self.services.stopping.clone(), self.listening.slow.clone());
        let (answers, answer) = mpsc::channel(1);
        tokio::select! {
            biased;
            () = slow.cancelled() => Some(SLOW),
            () = sleep_until(end) => Some(EXPIRED),
            () = stopping.cancelled() => Some(RESTARTS),
            why = self.tell(sink, answer, figures) => why,
            why = hear(stream, &answers) => why,
        }
    }

    async fn tell(&mut self, sink: &mut Sink, mut answer: mpsc::Receiver<()>, figures: &Figures) -> Option<Close> {
        let greeting = ready(&self.listening.channels, self.caller.token_expires_at, Utc::now());
        if sink.send(Message::Text(greeting.into())).await.is_err() {
            return None;
        }
        let mut asks = interval_at(Instant::now() + ASKS_EVERY, ASKS_EVERY);
        asks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut messages = Vec::new();
        loop {
            tokio::select! {
                count = self.listening.messages.recv_many(&mut messages, AT_ONCE) => {
                    // A key of a service account is void from the moment in which it was revoked.
                    if let Some(acting) = &self.caller.acting {
                        match self.services.authenticator.still_acts(acting).await {
                            Ok(true) => {}
                            Ok(false) => return Some(REVOKED),
                            Err(_) => return Some(AWAY),
                        }
                    }
                    let count = u64::try_from(count).unwrap_or_default();
                    if write(sink, messages.drain(..)).await.is_err() {
                        figures.write_errors.inc_by(count);
                        return None;
                    }
                    figures.forwarded.inc_by(count);
                }
                Some(()) = answer.recv() => {
                    if sink.send(Message::Text(pong(Utc::now()).into())).await.is_err() {
                        return None;
                    }
                }
                _ = asks.tick() => {
                    if let Some(why) = self.has_lost_its_right().await {
                        return Some(why);
                    }
                    if sink.send(Message::Ping(Vec::new().into())).await.is_err() {
                        return None;
                    }
                }
            }
        }
    }

    /// The provider may have taken back the key that signed the token, and somebody the account that it is of. Where that cannot be
    /// asked, what was true holds until the token ends.
    async fn has_lost_its_right(&self) -> Option<Close> {
        match self.services.authenticator.believe(self.token.expose_secret()).await {
            Ok(caller) if caller == self.caller => None,
            // It is another's word by now: who comes again listens to what is theirs.
            Ok(_) => Some(REVOKED),
            Err(error) if error.code() == Code::Unauthenticated && Utc::now() >= self.caller.token_expires_at => {
                Some(EXPIRED)
            }
            Err(error) if error.code() == Code::Unauthenticated => Some(REVOKED),
            Err(error) => {
                tracing::debug!(%error, "nobody can say whether a listener's token still holds");
                None
            }
        }
    }
}

async fn write(sink: &mut Sink, messages: impl Iterator<Item = Utf8Bytes>) -> Result<(), axum::Error> {
    for message in messages {
        sink.feed(Message::Text(message)).await?;
    }
    sink.flush().await
}

/// Until the other end is gone, or says what is not understood.
async fn hear(stream: &mut SplitStream<WebSocket>, answers: &mpsc::Sender<()>) -> Option<Close> {
    let mut controls = Controls::default();
    loop {
        let message = timeout(SILENT_AFTER, stream.next()).await.ok().flatten()?;
        match message {
            Err(error) => return is_too_big(&error).then_some(TOO_BIG),
            Ok(Message::Close(_)) => return None,
            Ok(Message::Binary(_)) => return Some(MISUSED),
            Ok(_) if !controls.take() => return Some(MISUSED),
            Ok(Message::Ping(_) | Message::Pong(_)) => {}
            Ok(Message::Text(said)) => match from_json(said.as_bytes()) {
                // Who asks faster than it listens is answered once.
                Ok(FromUser::Ping {}) => drop(answers.try_send(())),
                Err(_) => return Some(MISUSED),
            },
        }
    }
}

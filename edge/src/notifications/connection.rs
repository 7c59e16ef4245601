//! One subscriber's connection, from the upgrade to the close.

use super::message::{pong, ready};
use super::{NotificationMetrics, Subscription, Switches};
use crate::auth::{Authenticator, Caller, RevocableLogin};
use crate::http::error::Code;
use crate::http::request_body::integers::from_json;
use crate::http::websocket::{CLOSE_TIMEOUT, Close, Controls, MISUSED, REVOKED, TOO_BIG, frame, is_too_big};
use crate::limits::connection_quota::QuotaSlot;
use axum::extract::ws::{Message, Utf8Bytes, WebSocket};
use chrono::Utc;
use domain::BrowserSessionId;
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

/// The access token has expired: connect again with a new one.
const EXPIRED: Close = (4408, "token_expired");
/// The user has as many connections as one may have.
pub(crate) const FULL: Close = (4429, "too_many_connections");
const SLOW: Close = (4413, "too_slow: messages were lost");
const RESTARTS: Close = (1012, "connect again");
const AWAY: Close = (1013, "the service cannot check your access at the moment; connect again later");

/// How often the client is pinged and its access token is rechecked; and after which silence the connection counts as dead.
const PING_INTERVAL: Duration = Duration::from_secs(15);
const SILENCE_TIMEOUT: Duration = Duration::from_secs(45);
/// Messages that are written together, at most.
const WRITE_BATCH: usize = 16;

/// What a client may send in a text frame.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum FromUser {
    // With braces: without them serde lets fields pass that it does not have.
    Ping {},
}

/// What authenticated the caller of a connection.
pub(crate) enum Credential {
    Token(SecretString),
    BrowserSession(BrowserSessionId),
}

/// An admitted connection.
pub(crate) struct Connection {
    pub(crate) authenticator: Arc<Authenticator>,
    pub(crate) metrics: NotificationMetrics,
    /// Cancelled when this process stops.
    pub(crate) stopping: CancellationToken,
    pub(crate) subscription: Subscription,
    pub(crate) switches: Switches,
    /// What the caller was authenticated by; it is rechecked periodically.
    pub(crate) credential: Credential,
    pub(crate) caller: Caller,
    pub(crate) slot: QuotaSlot,
}

type Sink = SplitSink<WebSocket, Message>;

impl Connection {
    pub(crate) async fn run(mut self, socket: WebSocket) {
        let metrics = self.metrics.clone();
        metrics.connections.inc();
        let (mut sink, mut stream) = socket.split();
        if let Some(why) = self.serve(&mut sink, &mut stream, &metrics).await {
            let _ = timeout(CLOSE_TIMEOUT, sink.send(frame(why))).await;
        }
        drop(self.slot);
        metrics.connections.dec();
    }

    /// Runs until the connection ends; `None` where the client is gone.
    async fn serve(
        &mut self,
        sink: &mut Sink,
        stream: &mut SplitStream<WebSocket>,
        metrics: &NotificationMetrics,
    ) -> Option<Close> {
        let left = (self.caller.token_expires_at - Utc::now()).to_std().unwrap_or_default();
        let end = Instant::now() + left;
        let (stopping, slow) = (self.stopping.clone(), self.subscription.slow.clone());
        let (answers, answer) = mpsc::channel(1);
        tokio::select! {
            biased;
            () = slow.cancelled() => Some(SLOW),
            () = sleep_until(end) => Some(EXPIRED),
            () = stopping.cancelled() => Some(RESTARTS),
            why = self.send(sink, answer, metrics) => why,
            why = receive(stream, &answers) => why,
        }
    }

    async fn send(
        &mut self,
        sink: &mut Sink,
        mut answer: mpsc::Receiver<()>,
        metrics: &NotificationMetrics,
    ) -> Option<Close> {
        let greeting = ready(&self.subscription.channels, self.caller.token_expires_at, Utc::now());
        if sink.send(Message::Text(greeting.into())).await.is_err() {
            return None;
        }
        let mut pings = interval_at(Instant::now() + PING_INTERVAL, PING_INTERVAL);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut messages = Vec::new();
        loop {
            tokio::select! {
                _ = self.subscription.messages.recv_many(&mut messages, WRITE_BATCH) => {
                    // A key of a service account is void from the moment in which it was revoked, and so is a browser session that has
                    // ended, which is announced here.
                    if let Some(login) = self.caller.revocable_login() {
                        match self.authenticator.is_still_authorized(&login).await {
                            Ok(true) => {}
                            Ok(false) => return Some(REVOKED),
                            Err(_) => return Some(AWAY),
                        }
                    }
                    messages.retain(|message: &Utf8Bytes| self.switches.admit(message));
                    let count = u64::try_from(messages.len()).unwrap_or_default();
                    if write(sink, messages.drain(..)).await.is_err() {
                        metrics.write_errors.inc_by(count);
                        return None;
                    }
                    metrics.forwarded.inc_by(count);
                }
                Some(()) = answer.recv() => {
                    if sink.send(Message::Text(pong(Utc::now()).into())).await.is_err() {
                        return None;
                    }
                }
                _ = pings.tick() => {
                    if let Some(why) = self.recheck_token().await {
                        return Some(why);
                    }
                    if sink.send(Message::Ping(Vec::new().into())).await.is_err() {
                        return None;
                    }
                }
            }
        }
    }

    /// The provider may have withdrawn the key that signed the token, or the account may have been revoked. Where that cannot be
    /// determined, the last known state holds until the token expires.
    async fn recheck_token(&self) -> Option<Close> {
        let token = match &self.credential {
            Credential::Token(token) => token,
            Credential::BrowserSession(id) => {
                let session = RevocableLogin::BrowserSession(*id);
                return match self.authenticator.is_still_authorized(&session).await {
                    Ok(is_active) => (!is_active).then_some(REVOKED),
                    Err(error) => {
                        tracing::debug!(%error, "a subscriber's session could not be rechecked");
                        None
                    }
                };
            }
        };
        match self.authenticator.verify_token(token.expose_secret()).await {
            Ok(caller) if caller == self.caller => None,
            // The token names another caller now: a new connection subscribes to that caller's channels.
            Ok(_) => Some(REVOKED),
            Err(error) if error.code() == Code::Unauthenticated && Utc::now() >= self.caller.token_expires_at => {
                Some(EXPIRED)
            }
            Err(error) if error.code() == Code::Unauthenticated => Some(REVOKED),
            Err(error) => {
                tracing::debug!(%error, "a subscriber's token could not be rechecked");
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

/// Until the client is gone or violates the protocol.
async fn receive(stream: &mut SplitStream<WebSocket>, answers: &mpsc::Sender<()>) -> Option<Close> {
    let mut controls = Controls::default();
    loop {
        let message = timeout(SILENCE_TIMEOUT, stream.next()).await.ok().flatten()?;
        match message {
            Err(error) => return is_too_big(&error).then_some(TOO_BIG),
            Ok(Message::Close(_)) => return None,
            Ok(Message::Binary(_)) => return Some(MISUSED),
            Ok(_) if !controls.take() => return Some(MISUSED),
            Ok(Message::Ping(_) | Message::Pong(_)) => {}
            Ok(Message::Text(text)) => match from_json(text.as_bytes()) {
                // A client that pings faster than it reads is answered once.
                Ok(FromUser::Ping {}) => drop(answers.try_send(())),
                Err(_) => return Some(MISUSED),
            },
        }
    }
}

//! The stream of a session: a WebSocket to the control plane, reconnected whenever it is cut, as long as the session lives.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::{SinkExt as _, StreamExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use uuid::Uuid;
use wire::terminal::{KEEPALIVE_SECONDS, SILENCE_TIMEOUT_SECONDS, TerminalCommand, TerminalEvent};

use super::session::StreamMessage;
use crate::full_jitter::Backoff;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const ACK_TIMEOUT: Duration = Duration::from_secs(10);
/// The most messages that are flushed together.
const MAX_BATCH: usize = 16;
const SEND_TIMEOUT: Duration = Duration::from_secs(SILENCE_TIMEOUT_SECONDS);

/// An open stream.
pub type TerminalSocket = WebSocketStream<TlsStream<TcpStream>>;

/// Why there is no stream.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    /// The control plane has no such session, or it is over.
    #[error("the control plane says that the session is over")]
    Over,
    #[error("{0}")]
    Cut(String),
}

/// The connections to the control plane, authenticated as the node at that moment.
pub trait TerminalTransport: Send + Sync + 'static {
    fn open(&self, session_id: Uuid) -> BoxFuture<'_, Result<TerminalSocket, StreamError>>;

    /// Uploads a chunk of the session's recording; on success the control plane has stored it.
    fn send_chunk(&self, session_id: Uuid, seq: u32, frames: Vec<u8>) -> BoxFuture<'_, Result<(), UploadError>>;
}

/// Why a chunk is not stored.
#[derive(Debug)]
pub enum UploadError {
    /// Permanently.
    Refused(String),
    /// To be retried.
    Later { why: String, after: Option<Duration> },
}

/// Reports a session of an earlier process as lost, until the control plane acknowledges it, knows it, or `until` has passed.
pub(super) async fn report_lost(session_id: Uuid, transport: &dyn TerminalTransport, until: Instant) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while Instant::now() < until {
        match timeout(CONNECT_TIMEOUT, transport.open(session_id)).await {
            Ok(Ok(socket)) => {
                if timeout(ACK_TIMEOUT, deliver_lost(socket)).await.unwrap_or(false) {
                    return;
                }
            }
            Ok(Err(StreamError::Over)) => return,
            Ok(Err(StreamError::Cut(why))) => debug!(why, "could not yet report a lost terminal session"),
            Err(_) => {}
        }
        tokio::time::sleep(backoff.next(rand::random(), None)).await;
    }
}

/// Sends the loss. Returns whether the control plane has confirmed that the session is over.
async fn deliver_lost(mut socket: TerminalSocket) -> bool {
    if socket.send(Message::Binary(TerminalEvent::Lost.encode().into())).await.is_err() {
        return false;
    }
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Binary(bytes) = message
            && matches!(TerminalCommand::decode(&bytes), Ok(TerminalCommand::Close))
        {
            return true;
        }
    }
    false
}

pub(super) struct Stream {
    pub(super) session_id: Uuid,
    pub(super) transport: Arc<dyn TerminalTransport>,
    pub(super) to_session: mpsc::Sender<StreamMessage>,
    pub(super) from_session: mpsc::Receiver<TerminalEvent>,
    pub(super) over: CancellationToken,
}

impl Stream {
    pub(super) async fn run(mut self) {
        let over = self.over.clone();
        tokio::select! {
            () = over.cancelled() => {}
            () = self.maintain() => {}
        }
    }

    async fn maintain(&mut self) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            match timeout(CONNECT_TIMEOUT, self.transport.open(self.session_id)).await {
                Ok(Ok(socket)) => {
                    backoff.reset();
                    // Messages for the previous connection are not for this one.
                    while self.from_session.try_recv().is_ok() {}
                    let why = self.carry(socket).await;
                    debug!(why, "the terminal's stream is cut");
                }
                Ok(Err(StreamError::Over)) => return self.close_session().await,
                Ok(Err(StreamError::Cut(why))) => warn!(why, "a terminal's stream cannot be opened; trying again"),
                Err(_) => warn!("a terminal's stream takes too long to open; trying again"),
            }
            if self.to_session.send(StreamMessage::Cut).await.is_err() {
                return;
            }
            tokio::time::sleep(backoff.next(rand::random(), None)).await;
        }
    }

    async fn close_session(&self) {
        let _ = self.to_session.send(StreamMessage::Received(TerminalCommand::Close)).await;
    }

    /// Carries messages in both directions until the stream is cut, and returns why it was.
    async fn carry(&mut self, socket: TerminalSocket) -> String {
        let (mut sink, mut stream) = socket.split();
        let silent_after = Duration::from_secs(SILENCE_TIMEOUT_SECONDS);
        let (to_session, from_session) = (self.to_session.clone(), &mut self.from_session);
        let inbound = async {
            let mut silent_at = Instant::now() + silent_after;
            loop {
                let message = tokio::select! {
                    message = stream.next() => message,
                    () = sleep_until(silent_at) => return "the control plane says nothing".to_owned(),
                };
                silent_at = Instant::now() + silent_after;
                let bytes = match message {
                    Some(Ok(Message::Binary(bytes))) => bytes,
                    Some(Ok(Message::Close(_))) | None => return "closed".to_owned(),
                    Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Text(_) | Message::Frame(_))) => continue,
                    Some(Err(error)) => return error.to_string(),
                };
                match TerminalCommand::decode(&bytes) {
                    Ok(command) => {
                        if to_session.send(StreamMessage::Received(command)).await.is_err() {
                            return "the session is over".to_owned();
                        }
                    }
                    Err(error) => return error.to_string(),
                }
            }
        };
        let outbound = async {
            let mut ping = interval(Duration::from_secs(KEEPALIVE_SECONDS));
            ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let message = tokio::select! {
                    event = from_session.recv() => match event {
                        Some(event) => Message::Binary(event.encode().into()),
                        None => return "the session is over".to_owned(),
                    },
                    _ = ping.tick() => Message::Ping(Vec::new().into()),
                };
                let sending = async {
                    sink.feed(message).await?;
                    // Queued messages are flushed together.
                    for _ in 0..MAX_BATCH {
                        let Ok(event) = from_session.try_recv() else { break };
                        sink.feed(Message::Binary(event.encode().into())).await?;
                    }
                    sink.flush().await
                };
                match timeout(SEND_TIMEOUT, sending).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the control plane takes nothing".to_owned(),
                }
            }
        };
        tokio::select! {
            why = inbound => why,
            why = outbound => why,
        }
    }
}

//! The stream of a session: a WebSocket to the control plane, made again whenever it is cut, for as long as the session lives.

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
use wire::terminal::{Down, SAYS_EVERY_SECONDS, SILENT_AFTER_SECONDS, Up};

use super::session::Heard;
use crate::backoff::Backoff;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const CONNECTS_WITHIN: Duration = Duration::from_secs(10);
const HEARS_WITHIN: Duration = Duration::from_secs(10);
/// Messages that go out together, at most.
const TOGETHER: usize = 16;
const SENDS_WITHIN: Duration = Duration::from_secs(SILENT_AFTER_SECONDS);

/// An open stream.
pub type Socket = WebSocketStream<TlsStream<TcpStream>>;

/// Why there is no stream.
#[derive(Debug, thiserror::Error)]
pub enum NoStream {
    /// The control plane knows no such session, or it is over.
    #[error("the control plane says that the session is over")]
    Over,
    #[error("{0}")]
    Cut(String),
}

/// The way to the control plane, as the node that it is at that moment.
pub trait Way: Send + Sync + 'static {
    fn open(&self, session_id: Uuid) -> BoxFuture<'_, Result<Socket, NoStream>>;

    /// Sends a chunk of the session's recording; it is kept when this says so.
    fn send_recorded(&self, session_id: Uuid, seq: u32, frames: Vec<u8>) -> BoxFuture<'_, Result<(), NotSent>>;
}

/// Why a chunk is not kept.
#[derive(Debug)]
pub enum NotSent {
    /// For good.
    Refused(String),
    /// For now.
    Later { why: String, after: Option<Duration> },
}

/// Says of a session of before that it is lost, until somebody has heard it, knows it, or `until` has come.
pub(super) async fn say_lost(session_id: Uuid, way: &dyn Way, until: Instant) {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    while Instant::now() < until {
        match timeout(CONNECTS_WITHIN, way.open(session_id)).await {
            Ok(Ok(socket)) => {
                if timeout(HEARS_WITHIN, said_lost(socket)).await.unwrap_or(false) {
                    return;
                }
            }
            Ok(Err(NoStream::Over)) => return,
            Ok(Err(NoStream::Cut(why))) => debug!(why, "nobody could be told yet that a terminal is lost"),
            Err(_) => {}
        }
        tokio::time::sleep(backoff.next(rand::random(), None)).await;
    }
}

/// Whether the control plane has said that the session is over.
async fn said_lost(mut socket: Socket) -> bool {
    if socket.send(Message::Binary(Up::Lost.encode().into())).await.is_err() {
        return false;
    }
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Binary(bytes) = message
            && matches!(Down::decode(&bytes), Ok(Down::Close))
        {
            return true;
        }
    }
    false
}

pub(super) struct Stream {
    pub(super) session_id: Uuid,
    pub(super) way: Arc<dyn Way>,
    pub(super) to_session: mpsc::Sender<Heard>,
    pub(super) from_session: mpsc::Receiver<Up>,
    pub(super) over: CancellationToken,
}

impl Stream {
    pub(super) async fn run(mut self) {
        let over = self.over.clone();
        tokio::select! {
            () = over.cancelled() => {}
            () = self.keep() => {}
        }
    }

    async fn keep(&mut self) {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            match timeout(CONNECTS_WITHIN, self.way.open(self.session_id)).await {
                Ok(Ok(socket)) => {
                    backoff.reset();
                    // What was meant for the one before is not for this one.
                    while self.from_session.try_recv().is_ok() {}
                    let why = self.carry(socket).await;
                    debug!(why, "the terminal's stream is cut");
                }
                Ok(Err(NoStream::Over)) => return self.end().await,
                Ok(Err(NoStream::Cut(why))) => warn!(why, "a terminal's stream cannot be opened; trying again"),
                Err(_) => warn!("a terminal's stream takes too long to open; trying again"),
            }
            if self.to_session.send(Heard::Cut).await.is_err() {
                return;
            }
            tokio::time::sleep(backoff.next(rand::random(), None)).await;
        }
    }

    async fn end(&self) {
        let _ = self.to_session.send(Heard::Said(Down::Close)).await;
    }

    /// Carries messages both ways until the stream is cut, and says why it was.
    async fn carry(&mut self, socket: Socket) -> String {
        let (mut sink, mut stream) = socket.split();
        let silent_after = Duration::from_secs(SILENT_AFTER_SECONDS);
        let (to_session, from_session) = (self.to_session.clone(), &mut self.from_session);
        let down = async {
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
                match Down::decode(&bytes) {
                    Ok(said) => {
                        if to_session.send(Heard::Said(said)).await.is_err() {
                            return "the session is over".to_owned();
                        }
                    }
                    Err(error) => return error.to_string(),
                }
            }
        };
        let up = async {
            let mut beat = interval(Duration::from_secs(SAYS_EVERY_SECONDS));
            beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let message = tokio::select! {
                    said = from_session.recv() => match said {
                        Some(said) => Message::Binary(said.encode().into()),
                        None => return "the session is over".to_owned(),
                    },
                    _ = beat.tick() => Message::Ping(Vec::new().into()),
                };
                let sending = async {
                    sink.feed(message).await?;
                    // What is said together goes out together.
                    for _ in 0..TOGETHER {
                        let Ok(said) = from_session.try_recv() else { break };
                        sink.feed(Message::Binary(said.encode().into())).await?;
                    }
                    sink.flush().await
                };
                match timeout(SENDS_WITHIN, sending).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the control plane takes nothing".to_owned(),
                }
            }
        };
        tokio::select! {
            why = down => why,
            why = up => why,
        }
    }
}

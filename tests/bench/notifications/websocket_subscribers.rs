//! Subscribers of the replica, over WebSockets.

use anyhow::{Context, ensure};
use chrono::{DateTime, Utc};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use hdrhistogram::Histogram;
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tests::cluster::TestCluster;
use tests::cluster::notifications::PROTOCOL;
use tests::cluster::terminal::{Socket, TerminalGateway};
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;

const AT_ONCE: usize = 32;

/// The latencies of the received messages, and how many are missing.
pub(crate) struct Latencies {
    /// In microseconds.
    pub(crate) times: Histogram<u64>,
    pub(crate) missing: usize,
}

/// The shared histogram of all subscribers.
#[derive(Clone)]
pub(crate) struct LatencyRecorder(Arc<(Mutex<Histogram<u64>>, AtomicBool)>);

impl LatencyRecorder {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self(Arc::new((Mutex::new(Histogram::new(3)?), AtomicBool::new(false)))))
    }

    pub(crate) fn begin(&self) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).reset();
        self.0.1.store(true, Ordering::Relaxed);
    }

    /// Records a notification, which has the time of its creation.
    pub(crate) fn note(&self, message: &str) {
        #[derive(Deserialize)]
        struct Timed {
            time: DateTime<Utc>,
        }
        if !self.0.1.load(Ordering::Relaxed) {
            return;
        }
        let Ok(Timed { time }) = serde_json::from_str(message) else { return };
        let micros = (Utc::now() - time).num_microseconds().unwrap_or(i64::MAX);
        let micros = u64::try_from(micros).unwrap_or_default();
        let _ = self.0.0.lock().unwrap_or_else(PoisonError::into_inner).record(micros);
    }

    /// The latencies, once nothing is missing, or nothing more has arrived for two seconds.
    pub(crate) async fn taken(&self, expected: usize) -> anyhow::Result<Latencies> {
        let count = || self.0.0.lock().unwrap_or_else(PoisonError::into_inner).len();
        let (mut before, mut quiet) = (count(), 0);
        while usize::try_from(count())? < expected && quiet < 10 {
            tokio::time::sleep(Duration::from_millis(200)).await;
            quiet = if count() == before { quiet + 1 } else { 0 };
            before = count();
        }
        self.0.1.store(false, Ordering::Relaxed);
        let times = self.0.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let missing = expected.saturating_sub(usize::try_from(times.len())?);
        Ok(Latencies { times, missing })
    }
}

pub(crate) struct WebSocketSubscribers<'a> {
    cluster: &'a TestCluster,
    at: TerminalGateway,
    book: LatencyRecorder,
    reading: Vec<JoinHandle<()>>,
}

impl<'a> WebSocketSubscribers<'a> {
    pub(crate) fn at(cluster: &'a TestCluster) -> anyhow::Result<Self> {
        Ok(Self { cluster, at: cluster.gateway_at(0), book: LatencyRecorder::new()?, reading: Vec::new() })
    }

    /// Connects until there are `count`; `whose` is the user of the nth.
    pub(crate) async fn grow_to<'u>(
        &mut self,
        count: usize,
        whose: impl Fn(usize) -> &'u String,
    ) -> anyhow::Result<()> {
        let opening = stream::iter(self.reading.len()..count).map(|n| self.open(whose(n)));
        let sockets: Vec<Socket> = opening.buffer_unordered(AT_ONCE).try_collect().await?;
        for mut socket in sockets {
            let book = self.book.clone();
            self.reading.push(tokio::spawn(async move {
                while let Some(Ok(message)) = socket.next().await {
                    if let Message::Text(text) = message {
                        book.note(&text);
                    }
                }
            }));
        }
        Ok(())
    }

    async fn open(&self, user: &str) -> anyhow::Result<Socket> {
        let mut claims = self.cluster.identity.claims_of("user")?;
        claims["sub"] = json!(user);
        claims["exp"] = json!(Utc::now().timestamp() + 3600);
        let token = self.cluster.identity.mint(&claims)?;
        let offered = [PROTOCOL.to_owned(), format!("bearer.{}", token.expose_secret())];
        let opened = self.at.upgrade("/api/v1/notifications/ws", &offered, []).await;
        let mut socket = opened.map_err(|refused| anyhow::anyhow!("not let in: {refused:?}"))?;
        let first = socket.next().await.context("it was closed")??;
        ensure!(matches!(first, Message::Text(_)), "not let in: {first:?}");
        Ok(socket)
    }

    pub(crate) fn expect_all_open(&self) -> anyhow::Result<()> {
        let ended = self.reading.iter().filter(|task| task.is_finished()).count();
        ensure!(ended == 0, "{ended} connections have ended");
        Ok(())
    }

    pub(crate) fn begin(&self) {
        self.book.begin();
    }

    pub(crate) async fn taken(&self, expected: usize) -> anyhow::Result<Latencies> {
        self.book.taken(expected).await
    }

    pub(crate) async fn close(self) {
        for task in self.reading {
            task.abort();
            let _ = task.await;
        }
    }
}

//! Notifications: from the bus to those who listen here (specification, *Notification channel*).
//!
//! A replica subscribes to a channel once, while somebody here listens to it, and hands each message to them all. Everyone has a queue
//! of a few messages; whoever is so slow that it is full is put out, and holds nobody up. What nobody hears is gone.

mod connection;
mod message;

pub(crate) use connection::{Connection, FULL};
pub use message::{About, NotificationData, NotificationMessage, encoded, test_message};

use axum::extract::ws::Utf8Bytes;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use domain::notification::Channel;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use prometheus::{IntCounter, IntGauge, Registry};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

/// Messages that wait for one who listens.
const QUEUE: usize = 32;
/// A message is no longer; what is longer is none of ours.
const LONGEST: usize = 8 * 1024;
/// How soon it is tried again where the bus cannot be reached.
const SUBSCRIBES_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// How long a new listener waits for the bus before it is told that it listens.
const SUBSCRIBES_WITHIN: Duration = Duration::from_secs(2);

/// What is needed of the bus: core subjects, where nothing is kept.
pub trait Bus: Send + Sync + 'static {
    /// Heard from when this returns. `None`: there is no connection.
    fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>>;
}

/// Who listens here. Cheap to clone.
#[derive(Clone)]
pub struct Notifications(Arc<Parts>);

struct Parts {
    bus: Option<Arc<dyn Bus>>,
    channels: DashMap<Channel, Listeners>,
    next: AtomicU64,
    figures: Figures,
}

/// Of one channel.
struct Listeners {
    here: BTreeMap<u64, Ear>,
    carrier: AbortHandle,
    /// Whether the bus carries it.
    carried: watch::Receiver<bool>,
}

/// Where one who listens is handed a message.
#[derive(Clone)]
struct Ear {
    queue: mpsc::Sender<Utf8Bytes>,
    slow: CancellationToken,
}

#[derive(Clone)]
pub(crate) struct Figures {
    connections: IntGauge,
    /// Messages that were written to a connection.
    forwarded: IntCounter,
    /// Messages that could not be: the connection was gone or too slow.
    write_errors: IntCounter,
}

impl Figures {
    fn register(registry: &Registry) -> prometheus::Result<Self> {
        let connections =
            IntGauge::new("ws_notifications_active_connections", "Connections for notifications to this process.")?;
        registry.register(Box::new(connections.clone()))?;
        let counter = |name, help| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone())).map(|()| counter)
        };
        Ok(Self {
            connections,
            forwarded: counter("ws_notifications_forwarded_messages_total", "Notifications written to a connection.")?,
            write_errors: counter(
                "ws_notifications_write_errors_total",
                "Notifications that a connection which was there could not be given: it was cut, or too slow.",
            )?,
        })
    }
}

impl Notifications {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry, bus: Option<Arc<dyn Bus>>) -> prometheus::Result<Self> {
        let figures = Figures::register(registry)?;
        Ok(Self(Arc::new(Parts { bus, channels: DashMap::new(), next: AtomicU64::default(), figures })))
    }

    pub(crate) fn figures(&self) -> &Figures {
        &self.0.figures
    }

    /// Listens to these channels, until what is returned is dropped. Once it returns, what is said is heard, unless the bus is away.
    pub(crate) async fn listen(&self, channels: Vec<Channel>) -> Listening {
        let (queue, messages) = mpsc::channel(QUEUE);
        let ear = Ear { queue, slow: CancellationToken::new() };
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let listening = Listening { notifications: self.clone(), id, channels, messages, slow: ear.slow.clone() };
        let carried: Vec<_> = listening.channels.iter().map(|channel| self.join(channel, id, ear.clone())).collect();
        let all = async {
            for mut carried in carried {
                let _ = carried.wait_for(|carried| *carried).await;
            }
        };
        let _ = tokio::time::timeout(SUBSCRIBES_WITHIN, all).await;
        listening
    }

    fn join(&self, channel: &Channel, id: u64, ear: Ear) -> watch::Receiver<bool> {
        let mut listeners = self.0.channels.entry(channel.clone()).or_insert_with(|| {
            let (told, carried) = watch::channel(false);
            let carrier = tokio::spawn(self.clone().carry(channel.clone(), told)).abort_handle();
            Listeners { here: BTreeMap::new(), carrier, carried }
        });
        listeners.here.insert(id, ear);
        listeners.carried.clone()
    }

    fn leave(&self, channel: &Channel, id: u64) {
        let Entry::Occupied(mut listeners) = self.0.channels.entry(channel.clone()) else { return };
        listeners.get_mut().here.remove(&id);
        if listeners.get().here.is_empty() {
            listeners.remove().carrier.abort();
        }
    }

    /// Hands on what the bus says on the channel, until nobody here listens to it any more.
    async fn carry(self, channel: Channel, told: watch::Sender<bool>) {
        let Some(bus) = &self.0.bus else { return };
        loop {
            if let Some(mut messages) = bus.listen(channel.subject()).await {
                let _ = told.send(true);
                while let Some(message) = messages.next().await {
                    self.hand_on(&channel, message);
                }
            }
            tokio::time::sleep(SUBSCRIBES_AGAIN_AFTER).await;
        }
    }

    fn hand_on(&self, channel: &Channel, message: Vec<u8>) {
        let length = message.len();
        let Some(text) = Utf8Bytes::try_from(message).ok().filter(|_| length <= LONGEST) else {
            return tracing::warn!(length, "a message on a notification's subject is none");
        };
        let Some(listeners) = self.0.channels.get(channel) else { return };
        for ear in listeners.here.values() {
            match ear.queue.try_send(text.clone()) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(_)) => {
                    self.0.figures.write_errors.inc();
                    ear.slow.cancel();
                }
                // It leaves at this moment.
                Err(mpsc::error::TrySendError::Closed(_)) => {}
            }
        }
    }
}

/// One who listens; they leave when this is dropped.
pub(crate) struct Listening {
    notifications: Notifications,
    id: u64,
    channels: Vec<Channel>,
    messages: mpsc::Receiver<Utf8Bytes>,
    /// It was handed more than it took.
    slow: CancellationToken,
}

impl Drop for Listening {
    fn drop(&mut self) {
        for channel in &self.channels {
            self.notifications.leave(channel, self.id);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

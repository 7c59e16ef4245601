//! Notifications: from the bus to the subscribers of this replica (specification, *Notification channel*).
//!
//! A replica subscribes to a channel once, while it has subscribers for it, and fans each message out to all of them. Each subscriber has a
//! queue of a few messages; one whose queue is full is disconnected and delays no other. A message without a subscriber is dropped.

mod connection;
pub mod delivery;
mod message;
mod switches;

pub(crate) use connection::{Connection, Credential, FULL};
pub use message::{
    ChangedEntity, EventHeader, NotificationData, NotificationMessage, changes_message, encoded, test_message,
};
pub(crate) use switches::Switches;

use axum::extract::ws::Utf8Bytes;
use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use domain::notification::Channel;
use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use persistence::metrics::registered;
use prometheus::{IntCounter, IntGauge, Registry};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;

/// Messages that wait for one subscriber.
const QUEUE: usize = 32;
/// The maximum length of a message; a longer one is not ours.
const MAX_MESSAGE: usize = 8 * 1024;
/// Delay before a retry where the bus cannot be reached.
const RESUBSCRIBE_DELAY: Duration = Duration::from_secs(1);
/// How long a new subscriber waits for the bus before it is reported as subscribed.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(2);

/// What is needed of the bus: core subjects, which store nothing.
pub trait NotificationBus: Send + Sync + 'static {
    /// Subscribed when this returns. `None`: there is no connection.
    fn listen(&self, subject: String) -> BoxFuture<'_, Option<BoxStream<'static, Vec<u8>>>>;
}

/// The subscribers of this replica. Cheap to clone.
#[derive(Clone)]
pub struct Notifications(Arc<Parts>);

struct Parts {
    bus: Option<Arc<dyn NotificationBus>>,
    channels: DashMap<Channel, ChannelSubscribers>,
    next: AtomicU64,
    metrics: NotificationMetrics,
}

/// Of one channel.
struct ChannelSubscribers {
    subscribers: BTreeMap<u64, Subscriber>,
    relay_task: AbortHandle,
    /// Whether the bus carries it.
    subscribed: watch::Receiver<bool>,
}

/// Where a subscriber receives its messages.
#[derive(Clone)]
struct Subscriber {
    queue: mpsc::Sender<Utf8Bytes>,
    slow: CancellationToken,
}

#[derive(Clone)]
pub(crate) struct NotificationMetrics {
    connections: IntGauge,
    /// Messages that were written to a connection.
    forwarded: IntCounter,
    /// Messages that could not be written: the connection was closed or too slow.
    write_errors: IntCounter,
}

impl NotificationMetrics {
    fn register(registry: &Registry) -> prometheus::Result<Self> {
        let connections =
            IntGauge::new("ws_notifications_active_connections", "Connections for notifications to this process.")?;
        registry.register(Box::new(connections.clone()))?;
        let counter = |name, help| registered(registry, IntCounter::new(name, help));
        Ok(Self {
            connections,
            forwarded: counter("ws_notifications_forwarded_messages_total", "Notifications written to a connection.")?,
            write_errors: counter(
                "ws_notifications_write_errors_total",
                "Notifications that could not be written to a connection: it was closed, or too slow.",
            )?,
        })
    }
}

impl Notifications {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry, bus: Option<Arc<dyn NotificationBus>>) -> prometheus::Result<Self> {
        let metrics = NotificationMetrics::register(registry)?;
        Ok(Self(Arc::new(Parts { bus, channels: DashMap::new(), next: AtomicU64::default(), metrics })))
    }

    pub(crate) fn metrics(&self) -> &NotificationMetrics {
        &self.0.metrics
    }

    /// Subscribes to these channels until the returned value is dropped. Once it returns, messages are received, unless the bus is
    /// unreachable.
    pub(crate) async fn listen(&self, channels: Vec<Channel>) -> Subscription {
        let (queue, messages) = mpsc::channel(QUEUE);
        let subscriber = Subscriber { queue, slow: CancellationToken::new() };
        let id = self.0.next.fetch_add(1, Ordering::Relaxed);
        let subscription =
            Subscription { notifications: self.clone(), id, channels, messages, slow: subscriber.slow.clone() };
        let subscribed: Vec<_> =
            subscription.channels.iter().map(|channel| self.join(channel, id, subscriber.clone())).collect();
        let all = async {
            for mut subscribed in subscribed {
                let _ = subscribed.wait_for(|subscribed| *subscribed).await;
            }
        };
        let _ = tokio::time::timeout(SUBSCRIBE_TIMEOUT, all).await;
        subscription
    }

    fn join(&self, channel: &Channel, id: u64, subscriber: Subscriber) -> watch::Receiver<bool> {
        let mut listeners = self.0.channels.entry(channel.clone()).or_insert_with(|| {
            let (set_subscribed, subscribed) = watch::channel(false);
            let relay_task = tokio::spawn(self.clone().relay(channel.clone(), set_subscribed)).abort_handle();
            ChannelSubscribers { subscribers: BTreeMap::new(), relay_task, subscribed }
        });
        listeners.subscribers.insert(id, subscriber);
        listeners.subscribed.clone()
    }

    fn leave(&self, channel: &Channel, id: u64) {
        let Entry::Occupied(mut listeners) = self.0.channels.entry(channel.clone()) else { return };
        listeners.get_mut().subscribers.remove(&id);
        if listeners.get().subscribers.is_empty() {
            listeners.remove().relay_task.abort();
        }
    }

    /// Relays the channel's messages from the bus until this replica has no subscriber for it.
    async fn relay(self, channel: Channel, set_subscribed: watch::Sender<bool>) {
        let Some(bus) = &self.0.bus else { return };
        loop {
            if let Some(mut messages) = bus.listen(channel.subject()).await {
                let _ = set_subscribed.send(true);
                while let Some(message) = messages.next().await {
                    self.broadcast(&channel, message);
                }
            }
            tokio::time::sleep(RESUBSCRIBE_DELAY).await;
        }
    }

    fn broadcast(&self, channel: &Channel, message: Vec<u8>) {
        let length = message.len();
        let Some(text) = Utf8Bytes::try_from(message).ok().filter(|_| length <= MAX_MESSAGE) else {
            return tracing::warn!(length, "a message on a notification's subject is not a notification");
        };
        let Some(listeners) = self.0.channels.get(channel) else { return };
        for subscriber in listeners.subscribers.values() {
            match subscriber.queue.try_send(text.clone()) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Full(_)) => {
                    self.0.metrics.write_errors.inc();
                    subscriber.slow.cancel();
                }
                // It leaves at this moment.
                Err(mpsc::error::TrySendError::Closed(_)) => {}
            }
        }
    }
}

/// One subscriber; dropping it unsubscribes.
pub(crate) struct Subscription {
    notifications: Notifications,
    id: u64,
    channels: Vec<Channel>,
    messages: mpsc::Receiver<Utf8Bytes>,
    /// Its queue overflowed.
    slow: CancellationToken,
}

impl Subscription {
    /// Waits for a notification, at most for `limit`.
    pub(crate) async fn notified_within(&mut self, limit: Duration) {
        let _ = tokio::time::timeout(limit, self.messages.recv()).await;
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        for channel in &self.channels {
            self.notifications.leave(channel, self.id);
        }
    }
}

#[cfg(test)]
mod tests;

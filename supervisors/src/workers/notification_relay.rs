//! Notifies users of events (specification, notification channel): durable consumers deliver the events with notifications to any member
//! with this role, which looks up the audience and publishes on its subjects. Subscribers there receive the notifications
//! (`edge::notifications`); they are not stored.

use super::WorkerDependencies;
use super::outbox_relay::make_streams;
use crate::cluster::bus::Bus;
use crate::entity_environment::EntityEnvironment;
use crate::supervisor::{WorkerTask, task};
use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::{self, AckKind, Message};
use chrono::{DateTime, TimeDelta, Utc};
use domain::allocation::Allocation;
use domain::announcement::Announcement;
use domain::authz::PlatformRole;
use domain::billing_account::Holder;
use domain::node::Node;
use domain::notification::{Audience, Channel, Notification, NotificationDetails, live_subjects};
use domain::payment::Payment;
use domain::terminal_session::TerminalSession;
use domain::{AllocationId, EntityRef, Event, Machine, UserId};
use edge::notifications::{EventHeader, encoded};
use futures::StreamExt;
use futures::stream::select_all;
use persistence::Reads;
use persistence::outage_log::RetryLog;
use persistence::queries::BindingFilter;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// Events whose audience is looked up at once. Their notifications are published in order all the same.
const MAX_CONCURRENT: usize = 64;
/// How often an event whose notifications cannot be published is delivered, and after which pause.
const MAX_DELIVERIES: i64 = 5;
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Older events are dropped: the relay or NATS was down.
const MAX_EVENT_AGE: TimeDelta = TimeDelta::minutes(5);
/// Operators in one page of the bindings.
const PAGE_SIZE: u32 = 200;

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    Ok(task(&parts.notifier, Notifier::run))
}

/// Publishes notifications of events.
#[derive(Clone)]
pub struct Notifier {
    pub reads: Reads,
    pub environment: Arc<EntityEnvironment>,
    pub bus: Bus,
}

/// A notification and the channel it is published on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AddressedNotification {
    pub(super) channel: Channel,
    pub(super) data: NotificationDetails,
}

/// An event as the relay of the outbox published it.
#[derive(Deserialize)]
pub(super) struct PublishedEvent {
    pub(super) id: Uuid,
    #[serde(rename = "type")]
    pub(super) kind: String,
    subject: String,
    pub(super) time: DateTime<Utc>,
    pub(super) correlationid: String,
    #[serde(deserialize_with = "read_event")]
    pub(super) data: Event,
}

/// Events are tagged: their content is checked against what was sent.
fn read_event<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Event, D::Error> {
    let sent = serde_json::Value::deserialize(deserializer)?;
    strict_json::tagged::from_value(sent).map_err(serde::de::Error::custom)
}

impl PublishedEvent {
    pub(super) fn header(&self) -> EventHeader<'_> {
        EventHeader {
            id: self.id,
            kind: &self.kind,
            subject: &self.subject,
            time: self.time,
            correlation_id: &self.correlationid,
        }
    }
}

/// The event in a message. `None`: it is of a newer release, whose members publish its notifications.
pub(super) fn parse_event(message: &Message) -> Option<PublishedEvent> {
    let read = strict_json::from_slice(&message.payload);
    read.inspect_err(|error| tracing::debug!(%error, subject = %message.subject, "an event is not understood here"))
        .ok()
}

/// The configuration of a durable consumer of events with notifications, from now on.
pub(super) fn consumer_config(name: String, subjects: &[&str], tries: i64, ack_wait: Duration) -> pull::Config {
    pull::Config {
        durable_name: Some(name),
        ack_policy: AckPolicy::Explicit,
        deliver_policy: DeliverPolicy::New,
        ack_wait,
        max_deliver: tries,
        max_ack_pending: 4096,
        filter_subjects: subjects.iter().map(|subject| (*subject).to_owned()).collect(),
        ..pull::Config::default()
    }
}

impl Notifier {
    /// Publishes notifications until the connection to NATS is closed for good.
    ///
    /// # Errors
    /// Where a consumer cannot be made or ends.
    pub async fn run(self) -> anyhow::Result<()> {
        static RETRIES: RetryLog = RetryLog::new("read what clients are notified of");
        let context = jetstream::new(self.bus.client().clone());
        make_streams(&context, self.bus.stream_copies()).await?;
        let mut streams = Vec::new();
        for (stream, subjects) in live_subjects() {
            let name = format!("{}-notifications", stream.name().to_lowercase());
            let config = consumer_config(name, &subjects, MAX_DELIVERIES, Duration::from_secs(10));
            let consumer = context.get_stream(stream.name()).await?.create_consumer(config).await?;
            let batches = consumer.stream().max_messages_per_batch(MAX_CONCURRENT).heartbeat(Duration::from_secs(5));
            streams.push(batches.messages().await?);
        }
        self.bus.first_heartbeat().await;
        let working = select_all(streams).map(|message| async { anyhow::Ok(self.resolve(message?).await) });
        let mut working = working.buffered(MAX_CONCURRENT);
        while let Some(addressed) = working.next().await {
            let (message, done) = addressed?;
            let acknowledge = match done {
                Ok(Some((event, notifications))) => {
                    RETRIES.succeeded();
                    self.publish(&message, &event, notifications).await
                }
                Ok(None) => AckKind::Term,
                Err(error) => {
                    RETRIES.failed(&format!("{}: {error:#}", message.subject));
                    AckKind::Nak(Some(RETRY_AFTER))
                }
            };
            // A lost acknowledgement costs a repetition, which readers recognize by its id.
            if let Err(error) = message.ack_with(acknowledge).await {
                tracing::debug!(%error, "could not acknowledge an event");
            }
        }
        anyhow::bail!("the consumers ended")
    }

    async fn resolve(
        &self,
        message: Message,
    ) -> (Message, anyhow::Result<Option<(PublishedEvent, Vec<AddressedNotification>)>>) {
        if !self.bus.is_members_event(&message) {
            return (message, Ok(None));
        }
        let Some(event) = parse_event(&message) else { return (message, Ok(None)) };
        if Utc::now() - event.time > MAX_EVENT_AGE {
            return (message, Ok(None));
        }
        let notifications = self.notifications_for(&event.data).await;
        (message, notifications.map(|notifications| Some((event, notifications))))
    }

    /// The notifications of an event with their channels. What a recipient has switched off is left out where the recipient is known: at
    /// the subscriber's connection, or in the queue of an endpoint.
    pub(super) async fn notifications_for(&self, event: &Event) -> anyhow::Result<Vec<AddressedNotification>> {
        let mut notifications = Vec::new();
        for notice in event.notifications() {
            let Notification { audience, data } = notice;
            notifications.extend(self.address(audience, data).await?);
        }
        Ok(notifications)
    }

    async fn address(
        &self,
        audience: Audience,
        data: NotificationDetails,
    ) -> anyhow::Result<Vec<AddressedNotification>> {
        let to_user =
            |user: UserId, data: NotificationDetails| AddressedNotification { channel: Channel::User(user), data };
        Ok(match audience {
            Audience::Holder(Holder::User(id)) => vec![to_user(id, data)],
            Audience::Holder(Holder::Org(id)) => vec![AddressedNotification { channel: Channel::Org(id), data }],
            Audience::PaymentHolder(id) => match self.read::<Payment>(id.0).await?.map(|payment| payment.holder) {
                Some(Holder::User(id)) => vec![to_user(id, data)],
                Some(Holder::Org(id)) => vec![AddressedNotification { channel: Channel::Org(id), data }],
                None => Vec::new(),
            },
            Audience::Renter(id) => self.renter(id).await?.map(|user| to_user(user, data)).into_iter().collect(),
            Audience::User(id) => vec![to_user(id, data)],
            Audience::SessionUser(id) => {
                let session = self.read::<TerminalSession>(id.0).await?;
                session.map(|session| to_user(session.owner.user_id, data)).into_iter().collect()
            }
            Audience::NodeRenters(id) => {
                let node = self.read::<Node>(id.0).await?;
                let mut notifications = Vec::new();
                for allocation in node.iter().flat_map(|node| node.tenancy.holds.keys()) {
                    let data = NotificationDetails { allocation_id: Some(*allocation), ..data.clone() };
                    notifications.extend(self.renter(*allocation).await?.map(|user| to_user(user, data)));
                }
                notifications
            }
            Audience::Operators => {
                let operators = self.operators().await?;
                operators.into_iter().map(|user| to_user(user.into(), data.clone())).collect()
            }
            Audience::AllClients(id) => {
                let announcement = self.read::<Announcement>(id.0).await?;
                let details = |it: Announcement| NotificationDetails {
                    severity: Some(it.severity),
                    message: Some(it.message),
                    ..data
                };
                announcement
                    .map(|it| AddressedNotification { channel: Channel::Broadcast, data: details(it) })
                    .into_iter()
                    .collect()
            }
        })
    }

    async fn renter(&self, allocation: AllocationId) -> anyhow::Result<Option<UserId>> {
        Ok(self.read::<Allocation>(allocation.0).await?.map(|allocation| allocation.asked.owner.user_id))
    }

    /// By the bindings of this moment: a subject whose binding was revoked is not notified any more.
    async fn operators(&self) -> anyhow::Result<Vec<String>> {
        let filter = BindingFilter { role: Some(PlatformRole::PlatformOperations), ..BindingFilter::default() };
        let (mut operators, mut after) = (Vec::new(), None);
        loop {
            let page = self.reads.bindings(&filter, after, PAGE_SIZE).await?;
            operators.extend(page.items.into_iter().filter(|row| row.is_intact).map(|row| row.subject));
            after = page.next;
            if after.is_none() {
                return Ok(operators);
            }
        }
    }

    async fn read<M: Machine>(&self, id: Uuid) -> anyhow::Result<Option<M>> {
        let snapshot = self.reads.snapshot(EntityRef { kind: M::KIND, id }).await?;
        Ok(snapshot.map(|snapshot| serde_json::from_str(&snapshot.body)).transpose()?)
    }

    async fn publish(
        &self,
        message: &Message,
        event: &PublishedEvent,
        notifications: Vec<AddressedNotification>,
    ) -> AckKind {
        static RETRIES: RetryLog = RetryLog::new("publish notifications");
        for AddressedNotification { channel, data } in notifications {
            let payload = encoded(&event.header(), &channel, &data);
            if !self.bus.notify(channel.subject(), None, headers(message), payload.into_bytes()).await {
                RETRIES.failed("NATS does not take it");
                return AckKind::Nak(Some(RETRY_AFTER));
            }
            RETRIES.succeeded();
        }
        AckKind::Ack
    }
}

/// The headers that every message passes on.
fn headers(of: &Message) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for name in ["x-correlation-id", "traceparent", "tracestate"] {
        if let Some(value) = of.headers.as_ref().and_then(|headers| headers.get(name)) {
            headers.insert(name, value.clone());
        }
    }
    headers
}

//! Tells people of events, as the specification's notification channel wants it: durable consumers bring the events that are told of to any
//! member with this role, which looks up whom they concern and says it on the subjects of those. Whoever listens there hears it
//! (`edge::notifications`); nobody keeps it.

use super::relay::make_streams;
use crate::cluster::bus::Bus;
use crate::world::Here;
use actors::ports::World as _;
use async_nats::HeaderMap;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::{self, AckKind, Message};
use chrono::{DateTime, TimeDelta, Utc};
use domain::allocation::Allocation;
use domain::announcement::Announcement;
use domain::authz::PlatformRole;
use domain::billing_account::Holder;
use domain::node::Node;
use domain::notification::{Audience, Channel, Data, Notice, TOLD};
use domain::payment::Payment;
use domain::policy::Scopes;
use domain::terminal_session::TerminalSession;
use domain::{AllocationId, EntityRef, Event, Machine};
use edge::notifications::{About, encoded};
use futures::StreamExt;
use futures::stream::select_all;
use persistence::Reads;
use persistence::read::BindingFilter;
use serde::Deserialize;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// Events whose audience is looked up at once. They are told of in their order all the same.
const AT_ONCE: usize = 64;
/// How often an event is tried again that cannot be told of, and after how long.
const TRIES: i64 = 5;
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// What is older is no news: the relay, or the bus, was away.
const NEWS_FOR: TimeDelta = TimeDelta::minutes(5);
/// Operators in one page of the bindings.
const PAGE: u32 = 200;

/// Tells people of events.
#[derive(Clone)]
pub struct Notifier {
    pub reads: Reads,
    pub here: Arc<Here>,
    pub bus: Bus,
}

/// What is to be said on a subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) channel: Channel,
    pub(super) data: Data,
}

/// An event as the relay of the outbox published it.
#[derive(Deserialize)]
pub(super) struct Told {
    pub(super) id: Uuid,
    #[serde(rename = "type")]
    pub(super) kind: String,
    subject: String,
    pub(super) time: DateTime<Utc>,
    pub(super) correlationid: String,
    pub(super) data: Event,
}

impl Told {
    pub(super) fn about(&self) -> About<'_> {
        About {
            id: self.id,
            kind: &self.kind,
            subject: &self.subject,
            time: self.time,
            correlation_id: &self.correlationid,
        }
    }
}

/// The event in a message. `None`: it is of a newer member, whose own kind tells of it.
pub(super) fn told_in(message: &Message) -> Option<Told> {
    let read = serde_json::from_slice(&message.payload);
    read.inspect_err(|error| tracing::debug!(%error, subject = %message.subject, "an event is not understood here"))
        .ok()
}

/// A durable consumer of events that are told of from now on.
pub(super) fn durable(name: String, subjects: &[&str], tries: i64, ack_wait: Duration) -> pull::Config {
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
    /// Tells of events until the bus is gone for good.
    ///
    /// # Errors
    /// Where a consumer cannot be made or ends.
    pub async fn run(self) -> anyhow::Result<()> {
        let context = jetstream::new(self.bus.client().clone());
        make_streams(&context).await?;
        let mut streams = Vec::new();
        for (stream, subjects) in TOLD {
            let name = format!("{}-notifications", stream.name().to_lowercase());
            let config = durable(name, subjects, TRIES, Duration::from_secs(10));
            let consumer = context.get_stream(stream.name()).await?.create_consumer(config).await?;
            let batches = consumer.stream().max_messages_per_batch(AT_ONCE).heartbeat(Duration::from_secs(5));
            streams.push(batches.messages().await?);
        }
        let working = select_all(streams).map(|message| async { anyhow::Ok(self.addressed(message?).await) });
        let mut working = working.buffered(AT_ONCE);
        while let Some(addressed) = working.next().await {
            let (message, done) = addressed?;
            let acknowledge = match done {
                Ok(Some((told, words))) => self.say(&message, &told, words).await,
                Ok(None) => AckKind::Term,
                Err(error) => {
                    tracing::warn!(%error, subject = %message.subject, "nobody can be told of an event yet");
                    AckKind::Nak(Some(AGAIN_AFTER))
                }
            };
            // One that is lost costs a repetition, which its readers know by its id.
            if let Err(error) = message.ack_with(acknowledge).await {
                tracing::debug!(%error, "could not acknowledge an event");
            }
        }
        anyhow::bail!("the consumers ended")
    }

    async fn addressed(&self, message: Message) -> (Message, anyhow::Result<Option<(Told, Vec<Word>)>>) {
        if !self.bus.is_members_event(&message) {
            return (message, Ok(None));
        }
        let Some(told) = told_in(&message) else { return (message, Ok(None)) };
        if Utc::now() - told.time > NEWS_FOR {
            return (message, Ok(None));
        }
        let words = self.words(&told.data).await;
        (message, words.map(|words| Some((told, words))))
    }

    /// What is to be said of the event to whom.
    pub(super) async fn words(&self, event: &Event) -> anyhow::Result<Vec<Word>> {
        let mut words = Vec::new();
        for notice in Notice::of(event) {
            let Notice { audience, switch, data } = notice;
            let told = self.whom(audience, data).await?;
            let is_on = |word: &Word| {
                switch.is_none_or(|key| self.here.policy().is_on(key, &scopes_of(&word.channel), self.here.now()))
            };
            words.extend(told.into_iter().filter(is_on));
        }
        Ok(words)
    }

    async fn whom(&self, audience: Audience, data: Data) -> anyhow::Result<Vec<Word>> {
        let to_user = |user: String, data: Data| Word { channel: Channel::User(user), data };
        Ok(match audience {
            Audience::Holder(Holder::User(id)) => vec![to_user(id, data)],
            Audience::Holder(Holder::Org(id)) => vec![Word { channel: Channel::Org(id), data }],
            Audience::PaidInto(id) => match self.read::<Payment>(id.0).await?.map(|payment| payment.holder) {
                Some(Holder::User(id)) => vec![to_user(id, data)],
                Some(Holder::Org(id)) => vec![Word { channel: Channel::Org(id), data }],
                None => Vec::new(),
            },
            Audience::Renter(id) => self.renter(id).await?.map(|user| to_user(user, data)).into_iter().collect(),
            Audience::UserOf(id) => {
                let session = self.read::<TerminalSession>(id.0).await?;
                session.map(|session| to_user(session.owner.user_id, data)).into_iter().collect()
            }
            Audience::RentersOn(id) => {
                let node = self.read::<Node>(id.0).await?;
                let mut words = Vec::new();
                for allocation in node.iter().flat_map(|node| node.holds.keys()) {
                    let data = Data { allocation_id: Some(*allocation), ..data.clone() };
                    words.extend(self.renter(*allocation).await?.map(|user| to_user(user, data)));
                }
                words
            }
            Audience::Operators => {
                let operators = self.operators().await?;
                operators.into_iter().map(|user| to_user(user, data.clone())).collect()
            }
            Audience::Everybody(id) => {
                let announcement = self.read::<Announcement>(id.0).await?;
                let said = |it: Announcement| Data { severity: Some(it.severity), message: Some(it.message), ..data };
                announcement.map(|it| Word { channel: Channel::Broadcast, data: said(it) }).into_iter().collect()
            }
        })
    }

    async fn renter(&self, allocation: AllocationId) -> anyhow::Result<Option<String>> {
        Ok(self.read::<Allocation>(allocation.0).await?.map(|allocation| allocation.asked.user_id))
    }

    /// As the bindings are at this moment: who was revoked hears nothing more.
    async fn operators(&self) -> anyhow::Result<Vec<String>> {
        let filter = BindingFilter { role: Some(PlatformRole::PlatformOperations), ..BindingFilter::default() };
        let (mut operators, mut after) = (Vec::new(), None);
        loop {
            let page = self.reads.bindings(&filter, after, PAGE).await?;
            operators.extend(page.items.into_iter().map(|row| row.subject));
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

    async fn say(&self, message: &Message, told: &Told, words: Vec<Word>) -> AckKind {
        for Word { channel, data } in words {
            let said = encoded(&told.about(), &channel, &data);
            if !self.bus.notify(channel.subject(), None, headers(message), said.into_bytes()).await {
                tracing::warn!("a notification could not be published");
                return AckKind::Nak(Some(AGAIN_AFTER));
            }
        }
        AckKind::Ack
    }
}

/// Those that every message carries on.
fn headers(of: &Message) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for name in ["x-correlation-id", "traceparent", "tracestate"] {
        if let Some(value) = of.headers.as_ref().and_then(|headers| headers.get(name)) {
            headers.insert(name, value.clone());
        }
    }
    headers
}

/// In which the switches of who is told are resolved.
fn scopes_of(channel: &Channel) -> Scopes {
    match channel {
        Channel::User(id) => Scopes { user_id: Some(id.clone()), ..Scopes::default() },
        Channel::Org(id) => Scopes { org_id: Some(id.clone()), ..Scopes::default() },
        Channel::Broadcast => Scopes::global(),
    }
}

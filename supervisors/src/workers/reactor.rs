//! Events become commands: what follows from an event is asked of its machine, under the event's id, so that it happens once.
//!
//! Two ways lead here. JetStream's durable consumers bring fresh events to any member; and the owner of a shard polls its outbox for rows
//! whose effect has not been committed after a while, so that losing all of NATS loses nothing but time.

use super::pace::{self, Pacing};
use super::payments::errands::Errands;
use super::payments::webhooks::Webhooks;
use super::provisioning::Placer;
use super::relay::make_streams;
use crate::cluster::bus::Bus;
use actors::place::id_of_name;
use actors::{AskError, Asked, CommandKey, Directory, Host};
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::{self, AckKind, Message};
use chrono::{TimeDelta, Utc};
use domain::allocation::Allocation;
use domain::authz::authorize;
use domain::billing_account::BillingAccount;
use domain::event::{Reaction, Stream};
use domain::machine::Command as _;
use domain::node::Node;
use domain::payment::Payment;
use domain::tenant::Tenant;
use domain::terminal_session::TerminalSession;
use domain::{Action, Event, EventId, Kind, Machine, Permit, Principal};
use futures::{FutureExt, StreamExt};
use persistence::{Outbox, OutboxRow, Reads};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use telemetry::Trace;
use tokio::sync::mpsc;
use tracing::{Instrument as _, error_span, field};

/// Events that are worked on at once.
const AT_ONCE: usize = 256;

/// How long a command of an event may take. An event that has to wait comes again; one that is waited for takes the place of others.
const PATIENCE: TimeDelta = TimeDelta::seconds(2);

/// How long the owner of a shard is looked for. During a takeover there is none for seconds, and the other shards' events go on.
const SEEKS_FOR: TimeDelta = TimeDelta::milliseconds(200);

/// How often the owner of a shard looks for events without effect, and how many it takes from each shard.
const TURN: Duration = Duration::from_millis(250);
const IN_ONE_SHARD: u32 = 64;

/// After this an event without effect is taken up by the poll. JetStream has usually brought it within a millisecond.
const ORPHANED: Duration = Duration::from_secs(3);

/// The same while NATS cannot be reached: then the poll is the only way.
const ORPHANED_WITHOUT_BUS: Duration = Duration::from_millis(100);

/// How long an event that cannot be read is passed over. A newer release may have settled it by then, or this one been replaced.
const FOREIGN_FOR: Duration = Duration::from_secs(60);

/// Carries out what follows from events.
#[derive(Clone)]
pub struct Reactor {
    pub directory: Directory,
    pub reads: Reads,
    pub outbox: Outbox,
    pub placer: Arc<Placer>,
    /// Where a payment processor is configured.
    pub errands: Option<Errands>,
    pub webhooks: Option<Webhooks>,
    pub permit: Permit,
}

/// An event on its way to its effect.
#[derive(Clone, Debug)]
pub struct Heard {
    pub id: EventId,
    pub event: Event,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    pub tracestate: Option<String>,
}

/// What became of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Its effect is durable, or there is none: the outbox row is gone.
    Settled,
    /// Not yet; it stays in the outbox and is tried again.
    Later { why: String },
}

impl Reactor {
    /// # Errors
    /// Never in practice: a worker may advance the machines.
    pub fn new(
        directory: Directory,
        reads: Reads,
        outbox: Outbox,
        placer: Arc<Placer>,
        errands: Option<Errands>,
        webhooks: Option<Webhooks>,
        worker: &str,
    ) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system(worker), Action::Advance)?;
        Ok(Self { directory: directory.seeking_for(SEEKS_FOR), reads, outbox, placer, errands, webhooks, permit })
    }

    /// Asks what follows from an event, in the scope of the request that led to it.
    pub async fn react(&self, heard: &Heard) -> Effect {
        let trace = heard.traceparent.as_deref().and_then(Trace::parse).map(Trace::child);
        let span = error_span!(
            "event",
            correlation_id = heard.correlation_id,
            trace_id = trace.map(|trace| field::display(trace.trace_id())),
            span_id = trace.map(|trace| field::display(trace.span_id())),
            otel.parent = trace.and_then(Trace::parent_to_export),
            resource_name = %heard.event.about(),
            event.id = %heard.id,
            event.subject = heard.event.subject(),
        );
        // What follows belongs below this span.
        let heard = Heard { traceparent: trace.map(Trace::traceparent), ..heard.clone() };
        async {
            let effect = self.follow(&heard).await;
            if let Effect::Later { why } = &effect {
                tracing::info!(why, "an event's effect has to wait");
            }
            effect
        }
        .instrument(span)
        .await
    }

    async fn follow(&self, heard: &Heard) -> Effect {
        match heard.event.reaction() {
            // The row goes when the broker has acknowledged the event (`workers::relay`).
            Reaction::Nothing => Effect::Settled,
            Reaction::Place(allocation_id) => self.placer.place(self, heard, allocation_id).await,
            Reaction::Node(id, command) => self.carry_out::<Node>(heard, id.0, command).await,
            Reaction::Allocation(id, command) => self.carry_out::<Allocation>(heard, id.0, command).await,
            Reaction::Terminal(id, command) => self.carry_out::<TerminalSession>(heard, id.0, command).await,
            Reaction::ResolveLogins { allocation_id, user_id } => {
                super::logins::resolve(self, heard, allocation_id, &user_id).await
            }
            Reaction::TellLogins { allocation_id, node_id } => {
                super::logins::tell(self, heard, allocation_id, node_id).await
            }
            Reaction::CloseTerminals { allocation_id, user_id } => {
                super::terminals::close(self, heard, allocation_id, &user_id).await
            }
            Reaction::CutTerminals { node_id } => super::terminals::cut(self, heard, node_id).await,
            Reaction::Billing { holder, command } => {
                let account = id_of_name(Kind::BillingAccount, &holder.to_string());
                self.carry_out::<BillingAccount>(heard, account, command).await
            }
            Reaction::Payment(id, command) => self.carry_out::<Payment>(heard, id.0, command).await,
            Reaction::AskProcessor(errand) => match &self.errands {
                Some(errands) => errands.run(self, heard, &errand).await,
                None => self.drop_for_want_of_a_processor(heard).await,
            },
            Reaction::HeedProcessor(id) => match &self.webhooks {
                Some(webhooks) => webhooks.heed(self, heard, id).await,
                None => self.drop_for_want_of_a_processor(heard).await,
            },
            Reaction::Tenant { user_id, command } => {
                self.carry_out::<Tenant>(heard, id_of_name(Kind::Tenant, &user_id), command).await
            }
        }
    }

    /// Asks the one command that carries the event out; its commit takes the outbox row with it.
    pub(super) async fn carry_out<M: Machine>(&self, heard: &Heard, id: uuid::Uuid, command: M::Command) -> Effect {
        let asked = self.asked(heard).once(CommandKey::of_event(heard.id, command.name()));
        match self.directory.ask::<M>(&self.permit, id, command, asked).await {
            Ok(answered) if answered.written => Effect::Settled,
            // Carried out before, or nothing had to change: nothing else takes the row away.
            Ok(_) | Err(AskError::AlreadyDone) => self.settle(heard).await,
            Err(AskError::Rejected(rejection)) => {
                tracing::warn!("what follows from the event was refused: {rejection}");
                self.settle(heard).await
            }
            Err(error) => Effect::Later { why: error.to_string() },
        }
    }

    pub(super) fn asked(&self, heard: &Heard) -> Asked {
        Asked::new(&self.permit, heard.correlation_id.clone(), Utc::now() + PATIENCE)
            .traced(heard.traceparent.clone(), heard.tracestate.clone())
            // Sagas under way come before new requests: they are what frees capacity.
            .urgently()
    }

    /// Whoever waits for it says it again, ever more seldom, each time in a row of its own: rows that waited would be more and more.
    async fn drop_for_want_of_a_processor(&self, heard: &Heard) -> Effect {
        tracing::warn!("no payment processor is configured: what a payment or an event wants of it has to wait");
        self.settle(heard).await
    }

    pub(super) async fn settle(&self, heard: &Heard) -> Effect {
        match self.outbox.settle(&[heard.id]).await {
            Ok(_) => Effect::Settled,
            Err(error) => Effect::Later { why: error.to_string() },
        }
    }

    /// Works on the events of `stream`, with every other member that does.
    ///
    /// # Errors
    /// Where the consumer cannot be made or ends.
    pub async fn consume(&self, bus: &Bus, stream: Stream) -> anyhow::Result<()> {
        let context = jetstream::new(bus.client().clone());
        make_streams(&context).await?;
        let stream_of = context.get_stream(stream.name()).await?;
        let name = consumer_name(stream);
        let config = pull::Config {
            durable_name: Some(name.clone()),
            ack_policy: AckPolicy::Explicit,
            deliver_policy: DeliverPolicy::All,
            ack_wait: Duration::from_secs(30),
            // The outbox gives up on nothing; redelivery is only the quicker way.
            max_deliver: 20,
            max_ack_pending: 4096,
            ..pull::Config::default()
        };
        let consumer: PullConsumer = stream_of.get_or_create_consumer(&name, config).await?;
        let messages =
            consumer.stream().max_messages_per_batch(AT_ONCE).heartbeat(Duration::from_secs(5)).messages().await?;
        let mut working =
            messages.map(|message| async move { self.one(bus, message?).await }).buffer_unordered(AT_ONCE);
        while let Some(done) = working.next().await {
            done?;
        }
        anyhow::bail!("the consumer ended")
    }

    async fn one(&self, bus: &Bus, message: Message) -> anyhow::Result<()> {
        // What no member has published, as far as this one can tell: where it is an event all the same, its row is found by the poll.
        let heard = if bus.is_members_event(&message) { heard_in(&message) } else { None };
        let acknowledge = match heard {
            // Not ours to understand: a newer member's event. Its outbox row keeps it safe.
            None => AckKind::Term,
            Some(heard) => match self.react(&heard).await {
                Effect::Settled => AckKind::Ack,
                Effect::Later { .. } => AckKind::Nak(Some(Duration::from_millis(250))),
            },
        };
        // An acknowledgement that is lost costs a redelivery, which does nothing twice.
        if let Err(error) = message.ack_with(acknowledge).await {
            tracing::warn!(%error, "could not acknowledge an event");
        }
        Ok(())
    }

    /// Takes up rows of this member's shards whose effect is overdue.
    ///
    /// # Errors
    /// Never; what fails is tried again at the next turn.
    pub async fn poll(&self, bus: &Bus, host: &Arc<Host>, relay: &mpsc::Sender<OutboxRow>) -> anyhow::Result<()> {
        let foreign: Arc<Mutex<Foreign>> = Arc::default();
        let look = |passed_over: Vec<EventId>| {
            let (reactor, bus, host, foreign) = (self.clone(), bus.clone(), Arc::clone(host), Arc::clone(&foreign));
            async move { reactor.overdue(&bus, &host, passed_over, &foreign).await }.boxed()
        };
        let work = |row: OutboxRow| {
            let (reactor, bus, relay) = (self.clone(), bus.clone(), relay.clone());
            async move { reactor.take_up(row, &bus, &relay).await }
        };
        // What a look finds is bounded by shard: how many there are says nothing.
        let pacing = Pacing { each: TURN, at_once: AT_ONCE, full: usize::MAX };
        pace::run(pacing, look, work).await;
        Ok(())
    }

    async fn overdue(
        &self,
        bus: &Bus,
        host: &Host,
        mut passed_over: Vec<EventId>,
        foreign: &Mutex<Foreign>,
    ) -> Vec<(EventId, OutboxRow)> {
        passed_over.extend(lock(foreign).passed_over(Instant::now()));
        let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        let age = if bus.is_connected() { ORPHANED } else { ORPHANED_WITHOUT_BUS };
        match self.reads.orphans(&shards, age, &passed_over, IN_ONE_SHARD).await {
            Ok(orphans) => {
                lock(foreign).note(orphans.foreign, Instant::now());
                orphans.rows.into_iter().map(|row| (row.id, row)).collect()
            }
            Err(error) => {
                tracing::warn!(error = %error, "could not look for orphaned events");
                Vec::new()
            }
        }
    }

    /// Whether the row is gone by now.
    async fn take_up(&self, row: OutboxRow, bus: &Bus, relay: &mpsc::Sender<OutboxRow>) -> bool {
        if row.event.reaction() == Reaction::Nothing {
            if bus.is_connected() {
                // Full: it is found again, as it is where the broker does not acknowledge it.
                let _ = relay.try_send(row);
            }
            return false;
        }
        let heard = Heard {
            id: row.id,
            event: row.event,
            correlation_id: row.correlation_id,
            traceparent: row.traceparent,
            tracestate: row.tracestate,
        };
        match self.react(&heard).await {
            Effect::Settled => true,
            Effect::Later { why } => {
                tracing::warn!(
                    correlation_id = heard.correlation_id, resource_name = %heard.event.about(), event.id = %heard.id,
                    event.subject = heard.event.subject(), why, "an event's effect is overdue"
                );
                false
            }
        }
    }
}

/// Events that this release cannot read: they are looked at now and then, and hide nothing that comes after them.
#[derive(Default)]
struct Foreign {
    ids: BTreeSet<EventId>,
    since: Option<Instant>,
}

impl Foreign {
    fn passed_over(&mut self, now: Instant) -> impl Iterator<Item = EventId> {
        if self.since.is_some_and(|since| now.duration_since(since) >= FOREIGN_FOR) {
            *self = Self::default();
        }
        self.ids.iter().copied()
    }

    fn note(&mut self, ids: Vec<EventId>, now: Instant) {
        if !ids.is_empty() {
            self.since.get_or_insert(now);
            self.ids.extend(ids);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The durable consumer that turns a stream's events into commands.
#[must_use]
pub fn consumer_name(stream: Stream) -> String {
    format!("{}-reactions", stream.name().to_lowercase())
}

fn heard_in(message: &Message) -> Option<Heard> {
    #[derive(serde::Deserialize)]
    struct CloudEvent {
        id: EventId,
        correlationid: String,
        data: Event,
    }
    let event: CloudEvent = match serde_json::from_slice(&message.payload) {
        Ok(event) => event,
        Err(error) => {
            tracing::warn!(%error, subject = %message.subject, "a message is no event that is understood here");
            return None;
        }
    };
    let header = |name: &str| message.headers.as_ref()?.get(name).map(|value| value.as_str().to_owned());
    Some(Heard {
        id: event.id,
        event: event.data,
        correlation_id: event.correlationid,
        traceparent: header("traceparent"),
        tracestate: header("tracestate"),
    })
}

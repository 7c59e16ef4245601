//! Reactions: an event becomes a command for an entity, under the event's id, so that it is applied once.
//!
//! Events arrive in two ways. JetStream's durable consumers, which are here, deliver fresh events to any member; and the owner of a shard polls
//! its outbox for events whose reaction is overdue ([`super::orphans`]), so that a loss of NATS costs nothing but time.

use super::WorkerDependencies;
use super::bare_metal::BareMetalWorker;
use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use super::outbox_relay::make_streams;
use super::payments::processor_calls::ProcessorCalls;
use super::payments::processor_events::ProcessorEventHandler;
use super::provisioning::Placer;
use crate::cluster::bus::Bus;
use crate::supervisor::{WorkerTask, task};
use actors::sharding::id_of_name;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::{self, AckKind, Message};
use domain::allocation::Allocation;
use domain::choreography::Reaction;
use domain::event::Stream;
use domain::node::Node;
use domain::payment::Payment;
use domain::rollout::Rollout;
use domain::state_machine::RequestOrigin;
use domain::tenant::Tenant;
use domain::terminal_session::TerminalSession;
use domain::{BillingAccountId, EntityKind, Event, EventId};
use futures::StreamExt;
use std::sync::Arc;
use std::time::Duration;
use telemetry::SpanContext;
use tracing::{Instrument as _, error_span, field};

/// Events that are processed at once.
pub(super) const MAX_CONCURRENT: usize = 256;

/// The consumer of a stream.
pub(super) fn start_consumer(parts: &WorkerDependencies, stream: Stream) -> anyhow::Result<WorkerTask> {
    let shared = (parts.reactor.clone(), parts.stages.membership.bus.clone());
    Ok(task(&shared, move |(reactor, bus)| async move { reactor.consume(&bus, stream).await }))
}

/// Performs the reactions to events.
#[derive(Clone)]
pub struct Reactor {
    pub(super) context: ReactionContext,
    placer: Arc<Placer>,
    bare_metal: BareMetalWorker,
    /// `None` where no payment processor is configured.
    processor_calls: Option<ProcessorCalls>,
    processor_events: Option<ProcessorEventHandler>,
}

impl Reactor {
    #[must_use]
    pub const fn new(
        context: ReactionContext,
        placer: Arc<Placer>,
        bare_metal: BareMetalWorker,
        processor_calls: Option<ProcessorCalls>,
        processor_events: Option<ProcessorEventHandler>,
    ) -> Self {
        Self { context, placer, bare_metal, processor_calls, processor_events }
    }

    /// Performs the reaction to an event, in the trace of the request that led to it.
    pub async fn react(&self, delivery: &EventDelivery) -> Disposition {
        let trace = delivery.origin.traceparent.as_deref().and_then(SpanContext::parse).map(SpanContext::child);
        let span = error_span!(
            "event",
            correlation_id = delivery.origin.correlation_id,
            trace_id = trace.map(|trace| field::display(trace.trace_id())),
            span_id = trace.map(|trace| field::display(trace.span_id())),
            otel.parent = trace.and_then(SpanContext::parent_to_export),
            resource_name = %delivery.event.about(),
            event.id = %delivery.id,
            event.subject = delivery.event.subject(),
        );
        // The commands of the reaction belong below this span.
        let origin = RequestOrigin { traceparent: trace.map(SpanContext::traceparent), ..delivery.origin.clone() };
        let delivery = EventDelivery { origin, ..delivery.clone() };
        async {
            let disposition = self.dispatch(&delivery).await;
            if let Disposition::Later { why } = &disposition {
                tracing::info!(why, "an event's effect has to wait");
            }
            disposition
        }
        .instrument(span)
        .await
    }

    async fn dispatch(&self, delivery: &EventDelivery) -> Disposition {
        let context = &self.context;
        match delivery.event.reaction() {
            // The relay deletes the row when the broker has acknowledged the event (`workers::outbox_relay`).
            Reaction::Nothing => Disposition::Settled,
            Reaction::Place(allocation_id) => self.placer.place(context, delivery, allocation_id).await,
            Reaction::Node(id, instruction) => context.send_command::<Node>(delivery, id.0, instruction).await,
            Reaction::Allocation(id, fact) => context.send_command::<Allocation>(delivery, id.0, fact).await,
            Reaction::Terminal(id, instruction) => {
                context.send_command::<TerminalSession>(delivery, id.0, instruction).await
            }
            Reaction::DriveMachine(node_id) => self.bare_metal.drive(context, delivery, node_id).await,
            Reaction::ResolveSshKeys { allocation_id, user_id } => {
                super::ssh_access::update_allocation(context, delivery, allocation_id, &user_id).await
            }
            Reaction::SendSshKeys { allocation_id, node_id } => {
                super::ssh_access::update_node(context, delivery, allocation_id, node_id).await
            }
            Reaction::CloseTerminals { allocation_id, user_id } => {
                super::close_terminals::revoke_sessions(context, delivery, allocation_id, &user_id).await
            }
            Reaction::CloseBrowserTerminals { browser_session_id, user_id } => {
                super::close_terminals::log_out_sessions(context, delivery, browser_session_id, &user_id).await
            }
            Reaction::CloseNodeTerminals { node_id } => {
                super::close_terminals::cut_sessions(context, delivery, node_id).await
            }
            Reaction::Billing { holder, instruction } => {
                let account = BillingAccountId(id_of_name(EntityKind::BillingAccount, &holder.to_string()));
                context.instruct_account(delivery, account, instruction).await
            }
            Reaction::Payment(id, fact) => context.send_command::<Payment>(delivery, id.0, fact).await,
            Reaction::CallProcessor(call) => match &self.processor_calls {
                Some(processor_calls) => processor_calls.run(context, delivery, &call).await,
                None => self.drop_without_processor(delivery).await,
            },
            Reaction::ApplyProcessorEvent(id) => match &self.processor_events {
                Some(handler) => handler.process(context, delivery, id).await,
                None => self.drop_without_processor(delivery).await,
            },
            Reaction::Rollout(id, fact) => context.send_command::<Rollout>(delivery, id.0, fact).await,
            Reaction::FindRolloutNodes(id) => super::rollout_nodes::find(context, delivery, id).await,
            Reaction::Tenant { user_id, instruction } => {
                context.send_command::<Tenant>(delivery, id_of_name(EntityKind::Tenant, &user_id), instruction).await
            }
        }
    }

    /// Drops the event. The payment that waits for it resends it with a growing backoff, each time in a row of its own, and waiting rows
    /// would pile up.
    async fn drop_without_processor(&self, delivery: &EventDelivery) -> Disposition {
        tracing::warn!("no payment processor is configured: what a payment or an event wants of it has to wait");
        self.context.settle(delivery).await
    }

    /// Consumes the events of `stream`, together with every other member that does.
    ///
    /// # Errors
    /// Where the consumer cannot be made or ends.
    pub async fn consume(&self, bus: &Bus, stream: Stream) -> anyhow::Result<()> {
        let context = jetstream::new(bus.client().clone());
        make_streams(&context, bus.stream_copies()).await?;
        let stream_of = context.get_stream(stream.name()).await?;
        let name = consumer_name(stream);
        let config = pull::Config {
            durable_name: Some(name.clone()),
            ack_policy: AckPolicy::Explicit,
            deliver_policy: DeliverPolicy::All,
            ack_wait: Duration::from_secs(30),
            // The outbox never drops an event; redelivery is only the faster way.
            max_deliver: 20,
            max_ack_pending: 4096,
            ..pull::Config::default()
        };
        let consumer: PullConsumer = stream_of.get_or_create_consumer(&name, config).await?;
        let messages = consumer
            .stream()
            .max_messages_per_batch(MAX_CONCURRENT)
            .heartbeat(Duration::from_secs(5))
            .messages()
            .await?;
        bus.first_heartbeat().await;
        let mut working = messages
            .map(|message| async move { self.process_message(bus, message?).await })
            .buffer_unordered(MAX_CONCURRENT);
        while let Some(done) = working.next().await {
            done?;
        }
        anyhow::bail!("the consumer ended")
    }

    async fn process_message(&self, bus: &Bus, message: Message) -> anyhow::Result<()> {
        // A message that is not authentic is dropped: where it is an event all the same, its row is found by the poll.
        let delivery = if bus.is_members_event(&message) { parse_delivery(&message) } else { None };
        let acknowledge = match delivery {
            // An event of a newer release. It stays in the outbox.
            None => AckKind::Term,
            Some(delivery) => match self.react(&delivery).await {
                Disposition::Settled => AckKind::Ack,
                Disposition::Later { .. } => AckKind::Nak(Some(Duration::from_millis(250))),
            },
        };
        // A lost acknowledgement costs a redelivery, which has no effect.
        if let Err(error) = message.ack_with(acknowledge).await {
            tracing::warn!(%error, "could not acknowledge an event");
        }
        Ok(())
    }
}

/// The name of the durable consumer for a stream's reactions.
#[must_use]
pub fn consumer_name(stream: Stream) -> String {
    format!("{}-reactions", stream.name().to_lowercase())
}

fn parse_delivery(message: &Message) -> Option<EventDelivery> {
    #[derive(serde::Deserialize)]
    struct CloudEvent {
        id: EventId,
        correlationid: String,
        data: serde_json::Value,
    }
    let read =
        strict_json::from_slice::<CloudEvent>(&message.payload).and_then(|CloudEvent { id, correlationid, data }| {
            strict_json::tagged::from_value::<Event>(data).map(|event| (id, correlationid, event))
        });
    let (id, correlation_id, event) = match read {
        Ok(read) => read,
        Err(error) => {
            tracing::warn!(%error, subject = %message.subject, "a message is not an event that this release understands");
            return None;
        }
    };
    let header = |name: &str| message.headers.as_ref()?.get(name).map(|value| value.as_str().to_owned());
    Some(EventDelivery {
        id,
        event,
        origin: RequestOrigin { correlation_id, traceparent: header("traceparent"), tracestate: header("tracestate") },
    })
}

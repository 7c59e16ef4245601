//! Queues notifications for the endpoints of their audience (`domain::notification_endpoint`). Durable consumers deliver the events, as
//! they do for [`super::notification_relay`]; but an event is acknowledged only when every endpoint has it in its queue, and is redelivered
//! for days where that fails.
//!
//! An operator's announcement to all is for subscribers, and is queued for no endpoint.

use super::WorkerDependencies;
use super::notification_relay::{AddressedNotification, Notifier, PublishedEvent, consumer_config, parse_event};
use super::outbox_relay::make_streams;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::sharding::{command_id, digest_of};
use actors::shell_dependencies::Environment as _;
use actors::{CommandContext, CommandKey, Directory};
use async_nats::jetstream::{self, AckKind, Message};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::notification::{Channel, delivered_subjects, switch_of};
use domain::notification_endpoint::{self, Fact, NotificationEndpoint, PRESENT, Target};
use domain::policy::PolicyKey;
use domain::{Action, EntityKind, EntityRef, Permit, Principal};
use edge::notifications::encoded;
use futures::StreamExt;
use futures::stream::select_all;
use persistence::outage_log::RetryLog;
use persistence::queries::{ListFilter, ListedEntity};
use std::time::Duration;

/// Events that are processed at once.
const MAX_CONCURRENT: usize = 64;
/// The pause before an event that could not be queued is redelivered.
const RETRY_AFTER: Duration = Duration::from_secs(5);
/// Older events are dropped.
const MAX_EVENT_AGE: TimeDelta = TimeDelta::days(3);
/// The timeout of a command to an endpoint.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(5);
/// More endpoints than a holder can have.
const MAX_ENDPOINTS: u32 = 200;

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { actors, services, .. } = &parts.stages;
    let has_mail = services.services.delivery.mailer.is_some();
    let queue = NotificationQueue::new(parts.notifier.clone(), actors.directory.clone(), has_mail)?;
    Ok(task(&queue, NotificationQueue::run))
}

/// Queues events for endpoints.
#[derive(Clone)]
pub struct NotificationQueue {
    notifier: Notifier,
    directory: Directory,
    /// Whether a mail server is configured: only then e-mail is queued.
    has_mail: bool,
    permit: Permit,
}

impl NotificationQueue {
    /// # Errors
    /// Never in practice: a worker may advance the machines.
    pub fn new(notifier: Notifier, directory: Directory, has_mail: bool) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system("notification-queue"), Action::Advance)?;
        Ok(Self { notifier, directory, has_mail, permit })
    }

    /// Queues events until the connection to NATS is closed for good.
    ///
    /// # Errors
    /// Where a consumer cannot be made or ends.
    pub async fn run(self) -> anyhow::Result<()> {
        let context = jetstream::new(self.notifier.bus.client().clone());
        make_streams(&context, self.notifier.bus.stream_copies()).await?;
        let mut streams = Vec::new();
        for (stream, subjects) in delivered_subjects() {
            let name = format!("{}-deliveries", stream.name().to_lowercase());
            let config = consumer_config(name, &subjects, -1, Duration::from_secs(30));
            let consumer = context.get_stream(stream.name()).await?.create_consumer(config).await?;
            let batches = consumer.stream().max_messages_per_batch(MAX_CONCURRENT).heartbeat(Duration::from_secs(5));
            streams.push(batches.messages().await?);
        }
        self.notifier.bus.first_heartbeat().await;
        let working = select_all(streams).map(|message| async { anyhow::Ok(self.process_message(message?).await) });
        let mut working = working.buffer_unordered(MAX_CONCURRENT);
        while let Some(worked) = working.next().await {
            let (message, acknowledge) = worked?;
            // A lost acknowledgement costs a repetition, which the endpoints recognize by the command id.
            if let Err(error) = message.ack_with(acknowledge).await {
                tracing::debug!(%error, "could not acknowledge an event");
            }
        }
        anyhow::bail!("the consumers ended")
    }

    async fn process_message(&self, message: Message) -> (Message, AckKind) {
        static RETRIES: RetryLog = RetryLog::new("queue events for endpoints");
        let event = if self.notifier.bus.is_members_event(&message) { parse_event(&message) } else { None };
        let Some(event) = event.filter(|event| Utc::now() - event.time <= MAX_EVENT_AGE) else {
            return (message, AckKind::Term);
        };
        let acknowledge = match self.queue(&event).await {
            Ok(()) => {
                RETRIES.succeeded();
                AckKind::Ack
            }
            Err(error) => {
                RETRIES.failed(&format!("{}: {error:#}", message.subject));
                AckKind::Nak(Some(RETRY_AFTER))
            }
        };
        (message, acknowledge)
    }

    /// Queues the event for every endpoint that subscribes to it. An endpoint that cannot be read or reached does not block the others: the
    /// event is redelivered for it, and the others recognize it by then.
    async fn queue(&self, event: &PublishedEvent) -> anyhow::Result<()> {
        let mut queued = Ok(());
        for notification in self.notifier.notifications_for(&event.data).await? {
            let Some(holder) = holder_of(&notification.channel) else { continue };
            for listed in self.endpoints_of(&holder).await? {
                let endpoint = listed.entity;
                if let Err(error) = self.queue_for(listed, &holder, event, &notification).await {
                    queued = Err(error.context(endpoint));
                }
            }
        }
        queued
    }

    async fn endpoints_of(&self, holder: &str) -> anyhow::Result<Vec<ListedEntity>> {
        let filter = ListFilter {
            owner: Some(holder.to_owned()),
            states: PRESENT.map(str::to_owned).into(),
            ..ListFilter::default()
        };
        Ok(self.notifier.reads.list(EntityKind::NotificationEndpoint, &filter, None, MAX_ENDPOINTS).await?.items)
    }

    async fn queue_for(
        &self,
        listed: ListedEntity,
        holder: &str,
        event: &PublishedEvent,
        notification: &AddressedNotification,
    ) -> anyhow::Result<()> {
        let endpoint: NotificationEndpoint = serde_json::from_str(&listed.row?.body)?;
        // The column by which it was found is not sealed.
        let is_of_holder = endpoint.holder.to_string() == holder;
        if is_of_holder && endpoint.wants(&event.kind) && self.is_on(&endpoint, &event.kind) {
            self.enqueue(listed.entity, event, notification).await?;
        }
        Ok(())
    }

    /// Whether neither the event nor e-mail is switched off for the endpoint's recipient.
    fn is_on(&self, endpoint: &NotificationEndpoint, event: &str) -> bool {
        let environment = &self.notifier.environment;
        let policy = environment.policy();
        let is_on = |key| policy.is_on(key, &endpoint.scopes(), environment.now());
        let is_accepted = match endpoint.target {
            Target::Webhook { .. } => true,
            Target::Email { .. } => self.has_mail && is_on(PolicyKey::NotificationEmail),
        };
        is_accepted && switch_of(event).is_none_or(is_on)
    }

    async fn enqueue(
        &self,
        endpoint: EntityRef,
        event: &PublishedEvent,
        notification: &AddressedNotification,
    ) -> anyhow::Result<()> {
        let body = encoded(&event.header(), &notification.channel, &notification.data);
        // An event may concern a user twice, for two allocations on one node for example.
        let parts = [b"message", event.id.as_bytes().as_slice(), body.as_bytes()];
        let (id, digest) = (command_id(&parts).0, digest_of(&parts));
        let key = command_id(&[b"enqueue", endpoint.id.as_bytes(), id.as_bytes()]);
        let message = notification_endpoint::QueuedNotification { id, event: event.kind.clone(), body };
        let context = CommandContext::new(&self.permit, event.correlationid.clone(), Utc::now() + COMMAND_TIMEOUT)
            .patient()
            .with_key(CommandKey::repeatable(key, digest));
        let command = Fact::NotificationDue { message };
        self.directory.ask::<NotificationEndpoint>(&self.permit, endpoint.id, command.into(), context).await?;
        Ok(())
    }
}

/// The holder whose endpoints get the channel's notifications.
fn holder_of(channel: &Channel) -> Option<String> {
    use domain::billing_account::Holder;
    let holder = match channel {
        Channel::User(id) => Holder::User(id.clone()),
        Channel::Org(id) => Holder::Org(id.clone()),
        Channel::Broadcast | Channel::Operations => return None,
    };
    Some(holder.to_string())
}

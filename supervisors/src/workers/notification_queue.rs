//! Queues events for the endpoints of those whom they concern (`domain::notification_endpoint`). Durable consumers bring the events that are
//! told of, as they do for [`super::notifications`]; but an event is acknowledged only when every endpoint has it in its queue, and is
//! brought again for days where that fails.
//!
//! What an operator says to everybody is for those who listen, and is queued for nobody.

use super::notifications::{Notifier, Told, Word, durable, told_in};
use super::relay::make_streams;
use actors::place::{command_id, digest_of};
use actors::ports::World as _;
use actors::{Asked, CommandKey, Directory};
use async_nats::jetstream::{self, AckKind, Message};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::event::Stream;
use domain::notification::{Channel, TOLD};
use domain::notification_endpoint::{self, Command, NotificationEndpoint, PRESENT, Target};
use domain::policy::{Key, Scopes};
use domain::{Action, EntityRef, Kind, Permit, Principal};
use edge::notifications::encoded;
use futures::StreamExt;
use futures::stream::select_all;
use persistence::read::{EntityRow, ListFilter};
use std::time::Duration;

/// Events that are worked on at once.
const AT_ONCE: usize = 64;
/// After how long an event is brought again that could not be queued.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// What is older is told to nobody any more.
const NEWS_FOR: TimeDelta = TimeDelta::days(3);
/// How long an endpoint may take.
const WITHIN: TimeDelta = TimeDelta::seconds(5);
/// More endpoints than a holder can have.
const ALL: u32 = 200;

/// Queues events for endpoints.
#[derive(Clone)]
pub struct NotificationQueue {
    notifier: Notifier,
    directory: Directory,
    /// E-mail is queued where a mail server is configured.
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

    /// Queues events until the bus is gone for good.
    ///
    /// # Errors
    /// Where a consumer cannot be made or ends.
    pub async fn run(self) -> anyhow::Result<()> {
        let context = jetstream::new(self.notifier.bus.client().clone());
        make_streams(&context).await?;
        let mut streams = Vec::new();
        for (stream, subjects) in TOLD.iter().filter(|(stream, _)| *stream != Stream::Notifications) {
            let name = format!("{}-deliveries", stream.name().to_lowercase());
            let config = durable(name, subjects, -1, Duration::from_secs(30));
            let consumer = context.get_stream(stream.name()).await?.create_consumer(config).await?;
            let batches = consumer.stream().max_messages_per_batch(AT_ONCE).heartbeat(Duration::from_secs(5));
            streams.push(batches.messages().await?);
        }
        let working = select_all(streams).map(|message| async { anyhow::Ok(self.one(message?).await) });
        let mut working = working.buffer_unordered(AT_ONCE);
        while let Some(worked) = working.next().await {
            let (message, acknowledge) = worked?;
            // One that is lost costs a repetition, which the endpoints know by its command's id.
            if let Err(error) = message.ack_with(acknowledge).await {
                tracing::debug!(%error, "could not acknowledge an event");
            }
        }
        anyhow::bail!("the consumers ended")
    }

    async fn one(&self, message: Message) -> (Message, AckKind) {
        let told = if self.notifier.bus.is_members_event(&message) { told_in(&message) } else { None };
        let Some(told) = told.filter(|told| Utc::now() - told.time <= NEWS_FOR) else {
            return (message, AckKind::Term);
        };
        let acknowledge = match self.queue(&told).await {
            Ok(()) => AckKind::Ack,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), subject = %message.subject, "an event cannot be queued yet");
                AckKind::Nak(Some(AGAIN_AFTER))
            }
        };
        (message, acknowledge)
    }

    /// Queues the event for every endpoint that wants it. An endpoint that cannot be read or asked is in no other's way: the event is brought
    /// again for its sake, and the others know it by then.
    async fn queue(&self, told: &Told) -> anyhow::Result<()> {
        let mut queued = Ok(());
        for word in self.notifier.words(&told.data).await? {
            let Some((holder, scopes)) = holder_of(&word.channel) else { continue };
            for row in self.endpoints_of(&holder).await? {
                let endpoint = row.entity;
                if let Err(error) = self.queue_for(row, &scopes, told, &word).await {
                    queued = Err(error.context(endpoint));
                }
            }
        }
        queued
    }

    async fn endpoints_of(&self, holder: &str) -> anyhow::Result<Vec<EntityRow>> {
        let filter = ListFilter {
            owner: Some(holder.to_owned()),
            states: PRESENT.map(str::to_owned).into(),
            ..ListFilter::default()
        };
        Ok(self.notifier.reads.list(Kind::NotificationEndpoint, &filter, None, ALL).await?.items)
    }

    async fn queue_for(&self, row: EntityRow, scopes: &Scopes, told: &Told, word: &Word) -> anyhow::Result<()> {
        let endpoint: NotificationEndpoint = serde_json::from_str(&row.body)?;
        if endpoint.wants(&told.kind) && self.may_be_told(&endpoint, scopes) {
            self.enqueue(row.entity, told, word).await?;
        }
        Ok(())
    }

    fn may_be_told(&self, endpoint: &NotificationEndpoint, scopes: &Scopes) -> bool {
        let here = &self.notifier.here;
        match endpoint.target {
            Target::Webhook { .. } => true,
            Target::Email { .. } => self.has_mail && here.policy().is_on(Key::NotificationEmail, scopes, here.now()),
        }
    }

    async fn enqueue(&self, endpoint: EntityRef, told: &Told, word: &Word) -> anyhow::Result<()> {
        let body = encoded(&told.about(), &word.channel, &word.data);
        // An event may concern somebody twice, for two allocations on one node for example.
        let parts = [b"message", told.id.as_bytes().as_slice(), body.as_bytes()];
        let (id, digest) = (command_id(&parts).0, digest_of(&parts));
        let key = command_id(&[b"enqueue", endpoint.id.as_bytes(), id.as_bytes()]);
        let message = notification_endpoint::Message { id, event: told.kind.clone(), body };
        let asked = Asked::new(&self.permit, told.correlationid.clone(), Utc::now() + WITHIN)
            .patiently()
            .once(CommandKey::repeatable(key, digest));
        let command = Command::Enqueue { message };
        self.directory.ask::<NotificationEndpoint>(&self.permit, endpoint.id, command, asked).await?;
        Ok(())
    }
}

/// Whose endpoints are told of what is said on the channel, by the name under which they are found, and the policies of theirs.
fn holder_of(channel: &Channel) -> Option<(String, Scopes)> {
    use domain::billing_account::Holder;
    let holder = match channel {
        Channel::User(id) => Holder::User(id.clone()),
        Channel::Org(id) => Holder::Org(id.clone()),
        Channel::Broadcast => return None,
    };
    Some((holder.to_string(), holder.scopes()))
}

//! What the reaction to an event works with: the event as it was delivered, the commands that it sends, and what becomes of the event.

use actors::{AskError, CommandContext, CommandKey, Directory};
use chrono::{TimeDelta, Utc};
use domain::authz::authorize;
use domain::state_machine::{Command as _, RequestOrigin};
use domain::{Action, Event, EventId, Machine, Permit, Principal};
use persistence::{Outbox, Reads};

/// The timeout of an event's command. An event that times out is delivered again; one that is waited for blocks others.
const COMMAND_TIMEOUT: TimeDelta = TimeDelta::seconds(2);

/// How long the owner of a shard is searched for. During a takeover there is none for seconds, and other shards' events must proceed.
const OWNER_SEARCH_TIMEOUT: TimeDelta = TimeDelta::milliseconds(200);

/// An event as its consumer receives it.
#[derive(Clone, Debug)]
pub struct EventDelivery {
    pub id: EventId,
    pub event: Event,
    pub origin: RequestOrigin,
}

/// What becomes of a delivered event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Its reaction is committed, or there is none: the outbox row is deleted.
    Settled,
    /// The reaction is not committed yet; the event stays in the outbox and is retried.
    Later { why: String },
}

/// The entities and rows that a reaction reads and changes.
#[derive(Clone)]
pub struct ReactionContext {
    pub(super) directory: Directory,
    pub(super) reads: Reads,
    outbox: Outbox,
    pub(super) permit: Permit,
}

impl ReactionContext {
    /// # Errors
    /// Never in practice: a worker may advance the machines.
    pub fn new(directory: &Directory, reads: Reads, outbox: Outbox, worker: &str) -> anyhow::Result<Self> {
        let permit = authorize(&Principal::system(worker), Action::Advance)?;
        Ok(Self { directory: directory.with_owner_timeout(OWNER_SEARCH_TIMEOUT), reads, outbox, permit })
    }

    /// Sends the one command of the reaction; its commit deletes the outbox row.
    pub(super) async fn send_command<M: Machine>(
        &self,
        delivery: &EventDelivery,
        id: uuid::Uuid,
        command: impl Into<M::Command>,
    ) -> Disposition {
        let command = command.into();
        let context = self.context_for(delivery).with_key(CommandKey::for_event(delivery.id, command.name()));
        match self.directory.ask::<M>(&self.permit, id, command, context).await {
            Ok(answered) if answered.written => Disposition::Settled,
            // Applied before, or nothing had to change: nothing else deletes the row.
            Ok(_) | Err(AskError::AlreadyDone) => self.settle(delivery).await,
            Err(AskError::Rejected(rejection)) => {
                tracing::warn!("what follows from the event was refused: {rejection}");
                self.settle(delivery).await
            }
            Err(error) => Disposition::Later { why: error.to_string() },
        }
    }

    pub(super) fn context_for(&self, delivery: &EventDelivery) -> CommandContext {
        CommandContext::from_origin(&self.permit, delivery.origin.clone(), Utc::now() + COMMAND_TIMEOUT)
            // Running sagas come before new requests: they free capacity.
            .urgent()
    }

    pub(super) async fn settle(&self, delivery: &EventDelivery) -> Disposition {
        match self.outbox.settle(&[delivery.id]).await {
            Ok(_) => Disposition::Settled,
            Err(error) => Disposition::Later { why: error.to_string() },
        }
    }
}

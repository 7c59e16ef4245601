//! The entities of the shards that this process owns: activated by their first command, passivated when idle, with a bound in front of
//! every mailbox, and parked where they fail too often.
//!
//! The host and [`crate::entity`] know each other: it spawns the actor, and the actor reports its commits and its end to it.

mod activation;
mod concurrency_primitives;
mod failures;
mod handover;
mod shard;
#[cfg(test)]
mod shuttle_tests;
mod status;
#[cfg(test)]
mod tests;

pub(crate) use activation::{CommittedState, EntityFacts};
pub(crate) use failures::ActorExit;
pub use handover::Slot;
pub use status::{ActivationStatus, HostMetrics, HostedEntity, HostedShard};

use crate::changed_nodes::ChangedNodes;
use crate::command_context::{AskError, AskResult, CommandContext};
use crate::entity::{ActorArguments, EntityActor, EntityMessage, Waiter};
use crate::entity_shell::CommandRequest;
use crate::entity_watch::{EntityWatch, WatchRegistry};
use crate::recent_changes::RecentChanges;
use crate::sharding::shard_of;
use crate::shell_dependencies::{Effects, Environment, Store};
use activation::{ActiveEntity, MailboxHandle, mailbox_handle, passivate};
use dashmap::DashMap;
use domain::state_machine::Command as _;
use domain::{EntityKind, EntityRef, Machine, NodeId};
use failures::Failures;
use handover::{Handover, NotAdmitted};
use ractor::{ActorRef, ActorRuntime, ActorStatus};
use shard::OwnedShard;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tracing::Span;
use uuid::Uuid;

/// Bounds and rules of the host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Commands that may wait for one entity. Urgent ones have as many slots again.
    pub per_entity: usize,
    /// Commands that may wait in one shard, likewise.
    pub per_shard: usize,
    /// An entity that is idle for so long is passivated.
    pub passivate_after: Duration,
    /// So many crashes within [`HostConfig::window`] park an entity.
    pub intensity: usize,
    pub window: Duration,
    /// The pause after a first failure; it doubles with each further one, up to the longest. After an outage of the store entities are
    /// activated soon after it is back.
    pub backoff: Duration,
    pub longest_backoff: Duration,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            per_entity: 256,
            per_shard: 4096,
            passivate_after: Duration::from_secs(60),
            intensity: 5,
            window: Duration::from_secs(60),
            backoff: Duration::from_millis(50),
            longest_backoff: Duration::from_secs(1),
        }
    }
}

/// The hosted shards and entities.
pub struct Host {
    config: HostConfig,
    store: Arc<dyn Store>,
    effects: Arc<dyn Effects>,
    environment: Arc<dyn Environment>,
    handover: Handover<ActiveEntity>,
    failures: DashMap<EntityRef, Failures>,
    watches: WatchRegistry,
    recent_changes: RecentChanges,
    changed_nodes: ChangedNodes,
    tokens: AtomicU64,
    restarts: AtomicU64,
}

impl Host {
    #[must_use]
    pub fn new(
        config: HostConfig,
        store: Arc<dyn Store>,
        effects: Arc<dyn Effects>,
        environment: Arc<dyn Environment>,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            store,
            effects,
            environment,
            handover: Handover::new(),
            failures: DashMap::new(),
            watches: WatchRegistry::default(),
            recent_changes: RecentChanges::default(),
            changed_nodes: ChangedNodes::default(),
            tokens: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
        })
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(crate) fn effects(&self) -> &dyn Effects {
        &*self.effects
    }

    pub(crate) fn environment(&self) -> &dyn Environment {
        &*self.environment
    }

    /// Watches for changes of an entity of this member.
    #[must_use]
    pub fn watch(&self, entity: EntityRef) -> EntityWatch {
        self.watches.watch(entity)
    }

    /// The entities of this member that changed lately.
    #[must_use]
    pub const fn recent_changes(&self) -> &RecentChanges {
        &self.recent_changes
    }

    /// The nodes of this member that changed lately, for the indexes of free GPUs. Those that were loaded are among them: what a commit with
    /// an unknown outcome has made of a node is known then.
    #[must_use]
    pub const fn changed_nodes(&self) -> &ChangedNodes {
        &self.changed_nodes
    }

    pub(crate) fn changed(&self, entity: EntityRef) {
        if entity.kind == EntityKind::Node {
            self.changed_nodes.note(NodeId(entity.id));
        }
        self.watches.changed(entity);
        self.recent_changes.note(entity);
    }

    /// Sends a command to an entity of this member.
    pub async fn ask<M: Machine>(
        self: &Arc<Self>,
        id: Uuid,
        command: M::Command,
        context: CommandContext,
    ) -> AskResult<M> {
        let entity = EntityRef { kind: M::KIND, id };
        let (deadline, now) = (context.deadline, self.environment.now());
        let Ok(timeout) = (deadline - now).to_std() else {
            return Err(AskError::Unavailable { reason: "the time for an answer has passed".to_owned() });
        };
        let answered = self.enqueue::<M>(entity, command, context)?;
        match tokio::time::timeout(timeout, answered).await {
            Ok(Ok(answer)) => answer,
            // The actor stopped while it executed the command: its shard was taken over, or an operator restarted it.
            Ok(Err(_)) => Err(AskError::Unknown { reason: "the entity left while it was asked".to_owned() }),
            Err(_) => Err(AskError::Unknown { reason: "no answer in time".to_owned() }),
        }
    }

    fn enqueue<M: Machine>(
        self: &Arc<Self>,
        entity: EntityRef,
        command: M::Command,
        context: CommandContext,
    ) -> Result<oneshot::Receiver<AskResult<M>>, AskError<M::Rejection>> {
        let shard = shard_of(entity.id);
        let owned = self.handover.owned(shard).ok_or(AskError::NotOwner)?;
        if !self.environment.may_answer_from_memory() {
            return Err(AskError::NotOwner);
        }
        let lane = if context.urgent { 2 } else { 1 };
        let key = context.command.as_ref().map(|key| key.id);
        let slot = self.handover.admit(&owned, self.config.per_shard * lane, key).map_err(|refused| match refused {
            NotAdmitted::Overloaded => AskError::Overloaded,
            NotAdmitted::Closing => AskError::NotOwner,
            NotAdmitted::InProgress => AskError::InProgress,
        })?;
        let (mailbox, facts) = self.activate::<M>(entity, &owned, command.creates())?;
        let slot = slot.and_in_entity(&facts.waiting, self.config.per_entity * lane).ok_or(AskError::Overloaded)?;
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let ask = Box::new(CommandRequest { token, command, context });
        if mailbox.cast(EntityMessage::Ask(ask, Waiter { answer, slot, span: Span::current() })).is_err() {
            self.remove_if_stopped(entity, &mailbox);
            return Err(AskError::NotOwner);
        }
        Ok(answered)
    }

    /// The last committed state of the entity, where it is active here and this process may reply from memory; `None` means only that
    /// the store has to be read.
    #[must_use]
    pub fn committed_state<M: Machine>(&self, id: Uuid) -> Option<(Arc<M>, i64)> {
        let activation = self.handover.active.get(&EntityRef { kind: M::KIND, id })?;
        let settled = activation.memory.downcast_ref::<CommittedState<M>>()?.get()?;
        // Checked after the state was read: what was true under a fresh lease is an answer.
        let ours = !activation.owned.is_closing() && self.environment.may_answer_from_memory();
        ours.then_some(settled)
    }

    /// The entity's mailbox, with a running actor. `new`: the command that activates it creates it.
    fn activate<M: Machine>(
        self: &Arc<Self>,
        entity: EntityRef,
        owned: &Arc<OwnedShard>,
        new: bool,
    ) -> Result<MailboxHandle<M>, AskError<M::Rejection>> {
        let other_kind = || AskError::Unavailable { reason: "the entity is of another kind".to_owned() };
        let handle = |active: &ActiveEntity| mailbox_handle::<M>(active).ok_or_else(other_kind);
        let start = || {
            let facts = Arc::new(EntityFacts::new(self.environment.now()));
            let memory = Arc::new(CommittedState::<M>::new());
            let start = ActorArguments {
                id: entity.id,
                term: owned.grant.term,
                host: Arc::clone(self),
                facts: Arc::clone(&facts),
                memory: Arc::clone(&memory),
                new,
            };
            let supervisor = owned.grant.supervisor.get_cell();
            let spawned = ActorRuntime::spawn_linked_instant(None, EntityActor::<M>::new(), start, supervisor);
            let (mailbox, _) = spawned.map_err(|error| AskError::Unavailable { reason: error.to_string() })?;
            Ok(ActiveEntity {
                owned: Arc::clone(owned),
                actor: mailbox.get_id(),
                cell: mailbox.get_cell(),
                mailbox: Arc::new(mailbox),
                facts,
                memory,
                passivate: passivate::<M>,
            })
        };
        let found = self.handover.activate(entity, owned, handle, || self.may_activate(entity), start)?;
        found.ok_or(AskError::NotOwner)
    }

    /// An actor that was killed with its supervisor, or never ran, did not remove itself.
    fn remove_if_stopped<M: Machine>(&self, entity: EntityRef, mailbox: &ActorRef<EntityMessage<M>>) {
        if mailbox.get_status() == ActorStatus::Stopped {
            self.handover.remove(entity, &mailbox.get_id());
        }
    }

    /// Whether the entity has an actor.
    #[must_use]
    pub fn is_active(&self, entity: EntityRef) -> bool {
        self.handover.active.contains_key(&entity)
    }

    /// Passivates an entity that has no command in its mailbox. For workers that have activated many.
    pub fn passivate(&self, entity: EntityRef) {
        if let Some(activation) = self.handover.active.get(&entity) {
            (activation.passivate)(&*activation.mailbox);
        }
    }

    /// Passivates what was idle for [`HostConfig::passivate_after`], and forgets old failures.
    pub fn passivate_idle(&self) {
        for activation in &self.handover.active {
            if activation.facts.is_idle_for(self.config.passivate_after) {
                (activation.passivate)(&*activation.mailbox);
            }
        }
        let window = self.config.window * 10;
        self.failures.retain(|_, failures| failures.is_relevant(window));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

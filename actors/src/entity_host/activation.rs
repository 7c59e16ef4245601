//! An active entity: its mailbox, its committed state, and what an operator sees of it.

use super::handover::Activated;
use super::lock;
use super::shard::{OwnedShard, ShardGrant};
use super::status::{ActivationStatus, HostedEntity};
use crate::entity::EntityMessage;
use crate::entity_shell::Input;
use crate::sharding::shard_of;
use domain::{EntityRef, Machine, Timestamp};
use ractor::{ActorCell, ActorId, ActorRef};
use std::any::Any;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

/// An entity that has an actor.
pub(super) struct ActiveEntity {
    /// The term of its shard under which it was activated.
    pub(super) owned: Arc<OwnedShard>,
    pub(super) actor: ActorId,
    pub(super) cell: ActorCell,
    /// `ActorRef<EntityMessage<M>>` of the entity's machine.
    pub(super) mailbox: Arc<dyn Any + Send + Sync>,
    pub(super) facts: Arc<EntityFacts>,
    /// `Arc<CommittedState<M>>` of the entity's machine.
    pub(super) memory: Arc<dyn Any + Send + Sync>,
    pub(super) passivate: fn(&(dyn Any + Send + Sync)),
}

impl Activated for ActiveEntity {
    type Grant = ShardGrant;
    type ActorId = ActorId;

    fn owned(&self) -> &Arc<OwnedShard> {
        &self.owned
    }

    fn actor(&self) -> ActorId {
        self.actor
    }
}

/// An entity's mailbox, and its facts.
pub(super) type MailboxHandle<M> = (ActorRef<EntityMessage<M>>, Arc<EntityFacts>);

/// The last committed state and version of an active entity, for readers past its mailbox; `None` while a commit is in flight, since
/// the store may then be ahead.
pub(crate) struct CommittedState<M>(Mutex<Option<(Arc<M>, i64)>>);

impl<M> CommittedState<M> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn set(&self, settled: Option<(Arc<M>, i64)>) {
        *lock(&self.0) = settled;
    }

    pub(super) fn get(&self) -> Option<(Arc<M>, i64)> {
        lock(&self.0).clone()
    }
}

/// What an operator sees of an active entity.
pub(crate) struct EntityFacts {
    pub(crate) waiting: Arc<AtomicUsize>,
    activated_at: Timestamp,
    used: Mutex<Instant>,
    version: AtomicI64,
    seen: Mutex<StateSummary>,
}

#[derive(Clone, Debug, Default)]
struct StateSummary {
    state: Option<String>,
    deadline_at: Option<Timestamp>,
    waits_for: Option<String>,
}

impl EntityFacts {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            waiting: Arc::default(),
            activated_at: now,
            used: Mutex::new(Instant::now()),
            version: AtomicI64::new(0),
            seen: Mutex::default(),
        }
    }

    pub(crate) fn note<M: Machine>(&self, state: Option<&M>, version: i64) {
        *lock(&self.used) = Instant::now();
        if self.version.swap(version, Ordering::Relaxed) != version {
            let deadline = state.and_then(Machine::deadline);
            *lock(&self.seen) = StateSummary {
                state: state.map(|state| state.state().to_owned()),
                deadline_at: deadline.as_ref().map(|deadline| deadline.at),
                waits_for: deadline.map(|deadline| deadline.reason),
            };
        }
    }

    /// It was idle for so long.
    pub(super) fn is_idle_for(&self, length: Duration) -> bool {
        lock(&self.used).elapsed() >= length
    }

    /// `failed`: the row of its failures.
    pub(super) fn row(&self, entity: EntityRef, failed: Option<&HostedEntity>) -> HostedEntity {
        let seen = lock(&self.seen).clone();
        HostedEntity {
            kind: entity.kind,
            id: entity.id,
            shard: shard_of(entity.id),
            status: ActivationStatus::Awake,
            state: seen.state,
            since: Some(self.activated_at),
            version: self.version.load(Ordering::Relaxed),
            mailbox_depth: self.waiting.load(Ordering::Relaxed),
            restarts: failed.map_or(0, |failed| failed.restarts),
            last_error: failed.and_then(|failed| failed.last_error.clone()),
            deadline_at: seen.deadline_at,
            waits_for: seen.waits_for,
        }
    }
}

pub(super) fn mailbox_handle<M: Machine>(activation: &ActiveEntity) -> Option<MailboxHandle<M>> {
    let mailbox = activation.mailbox.downcast_ref::<ActorRef<EntityMessage<M>>>()?;
    Some((mailbox.clone(), Arc::clone(&activation.facts)))
}

pub(super) fn passivate<M: Machine>(mailbox: &(dyn Any + Send + Sync)) {
    if let Some(mailbox) = mailbox.downcast_ref::<ActorRef<EntityMessage<M>>>() {
        // A stopped actor is passivated already.
        let _ = mailbox.cast(EntityMessage::Input(Box::new(Input::Passivate)));
    }
}

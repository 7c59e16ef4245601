//! An entity that has an actor: its mailbox, what it remembers, and what an operator sees of it.

use super::lock;
use super::rows::{EntityRow, EntityStatus};
use super::shard::OwnedShard;
use crate::entity::Message;
use crate::place::shard_of;
use crate::shell::Input;
use domain::{EntityRef, Machine, Timestamp};
use ractor::{ActorCell, ActorId, ActorRef};
use std::any::Any;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;

/// An entity that has an actor.
pub(super) struct Awake {
    /// Under which term of its shard it was woken.
    pub(super) owned: Arc<OwnedShard>,
    pub(super) actor: ActorId,
    pub(super) cell: ActorCell,
    /// `ActorRef<Message<M>>` of the entity's machine.
    pub(super) mailbox: Arc<dyn Any + Send + Sync>,
    pub(super) facts: Arc<Facts>,
    /// `Arc<Memory<M>>` of the entity's machine.
    pub(super) memory: Arc<dyn Any + Send + Sync>,
    pub(super) put_to_sleep: fn(&(dyn Any + Send + Sync)),
}

/// An entity's mailbox, and what stands in front of it.
pub(super) type Found<M> = (ActorRef<Message<M>>, Arc<Facts>);

/// What an awake entity is, for those who read past its mailbox: its last committed state and version; nothing while a commit is
/// under way, since the store may then be ahead.
pub(crate) struct Memory<M>(Mutex<Option<(Arc<M>, i64)>>);

impl<M> Memory<M> {
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

/// What an operator sees of an entity that is awake.
pub(crate) struct Facts {
    pub(crate) waiting: Arc<AtomicUsize>,
    woken_at: Timestamp,
    used: Mutex<Instant>,
    version: AtomicI64,
    seen: Mutex<Seen>,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    state: Option<String>,
    deadline_at: Option<Timestamp>,
    waits_for: Option<String>,
}

impl Facts {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            waiting: Arc::default(),
            woken_at: now,
            used: Mutex::new(Instant::now()),
            version: AtomicI64::new(0),
            seen: Mutex::default(),
        }
    }

    pub(crate) fn note<M: Machine>(&self, state: Option<&M>, version: i64) {
        *lock(&self.used) = Instant::now();
        if self.version.swap(version, Ordering::Relaxed) != version {
            let deadline = state.and_then(Machine::deadline);
            *lock(&self.seen) = Seen {
                state: state.map(|state| state.state().to_owned()),
                deadline_at: deadline.as_ref().map(|deadline| deadline.at),
                waits_for: deadline.map(|deadline| deadline.reason),
            };
        }
    }

    /// Nobody needed it for so long.
    pub(super) fn rested_for(&self, length: Duration) -> bool {
        lock(&self.used).elapsed() >= length
    }

    /// `failed`: what is known of its failures.
    pub(super) fn row(&self, entity: EntityRef, failed: Option<&EntityRow>) -> EntityRow {
        let seen = lock(&self.seen).clone();
        EntityRow {
            kind: entity.kind,
            id: entity.id,
            shard: shard_of(entity.id),
            status: EntityStatus::Awake,
            state: seen.state,
            since: Some(self.woken_at),
            version: self.version.load(Ordering::Relaxed),
            mailbox_depth: self.waiting.load(Ordering::Relaxed),
            restarts: failed.map_or(0, |failed| failed.restarts),
            last_error: failed.and_then(|failed| failed.last_error.clone()),
            deadline_at: seen.deadline_at,
            waits_for: seen.waits_for,
        }
    }
}

pub(super) fn mailbox_of<M: Machine>(awake: &Awake) -> Option<Found<M>> {
    let mailbox = awake.mailbox.downcast_ref::<ActorRef<Message<M>>>()?;
    Some((mailbox.clone(), Arc::clone(&awake.facts)))
}

pub(super) fn put_to_sleep<M: Machine>(mailbox: &(dyn Any + Send + Sync)) {
    if let Some(mailbox) = mailbox.downcast_ref::<ActorRef<Message<M>>>() {
        // One that is gone sleeps already.
        let _ = mailbox.cast(Message::Tell(Box::new(Input::Sleep)));
    }
}

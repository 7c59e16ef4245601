//! The hand-over of entities: between the actors of one entity as it is passivated, fails and is activated again, and between owners as a
//! shard is opened, closed and lost. No actor, task or clock: the host adds them.
//!
//! `shuttle_tests.rs` compiles this file a second time, with the primitives of shuttle, and runs it under many schedules of threads.

use super::concurrency_primitives::{Arc, AtomicBool, AtomicUsize, Entry, Map, Ordering};
use domain::{CommandId, EntityRef, Shard};

/// A shard that this process owns, under one term.
pub(super) struct OwnedShard<G> {
    /// The term that was granted, and the supervisor of its entities.
    pub(super) grant: G,
    pub(super) closing: AtomicBool,
    pub(super) waiting: Arc<AtomicUsize>,
    /// Its entities leave the directory: none is activated from here on.
    removed: AtomicBool,
}

/// An entity that has an actor.
pub(super) trait Activated {
    type Grant;
    type ActorId: PartialEq;

    /// The term of its shard under which it was activated.
    fn owned(&self) -> &Arc<OwnedShard<Self::Grant>>;
    fn actor(&self) -> Self::ActorId;
}

/// The shards of this process, the actors of their entities, and the commands in flight.
pub(super) struct Handover<A: Activated> {
    pub(super) shards: Map<Shard, Arc<OwnedShard<A::Grant>>>,
    pub(super) active: Map<EntityRef, A>,
    pub(super) in_flight: Arc<Map<CommandId, ()>>,
}

/// Why a shard admits no command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotAdmitted {
    Overloaded,
    Closing,
    /// The same command is in flight.
    InProgress,
}

impl<A: Activated> Handover<A> {
    pub(super) fn new() -> Self {
        Self { shards: Map::new(), active: Map::new(), in_flight: Arc::new(Map::new()) }
    }

    pub(super) fn open(&self, shard: Shard, grant: A::Grant) {
        let owned = OwnedShard {
            grant,
            closing: AtomicBool::new(false),
            waiting: Arc::new(AtomicUsize::new(0)),
            removed: AtomicBool::new(false),
        };
        self.shards.insert(shard, Arc::new(owned));
    }

    pub(super) fn owned(&self, shard: Shard) -> Option<Arc<OwnedShard<A::Grant>>> {
        self.shards.get(&shard).map(|owned| Arc::clone(&owned))
    }

    /// Takes a slot of the shard for a command. From here to the drop of the slot the command is in flight.
    pub(super) fn admit(
        &self,
        owned: &OwnedShard<A::Grant>,
        bound: usize,
        command: Option<CommandId>,
    ) -> Result<Slot, NotAdmitted> {
        let mut slot = Slot::in_shard(&owned.waiting, bound).ok_or(NotAdmitted::Overloaded)?;
        // Checked after the slot is taken: the task that closes the shard waits for all slots.
        if owned.is_closing() {
            return Err(NotAdmitted::Closing);
        }
        if let Some(id) = command {
            if self.in_flight.insert(id, ()).is_some() {
                return Err(NotAdmitted::InProgress);
            }
            slot.command = Some((Arc::clone(&self.in_flight), id));
        }
        Ok(slot)
    }

    /// The handle of the entity's actor, which `start` starts where there is none and `may_start`; `None` where the shard was removed.
    pub(super) fn activate<H, E>(
        &self,
        entity: EntityRef,
        owned: &Arc<OwnedShard<A::Grant>>,
        handle: impl Fn(&A) -> Result<H, E>,
        may_start: impl FnOnce() -> Result<(), E>,
        start: impl FnOnce() -> Result<A, E>,
    ) -> Result<Option<H>, E> {
        if let Some(activation) = self.active.get(&entity) {
            return handle(&activation).map(Some);
        }
        may_start()?;
        match self.active.entry(entity) {
            Entry::Occupied(first) => handle(first.get()).map(Some),
            // Checked under the lock of the entry: either the removal finds the entity in the directory, or the entity finds the removal.
            Entry::Vacant(_) if owned.removed.load(Ordering::SeqCst) => Ok(None),
            // It is in the directory before it runs, so it cannot leave before it was added.
            Entry::Vacant(vacant) => {
                let activation = start()?;
                let found = handle(&activation)?;
                vacant.insert(activation);
                Ok(Some(found))
            }
        }
    }

    /// Removes this actor of the entity from the directory; another that follows it stays.
    pub(super) fn remove(&self, entity: EntityRef, actor: &A::ActorId) {
        self.active.remove_if(&entity, |_, activation| activation.actor() == *actor);
    }

    /// Begins to close the shard: it admits nothing from here on, and is drained once no command is in flight.
    pub(super) fn begin_closing(&self, shard: Shard) -> Option<Arc<OwnedShard<A::Grant>>> {
        let owned = self.owned(shard)?;
        owned.closing.store(true, Ordering::SeqCst);
        Some(owned)
    }

    /// Removes a closing shard and its entities from the directory. Returns what `handle` makes of each, to stop it.
    pub(super) fn remove_shard<H>(
        &self,
        shard: Shard,
        owned: &Arc<OwnedShard<A::Grant>>,
        handle: impl Fn(&A) -> H,
    ) -> Vec<H> {
        owned.removed.store(true, Ordering::SeqCst);
        self.shards.remove_if(&shard, |_, now| Arc::ptr_eq(now, owned));
        let mut leaving = Vec::new();
        self.active.retain(|_, activation| {
            let stays = !Arc::ptr_eq(activation.owned(), owned);
            if !stays {
                leaving.push(handle(activation));
            }
            stays
        });
        leaving
    }
}

impl<G> OwnedShard<G> {
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    pub(super) fn is_drained(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) == 0
    }
}

/// A slot of a shard and of an entity, and an entry in the set of commands in flight: the bounds of mailboxes (design 6, *Overload*).
/// Freed on drop.
pub struct Slot {
    shard: Arc<AtomicUsize>,
    entity: Option<Arc<AtomicUsize>>,
    command: Option<(Arc<Map<CommandId, ()>>, CommandId)>,
}

impl Slot {
    /// Counted before it is compared: of two requests for the last slot, at most one gets it.
    fn in_shard(waiting: &Arc<AtomicUsize>, bound: usize) -> Option<Self> {
        let before = waiting.fetch_add(1, Ordering::SeqCst);
        let slot = Self { shard: Arc::clone(waiting), entity: None, command: None };
        (before < bound).then_some(slot)
    }

    pub(super) fn and_in_entity(mut self, waiting: &Arc<AtomicUsize>, bound: usize) -> Option<Self> {
        let before = waiting.fetch_add(1, Ordering::SeqCst);
        self.entity = Some(Arc::clone(waiting));
        (before < bound).then_some(self)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some((in_flight, id)) = &self.command {
            in_flight.remove(id);
        }
        if let Some(entity) = &self.entity {
            entity.fetch_sub(1, Ordering::SeqCst);
        }
        // Last: closing the shard waits for it.
        self.shard.fetch_sub(1, Ordering::SeqCst);
    }
}

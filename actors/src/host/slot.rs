//! The bounds of mailboxes: a slot for each command that waits (design 6, *Overload*).

use dashmap::DashMap;
use domain::CommandId;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A slot of a shard and of an entity, and an entry in the set of commands in flight. Freed on drop.
pub struct Slot {
    shard: Arc<AtomicUsize>,
    entity: Option<Arc<AtomicUsize>>,
    pub(super) command: Option<(Arc<DashMap<CommandId, ()>>, CommandId)>,
}

impl Slot {
    /// Counted before it is compared: of two requests for the last slot, at most one gets it.
    pub(super) fn in_shard(waiting: &Arc<AtomicUsize>, bound: usize) -> Option<Self> {
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

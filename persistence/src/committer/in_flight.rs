//! The entities that have commits in flight to the store. A read of such an entity may be stale at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uuid::Uuid;

/// Clones share the counts.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlightCommits(Arc<Mutex<HashMap<Uuid, u32>>>);

/// A commit in flight; ends on drop.
#[derive(Debug)]
pub(super) struct InFlightCommit {
    entity: Uuid,
    book: InFlightCommits,
}

impl InFlightCommits {
    pub(super) fn enter(&self, entity: Uuid) -> InFlightCommit {
        *self.lock().entry(entity).or_default() += 1;
        InFlightCommit { entity, book: self.clone() }
    }

    pub(super) fn has(&self, entity: Uuid) -> bool {
        self.lock().contains_key(&entity)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for InFlightCommit {
    fn drop(&mut self) {
        let mut book = self.book.lock();
        if let Some(count) = book.get_mut(&self.entity) {
            *count -= 1;
            if *count == 0 {
                book.remove(&self.entity);
            }
        }
    }
}

//! Which entities have transitions on their way to the store. Whoever reads such an entity would read it as it will not stay.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uuid::Uuid;

/// Clones share the book.
#[derive(Clone, Debug, Default)]
pub(super) struct UnderWay(Arc<Mutex<HashMap<Uuid, u32>>>);

/// A transition on its way; over on drop.
#[derive(Debug)]
pub(super) struct Crossing {
    entity: Uuid,
    book: UnderWay,
}

impl UnderWay {
    pub(super) fn enter(&self, entity: Uuid) -> Crossing {
        *self.held().entry(entity).or_default() += 1;
        Crossing { entity, book: self.clone() }
    }

    pub(super) fn has(&self, entity: Uuid) -> bool {
        self.held().contains_key(&entity)
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Uuid, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        let mut book = self.book.held();
        if let Some(count) = book.get_mut(&self.entity) {
            *count -= 1;
            if *count == 0 {
                book.remove(&self.entity);
            }
        }
    }
}

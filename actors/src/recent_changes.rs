//! The entities that changed lately, for those who show many of them. A change carries no data: the reader reads what it shows.

use domain::{EntityKind, EntityRef};
use std::collections::BTreeSet;
use std::mem;
use std::sync::{Mutex, PoisonError};
use tokio::sync::Notify;

/// Entities that are named at most; of more, the kinds alone.
const MAX_NAMED: usize = 64;

/// What changed since it was taken last: each entity once, so that its size does not grow with the number of changes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ChangedEntities {
    /// The kinds of all of them.
    pub kinds: BTreeSet<EntityKind>,
    /// `None`: too many changed to name each.
    pub entities: Option<BTreeSet<EntityRef>>,
}

/// Collects changes until they are taken.
#[derive(Default)]
pub struct RecentChanges {
    collected: Mutex<ChangedEntities>,
    noted: Notify,
}

impl RecentChanges {
    pub(crate) fn note(&self, entity: EntityRef) {
        let mut collected = self.collected.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = collected.kinds.is_empty();
        if is_first {
            collected.entities = Some(BTreeSet::new());
        }
        collected.kinds.insert(entity.kind);
        if let Some(entities) = &mut collected.entities {
            entities.insert(entity);
            if entities.len() > MAX_NAMED {
                collected.entities = None;
            }
        }
        drop(collected);
        if is_first {
            self.noted.notify_one();
        }
    }

    /// Waits for a change, and takes those that were noted. To be called by one reader.
    pub async fn next(&self) -> ChangedEntities {
        loop {
            let changed = mem::take(&mut *self.collected.lock().unwrap_or_else(PoisonError::into_inner));
            if !changed.kinds.is_empty() {
                return changed;
            }
            self.noted.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use uuid::Uuid;

    fn entity(kind: EntityKind, n: usize) -> EntityRef {
        EntityRef { kind, id: Uuid::from_u128(n as u128) }
    }

    #[tokio::test]
    async fn changes_are_taken_once_and_each_entity_is_named_once() {
        let recent = RecentChanges::default();
        for n in [1, 1, 2, 1] {
            recent.note(entity(EntityKind::Node, n));
        }
        let changed = recent.next().await;
        let named = [1, 2].map(|n| entity(EntityKind::Node, n));
        assert_eq!(changed, ChangedEntities { kinds: [EntityKind::Node].into(), entities: Some(named.into()) });
        assert!(recent.next().now_or_never().is_none(), "nothing changed since");
        recent.note(entity(EntityKind::Sku, 7));
        assert_eq!(recent.next().await.kinds, [EntityKind::Sku].into());
    }

    #[tokio::test]
    async fn of_many_changes_the_kinds_are_known_and_the_memory_is_bounded() {
        let recent = RecentChanges::default();
        for n in 0..100_000 {
            recent.note(entity(if n % 2 == 0 { EntityKind::Node } else { EntityKind::Allocation }, n));
            let held = recent.collected.lock().unwrap().entities.as_ref().map_or(0, BTreeSet::len);
            assert!(held <= MAX_NAMED, "{held} entities are held");
        }
        let changed = recent.next().await;
        assert_eq!(
            changed,
            ChangedEntities { kinds: [EntityKind::Node, EntityKind::Allocation].into(), entities: None }
        );
    }

    #[tokio::test]
    async fn reader_that_waits_is_woken_by_a_change() {
        let recent = std::sync::Arc::new(RecentChanges::default());
        let reader = tokio::spawn({
            let recent = std::sync::Arc::clone(&recent);
            async move { recent.next().await }
        });
        tokio::task::yield_now().await;
        recent.note(entity(EntityKind::Rollout, 1));
        assert_eq!(reader.await.unwrap().kinds, [EntityKind::Rollout].into());
    }
}

//! Watches for changes of entities. A watch carries no data: the watcher reads the state after it was woken.

use dashmap::DashMap;
use domain::EntityRef;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// The entities of this process that have watchers.
#[derive(Clone, Default)]
pub(crate) struct WatchRegistry(Arc<DashMap<EntityRef, WatchEntry>>);

struct WatchEntry {
    changed: Arc<Notify>,
    watchers: usize,
}

/// A watcher of one entity; removed on drop.
pub struct EntityWatch {
    entity: EntityRef,
    changed: Arc<Notify>,
    watches: WatchRegistry,
}

impl WatchRegistry {
    pub(crate) fn watch(&self, entity: EntityRef) -> EntityWatch {
        let mut watched = self.0.entry(entity).or_insert_with(|| WatchEntry { changed: Arc::default(), watchers: 0 });
        watched.watchers += 1;
        EntityWatch { entity, changed: Arc::clone(&watched.changed), watches: self.clone() }
    }

    pub(crate) fn changed(&self, entity: EntityRef) {
        if let Some(watched) = self.0.get(&entity) {
            watched.changed.notify_waiters();
        }
    }
}

impl EntityWatch {
    /// Completes at the next change on this member after this call: create it before reading, await it after. Changes on another member
    /// do not complete it.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }
}

impl Drop for EntityWatch {
    fn drop(&mut self) {
        self.watches.0.remove_if_mut(&self.entity, |_, watched| {
            watched.watchers -= 1;
            watched.watchers == 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::EntityKind;
    use std::time::Duration;
    use uuid::Uuid;

    fn entity(n: u128) -> EntityRef {
        EntityRef { kind: EntityKind::Sku, id: Uuid::from_u128(n) }
    }

    #[tokio::test]
    async fn change_wakes_the_watchers_of_its_entity_alone() {
        let watches = WatchRegistry::default();
        let (here, elsewhere) = (watches.watch(entity(1)), watches.watch(entity(2)));
        let (changed, unchanged) = (here.changed(), elsewhere.changed());
        watches.changed(entity(1));
        changed.await;
        assert!(tokio::time::timeout(Duration::from_millis(20), unchanged).await.is_err());
    }

    #[test]
    fn dropped_watchers_are_removed() {
        let watches = WatchRegistry::default();
        let (first, second) = (watches.watch(entity(1)), watches.watch(entity(1)));
        drop(first);
        assert_eq!(watches.0.len(), 1);
        drop(second);
        assert!(watches.0.is_empty());
    }
}

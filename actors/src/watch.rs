//! Who waits for an entity to change. A watch carries no news: whoever is woken reads what is true.

use dashmap::DashMap;
use domain::EntityRef;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// The entities of this process that somebody waits for.
#[derive(Clone, Default)]
pub(crate) struct Watches(Arc<DashMap<EntityRef, Watched>>);

struct Watched {
    changed: Arc<Notify>,
    watchers: usize,
}

/// One who waits; forgotten when dropped.
pub struct Watch {
    entity: EntityRef,
    changed: Arc<Notify>,
    watches: Watches,
}

impl Watches {
    pub(crate) fn watch(&self, entity: EntityRef) -> Watch {
        let mut watched = self.0.entry(entity).or_insert_with(|| Watched { changed: Arc::default(), watchers: 0 });
        watched.watchers += 1;
        Watch { entity, changed: Arc::clone(&watched.changed), watches: self.clone() }
    }

    pub(crate) fn changed(&self, entity: EntityRef) {
        if let Some(watched) = self.0.get(&entity) {
            watched.changed.notify_waiters();
        }
    }
}

impl Watch {
    /// Completes at the next change here after this call: create it before reading, await it after. What changes on another
    /// member is not heard of.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watches.0.remove_if_mut(&self.entity, |_, watched| {
            watched.watchers -= 1;
            watched.watchers == 0
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use domain::Kind;
    use std::time::Duration;
    use uuid::Uuid;

    fn entity(n: u128) -> EntityRef {
        EntityRef { kind: Kind::Sku, id: Uuid::from_u128(n) }
    }

    #[tokio::test]
    async fn a_change_wakes_those_who_wait_for_it_and_nobody_else() {
        let watches = Watches::default();
        let (here, elsewhere) = (watches.watch(entity(1)), watches.watch(entity(2)));
        let (changed, unchanged) = (here.changed(), elsewhere.changed());
        watches.changed(entity(1));
        changed.await;
        assert!(tokio::time::timeout(Duration::from_millis(20), unchanged).await.is_err());
    }

    #[test]
    fn nothing_is_kept_of_those_who_have_gone() {
        let watches = Watches::default();
        let (first, second) = (watches.watch(entity(1)), watches.watch(entity(1)));
        drop(first);
        assert_eq!(watches.0.len(), 1);
        drop(second);
        assert!(watches.0.is_empty());
    }
}

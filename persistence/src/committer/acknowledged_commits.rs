//! What a worker has acknowledged last, compared with the database at each new connection: a failover to a standby that did not have all
//! commits, or a restored backup, loses some, and the database itself cannot know.

use domain::commit::Epoch;
use domain::id::{EntityRef, Shard};
use domain::state_machine::Timestamp;
use sqlx::{PgConnection, Row};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use uuid::Uuid;

/// The entities whose last transition a worker remembers. At a thousand transitions a second these are the last eight seconds; what a
/// failover loses is the lag of a standby.
const ENTITIES_MAX: usize = 8192;

/// How long it remembers them: no failover loses more, and the history of older ones may have been removed meanwhile.
const MEMORY: Duration = Duration::from_secs(3600);

/// The database stores microseconds.
const ROUNDING: Duration = Duration::from_millis(1);

/// A transition that was answered with *applied*.
#[derive(Clone, Copy, Debug)]
pub(super) struct Acknowledgement {
    pub(super) entity: EntityRef,
    pub(super) shard: Shard,
    pub(super) version: i64,
    /// With the sequence number: which transition it was. Another one may have led to the same version since.
    pub(super) epoch: Epoch,
    pub(super) seq: i64,
    pub(super) at: Timestamp,
}

/// The last acknowledged transition of each of the entities that changed last.
#[derive(Debug, Default)]
pub(super) struct AcknowledgedCommits {
    by_entity: HashMap<Uuid, (u64, Instant, Acknowledgement)>,
    /// The oldest first; an entry whose number is not the entity's is of an earlier transition.
    order: VecDeque<(u64, Uuid)>,
    next: u64,
}

impl AcknowledgedCommits {
    pub(super) fn is_empty(&self) -> bool {
        self.by_entity.is_empty()
    }

    pub(super) fn record(&mut self, acknowledged: Acknowledgement) {
        let id = acknowledged.entity.id;
        self.next += 1;
        self.by_entity.insert(id, (self.next, Instant::now(), acknowledged));
        self.order.push_back((self.next, id));
        while self.by_entity.len() > ENTITIES_MAX || self.order.len() > 2 * ENTITIES_MAX {
            let Some((number, id)) = self.order.pop_front() else { break };
            if self.by_entity.get(&id).is_some_and(|(last, ..)| *last == number) {
                self.by_entity.remove(&id);
            }
        }
    }

    /// Those that the database does not have. They are forgotten with this.
    pub(super) async fn take_lost(&mut self, connection: &mut PgConnection) -> Result<Vec<LostCommit>, sqlx::Error> {
        self.by_entity.retain(|_, (_, since, _)| since.elapsed() < MEMORY);
        let Some(oldest) = self.by_entity.values().map(|(.., it)| it.at).min() else {
            return Ok(Vec::new());
        };
        let ids: Vec<Uuid> = self.by_entity.keys().copied().collect();
        let rows = sqlx::query("SELECT entity, version, epoch, seq FROM history WHERE entity = ANY ($1) AND at >= $2")
            .bind(&ids)
            .bind(oldest - ROUNDING)
            .fetch_all(&mut *connection)
            .await?;
        let mut stored: HashSet<(Uuid, i64, i64, i64)> = HashSet::with_capacity(rows.len());
        for row in rows {
            stored.insert((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?));
        }
        let is_lost = |it: &Acknowledgement| !stored.contains(&(it.entity.id, it.version, it.epoch.0, it.seq));
        let lost: Vec<Acknowledgement> = self.by_entity.values().map(|(.., it)| *it).filter(is_lost).collect();
        if lost.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<Uuid> = lost.iter().map(|it| it.entity.id).collect();
        let rows =
            sqlx::query("SELECT id, version FROM entity WHERE id = ANY ($1)").bind(&ids).fetch_all(connection).await?;
        let mut versions: HashMap<Uuid, i64> = HashMap::new();
        for row in rows {
            versions.insert(row.try_get(0)?, row.try_get(1)?);
        }
        for id in &ids {
            self.by_entity.remove(id);
        }
        let of = |it: Acknowledgement| LostCommit {
            entity: it.entity,
            shard: it.shard,
            acknowledged: it.version,
            stored: versions.get(&it.entity.id).copied().unwrap_or(0),
        };
        Ok(lost.into_iter().map(of).collect())
    }
}

/// An entity whose acknowledged transition the database does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostCommit {
    pub entity: EntityRef,
    pub shard: Shard,
    /// The version that was acknowledged.
    pub acknowledged: i64,
    /// The version in the database; 0 where it does not have the entity.
    pub stored: i64,
}

/// Entities whose commits were lost and that are not parked yet: nothing is loaded of them, and nothing committed.
#[derive(Debug, Default)]
pub(super) struct LostCommits {
    unresolved: Mutex<BTreeMap<Uuid, LostCommit>>,
    found: Notify,
}

impl LostCommits {
    pub(super) fn add(&self, lost: &[LostCommit]) {
        if !lost.is_empty() {
            let mut unresolved = self.unresolved.lock().unwrap_or_else(PoisonError::into_inner);
            unresolved.extend(lost.iter().map(|lost| (lost.entity.id, *lost)));
            drop(unresolved);
            self.found.notify_one();
        }
    }

    pub(super) fn has(&self, entity: Uuid) -> bool {
        self.unresolved.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&entity)
    }

    /// Waits until there are some.
    pub(super) async fn wait(&self) -> Vec<LostCommit> {
        loop {
            let found = self.found.notified();
            let unresolved: Vec<_> =
                self.unresolved.lock().unwrap_or_else(PoisonError::into_inner).values().copied().collect();
            if !unresolved.is_empty() {
                return unresolved;
            }
            found.await;
        }
    }

    pub(super) fn resolve(&self, entity: Uuid) {
        self.unresolved.lock().unwrap_or_else(PoisonError::into_inner).remove(&entity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::id::EntityKind;

    #[test]
    fn memory_is_bounded_and_has_the_last_of_each_entity() {
        let mut acknowledged = AcknowledgedCommits::default();
        let at = |id: usize, version: i64| Acknowledgement {
            entity: EntityRef { kind: EntityKind::Node, id: Uuid::from_u128(id as u128) },
            shard: Shard(0),
            version,
            epoch: Epoch(1),
            seq: version,
            at: Timestamp::UNIX_EPOCH,
        };
        for id in 0..2 * ENTITIES_MAX {
            acknowledged.record(at(id, 1));
        }
        assert_eq!(acknowledged.by_entity.len(), ENTITIES_MAX);
        for version in 2..100_000 {
            acknowledged.record(at(7, version));
        }
        assert!(acknowledged.order.len() <= 2 * ENTITIES_MAX && acknowledged.by_entity.len() <= ENTITIES_MAX);
        assert_eq!(acknowledged.by_entity.get(&Uuid::from_u128(7)).map(|(.., it)| it.version), Some(99_999));
    }
}

//! What lives here, as the supervision tree and the figures show it.

use super::Host;
use domain::commit::Epoch;
use domain::{EntityRef, Kind, Shard, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// An entity as the supervision tree shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EntityRow {
    pub kind: Kind,
    pub id: Uuid,
    pub shard: Shard,
    pub status: EntityStatus,
    pub state: Option<String>,
    pub since: Option<Timestamp>,
    pub version: i64,
    pub mailbox_depth: usize,
    pub restarts: u64,
    pub last_error: Option<String>,
    pub deadline_at: Option<Timestamp>,
    pub waits_for: Option<String>,
}

/// How an entity stands here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntityStatus {
    Awake,
    /// It ended in failure lately, and is left alone for a moment.
    BackingOff,
    /// It failed too often, and waits for an operator.
    Parked,
}

/// A shard as the supervision tree shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShardRow {
    pub shard: Shard,
    pub epoch: Epoch,
    pub since: Timestamp,
    pub closing: bool,
    pub mailbox_depth: usize,
}

/// What lives here, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    pub shards: usize,
    pub awake: usize,
    pub parked: usize,
    /// Entities that failed lately and are awake again or may be soon.
    pub backing_off: usize,
    /// Commands that wait in front of entities.
    pub mailbox_depth: usize,
    pub failures_total: u64,
}

impl Host {
    /// Every entity that is awake, backing off or parked here, in order.
    #[must_use]
    pub fn entities(&self) -> Vec<EntityRow> {
        // One map after the other: holding both could wait for one who holds them the other way round.
        let failed = self.failures.iter().map(|failures| (*failures.key(), failures.row(*failures.key())));
        let mut rows: BTreeMap<_, _> = failed.collect();
        for awake in &self.awake {
            let row = awake.facts.row(*awake.key(), rows.get(awake.key()));
            rows.insert(*awake.key(), row);
        }
        rows.into_values().collect()
    }

    /// One entity as it stands here; `None` where it is asleep.
    #[must_use]
    pub fn entity(&self, entity: EntityRef) -> Option<EntityRow> {
        let failed = self.failures.get(&entity).map(|failures| failures.row(entity));
        let awake = self.awake.get(&entity).map(|awake| awake.facts.row(entity, failed.as_ref()));
        awake.or(failed)
    }

    /// The shards in this process's hands, in order.
    #[must_use]
    pub fn shards(&self) -> Vec<ShardRow> {
        let mut rows: Vec<_> = self
            .shards
            .iter()
            .map(|owned| ShardRow {
                shard: owned.term.shard,
                epoch: owned.term.epoch,
                since: owned.since,
                closing: owned.closing.load(Ordering::Relaxed),
                mailbox_depth: owned.waiting.load(Ordering::Relaxed),
            })
            .collect();
        rows.sort_by_key(|row| row.shard);
        rows
    }

    /// How much there is of everything, without a look at any one entity.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let (mut parked, mut backing_off) = (0, 0);
        for failures in &self.failures {
            if failures.parked.is_some() { parked += 1 } else { backing_off += 1 }
        }
        Figures {
            shards: self.shards.len(),
            awake: self.awake.len(),
            parked,
            backing_off,
            mailbox_depth: self.shards.iter().map(|owned| owned.waiting.load(Ordering::Relaxed)).sum(),
            failures_total: self.failures_total(),
        }
    }

    /// How often an entity's actor ended in failure since the process began.
    #[must_use]
    pub fn failures_total(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }
}

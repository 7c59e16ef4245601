//! The status of the hosted entities and shards, for the supervision tree and the metrics.

use super::Host;
use domain::commit::Epoch;
use domain::{EntityKind, EntityRef, Shard, Timestamp};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use uuid::Uuid;

/// An entity in the supervision tree.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostedEntity {
    pub kind: EntityKind,
    pub id: Uuid,
    pub shard: Shard,
    pub status: ActivationStatus,
    pub state: Option<String>,
    pub since: Option<Timestamp>,
    pub version: i64,
    pub mailbox_depth: usize,
    pub restarts: u64,
    pub last_error: Option<String>,
    pub deadline_at: Option<Timestamp>,
    pub waits_for: Option<String>,
}

/// The status of an entity on this member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationStatus {
    Awake,
    /// Its actor failed, and it backs off.
    BackingOff,
    /// It failed too often, and waits for an operator.
    Parked,
}

/// A shard in the supervision tree.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostedShard {
    pub shard: Shard,
    pub epoch: Epoch,
    pub since: Timestamp,
    pub closing: bool,
    pub mailbox_depth: usize,
}

/// Counts of the hosted shards and entities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMetrics {
    pub shards: usize,
    pub awake: usize,
    pub parked: usize,
    /// Entities that failed lately and are active again or may be soon.
    pub backing_off: usize,
    /// Commands that wait in mailboxes.
    pub mailbox_depth: usize,
    pub failures_total: u64,
}

impl Host {
    /// Every entity that is active, backing off or parked here, in order.
    #[must_use]
    pub fn entities(&self) -> Vec<HostedEntity> {
        // One map after the other: holding both could deadlock with one who locks them in the other order.
        let failed = self.failures.iter().map(|failures| (*failures.key(), failures.row(*failures.key())));
        let mut rows: BTreeMap<_, _> = failed.collect();
        for activation in &self.handover.active {
            let row = activation.facts.row(*activation.key(), rows.get(activation.key()));
            rows.insert(*activation.key(), row);
        }
        rows.into_values().collect()
    }

    /// The status of one entity; `None` where it is passivated.
    #[must_use]
    pub fn entity(&self, entity: EntityRef) -> Option<HostedEntity> {
        let failed = self.failures.get(&entity).map(|failures| failures.row(entity));
        let activation =
            self.handover.active.get(&entity).map(|activation| activation.facts.row(entity, failed.as_ref()));
        activation.or(failed)
    }

    /// The owned shards, in order.
    #[must_use]
    pub fn shards(&self) -> Vec<HostedShard> {
        let mut rows: Vec<_> = self
            .handover
            .shards
            .iter()
            .map(|owned| HostedShard {
                shard: owned.grant.term.shard,
                epoch: owned.grant.term.epoch,
                since: owned.grant.since,
                closing: owned.closing.load(Ordering::Relaxed),
                mailbox_depth: owned.waiting.load(Ordering::Relaxed),
            })
            .collect();
        rows.sort_by_key(|row| row.shard);
        rows
    }

    /// Counts, without reading any one entity.
    #[must_use]
    pub fn metrics(&self) -> HostMetrics {
        let (mut parked, mut backing_off) = (0, 0);
        for failures in &self.failures {
            if failures.parked.is_some() { parked += 1 } else { backing_off += 1 }
        }
        HostMetrics {
            shards: self.handover.shards.len(),
            awake: self.handover.active.len(),
            parked,
            backing_off,
            mailbox_depth: self.handover.shards.iter().map(|owned| owned.waiting.load(Ordering::Relaxed)).sum(),
            failures_total: self.failures_total(),
        }
    }

    /// How often actors of entities failed since the process began.
    #[must_use]
    pub fn failures_total(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }
}

//! Reads past the mailboxes. They return committed rows, as fresh as the transaction's instant.
//!
//! Bodies are the JSON text that was committed: the caller knows the machine and decodes it.
//!
//! | module | what |
//! | --- | --- |
//! | `entity`, `shard`, `entity_deadlines` | entities and their histories; those of a shard's owner; those by deadline |
//! | `entity_sums`, `entity_totals`, `capacity` | what nodes and accounts add up to; totals for metrics; free GPUs by SKU and region |
//! | `billing_reads`, `account_statement` | the ledger; statements of accounts |
//! | `audit`, `keys`, `policy`, `role_bindings` | the audit log; dependents of keys; policy values; bindings of platform roles |
//! | `fleet_history`, `invariant_checks` | the fleet hour by hour; the reads of the auditor |
//! | `backups`, `replication`, `restored_position` | backups and the archive; the copies of the database; where its commits end |

mod account_statement;
mod audit;
mod backups;
mod billing_reads;
mod capacity;
mod entity;
mod entity_deadlines;
mod entity_sums;
mod entity_totals;
mod fleet_history;
mod invariant_checks;
mod keys;
mod policy;
mod replication;
mod restored_position;
mod role_bindings;
mod shard;

pub use account_statement::{LedgerPosition, LedgerSum, SUM_TIMEOUT};
pub use audit::{AuditFilter, AuditPosition, AuditRow, AuditRowSeal};
pub use backups::BackupTimes;
pub use billing_reads::{AllocationCost, LedgerDiscrepancy, LedgerFilter, LedgerReport, LedgerRow};
pub use capacity::FleetNodeRow;
pub use entity::{
    Cursor, EntityRow, HistoryRow, ListFilter, ListedEntity, NodeRow, NodeVersionRow, SkuReferences, StateCount,
};
pub use entity_deadlines::{WaitingEntity, WaitingFilter, WaitingPosition};
pub use entity_sums::{AccountSum, GpuCount, GpuUse, PrepaidTotal};
pub use entity_totals::{NodeConcerns, RENEWAL_OVERDUE_SECONDS};
pub use fleet_history::{CurrencyRevenue, FleetFilter, FleetHour, TooManyRows};
pub use invariant_checks::{InspectedEntity, Inspection, OutboxBacklog, WaitingCounts};
pub use keys::DependentNode;
pub use policy::{PolicyFilter, PolicyRow};
pub use replication::ReplicationStatus;
pub use restored_position::LastCommit;
pub use role_bindings::{BindingFilter, BindingRow};
pub use shard::{DueTimer, GatewayConnection, OutboxCursor, OverdueEntities, UnsettledEvents};

use crate::idempotency::IdempotencyRecords;
use crate::pool::ReadPool;
use crate::provider_logouts::ProviderLogouts;
use crate::snapshot_seal::SnapshotSealer;
use sqlx::PgPool;

/// The most rows of one page.
pub const PAGE_MAX: u32 = 1000;

/// The reads, over a pool.
#[derive(Clone, Debug)]
pub struct Reads {
    pool: PgPool,
    read_pool: ReadPool,
    seals: Option<SnapshotSealer>,
}

impl Reads {
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { read_pool: ReadPool::like(&pool), pool, seals: None }
    }

    /// Requires a seal on snapshots that are loaded for decisions.
    #[must_use]
    pub fn sealed(self, seals: SnapshotSealer) -> Self {
        Self { seals: Some(seals), ..self }
    }

    /// The stored responses of requests, over the same connections.
    #[must_use]
    pub fn idempotency_records(&self) -> IdempotencyRecords {
        IdempotencyRecords::new(self.read_pool.clone())
    }

    /// The stored logouts at the identity provider, likewise.
    #[must_use]
    pub fn provider_logouts(&self) -> ProviderLogouts {
        ProviderLogouts::new(self.read_pool.clone())
    }
}

/// A page of a list, and where the next one begins.
#[derive(Clone, Debug, PartialEq)]
pub struct RowPage<T, P> {
    pub items: Vec<T>,
    /// `None` on the last page.
    pub next: Option<P>,
}

impl<T, P> RowPage<T, P> {
    /// From one row more than requested, where there is one.
    fn of(mut items: Vec<T>, limit: u32, place: impl Fn(&T) -> P) -> Self {
        let limit = limit.clamp(1, PAGE_MAX) as usize;
        let more = items.len() > limit;
        items.truncate(limit);
        let next = if more { items.last().map(place) } else { None };
        Self { items, next }
    }
}

/// One row more than the page holds, so that the end is known.
fn one_more(limit: u32) -> i64 {
    i64::from(limit.clamp(1, PAGE_MAX)) + 1
}

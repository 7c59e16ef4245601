//! Reads that never enter a mailbox. What they answer was committed; how fresh it is, is the transaction's instant.
//!
//! Bodies come as the JSON text that was committed: whoever asks knows the machine and decodes it.

mod audit;
mod bindings;
mod entity;
mod gpus;
mod inspect;
mod keys;
mod ledger;
mod policy;
mod shard;
mod statement;
mod waiting;

pub use audit::{AuditFilter, AuditPlace, AuditRow, AuditSeal};
pub use bindings::{BindingFilter, BindingRow};
pub use entity::{Cursor, EntityRow, HistoryRow, InUse, ListFilter, NodeRow, StateCount};
pub use gpus::GpuCount;
pub use inspect::{Inspected, Inspection, Pending, Standing};
pub use keys::Dependent;
pub use ledger::{Cost, Disagreement, LedgerFilter, LedgerReport, LedgerRow, Money};
pub use policy::{PolicyFilter, PolicyRow};
pub use shard::{Due, Orphans, OutboxCursor, Overdue};
pub use statement::{ADDED_UP_WITHIN, LedgerPlace, LedgerSum};
pub use waiting::{Waiting, WaitingFilter};

use crate::answers::Answers;
use crate::pool::Kept;
use crate::seal::Seals;
use sqlx::PgPool;

/// The most rows of one page.
pub const PAGE_MAX: u32 = 1000;

/// The reads, over a pool.
#[derive(Clone, Debug)]
pub struct Reads {
    pool: PgPool,
    kept: Kept,
    seals: Option<Seals>,
}

impl Reads {
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        Self { kept: Kept::like(&pool), pool, seals: None }
    }

    /// Snapshots that are decided from must have their seal.
    #[must_use]
    pub fn sealed(self, seals: Seals) -> Self {
        Self { seals: Some(seals), ..self }
    }

    /// The stored answers of requests, over the same connections.
    #[must_use]
    pub fn answers(&self) -> Answers {
        Answers::new(self.kept.clone())
    }
}

/// Some rows of a list, and where the next ones begin.
#[derive(Clone, Debug, PartialEq)]
pub struct Page<T, P> {
    pub items: Vec<T>,
    /// `None`: these were the last.
    pub next: Option<P>,
}

impl<T, P> Page<T, P> {
    /// From one row more than was asked for, if there is one.
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

//! The outbox: events that are not settled yet. The committer writes them and deletes the one whose reaction it commits; events without
//! a reaction are deleted here when the broker has acknowledged them.

use crate::error::{OperationContext, StoreError};
use domain::commit::Epoch;
use domain::event::Event;
use domain::id::{EventId, Shard};
use domain::state_machine::{RequestOrigin, Timestamp};
use sqlx::PgPool;
use uuid::Uuid;

/// An event to be published. `(shard, epoch, seq)` is the order of commits within a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct OutboxRow {
    pub id: EventId,
    pub shard: Shard,
    pub epoch: Epoch,
    pub seq: i64,
    pub event: Event,
    pub origin: RequestOrigin,
    /// When it happened, by the clock of the member that decided it.
    pub created_at: Timestamp,
}

/// Settles the outbox.
#[derive(Clone, Debug)]
pub struct Outbox {
    pool: PgPool,
}

impl Outbox {
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Deletes the rows of these events: the broker has acknowledged them and there is no reaction, or the reaction changed nothing.
    /// Missing rows are no error. Returns how many were deleted.
    ///
    /// # Errors
    /// [`StoreError`]; the rows then stay and are published again, which is harmless.
    pub async fn settle(&self, ids: &[EventId]) -> Result<u64, StoreError> {
        if ids.is_empty() {
            return Ok(0);
        }
        let mut ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        ids.sort_unstable();
        let done = sqlx::query("DELETE FROM outbox WHERE id = ANY ($1)").bind(ids).execute(&self.pool).await;
        done.map(|done| done.rows_affected()).doing("settling outbox rows")
    }
}

//! Where the commits of a database end, and the states of entities that a report compares.

use super::Reads;
use crate::error::{OperationContext, StoreError, damaged};
use crate::membership::TERM_BITS;
use chrono::{DateTime, Utc};
use domain::Shard;
use sqlx::Row;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The last transition of a shard. Its audit rows and events have the numbers that follow `seq`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastCommit {
    pub epoch: i64,
    pub seq: i64,
    /// By the clock of the member that decided it.
    pub at: DateTime<Utc>,
}

impl Reads {
    /// The last transition of each shard that has one since then, of the incarnations before `below`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn last_commits(
        &self,
        below: Option<i64>,
        since: DateTime<Utc>,
    ) -> Result<BTreeMap<Shard, LastCommit>, StoreError> {
        let below = below.map_or(i64::MAX, |incarnation| incarnation << TERM_BITS);
        let rows = sqlx::query(
            "SELECT DISTINCT ON (shard) shard, epoch, seq, at FROM history WHERE at >= $1 AND epoch < $2
             ORDER BY shard, epoch DESC, seq DESC",
        )
        .bind(since)
        .bind(below)
        .fetch_all(&self.pool)
        .await
        .doing("reading where the commits end")?;
        let last = |row: &sqlx::postgres::PgRow| {
            let shard = u8::try_from(row.try_get::<i16, _>("shard")?).map(Shard).map_err(damaged)?;
            Ok((shard, LastCommit { epoch: row.try_get("epoch")?, seq: row.try_get("seq")?, at: row.try_get("at")? }))
        };
        rows.iter().map(last).collect::<Result<_, _>>().doing("reading where the commits end")
    }

    /// The states of those of the entities that there are.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn states_of(&self, ids: &[Uuid]) -> Result<BTreeMap<Uuid, String>, StoreError> {
        let rows: Vec<(Uuid, String)> = sqlx::query_as("SELECT id, state FROM entity WHERE id = ANY ($1)")
            .bind(ids)
            .fetch_all(&self.pool)
            .await
            .doing("reading states of entities")?;
        Ok(rows.into_iter().collect())
    }
}

//! What grows by itself and must be kept small: remembered commands past their day, and the months of the partitioned logs.

use crate::error::{Doing, StoreError};
use crate::pool::begin_locking;
use sqlx::PgPool;
use std::time::Duration;

/// How long a command's reply is kept (decisions 2, *Idempotency-Key*).
pub const COMMANDS_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// Forgets up to `limit` commands older than `kept`, by the database's clock. Answers how many went: fewer than `limit` means
/// that none is left. Several members may sweep at once; they pass over each other's rows.
///
/// # Errors
/// [`StoreError`]
pub async fn forget_commands(pool: &PgPool, kept: Duration, limit: u32) -> Result<u64, StoreError> {
    sqlx::query(
        "DELETE FROM command WHERE id IN (
             SELECT id FROM command WHERE created_at < now() - make_interval(secs => $1)
             ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED)",
    )
    .bind(kept.as_secs_f64())
    .bind(i64::from(limit))
    .execute(pool)
    .await
    .map(|done| done.rows_affected())
    .doing("forgetting old commands")
}

/// Adds up how many entities there are: what many commits appended becomes one row for each kind and state.
///
/// # Errors
/// [`StoreError`]
pub async fn add_up_counts(pool: &PgPool) -> Result<(), StoreError> {
    let add_up = "WITH gone AS (DELETE FROM entity_count RETURNING kind, state, change)
                  INSERT INTO entity_count (kind, state, change)
                  SELECT kind, state, sum(change) FROM gone GROUP BY kind, state HAVING sum(change) <> 0";
    one_at_a_time(pool, add_up).await.doing("adding up the counts of entities")
}

/// Counts the entities anew, whatever was appended: what was committed by a release that appends nothing is counted too. A commit and
/// what it appends are seen together or not at all, so nothing is missed and nothing is counted twice.
///
/// # Errors
/// [`StoreError`]
pub async fn count_anew(pool: &PgPool) -> Result<(), StoreError> {
    let count = "WITH gone AS (DELETE FROM entity_count)
                 INSERT INTO entity_count (kind, state, change) SELECT kind, state, count(*) FROM entity GROUP BY kind, state";
    one_at_a_time(pool, count).await.doing("counting entities anew")
}

/// Two of them at once would each take what the other one took as well.
async fn one_at_a_time(pool: &PgPool, statement: &'static str) -> Result<(), sqlx::Error> {
    let mut transaction = begin_locking(pool).await?;
    sqlx::query("SELECT pg_advisory_xact_lock(7311704871502)").execute(&mut *transaction).await?;
    sqlx::query(statement).execute(&mut *transaction).await?;
    transaction.commit().await
}

/// Makes the partitions of history and audit for this month and `months_ahead` more. To be called at start and now and then:
/// what has no month goes to a default partition, so that a late call costs order and no row. Answers how many were made.
///
/// # Errors
/// [`StoreError`]
pub async fn make_partitions(pool: &PgPool, months_ahead: u8) -> Result<u32, StoreError> {
    let made: i32 = sqlx::query_scalar("SELECT make_partitions($1)")
        .bind(i32::from(months_ahead))
        .fetch_one(pool)
        .await
        .doing("making partitions")?;
    Ok(made.unsigned_abs())
}

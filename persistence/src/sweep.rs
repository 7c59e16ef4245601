//! What grows by itself and must be kept small: remembered commands past their day, and the months of the partitioned logs.

use crate::error::{Doing, StoreError};
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

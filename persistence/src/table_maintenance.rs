//! Sweeps: expired command records, missing terms of allocations, counts of entities, and the partitions of the logs by month.

use crate::error::{OperationContext, StoreError};
use crate::pool::begin_locking;
use domain::state_machine::Timestamp;
use sqlx::PgPool;
use std::time::Duration;
use uuid::Uuid;

/// Deletes up to `limit` commands older than `retention` (policy `retention.command_ids_hours`), by the database's clock. Returns how many: fewer
/// than `limit` means that none is left. Several members may sweep at once; they skip each other's rows.
///
/// # Errors
/// [`StoreError`]
pub async fn delete_commands(pool: &PgPool, retention: Duration, limit: u32) -> Result<u64, StoreError> {
    sqlx::query(
        "DELETE FROM command WHERE id IN (
             SELECT id FROM command WHERE created_at < now() - make_interval(secs => $1)
             ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED)",
    )
    .bind(retention.as_secs_f64())
    .bind(i64::from(limit))
    .execute(pool)
    .await
    .map(|done| done.rows_affected())
    .doing("deleting old command ids")
}

/// Stores the node's term of active and released allocations that have none: a replica of the release before migration 0054 places without
/// it. Reads up to `limit` allocations of the last eight days, oldest first, from a position on: longer than one may wait for capacity.
/// Returns the position of the last one; `None` where no allocation is left. The node of such an allocation never changes, so a
/// transition at the same time has the same term.
///
/// # Errors
/// [`StoreError`]
pub async fn store_node_terms(
    pool: &PgPool,
    after: Option<(Timestamp, Uuid)>,
    limit: u32,
) -> Result<Option<(Timestamp, Uuid)>, StoreError> {
    sqlx::query_as(
        "WITH page AS MATERIALIZED (
             SELECT id, created_at, state, coalesce(body #>> '{phase,node_id}', body #>> '{phase,last,0}') AS node
             FROM entity
             WHERE kind = 'allocation' AND (created_at, id) > (coalesce($1, now() - interval '8 days'), $2)
             ORDER BY created_at, id LIMIT $3),
         stored AS (
             INSERT INTO term (entity, term)
             SELECT id, 'node/' || node FROM page WHERE state IN ('active', 'released') AND node IS NOT NULL
             ON CONFLICT DO NOTHING)
         SELECT created_at, id FROM page ORDER BY created_at DESC, id DESC LIMIT 1",
    )
    .bind(after.map(|(created_at, _)| created_at))
    .bind(after.map_or(Uuid::nil(), |(_, id)| id))
    .bind(i64::from(limit))
    .fetch_optional(pool)
    .await
    .doing("storing the nodes of allocations")
}

/// Compacts the counts of entities: what many commits appended becomes one row for each kind and state.
///
/// # Errors
/// [`StoreError`]
pub async fn compact_counts(pool: &PgPool) -> Result<(), StoreError> {
    let add_up = "WITH gone AS (DELETE FROM entity_count RETURNING kind, state, change)
                  INSERT INTO entity_count (kind, state, change)
                  SELECT kind, state, sum(change) FROM gone GROUP BY kind, state HAVING sum(change) <> 0";
    one_at_a_time(pool, add_up).await.doing("adding up the counts of entities")
}

/// Compacts the sums of entities: what many commits appended becomes one row for each shard and group.
///
/// # Errors
/// [`StoreError`]
pub async fn compact_sums(pool: &PgPool) -> Result<(), StoreError> {
    let add_up = "WITH gone AS (DELETE FROM entity_sum RETURNING *)
                  INSERT INTO entity_sum (shard, kind, sku, sku_name, region, gpus_free, currency, state, entities, gpus_total, gpus_sold,
                                          gpus_held, balance)
                  SELECT shard, kind, sku, sku_name, region, gpus_free, currency, state, sum(entities), sum(gpus_total), sum(gpus_sold),
                         sum(gpus_held), sum(balance)
                  FROM gone GROUP BY shard, kind, sku, sku_name, region, gpus_free, currency, state
                  HAVING (sum(entities), sum(gpus_total), sum(gpus_sold), sum(gpus_held), sum(balance)) <> (0, 0, 0, 0, 0)";
    one_at_a_time(pool, add_up).await.doing("adding up the sums of entities")
}

/// A count that differed from the entities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CountDifference {
    pub kind: String,
    pub state: String,
    /// How many more entities there are than were counted.
    pub missing: i64,
}

/// Compares the counts of entities with them, corrects what differs, and returns it. A commit and its appended row are seen together or not
/// at all, so that nothing is missed or counted twice.
///
/// # Errors
/// [`StoreError`]; then nothing was corrected.
pub async fn correct_counts(pool: &PgPool) -> Result<Vec<CountDifference>, StoreError> {
    const DOING: &str = "comparing counts with the entities";
    let mut transaction = begin_locking(pool).await.doing(DOING)?;
    sqlx::query("SET LOCAL statement_timeout = 0").execute(&mut *transaction).await.doing(DOING)?;
    sqlx::query(ONE_AT_A_TIME).execute(&mut *transaction).await.doing(DOING)?;
    let rows: Vec<(String, String, i64)> = sqlx::query_as(
        "WITH actual AS (SELECT kind, state, count(*) AS entities FROM entity GROUP BY kind, state),
              stored AS (SELECT kind, state, sum(change) AS entities FROM entity_count GROUP BY kind, state),
              compared AS (
                  SELECT kind, state, coalesce(actual.entities, 0) - coalesce(stored.entities, 0) AS missing
                  FROM actual FULL JOIN stored USING (kind, state))
         INSERT INTO entity_count (kind, state, change) SELECT kind, state, missing FROM compared WHERE missing <> 0
         RETURNING kind, state, change",
    )
    .fetch_all(&mut *transaction)
    .await
    .doing(DOING)?;
    transaction.commit().await.doing(DOING)?;
    let difference = |(kind, state, missing)| CountDifference { kind, state, missing };
    Ok(rows.into_iter().map(difference).collect())
}

const ONE_AT_A_TIME: &str = "SELECT pg_advisory_xact_lock(7311704871502)";

/// Two at once would each delete what the other has deleted as well.
async fn one_at_a_time(pool: &PgPool, statement: &'static str) -> Result<(), sqlx::Error> {
    let mut transaction = begin_locking(pool).await?;
    sqlx::query(ONE_AT_A_TIME).execute(&mut *transaction).await?;
    sqlx::query(statement).execute(&mut *transaction).await?;
    transaction.commit().await
}

/// Creates the partitions of history and audit for this month and `months_ahead` more. To be called at start and from time to time:
/// rows without a partition go to a default partition, so that a late call loses no row. Returns how many were created.
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

//! Removal by age: months of the partitioned logs leave as whole tables, ended entities in batches (deploy/decisions/0072).
//!
//! A month is detached from its log, which locks the log for a moment, and dropped afterwards, when nothing can reach it. A process that is
//! killed in between leaves a table with a mark, which the next run drops.

mod month;

pub use month::Month;

use crate::error::{OperationContext, StoreError};
use crate::pool::begin;
use chrono::{Months, TimeDelta};
use domain::id::EntityKind;
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Acquire as _, PgConnection, PgPool, Row};
use std::time::Duration;

/// How long commits may wait behind a month that is detached. A reader that has the log open for longer is not waited for.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '50ms'";
/// How often one run tries to detach a month, and the pause in between.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The comment on a detached table that is to be dropped. One that an operator has detached has none, and stays.
const DETACHED_MARK: &str = "gpuaas: detached, to be dropped";

/// Rows in one statement.
const BATCH_SIZE: i64 = 1000;

/// A log that is partitioned by month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MonthlyLog {
    History,
    Audit,
}

impl MonthlyLog {
    pub const ALL: [Self; 2] = [Self::History, Self::Audit];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::History => "history",
            Self::Audit => "audit",
        }
    }

    pub(crate) fn partition(self, month: Month) -> String {
        format!("{}_{}", self.name(), month.suffix())
    }
}

/// How many months are retained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionMonths {
    pub history: u32,
    pub audit: u32,
    pub ended_entities: u32,
}

/// What ended before these instants is removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionCutoffs {
    pub history: Timestamp,
    pub audit: Timestamp,
    pub ended_entities: Timestamp,
}

impl RetentionCutoffs {
    #[must_use]
    pub fn of(months: RetentionMonths, now: Timestamp) -> Self {
        // At the beginning of the calendar nothing is old enough.
        let before =
            |count| now.checked_sub_months(Months::new(count)).unwrap_or(chrono::DateTime::<chrono::Utc>::MIN_UTC);
        Self {
            history: before(months.history),
            audit: before(months.audit),
            ended_entities: before(months.ended_entities),
        }
    }

    #[must_use]
    pub const fn of_log(&self, log: MonthlyLog) -> Timestamp {
        match log {
            MonthlyLog::History => self.history,
            MonthlyLog::Audit => self.audit,
        }
    }
}

/// A month of a log that has a table of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MonthPartition {
    pub log: MonthlyLog,
    pub month: Month,
    /// False where it was detached and is not dropped yet.
    pub is_attached: bool,
}

/// Whether a month left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MonthRemoval {
    Removed,
    /// A transaction has the log or the month open. Nothing changed; the next run tries again.
    InUse,
}

/// The earlier one of a member's clock and the database's: a clock that is ahead must not remove what is to be retained.
///
/// # Errors
/// [`StoreError`]
pub async fn earlier_clock(pool: &PgPool, now: Timestamp) -> Result<Timestamp, StoreError> {
    sqlx::query_scalar("SELECT least($1, clock_timestamp())")
        .bind(now)
        .fetch_one(pool)
        .await
        .doing("reading the database's clock")
}

/// The months that have tables, oldest first. A detached table without the mark is an operator's own and is left out.
///
/// # Errors
/// [`StoreError`]
pub async fn partitions(pool: &PgPool) -> Result<Vec<MonthPartition>, StoreError> {
    const DOING: &str = "listing the months of the logs";
    let rows = sqlx::query(
        "SELECT relname::text AS name, relispartition AS is_attached FROM pg_class
         WHERE relkind = 'r' AND pg_table_is_visible(oid) AND relname ~ '^(history|audit)_[0-9]{4}_[0-9]{2}$'
           AND (relispartition OR obj_description(oid, 'pg_class') = $1)",
    )
    .bind(DETACHED_MARK)
    .fetch_all(pool)
    .await
    .doing(DOING)?;
    let partitions: Result<Vec<_>, _> = rows.iter().map(partition).collect();
    let mut partitions: Vec<_> = partitions.doing(DOING)?.into_iter().flatten().collect();
    partitions.sort_by_key(|partition| (partition.month, partition.log));
    Ok(partitions)
}

fn partition(row: &PgRow) -> Result<Option<MonthPartition>, sqlx::Error> {
    let (name, is_attached): (String, bool) = (row.try_get("name")?, row.try_get("is_attached")?);
    Ok(MonthlyLog::ALL.into_iter().find_map(|log| {
        let suffix = name.strip_prefix(log.name())?.strip_prefix('_')?;
        Some(MonthPartition { log, month: Month::parse(&suffix.replace('_', "-"))?, is_attached })
    }))
}

/// Those of the months that the next run removes, oldest first.
#[must_use]
pub fn expired(partitions: &[MonthPartition], cutoffs: &RetentionCutoffs) -> Vec<MonthPartition> {
    let is_expired = |it: &&MonthPartition| it.month.end().is_some_and(|end| end <= cutoffs.of_log(it.log));
    partitions.iter().filter(is_expired).copied().collect()
}

/// Detaches a month of the history. From then on no statement on the history reads it.
///
/// # Errors
/// [`StoreError`]
pub async fn detach_month(pool: &PgPool, month: Month) -> Result<MonthRemoval, StoreError> {
    const DOING: &str = "detaching a month of the history";
    let mut transaction = begin(pool, "BEGIN").await.doing(DOING)?;
    let is_detached = detach_within(&mut transaction, MonthlyLog::History, month).await.doing(DOING)?;
    transaction.commit().await.doing(DOING)?;
    Ok(if is_detached { MonthRemoval::Removed } else { MonthRemoval::InUse })
}

/// Detaches and marks a month's table in the caller's transaction, as its last statement: until its end commits wait. Returns false where
/// the log was in use at every attempt; the transaction goes on then.
pub(crate) async fn detach_within(
    transaction: &mut PgConnection,
    log: MonthlyLog,
    month: Month,
) -> Result<bool, sqlx::Error> {
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        let mut savepoint = transaction.begin().await?;
        match try_detach(&mut savepoint, log, month).await {
            Ok(()) => {
                savepoint.commit().await?;
                return Ok(true);
            }
            Err(error) if is_lock_timeout(&error) => savepoint.rollback().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The month's own table is locked first, so that commits wait for no reader of it.
///
/// `DETACH PARTITION CONCURRENTLY` is refused beside a default partition, which takes the rows that no month was made for.
async fn try_detach(connection: &mut PgConnection, log: MonthlyLog, month: Month) -> Result<(), sqlx::Error> {
    let (parent, partition) = (log.name(), log.partition(month));
    sqlx::query(LOCK_TIMEOUT).execute(&mut *connection).await?;
    for statement in [
        format!("LOCK TABLE {partition} IN ACCESS EXCLUSIVE MODE"),
        format!("COMMENT ON TABLE {partition} IS '{DETACHED_MARK}'"),
        format!("ALTER TABLE {parent} DETACH PARTITION {partition}"),
    ] {
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Drops a month's table that was detached and marked; does nothing where there is none.
///
/// # Errors
/// [`StoreError`]
pub async fn drop_detached(pool: &PgPool, log: MonthlyLog, month: Month) -> Result<MonthRemoval, StoreError> {
    const DOING: &str = "dropping a detached month";
    if !partitions(pool).await?.contains(&MonthPartition { log, month, is_attached: false }) {
        return Ok(MonthRemoval::Removed);
    }
    let mut transaction = begin(pool, "BEGIN").await.doing(DOING)?;
    // A reader from before, such as a dump, is not waited for: the next run drops it.
    sqlx::query(LOCK_TIMEOUT).execute(&mut *transaction).await.doing(DOING)?;
    let drop = format!("DROP TABLE IF EXISTS {}", log.partition(month));
    match sqlx::query(sqlx::AssertSqlSafe(drop)).execute(&mut *transaction).await {
        Ok(_) => transaction.commit().await.doing(DOING)?,
        Err(error) if is_lock_timeout(&error) => return Ok(MonthRemoval::InUse),
        Err(error) => return Err(error).doing(DOING),
    }
    Ok(MonthRemoval::Removed)
}

fn is_lock_timeout(error: &sqlx::Error) -> bool {
    const LOCK_NOT_AVAILABLE: &str = "55P03";
    error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() == Some(LOCK_NOT_AVAILABLE)
}

/// Deletes a batch of rows that are older than `before` from the history's default partition: those of members whose clock was wrong.
/// Returns how many; 0 where none is left.
///
/// # Errors
/// [`StoreError`]
pub async fn delete_stray_history(pool: &PgPool, before: Timestamp) -> Result<u64, StoreError> {
    sqlx::query(
        "DELETE FROM history_default WHERE ctid = ANY (ARRAY(SELECT ctid FROM history_default WHERE at < $1 LIMIT $2))",
    )
    .bind(before)
    .bind(BATCH_SIZE)
    .execute(pool)
    .await
    .map(|done| done.rows_affected())
    .doing("deleting old rows of the history's default partition")
}

/// Ended entities that did not change since `$3`. One with a timer, a recording or an operator's mark is not done yet.
const ENDED: &str = "FROM entity
     WHERE kind = $1 AND state = ANY ($2) AND created_at < $3 AND updated_at < $3
       AND NOT EXISTS (SELECT FROM deadline WHERE deadline.entity = entity.id)
       AND NOT EXISTS (SELECT FROM recording WHERE recording.session_id = entity.id)
       AND NOT EXISTS (SELECT FROM parked WHERE parked.entity = entity.id)";

/// Deletes a batch of entities of a kind that ended before `before`, with their terms. Returns how many; 0 where none is left.
///
/// # Errors
/// [`StoreError`]
pub async fn delete_ended(pool: &PgPool, kind: EntityKind, before: Timestamp) -> Result<u64, StoreError> {
    // The row's lock is that of a commit: what changes meanwhile is not ended, and is skipped.
    let query = format!(
        "WITH ended AS MATERIALIZED (SELECT id {ENDED} ORDER BY created_at, id LIMIT $4 FOR UPDATE SKIP LOCKED),
         gone AS (DELETE FROM entity WHERE id IN (SELECT id FROM ended) RETURNING id, kind, state),
         terms AS (DELETE FROM term WHERE entity IN (SELECT id FROM ended)),
         counted AS (
             INSERT INTO entity_count (kind, state, change) SELECT kind, state, -count(*) FROM gone GROUP BY kind, state)
         SELECT count(*) FROM gone"
    );
    let gone: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(kind.as_str())
        .bind(kind.ended_states())
        .bind(before)
        .bind(BATCH_SIZE)
        .fetch_one(pool)
        .await
        .doing("deleting ended entities")?;
    Ok(gone.unsigned_abs())
}

/// How many entities of a kind ended before `before`.
///
/// # Errors
/// [`StoreError`]
pub async fn count_ended(pool: &PgPool, kind: EntityKind, before: Timestamp) -> Result<u64, StoreError> {
    let query = format!("SELECT count(*) {ENDED}");
    let count: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
        .bind(kind.as_str())
        .bind(kind.ended_states())
        .bind(before)
        .fetch_one(pool)
        .await
        .doing("counting ended entities")?;
    Ok(count.unsigned_abs())
}

/// How long ago what is removed first had to be removed: zero where nothing is to be removed.
///
/// # Errors
/// [`StoreError`]
pub async fn lag_of_ended(pool: &PgPool, before: Timestamp) -> Result<TimeDelta, StoreError> {
    let query = format!("SELECT updated_at {ENDED} ORDER BY created_at, id LIMIT 1");
    let mut lag = TimeDelta::zero();
    for kind in EntityKind::ALL.iter().filter(|kind| !kind.ended_states().is_empty()) {
        let oldest: Option<Timestamp> = sqlx::query_scalar(sqlx::AssertSqlSafe(query.clone()))
            .bind(kind.as_str())
            .bind(kind.ended_states())
            .bind(before)
            .fetch_optional(pool)
            .await
            .doing("looking for ended entities")?;
        lag = oldest.map_or(lag, |at| lag.max(before - at));
    }
    Ok(lag)
}

/// As [`lag_of_ended`], for a log.
#[must_use]
pub fn lag_of_log(partitions: &[MonthPartition], cutoffs: &RetentionCutoffs, log: MonthlyLog) -> TimeDelta {
    let ends = expired(partitions, cutoffs).into_iter().filter(|it| it.log == log).filter_map(|it| it.month.end());
    ends.map(|end| cutoffs.of_log(log) - end).max().unwrap_or_default()
}

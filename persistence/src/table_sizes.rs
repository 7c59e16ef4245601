//! How large the tables are, and were: one sample a day, from which their growth follows.

use crate::error::{OperationContext, StoreError};
use domain::id::EntityKind;
use domain::state_machine::Timestamp;
use serde::Serialize;
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::time::Duration;

/// Samples that are retained.
const SAMPLE_RETENTION: Duration = Duration::from_secs(90 * 24 * 60 * 60);
/// Growth is that since the oldest sample within this time.
const GROWTH_WINDOW: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// A sample that is younger says nothing of a day.
const GROWTH_LEAST: Duration = Duration::from_secs(60 * 60);

/// The name of the samples of the whole database, which is no table's.
const WHOLE_DATABASE: &str = "";

/// A table with its partitions, indexes and long values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TableSize {
    pub bytes: u64,
    /// As the planner estimates it.
    pub rows: u64,
    /// 1 where it is not partitioned. Months that are detached and not dropped yet are counted.
    pub partitions: u64,
}

/// How much tables grow in a day, in bytes. What shrinks grows by a negative number; what has no sample that is old enough is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DailyGrowth {
    pub tables: BTreeMap<String, i64>,
    pub database: Option<i64>,
}

/// The tables by name. The months of a log are counted to the log.
///
/// # Errors
/// [`StoreError`]
pub async fn table_sizes(pool: &PgPool) -> Result<BTreeMap<String, TableSize>, StoreError> {
    const DOING: &str = "measuring the tables";
    let rows = sqlx::query(
        "SELECT regexp_replace(relname, '^(history|audit)_([0-9]{4}_[0-9]{2}|default)$', '\\1') AS name,
                sum(pg_total_relation_size(oid))::bigint AS bytes, sum(greatest(reltuples, 0))::bigint AS rows, count(*) AS partitions
         FROM pg_class WHERE relkind = 'r' AND pg_table_is_visible(oid) AND relnamespace <> 'pg_catalog'::regnamespace
         GROUP BY 1",
    )
    .fetch_all(pool)
    .await
    .doing(DOING)?;
    let read = |row: &sqlx::postgres::PgRow| -> Result<(String, TableSize), sqlx::Error> {
        let number = |column: &str| row.try_get::<Option<i64>, _>(column).map(|it| it.unwrap_or(0).unsigned_abs());
        let size = TableSize { bytes: number("bytes")?, rows: number("rows")?, partitions: number("partitions")? };
        Ok((row.try_get("name")?, size))
    };
    rows.iter().map(read).collect::<Result<_, _>>().doing(DOING)
}

/// The size of the whole database in bytes.
///
/// # Errors
/// [`StoreError`]
pub async fn database_size(pool: &PgPool) -> Result<u64, StoreError> {
    let bytes: i64 = sqlx::query_scalar("SELECT pg_database_size(current_database())")
        .fetch_one(pool)
        .await
        .doing("measuring the database")?;
    Ok(bytes.unsigned_abs())
}

/// Stores a sample, where the last one is a day old, and deletes samples that are too old. Returns whether it stored one.
///
/// # Errors
/// [`StoreError`]
pub async fn store_sample(
    pool: &PgPool,
    sizes: &BTreeMap<String, TableSize>,
    now: Timestamp,
) -> Result<bool, StoreError> {
    const DOING: &str = "storing the sizes of the tables";
    let whole = (WHOLE_DATABASE, database_size(pool).await?);
    let sizes = sizes.iter().map(|(name, size)| (name.as_str(), size.bytes)).chain([whole]);
    let (names, bytes): (Vec<_>, Vec<_>) =
        sizes.map(|(name, bytes)| (name, i64::try_from(bytes).unwrap_or(i64::MAX))).unzip();
    let stored = sqlx::query(
        "INSERT INTO table_size (name, measured_at, bytes)
         SELECT name, $3, bytes FROM unnest($1::text[], $2::bigint[]) AS measured (name, bytes)
         WHERE NOT EXISTS (SELECT FROM table_size WHERE measured_at > $3 - interval '1 day')
         ON CONFLICT DO NOTHING",
    )
    .bind(names)
    .bind(bytes)
    .bind(now)
    .execute(pool)
    .await
    .doing(DOING)?;
    sqlx::query("DELETE FROM table_size WHERE measured_at < $1 - make_interval(secs => $2)")
        .bind(now)
        .bind(SAMPLE_RETENTION.as_secs_f64())
        .execute(pool)
        .await
        .doing(DOING)?;
    Ok(stored.rows_affected() > 0)
}

/// The growth since the oldest sample of the last 30 days.
///
/// # Errors
/// [`StoreError`]
pub async fn daily_growth(
    pool: &PgPool,
    sizes: &BTreeMap<String, TableSize>,
    now: Timestamp,
) -> Result<DailyGrowth, StoreError> {
    let samples: Vec<(String, i64, f64)> = sqlx::query_as(
        "SELECT DISTINCT ON (name) name, bytes, extract(epoch FROM $1 - measured_at)::float8 FROM table_size
         WHERE measured_at BETWEEN $1 - make_interval(secs => $2) AND $1 - make_interval(secs => $3)
         ORDER BY name, measured_at",
    )
    .bind(now)
    .bind(GROWTH_WINDOW.as_secs_f64())
    .bind(GROWTH_LEAST.as_secs_f64())
    .fetch_all(pool)
    .await
    .doing("reading how large the tables were")?;
    let mut growth = DailyGrowth::default();
    for (name, before, seconds) in samples {
        if name == WHOLE_DATABASE {
            growth.database = Some(per_day(before, database_size(pool).await?, seconds));
        } else if let Some(size) = sizes.get(&name) {
            growth.tables.insert(name, per_day(before, size.bytes, seconds));
        }
    }
    Ok(growth)
}

fn per_day(before: i64, bytes: u64, seconds: f64) -> i64 {
    let change = i64::try_from(bytes).unwrap_or(i64::MAX).saturating_sub(before);
    (change as f64 * 86_400.0 / seconds.max(1.0)) as i64
}

/// When the oldest row of each table was written, where an index says so: ended and living entities alike.
///
/// # Errors
/// [`StoreError`]
pub async fn oldest_rows(pool: &PgPool) -> Result<BTreeMap<&'static str, Option<Timestamp>>, StoreError> {
    const DOING: &str = "looking for the oldest rows";
    let kinds: Vec<_> = EntityKind::ALL.iter().map(|kind| kind.as_str()).collect();
    let entity = sqlx::query_scalar(
        "SELECT min(oldest.created_at) FROM unnest($1::text[]) AS kinds (kind)
         CROSS JOIN LATERAL (SELECT created_at FROM entity WHERE entity.kind = kinds.kind ORDER BY created_at, id LIMIT 1) AS oldest",
    )
    .bind(kinds)
    .fetch_one(pool);
    let command = sqlx::query_scalar("SELECT min(created_at) FROM command").fetch_one(pool);
    let recording = sqlx::query_scalar("SELECT min(created_at) FROM recording").fetch_one(pool);
    let outbox = sqlx::query_scalar("SELECT min(written_at) FROM outbox").fetch_one(pool);
    let (entity, command, recording, outbox) = tokio::try_join!(entity, command, recording, outbox).doing(DOING)?;
    Ok([("entity", entity), ("command", command), ("recording", recording), ("outbox", outbox)].into())
}

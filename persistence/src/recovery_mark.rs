//! How far a database's commits have come, so that one that was restored from a backup is recognized: members raise the mark, and publish it where
//! a restore of the database does not reach (decision 0069).

use crate::error::{OperationContext, StoreError};
use crate::membership::{Cluster, TERM_BITS};
use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};
use uuid::Uuid;

/// The server that holds a database: Postgres' system identifier, and the timeline that it writes. A promotion and a point-in-time recovery
/// begin a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerIdentity {
    pub system_identifier: i64,
    pub timeline: i64,
}

/// The marks of one database in their order: a new incarnation is above all marks of the ones before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MarkPosition {
    pub incarnation: i64,
    pub mark: i64,
}

/// The mark that a database has committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecoveryMark {
    /// Random, made with the schema, the same for the life of the cluster.
    pub cluster_id: Uuid,
    pub position: MarkPosition,
    /// The server that committed it; `None` before the first one.
    pub committed_by: Option<ServerIdentity>,
    /// By the database's clock.
    pub raised_at: Option<DateTime<Utc>>,
}

/// The mark of a database, and the server that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkReading {
    /// `None` where the schema is older than marks.
    pub mark: Option<RecoveryMark>,
    pub server: ServerIdentity,
}

/// The timeline is that of the position that is written: the control file follows a promotion later. A standby writes none.
const SERVER: &str = "SELECT system_identifier,
    CASE WHEN pg_is_in_recovery() THEN 0
         ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint END AS timeline
    FROM pg_control_system()";

/// The mark in Postgres.
#[derive(Clone, Debug)]
pub struct RecoveryMarks {
    pool: PgPool,
}

impl RecoveryMarks {
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// # Errors
    /// [`StoreError`]
    pub async fn read(&self) -> Result<MarkReading, StoreError> {
        const DOING: &str = "reading the recovery mark";
        let server = sqlx::query(SERVER).fetch_one(&self.pool).await.and_then(|row| server(&row)).doing(DOING)?;
        let has_marks: bool = sqlx::query_scalar("SELECT to_regclass('recovery_mark') IS NOT NULL")
            .fetch_one(&self.pool)
            .await
            .doing(DOING)?;
        if !has_marks {
            return Ok(MarkReading { mark: None, server });
        }
        let row = sqlx::query(
            "SELECT cluster_id, incarnation, mark, system_identifier, timeline, raised_at FROM recovery_mark, cluster",
        )
        .fetch_one(&self.pool)
        .await;
        Ok(MarkReading { mark: Some(row.and_then(|row| mark(&row)).doing(DOING)?), server })
    }

    /// Raises the mark, and returns it when it is committed.
    ///
    /// # Errors
    /// [`StoreError`]; the mark may have been raised.
    pub async fn raise(&self) -> Result<RecoveryMark, StoreError> {
        let statement = format!(
            "UPDATE recovery_mark SET mark = mark + 1, raised_at = clock_timestamp(),
                 system_identifier = server.system_identifier, timeline = server.timeline
             FROM ({SERVER}) AS server, cluster
             RETURNING cluster_id, incarnation, mark, recovery_mark.system_identifier, recovery_mark.timeline, raised_at"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(statement)).fetch_one(&self.pool).await;
        row.and_then(|row| mark(&row)).doing("raising the recovery mark")
    }
}

impl Cluster {
    /// To be called once on a database that was restored from a backup, while no member runs: takes every shard from its owner and raises all
    /// epochs above any that the lost time can have seen. `above` is the highest incarnation that is known elsewhere. Returns the mark of the
    /// new incarnation.
    ///
    /// # Errors
    /// [`StoreError`]; nothing has changed then.
    pub async fn begin_incarnation(&self, above: i64) -> Result<RecoveryMark, StoreError> {
        let statement = format!(
            "WITH begun AS (
                 UPDATE cluster
                 SET incarnation = greatest(incarnation + 1, $2 + 1, (extract(epoch FROM clock_timestamp()) / 60)::bigint)
                 RETURNING incarnation
             ),
             lifted AS (
                 UPDATE shard SET owner = NULL, epoch = greatest(shard.epoch + 1, begun.incarnation << $1) FROM begun
             )
             UPDATE recovery_mark SET mark = mark + 1, raised_at = clock_timestamp(),
                 system_identifier = server.system_identifier, timeline = server.timeline
             FROM ({SERVER}) AS server, begun
             RETURNING cluster_id, incarnation, mark, recovery_mark.system_identifier, recovery_mark.timeline, raised_at"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(statement))
            .bind(TERM_BITS.cast_signed())
            .bind(above)
            .fetch_one(&self.pool)
            .await;
        row.and_then(|row| mark(&row)).doing("beginning an incarnation")
    }
}

fn server(row: &PgRow) -> Result<ServerIdentity, sqlx::Error> {
    Ok(ServerIdentity { system_identifier: row.try_get("system_identifier")?, timeline: row.try_get("timeline")? })
}

fn mark(row: &PgRow) -> Result<RecoveryMark, sqlx::Error> {
    let system_identifier: Option<i64> = row.try_get("system_identifier")?;
    let timeline: Option<i64> = row.try_get("timeline")?;
    let committed_by = system_identifier
        .zip(timeline)
        .map(|(system_identifier, timeline)| ServerIdentity { system_identifier, timeline });
    Ok(RecoveryMark {
        cluster_id: row.try_get("cluster_id")?,
        position: MarkPosition { incarnation: row.try_get("incarnation")?, mark: row.try_get("mark")? },
        committed_by,
        raised_at: row.try_get("raised_at")?,
    })
}

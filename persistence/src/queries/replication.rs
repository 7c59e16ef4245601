//! How the database is replicated, as its primary sees it.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use sqlx::Row;

/// The standbys of the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicationStatus {
    /// Whether commits wait for a standby.
    pub is_synchronous: bool,
    /// The standbys that may confirm a commit.
    pub synchronous_standbys: u64,
    /// By how many bytes of log the last standby is behind; `None` without a standby.
    pub lag_bytes: Option<u64>,
}

impl Reads {
    /// `None` where the user may not see it: it is no member of `pg_monitor`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn replication_status(&self) -> Result<Option<ReplicationStatus>, StoreError> {
        const DOING: &str = "reading the standbys";
        let row = self
            .read_pool
            .fetch_optional(sqlx::query(
                "SELECT pg_has_role('pg_read_all_stats', 'USAGE') AS visible, current_setting('synchronous_standby_names') <> '' AS synchronous,
                        count(standby.pid) FILTER (WHERE standby.state = 'streaming' AND standby.sync_state IN ('sync', 'quorum')) AS standbys,
                        greatest(max(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN NULL ELSE pg_current_wal_lsn() END, standby.flush_lsn)), 0)::bigint AS lag
                 FROM (VALUES (1)) AS one LEFT JOIN pg_stat_replication AS standby ON true",
            ))
            .await
            .doing(DOING)?;
        let Some(row) = row else { return Ok(None) };
        let read = || -> Result<_, sqlx::Error> {
            let status = ReplicationStatus {
                is_synchronous: row.try_get("synchronous")?,
                synchronous_standbys: u64::try_from(row.try_get::<i64, _>("standbys")?).unwrap_or(0),
                lag_bytes: row.try_get::<Option<i64>, _>("lag")?.and_then(|lag| u64::try_from(lag).ok()),
            };
            Ok(row.try_get::<bool, _>("visible")?.then_some(status))
        };
        read().doing(DOING)
    }
}

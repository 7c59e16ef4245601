//! When the database was last backed up, and its write-ahead log archived.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use chrono::{DateTime, Utc};
use sqlx::Row;
use std::collections::BTreeMap;

/// The ages that alerts watch, as times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupTimes {
    /// The end of the newest backup of each kind (`full`, `diff`, `incr`), as `gpuaas-backup` has recorded it.
    pub completed: BTreeMap<String, DateTime<Utc>>,
    /// When the last segment was archived, or since when none has been; `None` where Postgres archives nothing.
    pub archived_at: Option<DateTime<Utc>>,
}

impl Reads {
    /// # Errors
    /// [`StoreError`]
    pub async fn backup_times(&self) -> Result<BackupTimes, StoreError> {
        const DOING: &str = "reading the ages of backups";
        let rows = sqlx::query("SELECT kind, max(completed_at) AS completed_at FROM backup_record GROUP BY kind")
            .fetch_all(&self.pool)
            .await
            .doing(DOING)?;
        let completed = rows.iter().map(|row| Ok((row.try_get("kind")?, row.try_get("completed_at")?)));
        let archived_at = sqlx::query_scalar(
            "SELECT CASE WHEN current_setting('archive_mode') <> 'off' THEN coalesce(last_archived_time, stats_reset) END
             FROM pg_stat_archiver",
        )
        .fetch_one(&self.pool)
        .await
        .doing(DOING)?;
        Ok(BackupTimes { completed: completed.collect::<Result<_, _>>().doing(DOING)?, archived_at })
    }
}

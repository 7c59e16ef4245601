//! Gauges of backups. What was never made has no series: Postgres may be backed up by other means than `deploy/backup`.

use persistence::metrics::registered;
use persistence::queries::BackupTimes;
use prometheus::{GaugeVec, Opts, Registry};

/// The gauges. Every process exports the same values.
pub struct BackupMetrics {
    completed: GaugeVec,
    archived: GaugeVec,
}

impl BackupMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str, labels: &[&str]| {
            registered(registry, GaugeVec::new(Opts::new(name, help), labels))
        };
        Ok(Self {
            completed: gauges(
                "backup_completed_timestamp_seconds",
                "When the newest backup of the database ended, by its kind: full, diff or incr.",
                &["kind"],
            )?,
            archived: gauges(
                "wal_archived_timestamp_seconds",
                "When Postgres last archived a segment of its write-ahead log by its archive_command.",
                &["archiver"],
            )?,
        })
    }

    pub fn set(&self, times: &BackupTimes) {
        self.completed.reset();
        for (kind, at) in &times.completed {
            self.completed.with_label_values(&[kind]).set(at.timestamp_millis() as f64 / 1000.0);
        }
        self.archived.reset();
        if let Some(at) = times.archived_at {
            self.archived.with_label_values(&["postgres"]).set(at.timestamp_millis() as f64 / 1000.0);
        }
    }
}

//! Metrics of the tables' sizes and of the removal by age. Every process with entities exports the same sizes and lags.

use persistence::metrics::registered;
use persistence::table_sizes::TableSize;
use prometheus::{Gauge, GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry};
use std::collections::BTreeMap;

/// What is removed by age, as the label `of` names it.
pub const REMOVED_KINDS: [&str; 3] = ["history", "audit", "ended_entities"];

/// See the module.
#[derive(Clone, Debug)]
pub struct RetentionMetrics {
    sizes: IntGaugeVec,
    partitions: IntGaugeVec,
    removed: IntCounterVec,
    lag: GaugeVec,
    run_at: Gauge,
}

impl RetentionMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauges = |name: &str, help: &str| registered(registry, IntGaugeVec::new(Opts::new(name, help), &["table"]));
        let removed = IntCounterVec::new(
            Opts::new(
                "retention_removed_total",
                "Months of the history and of the audit log, and ended entities, that this process removed since they were too old.",
            ),
            &["of"],
        )?;
        let lag = GaugeVec::new(
            Opts::new(
                "retention_lag_seconds",
                "For how long the oldest of what is to be removed should have been gone; 0 where nothing is to be removed.",
            ),
            &["of"],
        )?;
        let run_at = Gauge::new(
            "retention_run_timestamp_seconds",
            "When this process last looked at what is to be removed; 0 before the first time.",
        )?;
        registry.register(Box::new(removed.clone()))?;
        registry.register(Box::new(lag.clone()))?;
        registry.register(Box::new(run_at.clone()))?;
        for of in REMOVED_KINDS {
            removed.with_label_values(&[of]).reset();
            lag.with_label_values(&[of]).set(0.0);
        }
        Ok(Self {
            sizes: gauges(
                "table_size_bytes",
                "Bytes of a table in Postgres with its partitions, indexes and long values.",
            )?,
            partitions: gauges(
                "table_partitions",
                "Partitions of a table in Postgres; 1 where it is not partitioned.",
            )?,
            removed,
            lag,
            run_at,
        })
    }

    pub fn set_sizes(&self, sizes: &BTreeMap<String, TableSize>) {
        self.sizes.reset();
        self.partitions.reset();
        for (name, size) in sizes {
            self.sizes.with_label_values(&[name]).set(i64::try_from(size.bytes).unwrap_or(i64::MAX));
            self.partitions.with_label_values(&[name]).set(i64::try_from(size.partitions).unwrap_or(i64::MAX));
        }
    }

    pub fn count_removed(&self, of: &str, count: u64) {
        self.removed.with_label_values(&[of]).inc_by(count);
    }

    pub fn set_lag(&self, of: &str, lag: chrono::TimeDelta) {
        self.lag.with_label_values(&[of]).set(lag.as_seconds_f64());
    }

    pub fn mark_run(&self, at: chrono::DateTime<chrono::Utc>) {
        self.run_at.set(at.timestamp_millis() as f64 / 1000.0);
    }
}

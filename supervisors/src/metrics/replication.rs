//! Gauges of what is replicated: the database to its standbys, and the streams of NATS to the servers of its cluster.

use domain::event::Stream;
use persistence::metrics::registered;
use persistence::queries::ReplicationStatus;
use prometheus::{IntGauge, IntGaugeVec, Opts, Registry};

/// The gauges. Every process exports the same values.
pub struct ReplicationMetrics {
    synchronous: IntGauge,
    standbys: IntGauge,
    lag: IntGauge,
    missing_copies: IntGaugeVec,
}

impl ReplicationMetrics {
    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let gauge = |name: &str, help: &str| registered(registry, IntGauge::new(name, help));
        let missing_copies = IntGaugeVec::new(
            Opts::new(
                "nats_stream_copies_missing",
                "Copies of a stream that SVC_NATS_STREAM_REPLICAS asks for and that no server of the NATS cluster has in full.",
            ),
            &["stream"],
        )?;
        registry.register(Box::new(missing_copies.clone()))?;
        Ok(Self {
            synchronous: gauge(
                "database_synchronous",
                "1 where the database's commits wait for a standby; 0 also where this process's user is no member of pg_monitor.",
            )?,
            standbys: gauge("database_synchronous_standbys", "Connected standbys that may confirm a commit.")?,
            lag: gauge(
                "database_replication_lag_bytes",
                "By how many bytes of log the last connected standby is behind.",
            )?,
            missing_copies,
        })
    }

    pub fn set_database(&self, status: Option<ReplicationStatus>) {
        self.synchronous.set(i64::from(status.is_some_and(|status| status.is_synchronous)));
        let (standbys, lag) = status.map_or((0, 0), |it| (it.synchronous_standbys, it.lag_bytes.unwrap_or(0)));
        self.standbys.set(i64::try_from(standbys).unwrap_or(i64::MAX));
        self.lag.set(i64::try_from(lag).unwrap_or(i64::MAX));
    }

    pub fn set_missing_copies(&self, stream: Stream, missing: usize) {
        self.missing_copies.with_label_values(&[stream.name()]).set(i64::try_from(missing).unwrap_or(i64::MAX));
    }
}

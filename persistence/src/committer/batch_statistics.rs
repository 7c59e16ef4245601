//! The metrics of the committer.

use domain::commit::CommitOutcome;
use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

/// Counters and histograms of all workers. Registered once; a committer that is restarted continues them.
#[derive(Clone, Debug)]
pub struct CommitterMetrics {
    pub(super) outcomes: IntCounterVec,
    pub(super) batch: Histogram,
    pub(super) seconds: Histogram,
    pub(super) waiting: IntGauge,
    pub(super) bisections: IntCounter,
    pub(super) connections: IntCounter,
    pub(super) unpublished: IntCounter,
    pub(super) lost: IntCounter,
}

impl CommitterMetrics {
    /// # Errors
    /// [`prometheus::Error`] where the registry has metrics of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let sizes = vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];
        let seconds = vec![0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
        let metrics = Self {
            outcomes: IntCounterVec::new(
                Opts::new("commit_transitions_total", "Transitions that were to be committed, by outcome."),
                &["outcome"],
            )?,
            batch: Histogram::with_opts(
                HistogramOpts::new("commit_batch_transitions", "Transitions in one statement.").buckets(sizes),
            )?,
            seconds: Histogram::with_opts(
                HistogramOpts::new("commit_statement_seconds", "Time of one statement.").buckets(seconds),
            )?,
            waiting: IntGauge::new("commit_waiting_transitions", "Transitions in flight in the committer.")?,
            bisections: IntCounter::new(
                "commit_bisections_total",
                "Batches halved to find the transition that a constraint refuses.",
            )?,
            connections: IntCounter::new("commit_connections_total", "Connections that the committer opened.")?,
            unpublished: IntCounter::new(
                "commit_unpublished_events_total",
                "Events left to the poll for orphans, since the relay was behind.",
            )?,
            lost: IntCounter::new(
                "commit_lost_transitions_total",
                "Entities whose last acknowledged transition the database did not have at a new connection: a failover lost it.",
            )?,
        };
        registry.register(Box::new(metrics.outcomes.clone()))?;
        registry.register(Box::new(metrics.batch.clone()))?;
        registry.register(Box::new(metrics.seconds.clone()))?;
        registry.register(Box::new(metrics.waiting.clone()))?;
        registry.register(Box::new(metrics.bisections.clone()))?;
        registry.register(Box::new(metrics.connections.clone()))?;
        registry.register(Box::new(metrics.unpublished.clone()))?;
        registry.register(Box::new(metrics.lost.clone()))?;
        Ok(metrics)
    }

    pub(super) fn count(&self, outcome: &CommitOutcome) {
        self.outcomes.with_label_values(&[outcome.into_str()]).inc();
    }
}

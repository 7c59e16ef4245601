//! Metrics of the log gateway (specification, *Observability surface*).

use crate::outbound::log_store::PushFailureKind;
use prometheus::core::{AtomicU64, GenericCounter};
use prometheus::{IntCounterVec, Opts, Registry};
use std::sync::LazyLock;
use strum::IntoEnumIterator as _;

type Counter = GenericCounter<AtomicU64>;

/// Of the process.
pub static COUNTERS: LazyLock<LogGatewayCounters> = LazyLock::new(LogGatewayCounters::new);

/// See [`COUNTERS`].
pub struct LogGatewayCounters {
    pub(super) requests: Counter,
    pub(super) entries: Counter,
    pub(super) bytes: Counter,
    pub(super) rejected: Counter,
    pub(super) upstream_errors: Counter,
    store_failures: IntCounterVec,
}

impl LogGatewayCounters {
    fn new() -> Self {
        // The names are fixed and valid: a failure here fails every test.
        let counter = |name: &str, help: &str| {
            GenericCounter::with_opts(Opts::new(name, help)).unwrap_or_else(|error| unreachable!("{name}: {error}"))
        };
        let opts = Opts::new(
            "node_log_gateway_store_failures_total",
            "Batches that the log store has not taken, by the reason: credentials and address are to be corrected in this service's settings.",
        );
        let store_failures =
            IntCounterVec::new(opts, &["reason"]).unwrap_or_else(|error| unreachable!("store_failures: {error}"));
        // From the start, so that an increase is seen from the first.
        for kind in PushFailureKind::iter() {
            store_failures.with_label_values(&[kind.name()]);
        }
        Self {
            requests: counter(
                "node_log_gateway_requests_total",
                "Batches of log lines that were received, accepted or not.",
            ),
            entries: counter("node_log_gateway_entries_total", "Log lines that the log store has accepted."),
            bytes: counter(
                "node_log_gateway_bytes_total",
                "Bytes of the batches that the log store has accepted, as they were sent.",
            ),
            rejected: counter(
                "node_log_gateway_rejected_total",
                "Batches that were refused, by the gateway or by the log store.",
            ),
            upstream_errors: counter(
                "node_log_gateway_upstream_errors_total",
                "Batches that the log store did not take for a reason that is not in the batch: its failure, or this service's settings.",
            ),
            store_failures,
        }
    }

    /// Counts a batch that the log store has not taken.
    pub(super) fn count_failure(&self, kind: PushFailureKind) {
        self.store_failures.with_label_values(&[kind.name()]).inc();
        if kind.is_of_lines() { self.rejected.inc() } else { self.upstream_errors.inc() }
    }

    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all = [&self.requests, &self.entries, &self.bytes, &self.rejected, &self.upstream_errors];
        all.into_iter().try_for_each(|counter| registry.register(Box::new(counter.clone())))?;
        registry.register(Box::new(self.store_failures.clone()))
    }
}

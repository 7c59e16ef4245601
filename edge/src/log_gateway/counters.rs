//! Metrics of the log gateway (specification, *Observability surface*).

use prometheus::core::{AtomicU64, GenericCounter};
use prometheus::{Opts, Registry};
use std::sync::LazyLock;

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
}

impl LogGatewayCounters {
    fn new() -> Self {
        // The names are fixed and valid: a failure here fails every test.
        let counter = |name: &str, help: &str| {
            GenericCounter::with_opts(Opts::new(name, help)).unwrap_or_else(|error| unreachable!("{name}: {error}"))
        };
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
                "Batches that the log store did not answer, or answered with a failure of its own.",
            ),
        }
    }

    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all = [&self.requests, &self.entries, &self.bytes, &self.rejected, &self.upstream_errors];
        all.into_iter().try_for_each(|counter| registry.register(Box::new(counter.clone())))
    }
}

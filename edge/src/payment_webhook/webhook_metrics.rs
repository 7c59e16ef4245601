//! Metrics of the payment processor's webhooks (specification, *Observability surface*): one counter for each class of failure, so that an
//! alert names the party at fault.

use prometheus::core::{AtomicU64, GenericCounter};
use prometheus::{Opts, Registry};
use std::sync::LazyLock;

type Counter = GenericCounter<AtomicU64>;

/// Of the process, whichever part of it counts.
pub static COUNTERS: LazyLock<WebhookCounters> = LazyLock::new(WebhookCounters::new);

/// See [`COUNTERS`].
pub struct WebhookCounters {
    pub(super) received: Counter,
    pub(super) signature_failures: Counter,
    pub(super) invalid_payload: Counter,
    pub(super) persist_failures: Counter,
    processed_success: Counter,
    processing_failures: Counter,
    not_ours: Counter,
}

impl WebhookCounters {
    fn new() -> Self {
        // The names are fixed and valid: a failure here fails every test.
        let counter = |name: &str, help: &str| {
            GenericCounter::with_opts(Opts::new(name, help)).unwrap_or_else(|error| unreachable!("{name}: {error}"))
        };
        Self {
            received: counter("webhook_events_received_total", "Webhooks received, valid or not."),
            signature_failures: counter(
                "webhook_signature_failures_total",
                "Webhooks with a missing, wrong or expired signature.",
            ),
            invalid_payload: counter(
                "webhook_invalid_payload_total",
                "Webhooks whose body is too large, no event, or another event under a known id.",
            ),
            persist_failures: counter(
                "webhook_persist_failures_total",
                "Webhooks that could not be stored; the processor resends them.",
            ),
            processed_success: counter("webhook_processed_success_total", "Stored events that were processed."),
            processing_failures: counter(
                "webhook_processing_failures_total",
                "Failed attempts to process a stored event; it is retried, and then waits for an operator.",
            ),
            not_ours: counter("webhook_not_ours_total", "Processed events that concern no object of this service."),
        }
    }

    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all = [
            &self.received,
            &self.signature_failures,
            &self.invalid_payload,
            &self.persist_failures,
            &self.processed_success,
            &self.processing_failures,
            &self.not_ours,
        ];
        all.into_iter().try_for_each(|counter| registry.register(Box::new(counter.clone())))
    }

    /// A stored event was processed.
    pub fn processed(&self) {
        self.processed_success.inc();
    }

    /// It concerned nothing of ours.
    pub fn not_ours(&self) {
        self.not_ours.inc();
    }

    /// An attempt to process a stored event failed.
    pub fn processing_failed(&self) {
        self.processing_failures.inc();
    }
}

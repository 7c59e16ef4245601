//! Metrics of the responses to requests with a key (specification, *Observability surface*).

use prometheus::core::{AtomicU64, GenericCounter};
use prometheus::{Opts, Registry};
use std::sync::LazyLock;

use super::stored_response::ResponseKind;

/// Of the process, whatever its roles.
pub static COUNTERS: LazyLock<IdempotencyCounters> = LazyLock::new(IdempotencyCounters::new);

/// See [`COUNTERS`].
pub struct IdempotencyCounters {
    pub(super) persisted_json: GenericCounter<AtomicU64>,
    pub(super) skipped_empty: GenericCounter<AtomicU64>,
    pub(super) skipped_non_json: GenericCounter<AtomicU64>,
    pub(super) replays_served: GenericCounter<AtomicU64>,
}

impl IdempotencyCounters {
    fn new() -> Self {
        // The names are fixed and valid: a failure here fails every test.
        let counter = |name: &str, help: &str| {
            GenericCounter::with_opts(Opts::new(format!("api_idempotency_{name}_total"), help))
                .unwrap_or_else(|error| unreachable!("api_idempotency_{name}_total: {error}"))
        };
        Self {
            persisted_json: counter(
                "persisted_body_json",
                "Responses with a JSON body, errors included, that repeated requests get: stored, sanitized, or computed from the commit.",
            ),
            skipped_empty: counter(
                "skipped_body_empty",
                "Responses without a body to requests with a key: only their status is stored.",
            ),
            skipped_non_json: counter(
                "skipped_body_non_json",
                "Responses to requests with a key whose body is not JSON and is not stored.",
            ),
            replays_served: counter("replays_served", "Repeated requests that got the first response."),
        }
    }

    /// Counts an answer that is not a replay. `is_stored`: it is the one that repetitions get.
    pub(super) fn stored(&self, kind: &ResponseKind, is_stored: bool) {
        match kind {
            ResponseKind::Json if is_stored => self.persisted_json.inc(),
            ResponseKind::Empty => self.skipped_empty.inc(),
            ResponseKind::Other => self.skipped_non_json.inc(),
            ResponseKind::Json | ResponseKind::Secret | ResponseKind::TooLarge => {}
        }
    }

    /// # Errors
    /// Where the registry has metrics of these names.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        let all = [&self.persisted_json, &self.skipped_empty, &self.skipped_non_json, &self.replays_served];
        all.into_iter().try_for_each(|counter| registry.register(Box::new(counter.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::idempotency::stored_response::read;
    use crate::http::error::ApiError;
    use axum::Json;
    use axum::http::StatusCode;
    use axum::response::IntoResponse;

    async fn count(counters: &IdempotencyCounters, answer: impl IntoResponse) -> [u64; 3] {
        let read = read(answer.into_response()).await.unwrap();
        counters.stored(&read.kind, true);
        [&counters.persisted_json, &counters.skipped_empty, &counters.skipped_non_json].map(GenericCounter::get)
    }

    #[tokio::test]
    async fn answers_are_counted_by_what_their_body_is() {
        let counters = IdempotencyCounters::new();
        assert_eq!(count(&counters, Json(1)).await, [1, 0, 0]);
        assert_eq!(count(&counters, ApiError::not_found("node")).await, [2, 0, 0]);
        assert_eq!(count(&counters, StatusCode::NO_CONTENT).await, [2, 1, 0]);
        assert_eq!(count(&counters, "#!/bin/sh").await, [2, 1, 1]);
    }
}

//! Metrics of requests for platform roles and their changes (specification, *Observability surface*).

use axum::http::Method;
use persistence::metrics::registered;
use prometheus::{IntCounter, Registry};

use crate::http::error::{ApiError, Code};

/// The counters of the routes that bind and revoke platform roles.
#[derive(Clone, Debug)]
pub struct PlatformRoleCounters {
    pub(crate) list_requests: IntCounter,
    pub(crate) bind_requests: IntCounter,
    pub(crate) revoke_requests: IntCounter,
    pub(crate) mutation_success: IntCounter,
    pub(crate) mutation_failure: IntCounter,
    pub(crate) admin_denied: IntCounter,
    pub(crate) service_unavailable: IntCounter,
}

impl PlatformRoleCounters {
    /// # Errors
    /// [`prometheus::Error`] where the registry has counters of these names.
    pub fn register(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counter = |name: &str, help: &str| {
            registered(registry, IntCounter::new(format!("api_platform_role_{name}_total"), help))
        };
        Ok(Self {
            list_requests: counter("list_requests", "Requests for the list of platform role bindings.")?,
            bind_requests: counter("bind_requests", "Requests to bind a platform role.")?,
            revoke_requests: counter("revoke_requests", "Requests to revoke a platform role.")?,
            mutation_success: counter("mutation_success", "Platform roles bound or revoked.")?,
            mutation_failure: counter(
                "mutation_failure",
                "Administrators' requests to bind or revoke that were refused.",
            )?,
            admin_denied: counter("admin_denied", "Requests refused because the caller is not an administrator.")?,
            service_unavailable: counter(
                "service_unavailable",
                "Requests that failed because bindings could not be read or written.",
            )?,
        })
    }

    /// Counts a request at its arrival.
    pub(crate) fn count_request(&self, method: &Method) {
        match *method {
            Method::POST => self.bind_requests.inc(),
            Method::DELETE => self.revoke_requests.inc(),
            _ => self.list_requests.inc(),
        }
    }

    /// Counts a request that is refused before it is processed.
    pub(crate) fn count_refused(&self, error: &ApiError) {
        if error.code() == Code::Forbidden {
            self.admin_denied.inc();
        }
        self.count_unavailable(error);
    }

    /// Counts an administrator's change by its outcome.
    pub(crate) fn count_change<T>(&self, outcome: &Result<T, ApiError>) {
        match outcome {
            Ok(_) => self.mutation_success.inc(),
            Err(error) => {
                self.mutation_failure.inc();
                self.count_unavailable(error);
            }
        }
    }

    pub(crate) fn count_unavailable(&self, error: &ApiError) {
        if error.code() == Code::ServiceUnavailable {
            self.service_unavailable.inc();
        }
    }
}

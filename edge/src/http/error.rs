//! The one error of the API and the envelope that carries it.
//!
//! An [`ApiError`] has two halves: what the caller may read (code, message, details) and what the operator needs (the cause). The first is
//! rendered, the second logged, both exactly once, by the request scope ([`crate::http::correlation::RequestScope`]), which alone has the
//! correlation id, the trace and the route. The codes are the closed table in [`code`] (the API's decisions, section 1, "Errors").

use std::{borrow::Cow, error::Error, fmt, sync::Arc, time::Duration};

use axum::{
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

mod code;

pub use code::Code;

/// The body of every error response (service specification, "Errors").
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct Envelope {
    /// Machine-readable, from the closed table of codes.
    #[schema(value_type = String, example = "invalid_request")]
    pub code: Code,
    /// For a person, with the next step.
    pub message: String,
    /// The id under which operators find this request.
    pub correlation_id: String,
    /// Machine-readable; `service` at least, `trace_id` and `span_id` where the request carried a trace.
    #[schema(value_type = Object)]
    pub details: Map<String, Value>,
}

/// An error response.
pub struct ApiError(Box<Parts>);

pub(crate) struct Parts {
    pub(crate) code: Code,
    pub(crate) message: Cow<'static, str>,
    pub(crate) details: Map<String, Value>,
    retry_after: Option<Duration>,
    headers: Vec<(header::HeaderName, HeaderValue)>,
    cause: Option<Box<dyn Error + Send + Sync>>,
    pub(crate) expected: bool,
    /// The page that is answered in place of the envelope.
    pub(crate) page: Option<String>,
}

/// The parts that [`ApiError::into_response`] leaves for the request scope to render and log.
#[derive(Clone)]
pub(crate) struct PendingErrorResponse(pub(crate) Arc<Parts>);

impl ApiError {
    /// An error with the code's own status and, where the code has one, its `Retry-After`.
    #[must_use]
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Parts {
            code,
            message: message.into(),
            details: Map::new(),
            retry_after: code.retry_after(),
            headers: Vec::new(),
            cause: None,
            expected: false,
            page: None,
        }))
    }

    #[must_use]
    pub fn invalid_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    /// `what` names the resource as the API does: "node", "allocation".
    #[must_use]
    pub fn not_found(what: &str) -> Self {
        Self::new(Code::NotFound, format!("There is no such {what}, or it is not yours to see."))
    }

    #[must_use]
    pub fn forbidden(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Forbidden, message)
    }

    /// An internal error. The cause goes to the log alone.
    #[must_use]
    pub fn internal(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Code::InternalError, "The service failed on this request; quote the correlation id to the operator.")
            .because(cause)
    }

    /// A dependency is unavailable at the moment; a retry is safe.
    #[must_use]
    pub fn unavailable(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(
            Code::ServiceUnavailable,
            "The service cannot do this at the moment; try again, with the same Idempotency-Key.",
        )
        .because(cause)
    }

    /// The queue in front of the resource is full.
    #[must_use]
    pub fn overloaded() -> Self {
        Self::new(Code::Overloaded, "The service is too busy; try again after the time in Retry-After.")
    }

    /// Adds a machine-readable detail.
    #[must_use]
    pub fn detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0.details.insert(key.to_owned(), value.into());
        self
    }

    /// The operator's half: why, with its chain of sources. Never answered.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.0.cause = Some(cause.into());
        self
    }

    /// Replaces the code's own `Retry-After`. Rounded up to whole seconds.
    #[must_use]
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.0.retry_after = Some(after);
        self
    }

    #[must_use]
    pub fn header(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.0.headers.push((name, value));
        self
    }

    /// An expected error, which needs no attention: logged as INFO whatever its code.
    #[must_use]
    pub fn expected(mut self) -> Self {
        self.0.expected = true;
        self
    }

    /// For a person whose browser navigates here: a page in place of the envelope.
    #[must_use]
    pub(crate) fn with_page(mut self, html: String) -> Self {
        self.0.page = Some(html);
        self
    }

    #[must_use]
    pub fn code(&self) -> Code {
        self.0.code
    }

    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    #[must_use]
    pub fn details(&self) -> &Map<String, Value> {
        &self.0.details
    }

    /// The operator's half as one line.
    #[must_use]
    pub fn cause(&self) -> Option<String> {
        self.0.cause_chain()
    }
}

impl Parts {
    pub(crate) fn cause_chain(&self) -> Option<String> {
        Some(failures::chain(self.cause.as_deref()?))
    }
}

impl fmt::Debug for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiError")
            .field("code", &self.0.code)
            .field("message", &self.0.message)
            .field("cause", &self.0.cause_chain())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.code, self.0.message)
    }
}

impl Error for ApiError {}

impl IntoResponse for ApiError {
    /// Status and headers; the body is written by the request scope.
    fn into_response(self) -> Response {
        let parts = self.0;
        let mut response = parts.code.status().into_response();
        if let Some(after) = parts.retry_after {
            let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        for (name, value) in &parts.headers {
            response.headers_mut().append(name, value.clone());
        }
        response.extensions_mut().insert(PendingErrorResponse(Arc::from(parts)));
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_and_overloaded_have_retry_after() {
        for error in
            [ApiError::overloaded(), ApiError::unavailable("the store is away"), ApiError::new(Code::RateLimited, "")]
        {
            let response = error.into_response();
            assert!(response.headers().contains_key(header::RETRY_AFTER));
        }
        let half = ApiError::overloaded().retry_after(Duration::from_millis(1500)).into_response();
        assert_eq!(half.headers()[header::RETRY_AFTER], "2");
    }

    #[test]
    fn cause_is_logged_and_never_rendered() {
        #[derive(Debug, thiserror::Error)]
        #[error("could not read the row")]
        struct Outer(#[source] std::io::Error);
        let error = ApiError::internal(Outer(std::io::Error::other("disk of db-3 is gone")));
        assert_eq!(error.cause().unwrap(), "could not read the row: disk of db-3 is gone");
        assert!(!error.message().contains("db-3"));
    }
}

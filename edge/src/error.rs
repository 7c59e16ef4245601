//! The one error of the API and the envelope that carries it.
//!
//! An [`ApiError`] has two halves: what the caller may read (code, message, details) and what the operator needs (the
//! cause). The first is rendered, the second logged, both exactly once, by the request scope
//! ([`crate::correlation::request_scope`]), which alone knows the correlation id, the trace and the route.
//! The codes and their statuses are the table of the API's decisions, section 1 ("Errors").

use std::{borrow::Cow, collections::BTreeMap, error::Error, fmt, sync::Arc, time::Duration};

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::{
    ToSchema,
    openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder, ResponsesBuilder},
};

/// What went wrong, as a caller's program reads it. Closed: a code that is not here is never answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Code {
    InvalidRequest,
    ProbeTargetDenied,
    PolicyOutOfBounds,
    Unauthenticated,
    InvalidNodeIdentity,
    TokenInvalid,
    EnrollmentRejected,
    InsufficientBalance,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    PayloadTooLarge,
    UnsupportedMediaType,
    UpgradeRequired,
    NodeInUse,
    StateConflict,
    ConcurrencyLimitExceeded,
    InsufficientCapacity,
    StaleAttempt,
    IdempotencyInProgress,
    IdempotencyKeyReused,
    RateLimited,
    InternalError,
    UpstreamError,
    ServiceUnavailable,
    Overloaded,
}

/// One row of the error table.
struct Row {
    text: &'static str,
    status: StatusCode,
    retry_after: Option<Duration>,
    meaning: &'static str,
}

const fn row(text: &'static str, status: StatusCode, meaning: &'static str) -> Row {
    Row { text, status, retry_after: None, meaning }
}

const fn retryable(text: &'static str, status: StatusCode, seconds: u64, meaning: &'static str) -> Row {
    Row { text, status, retry_after: Some(Duration::from_secs(seconds)), meaning }
}

impl Code {
    /// Every code, in the order of the table.
    pub const ALL: [Code; 26] = [
        Code::InvalidRequest,
        Code::ProbeTargetDenied,
        Code::PolicyOutOfBounds,
        Code::Unauthenticated,
        Code::InvalidNodeIdentity,
        Code::TokenInvalid,
        Code::EnrollmentRejected,
        Code::InsufficientBalance,
        Code::Forbidden,
        Code::NotFound,
        Code::MethodNotAllowed,
        Code::PayloadTooLarge,
        Code::UnsupportedMediaType,
        Code::UpgradeRequired,
        Code::NodeInUse,
        Code::StateConflict,
        Code::ConcurrencyLimitExceeded,
        Code::InsufficientCapacity,
        Code::StaleAttempt,
        Code::IdempotencyInProgress,
        Code::IdempotencyKeyReused,
        Code::RateLimited,
        Code::InternalError,
        Code::UpstreamError,
        Code::ServiceUnavailable,
        Code::Overloaded,
    ];

    const fn row(self) -> Row {
        use StatusCode as S;
        match self {
            Self::InvalidRequest => row("invalid_request", S::BAD_REQUEST, "the request cannot be acted on as it is"),
            Self::ProbeTargetDenied => {
                row("probe_target_denied", S::BAD_REQUEST, "the service does not connect to this address")
            }
            Self::PolicyOutOfBounds => {
                row("policy_out_of_bounds", S::BAD_REQUEST, "the value is outside the key's bounds")
            }
            Self::Unauthenticated => row("unauthenticated", S::UNAUTHORIZED, "no usable access token"),
            Self::InvalidNodeIdentity => row(
                "invalid_node_identity",
                S::UNAUTHORIZED,
                "the node's certificate is not accepted; see details.reason",
            ),
            Self::TokenInvalid => {
                row("token_invalid", S::UNAUTHORIZED, "the single-use token is unknown, used or expired")
            }
            Self::EnrollmentRejected => {
                row("enrollment_rejected", S::UNAUTHORIZED, "the enrollment token is not accepted")
            }
            Self::InsufficientBalance => {
                row("insufficient_balance", S::PAYMENT_REQUIRED, "the balance does not cover this")
            }
            Self::Forbidden => row("forbidden", S::FORBIDDEN, "the caller may not do this"),
            Self::NotFound => row("not_found", S::NOT_FOUND, "there is no such thing, or not for this caller"),
            Self::MethodNotAllowed => row("method_not_allowed", S::METHOD_NOT_ALLOWED, "the path has no such method"),
            Self::PayloadTooLarge => row("payload_too_large", S::PAYLOAD_TOO_LARGE, "the body is over the limit"),
            Self::UnsupportedMediaType => {
                row("unsupported_media_type", S::UNSUPPORTED_MEDIA_TYPE, "the body is not application/json")
            }
            Self::UpgradeRequired => {
                row("upgrade_required", S::UPGRADE_REQUIRED, "the protocol spoken is not supported")
            }
            Self::NodeInUse => row("node_in_use", S::CONFLICT, "an allocation holds the node"),
            Self::StateConflict => {
                row("state_conflict", S::CONFLICT, "the resource is not in a state that allows this")
            }
            Self::ConcurrencyLimitExceeded => {
                row("concurrency_limit_exceeded", S::CONFLICT, "the limit of active allocations is reached")
            }
            Self::InsufficientCapacity => {
                row("insufficient_capacity", S::CONFLICT, "no node has the GPUs asked for; see details.suggestion")
            }
            Self::StaleAttempt => row("stale_attempt", S::CONFLICT, "the task has a later attempt"),
            Self::IdempotencyInProgress => {
                row("idempotency_in_progress", S::CONFLICT, "the first request with this key is still running")
            }
            Self::IdempotencyKeyReused => {
                row("idempotency_key_reused", S::UNPROCESSABLE_ENTITY, "the key belongs to another request")
            }
            Self::RateLimited => {
                retryable("rate_limited", S::TOO_MANY_REQUESTS, 1, "too many requests; see Retry-After")
            }
            Self::InternalError => {
                row("internal_error", S::INTERNAL_SERVER_ERROR, "the service failed; quote the correlation id")
            }
            Self::UpstreamError => row("upstream_error", S::BAD_GATEWAY, "a service behind this one failed"),
            Self::ServiceUnavailable => retryable(
                "service_unavailable",
                S::SERVICE_UNAVAILABLE,
                2,
                "not possible at the moment; see Retry-After",
            ),
            Self::Overloaded => retryable("overloaded", S::SERVICE_UNAVAILABLE, 1, "too busy; see Retry-After"),
        }
    }

    /// The code as it stands in the envelope.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.row().text
    }

    /// The HTTP status that goes with the code.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        self.row().status
    }

    /// What the code means, for the API's description.
    #[must_use]
    pub const fn meaning(self) -> &'static str {
        self.row().meaning
    }

    /// The code for an answer that a layer below gave with a bare status.
    pub(crate) fn of_status(status: StatusCode) -> Self {
        match status {
            StatusCode::UNAUTHORIZED => Self::Unauthenticated,
            StatusCode::FORBIDDEN => Self::Forbidden,
            StatusCode::NOT_FOUND => Self::NotFound,
            StatusCode::METHOD_NOT_ALLOWED => Self::MethodNotAllowed,
            StatusCode::PAYLOAD_TOO_LARGE => Self::PayloadTooLarge,
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Self::UnsupportedMediaType,
            StatusCode::UPGRADE_REQUIRED => Self::UpgradeRequired,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => Self::ServiceUnavailable,
            StatusCode::BAD_GATEWAY => Self::UpstreamError,
            other if other.is_client_error() => Self::InvalidRequest,
            _ => Self::InternalError,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// The body of every answer that is no success (service specification, "Errors").
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error)]
pub struct Envelope {
    /// Machine-readable, from the closed table of codes.
    #[schema(value_type = String, example = "invalid_request")]
    pub code: Code,
    /// For a person; says what to do next.
    pub message: String,
    /// The id under which operators find this request.
    pub correlation_id: String,
    /// Machine-readable; `service` at least, `trace_id` and `span_id` where the request carried a trace.
    #[schema(value_type = Object)]
    pub details: Map<String, Value>,
}

/// An answer that is no success.
pub struct ApiError(Box<Parts>);

pub(crate) struct Parts {
    pub(crate) code: Code,
    pub(crate) message: Cow<'static, str>,
    pub(crate) details: Map<String, Value>,
    retry_after: Option<Duration>,
    headers: Vec<(header::HeaderName, HeaderValue)>,
    cause: Option<Box<dyn Error + Send + Sync>>,
}

/// What [`ApiError::into_response`] leaves for the request scope to render and log.
#[derive(Clone)]
pub(crate) struct Unrendered(pub(crate) Arc<Parts>);

impl ApiError {
    /// An error with the code's own status and, where the code asks for it, its `Retry-After`.
    #[must_use]
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Parts {
            code,
            message: message.into(),
            details: Map::new(),
            retry_after: code.row().retry_after,
            headers: Vec::new(),
            cause: None,
        }))
    }

    #[must_use]
    pub fn invalid_request(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    /// `what` names the resource as the API calls it: "node", "allocation".
    #[must_use]
    pub fn not_found(what: &str) -> Self {
        Self::new(Code::NotFound, format!("There is no such {what}, or it is not yours to see."))
    }

    #[must_use]
    pub fn forbidden(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Code::Forbidden, message)
    }

    /// A fault of ours. The cause goes to the log alone.
    #[must_use]
    pub fn internal(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(Code::InternalError, "The service failed on this request; quote the correlation id to the operator.")
            .because(cause)
    }

    /// Something that is needed cannot be had at the moment; trying again is safe.
    #[must_use]
    pub fn unavailable(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::new(
            Code::ServiceUnavailable,
            "The service cannot do this at the moment; try again, with the same Idempotency-Key.",
        )
        .because(cause)
    }

    /// The queue in front of what was asked is full.
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
        let cause = self.cause.as_deref()?;
        let mut line = cause.to_string();
        let mut source = cause.source();
        while let Some(inner) = source {
            line.push_str(": ");
            line.push_str(&inner.to_string());
            source = inner.source();
        }
        Some(line)
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
        response.extensions_mut().insert(Unrendered(Arc::from(parts)));
        response
    }
}

/// The answers that a route may give for these codes, for its OpenAPI operation: one response per status, its description
/// listing the codes.
#[must_use]
pub fn openapi_responses(codes: &[Code]) -> utoipa::openapi::Responses {
    let mut by_status = BTreeMap::<u16, Vec<Code>>::new();
    for code in codes {
        let listed = by_status.entry(code.status().as_u16()).or_default();
        if !listed.contains(code) {
            listed.push(*code);
        }
    }
    let mut responses = ResponsesBuilder::new();
    for (status, codes) in by_status {
        let description =
            codes.iter().map(|code| format!("`{code}`: {}", code.meaning())).collect::<Vec<_>>().join("; ");
        let schema = RefOr::Ref(Ref::from_schema_name("Error"));
        let response = ResponseBuilder::new()
            .description(description)
            .content("application/json", ContentBuilder::new().schema(Some(schema)).build())
            .build();
        responses = responses.response(status.to_string(), response);
    }
    responses.build()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_table_of_codes_reads_as_decided() {
        let mut by_status = BTreeMap::<u16, Vec<&str>>::new();
        for code in Code::ALL {
            by_status.entry(code.status().as_u16()).or_default().push(code.as_str());
        }
        let table: Vec<String> =
            by_status.iter().map(|(status, codes)| format!("{status} {}", codes.join(" "))).collect();
        assert_eq!(
            table,
            [
                "400 invalid_request probe_target_denied policy_out_of_bounds",
                "401 unauthenticated invalid_node_identity token_invalid enrollment_rejected",
                "402 insufficient_balance",
                "403 forbidden",
                "404 not_found",
                "405 method_not_allowed",
                "409 node_in_use state_conflict concurrency_limit_exceeded insufficient_capacity stale_attempt \
                 idempotency_in_progress",
                "413 payload_too_large",
                "415 unsupported_media_type",
                "422 idempotency_key_reused",
                "426 upgrade_required",
                "429 rate_limited",
                "500 internal_error",
                "502 upstream_error",
                "503 service_unavailable overloaded",
            ]
        );
        assert_eq!(Code::ALL.iter().map(|code| code.as_str()).collect::<BTreeSet<_>>().len(), Code::ALL.len());
    }

    #[test]
    fn unavailable_and_overloaded_say_when_to_come_back() {
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
    fn the_cause_is_the_operators_alone() {
        #[derive(Debug, thiserror::Error)]
        #[error("could not read the row")]
        struct Outer(#[source] std::io::Error);
        let error = ApiError::internal(Outer(std::io::Error::other("disk of db-3 is gone")));
        assert_eq!(error.cause().unwrap(), "could not read the row: disk of db-3 is gone");
        assert!(!error.message().contains("db-3"));
    }

    #[test]
    fn a_route_lists_its_codes_by_status() {
        let responses = openapi_responses(&[Code::NotFound, Code::NodeInUse, Code::StateConflict, Code::NodeInUse]);
        let json = serde_json::to_value(&responses).unwrap();
        assert_eq!(json.as_object().unwrap().keys().collect::<Vec<_>>(), ["404", "409"]);
        let conflict = json["409"]["description"].as_str().unwrap();
        assert!(conflict.contains("`node_in_use`") && conflict.contains("`state_conflict`"));
        assert_eq!(json["404"]["content"]["application/json"]["schema"]["$ref"], "#/components/schemas/Error");
    }
}

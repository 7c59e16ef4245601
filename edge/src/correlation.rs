//! The scope of a request: its correlation id, its trace, its span, and the one place where errors become bodies.
//!
//! `X-Correlation-Id` is taken from the request when it is 1 to 128 characters of `[A-Za-z0-9._-]`, else made; it is
//! always in the response. W3C Trace Context (`traceparent`, `tracestate`) is read and carried on with a span of ours.

use std::{fmt, sync::Arc, time::Instant};

use axum::{
    body::Body,
    extract::{FromRequestParts, MatchedPath, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request},
    middleware::Next,
    response::{IntoResponse, Response},
};
use rand::Rng;
use serde_json::Value;
use tracing::{Instrument, Span, debug, error, field, info, info_span, warn};

use crate::error::{ApiError, Code, Envelope, Parts, Unrendered};

/// The header that carries the correlation id, in and out.
pub const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");
const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
/// W3C Trace Context asks to carry at least 512 characters of `tracestate`; what is longer is dropped.
const TRACESTATE_MAX: usize = 512;

/// Ties together whatever one request caused: log lines, events, commands, tasks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CorrelationId(Arc<str>);

impl CorrelationId {
    /// The longest id taken over, in characters.
    pub const MAX_LEN: usize = 128;

    /// `None` where the text is no acceptable id.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let acceptable = (1..=Self::MAX_LEN).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
        acceptable.then(|| Self(text.into()))
    }

    /// A new id, for a request that brought none.
    #[must_use]
    pub fn make() -> Self {
        Self(uuid::Uuid::now_v7().to_string().into())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn of(headers: &HeaderMap) -> Self {
        let mut given = headers.get_all(CORRELATION_ID).iter();
        match (given.next(), given.next()) {
            // Two ids cannot both be meant.
            (Some(one), None) => one.to_str().ok().and_then(Self::parse).unwrap_or_else(Self::make),
            _ => Self::make(),
        }
    }
}

impl fmt::Display for CorrelationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The trace that the request belongs to, with the span that this service adds to it (W3C Trace Context, level 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// 32 lower-case hexadecimal digits, not all zero.
    pub trace_id: String,
    /// The span of this request: 16 lower-case hexadecimal digits, not all zero.
    pub span_id: String,
    /// The caller's span.
    pub parent_id: String,
    flags: String,
    /// Vendor data, passed on untouched.
    pub tracestate: Option<String>,
}

impl Trace {
    /// Continues the caller's trace with a new span; `None` where there is none or it is malformed, as the
    /// recommendation asks.
    #[must_use]
    pub fn continue_from(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all(TRACEPARENT).iter();
        let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
        let (trace_id, parent_id, flags) = parse_traceparent(parent.to_str().ok()?)?;
        Some(Self {
            trace_id: trace_id.to_owned(),
            span_id: new_span_id(),
            parent_id: parent_id.to_owned(),
            flags: flags.to_owned(),
            tracestate: tracestate_of(headers),
        })
    }

    /// The `traceparent` for whatever this request causes.
    #[must_use]
    pub fn traceparent(&self) -> String {
        format!("00-{}-{}-{}", self.trace_id, self.span_id, self.flags)
    }
}

fn parse_traceparent(text: &str) -> Option<(&str, &str, &str)> {
    let mut fields = text.split('-');
    let (version, trace_id, parent_id, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let hex = |part: &str, len: usize| {
        part.len() == len && part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let nonzero = |part: &str| part.bytes().any(|byte| byte != b'0');
    let version_holds = hex(version, 2) && version != "ff" && (version != "00" || fields.next().is_none());
    (version_holds
        && hex(trace_id, 32)
        && nonzero(trace_id)
        && hex(parent_id, 16)
        && nonzero(parent_id)
        && hex(flags, 2))
    .then_some((trace_id, parent_id, flags))
}

fn tracestate_of(headers: &HeaderMap) -> Option<String> {
    let parts: Option<Vec<&str>> = headers.get_all(TRACESTATE).iter().map(|value| value.to_str().ok()).collect();
    let joined = parts?.join(",");
    (!joined.is_empty() && joined.len() <= TRACESTATE_MAX).then_some(joined)
}

fn new_span_id() -> String {
    let mut bytes = [0_u8; 8];
    rand::rng().fill_bytes(&mut bytes);
    // All zero would be no span id.
    bytes[7] |= 1;
    hex::encode(bytes)
}

/// Which service answers, as `details.service` and the log field `service` name it.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    pub name: &'static str,
    /// Adds `route` and `method` to the details of errors, as the terminal gateway does.
    pub tells_route: bool,
}

/// What a handler may know of the request it serves.
#[derive(Clone, Debug)]
pub struct Scope {
    pub correlation_id: CorrelationId,
    pub trace: Option<Trace>,
    span: Span,
}

impl Scope {
    /// Records whose scope the request runs in.
    pub fn record_caller(&self, org_id: Option<&str>, project_id: Option<&str>) {
        if let Some(org_id) = org_id {
            self.span.record("org_id", org_id);
        }
        if let Some(project_id) = project_id {
            self.span.record("project_id", project_id);
        }
    }

    /// Records what the request is about, such as `node/018f…`.
    pub fn record_resource(&self, name: impl fmt::Display) {
        self.span.record("resource_name", field::display(name));
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Scope {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, ApiError> {
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or_else(|| ApiError::internal("a route runs outside of the request scope"))
    }
}

/// The outermost layer of every router: opens the request's span, answers every failure with the envelope, logs once.
///
/// ```ignore
/// router.layer(axum::middleware::from_fn_with_state(service, request_scope))
/// ```
pub async fn request_scope(State(service): State<Service>, mut request: Request, next: Next) -> Response {
    let started = Instant::now();
    let correlation_id = CorrelationId::of(request.headers());
    let trace = Trace::continue_from(request.headers());
    let method = request.method().clone();
    let route =
        request.extensions().get::<MatchedPath>().map_or_else(|| "unknown".to_owned(), |path| path.as_str().to_owned());
    let span = info_span!(
        "request",
        service = service.name,
        %correlation_id,
        trace_id = field::Empty,
        span_id = field::Empty,
        org_id = field::Empty,
        project_id = field::Empty,
        resource_name = field::Empty,
        http.method = %method,
        http.route = %route,
    );
    if let Some(trace) = &trace {
        span.record("trace_id", trace.trace_id.as_str());
        span.record("span_id", trace.span_id.as_str());
    }
    let scope = Scope { correlation_id, trace, span: span.clone() };
    request.extensions_mut().insert(scope.clone());
    let response = next.run(request).instrument(span.clone()).await;
    let _entered = span.enter();
    let mut response = Finished { service, scope: &scope, method: &method, route: &route, started }.finish(response);
    if let Ok(value) = HeaderValue::from_str(scope.correlation_id.as_str()) {
        response.headers_mut().insert(CORRELATION_ID, value);
    }
    response
}

struct Finished<'a> {
    service: Service,
    scope: &'a Scope,
    method: &'a Method,
    route: &'a str,
    started: Instant,
}

impl Finished<'_> {
    fn finish(&self, mut response: Response) -> Response {
        if let Some(Unrendered(parts)) = response.extensions_mut().remove::<Unrendered>() {
            self.log_failure(&parts);
            return self.render(&parts, response);
        }
        let status = response.status();
        if status.is_client_error() || status.is_server_error() {
            return self.adopt(response);
        }
        debug!(http.status = status.as_u16(), elapsed_ms = self.elapsed_ms(), "request answered");
        response
    }

    /// A failure that a layer below answered in its own words gets the envelope too; one that is JSON was meant so.
    fn adopt(&self, response: Response) -> Response {
        let status = response.status();
        let is_json = response
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
        if is_json {
            info!(http.status = status.as_u16(), elapsed_ms = self.elapsed_ms(), "request failed");
            return response;
        }
        let code = Code::of_status(status);
        let message = status.canonical_reason().unwrap_or("The request was refused");
        let mut rendered = ApiError::new(code, format!("{message}.")).into_response();
        for (name, value) in response.headers() {
            if name != header::CONTENT_TYPE && name != header::CONTENT_LENGTH {
                rendered.headers_mut().append(name.clone(), value.clone());
            }
        }
        self.finish(rendered)
    }

    fn render(&self, parts: &Parts, response: Response) -> Response {
        let mut details = parts.details.clone();
        details.insert("service".into(), self.service.name.into());
        if let Some(trace) = &self.scope.trace {
            details.insert("trace_id".into(), trace.trace_id.clone().into());
            details.insert("span_id".into(), trace.span_id.clone().into());
        }
        if self.service.tells_route {
            details.insert("route".into(), self.route.into());
            details.insert("method".into(), Value::from(self.method.as_str()));
        }
        let envelope = Envelope {
            code: parts.code,
            message: parts.message.clone().into_owned(),
            correlation_id: self.scope.correlation_id.to_string(),
            details,
        };
        let (mut head, _) = response.into_parts();
        head.headers.remove(header::CONTENT_LENGTH);
        head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match serde_json::to_vec(&envelope) {
            Ok(body) => Response::from_parts(head, Body::from(body)),
            Err(cause) => {
                error!(%cause, "an error envelope could not be written");
                StatusCode::INTERNAL_SERVER_ERROR.into_response()
            }
        }
    }

    fn log_failure(&self, parts: &Parts) {
        let error_code = parts.code.as_str();
        let status = parts.code.status().as_u16();
        let elapsed_ms = self.elapsed_ms();
        let message = parts.message.as_ref();
        let cause = parts.cause_chain();
        let cause = cause.as_deref();
        match parts.code {
            Code::InternalError => {
                error!(error_code, http.status = status, elapsed_ms, cause, "request failed: {message}")
            }
            // Login failures are looked at, whatever their number (service specification, "Errors").
            Code::Unauthenticated
            | Code::InvalidNodeIdentity
            | Code::TokenInvalid
            | Code::EnrollmentRejected
            | Code::UpstreamError
            | Code::ServiceUnavailable
            | Code::Overloaded => {
                warn!(error_code, http.status = status, elapsed_ms, cause, "request failed: {message}")
            }
            Code::InvalidRequest
            | Code::ProbeTargetDenied
            | Code::PolicyOutOfBounds
            | Code::InsufficientBalance
            | Code::Forbidden
            | Code::NotFound
            | Code::MethodNotAllowed
            | Code::PayloadTooLarge
            | Code::UnsupportedMediaType
            | Code::UpgradeRequired
            | Code::NodeInUse
            | Code::StateConflict
            | Code::ConcurrencyLimitExceeded
            | Code::InsufficientCapacity
            | Code::StaleAttempt
            | Code::IdempotencyInProgress
            | Code::IdempotencyKeyReused
            | Code::RateLimited => {
                info!(error_code, http.status = status, elapsed_ms, cause, "request failed: {message}")
            }
        }
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The headers of a response that carries a secret.
#[must_use]
pub fn no_store() -> [(HeaderName, HeaderValue); 1] {
    [(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use axum::{Router, middleware::from_fn_with_state, routing::get};
    use proptest::prelude::*;
    use tower::ServiceExt;

    use super::*;
    use crate::testing::body_json;

    const API: Service = Service { name: "api", tells_route: false };
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn router(service: Service) -> Router {
        Router::new()
            .route(
                "/fine",
                get(|scope: Scope| async move { scope.trace.map(|trace| trace.traceparent()).unwrap_or_default() }),
            )
            .route("/broken", get(|| async { ApiError::internal("the secret cause") }))
            .route("/login", get(|| async { ApiError::new(Code::Unauthenticated, "Log in.") }))
            .route("/bare", get(|| async { (StatusCode::BAD_REQUEST, "plain words") }))
            .layer(from_fn_with_state(service, request_scope))
    }

    async fn get_with(path: &str, headers: &[(&str, &str)], service: Service) -> Response {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        router(service).oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn a_good_correlation_id_comes_back_and_a_bad_one_is_replaced() {
        let kept = get_with("/fine", &[("x-correlation-id", "job-17.retry_2")], API).await;
        assert_eq!(kept.headers()["x-correlation-id"], "job-17.retry_2");
        let too_long = "a".repeat(129);
        for bad in ["", "with space", "semi;colon", "new\tline", too_long.as_str()] {
            let replaced = get_with("/fine", &[("x-correlation-id", bad)], API).await;
            let id = replaced.headers()["x-correlation-id"].to_str().unwrap().to_owned();
            assert_ne!(id, bad);
            assert!(CorrelationId::parse(&id).is_some());
        }
        let two = get_with("/fine", &[("x-correlation-id", "one"), ("x-correlation-id", "two")], API).await;
        assert_eq!(two.headers().get_all("x-correlation-id").iter().count(), 1);
        assert_ne!(two.headers()["x-correlation-id"], "one");
    }

    #[tokio::test]
    async fn an_error_carries_the_id_the_service_and_the_trace_but_never_the_cause() {
        let response = get_with("/broken", &[("x-correlation-id", "c-1"), ("traceparent", PARENT)], API).await;
        assert_eq!(response.status(), 500);
        assert_eq!(response.headers()["x-correlation-id"], "c-1");
        let body = body_json(response).await;
        assert_eq!(body["code"], "internal_error");
        assert_eq!(body["correlation_id"], "c-1");
        assert_eq!(body["details"]["service"], "api");
        assert_eq!(body["details"]["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(body["details"]["span_id"].as_str().unwrap().len(), 16);
        assert!(!body.to_string().contains("secret cause"));
        assert!(body["details"].get("route").is_none());
        let read_by_agents: wire::error::Envelope = serde_json::from_value(body).unwrap();
        assert_eq!(read_by_agents.code, "internal_error");
    }

    #[tokio::test]
    async fn the_terminal_gateway_adds_route_and_method() {
        let gateway = Service { name: "terminal-gateway", tells_route: true };
        let body = body_json(get_with("/broken", &[], gateway).await).await;
        assert_eq!(body["details"]["route"], "/broken");
        assert_eq!(body["details"]["method"], "GET");
    }

    #[tokio::test]
    async fn a_failure_in_plain_words_gets_the_envelope() {
        let response = get_with("/bare", &[], API).await;
        assert_eq!(response.status(), 400);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(body_json(response).await["code"], "invalid_request");
    }

    #[tokio::test]
    async fn the_trace_goes_on_with_a_span_of_ours() {
        let response = get_with("/fine", &[("traceparent", PARENT)], API).await;
        let body = axum::body::to_bytes(response.into_body(), 1024).await.unwrap();
        let onward = std::str::from_utf8(&body).unwrap();
        assert!(onward.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && onward.ends_with("-01"));
        assert!(!onward.contains("00f067aa0ba902b7"));
    }

    #[derive(Clone, Default)]
    struct Log(Arc<std::sync::Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_failure_is_logged_once_with_its_cause_at_the_level_of_who_must_wake_up() {
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().json().with_writer(move || writer.clone()).finish();
        let _logging = tracing::subscriber::set_default(subscriber);
        get_with("/broken", &[("x-correlation-id", "c-2"), ("traceparent", PARENT)], API).await;
        get_with("/login", &[], API).await;
        let written = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let [broken, login] = lines.as_slice() else { panic!("{written}") };
        assert_eq!((&broken["level"], &login["level"]), (&"ERROR".into(), &"WARN".into()));
        assert_eq!(broken["fields"]["cause"], "the secret cause");
        assert_eq!(broken["fields"]["error_code"], "internal_error");
        assert_eq!(broken["span"]["correlation_id"], "c-2");
        assert_eq!(broken["span"]["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(broken["span"]["service"], "api");
    }

    #[test]
    fn malformed_trace_parents_are_ignored() {
        for bad in [
            "",
            "00",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert_eq!(parse_traceparent(bad), None, "{bad}");
        }
        assert!(parse_traceparent("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more").is_some());
    }

    #[test]
    fn a_tracestate_that_is_too_long_is_dropped() {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(PARENT));
        headers.insert(TRACESTATE, HeaderValue::from_static("a=1,b=2"));
        assert_eq!(Trace::continue_from(&headers).unwrap().tracestate.as_deref(), Some("a=1,b=2"));
        headers.insert(TRACESTATE, HeaderValue::from_str(&"x".repeat(513)).unwrap());
        assert_eq!(Trace::continue_from(&headers).unwrap().tracestate, None);
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_exactly_the_alphabet(text in "[ -~\u{80}-\u{ff}]{0,140}") {
            let expected = !text.is_empty() && text.chars().count() <= 128
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
            prop_assert_eq!(CorrelationId::parse(&text).is_some(), expected);
        }

        #[test]
        fn no_header_makes_the_trace_parser_fail(text in "\\PC{0,80}") {
            let _ = parse_traceparent(&text);
        }
    }
}

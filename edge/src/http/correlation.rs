//! The scope of a request: its correlation id, its trace, its span, and the one place where errors are rendered.
//!
//! `X-Correlation-Id` is accepted from the request when it is 1 to 128 characters of `[A-Za-z0-9._-]`, else generated; it is always in the
//! response. W3C Trace Context (`traceparent`, `tracestate`) is read and continued with a span of ours.

#[cfg(test)]
mod fuzz;

use std::{
    convert::Infallible,
    fmt,
    sync::Arc,
    task::{Context, Poll},
};

use actors::CommandContext;

use axum::{
    body::Body,
    extract::{FromRequestParts, MatchedPath, Request},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request},
    response::{IntoResponse, Response},
};
use domain::state_machine::RequestOrigin;
use domain::{Permit, Timestamp};
use futures::{
    FutureExt, TryFutureExt,
    future::{BoxFuture, ready},
};
use serde_json::Value;
use telemetry::{Sampling, SpanContext};
use tower::Layer;
use tracing::{Instrument, Span, debug, error, error_span, field, info, warn};

use crate::http::error::{ApiError, Code, Envelope, Parts, PendingErrorResponse};
use crate::http::malformed_request::MalformedRequest;
use crate::http::request_rates::{HttpMetrics, InFlightRequest, UNMATCHED};

/// The header that carries the correlation id, in and out.
pub const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");
const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
/// W3C Trace Context requires at least 512 characters of `tracestate` to be propagated; a longer one is dropped.
const TRACESTATE_MAX: usize = 512;

/// Ties together whatever one request caused: log lines, events, commands, tasks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CorrelationId(Arc<str>);

impl CorrelationId {
    /// The longest accepted id, in characters.
    pub const MAX_LEN: usize = 128;

    /// `None` where the text is not an acceptable id.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let acceptable = (1..=Self::MAX_LEN).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'));
        acceptable.then(|| Self(text.into()))
    }

    /// A new id, for a request without one.
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

/// The caller's trace; `None` where there is none or it is malformed.
fn trace_in(headers: &HeaderMap) -> Option<SpanContext> {
    let mut parents = headers.get_all(TRACEPARENT).iter();
    let (Some(parent), None) = (parents.next(), parents.next()) else { return None };
    SpanContext::parse(parent.to_str().ok()?)
}

/// Vendor data, passed on untouched.
fn tracestate_in(headers: &HeaderMap) -> Option<String> {
    let parts: Option<Vec<&str>> = headers.get_all(TRACESTATE).iter().map(|value| value.to_str().ok()).collect();
    let joined = parts?.join(",");
    (!joined.is_empty() && joined.len() <= TRACESTATE_MAX).then_some(joined)
}

/// Which service answers, as `details.service` and the log field `service` name it.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    pub name: &'static str,
    /// Adds `route` and `method` to the details of errors, as the terminal gateway does.
    pub shows_route: bool,
}

/// The correlation and trace of a request, for its handler.
#[derive(Clone, Debug)]
pub struct Scope {
    pub correlation_id: CorrelationId,
    /// The span of this request, in the caller's trace or one that begins here.
    pub trace: SpanContext,
    pub tracestate: Option<String>,
    span: Span,
}

impl Scope {
    /// The context of a command that this request sends, as part of its trace.
    #[must_use]
    pub fn command_context(&self, permit: &Permit, deadline: Timestamp) -> CommandContext {
        let origin = RequestOrigin::untraced(self.correlation_id.as_str())
            .traced(Some(self.trace.traceparent()), self.tracestate.clone());
        CommandContext::from_origin(permit, origin, deadline)
    }

    /// Records the caller's organization and project.
    pub fn record_caller(&self, org_id: Option<&str>, project_id: Option<&str>) {
        if let Some(org_id) = org_id {
            self.span.record("org_id", org_id);
        }
        if let Some(project_id) = project_id {
            self.span.record("project_id", project_id);
        }
    }

    /// Records the resource of the request, such as `node/018f…`.
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

/// The settings of a router's outermost layer.
#[derive(Clone)]
pub struct ScopeSettings {
    pub service: Service,
    pub metrics: HttpMetrics,
    /// How many of the traces that begin here are sampled.
    pub sampling: Sampling,
}

/// The outermost layer of every router: opens the request's span, answers every failure with the envelope, logs and counts once.
///
/// Written out instead of `from_fn`, whose box would hold the request until the response.
#[derive(Clone)]
pub struct RequestScope(pub ScopeSettings);

impl<S> Layer<S> for RequestScope {
    type Service = RequestScopeService<S>;

    fn layer(&self, inner: S) -> RequestScopeService<S> {
        RequestScopeService { inner, scope_settings: self.0.clone() }
    }
}

/// A router in its [`RequestScope`].
#[derive(Clone)]
pub struct RequestScopeService<S> {
    inner: S,
    scope_settings: ScopeSettings,
}

impl<S> tower::Service<Request> for RequestScopeService<S>
where
    S: tower::Service<Request, Response = Response, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        let begun = StartedRequest::of(&self.scope_settings, &mut request);
        if let Some(unreadable) = request.extensions_mut().remove::<MalformedRequest>() {
            return ready(Ok(begun.end(unreadable.into_response()))).boxed();
        }
        let span = begun.scope.span.clone();
        let answering = span.in_scope(|| self.inner.call(request));
        answering.instrument(span).map_ok(move |response| begun.end(response)).boxed()
    }
}

/// A request that is being worked on.
struct StartedRequest {
    service: Service,
    scope: Scope,
    method: Method,
    path: Option<MatchedPath>,
    in_flight: InFlightRequest,
}

impl StartedRequest {
    fn of(scope_settings: &ScopeSettings, request: &mut Request) -> Self {
        let service = scope_settings.service;
        let path = request.extensions().get::<MatchedPath>().cloned();
        let route = path.as_ref().map_or(UNMATCHED, MatchedPath::as_str);
        let method = request.method().clone();
        let in_flight = scope_settings.metrics.start(route, &method);
        let correlation_id = CorrelationId::of(request.headers());
        let above = trace_in(request.headers());
        let trace = above.map_or_else(|| SpanContext::begin(scope_settings.sampling), SpanContext::child);
        // A tracestate without its traceparent has no meaning.
        let tracestate = above.and_then(|_| tracestate_in(request.headers()));
        let span = error_span!(
            "request",
            service = service.name,
            %correlation_id,
            trace_id = %trace.trace_id(),
            span_id = %trace.span_id(),
            otel.parent = trace.parent_to_export(),
            otel.kind = "server",
            org_id = field::Empty,
            project_id = field::Empty,
            resource_name = field::Empty,
            error_code = field::Empty,
            http.request.method = %method,
            http.route = route,
            http.response.status_code = field::Empty,
        );
        let scope = Scope { correlation_id, trace, tracestate, span };
        request.extensions_mut().insert(scope.clone());
        Self { service, scope, method, path, in_flight }
    }

    fn end(self, response: Response) -> Response {
        let Self { service, scope, method, path, in_flight } = self;
        let route = path.as_ref().map_or(UNMATCHED, MatchedPath::as_str);
        let _entered = scope.span.enter();
        let finished = FinishedRequest { service, scope: &scope, method: &method, route, in_flight: &in_flight };
        let mut response = finished.finish(response);
        if scope.trace.is_sampled() {
            scope.span.record("http.response.status_code", response.status().as_u16());
        }
        if let Ok(value) = HeaderValue::from_str(scope.correlation_id.as_str()) {
            response.headers_mut().insert(CORRELATION_ID, value);
        }
        in_flight.finish(response.status());
        response
    }
}

struct FinishedRequest<'a> {
    service: Service,
    scope: &'a Scope,
    method: &'a Method,
    route: &'a str,
    in_flight: &'a InFlightRequest,
}

impl FinishedRequest<'_> {
    fn finish(&self, mut response: Response) -> Response {
        if let Some(PendingErrorResponse(parts)) = response.extensions_mut().remove::<PendingErrorResponse>() {
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

    /// A plain-text failure of a layer below gets the envelope too; a JSON one is deliberate.
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
        if let Some(html) = &parts.page {
            let (mut head, _) = response.into_parts();
            head.headers.remove(header::CONTENT_LENGTH);
            head.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
            return Response::from_parts(head, Body::from(html.clone()));
        }
        let mut details = parts.details.clone();
        details.insert("service".into(), self.service.name.into());
        details.insert("trace_id".into(), self.scope.trace.trace_id().to_string().into());
        details.insert("span_id".into(), self.scope.trace.span_id().to_string().into());
        if self.service.shows_route {
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
        self.in_flight.count_error(parts.code);
        if self.scope.trace.is_sampled() {
            self.scope.span.record("error_code", error_code);
        }
        let status = parts.code.status().as_u16();
        let elapsed_ms = self.elapsed_ms();
        let message = parts.message.as_ref();
        let cause = parts.cause_chain();
        let cause = cause.as_deref();
        if parts.expected {
            info!(error_code, http.status = status, elapsed_ms, cause, "request refused: {message}");
            return;
        }
        match parts.code {
            Code::InternalError => {
                error!(error_code, http.status = status, elapsed_ms, cause, "request failed: {message}");
            }
            // Login failures need attention, whatever their number (service specification, "Errors").
            Code::Unauthenticated
            | Code::SessionEnded
            | Code::InvalidNodeIdentity
            | Code::TokenInvalid
            | Code::EnrollmentRejected
            | Code::UpstreamError
            | Code::ServiceUnavailable
            | Code::Overloaded => {
                warn!(error_code, http.status = status, elapsed_ms, cause, "request failed: {message}");
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
            | Code::HeadersTooLarge
            | Code::RateLimited => {
                info!(error_code, http.status = status, elapsed_ms, cause, "request failed: {message}");
            }
        }
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.in_flight.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// The headers of a response that carries a secret.
#[must_use]
pub fn no_store() -> [(HeaderName, HeaderValue); 1] {
    [(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))]
}

#[cfg(test)]
mod tests {
    use axum::{Router, routing::get};
    use proptest::prelude::*;
    use tower::ServiceExt;

    use super::*;
    use crate::testing::body_json;
    use test_host::CapturedLog;

    const API: Service = Service { name: "api", shows_route: false };
    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn router(service: Service) -> Router {
        Router::new()
            .route("/fine", get(|scope: Scope| async move { scope.trace.traceparent() }))
            .route("/broken", get(|| async { ApiError::internal("the secret cause") }))
            .route("/login", get(|| async { ApiError::new(Code::Unauthenticated, "Log in.") }))
            .route("/starting", get(|| async { ApiError::new(Code::ServiceUnavailable, "Not yet.").expected() }))
            .route("/bare", get(|| async { (StatusCode::BAD_REQUEST, "plain words") }))
            .layer(RequestScope(crate::testing::scope_settings(service)))
    }

    async fn get_with(path: &str, headers: &[(&str, &str)], service: Service) -> Response {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        router(service).oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn valid_correlation_id_is_echoed_and_an_invalid_one_is_replaced() {
        let stored = get_with("/fine", &[("x-correlation-id", "job-17.retry_2")], API).await;
        assert_eq!(stored.headers()["x-correlation-id"], "job-17.retry_2");
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
        let read_by_agents: wire::error::ErrorEnvelope = serde_json::from_value(body).unwrap();
        assert_eq!(read_by_agents.code, "internal_error");
    }

    #[tokio::test]
    async fn the_terminal_gateway_adds_route_and_method() {
        let gateway = Service { name: "terminal-gateway", shows_route: true };
        let body = body_json(get_with("/broken", &[], gateway).await).await;
        assert_eq!(body["details"]["route"], "/broken");
        assert_eq!(body["details"]["method"], "GET");
    }

    #[tokio::test]
    async fn plain_text_failure_gets_the_envelope() {
        let response = get_with("/bare", &[], API).await;
        assert_eq!(response.status(), 400);
        assert_eq!(response.headers()["content-type"], "application/json");
        assert_eq!(body_json(response).await["code"], "invalid_request");
    }

    #[tokio::test]
    async fn trace_continues_with_a_span_of_ours() {
        let response = get_with("/fine", &[("traceparent", PARENT)], API).await;
        let body = axum::body::to_bytes(response.into_body(), 1024).await.unwrap();
        let onward = std::str::from_utf8(&body).unwrap();
        assert!(onward.starts_with("00-4bf92f3577b34da6a3ce929d0e0e4736-") && onward.ends_with("-01"));
        assert!(!onward.contains("00f067aa0ba902b7"));
    }

    #[tokio::test]
    async fn failure_is_logged_once_with_its_cause_at_the_level_of_its_urgency() {
        let (log, _logging) = CapturedLog::start();
        get_with("/broken", &[("x-correlation-id", "c-2"), ("traceparent", PARENT)], API).await;
        get_with("/login", &[], API).await;
        get_with("/starting", &[], API).await;
        let written = log.text();
        let lines: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let [broken, login, starting] = lines.as_slice() else { panic!("{written}") };
        assert_eq!((&broken["level"], &login["level"]), (&"ERROR".into(), &"WARN".into()));
        assert_eq!(starting["level"], "INFO", "an expected failure is no warning");
        assert_eq!(broken["fields"]["cause"], "the secret cause");
        assert_eq!(broken["fields"]["error_code"], "internal_error");
        assert_eq!(broken["span"]["correlation_id"], "c-2");
        assert_eq!(broken["span"]["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(broken["span"]["service"], "api");
    }

    #[tokio::test]
    async fn request_without_a_trace_begins_an_unsampled_one() {
        for bad in [None, Some("00-00000000000000000000000000000000-00f067aa0ba902b7-01"), Some("no trace")] {
            let headers: Vec<_> = bad.iter().map(|text| ("traceparent", *text)).collect();
            let response = get_with("/fine", &headers, API).await;
            let body = axum::body::to_bytes(response.into_body(), 1024).await.unwrap();
            let onward = SpanContext::parse(std::str::from_utf8(&body).unwrap()).unwrap();
            assert!(!onward.is_sampled());
        }
    }

    #[test]
    fn a_tracestate_that_is_too_long_is_dropped() {
        let mut headers = HeaderMap::new();
        headers.insert(TRACEPARENT, HeaderValue::from_static(PARENT));
        headers.insert(TRACESTATE, HeaderValue::from_static("a=1,b=2"));
        assert_eq!(tracestate_in(&headers).as_deref(), Some("a=1,b=2"));
        headers.append(TRACESTATE, HeaderValue::from_static("c=3"));
        assert_eq!(tracestate_in(&headers).as_deref(), Some("a=1,b=2,c=3"));
        headers.insert(TRACESTATE, HeaderValue::from_str(&"x".repeat(513)).unwrap());
        assert_eq!(tracestate_in(&headers), None);
    }

    proptest! {
        #[test]
        fn correlation_id_accepts_exactly_its_alphabet(text in "[ -~\u{80}-\u{ff}]{0,140}") {
            let expected = !text.is_empty() && text.chars().count() <= 128
                && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
            prop_assert_eq!(CorrelationId::parse(&text).is_some(), expected);
        }
    }
}

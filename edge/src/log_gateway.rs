//! The gateway for the logs of nodes: collectors push batches to it with a node's bearer token, and it passes them on to the log store
//! (specification, *Endpoints*; decisions 7, *Log gateway*).
//!
//! Nothing of a batch is changed or stored here. It is read within bounds and judged by its labels: a node writes under its own id alone.

#[cfg(test)]
mod fuzz;
mod labels;
mod log_gateway_metrics;
mod push_request;

pub use log_gateway_metrics::{COUNTERS, LogGatewayCounters};

use crate::app_state::AppState;
use crate::auth::signed_tokens::node_log::{GATEWAY_PATH, NodeLogTokenSubject};
use crate::auth::{INVALID, bearer, challenge};
use crate::http::correlation::{Scope, Service};
use crate::http::error::{ApiError, Code};
use crate::http::request_body::{BodyLimit, read_body, reject_query};
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, mount, with_common_layers};
use crate::limits::rate_limit::NodeLimit;
use crate::outbound::log_store::{LogStore, PUSH_PATH};
use actors::AskError;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::from_fn;
use axum::routing::post;
use axum::{Extension, Router};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::node::{self, Node, Rejection};
use domain::policy::PolicyKey;
use domain::{Action, Principal};
use push_request::PushFormat;
use std::sync::Arc;
use std::time::Duration;

/// The largest batch as it is sent, in bytes.
const BODY_BYTES: usize = 2 << 20;
/// Batches at once: each holds its body in memory, and once more decompressed.
const MAX_CONCURRENT: usize = 32;
/// Timeout for a batch, most of which is the log store's.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(25);
/// Timeout for the state machine of the node.
const ASK_TIMEOUT: TimeDelta = TimeDelta::seconds(5);

#[derive(Clone)]
struct LogGateway {
    app: AppState,
    pushes: Arc<NodeLimit>,
}

/// The gateway, ready to be served at [`GATEWAY_PATH`] and what a collector adds to it.
pub fn router(app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "node-log-gateway", shows_route: true });
    let gateway = LogGateway { app, pushes: Arc::new(NodeLimit::of(PolicyKey::RateLimitNodeLogPushes)) };
    let route = Router::new()
        .route(&path(), post(push))
        .route_layer(from_fn(reject_query))
        .route_layer(Extension(BodyLimit(BODY_BYTES)))
        .with_state(gateway);
    let route = bounded(route, RequestTimeout(REQUEST_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT));
    with_common_layers(route, scope_settings)
}

/// The gateway's one route.
fn path() -> String {
    format!("{GATEWAY_PATH}{PUSH_PATH}")
}

/// Mounts the gateway on the address of the node API. Each keeps its own layers and its own error details.
pub fn beside(node_api: Router, app: AppState) -> Router {
    mount(node_api, &path(), router(app))
}

async fn push(State(gateway): State<LogGateway>, scope: Scope, request: Request) -> Result<StatusCode, ApiError> {
    COUNTERS.requests.inc();
    let (store, content_type, batch, entries) = gateway.admit(&scope, request).await.inspect_err(count_rejected)?;
    let bytes = batch.len() as u64;
    store.push(content_type, batch).await.inspect_err(|failure| COUNTERS.count_failure(failure.kind))?;
    COUNTERS.entries.inc_by(entries as u64);
    COUNTERS.bytes.inc_by(bytes);
    Ok(StatusCode::NO_CONTENT)
}

impl LogGateway {
    /// A batch that may be passed on, with its media type, the store, and the number of its entries.
    async fn admit(&self, scope: &Scope, request: Request) -> Result<(&LogStore, HeaderValue, Bytes, usize), ApiError> {
        let (app, now) = (&self.app, self.app.environment.now());
        let store = app.log_store.as_ref().ok_or_else(no_log_store)?;
        let token = bearer(request.headers())?.to_owned().into();
        let subject = app.node_log_tokens().verify(&token, now).map_err(token_refused)?;
        scope.record_resource(format_args!("node/{}", subject.node_id));
        self.pushes.admit(subject.node_id, &app.environment.policy(), now)?;
        self.identify(scope, &subject).await?;
        let (content_type, format) = media_type(request.headers())?;
        let batch = read_body(request).await?;
        let summary = push_request::read(format, &batch)?;
        summary.streams.iter().try_for_each(|stream| labels::check(stream, subject.node_id))?;
        Ok((store, content_type, batch, summary.entries))
    }

    /// Asks the node's state machine whether the certificate is valid for which the token was issued.
    async fn identify(&self, scope: &Scope, subject: &NodeLogTokenSubject) -> Result<(), ApiError> {
        let permit = authorize(&Principal::Node(subject.node_id), Action::SpeakForNode).map_err(ApiError::internal)?;
        let context = scope.command_context(&permit, self.app.environment.now() + ASK_TIMEOUT);
        let identify = node::Request::Identify { serial: subject.certificate_serial.clone() };
        match self.app.directory.ask::<Node>(&permit, subject.node_id.0, identify.into(), context).await {
            Ok(_) => Ok(()),
            // A fenced node is one whose logs its operator wants to read.
            Err(AskError::Rejected(Rejection::Fenced { .. })) => Ok(()),
            Err(AskError::Rejected(rejection)) => Err(token_refused(rejection)),
            Err(AskError::Overloaded) => Err(ApiError::overloaded()),
            Err(error) => Err(ApiError::unavailable(error)),
        }
    }
}

/// A failure of our own, which the batch's sender cannot help, is neither a refusal nor the log store's.
fn count_rejected(error: &ApiError) {
    if !matches!(error.code(), Code::ServiceUnavailable | Code::Overloaded | Code::InternalError) {
        COUNTERS.rejected.inc();
    }
}

/// The content type as it was sent, and the format that it names.
fn media_type(headers: &HeaderMap) -> Result<(HeaderValue, PushFormat), ApiError> {
    let refuse = |message: &'static str| ApiError::new(Code::UnsupportedMediaType, message);
    let mut given = headers.get_all(header::CONTENT_TYPE).iter();
    let (Some(content_type), None) = (given.next(), given.next()) else {
        return Err(refuse("Send one header Content-Type: application/json or application/x-protobuf."));
    };
    let format = content_type.to_str().ok().and_then(PushFormat::of);
    let format = format.ok_or_else(|| {
        refuse("Send the batch as application/json, or as application/x-protobuf compressed with snappy.")
    })?;
    let codings = headers.get_all(header::CONTENT_ENCODING).iter();
    let allowed: &[&[u8]] = match format {
        PushFormat::Json => &[b"identity"],
        PushFormat::SnappyProtobuf => &[b"identity", b"snappy"],
    };
    for coding in codings {
        if !allowed.contains(&coding.as_bytes().to_ascii_lowercase().as_slice()) {
            return Err(refuse(
                "Send the batch without Content-Encoding: JSON as it is, protobuf compressed with snappy.",
            ));
        }
    }
    Ok((content_type.clone(), format))
}

/// One answer for every fault of a token. The cause goes to the log.
fn token_refused(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ApiError {
    challenge(
        "The token is not valid for this node's logs; get another with POST /internal/v1/nodes/{id}/log-token.",
        INVALID,
    )
    .because(cause)
}

fn no_log_store() -> ApiError {
    let message = "No log store is configured; the operator sets SVC_LOG_STORE_URL (see the book, operator/logs.md).";
    ApiError::new(Code::ServiceUnavailable, message).expected()
}

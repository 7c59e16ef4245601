//! The API that nodes' agents use: one page of routes (decisions 4), one file per noun.
//!
//! Enrollment is authenticated by its token, everything else by the node's client certificate: TLS has verified the chain, the extractor
//! [`NodeIdentity`](identity::NodeIdentity) the expiry and the path, and the node's state machine the serial, the generation and the node's
//! state, at each request.
//!
//! | module | what |
//! | --- | --- |
//! | `routes`, `identity`, `admission` | the table of routes; the node of a request; limits by node and by address |
//! | `enrollment`, `recovery` | how a node gets its first certificate, the next one, and one after its expiry |
//! | `heartbeat`, `inventory` | liveness, health and telemetry; what an agent reports of its machine |
//! | `task_dispatch`, `task_signing` | the wait for tasks; their signature |
//! | `task_result`, `task_output`, `cleanup_proof` | the results of tasks; their bounded output; the proof of a clean-up |
//! | `terminal`, `recording` | the node's end of a terminal; the upload of its recording |
//! | `package`, `log_gateway_access` | the agent's package; the token of the log collector |
//! | `strict_body`, `rejection_response` | bodies as agents send them; the responses to rejected commands |

mod admission;
mod cleanup_proof;
mod enrollment;
mod heartbeat;
pub(crate) mod identity;
mod inventory;
mod log_gateway_access;
mod package;
mod recording;
mod recovery;
mod rejection_response;
mod routes;
mod strict_body;
mod task_dispatch;
mod task_output;
mod task_result;
mod task_signing;
mod terminal;
#[cfg(test)]
mod tests;

pub use routes::{NodeRoute, ROUTES, RequiredCredential};

use crate::app_state::AppState;
use crate::http::correlation::{Scope, Service, no_store};
use crate::http::error::ApiError;
use crate::http::request_body::{BodyLimit, reject_query};
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, with_common_layers};
use crate::limits::body_admission::{BodyAdmission, BodyAdmissionLimits, admit_bodies};
use crate::limits::rate_limit::AddressLimit;
use crate::trust::current_keys::CurrentKeys;
use crate::trust::node_certificate::TrustDomain;
use actors::{AskError, CommandContext, CommandKey, CommandReply};
use axum::extract::FromRef;
use axum::middleware::from_fn;
use axum::routing::{get, post, put};
use axum::{Extension, Router};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::node::{Node, Rejection, Reply, Request};
use domain::{Action, NodeId, Principal};
use std::sync::Arc;
use std::time::Duration;
use tower_http::set_header::SetResponseHeaderLayer;
use wire::recording::CHUNK_MAX;

/// What the agent-facing routes share besides the [`AppState`].
#[derive(Clone)]
struct NodeApi {
    app: AppState,
    dispatch_log: Arc<task_dispatch::DispatchLog>,
    /// The enrollments of each address.
    enrolling: Arc<AddressLimit>,
    limits: Arc<admission::NodeLimits>,
}

impl FromRef<NodeApi> for CurrentKeys {
    fn from_ref(api: &NodeApi) -> Self {
        api.app.trust.keys.clone()
    }
}

impl FromRef<NodeApi> for TrustDomain {
    fn from_ref(api: &NodeApi) -> Self {
        api.app.trust.domain.clone()
    }
}

/// The largest body of these routes, in bytes, except for results, which carry what a clean-up found.
const BODY_BYTES: usize = 256 * 1024;
const RESULT_BYTES: usize = 1024 * 1024;

/// Timeout for the reply of a state machine.
const ASK_TIMEOUT: TimeDelta = TimeDelta::seconds(8);
/// How long, and how often, the outcome of an uncertain command is queried.
const CERTAINTY_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_PAUSE: Duration = Duration::from_millis(50);
/// Timeout for a request, most of which is the state machine's reply.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// The longest wait for a task, and the time for its queries of the state machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(task_dispatch::MAX_WAIT_SECONDS as u64 + 20);

/// The routes.
pub fn router(app: AppState) -> Router {
    let scope_settings = app.scope_settings(Service { name: "node-api", shows_route: false });
    let api = NodeApi { app, dispatch_log: Arc::default(), enrolling: Arc::default(), limits: Arc::default() };
    // Without a certificate: bounded per address, too.
    let enrolling = Router::new()
        .route("/internal/v1/nodes/{id}/enroll", post(enrollment::enroll))
        .route("/internal/v1/nodes/{id}/recover/nonce", get(recovery::nonce))
        .route("/internal/v1/nodes/{id}/recover", post(recovery::recover))
        .route_layer(from_fn(reject_query));
    let identified = Router::new()
        .route("/internal/v1/nodes/{id}/certificate/renew", post(enrollment::renew))
        .route("/internal/v1/nodes/{id}/heartbeat", post(heartbeat::heartbeat))
        .route("/internal/v1/nodes/{id}/log-token", post(log_gateway_access::issue))
        .route_layer(from_fn(reject_query))
        .route_layer(Extension(BodyLimit(BODY_BYTES)));
    let results = Router::new()
        .route("/internal/v1/nodes/{id}/tasks/{task_id}/result", post(task_result::record))
        .route_layer(from_fn(reject_query))
        .route_layer(Extension(BodyLimit(RESULT_BYTES)));
    let recording = Router::new()
        .route("/internal/v1/nodes/{id}/terminals/{session_id}/recording/{seq}", put(recording::store))
        .route_layer(from_fn(reject_query))
        .route_layer(Extension(BodyLimit(CHUNK_MAX)));
    let streams = Router::new()
        .route("/internal/v1/nodes/{id}/terminals/{session_id}/stream", get(terminal::stream))
        .route_layer(from_fn(reject_query));
    let package = Router::new()
        .route("/internal/v1/nodes/{id}/package/manifests/{reference}", get(package::manifest))
        .route("/internal/v1/nodes/{id}/package/blobs/{digest}", get(package::blob))
        .route_layer(from_fn(reject_query));
    let waits = Router::new().route("/internal/v1/nodes/{id}/tasks/wait", get(task_dispatch::wait));

    let [(name, value)] = no_store();
    let no_store_header = SetResponseHeaderLayer::overriding(name, value);
    let within = RequestTimeout(REQUEST_TIMEOUT);
    let enrolling = bounded(enrolling, within, Concurrency::at_most(256));
    let routes = admit_bodies(enrolling, BodyAdmission::new(BodyAdmissionLimits::of_bodies_up_to(BODY_BYTES)))
        .merge(bounded(identified, within, Concurrency::at_most(1024)))
        .merge(bounded(results, within, Concurrency::at_most(1024)))
        .merge(bounded(recording, within, Concurrency::at_most(256)))
        // Each holds a connection to the registry.
        .merge(bounded(package, within, Concurrency::at_most(64)))
        .merge(bounded(streams, within, Concurrency::at_most(1024)))
        // A parked wait costs a few kilobytes, so there may be as many as there are connections.
        .merge(bounded(waits, RequestTimeout(WAIT_TIMEOUT), Concurrency::at_most(65_536)))
        .layer(no_store_header)
        .with_state(api);
    with_common_layers(routes, scope_settings)
}

impl NodeApi {
    /// Sends a request to the node's state machine, as the node itself.
    async fn ask(
        &self,
        scope: &Scope,
        node_id: NodeId,
        request: Request,
        refine: impl FnOnce(CommandContext) -> CommandContext,
    ) -> Result<CommandReply<Reply>, NodeAskError> {
        let by = Principal::Node(node_id);
        let permit = authorize(&by, Action::SpeakForNode).map_err(|_| NodeAskError::Asking(AskError::Denied))?;
        let deadline = self.app.environment.now() + ASK_TIMEOUT;
        let context = refine(scope.command_context(&permit, deadline));
        self.app.directory.ask::<Node>(&permit, node_id.0, request.into(), context).await.map_err(NodeAskError::from)
    }

    /// As [`NodeApi::ask`]; where it is uncertain whether the command was committed, it is resent with the same command id: an agent that
    /// receives *unavailable* must be able to rely on its token being unspent.
    async fn ask_until_certain(
        &self,
        scope: &Scope,
        node_id: NodeId,
        request: Request,
        key: CommandKey,
    ) -> Result<CommandReply<Reply>, NodeAskError> {
        let until = tokio::time::Instant::now() + CERTAINTY_TIMEOUT;
        let mut uncertain = false;
        loop {
            let answer =
                self.ask(scope, node_id, request.clone(), |context| context.with_key(key.clone()).urgent()).await;
            let repeated = match &answer {
                Err(NodeAskError::Asking(AskError::Unknown { .. } | AskError::InProgress)) => {
                    uncertain = true;
                    true
                }
                // The entity is being activated.
                Err(NodeAskError::Asking(AskError::Unavailable { .. } | AskError::Overloaded)) => uncertain,
                Ok(_) | Err(_) => false,
            };
            if !repeated || tokio::time::Instant::now() >= until {
                return answer;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// Why a machine gave no reply.
enum NodeAskError {
    /// It rejected the command.
    Rejected(Rejection),
    /// It was not reached, or its reply did not arrive.
    Asking(AskError<Rejection>),
}

impl From<AskError<Rejection>> for NodeAskError {
    fn from(error: AskError<Rejection>) -> Self {
        match error {
            AskError::Rejected(rejection) => Self::Rejected(rejection),
            other @ (AskError::Denied
            | AskError::InProgress
            | AskError::AlreadyDone
            | AskError::Reused
            | AskError::Taken { .. }
            | AskError::Overloaded
            | AskError::Parked { .. }
            | AskError::Unavailable { .. }
            | AskError::Unknown { .. }
            | AskError::Broken { .. }
            | AskError::NotOwner) => Self::Asking(other),
        }
    }
}

/// A reply of a state machine that does not fit the command: a bug of ours.
fn unexpected(reply: &Reply) -> ApiError {
    let name = match reply {
        Reply::Node { .. } => "node",
        Reply::Task { .. } => "task",
        Reply::TokenIssued { .. } => "token_issued",
        Reply::Enrolled { .. } => "enrolled",
        Reply::CloneSuspected => "clone_suspected",
        Reply::SystemRefused => "system_refused",
        Reply::Work { .. } => "work",
        Reply::HeartbeatAccepted { .. } => "heartbeat_accepted",
        Reply::Reserved { .. } => "reserved",
        Reply::Done => "done",
    };
    ApiError::internal(format!("the node's machine replied {name} to another question"))
}

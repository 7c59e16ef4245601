//! The API that nodes' agents use: one page of routes (decisions 4, *Node onboarding and identity*), one file per noun.
//!
//! Enrollment is let in by its token, everything else by the node's client certificate: TLS has verified its chain, the extractor
//! [`NodeIdentity`](crate::identity::NodeIdentity) its end and its path, and the node's machine its serial, its generation and the
//! node's state, at each request.

mod answer;
mod enrollment;
mod gate;
mod handed;
mod heartbeat;
mod inventory;
pub mod nonce;
mod outcome;
mod page;
mod proof;
mod recording;
mod recovery;
mod result;
mod spoken;
mod terminal;
#[cfg(test)]
mod tests;
mod wait;

pub use page::{NodeRoute, PAGE, Shows};

use crate::body::{BodyLimit, takes_no_query};
use crate::correlation::{Outermost, Scope, Service, no_store};
use crate::error::ApiError;
use crate::identity::TrustDomain;
use crate::keys::KeysInForce;
use crate::limits::{Concurrency, RequestTimeout, bounded, finished};
use crate::rate_limit::AddressLimit;
use crate::reception::{Reception, ReceptionLimits, received};
use crate::services::Services;
use actors::{Answered, AskError, Asked, CommandKey};
use axum::extract::FromRef;
use axum::middleware::from_fn;
use axum::routing::{get, post, put};
use axum::{Extension, Router};
use chrono::TimeDelta;
use domain::authz::authorize;
use domain::node::{Command, Node, Rejection, Reply};
use domain::{Action, NodeId, Principal};
use std::sync::Arc;
use std::time::Duration;
use tower_http::set_header::SetResponseHeaderLayer;
use wire::recording::CHUNK_MOST;

/// What the agent-facing routes share beside the [`Services`].
#[derive(Clone)]
struct NodeApi {
    services: Services,
    handed: Arc<handed::Handed>,
    /// What each address has used up of enrollments.
    enrolling: Arc<AddressLimit>,
    limits: Arc<gate::Limits>,
}

impl FromRef<NodeApi> for KeysInForce {
    fn from_ref(api: &NodeApi) -> Self {
        api.services.trust.keys.clone()
    }
}

impl FromRef<NodeApi> for TrustDomain {
    fn from_ref(api: &NodeApi) -> Self {
        api.services.trust.domain.clone()
    }
}

/// The largest body of these routes, in bytes, but for results: those carry what a clean-up found.
const BODY_BYTES: usize = 256 * 1024;
const RESULT_BYTES: usize = 1024 * 1024;

/// How long a machine may take to answer.
const ASK_WITHIN: TimeDelta = TimeDelta::seconds(8);
/// How long the outcome of a command is asked for, and how often.
const CERTAIN_WITHIN: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);
/// How long a request may take, of which the machine's answer is the most.
const REQUEST_WITHIN: Duration = Duration::from_secs(20);
/// The longest wait for a task, and what its questions to the machine take.
const WAIT_WITHIN: Duration = Duration::from_secs(wait::LONGEST as u64 + 20);

/// The routes.
pub fn router(services: Services) -> Router {
    let outermost = Outermost::of(Service { name: "node-api", tells_route: false }, &services);
    let api = NodeApi { services, handed: Arc::default(), enrolling: Arc::default(), limits: Arc::default() };
    // Without a certificate: bounded per address, too.
    let enrolling = Router::new()
        .route("/internal/v1/nodes/{id}/enroll", post(enrollment::enroll))
        .route("/internal/v1/nodes/{id}/recover/nonce", get(recovery::nonce))
        .route("/internal/v1/nodes/{id}/recover", post(recovery::recover))
        .route_layer(from_fn(takes_no_query));
    let speaking = Router::new()
        .route("/internal/v1/nodes/{id}/certificate/renew", post(enrollment::renew))
        .route("/internal/v1/nodes/{id}/heartbeat", post(heartbeat::beat))
        .route_layer(from_fn(takes_no_query))
        .route_layer(Extension(BodyLimit(BODY_BYTES)));
    let reporting = Router::new()
        .route("/internal/v1/nodes/{id}/tasks/{task_id}/result", post(result::record))
        .route_layer(from_fn(takes_no_query))
        .route_layer(Extension(BodyLimit(RESULT_BYTES)));
    let recording = Router::new()
        .route("/internal/v1/nodes/{id}/terminals/{session_id}/recording/{seq}", put(recording::keep))
        .route_layer(from_fn(takes_no_query))
        .route_layer(Extension(BodyLimit(CHUNK_MOST)));
    let streaming = Router::new()
        .route("/internal/v1/nodes/{id}/terminals/{session_id}/stream", get(terminal::stream))
        .route_layer(from_fn(takes_no_query));
    let waiting = Router::new().route("/internal/v1/nodes/{id}/tasks/wait", get(wait::wait));

    let [(name, value)] = no_store();
    let never_stored = SetResponseHeaderLayer::overriding(name, value);
    let within = RequestTimeout(REQUEST_WITHIN);
    let enrolling = bounded(enrolling, within, Concurrency::at_most(256));
    let routes = received(enrolling, Reception::new(ReceptionLimits::of_bodies_up_to(BODY_BYTES)))
        .merge(bounded(speaking, within, Concurrency::at_most(1024)))
        .merge(bounded(reporting, within, Concurrency::at_most(1024)))
        .merge(bounded(recording, within, Concurrency::at_most(256)))
        .merge(bounded(streaming, within, Concurrency::at_most(1024)))
        // A parked wait costs a few kilobytes, so there may be as many as there are connections.
        .merge(bounded(waiting, RequestTimeout(WAIT_WITHIN), Concurrency::at_most(65_536)))
        .layer(never_stored)
        .with_state(api);
    finished(routes, outermost)
}

impl NodeApi {
    /// Asks the node's machine, as the node itself.
    async fn ask(
        &self,
        scope: &Scope,
        node_id: NodeId,
        command: Command,
        refine: impl FnOnce(Asked) -> Asked,
    ) -> Result<Answered<Reply>, Refused> {
        let by = Principal::Node(node_id);
        let permit = authorize(&by, Action::SpeakForNode).map_err(|_| Refused::Asking(AskError::Denied))?;
        let deadline = self.services.world.now() + ASK_WITHIN;
        let asked = refine(scope.asked(&permit, deadline));
        self.services.directory.ask::<Node>(&permit, node_id.0, command, asked).await.map_err(Refused::from)
    }

    /// As [`NodeApi::ask`], and where it is not certain whether the command was carried out, again with the same command id: an
    /// agent that is told *unavailable* must be able to rely on its token being unspent.
    async fn ask_until_certain(
        &self,
        scope: &Scope,
        node_id: NodeId,
        command: Command,
        key: CommandKey,
    ) -> Result<Answered<Reply>, Refused> {
        let until = tokio::time::Instant::now() + CERTAIN_WITHIN;
        let mut uncertain = false;
        loop {
            let answer = self.ask(scope, node_id, command.clone(), |asked| asked.once(key.clone()).urgently()).await;
            let again = match &answer {
                Err(Refused::Asking(AskError::Unknown { .. } | AskError::InProgress)) => {
                    uncertain = true;
                    true
                }
                // The entity is on its way back.
                Err(Refused::Asking(AskError::Unavailable { .. } | AskError::Overloaded)) => uncertain,
                Ok(_) | Err(_) => false,
            };
            if !again || tokio::time::Instant::now() >= until {
                return answer;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Why a machine gave no reply.
enum Refused {
    /// It said no.
    Rejected(Rejection),
    /// It was not asked, or its answer did not come.
    Asking(AskError<Rejection>),
}

impl From<AskError<Rejection>> for Refused {
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

/// A machine's reply that does not fit what was asked: a fault of ours.
fn unexpected(reply: &Reply) -> ApiError {
    let name = match reply {
        Reply::Node { .. } => "node",
        Reply::Task { .. } => "task",
        Reply::TokenIssued { .. } => "token_issued",
        Reply::Enrolled { .. } => "enrolled",
        Reply::CloneSuspected => "clone_suspected",
        Reply::Work { .. } => "work",
        Reply::Heard { .. } => "heard",
        Reply::Reserved { .. } => "reserved",
        Reply::Done => "done",
    };
    ApiError::internal(format!("the node's machine replied {name} to another question"))
}

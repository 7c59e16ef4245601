//! The wait for work: an agent's request that stays open until there is a task for it.
//!
//! A parked wait is no actor and no task of its own: it is its connection's future and one entry in
//! [`Polls`](crate::polls::Polls).

use super::answer::refused;
use super::gate::Speaker;
use super::handed::{Next, Session};
use super::{NodeApi, unexpected};
use crate::body::Query;
use crate::correlation::Scope;
use crate::error::ApiError;
use crate::identity::{NodeIdentity, Reason, refuse};
use crate::tasks;
use crate::tls::Peer;
use axum::Json;
use axum::extract::{ConnectInfo, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use domain::NodeId;
use domain::node::{Command, Reply, What};
use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use serde::Deserialize;
use std::time::Duration;
use telemetry::Trace;
use tokio::time::Instant;
use tracing::{field, info};
use uuid::Uuid;
use wire::task::Envelope;

/// The longest wait, in seconds.
pub(super) const LONGEST: u32 = 55;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wait {
    #[serde(default = "half_a_minute")]
    timeout_seconds: u32,
    /// Made anew by each process of the agent: a new one gets at once what the old one was given and has not reported on. Without
    /// it, a new connection does.
    session: Option<Uuid>,
}

const fn half_a_minute() -> u32 {
    30
}

/// `GET /internal/v1/nodes/{id}/tasks/wait`: 200 with one signed task, or 204.
///
/// No `async fn`: what such a one is given it keeps room for twice, for as long as it waits.
pub(super) fn wait(
    State(api): State<NodeApi>,
    Speaker(node): Speaker,
    scope: Scope,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(wait): Query<Wait>,
) -> BoxFuture<'static, Result<Response, ApiError>> {
    if !(1..=LONGEST).contains(&wait.timeout_seconds) {
        let refusal = ApiError::invalid_request(format!("`timeout_seconds` must be 1 to {LONGEST}."));
        return ready(Err(refusal.detail("field", "timeout_seconds"))).boxed();
    }
    let until = Instant::now() + Duration::from_secs(u64::from(wait.timeout_seconds));
    let session = wait.session.map_or(Session::Connection(peer.address), Session::Process);
    async move { parked(&api, &scope, &node, session, until).await }.boxed()
}

async fn parked(
    api: &NodeApi,
    scope: &Scope,
    node: &NodeIdentity,
    session: Session,
    until: Instant,
) -> Result<Response, ApiError> {
    let poll = api.services.polls.park(NodeId(node.node_id));
    loop {
        // Before the question: what comes while it is answered is not missed.
        let woken = poll.woken();
        // In a box, so that what asking takes is given back while the wait is parked.
        let look_again_at = match Box::pin(api.look(scope, node, session)).await? {
            Found::Task(task) => return Ok(Json(task).into_response()),
            Found::Later(at) => at.min(until),
            Found::Nothing => until,
        };
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep_until(look_again_at) => {}
            () = api.services.stopping.cancelled() => return Ok(StatusCode::NO_CONTENT.into_response()),
        }
        if Instant::now() >= until {
            return Ok(StatusCode::NO_CONTENT.into_response());
        }
    }
}

enum Found {
    Task(Envelope),
    Later(Instant),
    Nothing,
}

impl NodeApi {
    /// Asks the node what there is to do, and signs the first of it that this session has not been given.
    async fn look(&self, scope: &Scope, node: &NodeIdentity, session: Session) -> Result<Found, ApiError> {
        // It may have been retired while this waited; behind a proxy no connection is cut for that.
        if !self.services.trust.keys.load().node.trusts(&node.authority) {
            return Err(refuse(Reason::CertificateUnknown).because("its authority is retired"));
        }
        let node_id = NodeId(node.node_id);
        let command = Command::Poll { serial: node.serial.clone() };
        let answered = self.ask(scope, node_id, command, |asked| asked).await.map_err(refused)?;
        let Reply::Work { mut orders } = answered.reply else { return Err(unexpected(&answered.reply)) };
        let now = self.services.world.now();
        orders.retain(|order| tasks::is_in_time(order, now));
        match self.handed.next(node_id, session, &orders, std::time::Instant::now()) {
            Next::Hand { order, again } => {
                let task = tasks::signed(&self.services.trust, node_id, order, now).map_err(ApiError::internal)?;
                let (task_id, attempt) = (order.work.task_id, order.work.attempt);
                let correlation_id = order.work.origin.as_ref().map(|origin| origin.correlation_id.as_str());
                let trace = order.work.origin.as_ref().and_then(|it| Trace::parse(it.traceparent.as_deref()?));
                let allocation_id = order.allocation_id();
                // The poll's own ids say nothing here: what is handed out belongs to the request that asked for it.
                info!(
                    %task_id,
                    attempt,
                    allocation_id = allocation_id.map(field::display),
                    resource_name = allocation_id.map_or_else(|| format!("node/{node_id}"), |id| format!("allocation/{id}")),
                    correlation_id,
                    trace_id = trace.map(|trace| field::display(trace.trace_id())),
                    span_id = trace.map(|trace| field::display(trace.span_id())),
                    "task handed to the node's agent"
                );
                if let What::Provision { place, .. } = &order.what
                    && !again
                    && attempt == 1
                {
                    self.services.figures.dispatched(place.allocation_id, now);
                }
                Ok(Found::Task(task))
            }
            Next::Later(at) => Ok(Found::Later(at.into())),
            Next::Nothing => Ok(Found::Nothing),
        }
    }
}

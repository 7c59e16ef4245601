//! The update of a node's agent.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use chrono::{DateTime, Utc};
use domain::PackageDigest;
use domain::node::{Node, NodeTaskPhase, Request};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;
use wire::bundle::names;

use super::tasks::{OutcomeError, TaskView, shown};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::request_context::AdminRequest;
use crate::api::request_fields::{DigestText, Reason};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::request_body::{self, Path};

/// Another version of a node's agent.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct AgentUpdateOrder {
    /// Of the package, in the repository of the node's bundle. Left out: the one that the installation publishes.
    digest: Option<DigestText>,
    /// Try a version again that was rolled back on this node.
    #[serde(default)]
    force: bool,
    reason: Reason,
}

/// The latest update of a node's agent.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeAgentUpdate)]
pub(super) struct AgentUpdateView {
    task_id: Uuid,
    /// Of the package.
    digest: String,
    state: UpdateState,
    ordered_at: DateTime<Utc>,
    /// When the agent is to have reported on it.
    deadline_at: DateTime<Utc>,
    /// Null before its result.
    ended_at: Option<DateTime<Utc>>,
    /// Why the previous version is in use. Null where it is not.
    error: Option<OutcomeError>,
    /// The rollout that ordered it; absent where an administrator did.
    #[serde(skip_serializing_if = "Option::is_none")]
    rollout_id: Option<Uuid>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeAgentUpdateState)]
#[serde(rename_all = "snake_case")]
pub(super) enum UpdateState {
    /// The agent has it, or will get it.
    Open,
    /// Not reported in time: look at the machine, then resume the task.
    AwaitsOperator,
    /// The version is in use.
    Succeeded,
    /// It was refused or rolled back.
    Failed,
}

impl AgentUpdateView {
    pub(super) fn of(node: &Node) -> Option<Self> {
        let task = node.tasks.latest_update()?;
        let error =
            task.failure().map(|(code, message)| OutcomeError { code: code.to_owned(), message: message.to_owned() });
        let (state, ended_at) = match &task.phase {
            NodeTaskPhase::Open => (UpdateState::Open, None),
            NodeTaskPhase::AwaitsOperator { .. } => (UpdateState::AwaitsOperator, None),
            NodeTaskPhase::Ended { at, .. } if error.is_some() => (UpdateState::Failed, Some(*at)),
            NodeTaskPhase::Ended { at, .. } => (UpdateState::Succeeded, Some(*at)),
        };
        Some(Self {
            task_id: task.work.task_id.0,
            digest: task.update.as_ref()?.digest.to_string(),
            state,
            ordered_at: task.work.ordered_at,
            deadline_at: task.work.deadline_at,
            ended_at,
            error,
            rollout_id: task.update.as_ref()?.rollout_id.map(|id| id.0),
        })
    }
}

/// Replaces a node's agent by another version of its package.
///
/// The previous version is put back where the control plane has not answered the new agent within policy `node.update_commit_seconds`, and
/// that digest is then refused on this node unless `force` is set. Terminal sessions go on. A task that is not reported in time waits for
/// `resume`.
#[utoipa::path(
    post,
    path = "/",
    request_body = AgentUpdateOrder,
    responses((status = 201, description = "The task, to be read where the node's tasks are.", body = TaskView)),
)]
pub(in crate::api) async fn update_agent(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(order)): Idempotent<request_body::Json<AgentUpdateOrder>>,
) -> Result<Response, ApiError> {
    let answered = match context.committed_reply::<Node>()? {
        Some(answered) => answered,
        None => {
            let digest = package_digest(&app, order.digest.as_ref())?;
            let command = Request::UpdateAgent { digest, force: order.force, reason: order.reason.to_string() };
            context.ask::<Node>(id, command).await?
        }
    };
    shown(&app, StatusCode::CREATED, &answered)
}

/// The package's digest that was given, or else the one that the installation publishes.
pub(in crate::api) fn package_digest(app: &AppState, given: Option<&DigestText>) -> Result<PackageDigest, ApiError> {
    let published = app.agent_package.bundled.digest.as_deref();
    let digest = given.map(|digest| &**digest).or(published).ok_or_else(|| {
        let message = format!(
            "This installation publishes no package of the agent; name a `digest`, or have the operator set {}.",
            names::PACKAGE_DIGEST
        );
        ApiError::invalid_request(message).detail("field", "digest").detail("settings", vec![names::PACKAGE_DIGEST])
    })?;
    digest.parse().map_err(ApiError::internal)
}

//! The work of a node's agent: what is open, and what it has reported on.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use domain::node::{Hold, HoldPhase, Node, Work};
use domain::{AllocationId, Timestamp};
use persistence::read::HistoryRow;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::api::asking::ByAdmin;
use crate::api::stored::find;
use crate::body::Path;
use crate::error::ApiError;
use crate::services::Services;

/// How many reports are shown.
const SHOWN: usize = 50;
/// How many of the node's latest transitions are searched for them.
const SEARCHED: u32 = 1000;

/// What the node's agent is to do, and what it said of what it has done.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api) struct NodeTasks {
    /// Work that the agent has not reported on, and clean-ups that failed and are to be tried again, oldest first.
    open: Vec<TaskView>,
    /// What the agent reported, newest first: at most 50 reports out of the node's latest 1000 transitions.
    reports: Vec<ReportView>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeTask)]
pub(in crate::api) struct TaskView {
    task_id: Uuid,
    /// As `allocation.provision`.
    #[serde(rename = "type")]
    task_type: &'static str,
    state: TaskState,
    allocation_id: Uuid,
    attempt: u32,
    ordered_at: DateTime<Utc>,
    deadline_at: DateTime<Utc>,
    overdue: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeTaskState)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum TaskState {
    /// Offered to the agent until it reports.
    Open,
    /// Failed; the next attempt is the allocation's to ask.
    Failed,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeReport)]
pub(in crate::api) struct ReportView {
    at: DateTime<Utc>,
    /// What came of it, in words.
    outcome: String,
    /// The node's generation that it led to.
    generation: i64,
    correlation_id: String,
}

/// The node's tasks.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    responses((status = 200, description = "Its tasks.", body = NodeTasks)),
)]
pub(in crate::api) async fn tasks(
    _: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Json<NodeTasks>, ApiError> {
    let node = find::<Node>(&services, id).await?.ok_or_else(|| ApiError::not_found("node"))?.it;
    let now = services.world.now();
    let mut open: Vec<_> = node.holds.iter().filter_map(|(id, hold)| TaskView::of(*id, hold, now)).collect();
    open.sort_by_key(|task| (task.ordered_at, task.task_id));
    let history = services.reads.history(id, None, SEARCHED).await?.items;
    let reports = history.into_iter().filter(|row| row.command == "report").take(SHOWN).map(ReportView::from);
    Ok(Json(NodeTasks { open, reports: reports.collect() }))
}

impl TaskView {
    fn of(allocation_id: AllocationId, hold: &Hold, now: Timestamp) -> Option<Self> {
        let (task_type, state, work) = match &hold.phase {
            HoldPhase::Provisioning { work } => ("allocation.provision", TaskState::Open, work),
            HoldPhase::Releasing { work } | HoldPhase::Abandoned { work } => {
                ("allocation.release", TaskState::Open, work)
            }
            HoldPhase::ReleaseFailed { work } => ("allocation.release", TaskState::Failed, work),
            HoldPhase::Reserved | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => return None,
        };
        let Work { task_id, attempt, ordered_at, deadline_at, .. } = *work;
        Some(Self {
            task_id: task_id.0,
            task_type,
            state,
            allocation_id: allocation_id.0,
            attempt,
            ordered_at,
            deadline_at,
            overdue: deadline_at < now,
        })
    }
}

impl From<HistoryRow> for ReportView {
    fn from(row: HistoryRow) -> Self {
        Self { at: row.at, outcome: row.why, generation: row.version, correlation_id: row.correlation_id }
    }
}

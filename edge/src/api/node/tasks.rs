//! The tasks of a node's agent: open tasks, reported results, and tasks that an operator orders and resumes.

use actors::CommandReply;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::node::{
    Hold, HoldPhase, Node, NodeTask, NodeTaskPhase, PendingTask, Reply, Request, TaskOutcome, report_reasons,
};
use domain::{AllocationId, TaskId, TaskType, Timestamp};
use persistence::queries::HistoryRow;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::unexpected;
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::request_context::{AdminRequest, replayed};
use crate::api::request_fields::{Reason, ReasonBody};
use crate::api::ssh_key::NoFilter;
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery, Position};
use crate::http::request_body::{self, Path};

/// The tasks of the node's agent, and the results that it has reported.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api) struct NodeTasks {
    /// Tasks without a reported result, and failed clean-ups that are to be retried, oldest first.
    open: Vec<TaskView>,
    /// The outcomes of the node's own tasks that ended last, oldest first.
    ended: Vec<TaskOutcomeView>,
    /// A page of what the agent reported, newest first. `open` and `ended` are the same on every page: a node has few of them.
    reports: Vec<ReportView>,
    /// The `page_token` of the next page of reports; null on the last.
    next_page: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeTask)]
pub(in crate::api) struct TaskView {
    task_id: Uuid,
    /// Such as `allocation.provision`.
    #[serde(rename = "type")]
    task_type: &'static str,
    state: TaskState,
    /// Null of a task of the node itself.
    allocation_id: Option<Uuid>,
    attempt: u32,
    ordered_at: DateTime<Utc>,
    deadline_at: DateTime<Utc>,
    overdue: bool,
    /// Why it is not dispatched: the agent that sent the last heartbeat does not know tasks of its type. Null where it is dispatched.
    withheld_because: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeTaskState)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum TaskState {
    /// Dispatched to the agent until it reports.
    Open,
    /// Failed; the allocation orders the next attempt.
    Failed,
    /// Not reported in time, and its type must not be executed twice: look at the machine, then resume it.
    AwaitsOperator,
    /// The agent has reported on it.
    Ended,
}

/// The outcome of a task of the node itself.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeTaskOutcome)]
pub(in crate::api) struct TaskOutcomeView {
    task_id: Uuid,
    /// Such as `diagnostics.collect`.
    #[serde(rename = "type")]
    task_type: &'static str,
    attempt: u32,
    ended_at: DateTime<Utc>,
    succeeded: bool,
    /// Why it failed: a code and the agent's message. Null where it did not.
    error: Option<OutcomeError>,
    /// The agent's output, truncated where it is long; null where there is none.
    #[schema(value_type = Option<Object>)]
    output: Option<Value>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeTaskError)]
pub(in crate::api) struct OutcomeError {
    pub(super) code: String,
    pub(super) message: String,
}

/// A task that an administrator orders, with the reason.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct NewTask {
    #[serde(rename = "type")]
    task_type: OrderedType,
    reason: Reason,
}

/// The types of task that an administrator orders.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[schema(as = NodeTaskType)]
pub(in crate::api) enum OrderedType {
    /// Look whether the machine is fit for tenants. One that is not is quarantined.
    #[serde(rename = "node.validate")]
    Validate,
    /// Report the state of the machine and its tenants.
    #[serde(rename = "diagnostics.collect")]
    Diagnose,
    /// Restart the machine. Its allocations survive, their processes do not.
    #[serde(rename = "node.reboot")]
    Reboot,
}

impl From<OrderedType> for TaskType {
    fn from(ordered: OrderedType) -> Self {
        match ordered {
            OrderedType::Validate => Self::NodeValidate,
            OrderedType::Diagnose => Self::DiagnosticsCollect,
            OrderedType::Reboot => Self::NodeReboot,
        }
    }
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeReport)]
pub(in crate::api) struct ReportView {
    /// Null of a report that an earlier release recorded.
    task_id: Option<Uuid>,
    at: DateTime<Utc>,
    /// The outcome, as text.
    outcome: String,
    /// The node's generation that it led to.
    generation: i64,
    correlation_id: String,
}

/// The node's tasks, and its agent's reports page by page.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "Its tasks.", body = NodeTasks)),
)]
pub(in crate::api) async fn tasks(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<NoFilter>,
) -> Result<Json<NodeTasks>, ApiError> {
    let page = listing.page("admin/nodes/tasks", &id.to_string(), Order::NewestFirst)?;
    let node = find::<Node>(&app, id).await?.ok_or_else(|| ApiError::not_found("node"))?.it;
    let now = app.environment.now();
    let of_tenants = node.tenancy.holds.iter().filter_map(|(id, hold)| TaskView::of(&node, *id, hold, now));
    let own = node.tasks.by_id.values().filter(|task| !matches!(task.phase, NodeTaskPhase::Ended { .. }));
    let mut open: Vec<_> = of_tenants.chain(own.map(|task| TaskView::of_node(&node, task, now))).collect();
    let ended = node.tasks.by_id.values().filter_map(TaskOutcomeView::of).collect();
    open.sort_by_key(|task| (task.ordered_at, task.task_id));
    let before = page.after.and_then(|at| i64::try_from(at.id.as_u128()).ok());
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let history = app.reads.history_of_command(id, "report", before, rows).await?.items;
    // The position of a transition has its version in place of an id.
    let place =
        |row: &HistoryRow| Position { created_at: row.at, id: Uuid::from_u128(u128::from(row.version.unsigned_abs())) };
    let Items { items: reports, next_page } = page.answer(history, place, ReportView::from);
    Ok(Json(NodeTasks { open, ended, reports, next_page }))
}

/// Orders a task of the node itself.
///
/// A task that is not reported in time is dispatched again, except `node.reboot`, which then waits for `resume`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewTask,
    responses((status = 201, description = "The task, to be read where the node's tasks are.", body = TaskView)),
)]
pub(in crate::api) async fn order_task(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewTask>>,
) -> Result<Response, ApiError> {
    let command = Request::OrderTask { task_type: new.task_type.into(), reason: new.reason.to_string() };
    let answered = context.ask::<Node>(id, command).await?;
    shown(&app, StatusCode::CREATED, &answered)
}

/// Dispatches a task again that was not reported and must not be executed twice.
///
/// Check first whether it was executed: the service cannot know.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses((status = 200, description = "The task, under a higher attempt.", body = TaskView)),
)]
pub(in crate::api) async fn resume_task(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path((id, task_id)): Path<(Uuid, Uuid)>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    let command = Request::ResumeTask { task_id: TaskId(task_id), reason: why.reason.to_string() };
    let answered = context.prioritized().ask::<Node>(id, command).await?;
    shown(&app, StatusCode::OK, &answered)
}

pub(super) fn shown(app: &AppState, status: StatusCode, answered: &CommandReply<Reply>) -> Result<Response, ApiError> {
    let Reply::Task { task_id, node } = &answered.reply else { return Err(unexpected()) };
    let task = node.tasks.by_id.get(task_id).ok_or_else(unexpected)?;
    let view = TaskView::of_node(node, task, app.environment.now());
    Ok((status, replayed(answered), Json(view)).into_response())
}

impl TaskView {
    fn of(node: &Node, allocation_id: AllocationId, hold: &Hold, now: Timestamp) -> Option<Self> {
        let (task_type, state, work) = match &hold.phase {
            HoldPhase::Provisioning { work } => (TaskType::AllocationProvision, TaskState::Open, work),
            HoldPhase::Releasing { work } | HoldPhase::Abandoned { work } => {
                (TaskType::AllocationRelease, TaskState::Open, work)
            }
            HoldPhase::ReleaseFailed { work } => (TaskType::AllocationRelease, TaskState::Failed, work),
            HoldPhase::Ready => {
                let order = hold.logins.order.as_ref()?;
                let state = if order.rests_until.is_some() { TaskState::Failed } else { TaskState::Open };
                (TaskType::SshKeysReconcile, state, &order.work)
            }
            HoldPhase::Reserved | HoldPhase::SetupFailed { .. } => return None,
        };
        let PendingTask { task_id, attempt, ordered_at, deadline_at, .. } = *work;
        Some(Self {
            task_id: task_id.0,
            task_type: task_type.name(),
            state,
            allocation_id: Some(allocation_id.0),
            attempt,
            ordered_at,
            deadline_at,
            overdue: deadline_at < now,
            withheld_because: node.agent.lacks_task_type(task_type),
        })
    }

    fn of_node(node: &Node, task: &NodeTask, now: Timestamp) -> Self {
        let PendingTask { task_id, attempt, ordered_at, deadline_at, .. } = task.work;
        let state = match task.phase {
            NodeTaskPhase::Open => TaskState::Open,
            NodeTaskPhase::AwaitsOperator { .. } => TaskState::AwaitsOperator,
            NodeTaskPhase::Ended { .. } => TaskState::Ended,
        };
        Self {
            task_id: task_id.0,
            task_type: task.task_type.name(),
            overdue: deadline_at < now && !matches!(state, TaskState::Ended),
            withheld_because: match state {
                TaskState::Open | TaskState::AwaitsOperator => node.agent.lacks_task_type(task.task_type),
                TaskState::Failed | TaskState::Ended => None,
            },
            state,
            allocation_id: None,
            attempt,
            ordered_at,
            deadline_at,
        }
    }
}

impl TaskOutcomeView {
    fn of(task: &NodeTask) -> Option<Self> {
        let NodeTaskPhase::Ended { at, verdict, output } = &task.phase else { return None };
        let error = match verdict {
            TaskOutcome::Succeeded { .. } => None,
            TaskOutcome::Failed { code, message } => {
                Some(OutcomeError { code: code.clone(), message: message.clone() })
            }
        };
        Some(Self {
            task_id: task.work.task_id.0,
            task_type: task.task_type.name(),
            attempt: task.work.attempt,
            ended_at: *at,
            succeeded: error.is_none(),
            error,
            output: output.clone(),
        })
    }
}

impl From<HistoryRow> for ReportView {
    fn from(row: HistoryRow) -> Self {
        let (task_id, outcome) = report_reasons::read(&row.why);
        Self {
            task_id: task_id.map(|id| id.0),
            at: row.at,
            outcome: outcome.to_owned(),
            generation: row.version,
            correlation_id: row.correlation_id,
        }
    }
}

//! The running cluster as operators see it: the supervision tree, one entity with its history, the members.

use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use domain::restart_record::{Command, RestartRecord, RuntimePart};
use domain::{EntityKind, EntityRef, MemberId};
use persistence::queries::HistoryRow;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::api::request_context::{AdminRequest, RequestContext};
use crate::api::request_fields::{Reason, WorkerName};
use crate::app_state::AppState;
use crate::app_state::runtime_interface::{self, ClusterReport, EntityNode, Tree, TreeFilter};
use crate::http::error::{ApiError, Code};
use crate::http::request_body::{JsonOrDefault, Path, Query};

/// How many transitions are shown of an entity.
const SHOWN_TRANSITIONS: u32 = 50;
const MAX_STATE_LEN: usize = 64;

/// One entity: its owner, why it waits, and its history.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct EntityReport {
    entity: EntityNode,
    /// Its last 50 transitions, newest first.
    history: Vec<Transition>,
    /// True where transitions before the shown ones were removed, since they were older than policy `retention.history_months`.
    earlier_history_removed: bool,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Transition {
    /// The version that it led to.
    version: i64,
    at: DateTime<Utc>,
    command: String,
    from_state: Option<String>,
    to_state: String,
    why: String,
    /// `user:…`, `node:…` or `system:…`.
    actor: String,
    correlation_id: String,
}

/// Why a part is restarted.
#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewRestart)]
pub(super) struct NewRestart {
    reason: Option<Reason>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Restarted)]
pub(super) struct RestartView {
    /// False where it was not running: a passivated entity is activated by the next command anyway.
    restarted: bool,
}

/// The supervision tree of the whole cluster.
///
/// Without a filter: a summary, and what needs an operator.
#[utoipa::path(get, path = "/", params(TreeFilter), responses((status = 200, description = "The tree.", body = Tree)))]
pub(super) async fn tree(
    _: AdminRequest,
    State(app): State<AppState>,
    Query(filter): Query<TreeFilter>,
) -> Result<Json<Tree>, ApiError> {
    let invalid = |field: &str, why: String| {
        Err(ApiError::invalid_request(format!("Query parameter `{field}` {why}.")).detail("field", field))
    };
    if let Some(kind) = &filter.kind {
        kind_of(kind, "Query parameter")?;
    }
    if filter.limit.is_some_and(|limit| !(1..=1000).contains(&limit)) {
        return invalid("limit", "must be a whole number from 1 to 1000".to_owned());
    }
    if filter
        .state
        .as_ref()
        .is_some_and(|state| state.chars().count() > MAX_STATE_LEN || state.chars().any(char::is_control))
    {
        return invalid("state", format!("must be a state's name, at most {MAX_STATE_LEN} characters"));
    }
    Ok(Json(app.runtime.tree(filter).await?))
}

/// The members of the cluster and what each owns.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The members.", body = ClusterReport)))]
pub(super) async fn cluster(_: AdminRequest, State(app): State<AppState>) -> Result<Json<ClusterReport>, ApiError> {
    Ok(Json(app.runtime.cluster().await?))
}

/// One entity with its history and the reason it waits.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The entity.", body = EntityReport)),
)]
pub(super) async fn entity(
    _: AdminRequest,
    State(app): State<AppState>,
    Path((kind, id)): Path<(String, Uuid)>,
) -> Result<Json<EntityReport>, ApiError> {
    let entity = find_entity(&app, &kind, id).await?;
    let history = app.reads.history(id, None, SHOWN_TRANSITIONS).await?;
    // Versions begin at 1.
    let is_complete = history.next.is_some() || history.items.last().map_or(entity.version, |row| row.version - 1) == 0;
    let history = history.items.into_iter().map(Transition::from).collect();
    Ok(Json(EntityReport { entity, history, earlier_history_removed: !is_complete }))
}

/// Clears an entity's failures and restarts it, on whichever member owns it.
///
/// A repetition changes nothing more, and adds a row to the audit log.
#[utoipa::path(
    post,
    path = "/",
    request_body(content = NewRestart, description = "May be left out."),
    responses((status = 200, description = "Done.", body = RestartView)),
)]
pub(super) async fn restart(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path((kind, id)): Path<(String, Uuid)>,
    JsonOrDefault(why): JsonOrDefault<NewRestart>,
) -> Result<Json<RestartView>, ApiError> {
    find_entity(&app, &kind, id).await?;
    let entity = EntityRef { kind: kind_of(&kind, "Path parameter")?, id };
    restart_part(&app, context, RuntimePart::Entity { entity }, why).await
}

/// Restarts a row of one member's supervision tree, with everything below it, whatever it was doing.
///
/// A repetition changes nothing more, and adds a row to the audit log.
#[utoipa::path(
    post,
    path = "/",
    request_body(content = NewRestart, description = "May be left out."),
    responses((status = 200, description = "Done.", body = RestartView)),
)]
pub(super) async fn restart_worker(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path((member, worker)): Path<(Uuid, WorkerName)>,
    JsonOrDefault(why): JsonOrDefault<NewRestart>,
) -> Result<Json<RestartView>, ApiError> {
    let (member, worker) = (MemberId(member), worker.to_string());
    let row = app.runtime.worker(member, &worker).await?.ok_or_else(|| ApiError::not_found("worker"))?;
    if !row.restartable {
        let message = format!("{worker} restarts itself and cannot be restarted alone; restart the process.");
        return Err(ApiError::new(Code::StateConflict, message));
    }
    restart_part(&app, context, RuntimePart::Worker { member, worker }, why).await
}

/// The restart is committed to the audit log first and executed then: an unaudited restart must not happen, and one that was audited and
/// not executed is requested again.
async fn restart_part(
    app: &AppState,
    context: RequestContext,
    part: RuntimePart,
    NewRestart { reason }: NewRestart,
) -> Result<Json<RestartView>, ApiError> {
    let record = id_of_name(EntityKind::Runtime, &part.to_string());
    let command = Command::Restart { what: part.clone(), reason: reason.map(|reason| reason.to_string()) };
    context.prioritized().ask_unstored::<RestartRecord>(record, command).await?;
    match app.runtime.restart(part).await? {
        runtime_interface::RestartOutcome::Restarted => Ok(Json(RestartView { restarted: true })),
        runtime_interface::RestartOutcome::Nothing => Ok(Json(RestartView { restarted: false })),
        runtime_interface::RestartOutcome::Unknown => Err(ApiError::new(
            Code::ServiceUnavailable,
            "A member did not answer in time, so it is not certain that this was restarted; read the tree, then ask again.",
        )),
    }
}

async fn find_entity(app: &AppState, kind: &str, id: Uuid) -> Result<EntityNode, ApiError> {
    let kind = kind_of(kind, "Path parameter")?;
    app.runtime.entity(EntityRef { kind, id }).await?.ok_or_else(|| ApiError::not_found(kind.as_str()))
}

fn kind_of(name: &str, what: &str) -> Result<EntityKind, ApiError> {
    EntityKind::parse(name).ok_or_else(|| {
        let kinds: Vec<_> = EntityKind::ALL.iter().map(|kind| kind.as_str()).collect();
        ApiError::invalid_request(format!("{what} `kind` must be one of {}.", kinds.join(", "))).detail("field", "kind")
    })
}

impl From<HistoryRow> for Transition {
    fn from(row: HistoryRow) -> Self {
        Self {
            version: row.version,
            at: row.at,
            command: row.command,
            from_state: row.from_state,
            to_state: row.to_state,
            why: row.why,
            actor: row.actor,
            correlation_id: row.correlation_id,
        }
    }
}

//! The running cluster as operators see it: the supervision tree, one entity with its past, the members.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use domain::{EntityRef, Kind};
use persistence::read::HistoryRow;
use serde::Serialize;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use crate::api::asking::ByAdmin;
use crate::body::{Path, Query};
use crate::error::ApiError;
use crate::runtime::{ClusterReport, EntityNode, Tree, TreeFilter, kinds};
use crate::services::Services;

/// The name of a kind, in a path.
struct KindName;

impl PartialSchema for KindName {
    fn schema() -> RefOr<Schema> {
        kinds().into()
    }
}

impl ToSchema for KindName {}

/// How many transitions are shown of an entity.
const SHOWN: u32 = 50;
const MAX_STATE_LEN: usize = 64;

/// One entity: where it lives, why it waits, and how it came there.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct EntityReport {
    entity: EntityNode,
    /// Its last 50 transitions, newest first.
    history: Vec<Transition>,
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

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Restarted {
    /// False where the entity slept: it wakes at the next command anyway.
    restarted: bool,
}

/// The supervision tree of the whole cluster.
///
/// Without a filter: a summary, and what needs an operator.
#[utoipa::path(get, path = "/", params(TreeFilter), responses((status = 200, description = "The tree.", body = Tree)))]
pub(super) async fn tree(
    _: ByAdmin,
    State(services): State<Services>,
    Query(filter): Query<TreeFilter>,
) -> Result<Json<Tree>, ApiError> {
    let refuse = |field: &str, why: String| {
        Err(ApiError::invalid_request(format!("Query parameter `{field}` {why}.")).detail("field", field))
    };
    if let Some(kind) = &filter.kind {
        kind_of(kind, "Query parameter")?;
    }
    if filter.limit.is_some_and(|limit| !(1..=1000).contains(&limit)) {
        return refuse("limit", "must be a whole number from 1 to 1000".to_owned());
    }
    if filter.state.as_ref().is_some_and(|state| state.len() > MAX_STATE_LEN || state.chars().any(char::is_control)) {
        return refuse("state", format!("must be a state's name, at most {MAX_STATE_LEN} characters"));
    }
    Ok(Json(services.runtime.tree(filter).await?))
}

/// The members of the cluster and what each owns.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The members.", body = ClusterReport)))]
pub(super) async fn cluster(_: ByAdmin, State(services): State<Services>) -> Result<Json<ClusterReport>, ApiError> {
    Ok(Json(services.runtime.cluster().await?))
}

/// One entity with its history and the reason it waits.
#[utoipa::path(
    get,
    path = "/",
    params(
        ("kind" = inline(KindName), Path, description = "What kind of entity"),
        ("id" = Uuid, Path, description = "The entity's id"),
    ),
    responses((status = 200, description = "The entity.", body = EntityReport)),
)]
pub(super) async fn entity(
    _: ByAdmin,
    State(services): State<Services>,
    Path((kind, id)): Path<(String, Uuid)>,
) -> Result<Json<EntityReport>, ApiError> {
    let entity = known(&services, &kind, id).await?;
    let history = services.reads.history(id, None, SHOWN).await?;
    Ok(Json(EntityReport { entity, history: history.items.into_iter().map(Transition::from).collect() }))
}

/// Forgets an entity's failures and starts it anew, wherever it lives.
///
/// Asking twice is asking once.
#[utoipa::path(
    post,
    path = "/",
    params(
        ("kind" = inline(KindName), Path, description = "What kind of entity"),
        ("id" = Uuid, Path, description = "The entity's id"),
    ),
    responses((status = 200, description = "Done.", body = Restarted)),
)]
pub(super) async fn restart(
    _: ByAdmin,
    State(services): State<Services>,
    Path((kind, id)): Path<(String, Uuid)>,
) -> Result<Json<Restarted>, ApiError> {
    known(&services, &kind, id).await?;
    let entity = EntityRef { kind: kind_of(&kind, "Path parameter")?, id };
    Ok(Json(Restarted { restarted: services.runtime.restart_entity(entity).await? }))
}

async fn known(services: &Services, kind: &str, id: Uuid) -> Result<EntityNode, ApiError> {
    let kind = kind_of(kind, "Path parameter")?;
    services.runtime.entity(EntityRef { kind, id }).await?.ok_or_else(|| ApiError::not_found(kind.as_str()))
}

fn kind_of(name: &str, what: &str) -> Result<Kind, ApiError> {
    Kind::parse(name).ok_or_else(|| {
        let kinds: Vec<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
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

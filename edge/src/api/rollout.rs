//! Rollouts: updates of the agents of many nodes (decision 0055).

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use chrono::{DateTime, Utc};
use domain::node::{Node, rollout_term};
use domain::rollout::{EndedNode, NodeSelector, Phase, Reply, Request, Rollout, RolloutOrder};
use domain::rollout_outcome::RolloutOutcome;
use domain::{EntityKind, Machine as _, NodeId, RolloutId, SkuId, Timestamp};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::commands_with_reason::reason_commands;
use super::node::package_digest;
use super::request_context::{AdminRequest, RequestContext, replayed};
use super::request_fields::{
    CanaryCount, DigestText, MaxUnavailable, Reason, ReasonBody, RegionCode, SkuRef, SoakSeconds, set_or_none,
};
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, current};
use crate::app_state::rollout_nodes::RolloutScope;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, Path};

/// A version of the agent's package for many nodes.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewRollout {
    /// Of the package, in the repository of the nodes' bundles. Left out: the one that the installation publishes now.
    digest: Option<DigestText>,
    /// Left out: 1.
    canary: Option<CanaryCount>,
    max_unavailable: MaxUnavailable,
    /// Left out: 600.
    soak_seconds: Option<SoakSeconds>,
    /// Also nodes in quarantine that only findings, drift or a validation hold there, since another version may be what ends that. Left out:
    /// false, and all nodes in quarantine are skipped.
    #[serde(default)]
    include_held: bool,
    /// Left out: all nodes.
    #[serde(default)]
    selector: SelectorFields,
    reason: Reason,
}

/// The nodes of a rollout: those that match every field. Nodes that are registered later are no part of it.
#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[schema(as = NewRolloutSelector)]
#[serde(deny_unknown_fields)]
pub(super) struct SelectorFields {
    sku: Option<SkuRef>,
    region_code: Option<RegionCode>,
    #[serde(default, deserialize_with = "set_or_none::<_, _, 500>")]
    #[schema(min_items = 1, max_items = 500)]
    node_ids: Option<Vec<Uuid>>,
}

/// Longer than the silence after which a node is offline, and than a search of the file systems of most machines.
const DEFAULT_SOAK_SECONDS: u32 = 600;

/// A filter of rollouts.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RolloutFilter {
    state: Option<RolloutState>,
    /// The order of the list; the oldest first where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub(super) enum RolloutState {
    Running,
    /// By an administrator. Updates in flight go on.
    Paused,
    /// The update of a node failed or was rolled back, or the node had a fault in the soak after it. Updates in flight go on; resume or abort it.
    Stopped,
    /// Aborted, while updates are in flight.
    Aborting,
    Aborted,
    Completed,
}

/// The stage of a rollout.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum RolloutStage {
    /// Until as many nodes as `canary` have succeeded.
    Canary,
    /// Up to `max_unavailable` nodes at once.
    Waves,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Rollout)]
pub(super) struct RolloutView {
    id: Uuid,
    /// Of the package.
    digest: String,
    state: RolloutState,
    stage: RolloutStage,
    canary: u32,
    max_unavailable: u32,
    soak_seconds: u32,
    /// True where nodes in quarantine are updated that only findings, drift or a validation hold there.
    include_held: bool,
    /// Until when the nodes of the last wave are watched, while nothing begins; null where they are not.
    soaks_until: Option<DateTime<Utc>>,
    selector: RolloutSelectorView,
    reason: String,
    created_by: String,
    created_at: DateTime<Utc>,
    /// When its state began.
    state_since: DateTime<Utc>,
    /// The node that stopped it; null where it is not stopped.
    stopped_by: Option<EndedNodeView>,
    /// Nodes that have the version, without those that had a fault in the soak after it.
    updated: u32,
    /// Nodes whose update failed, was rolled back or has no result, and those that had a fault in the soak after it.
    failed: u32,
    /// Nodes that it did not update.
    skipped: u32,
    /// Nodes under update.
    in_flight: Vec<Uuid>,
    /// Nodes that wait, among those that were read.
    waiting: usize,
    /// True when no more nodes are to be read.
    all_nodes_read: bool,
    /// The first 50 nodes that failed.
    failures: Vec<EndedNodeView>,
    /// The first 50 nodes that were skipped.
    skips: Vec<EndedNodeView>,
    /// When an operator should look.
    deadline_at: Option<DateTime<Utc>>,
    /// True after the deadline.
    overdue: bool,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RolloutSelector)]
pub(super) struct RolloutSelectorView {
    /// Null: any.
    sku_id: Option<Uuid>,
    /// Null: any.
    region_code: Option<String>,
    /// Null: any.
    node_ids: Option<Vec<Uuid>>,
}

/// A node that failed or was skipped.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RolloutEndedNode)]
pub(super) struct EndedNodeView {
    node_id: Uuid,
    /// A code: of a failure the agent's own, or `no_result`, or the fault in the soak: `offline`, or a health finding such as
    /// `privilege/setuid`; of a skip `up_to_date`, `not_active`, `offline`, `draining`, `quarantined`,
    /// `retired`, `removed`, `update_in_progress`, `too_many_tasks` or `unsupported`.
    reason: String,
}

/// A node's part in a rollout.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RolloutNode)]
pub(super) struct RolloutNodeView {
    node_id: Uuid,
    name: Option<String>,
    host: String,
    outcome: RolloutNodeOutcome,
    /// Why it failed or was skipped: a code.
    reason: Option<String>,
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum RolloutNodeOutcome {
    /// Its update has no result yet.
    Open,
    Updated,
    Failed,
    Skipped,
}

/// The rollouts.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, RolloutFilter),
    responses((status = 200, description = "A page of rollouts.", body = Items<RolloutView>)),
)]
pub(super) async fn list(
    _: AdminRequest,
    State(app): State<AppState>,
    listing: Listing<RolloutFilter>,
) -> Result<Json<Items<RolloutView>>, ApiError> {
    let page = listing.page("admin/rollouts", "", listing.filter.order.unwrap_or_default())?;
    let states = listing.filter.state.map(|state| state.name().to_owned()).into_iter().collect();
    let filter = ListFilter { states, ..ListFilter::default() };
    let rows = read_model::list::<Rollout>(&app, &filter, &page).await?;
    let now = app.environment.now();
    Ok(Json(read_model::to_page(&page, rows, |stored| RolloutView::of(&stored.it, now))))
}

/// Updates the agents of many nodes: canaries first, then the others with at most `max_unavailable` under update at once.
///
/// After the canaries, and after each wave of `max_unavailable` nodes, nothing begins for `soak_seconds`. It stops by itself at the first node
/// whose update fails or is rolled back, or that is offline or has a health finding of class `evacuate`, `billing_credit` or `quarantine` in the
/// soak after it. Nodes that are not active, that have the version, or that another
/// update is in progress on are skipped; with `include_held` nodes in quarantine for a fault are not. One rollout at a time: another one is refused until this one has completed or was aborted.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewRollout,
    responses((status = 201, description = "The rollout.", body = RolloutView)),
)]
pub(super) async fn create(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewRollout>>,
) -> Result<Response, ApiError> {
    let answered = match context.committed_reply::<Rollout>()? {
        Some(answered) => answered,
        None => {
            let order = Box::new(order(&app, &new).await?);
            context.ask::<Rollout>(context.new_id(), Request::Create { order }).await?
        }
    };
    let headers = replayed(&answered);
    let view = shown(&app, answered.reply)?;
    Ok((StatusCode::CREATED, headers, Json(view)).into_response())
}

async fn order(app: &AppState, new: &NewRollout) -> Result<RolloutOrder, ApiError> {
    let order = RolloutOrder {
        digest: package_digest(app, new.digest.as_ref())?,
        canary: new.canary.map_or(1, |count| count.0),
        max_unavailable: new.max_unavailable.0,
        soak_seconds: new.soak_seconds.map_or(DEFAULT_SOAK_SECONDS, |seconds| seconds.0),
        includes_held: new.include_held,
        selector: selector(app, &new.selector).await?,
        reason: new.reason.to_string(),
    };
    let created_at = app.environment.now();
    let includes_held = order.includes_held;
    let scope = RolloutScope { selector: &order.selector, digest: &order.digest, includes_held, created_at };
    let mut after = None;
    loop {
        let page = scope.page(&app.reads, after).await?;
        match (page.nodes.is_empty(), page.next) {
            (false, _) => return Ok(order),
            (true, Some(next)) => after = Some(next),
            (true, None) => {
                let message =
                    "`selector` matches no node; `gpuctl nodes list` shows the nodes with their SKUs and regions.";
                return Err(ApiError::invalid_request(message).detail("field", "selector"));
            }
        }
    }
}

async fn selector(app: &AppState, fields: &SelectorFields) -> Result<NodeSelector, ApiError> {
    let sku_id = match &fields.sku {
        Some(sku) => {
            let row = app.reads.find_by_name(EntityKind::Sku, sku).await?;
            let row = row.ok_or_else(|| {
                ApiError::invalid_request("`selector.sku` is not the name or id of a SKU.")
                    .detail("field", "selector.sku")
            })?;
            Some(SkuId(row.entity.id))
        }
        None => None,
    };
    if let Some(ids) = &fields.node_ids {
        let found = app.reads.entities(EntityKind::Node, ids).await?;
        let found: BTreeSet<Uuid> = found.iter().map(|row| row.entity.id).collect();
        if let Some(unknown) = ids.iter().find(|id| !found.contains(id)) {
            let message = format!("`selector.node_ids` has {unknown}, which is no node; leave it out.");
            return Err(ApiError::invalid_request(message).detail("field", "selector.node_ids"));
        }
    }
    let node_ids = fields.node_ids.as_ref().map(|ids| ids.iter().copied().map(NodeId).collect());
    Ok(NodeSelector { sku_id, region_code: fields.region_code.as_ref().map(|code| code.to_string()), node_ids })
}

/// One rollout.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The rollout.", body = RolloutView)),
)]
pub(super) async fn get(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<RolloutView>, ApiError> {
    let found = current::<Rollout>(&app, id).await?.ok_or_else(|| ApiError::not_found("rollout"))?;
    Ok(Json(RolloutView::of(&found.it, app.environment.now())))
}

/// The nodes whose update a rollout has ordered, oldest first, with the outcome of each.
///
/// A node remembers its last four rollouts. Nodes that it skipped without an order are counted and named by the rollout alone.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of nodes.", body = Items<RolloutNodeView>)),
)]
pub(super) async fn nodes(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    listing: Listing<NoFilter>,
) -> Result<Json<Items<RolloutNodeView>>, ApiError> {
    let page = listing.page("admin/rollouts/nodes", &id.to_string(), Order::OldestFirst)?;
    current::<Rollout>(&app, id).await?.ok_or_else(|| ApiError::not_found("rollout"))?;
    let rollout_id = RolloutId(id);
    let filter = ListFilter { terms: vec![rollout_term(rollout_id)], ..ListFilter::default() };
    let rows = read_model::list::<Node>(&app, &filter, &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| RolloutNodeView::of(&stored.it, rollout_id))))
}

/// A list without a filter.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoFilter {}

reason_commands! {
    AdminRequest, execute => 200 "The rollout." RolloutView;

    /// Pauses a rollout: no further update begins. Updates in flight go on.
    pause: Pause;

    /// Resumes a rollout that was paused or has stopped, with the nodes that have not ended.
    ///
    /// A node that failed is not tried again.
    resume: Resume;

    /// Aborts a rollout: no further update begins, and it ends when those in flight have ended.
    ///
    /// Nodes that have the version keep it.
    abort: Abort;
}

async fn execute(app: &AppState, context: RequestContext, id: Uuid, request: Request) -> Result<Response, ApiError> {
    let answered = context.prioritized().ask::<Rollout>(id, request).await?;
    let headers = replayed(&answered);
    Ok((headers, Json(shown(app, answered.reply)?)).into_response())
}

fn shown(app: &AppState, reply: Reply) -> Result<RolloutView, ApiError> {
    match reply {
        Reply::Rollout { rollout } => Ok(RolloutView::of(&rollout, app.environment.now())),
        Reply::Done => Err(ApiError::internal("the machine of the rollouts answered another question")),
    }
}

impl RolloutView {
    fn of(it: &Rollout, now: Timestamp) -> Self {
        let (order, deadline) = (&it.order, it.deadline());
        let stopped_by = match &it.phase {
            Phase::Stopped { node_id, reason } => Some(EndedNodeView { node_id: node_id.0, reason: reason.clone() }),
            Phase::Running | Phase::Paused | Phase::Aborting | Phase::Aborted | Phase::Completed => None,
        };
        Self {
            id: it.id.0,
            digest: order.digest.to_string(),
            state: RolloutState::of(&it.phase),
            stage: if it.is_in_canary() { RolloutStage::Canary } else { RolloutStage::Waves },
            canary: order.canary,
            max_unavailable: order.max_unavailable,
            soak_seconds: order.soak_seconds,
            include_held: order.includes_held,
            soaks_until: it.soaks_until(),
            selector: RolloutSelectorView {
                sku_id: order.selector.sku_id.map(|id| id.0),
                region_code: order.selector.region_code.clone(),
                node_ids: order.selector.node_ids.as_ref().map(|ids| ids.iter().map(|id| id.0).collect()),
            },
            reason: order.reason.clone(),
            created_by: it.created_by.clone(),
            created_at: it.created_at,
            state_since: it.entered_at,
            stopped_by,
            updated: it.updated,
            failed: it.failed,
            skipped: it.skipped,
            in_flight: it.in_flight.keys().map(|id| id.0).collect(),
            waiting: it.waiting.len(),
            all_nodes_read: it.feed.is_exhausted,
            failures: it.failures.iter().map(EndedNodeView::of).collect(),
            skips: it.skips.iter().map(EndedNodeView::of).collect(),
            overdue: deadline.as_ref().is_some_and(|deadline| deadline.at <= now),
            deadline_at: deadline.map(|deadline| deadline.at),
        }
    }
}

impl RolloutState {
    const fn of(phase: &Phase) -> Self {
        match phase {
            Phase::Running => Self::Running,
            Phase::Paused => Self::Paused,
            Phase::Stopped { .. } => Self::Stopped,
            Phase::Aborting => Self::Aborting,
            Phase::Aborted => Self::Aborted,
            Phase::Completed => Self::Completed,
        }
    }

    /// The name of the state in the state machine.
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl EndedNodeView {
    fn of(ended: &EndedNode) -> Self {
        Self { node_id: ended.node_id.0, reason: ended.reason.clone() }
    }
}

impl RolloutNodeView {
    fn of(node: &Node, rollout_id: RolloutId) -> Self {
        let part = node.agent.rollouts.iter().find(|known| known.rollout_id == rollout_id);
        let fault = part.and_then(|known| known.soak.as_ref()?.fault.clone());
        let (outcome, reason) = match part.and_then(|known| known.outcome.as_ref()) {
            Some(RolloutOutcome::Updated) if fault.is_some() => (RolloutNodeOutcome::Failed, fault),
            None => (RolloutNodeOutcome::Open, None),
            Some(RolloutOutcome::Updated) => (RolloutNodeOutcome::Updated, None),
            Some(RolloutOutcome::Failed { reason }) => (RolloutNodeOutcome::Failed, Some(reason.clone())),
            Some(RolloutOutcome::Skipped { reason }) => (RolloutNodeOutcome::Skipped, Some(reason.name().to_owned())),
        };
        let registration = &node.machine.registration;
        let (name, host) = (registration.metadata.name.clone(), registration.host.clone());
        Self { node_id: node.id.0, name, host, outcome, reason }
    }
}

//! Allocations: creating, reading, following and releasing them (decisions 5).

mod events;
mod name_and_labels;
mod ssh_access;
mod view;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::allocation::{
    Allocation, AllocationFailure, AllocationRequest, AuthorizedKey, FailureCode, Phase, PhaseName, Request, node_term,
};
use domain::node::Node;
use domain::policy::PolicyKey;
use domain::tenant::Tenant;
use domain::{EntityKind, NodeId, SshKeyId};
use persistence::envelope_encryption::SealContext;
use persistence::queries::{AllocationCost, ListFilter};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

pub(super) use events::*;
pub(super) use name_and_labels::*;
pub(super) use ssh_access::*;

use super::commands_with_reason::reason_commands;
use super::notification_endpoint::introduce;
use super::request_context::{AdminRequest, RequestContext, UserRequest, replayed};
use super::request_fields::{
    ClaimId, GpuCount, LabelSelector, LabelSelectors, Labels, QueueSeconds, Reason, ReasonBody, RegionCode,
    ResourceName, SkuRef, metadata, set_or_none, terms,
};
use super::sku;
use super::ssh_key::tenant_of;
use crate::api::idempotency::ReplayedResponse;
use crate::api::idempotency::request_layer::{Idempotent, IdempotentCommand};
use crate::app_state::AppState;
use crate::app_state::read_model::{self, CurrentEntity, current, etag, wait_until};
use crate::http::error::{ApiError, Code};
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, JsonOrDefault, Path};
use view::{AllocationView, StateName};

/// The timeout for the saga's first reply (decisions 5).
pub(super) const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// An allocation to be created.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewAllocation {
    /// An active SKU.
    sku: SkuRef,
    /// One of the SKU's regions; any where it is left out.
    region_code: Option<RegionCode>,
    /// The node to be on; the best fitting one where it is left out.
    node_id: Option<Uuid>,
    /// All on one node.
    gpu_count: GpuCount,
    /// The project of the access token.
    project_id: Option<ClaimId>,
    /// Which of your SSH keys open it; your default key where it is left out.
    #[serde(default, deserialize_with = "set_or_none::<_, _, 32>")]
    #[schema(max_items = 32)]
    ssh_key_ids: Option<Vec<Uuid>>,
    /// How long to wait for capacity; where it is left out, there is capacity now or an error.
    queue_seconds: Option<QueueSeconds>,
    name: Option<ResourceName>,
    labels: Option<Labels>,
}

#[derive(Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewRelease {
    /// A problem with the allocation, where there was one.
    issue: Option<Reason>,
}

/// A filter of allocations.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AllocationFilter {
    state: Option<StateName>,
    /// A SKU's name or id.
    sku: Option<SkuRef>,
    /// The owner; any user for administrators, yourself otherwise.
    user_id: Option<ClaimId>,
    /// Allocations with this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<ResourceName>,
    /// Allocations with this label; several labels, repeated or separated by commas, must all match.
    #[serde(default, skip_serializing_if = "LabelSelectors::is_empty")]
    #[param(value_type = Option<Vec<LabelSelector>>, style = Form, explode, max_items = 32)]
    label: LabelSelectors,
    /// Allocations that are or were on this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    node_id: Option<Uuid>,
    /// The order of the list. Where it is left out, the oldest are first, but of a node (`node_id`) the newest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[param(inline)]
    order: Option<Order>,
}

/// Your allocations; everybody's for administrators.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, AllocationFilter),
    responses((status = 200, description = "A page of allocations.", body = Items<AllocationView>)),
)]
pub(super) async fn list(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<AllocationFilter>,
) -> Result<Json<Items<AllocationView>>, ApiError> {
    let filter = &listing.filter;
    let owner = visible_owner(&context, filter.user_id.as_deref())?;
    // A node has had many tenants: its present ones are on the first page. Replicas of an earlier release began with the oldest.
    let orders: &[Order] = match (&filter.order, filter.node_id) {
        (Some(order), _) => slice::from_ref(order),
        (None, Some(_)) => &[Order::NewestFirst, Order::OldestFirst],
        (None, None) => &[Order::OldestFirst],
    };
    let page = listing.page_in_orders("allocations", owner.as_deref().unwrap_or_default(), orders)?;
    let sku = match &filter.sku {
        Some(sku) => Some(sku::id_in_filter(&app, sku).await?),
        None => None,
    };
    let mut terms = terms(filter.name.as_ref(), &filter.label);
    terms.extend(filter.node_id.map(|id| node_term(NodeId(id))));
    let filter = ListFilter {
        owner,
        states: filter.state.map(|state| state.name().to_owned()).into_iter().collect(),
        sku,
        terms,
        ..ListFilter::default()
    };
    let rows = read_model::list::<Allocation>(&app, &filter, &page).await?;
    let now = app.environment.now();
    let ids: Vec<_> = rows.iter().map(|(position, _)| position.id).collect();
    let costs = app.reads.allocation_costs(&ids).await?;
    let nodes = nodes_of(&app, rows.iter().filter_map(|(_, stored)| Some(&stored.as_ref()?.it))).await?;
    let show = |stored: read_model::StoredEntity<Allocation>| {
        let (it, node) = (&stored.it, node_of(&stored.it));
        let node = node.and_then(|id| nodes.get(&id));
        AllocationView::of(it, node, stored.version, costs.get(&it.id.0), now)
    };
    Ok(Json(read_model::to_page(&page, rows, show)))
}

/// Rents GPUs.
///
/// The answer comes once a node holds them, or with the reason why none does; with `queue_seconds`, or where that takes longer
/// than 5 s, the allocation is answered as `requested`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewAllocation,
    responses((status = 201, description = "The allocation.", body = AllocationView)),
)]
pub(super) async fn create(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    IdempotentCommand(request_body::Json(new)): IdempotentCommand<request_body::Json<NewAllocation>>,
) -> Result<Response, ApiError> {
    let (resolved, asked_at) = (resolved_request(&app, &context, &new).await, Instant::now());
    let answered = match resolved {
        Ok(mut request) => {
            let id = context.new_id();
            request.scheduler_request_enc = Some(sealed(&app, id, &new)?);
            // Before the allocation, which may fail at once, and its user is to have the mail.
            introduce(&app, &context).await;
            context.ask::<Allocation>(id, Request::Create(Box::new(request))).await?
        }
        Err(refusal) => context.committed_reply_or::<Allocation>(refusal).await?,
    };
    // A repetition is answered with the allocation that the first request created.
    let id = answered.reply.id.0;
    let found = wait_until(&app, id, FIRST_REPLY_TIMEOUT, |it: &Allocation| !it.is_unanswered()).await?;
    let found = found.ok_or_else(|| ApiError::not_found("allocation"))?;
    let replayed = replayed(&answered);
    let Some(CurrentEntity { it, version }) = as_first_answered(&app, &found).await? else {
        return match placement_error(&found.it) {
            Some(error) => Err(replayed.refused(error)),
            None => response(&app, StatusCode::CREATED, replayed, &found.it, found.version).await,
        };
    };
    // A repetition waits as long, from after the commit: it sees the answer too, and does not answer `requested`.
    if asked_at.elapsed() < FIRST_REPLY_TIMEOUT {
        context.answer_follows_from_commit();
    }
    match placement_error(&it) {
        Some(error) => Err(replayed.refused(error)),
        None => Ok(response_from_commit(StatusCode::CREATED, replayed, &it, version, None)),
    }
}

/// The allocation at the version with which its user is answered, from memory or from that version's reply. `None` where there is none: it
/// still waits, or an earlier release has placed it.
async fn as_first_answered(
    app: &AppState,
    found: &CurrentEntity<Allocation>,
) -> Result<Option<CurrentEntity<Allocation>>, ApiError> {
    let Some(version) = found.it.answered_in else { return Ok(None) };
    if version == found.version {
        return Ok(Some(found.clone()));
    }
    let Some(reply) = app.reads.reply_at(found.it.id.0, version).await? else { return Ok(None) };
    let it: Allocation = serde_json::from_str(&reply).map_err(ApiError::internal)?;
    Ok(Some(CurrentEntity { it: Arc::new(it), version }))
}

/// One allocation.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The allocation.", body = AllocationView)),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let CurrentEntity { it, version } = visible(&app, &context, id).await?;
    response(&app, StatusCode::OK, ReplayedResponse(false), &it, version).await
}

/// Gives an allocation back, or cancels it.
///
/// A repetition changes nothing more.
#[utoipa::path(
    post,
    path = "/",
    request_body(content = NewRelease, description = "May be left out."),
    responses((status = 202, description = "The allocation, which is being released.", body = AllocationView)),
)]
pub(super) async fn release(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    IdempotentCommand(JsonOrDefault(release)): IdempotentCommand<JsonOrDefault<NewRelease>>,
) -> Result<Response, ApiError> {
    let request = Request::Release { issue: release.issue.as_ref().map(|issue| issue.to_string()) };
    execute_release(&app, context, id, request).await
}

reason_commands! {
    AdminRequest, execute_release => 202 "The allocation." AllocationView;

    /// Tries the clean-up of a failed release again, and lifts the fence that it put around the node.
    retry_release: RetryRelease;

    /// Ends a failed release without a clean-up proof. The node is quarantined.
    force_release: ForceRelease;
}

async fn execute_release(
    app: &AppState,
    context: RequestContext,
    id: Uuid,
    request: Request,
) -> Result<Response, ApiError> {
    let context = context.prioritized();
    let cost = app.reads.allocation_costs(&[id]).await?.remove(&id);
    let (answered, cost) = context.ask_resolved::<Allocation, _>(id, request, cost).await?;
    let (version, replayed) = (context.version_of(id, &answered).await?, replayed(&answered));
    if answered.written || answered.replayed {
        context.answer_follows_from_commit();
        Ok(response_from_commit(StatusCode::ACCEPTED, replayed, &answered.reply, version, cost.as_ref()))
    } else {
        response(app, StatusCode::ACCEPTED, replayed, &answered.reply, version).await
    }
}

/// The response to a command that was committed. It follows from the arguments alone, so that a repetition gets the same one.
fn response_from_commit(
    status: StatusCode,
    replayed: ReplayedResponse,
    it: &Allocation,
    version: i64,
    cost: Option<&AllocationCost>,
) -> Response {
    let view = AllocationView::of(it, None, version, cost, it.state_entered_at());
    (status, replayed, etag(version), Json(view)).into_response()
}

async fn response(
    app: &AppState,
    status: StatusCode,
    replayed: ReplayedResponse,
    it: &Allocation,
    version: i64,
) -> Result<Response, ApiError> {
    // An allocation that was never active has no cost.
    let costs = match it.active_at {
        Some(_) => app.reads.allocation_costs(&[it.id.0]).await?,
        None => BTreeMap::new(),
    };
    let nodes = nodes_of(app, std::iter::once(it)).await?;
    let node = node_of(it).and_then(|id| nodes.get(&id));
    let view = AllocationView::of(it, node, version, costs.get(&it.id.0), app.environment.now());
    Ok((status, replayed, etag(version), Json(view)).into_response())
}

/// The node whose health alerts concern the allocation.
const fn node_of(it: &Allocation) -> Option<NodeId> {
    match &it.phase {
        Phase::Active { node_id, .. } => Some(*node_id),
        Phase::Requested { .. }
        | Phase::Provisioning { .. }
        | Phase::Releasing { .. }
        | Phase::ReleaseFailed { .. }
        | Phase::Released { .. } => None,
    }
}

/// The nodes of active allocations, by one query. One that cannot be read is left out: it hides no allocation.
async fn nodes_of<'a>(
    app: &AppState,
    allocations: impl Iterator<Item = &'a Allocation>,
) -> Result<BTreeMap<NodeId, Node>, ApiError> {
    let ids: BTreeSet<Uuid> = allocations.filter_map(node_of).map(|id| id.0).collect();
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let ids: Vec<_> = ids.into_iter().collect();
    let rows = app.reads.entities(EntityKind::Node, &ids).await?;
    let node = |row: &persistence::queries::EntityRow| {
        let node = serde_json::from_str::<Node>(&row.body).inspect_err(|error| {
            let node_id = row.entity.id;
            tracing::warn!(node.id = %node_id, %error, "node {node_id} cannot be read; its allocations are shown without it");
        });
        node.ok().map(|node| (node.id, node))
    };
    Ok(rows.iter().filter_map(node).collect())
}

/// The allocation, where the caller may see it. Other users' allocations are `not_found`.
pub(super) async fn visible(
    app: &AppState,
    context: &RequestContext,
    id: Uuid,
) -> Result<CurrentEntity<Allocation>, ApiError> {
    let found = current::<Allocation>(app, id).await?;
    let may_see = |found: &CurrentEntity<Allocation>| {
        context.is_admin() || found.it.asked.owner.user_id == context.caller.user_id
    };
    found.filter(may_see).ok_or_else(|| ApiError::not_found("allocation"))
}

/// The owner whose allocations the caller may list; `None`: all owners.
fn visible_owner(context: &RequestContext, wanted: Option<&str>) -> Result<Option<String>, ApiError> {
    let own = &context.caller.user_id;
    match wanted {
        wanted if context.is_admin() => Ok(wanted.map(str::to_owned)),
        Some(other) if *own != *other => {
            Err(ApiError::forbidden("Only administrators see other people's allocations; leave `user_id` out."))
        }
        Some(_) | None => Ok(Some(own.to_string())),
    }
}

/// The request as it was received, sealed for this allocation alone.
fn sealed(app: &AppState, id: Uuid, new: &NewAllocation) -> Result<String, ApiError> {
    let row = id.to_string();
    let place = SealContext { table: "entity", column: "scheduler_request_enc", row: &row };
    let plain = serde_json::to_vec(new).map_err(ApiError::internal)?;
    let sealed = app.trust.at_rest.seal(&place, &plain).map_err(ApiError::internal)?;
    Ok(STANDARD.encode(sealed))
}

/// The request with its references resolved: SKU, price and keys, so that they do not change for this allocation later.
async fn resolved_request(
    app: &AppState,
    context: &RequestContext,
    new: &NewAllocation,
) -> Result<AllocationRequest, ApiError> {
    let caller = &context.caller;
    if new.project_id.as_deref().is_some_and(|project| caller.project_id.as_deref() != Some(project)) {
        return Err(ApiError::forbidden(
            "Your access token is not for this project; get one that is, or leave `project_id` out.",
        ));
    }
    let (sku, (ssh_keys, logins_revision)) =
        tokio::try_join!(sku::rentable(app, &new.sku), ssh_keys(app, context, new.ssh_key_ids.as_deref()))?;
    if let Some(region) = &new.region_code
        && !sku.spec.allowed_regions.iter().any(|allowed| **allowed == **region)
    {
        let regions = sku.spec.allowed_regions.join(", ");
        return Err(ApiError::invalid_request(format!("The SKU is not offered in this region; it is in {regions}."))
            .detail("field", "region_code"));
    }
    let price = sku.price().cloned().ok_or_else(|| ApiError::internal("a SKU that can be rented has no price"))?;
    let isolation_model =
        app.environment.policy().text(PolicyKey::AllocationIsolationModel, &context.scopes(), app.environment.now());
    Ok(AllocationRequest {
        owner: caller.into(),
        sku_id: sku.id,
        sku: sku.spec.name,
        region_code: new.region_code.as_ref().map(|region| region.to_string()),
        node_id: new.node_id.map(NodeId),
        gpu_count: new.gpu_count.0,
        ssh_keys,
        follows_default: new.ssh_key_ids.is_none(),
        logins_revision,
        isolation_model,
        price,
        queue_seconds: new.queue_seconds.map(|seconds| seconds.0),
        scheduler_request_enc: None,
        metadata: metadata(new.name.as_ref(), new.labels.as_ref()),
    })
}

/// The named keys, or the default one, and the revision at which they were read. An allocation of a user without keys is reachable by
/// terminal alone.
async fn ssh_keys(
    app: &AppState,
    context: &RequestContext,
    ids: Option<&[Uuid]>,
) -> Result<(Vec<AuthorizedKey>, u64), ApiError> {
    let chosen: Option<Vec<_>> = ids.map(|ids| ids.iter().copied().map(SshKeyId).collect());
    let tenant = current::<Tenant>(app, tenant_of(context)).await?.map(|found| found.it);
    let logins = tenant.as_ref().map(|tenant| (tenant.authorized_keys(chosen.as_deref()), tenant.logins_revision));
    let (keys, revision) = logins.unwrap_or_default();
    if chosen.is_some_and(|chosen| chosen.len() != keys.len()) {
        return Err(ApiError::invalid_request(
            "One of `ssh_key_ids` is not a key of yours; GET /api/v1/ssh-keys lists those there are.",
        )
        .detail("field", "ssh_key_ids"));
    }
    Ok((keys, revision))
}

/// The error response where the saga's first reply was that the allocation cannot be placed.
fn placement_error(allocation: &Allocation) -> Option<ApiError> {
    let AllocationFailure { phase, code, message, .. } = allocation.failure.as_ref()?;
    if *phase != PhaseName::Requested {
        return None;
    }
    let error = |code| Some(ApiError::new(code, message.clone()).detail("allocation_id", allocation.id.to_string()));
    match code {
        FailureCode::InsufficientCapacity => {
            error(Code::InsufficientCapacity).map(|error| error.detail("suggestion", message.clone()))
        }
        FailureCode::ConcurrencyLimitExceeded => error(Code::ConcurrencyLimitExceeded)
            .map(|error| error.detail("policy_key", PolicyKey::AllocationMaxConcurrent.name())),
        FailureCode::InsufficientBalance => error(Code::InsufficientBalance),
        FailureCode::ProvisioningTimeout | FailureCode::Reported(_) => {
            error(Code::StateConflict).map(|error| error.detail("failure", code.as_str()))
        }
    }
}

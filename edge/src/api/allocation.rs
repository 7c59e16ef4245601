//! Allocations: GPUs rented, watched and given back (decisions 5).

mod events;
mod logins;
mod revision;
mod view;

use actors::Answered;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::allocation::{Allocation, AuthorizedKey, Command, Failure, Phase, Request};
use domain::node::Node;
use domain::policy::Key;
use domain::tenant::Tenant;
use domain::{Kind, NodeId, SshKeyId};
use persistence::envelope::Place;
use persistence::read::ListFilter;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

pub(super) use events::*;
pub(super) use logins::*;
pub(super) use revision::*;

use super::asking::{Asking, ByAdmin, ByUser, replayed};
use super::field::{
    Because, ClaimId, GpuCount, LabelSelector, LabelSelectors, Labels, QueueSeconds, Reason, RegionCode, ResourceName,
    SkuRef, metadata, set_or_none, terms,
};
use super::notification_endpoint::introduce;
use super::sku;
use super::ssh_key::tenant_of;
use super::stored::{self, Current, current, etag, wait_until};
use crate::body::{self, JsonOrDefault, Path};
use crate::error::{ApiError, Code};
use crate::idempotency::Replayed;
use crate::idempotency::keyed::Once;
use crate::page::{Items, Listing, Order, PageQuery};
use crate::services::Services;
use view::{AllocationView, StateName};

/// How long the saga's first answer is waited for (decisions 5).
const FIRST_ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// What is to be rented.
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
    /// What was wrong with it, where something was.
    issue: Option<Reason>,
}

/// Which allocations.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AllocationFilter {
    state: Option<StateName>,
    /// A SKU's name or id.
    sku: Option<SkuRef>,
    /// Whose; anybody's for administrators, your own otherwise.
    user_id: Option<ClaimId>,
    /// Those of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<ResourceName>,
    /// Those that have this label; given several times, or with commas in between, those that have all of them.
    #[serde(default, skip_serializing_if = "LabelSelectors::is_empty")]
    #[param(value_type = Option<Vec<LabelSelector>>, style = Form, explode, max_items = 32)]
    label: LabelSelectors,
}

/// Your allocations, oldest first; everybody's for administrators.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, AllocationFilter),
    responses((status = 200, description = "A page of allocations.", body = Items<AllocationView>)),
)]
pub(super) async fn list(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    listing: Listing<AllocationFilter>,
) -> Result<Json<Items<AllocationView>>, ApiError> {
    let filter = &listing.filter;
    let owner = visible_owner(&asking, filter.user_id.as_deref())?;
    let page = listing.page("allocations", owner.as_deref().unwrap_or_default(), Order::OldestFirst)?;
    let sku = match &filter.sku {
        Some(sku) => Some(sku::referred(&services, sku).await?),
        None => None,
    };
    let filter = ListFilter {
        owner,
        states: filter.state.map(|state| state.name().to_owned()).into_iter().collect(),
        sku,
        terms: terms(filter.name.as_ref(), &filter.label),
    };
    let rows = stored::list::<Allocation>(&services, &filter, &page).await?;
    let now = services.world.now();
    let ids: Vec<_> = rows.iter().map(|(position, _)| position.id).collect();
    let costs = services.reads.costs(&ids).await?;
    let nodes = nodes_of(&services, rows.iter().filter_map(|(_, stored)| Some(&stored.as_ref()?.it))).await?;
    let show = |stored: stored::Stored<Allocation>| {
        let (it, node) = (&stored.it, node_of(&stored.it));
        let node = node.and_then(|id| nodes.get(&id));
        AllocationView::of(it, node, stored.version, costs.get(&it.id.0), now)
    };
    Ok(Json(stored::answer(&page, rows, show)))
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
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Once(body::Json(new)): Once<body::Json<NewAllocation>>,
) -> Result<Response, ApiError> {
    let answered = match asking.carried_out::<Allocation>()? {
        Some(answered) => answered,
        None => {
            introduce(&services, &asking).await;
            let id = asking.id_of_new();
            let mut request = request(&services, &asking, &new).await?;
            request.scheduler_request_enc = Some(sealed(&services, id, &new)?);
            asking.ask::<Allocation>(id, Command::Request(Box::new(request))).await?
        }
    };
    let is_answered =
        |allocation: &Allocation| !matches!(allocation.phase, Phase::Requested { look_again_at: None, .. });
    // A repetition is answered with what the first request made.
    let id = answered.reply.id.0;
    let found = wait_until(&services, id, FIRST_ANSWER_WITHIN, is_answered).await?;
    let Current { it, version } = found.ok_or_else(|| ApiError::not_found("allocation"))?;
    let replayed = replayed(&answered);
    match refusal(&it) {
        Some(error) => Err(replayed.refused(error)),
        None => shown(&services, StatusCode::CREATED, replayed, &it, version).await,
    }
}

/// One allocation.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id")),
    responses((status = 200, description = "The allocation.", body = AllocationView)),
)]
pub(super) async fn get(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let Current { it, version } = visible(&services, &asking, id).await?;
    shown(&services, StatusCode::OK, Replayed(false), &it, version).await
}

/// Gives an allocation back, or cancels it.
///
/// Asking twice is asking once.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id")),
    request_body(content = NewRelease, description = "May be left out."),
    responses((status = 202, description = "The allocation, which is being released.", body = AllocationView)),
)]
pub(super) async fn release(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(JsonOrDefault(release)): Once<JsonOrDefault<NewRelease>>,
) -> Result<Response, ApiError> {
    let command = Command::Release { issue: release.issue.as_ref().map(|issue| issue.to_string()) };
    accepted(&services, asking, id, command).await
}

/// Tries the clean-up of a failed release again, and lifts the fence that it put around the node.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id")),
    request_body = Because,
    responses((status = 202, description = "The allocation.", body = AllocationView)),
)]
pub(super) async fn retry_release(
    ByAdmin(asking): ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    accepted(&services, asking, id, Command::RetryRelease { reason: why.reason.to_string() }).await
}

/// Ends a failed release without a clean-up proof. The node is quarantined.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The allocation's id")),
    request_body = Because,
    responses((status = 202, description = "The allocation.", body = AllocationView)),
)]
pub(super) async fn force_release(
    ByAdmin(asking): ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    accepted(&services, asking, id, Command::ForceRelease { reason: why.reason.to_string() }).await
}

async fn accepted(services: &Services, asking: Asking, id: Uuid, command: Command) -> Result<Response, ApiError> {
    let asking = asking.urgently();
    let answered: Answered<Box<Allocation>> = asking.ask::<Allocation>(id, command).await?;
    let version = asking.version_of(id, &answered).await?;
    shown(services, StatusCode::ACCEPTED, replayed(&answered), &answered.reply, version).await
}

async fn shown(
    services: &Services,
    status: StatusCode,
    replayed: Replayed,
    it: &Allocation,
    version: i64,
) -> Result<Response, ApiError> {
    // What never was active has cost nothing.
    let costs = match it.active_at {
        Some(_) => services.reads.costs(&[it.id.0]).await?,
        None => BTreeMap::new(),
    };
    let nodes = nodes_of(services, std::iter::once(it)).await?;
    let node = node_of(it).and_then(|id| nodes.get(&id));
    let view = AllocationView::of(it, node, version, costs.get(&it.id.0), services.world.now());
    Ok((status, replayed, etag(version), Json(view)).into_response())
}

/// The node whose alerts concern the allocation.
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

/// The nodes of active allocations, by one query.
async fn nodes_of<'a>(
    services: &Services,
    allocations: impl Iterator<Item = &'a Allocation>,
) -> Result<BTreeMap<NodeId, Node>, ApiError> {
    let ids: BTreeSet<Uuid> = allocations.filter_map(node_of).map(|id| id.0).collect();
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let ids: Vec<_> = ids.into_iter().collect();
    let rows = services.reads.entities(Kind::Node, &ids).await?;
    let node = |row: &persistence::read::EntityRow| {
        serde_json::from_str::<Node>(&row.body).map(|node| (node.id, node)).map_err(ApiError::internal)
    };
    rows.iter().map(node).collect()
}

/// The allocation, where the caller may see it: other people's do not exist for them.
pub(super) async fn visible(services: &Services, asking: &Asking, id: Uuid) -> Result<Current<Allocation>, ApiError> {
    let found = current::<Allocation>(services, id).await?;
    let may_see = |found: &Current<Allocation>| asking.is_admin() || found.it.asked.user_id == asking.caller.user_id;
    found.filter(may_see).ok_or_else(|| ApiError::not_found("allocation"))
}

/// Whose allocations the caller gets to see; `None`: everybody's.
fn visible_owner(asking: &Asking, wanted: Option<&str>) -> Result<Option<String>, ApiError> {
    let own = &asking.caller.user_id;
    match wanted {
        wanted if asking.is_admin() => Ok(wanted.map(str::to_owned)),
        Some(other) if other != own => {
            Err(ApiError::forbidden("Only administrators see other people's allocations; leave `user_id` out."))
        }
        Some(_) | None => Ok(Some(own.clone())),
    }
}

/// The request as it came in, sealed for this allocation alone.
fn sealed(services: &Services, id: Uuid, new: &NewAllocation) -> Result<String, ApiError> {
    let row = id.to_string();
    let place = Place { table: "entity", column: "scheduler_request_enc", row: &row };
    let plain = serde_json::to_vec(new).map_err(ApiError::internal)?;
    let sealed = services.trust.at_rest.seal(&place, &plain).map_err(ApiError::internal)?;
    Ok(STANDARD.encode(sealed))
}

/// What is asked for, with everything resolved that must not change under the user.
async fn request(services: &Services, asking: &Asking, new: &NewAllocation) -> Result<Request, ApiError> {
    let caller = &asking.caller;
    if new.project_id.as_deref().is_some_and(|project| caller.project_id.as_deref() != Some(project)) {
        return Err(ApiError::forbidden(
            "Your access token is not for this project; get one that is, or leave `project_id` out.",
        ));
    }
    let (sku, (ssh_keys, logins_revision)) =
        tokio::try_join!(sku::rentable(services, &new.sku), ssh_keys(services, asking, new.ssh_key_ids.as_deref()))?;
    if let Some(region) = &new.region_code
        && !sku.spec.allowed_regions.iter().any(|allowed| **allowed == **region)
    {
        let regions = sku.spec.allowed_regions.join(", ");
        return Err(ApiError::invalid_request(format!("The SKU is not offered in this region; it is in {regions}."))
            .detail("field", "region_code"));
    }
    let price = sku.price().cloned().ok_or_else(|| ApiError::internal("a SKU that can be rented has no price"))?;
    let isolation_model =
        services.world.policy().text(Key::AllocationIsolationModel, &asking.scopes(), services.world.now());
    Ok(Request {
        user_id: caller.user_id.clone(),
        org_id: caller.org_id.clone(),
        project_id: caller.project_id.clone(),
        plan: caller.plan.clone(),
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

/// The keys that were named, or the default one, and the revision at which they were read. A user without keys gets an allocation that
/// only a terminal opens.
async fn ssh_keys(
    services: &Services,
    asking: &Asking,
    ids: Option<&[Uuid]>,
) -> Result<(Vec<AuthorizedKey>, u64), ApiError> {
    let chosen: Option<Vec<_>> = ids.map(|ids| ids.iter().copied().map(SshKeyId).collect());
    let tenant = current::<Tenant>(services, tenant_of(asking)).await?.map(|found| found.it);
    let logins = tenant.as_ref().map(|tenant| (tenant.logins(chosen.as_deref()), tenant.logins_revision));
    let (keys, revision) = logins.unwrap_or_default();
    if chosen.is_some_and(|chosen| chosen.len() != keys.len()) {
        return Err(ApiError::invalid_request(
            "One of `ssh_key_ids` is not a key of yours; GET /api/v1/ssh-keys lists those there are.",
        )
        .detail("field", "ssh_key_ids"));
    }
    Ok((keys, revision))
}

/// The answer to a request that could not be met: the saga's first answer was no.
fn refusal(allocation: &Allocation) -> Option<ApiError> {
    let Failure { phase, code, message, .. } = allocation.failure.as_ref()?;
    if phase != "requested" {
        return None;
    }
    let error = |code| Some(ApiError::new(code, message.clone()).detail("allocation_id", allocation.id.to_string()));
    match code.as_str() {
        "insufficient_capacity" => {
            error(Code::InsufficientCapacity).map(|error| error.detail("suggestion", message.clone()))
        }
        "concurrency_limit_exceeded" => error(Code::ConcurrencyLimitExceeded)
            .map(|error| error.detail("policy_key", Key::AllocationMaxConcurrent.name())),
        "insufficient_balance" => error(Code::InsufficientBalance),
        _ => error(Code::StateConflict).map(|error| error.detail("failure", code.clone())),
    }
}

/// The version after which a stream goes on.
fn last_event_id(headers: &axum::http::HeaderMap) -> Result<i64, ApiError> {
    let Some(value) = headers.get("last-event-id") else { return Ok(0) };
    let version = value.to_str().ok().and_then(|text| text.trim().parse().ok()).filter(|version| *version >= 0);
    version.ok_or_else(|| {
        ApiError::invalid_request("Header `Last-Event-ID` must be the id of an event of this stream.")
            .detail("field", "Last-Event-ID")
    })
}

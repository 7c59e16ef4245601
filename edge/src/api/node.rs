//! The inventory of nodes, and what administrators do with a node (decisions 4, *Node onboarding and identity*).

mod onboarding;
mod tasks;
mod view;

use actors::{Answered, AskError};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use domain::metadata::Patch;
use domain::node::{Command, Life, Node, OnboardingMode, Probe, Registration, Rejection, Reply};
use domain::policy::Key;
use persistence::read::ListFilter;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

pub(super) use onboarding::*;
pub(super) use tasks::*;

use super::asking::{Asking, ByAdmin, replayed};
use super::field::{
    Because, GpuCount, HostName, LabelChanges, LabelSelector, LabelSelectors, Labels, LoginName, Port, PublicKeyText,
    Reason, RegionCode, ResourceName, SkuRef, metadata, metadata_patch, terms,
};
use super::sku;
use super::stored::{self, Stored, etag, find, if_match, wait_until};
use crate::answer::not_answered;
use crate::body::{self, Path};
use crate::error::{ApiError, Code};
use crate::host::Host;
use crate::idempotency::keyed::Once;
use crate::page::{Items, Listing, Order, PageQuery};
use crate::probe::Probed;
use crate::services::Services;
use crate::ssh_public_key::SshPublicKey;
use view::{NodeView, StateName};

/// How long the removal of a node is waited for.
const REMOVED_WITHIN: Duration = Duration::from_secs(5);

/// A machine to be registered.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewNode {
    host: HostName,
    /// SSH's port.
    port: Port,
    ssh_username: LoginName,
    ssh_public_key: PublicKeyText,
    /// An active SKU.
    sku: SkuRef,
    /// As many as the SKU has.
    gpus_total: GpuCount,
    /// One of the SKU's regions.
    region_code: RegionCode,
    onboarding_mode: Mode,
    /// Try to connect to `host` and `port` now.
    #[serde(default)]
    probe: bool,
    name: Option<ResourceName>,
    labels: Option<Labels>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[schema(as = OnboardingMode)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    /// An operator installs the bundle.
    Manual,
    /// A bare-metal provider injects it.
    Maas,
}

/// What changes of a node. What is left out stays; give at least one.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 1)]
pub(super) struct NodeChange {
    host: Option<HostName>,
    port: Option<Port>,
    ssh_username: Option<LoginName>,
    /// Try to connect to the node's address now. Left out: a new `host` or `port` of a node that was probed is probed too.
    probe: Option<bool>,
    /// Null: the node has no name any more.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<ResourceName>)]
    name: Patch<ResourceName>,
    /// Null: the node has no labels any more.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<LabelChanges>)]
    labels: Patch<LabelChanges>,
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Retirement {
    reason: Reason,
    /// Take no new allocation and retire when the last one ends, where there are any.
    #[serde(default)]
    drain: bool,
}

/// Which nodes.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct NodeFilter {
    state: Option<StateName>,
    /// A SKU's name or id.
    sku: Option<SkuRef>,
    /// Those of this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<ResourceName>,
    /// Those that have this label; given several times, or with commas in between, those that have all of them.
    #[serde(default, skip_serializing_if = "LabelSelectors::is_empty")]
    #[param(value_type = Option<Vec<LabelSelector>>, style = Form, explode, max_items = 32)]
    label: LabelSelectors,
}

/// The inventory, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, NodeFilter),
    responses((status = 200, description = "A page of nodes.", body = Items<NodeView>)),
)]
pub(super) async fn list(
    _: ByAdmin,
    State(services): State<Services>,
    listing: Listing<NodeFilter>,
) -> Result<Json<Items<NodeView>>, ApiError> {
    let page = listing.page("admin/nodes", "", Order::OldestFirst)?;
    let filter = &listing.filter;
    let sku = match &filter.sku {
        Some(sku) => Some(sku::referred(&services, sku).await?),
        None => None,
    };
    let filter = ListFilter {
        owner: None,
        states: filter.state.map(|state| state.name().to_owned()).into_iter().collect(),
        sku,
        terms: terms(filter.name.as_ref(), &filter.label),
    };
    let rows = stored::list::<Node>(&services, &filter, &page).await?;
    let now = services.world.now();
    Ok(Json(stored::answer(&page, rows, |stored| NodeView::of(&stored, now))))
}

/// Registers a machine as a node.
///
/// Issue an enrollment token for it next.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewNode,
    responses((status = 201, description = "The node.", body = NodeView)),
)]
pub(super) async fn create(
    ByAdmin(asking): ByAdmin,
    State(services): State<Services>,
    Once(body::Json(new)): Once<body::Json<NewNode>>,
) -> Result<Response, ApiError> {
    let answered = match asking.carried_out::<Node>()? {
        Some(answered) => answered,
        None => asking.ask::<Node>(asking.id_of_new(), registered(&services, &asking, &new).await?).await?,
    };
    shown(&services, &asking, StatusCode::CREATED, answered).await
}

/// What is to be registered: its SKU looked up and, where that is wanted, its address probed.
async fn registered(services: &Services, asking: &Asking, new: &NewNode) -> Result<Command, ApiError> {
    let host = Host::parse(&new.host)?;
    let key = SshPublicKey::parse(&new.ssh_public_key).map_err(|error| {
        ApiError::invalid_request(format!("`ssh_public_key` is refused: {error}.")).detail("field", "ssh_public_key")
    })?;
    let sku = sku::active(services, &new.sku).await?;
    let onboarding_mode = match new.onboarding_mode {
        Mode::Manual => OnboardingMode::Manual,
        Mode::Maas => return Err(no_provider(services, asking)),
    };
    let probe = if new.probe { Some(probed(services, &host, new.port.0).await?) } else { None };
    let registration = Registration {
        host: host.to_string(),
        port: new.port.0,
        ssh_username: new.ssh_username.to_string(),
        ssh_public_key: key.public_key,
        ssh_key_fingerprint: key.fingerprint,
        sku: sku.promise(),
        region_code: new.region_code.to_string(),
        gpus_total: new.gpus_total.0,
        onboarding_mode,
        metadata: metadata(new.name.as_ref(), new.labels.as_ref()),
    };
    Ok(Command::Register { registration: Box::new(registration), probe })
}

/// One node.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    responses((status = 200, description = "The node; its generation is the `ETag` too.", body = NodeView)),
)]
pub(super) async fn get(
    _: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let stored = find::<Node>(&services, id).await?.ok_or_else(|| ApiError::not_found("node"))?;
    Ok((etag(stored.version), Json(NodeView::of(&stored, services.world.now()))).into_response())
}

/// Changes how a node is reached, its name and its labels.
#[utoipa::path(
    patch,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The node's id"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the change is based on",
            pattern = r#"^"[0-9]{1,18}"$"#),
    ),
    request_body = NodeChange,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn revise(
    ByAdmin(asking): ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
    body::Json(change): body::Json<NodeChange>,
) -> Result<Response, ApiError> {
    let metadata = metadata_patch(change.name.clone(), change.labels.clone());
    let keeps_address = change.host.is_none() && change.port.is_none() && change.ssh_username.is_none();
    if keeps_address && change.probe != Some(true) && metadata.is_empty() {
        return Err(ApiError::invalid_request(
            "Nothing is to be changed; give `host`, `port`, `ssh_username`, `name`, `labels` or \"probe\": true.",
        ));
    }
    let host = change.host.as_deref().map(Host::parse).transpose()?;
    let probe = revised_probe(&services, id, host.as_ref(), &change).await?;
    let command = Command::Revise {
        host: host.map(|host| host.to_string()),
        port: change.port.map(|port| port.0),
        ssh_username: change.ssh_username.as_ref().map(|name| name.to_string()),
        probe,
        metadata,
        if_version: if_match(&headers)?,
    };
    let answered = asking.ask::<Node>(id, command).await?;
    shown(&services, &asking, StatusCode::OK, answered).await
}

/// Takes a node out of service.
///
/// Refused while an allocation is on it, unless it is to be drained.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    request_body = Retirement,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn retire(
    by: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Retirement>>,
) -> Result<Response, ApiError> {
    let command = Command::Retire { reason: why.reason.to_string(), drain: why.drain };
    order(&services, by, id, command).await
}

/// Takes a retired node into service again, if it is in order.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    request_body = Because,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn reactivate(
    by: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    order(&services, by, id, Command::Reactivate { reason: why.reason.to_string() }).await
}

/// Takes a node out of rent until it is found in order.
///
/// Its tenants stay.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    request_body = Because,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn quarantine(
    by: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    order(&services, by, id, Command::Quarantine { reason: why.reason.to_string() }).await
}

/// Gives a quarantined node its state back, if it is in order.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    request_body = Because,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn release_quarantine(
    by: ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    order(&services, by, id, Command::ReleaseQuarantine { reason: why.reason.to_string() }).await
}

/// Removes a retired node for good.
///
/// Its identity, tokens and connections are void at once, on every replica.
#[utoipa::path(
    post,
    path = "/",
    params(("id" = Uuid, Path, description = "The node's id")),
    request_body = Because,
    responses(
        (status = 200, description = "It is removed.", body = NodeView),
        (status = 202, description = "Its connections are still being closed.", body = NodeView),
    ),
)]
pub(super) async fn remove(
    ByAdmin(asking): ByAdmin,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    Once(body::Json(why)): Once<body::Json<Because>>,
) -> Result<Response, ApiError> {
    let asking = asking.urgently();
    let command = Command::Remove { reason: why.reason.to_string() };
    let answered = asking.try_ask::<Node>(id, command).await?.map_err(not_removed)?;
    let gone = |node: &Node| node.life == Life::Removed;
    wait_until(&services, id, REMOVED_WITHIN, gone).await?;
    let stored = find::<Node>(&services, id).await?.ok_or_else(unexpected)?;
    let status = if gone(&stored.it) { StatusCode::OK } else { StatusCode::ACCEPTED };
    let view = NodeView::of(&stored, services.world.now());
    Ok((status, replayed(&answered), etag(stored.version), Json(view)).into_response())
}

/// Carries out what an operator orders, ahead of what waits, and shows the node as it is then.
async fn order(
    services: &Services,
    ByAdmin(asking): ByAdmin,
    id: Uuid,
    command: Command,
) -> Result<Response, ApiError> {
    let asking = asking.urgently();
    let answered = asking.ask::<Node>(id, command).await?;
    shown(services, &asking, StatusCode::OK, answered).await
}

async fn shown(
    services: &Services,
    asking: &Asking,
    status: StatusCode,
    answered: Answered<Reply>,
) -> Result<Response, ApiError> {
    let replayed = replayed(&answered);
    let Reply::Node { node } = &answered.reply else { return Err(unexpected()) };
    let (version, updated_at) = asking.led_to(node.id.0, &answered).await?;
    let stored = Stored { created_at: node.registered_at, it: Node::clone(node), version, updated_at };
    Ok((status, replayed, etag(version), Json(NodeView::of(&stored, services.world.now()))).into_response())
}

/// A removal is refused in the words of its precondition, whatever keeps the node (specification, *Errors*).
fn not_removed(error: AskError<Rejection>) -> ApiError {
    match error {
        AskError::Rejected(Rejection::InUse { allocation_id }) => ApiError::invalid_request(format!(
            "Allocation {allocation_id} is on the node; it can be removed when the allocation is released."
        ))
        .detail("allocation_id", allocation_id.to_string()),
        other => not_answered(other),
    }
}

/// What a probe of the changed address finds, where one is wanted.
async fn revised_probe(
    services: &Services,
    id: Uuid,
    host: Option<&Host>,
    change: &NodeChange,
) -> Result<Option<Probe>, ApiError> {
    let node = find::<Node>(services, id).await?.ok_or_else(|| ApiError::not_found("node"))?.it;
    let host = match host {
        Some(host) => host.clone(),
        None => Host::parse(&node.registration.host)?,
    };
    let port = change.port.as_ref().map_or(node.registration.port, |port| port.0);
    let is_elsewhere = host.to_string() != node.registration.host || port != node.registration.port;
    let wanted = change.probe.unwrap_or(is_elsewhere && node.probe.is_some());
    if wanted { Ok(Some(probed(services, &host, port).await?)) } else { Ok(None) }
}

async fn probed(services: &Services, host: &Host, port: u16) -> Result<Probe, ApiError> {
    let (reachable, error) = match services.probe.probe(host, port).await? {
        Probed::Reachable => (true, None),
        Probed::Unreachable(why) => (false, Some(why)),
    };
    Ok(Probe { reachable, checked_at: services.world.now(), error })
}

/// Why no provider's automation prepares the machine: it is switched off, or there is none.
fn no_provider(services: &Services, asking: &Asking) -> ApiError {
    let on = services.world.policy().is_on(Key::MaasEnabled, &asking.scopes(), services.world.now());
    let message = if on {
        "This installation has no bare-metal provider; use onboarding_mode manual."
    } else {
        "The bare-metal provider is switched off; use onboarding_mode manual, or set the policy maas.enabled to true."
    };
    ApiError::new(Code::ServiceUnavailable, message)
        .detail("field", "onboarding_mode")
        .detail("policy_key", Key::MaasEnabled.name())
}

fn unexpected() -> ApiError {
    ApiError::internal("the node's machine answered another question")
}

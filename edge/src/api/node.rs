//! Nodes: the inventory, and administrators' actions on a node (decisions 4).

mod agent_update;
pub(crate) mod bootstrap_bundle;
mod enrollment_token;
mod gpu_reset;
pub mod machine_provider;
mod tasks;
mod validation;
mod view;

use actors::{AskError, CommandReply};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use domain::FindingId;
use domain::metadata::PatchValue;
use domain::node::{Node, OnboardingMode, Phase, ProbeOutcome, Registration, Rejection, Reply, Request};
use persistence::queries::ListFilter;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

pub(super) use agent_update::*;
pub(super) use enrollment_token::*;
pub(super) use gpu_reset::*;
pub(super) use tasks::*;
pub(super) use validation::*;

use super::commands_with_reason::reason_commands;
use super::request_context::{AdminRequest, RequestContext, replayed};
use super::request_fields::{
    GpuCount, HostName, LabelChanges, LabelSelector, LabelSelectors, Labels, LoginName, Port, PublicKeyText, Reason,
    ReasonBody, RegionCode, ResourceName, SkuRef, metadata, metadata_patch, terms,
};
use super::sku;
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::rejection_response::not_answered;
use crate::api::request_fields::ssh_public_key::SshPublicKey;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, IfMatch, StoredEntity, etag, find, if_match, wait_until};
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, Path};
use crate::outbound::host_address::HostAddress;
use crate::outbound::node_probe::Reachability;
use view::{NodeView, StateName};

/// The timeout of waiting for a node's removal.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

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
    /// As many as the SKU says.
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
    /// A bare-metal provider deploys the machine, whose name there is `host`, with the bundle as its user data.
    Maas,
}

/// A change of a node. Absent fields stay; give at least one.
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
    #[serde(default, skip_serializing_if = "PatchValue::is_keep")]
    #[schema(value_type = Option<ResourceName>)]
    name: PatchValue<ResourceName>,
    /// Null: the node has no labels any more.
    #[serde(default, skip_serializing_if = "PatchValue::is_keep")]
    #[schema(value_type = Option<LabelChanges>)]
    labels: PatchValue<LabelChanges>,
}

#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Retirement {
    reason: Reason,
    /// Take no new allocation and retire when the last one ends, where there are any.
    #[serde(default)]
    drain: bool,
}

/// A filter of nodes.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct NodeFilter {
    state: Option<StateName>,
    /// A SKU's name or id.
    sku: Option<SkuRef>,
    /// Nodes with this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<ResourceName>,
    /// Nodes with this label; several labels, repeated or separated by commas, must all match.
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
    _: AdminRequest,
    State(app): State<AppState>,
    listing: Listing<NodeFilter>,
) -> Result<Json<Items<NodeView>>, ApiError> {
    let page = listing.page("admin/nodes", "", Order::OldestFirst)?;
    let filter = &listing.filter;
    let sku = match &filter.sku {
        Some(sku) => Some(sku::id_in_filter(&app, sku).await?),
        None => None,
    };
    let filter = ListFilter {
        states: filter.state.map(|state| state.name().to_owned()).into_iter().collect(),
        sku,
        terms: terms(filter.name.as_ref(), &filter.label),
        ..ListFilter::default()
    };
    let rows = read_model::list::<Node>(&app, &filter, &page).await?;
    let now = app.environment.now();
    Ok(Json(read_model::to_page(&page, rows, |stored| NodeView::of(&stored, now))))
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
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewNode>>,
) -> Result<Response, ApiError> {
    let answered = match context.committed_reply::<Node>()? {
        Some(answered) => answered,
        None => context.ask::<Node>(context.new_id(), register_command(&app, &context, &new).await?).await?,
    };
    node_response(&app, &context, StatusCode::CREATED, answered).await
}

/// The command that registers a node: its SKU resolved and, where the request wants it, its address probed.
async fn register_command(app: &AppState, context: &RequestContext, new: &NewNode) -> Result<Request, ApiError> {
    let host = HostAddress::parse(&new.host)?;
    let key = SshPublicKey::parse(&new.ssh_public_key).map_err(|error| {
        ApiError::invalid_request(format!("`ssh_public_key` is refused: {error}.")).detail("field", "ssh_public_key")
    })?;
    let sku = sku::active(app, &new.sku).await?;
    let (onboarding_mode, machine) = match new.onboarding_mode {
        Mode::Manual => (OnboardingMode::Manual, None),
        Mode::Maas => {
            let prepared = machine_provider::prepare(app, &context.scopes(), &host.to_string()).await?;
            (OnboardingMode::Maas, Some(prepared))
        }
    };
    let probe = if new.probe { Some(probed(app, &host, new.port.0).await?) } else { None };
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
    Ok(Request::Register { registration: Box::new(registration), probe, machine })
}

/// One node.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The node; its generation is the `ETag` too.", body = NodeView)),
)]
pub(super) async fn get(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Response, ApiError> {
    let stored = find::<Node>(&app, id).await?.ok_or_else(|| ApiError::not_found("node"))?;
    Ok((etag(stored.version), Json(NodeView::of(&stored, app.environment.now()))).into_response())
}

/// Changes how a node is reached, its name and its labels.
#[utoipa::path(
    patch,
    path = "/",
    params(IfMatch),
    request_body = NodeChange,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn revise(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
    request_body::Json(change): request_body::Json<NodeChange>,
) -> Result<Response, ApiError> {
    let metadata = metadata_patch(change.name.clone(), change.labels.clone());
    let keeps_address = change.host.is_none() && change.port.is_none() && change.ssh_username.is_none();
    if keeps_address && change.probe != Some(true) && metadata.is_empty() {
        return Err(ApiError::invalid_request(
            "Nothing is to be changed; give `host`, `port`, `ssh_username`, `name`, `labels` or \"probe\": true.",
        ));
    }
    let host = change.host.as_deref().map(HostAddress::parse).transpose()?;
    let probe = revised_probe(&app, id, host.as_ref(), &change).await?;
    let command = Request::Revise {
        host: host.map(|host| host.to_string()),
        port: change.port.map(|port| port.0),
        ssh_username: change.ssh_username.as_ref().map(|name| name.to_string()),
        probe,
        metadata,
        if_version: if_match(&headers)?,
    };
    let answered = context.ask::<Node>(id, command).await?;
    node_response(&app, &context, StatusCode::OK, answered).await
}

/// Takes a node out of service.
///
/// Refused while an allocation is on it, unless it is to be drained.
#[utoipa::path(
    post,
    path = "/",
    request_body = Retirement,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn retire(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<Retirement>>,
) -> Result<Response, ApiError> {
    let command = Request::Retire { reason: why.reason.to_string(), drain: why.drain };
    execute(&app, context, id, command).await
}

reason_commands! {
    AdminRequest, execute => 200 "The node." NodeView;

    /// Takes a retired node into service again, if it is in order.
    reactivate: Reactivate;

    /// Takes a node out of rent until it is found in order.
    ///
    /// Its tenants stay.
    quarantine: Quarantine;

    /// Gives a quarantined node its state back, if it is in order.
    release_quarantine: ReleaseQuarantine;

    /// Has the bare-metal provider erase the machine and install it again.
    ///
    /// For a node without tenants that the provider has deployed, or could not deploy. Its agent's identity is void at once; the node is in
    /// quarantine until the new system has enrolled, has shown another machine id and the image's digest, and has passed `node.validate`.
    reimage: Reimage;
}

/// Clears a health finding: it has no consequence until it occurs again.
///
/// Look at the GPU or the machine first. The agent may go on reporting what is cleared.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses((status = 200, description = "The node.", body = NodeView)),
)]
pub(super) async fn clear_finding(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path((id, finding_id)): Path<(Uuid, Uuid)>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    let command = Request::ClearFinding { finding_id: FindingId(finding_id), reason: why.reason.to_string() };
    execute(&app, context, id, command).await
}

/// Removes a retired node for good.
///
/// Its identity, tokens and connections are void at once, on every replica.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses(
        (status = 200, description = "It is removed.", body = NodeView),
        (status = 202, description = "Its connections are still being closed.", body = NodeView),
    ),
)]
pub(super) async fn remove(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    let context = context.prioritized();
    let command = Request::Remove { reason: why.reason.to_string() };
    let answered = context.try_ask::<Node>(id, command).await?.map_err(removal_error)?;
    let gone = |node: &Node| node.lifecycle.phase == Phase::Removed;
    wait_until(&app, id, REMOVAL_TIMEOUT, gone).await?;
    let stored = find::<Node>(&app, id).await?.ok_or_else(unexpected)?;
    let status = if gone(&stored.it) { StatusCode::OK } else { StatusCode::ACCEPTED };
    let view = NodeView::of(&stored, app.environment.now());
    Ok((status, replayed(&answered), etag(stored.version), Json(view)).into_response())
}

/// Executes an operator's command, exempt from load shedding, and responds with the node after it.
async fn execute(app: &AppState, context: RequestContext, id: Uuid, request: Request) -> Result<Response, ApiError> {
    let context = context.prioritized();
    let answered = context.ask::<Node>(id, request).await?;
    node_response(app, &context, StatusCode::OK, answered).await
}

async fn node_response(
    app: &AppState,
    context: &RequestContext,
    status: StatusCode,
    answered: CommandReply<Reply>,
) -> Result<Response, ApiError> {
    let replayed = replayed(&answered);
    let Reply::Node { node } = &answered.reply else { return Err(unexpected()) };
    let (version, updated_at) = context.transition_of(node.id.0, &answered).await?;
    let stored = StoredEntity { created_at: node.machine.registered_at, it: Node::clone(node), version, updated_at };
    Ok((status, replayed, etag(version), Json(NodeView::of(&stored, app.environment.now()))).into_response())
}

/// The error of a refused removal states its precondition (specification, *Errors*).
fn removal_error(error: AskError<Rejection>) -> ApiError {
    match error {
        AskError::Rejected(Rejection::InUse { allocation_id }) => ApiError::invalid_request(format!(
            "Allocation {allocation_id} is on the node; it can be removed when the allocation is released."
        ))
        .detail("allocation_id", allocation_id.to_string()),
        other => not_answered(other),
    }
}

/// The probe of the changed address, where one is wanted.
async fn revised_probe(
    app: &AppState,
    id: Uuid,
    host: Option<&HostAddress>,
    change: &NodeChange,
) -> Result<Option<ProbeOutcome>, ApiError> {
    let node = find::<Node>(app, id).await?.ok_or_else(|| ApiError::not_found("node"))?.it;
    let host = match host {
        Some(host) => host.clone(),
        None => HostAddress::parse(&node.machine.registration.host)?,
    };
    let port = change.port.as_ref().map_or(node.machine.registration.port, |port| port.0);
    let is_elsewhere = host.to_string() != node.machine.registration.host || port != node.machine.registration.port;
    let wanted = change.probe.unwrap_or(is_elsewhere && node.machine.probe.is_some());
    if wanted { Ok(Some(probed(app, &host, port).await?)) } else { Ok(None) }
}

async fn probed(app: &AppState, host: &HostAddress, port: u16) -> Result<ProbeOutcome, ApiError> {
    let (reachable, error) = match app.probe.probe(host, port).await? {
        Reachability::Reachable => (true, None),
        Reachability::Unreachable(why) => (false, Some(why)),
    };
    Ok(ProbeOutcome { reachable, checked_at: app.environment.now(), error })
}

fn unexpected() -> ApiError {
    ApiError::internal("the node's machine answered another question")
}

//! Platform roles and their bindings to subjects (decisions 3, *Scopes*; 7).
//!
//! A binding is identified by its subject and its role, and is revoked by them.

use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::{StatusCode, request};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::authz::PlatformRole;
use domain::role_bindings::{Command, Reply, RoleBinding, RoleBindings};
use domain::{BindingId, EntityKind};
use persistence::queries::{BindingFilter, BindingRow, Cursor};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{Authorized, BindPlatformRoles, RequestContext, replayed};
use super::request_fields::{ClaimId, Reason};
use crate::api::idempotency::request_layer::{HandlerSkipped, Idempotent};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery, Position};
use crate::http::request_body::{self, Path, Query};

/// A platform role to be bound.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewBinding {
    /// The subject of the binding: the `sub` of the user's access tokens.
    subject: ClaimId,
    role: PlatformRoleName,
    reason: Reason,
}

/// The binding to be revoked.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RevokedBinding {
    subject: ClaimId,
    role: PlatformRoleName,
    /// Why; recorded in the audit log.
    reason: Option<Reason>,
}

/// A filter of bindings.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct BindingQuery {
    subject: Option<ClaimId>,
    role: Option<PlatformRoleName>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum PlatformRoleName {
    PlatformOperations,
    InventoryOwner,
    BillingOperations,
    Auditor,
}

/// A platform role that is bound to a subject.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PlatformRoleBinding)]
pub(super) struct BindingView {
    id: Uuid,
    subject: String,
    role: PlatformRoleName,
    /// `user:…`
    bound_by: String,
    bound_at: DateTime<Utc>,
    reason: String,
}

/// An administrator's request about platform roles, with its metrics.
pub(super) struct PlatformRoleRequest(RequestContext);

impl FromRequestParts<AppState> for PlatformRoleRequest {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, app: &AppState) -> Result<Self, ApiError> {
        app.platform_roles.count_request(&parts.method);
        let authorized = Authorized::<BindPlatformRoles>::from_request_parts(parts, app).await;
        let Authorized { context, .. } = authorized.inspect_err(|error| app.platform_roles.count_refused(error))?;
        Ok(Self(context))
    }
}

/// The bindings of platform roles, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, BindingQuery),
    responses((status = 200, description = "A page of bindings.", body = Items<BindingView>)),
)]
pub(super) async fn list(
    _: PlatformRoleRequest,
    State(app): State<AppState>,
    listing: Listing<BindingQuery>,
) -> Result<Json<Items<BindingView>>, ApiError> {
    let page = listing.page("platform-roles/bindings", "", Order::OldestFirst)?;
    let filter = BindingFilter {
        id: None,
        subject: listing.filter.subject.as_ref().map(|subject| subject.to_string()),
        role: listing.filter.role.map(PlatformRole::from),
    };
    let after = page.after.map(|at| Cursor { created_at: at.created_at, id: at.id });
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let found = app.reads.bindings(&filter, after, rows).await.map_err(ApiError::from);
    let found = found.inspect_err(|error| app.platform_roles.count_unavailable(error))?;
    let place = |row: &BindingRow| Position { created_at: row.binding.bound_at, id: row.binding.id.0 };
    // One whose seal does not hold is left out: it is effective nowhere.
    let show = |row: BindingRow| row.is_intact.then(|| view(row.subject, row.role.into(), row.binding));
    let Items { items, next_page } = page.answer(found.items, place, show);
    Ok(Json(Items { items: items.into_iter().flatten().collect(), next_page }))
}

/// One binding.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The binding.", body = BindingView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    _: PlatformRoleRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<BindingView>, ApiError> {
    let filter = BindingFilter { id: Some(BindingId(id)), ..BindingFilter::default() };
    let found = app.reads.bindings(&filter, None, 1).await.map_err(ApiError::from);
    let found = found.inspect_err(|error| app.platform_roles.count_unavailable(error))?.items.pop();
    let row = found.ok_or_else(|| ApiError::not_found("platform role binding"))?;
    if !row.is_intact {
        return Err(ApiError::unavailable("the stored platform role binding is not one that a member committed"));
    }
    Ok(Json(view(row.subject, row.role.into(), row.binding)))
}

/// Binds a platform role to a subject.
///
/// It holds from the answer on, on every replica. Binding what is bound answers 200 with the binding that there is.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewBinding,
    responses(
        (status = 201, description = "The binding.", body = BindingView),
        (status = 200, description = "The binding that there was.", body = BindingView),
    ),
)]
pub(super) async fn bind(
    PlatformRoleRequest(context): PlatformRoleRequest,
    State(app): State<AppState>,
    new: Result<Idempotent<request_body::Json<NewBinding>>, HandlerSkipped>,
) -> Result<Response, ApiError> {
    let new = match new {
        Ok(Idempotent(request_body::Json(new))) => Ok(new),
        Err(HandlerSkipped::Refused(error)) => Err(error),
        Err(HandlerSkipped::Answered(answer)) => return Ok(answer),
    };
    let bound = async {
        let new = new?;
        let (subject, role) = (new.subject.to_string(), new.role);
        let command =
            Command::Bind { subject: subject.clone().into(), role: role.into(), reason: new.reason.to_string() };
        let answered = context.ask::<RoleBindings>(id_of_name(EntityKind::Bindings, &subject), command).await?;
        let status = if answered.written || answered.replayed { StatusCode::CREATED } else { StatusCode::OK };
        let replayed = replayed(&answered);
        let Reply::Bound { binding } = answered.reply else {
            return Err(ApiError::internal("the machine of bindings answered another question"));
        };
        Ok((status, replayed, Json(view(subject, role, binding))).into_response())
    };
    let bound = bound.await;
    app.platform_roles.count_change(&bound);
    bound
}

/// Revokes a platform role.
///
/// From the response on every replica refuses it: a request in flight changes nothing by it either.
#[utoipa::path(
    delete,
    path = "/",
    params(RevokedBinding),
    responses((status = 204, description = "It is revoked.")),
)]
pub(super) async fn revoke(
    PlatformRoleRequest(context): PlatformRoleRequest,
    State(app): State<AppState>,
    revoked: Result<Query<RevokedBinding>, ApiError>,
) -> Result<StatusCode, ApiError> {
    let revoked = async {
        let Query(revoked) = revoked?;
        let reason = revoked.reason.as_ref().map(|reason| reason.to_string());
        let command = Command::Revoke { role: revoked.role.into(), reason };
        context.ask::<RoleBindings>(id_of_name(EntityKind::Bindings, &revoked.subject), command).await?;
        Ok(StatusCode::NO_CONTENT)
    };
    let revoked = revoked.await;
    app.platform_roles.count_change(&revoked);
    revoked
}

fn view(subject: String, role: PlatformRoleName, binding: RoleBinding) -> BindingView {
    let RoleBinding { id, bound_by, bound_at, reason } = binding;
    BindingView { id: id.0, subject, role, bound_by, bound_at, reason }
}

impl From<PlatformRoleName> for PlatformRole {
    fn from(name: PlatformRoleName) -> Self {
        match name {
            PlatformRoleName::PlatformOperations => Self::PlatformOperations,
            PlatformRoleName::InventoryOwner => Self::InventoryOwner,
            PlatformRoleName::BillingOperations => Self::BillingOperations,
            PlatformRoleName::Auditor => Self::Auditor,
        }
    }
}

impl From<PlatformRole> for PlatformRoleName {
    fn from(role: PlatformRole) -> Self {
        match role {
            PlatformRole::PlatformOperations => Self::PlatformOperations,
            PlatformRole::InventoryOwner => Self::InventoryOwner,
            PlatformRole::BillingOperations => Self::BillingOperations,
            PlatformRole::Auditor => Self::Auditor,
        }
    }
}

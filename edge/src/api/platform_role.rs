//! Platform roles: which are bound to whom (decisions 3, *Scopes*; 7).
//!
//! A binding is known by its subject and its role, so that is how it is revoked.

use actors::place::id_of_name;
use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::{StatusCode, request};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::authz::PlatformRole;
use domain::bindings::{Binding, Bindings, Command, Reply};
use domain::{BindingId, Kind};
use persistence::read::{BindingFilter, BindingRow, Cursor};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::asking::{Asking, BindPlatformRoles, May, replayed};
use super::field::{ClaimId, Reason};
use crate::body::{self, Path, Query};
use crate::error::ApiError;
use crate::idempotency::keyed::{NotRun, Once};
use crate::page::{Items, Listing, Order, PageQuery, Position};
use crate::services::Services;

/// A platform role to be bound.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewBinding {
    /// Whom it is bound to: the `sub` of their access tokens.
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
    /// Why; kept in the audit log.
    reason: Option<Reason>,
}

/// Which bindings.
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

/// A request by an administrator about platform roles, counted.
pub(super) struct Steward(Asking);

impl FromRequestParts<Services> for Steward {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, services: &Services) -> Result<Self, ApiError> {
        services.platform_roles.asked(&parts.method);
        let may = May::<BindPlatformRoles>::from_request_parts(parts, services).await;
        let May { asking, .. } = may.inspect_err(|error| services.platform_roles.turned_away(error))?;
        Ok(Self(asking))
    }
}

/// Who holds which platform role, the oldest binding first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, BindingQuery),
    responses((status = 200, description = "A page of bindings.", body = Items<BindingView>)),
)]
pub(super) async fn list(
    _: Steward,
    State(services): State<Services>,
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
    let found = services.reads.bindings(&filter, after, rows).await.map_err(ApiError::from);
    let found = found.inspect_err(|error| services.platform_roles.failed(error))?;
    let place = |row: &BindingRow| Position { created_at: row.binding.bound_at, id: row.binding.id.0 };
    Ok(Json(page.answer(found.items, place, |row| view(row.subject, row.role.into(), row.binding))))
}

/// One binding.
#[utoipa::path(
    get,
    path = "/",
    params(("id" = Uuid, Path, description = "The binding's id")),
    responses((status = 200, description = "The binding.", body = BindingView)),
)]
pub(super) async fn get(
    _: Steward,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
) -> Result<Json<BindingView>, ApiError> {
    let filter = BindingFilter { id: Some(BindingId(id)), ..BindingFilter::default() };
    let found = services.reads.bindings(&filter, None, 1).await.map_err(ApiError::from);
    let found = found.inspect_err(|error| services.platform_roles.failed(error))?.items.pop();
    let row = found.ok_or_else(|| ApiError::not_found("platform role binding"))?;
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
    Steward(asking): Steward,
    State(services): State<Services>,
    new: Result<Once<body::Json<NewBinding>>, NotRun>,
) -> Result<Response, ApiError> {
    let new = match new {
        Ok(Once(body::Json(new))) => Ok(new),
        Err(NotRun::Refused(error)) => Err(error),
        Err(NotRun::Answered(answer)) => return Ok(answer),
    };
    let bound = async {
        let new = new?;
        let (subject, role) = (new.subject.to_string(), new.role);
        let command = Command::Bind { subject: subject.clone(), role: role.into(), reason: new.reason.to_string() };
        let answered = asking.ask::<Bindings>(id_of_name(Kind::Bindings, &subject), command).await?;
        let status = if answered.written || answered.replayed { StatusCode::CREATED } else { StatusCode::OK };
        let replayed = replayed(&answered);
        let Reply::Bound { binding } = answered.reply else {
            return Err(ApiError::internal("the machine of bindings answered another question"));
        };
        Ok((status, replayed, Json(view(subject, role, binding))).into_response())
    };
    let bound = bound.await;
    services.platform_roles.changed(&bound);
    bound
}

/// Revokes a platform role.
///
/// From the answer on it is refused on every replica: also a request that is under way changes nothing any more by it.
#[utoipa::path(
    delete,
    path = "/",
    params(RevokedBinding),
    responses((status = 204, description = "It is revoked.")),
)]
pub(super) async fn revoke(
    Steward(asking): Steward,
    State(services): State<Services>,
    revoked: Result<Query<RevokedBinding>, ApiError>,
) -> Result<StatusCode, ApiError> {
    let revoked = async {
        let Query(revoked) = revoked?;
        let reason = revoked.reason.as_ref().map(|reason| reason.to_string());
        let command = Command::Revoke { role: revoked.role.into(), reason };
        asking.ask::<Bindings>(id_of_name(Kind::Bindings, &revoked.subject), command).await?;
        Ok(StatusCode::NO_CONTENT)
    };
    let revoked = revoked.await;
    services.platform_roles.changed(&revoked);
    revoked
}

fn view(subject: String, role: PlatformRoleName, binding: Binding) -> BindingView {
    let Binding { id, bound_by, bound_at, reason } = binding;
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

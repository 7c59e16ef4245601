//! The caller, as this service knows them.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use domain::authz::{Action, CallerIdentity, TokenRole, authorize};
use domain::browser_session::BrowserSession;
use domain::{OrgId, Principal, ProjectId};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::platform_role::PlatformRoleName;
use super::request_context::{UserRequest, grant_of};
use super::service_account::RoleName;
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::http::error::ApiError;

/// The caller as the access token names them, and their roles.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Me)]
pub(super) struct MeView {
    /// The token's `sub`; of a service account, its owner's.
    user_id: String,
    /// The name under which the user logs in, where the identity provider says it.
    username: Option<String>,
    /// The user's address, where the identity provider has verified it.
    email: Option<String>,
    auth_kind: AuthKind,
    /// The service account that acts for the user; null where the user acts themselves.
    service_account_id: Option<Uuid>,
    roles: Vec<RoleName>,
    /// Bound here, by `POST /api/v1/admin/platform-roles/bindings`. A service account has none.
    platform_roles: Vec<PlatformRoleName>,
    /// The actions that these roles allow, by their names in the table of permissions. What belongs to others, or is in another state, may be
    /// refused all the same.
    permissions: Vec<String>,
    org_id: Option<String>,
    project_id: Option<String>,
    plan: Option<String>,
    token_expires_at: DateTime<Utc>,
    /// The login to the web console that makes this request; null where an access token does.
    session: Option<MySession>,
}

/// The login to the web console by which a request is made.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct MySession {
    id: Uuid,
    created_at: DateTime<Utc>,
    /// When it ends without a further request.
    idle_ends_at: DateTime<Utc>,
    /// When it ends in any case.
    ends_at: DateTime<Utc>,
}

/// The kind of the caller.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum AuthKind {
    /// The identity provider's, of a person.
    User,
    ServiceAccount,
}

/// Who you are to this service: roles, organisation, project and plan, as your access token and the bindings here say.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The caller.", body = MeView)))]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
) -> Result<Json<MeView>, ApiError> {
    let caller = &context.caller;
    let bound = match caller.service_account {
        Some(_) => None,
        None => grant_of(&app, &caller.user_id).await?,
    };
    let session = match caller.browser_session {
        Some(id) => find::<BrowserSession>(&app, id.0).await?.map(|stored| MySession {
            id: stored.it.id.0,
            created_at: stored.it.created_at,
            idle_ends_at: stored.it.idle_ends_at,
            ends_at: stored.it.ends_at,
        }),
        None => None,
    };
    let principal = Principal::Caller(CallerIdentity { grant: bound.clone(), ..caller.clone() });
    let permissions = Action::ALL.iter().filter(|action| authorize(&principal, **action).is_ok());
    Ok(Json(MeView {
        user_id: caller.user_id.to_string(),
        username: context.username.clone(),
        email: context.verified_email.clone(),
        permissions: permissions.map(|action| action.name().to_owned()).collect(),
        session,
        auth_kind: if caller.service_account.is_some() { AuthKind::ServiceAccount } else { AuthKind::User },
        service_account_id: caller.service_account.map(|account| account.0),
        roles: caller.roles.iter().copied().map(|role: TokenRole| role.into()).collect(),
        platform_roles: bound.into_iter().flat_map(|grant| grant.roles).map(PlatformRoleName::from).collect(),
        org_id: caller.org_id.as_ref().map(OrgId::to_string),
        project_id: caller.project_id.as_ref().map(ProjectId::to_string),
        plan: caller.plan.clone(),
        token_expires_at: context.token_expires_at,
    }))
}

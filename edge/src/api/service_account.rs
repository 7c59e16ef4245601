//! Service accounts: programs that act for a user, and their keys (decisions 7).

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use domain::authz::TokenRole;
use domain::service_account::{Command, Reply, ServiceAccount};
use domain::tenant::{self, QuotaScopes, Tenant};
use domain::{EntityKind, ServiceAccountId, ServiceAccountKeyId};
use persistence::queries::ListFilter;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{RequestContext, UserRequest, replayed};
use super::request_fields::{ClaimId, Label, set_or_none};
use super::ssh_key::tenant_of;
use crate::api::idempotency::request_layer::Idempotent;
use crate::app_state::AppState;
use crate::app_state::read_model::{self, find};
use crate::auth::opaque_token::{TokenPurpose, mint};
use crate::http::correlation::no_store;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery};
use crate::http::request_body::{self, Path};

/// The state of accounts that exist for callers.
const ACTIVE: &str = "active";
/// A bound above every limit of accounts.
const ABOVE_ANY_LIMIT: u32 = 1000;

/// A role that a service account can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum RoleName {
    User,
    Admin,
}

impl From<TokenRole> for RoleName {
    fn from(role: TokenRole) -> Self {
        match role {
            TokenRole::User => Self::User,
            TokenRole::Admin => Self::Admin,
        }
    }
}

impl From<RoleName> for TokenRole {
    fn from(name: RoleName) -> Self {
        match name {
            RoleName::User => Self::User,
            RoleName::Admin => Self::Admin,
        }
    }
}

/// A service account to be made.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewServiceAccount {
    name: Label,
    /// A subset of your own roles; `user` where it is left out.
    #[serde(default, deserialize_with = "set_or_none::<_, _, 2>")]
    #[schema(min_items = 1, max_items = 2)]
    roles: Option<Vec<RoleName>>,
}

/// A program that acts for its owner.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ServiceAccount)]
pub(super) struct ServiceAccountView {
    /// Also its `client_id`.
    id: Uuid,
    name: String,
    owner_user_id: String,
    org_id: Option<String>,
    project_id: Option<String>,
    plan: Option<String>,
    roles: Vec<RoleName>,
    /// The valid keys, oldest first.
    keys: Vec<ServiceAccountKeyView>,
    created_by: String,
    created_at: DateTime<Utc>,
}

/// A key without its secret, which was shown once.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ServiceAccountKey)]
pub(super) struct ServiceAccountKeyView {
    id: Uuid,
    created_by: String,
    created_at: DateTime<Utc>,
}

/// A key that was made: the only time that it is shown.
#[derive(Serialize, ToSchema)]
pub(super) struct IssuedServiceAccountKey {
    id: Uuid,
    /// The service account's id.
    client_id: Uuid,
    /// For `POST /api/v1/service-accounts/token`. Kept nowhere.
    client_secret: String,
    created_at: DateTime<Utc>,
}

/// A filter of service accounts.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ServiceAccountFilter {
    /// The owner; any user for administrators, yourself otherwise.
    user_id: Option<ClaimId>,
}

/// Your service accounts, oldest first; everybody's for administrators.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, ServiceAccountFilter),
    responses((status = 200, description = "A page of service accounts.", body = Items<ServiceAccountView>)),
)]
pub(super) async fn list(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<ServiceAccountFilter>,
) -> Result<Json<Items<ServiceAccountView>>, ApiError> {
    let owner = match listing.filter.user_id.as_deref() {
        wanted if context.is_admin() => wanted.map(str::to_owned),
        Some(other) if context.caller.user_id != *other => {
            let message = "Only administrators see other people's service accounts; leave `user_id` out.";
            return Err(ApiError::forbidden(message));
        }
        Some(_) | None => Some(context.caller.user_id.to_string()),
    };
    let page = listing.page("service-accounts", owner.as_deref().unwrap_or_default(), Order::OldestFirst)?;
    let filter = ListFilter { owner, states: vec![ACTIVE.to_owned()], ..ListFilter::default() };
    let rows = read_model::list::<ServiceAccount>(&app, &filter, &page).await?;
    Ok(Json(read_model::to_page(&page, rows, |stored| view(stored.it))))
}

/// Makes a service account, which acts for you.
///
/// It has no key yet. What it does is done in your name, in the organisation, project and plan of your access token, and audited as
/// `service-account:<id>`.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewServiceAccount,
    responses((status = 201, description = "The service account.", body = ServiceAccountView)),
)]
pub(super) async fn create(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewServiceAccount>>,
) -> Result<Response, ApiError> {
    let roles = new.roles.as_deref().unwrap_or(&[RoleName::User]);
    if roles.is_empty() {
        let message = "`roles` is empty; name one of your roles, or leave it out.";
        return Err(ApiError::invalid_request(message).detail("field", "roles"));
    }
    let id = context.new_id();
    if !context.is_replay() {
        reserve_account(&app, &context, id).await?;
    }
    let roles = roles.iter().map(|role| (*role).into()).collect();
    let command = Command::Create { name: new.name.to_string(), roles };
    let answered = context.ask::<ServiceAccount>(id, command).await?;
    let replayed = replayed(&answered);
    let Reply::Account { account } = answered.reply else { return Err(unexpected()) };
    Ok((StatusCode::CREATED, replayed, Json(view(*account))).into_response())
}

/// Reserves a slot in the owner's quota of accounts, so that concurrent requests do not exceed the limit.
async fn reserve_account(app: &AppState, context: &RequestContext, id: Uuid) -> Result<(), ApiError> {
    let caller = &context.caller;
    let owner = Some(caller.user_id.to_string());
    let own = ListFilter { owner, states: vec![ACTIVE.to_owned()], ..ListFilter::default() };
    let there = app.reads.list(EntityKind::ServiceAccount, &own, None, ABOVE_ANY_LIMIT).await?.items;
    let command = tenant::Request::ExpectAccount {
        user_id: caller.user_id.clone(),
        account: ServiceAccountId(id),
        there: there.into_iter().map(|row| ServiceAccountId(row.entity.id)).collect(),
        scopes: QuotaScopes {
            org_id: caller.org_id.clone(),
            project_id: caller.project_id.clone(),
            plan: caller.plan.clone(),
        },
    };
    context.ask_unstored::<Tenant>(tenant_of(context), command).await.map(|_| ())
}

/// One service account.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The service account.", body = ServiceAccountView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<ServiceAccountView>, ApiError> {
    let found = find::<ServiceAccount>(&app, id).await?.filter(|stored| stored.it.is_for(&context.principal()));
    found.map(|stored| Json(view(stored.it))).ok_or_else(|| ApiError::not_found("service account"))
}

/// Deletes a service account with all its keys.
///
/// Its access tokens are refused from then on.
#[utoipa::path(
    delete,
    path = "/",
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn delete(UserRequest(context): UserRequest, Path(id): Path<Uuid>) -> Result<StatusCode, ApiError> {
    context.prioritized().ask::<ServiceAccount>(id, Command::Delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a key of your own service account, valid beside those that there are.
///
/// You need the roles of the account. The answer is a secret: it is stored nowhere, so a repetition makes another key
/// whatever its `Idempotency-Key`.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 201, description = "The key. `Cache-Control: no-store`.", body = IssuedServiceAccountKey)),
)]
pub(super) async fn add_key(UserRequest(context): UserRequest, Path(id): Path<Uuid>) -> Result<Response, ApiError> {
    let minted = mint(TokenPurpose::ServiceAccountKey);
    let command = Command::AddKey { sha256: minted.hash.to_bytes() };
    let answered = context.ask_unstored::<ServiceAccount>(id, command).await?;
    let Reply::Key { id: ServiceAccountKeyId(key), created_at } = answered.reply else { return Err(unexpected()) };
    let client_secret = minted.token.expose_secret().to_owned();
    let issued = IssuedServiceAccountKey { id: key, client_id: id, client_secret, created_at };
    Ok((StatusCode::CREATED, no_store(), Json(issued)).into_response())
}

/// Revokes a key.
///
/// From the response on every replica refuses it, and the access tokens that were issued for it.
#[utoipa::path(
    delete,
    path = "/",
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn revoke_key(
    UserRequest(context): UserRequest,
    Path((id, key)): Path<(Uuid, Uuid)>,
) -> Result<StatusCode, ApiError> {
    let command = Command::RevokeKey { key: ServiceAccountKeyId(key) };
    context.prioritized().ask::<ServiceAccount>(id, command).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn unexpected() -> ApiError {
    ApiError::internal("the service account's machine answered another question")
}

fn view(account: ServiceAccount) -> ServiceAccountView {
    let keys = account.keys.into_iter().map(|(id, key)| ServiceAccountKeyView {
        id: id.0,
        created_by: key.created_by,
        created_at: key.created_at,
    });
    ServiceAccountView {
        id: account.id.0,
        name: account.name,
        owner_user_id: account.owner.user_id.0,
        org_id: account.owner.org_id.map(|id| id.0),
        project_id: account.owner.project_id.map(|id| id.0),
        plan: account.owner.plan,
        roles: account.roles.into_iter().map(RoleName::from).collect(),
        keys: keys.collect(),
        created_by: account.created_by,
        created_at: account.created_at,
    }
}

//! A user's SSH public keys and their fingerprints (specification, *SSH key*).

use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use domain::tenant::{Reply, Request, SshKey, SshKeyFault, Tenant};
use domain::{EntityKind, SshKeyId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::request_context::{AdminRequest, RequestContext, UserRequest, replayed};
use super::request_fields::{ClaimId, Label, PublicKeyText};
use crate::api::idempotency::request_layer::{Idempotent, IdempotentCommand};
use crate::api::request_fields::ssh_public_key::{SshPublicKey, SshPublicKeyError};
use crate::app_state::AppState;
use crate::app_state::read_model::find;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery, Position};
use crate::http::request_body::{self, NoBody, Path};

/// A public key to be registered.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewSshKey {
    name: Label,
    public_key: PublicKeyText,
}

/// A registered public key. No private key is ever created or stored.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SshKey)]
pub(super) struct SshKeyView {
    id: Uuid,
    owner_user_id: String,
    /// Null: the key is the user's own, not one allocation's.
    allocation_id: Option<Uuid>,
    name: String,
    /// Such as `ssh-ed25519`.
    key_type: String,
    /// Type and base64, without comment.
    public_key: String,
    /// OpenSSH's `SHA256:` form.
    fingerprint: String,
    /// Opens allocations for which no key is named.
    is_default: bool,
    created_by: String,
    created_at: DateTime<Utc>,
    /// Null: a key that is deleted is gone.
    revoked_at: Option<DateTime<Utc>>,
}

/// The empty filter of lists without one.
#[derive(Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoFilter {}

/// The tenant entity of the caller.
pub(super) fn tenant_of(context: &RequestContext) -> Uuid {
    tenant(&context.caller.user_id)
}

fn tenant(user_id: &str) -> Uuid {
    id_of_name(EntityKind::Tenant, user_id)
}

/// The caller's keys, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of keys.", body = Items<SshKeyView>)),
)]
pub(super) async fn list(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    listing: Listing<NoFilter>,
) -> Result<Json<Items<SshKeyView>>, ApiError> {
    page_of(&app, &context.caller.user_id, &listing).await
}

/// A user's keys, oldest first.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery),
    responses((status = 200, description = "A page of keys.", body = Items<SshKeyView>)),
)]
pub(super) async fn list_of_user(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(user_id): Path<ClaimId>,
    listing: Listing<NoFilter>,
) -> Result<Json<Items<SshKeyView>>, ApiError> {
    page_of(&app, &user_id, &listing).await
}

async fn page_of(
    app: &AppState,
    owner: &str,
    listing: &Listing<NoFilter>,
) -> Result<Json<Items<SshKeyView>>, ApiError> {
    let page = listing.page("ssh-keys", owner, Order::OldestFirst)?;
    let tenant = find::<Tenant>(app, tenant(owner)).await?;
    let mut keys: Vec<_> = tenant.into_iter().flat_map(|stored| stored.it.keys.into_values()).collect();
    keys.sort_by_key(|key| (key.created_at, key.id));
    // Page tokens have microseconds.
    let place = |key: &SshKey| Position { created_at: key.created_at, id: key.id.0 };
    let after = page.after.map(|at| (at.created_at.timestamp_micros(), at.id));
    keys.retain(|key| after.is_none_or(|after| (key.created_at.timestamp_micros(), key.id.0) > after));
    keys.truncate(usize::try_from(page.rows_to_read()).unwrap_or(usize::MAX));
    Ok(Json(page.answer(keys, place, |key| view(key, owner))))
}

/// Registers a public key.
///
/// The first one is the default.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewSshKey,
    responses((status = 201, description = "The key.", body = SshKeyView)),
)]
pub(super) async fn add(
    UserRequest(context): UserRequest,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewSshKey>>,
) -> Result<impl IntoResponse, ApiError> {
    let key = match SshPublicKey::parse(&new.public_key) {
        Ok(key) => key,
        Err(error) => {
            let (user_id, cause) = (context.caller.user_id.clone(), cause_of(&error));
            context.ask_unstored::<Tenant>(tenant_of(&context), Request::RefuseKey { user_id, cause }).await?;
            let refusal = ApiError::invalid_request(format!("`public_key` is refused: {error}."));
            return Err(refusal.detail("field", "public_key"));
        }
    };
    let command = Request::AddKey {
        user_id: context.caller.user_id.clone(),
        name: new.name.to_string(),
        key_type: key.key_type,
        public_key: key.public_key,
        fingerprint: key.fingerprint,
    };
    let answered = context.ask::<Tenant>(tenant_of(&context), command).await?;
    context.answer_follows_from_commit();
    let replayed = replayed(&answered);
    Ok((StatusCode::CREATED, replayed, Json(view(key_of(answered.reply)?, &context.caller.user_id))))
}

/// The cause of a refusal, for the audit log.
const fn cause_of(error: &SshPublicKeyError) -> SshKeyFault {
    match error {
        SshPublicKeyError::PrivateKey => SshKeyFault::PrivateKey,
        SshPublicKeyError::UnsupportedType(_) | SshPublicKeyError::RsaSize(_) => SshKeyFault::Weak,
        SshPublicKeyError::NoType | SshPublicKeyError::Options => SshKeyFault::Options,
        SshPublicKeyError::Empty
        | SshPublicKeyError::TooLong
        | SshPublicKeyError::KeyTooLong
        | SshPublicKeyError::NotOneLine
        | SshPublicKeyError::SeveralKeys
        | SshPublicKeyError::OtherForm { .. }
        | SshPublicKeyError::CutBlock
        | SshPublicKeyError::Malformed => SshKeyFault::Unreadable,
    }
}

/// One of the caller's keys.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The key.", body = SshKeyView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<SshKeyView>, ApiError> {
    one_key(&app, &context.caller.user_id, id).await
}

/// One of a user's keys.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The key.", body = SshKeyView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get_of_user(
    _: AdminRequest,
    State(app): State<AppState>,
    Path((user_id, id)): Path<(ClaimId, Uuid)>,
) -> Result<Json<SshKeyView>, ApiError> {
    one_key(&app, &user_id, id).await
}

async fn one_key(app: &AppState, owner: &str, id: Uuid) -> Result<Json<SshKeyView>, ApiError> {
    let tenant = find::<Tenant>(app, tenant(owner)).await?;
    let key = tenant.and_then(|mut stored| stored.it.keys.remove(&SshKeyId(id)));
    key.map(|key| Json(view(key, owner))).ok_or_else(|| ApiError::not_found("SSH key"))
}

/// Deletes a key.
///
/// Where it was the default, the oldest other one is from now on.
#[utoipa::path(
    delete,
    path = "/",
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn delete(UserRequest(context): UserRequest, Path(id): Path<Uuid>) -> Result<StatusCode, ApiError> {
    delete_key(&context, &context.caller.user_id, id).await
}

/// Deletes a user's key.
///
/// Where it was the default, their oldest other one is from now on. It opens no allocation any more, running ones included; open SSH
/// sessions stay.
#[utoipa::path(
    delete,
    path = "/",
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn delete_of_user(
    AdminRequest(context): AdminRequest,
    Path((user_id, id)): Path<(ClaimId, Uuid)>,
) -> Result<StatusCode, ApiError> {
    delete_key(&context, &user_id, id).await
}

async fn delete_key(context: &RequestContext, owner: &str, id: Uuid) -> Result<StatusCode, ApiError> {
    context.ask::<Tenant>(tenant(owner), Request::DeleteKey { key: SshKeyId(id) }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a key the default one.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 200, description = "The key.", body = SshKeyView)),
)]
pub(super) async fn make_default(
    UserRequest(context): UserRequest,
    Path(id): Path<Uuid>,
    _: IdempotentCommand<NoBody>,
) -> Result<impl IntoResponse, ApiError> {
    set_default(&context, &context.caller.user_id, id).await
}

/// Makes one of a user's own keys their default one.
///
/// An administrator chooses among the keys that the user has, and adds none: whose key it is could come in as the user.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 200, description = "The key.", body = SshKeyView)),
)]
pub(super) async fn make_default_of_user(
    AdminRequest(context): AdminRequest,
    Path((user_id, id)): Path<(ClaimId, Uuid)>,
    _: IdempotentCommand<NoBody>,
) -> Result<impl IntoResponse, ApiError> {
    set_default(&context, &user_id, id).await
}

async fn set_default(context: &RequestContext, owner: &str, id: Uuid) -> Result<impl IntoResponse + use<>, ApiError> {
    let answered = context.ask::<Tenant>(tenant(owner), Request::MakeDefault { key: SshKeyId(id) }).await?;
    context.answer_follows_from_commit();
    let replayed = replayed(&answered);
    Ok((replayed, Json(view(key_of(answered.reply)?, owner))))
}

fn key_of(reply: Reply) -> Result<SshKey, ApiError> {
    match reply {
        Reply::Key { key } => Ok(key),
        Reply::Done => Err(ApiError::internal("the tenant's machine answered another question")),
    }
}

fn view(key: SshKey, owner: &str) -> SshKeyView {
    SshKeyView {
        id: key.id.0,
        owner_user_id: owner.to_owned(),
        allocation_id: None,
        name: key.name,
        key_type: key.key_type,
        public_key: key.public_key,
        fingerprint: key.fingerprint,
        is_default: key.is_default,
        created_by: key.created_by,
        created_at: key.created_at,
        revoked_at: None,
    }
}

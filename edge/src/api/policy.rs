//! Policies: the catalog of keys, the values by scope, and their resolution at run time (decisions 7, *Policy*).

mod json_value;
mod revocation;

use actors::sharding::id_of_name;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use chrono::{DateTime, Utc};
use domain::policy::{PolicyKey as CatalogKey, PolicyScope, PolicyValue, ResolvedPolicy, Scopes, ValueBounds};
use domain::policy_values::{Command, ExpectedValue, PolicyVersion, PolicyWrite, Reply, ScopeValues};
use domain::{EntityKind, OrgId, PolicyId, ProjectId, UserId};
use persistence::queries::{Cursor, PolicyFilter, PolicyRow};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use json_value::{JsonValue, present};
pub(super) use revocation::*;

use super::request_context::{AdminRequest, replayed};
use super::request_fields::{ClaimId, PolicyKey, Reason, not_null};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::rejection_response::{bounds_of, not_admitted};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery, Position};
use crate::http::request_body::{self, Path, Query};

/// A value to be set.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NewPolicyValue {
    key: PolicyKey,
    /// The scope of the value; left out or empty: all users. Null is refused, and so is a field that is null: a client that computes a scope and has
    /// none must not write a global value by mistake.
    #[serde(default, deserialize_with = "not_null")]
    #[schema(value_type = ScopeFields, required = false)]
    scope: Option<ScopeFields>,
    value: JsonValue,
    /// From when on it holds, to the second; left out: at once. Up to a minute ago means at once too. A value that lies ahead can be
    /// replaced by another one for the same instant.
    effective_at: Option<DateTime<Utc>>,
    reason: Reason,
    /// The expected value of this scope at `effective_at` without this write, null for none: where it differs, the write is refused with
    /// `state_conflict`.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<JsonValue>)]
    old_value: Option<Option<JsonValue>>,
}

/// The scope of a value: empty for global, or one of these.
#[derive(Clone, Debug, Default, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = PolicyScope)]
pub(super) struct ScopeFields {
    #[serde(default, deserialize_with = "not_null", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = ClaimId, required = false)]
    user_id: Option<ClaimId>,
    #[serde(default, deserialize_with = "not_null", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = ClaimId, required = false)]
    project_id: Option<ClaimId>,
    #[serde(default, deserialize_with = "not_null", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = ClaimId, required = false)]
    org_id: Option<ClaimId>,
    #[serde(default, deserialize_with = "not_null", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = ClaimId, required = false)]
    plan: Option<ClaimId>,
}

/// A filter of values.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct PolicyValueFilter {
    key: Option<PolicyKey>,
    /// Values in this kind of scope.
    #[param(inline)]
    scope: Option<ScopeKind>,
    /// Values for this user. Give at most one of these four.
    user_id: Option<ClaimId>,
    project_id: Option<ClaimId>,
    org_id: Option<ClaimId>,
    plan: Option<ClaimId>,
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub(super) enum ScopeKind {
    Global,
    UserId,
    ProjectId,
    OrgId,
    Plan,
}

/// The subject for which a key is resolved: any of the four, as a token names them.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ResolveQuery {
    key: PolicyKey,
    user_id: Option<ClaimId>,
    project_id: Option<ClaimId>,
    org_id: Option<ClaimId>,
    plan: Option<ClaimId>,
}

/// A key of the catalog.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PolicyKeyEntry)]
pub(super) struct KeyView {
    #[schema(example = "billing.window_seconds")]
    key: &'static str,
    #[serde(rename = "type")]
    value_type: KeyType,
    /// `min` and `max`, or `enum`.
    #[schema(value_type = Object, example = json!({"min": 1, "max": 3600}))]
    bounds: serde_json::Value,
    /// The default value.
    #[schema(value_type = JsonValue)]
    default: PolicyValue,
    /// The kinds of scopes for which it can be set, most specific first.
    #[schema(example = json!(["user_id", "org_id", "plan", "global"]))]
    scopes: &'static [&'static str],
    meaning: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = PolicyKeyType)]
pub(super) enum KeyType {
    Int,
    String,
    Bool,
}

/// The whole catalog; it has no pages.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PolicyCatalog)]
pub(super) struct Catalog {
    items: Vec<KeyView>,
}

/// A value that is in force in its scope, or will be.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PolicyValue)]
pub(super) struct ValueView {
    id: Uuid,
    key: String,
    scope: ScopeFields,
    #[schema(value_type = JsonValue)]
    value: PolicyValue,
    effective_at: DateTime<Utc>,
    reason: String,
    /// The value that would have held for this scope instead; null where none was set.
    #[schema(value_type = Option<JsonValue>)]
    old_value: Option<PolicyValue>,
    written_by: String,
    written_at: DateTime<Utc>,
}

/// The value that holds for a caller of these scopes, as the replica that responds knows it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ResolvedPolicyValue)]
pub(super) struct ResolvedView {
    key: &'static str,
    #[schema(value_type = JsonValue)]
    value: PolicyValue,
    /// The source of the value: a kind of scope, or `default` where nothing is set.
    #[schema(example = "org_id")]
    source: &'static str,
    /// The scope that won, empty for `global`; null for `default`.
    scope: Option<ScopeFields>,
    /// Since when it holds; null for `default`.
    effective_at: Option<DateTime<Utc>>,
}

/// The catalog: every key with its type, bounds, default, meaning, and the kinds of scopes for which it can be set.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The catalog.", body = Catalog)))]
pub(super) async fn catalog(_: AdminRequest) -> Json<Catalog> {
    let entry = |key: &CatalogKey| KeyView {
        key: key.name(),
        value_type: match key.bounds() {
            ValueBounds::Int { .. } => KeyType::Int,
            ValueBounds::Enum { .. } => KeyType::String,
            ValueBounds::Bool { .. } => KeyType::Bool,
        },
        bounds: bounds_of(*key),
        default: key.default_value(),
        scopes: key.applies_to().scope_kinds(),
        meaning: key.meaning(),
    };
    Json(Catalog { items: CatalogKey::ALL.iter().map(entry).collect() })
}

/// The values in force and scheduled values, in the order of writing.
///
/// The audit log has the values that were replaced.
#[utoipa::path(
    get,
    path = "/",
    params(PageQuery, PolicyValueFilter),
    responses((status = 200, description = "A page of values.", body = Items<ValueView>)),
)]
pub(super) async fn list(
    _: AdminRequest,
    State(app): State<AppState>,
    listing: Listing<PolicyValueFilter>,
) -> Result<Json<Items<ValueView>>, ApiError> {
    let page = listing.page("admin/policy-values", "", Order::OldestFirst)?;
    let PolicyValueFilter { key, scope, user_id, project_id, org_id, plan } = listing.filter;
    let key = key.as_ref().map(known).transpose()?;
    let one = match one_scope(ScopeFields { user_id, project_id, org_id, plan }, "query")? {
        PolicyScope::Global => None,
        scope => Some(id_of(&scope)),
    };
    let filter = PolicyFilter {
        id: None,
        key: key.map(|key| key.name().to_owned()),
        scope: one,
        scope_kind: scope.map(|kind| kind.name().to_owned()),
    };
    let after = page.after.map(|at| Cursor { created_at: at.created_at, id: at.id });
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let found = app.reads.policy_values(&filter, app.environment.now(), after, rows).await?;
    let place = |row: &PolicyRow| Position { created_at: row.written.written_at, id: row.written.id.0 };
    // One whose seal does not hold is left out: it is in force nowhere.
    let show = |row: PolicyRow| row.is_intact.then(|| view(row.scope, row.written));
    let Items { items, next_page } = page.answer(found.items, place, show);
    Ok(Json(Items { items: items.into_iter().flatten().collect(), next_page }))
}

/// One value, while it is in force or lies ahead.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The value.", body = ValueView)),
    extensions(("x-without-console" = json!("the list has the same fields"))),
)]
pub(super) async fn get(
    _: AdminRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
) -> Result<Json<ValueView>, ApiError> {
    let filter = PolicyFilter { id: Some(id), ..PolicyFilter::default() };
    let found = app.reads.policy_values(&filter, app.environment.now(), None, 1).await?.items.pop();
    let row = found.ok_or_else(|| ApiError::not_found("policy value"))?;
    if !row.is_intact {
        return Err(ApiError::unavailable("the stored policy value is not one that a member committed"));
    }
    Ok(Json(view(row.scope, row.written)))
}

/// Sets a value for a scope, at once or from an instant on.
///
/// A key can be set for the kinds of scopes that the catalog names for it: in another a value would never win, and is refused.
///
/// Every process sees it within a second; while the message bus is down, within a minute.
#[utoipa::path(
    post,
    path = "/",
    request_body = NewPolicyValue,
    responses((status = 201, description = "The value as it was written.", body = ValueView)),
)]
pub(super) async fn write(
    AdminRequest(context): AdminRequest,
    Idempotent(request_body::Json(new)): Idempotent<request_body::Json<NewPolicyValue>>,
) -> Result<impl IntoResponse, ApiError> {
    let key = known(&new.key)?;
    let scope = one_scope(new.scope.clone().unwrap_or_default(), "scope")?;
    let value = new.value.read().ok_or_else(|| not_admitted(key, "`value`"))?;
    let expected = match &new.old_value {
        None => ExpectedValue::Anything,
        Some(None) => ExpectedValue::Nothing,
        Some(Some(given)) => ExpectedValue::This(given.read().ok_or_else(|| {
            ApiError::invalid_request("`old_value` must be a whole number, a text, true, false or null.")
                .detail("field", "old_value")
        })?),
    };
    let id = id_of(&scope).0;
    let reason = new.reason.to_string();
    let command = PolicyWrite { scope, key, value, effective_at: new.effective_at, reason, expected };
    let answered = context.ask::<ScopeValues>(id, Command::Write(Box::new(command))).await?;
    match &answered.reply {
        Reply::Written { scope, written } => {
            Ok((StatusCode::CREATED, replayed(&answered), Json(view(scope.clone(), PolicyVersion::clone(written)))))
        }
        Reply::Done => Err(ApiError::internal("the policy machine replied done to a write")),
    }
}

/// Resolves a key for a caller of these scopes, and names the scope that won.
///
/// The most specific one that the key can be set for does: user, project, organisation, plan, everybody. What a billing account goes by is
/// resolved for its holder and plan: for the organisation, where the caller has one, and else for the user. What a notification goes by is
/// resolved for its recipient: user, organisation, plan, everybody.
#[utoipa::path(
    get,
    path = "/",
    params(ResolveQuery),
    responses((status = 200, description = "The value that holds.", body = ResolvedView)),
)]
pub(super) async fn resolve(
    _: AdminRequest,
    State(app): State<AppState>,
    Query(query): Query<ResolveQuery>,
) -> Result<Json<ResolvedView>, ApiError> {
    let key = known(&query.key)?;
    let text = |id: Option<ClaimId>| id.map(|id| id.to_string());
    let scopes = Scopes {
        user_id: text(query.user_id).map(UserId),
        project_id: text(query.project_id).map(ProjectId),
        org_id: text(query.org_id).map(OrgId),
        plan: text(query.plan),
    };
    let ResolvedPolicy { value, by } = app.environment.policy().look_up(key, &scopes, app.environment.now());
    let source = by.as_ref().map_or("default", |(scope, _)| scope.kind());
    let effective_at = by.as_ref().map(|(_, since)| *since);
    Ok(Json(ResolvedView { key: key.name(), value, source, scope: by.map(|(scope, _)| scope.into()), effective_at }))
}

fn known(name: &PolicyKey) -> Result<CatalogKey, ApiError> {
    CatalogKey::parse(name).ok_or_else(|| {
        ApiError::invalid_request("`key` is no policy key; GET /api/v1/admin/policies lists those there are.")
            .detail("field", "key")
    })
}

/// The entity that has the values of a scope.
fn id_of(scope: &PolicyScope) -> PolicyId {
    PolicyId(id_of_name(EntityKind::Policy, &scope.to_string()))
}

fn one_scope(fields: ScopeFields, field: &str) -> Result<PolicyScope, ApiError> {
    let text = |id: ClaimId| id.to_string();
    let named = [
        fields.user_id.map(|id| PolicyScope::UserId(text(id).into())),
        fields.project_id.map(|id| PolicyScope::ProjectId(text(id).into())),
        fields.org_id.map(|id| PolicyScope::OrgId(text(id).into())),
        fields.plan.map(text).map(PolicyScope::Plan),
    ];
    let mut named = named.into_iter().flatten();
    let scope = named.next().unwrap_or(PolicyScope::Global);
    match named.next() {
        None => Ok(scope),
        Some(_) => Err(ApiError::invalid_request(
            "A value has one scope: give one of `user_id`, `project_id`, `org_id` and `plan`, or none for all users.",
        )
        .detail("field", field)),
    }
}

impl ScopeKind {
    const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl From<PolicyScope> for ScopeFields {
    fn from(scope: PolicyScope) -> Self {
        let mut fields = Self::default();
        match scope {
            PolicyScope::UserId(id) => fields.user_id = Some(ClaimId::from_stored(id.0)),
            PolicyScope::ProjectId(id) => fields.project_id = Some(ClaimId::from_stored(id.0)),
            PolicyScope::OrgId(id) => fields.org_id = Some(ClaimId::from_stored(id.0)),
            PolicyScope::Plan(id) => fields.plan = Some(ClaimId::from_stored(id)),
            PolicyScope::Global => {}
        }
        fields
    }
}

fn view(scope: PolicyScope, written: PolicyVersion) -> ValueView {
    ValueView {
        id: written.id.0,
        key: written.key,
        scope: scope.into(),
        value: written.value,
        effective_at: written.effective_at,
        reason: written.reason,
        old_value: written.old_value,
        written_by: written.written_by,
        written_at: written.written_at,
    }
}

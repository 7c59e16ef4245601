//! A policy value is taken back, so that the less specific one holds.

use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use domain::policy::{Bounds, Command, Expected, Key, ScopeValues, TakeBack, Value};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

use super::{ScopeFields, id_of, known, one_scope};
use crate::api::asking::ByAdmin;
use crate::api::field::{ClaimId, PolicyKey, PolicyText, Reason};
use crate::body::Query;
use crate::error::ApiError;

/// Which value, by its key and its scope. Give one of the four scopes, or none for what is set for everybody.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct TakenBack {
    key: PolicyKey,
    user_id: Option<ClaimId>,
    project_id: Option<ClaimId>,
    org_id: Option<ClaimId>,
    plan: Option<ClaimId>,
    /// The `effective_at` of one that lies ahead, as the list shows it; left out: the one in force.
    effective_at: Option<DateTime<Utc>>,
    /// The value that is to be taken back: where it is another, that is refused with `state_conflict`.
    #[param(inline)]
    old_value: Option<PolicyText>,
    /// Why; kept in the audit log.
    reason: Reason,
}

/// Takes a value back: the one of the next scope holds, in the end the default.
///
/// Every process sees it within a second; while the message bus is down, within a minute. Values of the key that lie ahead stay.
#[utoipa::path(
    delete,
    path = "/",
    params(TakenBack),
    responses((status = 204, description = "It is taken back.")),
)]
pub(in crate::api) async fn take_back(
    ByAdmin(asking): ByAdmin,
    Query(query): Query<TakenBack>,
) -> Result<StatusCode, ApiError> {
    let key = known(&query.key)?;
    let scope = ScopeFields {
        user_id: query.user_id.clone(),
        project_id: query.project_id.clone(),
        org_id: query.org_id.clone(),
        plan: query.plan.clone(),
    };
    let id = id_of(&one_scope(scope, "query")?).0;
    let expected = query.old_value.as_ref().map_or(Expected::Anything, |text| Expected::This(read(key, text)));
    let what = TakeBack { key, effective_at: query.effective_at, reason: query.reason.to_string(), expected };
    asking.ask::<ScopeValues>(id, Command::TakeBack(what)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A text as a value of the key's type. What is none of that type is no value of the key, and so never the one that is set.
fn read(key: Key, text: &str) -> Value {
    let read = match key.bounds() {
        Bounds::Int { .. } => text.parse().ok().map(Value::Int),
        Bounds::Bool { .. } => text.parse().ok().map(Value::Bool),
        Bounds::Enum { .. } => None,
    };
    read.unwrap_or_else(|| Value::Text(text.to_owned()))
}

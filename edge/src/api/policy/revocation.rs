//! Revoking a policy value, so that the less specific one holds.

use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use domain::policy::{PolicyKey as CatalogKey, PolicyValue, ValueBounds};
use domain::policy_values::{Command, ExpectedValue, PolicyRevocation, ScopeValues};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

use super::{ScopeFields, id_of, known, one_scope};
use crate::api::request_context::AdminRequest;
use crate::api::request_fields::{ClaimId, PolicyKey, PolicyText, Reason};
use crate::http::error::ApiError;
use crate::http::request_body::Query;

/// The value to revoke, by its key and its scope. Give one of the four scopes, or none for the global value.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(in crate::api) struct RevocationQuery {
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
    /// Why; recorded in the audit log.
    reason: Reason,
}

/// Takes a value back: the one of the next scope holds, in the end the default.
///
/// Every process sees it within a second; while the message bus is down, within a minute. Values of the key that lie ahead stay.
#[utoipa::path(
    delete,
    path = "/",
    params(RevocationQuery),
    responses((status = 204, description = "It is taken back.")),
)]
pub(in crate::api) async fn take_back(
    AdminRequest(context): AdminRequest,
    Query(query): Query<RevocationQuery>,
) -> Result<StatusCode, ApiError> {
    let key = known(&query.key)?;
    let scope = ScopeFields {
        user_id: query.user_id.clone(),
        project_id: query.project_id.clone(),
        org_id: query.org_id.clone(),
        plan: query.plan.clone(),
    };
    let id = id_of(&one_scope(scope, "query")?).0;
    let expected =
        query.old_value.as_ref().map_or(ExpectedValue::Anything, |text| ExpectedValue::This(parse_value(key, text)));
    let what = PolicyRevocation { key, effective_at: query.effective_at, reason: query.reason.to_string(), expected };
    context.ask::<ScopeValues>(id, Command::TakeBack(what)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Parses a text as a value of the key's type. A text that does not parse stays a text, which never equals the value that is set.
fn parse_value(key: CatalogKey, text: &str) -> PolicyValue {
    let read = match key.bounds() {
        ValueBounds::Int { .. } => text.parse().ok().map(PolicyValue::Int),
        ValueBounds::Bool { .. } => text.parse().ok().map(PolicyValue::Bool),
        ValueBounds::Enum { .. } => None,
    };
    read.unwrap_or_else(|| PolicyValue::Text(text.to_owned()))
}

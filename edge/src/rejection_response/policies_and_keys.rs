//! Rejections of policies, keys and the operation of the running system.

use domain::policy::{CrossingBounds, PolicyKey, ValueBounds};
use domain::{key_set, policy_values, runtime};

use super::{Explain, conflict, invalid, unexpected};
use crate::error::{ApiError, Code};

impl Explain for key_set::Rejection {
    fn explain(self) -> ApiError {
        use key_set::{Phase, Rejection as R};
        match self {
            R::NotFound { id } => ApiError::new(
                Code::NotFound,
                format!("There is no key {id} of this purpose; GET /api/v1/admin/keys lists those there are."),
            ),
            R::AlreadyStaged { id } => {
                conflict(format!("Key {id} is staged already; activate it, or retire it first.")).detail("key_id", id)
            }
            R::WrongPhase { id, phase } => {
                let way = match phase {
                    Phase::Staged => "activate it first",
                    Phase::Active => "it is in use; to replace it, stage another and activate that one",
                    Phase::Grace => "it was replaced; stage a new one",
                    Phase::Retired => "that is its end; stage a new one",
                };
                conflict(format!("Key {id} is {}: {way}.", phase.name())).detail("key_id", id).detail("phase", phase.name())
            }
            R::StillActive { id } => conflict(format!(
                "Key {id} is the active one; stage another, activate that one, and then retire this one."
            ))
            .detail("key_id", id),
            R::InGrace { id, until } => conflict(format!(
                "Tasks that key {id} signed may be under way until {until}; ask again then, or with \"force\": true where the key \
                 has leaked."
            ))
            .detail("key_id", id)
            .detail("until", serde_json::json!(until)),
            R::InUse { id, dependents } => conflict(format!(
                "{dependents} nodes have certificates by authority {id} alone; wait until they have renewed, or ask with \"force\": \
                 true: those nodes have to recover or to be enrolled anew."
            ))
            .detail("key_id", id)
            .detail("dependents", dependents),
            R::Moved => conflict("Somebody else rotates these keys at this moment; look at them and ask again."),
            R::OtherPurpose => invalid(
                "Keys of this purpose are not rotated so: those at rest are in the key ring file, and `rewrap` puts them to use."
                    .to_owned(),
                "purpose",
            ),
            rejection @ R::Exists { .. } => unexpected(&rejection),
        }
    }
}

impl Explain for policy_values::Rejection {
    fn explain(self) -> ApiError {
        use policy_values::Rejection as R;
        match self {
            R::OutOfBounds { key, value } => not_admitted(key, &value.to_string()),
            R::Scope { key, scope } => {
                let kinds = key.applies_to().scope_kinds();
                ApiError::invalid_request(format!(
                    "{} cannot be set in scope `{}`: {}. Set it in one of the scopes {} (`global` is an empty `scope`).",
                    key.name(),
                    scope.kind(),
                    key.applies_to().reason(),
                    kinds.join(", ")
                ))
                .detail("field", "scope")
                .detail("key", key.name())
                .detail("scopes", serde_json::json!(kinds))
            }
            R::NotBuilt { key, value } => policy_out_of_bounds(
                key,
                format!(
                    "{value} is not available yet as a value of {}: nothing carries it out. Leave the key as it is.",
                    key.name()
                ),
            ),
            R::Crosses { key, low, high, crossing } => {
                let CrossingBounds { at, low: smallest, high: largest, with } = crossing;
                let (low, high) = (low.name(), high.name());
                let message = format!(
                    "With this value {low} ({smallest}) would be over {high} ({largest}) from {at} on, for those whom the values \
                     of scope {with} concern too; change the other one first."
                );
                policy_out_of_bounds(key, message).detail(
                    "crosses",
                    serde_json::json!({ low: smallest, high: largest, "at": at, "scope_kind": with.kind() }),
                )
            }
            R::Differs { key, current } => {
                let now = current.as_ref().map_or_else(|| "not set".to_owned(), ToString::to_string);
                conflict(format!(
                    "`old_value` is not what {} would be without this write: in this scope it is {now}. Look at it again and repeat.",
                    key.name()
                ))
                .detail("field", "old_value")
                .detail("current_value", serde_json::json!(current))
            }
            R::NotSet { key } => ApiError::new(
                Code::NotFound,
                format!(
                    "There is no such value of {} in this scope; GET /api/v1/admin/policy-values lists what is set.",
                    key.name()
                ),
            ),
            R::Past { now } => invalid(
                format!("`effective_at` lies in the past (it is {now}); leave it out to set the value at once."),
                "effective_at",
            ),
            R::TooFarAhead { latest } => {
                invalid(format!("`effective_at` must be at {latest} at the latest."), "effective_at")
            }
            R::TooManyAhead { limit } => conflict(format!(
                "{limit} values lie ahead, which is the most; wait until one has come to pass, or write it anew under its effective_at."
            )),
            R::TooManyScopes { limit } => conflict(format!(
                "{limit} scopes have values of their own, which is the most; set this one for a plan or an organisation."
            )),
            rejection @ R::NotFound => unexpected(&rejection),
        }
    }
}

/// An invalid value of a policy key, and the valid ones.
pub fn not_admitted(key: PolicyKey, value: &str) -> ApiError {
    let takes = match key.bounds() {
        ValueBounds::Int { min, max, .. } => format!("a whole number from {min} to {max}"),
        ValueBounds::Enum { of, .. } => format!("one of {}", of.join(", ")),
        ValueBounds::Bool { .. } => "true or false".to_owned(),
    };
    policy_out_of_bounds(key, format!("{value} is no value of {}; it takes {takes}.", key.name()))
}

fn policy_out_of_bounds(key: PolicyKey, message: String) -> ApiError {
    ApiError::new(Code::PolicyOutOfBounds, message)
        .detail("field", "value")
        .detail("key", key.name())
        .detail("bounds", bounds_of(key))
        .detail("default", serde_json::json!(key.default_value()))
}

/// The valid values of a key, in the API's notation.
#[must_use]
pub fn bounds_of(key: PolicyKey) -> serde_json::Value {
    match key.bounds() {
        ValueBounds::Int { min, max, .. } => serde_json::json!({ "min": min, "max": max }),
        ValueBounds::Enum { of, .. } => serde_json::json!({ "enum": of }),
        ValueBounds::Bool { .. } => serde_json::json!({ "enum": [true, false] }),
    }
}

impl Explain for runtime::Rejection {
    fn explain(self) -> ApiError {
        match self {
            // The record's id is derived from the part's name.
            rejection @ runtime::Rejection::AnotherPart => unexpected(&rejection),
        }
    }
}

//! The responses to rejected commands, for users and administrators: one table per state machine, with every rejection spelled out.

mod billing;
mod nodes_and_allocations;
mod policies_and_keys;
mod users;

pub use policies_and_keys::{bounds_of, not_admitted};

use actors::AskError;
use domain::policy::PolicyKey;

use crate::error::{ApiError, Code};
use crate::idempotency;
use crate::operator_view::RuntimeError;

/// The constraint that keeps names unique within a kind.
const UNIQUE_NAME: &str = "entity_unique_name";

/// A rejection as a response with the next step.
pub trait Explain {
    fn explain(self) -> ApiError;
}

/// The answer where a machine gave no reply.
pub fn not_answered<J: Explain>(error: AskError<J>) -> ApiError {
    match error {
        AskError::Rejected(rejection) => rejection.explain(),
        AskError::Denied => ApiError::forbidden("Your role does not allow this; ask an administrator."),
        AskError::InProgress => idempotency::in_progress(),
        AskError::Reused => idempotency::key_reused(),
        AskError::AlreadyDone => idempotency::answer_not_stored(),
        AskError::Taken { constraint } if constraint == UNIQUE_NAME => {
            conflict("There is one of this name already; choose another name.").detail("field", "name")
        }
        AskError::Taken { constraint } => ApiError::internal(format!("the database refused: {constraint}")),
        AskError::Overloaded => ApiError::overloaded(),
        AskError::Broken { reason } => ApiError::internal(format!("the machine failed: {reason}")),
        error @ (AskError::Parked { .. }
        | AskError::Unavailable { .. }
        | AskError::Unknown { .. }
        | AskError::NotOwner) => ApiError::unavailable(error.without_rejection()),
    }
}

/// A name for the cause that does not depend on the machine.
trait WithoutRejection {
    fn without_rejection(self) -> String;
}

impl<J> WithoutRejection for AskError<J> {
    fn without_rejection(self) -> String {
        match self {
            Self::Parked { reason } => format!("parked: {reason}"),
            Self::Unavailable { reason } => format!("unavailable: {reason}"),
            Self::Unknown { reason } => format!("the outcome is unknown: {reason}"),
            Self::NotOwner => "nobody owns the shard".to_owned(),
            Self::Rejected(_)
            | Self::Denied
            | Self::InProgress
            | Self::AlreadyDone
            | Self::Reused
            | Self::Taken { .. }
            | Self::Overloaded
            | Self::Broken { .. } => "not carried out".to_owned(),
        }
    }
}

fn conflict(message: impl Into<std::borrow::Cow<'static, str>>) -> ApiError {
    ApiError::new(Code::StateConflict, message)
}

/// Names the policy that limits the request, and its value.
pub(crate) fn limited_by(refusal: ApiError, key: PolicyKey, limit: impl Into<serde_json::Value>) -> ApiError {
    refusal.detail("policy_key", key.name()).detail("limit", limit)
}

fn invalid(message: String, field: &str) -> ApiError {
    ApiError::invalid_request(message).detail("field", field)
}

/// A rejection that has no public explanation.
fn unexpected(rejection: &impl std::error::Error) -> ApiError {
    ApiError::internal(format!("the machine refused a person with: {rejection}"))
}

impl From<persistence::StoreError> for ApiError {
    fn from(error: persistence::StoreError) -> Self {
        if error.is_unavailable() { Self::unavailable(error) } else { Self::internal(error) }
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        Self::unavailable(error)
    }
}

#[cfg(test)]
mod tests;

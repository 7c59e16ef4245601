//! The responses to rejected commands, for users and administrators. A state machine explains each of its rejections.

use actors::AskError;
use domain::explanation::{Explanation, RejectionCode};
use domain::policy::PolicyKey;
use domain::policy_values;
pub(crate) use domain::policy_values::bounds_of;
use std::sync::Arc;

use crate::api::idempotency;
use crate::app_state::runtime_interface::RuntimeError;
use crate::http::error::{ApiError, Code};

/// The constraint that keeps names unique within a kind.
const UNIQUE_NAME: &str = "entity_unique_name";

/// A rejection as a response with the next step.
pub(crate) trait Explain {
    fn explain(self) -> ApiError;
}

/// The answer where a machine gave no reply.
pub(crate) fn not_answered<J: Explain>(error: AskError<J>) -> ApiError {
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
            Self::NotOwner => "no member owns the shard".to_owned(),
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

/// An invalid value of a policy key, and the valid ones.
pub(crate) fn not_admitted(key: PolicyKey, value: &str) -> ApiError {
    policy_values::not_admitted(key, value).into()
}

impl<R: domain::state_machine::Rejection> Explain for R {
    fn explain(self) -> ApiError {
        domain::state_machine::Rejection::explain(self).into()
    }
}

impl From<Explanation> for ApiError {
    fn from(Explanation { code, message, details }: Explanation) -> Self {
        let code = match code {
            RejectionCode::InvalidRequest => Code::InvalidRequest,
            RejectionCode::PolicyOutOfBounds => Code::PolicyOutOfBounds,
            RejectionCode::InsufficientBalance => Code::InsufficientBalance,
            RejectionCode::Forbidden => Code::Forbidden,
            RejectionCode::NotFound => Code::NotFound,
            RejectionCode::NodeInUse => Code::NodeInUse,
            RejectionCode::StateConflict => Code::StateConflict,
            RejectionCode::Temporary => Code::ServiceUnavailable,
            RejectionCode::Unexpected => return Self::internal(message),
        };
        let error = details.into_iter().fold(Self::new(code, message), |error, (key, value)| error.detail(&key, value));
        if code == Code::ServiceUnavailable { error.expected() } else { error }
    }
}

impl From<persistence::StoreError> for ApiError {
    fn from(error: persistence::StoreError) -> Self {
        Self::from(Arc::new(error))
    }
}

impl From<Arc<persistence::StoreError>> for ApiError {
    fn from(error: Arc<persistence::StoreError>) -> Self {
        // An altered snapshot is restored by an operator; the request is right.
        let may_succeed_later = error.is_unavailable() || error.seal_refused().is_some();
        if may_succeed_later { Self::unavailable(error) } else { Self::internal(error) }
    }
}

impl From<RuntimeError> for ApiError {
    fn from(error: RuntimeError) -> Self {
        Self::unavailable(error)
    }
}

#[cfg(test)]
mod tests;

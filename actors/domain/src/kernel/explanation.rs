//! The explanation of a rejection for its caller: a code, and a message that says what to do next.

use crate::policy::PolicyKey;
use serde_json::{Map, Value};

/// The code of a rejection, as a caller's program reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionCode {
    InvalidRequest,
    PolicyOutOfBounds,
    InsufficientBalance,
    Forbidden,
    NotFound,
    NodeInUse,
    StateConflict,
    /// It holds for a moment: the same request may succeed when it is sent again.
    Temporary,
    /// No user or administrator can cause it: the message is for operators alone.
    Unexpected,
}

/// What a user or an administrator reads of a rejection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    pub code: RejectionCode,
    /// What was refused and why, with the next step.
    pub message: String,
    /// For programs.
    pub details: Map<String, Value>,
}

impl Explanation {
    #[must_use]
    pub fn new(code: RejectionCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Map::new() }
    }

    /// `what` names the resource as the API does: "node", "allocation".
    #[must_use]
    pub fn not_found(what: &str) -> Self {
        Self::new(RejectionCode::NotFound, format!("There is no such {what}, or it is not yours to see."))
    }

    #[must_use]
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(RejectionCode::StateConflict, message)
    }

    /// What the request rests on changes at this moment.
    #[must_use]
    pub fn temporary(message: impl Into<String>) -> Self {
        Self::new(RejectionCode::Temporary, message)
    }

    #[must_use]
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(RejectionCode::Forbidden, message)
    }

    #[must_use]
    pub fn invalid_request(message: impl Into<String>) -> Self {
        Self::new(RejectionCode::InvalidRequest, message)
    }

    /// An invalid field of the request.
    #[must_use]
    pub fn invalid(message: impl Into<String>, field: &str) -> Self {
        Self::invalid_request(message).detail("field", field)
    }

    /// A rejection that has no public explanation.
    #[must_use]
    pub fn unexpected(rejection: &impl std::error::Error) -> Self {
        Self::new(RejectionCode::Unexpected, format!("the machine refused a person with: {rejection}"))
    }

    /// Adds a machine-readable detail.
    #[must_use]
    pub fn detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.details.insert(key.to_owned(), value.into());
        self
    }

    /// Names the policy that limits the request, and its value.
    #[must_use]
    pub fn limited_by(self, key: PolicyKey, limit: impl Into<Value>) -> Self {
        self.detail("policy_key", key.name()).detail("limit", limit)
    }
}

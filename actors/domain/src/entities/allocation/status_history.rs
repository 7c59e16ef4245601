//! The part of an allocation's history that its user can read.

use super::{Allocation, Phase, PhaseName, ReleaseRetry};
use crate::resend_timer::ResendTimer;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Why an allocation failed (decisions 3, *Allocation*).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationFailure {
    /// The state in which it failed.
    pub phase: PhaseName,
    pub code: FailureCode,
    pub message: String,
    /// True where a new request may succeed.
    pub retryable: bool,
}

/// The cause of a failure, as a code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::AsRefStr)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    InsufficientCapacity,
    ConcurrencyLimitExceeded,
    InsufficientBalance,
    ProvisioningTimeout,
    /// The code of the node's agent, or a code of another release, such as `isolation_model_unavailable` of allocations from before 0.1.
    #[serde(untagged)]
    #[strum(transparent)]
    Reported(String),
}

impl FailureCode {
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.as_ref()
    }
}

impl fmt::Display for FailureCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One line of `status_history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEntry {
    pub state: PhaseName,
    pub at: Timestamp,
    pub reason: StatusReason,
}

/// The reason of a status, stored as text.
///
/// This is the one place where stored text becomes a reason: text that is none of the codes, as of earlier releases, is
/// [`StatusReason::Text`], and nothing is decided by it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::AsRefStr)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum StatusReason {
    Requested,
    DevicesReserved,
    TenantReady,
    /// [`AllocationFailure`] has the cause.
    ProvisioningFailed,
    /// Its user released it.
    ReleaseRequested,
    /// No money covers it, and the grace is over.
    BalanceDepleted,
    /// Its GPU or machine goes out of service, and the time to leave has ended.
    Evacuated,
    /// The clean-up failed and is tried again.
    CleanUpRetried,
    /// The clean-up failed, and an administrator ordered another attempt.
    CleanUpOrdered,
    CleanedUp,
    /// Its user released it before a node was found.
    Cancelled,
    /// An administrator released it without proof of clean-up.
    Forced,
    /// The code of a failure with its detail, or half a sentence of an earlier release.
    #[serde(untagged)]
    #[strum(transparent)]
    Text(String),
}

impl StatusReason {
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.as_ref()
    }
}

impl From<&str> for StatusReason {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<&FailureCode> for StatusReason {
    fn from(code: &FailureCode) -> Self {
        Self::Text(code.as_str().to_owned())
    }
}

/// The bound of the entries in a snapshot, which repeated clean-ups would exceed: beyond it, the oldest entry but the first is removed.
/// The whole history is in the history table.
const MAX_ENTRIES: usize = 32;

impl Allocation {
    /// The same allocation in another phase, with an entry in its history.
    pub(super) fn in_phase(&self, phase: Phase, at: Timestamp, reason: impl Into<StatusReason>) -> Self {
        let mut next = self.clone();
        next.history.push(StatusEntry { state: PhaseName::from(&phase), at, reason: reason.into() });
        if next.history.len() > MAX_ENTRIES {
            next.history.remove(1);
        }
        next.again = phase.waits_for_reply().then(|| ResendTimer::first(at));
        next.phase = phase;
        next
    }

    /// Whether it was released by force, where it is released.
    pub(super) fn was_forced(&self) -> bool {
        self.history.last().is_some_and(|last| last.reason == StatusReason::Forced)
    }
}

impl Phase {
    /// Whether another entity owes an answer.
    const fn waits_for_reply(&self) -> bool {
        match self {
            Self::Requested { .. }
            | Self::Provisioning { .. }
            | Self::Releasing { .. }
            | Self::ReleaseFailed { next: ReleaseRetry::Operator(_), .. } => true,
            Self::Active { .. }
            | Self::ReleaseFailed { next: ReleaseRetry::RetryAt(_), .. }
            | Self::Released { .. } => false,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_stored_as_its_text_and_other_text_is_preserved() {
        for (reason, text) in [
            (StatusReason::Forced, "forced"),
            (StatusReason::CleanedUp, "cleaned_up"),
            (StatusReason::CleanUpOrdered, "clean_up_ordered"),
            // As earlier releases stored them.
            (StatusReason::Text("release requested".to_owned()), "release requested"),
            (StatusReason::Text("trying the clean-up again".to_owned()), "trying the clean-up again"),
            (StatusReason::Text("tenant_remains: a process".to_owned()), "tenant_remains: a process"),
        ] {
            assert_eq!(reason.as_str(), text);
            assert_eq!(serde_json::to_value(&reason).unwrap(), text);
            assert_eq!(serde_json::from_value::<StatusReason>(text.into()).unwrap(), reason);
        }
    }

    #[test]
    fn failure_code_of_an_agent_is_preserved() {
        for (code, text) in [
            (FailureCode::InsufficientCapacity, "insufficient_capacity"),
            (FailureCode::Reported("disk_full".to_owned()), "disk_full"),
        ] {
            assert_eq!((code.as_str(), serde_json::to_value(&code).unwrap()), (text, text.into()));
            assert_eq!(serde_json::from_value::<FailureCode>(text.into()).unwrap(), code);
        }
    }
}

//! The part of an allocation's history that its user can read.

use super::{Allocation, Phase, ReleaseRetry};
use crate::machine::Timestamp;
use crate::retry::RetryTimer;
use serde::{Deserialize, Serialize};

/// Why an allocation failed (decisions 3, *Allocation*).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationFailure {
    /// The state in which it failed.
    pub phase: String,
    pub code: String,
    pub message: String,
    /// True where a new request may succeed.
    pub retryable: bool,
}

/// One line of `status_history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEntry {
    pub state: String,
    pub at: Timestamp,
    pub reason: String,
}

/// The bound of the entries in a snapshot, which repeated clean-ups would exceed: beyond it, the oldest entry but the first is removed.
/// The whole history is in the history table.
const MAX_ENTRIES: usize = 32;

impl Allocation {
    /// The same allocation in another phase, with an entry in its history.
    pub(super) fn in_phase(&self, phase: Phase, at: Timestamp, reason: &str) -> Self {
        let mut next = self.clone();
        next.history.push(StatusEntry { state: phase.name().to_owned(), at, reason: reason.to_owned() });
        if next.history.len() > MAX_ENTRIES {
            next.history.remove(1);
        }
        next.again = phase.waits_for_reply().then(|| RetryTimer::first(at));
        next.phase = phase;
        next
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

//! What of an allocation's past its user can read.

use super::{AfterFailure, Allocation, Phase};
use crate::again::Again;
use crate::machine::Timestamp;
use serde::{Deserialize, Serialize};

/// Why an allocation could not be had (decisions 3, *Allocation*).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The state in which it failed.
    pub phase: String,
    pub code: String,
    pub message: String,
    /// True where asking again may succeed.
    pub retryable: bool,
}

/// One line of `status_history`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusEntry {
    pub state: String,
    pub at: Timestamp,
    pub reason: String,
}

/// Repeated clean-ups must not let a snapshot grow for ever: beyond this, the oldest entry but the first goes. The whole history
/// is in the history table.
const KEPT: usize = 32;

impl Allocation {
    /// The same allocation in another phase, with the step noted in its history.
    pub(super) fn moved(&self, phase: Phase, at: Timestamp, reason: &str) -> Self {
        let mut next = self.clone();
        next.history.push(StatusEntry { state: phase.name().to_owned(), at, reason: reason.to_owned() });
        if next.history.len() > KEPT {
            next.history.remove(1);
        }
        next.again = phase.waits_to_hear().then(|| Again::first(at));
        next.phase = phase;
        next
    }
}

impl Phase {
    /// Whether somebody was asked for something and has not answered.
    const fn waits_to_hear(&self) -> bool {
        match self {
            Self::Requested { .. }
            | Self::Provisioning { .. }
            | Self::Releasing { .. }
            | Self::ReleaseFailed { next: AfterFailure::Operator(_), .. } => true,
            Self::Active { .. }
            | Self::ReleaseFailed { next: AfterFailure::RetryAt(_), .. }
            | Self::Released { .. } => false,
        }
    }
}

//! How a node's part in a rollout ended.

use serde::{Deserialize, Serialize};

/// How a node's part in a rollout ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum RolloutOutcome {
    /// The version is in use.
    Updated,
    /// The agent refused it, rolled it back, or did not report on it: the agent's code, or one of [`failure`].
    Failed { reason: String },
    /// No update began.
    Skipped { reason: SkipReason },
}

impl RolloutOutcome {
    /// Of an update that failed with this code of the agent. One that cannot update itself began nothing, as where no package has installed
    /// it: no reason to stop the others.
    #[must_use]
    pub fn of_failure(code: &str) -> Self {
        match code {
            failure::UPDATE_UNSUPPORTED => Self::Skipped { reason: SkipReason::Unsupported },
            code => Self::Failed { reason: code.to_owned() },
        }
    }
}

/// Codes of failures: one that agents report, and those that none does.
pub mod failure {
    /// The agent has no way to update itself: no package installed it, or its installation is incomplete.
    pub const UPDATE_UNSUPPORTED: &str = "update_unsupported";
    /// No result in time: it is unknown which version is in use.
    pub const NO_RESULT: &str = "no_result";
    /// The node was silent for too long in the soak after its update, or polled and sent no heartbeat.
    pub const OFFLINE: &str = "offline";
}

/// Why a rollout does not update a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[derive(strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum SkipReason {
    /// Its agent reports this version.
    UpToDate,
    /// It was never active.
    NotActive,
    Offline,
    Draining,
    Quarantined,
    Retired,
    Removed,
    /// Another update has no result.
    UpdateInProgress,
    /// As many tasks as a node may have are without a result.
    TooManyTasks,
    /// No package installed its agent, or the agent has no task for updates.
    Unsupported,
}

impl SkipReason {
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The code, as the API shows it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

//! Why a node is in its state.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateReason {
    pub code: StateCode,
    /// A sentence for operators.
    pub message: String,
}

impl StateReason {
    pub(in crate::entities::node) fn new(code: StateCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The reason as a code, as stored and published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::AsRefStr)]
#[cfg_attr(test, derive(strum::VariantNames))]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum StateCode {
    Registered,
    TokenIssued,
    TokenExpired,
    CertificateIssued,
    EnrollmentExpired,
    /// The enrolled node is not active: its inventory differs from its SKU.
    InventoryMismatch,
    FirstPoll,
    Silent,
    #[serde(rename = "heard_again")]
    #[strum(serialize = "heard_again")]
    ContactRestored,
    Restarted,
    Draining,
    Drained,
    Retired,
    Reactivated,
    Removing,
    Removed,
    Quarantined,
    QuarantineReleased,
    HealthCritical,
    InventoryDrift,
    /// The agent's package or the machine's privileges were altered.
    IntegrityFinding,
    CloneSuspected,
    /// The node reports a GPU that another node has claimed.
    GpuOfAnotherNode,
    ValidationFailed,
    ForcedRelease,
    /// The bare-metal provider could not deploy the machine.
    DeploymentFailed,
    /// The machine is being reinstalled.
    Reimaging,
    /// A reinstalled machine came back that is not the new system.
    SystemRefused,
    /// The bare-metal provider has released the machine, or given it to another.
    MachineLost,
    /// A code that this release does not know, of a node that another release wrote.
    #[serde(untagged)]
    #[strum(transparent)]
    Other(String),
}

impl StateCode {
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.as_ref()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn code_is_stored_as_its_text_and_an_unknown_one_is_preserved() {
        for (code, text) in [
            (StateCode::InventoryMismatch, "inventory_mismatch"),
            (StateCode::GpuOfAnotherNode, "gpu_of_another_node"),
            (StateCode::Other("of_another_release".to_owned()), "of_another_release"),
        ] {
            assert_eq!(code.as_str(), text);
            assert_eq!(serde_json::to_value(&code).unwrap(), text);
            assert_eq!(serde_json::from_value::<StateCode>(text.into()).unwrap(), code);
        }
    }
}

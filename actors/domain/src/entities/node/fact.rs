//! What the sagas of allocations and terminal sessions, and the worker for bare-metal machines, report to a node.

use super::{OrderedImage, ProviderReport};
use crate::id::{AllocationId, RolloutId, TerminalSessionId, TokenId};
use crate::package_digest::PackageDigest;
use crate::recording::RecordingTerms;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};

/// What the sagas of allocations and terminal sessions, and the worker for bare-metal machines, report to a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    Reserve {
        allocation_id: AllocationId,
        gpu_count: u32,
        keys: Vec<AuthorizedKey>,
        /// The revision of these keys.
        #[serde(default)]
        revision: u64,
        /// It is to have the whole node, which is reimaged after it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        reimages: bool,
    },
    /// The SSH keys of an allocation on this node, from this revision on.
    ReconcileLogins {
        allocation_id: AllocationId,
        revision: u64,
        keys: Vec<AuthorizedKey>,
    },
    Unreserve {
        allocation_id: AllocationId,
    },
    Provision {
        allocation_id: AllocationId,
        deadline_at: Timestamp,
    },
    Clean {
        allocation_id: AllocationId,
        attempt: u32,
        deadline_at: Timestamp,
    },
    MarkReleaseFailed {
        allocation_id: AllocationId,
        attempt: u32,
    },
    Fence {
        allocation_id: AllocationId,
        attempt: u32,
    },
    Abandon {
        allocation_id: AllocationId,
    },
    /// A terminal session was opened.
    OpenTerminal {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        ends_at: Timestamp,
        begin_until: Timestamp,
        #[serde(default)]
        recording: RecordingTerms,
    },
    /// A terminal session was closed.
    ForgetTerminal {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
    },
    /// The worker is about to have the machine deployed, with this token in its user data.
    MachineToken {
        token_id: TokenId,
        token_sha256: [u8; 32],
        /// The image that is ordered; absent where the worker is of a release that does not name it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<OrderedImage>,
    },
    /// What the worker found at the bare-metal provider, of the step that began then.
    MachineReported {
        since: Timestamp,
        report: ProviderReport,
    },
    /// A rollout orders an update of the agent, perhaps once more.
    UpdateForRollout {
        rollout_id: RolloutId,
        digest: PackageDigest,
        /// The rollout watches the node after its update.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        soaks: bool,
        /// Also while a fault holds the node in quarantine.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        includes_held: bool,
    },
    /// The soak of a rollout is over: it asks whether the node is in order, perhaps once more.
    CheckForRollout {
        rollout_id: RolloutId,
    },
}

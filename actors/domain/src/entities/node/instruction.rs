//! What the sagas of allocations and terminal sessions, and rollouts, have a node do.

use crate::id::{AllocationId, RolloutId, TerminalSessionId};
use crate::package_digest::PackageDigest;
use crate::recording::RecordingTerms;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};

/// What the sagas of allocations and terminal sessions, and rollouts, have a node do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Instruction {
    /// Reserves GPUs for an allocation, if that many are free.
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
    /// Has the agent write the SSH keys of an allocation, which hold from this revision on.
    ReconcileLogins { allocation_id: AllocationId, revision: u64, keys: Vec<AuthorizedKey> },
    /// Ends a reservation that the allocation does not want.
    Unreserve { allocation_id: AllocationId },
    /// Has the agent set the tenant up.
    Provision { allocation_id: AllocationId, deadline_at: Timestamp },
    /// Has the agent remove the tenant, and prove it.
    Clean { allocation_id: AllocationId, attempt: u32, deadline_at: Timestamp },
    /// Takes no other allocation until the clean-up is proved: an attempt has failed.
    MarkReleaseFailed { allocation_id: AllocationId, attempt: u32 },
    /// Stops the node from being used: the last attempt of a clean-up has failed.
    Fence { allocation_id: AllocationId, attempt: u32 },
    /// Goes on with the clean-up of an allocation that an administrator has released without a proof.
    Abandon { allocation_id: AllocationId },
    /// Has the agent start the shell of a terminal session, which was opened.
    OpenTerminal {
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        ends_at: Timestamp,
        begin_until: Timestamp,
        #[serde(default)]
        recording: RecordingTerms,
    },
    /// Drops the tasks of a terminal session, which was closed.
    ForgetTerminal { session_id: TerminalSessionId, allocation_id: AllocationId },
    /// Updates the agent for a rollout, which may send it more than once.
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
    /// Reports whether the node is in order after the soak of a rollout, which may send it more than once.
    CheckForRollout { rollout_id: RolloutId },
}

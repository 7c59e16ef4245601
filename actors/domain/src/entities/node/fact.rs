//! What the sagas of allocations and terminal sessions, and the worker for bare-metal machines, report to a node.

use super::rollout_update::RolloutUpdate;
use super::{Node, OrderedImage, ProviderReport, Rejection};
use crate::id::{AllocationId, RolloutId, TerminalSessionId, TokenId};
use crate::package_digest::PackageDigest;
use crate::recording::RecordingTerms;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
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

impl Node {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Reserve { allocation_id, gpu_count, keys, revision, reimages } => {
                self.reserve((allocation_id, gpu_count), keys, revision, reimages, ctx)
            }
            Fact::ReconcileLogins { allocation_id, revision, keys } => {
                Ok(self.reconcile_logins(allocation_id, revision, keys, ctx))
            }
            Fact::Unreserve { allocation_id } => Ok(self.unreserve(allocation_id, ctx)),
            Fact::Provision { allocation_id, deadline_at } => Ok(self.provision(allocation_id, deadline_at, ctx)),
            Fact::Clean { allocation_id, attempt, deadline_at } => {
                Ok(self.clean(allocation_id, attempt, deadline_at, ctx))
            }
            Fact::MarkReleaseFailed { allocation_id, attempt } => {
                Ok(self.mark_release_failed(allocation_id, attempt, ctx))
            }
            Fact::Fence { allocation_id, attempt } => Ok(self.fence(allocation_id, attempt, ctx)),
            Fact::Abandon { allocation_id } => Ok(self.abandon(allocation_id, ctx)),
            Fact::OpenTerminal { session_id, allocation_id, ends_at, begin_until, recording } => {
                Ok(self.open_terminal(session_id, allocation_id, ends_at, begin_until, recording, ctx))
            }
            Fact::ForgetTerminal { session_id, allocation_id } => Ok(self.forget_terminal(session_id, allocation_id)),
            Fact::MachineToken { token_id, token_sha256, image } => {
                self.machine_token((token_id, token_sha256), image, ctx)
            }
            Fact::MachineReported { since, report } => Ok(self.machine_reported(since, report, ctx)),
            Fact::UpdateForRollout { rollout_id, digest, soaks, includes_held } => {
                Ok(self.update_for_rollout(&RolloutUpdate { rollout_id, digest, soaks, includes_held }, ctx))
            }
            Fact::CheckForRollout { rollout_id } => Ok(self.check_for_rollout(rollout_id, ctx)),
        }
    }
}

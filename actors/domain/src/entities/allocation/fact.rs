//! What nodes, the tenant, the billing account and the provisioning worker report to an allocation.

use super::{Allocation, Placement};
use crate::id::{NodeId, SshKeyId};
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What other parts of the service report to an allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// A node has reserved the devices.
    Reserved {
        node_id: NodeId,
        placed: Placement,
    },
    /// No node has capacity; `suggestion` names an alternative.
    NoCapacity {
        suggestion: Option<String>,
    },
    /// The tenant's quota is used up.
    OverQuota {
        limit: i64,
    },
    /// The account does not cover it; `message` says how much is missing.
    Unaffordable {
        message: String,
    },
    /// The account is depleted, and the grace period has ended. Its name between members is that of earlier releases.
    #[serde(rename = "uncover")]
    #[strum(serialize = "uncover")]
    Uncovered,
    /// A critical fault of the node was detected at this time.
    Faulted {
        node_id: NodeId,
        at: Timestamp,
        reason: String,
    },
    /// The time of its tenant to leave a GPU or a machine that goes out of service has ended. Its name between members is that
    /// of earlier releases.
    #[serde(rename = "evacuate")]
    #[strum(serialize = "evacuate")]
    EvacuationDue {
        node_id: NodeId,
        reason: String,
    },
    /// The account has a meter for it, and asks for its state.
    StillMetered {
        is_running: bool,
    },
    Provisioned {
        node_id: NodeId,
    },
    ProvisionFailed {
        node_id: NodeId,
        reason: String,
    },
    Cleaned {
        node_id: NodeId,
        attempt: u32,
    },
    CleanupFailed {
        node_id: NodeId,
        attempt: u32,
        reason: String,
        #[serde(default)]
        detail: String,
    },
    /// The tenant still counts it against the quota; with the revision of the tenant's keys.
    StillCounted {
        #[serde(default)]
        logins_revision: u64,
    },
    /// The keys that this choice resolves to at this revision of the user's keys. Its name between members is that of earlier releases.
    #[serde(rename = "adopt_logins")]
    #[strum(serialize = "adopt_logins")]
    LoginsResolved {
        chosen: Option<Vec<SshKeyId>>,
        keys: Vec<AuthorizedKey>,
        logins_revision: u64,
    },
    /// The node has written the SSH keys.
    LoginsWritten {
        node_id: NodeId,
        revision: u64,
    },
}

impl Allocation {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match fact {
            Fact::Reserved { node_id, placed } => self.reserved(node_id, placed, ctx),
            Fact::NoCapacity { suggestion } => self.no_capacity(suggestion, ctx),
            Fact::OverQuota { limit } => self.over_quota(limit, ctx),
            Fact::Unaffordable { message } => self.unaffordable(&message, ctx),
            Fact::Uncovered => self.uncover(ctx),
            Fact::Faulted { node_id, at, reason } => self.faulted(node_id, at, &reason, ctx),
            Fact::EvacuationDue { node_id, reason } => self.evacuate(node_id, &reason, ctx),
            Fact::StillMetered { is_running } => self.still_metered(is_running),
            Fact::Provisioned { node_id } => self.provisioned(node_id, ctx),
            Fact::ProvisionFailed { node_id, reason } => self.provision_failed(node_id, &reason, ctx),
            Fact::Cleaned { node_id, attempt } => self.cleaned(node_id, attempt, ctx),
            Fact::CleanupFailed { node_id, attempt, reason, detail } => {
                self.cleanup_failed(node_id, attempt, (&reason, &detail), ctx)
            }
            Fact::StillCounted { logins_revision } => self.still_counted(logins_revision),
            Fact::LoginsResolved { chosen, keys, logins_revision } => {
                self.adopt_logins(&chosen, keys, logins_revision, ctx)
            }
            Fact::LoginsWritten { node_id, revision } => self.logins_written(node_id, revision),
        }
    }
}

//! What gateways, the node and the provisioning worker report to a terminal session.

use super::{CloseReason, Rejection, Reply, TerminalSession, TokenDigest};
use crate::audit::AuditAction;
use crate::id::NodeId;
use crate::precondition::Precondition;
use crate::state_machine::{Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What gateways, the node and the provisioning worker report to a terminal session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// A connection presents a token.
    Attach { token_sha256: TokenDigest, active: Precondition },
    /// The connection of that number was closed.
    Detach { attachment: u32 },
    /// The node could not start it, or lost it.
    Fail { node_id: NodeId, code: String },
    /// Its allocation is being released.
    Revoke,
    /// An administrator has revoked the certificates of its node.
    CutOff,
    /// A policy of recordings may have changed.
    HeedPolicy,
}

impl TerminalSession {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Attach { token_sha256, active } => self.attach(token_sha256, active, ctx),
            Fact::Detach { attachment } => Ok(self.detach(attachment, ctx)),
            Fact::Fail { node_id, code } if node_id == self.node_id => {
                let metadata = json!({ "fault": code });
                Ok(self.close(CloseReason::Failed { code }, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Fact::Fail { .. } => Ok(Transition::stay(Reply::Done)),
            Fact::Revoke => Ok(self.close(CloseReason::AllocationEnded, AuditAction::TerminalsClose, &json!({}), ctx)),
            Fact::CutOff => {
                let metadata = json!({ "cause": "node_revoked" });
                Ok(self.close(CloseReason::Killed, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Fact::HeedPolicy => Ok(self.apply_recording_policy(ctx)),
        }
    }
}

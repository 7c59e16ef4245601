//! What gateways, the node and the provisioning worker report to a terminal session.

use super::{CloseReason, Rejection, Reply, TerminalSession, TokenDigest};
use crate::audit::AuditAction;
use crate::id::{AllocationId, BrowserSessionId, NodeId};
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
    /// Its allocation is being released. It is named where the sender could not read whether it is the session's.
    Revoke {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allocation_id: Option<AllocationId>,
    },
    /// An administrator has revoked the certificates of its node. It is named where the sender could not read whether it is the session's.
    CutOff {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node_id: Option<NodeId>,
    },
    /// A browser session has ended.
    LogOut { browser_session_id: BrowserSessionId },
    /// A policy of recordings may have changed.
    HeedPolicy,
}

impl TerminalSession {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Attach { token_sha256, active } => self.attach(token_sha256, active, ctx),
            Fact::Detach { attachment } => Ok(self.detach(attachment, ctx)),
            Fact::Fail { node_id, code } if node_id == self.node_id => {
                let metadata = json!({ "failure_code": code });
                Ok(self.close(CloseReason::Failed { code }, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Fact::Fail { .. } => Ok(Transition::stay(Reply::Done)),
            Fact::Revoke { allocation_id } if allocation_id.is_some_and(|named| named != self.allocation_id) => {
                Ok(Transition::stay(Reply::Done))
            }
            Fact::Revoke { .. } => {
                Ok(self.close(CloseReason::AllocationEnded, AuditAction::TerminalsClose, &json!({}), ctx))
            }
            Fact::CutOff { node_id } if node_id.is_some_and(|named| named != self.node_id) => {
                Ok(Transition::stay(Reply::Done))
            }
            Fact::CutOff { .. } => {
                let metadata = json!({ "cause": "the certificates of its node were revoked" });
                Ok(self.close(CloseReason::Killed, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Fact::LogOut { browser_session_id } => Ok(self.log_out(browser_session_id, ctx)),
            Fact::HeedPolicy => Ok(self.apply_recording_policy(ctx)),
        }
    }
}

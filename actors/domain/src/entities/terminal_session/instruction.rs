//! What gateways, the node and the provisioning worker have a terminal session do.

use super::{CloseReason, Rejection, Reply, TerminalSession, TokenDigest};
use crate::audit::AuditAction;
use crate::id::{AllocationId, BrowserSessionId, MemberId, NodeId};
use crate::precondition::Precondition;
use crate::state_machine::{Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What gateways, the node and the provisioning worker have a terminal session do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Instruction {
    /// Admits the connection that presents this token.
    Attach {
        token_sha256: TokenDigest,
        active: Precondition,
        /// The member that has the connection. `None` from members of earlier releases.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gateway: Option<MemberId>,
    },
    /// Forgets the connection of that number, which was closed, or whose gateway has ended.
    Detach { attachment: u32 },
    /// Closes it: the node could not start it, or lost it.
    Fail { node_id: NodeId, code: String },
    /// Closes it: its allocation is being released. It is named where the sender could not read whether it is the session's.
    Revoke {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        allocation_id: Option<AllocationId>,
    },
    /// Closes it: an administrator has revoked the certificates of its node. It is named where the sender could not read whether it is the
    /// session's.
    CutOff {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node_id: Option<NodeId>,
    },
    /// Closes it, or voids its token, where it is of this browser session, which has ended.
    LogOut { browser_session_id: BrowserSessionId },
    /// Reads the policies of recordings again: one may have changed. Its name between members is that of earlier releases.
    #[serde(rename = "heed_policy")]
    #[strum(serialize = "heed_policy")]
    ApplyRecordingPolicy,
}

impl TerminalSession {
    pub(super) fn follow(
        &self,
        instruction: Instruction,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match instruction {
            Instruction::Attach { token_sha256, active, gateway } => self.attach(token_sha256, active, gateway, ctx),
            Instruction::Detach { attachment } => Ok(self.detach(attachment, ctx)),
            Instruction::Fail { node_id, code } if node_id == self.node_id => {
                let metadata = json!({ "failure_code": code });
                Ok(self.close(CloseReason::Failed { code }, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Instruction::Fail { .. } => Ok(Transition::stay(Reply::Done)),
            Instruction::Revoke { allocation_id } if allocation_id.is_some_and(|named| named != self.allocation_id) => {
                Ok(Transition::stay(Reply::Done))
            }
            Instruction::Revoke { .. } => {
                Ok(self.close(CloseReason::AllocationEnded, AuditAction::TerminalsClose, &json!({}), ctx))
            }
            Instruction::CutOff { node_id } if node_id.is_some_and(|named| named != self.node_id) => {
                Ok(Transition::stay(Reply::Done))
            }
            Instruction::CutOff { .. } => {
                let metadata = json!({ "cause": "the certificates of its node were revoked" });
                Ok(self.close(CloseReason::Killed, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Instruction::LogOut { browser_session_id } => Ok(self.log_out(browser_session_id, ctx)),
            Instruction::ApplyRecordingPolicy => Ok(self.apply_recording_policy(ctx)),
        }
    }
}

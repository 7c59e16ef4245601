//! What the owner, operators and the node's agent ask of a terminal session.

use super::{AGENT_RESTARTED, CloseReason, Phase, Rejection, ShellExit, TerminalSession, TokenDigest};
use crate::audit::AuditAction;
use crate::authz::{Action, Principal};
use crate::id::{AllocationId, NodeId};
use crate::precondition::Precondition;
use crate::state_machine::{self, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What the owner, operators and the node's agent ask of a terminal session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    /// The owner of an active allocation opens a shell. `active`: the allocation's version that was read.
    Open {
        allocation_id: AllocationId,
        node_id: NodeId,
        token_sha256: TokenDigest,
        active: Precondition,
    },
    /// Its owner requests a token to reconnect.
    IssueToken {
        token_sha256: TokenDigest,
        active: Precondition,
    },
    /// The node's agent reports that the program ended.
    End {
        exit: ShellExit,
    },
    /// The node's agent reports that it was stopped or restarted, and the program with it.
    Lose,
    Kill {
        reason: String,
    },
    /// Its owner ends it.
    EndByUser,
    /// Its owner opens a session above the limit. Rejected while a client is connected to this one.
    Displace,
    /// A caller reads its recording.
    ReadRecording,
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Open { .. } | Self::IssueToken { .. } | Self::EndByUser | Self::Displace => Action::OpenTerminals,
            Self::Kill { .. } => Action::OperateTerminals,
            Self::End { .. } | Self::Lose => Action::SpeakForNode,
            Self::ReadRecording => Action::ReadRecordings,
        }
    }

    fn creates(&self) -> bool {
        matches!(self, Self::Open { .. })
    }
}

impl TerminalSession {
    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Open { .. } => Err(Rejection::Exists),
            Request::IssueToken { token_sha256, active } => self.issue_token(token_sha256, active, ctx),
            Request::End { exit } => {
                if *ctx.by != Principal::Node(self.node_id) {
                    return Err(Rejection::NotFound);
                }
                Ok(self.close(CloseReason::Exited { exit }, AuditAction::TerminalsClose, &json!({}), ctx))
            }
            Request::Lose => {
                if *ctx.by != Principal::Node(self.node_id) {
                    return Err(Rejection::NotFound);
                }
                let code = AGENT_RESTARTED.to_owned();
                let metadata = json!({ "failure_code": code });
                Ok(self.close(CloseReason::Failed { code }, AuditAction::TerminalsClose, &metadata, ctx))
            }
            Request::Kill { reason } => {
                let metadata = json!({ "reason": reason });
                Ok(self.with_session_reply(self.close(CloseReason::Killed, AuditAction::TerminalsKill, &metadata, ctx)))
            }
            Request::EndByUser => {
                let step =
                    self.by_owner(ctx)?.close(CloseReason::EndedByUser, AuditAction::TerminalsClose, &json!({}), ctx);
                Ok(self.with_session_reply(step))
            }
            Request::Displace => {
                let it = self.by_owner(ctx)?;
                match it.phase {
                    // A token that was never used holds no place: nothing runs that its user has seen.
                    Phase::Opened { .. } | Phase::Detached { .. } | Phase::Closed { .. } => {
                        Ok(it.close(CloseReason::Displaced, AuditAction::TerminalsClose, &json!({}), ctx))
                    }
                    Phase::Attached { .. } => Err(Rejection::NotDetached),
                }
            }
            Request::ReadRecording => self.read_recording(ctx),
        }
    }
}

//! What administrators and the agent ask of a node.

use super::{
    AgentContact, CertificateRecord, Enrollment, IdentityRecovery, Node, NodeHealth, PreparedMachine, ProbeOutcome,
    ProofGap, Registration, Reissue, Rejection, Reply, ReportedInventory, TaskOutcome, report_reasons,
};
use crate::authz::Action;
use crate::id::{FindingId, TaskId, TokenId};
use crate::metadata::MetadataPatch;
use crate::package_digest::PackageDigest;
use crate::state_machine::{self, Transition, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What administrators ask of a node, and the messages of its agent.
#[derive(
    Clone,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantNames,
    strum::EnumDiscriminants,
)]
#[strum_discriminants(
    name(CommandName),
    doc = "The name of a request.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    // Requests of administrators.
    Register {
        registration: Box<Registration>,
        probe: Option<ProbeOutcome>,
        /// Its machine at the bare-metal provider, which is to deploy it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        machine: Option<PreparedMachine>,
    },
    Revise {
        host: Option<String>,
        port: Option<u16>,
        ssh_username: Option<String>,
        /// The probe of the new address, where one was requested.
        #[serde(default)]
        probe: Option<ProbeOutcome>,
        #[serde(default, skip_serializing_if = "MetadataPatch::is_empty")]
        metadata: MetadataPatch,
        if_version: Option<i64>,
    },
    IssueToken {
        token_id: TokenId,
        token_sha256: [u8; 32],
        ttl_seconds: Option<u32>,
    },
    Reissue(Box<Reissue>),
    Retire {
        reason: String,
        drain: bool,
    },
    Reactivate {
        reason: String,
    },
    Remove {
        reason: String,
    },
    Quarantine {
        reason: String,
    },
    ReleaseQuarantine {
        reason: String,
    },
    ClearFinding {
        finding_id: FindingId,
        reason: String,
    },
    /// The bare-metal provider is to reinstall the machine.
    Reimage {
        reason: String,
    },
    OrderTask {
        task_type: TaskType,
        reason: String,
    },
    ResumeTask {
        task_id: TaskId,
        reason: String,
    },
    /// A validation of the machine with load.
    Validate {
        level: ValidationLevel,
        reason: String,
    },
    UpdateAgent {
        digest: PackageDigest,
        force: bool,
        reason: String,
    },
    /// A reset of one GPU that no tenant holds, and its validation.
    ResetGpu {
        gpu_uuid: String,
        reason: String,
    },

    // Messages of the agent.
    Enroll(Box<Enrollment>),
    Recover(Box<IdentityRecovery>),
    Renew {
        serial: String,
        issued: CertificateRecord,
    },
    /// The agent polls for tasks.
    Poll {
        serial: String,
    },
    Heartbeat {
        serial: String,
        seen: Box<AgentContact>,
        inventory: Box<ReportedInventory>,
        health: Box<NodeHealth>,
    },
    Report {
        serial: String,
        task_id: TaskId,
        attempt: u32,
        verdict: TaskOutcome,
        /// The output of a task of the node itself, for the administrator who ordered it.
        #[serde(default)]
        output: Option<Value>,
        /// What the clean-up proof of a verdict leaves out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unproved: Option<Box<ProofGap>>,
    },
    /// The agent authenticates for its side of a terminal connection.
    Identify {
        serial: String,
    },
    /// A machine without a certificate authenticates for its package. The token is not consumed.
    PresentToken {
        token_sha256: [u8; 32],
    },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Register { .. }
            | Self::Revise { .. }
            | Self::IssueToken { .. }
            | Self::Reissue(_)
            | Self::Retire { .. }
            | Self::Reactivate { .. }
            | Self::Remove { .. }
            | Self::Quarantine { .. }
            | Self::ReleaseQuarantine { .. }
            | Self::ClearFinding { .. }
            | Self::Reimage { .. }
            | Self::OrderTask { .. }
            | Self::ResumeTask { .. }
            | Self::Validate { .. }
            | Self::UpdateAgent { .. }
            | Self::ResetGpu { .. } => Action::ManageNodes,
            Self::Enroll(_)
            | Self::Recover(_)
            | Self::Renew { .. }
            | Self::Poll { .. }
            | Self::Heartbeat { .. }
            | Self::Report { .. }
            | Self::Identify { .. }
            | Self::PresentToken { .. } => Action::SpeakForNode,
        }
    }
}

impl Node {
    pub(super) fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Register { .. } => Err(Rejection::Exists),
            Request::Revise { host, port, ssh_username, probe, metadata, if_version } => {
                self.revise((host, port, ssh_username), probe, metadata, if_version, ctx)
            }
            Request::IssueToken { token_id, token_sha256, ttl_seconds } => {
                self.issue_token(token_id, token_sha256, ttl_seconds, ctx)
            }
            Request::Reissue(asked) => self.reissue(*asked, ctx),
            Request::Retire { reason, drain } => self.retire(&reason, drain, ctx),
            Request::Reactivate { reason } => self.reactivate(&reason, ctx),
            Request::Remove { reason } => self.remove(&reason, ctx),
            Request::Quarantine { reason } => self.quarantine(&reason, ctx),
            Request::ReleaseQuarantine { reason } => self.release_quarantine(&reason, ctx),
            Request::ClearFinding { finding_id, reason } => self.clear_finding(finding_id, &reason, ctx),
            Request::Reimage { reason } => self.order_reimage(&reason, ctx),
            Request::OrderTask { task_type, reason } => self.order_task(task_type, &reason, ctx),
            Request::ResumeTask { task_id, reason } => self.resume_task(task_id, &reason, ctx),
            Request::Validate { level, reason } => self.order_validation(level, &reason, ctx),
            Request::UpdateAgent { digest, force, reason } => self.order_update(digest, force, &reason, ctx),
            Request::ResetGpu { gpu_uuid, reason } => self.order_gpu_reset(&gpu_uuid, &reason, ctx),
            Request::Enroll(enrollment) => self.enroll(*enrollment, ctx),
            Request::Recover(recovery) => self.recover(*recovery, ctx),
            Request::Renew { serial, issued } => self.renew(&serial, issued, ctx),
            Request::Poll { serial } => self.poll(&serial, ctx),
            Request::Heartbeat { serial, seen, inventory, health } => {
                self.heartbeat(&serial, *seen, *inventory, *health, ctx)
            }
            Request::Report { serial, task_id, attempt, verdict, output, unproved } => {
                let mut step = self.report(&serial, (task_id, attempt), verdict, (output, unproved.as_deref()), ctx)?;
                step.why = report_reasons::why(task_id, &step.why);
                Ok(step)
            }
            Request::Identify { serial } => {
                self.check_certificate(&serial, ctx)?;
                Ok(Transition::stay(Reply::Done))
            }
            Request::PresentToken { token_sha256 } => {
                self.check_token(&token_sha256, ctx)?;
                Ok(Transition::stay(Reply::Done))
            }
        }
    }
}

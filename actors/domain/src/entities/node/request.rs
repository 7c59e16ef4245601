//! What administrators and the agent ask of a node.

use super::{
    AgentContact, CertificateRecord, IdentityRecovery, NodeHealth, PreparedMachine, ProbeOutcome, ProofGap,
    Registration, ReportedInventory, TaskOutcome,
};
use crate::authz::Action;
use crate::id::{FindingId, TaskId, TokenId};
use crate::metadata::MetadataPatch;
use crate::package_digest::PackageDigest;
use crate::state_machine;
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What administrators ask of a node, and the messages of its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[derive(strum::IntoStaticStr, strum::VariantNames, strum::EnumDiscriminants)]
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

/// An agent's enrollment, with the certificate that the edge has prepared for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrollment {
    pub token_sha256: [u8; 32],
    pub csr_sha256: [u8; 32],
    pub issued: CertificateRecord,
    pub recovery_public_key: String,
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
    pub inventory: ReportedInventory,
}

/// A token that replaces the node's token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reissue {
    pub token_id: TokenId,
    pub token_sha256: [u8; 32],
    pub ttl_seconds: Option<u32>,
    pub reason: String,
    /// Revokes the node's current certificates too, at once.
    pub revoke_current_certificate: bool,
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

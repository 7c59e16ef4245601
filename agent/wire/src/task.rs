//! Tasks that the control plane gives a node, and their results.
//!
//! A task is transmitted as a [`SignedEnvelope`] of type [`TASK_TYPE`]. The agent verifies the signature first ([`open`]), then whether
//! the task is for it and not expired ([`TaskPayload::check`]), and executes nothing outside the signed bytes.

use chrono::{DateTime, Utc};
use ed25519_dalek::SigningKey;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uuid::Uuid;

pub use crate::envelope::{EnvelopeSignatureError, KeySignature, SignedEnvelope};
pub use crate::inventory::DeviceRef;
use crate::package::Digest;
use crate::validation::ValidationLoad;
pub use crate::verifier_set::{KeyStatus, VerifierKey, VerifierSet, Verifiers};

/// Payload type of tasks.
pub const TASK_TYPE: &str = "application/vnd.gpuaas.task+json";

/// What the signature covers: one attempt of one task, on one node, until it expires.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskPayload {
    pub node_id: Uuid,
    pub task_id: Uuid,
    /// From 1; incremented when the control plane dispatches the task again.
    pub attempt: u32,
    pub issued_at: DateTime<Utc>,
    /// From this moment on the agent does not begin the task.
    pub expires_at: DateTime<Utc>,
    /// The request that caused the task; absent from control planes that do not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<TaskOrigin>,
    pub task: Task,
}

/// The correlation id and trace (W3C Trace Context) of a task, which the agent logs and returns with the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskOrigin {
    pub correlation_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

/// The work itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum Task {
    /// Set a tenant up on the node. Idempotent.
    #[serde(rename = "allocation.provision")]
    Provision(Provision),
    /// Remove a tenant and prove that nothing is left. Idempotent.
    #[serde(rename = "allocation.release")]
    Release(Release),
    /// Write a tenant's authorized keys, these and no others. Idempotent.
    #[serde(rename = "ssh_keys.reconcile")]
    ReconcileSshKeys(ReconcileSshKeys),
    /// Start a tenant's terminal session. Not idempotent: the shell that it started may be in use.
    #[serde(rename = "terminal.open")]
    OpenTerminal(OpenTerminal),
    /// Check whether the node is fit for tenants. Idempotent.
    #[serde(rename = "node.validate")]
    Validate {
        /// Absent: no load is applied, as control planes want that do not know of any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        load: Option<ValidationLoad>,
    },
    /// Collect diagnostics of the node and its tenants. Idempotent.
    #[serde(rename = "diagnostics.collect")]
    Diagnose {},
    /// Reboot the machine. It must not be executed twice.
    #[serde(rename = "node.reboot")]
    Reboot(Reboot),
    /// Reset a GPU that no tenant holds. Idempotent.
    #[serde(rename = "node.gpu_reset")]
    ResetGpu(ResetGpu),
    /// Replace the agent by the version of a package. The agent that runs afterwards reports the result.
    #[serde(rename = "agent.update")]
    UpdateAgent(UpdateAgent),
}

/// Parameters of `agent.update`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateAgent {
    /// Of the package, which is pulled from the repository of the node's bundle.
    pub digest: Digest,
    /// Also a version that was rolled back on this machine.
    #[serde(default)]
    pub force: bool,
    /// How long the new agent may take to be answered by the control plane, before the one of before is put back.
    pub commit_seconds: u32,
}

/// Parameters of `node.reboot`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reboot {
    /// The boot that is to end. In any other boot the machine was rebooted already.
    pub boot_id: Uuid,
}

/// Parameters of `node.gpu_reset`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetGpu {
    /// As NVIDIA's driver names it.
    pub gpu_uuid: String,
}

/// Parameters of `allocation.provision`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provision {
    pub allocation_id: Uuid,
    /// Login name of the tenant on the node.
    pub user_name: String,
    /// OpenSSH public keys, one each, without options.
    pub authorized_keys: Vec<String>,
    pub devices: Vec<DeviceRef>,
    pub sku: String,
    /// When the control plane gives up the attempt.
    pub deadline_at: DateTime<Utc>,
}

/// Parameters of `ssh_keys.reconcile`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReconcileSshKeys {
    pub allocation_id: Uuid,
    pub user_name: String,
    /// OpenSSH public keys, one each, without options. Empty: no login.
    pub authorized_keys: Vec<String>,
}

/// Parameters of `allocation.release`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    pub allocation_id: Uuid,
    pub user_name: String,
    pub devices: Vec<DeviceRef>,
}

/// Parameters of `terminal.open`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenTerminal {
    pub session_id: Uuid,
    pub allocation_id: Uuid,
    pub user_name: String,
    /// The end of the session's lifetime: from then on the agent keeps nothing of it, whatever it is asked.
    pub ends_at: DateTime<Utc>,
    /// The terms of its recording; a control plane that sends none wants no recording.
    #[serde(default)]
    pub recording: crate::recording::RecordTerms,
}

impl Task {
    /// The value of `type` on the wire.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Provision(_) => "allocation.provision",
            Self::Release(_) => "allocation.release",
            Self::ReconcileSshKeys(_) => "ssh_keys.reconcile",
            Self::OpenTerminal(_) => "terminal.open",
            Self::Validate { .. } => "node.validate",
            Self::Diagnose {} => "diagnostics.collect",
            Self::Reboot(_) => "node.reboot",
            Self::ResetGpu(_) => "node.gpu_reset",
            Self::UpdateAgent(_) => "agent.update",
        }
    }

    /// The allocation it is about, if any.
    #[must_use]
    pub fn allocation_id(&self) -> Option<Uuid> {
        match self {
            Self::Provision(provision) => Some(provision.allocation_id),
            Self::Release(release) => Some(release.allocation_id),
            Self::ReconcileSshKeys(reconcile) => Some(reconcile.allocation_id),
            Self::OpenTerminal(open) => Some(open.allocation_id),
            Self::Validate { .. } | Self::Diagnose {} | Self::Reboot(_) | Self::ResetGpu(_) | Self::UpdateAgent(_) => {
                None
            }
        }
    }

    /// Whether an attempt with an unknown outcome may be executed again.
    #[must_use]
    pub fn is_idempotent(&self) -> bool {
        match self {
            Self::Provision(_)
            | Self::Release(_)
            | Self::ReconcileSshKeys(_)
            | Self::Validate { .. }
            | Self::Diagnose {}
            | Self::ResetGpu(_) => true,
            Self::OpenTerminal(_) | Self::Reboot(_) | Self::UpdateAgent(_) => false,
        }
    }
}

/// Why a correctly signed task is not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskRefusal {
    #[error("task {task_id} is for node {for_node}, this is node {this_node}")]
    ForAnotherNode { task_id: Uuid, for_node: Uuid, this_node: Uuid },
    #[error("task {task_id} attempt {attempt} expired at {expires_at}")]
    Expired { task_id: Uuid, attempt: u32, expires_at: DateTime<Utc> },
}

impl TaskPayload {
    /// Whether node `node_id` may start this task at `now`.
    ///
    /// # Errors
    /// [`TaskRefusal`] when it is for another node or expired.
    pub fn check(&self, node_id: Uuid, now: DateTime<Utc>) -> Result<(), TaskRefusal> {
        if self.node_id != node_id {
            let (task_id, for_node) = (self.task_id, self.node_id);
            return Err(TaskRefusal::ForAnotherNode { task_id, for_node, this_node: node_id });
        }
        if now >= self.expires_at {
            let (task_id, attempt, expires_at) = (self.task_id, self.attempt, self.expires_at);
            return Err(TaskRefusal::Expired { task_id, attempt, expires_at });
        }
        Ok(())
    }
}

/// Signs a task.
///
/// # Errors
/// The payload does not serialise, which never happens for these types.
pub fn sign(key: &SigningKey, key_id: &str, payload: &TaskPayload) -> Result<SignedEnvelope, serde_json::Error> {
    Ok(SignedEnvelope::sign(key, key_id, TASK_TYPE, serde_json::to_vec(payload)?))
}

/// Why an envelope is not a task that this agent can read and trust.
#[derive(Debug, thiserror::Error)]
pub enum TaskOpenError {
    #[error("the task's signature is refused")]
    Signature(#[from] EnvelopeSignatureError),
    #[error("the signed payload is of type {found:?}, not {TASK_TYPE}")]
    NotATask { found: String },
    #[error("the signed task is of type {kind:?}, which this agent (protocol {}) does not know", crate::PROTOCOL)]
    UnknownKind { kind: String, bound: Box<TaskHeader> },
    #[error("the signed task does not parse")]
    Malformed(#[source] serde_json::Error),
}

/// The signed fields beside the work itself: enough to report that a task of an unknown type is not executed.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TaskHeader {
    pub node_id: Uuid,
    pub task_id: Uuid,
    pub attempt: u32,
    pub expires_at: DateTime<Utc>,
    #[serde(default)]
    pub origin: Option<TaskOrigin>,
}

/// Verifies the signature and reads the task from the signed bytes.
///
/// # Errors
/// [`TaskOpenError`] when it is not signed by a trusted key, is of another type, or is a task of an unknown type.
pub fn open(envelope: &SignedEnvelope, verifiers: &Verifiers) -> Result<TaskPayload, TaskOpenError> {
    let bytes = verifiers.verify(envelope)?;
    if envelope.payload_type != TASK_TYPE {
        return Err(TaskOpenError::NotATask { found: envelope.payload_type.clone() });
    }
    strict_json::tagged::from_slice(&bytes).map_err(|error| match (kind_of(&bytes), strict_json::from_slice(&bytes)) {
        (Some(kind), Ok(bound)) if !TASK_TYPES.contains(&kind.as_str()) => {
            TaskOpenError::UnknownKind { kind, bound: Box::new(bound) }
        }
        (Some(_) | None, _) => TaskOpenError::Malformed(error),
    })
}

/// The types of task that an agent of this build executes. It sends them with its heartbeats, and is given no others.
pub const TASK_TYPES: [&str; 9] = [
    "allocation.provision",
    "allocation.release",
    "ssh_keys.reconcile",
    "terminal.open",
    "node.validate",
    "diagnostics.collect",
    "node.reboot",
    "node.gpu_reset",
    "agent.update",
];

fn kind_of(bytes: &[u8]) -> Option<String> {
    let value: Value = strict_json::from_slice(bytes).ok()?;
    Some(value.get("task")?.get("type")?.as_str()?.to_owned())
}

/// Body of `POST /internal/v1/nodes/{id}/tasks/{task_id}/result`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskResult {
    pub attempt: u32,
    pub status: TaskStatus,
    /// The output of the task; its shape depends on the task's type.
    #[serde(default)]
    pub output: Map<String, Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<TaskError>,
    /// The signed [`crate::cleanup_proof::CleanupReport`] of a release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<SignedEnvelope>,
    pub started_at: DateTime<Utc>,
    pub finished_at: DateTime<Utc>,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TaskStatus {
    Succeeded,
    Failed,
}

/// Why an attempt failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskError {
    pub code: String,
    pub message: String,
}

/// Answer (200) to a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResultAnswer {
    pub recorded: ResultReceipt,
}

/// Whether the result was new to the control plane. In both cases it is stored there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResultReceipt {
    New,
    Already,
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;
    use crate::verifier_set::PublicKey;

    fn key() -> SigningKey {
        SigningKey::from_bytes(&[1; 32])
    }

    fn verifiers() -> Verifiers {
        let key = VerifierKey::new(PublicKey::from(&key()), KeyStatus::Active);
        Verifiers::trusting(VerifierSet { version: 0, keys: vec![key], signatures: Vec::new() }).unwrap()
    }

    fn payload() -> TaskPayload {
        let issued_at = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        TaskPayload {
            node_id: Uuid::from_u128(1),
            task_id: Uuid::from_u128(2),
            attempt: 1,
            issued_at,
            expires_at: issued_at + TimeDelta::minutes(10),
            origin: None,
            task: Task::Validate { load: None },
        }
    }

    fn signed(payload: &TaskPayload) -> SignedEnvelope {
        sign(&key(), &PublicKey::from(&key()).key_id(), payload).unwrap()
    }

    #[test]
    fn a_signed_task_opens_to_what_was_signed() {
        assert_eq!(open(&signed(&payload()), &verifiers()).unwrap(), payload());
    }

    #[test]
    fn a_task_altered_in_any_byte_is_refused() {
        let good = signed(&payload());
        for position in 0..good.payload.len() {
            let mut altered = good.clone();
            altered.payload[position] ^= 1;
            assert!(matches!(
                open(&altered, &verifiers()),
                Err(TaskOpenError::Signature(EnvelopeSignatureError::Mismatch))
            ));
        }
    }

    #[test]
    fn unsigned_or_foreign_signed_task_is_refused() {
        let stranger = sign(&SigningKey::from_bytes(&[9; 32]), "stranger", &payload()).unwrap();
        assert!(matches!(
            open(&stranger, &verifiers()),
            Err(TaskOpenError::Signature(EnvelopeSignatureError::UnknownKey))
        ));
        let mut bare = signed(&payload());
        bare.signatures.clear();
        assert!(matches!(open(&bare, &verifiers()), Err(TaskOpenError::Signature(EnvelopeSignatureError::UnknownKey))));
    }

    #[test]
    fn another_signed_message_does_not_pass_for_a_task() {
        let id = PublicKey::from(&key()).key_id();
        let bytes = serde_json::to_vec(&payload()).unwrap();
        let other = SignedEnvelope::sign(&key(), &id, crate::verifier_set::VERIFIER_SET_TYPE, bytes);
        assert!(matches!(open(&other, &verifiers()), Err(TaskOpenError::NotATask { .. })));
    }

    #[test]
    fn a_kind_of_task_from_a_newer_control_plane_is_named_in_the_refusal() {
        let id = PublicKey::from(&key()).key_id();
        let mut value = serde_json::to_value(payload()).unwrap();
        value["task"] = serde_json::json!({"type": "node.sing"});
        let envelope = SignedEnvelope::sign(&key(), &id, TASK_TYPE, serde_json::to_vec(&value).unwrap());
        assert!(
            matches!(open(&envelope, &verifiers()), Err(TaskOpenError::UnknownKind { kind, bound }) if kind == "node.sing" && bound.task_id == payload().task_id)
        );
    }

    #[test]
    fn a_field_that_a_newer_control_plane_adds_is_ignored() {
        let id = PublicKey::from(&key()).key_id();
        let mut value = serde_json::to_value(payload()).unwrap();
        value["priority"] = 7.into();
        let envelope = SignedEnvelope::sign(&key(), &id, TASK_TYPE, serde_json::to_vec(&value).unwrap());
        assert_eq!(open(&envelope, &verifiers()).unwrap(), payload());
    }

    #[test]
    fn a_task_for_another_node_is_refused() {
        let task = payload();
        assert!(matches!(
            task.check(Uuid::from_u128(99), task.issued_at),
            Err(TaskRefusal::ForAnotherNode { for_node, .. }) if for_node == task.node_id
        ));
    }

    #[test]
    fn a_task_is_refused_from_the_moment_it_expires() {
        let task = payload();
        let node = task.node_id;
        assert_eq!(task.check(node, task.expires_at - TimeDelta::milliseconds(1)), Ok(()));
        assert!(matches!(task.check(node, task.expires_at), Err(TaskRefusal::Expired { .. })));
    }

    #[test]
    fn every_kind_is_listed_under_its_name() {
        for task in [Task::Validate { load: None }, Task::Diagnose {}, Task::Reboot(Reboot { boot_id: Uuid::nil() })] {
            let value = serde_json::to_value(&task).unwrap();
            assert_eq!(value["type"], task.kind());
            assert!(TASK_TYPES.contains(&task.kind()));
        }
    }
}

//! Liveness: an agent's heartbeat at the interval that the control plane sets.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::finding::{AcceptedFinding, Finding};
use crate::inventory::NodeInventory;
use crate::package::Digest;
use crate::verifier_set::VerifierSet;

/// Body of `POST /internal/v1/nodes/{id}/heartbeat`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The kernel's boot id. A different one means that the machine was restarted.
    pub boot_id: Uuid,
    /// Made at the start of the agent's process; the same in its polls. Two that alternate are two copies of one identity. One of [`LATER_FIELDS`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<Uuid>,
    pub agent_version: String,
    /// The digest of the package that the agent is of; absent where no package installed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package_digest: Option<Digest>,
    pub protocol: u16,
    pub sent_at: DateTime<Utc>,
    pub inventory: NodeInventory,
    pub telemetry: Telemetry,
    pub health: HealthReport,
    /// Highest verifier set that the agent has accepted; the bundle's keys are version 0.
    pub verifier_set_version: u64,
    /// Tasks whose effect is in flight.
    pub running: Vec<RunningTask>,
    /// [`fingerprint`](crate::bundle::fingerprint) of the node-CA bundle that the agent has stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_ca_bundle_fingerprint: Option<String>,
    /// The types of task that the agent executes ([`TASK_TYPES`](crate::task::TASK_TYPES)). An agent that sends none gets those of its
    /// protocol version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_types: Option<Vec<String>>,
    /// What the health probes found, at most [`MAX_FINDINGS`](crate::finding::MAX_FINDINGS). An agent that sends the field leaves the
    /// judgement to the control plane, which then does not judge by `health`; an agent that sends none is judged by `health`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub findings: Option<Vec<Finding>>,
}

/// The fields that were added to a heartbeat within this generation of the protocol. A control plane of an earlier release refuses what it does not
/// know, so an agent sends them after an answer that names them all. An enrollment has none of them. A heartbeat without `session` has none either:
/// the control plane stores the others as they were reported last.
pub const LATER_FIELDS: [&str; 3] = ["session", "inventory.gpus.topology", "inventory.tenant_devices"];

impl Heartbeat {
    /// As a control plane of an earlier release reads it.
    #[must_use]
    pub fn without_later_fields(self) -> Self {
        Self { session: None, inventory: self.inventory.without_later_fields(), ..self }
    }
}

/// A task in flight on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningTask {
    pub task_id: Uuid,
    pub attempt: u32,
}

/// Load at the moment of the heartbeat. What could not be measured is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Telemetry {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage_used_gib: Option<u64>,
    #[serde(default)]
    pub gpus: Vec<GpuTelemetry>,
}

/// Load of one GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuTelemetry {
    pub uuid: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_mib: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_milliwatts: Option<u32>,
}

/// The agent's judgement of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthReport {
    pub status: HealthLevel,
    #[serde(default)]
    pub alerts: Vec<Alert>,
}

/// The worst of a node's alerts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthLevel {
    Ok,
    Warning,
    Critical,
}

/// One finding of a health probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alert {
    pub probe_id: String,
    /// Its subject, such as a GPU's UUID or a path.
    pub target: String,
    pub since: DateTime<Utc>,
    pub classifications: Vec<Classification>,
    /// For the operator.
    pub message: String,
    /// For the tenant; contains no internals.
    pub tenant_message: String,
}

/// What an alert requests of the control plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Classification {
    PreventAllocation,
    Evacuate,
    BillingCredit,
    Warn,
}

/// Answer (200) to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatAnswer {
    pub server_time: DateTime<Utc>,
    /// Seconds until the next heartbeat is expected.
    pub next_heartbeat_seconds: u32,
    /// Every verifier set above the version in the heartbeat, lowest first.
    #[serde(default)]
    pub verifier_sets: Vec<VerifierSet>,
    pub poll: PollSettings,
    /// The authorities that certify nodes, PEM, if the agent has stored others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_ca_bundle_pem: Option<String>,
    /// The authority of the agent's certificate is retired: the certificate is to be renewed at some moment within this time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_within_seconds: Option<u32>,
    /// Findings about privileges that an operator has accepted: what they are about is the agent's new baseline. Repeated until the agent does
    /// not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accepted_findings: Vec<AcceptedFinding>,
    /// Those of [`LATER_FIELDS`] that this control plane reads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub later_fields: Vec<String>,
}

impl HeartbeatAnswer {
    /// Whether the control plane reads all of [`LATER_FIELDS`].
    #[must_use]
    pub fn reads_later_fields(&self) -> bool {
        LATER_FIELDS.iter().all(|field| self.later_fields.iter().any(|read| read == field))
    }
}

/// How the agent is to poll for tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PollSettings {
    /// `timeout_seconds` of the task wait, 1 to 55.
    pub timeout_seconds: u32,
    /// Longest pause between failed polls.
    pub backoff_max_seconds: u32,
}

impl Default for PollSettings {
    fn default() -> Self {
        Self { timeout_seconds: 30, backoff_max_seconds: 30 }
    }
}

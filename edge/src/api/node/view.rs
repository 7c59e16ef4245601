//! The representation of a node in the API (decisions 3, *Node*).

use chrono::{DateTime, Utc};
use domain::node::{
    GpuReset, HardwareComparison, Node, NodeFinding, NodeHealthStatus, NodeRepair, OnboardingMode, ProvidedMachine,
    QuarantineHold, Reimage, ReportedGpu,
};
use domain::{Machine, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Mode;
use super::agent_update::AgentUpdateView;
use super::validation::{Level, ValidationView};
use crate::api::request_fields::{Labels, ResourceName};
use crate::app_state::read_model::StoredEntity;

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Node)]
pub(in crate::api) struct NodeView {
    id: Uuid,
    #[schema(value_type = Option<ResourceName>)]
    name: Option<String>,
    #[schema(value_type = Labels)]
    labels: BTreeMap<String, String>,
    host: String,
    port: u16,
    ssh_username: String,
    /// OpenSSH's `SHA256:` form.
    ssh_key_fingerprint: String,
    /// The SKU's name.
    sku: String,
    region_code: String,
    gpus_total: u32,
    /// How many GPUs a new allocation could get now: 0 where the node takes none.
    gpus_free: u32,
    /// Why it takes no new allocation; null where it does.
    unschedulable_reason: Option<String>,
    onboarding_mode: Mode,
    state: StateName,
    state_reason: ReasonView,
    /// Why it is in quarantine, oldest first: it returns to its former state when the last of these is taken back. `state_reason` is the
    /// first of them.
    quarantine_holds: Vec<HoldView>,
    /// The last repair by itself; null where there was none.
    repair: Option<RepairView>,
    /// The last reset of each GPU that the service has reset lately.
    gpu_resets: Vec<GpuResetView>,
    state_entered_at: DateTime<Utc>,
    /// The deadline of the state, or of a task that must not be executed twice; null where neither has one.
    state_deadline_at: Option<DateTime<Utc>>,
    /// True after the deadline.
    overdue: bool,
    /// Null where no probe was asked for.
    probe: Option<ProbeView>,
    health: HealthView,
    /// The machine as the agent reports it; null before the first heartbeat.
    inventory: Option<InventoryView>,
    /// What the SKU promises of the GPUs and expects of the rest of the machine, beside what was found.
    hardware: Vec<HardwareComparisonView>,
    /// Null before the first heartbeat.
    agent: Option<AgentView>,
    /// The latest update of its agent that is remembered; null where there is none.
    agent_update: Option<AgentUpdateView>,
    /// Its machine at the bare-metal provider; null where it has none there.
    machine: Option<MachineView>,
    /// The reinstallation of its machine that is not over; null where there is none.
    reimage: Option<ReimageView>,
    /// The last validation with load; null where there was none.
    validation: Option<ValidationView>,
    /// The level of the validation that it has to pass, since it failed one of that level; null where it has to pass none.
    failed_validation_level: Option<Level>,
    /// Raised by every change; the `ETag` too.
    generation: i64,
    created_at: DateTime<Utc>,
    updated_at: DateTime<Utc>,
}

/// A node's states, from its registration to its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[schema(as = NodeState)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum StateName {
    Registered,
    /// The spelling of the specification.
    #[serde(rename = "bootstrap-issued")]
    BootstrapIssued,
    Enrolling,
    Active,
    Offline,
    Draining,
    Quarantined,
    Retired,
    Removing,
    Removed,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeReason)]
pub(in crate::api) struct ReasonView {
    code: String,
    message: String,
}

/// The result of probing the node's address at its registration.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeProbe)]
pub(in crate::api) struct ProbeView {
    result: ProbeResult,
    checked_at: DateTime<Utc>,
    error: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeProbeResult)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum ProbeResult {
    Reachable,
    Unreachable,
}

/// The health that the agent reports.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeHealth)]
pub(in crate::api) struct HealthView {
    status: HealthName,
    /// What an older agent judges itself; of an agent that reports findings, the open ones in the same form.
    #[schema(value_type = Vec<Object>)]
    alerts: Vec<Value>,
    /// What the agent's probes found, and how the service judges it.
    findings: Vec<FindingView>,
}

/// What the agent reports of the machine.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeInventory)]
pub(in crate::api) struct InventoryView {
    gpus: Vec<GpuView>,
    /// Where the data of the GPUs is from: `nvml`, `simulated` or `none`.
    gpu_source: String,
    /// True where the node takes several tenants at a time, each with the GPUs of its own alone.
    isolates_devices: bool,
    cpu_model: Option<String>,
    /// Logical processors. This, the memory and the storage are 0 where the agent cannot read them.
    cpu_cores: u32,
    memory_mib: u64,
    storage_gib: u64,
    driver_version: Option<String>,
    /// The device nodes beside those of GPUs that each tenant may open, as `SVC_NODE_AGENT_TENANT_DEVICES` of the machine has them.
    tenant_devices: Vec<String>,
}

/// A GPU of the machine.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeGpu)]
pub(in crate::api) struct GpuView {
    index: u32,
    uuid: String,
    model: String,
    memory_mib: u64,
    /// The NUMA node of its slot; null where it is not known.
    numa_node: Option<u32>,
    /// GPUs with the same number are connected by NVLinks, directly or by switches; null where it has none.
    nvlink_domain: Option<u32>,
    /// The allocation that holds it.
    allocation_id: Option<Uuid>,
    /// True where no allocation holds it and nothing withholds it. The node has to take allocations, too.
    is_free: bool,
}

/// A part of the machine beside what is expected of it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeHardwareComparison)]
pub(in crate::api) struct HardwareComparisonView {
    #[schema(example = "memory of each GPU")]
    item: &'static str,
    expected: String,
    /// Null: the agent has not reported it.
    found: Option<String>,
    /// Null: it cannot be compared.
    is_enough: Option<bool>,
}

/// A hold of a quarantine.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = QuarantineHold)]
pub(in crate::api) struct HoldView {
    /// `health`, `drift`, `clone`, `release`, `validation`, `reimage`, `provider` or `administrator`. The first two are taken back when what they are about is
    /// over, where the agent reports findings; `validation` when the machine passes a later one that is as strict.
    author: &'static str,
    code: String,
    message: String,
    since_at: DateTime<Utc>,
}

/// A fault that the agent found, on one GPU or on the machine.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeFinding)]
pub(in crate::api) struct FindingView {
    id: Uuid,
    /// Such as `xid`.
    probe: String,
    /// Such as `79`.
    code: String,
    /// Null: the machine, or a GPU that the agent cannot name.
    gpu_uuid: Option<String>,
    /// What follows: `prevent_allocation`, `evacuate`, `billing_credit`, `quarantine`, `warn`. Nothing, where it is cleared.
    classes: Vec<&'static str>,
    /// `tenant`, `hardware`, `software` or `unknown`.
    cause: &'static str,
    /// What repairs it: `none`, `reset`, `reboot` or `operator`.
    repair: &'static str,
    meaning: &'static str,
    /// The pattern of the administrators' override that judges it in place of the table; null where none does.
    overridden_by: Option<String>,
    /// The latest occurrence, as the agent describes it.
    detail: String,
    /// How often it occurred in the boot.
    count: u64,
    /// By the machine's clock.
    first_at: DateTime<Utc>,
    /// By the machine's clock.
    last_at: DateTime<Utc>,
    boot_id: String,
    /// When it occurred first since it was cleared last, by the service's clock.
    opened_at: DateTime<Utc>,
    /// Null where it is open.
    cleared_at: Option<DateTime<Utc>>,
    /// The reason of the administrator who cleared it; null where none did.
    cleared_reason: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeHealthStatus)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum HealthName {
    /// Nothing was reported yet.
    Unknown,
    Ok,
    Warning,
    Critical,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeAgent)]
pub(in crate::api) struct AgentView {
    version: String,
    /// Of the package that the agent is of; null where no package installed it.
    package_digest: Option<String>,
    protocol: u16,
    /// Lags by up to a third of policy `node.offline_after_seconds`.
    last_seen_at: DateTime<Utc>,
    boot_id: String,
    /// When the youngest of its certificates ends; null where it has none.
    cert_not_after: Option<DateTime<Utc>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeMachine)]
pub(in crate::api) struct MachineView {
    /// The provider's id.
    system_id: String,
    /// `deploying`, `deployed`, `failing`, `failed`, `releasing` or `released`: what the provider has to do, or has done.
    step: &'static str,
    step_entered_at: DateTime<Utc>,
    /// The provider's last status, or why it could not be asked.
    status: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeReimage)]
pub(in crate::api) struct ReimageView {
    ordered_at: DateTime<Utc>,
    /// `installation`, `validation` or `refused`.
    stage: &'static str,
}

/// A repair of health findings by the service.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeRepair)]
pub(in crate::api) struct RepairView {
    /// `rebooting`, `validating`, `succeeded`, or `awaits_operator` where the attempts of policy `node.repair_attempts` are used up.
    phase: &'static str,
    /// Attempts within a day.
    attempts: u32,
    /// When the last attempt began.
    begun_at: DateTime<Utc>,
}

/// A reset of one GPU by the service.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = NodeGpuReset)]
pub(in crate::api) struct GpuResetView {
    gpu_uuid: String,
    /// `resetting`, `validating`, `succeeded`; `failed` where it was not reset or a fault is there again; `unfit` where it failed its validation
    /// afterwards. After the last two the machine is rebooted, once no tenant is on it.
    phase: &'static str,
    begun_at: DateTime<Utc>,
    /// Why it failed; null where it did not.
    error: Option<String>,
}

impl NodeView {
    pub(in crate::api) fn of(stored: &StoredEntity<Node>, now: Timestamp) -> Self {
        let node = &stored.it;
        let registration = node.machine.registration.clone();
        let deadline = node.deadline();
        Self {
            id: node.id.0,
            name: registration.metadata.name,
            labels: registration.metadata.labels,
            host: registration.host,
            port: registration.port,
            ssh_username: registration.ssh_username,
            ssh_key_fingerprint: registration.ssh_key_fingerprint,
            sku: registration.sku.name,
            region_code: registration.region_code,
            gpus_total: registration.gpus_total,
            gpus_free: node.gpus_free(),
            unschedulable_reason: node.not_schedulable(),
            onboarding_mode: match registration.onboarding_mode {
                OnboardingMode::Manual => Mode::Manual,
                OnboardingMode::Maas => Mode::Maas,
            },
            state: StateName::of(node),
            state_reason: ReasonView {
                code: node.lifecycle.reason.code.as_str().to_owned(),
                message: node.lifecycle.reason.message.clone(),
            },
            quarantine_holds: node.lifecycle.quarantine_holds().into_iter().map(HoldView::of).collect(),
            repair: node.repair.of_machine.as_ref().map(RepairView::of),
            gpu_resets: node.repair.gpu_resets.iter().map(|(uuid, reset)| GpuResetView::of(uuid, reset)).collect(),
            state_entered_at: node.lifecycle.entered_at,
            overdue: deadline.as_ref().is_some_and(|deadline| deadline.at < now),
            state_deadline_at: deadline.map(|deadline| deadline.at),
            probe: node.machine.probe.as_ref().map(ProbeView::of),
            health: HealthView {
                status: node.health.reported.status.into(),
                alerts: node.health.alerts(),
                findings: node.health.findings.iter().map(FindingView::of).collect(),
            },
            inventory: InventoryView::of(node),
            hardware: node.compared_hardware().into_iter().map(HardwareComparisonView::of).collect(),
            agent: AgentView::of(node),
            agent_update: AgentUpdateView::of(node),
            machine: node.machine.provided.as_ref().map(MachineView::of),
            reimage: node.machine.reimage.as_ref().map(ReimageView::of),
            validation: node.validation.last.as_deref().map(ValidationView::of),
            failed_validation_level: node.failed_level().map(Level::of),
            generation: stored.version,
            created_at: stored.created_at,
            updated_at: stored.updated_at,
        }
    }
}

impl InventoryView {
    fn of(node: &Node) -> Option<Self> {
        let inventory = node.machine.inventory.as_ref()?;
        let free: BTreeSet<_> = node.free_gpus().map(|gpu| &gpu.uuid).collect();
        let holders: BTreeMap<_, _> = node
            .tenancy
            .holds
            .iter()
            .flat_map(|(allocation, hold)| hold.placed.devices.iter().map(|device| (&device.uuid, allocation.0)))
            .collect();
        let gpu = |gpu: &ReportedGpu| GpuView {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            model: gpu.model.clone(),
            memory_mib: gpu.memory_mib,
            numa_node: gpu.locality.numa_node,
            nvlink_domain: gpu.locality.nvlink_domain,
            allocation_id: holders.get(&gpu.uuid).copied(),
            is_free: free.contains(&gpu.uuid),
        };
        Some(Self {
            gpus: inventory.gpus.iter().map(gpu).collect(),
            gpu_source: inventory.gpu_source.clone(),
            isolates_devices: inventory.isolates_devices,
            cpu_model: inventory.cpu_model.clone(),
            cpu_cores: inventory.cpu_cores,
            memory_mib: inventory.memory_mib,
            storage_gib: inventory.storage_gib,
            driver_version: inventory.driver_version.clone(),
            tenant_devices: inventory.tenant_devices.clone(),
        })
    }
}

impl HardwareComparisonView {
    fn of(HardwareComparison { item, expected, found, is_enough }: HardwareComparison) -> Self {
        Self { item, expected, found, is_enough }
    }
}

impl GpuResetView {
    fn of(gpu_uuid: &str, reset: &GpuReset) -> Self {
        let (phase, error) = (reset.phase.name(), reset.phase.error().map(str::to_owned));
        Self { gpu_uuid: gpu_uuid.to_owned(), phase, begun_at: reset.begun_at, error }
    }
}

impl RepairView {
    fn of(repair: &NodeRepair) -> Self {
        Self { phase: repair.phase.name(), attempts: repair.attempts, begun_at: repair.begun_at }
    }
}

impl HoldView {
    fn of(hold: QuarantineHold) -> Self {
        let (author, code) = (hold.author.into(), hold.code.as_str().to_owned());
        Self { author, code, message: hold.message, since_at: hold.since_at }
    }
}

impl FindingView {
    fn of(finding: &NodeFinding) -> Self {
        let (rule, reported) = (finding.rule(), &finding.reported);
        let classes = if finding.is_open() { finding.classes() } else { Vec::new() };
        Self {
            id: finding.id.0,
            probe: reported.probe.clone(),
            code: reported.code.clone(),
            gpu_uuid: reported.gpu_uuid.clone(),
            classes: classes.into_iter().map(Into::into).collect(),
            cause: finding.cause().into(),
            repair: finding.repair().into(),
            meaning: rule.meaning,
            overridden_by: finding.overridden.as_ref().map(|judgement| judgement.pattern.to_string()),
            detail: reported.detail.clone(),
            count: reported.count,
            first_at: reported.first_at,
            last_at: reported.last_at,
            boot_id: reported.boot_id.clone(),
            opened_at: finding.opened_at,
            cleared_at: finding.cleared.as_ref().map(|cleared| cleared.at),
            cleared_reason: finding.cleared.as_ref().and_then(|cleared| cleared.reason.clone()),
        }
    }
}

impl MachineView {
    fn of(machine: &ProvidedMachine) -> Self {
        Self {
            system_id: machine.system_id.clone(),
            step: (&machine.step).into(),
            step_entered_at: machine.since,
            status: machine.status.clone(),
        }
    }
}

impl ReimageView {
    fn of(reimage: &Reimage) -> Self {
        Self { ordered_at: reimage.ordered_at, stage: (&reimage.stage).into() }
    }
}

impl StateName {
    const fn of(node: &Node) -> Self {
        use domain::node::Phase as L;
        match node.lifecycle.phase {
            L::Registered => Self::Registered,
            L::BootstrapIssued { .. } => Self::BootstrapIssued,
            L::Enrolling { .. } => Self::Enrolling,
            L::Active => Self::Active,
            L::Offline => Self::Offline,
            L::Draining { .. } => Self::Draining,
            L::Quarantined { .. } => Self::Quarantined,
            L::Retired => Self::Retired,
            L::Removing { .. } => Self::Removing,
            L::Removed => Self::Removed,
        }
    }

    /// The name of the state in the state machine.
    pub(super) const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl ProbeView {
    fn of(probe: &domain::node::ProbeOutcome) -> Self {
        Self {
            result: if probe.reachable { ProbeResult::Reachable } else { ProbeResult::Unreachable },
            checked_at: probe.checked_at,
            error: probe.error.clone(),
        }
    }
}

impl AgentView {
    fn of(node: &Node) -> Option<Self> {
        let seen = node.agent.contact.as_ref()?;
        Some(Self {
            version: seen.agent_version.clone(),
            package_digest: seen.package_digest.as_ref().map(ToString::to_string),
            protocol: seen.protocol,
            last_seen_at: seen.last_seen_at,
            boot_id: seen.boot_id.clone(),
            cert_not_after: node.identity.certificates.values().map(|certificate| certificate.not_after).max(),
        })
    }
}

impl From<NodeHealthStatus> for HealthName {
    fn from(status: NodeHealthStatus) -> Self {
        match status {
            NodeHealthStatus::Unknown => Self::Unknown,
            NodeHealthStatus::Ok => Self::Ok,
            NodeHealthStatus::Warning => Self::Warning,
            NodeHealthStatus::Critical => Self::Critical,
        }
    }
}

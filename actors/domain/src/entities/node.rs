//! A node: a GPU machine in the inventory, from its registration to its removal (specification, *Node*; decisions 4).
//!
//! ```text
//! registered ⇄ bootstrap-issued ⇄ enrolling ──first good poll──▶ active ⇄ offline
//!                                                                 │ ▲  │
//!                                        retire {drain} draining ◀┘ │  └▶ quarantined ──▶ (what it was)
//!                                                         │         │reactivate
//!                                                         ▼         │
//!                                                       retired ────┘──remove──▶ removing ──▶ removed
//! ```
//!
//! A node that never was active is retired too, which revokes its token and certificate; `remove` accepts retired nodes only.
//!
//! Only the node's actor assigns its GPUs, by UUID, and frees them only on the agent's clean-up proof. It stores the hashes of its token,
//! the serials of its certificates, and the tasks without a result; the edge handles secrets and signatures.

mod agent_contact;
mod agent_update;
mod evacuation;
mod explanation;
mod fact;
mod gpu_claims;
mod gpu_reset;
mod hardware_comparison;
mod hardware_drift;
mod health;
mod integrity;
mod invariants;
mod lifecycle;
mod onboarding;
mod provided_machine;
mod quarantine;
mod recovery;
mod reimage;
mod repair;
pub mod report_reasons;
mod request;
mod rollout_soak;
mod rollout_update;
mod sku_minimums;
mod ssh_access;
mod state_reason;
mod supported_task_types;
mod tasks;
mod tenancy;
mod terminal_tasks;
#[cfg(test)]
mod tests;
mod unproved_gpus;
mod validation;

use crate::audit::{AuditAction, AuditRecord, RefusalAudit};
use crate::event::{Event, GpuDevice};
use crate::hardware::{ExpectedHardware, Placement};
use crate::history::{HistoryEntry, Invariant};
use crate::id::{AllocationId, EntityKind, EntityRef, NodeId, TaskId};
use crate::metadata::Metadata;
use crate::state_machine::{
    self, AuditedRefusal, Deadline, IndexKeys, Machine, TickOnly, Timestamp, Transition, TransitionContext,
};
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

pub use crate::hardware::PromisedHardware;
pub use agent_contact::{
    AgentContact, LastHeartbeat, NodeHealth, NodeHealthStatus, ReportedGpu, ReportedInventory, ReportedSystem,
};
pub use agent_update::AgentUpdate;
pub use evacuation::Evacuation;
pub use fact::Fact;
pub use gpu_reset::{GpuReset, GpuResetPhase};
pub use hardware_comparison::HardwareComparison;
pub use health::{ClearedFinding, FindingReport, MAX_STORED_FINDINGS, NodeFinding, ReportedFinding};
pub use integrity::FindingAcceptance;
pub use onboarding::{CertificateRecord, Enrollment, EnrollmentToken, NodeCredentials, PreparedMachine};
pub use provided_machine::{OrderedImage, ProvidedMachine, ProviderReport, ProviderStep};
pub use quarantine::{HoldAuthor, QuarantineHold};
pub use recovery::{IdentityRecovery, Nonce, Reissue};
pub use reimage::{Reimage, ReimageStage};
pub use repair::{NodeRepair, RepairPhase};
pub use request::{CommandName, Request};
pub use rollout_soak::NodeSoak;
pub use rollout_update::{NodeRollout, rollout_term};
pub use ssh_access::{HoldSshAccess, SshKeysTask};
pub use state_reason::{StateCode, StateReason};
pub use tasks::{NodeTask, NodeTaskPhase};
pub use tenancy::{AgentTask, Hold, HoldPhase, PendingTask, TaskKind, TaskOutcome, TenantSlot, user_name};
pub use terminal_tasks::TerminalTask;
pub use unproved_gpus::{ProofGap, UnprovedGpu};
pub use validation::{NodeValidation, ValidationOrder};

/// The class of an alert that prevents new allocations on the node while it is active (decisions 7, *Health alert*).
const PREVENT_ALLOCATION: &str = "prevent_allocation";

/// The state of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub id: NodeId,
    pub registration: Registration,
    pub registered_at: Timestamp,
    pub life: Phase,
    pub entered_at: Timestamp,
    /// The reason of its state, as a code and a sentence.
    pub reason: StateReason,
    pub probe: Option<ProbeOutcome>,
    pub identity: NodeCredentials,
    pub inventory: Option<ReportedInventory>,
    /// What its SKU expects of its machine, as of the last contact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_hardware: Option<Box<ExpectedHardware>>,
    pub seen: Option<AgentContact>,
    pub health: NodeHealth,
    /// What the agent's health probes found, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<NodeFinding>,
    /// The repair of its findings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repair: Option<NodeRepair>,
    /// The last reset of each GPU, by UUID.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub gpu_resets: BTreeMap<String, GpuReset>,
    /// Why it is in quarantine. See [`Node::quarantine_holds`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    quarantine_holds: Vec<QuarantineHold>,
    /// The allocations that hold its GPUs.
    pub holds: BTreeMap<AllocationId, Hold>,
    /// GPUs without a tenant of which it is not proved that they are free of the last one, by UUID.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unproved_gpus: BTreeMap<String, UnprovedGpu>,
    /// The allocations whose failed release fences the node: it gets no tasks.
    pub fenced_by: BTreeSet<AllocationId>,
    /// Tasks of the node itself that administrators ordered, with their results.
    #[serde(default)]
    pub tasks: BTreeMap<TaskId, NodeTask>,
    #[serde(default)]
    pub refusals: RefusalAudit,
    /// UUIDs of GPUs that this node has claimed in the cluster.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub claimed_gpus: BTreeSet<String>,
    /// UUIDs of GPUs that the node reports and that another node has claimed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub contested_gpus: BTreeMap<String, NodeId>,
    /// Its machine at the bare-metal provider, where one has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<ProvidedMachine>,
    /// The reimage that is not over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reimage: Option<Reimage>,
    /// The last rollouts that have ordered an update of its agent, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rollouts: Vec<NodeRollout>,
    /// The last validation with load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Box<NodeValidation>>,
    /// The strictest level that it has failed and not passed since. See [`Node::failed_level`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed_validation: Option<ValidationLevel>,
}

/// A node's data from its administrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    pub host: String,
    pub port: u16,
    pub ssh_username: String,
    pub ssh_public_key: String,
    pub ssh_key_fingerprint: String,
    pub sku: PromisedHardware,
    pub region_code: String,
    pub gpus_total: u32,
    pub onboarding_mode: OnboardingMode,
    /// Its name and labels.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnboardingMode {
    Manual,
    Maas,
}

/// The outcome of the reachability probe at creation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeOutcome {
    pub reachable: bool,
    pub checked_at: Timestamp,
    pub error: Option<String>,
}

/// The states of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(PhaseName),
    doc = "The name of a node's state.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "kebab-case", const_into_str),
    serde(rename_all = "kebab-case")
)]
#[strum(serialize_all = "kebab-case", const_into_str)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    Registered,
    BootstrapIssued {
        until: Timestamp,
    },
    Enrolling {
        until: Timestamp,
    },
    Active,
    Offline,
    Draining {
        until: Timestamp,
    },
    /// It returns to `was` once the quarantine is released.
    Quarantined {
        was: Box<Phase>,
    },
    Retired,
    Removing {
        until: Timestamp,
    },
    Removed,
}

impl Phase {
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }

    /// True where the node has no identity yet that could have faults.
    #[must_use]
    pub const fn has_no_identity(&self) -> bool {
        matches!(self, Self::Registered | Self::BootstrapIssued { .. })
    }

    /// True where the node's identity is revoked for good.
    #[must_use]
    pub const fn is_gone(&self) -> bool {
        matches!(self, Self::Removing { .. } | Self::Removed)
    }
}

/// The commands of a node.
pub type Command = state_machine::AnyCommand<Request, Fact>;

state_machine::impl_command_from!(Request, Fact);

/// The reply to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// To an administrator: the node after the command.
    Node {
        node: Box<Node>,
    },
    /// To an administrator: the node's task, and the node after the command.
    Task {
        task_id: TaskId,
        node: Box<Node>,
    },
    TokenIssued {
        expires_at: Timestamp,
    },
    Enrolled {
        identity_generation: u32,
        recoveries_left: u32,
    },
    /// To a recovery with a state that another machine has recovered with: it gets no certificate, and the node is quarantined.
    CloneSuspected,
    /// To an enrollment of a reinstalled machine that is not the new system: it gets no certificate.
    SystemRefused,
    /// The tasks without a result, oldest first.
    Work {
        orders: Vec<AgentTask>,
    },
    /// When the next heartbeat is expected.
    #[serde(rename = "heard")]
    HeartbeatAccepted {
        next_heartbeat_seconds: u32,
        /// The reported findings that an administrator has accepted.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        accepted: Vec<FindingAcceptance>,
    },
    Reserved {
        placed: Placement,
    },
    Done,
}

/// Why a command was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such node")]
    NotFound,
    #[error("the node exists already")]
    Exists,
    #[error("a node in state {state} cannot {command}")]
    WrongState { state: PhaseName, command: CommandName },
    #[error("allocation {allocation_id} is on the node")]
    InUse { allocation_id: AllocationId },
    #[error("gpus_total is {given}, but the SKU has {promised} GPUs")]
    GpusDiffer { given: u32, promised: u32 },
    #[error("region {region_code} is not among the SKU's regions")]
    RegionNotAllowed { region_code: String },
    #[error("the node is at another version than the one in If-Match")]
    VersionDiffers,
    #[error("a node has at most {max} labels")]
    TooManyLabels { max: usize },
    #[error("the node is not in order: {why}")]
    NotInOrder { why: String },
    #[error("the node has no machine at a bare-metal provider")]
    NotProvided,
    #[error("the machine is that of node {node_id}")]
    MachineTaken { node_id: NodeId },

    // Enrollment: one public code; the cause is for logs and audit.
    #[error("the enrollment token does not hold: {cause}")]
    TokenRefused { cause: EnrollmentTokenFault },

    // Identity.
    #[error("the certificate is not one of the node's present identity")]
    CertificateUnknown,
    #[error("the certificate has expired")]
    CertificateExpired,
    #[error("the node was removed")]
    Removed,
    #[error("the failed release of allocation {allocation_id} fences the node")]
    Fenced { allocation_id: AllocationId },
    #[error("the node speaks for {id} alone")]
    ForeignNode { id: NodeId },

    #[error("the node has no such finding")]
    FindingUnknown,
    #[error("the node has no GPU {gpu_uuid}")]
    GpuUnknown { gpu_uuid: String, reported: Vec<String> },
    #[error("GPU {gpu_uuid} cannot be reset: {why}")]
    GpuNotReset { gpu_uuid: String, why: String },

    // Tasks.
    #[error("the node has no such task")]
    TaskUnknown,
    #[error("{task_type} is not ordered by administrators")]
    NotOrdered { task_type: TaskType },
    #[error("task {task_id} updates the agent")]
    UpdateInProgress { task_id: TaskId },
    #[error("the agent has not reported on {limit} tasks")]
    TooManyTasks { limit: usize },
    #[error("the task does not wait for an operator: {why}")]
    TaskDoesNotWait { why: String },
    #[error("the result is of attempt {given}; the task is at attempt {current}")]
    StaleAttempt { given: u32, current: u32 },

    // Placement.
    #[error("the node takes no allocation: {why}")]
    NotSchedulable { why: String },
    #[error("{free} GPUs are free, {wanted} are wanted")]
    NotEnoughGpus { free: u32, wanted: u32 },
}

/// Why a token is not valid; never sent to the agent that presented it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum EnrollmentTokenFault {
    #[error("no token was issued")]
    NoneIssued,
    #[error("it is another token")]
    Mismatch,
    #[error("it has expired")]
    Expired,
    #[error("it was used before")]
    Consumed,
    #[error("it was not used yet: it is for enrollment")]
    FirstBoot,
    #[error("it is bound to another recovery key")]
    KeyDiffers,
    #[error("the nonce has ended")]
    NonceExpired,
    #[error("the nonce was used before")]
    NonceSpent,
    #[error("the identity was never of that generation")]
    GenerationUnknown,
    #[error("no recovery of this identity is left")]
    RecoveriesUsedUp,
    #[error("too many recoveries were tried lately; try again in some minutes")]
    TooManyNonces,
}

impl Machine for Node {
    const KIND: EntityKind = EntityKind::Node;
    /// As much as other entities, thirty-two labels, and the keys and the terminals of a tenant for each of sixty-four GPUs.
    const SNAPSHOT_MOST: usize = 80 * 1024 + 64 * 128 * 1024;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I2, Invariant::I6, Invariant::I8];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Request(Request::Register { registration, probe, machine })) => {
                Self::register(*registration, probe, machine, ctx)
            }
            (None, _) => Err(Rejection::NotFound),
            (Some(node), command) => Ok(node.advance(command, ctx)?.with_claims()),
        }
    }

    fn decide_without(
        state: Option<&Self>,
        command: Command,
        holders: &BTreeMap<String, Uuid>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match state {
            Some(node) => node.advance_without(command, holders, ctx),
            // A new node claims nothing but its machine.
            None => match holders.values().next() {
                Some(holder) => Err(Rejection::MachineTaken { node_id: NodeId(*holder) }),
                None => Self::decide(state, command, ctx),
            },
        }
    }

    /// A refused enrollment or recovery: the caller gets one public code, the audit log records the true cause.
    fn audit_refusal(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        let (
            Command::Request(Request::Enroll(_) | Request::Recover(_)),
            Rejection::TokenRefused { .. } | Rejection::Removed,
        ) = (command, rejection)
        else {
            return None;
        };
        let next = Self { refusals: self.refusals.audited(ctx.now)?, ..self.clone() };
        let metadata = json!({ "cause": rejection.to_string(), "result": "refused" });
        Some(AuditedRefusal { next, audit: self.audit(AuditAction::NodesRefuseEnrollment, metadata) })
    }

    fn state(&self) -> &'static str {
        self.life.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        let of_its_life = match &self.life {
            Phase::BootstrapIssued { until } => {
                Some(Deadline::new(*until, "no agent has enrolled with the issued token"))
            }
            Phase::Enrolling { until } if self.reason.code == StateCode::InventoryMismatch => {
                Some(Deadline::new(*until, self.reason.message.clone()))
            }
            Phase::Enrolling { until } => Some(Deadline::new(*until, self.enrollment_waits_for())),
            Phase::Draining { until } => {
                let left = self.holds.len();
                Some(Deadline::new(*until, format!("{left} allocations have not ended")))
            }
            // The provider's deadline holds then.
            Phase::Removing { .. } if self.has_machine() => None,
            Phase::Removing { until } => Some(Deadline::new(*until, "the node's connections are being closed")),
            Phase::Registered
            | Phase::Active
            | Phase::Offline
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removed => None,
        };
        let others = self.task_deadline().into_iter().chain(self.ssh_keys_deadline()).chain(self.repair_deadline());
        let others = others.chain(self.monitoring_deadline());
        let of_machine = self.machine.as_ref().and_then(ProvidedMachine::deadline);
        let others = others.chain(of_machine).chain(self.reimage_deadline());
        of_its_life.into_iter().chain(others).min_by_key(|deadline| deadline.at)
    }

    fn timer(&self) -> Option<Timestamp> {
        let of_its_life = match &self.life {
            // The provider's release ends it.
            Phase::Removing { .. } if self.has_machine() => None,
            Phase::BootstrapIssued { until } | Phase::Enrolling { until } | Phase::Removing { until } => Some(*until),
            Phase::Active => self.seen.as_ref().map(|seen| seen.silent_at),
            // A drain ends with the last allocation, not at a time.
            Phase::Draining { .. }
            | Phase::Registered
            | Phase::Offline
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removed => None,
        };
        let of_tenants =
            self.next_resend_at().into_iter().chain(self.ssh_keys_due_at()).chain(self.evacuation_due_at());
        let of_tenants = of_tenants.chain(self.terminals_due_at());
        let of_machine = self.machine.as_ref().and_then(|machine| machine.check_at);
        of_its_life.into_iter().chain(of_tenants).chain(self.task_due_at()).chain(of_machine).min()
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: None, sku: Some(self.registration.sku.sku_id.0), unique_name: None }
    }

    fn claims(&self) -> BTreeSet<String> {
        let gpus = self.claimed_gpus.iter().map(|uuid| gpu_claims::gpu_claim(uuid));
        gpus.chain(self.machine.iter().filter(|it| it.is_held()).map(ProvidedMachine::claim)).collect()
    }

    fn terms(&self) -> BTreeSet<String> {
        let rollouts = self.rollouts.iter().map(|known| rollout_update::rollout_term(known.rollout_id));
        self.registration.metadata.terms().into_iter().chain(rollouts).collect()
    }

    fn is_transient(&self) -> bool {
        match self.life {
            Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Draining { .. }
            | Phase::Removing { .. } => true,
            Phase::Registered
            | Phase::Active
            | Phase::Offline
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removed => false,
        }
    }

    fn violations(&self, recorded: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([
            (Invariant::I2, self.has_one_tenant_on_each_gpu()),
            (Invariant::I6, self.gets_nothing_once_removed(recorded)),
            (Invariant::I8, self.has_deadline_where_transient()),
        ])
    }
}

impl Node {
    fn advance(&self, command: Command, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let step = match command {
            Command::Request(request) => self.execute(request, ctx)?,
            Command::Fact(fact) => self.apply(fact, ctx)?,
            Command::Maintenance(TickOnly::Tick) => {
                let step = self.expire_stale_tasks(self.confirm_holds(self.tick(ctx), ctx), ctx);
                let step = self.advance_evacuations(self.retry_stale_ssh_keys(step, ctx), ctx);
                let step = self.fail_stale_terminals(step, ctx);
                self.check_machine(step, ctx)
            }
        };
        Ok(self.watched_for_rollout(step, ctx))
    }

    /// The node in another state, with the reason and the event of the change.
    fn change_phase(
        &self,
        life: Phase,
        code: StateCode,
        message: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let event = next.enter(life, code, message, ctx);
        next.transition_with_node(message).event(event)
    }

    fn enter(&mut self, life: Phase, code: StateCode, message: &str, ctx: &TransitionContext<'_>) -> Event {
        let from = self.life.name().to_owned();
        if !matches!(life, Phase::Quarantined { .. }) {
            self.quarantine_holds.clear();
        }
        self.life = life;
        self.entered_at = ctx.now;
        let reason = code.as_str().to_owned();
        self.reason = StateReason::new(code, message);
        Event::NodeStateChanged { node_id: self.id, from: Some(from), to: self.life.name().to_owned(), reason }
    }

    /// The transition to this node, with the node as its reply.
    fn transition_with_node(self, why: impl Into<String>) -> Transition<Self> {
        let reply = Reply::Node { node: Box::new(self.clone()) };
        Transition::to(self, reply, why)
    }

    /// Nothing changes; the reply is the node.
    fn stay_with_node(&self) -> Transition<Self> {
        Transition::stay(Reply::Node { node: Box::new(self.clone()) })
    }

    fn wrong_state(&self, command: CommandName) -> Rejection {
        Rejection::WrongState { state: PhaseName::from(&self.life), command }
    }

    fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> AuditRecord {
        AuditRecord::new(action, self.entity(), metadata)
    }

    const fn entity(&self) -> EntityRef {
        EntityRef { kind: EntityKind::Node, id: self.id.0 }
    }

    /// The GPUs that a new tenant can get, in the order of their index.
    pub fn free_devices(&self) -> impl Iterator<Item = GpuDevice> + '_ {
        let withheld = self.withheld_gpus();
        self.unheld_devices().filter(move |device| !withheld.contains(device.uuid.as_str()))
    }

    /// The GPUs without a hold, in the order of their index. Before the agent's first report there are none.
    fn unheld_devices(&self) -> impl Iterator<Item = GpuDevice> + '_ {
        let held: BTreeSet<&str> =
            self.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| device.uuid.as_str()).collect();
        self.inventory
            .iter()
            .flat_map(|inventory| &inventory.gpus)
            .filter(move |gpu| !held.contains(gpu.uuid.as_str()))
            .map(|gpu| GpuDevice { index: gpu.index, uuid: gpu.uuid.clone() })
    }
}

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
//!
//! # Parts
//!
//! Each part owns its fields, its rules and its deadline, and knows no other part. What it has to know of the rest comes as an argument, and
//! what it wants of the rest goes out as its result: an [`outcome::Outcome`], or an enum such as [`RepairStep`].
//!
//! | part | file | knows |
//! | --- | --- | --- |
//! | [`Identity`] | `identity` | the token, the certificates, the key of the agent, recoveries |
//! | [`Lifecycle`] | `lifecycle` | the phase, its reason, the holds of a quarantine |
//! | [`Tenancy`] | `tenancy` | the tenants: their GPUs, set-ups, clean-ups, keys, terminals, evacuations |
//! | [`Tasks`] | `tasks` | the tasks of the node itself, and their results |
//! | [`Health`] | `health` | what the agent reports of the machine's health, and what follows for GPUs |
//! | [`MachineRepair`] | `repair` | reboots and resets of GPUs that end findings |
//! | [`Validation`] | `validation` | what the machine has shown under load |
//! | [`NodeMachine`] | `machine` | the registration, the inventory, drift, claims on GPUs, the provider, the reimage |
//! | [`Agent`] | `agent` | the contact with the agent, its versions, its rollouts |
//!
//! # The switchboard
//!
//! The files that have functions of the node itself. Each uses those above it, and no other:
//!
//! | file | has |
//! | --- | --- |
//! | `readiness` | what is read from all parts: what excludes an allocation, which GPUs are free |
//! | `wants` | what one part wants of others, as one step: holds taken back, a reimage, a task, the end of a hold |
//! | `invariants` | what must be true of every node |
//! | `tenants`, `onboarding`, `bare_metal`, `rollouts`, `orders`, `administration` | the commands of allocations, of a new machine, of the worker for bare-metal machines, of rollouts, and of administrators |
//! | `recovery`, `results` | recoveries of the identity; results of tasks |
//! | `contact` | polls, heartbeats and ticks |
//! | `gpu_claims` | what a command becomes where another node has the GPUs |
//!
//! This file dispatches commands to them. `gpu_choice` chooses among free GPUs, and `gpu_summand` adds them to the sums of the fleet. `request`,
//! `instruction` and `fact` define the commands, `explanation` and `report_reasons` the texts for callers, `agent_task` the tasks that an agent
//! receives, `outcome` what a command does to one part, and `stored_node` the form in which a node is stored.
//!
//! # Order
//!
//! Of one heartbeat follows, in this order: the contact, the inventory and what is expected of it, the proved GPUs, the findings; then the
//! holds that are over, the texts of those that stay, a new hold, the evacuations; then the ends of GPU resets, the next step of the repair,
//! a new reset; and where none of these has changed anything, what the contact means for the phase. Of a tick: the phase, the tenants that
//! are to be confirmed, overdue tasks, overdue keys, evacuations, overdue terminals, the machine at its provider. A soak of a rollout looks
//! at the result of every command, and the claims on GPUs follow last.

mod administration;
mod agent;
mod agent_task;
mod bare_metal;
mod contact;
mod explanation;
mod fact;
mod gpu_choice;
mod gpu_claims;
mod gpu_summand;
mod health;
mod identity;
mod instruction;
mod invariants;
mod lifecycle;
mod machine;
mod onboarding;
mod orders;
mod outcome;
mod readiness;
mod recovery;
mod repair;
pub mod report_reasons;
mod request;
mod results;
mod rollouts;
mod stored_node;
mod tasks;
mod tenancy;
mod tenants;
#[cfg(test)]
mod tests;
mod validation;
mod wants;

use crate::audit::AuditAction;
use crate::hardware::Placement;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{AllocationId, EntityKind, NodeId, TaskId};
use crate::state_machine::{
    self, AuditedRefusal, Deadline, IndexKeys, TickOnly, Timestamp, Transition, TransitionContext,
};
use crate::summand::Summand;
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

pub use crate::hardware::PromisedHardware;
pub use agent::{Agent, AgentContact, LastHeartbeat, NodeRollout, NodeSoak, rollout_term};
pub use agent_task::{AgentTask, AgentUpdate, PendingTask, TaskKind, TaskOutcome, TenantSlot, ValidationOrder};
pub use fact::Fact;
pub use health::{
    ClearedFinding, FindingAcceptance, FindingReport, Health, MAX_STORED_FINDINGS, NodeFinding, NodeHealth,
    NodeHealthStatus, ReportedFinding,
};
pub use identity::{AgentSessions, CertificateRecord, EnrollmentToken, Identity, IdentityRecovery, Nonce};
pub use instruction::Instruction;
pub use lifecycle::{HoldAuthor, Lifecycle, Phase, PhaseName, QuarantineHold, StateCode, StateReason};
pub use machine::{
    HardwareComparison, NodeMachine, OnboardingMode, OrderedImage, PreparedMachine, ProbeOutcome, ProvidedMachine,
    ProviderReport, ProviderStep, Registration, Reimage, ReimageStage, ReportedGpu, ReportedInventory, ReportedSystem,
};
pub use repair::{GpuReset, GpuResetPhase, MachineRepair, NodeRepair, RepairPhase};
pub use request::{CommandName, Enrollment, Reissue, Request};
pub use tasks::{NodeTask, NodeTaskPhase, Tasks};
pub use tenancy::{
    Evacuation, Hold, HoldPhase, HoldSshAccess, ProofGap, SshKeysTask, Tenancy, TerminalTask, UnprovedGpu, user_name,
};
pub use validation::{NodeValidation, Validation};

use agent::ContactKind;
use agent_task::reason_code;
use identity::RecoveryVerdict;
use machine::GpuClaimScope;
use repair::{RepairStep, RepairView, ResetStep};
use rollouts::RolloutUpdate;
use tasks::{TaskEnd, TaskSubject};
use tenancy::TenantReport;

/// The state of a node: its parts. Its stored form is in `stored_node.rs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: NodeId,
    pub identity: Identity,
    pub lifecycle: Lifecycle,
    pub tenancy: Tenancy,
    pub tasks: Tasks,
    pub health: Health,
    pub repair: MachineRepair,
    pub validation: Validation,
    pub machine: NodeMachine,
    pub agent: Agent,
}

/// The commands of a node.
pub type Command = state_machine::AnyCommand<Request, Instruction, Fact>;

state_machine::impl_command_from!(Request, Instruction, Fact);

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

impl state_machine::Machine for Node {
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
        let mut next = self.clone();
        next.identity.refusals = self.identity.refusals.audited(ctx.now)?;
        let metadata = json!({ "cause": rejection.to_string(), "result": "refused" });
        Some(AuditedRefusal { next, audit: self.audit(AuditAction::NodesRefuseEnrollment, metadata) })
    }

    fn state(&self) -> &'static str {
        self.lifecycle.phase.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        let lacks = |task_type| self.agent.lacks_task_type(task_type);
        let monitored = self.lifecycle.phase.is_monitored();
        let of_parts = [
            self.lifecycle_deadline(),
            self.tasks.deadline(lacks),
            self.tenancy.ssh_keys_deadline(lacks(TaskType::SshKeysReconcile)),
            self.repair.deadline(&self.repair_view()),
            monitored.then(|| self.agent.monitoring_deadline()).flatten(),
            self.machine.provided.as_ref().and_then(ProvidedMachine::deadline),
            self.machine.reimage_deadline(),
        ];
        of_parts.into_iter().flatten().min_by_key(|deadline| deadline.at)
    }

    fn timer(&self) -> Option<Timestamp> {
        let of_parts = [
            self.lifecycle_timer(),
            self.tenancy.next_resend_at(),
            self.tenancy.ssh_keys_due_at(),
            self.tenancy.evacuation_due_at(),
            self.tenancy.terminals_due_at(),
            self.tasks.due_at(),
            self.machine.provided.as_ref().and_then(|machine| machine.check_at),
        ];
        of_parts.into_iter().flatten().min()
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys { owner: None, sku: Some(self.machine.registration.sku.sku_id.0), unique_name: None }
    }

    fn claims(&self) -> BTreeSet<String> {
        self.machine.claims()
    }

    fn terms(&self) -> BTreeSet<String> {
        let rollouts = self.agent.rollouts.iter().map(|known| rollout_term(known.rollout_id));
        self.machine.registration.metadata.terms().into_iter().chain(rollouts).collect()
    }

    fn summand(&self) -> Option<Summand> {
        self.gpu_summand()
    }

    fn is_transient(&self) -> bool {
        self.lifecycle.phase.is_transient()
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
            Command::Instruction(instruction) => self.follow(instruction, ctx)?,
            Command::Fact(fact) => self.apply(fact, ctx)?,
            Command::Maintenance(TickOnly::Tick) => self.tick(ctx),
        };
        Ok(self.watched_for_rollout(step, ctx))
    }

    fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
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
            Request::Recover(recovery) => self.recover(&recovery, ctx),
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

    fn follow(&self, instruction: Instruction, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match instruction {
            Instruction::Reserve { allocation_id, gpu_count, keys, revision, reimages } => {
                self.reserve((allocation_id, gpu_count), keys, revision, reimages, ctx)
            }
            Instruction::ReconcileLogins { allocation_id, revision, keys } => {
                Ok(self.with_tenancy(self.tenancy.reconcile_logins(allocation_id, revision, keys, ctx)))
            }
            Instruction::Unreserve { allocation_id } => Ok(self.unreserve(allocation_id, ctx)),
            Instruction::Provision { allocation_id, deadline_at } => {
                Ok(self.provision(allocation_id, deadline_at, ctx))
            }
            Instruction::Clean { allocation_id, attempt, deadline_at } => {
                Ok(self.with_tenancy(self.tenancy.clean(allocation_id, attempt, deadline_at, ctx)))
            }
            Instruction::MarkReleaseFailed { allocation_id, attempt } => {
                Ok(self.with_tenancy(self.tenancy.mark_release_failed(allocation_id, attempt, ctx)))
            }
            Instruction::Fence { allocation_id, attempt } => {
                Ok(self.with_tenancy(self.tenancy.fence(allocation_id, attempt, ctx)))
            }
            Instruction::Abandon { allocation_id } => Ok(self.abandon(allocation_id, ctx)),
            Instruction::OpenTerminal { session_id, allocation_id, ends_at, begin_until, recording } => {
                let lacks = self.agent.lacks_task_type(TaskType::TerminalOpen);
                let can_open = (self.lifecycle.phase.is_in_service(), lacks);
                let (session, times) = ((session_id, allocation_id), (ends_at, begin_until));
                Ok(self.with_tenancy(self.tenancy.open_terminal(session, times, recording, can_open, ctx)))
            }
            Instruction::ForgetTerminal { session_id, allocation_id } => {
                Ok(self.with_tenancy(self.tenancy.forget_terminal(session_id, allocation_id)))
            }
            Instruction::UpdateForRollout { rollout_id, digest, soaks, includes_held } => {
                Ok(self.update_for_rollout(&RolloutUpdate { rollout_id, digest, soaks, includes_held }, ctx))
            }
            Instruction::CheckForRollout { rollout_id } => Ok(self.check_for_rollout(rollout_id, ctx)),
        }
    }

    fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::MachineTokenMade { token_id, token_sha256, image } => {
                self.machine_token((token_id, token_sha256), image, ctx)
            }
            Fact::MachineReported { since, report } => Ok(self.machine_reported(since, report, ctx)),
        }
    }

    fn lifecycle_deadline(&self) -> Option<Deadline> {
        match &self.lifecycle.phase {
            Phase::BootstrapIssued { until } => {
                Some(Deadline::new(*until, "no agent has enrolled with the issued token"))
            }
            Phase::Enrolling { until } if self.lifecycle.reason.code == StateCode::InventoryMismatch => {
                Some(Deadline::new(*until, self.lifecycle.reason.message.clone()))
            }
            Phase::Enrolling { until } if self.tasks.has_open_validation() => {
                Some(Deadline::new(*until, "the machine has not passed its first validation"))
            }
            Phase::Enrolling { until } => Some(Deadline::new(*until, "the agent has not polled with its certificate")),
            Phase::Draining { until } => {
                let left = self.tenancy.holds.len();
                Some(Deadline::new(*until, format!("{left} allocations have not ended")))
            }
            // The provider's deadline holds then.
            Phase::Removing { .. } if self.machine.is_held_at_provider() => None,
            Phase::Removing { until } => Some(Deadline::new(*until, "the node's connections are being closed")),
            Phase::Registered
            | Phase::Active
            | Phase::Offline
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removed => None,
        }
    }

    fn lifecycle_timer(&self) -> Option<Timestamp> {
        match &self.lifecycle.phase {
            // The provider's release ends it.
            Phase::Removing { .. } if self.machine.is_held_at_provider() => None,
            Phase::BootstrapIssued { until } | Phase::Enrolling { until } | Phase::Removing { until } => Some(*until),
            Phase::Active => self.agent.contact.as_ref().map(|seen| seen.silent_at),
            // A drain ends with the last allocation, not at a time.
            Phase::Draining { .. }
            | Phase::Registered
            | Phase::Offline
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removed => None,
        }
    }
}

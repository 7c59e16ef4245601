//! Resets of single GPUs: what a reset repairs needs no reboot, and no wait for the tenants of other GPUs (decision 0060).
//!
//! ```text
//! resetting ──▶ validating ──▶ succeeded ──the fault is there again──▶ failed
//!     └─▶ failed      └─▶ unfit
//! ```
//!
//! Heartbeats drive it, as the repair by a reboot. One GPU of a node is reset at a time, and each once within a day by itself. What a reset does
//! not end is left to the reboot, once all tenants are gone. Administrators order a reset where there is no finding, or once more on a day.

use super::{ClearedFinding, CommandName, Node, NodeFinding, NodeTaskPhase, Phase, Rejection, Reply, TaskOutcome};
use crate::audit::{AuditAction, AuditRecord};
use crate::finding::Repair;
use crate::id::{AllocationId, TaskId};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeSet;

/// A GPU is not reset again within this time.
const COUNTS_FOR: TimeDelta = TimeDelta::hours(24);
/// How long after a reset a heartbeat may have what the driver reported before it.
const REPORTED_FOR: TimeDelta = TimeDelta::seconds(60);
/// The bound of remembered resets.
const MAX_RESETS: usize = 64;
/// Why a reset ends the events of its GPU.
const CLEARED_BY_RESET: &str = "the GPU was reset";

/// The last reset of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReset {
    pub begun_at: Timestamp,
    pub phase: GpuResetPhase,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum GpuResetPhase {
    Resetting {
        task_id: TaskId,
    },
    Validating {
        task_id: TaskId,
    },
    Succeeded {
        at: Timestamp,
    },
    /// It was not reset, or its fault is there again.
    Failed {
        why: String,
    },
    /// It was reset and failed its validation: it gets no tenant until the machine has passed one.
    Unfit {
        why: String,
    },
}

impl GpuResetPhase {
    /// The name of the phase, as the API shows it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }

    /// Why a reboot has to follow; `None` where none has.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        match self {
            Self::Failed { why } | Self::Unfit { why } => Some(why),
            Self::Resetting { .. } | Self::Validating { .. } | Self::Succeeded { .. } => None,
        }
    }

    const fn task_id(&self) -> Option<TaskId> {
        match self {
            Self::Resetting { task_id } | Self::Validating { task_id } => Some(*task_id),
            Self::Succeeded { .. } | Self::Failed { .. } | Self::Unfit { .. } => None,
        }
    }
}

/// How a task of a reset ended.
enum TaskEnd {
    Succeeded,
    Failed(String),
    /// Its result is not remembered.
    Forgotten,
}

impl Node {
    /// The GPUs that are being reset or validated afterwards, by UUID.
    pub(super) fn gpus_in_reset(&self) -> impl Iterator<Item = &str> {
        self.gpu_resets.iter().filter(|(_, reset)| reset.phase.task_id().is_some()).map(|(uuid, _)| uuid.as_str())
    }

    /// The GPUs that get no tenant because of their last reset, by UUID.
    pub(super) fn gpus_withheld_by_reset(&self) -> impl Iterator<Item = &str> {
        self.gpus_in_reset().chain(self.unfit_gpu())
    }

    /// A GPU that failed its validation after a reset. There is one at most: then the machine waits for its reboot.
    pub(super) fn unfit_gpu(&self) -> Option<&str> {
        let mut resets = self.gpu_resets.iter();
        resets.find(|(_, reset)| matches!(reset.phase, GpuResetPhase::Unfit { .. })).map(|(uuid, _)| uuid.as_str())
    }

    /// The machine has passed a validation of all of its GPUs.
    pub(super) fn forget_unfit_gpus(&mut self) {
        self.gpu_resets.retain(|_, reset| !matches!(reset.phase, GpuResetPhase::Unfit { .. }));
    }

    /// True where the finding is to be ended by a reset, and not by a reboot.
    pub(super) fn is_left_to_a_reset(&self, known: &NodeFinding) -> bool {
        let Some(uuid) = known.reported.gpu_uuid.as_deref().filter(|_| known.repair() == Repair::Reset) else {
            return false;
        };
        let has_failed = self.gpu_resets.get(uuid).is_some_and(|reset| reset.phase.error().is_some());
        let needs_more = self.findings.iter().any(|other| {
            let is_of_gpu = other.reported.gpu_uuid.as_deref() == Some(uuid);
            is_of_gpu && other.prevents_allocation() && matches!(other.repair(), Repair::Reboot | Repair::Operator)
        });
        let listed = self.inventory.iter().flat_map(|inventory| &inventory.gpus);
        listed.into_iter().any(|gpu| gpu.uuid == uuid)
            && !has_failed
            && !needs_more
            && !self.is_machine_critical()
            && self.lacks_task_type(TaskType::NodeGpuReset).is_none()
    }

    /// Takes over what has become of the resets so far.
    pub(super) fn end_gpu_resets(&mut self, ctx: &TransitionContext<'_>) -> Vec<AuditRecord> {
        let faulty: BTreeSet<String> = self.faulty_gpus().map(str::to_owned).collect();
        self.gpu_resets.retain(|uuid, reset| match reset.phase {
            GpuResetPhase::Resetting { .. } | GpuResetPhase::Validating { .. } | GpuResetPhase::Unfit { .. } => true,
            GpuResetPhase::Succeeded { .. } | GpuResetPhase::Failed { .. } => {
                faulty.contains(uuid) || ctx.now < reset.begun_at + COUNTS_FOR
            }
        });
        let next: Vec<_> = self
            .gpu_resets
            .clone()
            .into_iter()
            .filter_map(|(uuid, reset)| Some((self.next_phase(&uuid, &reset.phase, &faulty, ctx)?, uuid)))
            .collect();
        next.into_iter().filter_map(|(phase, uuid)| self.enter_reset_phase(&uuid, phase)).collect()
    }

    /// Begins the reset of a GPU that no tenant holds, where one is wanted and nothing is in the way.
    pub(super) fn begin_gpu_reset(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let uuid = self.gpu_to_reset(ctx)?;
        let task_id = self.add_gpu_task(TaskType::NodeGpuReset, &uuid, ctx)?;
        let phase = GpuResetPhase::Resetting { task_id };
        self.gpu_resets.insert(uuid.clone(), GpuReset { begun_at: ctx.now, phase: phase.clone() });
        self.enter_reset_phase(&uuid, phase)
    }

    /// An administrator's order. A reset of the GPU that is open is the one that is wanted.
    pub(super) fn order_gpu_reset(
        &self,
        uuid: &str,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.life.has_no_identity() || self.life.is_gone() {
            return Err(self.wrong_state(CommandName::ResetGpu));
        }
        let gpu_uuid = uuid.to_owned();
        let reported: Vec<_> =
            self.inventory.iter().flat_map(|inventory| &inventory.gpus).map(|gpu| gpu.uuid.clone()).collect();
        if !reported.contains(&gpu_uuid) {
            return Err(Rejection::GpuUnknown { gpu_uuid, reported });
        }
        let open = self.gpu_resets.get(uuid).and_then(|reset| reset.phase.task_id());
        if let Some(task_id) = open.filter(|task_id| self.tasks.contains_key(task_id)) {
            return Ok(Transition::stay(Reply::Task { task_id, node: Box::new(self.clone()) }));
        }
        if let Some(allocation_id) = self.tenant_in_the_way_of_reset(uuid) {
            return Err(Rejection::InUse { allocation_id });
        }
        if let Some(why) = self.obstacle_to_ordered_reset() {
            return Err(Rejection::GpuNotReset { gpu_uuid, why });
        }
        let mut next = self.clone();
        let Some(task_id) = next.add_gpu_task(TaskType::NodeGpuReset, uuid, ctx) else {
            return Err(Self::too_many_tasks());
        };
        let phase = GpuResetPhase::Resetting { task_id };
        next.gpu_resets.insert(gpu_uuid, GpuReset { begun_at: ctx.now, phase });
        let metadata = json!({ "task_id": task_id, "gpu_uuid": uuid, "reason": reason });
        let audit = self.audit(AuditAction::NodesResetGpu, metadata);
        Ok(next.task_transition(task_id, format!("the reset of {uuid} was ordered: {reason}")).audit(audit))
    }

    /// The allocation that a reset of this GPU would disturb. A tenant of a machine that does not isolate its GPUs can use each of them.
    fn tenant_in_the_way_of_reset(&self, uuid: &str) -> Option<AllocationId> {
        let isolates = self.inventory.as_ref().is_some_and(|inventory| inventory.isolates_devices);
        let mut holds = self.holds.iter();
        let hold = holds.find(|(_, hold)| !isolates || hold.placed.devices.iter().any(|device| device.uuid == uuid));
        hold.map(|(allocation_id, _)| *allocation_id)
    }

    /// Why no GPU is reset on an administrator's order; `None` where one can be.
    fn obstacle_to_ordered_reset(&self) -> Option<String> {
        if let Some(why) = self.lacks_task_type(TaskType::NodeGpuReset) {
            return Some(why);
        }
        if self.is_machine_critical() {
            let why = "the machine has a critical fault, which may hang the reset as well; reboot the machine";
            return Some(why.to_owned());
        }
        self.obstacle_to_reset()
    }

    /// What has to end before any GPU is reset; `None` where nothing has.
    fn obstacle_to_reset(&self) -> Option<String> {
        let busy = self.tasks.values().find(|task| {
            matches!(
                task.task_type,
                TaskType::NodeReboot | TaskType::NodeValidate | TaskType::NodeGpuReset | TaskType::AgentUpdate
            ) && !task.has_ended()
        });
        if let Some(task) = busy {
            let (task_type, task_id) = (task.task_type, task.work.task_id);
            return Some(format!("{task_type} ({task_id}) has no result yet; wait for it, and order the reset then"));
        }
        if let Some(why) = self.under_repair() {
            return Some(format!("{why}; wait for its end"));
        }
        if let Some(other) = self.unfit_gpu() {
            return Some(format!("{other} failed its validation after a reset; validate the machine first"));
        }
        if let Some(other) = self.gpus_in_reset().next() {
            return Some(format!("{other} is being reset; wait for its end"));
        }
        if self.reimage.is_some() {
            return Some("the machine is being reinstalled".to_owned());
        }
        let is_full = self.gpu_resets.len() >= MAX_RESETS;
        is_full.then(|| "the GPUs had too many resets within a day; reboot the machine".to_owned())
    }

    /// The GPUs that an open finding takes out of rent, by UUID. What ends by itself, or by another mode of the GPU, is not for a reset to end.
    fn faulty_gpus(&self) -> impl Iterator<Item = &str> {
        self.findings
            .iter()
            .filter(|known| known.prevents_allocation() && known.repair() != Repair::None)
            .filter_map(|known| known.reported.gpu_uuid.as_deref())
    }

    fn gpu_to_reset(&self, ctx: &TransitionContext<'_>) -> Option<String> {
        let life = if let Phase::Quarantined { was } = &self.life { was } else { &self.life };
        let most = ctx.policy.int(PolicyKey::NodeRepairAttempts, &Scopes::global(), ctx.now);
        if *life != Phase::Active || most == 0 || self.obstacle_to_reset().is_some() {
            return None;
        }
        let left = self.findings.iter().filter(|known| known.prevents_allocation() && self.is_left_to_a_reset(known));
        let left = left.filter(|known| known.is_confirmed(ctx));
        let mut uuids = left.filter_map(|known| known.reported.gpu_uuid.as_deref());
        let may_begin =
            |uuid: &&str| self.tenant_in_the_way_of_reset(uuid).is_none() && !self.gpu_resets.contains_key(*uuid);
        uuids.find(may_begin).map(str::to_owned)
    }

    pub(super) fn holds_gpu(&self, uuid: &str) -> bool {
        self.holds.values().flat_map(|hold| &hold.placed.devices).any(|device| device.uuid == uuid)
    }

    /// The phase that follows now; `None` where it stays as it is.
    fn next_phase(
        &mut self,
        uuid: &str,
        phase: &GpuResetPhase,
        faulty: &BTreeSet<String>,
        ctx: &TransitionContext<'_>,
    ) -> Option<GpuResetPhase> {
        match phase {
            GpuResetPhase::Resetting { task_id } => match self.end_of_gpu_task(*task_id)? {
                TaskEnd::Succeeded => {
                    let validating = self.validate_gpu(uuid, ctx)?;
                    self.clear_events(uuid, ctx);
                    Some(validating)
                }
                TaskEnd::Failed(why) => Some(GpuResetPhase::Failed { why }),
                TaskEnd::Forgotten => Some(GpuResetPhase::Failed { why: "its result was not stored".to_owned() }),
            },
            GpuResetPhase::Validating { task_id } => match self.end_of_gpu_task(*task_id)? {
                TaskEnd::Succeeded => Some(GpuResetPhase::Succeeded { at: ctx.now }),
                TaskEnd::Failed(why) => Some(GpuResetPhase::Unfit { why }),
                TaskEnd::Forgotten => self.validate_gpu(uuid, ctx),
            },
            GpuResetPhase::Succeeded { at } if faulty.contains(uuid) && ctx.now >= *at + REPORTED_FOR => {
                Some(GpuResetPhase::Failed { why: "a fault is there again".to_owned() })
            }
            GpuResetPhase::Succeeded { .. } | GpuResetPhase::Failed { .. } | GpuResetPhase::Unfit { .. } => None,
        }
    }

    /// `None` where the agent has not reported on it.
    fn end_of_gpu_task(&self, task_id: TaskId) -> Option<TaskEnd> {
        match self.tasks.get(&task_id).map(|task| &task.phase) {
            Some(NodeTaskPhase::Open | NodeTaskPhase::AwaitsOperator { .. }) => None,
            Some(NodeTaskPhase::Ended { verdict: TaskOutcome::Succeeded { .. }, .. }) => Some(TaskEnd::Succeeded),
            Some(NodeTaskPhase::Ended { verdict: TaskOutcome::Failed { code, message }, .. }) => {
                Some(TaskEnd::Failed(format!("{code}: {message}")))
            }
            None => Some(TaskEnd::Forgotten),
        }
    }

    fn validate_gpu(&mut self, uuid: &str, ctx: &TransitionContext<'_>) -> Option<GpuResetPhase> {
        let task_id = self.add_gpu_task(TaskType::NodeValidate, uuid, ctx)?;
        if let Some(task) = self.tasks.get_mut(&task_id) {
            task.validation = Some(Self::validation_order(ValidationLevel::Quick, ctx));
        }
        Some(GpuResetPhase::Validating { task_id })
    }

    fn add_gpu_task(&mut self, task_type: TaskType, uuid: &str, ctx: &TransitionContext<'_>) -> Option<TaskId> {
        let task_id = self.add_task(task_type, None, ctx)?;
        if let Some(task) = self.tasks.get_mut(&task_id) {
            task.gpu_uuid = Some(uuid.to_owned());
        }
        Some(task_id)
    }

    /// An event is reported until the next boot, so that a reset ends it here. A condition ends when the driver does not report it any more.
    fn clear_events(&mut self, uuid: &str, ctx: &TransitionContext<'_>) {
        for known in &mut self.findings {
            let is_event = known.reported.probe == "xid" && known.reported.gpu_uuid.as_deref() == Some(uuid);
            if is_event && known.repair() == Repair::Reset && known.is_open() {
                known.cleared = Some(ClearedFinding { at: ctx.now, reason: Some(CLEARED_BY_RESET.to_owned()) });
            }
        }
    }

    fn enter_reset_phase(&mut self, uuid: &str, phase: GpuResetPhase) -> Option<AuditRecord> {
        let metadata = json!({
            "step": format!("reset_{}", phase.name()),
            "gpu_uuid": uuid,
            "task_id": phase.task_id(),
            "cause": phase.error(),
        });
        self.gpu_resets.get_mut(uuid)?.phase = phase;
        Some(self.audit(AuditAction::NodesRepair, metadata))
    }
}

//! Resets of single GPUs: what a reset repairs needs no reboot, and no wait for the tenants of other GPUs (decision 0060).
//!
//! ```text
//! resetting ──▶ validating ──▶ succeeded ──the fault is there again──▶ failed
//!     └─▶ failed      └─▶ unfit
//! ```
//!
//! Heartbeats drive it, as the repair by a reboot. One GPU of a node is reset at a time, and each once within a day by itself. What a reset does
//! not end is left to the reboot, once all tenants are gone. Administrators order a reset where there is no finding, or once more on a day.

use super::{MachineRepair, RepairView};
use crate::audit::{AuditAction, AuditRecord};
use crate::entities::node::{NodeFinding, NodeTask, TaskEnd, outcome};
use crate::finding;
use crate::id::TaskId;
use crate::state_machine::{Timestamp, TransitionContext};
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

/// What follows from the end of a task of a reset.
pub(in crate::entities::node) enum ResetStep {
    /// The GPU is to be validated, perhaps once more. `is_reset`: its task has just reset it.
    Validate {
        is_reset: bool,
    },
    Enter(GpuResetPhase),
}

impl MachineRepair {
    /// The GPUs that are being reset or validated afterwards, by UUID.
    pub(in crate::entities::node) fn gpus_in_reset(&self) -> impl Iterator<Item = &str> {
        self.gpu_resets.iter().filter(|(_, reset)| reset.phase.task_id().is_some()).map(|(uuid, _)| uuid.as_str())
    }

    /// The GPUs that get no tenant because of their last reset, by UUID.
    pub(in crate::entities::node) fn withheld_gpus(&self) -> impl Iterator<Item = &str> {
        self.gpus_in_reset().chain(self.unfit_gpu())
    }

    /// A GPU that failed its validation after a reset. There is one at most: then the machine waits for its reboot.
    pub(super) fn unfit_gpu(&self) -> Option<&str> {
        let mut resets = self.gpu_resets.iter();
        resets.find(|(_, reset)| matches!(reset.phase, GpuResetPhase::Unfit { .. })).map(|(uuid, _)| uuid.as_str())
    }

    /// The machine has passed a validation of all of its GPUs.
    pub(in crate::entities::node) fn forget_unfit_gpus(&mut self) {
        self.gpu_resets.retain(|_, reset| !matches!(reset.phase, GpuResetPhase::Unfit { .. }));
    }

    /// The task of the GPU's open reset.
    pub(in crate::entities::node) fn open_reset(&self, uuid: &str) -> Option<TaskId> {
        self.gpu_resets.get(uuid)?.phase.task_id()
    }

    /// True where the finding is to be ended by a reset, and not by a reboot.
    pub(super) fn is_left_to_a_reset(&self, known: &NodeFinding, view: &RepairView<'_>) -> bool {
        let is_for_reset = known.repair() == finding::Repair::Reset;
        let Some(uuid) = known.reported.gpu_uuid.as_deref().filter(|_| is_for_reset) else { return false };
        let has_failed = self.gpu_resets.get(uuid).is_some_and(|reset| reset.phase.error().is_some());
        let needs_more = view.findings.iter().any(|other| {
            let is_of_gpu = other.reported.gpu_uuid.as_deref() == Some(uuid);
            let is_beyond = matches!(other.repair(), finding::Repair::Reboot | finding::Repair::Operator);
            is_of_gpu && other.prevents_allocation() && is_beyond
        });
        view.listed.contains(uuid) && !has_failed && !needs_more && !view.is_critical && view.can_reset
    }

    /// What follows for each reset, by UUID. Resets that do not count any more are forgotten. `end_of` says how a task ended.
    pub(in crate::entities::node) fn next_reset_steps(
        &mut self,
        view: &RepairView<'_>,
        end_of: impl Fn(TaskId) -> Option<TaskEnd>,
        now: Timestamp,
    ) -> Vec<(String, ResetStep)> {
        let faulty = faulty_gpus(view);
        self.gpu_resets.retain(|uuid, reset| match reset.phase {
            GpuResetPhase::Resetting { .. } | GpuResetPhase::Validating { .. } | GpuResetPhase::Unfit { .. } => true,
            GpuResetPhase::Succeeded { .. } | GpuResetPhase::Failed { .. } => {
                faulty.contains(uuid.as_str()) || now < reset.begun_at + COUNTS_FOR
            }
        });
        let resets = self.gpu_resets.iter();
        let steps = resets.filter_map(|(uuid, reset)| {
            let is_faulty = faulty.contains(uuid.as_str());
            Some((uuid.clone(), next_step(&reset.phase, is_faulty, &end_of, now)?))
        });
        steps.collect()
    }

    /// The reset of a GPU was ordered.
    pub(in crate::entities::node) fn begin_reset(&mut self, uuid: &str, task_id: TaskId, now: Timestamp) {
        let phase = GpuResetPhase::Resetting { task_id };
        self.gpu_resets.insert(uuid.to_owned(), GpuReset { begun_at: now, phase });
    }

    pub(in crate::entities::node) fn enter_reset_phase(
        &mut self,
        uuid: &str,
        phase: GpuResetPhase,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditRecord> {
        self.gpu_resets.get_mut(uuid)?.phase = phase;
        self.reset_record(uuid, ctx)
    }

    /// The audit record of the present phase of a reset.
    pub(in crate::entities::node) fn reset_record(
        &self,
        uuid: &str,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditRecord> {
        let phase = &self.gpu_resets.get(uuid)?.phase;
        let metadata = json!({
            "step": format!("reset_{}", phase.name()),
            "gpu_uuid": uuid,
            "task_id": phase.task_id(),
            "cause": phase.error(),
        });
        Some(outcome::audit(AuditAction::NodesRepair, metadata, ctx))
    }

    /// What has to end before any GPU is reset; `None` where nothing has. `busy` is a task without a result that excludes a reset.
    pub(in crate::entities::node) fn obstacle_to_reset(
        &self,
        busy: Option<&NodeTask>,
        is_reinstalled: bool,
    ) -> Option<String> {
        if let Some(task) = busy {
            let (task_type, task_id) = (task.task_type, task.work.task_id);
            return Some(format!("{task_type} ({task_id}) has no result yet; wait for it, and order the reset then"));
        }
        if let Some(why) = self.obstacle() {
            return Some(format!("{why}; wait for its end"));
        }
        if let Some(other) = self.unfit_gpu() {
            return Some(format!("{other} failed its validation after a reset; validate the machine first"));
        }
        if let Some(other) = self.gpus_in_reset().next() {
            return Some(format!("{other} is being reset; wait for its end"));
        }
        if is_reinstalled {
            return Some("the machine is being reinstalled".to_owned());
        }
        let is_full = self.gpu_resets.len() >= MAX_RESETS;
        is_full.then(|| "the GPUs had too many resets within a day; reboot the machine".to_owned())
    }

    /// The GPU whose reset is wanted, and may begin. `has_tenant` says whether a tenant is in the way.
    pub(in crate::entities::node) fn gpu_to_reset<'a>(
        &self,
        view: &RepairView<'a>,
        has_tenant: impl Fn(&str) -> bool,
        ctx: &TransitionContext<'_>,
    ) -> Option<&'a str> {
        let left = view.findings.iter().filter(|known| known.prevents_allocation());
        let left = left.filter(|known| self.is_left_to_a_reset(known, view) && known.is_confirmed(ctx));
        let mut uuids = left.filter_map(|known| known.reported.gpu_uuid.as_deref());
        uuids.find(|uuid| !has_tenant(uuid) && !self.gpu_resets.contains_key(*uuid))
    }
}

/// The GPUs that an open finding takes out of rent, by UUID. What ends by itself, or by another mode of the GPU, is not for a reset to end.
fn faulty_gpus<'a>(view: &RepairView<'a>) -> BTreeSet<&'a str> {
    view.findings
        .iter()
        .filter(|known| known.prevents_allocation() && known.repair() != finding::Repair::None)
        .filter_map(|known| known.reported.gpu_uuid.as_deref())
        .collect()
}

/// What follows now; `None` where the phase stays as it is.
fn next_step(
    phase: &GpuResetPhase,
    is_faulty: bool,
    end_of: impl Fn(TaskId) -> Option<TaskEnd>,
    now: Timestamp,
) -> Option<ResetStep> {
    match phase {
        GpuResetPhase::Resetting { task_id } => Some(match end_of(*task_id)? {
            TaskEnd::Succeeded => ResetStep::Validate { is_reset: true },
            TaskEnd::Failed(why) => ResetStep::Enter(GpuResetPhase::Failed { why }),
            TaskEnd::Forgotten => {
                ResetStep::Enter(GpuResetPhase::Failed { why: "its result was not stored".to_owned() })
            }
        }),
        GpuResetPhase::Validating { task_id } => Some(match end_of(*task_id)? {
            TaskEnd::Succeeded => ResetStep::Enter(GpuResetPhase::Succeeded { at: now }),
            TaskEnd::Failed(why) => ResetStep::Enter(GpuResetPhase::Unfit { why }),
            TaskEnd::Forgotten => ResetStep::Validate { is_reset: false },
        }),
        GpuResetPhase::Succeeded { at } if is_faulty && now >= *at + REPORTED_FOR => {
            Some(ResetStep::Enter(GpuResetPhase::Failed { why: "a fault is there again".to_owned() }))
        }
        GpuResetPhase::Succeeded { .. } | GpuResetPhase::Failed { .. } | GpuResetPhase::Unfit { .. } => None,
    }
}

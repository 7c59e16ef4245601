//! Repair by itself: a machine without tenants that has a finding which a reboot repairs is rebooted and validated (decision 0052). What a
//! reset of its GPU repairs is left to that first (decision 0060).
//!
//! Heartbeats drive it: a machine that is not in contact is not repaired, and none by one look alone: it begins when heartbeats have had the finding for
//! policy `node.repair_delay_seconds`. After the attempts of policy `node.repair_attempts` an operator takes
//! over.

mod gpu_reset;

use super::{NodeFinding, TaskEnd, outcome};
use crate::audit::{AuditAction, AuditRecord};
use crate::finding;
use crate::id::TaskId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

pub use gpu_reset::{GpuReset, GpuResetPhase};

pub(super) use gpu_reset::ResetStep;

/// The part of a node that repairs its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineRepair {
    /// The repair of its findings by reboots.
    pub of_machine: Option<NodeRepair>,
    /// The last reset of each GPU, by UUID.
    pub gpu_resets: BTreeMap<String, GpuReset>,
}

/// Attempts that began within this time count together: a fault that returns after a longer time is another one.
const ATTEMPTS_COUNT_FOR: TimeDelta = TimeDelta::hours(24);

/// The repair of a node, and how often it was tried lately.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRepair {
    pub attempts: u32,
    /// When the last attempt began.
    pub begun_at: Timestamp,
    pub phase: RepairPhase,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum RepairPhase {
    Rebooting {
        task_id: TaskId,
    },
    Validating {
        task_id: TaskId,
    },
    /// The finding is over and the machine was validated.
    Succeeded,
    /// The attempts are used up, or the machine failed its validation.
    AwaitsOperator {
        since: Timestamp,
    },
}

impl RepairPhase {
    /// The name of the phase, as the API shows it.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }
}

/// What a repair has to know of the machine.
pub(super) struct RepairView<'a> {
    pub(super) findings: &'a [NodeFinding],
    /// The GPUs that the agent lists, by UUID.
    pub(super) listed: BTreeSet<&'a str>,
    /// The machine as a whole has failed.
    pub(super) is_critical: bool,
    /// The agent supports the reset of a GPU.
    pub(super) can_reset: bool,
}

/// What a repair wants next.
pub(super) enum RepairStep {
    Reboot,
    Validate,
    /// The finding is over and the machine was validated.
    Succeed,
    /// An operator takes over.
    GiveUp,
    /// An operator has cleared the finding, or it is over.
    Forget,
}

impl MachineRepair {
    /// Why it excludes a new allocation; `None` where it does not.
    pub(super) fn obstacle(&self) -> Option<String> {
        let repair = self.of_machine.as_ref()?;
        let step = match repair.phase {
            RepairPhase::Rebooting { .. } => "rebooted",
            RepairPhase::Validating { .. } => "validated",
            RepairPhase::Succeeded | RepairPhase::AwaitsOperator { .. } => return None,
        };
        Some(format!("it is being {step} to repair a health finding (attempt {})", repair.attempts))
    }

    /// Since when an operator has to repair it.
    pub(super) fn deadline(&self, view: &RepairView<'_>) -> Option<Deadline> {
        let NodeRepair { attempts, phase: RepairPhase::AwaitsOperator { since }, .. } = self.of_machine.as_ref()?
        else {
            return None;
        };
        let what = self.repairable(view).unwrap_or_else(|| "a failed validation".to_owned());
        let why = format!("{attempts} repairs have not ended {what}: repair the machine, then clear the finding");
        Some(Deadline::new(*since, why))
    }

    /// The task whose result it waits for.
    pub(super) fn pending_task(&self) -> Option<TaskId> {
        match self.of_machine.as_ref()?.phase {
            RepairPhase::Rebooting { task_id } | RepairPhase::Validating { task_id } => Some(task_id),
            RepairPhase::Succeeded | RepairPhase::AwaitsOperator { .. } => None,
        }
    }

    /// What it wants next. The task that it awaits has ended as `end` says; `is_free`: no tenant and no other task is in the way of a reboot;
    /// `is_held`: a failed validation holds the node.
    pub(super) fn next_step(
        &self,
        view: &RepairView<'_>,
        end: Option<TaskEnd>,
        (is_free, is_held): (bool, bool),
        ctx: &TransitionContext<'_>,
    ) -> Option<RepairStep> {
        let (repairable, may_begin) = (self.repairable(view).is_some(), self.is_confirmed(view, ctx));
        match self.of_machine.as_ref().map(|repair| &repair.phase) {
            Some(RepairPhase::Rebooting { .. }) => match end? {
                TaskEnd::Succeeded => Some(RepairStep::Validate),
                // The finding is over all the same: the machine is not rebooted for nothing.
                TaskEnd::Failed(_) | TaskEnd::Forgotten if !repairable => Some(RepairStep::Validate),
                TaskEnd::Failed(_) | TaskEnd::Forgotten => self.reboot_or_give_up(ctx),
            },
            Some(RepairPhase::Validating { .. }) => match (end?, repairable) {
                (TaskEnd::Succeeded, false) => Some(RepairStep::Succeed),
                (TaskEnd::Succeeded, true) if may_begin => self.reboot_or_give_up(ctx),
                (TaskEnd::Succeeded, true) => None,
                (TaskEnd::Failed(_) | TaskEnd::Forgotten, _) => Some(RepairStep::GiveUp),
            },
            Some(RepairPhase::AwaitsOperator { .. }) => (!repairable && !is_held).then_some(RepairStep::Forget),
            Some(RepairPhase::Succeeded) | None if repairable && may_begin && is_free => self.reboot_or_give_up(ctx),
            Some(RepairPhase::Succeeded) | None => None,
        }
    }

    fn reboot_or_give_up(&self, ctx: &TransitionContext<'_>) -> Option<RepairStep> {
        let most = ctx.policy.int(PolicyKey::NodeRepairAttempts, &Scopes::global(), ctx.now);
        match self.attempts(ctx.now) {
            attempts if i64::from(attempts) < most => Some(RepairStep::Reboot),
            // Without any attempt, operators repair by themselves.
            0 => None,
            _ => Some(RepairStep::GiveUp),
        }
    }

    fn attempts(&self, now: Timestamp) -> u32 {
        let lately = self.of_machine.as_ref().filter(|repair| now < repair.begun_at + ATTEMPTS_COUNT_FOR);
        lately.map_or(0, |repair| repair.attempts)
    }

    /// The reboot was ordered.
    pub(super) fn begin(&mut self, task_id: TaskId, finding: Option<&str>, ctx: &TransitionContext<'_>) -> AuditRecord {
        let attempts = self.attempts(ctx.now) + 1;
        let phase = RepairPhase::Rebooting { task_id };
        self.of_machine = Some(NodeRepair { attempts, begun_at: ctx.now, phase });
        let metadata = json!({
            "step": "rebooting", "attempt": attempts, "task_id": task_id, "finding": finding,
        });
        outcome::audit(AuditAction::NodesRepair, metadata, ctx)
    }

    pub(super) fn enter(&mut self, phase: RepairPhase, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let repair = self.of_machine.as_mut()?;
        let metadata = json!({ "step": phase.name(), "attempt": repair.attempts });
        repair.phase = phase;
        Some(outcome::audit(AuditAction::NodesRepair, metadata, ctx))
    }

    pub(super) fn forget(&mut self, ctx: &TransitionContext<'_>) -> AuditRecord {
        self.of_machine = None;
        outcome::audit(AuditAction::NodesRepair, json!({ "step": "finding_over" }), ctx)
    }

    /// What takes it or a GPU out of rent and is for a reboot to repair.
    pub(super) fn repairable(&self, view: &RepairView<'_>) -> Option<String> {
        if let Some(uuid) = self.unfit_gpu() {
            return Some(format!("the failed validation of {uuid} after its reset"));
        }
        let known = self.findings_for_a_reboot(view).next()?;
        Some(format!("{}/{}", known.reported.probe, known.reported.code))
    }

    fn findings_for_a_reboot<'a>(&'a self, view: &'a RepairView<'_>) -> impl Iterator<Item = &'a NodeFinding> {
        view.findings
            .iter()
            .filter(|known| matches!(known.repair(), finding::Repair::Reset | finding::Repair::Reboot))
            .filter(|known| known.prevents_allocation() && !self.is_left_to_a_reset(known, view))
    }

    /// True where a second look agrees with the first. A failed validation is one after the finding for which its GPU was reset.
    fn is_confirmed(&self, view: &RepairView<'_>, ctx: &TransitionContext<'_>) -> bool {
        self.unfit_gpu().is_some() || self.findings_for_a_reboot(view).any(|known| known.is_confirmed(ctx))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decided_at, start};
    use super::*;

    #[test]
    fn attempts_count_together_for_a_day() {
        let mut repair = MachineRepair::default();
        let task_id = TaskId(uuid::Uuid::from_u128(1));
        let again = ATTEMPTS_COUNT_FOR - TimeDelta::seconds(1);
        for (at, attempts) in [(TimeDelta::zero(), 1), (again, 2), (again + ATTEMPTS_COUNT_FOR, 1)] {
            decided_at(start() + at, |ctx| repair.begin(task_id, Some("xid/79"), ctx));
            assert_eq!(repair.of_machine.as_ref().map(|it| it.attempts), Some(attempts), "{at}");
        }
        assert_eq!((repair.pending_task(), repair.obstacle().is_some()), (Some(task_id), true));
        decided_at(start(), |ctx| repair.enter(RepairPhase::Succeeded, ctx));
        assert_eq!((repair.pending_task(), repair.obstacle()), (None, None));
    }
}

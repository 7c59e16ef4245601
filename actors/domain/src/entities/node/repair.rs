//! Repair by itself: a machine without tenants that has a finding which a reboot repairs is rebooted and validated (decision 0052). What a
//! reset of its GPU repairs is left to that first (decision 0060).
//!
//! Heartbeats drive it: a machine that is not in contact is not repaired, and none by one look alone: it begins when heartbeats have had the finding for
//! policy `node.repair_delay_seconds`. After the attempts of policy `node.repair_attempts` an operator takes
//! over.

use super::{HoldAuthor, Node, NodeFinding, NodeTaskPhase, Phase, TaskOutcome};
use crate::audit::{AuditAction, AuditRecord};
use crate::finding::Repair;
use crate::id::TaskId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use crate::task_type::TaskType;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;

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

/// What the result of a repair's task is, if it has one.
enum TaskEnd {
    None,
    Succeeded,
    Failed,
}

impl Node {
    /// Why its repair excludes a new allocation; `None` where it does not.
    pub(super) fn under_repair(&self) -> Option<String> {
        let repair = self.repair.as_ref()?;
        let step = match repair.phase {
            RepairPhase::Rebooting { .. } => "rebooted",
            RepairPhase::Validating { .. } => "validated",
            RepairPhase::Succeeded | RepairPhase::AwaitsOperator { .. } => return None,
        };
        Some(format!("it is being {step} to repair a health finding (attempt {})", repair.attempts))
    }

    /// Since when an operator has to repair it.
    pub(super) fn repair_deadline(&self) -> Option<Deadline> {
        let NodeRepair { attempts, phase: RepairPhase::AwaitsOperator { since }, .. } = self.repair.as_ref()? else {
            return None;
        };
        let what = self.repairable().unwrap_or_else(|| "a failed validation".to_owned());
        let why = format!("{attempts} repairs have not ended {what}: repair the machine, then clear the finding");
        Some(Deadline::new(*since, why))
    }

    /// The next step of its repair, with its audit record.
    pub(super) fn advance_repair(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let (repairable, may_begin) = (self.repairable(), self.is_repair_confirmed(ctx));
        let phase = self.repair.as_ref().map(|repair| repair.phase.clone());
        match (phase, repairable) {
            (Some(RepairPhase::Rebooting { task_id }), _) => match self.end_of(task_id) {
                TaskEnd::None => None,
                TaskEnd::Succeeded => self.validate_repair(ctx),
                // The finding is over all the same: the machine is not rebooted for nothing.
                TaskEnd::Failed if self.repairable().is_none() => self.validate_repair(ctx),
                TaskEnd::Failed => self.begin_or_give_up(ctx),
            },
            (Some(RepairPhase::Validating { task_id }), repairable) => match (self.end_of(task_id), repairable) {
                (TaskEnd::None, _) => None,
                (TaskEnd::Succeeded, None) => self.enter_repair_phase(RepairPhase::Succeeded),
                (TaskEnd::Succeeded, Some(_)) if may_begin => self.begin_or_give_up(ctx),
                (TaskEnd::Succeeded, Some(_)) => None,
                (TaskEnd::Failed, _) => self.give_up(ctx),
            },
            (Some(RepairPhase::AwaitsOperator { .. }), Some(_)) => None,
            // An operator has cleared the finding, or it is over.
            (Some(RepairPhase::AwaitsOperator { .. }), None) if !self.is_held_by(HoldAuthor::Validation) => {
                self.repair = None;
                Some(self.audit(AuditAction::NodesRepair, json!({ "step": "finding_over" })))
            }
            (Some(RepairPhase::AwaitsOperator { .. } | RepairPhase::Succeeded) | None, None) => None,
            (Some(RepairPhase::Succeeded) | None, Some(_)) if may_begin && self.may_be_repaired() => {
                self.begin_or_give_up(ctx)
            }
            (Some(RepairPhase::Succeeded) | None, Some(_)) => None,
        }
    }

    /// What takes it or a GPU out of rent and is for a reboot to repair.
    fn repairable(&self) -> Option<String> {
        if let Some(uuid) = self.unfit_gpu() {
            return Some(format!("the failed validation of {uuid} after its reset"));
        }
        let known = self.findings_for_a_reboot().next()?;
        Some(format!("{}/{}", known.reported.probe, known.reported.code))
    }

    fn findings_for_a_reboot(&self) -> impl Iterator<Item = &NodeFinding> {
        self.findings
            .iter()
            .filter(|known| matches!(known.repair(), Repair::Reset | Repair::Reboot) && known.prevents_allocation())
            .filter(|known| !self.is_left_to_a_reset(known))
    }

    /// True where a second look agrees with the first. A failed validation is one after the finding for which its GPU was reset.
    fn is_repair_confirmed(&self, ctx: &TransitionContext<'_>) -> bool {
        self.unfit_gpu().is_some() || self.findings_for_a_reboot().any(|known| known.is_confirmed(ctx))
    }

    /// True where no tenant and no other task is in the way. Holds of any author are not: they are not lifted either.
    fn may_be_repaired(&self) -> bool {
        let life = if let Phase::Quarantined { was } = &self.life { was } else { &self.life };
        let open = self.tasks.values().any(|task| {
            matches!(task.task_type, TaskType::NodeReboot | TaskType::NodeValidate | TaskType::NodeGpuReset)
                && !matches!(task.phase, NodeTaskPhase::Ended { .. })
        });
        let is_free = self.holds.is_empty() && self.gpus_in_reset().next().is_none();
        *life == Phase::Active && is_free && !open && self.lacks_task_type(TaskType::NodeReboot).is_none()
    }

    fn begin_or_give_up(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let most = ctx.policy.int(PolicyKey::NodeRepairAttempts, &Scopes::global(), ctx.now);
        let lately = self.repair.as_ref().filter(|repair| ctx.now < repair.begun_at + ATTEMPTS_COUNT_FOR);
        let attempts = lately.map_or(0, |repair| repair.attempts);
        if i64::from(attempts) >= most {
            // Without any attempt, operators repair by themselves.
            return if attempts == 0 { None } else { self.give_up(ctx) };
        }
        let task_id = self.add_task(TaskType::NodeReboot, None, ctx)?;
        let phase = RepairPhase::Rebooting { task_id };
        self.repair = Some(NodeRepair { attempts: attempts + 1, begun_at: ctx.now, phase });
        let finding = self.repairable();
        Some(self.audit(
            AuditAction::NodesRepair,
            json!({ "step": "rebooting", "attempt": attempts + 1, "task_id": task_id, "finding": finding }),
        ))
    }

    fn validate_repair(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let task_id = self.add_validation(self.required_level(), ctx)?;
        self.enter_repair_phase(RepairPhase::Validating { task_id })
    }

    fn give_up(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        let audit = self.enter_repair_phase(RepairPhase::AwaitsOperator { since: ctx.now });
        if let Some(deadline) = self.repair_deadline() {
            self.explain_hold(HoldAuthor::Health, &deadline.reason);
        }
        audit
    }

    fn enter_repair_phase(&mut self, phase: RepairPhase) -> Option<AuditRecord> {
        let repair = self.repair.as_mut()?;
        let metadata = json!({ "step": phase.name(), "attempt": repair.attempts });
        repair.phase = phase;
        Some(self.audit(AuditAction::NodesRepair, metadata))
    }

    fn end_of(&self, task_id: TaskId) -> TaskEnd {
        match self.tasks.get(&task_id).map(|task| &task.phase) {
            Some(NodeTaskPhase::Open | NodeTaskPhase::AwaitsOperator { .. }) => TaskEnd::None,
            Some(NodeTaskPhase::Ended { verdict: TaskOutcome::Succeeded { .. }, .. }) => TaskEnd::Succeeded,
            Some(NodeTaskPhase::Ended { verdict: TaskOutcome::Failed { .. }, .. }) | None => TaskEnd::Failed,
        }
    }
}

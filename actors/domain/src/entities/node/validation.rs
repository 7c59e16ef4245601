//! Validations of the machine with load: when they are ordered, and what follows from their results (decision 0056).
//!
//! The agent measures; the minimums of the SKU, as of the moment of the report, decide. A machine below them gets the hold `validation`,
//! and a later validation that it passes, at least as strict as those that it failed, takes back that hold alone. While a validation is open
//! the node gets no tenant.

use super::{
    CommandName, HoldAuthor, Node, NodeTask, NodeTaskPhase, Phase, Rejection, Reply, StateCode, StateReason,
    TaskOutcome,
};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::Event;
use crate::id::TaskId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::{self, Measurement, ValidationLevel, ValidationReport};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The load of a task `node.validate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationOrder {
    pub level: ValidationLevel,
    /// How long all loads of a deep validation may take together.
    pub load_seconds: u32,
}

impl ValidationOrder {
    pub(super) fn load_time(&self) -> TimeDelta {
        TimeDelta::seconds(self.load_seconds.into())
    }
}

/// The last validation with load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeValidation {
    pub task_id: TaskId,
    pub level: ValidationLevel,
    pub ended_at: Timestamp,
    pub measurements: BTreeMap<Measurement, u64>,
    /// Tests that were not made, with the reason.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_tested: BTreeMap<String, String>,
    /// Why the machine was not fit for tenants; empty where it was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shortfalls: Vec<String>,
}

impl NodeValidation {
    #[must_use]
    pub const fn is_passed(&self) -> bool {
        self.shortfalls.is_empty()
    }
}

impl Node {
    /// An administrator's order, on a node without tenants: the load would disturb them, and they the measurements.
    pub(super) fn order_validation(
        &self,
        level: ValidationLevel,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.life.has_no_identity() || self.life.is_gone() {
            return Err(self.wrong_state(CommandName::Validate));
        }
        if let Some(allocation_id) = self.holds.keys().next() {
            return Err(Rejection::InUse { allocation_id: *allocation_id });
        }
        let mut next = self.clone();
        let Some(task_id) = next.add_validation(level, ctx) else { return Err(Self::too_many_tasks()) };
        let metadata = json!({ "task_id": task_id, "level": level, "reason": reason });
        let audit = self.audit(AuditAction::NodesValidate, metadata);
        Ok(next.task_transition(task_id, format!("a {} validation was ordered: {reason}", level.name())).audit(audit))
    }

    /// The strictest level that it has failed and not passed since: only a validation of this level shows that it is fit again. A node that an
    /// earlier release stored while it held it has that of its last validation.
    #[must_use]
    pub fn failed_level(&self) -> Option<ValidationLevel> {
        let of_its_hold = || {
            let last = self.validation.as_ref().filter(|last| !last.is_passed());
            last.filter(|_| self.is_held_by(HoldAuthor::Validation)).map(|last| last.level)
        };
        self.failed_validation.or_else(of_its_hold)
    }

    /// The level of a validation after which the machine is fit.
    pub(super) fn required_level(&self) -> ValidationLevel {
        self.failed_level().unwrap_or(ValidationLevel::Quick)
    }

    /// Adds a validation with load; `None` where too many tasks have no result.
    pub(super) fn add_validation(&mut self, level: ValidationLevel, ctx: &TransitionContext<'_>) -> Option<TaskId> {
        let task_id = self.add_task(TaskType::NodeValidate, None, ctx)?;
        let order = Self::validation_order(level, ctx);
        if let Some(task) = self.tasks.get_mut(&task_id) {
            task.work.deadline_at += order.load_time();
            task.validation = Some(order);
        }
        Some(task_id)
    }

    pub(super) fn validation_order(level: ValidationLevel, ctx: &TransitionContext<'_>) -> ValidationOrder {
        let load_seconds = match level {
            ValidationLevel::Quick => 0,
            ValidationLevel::Deep => {
                let seconds = ctx.policy.int(PolicyKey::NodeDeepValidation, &Scopes::global(), ctx.now);
                u32::try_from(seconds).unwrap_or(u32::MAX)
            }
        };
        ValidationOrder { level, load_seconds }
    }

    fn open_validation(&self) -> Option<&NodeTask> {
        let of_machine = self.tasks.values().filter(|task| task.validation.is_some() && task.gpu_uuid.is_none());
        of_machine.into_iter().find(|task| !matches!(task.phase, NodeTaskPhase::Ended { .. }))
    }

    /// Why its validation excludes a new allocation; `None` where there is none.
    pub(super) fn under_validation(&self) -> Option<String> {
        match (self.open_validation(), self.failed_validation) {
            (Some(_), _) => Some("it is being validated".to_owned()),
            // Its hold was released where no validation could be ordered, such as beside tenants.
            (None, Some(level)) => {
                let level = level.name();
                Some(format!(
                    "it failed a {level} validation, and has passed none of that level since: validate it again"
                ))
            }
            (None, None) => None,
        }
    }

    /// The verdict of the control plane on a task's result: of a validation with load, the minimums of the SKU decide.
    pub(super) fn judged(
        &self,
        task: &NodeTask,
        verdict: TaskOutcome,
        output: Option<&Value>,
        ctx: &TransitionContext<'_>,
    ) -> (TaskOutcome, Option<NodeValidation>) {
        let Some(order) = task.validation else { return (verdict, None) };
        let report = ValidationReport::read(output);
        let minimums = ctx.policy.minimums(self.registration.sku.sku_id);
        let of_gpus = task.gpu_uuid.is_some().then(|| minimums.of_gpus());
        let minimums = of_gpus.as_ref().unwrap_or(minimums);
        let (verdict, shortfalls) = match verdict {
            TaskOutcome::Failed { code, message } => {
                let shortfalls = vec![message.clone()];
                (TaskOutcome::Failed { code, message }, shortfalls)
            }
            TaskOutcome::Succeeded { proof } => {
                let short = report.shortfalls(order.level, minimums);
                // Of one GPU alone only that GPU is tested.
                let gap = || match task.gpu_uuid {
                    Some(_) => None,
                    None => report.gap(order.level).or_else(|| self.shows_nothing(&report)),
                };
                let failed = if short.is_empty() {
                    gap().map(|gap| ("validation_incomplete", vec![gap]))
                } else {
                    Some(("not_fit", short))
                };
                match failed {
                    None => (TaskOutcome::Succeeded { proof }, Vec::new()),
                    Some((code, why)) => {
                        let message = validation::reason(&why);
                        (TaskOutcome::Failed { code: code.to_owned(), message }, why)
                    }
                }
            }
        };
        if task.gpu_uuid.is_some() {
            return (verdict, None);
        }
        let ValidationReport { measurements, not_tested, .. } = report;
        let validation = NodeValidation {
            task_id: task.work.task_id,
            level: order.level,
            ended_at: ctx.now,
            measurements,
            not_tested,
            shortfalls: shortfalls.iter().map(|it| validation::reason(std::slice::from_ref(it))).collect(),
        };
        (verdict, Some(validation))
    }

    /// A machine that failed a validation is not fit by one that has measured nothing of it, such as after its tools were removed.
    fn shows_nothing(&self, report: &ValidationReport) -> Option<String> {
        let failed = self.failed_level().filter(|_| report.measurements.is_empty())?.name();
        let why: Vec<_> =
            report.not_tested.iter().map(|(test, why)| format!("{test} was not tested ({why})")).collect();
        Some(format!("nothing was measured of a machine that failed a {failed} validation: {}", why.join(", ")))
    }

    /// Whether this result shows that the machine is fit: at least as strict a validation as those that it failed. A check without load shows
    /// that only where it failed none with load, and the SKU has no minimum.
    pub(super) fn is_validated_by(&self, task: &NodeTask, verdict: &TaskOutcome, ctx: &TransitionContext<'_>) -> bool {
        let is_enough = match (&task.validation, self.failed_level()) {
            (Some(order), failed) => failed.is_none_or(|failed| order.level >= failed),
            (None, Some(_)) => false,
            (None, None) => ctx.policy.minimums(self.registration.sku.sku_id).is_empty(),
        };
        let is_of_machine = task.task_type == TaskType::NodeValidate && task.gpu_uuid.is_none();
        is_of_machine && matches!(verdict, TaskOutcome::Succeeded { .. }) && is_enough
    }

    /// Remembers the result of a validation with load. Called before it is stored as the last one.
    pub(super) fn note_validation(&mut self, validation: NodeValidation) {
        let failed = self.failed_level();
        self.failed_validation = if validation.is_passed() {
            failed.filter(|failed| *failed > validation.level)
        } else {
            failed.max(Some(validation.level))
        };
        self.validation = Some(Box::new(validation));
    }

    /// What the hold says of a machine that is not fit.
    pub(super) fn unfit_message(&self, why: &str) -> String {
        let way_out = match self.failed_validation {
            Some(ValidationLevel::Deep) => "; it is held until it passes a deep validation",
            Some(ValidationLevel::Quick) | None => "",
        };
        format!("The machine is not fit for tenants: {why}{way_out}")
    }

    /// The machine is fit: what waited for that goes on, as part of this transition.
    pub(super) fn follow_validation(&mut self, ctx: &TransitionContext<'_>) -> (Vec<Event>, Vec<AuditRecord>) {
        let (mut events, mut audits) = self.finish_reimage(ctx);
        if let Some((released, audit)) = self.take_back_holds(&[HoldAuthor::Validation], ctx) {
            events.extend(released);
            audits.push(audit);
        }
        if matches!(self.life, Phase::Enrolling { .. })
            && self.mismatch().is_none()
            && !self.lacks_first_validation(ctx)
        {
            let message = "The agent polls, the inventory matches, and the machine passed its validation.";
            events.push(self.enter(Phase::Active, StateCode::FirstPoll, message, ctx));
            audits.push(self.audit(AuditAction::NodesActivate, json!({})));
        }
        (events, audits)
    }

    /// True where it has to pass a validation before it is active for the first time: its SKU has minimums, or it failed one.
    pub(super) fn lacks_first_validation(&self, ctx: &TransitionContext<'_>) -> bool {
        let is_passed = self.validation.as_ref().is_some_and(|it| it.is_passed());
        let has_minimums = !ctx.policy.minimums(self.registration.sku.sku_id).is_empty();
        self.failed_level().is_some() || (!is_passed && has_minimums)
    }

    /// Orders the first validation of an enrolled node that is in contact, unless it is open.
    pub(super) fn begin_first_validation(
        &self,
        mut next: Self,
        reply: Reply,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        const MESSAGE: &str = "The machine is validated before it takes tenants.";
        let level = next.required_level();
        if next.open_validation().is_none() && next.add_validation(level, ctx).is_some() {
            next.life = next.enrolling_with_load(&next.life, level, ctx);
            next.reason = StateReason::new(StateCode::CertificateIssued, MESSAGE);
            return Transition::to(next, reply, "its first validation was ordered").effect(Effect::WakeNode(self.id));
        }
        if next == *self { Transition::stay(reply) } else { Transition::to(next, reply, "the agent was in contact") }
    }

    /// Its life, with time for a validation of this level where it is enrolling.
    fn enrolling_with_load(&self, life: &Phase, level: ValidationLevel, ctx: &TransitionContext<'_>) -> Phase {
        let Phase::Enrolling { until } = life else { return life.clone() };
        let time = ctx.policy.seconds(PolicyKey::NodeTaskTimeout, &Scopes::global(), ctx.now);
        let load = Self::validation_order(level, ctx).load_time();
        Phase::Enrolling { until: (ctx.now + time + load).max(*until) }
    }

    /// What holds an enrolled node up that is in contact.
    pub(super) fn enrollment_waits_for(&self) -> &'static str {
        if self.open_validation().is_some() {
            "the machine has not passed its first validation"
        } else {
            "the agent has not polled with its certificate"
        }
    }

    /// An operator releases a hold of its validation: the machine shows by another one whether it is fit.
    /// Returns the state that the node gets.
    pub(super) fn validate_released(&mut self, was: &Phase, ctx: &TransitionContext<'_>) -> Result<Phase, Rejection> {
        self.failed_validation = self.failed_level();
        if !self.is_held_by(HoldAuthor::Validation) || !self.holds.is_empty() {
            return Ok(was.clone());
        }
        let level = self.required_level();
        match was {
            // The token of an enrolling one may have expired while it was held.
            Phase::Active | Phase::Offline | Phase::Enrolling { .. } => {
                self.add_validation(level, ctx).ok_or_else(Self::too_many_tasks)?;
                Ok(self.enrolling_with_load(was, level, ctx))
            }
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => Ok(was.clone()),
        }
    }
}

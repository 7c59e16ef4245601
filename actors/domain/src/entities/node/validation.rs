//! Validations of the machine with load: what their results show (decision 0056).
//!
//! The agent measures; the minimums of the SKU, as of the moment of the report, decide. A machine below them gets the hold `validation`,
//! and a later validation that it passes, at least as strict as those that it failed, takes back that hold alone. While a validation is open
//! the node gets no tenant.

use super::{NodeTask, TaskOutcome};
use crate::id::TaskId;
use crate::state_machine::Timestamp;
use crate::task_type::TaskType;
use crate::validation::{self, Measurement, ValidationLevel, ValidationMinimums, ValidationReport};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The part of a node that knows what its machine has shown under load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Validation {
    /// The last validation with load.
    pub last: Option<Box<NodeValidation>>,
    /// The strictest level that it has failed and not passed since. See [`Validation::failed_level`].
    pub(super) failed: Option<ValidationLevel>,
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

impl Validation {
    /// The strictest level that it has failed and not passed since: only a validation of this level shows that it is fit again. A node that an
    /// earlier release stored while a failed validation held it (`is_held`) has that of its last validation.
    pub(super) fn failed_level(&self, is_held: bool) -> Option<ValidationLevel> {
        let of_its_hold = || self.last.as_ref().filter(|last| is_held && !last.is_passed()).map(|last| last.level);
        self.failed.or_else(of_its_hold)
    }

    /// Why it excludes a new allocation; `None` where it does not. A validation is open where `is_open`.
    pub(super) fn obstacle(&self, is_open: bool) -> Option<String> {
        if is_open {
            return Some("it is being validated".to_owned());
        }
        // Its hold was released where no validation could be ordered, such as beside tenants.
        let level = self.failed?.name();
        Some(format!("it failed a {level} validation, and has passed none of that level since: validate it again"))
    }

    /// The verdict of the control plane on a task's result: of a validation with load, the minimums of the SKU decide.
    /// `failed` is the strictest level that the machine has failed and not passed since.
    pub(super) fn judge(
        task: &NodeTask,
        (verdict, output): (TaskOutcome, Option<&Value>),
        minimums: &ValidationMinimums,
        failed: Option<ValidationLevel>,
        now: Timestamp,
    ) -> (TaskOutcome, Option<NodeValidation>) {
        let Some(order) = task.validation else { return (verdict, None) };
        let report = ValidationReport::read(output);
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
                    None => report.gap(order.level).or_else(|| shows_nothing(failed, &report)),
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
            ended_at: now,
            measurements,
            not_tested,
            shortfalls: shortfalls.iter().map(|it| validation::reason(std::slice::from_ref(it))).collect(),
        };
        (verdict, Some(validation))
    }

    /// Whether this result shows that the machine is fit: at least as strict a validation as those that it failed. A check without load shows
    /// that only where it failed none with load, and the SKU has no minimum.
    pub(super) fn is_passed_by(
        task: &NodeTask,
        verdict: &TaskOutcome,
        minimums: &ValidationMinimums,
        failed: Option<ValidationLevel>,
    ) -> bool {
        let is_enough = match (&task.validation, failed) {
            (Some(order), failed) => failed.is_none_or(|failed| order.level >= failed),
            (None, Some(_)) => false,
            (None, None) => minimums.is_empty(),
        };
        let is_of_machine = task.task_type == TaskType::NodeValidate && task.gpu_uuid.is_none();
        is_of_machine && matches!(verdict, TaskOutcome::Succeeded { .. }) && is_enough
    }

    /// Remembers the result of a validation with load, of a machine that had failed this level before.
    pub(super) fn note(&mut self, validation: NodeValidation, failed: Option<ValidationLevel>) {
        self.failed = if validation.is_passed() {
            failed.filter(|failed| *failed > validation.level)
        } else {
            failed.max(Some(validation.level))
        };
        self.last = Some(Box::new(validation));
    }

    /// It may be another machine than the one that was validated. One that failed has to pass whatever it is.
    pub(super) fn forget_machine(&mut self, failed: Option<ValidationLevel>) {
        *self = Self { last: None, failed };
    }

    /// What the hold says of a machine that is not fit.
    pub(super) fn unfit_message(&self, why: &str) -> String {
        let way_out = match self.failed {
            Some(ValidationLevel::Deep) => "; it is held until it passes a deep validation",
            Some(ValidationLevel::Quick) | None => "",
        };
        format!("The machine is not fit for tenants: {why}{way_out}")
    }

    /// True where it has to pass a validation before it is active for the first time: its SKU has minimums, or it failed one.
    pub(super) fn lacks_first(&self, has_minimums: bool, failed: Option<ValidationLevel>) -> bool {
        let is_passed = self.last.as_ref().is_some_and(|it| it.is_passed());
        failed.is_some() || (!is_passed && has_minimums)
    }
}

/// A machine that failed a validation is not fit by one that has measured nothing of it, such as after its tools were removed.
fn shows_nothing(failed: Option<ValidationLevel>, report: &ValidationReport) -> Option<String> {
    let failed = failed.filter(|_| report.measurements.is_empty())?.name();
    let why: Vec<_> = report.not_tested.iter().map(|(test, why)| format!("{test} was not tested ({why})")).collect();
    Some(format!("nothing was measured of a machine that failed a {failed} validation: {}", why.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::tests::start;
    use super::*;

    #[test]
    fn machine_that_failed_a_level_is_fit_by_a_validation_of_that_level_alone() {
        let mut part = Validation::default();
        let note = |part: &mut Validation, level, shortfalls: &[&str]| {
            let failed = part.failed_level(false);
            let shortfalls = shortfalls.iter().map(|it| (*it).to_owned()).collect();
            let (task_id, measurements, not_tested) = (TaskId(uuid::Uuid::nil()), BTreeMap::new(), BTreeMap::new());
            part.note(
                NodeValidation { task_id, level, ended_at: start(), measurements, not_tested, shortfalls },
                failed,
            );
        };
        note(&mut part, ValidationLevel::Deep, &["the disk is slow"]);
        note(&mut part, ValidationLevel::Quick, &[]);
        assert_eq!(part.failed_level(false), Some(ValidationLevel::Deep));
        assert!(part.obstacle(false).unwrap().contains("deep") && part.lacks_first(false, part.failed_level(false)));
        note(&mut part, ValidationLevel::Deep, &[]);
        assert_eq!((part.failed_level(false), part.obstacle(false)), (None, None));
    }
}

//! Tasks of the node itself, not of a tenant: ordered by an administrator or by another part, with the result in the node's own state.
//!
//! A task without a result in time is handled as its type says ([`StaleTaskAction`]). One that must not happen twice waits until an
//! operator has checked and resumes it, and is shown as overdue.

use super::{AgentTask, AgentUpdate, PendingTask, Rejection, TaskKind, TaskOutcome, ValidationOrder, outcome};
use crate::audit::{AuditAction, AuditRecord};
use crate::id::{RolloutId, TaskId};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use crate::task_type::{StaleTaskAction, TaskType};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The bound of tasks without a result.
const MAX_OPEN: usize = 8;
/// The bound of remembered results.
const MAX_ENDED: usize = 8;

/// The part of a node that knows its own tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tasks {
    /// Those without a result, and the last results.
    pub by_id: BTreeMap<TaskId, NodeTask>,
}

/// A task of the node itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTask {
    pub task_type: TaskType,
    pub work: PendingTask,
    /// The boot of the machine at the order: a restart is not done twice.
    pub boot_id: Option<String>,
    /// Of a task `agent.update`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update: Option<AgentUpdate>,
    /// The load of a task `node.validate`; `None`: a check without load.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationOrder>,
    /// The one GPU of a task `node.gpu_reset`, and of the task `node.validate` that follows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    pub phase: NodeTaskPhase,
}

/// The phase of a node's task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum NodeTaskPhase {
    /// Dispatched to the agent until it reports.
    Open,
    /// No result in time: it is unknown whether it was executed.
    AwaitsOperator {
        since: Timestamp,
    },
    Ended {
        at: Timestamp,
        verdict: TaskOutcome,
        output: Option<Value>,
    },
}

/// What a task is about, beside its type.
#[derive(Default)]
pub(super) struct TaskSubject<'a> {
    /// Of a task `agent.update`.
    pub(super) update: Option<AgentUpdate>,
    /// Of a task `node.validate` with load.
    pub(super) validation: Option<ValidationOrder>,
    /// The one GPU that it is about.
    pub(super) gpu_uuid: Option<&'a str>,
}

/// A task without a result in time, and what has happened with it.
pub(super) struct StaleTask {
    pub(super) task_id: TaskId,
    pub(super) task_type: TaskType,
    pub(super) action: StaleTaskAction,
}

/// How a task ended.
pub(super) enum TaskEnd {
    Succeeded,
    /// With the agent's code and message.
    Failed(String),
    /// Its result is not remembered.
    Forgotten,
}

impl NodeTask {
    const fn is_open(&self) -> bool {
        matches!(self.phase, NodeTaskPhase::Open)
    }

    pub(super) const fn has_ended(&self) -> bool {
        matches!(self.phase, NodeTaskPhase::Ended { .. })
    }

    fn is_overdue(&self, now: Timestamp) -> bool {
        self.is_open() && self.work.deadline_at <= now
    }

    fn requeue(&mut self, ctx: &TransitionContext<'_>) {
        self.work.attempt = self.work.attempt.saturating_add(1);
        self.work.ordered_at = ctx.now;
        let load_time = self.validation.as_ref().map_or_else(TimeDelta::zero, ValidationOrder::load_time);
        self.work.deadline_at = ctx.now + task_time(self.update.as_ref(), ctx) + load_time;
        self.phase = NodeTaskPhase::Open;
    }

    /// The result of an update that failed: its code and its message.
    #[must_use]
    pub fn failure(&self) -> Option<(&str, &str)> {
        match &self.phase {
            NodeTaskPhase::Ended { verdict: TaskOutcome::Failed { code, message }, .. } => Some((code, message)),
            NodeTaskPhase::Ended { verdict: TaskOutcome::Succeeded { .. }, .. }
            | NodeTaskPhase::Open
            | NodeTaskPhase::AwaitsOperator { .. } => None,
        }
    }
}

impl Tasks {
    pub(super) const fn too_many() -> Rejection {
        Rejection::TooManyTasks { limit: MAX_OPEN }
    }

    /// Adds a task for the agent, which is in this boot; `None` where too many have no result.
    pub(super) fn add(
        &mut self,
        task_type: TaskType,
        subject: TaskSubject<'_>,
        boot_id: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) -> Option<TaskId> {
        if self.by_id.values().filter(|task| !task.has_ended()).count() >= MAX_OPEN {
            return None;
        }
        let task_id = TaskId(ctx.new_id(0));
        self.insert(task_id, task_type, subject, boot_id, ctx);
        self.forget_old();
        Some(task_id)
    }

    /// Adds the validation of a reinstalled machine, however many tasks have no result.
    pub(super) fn add_system_validation(
        &mut self,
        order: ValidationOrder,
        boot_id: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) {
        let subject = TaskSubject { validation: Some(order), ..TaskSubject::default() };
        self.insert(TaskId(ctx.new_id(1)), TaskType::NodeValidate, subject, boot_id, ctx);
    }

    fn insert(
        &mut self,
        task_id: TaskId,
        task_type: TaskType,
        subject: TaskSubject<'_>,
        boot_id: Option<&str>,
        ctx: &TransitionContext<'_>,
    ) {
        let TaskSubject { update, validation, gpu_uuid } = subject;
        // The validation of one GPU has the time of any other task.
        let load = validation.filter(|_| gpu_uuid.is_none()).map_or_else(TimeDelta::zero, |order| order.load_time());
        let work = PendingTask {
            task_id,
            attempt: 1,
            ordered_at: ctx.now,
            deadline_at: ctx.now + task_time(update.as_ref(), ctx) + load,
            origin: Some(ctx.origin()),
        };
        let (boot_id, gpu_uuid) = (boot_id.map(str::to_owned), gpu_uuid.map(str::to_owned));
        let phase = NodeTaskPhase::Open;
        self.by_id.insert(task_id, NodeTask { task_type, work, boot_id, update, validation, gpu_uuid, phase });
    }

    /// An operator resumes a task that waits for one. Returns its type.
    pub(super) fn resume(&mut self, task_id: TaskId, ctx: &TransitionContext<'_>) -> Result<TaskType, Rejection> {
        let Some(task) = self.by_id.get_mut(&task_id) else { return Err(Rejection::TaskUnknown) };
        let refused = |why: &str| Err(Rejection::TaskDoesNotWait { why: why.to_owned() });
        match task.phase {
            NodeTaskPhase::AwaitsOperator { .. } => task.requeue(ctx),
            NodeTaskPhase::Open => return refused("it is with the agent"),
            NodeTaskPhase::Ended { .. } => return refused("the agent has reported on it"),
        }
        Ok(task.task_type)
    }

    /// The task of which a result of this attempt is reported.
    pub(super) fn reported(&self, task_id: TaskId, attempt: u32) -> Result<&NodeTask, Rejection> {
        let Some(task) = self.by_id.get(&task_id) else { return Err(Rejection::TaskUnknown) };
        if attempt != task.work.attempt || task.has_ended() {
            return Err(Rejection::StaleAttempt { given: attempt, current: task.work.attempt });
        }
        Ok(task)
    }

    pub(super) fn end(&mut self, task_id: TaskId, verdict: TaskOutcome, output: Option<Value>, now: Timestamp) {
        if let Some(task) = self.by_id.get_mut(&task_id) {
            task.phase = NodeTaskPhase::Ended { at: now, verdict, output };
        }
        self.forget_old();
    }

    /// Handles overdue tasks as their type says. `lacks` says why the agent does not support a type of tasks.
    pub(super) fn expire_stale(
        &mut self,
        lacks: impl Fn(TaskType) -> Option<String>,
        ctx: &TransitionContext<'_>,
    ) -> Vec<StaleTask> {
        let mut stale = Vec::new();
        for (task_id, task) in self.by_id.iter_mut().filter(|(_, task)| task.is_overdue(ctx.now)) {
            let action = task.task_type.when_stale();
            let failed = match action {
                StaleTaskAction::Requeue => match lacks(task.task_type) {
                    None => {
                        task.requeue(ctx);
                        None
                    }
                    // It was not dispatched, and would not be.
                    Some(message) => Some(("task_type_unknown", message)),
                },
                StaleTaskAction::AwaitOperator => {
                    task.phase = NodeTaskPhase::AwaitsOperator { since: ctx.now };
                    None
                }
                StaleTaskAction::Expire => Some(("expired", "The agent did not report in time.".to_owned())),
            };
            if let Some((code, message)) = failed {
                let verdict = TaskOutcome::Failed { code: code.to_owned(), message };
                task.phase = NodeTaskPhase::Ended { at: ctx.now, verdict, output: None };
            }
            stale.push(StaleTask { task_id: *task_id, task_type: task.task_type, action });
        }
        stale
    }

    /// The tasks for the agent.
    pub(super) fn open(&self) -> impl Iterator<Item = AgentTask> + '_ {
        let open = self.by_id.values().filter(|task| task.is_open());
        open.map(|task| AgentTask {
            work: task.work.clone(),
            what: TaskKind::OfNode {
                task_type: task.task_type,
                boot_id: task.boot_id.clone(),
                update: task.update.clone(),
                validation: task.validation,
                gpu_uuid: task.gpu_uuid.clone(),
            },
        })
    }

    /// When the next task is overdue.
    pub(super) fn due_at(&self) -> Option<Timestamp> {
        self.by_id.values().filter(|task| task.is_open()).map(|task| task.work.deadline_at).min()
    }

    /// The task that an operator has to check now or later: a task that can be retried needs no operator, a task type that the agent does
    /// not support needs an upgrade. `lacks` says why the agent does not support a type of tasks.
    pub(super) fn deadline(&self, lacks: impl Fn(TaskType) -> Option<String>) -> Option<Deadline> {
        let waits = self.by_id.values().filter_map(|task| {
            let lacks = lacks(task.task_type);
            match task.phase {
                NodeTaskPhase::AwaitsOperator { since } => {
                    let of_the_agent = lacks.map(|why| format!("; {why}")).unwrap_or_default();
                    let why = format!("{} was not reported on: look and resume it{of_the_agent}", task.task_type);
                    Some(Deadline::new(since, why))
                }
                NodeTaskPhase::Open => {
                    let waits_for_operator = task.task_type.when_stale() == StaleTaskAction::AwaitOperator;
                    let unreported = || format!("{} was not reported on yet", task.task_type);
                    let why = lacks.or_else(|| waits_for_operator.then(unreported))?;
                    Some(Deadline::new(task.work.deadline_at, why))
                }
                NodeTaskPhase::Ended { .. } => None,
            }
        });
        waits.min_by_key(|deadline| deadline.at)
    }

    /// `None` where the agent has not reported on it.
    pub(super) fn end_of(&self, task_id: TaskId) -> Option<TaskEnd> {
        match self.by_id.get(&task_id).map(|task| &task.phase) {
            Some(NodeTaskPhase::Open | NodeTaskPhase::AwaitsOperator { .. }) => None,
            Some(NodeTaskPhase::Ended { verdict: TaskOutcome::Succeeded { .. }, .. }) => Some(TaskEnd::Succeeded),
            Some(NodeTaskPhase::Ended { verdict: TaskOutcome::Failed { code, message }, .. }) => {
                Some(TaskEnd::Failed(format!("{code}: {message}")))
            }
            None => Some(TaskEnd::Forgotten),
        }
    }

    /// The first task of one of these types without a result.
    pub(super) fn unended(&self, types: &[TaskType]) -> Option<&NodeTask> {
        self.by_id.values().find(|task| types.contains(&task.task_type) && !task.has_ended())
    }

    /// A validation of the machine with load is without a result.
    pub(super) fn has_open_validation(&self) -> bool {
        let mut of_machine = self.by_id.values().filter(|task| task.validation.is_some() && task.gpu_uuid.is_none());
        of_machine.any(|task| !task.has_ended())
    }

    /// The latest update of the agent that is remembered: open, or with its result.
    #[must_use]
    pub fn latest_update(&self) -> Option<&NodeTask> {
        // Ids ascend with time.
        self.by_id.values().rev().find(|task| task.task_type == TaskType::AgentUpdate)
    }

    /// The rollout that has ordered this update.
    pub(super) fn rollout_of(&self, task_id: TaskId) -> Option<RolloutId> {
        self.by_id.get(&task_id)?.update.as_ref()?.rollout_id
    }

    pub(super) fn has_open_update_of(&self, rollout_id: RolloutId) -> bool {
        self.by_id.values().any(|task| {
            let is_of_it = task.update.as_ref().is_some_and(|update| update.rollout_id == Some(rollout_id));
            is_of_it && !task.has_ended()
        })
    }

    fn forget_old(&mut self) {
        while self.by_id.values().filter(|task| task.has_ended()).count() > MAX_ENDED {
            // Ids ascend with time.
            let oldest = self.by_id.iter().find(|(_, task)| task.has_ended()).map(|(task_id, _)| *task_id);
            let Some(oldest) = oldest else { return };
            self.by_id.remove(&oldest);
        }
    }
}

impl StaleTask {
    /// Of a task that waits for an operator.
    pub(super) fn audit(&self, ctx: &TransitionContext<'_>) -> AuditRecord {
        let metadata = json!({ "task_id": self.task_id, "task_type": self.task_type });
        outcome::audit(AuditAction::NodesStallTask, metadata, ctx)
    }
}

/// An update also waits for the proof of the new agent.
fn task_time(update: Option<&AgentUpdate>, ctx: &TransitionContext<'_>) -> TimeDelta {
    let commit = update.map_or(0, |update| update.commit_seconds);
    ctx.policy.seconds(PolicyKey::NodeTaskTimeout, &Scopes::global(), ctx.now) + TimeDelta::seconds(commit.into())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decided_at, start};
    use super::*;

    #[test]
    fn tasks_without_a_result_are_bounded_and_one_with_the_agent_is_not_resumed() {
        let mut tasks = Tasks::default();
        let add = |tasks: &mut Tasks, n: usize| {
            let subject = TaskSubject::default();
            let at = start() + TimeDelta::seconds(i64::try_from(n).unwrap());
            decided_at(at, |ctx| tasks.add(TaskType::DiagnosticsCollect, subject, None, ctx))
        };
        let open = add(&mut tasks, 0).unwrap();
        assert!((1..MAX_OPEN).all(|n| add(&mut tasks, n).is_some()));
        assert_eq!(add(&mut tasks, MAX_OPEN), None);
        let resumed = decided_at(start(), |ctx| tasks.resume(open, ctx));
        assert!(matches!(resumed, Err(Rejection::TaskDoesNotWait { why }) if why == "it is with the agent"));
        assert_eq!(tasks.reported(open, 2).unwrap_err(), Rejection::StaleAttempt { given: 2, current: 1 });
    }
}

//! Tasks of the node itself, not of a tenant: ordered by an administrator, with the result in the node's own state.
//!
//! A task without a result in time is handled as its type says ([`StaleTaskAction`]). One that must not happen twice waits until an
//! operator has checked and resumes it, and is shown as overdue.

use super::{
    AgentTask, AgentUpdate, CommandName, Node, PendingTask, Rejection, Reply, StateCode, TaskKind, TaskOutcome,
    ValidationOrder,
};
use crate::audit::AuditAction;
use crate::id::TaskId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Effect, Timestamp, Transition, TransitionContext};
use crate::task_type::{StaleTaskAction, TaskType};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The bound of tasks without a result.
const MAX_OPEN: usize = 8;
/// The bound of remembered results.
const MAX_ENDED: usize = 8;

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
}

impl Node {
    pub(super) fn order_task(
        &self,
        task_type: TaskType,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.life.has_no_identity() || self.life.is_gone() {
            return Err(self.wrong_state(CommandName::OrderTask));
        }
        if !TaskType::ORDERED.contains(&task_type) {
            return Err(Rejection::NotOrdered { task_type });
        }
        let (next, task_id) = self.with_task(task_type, None, ctx)?;
        let metadata = json!({ "task_id": task_id, "task_type": task_type, "reason": reason });
        let audit = self.audit(AuditAction::NodesOrderTask, metadata);
        Ok(next.task_transition(task_id, format!("{task_type} was ordered: {reason}")).audit(audit))
    }

    /// The node with one more open task of its own.
    pub(super) fn with_task(
        &self,
        task_type: TaskType,
        update: Option<AgentUpdate>,
        ctx: &TransitionContext<'_>,
    ) -> Result<(Self, TaskId), Rejection> {
        let mut next = self.clone();
        match next.add_task(task_type, update, ctx) {
            Some(task_id) => Ok((next, task_id)),
            None => Err(Self::too_many_tasks()),
        }
    }

    pub(super) const fn too_many_tasks() -> Rejection {
        Rejection::TooManyTasks { limit: MAX_OPEN }
    }

    /// Adds a task for the agent; `None` where too many have no result.
    pub(super) fn add_task(
        &mut self,
        task_type: TaskType,
        update: Option<AgentUpdate>,
        ctx: &TransitionContext<'_>,
    ) -> Option<TaskId> {
        if self.tasks.values().filter(|task| !task.has_ended()).count() >= MAX_OPEN {
            return None;
        }
        let task_id = TaskId(ctx.new_id(0));
        let work = PendingTask {
            task_id,
            attempt: 1,
            ordered_at: ctx.now,
            deadline_at: ctx.now + task_time(update.as_ref(), ctx),
            origin: Some(ctx.origin()),
        };
        let boot_id = self.seen.as_ref().map(|seen| seen.boot_id.clone());
        let phase = NodeTaskPhase::Open;
        let task = NodeTask { task_type, work, boot_id, update, validation: None, gpu_uuid: None, phase };
        self.tasks.insert(task_id, task);
        self.forget_old_tasks();
        Some(task_id)
    }

    pub(super) fn resume_task(
        &self,
        task_id: TaskId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Some(task) = self.tasks.get(&task_id) else { return Err(Rejection::TaskUnknown) };
        match task.phase {
            NodeTaskPhase::AwaitsOperator { .. } => {}
            NodeTaskPhase::Open => return Err(Rejection::TaskDoesNotWait { why: "it is with the agent".to_owned() }),
            NodeTaskPhase::Ended { .. } => {
                return Err(Rejection::TaskDoesNotWait { why: "the agent has reported on it".to_owned() });
            }
        }
        let mut next = self.clone();
        if let Some(task) = next.tasks.get_mut(&task_id) {
            task.requeue(ctx);
        }
        let metadata = json!({ "task_id": task_id, "task_type": task.task_type, "reason": reason });
        let audit = self.audit(AuditAction::NodesResumeTask, metadata);
        Ok(next.task_transition(task_id, format!("an operator resumed {}: {reason}", task.task_type)).audit(audit))
    }

    pub(super) fn task_transition(self, task_id: TaskId, why: String) -> Transition<Self> {
        let wake = Effect::WakeNode(self.id);
        let reply = Reply::Task { task_id, node: Box::new(self.clone()) };
        Transition::to(self, reply, why).effect(wake)
    }

    /// The result of a task of the node itself.
    pub(super) fn task_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: TaskOutcome,
        output: Option<Value>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Some(task) = self.tasks.get(&task_id) else { return Err(Rejection::TaskUnknown) };
        if attempt != task.work.attempt || task.has_ended() {
            return Err(Rejection::StaleAttempt { given: attempt, current: task.work.attempt });
        }
        let task_type = task.task_type;
        let (verdict, validation) = self.judged(task, verdict, output.as_ref(), ctx);
        let why = match &verdict {
            TaskOutcome::Succeeded { .. } => format!("the agent did {task_type}"),
            TaskOutcome::Failed { code, message } => format!("{task_type} failed ({code}): {message}"),
        };
        let of_update = self.update_event(task, &verdict);
        let is_validated = self.is_validated_by(task, &verdict, ctx);
        let mut next = self.clone();
        if is_validated && task.validation.is_some() {
            next.forget_unfit_gpus();
        }
        if let Some(validation) = validation {
            next.note_validation(validation);
        }
        let unfit = match (&verdict, task_type) {
            (TaskOutcome::Failed { message, .. }, TaskType::NodeValidate)
                if task.gpu_uuid.is_none() && self.may_be_quarantined() =>
            {
                Some(message.clone())
            }
            _ => None,
        };
        next.end_rollout_update(task_id, &verdict);
        if let Some(task) = next.tasks.get_mut(&task_id) {
            task.phase = NodeTaskPhase::Ended { at: ctx.now, verdict, output };
        }
        next.forget_old_tasks();
        let Some(unfit) = unfit else {
            let (events, audits) = if is_validated { next.follow_validation(ctx) } else { (Vec::new(), Vec::new()) };
            let step = Transition::to(next, Reply::Done, why);
            let step = of_update.into_iter().chain(events).fold(step, Transition::event);
            return Ok(audits.into_iter().fold(step, Transition::audit));
        };
        let message = next.unfit_message(&unfit);
        let event = next.enter_quarantine(StateCode::ValidationFailed, &message, ctx);
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "code": StateCode::ValidationFailed }));
        let step = Transition::to(next, Reply::Done, why).audit(audit);
        Ok(event.into_iter().fold(step, Transition::event))
    }

    /// Handles overdue tasks as their type says, as part of this transition.
    pub(super) fn expire_stale_tasks(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let mut stale = Vec::new();
        let withheld = next.clone();
        for (task_id, task) in next.tasks.iter_mut().filter(|(_, task)| task.is_overdue(ctx.now)) {
            let when_stale = task.task_type.when_stale();
            match when_stale {
                StaleTaskAction::Requeue => match withheld.lacks_task_type(task.task_type) {
                    None => task.requeue(ctx),
                    // It was not dispatched, and would not be.
                    Some(message) => {
                        let verdict = TaskOutcome::Failed { code: "task_type_unknown".to_owned(), message };
                        task.phase = NodeTaskPhase::Ended { at: ctx.now, verdict, output: None };
                    }
                },
                StaleTaskAction::AwaitOperator => task.phase = NodeTaskPhase::AwaitsOperator { since: ctx.now },
                StaleTaskAction::Expire => {
                    let (code, message) = ("expired".to_owned(), "The agent did not report in time.".to_owned());
                    let verdict = TaskOutcome::Failed { code, message };
                    task.phase = NodeTaskPhase::Ended { at: ctx.now, verdict, output: None };
                }
            }
            stale.push((*task_id, task.task_type, when_stale));
        }
        if stale.is_empty() {
            return step;
        }
        let stalled = stale.iter().filter(|(_, _, action)| *action == StaleTaskAction::AwaitOperator);
        let of_rollouts: Vec<_> = stalled.filter_map(|(task_id, ..)| next.stall_rollout_update(*task_id)).collect();
        let why = if step.next.is_some() { step.why.clone() } else { "tasks were not reported on in time".to_owned() };
        let step = of_rollouts.into_iter().fold(Transition { next: Some(next), why, ..step }, Transition::event);
        stale.into_iter().fold(step, |step, (task_id, task_type, when_stale)| match when_stale {
            StaleTaskAction::Requeue => step.effect(Effect::WakeNode(self.id)),
            StaleTaskAction::AwaitOperator => {
                let metadata = json!({ "task_id": task_id, "task_type": task_type });
                step.audit(self.audit(AuditAction::NodesStallTask, metadata))
            }
            StaleTaskAction::Expire => step,
        })
    }

    /// The node's own tasks for the agent.
    pub(super) fn node_tasks(&self) -> impl Iterator<Item = AgentTask> + '_ {
        let open = self.tasks.values().filter(|task| task.is_open());
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
    pub(super) fn task_due_at(&self) -> Option<Timestamp> {
        self.tasks.values().filter(|task| task.is_open()).map(|task| task.work.deadline_at).min()
    }

    /// The task that an operator has to check now or later: a task that can be retried needs no operator, a task type that the agent does
    /// not support needs an upgrade.
    pub(super) fn task_deadline(&self) -> Option<Deadline> {
        let waits = self.tasks.values().filter_map(|task| match task.phase {
            NodeTaskPhase::AwaitsOperator { since } => {
                let of_the_agent =
                    self.lacks_task_type(task.task_type).map(|why| format!("; {why}")).unwrap_or_default();
                let why = format!("{} was not reported on: look and resume it{of_the_agent}", task.task_type);
                Some(Deadline::new(since, why))
            }
            NodeTaskPhase::Open if self.lacks_task_type(task.task_type).is_some() => {
                self.lacks_task_type(task.task_type).map(|why| Deadline::new(task.work.deadline_at, why))
            }
            NodeTaskPhase::Open if task.task_type.when_stale() == StaleTaskAction::AwaitOperator => {
                Some(Deadline::new(task.work.deadline_at, format!("{} was not reported on yet", task.task_type)))
            }
            NodeTaskPhase::Open | NodeTaskPhase::Ended { .. } => None,
        });
        waits.min_by_key(|deadline| deadline.at)
    }

    fn forget_old_tasks(&mut self) {
        while self.tasks.values().filter(|task| task.has_ended()).count() > MAX_ENDED {
            // Ids ascend with time.
            let oldest = self.tasks.iter().find(|(_, task)| task.has_ended()).map(|(task_id, _)| *task_id);
            let Some(oldest) = oldest else { return };
            self.tasks.remove(&oldest);
        }
    }
}

impl NodeTask {
    fn requeue(&mut self, ctx: &TransitionContext<'_>) {
        self.work.attempt = self.work.attempt.saturating_add(1);
        self.work.ordered_at = ctx.now;
        let load_time = self.validation.as_ref().map_or_else(TimeDelta::zero, ValidationOrder::load_time);
        self.work.deadline_at = ctx.now + task_time(self.update.as_ref(), ctx) + load_time;
        self.phase = NodeTaskPhase::Open;
    }
}

/// An update also waits for the proof of the new agent.
fn task_time(update: Option<&AgentUpdate>, ctx: &TransitionContext<'_>) -> TimeDelta {
    let commit = update.map_or(0, |update| update.commit_seconds);
    ctx.policy.seconds(PolicyKey::NodeTaskTimeout, &Scopes::global(), ctx.now) + TimeDelta::seconds(commit.into())
}

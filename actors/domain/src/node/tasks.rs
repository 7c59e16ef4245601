//! What the node's agent is to do that is no tenant's: ordered by an administrator, and answered in the node's own state.
//!
//! A task that is not reported on in time goes the way that its type says ([`WhenStale`]). One that must not happen twice stands until
//! an operator has looked and resumes it, overdue wherever overdue things are shown.

use super::{Command, Life, Node, Order, Rejection, Reply, Verdict, What, Work};
use crate::audit::AuditAction;
use crate::id::TaskId;
use crate::machine::{Ctx, Deadline, Effect, Step, Timestamp};
use crate::policy::{Key, Scopes};
use crate::task_type::{TaskType, WhenStale};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Tasks that a node may have before it has reported on one of them.
const OPEN: usize = 8;
/// Outcomes that a node remembers.
const REMEMBERED: usize = 8;

/// A task of the node itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTask {
    pub task_type: TaskType,
    pub work: Work,
    /// The boot of the machine that it was ordered in: a restart is not done twice.
    pub boot_id: Option<String>,
    pub phase: TaskPhase,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum TaskPhase {
    /// Offered to the agent until it reports.
    Open,
    /// Not reported on in time: nobody knows whether it happened.
    AwaitsOperator {
        since: Timestamp,
    },
    Ended {
        at: Timestamp,
        verdict: Verdict,
        output: Option<Value>,
    },
}

impl NodeTask {
    const fn is_open(&self) -> bool {
        matches!(self.phase, TaskPhase::Open)
    }

    const fn has_ended(&self) -> bool {
        matches!(self.phase, TaskPhase::Ended { .. })
    }

    fn time_is_over(&self, now: Timestamp) -> bool {
        self.is_open() && self.work.deadline_at <= now
    }
}

impl Node {
    pub(super) fn order_task(&self, task_type: TaskType, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        if self.life.is_unborn() || self.life.is_gone() {
            return Err(self.wrong_state(&Command::OrderTask { task_type, reason: String::new() }));
        }
        if !TaskType::ORDERED.contains(&task_type) {
            return Err(Rejection::NotOrdered { task_type });
        }
        if self.tasks.values().filter(|task| !task.has_ended()).count() >= OPEN {
            return Err(Rejection::TooManyTasks { limit: OPEN });
        }
        let task_id = TaskId(ctx.new_id(0));
        let work = Work {
            task_id,
            attempt: 1,
            ordered_at: ctx.now,
            deadline_at: ctx.now + task_time(ctx),
            origin: Some(ctx.origin()),
        };
        let boot_id = self.seen.as_ref().map(|seen| seen.boot_id.clone());
        let mut next = self.clone();
        next.tasks.insert(task_id, NodeTask { task_type, work, boot_id, phase: TaskPhase::Open });
        next.forget_old_tasks();
        let metadata = json!({ "task_id": task_id, "type": task_type, "reason": reason });
        let audit = self.audit(AuditAction::NodesOrderTask, metadata);
        Ok(next.told_of(task_id, format!("{task_type} was ordered: {reason}")).audit(audit))
    }

    pub(super) fn resume_task(&self, task_id: TaskId, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let Some(task) = self.tasks.get(&task_id) else { return Err(Rejection::TaskUnknown) };
        match task.phase {
            TaskPhase::AwaitsOperator { .. } => {}
            TaskPhase::Open => return Err(Rejection::TaskDoesNotWait { why: "it is with the agent".to_owned() }),
            TaskPhase::Ended { .. } => {
                return Err(Rejection::TaskDoesNotWait { why: "the agent has reported on it".to_owned() });
            }
        }
        let mut next = self.clone();
        if let Some(task) = next.tasks.get_mut(&task_id) {
            task.again(ctx);
        }
        let metadata = json!({ "task_id": task_id, "type": task.task_type, "reason": reason });
        let audit = self.audit(AuditAction::NodesResumeTask, metadata);
        Ok(next.told_of(task_id, format!("an operator resumed {}: {reason}", task.task_type)).audit(audit))
    }

    fn told_of(self, task_id: TaskId, why: String) -> Step<Self> {
        let wake = Effect::WakeNode(self.id);
        let reply = Reply::Task { task_id, node: Box::new(self.clone()) };
        Step::to(self, reply, why).effect(wake)
    }

    /// What came of a task of the node itself.
    pub(super) fn task_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: Verdict,
        output: Option<Value>,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Rejection> {
        let Some(task) = self.tasks.get(&task_id) else { return Err(Rejection::TaskUnknown) };
        if attempt != task.work.attempt || task.has_ended() {
            return Err(Rejection::StaleAttempt { given: attempt, current: task.work.attempt });
        }
        let task_type = task.task_type;
        let why = match &verdict {
            Verdict::Succeeded { .. } => format!("the agent did {task_type}"),
            Verdict::Failed { code, message } => format!("{task_type} failed ({code}): {message}"),
        };
        let mut next = self.clone();
        let unfit = match (&verdict, task_type) {
            (Verdict::Failed { message, .. }, TaskType::NodeValidate) if self.may_be_quarantined() => {
                Some(message.clone())
            }
            _ => None,
        };
        if let Some(task) = next.tasks.get_mut(&task_id) {
            task.phase = TaskPhase::Ended { at: ctx.now, verdict, output };
        }
        next.forget_old_tasks();
        let Some(unfit) = unfit else { return Ok(Step::to(next, Reply::Done, why)) };
        let was = Box::new(self.life.clone());
        let message = format!("The machine is not fit for tenants: {unfit}");
        let event = next.enter(Life::Quarantined { was }, "validation_failed", &message, ctx);
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "reason": "validation_failed" }));
        Ok(Step::to(next, Reply::Done, why).event(event).audit(audit))
    }

    /// Tasks whose time is over go the way of their type, as part of this step.
    pub(super) fn stale_tasks(&self, step: Step<Self>, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let mut stale = Vec::new();
        let withheld = next.clone();
        for (task_id, task) in next.tasks.iter_mut().filter(|(_, task)| task.time_is_over(ctx.now)) {
            let when_stale = task.task_type.when_stale();
            match when_stale {
                WhenStale::Requeue => match withheld.withholds(task.task_type) {
                    None => task.again(ctx),
                    // It was not handed out, and would not be.
                    Some(message) => {
                        let verdict = Verdict::Failed { code: "task_type_unknown".to_owned(), message };
                        task.phase = TaskPhase::Ended { at: ctx.now, verdict, output: None };
                    }
                },
                WhenStale::AwaitOperator => task.phase = TaskPhase::AwaitsOperator { since: ctx.now },
                WhenStale::Expire => {
                    let (code, message) = ("expired".to_owned(), "The agent did not report in time.".to_owned());
                    let verdict = Verdict::Failed { code, message };
                    task.phase = TaskPhase::Ended { at: ctx.now, verdict, output: None };
                }
            }
            stale.push((*task_id, task.task_type, when_stale));
        }
        if stale.is_empty() {
            return step;
        }
        let why = if step.next.is_some() { step.why.clone() } else { "tasks were not reported on in time".to_owned() };
        let step = Step { next: Some(next), why, ..step };
        stale.into_iter().fold(step, |step, (task_id, task_type, when_stale)| match when_stale {
            WhenStale::Requeue => step.effect(Effect::WakeNode(self.id)),
            WhenStale::AwaitOperator => {
                let metadata = json!({ "task_id": task_id, "type": task_type });
                step.audit(self.audit(AuditAction::NodesStallTask, metadata))
            }
            WhenStale::Expire => step,
        })
    }

    /// The node's own tasks as they are offered to the agent.
    pub(super) fn own_orders(&self) -> impl Iterator<Item = Order> + '_ {
        let open = self.tasks.values().filter(|task| task.is_open());
        open.map(|task| Order {
            work: task.work.clone(),
            what: What::OfNode { task_type: task.task_type, boot_id: task.boot_id.clone() },
        })
    }

    /// When a task's time is over next.
    pub(super) fn task_is_due_at(&self) -> Option<Timestamp> {
        self.tasks.values().filter(|task| task.is_open()).map(|task| task.work.deadline_at).min()
    }

    /// The task that an operator has to look at, or will have to: what can be offered again needs nobody, what the agent does not do, an
    /// upgrade.
    pub(super) fn task_deadline(&self) -> Option<Deadline> {
        let waits = self.tasks.values().filter_map(|task| match task.phase {
            TaskPhase::AwaitsOperator { since } => {
                let of_the_agent = self.withholds(task.task_type).map(|why| format!("; {why}")).unwrap_or_default();
                let why = format!("{} was not reported on: look and resume it{of_the_agent}", task.task_type);
                Some(Deadline::new(since, why))
            }
            TaskPhase::Open if self.withholds(task.task_type).is_some() => {
                self.withholds(task.task_type).map(|why| Deadline::new(task.work.deadline_at, why))
            }
            TaskPhase::Open if task.task_type.when_stale() == WhenStale::AwaitOperator => {
                Some(Deadline::new(task.work.deadline_at, format!("{} was not reported on yet", task.task_type)))
            }
            TaskPhase::Open | TaskPhase::Ended { .. } => None,
        });
        waits.min_by_key(|deadline| deadline.at)
    }

    fn forget_old_tasks(&mut self) {
        while self.tasks.values().filter(|task| task.has_ended()).count() > REMEMBERED {
            // Ids rise with time.
            let oldest = self.tasks.iter().find(|(_, task)| task.has_ended()).map(|(task_id, _)| *task_id);
            let Some(oldest) = oldest else { return };
            self.tasks.remove(&oldest);
        }
    }
}

impl NodeTask {
    fn again(&mut self, ctx: &Ctx<'_>) {
        self.work.attempt = self.work.attempt.saturating_add(1);
        self.work.ordered_at = ctx.now;
        self.work.deadline_at = ctx.now + task_time(ctx);
        self.phase = TaskPhase::Open;
    }
}

fn task_time(ctx: &Ctx<'_>) -> TimeDelta {
    ctx.policy.seconds(Key::NodeTaskTimeout, &Scopes::global(), ctx.now)
}

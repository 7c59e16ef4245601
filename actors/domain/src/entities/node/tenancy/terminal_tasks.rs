//! Terminal sessions that the agent is to start. The node stores only the task of a session: the session's own state machine has its
//! state.

use super::{HoldPhase, Tenancy};
use crate::entities::node::outcome::{self, Outcome};
use crate::entities::node::{AgentTask, PendingTask, Rejection, TaskKind, TaskOutcome, reason_code};
use crate::event::Event;
use crate::id::{AllocationId, TaskId, TerminalSessionId};
use crate::recording::RecordingTerms;
use crate::state_machine::{Timestamp, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// The bound of tasks of one tenant, with or without a result: more than sessions may be open.
const MAX_TASKS: usize = 64;

/// How long a task that is over is remembered, so that a late result is recognised.
const TASK_RETENTION: TimeDelta = TimeDelta::minutes(10);

/// How long after its deadline a task without a result counts as not begun: an agent that began it in time has reported it by then.
const REPORT_GRACE: TimeDelta = TimeDelta::minutes(1);

/// A task to start a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalTask {
    pub work: PendingTask,
    /// The session's end, which the agent enforces by itself.
    pub ends_at: Timestamp,
    #[serde(default)]
    pub recording: RecordingTerms,
    /// False once the session is over.
    pub wanted: bool,
}

impl TerminalTask {
    /// `None` where the session is over.
    fn due_at(&self) -> Option<Timestamp> {
        self.wanted.then(|| self.work.deadline_at + REPORT_GRACE)
    }
}

impl Tenancy {
    /// The node serves its tenants where `in_service`; `lacks` says why the agent opens no terminal.
    pub(in crate::entities::node) fn open_terminal(
        &self,
        (session_id, allocation_id): (TerminalSessionId, AllocationId),
        (ends_at, begin_until): (Timestamp, Timestamp),
        recording: RecordingTerms,
        (in_service, lacks): (bool, Option<String>),
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let failed = |reason: &str, why: &str| {
            Outcome::to(self.clone(), why).event(Event::TerminalFailed {
                session_id,
                node_id: outcome::node_id(ctx),
                reason: reason.to_owned(),
            })
        };
        let is_ready = self.holds.get(&allocation_id).is_some_and(|hold| matches!(hold.phase, HoldPhase::Ready));
        if !in_service || !is_ready {
            return failed("tenant_not_ready", "a terminal is wanted of a tenant that is not set up");
        }
        if let Some(why) = lacks {
            return failed("agent_outdated", &why);
        }
        let mut next = self.clone();
        let Some(hold) = next.holds.get_mut(&allocation_id) else { return Outcome::stay() };
        if hold.terminals.contains_key(&session_id) {
            return Outcome::stay().wake_agent();
        }
        hold.terminals.retain(|_, order| ctx.now < order.work.deadline_at + TASK_RETENTION);
        if hold.terminals.len() >= MAX_TASKS {
            return failed("too_many_terminals", "more terminals are wanted than a tenant may have");
        }
        let work = PendingTask {
            task_id: TaskId(ctx.new_id(0)),
            attempt: 1,
            ordered_at: ctx.now,
            deadline_at: begin_until,
            origin: Some(ctx.origin()),
        };
        hold.terminals.insert(session_id, TerminalTask { work, ends_at, recording, wanted: true });
        Outcome::to(next, format!("terminal session {session_id} is to be begun")).wake_agent()
    }

    /// The session is closed: an agent that has not started it does not start it.
    pub(in crate::entities::node) fn forget_terminal(
        &self,
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
    ) -> Outcome<Self> {
        let mut next = self.clone();
        let order = next.holds.get_mut(&allocation_id).and_then(|hold| hold.terminals.get_mut(&session_id));
        match order {
            Some(order) if order.wanted => {
                order.wanted = false;
                Outcome::to(next, format!("terminal session {session_id} is over"))
            }
            Some(_) | None => Outcome::stay(),
        }
    }

    /// When a task without a result counts as not begun.
    pub(in crate::entities::node) fn terminals_due_at(&self) -> Option<Timestamp> {
        let ready = self.holds.values().filter(|hold| matches!(hold.phase, HoldPhase::Ready));
        ready.flat_map(|hold| hold.terminals.values()).filter_map(TerminalTask::due_at).min()
    }

    /// Fails the sessions that no agent has begun in time. Their user would wait for them until the end of their lifetime, although the
    /// agent may be back.
    pub(in crate::entities::node) fn fail_stale_terminals(&self, ctx: &TransitionContext<'_>) -> Outcome<Self> {
        let mut next = self.clone();
        let mut failed = Vec::new();
        let ready = next.holds.values_mut().filter(|hold| matches!(hold.phase, HoldPhase::Ready));
        for (session_id, order) in ready.flat_map(|hold| &mut hold.terminals) {
            if order.due_at().is_some_and(|due_at| due_at <= ctx.now) {
                order.wanted = false;
                failed.push(*session_id);
            }
        }
        if failed.is_empty() {
            return Outcome::stay();
        }
        let events = failed.into_iter().map(|session_id| Event::TerminalFailed {
            session_id,
            node_id: outcome::node_id(ctx),
            reason: "not_begun".to_owned(),
        });
        events.fold(Outcome::to(next, "the agent has not begun a terminal session in time"), Outcome::event)
    }

    pub(super) fn terminal_tasks(&self, sku: &str) -> impl Iterator<Item = AgentTask> {
        let ready = self.holds.iter().filter(|(_, hold)| matches!(hold.phase, HoldPhase::Ready));
        ready.flat_map(move |(allocation_id, hold)| {
            let wanted = hold.terminals.iter().filter(|(_, order)| order.wanted);
            wanted.map(move |(session_id, order)| AgentTask {
                work: order.work.clone(),
                what: TaskKind::OpenTerminal {
                    place: Self::slot(*allocation_id, hold, sku),
                    session_id: *session_id,
                    ends_at: order.ends_at,
                    recording: order.recording,
                },
            })
        })
    }

    /// The result of a terminal's task; `None` where the task is of another type.
    pub(in crate::entities::node) fn terminal_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: &TaskOutcome,
        ctx: &TransitionContext<'_>,
    ) -> Option<Result<Outcome<Self>, Rejection>> {
        let of_task = |order: &TerminalTask| order.work.task_id == task_id;
        let (allocation_id, session_id, current) = self.holds.iter().find_map(|(allocation_id, hold)| {
            let (session_id, order) = hold.terminals.iter().find(|(_, order)| of_task(order))?;
            Some((*allocation_id, *session_id, order.work.attempt))
        })?;
        if attempt != current {
            return Some(Err(Rejection::StaleAttempt { given: attempt, current }));
        }
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.terminals.remove(&session_id);
        }
        Some(Ok(match verdict {
            TaskOutcome::Succeeded { .. } => {
                Outcome::to(next, format!("the agent began terminal session {session_id}"))
            }
            TaskOutcome::Failed { code, message } => {
                let reason = reason_code(code);
                Outcome::to(next, format!("the agent could not begin terminal session {session_id}: {message}"))
                    .event(Event::TerminalFailed { session_id, node_id: outcome::node_id(ctx), reason })
            }
        }))
    }
}

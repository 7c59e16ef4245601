//! Terminal sessions that the agent is to begin. The node keeps no more of a session than the order for it: what becomes of it is said
//! by the session's own machine.

use super::{HoldPhase, Life, Node, Order, Place, Rejection, Reply, Verdict, What, Work};
use crate::event::Event;
use crate::id::{AllocationId, TaskId, TerminalSessionId};
use crate::machine::{Ctx, Effect, Step, Timestamp};
use crate::task_type::TaskType;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// Orders that one tenant may have at once, reported on or not: more than may be open.
const MOST: usize = 64;

/// How long an order that is over is remembered, so that a late report is known.
const REMEMBERED: TimeDelta = TimeDelta::minutes(10);

/// A session that the agent is to begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalOrder {
    pub work: Work,
    /// The session's lifetime, which the agent keeps to by itself.
    pub ends_at: Timestamp,
    /// False once the session is over.
    pub wanted: bool,
}

impl Node {
    pub(super) fn open_terminal(
        &self,
        session_id: TerminalSessionId,
        allocation_id: AllocationId,
        ends_at: Timestamp,
        begin_until: Timestamp,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let failed = |reason: &str, why: &str| {
            Step::to(self.clone(), Reply::Done, why).event(Event::TerminalFailed {
                session_id,
                node_id: self.id,
                reason: reason.to_owned(),
            })
        };
        let in_service = matches!(self.life, Life::Active | Life::Offline | Life::Draining { .. });
        let ready =
            |node: &Self| node.holds.get(&allocation_id).is_some_and(|hold| matches!(hold.phase, HoldPhase::Ready));
        if !in_service || !ready(self) {
            return failed("tenant_not_ready", "a terminal is wanted of a tenant that is not set up");
        }
        if let Some(why) = self.withholds(TaskType::TerminalOpen) {
            return failed("agent_outdated", &why);
        }
        let mut next = self.clone();
        let Some(hold) = next.holds.get_mut(&allocation_id) else { return Step::stay(Reply::Done) };
        if hold.terminals.contains_key(&session_id) {
            return Step::stay(Reply::Done).effect(Effect::WakeNode(self.id));
        }
        hold.terminals.retain(|_, order| ctx.now < order.work.deadline_at + REMEMBERED);
        if hold.terminals.len() >= MOST {
            return failed("too_many_terminals", "more terminals are wanted than a tenant may have");
        }
        let work = Work {
            task_id: TaskId(ctx.new_id(0)),
            attempt: 1,
            ordered_at: ctx.now,
            deadline_at: begin_until,
            origin: Some(ctx.origin()),
        };
        hold.terminals.insert(session_id, TerminalOrder { work, ends_at, wanted: true });
        Step::to(next, Reply::Done, format!("terminal session {session_id} is to be begun"))
            .effect(Effect::WakeNode(self.id))
    }

    /// The session is over: an agent that has not begun it does not begin it.
    pub(super) fn forget_terminal(&self, session_id: TerminalSessionId, allocation_id: AllocationId) -> Step<Self> {
        let mut next = self.clone();
        let order = next.holds.get_mut(&allocation_id).and_then(|hold| hold.terminals.get_mut(&session_id));
        match order {
            Some(order) if order.wanted => {
                order.wanted = false;
                Step::to(next, Reply::Done, format!("terminal session {session_id} is over"))
            }
            Some(_) | None => Step::stay(Reply::Done),
        }
    }

    pub(super) fn terminal_orders(&self) -> impl Iterator<Item = Order> + '_ {
        let ready = self.holds.iter().filter(|(_, hold)| matches!(hold.phase, HoldPhase::Ready));
        ready.flat_map(move |(allocation_id, hold)| {
            let wanted = hold.terminals.iter().filter(|(_, order)| order.wanted);
            wanted.map(move |(session_id, order)| Order {
                work: order.work.clone(),
                what: What::OpenTerminal {
                    place: Place {
                        allocation_id: *allocation_id,
                        placed: hold.placed.clone(),
                        sku: self.registration.sku.name.clone(),
                    },
                    session_id: *session_id,
                    ends_at: order.ends_at,
                },
            })
        })
    }

    /// What the agent says of a terminal's order; `None` where the task is no terminal's.
    pub(super) fn terminal_reported(
        &self,
        task_id: TaskId,
        attempt: u32,
        verdict: &Verdict,
    ) -> Option<Result<Step<Self>, Rejection>> {
        let of_task = |order: &TerminalOrder| order.work.task_id == task_id;
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
            Verdict::Succeeded { .. } => {
                Step::to(next, Reply::Done, format!("the agent began terminal session {session_id}"))
            }
            Verdict::Failed { code, message } => {
                let reason = super::tenancy::reason_code(code);
                Step::to(
                    next,
                    Reply::Done,
                    format!("the agent could not begin terminal session {session_id}: {message}"),
                )
                .event(Event::TerminalFailed { session_id, node_id: self.id, reason })
            }
        }))
    }
}

//! Clean-up of tenants: ordered by the allocation, by force, or since no allocation wants the tenant; and the end of a hold.

use super::{Hold, HoldPhase, PendingTask};
use crate::audit::AuditAction;
use crate::entities::node::{HoldAuthor, Node, Reply, StateCode};
use crate::event::Event;
use crate::id::{AllocationId, TaskId};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use serde_json::json;

impl Node {
    pub(in crate::entities::node) fn clean(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        deadline_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else {
            // Proved before, or never here: in both cases nothing of it is held.
            return Transition::to(self.clone(), Reply::Done, "nothing is held for the allocation")
                .event(Event::TenantGone { node_id: self.id, allocation_id, attempt });
        };
        let task_id = match &hold.phase {
            // The clean-up of an abandoned tenant has no bound of attempts and ends only with the proof.
            HoldPhase::Abandoned { .. } => return Transition::stay(Reply::Done).effect(Effect::WakeNode(self.id)),
            HoldPhase::Releasing { work } if work.attempt >= attempt => {
                return Transition::stay(Reply::Done).effect(Effect::WakeNode(self.id));
            }
            // A request that was overtaken by the failure of a later attempt.
            HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return Transition::stay(Reply::Done),
            // The attempt has failed already, and the allocation did not receive it.
            HoldPhase::ReleaseFailed { work } if work.attempt == attempt => {
                let (reason, detail) = ("clean_up_failed".to_owned(), hold.remains.clone().unwrap_or_default());
                return Transition::to(self.clone(), Reply::Done, "the failed clean-up was requested again")
                    .event(Event::TenantRemains { node_id: self.id, allocation_id, attempt, reason, detail });
            }
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => work.task_id,
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                TaskId(ctx.new_id(0))
            }
        };
        let work = PendingTask { task_id, attempt, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
        let mut step = self
            .with_phase(
                allocation_id,
                HoldPhase::Releasing { work },
                format!("the tenant is to be cleaned up (attempt {attempt})"),
            )
            .effect(Effect::WakeNode(self.id));
        if let Some(next) = &mut step.next {
            next.fenced_by.remove(&allocation_id);
        }
        step
    }

    /// The allocation has given up its clean-up attempt: no new allocation until a proof arrives. Facts of an attempt that was followed by
    /// another are ignored.
    pub(in crate::entities::node) fn mark_release_failed(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        match self.release_failed_phase(allocation_id, attempt, ctx) {
            Some(phase) if !self.is_in(allocation_id, &phase) => self.with_phase(
                allocation_id,
                phase,
                format!("clean-up attempt {attempt} failed: no new allocation until it is proved"),
            ),
            Some(_) | None => Transition::stay(Reply::Done),
        }
    }

    pub(in crate::entities::node) fn fence(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        if !self.holds.contains_key(&allocation_id) {
            // The proof arrived after all, and the allocation did not receive it.
            return Transition::to(self.clone(), Reply::Done, "nothing is held for the allocation")
                .event(Event::TenantGone { node_id: self.id, allocation_id, attempt });
        }
        match self.release_failed_phase(allocation_id, attempt, ctx) {
            Some(phase) if self.fenced_by.contains(&allocation_id) && self.is_in(allocation_id, &phase) => {
                Transition::stay(Reply::Done)
            }
            Some(phase) => {
                let why = format!("fenced by the failed release of allocation {allocation_id}");
                let mut step = self.with_phase(allocation_id, phase, why);
                if let Some(next) = &mut step.next {
                    next.fenced_by.insert(allocation_id);
                }
                // A waiting long poll is answered.
                step.effect(Effect::WakeNode(self.id))
            }
            None => Transition::stay(Reply::Done),
        }
    }

    /// The hold's phase after clean-up attempt `attempt` has failed; `None` where a later one runs, or none can fail.
    fn release_failed_phase(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Option<HoldPhase> {
        let work = match &self.holds.get(&allocation_id)?.phase {
            HoldPhase::Abandoned { .. } => return None,
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return None,
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => {
                PendingTask { attempt, ..work.clone() }
            }
            // The request of that attempt has not arrived yet.
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                PendingTask {
                    task_id: TaskId(ctx.new_id(0)),
                    attempt,
                    ordered_at: ctx.now,
                    deadline_at: ctx.now,
                    origin: Some(ctx.origin()),
                }
            }
        };
        Some(HoldPhase::ReleaseFailed { work })
    }

    /// Released by force: the node is quarantined until the agent proves that nothing is left.
    pub(in crate::entities::node) fn abandon(
        &self,
        allocation_id: AllocationId,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else { return Transition::stay(Reply::Done) };
        let closed = self.is_held_by(HoldAuthor::Release) || self.life.is_gone();
        if closed && matches!(hold.phase, HoldPhase::Abandoned { .. }) {
            return Transition::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.fenced_by.remove(&allocation_id);
        let work = self.abandoned_clean_up(hold, ctx);
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = HoldPhase::Abandoned { work };
        }
        let event = (!closed).then_some(()).and_then(|()| {
            let message = "An allocation was released by force, without proof of clean-up.";
            next.enter_quarantine(StateCode::ForcedRelease, message, ctx)
        });
        let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id} was released by force"))
            .effect(Effect::WakeNode(self.id));
        event.into_iter().fold(step, Transition::event)
    }

    /// A clean-up without an allocation. It has no deadline: it stays dispatched until the proof arrives.
    pub(super) fn abandoned_clean_up(&self, hold: &Hold, ctx: &TransitionContext<'_>) -> PendingTask {
        let (task_id, attempt) = match &hold.phase {
            HoldPhase::Abandoned { work } => return work.clone(),
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => {
                (work.task_id, work.attempt.saturating_add(1))
            }
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                (TaskId(ctx.new_id(0)), 1)
            }
        };
        PendingTask {
            task_id,
            attempt,
            ordered_at: ctx.now,
            deadline_at: Timestamp::MAX_UTC,
            origin: Some(ctx.origin()),
        }
    }

    pub(super) fn release_hold(
        &self,
        allocation_id: AllocationId,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let hold = next.holds.remove(&allocation_id);
        next.fenced_by.remove(&allocation_id);
        // A tenant that was never set up has left nothing.
        if hold.is_some_and(|hold| hold.reimages && hold.phase != HoldPhase::Reserved) && next.machine.is_some() {
            let (events, audit) = next.begin_reimage(&format!("allocation {allocation_id} has ended"), ctx);
            let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id}: {why}")).audit(audit);
            return events.into_iter().fold(step, Transition::event).effect(Effect::CloseNode(self.id));
        }
        let retired = next.retire_if_drained(ctx);
        let step = Transition::to(next, Reply::Done, format!("allocation {allocation_id}: {why}"));
        match retired {
            Some(event) => step.event(event).audit(self.audit(AuditAction::NodesDrained, json!({}))),
            None => step,
        }
    }
}

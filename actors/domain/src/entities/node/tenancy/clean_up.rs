//! Clean-up of tenants: ordered by the allocation, by force, or since no allocation wants the tenant; and the end of a hold.

use super::{Hold, HoldPhase, PendingTask, Tenancy};
use crate::entities::node::outcome::{self, Outcome};
use crate::event::Event;
use crate::id::{AllocationId, TaskId};
use crate::resend_timer::ResendTimer;
use crate::state_machine::{Timestamp, TransitionContext};

impl Tenancy {
    pub(in crate::entities::node) fn clean(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        deadline_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else {
            // Proved before, or never here: in both cases nothing of it is held.
            return Outcome::to(self.clone(), "nothing is held for the allocation").event(Event::TenantGone {
                node_id: outcome::node_id(ctx),
                allocation_id,
                attempt,
            });
        };
        let task_id = match &hold.phase {
            // The clean-up of an abandoned tenant has no bound of attempts and ends only with the proof.
            HoldPhase::Abandoned { .. } => return Outcome::stay().wake_agent(),
            HoldPhase::Releasing { work } if work.attempt >= attempt => {
                return Outcome::stay().wake_agent();
            }
            // A request that was overtaken by the failure of a later attempt.
            HoldPhase::ReleaseFailed { work } if work.attempt > attempt => return Outcome::stay(),
            // The attempt has failed already, and the allocation did not receive it.
            HoldPhase::ReleaseFailed { work } if work.attempt == attempt => {
                let (reason, detail) = ("clean_up_failed".to_owned(), hold.remains.clone().unwrap_or_default());
                return Outcome::to(self.clone(), "the failed clean-up was requested again").event(
                    Event::TenantRemains { node_id: outcome::node_id(ctx), allocation_id, attempt, reason, detail },
                );
            }
            HoldPhase::Releasing { work } | HoldPhase::ReleaseFailed { work } => work.task_id,
            HoldPhase::Reserved | HoldPhase::Provisioning { .. } | HoldPhase::Ready | HoldPhase::SetupFailed { .. } => {
                TaskId(ctx.new_id(0))
            }
        };
        let work = PendingTask { task_id, attempt, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
        let why = format!("the tenant is to be cleaned up (attempt {attempt})");
        self.with_phase(allocation_id, HoldPhase::Releasing { work }, why).unfence(allocation_id).wake_agent()
    }

    /// The allocation has given up its clean-up attempt: no new allocation until a proof arrives. Facts of an attempt that was followed by
    /// another are ignored.
    pub(in crate::entities::node) fn mark_release_failed(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        match self.release_failed_phase(allocation_id, attempt, ctx) {
            Some(phase) if !self.is_in(allocation_id, &phase) => self.with_phase(
                allocation_id,
                phase,
                format!("clean-up attempt {attempt} failed: no new allocation until it is proved"),
            ),
            Some(_) | None => Outcome::stay(),
        }
    }

    pub(in crate::entities::node) fn fence(
        &self,
        allocation_id: AllocationId,
        attempt: u32,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        if !self.holds.contains_key(&allocation_id) {
            // The proof arrived after all, and the allocation did not receive it.
            return Outcome::to(self.clone(), "nothing is held for the allocation").event(Event::TenantGone {
                node_id: outcome::node_id(ctx),
                allocation_id,
                attempt,
            });
        }
        match self.release_failed_phase(allocation_id, attempt, ctx) {
            Some(phase) if self.fenced_by.contains(&allocation_id) && self.is_in(allocation_id, &phase) => {
                Outcome::stay()
            }
            Some(phase) => {
                let why = format!("fenced by the failed release of allocation {allocation_id}");
                let mut step = self.with_phase(allocation_id, phase, why);
                if let Some(next) = &mut step.next {
                    next.fenced_by.insert(allocation_id);
                }
                // A waiting long poll is answered.
                step.wake_agent()
            }
            None => Outcome::stay(),
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

    /// Released by force. `is_closed`: the node takes no tenant until the agent proves that nothing is left.
    pub(in crate::entities::node) fn abandon(
        &self,
        allocation_id: AllocationId,
        is_closed: bool,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let Some(hold) = self.holds.get(&allocation_id) else { return Outcome::stay() };
        if is_closed && matches!(hold.phase, HoldPhase::Abandoned { .. }) {
            return Outcome::stay();
        }
        self.with_abandoned(allocation_id, hold, format!("allocation {allocation_id} was released by force"), ctx)
    }

    /// The tenant belongs to no allocation any more, and is to be cleaned up.
    pub(super) fn with_abandoned(
        &self,
        allocation_id: AllocationId,
        hold: &Hold,
        why: String,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let work = Self::abandoned_clean_up(hold, ctx);
        let mut step =
            self.with_phase(allocation_id, HoldPhase::Abandoned { work }, why).unfence(allocation_id).wake_agent();
        if let Some(hold) = step.next.as_mut().and_then(|next| next.holds.get_mut(&allocation_id)) {
            hold.again = None;
        }
        step
    }

    /// The pause after a failed clean-up of an abandoned tenant: as long as the clean-up has lasted, 10 s at least and an hour at most.
    pub(super) fn pause_of_clean_up(work: &PendingTask, now: Timestamp) -> ResendTimer {
        ResendTimer::first(work.ordered_at).next(now)
    }

    /// Tries the clean-ups of abandoned tenants again whose pause is over.
    pub(in crate::entities::node) fn retry_clean_ups(&self, ctx: &TransitionContext<'_>) -> Outcome<Self> {
        let mut next = self.clone();
        if !next.end_clean_up_pauses(|again| again.is_due(ctx.now)) {
            return Outcome::stay();
        }
        Outcome::to(next, "the clean-up of an abandoned tenant is tried again").wake_agent()
    }

    /// Ends the pauses for which `is_over` holds. Returns whether there was one.
    pub(in crate::entities::node) fn end_clean_up_pauses(&mut self, is_over: impl Fn(ResendTimer) -> bool) -> bool {
        let mut has_ended = false;
        for hold in self.holds.values_mut().filter(|hold| matches!(hold.phase, HoldPhase::Abandoned { .. })) {
            if hold.again.is_some_and(&is_over) {
                hold.again = None;
                has_ended = true;
            }
        }
        has_ended
    }

    /// A clean-up without an allocation. It has no deadline: it is tried until the proof arrives.
    fn abandoned_clean_up(hold: &Hold, ctx: &TransitionContext<'_>) -> PendingTask {
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

    /// Ends a hold. True where the machine is to be reinstalled after it: a tenant that was never set up has left nothing.
    pub(in crate::entities::node) fn end_hold(&mut self, allocation_id: AllocationId) -> bool {
        self.fenced_by.remove(&allocation_id);
        let hold = self.holds.remove(&allocation_id);
        hold.is_some_and(|hold| hold.reimages && hold.phase != HoldPhase::Reserved)
    }
}

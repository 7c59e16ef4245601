//! The saga: which fact leads to which state, and which step undoes one that failed.

use super::{
    Allocation, AllocationFailure, AllocationRequest, CAPACITY_RETRY_INTERVAL, CommandName, FailureCode, MAX_GPUS,
    Phase, PhaseName, Placement, Rejection, ReleaseRetry, StatusReason,
};
use crate::audit::{AuditAction, RefusalAudit};
use crate::event::Event;
use crate::id::{AllocationId, NodeId};
use crate::policy::PolicyKey;
use crate::resend_timer::ResendTimer;
use crate::retry;
use crate::ssh_key;
use crate::state_machine::{Transition, TransitionContext};
use chrono::TimeDelta;
use serde_json::json;

/// The first pause between clean-up attempts; it doubles up to policy `allocation.release_backoff_max_seconds`.
const FIRST_PAUSE: TimeDelta = TimeDelta::seconds(1);

impl Allocation {
    pub(super) fn create(
        mut request: AllocationRequest,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if !(1..=MAX_GPUS).contains(&request.gpu_count) {
            return Err(Rejection::GpuCount { max: MAX_GPUS });
        }
        if !ssh_key::are_within_bound(&request.ssh_keys) {
            return Err(Rejection::KeysTooLong { max: ssh_key::MAX_LOGIN_BYTES });
        }
        let scopes = request.scopes();
        let longest = ctx.policy.int(PolicyKey::AllocationQueueMax, &scopes, ctx.now);
        let patience = match request.queue_seconds {
            Some(seconds) if i64::from(seconds) > longest => return Err(Rejection::QueueSeconds { max: longest }),
            Some(seconds) => TimeDelta::seconds(seconds.into()),
            None => ctx.policy.seconds(PolicyKey::AllocationProvisioningTimeout, &scopes, ctx.now),
        };
        let metadata = std::mem::take(&mut request.metadata).bounded()?;
        let id = AllocationId(ctx.id);
        let requested = Self {
            id,
            asked: request,
            requested_at: ctx.now,
            phase: Phase::Requested { until: ctx.now + patience, look_again_at: None },
            failure: None,
            history: Vec::new(),
            active_at: None,
            release_requested_at: None,
            fault: None,
            again: None,
            logins: None,
            metadata,
            refusals: RefusalAudit::default(),
            answered_in: None,
        };
        let phase = requested.phase.clone();
        let requested = requested.in_phase(phase, ctx.now, StatusReason::Requested);
        Ok(requested
            .clone()
            .transition("requested by its user")
            .event(Event::AllocationRequested { allocation_id: id })
            .audit(requested.audit(AuditAction::AllocationsRequest, json!({ "gpu_count": requested.asked.gpu_count }))))
    }

    /// Without a stored request there is nothing to reseal.
    pub(super) fn resealed(&self, sealed: String) -> Transition<Self> {
        let mut next = self.clone();
        match &mut next.asked.scheduler_request_enc {
            Some(kept) => *kept = sealed,
            None => return Transition::stay(Box::new(next)),
        }
        next.transition("its request was sealed under another key")
    }

    pub(super) fn release(
        &self,
        issue: Option<String>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        const REQUESTED: (StatusReason, &str) = (StatusReason::ReleaseRequested, "release requested");
        if !ctx.by.is_admin() && !ctx.by.is_user(&self.asked.owner.user_id) {
            return Err(Rejection::NotFound);
        }
        let audit = self.audit(AuditAction::AllocationsRelease, json!({ "issue": issue }));
        match &self.phase {
            Phase::Requested { .. } => {
                let step = self.finish(None, StatusReason::Cancelled, "cancelled before a node was found", ctx);
                Ok(step.event(self.never_used()).audit(audit))
            }
            Phase::Provisioning { node_id, placed, .. } => {
                Ok(self.begin_release(REQUESTED, *node_id, placed, ctx).event(self.never_used()).audit(audit))
            }
            Phase::Active { node_id, placed } => Ok(self.release_active(REQUESTED, *node_id, placed, ctx).audit(audit)),
            // A repeated release request has no effect.
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => Ok(self.stay()),
        }
    }

    /// Releases an active allocation: its terminals are closed and its meter ends.
    pub(super) fn release_active(
        &self,
        why: (StatusReason, &str),
        node_id: NodeId,
        placed: &Placement,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let unwanted = Event::TerminalsUnwanted { allocation_id: self.id, user_id: self.asked.owner.user_id.clone() };
        let step = self.begin_release(why, node_id, placed, ctx).event(unwanted);
        let usage = step.reply.usage();
        step.event(usage)
    }

    fn begin_release(
        &self,
        why: (StatusReason, &str),
        node_id: NodeId,
        placed: &Placement,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let next = Self { release_requested_at: Some(ctx.now), ..self.clone() };
        next.clean_up(node_id, placed, 1, why, ctx)
    }

    pub(super) fn retry_release(
        &self,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        const ORDERED: (StatusReason, &str) =
            (StatusReason::CleanUpOrdered, "an administrator ordered another clean-up attempt");
        match &self.phase {
            Phase::ReleaseFailed { node_id, placed, attempt, .. } => Ok(self
                .clean_up(*node_id, placed, attempt + 1, ORDERED, ctx)
                .audit(self.audit(AuditAction::AllocationsRetryRelease, json!({ "reason": reason })))),
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::Released { .. } => Err(self.wrong_state(CommandName::RetryRelease)),
        }
    }

    pub(super) fn force_release(
        &self,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match &self.phase {
            Phase::ReleaseFailed { node_id, placed, .. } => {
                let forced = Event::ReleaseForced { allocation_id: self.id, node_id: *node_id };
                let last = Some((*node_id, placed.clone()));
                Ok(self
                    .finish(last, StatusReason::Forced, "released by force, without proof of clean-up", ctx)
                    .event(forced)
                    .audit(self.audit(AuditAction::AllocationsForceRelease, json!({ "reason": reason }))))
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::Released { .. } => Err(self.wrong_state(CommandName::ForceRelease)),
        }
    }

    pub(super) fn reserved(&self, node_id: NodeId, placed: Placement, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Requested { .. } => {
                let limit = ctx.policy.seconds(PolicyKey::AllocationProvisioningTimeout, &self.scopes(), ctx.now);
                let until = ctx.now + limit;
                let phase = Phase::Provisioning { node_id, placed, until };
                let next = self.in_phase(phase, ctx.now, StatusReason::DevicesReserved);
                // The node has the keys of its reservation, which may be stale by now.
                let logins = next.pending_ssh_keys_event();
                next.transition(format!("node {node_id} reserved the devices"))
                    .event(Event::ProvisioningStarted { allocation_id: self.id, node_id, deadline_at: until })
                    .with(logins, None)
            }
            Phase::Provisioning { node_id: ours, .. }
            | Phase::Active { node_id: ours, .. }
            | Phase::Releasing { node_id: ours, .. }
            | Phase::ReleaseFailed { node_id: ours, .. }
                if *ours == node_id =>
            {
                self.stay()
            }
            // A second node, or one whose reservation came too late: it must not hold devices that no allocation uses.
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. } => self.reject_reservation(node_id),
            // The node asks because it did not receive the forced release.
            Phase::Released { last: Some((ours, _)), .. } if *ours == node_id && self.was_forced() => self
                .unchanged(format!("node {node_id} still holds devices after the release by force"))
                .event(Event::ReleaseForced { allocation_id: self.id, node_id }),
            Phase::Released { last, .. } => {
                self.reject_reservation(node_id).event(self.released_event(last.as_ref(), "placed_too_late"))
            }
        }
    }

    /// The tenant did not receive its end, or it did not receive the tenant's key changes.
    pub(super) fn still_counted(&self, logins_revision: u64) -> Transition<Self> {
        match &self.phase {
            Phase::Released { last, .. } => self
                .unchanged("its tenant still counts it after its end")
                .event(self.released_event(last.as_ref(), "still_counted")),
            Phase::Requested { .. } | Phase::Provisioning { .. } | Phase::Active { .. } => {
                match self.stale_ssh_keys_event(logins_revision) {
                    Some(stale) => self.unchanged("its user's SSH keys have changed").event(stale),
                    None => self.stay(),
                }
            }
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } => self.stay(),
        }
    }

    pub(super) fn no_capacity(&self, suggestion: Option<String>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Requested { until, .. } if self.asked.queue_seconds.is_some() && ctx.now < *until => {
                let mut next = self.clone();
                next.phase = Phase::Requested { until: *until, look_again_at: Some(ctx.now + CAPACITY_RETRY_INTERVAL) };
                next.transition("no capacity: the request waits in the queue")
            }
            Phase::Requested { .. } => {
                let message = suggestion
                    .unwrap_or_else(|| "No node of this SKU has enough free GPUs; try again later.".to_owned());
                self.fail_request(FailureCode::InsufficientCapacity, &message, true, ctx)
            }
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. } => self.stay(),
            Phase::Released { last, .. } => self
                .unchanged("a placement was made after its end")
                .event(self.released_event(last.as_ref(), "placed_too_late")),
        }
    }

    pub(super) fn over_quota(&self, limit: i64, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Requested { .. } => {
                let message = format!("You hold the {limit} allocations that your quota admits; release one first.");
                self.fail_request(FailureCode::ConcurrencyLimitExceeded, &message, true, ctx)
            }
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    pub(super) fn provisioned(&self, node_id: NodeId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Provisioning { node_id: ours, placed, .. } if *ours == node_id => {
                let phase = Phase::Active { node_id, placed: placed.clone() };
                let mut next = self.in_phase(phase, ctx.now, StatusReason::TenantReady);
                next.active_at = Some(ctx.now);
                let usage = next.usage();
                next.again = next.ssh_access().are_pending().then(|| ResendTimer::first(ctx.now));
                next.transition(format!("node {node_id} set the tenant up"))
                    .event(Event::AllocationActive { allocation_id: self.id, node_id })
                    .event(usage)
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    pub(super) fn provision_failed(
        &self,
        node_id: NodeId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        match &self.phase {
            Phase::Provisioning { node_id: ours, placed, .. } if *ours == node_id => {
                let message = format!("The node could not set the allocation up ({reason}); ask for another one.");
                self.compensate(node_id, placed, FailureCode::Reported(reason.to_owned()), &message, ctx)
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    /// Provisioning failed: whatever the node did is cleaned up like any tenant, unbilled.
    pub(super) fn compensate(
        &self,
        node_id: NodeId,
        placed: &Placement,
        code: FailureCode,
        message: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let reason = code.to_string();
        let audit = self.audit(AuditAction::AllocationsFail, json!({ "code": code, "node_id": node_id }));
        next.failure = Some(AllocationFailure {
            phase: PhaseName::Provisioning,
            code,
            message: message.to_owned(),
            retryable: true,
        });
        next.clean_up(node_id, placed, 1, (StatusReason::ProvisioningFailed, "provisioning failed"), ctx)
            .event(Event::ProvisioningFailed { allocation_id: self.id, node_id: Some(node_id), reason })
            .event(self.never_used())
            .audit(audit)
    }

    pub(super) fn cleaned(&self, node_id: NodeId, attempt: u32, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            // A proof that arrives after its attempt was given up is as good as any.
            Phase::Releasing { node_id: ours, placed, .. } | Phase::ReleaseFailed { node_id: ours, placed, .. }
                if *ours == node_id =>
            {
                let why = format!("node {node_id} proved the clean-up (attempt {attempt})");
                self.finish(Some((node_id, placed.clone())), StatusReason::CleanedUp, &why, ctx)
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    pub(super) fn cleanup_failed(
        &self,
        node_id: NodeId,
        attempt: u32,
        why: (&str, &str),
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        match &self.phase {
            Phase::Releasing { node_id: ours, attempt: current, placed, .. }
                if *ours == node_id && *current == attempt =>
            {
                self.fail_release(node_id, placed, attempt, why, ctx)
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    /// `reason` is the failure's code, `detail` what is left and where, for the allocation's `state_reason`.
    fn fail_release(
        &self,
        node_id: NodeId,
        placed: &Placement,
        attempt: u32,
        (reason, detail): (&str, &str),
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let scopes = self.scopes();
        let most = ctx.policy.int(PolicyKey::AllocationReleaseMaxAttempts, &scopes, ctx.now);
        let exhausted = i64::from(attempt) >= most;
        let next = if exhausted {
            ReleaseRetry::Operator(ctx.now)
        } else {
            let longest = ctx.policy.seconds(PolicyKey::AllocationReleaseBackoffMax, &scopes, ctx.now);
            ReleaseRetry::RetryAt(ctx.now + retry::delay(FIRST_PAUSE, attempt, longest))
        };
        let phase = Phase::ReleaseFailed { node_id, placed: placed.clone(), attempt, reason: reason.to_owned(), next };
        let state_reason = if detail.is_empty() { reason.to_owned() } else { format!("{reason}: {detail}") };
        let step = self
            .in_phase(phase, ctx.now, state_reason.as_str())
            .transition(format!("clean-up attempt {attempt} failed ({reason})"))
            .event(Event::ReleaseFailed { allocation_id: self.id, node_id, attempt, reason: reason.to_owned() })
            .audit(self.audit(
                AuditAction::AllocationsFailRelease,
                json!({ "node_id": node_id, "attempt": attempt, "code": reason, "exhausted": exhausted }),
            ));
        if exhausted { step.event(Event::ReleaseExhausted { allocation_id: self.id, node_id, attempt }) } else { step }
    }

    /// Checks the whole state: past its deadline it changes the state, before it, it resends what may have been lost.
    pub(super) fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Requested { until, .. } if ctx.now >= *until => self.fail_request(
                FailureCode::InsufficientCapacity,
                "No node had enough free GPUs in time; try again later.",
                true,
                ctx,
            ),
            Phase::Requested { until, look_again_at } => {
                let mut next = self.with_next_resend(ctx);
                // After the first search without a result, the search repeats at a short interval.
                let look_again_at = look_again_at.map(|_| ctx.now + CAPACITY_RETRY_INTERVAL);
                next.phase = Phase::Requested { until: *until, look_again_at };
                next.transition("looking for capacity again")
                    .event(Event::AllocationRequested { allocation_id: self.id })
            }
            Phase::Provisioning { node_id, placed, until } if ctx.now >= *until => self.compensate(
                *node_id,
                placed,
                FailureCode::ProvisioningTimeout,
                "The node did not confirm in time.",
                ctx,
            ),
            Phase::Provisioning { node_id, until, .. } => self
                .with_next_resend(ctx)
                .transition("asking the node again")
                .event(Event::ProvisioningStarted { allocation_id: self.id, node_id: *node_id, deadline_at: *until })
                .with(self.pending_ssh_keys_event(), None),
            Phase::Releasing { node_id, placed, attempt, until } if ctx.now >= *until => {
                self.fail_release(*node_id, placed, *attempt, ("release_timeout", ""), ctx)
            }
            Phase::Releasing { node_id, attempt, until, .. } => {
                self.with_next_resend(ctx).transition("asking the node again").event(Event::ReleaseRequested {
                    allocation_id: self.id,
                    node_id: *node_id,
                    attempt: *attempt,
                    deadline_at: *until,
                })
            }
            Phase::ReleaseFailed { node_id, placed, attempt, next: ReleaseRetry::RetryAt(at), .. }
                if ctx.now >= *at =>
            {
                let why = (StatusReason::CleanUpRetried, "trying the clean-up again");
                self.clean_up(*node_id, placed, attempt + 1, why, ctx)
            }
            // Either message may have been lost: the fence to the node, or the node's report to the allocation.
            Phase::ReleaseFailed { node_id, attempt, next: ReleaseRetry::Operator(_), .. } => self
                .with_next_resend(ctx)
                .transition("resending the failed clean-up to the node")
                .event(Event::ReleaseExhausted { allocation_id: self.id, node_id: *node_id, attempt: *attempt }),
            Phase::Active { .. } => match self.pending_ssh_keys_event() {
                Some(logins) => {
                    self.with_next_resend(ctx).transition("resending the SSH keys to the node").event(logins)
                }
                None if self.again.is_some() => {
                    Self { again: None, ..self.clone() }.transition("there is nothing to resend")
                }
                None => self.stay(),
            },
            Phase::ReleaseFailed { .. } | Phase::Released { .. } => self.stay(),
        }
    }

    /// The same allocation, with its next resend scheduled.
    fn with_next_resend(&self, ctx: &TransitionContext<'_>) -> Self {
        let again = self.again.unwrap_or_else(|| ResendTimer::first(ctx.now)).next(ctx.now);
        Self { again: Some(again), ..self.clone() }
    }

    fn clean_up(
        &self,
        node_id: NodeId,
        placed: &Placement,
        attempt: u32,
        (reason, why): (StatusReason, &str),
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let limit = ctx.policy.seconds(PolicyKey::AllocationReleaseTimeout, &self.scopes(), ctx.now);
        let until = ctx.now + limit;
        let phase = Phase::Releasing { node_id, placed: placed.clone(), attempt, until };
        self.in_phase(phase, ctx.now, reason).transition(why).event(Event::ReleaseRequested {
            allocation_id: self.id,
            node_id,
            attempt,
            deadline_at: until,
        })
    }

    pub(super) fn fail_request(
        &self,
        code: FailureCode,
        message: &str,
        retryable: bool,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        next.failure = Some(AllocationFailure {
            phase: PhaseName::Requested,
            code: code.clone(),
            message: message.to_owned(),
            retryable,
        });
        next.finish(None, &code, message, ctx)
            .event(Event::ProvisioningFailed { allocation_id: self.id, node_id: None, reason: code.to_string() })
            .event(self.never_used())
            .audit(self.audit(AuditAction::AllocationsFail, json!({ "code": code })))
    }

    fn finish(
        &self,
        last: Option<(NodeId, Placement)>,
        reason: impl Into<StatusReason>,
        why: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let reason = reason.into();
        let ended = self.released_event(last.as_ref(), reason.as_str());
        self.in_phase(Phase::Released { at: ctx.now, last }, ctx.now, reason).transition(why).event(ended)
    }

    /// The event of its end. Resent after a placement that came too late: the tenant may have counted the allocation once more.
    fn released_event(&self, last: Option<&(NodeId, Placement)>, reason: &str) -> Event {
        Event::AllocationReleased {
            allocation_id: self.id,
            user_id: self.asked.owner.user_id.clone(),
            node_id: last.map(|(node_id, _)| *node_id),
            reason: reason.to_owned(),
        }
    }

    fn reject_reservation(&self, node_id: NodeId) -> Transition<Self> {
        self.unchanged(format!("node {node_id} holds devices that are not wanted"))
            .event(Event::ReservationUnwanted { allocation_id: self.id, node_id })
    }
}

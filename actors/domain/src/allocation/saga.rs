//! The saga: which fact moves an allocation where, and what undoes a step that came to nothing.

use super::{AfterFailure, Allocation, Command, Failure, LOOK_AGAIN, MAX_GPUS, Phase, Placed, Rejection, Request};
use crate::again::Again;
use crate::audit::{Audit, AuditAction, Refusals};
use crate::event::Event;
use crate::id::{AllocationId, EntityRef, Kind, NodeId};
use crate::machine::{Command as _, Ctx, Step};
use crate::policy::Key;
use chrono::TimeDelta;
use serde_json::json;

/// Why a release without proof is over, in its history.
const FORCED: &str = "forced";

/// The first pause between clean-up attempts; it doubles up to policy `allocation.release_backoff_max_seconds`.
const FIRST_PAUSE: TimeDelta = TimeDelta::seconds(1);

impl Allocation {
    pub(super) fn request(mut request: Request, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        if !(1..=MAX_GPUS).contains(&request.gpu_count) {
            return Err(Rejection::GpuCount { max: MAX_GPUS });
        }
        let scopes = request.scopes();
        let longest = ctx.policy.int(Key::AllocationQueueMax, &scopes, ctx.now);
        let patience = match request.queue_seconds {
            Some(seconds) if i64::from(seconds) > longest => return Err(Rejection::QueueSeconds { max: longest }),
            Some(seconds) => TimeDelta::seconds(seconds.into()),
            None => ctx.policy.seconds(Key::AllocationProvisioningTimeout, &scopes, ctx.now),
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
            refusals: Refusals::default(),
        };
        let phase = requested.phase.clone();
        let requested = requested.moved(phase, ctx.now, "requested");
        Ok(requested
            .clone()
            .step("asked for by its user")
            .event(Event::AllocationRequested { allocation_id: id })
            .audit(requested.audit(AuditAction::AllocationsRequest, json!({ "gpu_count": requested.asked.gpu_count }))))
    }

    pub(super) fn advance(&self, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match command {
            Command::Request(_) => Err(Rejection::Exists),
            Command::Release { issue } => self.release(issue, ctx),
            Command::Revise { metadata, if_version } => self.revise(metadata, if_version, ctx),
            Command::RetryRelease { reason } => self.retry_release(&reason, ctx),
            Command::ForceRelease { reason } => self.force_release(&reason, ctx),
            Command::Reserved { node_id, placed } => Ok(self.reserved(node_id, placed, ctx)),
            Command::NoCapacity { suggestion } => Ok(self.no_capacity(suggestion, ctx)),
            Command::OverQuota { limit } => Ok(self.over_quota(limit, ctx)),
            Command::Unaffordable { message } => Ok(self.unaffordable(&message, ctx)),
            Command::NotIsolated => Ok(self.not_isolated(ctx)),
            Command::Uncover => Ok(self.uncover(ctx)),
            Command::Faulted { node_id, at, reason } => Ok(self.faulted(node_id, at, &reason, ctx)),
            Command::StillMetered { is_running } => Ok(self.still_metered(is_running)),
            Command::Provisioned { node_id } => Ok(self.provisioned(node_id, ctx)),
            Command::ProvisionFailed { node_id, reason } => Ok(self.provision_failed(node_id, &reason, ctx)),
            Command::Cleaned { node_id, attempt } => Ok(self.cleaned(node_id, attempt, ctx)),
            Command::CleanupFailed { node_id, attempt, reason, detail } => {
                Ok(self.cleanup_failed(node_id, attempt, (&reason, &detail), ctx))
            }
            Command::StillCounted { logins_revision } => Ok(self.still_counted(logins_revision)),
            Command::ChooseLogins { chosen, keys, logins_revision } => {
                self.choose_logins(chosen, keys, logins_revision, ctx)
            }
            Command::AdoptLogins { chosen, keys, logins_revision } => {
                Ok(self.adopt_logins(&chosen, keys, logins_revision, ctx))
            }
            Command::LoginsWritten { node_id, revision } => Ok(self.logins_written(node_id, revision)),
            Command::Reseal { scheduler_request_enc } => Ok(self.resealed(scheduler_request_enc)),
            Command::Tick => Ok(self.tick(ctx)),
        }
    }

    /// Where there was none there is nothing to seal anew.
    fn resealed(&self, sealed: String) -> Step<Self> {
        let mut next = self.clone();
        match &mut next.asked.scheduler_request_enc {
            Some(kept) => *kept = sealed,
            None => return Step::stay(Box::new(next)),
        }
        next.step("its request was sealed anew")
    }

    fn release(&self, issue: Option<String>, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        if !ctx.by.is_admin() && !ctx.by.is_user(&self.asked.user_id) {
            return Err(Rejection::NotFound);
        }
        let audit = self.audit(AuditAction::AllocationsRelease, json!({ "issue": issue }));
        match &self.phase {
            Phase::Requested { .. } => {
                let step = self.end(None, "cancelled", "cancelled before a node was found", ctx);
                Ok(step.event(self.never_used()).audit(audit))
            }
            Phase::Provisioning { node_id, placed, .. } => {
                Ok(self.released("release requested", *node_id, placed, ctx).event(self.never_used()).audit(audit))
            }
            Phase::Active { node_id, placed } => {
                Ok(self.given_back("release requested", *node_id, placed, ctx).audit(audit))
            }
            // Asking twice is asking once.
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => Ok(self.stay()),
        }
    }

    /// An active one is to end: its terminals and its meter end with it.
    pub(super) fn given_back(&self, why: &str, node_id: NodeId, placed: &Placed, ctx: &Ctx<'_>) -> Step<Self> {
        let unwanted = Event::TerminalsUnwanted { allocation_id: self.id, user_id: self.asked.user_id.clone() };
        let step = self.released(why, node_id, placed, ctx).event(unwanted);
        let usage = step.reply.usage();
        step.event(usage)
    }

    fn released(&self, why: &str, node_id: NodeId, placed: &Placed, ctx: &Ctx<'_>) -> Step<Self> {
        let next = Self { release_requested_at: Some(ctx.now), ..self.clone() };
        next.clean_up(node_id, placed, 1, why, ctx)
    }

    fn retry_release(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match &self.phase {
            Phase::ReleaseFailed { node_id, placed, attempt, .. } => Ok(self
                .clean_up(*node_id, placed, attempt + 1, "an administrator asked to try the clean-up again", ctx)
                .audit(self.audit(AuditAction::AllocationsRetryRelease, json!({ "reason": reason })))),
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::Released { .. } => Err(self.wrong_state(&Command::RetryRelease { reason: String::new() })),
        }
    }

    fn force_release(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match &self.phase {
            Phase::ReleaseFailed { node_id, placed, .. } => {
                let forced = Event::ReleaseForced { allocation_id: self.id, node_id: *node_id };
                let last = Some((*node_id, placed.clone()));
                Ok(self
                    .end(last, FORCED, "released by force, without proof of clean-up", ctx)
                    .event(forced)
                    .audit(self.audit(AuditAction::AllocationsForceRelease, json!({ "reason": reason }))))
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::Released { .. } => Err(self.wrong_state(&Command::ForceRelease { reason: String::new() })),
        }
    }

    fn reserved(&self, node_id: NodeId, placed: Placed, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Requested { .. } => {
                let limit = ctx.policy.seconds(Key::AllocationProvisioningTimeout, &self.scopes(), ctx.now);
                let until = ctx.now + limit;
                let phase = Phase::Provisioning { node_id, placed, until };
                let next = self.moved(phase, ctx.now, "devices_reserved");
                // The node has the keys that it was asked with, which may be those of a moment ago.
                let logins = next.logins_to_tell();
                let step = next
                    .step(format!("node {node_id} reserved the devices"))
                    .event(Event::ProvisioningStarted { allocation_id: self.id, node_id, deadline_at: until });
                logins.into_iter().fold(step, Step::event)
            }
            Phase::Provisioning { node_id: ours, .. }
            | Phase::Active { node_id: ours, .. }
            | Phase::Releasing { node_id: ours, .. }
            | Phase::ReleaseFailed { node_id: ours, .. }
                if *ours == node_id =>
            {
                self.stay()
            }
            // A second node, or one that came too late: it must not hold devices for nobody.
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. } => self.unwanted(node_id),
            // The node's own question: it was not told of the force.
            Phase::Released { last: Some((ours, _)), .. } if *ours == node_id && self.was_forced() => self
                .unchanged(format!("node {node_id} still holds devices after the release by force"))
                .event(Event::ReleaseForced { allocation_id: self.id, node_id }),
            Phase::Released { last, .. } => self.unwanted(node_id).event(self.ended(last.as_ref(), "placed_too_late")),
        }
    }

    fn was_forced(&self) -> bool {
        self.history.last().is_some_and(|last| last.reason == FORCED)
    }

    /// Its tenant has not heard of its end, or it not of its tenant's keys.
    fn still_counted(&self, logins_revision: u64) -> Step<Self> {
        match &self.phase {
            Phase::Released { last, .. } => self
                .unchanged("its tenant still counts it after its end")
                .event(self.ended(last.as_ref(), "still_counted")),
            Phase::Requested { .. } | Phase::Provisioning { .. } | Phase::Active { .. } => {
                match self.stale_logins(logins_revision) {
                    Some(stale) => self.unchanged("its user has other keys than it knows of").event(stale),
                    None => self.stay(),
                }
            }
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } => self.stay(),
        }
    }

    fn no_capacity(&self, suggestion: Option<String>, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Requested { until, .. } if self.asked.queue_seconds.is_some() && ctx.now < *until => {
                let mut next = self.clone();
                next.phase = Phase::Requested { until: *until, look_again_at: Some(ctx.now + LOOK_AGAIN) };
                next.step("no capacity: the request waits in the queue")
            }
            Phase::Requested { .. } => {
                let message = suggestion
                    .unwrap_or_else(|| "No node of this SKU has enough free GPUs; try again later.".to_owned());
                self.refused("insufficient_capacity", &message, true, ctx)
            }
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. } => self.stay(),
            Phase::Released { last, .. } => self
                .unchanged("a node was looked for after the end")
                .event(self.ended(last.as_ref(), "placed_too_late")),
        }
    }

    fn over_quota(&self, limit: i64, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Requested { .. } => {
                let message = format!("You hold the {limit} allocations that your quota admits; release one first.");
                self.refused("concurrency_limit_exceeded", &message, true, ctx)
            }
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    fn provisioned(&self, node_id: NodeId, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Provisioning { node_id: ours, placed, .. } if *ours == node_id => {
                let mut next = self.moved(Phase::Active { node_id, placed: placed.clone() }, ctx.now, "tenant_ready");
                next.active_at = Some(ctx.now);
                let usage = next.usage();
                next.again = next.logins().are_pending().then(|| Again::first(ctx.now));
                next.step(format!("node {node_id} set the tenant up"))
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

    fn provision_failed(&self, node_id: NodeId, reason: &str, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Provisioning { node_id: ours, placed, .. } if *ours == node_id => {
                let message = format!("The node could not set the allocation up ({reason}); ask for another one.");
                self.compensate(node_id, placed, reason, &message, ctx)
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    /// Provisioning came to nothing: whatever the node did of it is cleaned up like any tenant, unbilled.
    pub(super) fn compensate(
        &self,
        node_id: NodeId,
        placed: &Placed,
        code: &str,
        message: &str,
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let mut next = self.clone();
        next.failure = Some(Failure {
            phase: "provisioning".to_owned(),
            code: code.to_owned(),
            message: message.to_owned(),
            retryable: true,
        });
        next.clean_up(node_id, placed, 1, "provisioning failed", ctx)
            .event(Event::ProvisioningFailed {
                allocation_id: self.id,
                node_id: Some(node_id),
                reason: code.to_owned(),
            })
            .event(self.never_used())
            .audit(self.audit(AuditAction::AllocationsFail, json!({ "code": code, "node_id": node_id })))
    }

    fn cleaned(&self, node_id: NodeId, attempt: u32, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            // A proof that comes after its attempt was given up proves the same.
            Phase::Releasing { node_id: ours, placed, .. } | Phase::ReleaseFailed { node_id: ours, placed, .. }
                if *ours == node_id =>
            {
                let why = format!("node {node_id} proved the clean-up (attempt {attempt})");
                self.end(Some((node_id, placed.clone())), "cleaned_up", &why, ctx)
            }
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    fn cleanup_failed(&self, node_id: NodeId, attempt: u32, why: (&str, &str), ctx: &Ctx<'_>) -> Step<Self> {
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
        placed: &Placed,
        attempt: u32,
        (reason, detail): (&str, &str),
        ctx: &Ctx<'_>,
    ) -> Step<Self> {
        let scopes = self.scopes();
        let most = ctx.policy.int(Key::AllocationReleaseMaxAttempts, &scopes, ctx.now);
        let exhausted = i64::from(attempt) >= most;
        let next = if exhausted {
            AfterFailure::Operator(ctx.now)
        } else {
            AfterFailure::RetryAt(
                ctx.now + pause(attempt, ctx.policy.seconds(Key::AllocationReleaseBackoffMax, &scopes, ctx.now)),
            )
        };
        let phase = Phase::ReleaseFailed { node_id, placed: placed.clone(), attempt, reason: reason.to_owned(), next };
        let state_reason = if detail.is_empty() { reason.to_owned() } else { format!("{reason}: {detail}") };
        let step = self
            .moved(phase, ctx.now, &state_reason)
            .step(format!("clean-up attempt {attempt} failed ({reason})"))
            .event(Event::ReleaseFailed { allocation_id: self.id, node_id, attempt, reason: reason.to_owned() })
            .audit(self.audit(
                AuditAction::AllocationsFailRelease,
                json!({ "node_id": node_id, "attempt": attempt, "reason": reason, "exhausted": exhausted }),
            ));
        if exhausted { step.event(Event::ReleaseExhausted { allocation_id: self.id, node_id, attempt }) } else { step }
    }

    /// Looks at the whole state: past its deadline it moves on, before it the request that may have been lost is made again.
    fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        match &self.phase {
            Phase::Requested { until, .. } if ctx.now >= *until => self.refused(
                "insufficient_capacity",
                "No node had enough free GPUs in time; try again later.",
                true,
                ctx,
            ),
            Phase::Requested { until, look_again_at } => {
                let mut next = self.asking_again(ctx);
                // Once it has been looked for in vain, it is looked for often.
                let look_again_at = look_again_at.map(|_| ctx.now + LOOK_AGAIN);
                next.phase = Phase::Requested { until: *until, look_again_at };
                next.step("looking for capacity again").event(Event::AllocationRequested { allocation_id: self.id })
            }
            Phase::Provisioning { node_id, placed, until } if ctx.now >= *until => {
                self.compensate(*node_id, placed, "provisioning_timeout", "The node did not confirm in time.", ctx)
            }
            Phase::Provisioning { node_id, until, .. } => {
                let step = self.asking_again(ctx).step("asking the node again").event(Event::ProvisioningStarted {
                    allocation_id: self.id,
                    node_id: *node_id,
                    deadline_at: *until,
                });
                self.logins_to_tell().into_iter().fold(step, Step::event)
            }
            Phase::Releasing { node_id, placed, attempt, until } if ctx.now >= *until => {
                self.fail_release(*node_id, placed, *attempt, ("release_timeout", ""), ctx)
            }
            Phase::Releasing { node_id, attempt, until, .. } => {
                self.asking_again(ctx).step("asking the node again").event(Event::ReleaseRequested {
                    allocation_id: self.id,
                    node_id: *node_id,
                    attempt: *attempt,
                    deadline_at: *until,
                })
            }
            Phase::ReleaseFailed { node_id, placed, attempt, next: AfterFailure::RetryAt(at), .. }
                if ctx.now >= *at =>
            {
                self.clean_up(*node_id, placed, attempt + 1, "trying the clean-up again", ctx)
            }
            // The fence may not have reached the node, nor what the node has to say by now the allocation.
            Phase::ReleaseFailed { node_id, attempt, next: AfterFailure::Operator(_), .. } => self
                .asking_again(ctx)
                .step("telling the node again that its clean-up has failed")
                .event(Event::ReleaseExhausted { allocation_id: self.id, node_id: *node_id, attempt: *attempt }),
            Phase::Active { .. } => match self.logins_to_tell() {
                Some(logins) => self.asking_again(ctx).step("telling the node again who may log in").event(logins),
                None if self.again.is_some() => {
                    Self { again: None, ..self.clone() }.step("there is nothing to say again")
                }
                None => self.stay(),
            },
            Phase::ReleaseFailed { .. } | Phase::Released { .. } => self.stay(),
        }
    }

    /// The same, having spoken up again.
    fn asking_again(&self, ctx: &Ctx<'_>) -> Self {
        let again = self.again.unwrap_or_else(|| Again::first(ctx.now)).next(ctx.now);
        Self { again: Some(again), ..self.clone() }
    }

    fn clean_up(&self, node_id: NodeId, placed: &Placed, attempt: u32, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let limit = ctx.policy.seconds(Key::AllocationReleaseTimeout, &self.scopes(), ctx.now);
        let until = ctx.now + limit;
        let phase = Phase::Releasing { node_id, placed: placed.clone(), attempt, until };
        self.moved(phase, ctx.now, why).step(why).event(Event::ReleaseRequested {
            allocation_id: self.id,
            node_id,
            attempt,
            deadline_at: until,
        })
    }

    pub(super) fn refused(&self, code: &str, message: &str, retryable: bool, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        next.failure = Some(Failure {
            phase: "requested".to_owned(),
            code: code.to_owned(),
            message: message.to_owned(),
            retryable,
        });
        next.end(None, code, message, ctx)
            .event(Event::ProvisioningFailed { allocation_id: self.id, node_id: None, reason: code.to_owned() })
            .event(self.never_used())
            .audit(self.audit(AuditAction::AllocationsFail, json!({ "code": code })))
    }

    fn end(&self, last: Option<(NodeId, Placed)>, reason: &str, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let ended = self.ended(last.as_ref(), reason);
        self.moved(Phase::Released { at: ctx.now, last }, ctx.now, reason).step(why).event(ended)
    }

    /// That it is over. Said again after a placement that came too late: the tenant may have counted the allocation once more.
    fn ended(&self, last: Option<&(NodeId, Placed)>, reason: &str) -> Event {
        Event::AllocationReleased {
            allocation_id: self.id,
            user_id: self.asked.user_id.clone(),
            node_id: last.map(|(node_id, _)| *node_id),
            reason: reason.to_owned(),
        }
    }

    fn unwanted(&self, node_id: NodeId) -> Step<Self> {
        self.unchanged(format!("node {node_id} holds devices that are not wanted"))
            .event(Event::ReservationUnwanted { allocation_id: self.id, node_id })
    }

    pub(super) fn step(self, why: impl Into<String>) -> Step<Self> {
        let reply = Box::new(self.clone());
        Step::to(self, reply, why)
    }

    pub(super) fn stay(&self) -> Step<Self> {
        Step::stay(Box::new(self.clone()))
    }

    /// The state stays, and yet something must be said of it: written, so that it is not lost.
    pub(super) fn unchanged(&self, why: impl Into<String>) -> Step<Self> {
        self.clone().step(why)
    }

    pub(super) fn wrong_state(&self, command: &Command) -> Rejection {
        Rejection::WrongState { state: self.phase.name().to_owned(), command: command.name().to_owned() }
    }

    pub(super) fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> Audit {
        Audit::new(action, EntityRef { kind: Kind::Allocation, id: self.id.0 }, metadata)
    }
}

/// Doubling from [`FIRST_PAUSE`], never beyond `cap`.
fn pause(attempt: u32, cap: TimeDelta) -> TimeDelta {
    let doublings = attempt.saturating_sub(1).min(16);
    (FIRST_PAUSE * (1 << doublings)).min(cap)
}

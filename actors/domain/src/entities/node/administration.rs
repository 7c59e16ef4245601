//! An administrator's actions on a node: retire, reactivate, remove, quarantine.

use super::{CommandName, HoldAuthor, HoldPhase, Node, Phase, ProviderStep, Rejection, StateCode};
use crate::audit::AuditAction;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Effect, Transition, TransitionContext};
use chrono::TimeDelta;
use serde_json::json;

/// How long replicas get to close a removed node's connections. Safety does not depend on it: every request is refused from the commit on.
const CONNECTION_CLOSE_TIME: TimeDelta = TimeDelta::seconds(1);

impl Node {
    pub(super) fn retire(
        &self,
        reason: &str,
        drain: bool,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let audit = self.audit(AuditAction::NodesRetire, json!({ "reason": reason, "drain": drain }));
        match (&self.lifecycle.phase, self.tenancy.in_use()) {
            (Phase::Retired, _) => Ok(self.stay_with_node()),
            (Phase::Active | Phase::Offline | Phase::Draining { .. }, None) => {
                Ok(self.change_phase(Phase::Retired, StateCode::Retired, reason, ctx).audit(audit))
            }
            // A machine that is beyond repair is retired this way; what is left on it prevents a reactivation.
            (Phase::Quarantined { was }, None) if !was.has_no_identity() => {
                Ok(self.change_phase(Phase::Retired, StateCode::Retired, reason, ctx).audit(audit))
            }
            (Phase::Active | Phase::Offline, Some(_)) if drain => {
                let until = ctx.now + ctx.policy.seconds(PolicyKey::NodeDrainOverdue, &Scopes::global(), ctx.now);
                Ok(self.change_phase(Phase::Draining { until }, StateCode::Draining, reason, ctx).audit(audit))
            }
            (Phase::Draining { .. }, Some(_)) if drain => Ok(self.stay_with_node()),
            (
                Phase::Active | Phase::Offline | Phase::Draining { .. } | Phase::Quarantined { .. },
                Some(allocation_id),
            ) => Err(Rejection::InUse { allocation_id }),
            // It never was active: no tenant can be on it, and its token and certificates are revoked.
            (
                Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } | Phase::Quarantined { .. },
                None,
            ) => {
                let mut next = self.clone();
                next.identity.revoke();
                let step = next.change_phase(Phase::Retired, StateCode::Retired, reason, ctx).audit(audit);
                Ok(step.effect(Effect::CloseNode(self.id)))
            }
            (Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. }, Some(allocation_id)) => {
                Err(Rejection::InUse { allocation_id })
            }
            (Phase::Removing { .. } | Phase::Removed, _) => Err(self.wrong_state(CommandName::Retire)),
        }
    }

    pub(super) fn reactivate(&self, reason: &str, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match self.lifecycle.phase {
            Phase::Retired => {}
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Removing { .. }
            | Phase::Removed => return Err(self.wrong_state(CommandName::Reactivate)),
        }
        self.check_fit_for_tenants(ctx)?;
        if !self.identity.has_valid_certificate(ctx.now) {
            let why = "its agent has no certificate that holds; issue a token with reissue-enrollment".to_owned();
            return Err(Rejection::NotInOrder { why });
        }
        let audit = self.audit(AuditAction::NodesReactivate, json!({ "reason": reason }));
        let mut free = self.clone();
        free.machine.reclaim_gpus();
        Ok(free.change_phase(Phase::Active, StateCode::Reactivated, reason, ctx).audit(audit))
    }

    pub(super) fn remove(&self, reason: &str, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match (&self.lifecycle.phase, self.tenancy.in_use()) {
            // The provider does not take the machine back: an operator gives it up.
            (Phase::Removing { until }, _) if self.machine.is_release_overdue(ctx.now) => {
                let mut next = self.clone();
                next.machine.begin_step(ProviderStep::Released, ctx);
                let event = (ctx.now >= *until).then(|| next.enter_removed(ctx));
                let audit = self.audit(AuditAction::NodesRemove, json!({ "reason": reason, "machine": "given up" }));
                Ok(next.transition_with_node("removed without its machine's release").with(event, [audit]))
            }
            (Phase::Removing { .. } | Phase::Removed, _) => Ok(self.stay_with_node()),
            (Phase::Retired, Some(allocation_id)) => Err(Rejection::InUse { allocation_id }),
            (Phase::Retired, None) => {
                let mut next = self.clone();
                next.identity.revoke();
                next.tenancy.holds.clear();
                next.tenancy.fenced_by.clear();
                next.tasks.by_id.clear();
                next.repair.gpu_resets.clear();
                next.machine.reimage = None;
                let due = next.release_machine(false, ctx);
                let message = "Its identity is void; its connections are being closed.";
                let event = next.lifecycle.enter(
                    Phase::Removing { until: ctx.now + CONNECTION_CLOSE_TIME },
                    StateCode::Removing,
                    message,
                    ctx,
                );
                let audit = self.audit(AuditAction::NodesRemove, json!({ "reason": reason }));
                let step = next.transition_with_node(message).event(event).with(due, [audit]);
                Ok(step.effect(Effect::CloseNode(self.id)))
            }
            (
                Phase::Registered
                | Phase::BootstrapIssued { .. }
                | Phase::Enrolling { .. }
                | Phase::Active
                | Phase::Offline
                | Phase::Draining { .. }
                | Phase::Quarantined { .. },
                _,
            ) => Err(self.wrong_state(CommandName::Remove)),
        }
    }

    pub(super) fn quarantine(&self, reason: &str, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        if self.lifecycle.is_held_by(HoldAuthor::Administrator) {
            return Ok(self.stay_with_node());
        }
        if self.lifecycle.phase.is_gone() {
            return Err(self.wrong_state(CommandName::Quarantine));
        }
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "reason": reason }));
        let mut next = self.clone();
        let event = next.lifecycle.enter_quarantine(StateCode::Quarantined, reason, ctx);
        Ok(next.transition_with_node(reason).with(event, [audit]))
    }

    pub(super) fn release_quarantine(
        &self,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let was = match &self.lifecycle.phase {
            Phase::Quarantined { was } => was,
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => return Err(self.wrong_state(CommandName::ReleaseQuarantine)),
        };
        if !was.has_no_identity() {
            self.check_fit_for_tenants(ctx)?;
        }
        let audit = self.audit(AuditAction::NodesReleaseQuarantine, json!({ "reason": reason }));
        let mut free = self.clone();
        free.identity.sessions.settle();
        // Its last allocation has ended in the meantime.
        if matches!(**was, Phase::Draining { .. }) && self.tenancy.in_use().is_none() {
            return Ok(free.drained(ctx).audit(audit));
        }
        free.machine.reclaim_gpus();
        let to = free.validate_released(was, ctx)?;
        let is_validated = free.validation.obstacle(free.tasks.has_open_validation()).is_some();
        let step = free.change_phase(to, StateCode::QuarantineReleased, reason, ctx).audit(audit);
        Ok(if is_validated { step.effect(Effect::WakeNode(self.id)) } else { step })
    }

    /// Checks that it may take tenants (again).
    fn check_fit_for_tenants(&self, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        let not = |why: String| Err(Rejection::NotInOrder { why });
        let remains = self.tenancy.holds.iter().find(|(_, hold)| matches!(hold.phase, HoldPhase::Abandoned { .. }));
        if let Some((allocation_id, _)) = remains {
            let why = format!("there is no clean-up proof of allocation {allocation_id} yet");
            let is_shared = self.identity.sessions.run_beside_each_other();
            let reissue = "; none is accepted while two agents use this node's identity: reissue its enrollment";
            return not(if is_shared { why + reissue } else { why });
        }
        if self.machine.reimage.is_some() {
            return not("its machine is being reinstalled; retire the node to end that".to_owned());
        }
        if let Some(why) = self.mismatch() {
            return not(why);
        }
        if self.health.is_machine_critical() {
            return not("the agent reports critical health".to_owned());
        }
        if let Some(altered) = self.health.integrity_fault() {
            return not(altered);
        }
        if let Some(unmonitored) = self.agent.unmonitored() {
            return not(unmonitored);
        }
        if self.agent.is_silent(ctx.now) {
            return not("the agent has been silent; start it and try again".to_owned());
        }
        Ok(())
    }

    /// An operator releases a hold of its validation: the machine shows by another one whether it is fit.
    /// Returns the state that the node gets.
    fn validate_released(&mut self, was: &Phase, ctx: &TransitionContext<'_>) -> Result<Phase, Rejection> {
        self.validation.failed = self.failed_level();
        if !self.lifecycle.is_held_by(HoldAuthor::Validation) || !self.tenancy.holds.is_empty() {
            return Ok(was.clone());
        }
        let level = self.required_level();
        match was {
            // The token of an enrolling one may have expired while it was held.
            Phase::Active | Phase::Offline | Phase::Enrolling { .. } => {
                self.add_validation(level, ctx).ok_or_else(Self::too_many_tasks)?;
                Ok(Self::enrolling_with_load(was, level, ctx))
            }
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => Ok(was.clone()),
        }
    }
}

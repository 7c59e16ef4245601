//! What an administrator does with a node: retire, reactivate, remove, quarantine.

use super::{Command, HealthStatus, HoldPhase, Life, Node, Rejection, Reply};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::machine::{Ctx, Effect, Step};
use crate::policy::{Key, Scopes};
use chrono::TimeDelta;
use serde_json::json;

/// How long replicas get to close a removed node's connections. Nothing hangs on it: every request is refused from the commit on.
const REMOVING: TimeDelta = TimeDelta::seconds(1);

impl Node {
    pub(super) fn retire(&self, reason: &str, drain: bool, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let audit = self.audit(AuditAction::NodesRetire, json!({ "reason": reason, "drain": drain }));
        match (&self.life, self.in_use()) {
            (Life::Retired, _) => Ok(Step::stay(Reply::Node { node: Box::new(self.clone()) })),
            (Life::Active | Life::Offline | Life::Draining { .. }, None) => {
                Ok(self.moved(Life::Retired, "retired", reason, ctx).audit(audit))
            }
            // A machine that is beyond repair has this way out; what is left on it keeps it from coming back.
            (Life::Quarantined { was }, None) if !was.is_unborn() => {
                Ok(self.moved(Life::Retired, "retired", reason, ctx).audit(audit))
            }
            (Life::Active | Life::Offline, Some(_)) if drain => {
                let until = ctx.now + ctx.policy.seconds(Key::NodeDrainOverdue, &Scopes::global(), ctx.now);
                Ok(self.moved(Life::Draining { until }, "draining", reason, ctx).audit(audit))
            }
            (Life::Draining { .. }, Some(_)) if drain => Ok(Step::stay(Reply::Node { node: Box::new(self.clone()) })),
            (Life::Active | Life::Offline | Life::Draining { .. } | Life::Quarantined { .. }, Some(allocation_id)) => {
                Err(Rejection::InUse { allocation_id })
            }
            // It never was active: nothing can be on it, and what would still make it so is void.
            (
                Life::Registered | Life::BootstrapIssued { .. } | Life::Enrolling { .. } | Life::Quarantined { .. },
                None,
            ) => {
                let mut next = self.clone();
                next.identity.token = None;
                next.identity.certificates.clear();
                let step = next.moved(Life::Retired, "retired", reason, ctx).audit(audit);
                Ok(step.effect(Effect::CloseNode(self.id)))
            }
            (Life::Registered | Life::BootstrapIssued { .. } | Life::Enrolling { .. }, Some(allocation_id)) => {
                Err(Rejection::InUse { allocation_id })
            }
            (Life::Removing { .. } | Life::Removed, _) => {
                Err(self.wrong_state(&Command::Retire { reason: String::new(), drain }))
            }
        }
    }

    /// The last allocation of a draining node has ended.
    pub(super) fn drained(&self, ctx: &Ctx<'_>) -> Step<Self> {
        self.moved(Life::Retired, "drained", "The last allocation ended; the node is retired.", ctx)
            .audit(self.audit(AuditAction::NodesDrained, json!({})))
    }

    /// As [`Node::drained`], as part of the step that ended the last allocation.
    pub(super) fn retire_if_drained(&mut self, ctx: &Ctx<'_>) -> Option<Event> {
        (matches!(self.life, Life::Draining { .. }) && self.in_use().is_none())
            .then(|| self.enter(Life::Retired, "drained", "The last allocation ended; the node is retired.", ctx))
    }

    pub(super) fn reactivate(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match self.life {
            Life::Retired => {
                self.in_order(ctx)?;
                if self.identity.certificates.values().all(|certificate| certificate.not_after <= ctx.now) {
                    let why =
                        "its agent has no certificate that holds; issue a token with reissue-enrollment".to_owned();
                    return Err(Rejection::NotInOrder { why });
                }
                let audit = self.audit(AuditAction::NodesReactivate, json!({ "reason": reason }));
                Ok(self.clone().contest_again().moved(Life::Active, "reactivated", reason, ctx).audit(audit))
            }
            Life::Registered
            | Life::BootstrapIssued { .. }
            | Life::Enrolling { .. }
            | Life::Active
            | Life::Offline
            | Life::Draining { .. }
            | Life::Quarantined { .. }
            | Life::Removing { .. }
            | Life::Removed => Err(self.wrong_state(&Command::Reactivate { reason: String::new() })),
        }
    }

    pub(super) fn remove(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match (&self.life, self.in_use()) {
            (Life::Removing { .. } | Life::Removed, _) => Ok(Step::stay(Reply::Node { node: Box::new(self.clone()) })),
            (Life::Retired, Some(allocation_id)) => Err(Rejection::InUse { allocation_id }),
            (Life::Retired, None) => {
                let mut next = self.clone();
                next.identity.token = None;
                next.identity.certificates.clear();
                next.holds.clear();
                next.fenced_by.clear();
                next.tasks.clear();
                let message = "Its identity is void; its connections are being closed.";
                let event = next.enter(Life::Removing { until: ctx.now + REMOVING }, "removing", message, ctx);
                let audit = self.audit(AuditAction::NodesRemove, json!({ "reason": reason }));
                Ok(next.answered(message).event(event).audit(audit).effect(Effect::CloseNode(self.id)))
            }
            (
                Life::Registered
                | Life::BootstrapIssued { .. }
                | Life::Enrolling { .. }
                | Life::Active
                | Life::Offline
                | Life::Draining { .. }
                | Life::Quarantined { .. },
                _,
            ) => Err(self.wrong_state(&Command::Remove { reason: String::new() })),
        }
    }

    pub(super) fn quarantine(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        if matches!(self.life, Life::Quarantined { .. }) {
            return Ok(Step::stay(Reply::Node { node: Box::new(self.clone()) }));
        }
        if self.life.is_gone() {
            return Err(self.wrong_state(&Command::Quarantine { reason: String::new() }));
        }
        let was = Box::new(self.life.clone());
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "reason": reason }));
        Ok(self.moved(Life::Quarantined { was }, "quarantined", reason, ctx).audit(audit))
    }

    pub(super) fn release_quarantine(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match &self.life {
            Life::Quarantined { was } => {
                if !was.is_unborn() {
                    self.in_order(ctx)?;
                }
                let audit = self.audit(AuditAction::NodesReleaseQuarantine, json!({ "reason": reason }));
                match **was {
                    // Its last allocation ended meanwhile.
                    Life::Draining { .. } if self.in_use().is_none() => Ok(self.drained(ctx).audit(audit)),
                    Life::Registered
                    | Life::BootstrapIssued { .. }
                    | Life::Enrolling { .. }
                    | Life::Active
                    | Life::Offline
                    | Life::Draining { .. }
                    | Life::Quarantined { .. }
                    | Life::Retired
                    | Life::Removing { .. }
                    | Life::Removed => {
                        let free = self.clone().contest_again();
                        Ok(free.moved((**was).clone(), "quarantine_released", reason, ctx).audit(audit))
                    }
                }
            }
            Life::Registered
            | Life::BootstrapIssued { .. }
            | Life::Enrolling { .. }
            | Life::Active
            | Life::Offline
            | Life::Draining { .. }
            | Life::Retired
            | Life::Removing { .. }
            | Life::Removed => Err(self.wrong_state(&Command::ReleaseQuarantine { reason: String::new() })),
        }
    }

    /// May it take tenants (again)?
    fn in_order(&self, ctx: &Ctx<'_>) -> Result<(), Rejection> {
        let not = |why: String| Err(Rejection::NotInOrder { why });
        let remains = self.holds.iter().find(|(_, hold)| matches!(hold.phase, HoldPhase::Abandoned { .. }));
        if let Some((allocation_id, _)) = remains {
            return not(format!("there is no clean-up proof of allocation {allocation_id} yet"));
        }
        if let Some(why) = self.mismatch() {
            return not(why);
        }
        if self.health.status == HealthStatus::Critical {
            return not("the agent reports critical health".to_owned());
        }
        match &self.seen {
            Some(seen) if seen.silent_at > ctx.now => Ok(()),
            Some(_) | None => not("the agent was not heard lately; start it and try again".to_owned()),
        }
    }

    pub(super) const fn may_be_quarantined(&self) -> bool {
        !matches!(self.life, Life::Quarantined { .. }) && !self.life.is_gone()
    }
}

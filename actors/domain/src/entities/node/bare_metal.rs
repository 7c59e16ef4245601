//! What the worker for bare-metal machines reports of a node's machine, and the reimages that administrators order.

use super::machine::bounded_status;
use super::{
    CommandName, HoldAuthor, Identity, Node, OrderedImage, Phase, ProviderReport, ProviderStep, Rejection, Reply,
    StateCode, StateReason,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::TokenId;
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use serde_json::json;

impl Node {
    /// The worker is about to deploy the machine with this image, and with this token in its user data. Older tokens are void: no system of
    /// an earlier order, which may have another image, can enroll.
    pub(super) fn machine_token(
        &self,
        (token_id, token_sha256): (TokenId, [u8; 32]),
        image: Option<OrderedImage>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let Some(machine) = self.machine.provided.as_ref().filter(|machine| machine.step == ProviderStep::Deploying)
        else {
            return Err(self.wrong_state(CommandName::IssueToken));
        };
        // It holds for as long as the deployment may take, and then as long as any other.
        let expires_at = machine.until + Identity::token_ttl(None, ctx);
        let mut next = self.clone();
        next.identity.issue_token(token_id, token_sha256, expires_at);
        next.identity.certificates.clear();
        if let (Some(machine), Some(image)) = (&mut next.machine.provided, image) {
            machine.image_digest = image.digest;
        }
        let event = match self.lifecycle.phase {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {
                let message = "The provider deploys the machine with a token; waiting for its agent.";
                Some(next.lifecycle.enter(
                    Phase::BootstrapIssued { until: expires_at },
                    StateCode::TokenIssued,
                    message,
                    ctx,
                ))
            }
            // A reimage: the node stays held until the new system has proved itself.
            Phase::Quarantined { .. } | Phase::Retired if self.machine.reimage.is_some() => None,
            Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => return Err(self.wrong_state(CommandName::IssueToken)),
        };
        let audit = self.audit(
            AuditAction::NodesIssueEnrollmentToken,
            json!({
                "token_id": token_id,
                "expires_at": expires_at,
                "system_id": machine.system_id,
                "image_digest": next.machine.provided.as_ref().and_then(|machine| machine.image_digest.as_deref()),
            }),
        );
        Ok(Transition::to(next, Reply::TokenIssued { expires_at }, "a token for the machine's user data")
            .with(event, [audit]))
    }

    /// What the worker found of the step that began at `since`.
    pub(super) fn machine_reported(
        &self,
        since: Timestamp,
        report: ProviderReport,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let Some(machine) = self.machine.provided.as_ref().filter(|machine| machine.since == since) else {
            return Transition::stay(Reply::Done);
        };
        match (&machine.step, report) {
            (ProviderStep::Deploying, ProviderReport::Done) => {
                let mut next = self.with_provider_step(ProviderStep::Deployed, ctx);
                next.machine.expect_new_system(ctx);
                Transition::to(next, Reply::Done, "the provider has deployed the machine")
            }
            // An agent that has enrolled proves the deployment, whatever the provider says of it.
            (ProviderStep::Deploying, ProviderReport::Failed { why }) if !self.identity.has_used_its_token() => {
                self.deployment_failed(&why, ctx)
            }
            (ProviderStep::Failing { why }, ProviderReport::Done) => {
                let next = self.with_provider_step(ProviderStep::Failed { why: why.clone() }, ctx);
                Transition::to(next, Reply::Done, "the provider has marked the machine as broken")
            }
            (ProviderStep::Releasing { then_deploy: true }, ProviderReport::Done) => {
                let next = self.with_provider_step(ProviderStep::Deploying, ctx);
                let due = next.machine_due();
                Transition::to(next, Reply::Done, "the provider has erased the machine; it is deployed next").event(due)
            }
            (ProviderStep::Releasing { then_deploy: false }, ProviderReport::Done) => {
                let mut next = self.with_provider_step(ProviderStep::Released, ctx);
                let removed = next.removed_once_released(ctx);
                Transition::to(next, Reply::Done, "the provider has released the machine").with(removed, None)
            }
            (ProviderStep::Deployed, ProviderReport::Lost { why }) => self.machine_lost(&why, ctx),
            (_, ProviderReport::Waiting { status } | ProviderReport::Failed { why: status }) => {
                let status = Some(bounded_status(&status));
                if machine.status == status {
                    return Transition::stay(Reply::Done);
                }
                let mut next = self.clone();
                if let Some(machine) = &mut next.machine.provided {
                    machine.status = status;
                }
                Transition::to(next, Reply::Done, "the provider was asked")
            }
            (
                ProviderStep::Deploying
                | ProviderStep::Deployed
                | ProviderStep::Failing { .. }
                | ProviderStep::Failed { .. }
                | ProviderStep::Releasing { .. }
                | ProviderStep::Released,
                ProviderReport::Done | ProviderReport::Lost { .. },
            ) => Transition::stay(Reply::Done),
        }
    }

    fn deployment_failed(&self, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let why = bounded_status(why);
        let mut next = self.with_provider_step(ProviderStep::Failing { why: why.clone() }, ctx);
        next.identity.token = None;
        let message = format!(
            "The provider could not deploy the machine: {why}. Repair it there, then order the reimage again, or retire and \
             remove the node."
        );
        let event = if self.machine.reimage.is_some() {
            next.lifecycle.enter_quarantine(StateCode::Reimaging, &message, ctx)
        } else if self.lifecycle.phase.has_no_identity() {
            Some(next.lifecycle.enter(Phase::Registered, StateCode::DeploymentFailed, &message, ctx))
        } else {
            next.lifecycle.reason = StateReason::new(StateCode::DeploymentFailed, message);
            None
        };
        let audit = self.audit(AuditAction::NodesFailDeployment, json!({ "cause": why }));
        let due = next.machine_due();
        Transition::to(next, Reply::Done, format!("the deployment failed: {why}")).event(due).with(event, [audit])
    }

    /// The machine was released, or given to another, by others than this service: what runs there is not to be trusted.
    fn machine_lost(&self, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.lifecycle.is_held_by(HoldAuthor::Provider) || self.lifecycle.phase.is_gone() {
            return Transition::stay(Reply::Done);
        }
        let message = format!(
            "{} Look at the provider, then order a reimage, retire the node, or release the quarantine.",
            bounded_status(why)
        );
        let mut next = self.clone();
        let event = next.lifecycle.enter_quarantine(StateCode::MachineLost, &message, ctx);
        let audit = self.audit(AuditAction::NodesQuarantine, json!({ "code": StateCode::MachineLost }));
        Transition::to(next, Reply::Done, message).with(event, [audit])
    }

    fn with_provider_step(&self, step: ProviderStep, ctx: &TransitionContext<'_>) -> Self {
        let mut next = self.clone();
        next.machine.begin_step(step, ctx);
        next
    }

    fn removed_once_released(&mut self, ctx: &TransitionContext<'_>) -> Option<Event> {
        let Phase::Removing { until } = self.lifecycle.phase else { return None };
        (ctx.now >= until).then(|| self.enter_removed(ctx))
    }

    /// Publishes what is outstanding at the provider again, as part of this transition. A deployment past its deadline has failed.
    pub(super) fn check_machine(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let node = step.next.as_ref().unwrap_or(self);
        let Some(machine) = node.machine.provided.as_ref().filter(|it| it.check_at.is_some_and(|at| at <= ctx.now))
        else {
            return step;
        };
        if machine.step == ProviderStep::Deploying && machine.until <= ctx.now && !node.identity.has_used_its_token() {
            let status = machine.status.as_deref().unwrap_or("the provider was not asked");
            let failed = node.deployment_failed(&format!("the machine was not deployed in time ({status})"), ctx);
            return Transition {
                events: step.events.into_iter().chain(failed.events).collect(),
                audit: step.audit.into_iter().chain(failed.audit).collect(),
                effects: step.effects,
                ..failed
            };
        }
        let mut next = node.clone();
        if let Some(machine) = &mut next.machine.provided {
            machine.check_at = machine.next_check(ctx.now);
        }
        let why = if step.next.is_some() { step.why.clone() } else { "the provider is asked again".to_owned() };
        let due = next.machine_due();
        Transition { next: Some(next), why, ..step }.event(due)
    }

    /// An operator's order, on a node without tenants.
    pub(super) fn order_reimage(
        &self,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.lifecycle.phase.is_gone() || matches!(self.lifecycle.phase, Phase::Draining { .. }) {
            return Err(self.wrong_state(CommandName::Reimage));
        }
        if self.machine.provided.is_none() {
            return Err(Rejection::NotProvided);
        }
        if let Some(allocation_id) = self.tenancy.holds.keys().next() {
            return Err(Rejection::InUse { allocation_id: *allocation_id });
        }
        let mut next = self.clone();
        let (events, audit) = next.begin_reimage(reason, ctx);
        let step = next.transition_with_node(format!("a reimage was ordered: {reason}")).with(events, [audit]);
        Ok(step.effect(Effect::CloseNode(self.id)))
    }
}

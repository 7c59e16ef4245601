//! How a node recovers its identity: by the recovery token that its first enrollment left it, or by a token that an administrator reissues
//! (decisions 4; specification, *Recovery token*).
//!
//! A used enrollment token is a recovery token from then on. It does not expire, but it is bound to the Ed25519 key that the agent
//! generated at enrollment and to the identity's generation, which every recovery raises. So of two machines with the same state, the
//! second to recover presents an old generation: one of them is a clone.

use super::{
    AgentContact, CommandName, ContactKind, Identity, IdentityRecovery, Node, Phase, RecoveryVerdict, Reissue,
    Rejection, Reply, StateCode,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::state_machine::{Effect, Transition, TransitionContext};
use serde_json::json;

impl Node {
    pub(super) fn recover(
        &self,
        shown: &IdentityRecovery,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_is_own_node(ctx)?;
        if self.lifecycle.phase.is_gone() {
            return Err(Rejection::Removed);
        }
        Ok(match self.identity.judge_recovery(shown, ctx.now)? {
            RecoveryVerdict::Recovers { generation } => self.recovered(generation, shown, ctx),
            RecoveryVerdict::IsClone { given } => self.clone_suspected(given, shown, ctx),
        })
    }

    /// The node with a new certificate in `generation`: the next one, or the present one where its answer was lost.
    fn recovered(&self, generation: u32, shown: &IdentityRecovery, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        let again = generation == self.identity.generation;
        next.identity.recover(generation, shown, ctx.now);
        let contact = AgentContact::new(&shown.boot_id, &shown.agent_version, shown.protocol, ctx.now);
        // Its heartbeats follow.
        next.agent.record_contact(contact, ContactKind::Heartbeat, next.lifecycle.phase == Phase::Offline, ctx);
        let recoveries_left = next.identity.recoveries_left;
        let audit = self.audit(
            AuditAction::NodesRecover,
            json!({ "identity_generation": generation, "recoveries_left": recoveries_left, "again": again }),
        );
        let event = match &self.lifecycle.phase {
            Phase::BootstrapIssued { until } => Some(next.expect_first_poll(*until, ctx)),
            Phase::Registered
            | Phase::Enrolling { .. }
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => None,
        };
        let reply = Reply::Enrolled { identity_generation: generation, recoveries_left };
        let step = Transition::to(next, reply, "the agent recovered its identity").audit(audit);
        // Connections with an older certificate are closed.
        step.with(None, self.agent.restarted(&shown.boot_id, self.tenancy.holds.keys(), ctx))
            .with(event, None)
            .effect(Effect::CloseNode(self.id))
    }

    /// Token and signature are valid, but another agent recovered with this state before: two machines have it.
    fn clone_suspected(&self, given: u32, shown: &IdentityRecovery, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        next.identity.spend_nonce(&shown.nonce, ctx.now);
        let metadata = json!({ "given_generation": given, "current_generation": self.identity.generation, "boot_id": shown.boot_id });
        let audit = self.audit(AuditAction::NodesCloneSuspected, metadata);
        let event = (!self.lifecycle.phase.is_gone()).then_some(()).and_then(|()| {
            let message = "An agent recovered with an identity that another had recovered before: find the copy of this machine's \
                           state, then release the quarantine.";
            next.lifecycle.enter_quarantine(StateCode::CloneSuspected, message, ctx)
        });
        Transition::to(next, Reply::CloneSuspected, "an old identity generation was shown").with(event, [audit])
    }

    /// Issues a token for `/enroll` that replaces every earlier token.
    pub(super) fn reissue(&self, asked: Reissue, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let expires_at = ctx.now + Identity::token_ttl(asked.ttl_seconds, ctx);
        let mut next = self.clone();
        next.identity.issue_token(asked.token_id, asked.token_sha256, expires_at);
        let message = "A new token was issued; run the restart command on the machine.";
        let event = match &self.lifecycle.phase {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => Some(next.lifecycle.enter(
                Phase::BootstrapIssued { until: expires_at },
                StateCode::TokenIssued,
                message,
                ctx,
            )),
            Phase::Active | Phase::Offline | Phase::Quarantined { .. } | Phase::Retired => None,
            Phase::Draining { .. } | Phase::Removing { .. } | Phase::Removed => {
                return Err(self.wrong_state(CommandName::Reissue));
            }
        };
        // A certificate that was never used is revoked in any case.
        let voids = asked.revoke_current_certificate || event.is_some();
        if voids {
            next.identity.certificates.clear();
        }
        let audit = self.audit(
            AuditAction::NodesReissueEnrollment,
            json!({
                "token_id": asked.token_id,
                "expires_at": expires_at,
                "reason": asked.reason,
                "certificate_revoked": voids,
            }),
        );
        // A holder of the revoked certificate may be connected to any of the terminals.
        let cut_off = asked.revoke_current_certificate.then_some(Event::TerminalsCutOff { node_id: self.id });
        let events = event.into_iter().chain(cut_off);
        let step = Transition::to(next, Reply::TokenIssued { expires_at }, asked.reason).with(events, [audit]);
        Ok(if voids { step.effect(Effect::CloseNode(self.id)) } else { step })
    }
}

//! How a node recovers its identity: by the recovery token that its first enrollment left it, or by a token that an administrator reissues
//! (decisions 4; specification, *Recovery token*).
//!
//! A used enrollment token is a recovery token from then on. It does not expire, but it is bound to the Ed25519 key that the agent
//! generated at enrollment and to the identity's generation, which every recovery raises. So of two machines with the same state, the
//! second to recover presents an old generation: one of them is a clone.

use super::agent_contact::ContactKind;
use super::{
    AgentContact, CertificateRecord, CommandName, EnrollmentToken, EnrollmentTokenFault, Node, Phase, Rejection, Reply,
    StateCode,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::TokenId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

/// The bound of spent nonces that a node remembers. None is forgotten before its expiry, or it could be used twice.
const MAX_NONCES: usize = 64;

/// An agent's recovery, with the certificate that the edge has prepared for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityRecovery {
    pub token_sha256: [u8; 32],
    /// The generation that the agent knows.
    pub identity_generation: u32,
    /// The node's recovery key with which the edge verified the signature.
    pub verified_with: String,
    pub nonce: Nonce,
    pub csr_sha256: [u8; 32],
    pub issued: CertificateRecord,
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
}

/// A nonce of the service, to be signed once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nonce {
    pub value: String,
    pub until: Timestamp,
}

/// A token that replaces the node's token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reissue {
    pub token_id: TokenId,
    pub token_sha256: [u8; 32],
    pub ttl_seconds: Option<u32>,
    pub reason: String,
    /// Revokes the node's current certificates too, at once.
    pub revoke_current_certificate: bool,
}

/// Of an identity whose agent has had no answer yet.
const FIRST_GENERATION: u32 = 1;

impl Node {
    /// Of any number of recoveries in one generation exactly one succeeds: it raises the generation.
    pub(super) fn recover(
        &self,
        shown: IdentityRecovery,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_is_own_node(ctx)?;
        if self.life.is_gone() {
            return Err(Rejection::Removed);
        }
        self.check_recovery(&shown, ctx)?;
        let generation = self.identity.generation;
        let lost_answer = self.identity.last_request == Some(shown.csr_sha256);
        // An agent that never had an answer takes its identity for one of the first generation. Token and key are those of the last enrollment,
        // which may be a later one: the machine was reinstalled, or its enrollment was reissued.
        let shown_generation = match shown.identity_generation {
            FIRST_GENERATION => self.identity.enrolled_generation.max(FIRST_GENERATION),
            given => given,
        };
        match shown_generation {
            given if given == generation && self.identity.recoveries_left == 0 => {
                Err(Rejection::TokenRefused { cause: EnrollmentTokenFault::RecoveriesUsedUp })
            }
            given if given == generation => Ok(self.recovered(generation + 1, &shown, ctx)),
            given if given.checked_add(1) == Some(generation) && lost_answer => {
                Ok(self.recovered(generation, &shown, ctx))
            }
            given if given < generation => Ok(self.clone_suspected(given, &shown, ctx)),
            _ => Err(Rejection::TokenRefused { cause: EnrollmentTokenFault::GenerationUnknown }),
        }
    }

    /// Everything about a recovery but its generation.
    fn check_recovery(&self, shown: &IdentityRecovery, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        let identity = &self.identity;
        let cause = match &identity.token {
            None => Some(EnrollmentTokenFault::NoneIssued),
            Some(token) if !super::onboarding::constant_time_eq(&token.sha256, &shown.token_sha256) => {
                Some(EnrollmentTokenFault::Mismatch)
            }
            Some(EnrollmentToken { consumed_at: None, .. }) => Some(EnrollmentTokenFault::FirstBoot),
            // The signature was verified with another key: a new enrollment came in between.
            Some(_) if identity.recovery_public_key.as_ref() != Some(&shown.verified_with) => {
                Some(EnrollmentTokenFault::KeyDiffers)
            }
            Some(_) if ctx.now >= shown.nonce.until => Some(EnrollmentTokenFault::NonceExpired),
            Some(_) if identity.spent_nonces.contains_key(&shown.nonce.value) => Some(EnrollmentTokenFault::NonceSpent),
            Some(_) if identity.spent_nonces.values().filter(|until| **until > ctx.now).count() >= MAX_NONCES => {
                Some(EnrollmentTokenFault::TooManyNonces)
            }
            Some(_) => None,
        };
        cause.map_or(Ok(()), |cause| Err(Rejection::TokenRefused { cause }))
    }

    /// The node with a new certificate in `generation`: the next one, or the present one where its answer was lost.
    fn recovered(&self, generation: u32, shown: &IdentityRecovery, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        let again = generation == self.identity.generation;
        let identity = &mut next.identity;
        identity.generation = generation;
        identity.recoveries_left = identity.recoveries_left.saturating_sub(u32::from(!again));
        identity.last_request = Some(shown.csr_sha256);
        let certificate = CertificateRecord { generation, ..shown.issued.clone() };
        identity.certificates = BTreeMap::from([(certificate.serial.clone(), certificate)]);
        next.spend_nonce(&shown.nonce, ctx);
        let contact = AgentContact::new(&shown.boot_id, &shown.agent_version, shown.protocol, ctx.now);
        // Its heartbeats follow.
        next.record_contact(contact, ContactKind::Heartbeat, ctx);
        let recoveries_left = next.identity.recoveries_left;
        let audit = self.audit(
            AuditAction::NodesRecover,
            json!({ "identity_generation": generation, "recoveries_left": recoveries_left, "again": again }),
        );
        let event = match &self.life {
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
        let step = self.restarted(&shown.boot_id).into_iter().fold(step, Transition::audit);
        event.into_iter().fold(step, Transition::event).effect(Effect::CloseNode(self.id))
    }

    /// Token and signature are valid, but another agent recovered with this state before: two machines have it.
    fn clone_suspected(&self, given: u32, shown: &IdentityRecovery, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        next.spend_nonce(&shown.nonce, ctx);
        let metadata = json!({ "given_generation": given, "current_generation": self.identity.generation, "boot_id": shown.boot_id });
        let audit = self.audit(AuditAction::NodesCloneSuspected, metadata);
        let event = self.may_be_quarantined().then_some(()).and_then(|()| {
            let message = "An agent recovered with an identity that another had recovered before: find the copy of this machine's \
                           state, then release the quarantine.";
            next.enter_quarantine(StateCode::CloneSuspected, message, ctx)
        });
        let step = Transition::to(next, Reply::CloneSuspected, "an old identity generation was shown").audit(audit);
        event.into_iter().fold(step, Transition::event)
    }

    fn spend_nonce(&mut self, nonce: &Nonce, ctx: &TransitionContext<'_>) {
        let spent = &mut self.identity.spent_nonces;
        // An expired nonce is refused as expired.
        spent.retain(|_, until| *until > ctx.now);
        spent.insert(nonce.value.clone(), nonce.until);
    }

    /// Issues a token for `/enroll` that replaces every earlier token.
    pub(super) fn reissue(&self, asked: Reissue, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let expires_at = ctx.now + self.token_ttl(asked.ttl_seconds, ctx);
        let mut next = self.clone();
        next.identity.token =
            Some(EnrollmentToken { id: asked.token_id, sha256: asked.token_sha256, expires_at, consumed_at: None });
        let message = "A new token was issued; run the restart command on the machine.";
        let event = match &self.life {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {
                Some(next.enter(Phase::BootstrapIssued { until: expires_at }, StateCode::TokenIssued, message, ctx))
            }
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
        let step = Transition::to(next, Reply::TokenIssued { expires_at }, asked.reason).audit(audit);
        // A holder of the revoked certificate may be connected to any of the terminals.
        let cut_off = asked.revoke_current_certificate.then_some(Event::TerminalsCutOff { node_id: self.id });
        let step = event.into_iter().chain(cut_off).fold(step, Transition::event);
        Ok(if voids { step.effect(Effect::CloseNode(self.id)) } else { step })
    }

    pub(super) fn token_ttl(&self, ttl_seconds: Option<u32>, ctx: &TransitionContext<'_>) -> TimeDelta {
        ttl_seconds.map_or_else(
            || ctx.policy.seconds(PolicyKey::NodeEnrollmentTokenTtl, &Scopes::global(), ctx.now),
            |seconds| TimeDelta::seconds(seconds.into()),
        )
    }
}

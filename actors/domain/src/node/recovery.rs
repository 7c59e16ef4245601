//! How a node comes back to its identity: by the recovery token that its first enrollment left it, or by a token that an
//! administrator issues anew (decisions 4; specification, *Recovery token*).
//!
//! An enrollment token that was used is a recovery token from then on. It has no end of its own, but it is bound to the Ed25519 key that
//! the agent made at enrollment and to the identity's generation, which every recovery raises. So of two machines with one state, the
//! second to recover shows an old generation: one of them is a clone.

use super::{Certificate, Command, Life, Node, Rejection, Reply, Token, TokenCause};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::TokenId;
use crate::machine::{Ctx, Effect, Step, Timestamp};
use crate::policy::{Key, Scopes};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

/// Spent nonces that a node remembers. None is forgotten before its end, or it could be used twice.
const NONCES: usize = 64;

/// What an agent shows when it recovers, with the certificate that the edge has made ready for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    pub token_sha256: [u8; 32],
    /// As the agent knows it.
    pub identity_generation: u32,
    /// The node's recovery key with which the edge found the signature to be good.
    pub verified_with: String,
    pub nonce: Nonce,
    pub csr_sha256: [u8; 32],
    pub issued: Certificate,
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
}

/// A number that the service gave out to be signed once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nonce {
    pub value: String,
    pub until: Timestamp,
}

/// A token that is issued in place of whatever the node had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reissue {
    pub token_id: TokenId,
    pub token_sha256: [u8; 32],
    pub ttl_seconds: Option<u32>,
    pub reason: String,
    /// Also what the node has now is void, at once.
    pub revoke_current_certificate: bool,
}

impl Node {
    /// Of any number of recoveries in one generation exactly one passes: it raises the generation.
    pub(super) fn recover(&self, shown: Recovery, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        self.only_itself(ctx)?;
        if self.life.is_gone() {
            return Err(Rejection::Removed);
        }
        self.check_recovery(&shown, ctx)?;
        let generation = self.identity.generation;
        let lost_answer = self.identity.last_request == Some(shown.csr_sha256);
        match shown.identity_generation {
            given if given == generation && self.identity.recoveries_left == 0 => {
                Err(Rejection::TokenRefused { cause: TokenCause::RecoveriesUsedUp })
            }
            given if given == generation => Ok(self.recovered(generation + 1, &shown, ctx)),
            given if given.checked_add(1) == Some(generation) && lost_answer => {
                Ok(self.recovered(generation, &shown, ctx))
            }
            given if given < generation => Ok(self.cloned(given, &shown, ctx)),
            _ => Err(Rejection::TokenRefused { cause: TokenCause::GenerationUnknown }),
        }
    }

    /// Everything about a recovery but its generation.
    fn check_recovery(&self, shown: &Recovery, ctx: &Ctx<'_>) -> Result<(), Rejection> {
        let identity = &self.identity;
        let cause = match &identity.token {
            None => Some(TokenCause::NoneIssued),
            Some(token) if !super::onboarding::same(&token.sha256, &shown.token_sha256) => Some(TokenCause::Mismatch),
            Some(Token { consumed_at: None, .. }) => Some(TokenCause::FirstBoot),
            // The key was another's when the signature was looked at: a new enrollment came in between.
            Some(_) if identity.recovery_public_key.as_ref() != Some(&shown.verified_with) => {
                Some(TokenCause::KeyDiffers)
            }
            Some(_) if ctx.now >= shown.nonce.until => Some(TokenCause::NonceExpired),
            Some(_) if identity.spent_nonces.contains_key(&shown.nonce.value) => Some(TokenCause::NonceSpent),
            Some(_) if identity.spent_nonces.values().filter(|until| **until > ctx.now).count() >= NONCES => {
                Some(TokenCause::TooManyNonces)
            }
            Some(_) => None,
        };
        cause.map_or(Ok(()), |cause| Err(Rejection::TokenRefused { cause }))
    }

    /// The node with a new certificate in `generation`: the next one, or the present one where its answer was lost.
    fn recovered(&self, generation: u32, shown: &Recovery, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        let again = generation == self.identity.generation;
        let identity = &mut next.identity;
        identity.generation = generation;
        identity.recoveries_left = identity.recoveries_left.saturating_sub(u32::from(!again));
        identity.last_request = Some(shown.csr_sha256);
        let certificate = Certificate { generation, ..shown.issued.clone() };
        identity.certificates = BTreeMap::from([(certificate.serial.clone(), certificate)]);
        next.spend(&shown.nonce, ctx);
        next.see(&shown.boot_id, &shown.agent_version, shown.protocol, None, ctx);
        let recoveries_left = next.identity.recoveries_left;
        let audit = self.audit(
            AuditAction::NodesRecover,
            json!({ "identity_generation": generation, "recoveries_left": recoveries_left, "again": again }),
        );
        let event = match &self.life {
            Life::BootstrapIssued { until } => {
                let message = "The agent has its certificate; waiting for its first poll.";
                Some(next.enter(Life::Enrolling { until: *until }, "certificate_issued", message, ctx))
            }
            Life::Registered
            | Life::Enrolling { .. }
            | Life::Active
            | Life::Offline
            | Life::Draining { .. }
            | Life::Quarantined { .. }
            | Life::Retired
            | Life::Removing { .. }
            | Life::Removed => None,
        };
        let reply = Reply::Enrolled { identity_generation: generation, recoveries_left };
        let step = Step::to(next, reply, "the agent recovered its identity").audit(audit);
        // What speaks with an older certificate is answered no more.
        let step = self.restarted(&shown.boot_id).into_iter().fold(step, Step::audit);
        event.into_iter().fold(step, Step::event).effect(Effect::CloseNode(self.id))
    }

    /// Token and signature hold, but somebody recovered with this state before: two machines have it.
    fn cloned(&self, given: u32, shown: &Recovery, ctx: &Ctx<'_>) -> Step<Self> {
        let mut next = self.clone();
        next.spend(&shown.nonce, ctx);
        let metadata = json!({ "given": given, "current": self.identity.generation, "boot_id": shown.boot_id });
        let audit = self.audit(AuditAction::NodesCloneSuspected, metadata);
        let event = self.may_be_quarantined().then(|| {
            let was = Box::new(self.life.clone());
            let message = "An agent recovered with an identity that another had recovered before: find the copy of this machine's \
                           state, then release the quarantine.";
            next.enter(Life::Quarantined { was }, "clone_suspected", message, ctx)
        });
        let step = Step::to(next, Reply::CloneSuspected, "an old identity generation was shown").audit(audit);
        event.into_iter().fold(step, Step::event)
    }

    fn spend(&mut self, nonce: &Nonce, ctx: &Ctx<'_>) {
        let spent = &mut self.identity.spent_nonces;
        // One that has ended is refused for that.
        spent.retain(|_, until| *until > ctx.now);
        spent.insert(nonce.value.clone(), nonce.until);
    }

    /// A token for `/enroll` in place of every token before.
    pub(super) fn reissue(&self, asked: Reissue, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let expires_at = ctx.now + self.token_life(asked.ttl_seconds, ctx);
        let mut next = self.clone();
        next.identity.token =
            Some(Token { id: asked.token_id, sha256: asked.token_sha256, expires_at, consumed_at: None });
        let message = "A token was issued anew; run the restart command on the machine.";
        let event = match &self.life {
            Life::Registered | Life::BootstrapIssued { .. } | Life::Enrolling { .. } => {
                Some(next.enter(Life::BootstrapIssued { until: expires_at }, "token_issued", message, ctx))
            }
            Life::Active | Life::Offline | Life::Quarantined { .. } | Life::Retired => None,
            Life::Draining { .. } | Life::Removing { .. } | Life::Removed => {
                return Err(self.wrong_state(&Command::Reissue(Box::new(asked))));
            }
        };
        // What was never used is void in any case.
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
        let step = Step::to(next, Reply::TokenIssued { expires_at }, asked.reason).audit(audit);
        // Whoever has what was revoked may sit at the other end of each.
        let cut_off = asked.revoke_current_certificate.then_some(Event::TerminalsCutOff { node_id: self.id });
        let step = event.into_iter().chain(cut_off).fold(step, Step::event);
        Ok(if voids { step.effect(Effect::CloseNode(self.id)) } else { step })
    }

    pub(super) fn token_life(&self, ttl_seconds: Option<u32>, ctx: &Ctx<'_>) -> TimeDelta {
        ttl_seconds.map_or_else(
            || ctx.policy.seconds(Key::NodeEnrollmentTokenTtl, &Scopes::global(), ctx.now),
            |seconds| TimeDelta::seconds(seconds.into()),
        )
    }
}

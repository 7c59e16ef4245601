//! The credentials of a node: its token, its certificates, and the key of its agent.

mod agent_sessions;

use super::{EnrollmentTokenFault, Rejection};
use crate::audit::RefusalAudit;
use crate::id::TokenId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Timestamp, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub use agent_sessions::AgentSessions;

/// The part of a node that says who it is: its credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Raised by every enrollment; 0 before the first.
    pub generation: u32,
    /// The generation of the last enrollment; 0 where an earlier release recorded it.
    #[serde(default)]
    pub enrolled_generation: u32,
    pub recoveries_left: u32,
    /// The agent's Ed25519 key, base64: it signs clean-up proofs and recoveries.
    pub recovery_public_key: Option<String>,
    /// By serial, as lower-case hex. Expired ones go.
    pub certificates: BTreeMap<String, CertificateRecord>,
    /// The serial of the certificate that the agent presented last: one that was issued since then may never have reached it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shown: Option<String>,
    pub token: Option<EnrollmentToken>,
    /// SHA-256 of the certificate request that was answered last: an agent that lost the answer presents it again.
    #[serde(default)]
    pub last_request: Option<[u8; 32]>,
    /// Spent nonces of recoveries, until they would have expired.
    #[serde(default)]
    pub spent_nonces: BTreeMap<String, Timestamp>,
    /// Of this generation.
    #[serde(default, skip_serializing_if = "AgentSessions::is_unknown")]
    pub sessions: AgentSessions,
    /// Stored beside the others: see `stored_node.rs`.
    #[serde(skip)]
    pub(super) refusals: RefusalAudit,
}

/// What is stored of a certificate of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateRecord {
    pub serial: String,
    pub not_after: Timestamp,
    /// The identity generation that it was issued in; the state machine sets it.
    #[serde(default)]
    pub generation: u32,
    /// The id of the authority that signed it; where it is not known, the one that the cluster began with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<String>,
}

/// A single-use enrollment token: its hash and its expiry. Once consumed it is a recovery token, which does not expire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrollmentToken {
    pub id: TokenId,
    pub sha256: [u8; 32],
    pub expires_at: Timestamp,
    pub consumed_at: Option<Timestamp>,
}

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

/// What a recovery with a valid token and signature is.
pub(super) enum RecoveryVerdict {
    /// The next certificate is of this generation: the next one, or the present one where its answer was lost.
    Recovers { generation: u32 },
    /// Another agent recovered with this generation before: two machines have the state.
    IsClone { given: u32 },
}

/// The bound of spent nonces that a node remembers. None is forgotten before its expiry, or it could be used twice.
const MAX_NONCES: usize = 64;

/// Of an identity whose agent has had no answer yet.
const FIRST_GENERATION: u32 = 1;

/// The bound of valid certificates of one node. Each renewal whose answer was lost leaves one behind that the agent does not have.
pub(super) const CERTIFICATES: usize = 8;

impl Identity {
    /// Neither the token nor a certificate is valid any more.
    pub(super) fn revoke(&mut self) {
        self.token = None;
        self.certificates.clear();
    }

    /// Checks that the presented token admits the node now. Returns when it expires.
    pub(super) fn check_token(&self, token_sha256: &[u8; 32], now: Timestamp) -> Result<Timestamp, Rejection> {
        let refused = |cause| Err(Rejection::TokenRefused { cause });
        let Some(token) = &self.token else { return refused(EnrollmentTokenFault::NoneIssued) };
        if !constant_time_eq(&token.sha256, token_sha256) {
            return refused(EnrollmentTokenFault::Mismatch);
        }
        if token.consumed_at.is_some() {
            return refused(EnrollmentTokenFault::Consumed);
        }
        if now >= token.expires_at {
            return refused(EnrollmentTokenFault::Expired);
        }
        Ok(token.expires_at)
    }

    /// Checks that this certificate belongs to the current identity.
    pub(super) fn check_certificate(&self, serial: &str, now: Timestamp) -> Result<(), Rejection> {
        match self.certificates.get(serial) {
            Some(certificate) if certificate.generation != self.generation => Err(Rejection::CertificateUnknown),
            Some(certificate) if certificate.not_after <= now => Err(Rejection::CertificateExpired),
            Some(_) => Ok(()),
            None => Err(Rejection::CertificateUnknown),
        }
    }

    /// Whether the agent has a certificate that holds.
    pub(super) fn has_valid_certificate(&self, now: Timestamp) -> bool {
        self.certificates.values().any(|certificate| certificate.not_after > now)
    }

    pub(super) fn has_used_its_token(&self) -> bool {
        self.token.as_ref().is_some_and(|token| token.consumed_at.is_some())
    }

    /// Replaces the token: every earlier one is void.
    pub(super) fn issue_token(&mut self, id: TokenId, sha256: [u8; 32], expires_at: Timestamp) {
        self.token = Some(EnrollmentToken { id, sha256, expires_at, consumed_at: None });
    }

    /// The agent has enrolled with the token: a new generation with its first certificate.
    pub(super) fn enroll(
        &mut self,
        issued: CertificateRecord,
        csr_sha256: [u8; 32],
        recovery_public_key: String,
        ctx: &TransitionContext<'_>,
    ) {
        if let Some(token) = &mut self.token {
            token.consumed_at = Some(ctx.now);
        }
        let recoveries = ctx.policy.int(PolicyKey::NodeMaxRecoveries, &Scopes::global(), ctx.now);
        self.generation += 1;
        self.enrolled_generation = self.generation;
        self.recoveries_left = u32::try_from(recoveries).unwrap_or(0);
        self.recovery_public_key = Some(recovery_public_key);
        self.last_request = Some(csr_sha256);
        self.sessions = AgentSessions::default();
        self.replace_certificates(issued);
    }

    fn replace_certificates(&mut self, issued: CertificateRecord) {
        let certificate = CertificateRecord { generation: self.generation, ..issued };
        self.certificates = BTreeMap::from([(certificate.serial.clone(), certificate)]);
    }

    /// The agent, which presents the certificate `serial`, gets another one.
    pub(super) fn renew(&mut self, serial: &str, issued: CertificateRecord, now: Timestamp) {
        self.add_certificate(issued, &[serial], now);
    }

    /// One more certificate of this generation. Those of `in_use` stay.
    fn add_certificate(&mut self, issued: CertificateRecord, in_use: &[&str], now: Timestamp) {
        self.certificates.retain(|_, certificate| certificate.not_after > now);
        let certificate = CertificateRecord { generation: self.generation, ..issued };
        self.drop_superseded_certificates(in_use);
        self.certificates.insert(certificate.serial.clone(), certificate);
    }

    /// Of any number of recoveries in one generation exactly one succeeds: it raises the generation.
    pub(super) fn judge_recovery(
        &self,
        shown: &IdentityRecovery,
        now: Timestamp,
    ) -> Result<RecoveryVerdict, Rejection> {
        self.check_recovery(shown, now)?;
        let generation = self.generation;
        let lost_answer = self.last_request == Some(shown.csr_sha256);
        // An agent that never had an answer takes its identity for one of the first generation. Token and key are those of the last enrollment,
        // which may be a later one: the machine was reinstalled, or its enrollment was reissued.
        let shown_generation = match shown.identity_generation {
            FIRST_GENERATION => self.enrolled_generation.max(FIRST_GENERATION),
            given => given,
        };
        match shown_generation {
            given if given == generation && self.recoveries_left == 0 => {
                Err(Rejection::TokenRefused { cause: EnrollmentTokenFault::RecoveriesUsedUp })
            }
            given if given == generation => Ok(RecoveryVerdict::Recovers { generation: generation + 1 }),
            given if given.checked_add(1) == Some(generation) && lost_answer => {
                Ok(RecoveryVerdict::Recovers { generation })
            }
            given if given < generation && self.is_superseded(&shown.nonce) => {
                Err(Rejection::TokenRefused { cause: EnrollmentTokenFault::NonceExpired })
            }
            given if given < generation => Ok(RecoveryVerdict::IsClone { given }),
            _ => Err(Rejection::TokenRefused { cause: EnrollmentTokenFault::GenerationUnknown }),
        }
    }

    /// Whether the nonce was given out before one that was spent since. Its request is of before that recovery: the network may have delayed it,
    /// and the agent has retried. A copy of the machine tries again with a later nonce.
    fn is_superseded(&self, nonce: &Nonce) -> bool {
        self.spent_nonces.values().any(|until| *until > nonce.until)
    }

    /// Everything about a recovery but its generation.
    fn check_recovery(&self, shown: &IdentityRecovery, now: Timestamp) -> Result<(), Rejection> {
        let cause = match &self.token {
            None => Some(EnrollmentTokenFault::NoneIssued),
            Some(token) if !constant_time_eq(&token.sha256, &shown.token_sha256) => {
                Some(EnrollmentTokenFault::Mismatch)
            }
            Some(EnrollmentToken { consumed_at: None, .. }) => Some(EnrollmentTokenFault::FirstBoot),
            // The signature was verified with another key: a new enrollment came in between.
            Some(_) if self.recovery_public_key.as_ref() != Some(&shown.verified_with) => {
                Some(EnrollmentTokenFault::KeyDiffers)
            }
            Some(_) if now >= shown.nonce.until => Some(EnrollmentTokenFault::NonceExpired),
            Some(_) if self.spent_nonces.contains_key(&shown.nonce.value) => Some(EnrollmentTokenFault::NonceSpent),
            Some(_) if self.spent_nonces.values().filter(|until| **until > now).count() >= MAX_NONCES => {
                Some(EnrollmentTokenFault::TooManyNonces)
            }
            Some(_) => None,
        };
        cause.map_or(Ok(()), |cause| Err(Rejection::TokenRefused { cause }))
    }

    /// The agent gets a certificate of this generation.
    pub(super) fn recover(&mut self, generation: u32, shown: &IdentityRecovery, now: Timestamp) {
        let again = generation == self.generation;
        self.generation = generation;
        self.recoveries_left = self.recoveries_left.saturating_sub(u32::from(!again));
        self.last_request = Some(shown.csr_sha256);
        self.sessions = AgentSessions::default();
        if again {
            // The network may have delayed this request, and the agent has had the answer to another one, or a renewal since.
            self.add_certificate(shown.issued.clone(), &[], now);
        } else {
            self.replace_certificates(shown.issued.clone());
        }
        self.spend_nonce(&shown.nonce, now);
    }

    pub(super) fn spend_nonce(&mut self, nonce: &Nonce, now: Timestamp) {
        let spent = &mut self.spent_nonces;
        // An expired nonce is refused as expired.
        spent.retain(|_, until| *until > now);
        spent.insert(nonce.value.clone(), nonce.until);
    }

    /// How long a token holds: as asked for, or by the policy.
    pub(super) fn token_ttl(ttl_seconds: Option<u32>, ctx: &TransitionContext<'_>) -> TimeDelta {
        ttl_seconds.map_or_else(
            || ctx.policy.seconds(PolicyKey::NodeEnrollmentTokenTtl, &Scopes::global(), ctx.now),
            |seconds| TimeDelta::seconds(seconds.into()),
        )
    }

    /// Drops the certificates that expire first, so that one more has room. The certificates that the agent uses stay: the one that it
    /// presents now (`but`), and the one that it presented last. So an agent whose answer was lost renews again with its old one.
    fn drop_superseded_certificates(&mut self, but: &[&str]) {
        while self.certificates.len() >= CERTIFICATES {
            let superseded = self
                .certificates
                .values()
                .filter(|it| !but.contains(&it.serial.as_str()) && self.shown.as_ref() != Some(&it.serial));
            let Some(oldest) = superseded.min_by_key(|it| (it.not_after, &it.serial)).map(|it| it.serial.clone())
            else {
                return;
            };
            self.certificates.remove(&oldest);
        }
    }
}

/// Compares in constant time.
fn constant_time_eq(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::super::tests::{certificate, decided_at, start};
    use super::*;

    #[test]
    fn lost_renewals_drop_no_certificate_that_the_agent_uses() {
        let mut identity = Identity::default();
        decided_at(start(), |ctx| identity.enroll(certificate("first"), [1; 32], "key".to_owned(), ctx));
        for n in 0..3 * CERTIFICATES {
            identity.renew("first", certificate(&format!("lost-{n}")), start());
        }
        assert_eq!(identity.certificates.len(), CERTIFICATES);
        let ends_at = identity.certificates["first"].not_after;
        assert_eq!(identity.check_certificate("first", start()), Ok(()));
        assert_eq!(identity.check_certificate("first", ends_at), Err(Rejection::CertificateExpired));
        identity.revoke();
        assert_eq!(identity.check_certificate("first", start()), Err(Rejection::CertificateUnknown));
    }
}

//! How a machine becomes a node: registration, the single-use token, and the certificates of its identity.

use super::agent_contact::ContactKind;
use super::{
    AgentContact, CommandName, EnrollmentTokenFault, Node, NodeHealth, Phase, ProbeOutcome, ProvidedMachine,
    Registration, Rejection, Reply, ReportedInventory, StateCode, StateReason,
};
use crate::audit::{AuditAction, RefusalAudit};
use crate::event::Event;
use crate::id::{NodeId, TokenId};
use crate::metadata::{MAX_LABELS, MetadataPatch, TooManyLabels};
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The credentials of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCredentials {
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

/// A machine that the bare-metal provider has ready for a new node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedMachine {
    /// The provider's id.
    pub system_id: String,
    /// The digest that the image shows which is configured at the registration, where it carries one. See [`OrderedImage`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
}

/// An agent's enrollment, with the certificate that the edge has prepared for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrollment {
    pub token_sha256: [u8; 32],
    pub csr_sha256: [u8; 32],
    pub issued: CertificateRecord,
    pub recovery_public_key: String,
    pub boot_id: String,
    pub agent_version: String,
    pub protocol: u16,
    pub inventory: ReportedInventory,
}

/// The bound of valid certificates of one node. Each renewal whose answer was lost leaves one behind that the agent does not have.
pub(super) const CERTIFICATES: usize = 8;

impl NodeCredentials {
    /// Neither the token nor a certificate is valid any more.
    pub(super) fn revoke(&mut self) {
        self.token = None;
        self.certificates.clear();
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

impl Node {
    pub(super) fn register(
        mut registration: Registration,
        probe: Option<ProbeOutcome>,
        machine: Option<PreparedMachine>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        let promise = &registration.sku;
        if registration.gpus_total != promise.gpu_count {
            return Err(Rejection::GpusDiffer { given: registration.gpus_total, promised: promise.gpu_count });
        }
        if !promise.allowed_regions.contains(&registration.region_code) {
            return Err(Rejection::RegionNotAllowed { region_code: registration.region_code });
        }
        registration.metadata = registration.metadata.bounded()?;
        let machine = machine.map(|it| ProvidedMachine::deploying(it.system_id, it.image_digest, ctx));
        let message = match &machine {
            Some(_) => "Registered; the bare-metal provider deploys the machine next.",
            None => "Registered; issue an enrollment token next.",
        };
        let node = Self {
            id: NodeId(ctx.id),
            registration,
            registered_at: ctx.now,
            life: Phase::Registered,
            entered_at: ctx.now,
            reason: StateReason::new(StateCode::Registered, message),
            probe,
            identity: NodeCredentials::default(),
            inventory: None,
            expected_hardware: None,
            seen: None,
            health: NodeHealth::default(),
            findings: Vec::new(),
            repair: None,
            gpu_resets: BTreeMap::new(),
            quarantine_holds: Vec::new(),
            holds: BTreeMap::new(),
            unproved_gpus: BTreeMap::new(),
            fenced_by: BTreeSet::new(),
            tasks: BTreeMap::new(),
            refusals: RefusalAudit::default(),
            claimed_gpus: BTreeSet::new(),
            contested_gpus: BTreeMap::new(),
            machine,
            reimage: None,
            rollouts: Vec::new(),
            validation: None,
            failed_validation: None,
        };
        let event = Event::NodeStateChanged {
            node_id: node.id,
            from: None,
            to: node.life.name().to_owned(),
            reason: node.reason.code.as_str().to_owned(),
        };
        let audit = node.audit(
            AuditAction::NodesCreate,
            json!({ "host": node.registration.host, "sku": node.registration.sku.name }),
        );
        let due = node.machine.is_some().then(|| node.machine_due());
        let step = node.transition_with_node("registered by an administrator").event(event).audit(audit);
        Ok(due.into_iter().fold(step, Transition::event))
    }

    pub(super) fn revise(
        &self,
        (host, port, ssh_username): (Option<String>, Option<u16>, Option<String>),
        probe: Option<ProbeOutcome>,
        metadata: MetadataPatch,
        if_version: Option<i64>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if if_version.is_some_and(|version| version != ctx.version) {
            return Err(Rejection::VersionDiffers);
        }
        if self.life.is_gone() {
            return Err(self.wrong_state(CommandName::Revise));
        }
        let mut next = self.clone();
        let to = &mut next.registration;
        to.host = host.unwrap_or_else(|| to.host.clone());
        to.port = port.unwrap_or(to.port);
        to.ssh_username = ssh_username.unwrap_or_else(|| to.ssh_username.clone());
        to.metadata = to.metadata.patched(&metadata)?;
        let is_elsewhere = (&to.host, to.port) != (&self.registration.host, self.registration.port);
        // The probe of the old address says nothing about the new one.
        if probe.is_some() || is_elsewhere {
            next.probe = probe;
        }
        let to = &next.registration;
        let mut changed = json!({ "host": to.host, "port": to.port });
        if let (Value::Object(changed), Value::Object(patch)) = (&mut changed, json!(metadata)) {
            changed.extend(patch);
        }
        let audit = self.audit(AuditAction::NodesUpdate, changed);
        Ok(next.transition_with_node("revised by an administrator").audit(audit))
    }

    pub(super) fn issue_token(
        &self,
        id: TokenId,
        sha256: [u8; 32],
        ttl_seconds: Option<u32>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match self.life {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {}
            Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => {
                return Err(self.wrong_state(CommandName::IssueToken));
            }
        }
        let expires_at = ctx.now + self.token_ttl(ttl_seconds, ctx);
        let mut next = self.clone();
        // A new token revokes the older token, and a certificate that was never used.
        next.identity.token = Some(EnrollmentToken { id, sha256, expires_at, consumed_at: None });
        next.identity.certificates.clear();
        let message = "A token was issued; install the bundle on the machine and start the agent.";
        let event = next.enter(Phase::BootstrapIssued { until: expires_at }, StateCode::TokenIssued, message, ctx);
        let audit =
            self.audit(AuditAction::NodesIssueEnrollmentToken, json!({ "token_id": id, "expires_at": expires_at }));
        Ok(Transition::to(next, Reply::TokenIssued { expires_at }, "an enrollment token was issued")
            .event(event)
            .audit(audit))
    }

    /// Of any number of enrollments with one token exactly one succeeds: the mailbox processes them one by one, and the first one's commit
    /// consumes the token.
    pub(super) fn enroll(&self, shown: Enrollment, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let until = self.check_token(&shown.token_sha256, ctx)?;
        if let Some(refused) = self.refuse_old_system(&shown, ctx) {
            return Ok(refused);
        }
        let mut next = self.clone();
        if let Some(token) = &mut next.identity.token {
            token.consumed_at = Some(ctx.now);
        }
        let generation = next.identity.generation + 1;
        let recoveries = ctx.policy.int(PolicyKey::NodeMaxRecoveries, &Scopes::global(), ctx.now);
        next.identity.generation = generation;
        next.identity.enrolled_generation = generation;
        next.identity.recoveries_left = u32::try_from(recoveries).unwrap_or(0);
        next.identity.recovery_public_key = Some(shown.recovery_public_key);
        next.identity.last_request = Some(shown.csr_sha256);
        let certificate = CertificateRecord { generation, ..shown.issued };
        next.identity.certificates = BTreeMap::from([(certificate.serial.clone(), certificate)]);
        next.inventory = Some(shown.inventory);
        let contact = AgentContact::new(&shown.boot_id, &shown.agent_version, shown.protocol, ctx.now);
        // Its heartbeats follow.
        next.record_contact(contact, ContactKind::Heartbeat, ctx);
        next.validate_new_system(ctx);
        let reply = Reply::Enrolled { identity_generation: generation, recoveries_left: next.identity.recoveries_left };
        let audit = self.audit(
            AuditAction::NodesEnroll,
            json!({ "identity_generation": generation, "agent_version": shown.agent_version }),
        );
        let event = match self.life {
            Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => Some(next.expect_first_poll(until, ctx)),
            Phase::Registered
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => None,
        };
        let step = Transition::to(next, reply, "an agent enrolled with the issued token").audit(audit);
        let step = event.into_iter().fold(step, Transition::event);
        let had_one = !self.identity.certificates.is_empty();
        Ok(if had_one { step.effect(Effect::CloseNode(self.id)) } else { step })
    }

    /// Checks that the presented token admits this node now. Returns when it expires.
    pub(super) fn check_token(
        &self,
        token_sha256: &[u8; 32],
        ctx: &TransitionContext<'_>,
    ) -> Result<Timestamp, Rejection> {
        self.check_is_own_node(ctx)?;
        if self.life.is_gone() {
            return Err(Rejection::Removed);
        }
        let refused = |cause| Err(Rejection::TokenRefused { cause });
        let Some(token) = &self.identity.token else { return refused(EnrollmentTokenFault::NoneIssued) };
        if !constant_time_eq(&token.sha256, token_sha256) {
            return refused(EnrollmentTokenFault::Mismatch);
        }
        if token.consumed_at.is_some() {
            return refused(EnrollmentTokenFault::Consumed);
        }
        if ctx.now >= token.expires_at {
            return refused(EnrollmentTokenFault::Expired);
        }
        Ok(token.expires_at)
    }

    /// The enrolled node waits for its agent's first poll.
    pub(super) fn expect_first_poll(&mut self, until: Timestamp, ctx: &TransitionContext<'_>) -> Event {
        // It may be another machine than the one that was validated. One that failed has to pass whatever it is.
        self.failed_validation = self.failed_level();
        self.validation = None;
        let message = "The agent has its certificate; waiting for its first poll.";
        self.enter(Phase::Enrolling { until }, StateCode::CertificateIssued, message, ctx)
    }

    pub(super) fn renew(
        &self,
        serial: &str,
        issued: CertificateRecord,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        self.check_certificate(serial, ctx)?;
        let generation = self.identity.generation;
        let mut next = self.clone();
        next.identity.certificates.retain(|_, certificate| certificate.not_after > ctx.now);
        let audit = self.audit(
            AuditAction::NodesRenewCertificate,
            json!({ "serial": issued.serial, "not_after": issued.not_after }),
        );
        let certificate = CertificateRecord { generation, ..issued };
        next.identity.drop_superseded_certificates(&[serial, &certificate.serial]);
        next.identity.certificates.insert(certificate.serial.clone(), certificate);
        let reply = Reply::Enrolled { identity_generation: generation, recoveries_left: self.identity.recoveries_left };
        Ok(Transition::to(next, reply, "the agent renewed its certificate").audit(audit))
    }

    /// Checks that this certificate belongs to the node's current identity. Checked at each request, since a live or resumed connection
    /// verifies nothing.
    pub(super) fn check_certificate(&self, serial: &str, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        self.check_is_own_node(ctx)?;
        if self.life.is_gone() {
            return Err(Rejection::Removed);
        }
        match self.identity.certificates.get(serial) {
            Some(certificate) if certificate.generation != self.identity.generation => {
                Err(Rejection::CertificateUnknown)
            }
            Some(certificate) if certificate.not_after <= ctx.now => Err(Rejection::CertificateExpired),
            Some(_) => Ok(()),
            None => Err(Rejection::CertificateUnknown),
        }
    }

    pub(super) fn check_is_own_node(&self, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        match ctx.by {
            crate::authz::Principal::Node(id) if *id == self.id => Ok(()),
            crate::authz::Principal::Node(_)
            | crate::authz::Principal::Caller(_)
            | crate::authz::Principal::System(_) => Err(Rejection::ForeignNode { id: self.id }),
        }
    }

    /// An enrollment that was not completed: its certificate is revoked, and so is the token.
    pub(super) fn expire_enrollment(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        next.identity.certificates.clear();
        let (life, code, message) = match &self.life {
            Phase::Enrolling { until } => (
                Phase::BootstrapIssued { until: *until },
                StateCode::EnrollmentExpired,
                "The agent enrolled but did not poll in time; its certificate is void.",
            ),
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => {
                next.identity.token = None;
                (Phase::Registered, StateCode::TokenExpired, "The enrollment token expired unused; issue another.")
            }
        };
        let audit = self.audit(AuditAction::NodesExpireEnrollment, json!({ "code": code }));
        let event = next.enter(life, code, message, ctx);
        next.transition_with_node(message).event(event).audit(audit).effect(Effect::CloseNode(self.id))
    }
}

impl From<TooManyLabels> for Rejection {
    fn from(TooManyLabels: TooManyLabels) -> Self {
        Self::TooManyLabels { max: MAX_LABELS }
    }
}

/// Compares in constant time.
pub(super) fn constant_time_eq(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

//! How a machine becomes a node: registration, the single-use token, and the certificates of its identity.

use super::{
    Agent, AgentContact, CertificateRecord, CommandName, ContactKind, Enrollment, Health, Identity, Lifecycle,
    MachineRepair, Node, NodeMachine, Phase, PreparedMachine, ProbeOutcome, ProvidedMachine, Registration, Rejection,
    Reply, StateCode, Tasks, Tenancy, Validation, ValidationOrder,
};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{NodeId, TokenId};
use crate::metadata::{MAX_LABELS, MetadataPatch, TooManyLabels};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use serde_json::{Value, json};

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
            identity: Identity::default(),
            lifecycle: Lifecycle::registered(message, ctx.now),
            tenancy: Tenancy::default(),
            tasks: Tasks::default(),
            health: Health::default(),
            repair: MachineRepair::default(),
            validation: Validation::default(),
            machine: NodeMachine::registered(registration, probe, machine, ctx.now),
            agent: Agent::default(),
        };
        let event = Event::NodeStateChanged {
            node_id: node.id,
            from: None,
            to: node.lifecycle.phase.name().to_owned(),
            reason: node.lifecycle.reason.code.as_str().to_owned(),
        };
        let audit = node.audit(
            AuditAction::NodesCreate,
            json!({ "host": node.machine.registration.host, "sku": node.machine.registration.sku.name }),
        );
        let due = node.machine.provided.is_some().then(|| node.machine_due());
        Ok(node.transition_with_node("registered by an administrator").event(event).with(due, [audit]))
    }

    pub(super) fn revise(
        &self,
        address: (Option<String>, Option<u16>, Option<String>),
        probe: Option<ProbeOutcome>,
        metadata: MetadataPatch,
        if_version: Option<i64>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if if_version.is_some_and(|version| version != ctx.version) {
            return Err(Rejection::VersionDiffers);
        }
        if self.lifecycle.phase.is_gone() {
            return Err(self.wrong_state(CommandName::Revise));
        }
        let mut next = self.clone();
        next.machine.revise(address, probe, &metadata)?;
        let to = &next.machine.registration;
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
        match self.lifecycle.phase {
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
        let expires_at = ctx.now + Identity::token_ttl(ttl_seconds, ctx);
        let mut next = self.clone();
        // A new token revokes the older token, and a certificate that was never used.
        next.identity.issue_token(id, sha256, expires_at);
        next.identity.certificates.clear();
        let message = "A token was issued; install the bundle on the machine and start the agent.";
        let event =
            next.lifecycle.enter(Phase::BootstrapIssued { until: expires_at }, StateCode::TokenIssued, message, ctx);
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
        next.identity.enroll(shown.issued, shown.csr_sha256, shown.recovery_public_key, ctx);
        let generation = next.identity.generation;
        next.machine.report(shown.inventory, false);
        let contact = AgentContact::new(&shown.boot_id, &shown.agent_version, shown.protocol, ctx.now);
        // Its heartbeats follow.
        let is_offline = next.lifecycle.phase == Phase::Offline;
        next.agent.record_contact(contact, ContactKind::Heartbeat, is_offline, ctx);
        next.validate_new_system(ctx);
        let reply = Reply::Enrolled { identity_generation: generation, recoveries_left: next.identity.recoveries_left };
        let audit = self.audit(
            AuditAction::NodesEnroll,
            json!({ "identity_generation": generation, "agent_version": shown.agent_version }),
        );
        let event = match self.lifecycle.phase {
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
        let step = Transition::to(next, reply, "an agent enrolled with the issued token").with(event, [audit]);
        let had_one = !self.identity.certificates.is_empty();
        Ok(if had_one { step.effect(Effect::CloseNode(self.id)) } else { step })
    }

    /// The new system has enrolled: it is validated before a GPU is free.
    fn validate_new_system(&mut self, ctx: &TransitionContext<'_>) {
        let order = ValidationOrder::new(self.required_level(), ctx);
        if self.machine.begin_system_validation(order.load_time(), ctx) {
            self.tasks.add_system_validation(order, self.agent.boot_id(), ctx);
        }
    }

    /// The answer to an enrollment of a system that is not the new one: its token is void, and the node stays held.
    fn refuse_old_system(&self, shown: &Enrollment, ctx: &TransitionContext<'_>) -> Option<Transition<Self>> {
        let why = self.machine.not_the_new_system(&shown.inventory)?;
        let mut next = self.clone();
        next.identity.revoke();
        next.machine.refuse_system(&why, ctx.now);
        let message =
            format!("The reinstalled machine was refused: {why}. Look at the machine, then order the reimage again.");
        let event = next.lifecycle.enter_quarantine(StateCode::SystemRefused, &message, ctx);
        let audit = self.audit(AuditAction::NodesRefuseSystem, json!({ "cause": why }));
        Some(Transition::to(next, Reply::SystemRefused, message).with(event, [audit]))
    }

    /// Checks that the presented token admits this node now. Returns when it expires.
    pub(super) fn check_token(
        &self,
        token_sha256: &[u8; 32],
        ctx: &TransitionContext<'_>,
    ) -> Result<Timestamp, Rejection> {
        self.check_is_own_node(ctx)?;
        if self.lifecycle.phase.is_gone() {
            return Err(Rejection::Removed);
        }
        self.identity.check_token(token_sha256, ctx.now)
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
        let audit = self.audit(
            AuditAction::NodesRenewCertificate,
            json!({ "serial": issued.serial, "not_after": issued.not_after }),
        );
        next.identity.renew(serial, issued, ctx.now);
        let reply = Reply::Enrolled { identity_generation: generation, recoveries_left: self.identity.recoveries_left };
        Ok(Transition::to(next, reply, "the agent renewed its certificate").audit(audit))
    }

    /// Checks that this certificate belongs to the node's current identity. Checked at each request, since a live or resumed connection
    /// verifies nothing.
    pub(super) fn check_certificate(&self, serial: &str, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        self.check_is_own_node(ctx)?;
        if self.lifecycle.phase.is_gone() {
            return Err(Rejection::Removed);
        }
        self.identity.check_certificate(serial, ctx.now)
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
        let (life, code, message) = match &self.lifecycle.phase {
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
        let event = next.lifecycle.enter(life, code, message, ctx);
        next.transition_with_node(message).event(event).audit(audit).effect(Effect::CloseNode(self.id))
    }
}

impl From<TooManyLabels> for Rejection {
    fn from(TooManyLabels: TooManyLabels) -> Self {
        Self::TooManyLabels { max: MAX_LABELS }
    }
}

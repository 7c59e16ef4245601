//! The reimage of a node's machine: after a tenant whose allocation isolates by it, or on an operator's order.
//!
//! The provider erases and installs the machine. Until the new system has enrolled with a fresh token, shown another machine id than the
//! old one and the digest of the image that its deployment was ordered with, and passed `node.validate`, a hold of the quarantine has the
//! node out of rent, so that none of its GPUs is free. Retries: an operator orders the reimage again, or retires the node.

use super::{
    CommandName, Enrollment, HoldAuthor, Node, NodeTask, NodeTaskPhase, PendingTask, Phase, ProviderStep, Rejection,
    Reply, ReportedInventory, StateCode,
};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::Event;
use crate::id::TaskId;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Effect, Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// A reimage that is not over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reimage {
    pub ordered_at: Timestamp,
    /// The machine id of the system that is replaced, where it reported one.
    pub replaces: Option<String>,
    pub stage: ReimageStage,
    /// The deadline of what the new system has to do.
    pub until: Timestamp,
}

/// What the reimage waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "stage", rename_all = "snake_case")]
pub enum ReimageStage {
    /// The provider, and then the enrollment of the new system.
    Installation,
    /// `node.validate` of the new system.
    Validation,
    /// A system came that is not the new one.
    Refused { why: String },
}

impl Node {
    /// Why it cannot be reimaged after a tenant; `None` where it can.
    #[must_use]
    pub fn not_reimageable(&self) -> Option<String> {
        let Some(machine) = &self.machine else {
            return Some("its machine has no bare-metal provider that could reimage it".to_owned());
        };
        if !machine.is_deployed() {
            return Some("its bare-metal provider has not deployed it".to_owned());
        }
        if self.machine_id().is_none() {
            return Some(
                "its agent reports no machine id, by which a new system is distinguished from the old one".to_owned(),
            );
        }
        None
    }

    /// Whether one tenant can have all of it now, and it can be reimaged afterwards.
    #[must_use]
    pub fn is_reimageable_as_a_whole(&self) -> bool {
        self.not_reimageable().is_none() && self.gpus_free() == self.registration.gpus_total
    }

    fn machine_id(&self) -> Option<&str> {
        self.inventory.as_ref()?.system.as_ref()?.machine_id.as_deref()
    }

    /// An operator's order, on a node without tenants.
    pub(super) fn order_reimage(
        &self,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.life.is_gone() || matches!(self.life, Phase::Draining { .. }) {
            return Err(self.wrong_state(CommandName::Reimage));
        }
        if self.machine.is_none() {
            return Err(Rejection::NotProvided);
        }
        if let Some(allocation_id) = self.holds.keys().next() {
            return Err(Rejection::InUse { allocation_id: *allocation_id });
        }
        let mut next = self.clone();
        let (events, audit) = next.begin_reimage(reason, ctx);
        let step = next.transition_with_node(format!("a reimage was ordered: {reason}")).audit(audit);
        let step = events.into_iter().fold(step, Transition::event);
        Ok(step.effect(Effect::CloseNode(self.id)))
    }

    /// The old system's identity is void, and the provider erases and installs the machine. A node that never was active begins again as a
    /// registered one; any other is held in quarantine until the new system has proved itself.
    pub(super) fn begin_reimage(&mut self, reason: &str, ctx: &TransitionContext<'_>) -> (Vec<Event>, AuditRecord) {
        let audit = self.audit(AuditAction::NodesReimage, json!({ "reason": reason }));
        self.identity.revoke();
        let message = format!("The machine is being reinstalled: {reason}");
        let event = match self.life {
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {
                Some(self.enter(Phase::Registered, StateCode::Reimaging, &message, ctx))
            }
            Phase::Active
            | Phase::Offline
            | Phase::Draining { .. }
            | Phase::Quarantined { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => {
                // The system that is replaced is the last one that had tenants, however often the reimage is ordered.
                let before = self.reimage.take().and_then(|reimage| reimage.replaces);
                let replaces = before.or_else(|| self.machine_id().map(str::to_owned));
                let until = ctx.now + self.installation_time(ctx);
                let stage = ReimageStage::Installation;
                self.reimage = Some(Reimage { ordered_at: ctx.now, replaces, stage, until });
                self.enter_quarantine(StateCode::Reimaging, &message, ctx)
            }
        };
        let due = self.release_machine(true, ctx);
        (event.into_iter().chain(due).collect(), audit)
    }

    fn installation_time(&self, ctx: &TransitionContext<'_>) -> chrono::TimeDelta {
        let seconds = |key| ctx.policy.seconds(key, &Scopes::global(), ctx.now);
        seconds(PolicyKey::MaasReleaseTimeout) + seconds(PolicyKey::MaasDeployTimeout)
    }

    /// The provider has deployed the machine: its agent is expected.
    pub(super) fn expect_new_system(&mut self, ctx: &TransitionContext<'_>) {
        if let Some(reimage) = &mut self.reimage {
            reimage.until = ctx.now + ctx.policy.seconds(PolicyKey::MaasDeployTimeout, &Scopes::global(), ctx.now);
        }
    }

    /// The answer to an enrollment of a system that is not the new one: its token is void, and the node stays held.
    pub(super) fn refuse_old_system(
        &self,
        shown: &Enrollment,
        ctx: &TransitionContext<'_>,
    ) -> Option<Transition<Self>> {
        let why = self.not_the_new_system(&shown.inventory)?;
        let mut next = self.clone();
        next.identity.revoke();
        if let Some(reimage) = &mut next.reimage {
            reimage.stage = ReimageStage::Refused { why: why.clone() };
            reimage.until = ctx.now;
        }
        let message =
            format!("The reinstalled machine was refused: {why}. Look at the machine, then order the reimage again.");
        let event = next.enter_quarantine(StateCode::SystemRefused, &message, ctx);
        let audit = self.audit(AuditAction::NodesRefuseSystem, json!({ "cause": why }));
        let step = Transition::to(next, Reply::SystemRefused, message).audit(audit);
        Some(event.into_iter().fold(step, Transition::event))
    }

    /// Why the enrolling system is not a new one with the image; `None` where it is, or none is expected.
    fn not_the_new_system(&self, shown: &ReportedInventory) -> Option<String> {
        let reimage = self.reimage.as_ref()?;
        let system = shown.system.as_ref();
        let Some(machine_id) = system.and_then(|system| system.machine_id.as_deref()) else {
            return Some("its agent reports no machine id".to_owned());
        };
        if reimage.replaces.as_deref() == Some(machine_id) {
            return Some("it has the machine id of the system before, so its disk was not erased".to_owned());
        }
        let wanted = self.machine.as_ref()?.image_digest.as_deref()?;
        match system.and_then(|system| system.image_digest.as_deref()) {
            Some(digest) if digest == wanted => None,
            Some(digest) => Some(format!("it shows the image {digest}, and {wanted} was to be installed")),
            None => Some(format!("it shows no image digest, and {wanted} was to be installed")),
        }
    }

    /// The new system has enrolled: it is validated before a GPU is free, as part of this transition.
    pub(super) fn validate_new_system(&mut self, ctx: &TransitionContext<'_>) {
        let order = Self::validation_order(self.required_level(), ctx);
        let within = |key| ctx.now + ctx.policy.seconds(key, &Scopes::global(), ctx.now) + order.load_time();
        let Some(reimage) = &mut self.reimage else { return };
        reimage.stage = ReimageStage::Validation;
        reimage.until = within(PolicyKey::MaasDeployTimeout);
        let task_id = TaskId(ctx.new_id(1));
        let deadline_at = within(PolicyKey::NodeTaskTimeout);
        let work = PendingTask { task_id, attempt: 1, ordered_at: ctx.now, deadline_at, origin: Some(ctx.origin()) };
        let boot_id = self.seen.as_ref().map(|seen| seen.boot_id.clone());
        let task = NodeTask {
            task_type: TaskType::NodeValidate,
            work,
            boot_id,
            phase: NodeTaskPhase::Open,
            update: None,
            gpu_uuid: None,
            validation: Some(order),
        };
        self.tasks.insert(task_id, task);
    }

    /// The new system has passed `node.validate`: the reimage is over, as part of this transition.
    pub(super) fn finish_reimage(&mut self, ctx: &TransitionContext<'_>) -> (Vec<Event>, Vec<AuditRecord>) {
        let validated = self.reimage.as_ref().is_some_and(|reimage| reimage.stage == ReimageStage::Validation);
        if !validated || self.mismatch().is_some() {
            return (Vec::new(), Vec::new());
        }
        let replaced = self.reimage.take().and_then(|reimage| reimage.replaces);
        let metadata = json!({ "old_machine_id": replaced, "new_machine_id": self.machine_id() });
        let mut audits = vec![self.audit(AuditAction::NodesFinishReimage, metadata)];
        let mut events = Vec::new();
        if let Some((released, audit)) = self.take_back_holds(&[HoldAuthor::Reimage], ctx) {
            events = released;
            audits.push(audit);
        }
        (events, audits)
    }

    /// Until when the new system has to prove itself. The provider's part has a deadline of its own.
    pub(super) fn reimage_deadline(&self) -> Option<Deadline> {
        let reimage = self.reimage.as_ref()?;
        let waits = match &reimage.stage {
            ReimageStage::Refused { why } => {
                format!("the reinstalled machine was refused: {why}; order the reimage again")
            }
            ReimageStage::Validation => "the reinstalled machine has not passed node.validate".to_owned(),
            ReimageStage::Installation => match &self.machine.as_ref()?.step {
                ProviderStep::Failing { why } | ProviderStep::Failed { why } => {
                    let why = format!("the machine could not be deployed: {why}; order the reimage again");
                    return Some(Deadline::new(self.machine.as_ref()?.since, why));
                }
                ProviderStep::Deployed => "the reinstalled machine has not enrolled".to_owned(),
                ProviderStep::Deploying | ProviderStep::Releasing { .. } | ProviderStep::Released => return None,
            },
        };
        Some(Deadline::new(reimage.until, waits))
    }
}

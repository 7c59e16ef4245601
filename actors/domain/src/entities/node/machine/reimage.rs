//! The reimage of a node's machine: after a tenant whose allocation isolates by it, or on an operator's order.
//!
//! The provider erases and installs the machine. Until the new system has enrolled with a fresh token, shown another machine id than the
//! old one and the digest of the image that its deployment was ordered with, and passed `node.validate`, a hold of the quarantine has the
//! node out of rent, so that none of its GPUs is free. Retries: an operator orders the reimage again, or retires the node.

use super::{NodeMachine, ProviderStep, ReportedInventory};
use crate::audit::{AuditAction, AuditRecord};
use crate::entities::node::outcome;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Deadline, Timestamp, TransitionContext};
use chrono::TimeDelta;
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

impl NodeMachine {
    /// Why it cannot be reimaged after a tenant; `None` where it can.
    pub(in crate::entities::node) fn not_reimageable(&self) -> Option<String> {
        let Some(machine) = &self.provided else {
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

    pub(in crate::entities::node) fn machine_id(&self) -> Option<&str> {
        self.inventory.as_ref()?.system.as_ref()?.machine_id.as_deref()
    }

    /// The provider is to reinstall the machine. The system that is replaced is the last one that had tenants, however often the
    /// reimage is ordered.
    pub(in crate::entities::node) fn begin_reimage(&mut self, ctx: &TransitionContext<'_>) {
        let before = self.reimage.take().and_then(|reimage| reimage.replaces);
        let replaces = before.or_else(|| self.machine_id().map(str::to_owned));
        let seconds = |key| ctx.policy.seconds(key, &Scopes::global(), ctx.now);
        let until = ctx.now + seconds(PolicyKey::MaasReleaseTimeout) + seconds(PolicyKey::MaasDeployTimeout);
        self.reimage = Some(Reimage { ordered_at: ctx.now, replaces, stage: ReimageStage::Installation, until });
    }

    /// An enrolling system was not the new one.
    pub(in crate::entities::node) fn refuse_system(&mut self, why: &str, now: Timestamp) {
        if let Some(reimage) = &mut self.reimage {
            reimage.stage = ReimageStage::Refused { why: why.to_owned() };
            reimage.until = now;
        }
    }

    /// The new system has enrolled: it is validated, with a load of this length. False where none is expected.
    pub(in crate::entities::node) fn begin_system_validation(
        &mut self,
        load_time: TimeDelta,
        ctx: &TransitionContext<'_>,
    ) -> bool {
        let Some(reimage) = &mut self.reimage else { return false };
        reimage.stage = ReimageStage::Validation;
        reimage.until =
            ctx.now + ctx.policy.seconds(PolicyKey::MaasDeployTimeout, &Scopes::global(), ctx.now) + load_time;
        true
    }

    /// The new system has passed its validation: the reimage is over. `None` where that was not awaited.
    pub(in crate::entities::node) fn end_reimage(&mut self, ctx: &TransitionContext<'_>) -> Option<AuditRecord> {
        self.reimage.as_ref().filter(|reimage| reimage.stage == ReimageStage::Validation)?;
        let replaced = self.reimage.take().and_then(|reimage| reimage.replaces);
        let metadata = json!({ "old_machine_id": replaced, "new_machine_id": self.machine_id() });
        Some(outcome::audit(AuditAction::NodesFinishReimage, metadata, ctx))
    }

    /// The provider has deployed the machine: its agent is expected.
    pub(in crate::entities::node) fn expect_new_system(&mut self, ctx: &TransitionContext<'_>) {
        if let Some(reimage) = &mut self.reimage {
            reimage.until = ctx.now + ctx.policy.seconds(PolicyKey::MaasDeployTimeout, &Scopes::global(), ctx.now);
        }
    }

    /// Why the enrolling system is not a new one with the image; `None` where it is, or none is expected.
    pub(in crate::entities::node) fn not_the_new_system(&self, shown: &ReportedInventory) -> Option<String> {
        let reimage = self.reimage.as_ref()?;
        let system = shown.system.as_ref();
        let Some(machine_id) = system.and_then(|system| system.machine_id.as_deref()) else {
            return Some("its agent reports no machine id".to_owned());
        };
        if reimage.replaces.as_deref() == Some(machine_id) {
            return Some("it has the machine id of the system before, so its disk was not erased".to_owned());
        }
        let wanted = self.provided.as_ref()?.image_digest.as_deref()?;
        match system.and_then(|system| system.image_digest.as_deref()) {
            Some(digest) if digest == wanted => None,
            Some(digest) => Some(format!("it shows the image {digest}, and {wanted} was to be installed")),
            None => Some(format!("it shows no image digest, and {wanted} was to be installed")),
        }
    }

    /// Until when the new system has to prove itself. The provider's part has a deadline of its own.
    pub(in crate::entities::node) fn reimage_deadline(&self) -> Option<Deadline> {
        let reimage = self.reimage.as_ref()?;
        let waits = match &reimage.stage {
            ReimageStage::Refused { why } => {
                format!("the reinstalled machine was refused: {why}; order the reimage again")
            }
            ReimageStage::Validation => "the reinstalled machine has not passed node.validate".to_owned(),
            ReimageStage::Installation => match &self.provided.as_ref()?.step {
                ProviderStep::Failing { why } | ProviderStep::Failed { why } => {
                    let why = format!("the machine could not be deployed: {why}; order the reimage again");
                    return Some(Deadline::new(self.provided.as_ref()?.since, why));
                }
                ProviderStep::Deployed => "the reinstalled machine has not enrolled".to_owned(),
                ProviderStep::Deploying | ProviderStep::Releasing { .. } | ProviderStep::Released => return None,
            },
        };
        Some(Deadline::new(reimage.until, waits))
    }
}

//! The name and the labels of an allocation. They can be changed until it is released: from then on they stay as a record.

use super::{Allocation, CommandName, Phase, Rejection};
use crate::audit::AuditAction;
use crate::metadata::{MAX_LABELS, MetadataPatch, TooManyLabels};
use crate::state_machine::{Transition, TransitionContext};
use serde_json::json;

impl Allocation {
    pub(super) fn revise(
        &self,
        patch: MetadataPatch,
        if_version: Option<i64>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if !ctx.by.is_admin() && !ctx.by.is_user(&self.asked.owner.user_id) {
            return Err(Rejection::NotFound);
        }
        if if_version.is_some_and(|version| version != ctx.version) {
            return Err(Rejection::VersionDiffers);
        }
        if let Phase::Released { .. } = self.phase {
            return Err(self.wrong_state(CommandName::Revise));
        }
        let metadata = self.metadata.patched(&patch)?;
        if metadata == self.metadata {
            return Ok(self.stay());
        }
        let audit = self.audit(AuditAction::AllocationsUpdate, json!(patch));
        Ok(Self { metadata, ..self.clone() }.transition("its name or labels were changed").audit(audit))
    }
}

impl From<TooManyLabels> for Rejection {
    fn from(TooManyLabels: TooManyLabels) -> Self {
        Self::TooManyLabels { max: MAX_LABELS }
    }
}

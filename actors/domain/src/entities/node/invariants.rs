//! The invariants (design 2) that a node shows by itself.

use super::{HoldPhase, Node, PhaseName};
use crate::history::HistoryEntry;

impl Node {
    /// I2: no GPU is in two holds, none that is being reset or is not proved to be free of its last tenant is in one, and a node without the clean-up proof of a tenant, or whose machine is being reinstalled, has no GPU for
    /// another.
    #[must_use]
    pub fn has_one_tenant_on_each_gpu(&self) -> bool {
        let is_unproven =
            |phase: &HoldPhase| matches!(phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. });
        let has_unproven = self.tenancy.holds.values().any(|hold| is_unproven(&hold.phase));
        let is_held_in_reset = self.repair.gpus_in_reset().any(|uuid| self.tenancy.holds_gpu(uuid));
        let is_held_unproved = self.tenancy.unproved_gpus.keys().any(|uuid| self.tenancy.holds_gpu(uuid));
        self.tenancy.holds_each_gpu_once()
            && !is_held_in_reset
            && !is_held_unproved
            && (!has_unproven && self.machine.reimage.is_none() || self.gpus_free() == 0)
    }

    /// I6: a node that is being removed, or is gone, holds nothing and gets nothing. Given its last transitions, in their order.
    #[must_use]
    pub fn gets_nothing_once_removed(&self, recorded: &[HistoryEntry]) -> bool {
        if !self.lifecycle.phase.is_gone() {
            return true;
        }
        let gone = [PhaseName::Removing, PhaseName::Removed].map(|name| name.into_str());
        let itself = format!("node:{}", self.id);
        let since = recorded.iter().skip_while(|step| !gone.contains(&step.to_state.as_str()));
        let got_something = since.filter(|step| !step.refused).any(|step| step.actor == itself);
        let has_identity = self.identity.token.is_some() || !self.identity.certificates.is_empty();
        !has_identity && self.tenancy.holds.is_empty() && !got_something
    }
}

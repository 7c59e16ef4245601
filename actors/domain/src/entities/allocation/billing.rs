//! What an allocation reports to the account that pays for it, and what it receives from the account.

use super::{Allocation, FailureCode, NodeFault, Phase, StatusReason};
use crate::audit::AuditAction;
use crate::id::NodeId;
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde_json::json;

impl Allocation {
    /// Until when it is billed. Billing runs from `active` to the release request, or to a critical fault of the node.
    #[must_use]
    pub fn billed_to(&self) -> Option<Timestamp> {
        let ends = [self.fault.as_ref().map(|fault| fault.at), self.release_requested_at];
        match &self.phase {
            Phase::Requested { .. } | Phase::Provisioning { .. } => None,
            Phase::Active { .. } | Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => {
                ends.into_iter().flatten().min()
            }
        }
    }

    /// The account has a meter for it that may have missed the last usage event.
    pub(super) fn still_metered(&self, is_running: bool) -> Transition<Self> {
        let news = match &self.phase {
            Phase::Requested { .. } | Phase::Provisioning { .. } => None,
            Phase::Active { .. } if is_running && self.fault.is_none() => None,
            Phase::Active { .. } => Some(self.usage()),
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => {
                Some(if self.active_at.is_some() { self.usage() } else { self.never_used() })
            }
        };
        match news {
            None => self.stay(),
            Some(news) => self.unchanged("its billing account has not acknowledged all of its use").event(news),
        }
    }

    pub(super) fn unaffordable(&self, message: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match &self.phase {
            Phase::Requested { .. } => self.fail_request(FailureCode::InsufficientBalance, message, true, ctx),
            Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    /// No account covers it any more.
    pub(super) fn uncover(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        const WHY: (StatusReason, &str) = (StatusReason::BalanceDepleted, "the balance is depleted");
        let audit = self.audit(AuditAction::AllocationsUncover, json!({ "holder": self.asked.holder().to_string() }));
        match &self.phase {
            Phase::Active { node_id, placed } => self.release_active(WHY, *node_id, placed, ctx).audit(audit),
            Phase::Provisioning { .. } | Phase::Requested { .. } => self.stay(),
            // The account did not receive its end.
            Phase::Releasing { .. } | Phase::ReleaseFailed { .. } | Phase::Released { .. } => self.still_metered(true),
        }
    }

    /// The deadline of its evacuation has passed: it is released as if its user had asked for it.
    pub(super) fn evacuate(&self, node_id: NodeId, reason: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        const WHY: (StatusReason, &str) =
            (StatusReason::Evacuated, "its GPU or machine goes out of service, and the time to leave has ended");
        let is_here = self.placement().is_some_and(|(ours, _)| ours == node_id);
        match &self.phase {
            Phase::Active { node_id, placed } if is_here => {
                let audit = self.audit(AuditAction::AllocationsEvacuate, json!({ "node_id": node_id, "code": reason }));
                self.release_active(WHY, *node_id, placed, ctx).audit(audit)
            }
            // The node asks only for a tenant that is set up: it asks again.
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }

    /// The first fault counts: the user still has to release the allocation, and it costs nothing from then on. On a machine that fails
    /// before the tenant is set up, provisioning is compensated: the fault is reported once, so that a deferred report would be lost.
    pub(super) fn faulted(
        &self,
        node_id: NodeId,
        at: Timestamp,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let is_here = self.placement().is_some_and(|(ours, _)| ours == node_id);
        match &self.phase {
            Phase::Active { .. } if is_here && self.fault.is_none() => {
                let at = self.active_at.map_or(at, |active_at| at.max(active_at));
                let fault = Some(NodeFault { at, reason: reason.to_owned() });
                let next = Self { fault, ..self.clone() };
                let (usage, audit) = (next.usage(), json!({ "node_id": node_id, "at": at, "code": reason }));
                let audit = self.audit(AuditAction::AllocationsFault, audit);
                next.transition(format!("node {node_id} has a critical fault: billing has ended"))
                    .event(usage)
                    .audit(audit)
            }
            Phase::Provisioning { placed, .. } if is_here => {
                let message = format!("The node has a critical fault ({reason}); ask for another allocation.");
                self.compensate(node_id, placed, FailureCode::Reported(reason.to_owned()), &message, ctx)
            }
            // A reservation that it has not received yet: the node does not set it up.
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.stay(),
        }
    }
}

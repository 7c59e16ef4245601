//! What allocations ask of a node: reservations, set-ups, clean-ups.

use super::gpu_choice::closest;
use super::{Node, Rejection, Reply, StateCode, user_name};
use crate::event::Event;
use crate::hardware::Placement;
use crate::id::AllocationId;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{Timestamp, Transition, TransitionContext};

impl Node {
    pub(super) fn reserve(
        &self,
        (allocation_id, gpu_count): (AllocationId, u32),
        keys: Vec<AuthorizedKey>,
        revision: u64,
        reimages: bool,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if let Some(hold) = self.tenancy.holds.get(&allocation_id) {
            let placed = hold.placed.clone();
            let outcome = self.tenancy.already_reserved(allocation_id, placed.clone(), ctx);
            return Ok(Transition { reply: Reply::Reserved { placed }, ..self.with_tenancy(outcome) });
        }
        if let Some(why) = self.not_schedulable() {
            return Err(Rejection::NotSchedulable { why });
        }
        if let Some(why) = self.not_isolable(gpu_count).filter(|_| reimages) {
            return Err(Rejection::NotSchedulable { why });
        }
        let devices = closest(self.free_gpus().collect(), gpu_count as usize);
        if devices.len() < gpu_count as usize {
            return Err(Rejection::NotEnoughGpus { free: self.gpus_free(), wanted: gpu_count });
        }
        let registration = &self.machine.registration;
        let placed = Placement {
            devices,
            host: registration.host.clone(),
            port: registration.port,
            user_name: user_name(allocation_id),
            region_code: registration.region_code.clone(),
            host_fingerprint: self.machine.inventory.as_ref().and_then(|inventory| inventory.host_fingerprint.clone()),
        };
        let outcome = self.tenancy.reserve((allocation_id, placed.clone()), keys, revision, reimages, ctx);
        Ok(Transition { reply: Reply::Reserved { placed }, ..self.with_tenancy(outcome) })
    }

    /// Why it cannot be one tenant's alone and be reinstalled afterwards; `None` where it can.
    fn not_isolable(&self, gpu_count: u32) -> Option<String> {
        let gpus_total = self.machine.registration.gpus_total;
        if gpu_count != gpus_total {
            return Some(format!("an allocation that is isolated by reimage has all {gpus_total} GPUs of a node"));
        }
        self.not_reimageable()
    }

    pub(super) fn unreserve(&self, allocation_id: AllocationId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.tenancy.is_only_reserved(allocation_id) {
            return self.end_hold(allocation_id, "the reservation is not wanted", ctx);
        }
        self.with_tenancy(self.tenancy.disown(allocation_id, ctx))
    }

    pub(super) fn provision(
        &self,
        allocation_id: AllocationId,
        deadline_at: Timestamp,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let (in_service, fault) = (self.lifecycle.phase.is_in_service(), self.fault_of(allocation_id));
        self.with_tenancy(self.tenancy.provision((allocation_id, deadline_at), in_service, fault, ctx))
    }

    /// Released by force: the node is quarantined until the agent proves that nothing is left.
    pub(super) fn abandon(&self, allocation_id: AllocationId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let is_closed = self.lifecycle.is_held_by(super::HoldAuthor::Release) || self.lifecycle.phase.is_gone();
        let mut step = self.with_tenancy(self.tenancy.abandon(allocation_id, is_closed, ctx));
        let Some(next) = step.next.as_mut().filter(|_| !is_closed) else { return step };
        let message = "An allocation was released by force, without proof of clean-up.";
        let event = next.lifecycle.enter_quarantine(StateCode::ForcedRelease, message, ctx);
        step.with(event, None)
    }

    /// The agent has proved that nothing of the tenant is left.
    pub(super) fn proved_clean(
        &self,
        (allocation_id, attempt): (AllocationId, u32),
        unproved: Option<&super::ProofGap>,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let gone = Event::TenantGone { node_id: self.id, allocation_id, attempt };
        let mut node = self.clone();
        if let Some(gap) = unproved {
            node.tenancy.withhold_unproved(allocation_id, gap, ctx.now);
        }
        node.end_hold(allocation_id, "the agent proved the clean-up", ctx).event(gone)
    }
}

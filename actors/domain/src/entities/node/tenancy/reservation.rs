//! Reservations of GPUs.

use super::{Hold, HoldPhase, HoldSshAccess, Tenancy};
use crate::entities::node::outcome::{self, Outcome};
use crate::event::Event;
use crate::hardware::Placement;
use crate::id::AllocationId;
use crate::resend_timer::ResendTimer;
use crate::ssh_key::{self, AuthorizedKey};
use crate::state_machine::TransitionContext;
use std::collections::BTreeMap;

impl Tenancy {
    pub(in crate::entities::node) fn reserve(
        &self,
        (allocation_id, placed): (AllocationId, Placement),
        keys: Vec<AuthorizedKey>,
        revision: u64,
        reimages: bool,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let mut next = self.clone();
        let why = format!("{} GPUs reserved for allocation {allocation_id}", placed.devices.len());
        next.holds.insert(
            allocation_id,
            Hold {
                placed: placed.clone(),
                keys: ssh_key::within_bound(keys),
                logins: HoldSshAccess::initial(revision),
                phase: HoldPhase::Reserved,
                again: Some(ResendTimer::first(ctx.now)),
                remains: None,
                evacuation: None,
                terminals: BTreeMap::new(),
                reimages,
            },
        );
        debug_assert!(next.holds_each_gpu_once());
        let event = Event::DevicesReserved { node_id: outcome::node_id(ctx), allocation_id, placed };
        Outcome::to(next, why).event(event)
    }

    /// The allocation has the hold already: the event is published again.
    pub(in crate::entities::node) fn already_reserved(
        &self,
        allocation_id: AllocationId,
        placed: Placement,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        let event = Event::DevicesReserved { node_id: outcome::node_id(ctx), allocation_id, placed };
        Outcome::to(self.clone(), "the reservation was requested again").event(event)
    }

    /// True where the agent never had a task for the hold: there is nothing to clean up.
    pub(in crate::entities::node) fn is_only_reserved(&self, allocation_id: AllocationId) -> bool {
        self.is_in(allocation_id, &HoldPhase::Reserved)
    }

    /// The allocation does not want its tenant. It will never be here, so that no other request for the clean-up follows.
    pub(in crate::entities::node) fn disown(
        &self,
        allocation_id: AllocationId,
        ctx: &TransitionContext<'_>,
    ) -> Outcome<Self> {
        match self.holds.get(&allocation_id) {
            None | Some(Hold { phase: HoldPhase::Abandoned { .. }, .. }) => Outcome::stay(),
            Some(hold) => {
                let why = format!("allocation {allocation_id} does not want its tenant: it is to be cleaned up");
                self.with_abandoned(allocation_id, hold, why, ctx)
            }
        }
    }

    /// Why its present or past tenants exclude another one, on a machine that isolates its GPUs or not.
    pub(in crate::entities::node) fn occupied(&self, isolates: bool) -> Option<String> {
        let unproven = self
            .holds
            .iter()
            .find(|(_, hold)| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }));
        if let Some((allocation_id, hold)) = unproven {
            let remains = hold.remains.as_ref().map(|remains| format!(": {remains}")).unwrap_or_default();
            return Some(format!("the clean-up of allocation {allocation_id} is not proved{remains}"));
        }
        if !isolates && !self.holds.is_empty() {
            return Some("it cannot keep tenants' GPUs apart and has a tenant".to_owned());
        }
        None
    }
}

impl Outcome<Tenancy> {
    /// The allocation does not fence the node any more.
    pub(super) fn unfence(mut self, allocation_id: AllocationId) -> Self {
        if let Some(next) = &mut self.next {
            next.fenced_by.remove(&allocation_id);
        }
        self
    }
}

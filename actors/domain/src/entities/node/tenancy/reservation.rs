//! Reservations of GPUs, and why a node takes none.

use super::{Hold, HoldPhase, user_name};
use crate::entities::node::{HoldSshAccess, Node, NodeHealth, PREVENT_ALLOCATION, Phase, Rejection, Reply};
use crate::event::Event;
use crate::hardware::Placement;
use crate::id::AllocationId;
use crate::resend_timer::ResendTimer;
use crate::ssh_key::{self, AuthorizedKey};
use crate::state_machine::{Effect, Transition, TransitionContext};
use serde_json::Value;
use std::collections::BTreeMap;

impl Node {
    pub(in crate::entities::node) fn reserve(
        &self,
        (allocation_id, gpu_count): (AllocationId, u32),
        keys: Vec<AuthorizedKey>,
        revision: u64,
        reimages: bool,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if let Some(hold) = self.holds.get(&allocation_id) {
            return Ok(self.already_reserved(allocation_id, hold));
        }
        if let Some(why) = self.not_schedulable() {
            return Err(Rejection::NotSchedulable { why });
        }
        if let Some(why) = self.not_isolable(gpu_count).filter(|_| reimages) {
            return Err(Rejection::NotSchedulable { why });
        }
        let devices: Vec<_> = self.free_devices().take(gpu_count as usize).collect();
        if devices.len() < gpu_count as usize {
            return Err(Rejection::NotEnoughGpus { free: self.gpus_free(), wanted: gpu_count });
        }
        let placed = Placement {
            devices,
            host: self.registration.host.clone(),
            port: self.registration.port,
            user_name: user_name(allocation_id),
            region_code: self.registration.region_code.clone(),
            host_fingerprint: self.inventory.as_ref().and_then(|inventory| inventory.host_fingerprint.clone()),
        };
        let mut next = self.clone();
        let again = Some(ResendTimer::first(ctx.now));
        next.holds.insert(
            allocation_id,
            Hold {
                placed: placed.clone(),
                keys: ssh_key::within_bound(keys),
                logins: HoldSshAccess::initial(revision),
                phase: HoldPhase::Reserved,
                again,
                remains: None,
                evacuation: None,
                terminals: BTreeMap::new(),
                reimages,
            },
        );
        debug_assert!(next.holds_each_gpu_once());
        let event = Event::DevicesReserved { node_id: self.id, allocation_id, placed: placed.clone() };
        let why = format!("{gpu_count} GPUs reserved for allocation {allocation_id}");
        Ok(Transition::to(next, Reply::Reserved { placed }, why).event(event))
    }

    /// Why it cannot be one tenant's alone and be reinstalled afterwards; `None` where it can.
    fn not_isolable(&self, gpu_count: u32) -> Option<String> {
        if gpu_count != self.registration.gpus_total {
            return Some(format!(
                "an allocation that is isolated by reimage has all {} GPUs of a node",
                self.registration.gpus_total
            ));
        }
        self.not_reimageable()
    }

    /// The allocation has the hold already: the event is published again.
    fn already_reserved(&self, allocation_id: AllocationId, hold: &Hold) -> Transition<Self> {
        let placed = hold.placed.clone();
        let event = Event::DevicesReserved { node_id: self.id, allocation_id, placed: placed.clone() };
        Transition::to(self.clone(), Reply::Reserved { placed }, "the reservation was requested again").event(event)
    }

    /// Why it takes no new allocation; `None` where it does.
    #[must_use]
    pub fn not_schedulable(&self) -> Option<String> {
        self.unfit().or_else(|| self.withheld()).or_else(|| self.occupied())
    }

    /// Why no allocation can be placed on it, regardless of its tenants.
    fn unfit(&self) -> Option<String> {
        if self.life != Phase::Active {
            return Some(format!("it is {}", self.life.name()));
        }
        self.mismatch()
            .or_else(|| self.unmonitored())
            .or_else(|| self.under_repair())
            .or_else(|| self.under_validation())
    }

    /// What of its health prevents new allocations on all of its GPUs.
    fn withheld(&self) -> Option<String> {
        self.withheld_by_finding().or_else(|| self.withheld_by_alert())
    }

    /// The alert of an older agent that prevents new allocations.
    fn withheld_by_alert(&self) -> Option<String> {
        let alert = self.health.alerts.iter().find(|alert| NodeHealth::is_of_class(alert, PREVENT_ALLOCATION))?;
        let text = |field: &str| alert.get(field).and_then(Value::as_str).unwrap_or_default();
        let (probe, target, message) = (text("probe_id"), text("target"), text("message"));
        Some(format!("an alert of its agent prevents new allocations: {probe} on {target}: {message}"))
    }

    /// Why its present or past tenants exclude another one.
    fn occupied(&self) -> Option<String> {
        let unproven = self
            .holds
            .iter()
            .find(|(_, hold)| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }));
        if let Some((allocation_id, hold)) = unproven {
            let remains = hold.remains.as_ref().map(|remains| format!(": {remains}")).unwrap_or_default();
            return Some(format!("the clean-up of allocation {allocation_id} is not proved{remains}"));
        }
        let isolates = self.inventory.as_ref().is_some_and(|inventory| inventory.isolates_devices);
        if !isolates && !self.holds.is_empty() {
            return Some("it cannot keep tenants' GPUs apart and has a tenant".to_owned());
        }
        None
    }

    /// How many GPUs a new allocation could get now.
    #[must_use]
    pub fn gpus_free(&self) -> u32 {
        if self.not_schedulable().is_some() {
            return 0;
        }
        u32::try_from(self.free_devices().count()).unwrap_or(0)
    }

    /// How many more GPUs a new allocation could get, if the node's health did not prevent it.
    #[must_use]
    pub fn gpus_withheld(&self) -> u32 {
        if self.unfit().is_some() || self.occupied().is_some() {
            return 0;
        }
        let withheld =
            if self.withheld().is_some() { self.unheld_devices().count() } else { self.withheld_free_gpus() };
        u32::try_from(withheld).unwrap_or(0)
    }

    pub(in crate::entities::node) fn unreserve(
        &self,
        allocation_id: AllocationId,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        match self.holds.get(&allocation_id) {
            // The agent never had a task for it: there is nothing to clean up.
            Some(Hold { phase: HoldPhase::Reserved, .. }) => {
                self.release_hold(allocation_id, "the reservation is not wanted", ctx)
            }
            // A late request came in between. The allocation will never be here, so that no other request for the clean-up follows.
            Some(
                hold @ Hold {
                    phase:
                        HoldPhase::Provisioning { .. }
                        | HoldPhase::Ready
                        | HoldPhase::SetupFailed { .. }
                        | HoldPhase::Releasing { .. }
                        | HoldPhase::ReleaseFailed { .. },
                    ..
                },
            ) => {
                let work = self.abandoned_clean_up(hold, ctx);
                let mut step = self
                    .with_phase(
                        allocation_id,
                        HoldPhase::Abandoned { work },
                        format!("allocation {allocation_id} does not want its tenant: it is to be cleaned up"),
                    )
                    .effect(Effect::WakeNode(self.id));
                if let Some(next) = &mut step.next {
                    next.fenced_by.remove(&allocation_id);
                }
                step
            }
            Some(Hold { phase: HoldPhase::Abandoned { .. }, .. }) | None => Transition::stay(Reply::Done),
        }
    }
}

//! The allocations on the node's GPUs, and the tasks that set tenants up and clean them up.

mod clean_up;
mod evacuation;
mod reservation;
mod ssh_access;
mod tenant_tasks;
mod terminal_tasks;
mod unproved_gpus;

use super::outcome::{self, Outcome};
use super::{PendingTask, TenantSlot};
use crate::event::{Event, GpuDevice};
use crate::hardware::Placement;
use crate::id::{AllocationId, TerminalSessionId};
use crate::resend_timer::ResendTimer;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{Timestamp, TransitionContext};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

pub use evacuation::Evacuation;
pub use ssh_access::{HoldSshAccess, SshKeysTask};
pub use terminal_tasks::TerminalTask;
pub use unproved_gpus::{ProofGap, UnprovedGpu};

pub(super) use tenant_tasks::TenantReport;

/// The part of a node that knows its tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenancy {
    /// The allocations that hold its GPUs.
    pub holds: BTreeMap<AllocationId, Hold>,
    /// GPUs without a tenant of which it is not proved that they are free of the last one, by UUID.
    pub unproved_gpus: BTreeMap<String, UnprovedGpu>,
    /// The allocations whose failed release fences the node: it gets no tasks.
    pub fenced_by: BTreeSet<AllocationId>,
}

/// One allocation's hold on GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub placed: Placement,
    pub keys: Vec<AuthorizedKey>,
    /// The revision of the keys, and what the agent has written of it.
    #[serde(default)]
    pub logins: HoldSshAccess,
    pub phase: HoldPhase,
    /// When the node asks the allocation again whether it wants the hold. Of an abandoned tenant: when its clean-up is tried again, after an
    /// attempt that failed.
    #[serde(default)]
    pub again: Option<ResendTimer>,
    /// Terminal sessions that the agent is to start.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub terminals: BTreeMap<TerminalSessionId, TerminalTask>,
    /// What the last clean-up attempt left, as the agent describes it.
    #[serde(default)]
    pub remains: Option<String>,
    /// The machine is reinstalled after this tenant.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reimages: bool,
    /// Its tenant is asked to leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation: Option<Evacuation>,
}

impl Hold {
    /// No allocation is asked about an abandoned tenant.
    const fn active_resend_timer(&self) -> Option<ResendTimer> {
        match self.phase {
            HoldPhase::Abandoned { .. } => None,
            HoldPhase::Reserved
            | HoldPhase::Provisioning { .. }
            | HoldPhase::Ready
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. } => self.again,
        }
    }
}

/// The phase of a tenant on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum HoldPhase {
    /// The devices are reserved; the agent has no task yet.
    Reserved,
    Provisioning {
        work: PendingTask,
    },
    Ready,
    /// The agent could not set the tenant up. What it did stays until the allocation requests the clean-up.
    SetupFailed {
        reason: String,
        detail: String,
    },
    Releasing {
        work: PendingTask,
    },
    /// The clean-up failed; the next attempt comes from the allocation.
    ReleaseFailed {
        work: PendingTask,
    },
    /// A tenant without an allocation, and without a clean-up proof: released by force, or set up for an allocation that does not want it.
    /// The clean-up is tried until the proof arrives, with growing pauses.
    Abandoned {
        work: PendingTask,
    },
}

impl Tenancy {
    /// The tenants with their GPUs.
    pub(super) fn tenants(&self) -> impl Iterator<Item = (AllocationId, &[GpuDevice])> {
        self.holds.iter().map(|(allocation_id, hold)| (*allocation_id, hold.placed.devices.as_slice()))
    }

    /// The GPUs that tenants hold, by UUID.
    pub(super) fn held_gpus(&self) -> impl Iterator<Item = &str> {
        self.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| device.uuid.as_str())
    }

    pub(super) fn holds_each_gpu_once(&self) -> bool {
        let distinct: BTreeSet<_> = self.held_gpus().collect();
        distinct.len() == self.held_gpus().count()
    }

    pub(super) fn holds_gpu(&self, uuid: &str) -> bool {
        self.held_gpus().any(|held| held == uuid)
    }

    /// The allocation that a reset of this GPU would disturb. Where the machine does not isolate its GPUs, a tenant can use each of them.
    pub(super) fn in_the_way_of_reset(&self, uuid: &str, isolates: bool) -> Option<AllocationId> {
        let mut tenants = self.tenants();
        let tenant = tenants.find(|(_, gpus)| !isolates || gpus.iter().any(|device| device.uuid == uuid));
        tenant.map(|(allocation_id, _)| allocation_id)
    }

    /// The first allocation that is on the node. An abandoned tenant belongs to none.
    pub(super) fn in_use(&self) -> Option<AllocationId> {
        self.holds
            .iter()
            .find(|(_, hold)| !matches!(hold.phase, HoldPhase::Abandoned { .. }))
            .map(|(allocation_id, _)| *allocation_id)
    }

    fn has_unproven(&self) -> bool {
        self.holds
            .values()
            .any(|hold| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }))
    }

    /// When it asks next whether one of its holds is still wanted, or tries a clean-up again.
    pub(super) fn next_resend_at(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(|hold| hold.again).map(|again| again.at).min()
    }

    /// Messages between a node and an allocation may have been lost. So the node periodically publishes its holds; the allocation answers
    /// if it does not want them.
    pub(super) fn confirm_holds(&self, ctx: &TransitionContext<'_>) -> Outcome<Self> {
        let mut next = self.clone();
        let mut asked = Vec::new();
        for (allocation_id, hold) in &mut next.holds {
            if let Some(again) = hold.active_resend_timer().filter(|again| again.is_due(ctx.now)) {
                hold.again = Some(again.next(ctx.now));
                let (allocation_id, placed) = (*allocation_id, hold.placed.clone());
                asked.push(Event::DevicesReserved { node_id: outcome::node_id(ctx), allocation_id, placed });
            }
        }
        if asked.is_empty() {
            return Outcome::stay();
        }
        asked.into_iter().fold(Outcome::to(next, "asking whether its tenants are wanted"), Outcome::event)
    }

    /// The tenant's place, on a node of this SKU.
    fn slot(allocation_id: AllocationId, hold: &Hold, sku: &str) -> TenantSlot {
        TenantSlot { allocation_id, placed: hold.placed.clone(), sku: sku.to_owned() }
    }

    fn is_in(&self, allocation_id: AllocationId, phase: &HoldPhase) -> bool {
        self.holds.get(&allocation_id).is_some_and(|hold| hold.phase == *phase)
    }

    fn with_phase(&self, allocation_id: AllocationId, phase: HoldPhase, why: impl Into<String>) -> Outcome<Self> {
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = phase;
        }
        Outcome::to(next, why)
    }
}

/// The login of an allocation on its node: short enough for every system, and derived from the id alone so that it is unique.
#[must_use]
pub fn user_name(allocation_id: AllocationId) -> String {
    let id = allocation_id.0.as_simple().to_string();
    format!("gpu-{}", &id[id.len() - 16..])
}

#[cfg(test)]
mod tests {
    use super::super::tests::{decided_at, start};
    use super::*;

    #[test]
    fn hold_is_confirmed_when_its_timer_is_due_and_excludes_others_where_gpus_are_not_isolated() {
        let placed = |gpu: &str| Placement {
            devices: vec![GpuDevice { index: 0, uuid: gpu.to_owned() }],
            host: "node-a".to_owned(),
            port: 22,
            user_name: "gpu-1".to_owned(),
            region_code: "eu".to_owned(),
            host_fingerprint: None,
        };
        let allocation_id = AllocationId(uuid::Uuid::from_u128(1));
        let reserve = |ctx: &TransitionContext<'_>| {
            Tenancy::default().reserve((allocation_id, placed("GPU-0")), Vec::new(), 0, false, ctx).next.unwrap()
        };
        let tenancy = decided_at(start(), reserve);
        assert_eq!(tenancy.held_gpus().collect::<Vec<_>>(), ["GPU-0"]);
        assert_eq!((tenancy.in_use(), tenancy.occupied(true)), (Some(allocation_id), None));
        assert!(tenancy.occupied(false).is_some());
        let due_at = tenancy.next_resend_at().unwrap();
        assert!(decided_at(start(), |ctx| tenancy.confirm_holds(ctx)).next.is_none());
        let confirmed = decided_at(due_at, |ctx| tenancy.confirm_holds(ctx));
        assert_eq!(confirmed.events.len(), 1);
        assert!(confirmed.next.unwrap().next_resend_at().unwrap() > due_at);
    }
}

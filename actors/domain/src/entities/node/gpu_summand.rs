//! What a node adds to the sums of GPUs by SKU and region.

use super::{HoldPhase, Node};
use crate::summand::{Amounts, SumGroup, Summand};

impl Node {
    /// `None` once it is removed or being removed.
    pub(super) fn gpu_summand(&self) -> Option<Summand> {
        if self.lifecycle.phase.is_gone() {
            return None;
        }
        let gpus = |is_counted: fn(&HoldPhase) -> bool| {
            let holds = self.tenancy.holds.values().filter(|hold| is_counted(&hold.phase));
            holds.map(|hold| i64::try_from(hold.placed.devices.len()).unwrap_or(i64::MAX)).sum()
        };
        let registration = &self.machine.registration;
        let group = SumGroup::Gpus {
            sku_id: registration.sku.sku_id,
            sku: registration.sku.name.clone(),
            region_code: registration.region_code.clone(),
            gpus_free: self.gpus_free(),
        };
        let amounts = Amounts {
            entities: 1,
            gpus_total: i64::from(registration.gpus_total),
            gpus_sold: gpus(is_set_up),
            gpus_held: gpus(|phase| !is_set_up(phase)),
            balance: 0,
        };
        Some(Summand { group, amounts })
    }
}

const fn is_set_up(phase: &HoldPhase) -> bool {
    match phase {
        HoldPhase::Ready => true,
        HoldPhase::Reserved
        | HoldPhase::Provisioning { .. }
        | HoldPhase::SetupFailed { .. }
        | HoldPhase::Releasing { .. }
        | HoldPhase::ReleaseFailed { .. }
        | HoldPhase::Abandoned { .. } => false,
    }
}

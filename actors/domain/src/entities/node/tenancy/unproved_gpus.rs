//! GPUs whose last tenant has left with a clean-up proof that leaves them out: the driver did not show that nothing of it is left (decision
//! 0081). Each is withheld from rent by itself, until the agent has proved it.

use super::Tenancy;
use crate::entities::node::FindingReport;
use crate::id::AllocationId;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The finding of an agent about such a GPU.
const PROBE: &str = "clean_up";

/// What a clean-up proof leaves out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProofGap {
    /// By the node's clock.
    pub checked_at: Timestamp,
    /// Why each GPU is not proved, by UUID.
    pub gpus: BTreeMap<String, String>,
}

/// A GPU without proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnprovedGpu {
    /// Its last tenant.
    pub allocation_id: AllocationId,
    pub since_at: Timestamp,
    /// By the node's clock: a report that was sent before says nothing of it.
    pub checked_at: Timestamp,
    pub why: String,
}

impl Tenancy {
    /// Withholds those GPUs of a tenant that its clean-up proof leaves out.
    pub(in crate::entities::node) fn withhold_unproved(
        &mut self,
        allocation_id: AllocationId,
        gap: &ProofGap,
        now: Timestamp,
    ) {
        let Some(hold) = self.holds.get(&allocation_id) else { return };
        let unproved = |(uuid, why): (&String, &String)| {
            hold.placed.devices.iter().any(|device| device.uuid == *uuid).then(|| {
                let gpu = UnprovedGpu { allocation_id, since_at: now, checked_at: gap.checked_at, why: why.clone() };
                (uuid.clone(), gpu)
            })
        };
        let unproved: Vec<_> = gap.gpus.iter().filter_map(unproved).collect();
        self.unproved_gpus.extend(unproved);
    }

    /// Takes back what the agent has proved since: its report was sent after the proof, and does not name the GPU.
    pub(in crate::entities::node) fn note_proved_gpus(&mut self, report: &FindingReport) {
        if report.is_truncated {
            return;
        }
        let is_named = |uuid: &str| {
            report.findings.iter().any(|found| found.probe == PROBE && found.gpu_uuid.as_deref() == Some(uuid))
        };
        self.unproved_gpus.retain(|uuid, gpu| report.sent_at <= gpu.checked_at || is_named(uuid));
    }
}

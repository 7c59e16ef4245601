//! The machine of a node: what was registered, what the agent reports of it, and what a bare-metal provider does with it.

mod gpu_claims;
mod hardware_comparison;
mod hardware_drift;
mod inventory;
mod provided_machine;
mod reimage;
mod sku_minimums;

use crate::hardware::{ExpectedHardware, PromisedHardware};
use crate::id::NodeId;
use crate::metadata::{Metadata, MetadataPatch, TooManyLabels};
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

pub use hardware_comparison::HardwareComparison;
pub use inventory::{ReportedGpu, ReportedInventory, ReportedSystem};
pub use provided_machine::{OrderedImage, PreparedMachine, ProvidedMachine, ProviderReport, ProviderStep};
pub use reimage::{Reimage, ReimageStage};

pub(super) use gpu_claims::GpuClaimScope;
pub(super) use provided_machine::bounded_status;

/// The part of a node that knows its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeMachine {
    pub registration: Registration,
    pub registered_at: Timestamp,
    pub probe: Option<ProbeOutcome>,
    pub inventory: Option<ReportedInventory>,
    /// What its SKU expects of its machine, as of the last contact.
    pub expected_hardware: Option<Box<ExpectedHardware>>,
    /// UUIDs of GPUs that this node has claimed in the cluster.
    pub claimed_gpus: BTreeSet<String>,
    /// UUIDs of GPUs that the node reports and that another node has claimed.
    pub contested_gpus: BTreeMap<String, NodeId>,
    /// Its machine at the bare-metal provider, where one has it.
    pub provided: Option<ProvidedMachine>,
    /// The reimage that is not over.
    pub reimage: Option<Reimage>,
}

/// A node's data from its administrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    pub host: String,
    pub port: u16,
    pub ssh_username: String,
    pub ssh_public_key: String,
    pub ssh_key_fingerprint: String,
    pub sku: PromisedHardware,
    pub region_code: String,
    pub gpus_total: u32,
    pub onboarding_mode: OnboardingMode,
    /// Its name and labels.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnboardingMode {
    Manual,
    Maas,
}

/// The outcome of the reachability probe at creation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeOutcome {
    pub reachable: bool,
    pub checked_at: Timestamp,
    pub error: Option<String>,
}

impl NodeMachine {
    /// The machine of a node that is registered at this moment.
    pub(super) const fn registered(
        registration: Registration,
        probe: Option<ProbeOutcome>,
        provided: Option<ProvidedMachine>,
        now: Timestamp,
    ) -> Self {
        Self {
            registration,
            registered_at: now,
            probe,
            inventory: None,
            expected_hardware: None,
            claimed_gpus: BTreeSet::new(),
            contested_gpus: BTreeMap::new(),
            provided,
            reimage: None,
        }
    }

    /// `is_whole` as of [`ReportedInventory::complete`].
    pub(super) fn report(&mut self, mut inventory: ReportedInventory, is_whole: bool) {
        if let Some(before) = &self.inventory {
            inventory.complete(before, is_whole);
        }
        self.inventory = Some(inventory);
    }

    /// The GPUs that the agent lists. Before its first report there are none.
    pub(super) fn gpus(&self) -> impl Iterator<Item = &ReportedGpu> {
        self.inventory.iter().flat_map(|inventory| &inventory.gpus)
    }

    pub(super) fn lists_gpu(&self, uuid: &str) -> bool {
        self.gpus().any(|gpu| gpu.uuid == uuid)
    }

    /// False where a tenant can use each of its GPUs, whatever it has rented.
    pub(super) fn isolates_devices(&self) -> bool {
        self.inventory.as_ref().is_some_and(|inventory| inventory.isolates_devices)
    }

    /// What its administrator has changed.
    pub(super) fn revise(
        &mut self,
        (host, port, ssh_username): (Option<String>, Option<u16>, Option<String>),
        probe: Option<ProbeOutcome>,
        metadata: &MetadataPatch,
    ) -> Result<(), TooManyLabels> {
        let to = &mut self.registration;
        let before = (to.host.clone(), to.port);
        to.host = host.unwrap_or_else(|| to.host.clone());
        to.port = port.unwrap_or(to.port);
        to.ssh_username = ssh_username.unwrap_or_else(|| to.ssh_username.clone());
        to.metadata = to.metadata.patched(metadata)?;
        // The probe of the old address says nothing about the new one.
        if probe.is_some() || (&to.host, to.port) != (&before.0, before.1) {
            self.probe = probe;
        }
        Ok(())
    }

    /// The difference of the inventory from the SKU's promise, in a sentence for an operator.
    ///
    /// `missing` GPUs are not listed and were found missing. `is_to_become_active` is false of a node in service.
    pub(super) fn mismatch(&self, missing: u32, is_to_become_active: bool) -> Option<String> {
        let promise = &self.registration.sku;
        let Some(inventory) = &self.inventory else { return Some("No inventory was reported.".to_owned()) };
        let found = u32::try_from(inventory.gpus.len()).unwrap_or(u32::MAX);
        if found.saturating_add(missing) != promise.gpu_count {
            let promised = promise.gpu_count;
            return Some(format!("The SKU {} has {promised} GPUs, the machine reports {found}.", promise.name));
        }
        for gpu in &inventory.gpus {
            let (index, model, memory) = (gpu.index, &gpu.model, gpu.memory_mib);
            if !model.trim().eq_ignore_ascii_case(promise.gpu_model.trim()) {
                return Some(format!("GPU {index} is a {model}, the SKU promises {}.", promise.gpu_model));
            }
            // Drivers reserve a part of the memory.
            if memory.saturating_mul(100) < promise.gpu_memory_mib.saturating_mul(95) {
                let promised = promise.gpu_memory_mib;
                return Some(format!("GPU {index} has {memory} MiB of memory, the SKU promises {promised}."));
            }
        }
        let mut uuids: Vec<_> = inventory.gpus.iter().map(|gpu| &gpu.uuid).collect();
        uuids.sort();
        uuids.dedup();
        if uuids.len() != inventory.gpus.len() {
            return Some("Two of the GPUs report the same UUID.".to_owned());
        }
        let below_sku = if is_to_become_active { self.below_sku() } else { None };
        below_sku.or_else(|| self.hardware_drift())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{inventory, registration, start};
    use super::*;

    #[test]
    fn new_address_drops_the_probe_of_the_old_one_and_an_inventory_is_compared_with_the_sku() {
        let probe = ProbeOutcome { reachable: true, checked_at: start(), error: None };
        let mut machine = NodeMachine::registered(registration(), Some(probe), None, start());
        let mut revise = |host: Option<&str>| {
            let address = (host.map(str::to_owned), None, None);
            machine.revise(address, None, &MetadataPatch::default()).unwrap();
            machine.probe.is_some()
        };
        assert_eq!([revise(None), revise(Some("node-a")), revise(Some("node-b"))], [true, true, false]);
        let gpus = machine.registration.gpus_total;
        for (listed, missing, fits) in [(gpus, 0, true), (gpus - 1, 0, false), (gpus - 1, 1, true)] {
            machine.inventory = Some(inventory(listed));
            assert_eq!(machine.mismatch(missing, false).is_none(), fits, "{listed} listed, {missing} missing");
        }
    }
}

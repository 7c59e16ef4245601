//! Differences of a machine from what its SKU expects of it beside its GPUs (decision 0057). What is unknown is no difference.

use super::{NodeMachine, ReportedInventory};
use crate::hardware::{DriverVersion, ExpectedHardware};
use crate::state_machine::TransitionContext;

/// The kernel, firmware and file systems reserve a part of memory and storage: so much of what is expected is enough.
pub(super) const ENOUGH_PERCENT: u64 = 95;

impl NodeMachine {
    /// Takes over what its SKU expects at this moment.
    pub(in crate::entities::node) fn learn_expected_hardware(&mut self, ctx: &TransitionContext<'_>) {
        let expected = ctx.policy.expected_hardware(self.registration.sku.sku_id);
        if self.expected_hardware.as_deref() != expected {
            self.expected_hardware = expected.cloned().map(Box::new);
        }
    }

    /// All differences of the machine from what its SKU expects, in a sentence for an operator.
    pub(super) fn hardware_drift(&self) -> Option<String> {
        let (expected, inventory) = (self.expected_hardware.as_deref()?, self.inventory.as_ref()?);
        let found = differences(expected, inventory);
        let name = &self.registration.sku.name;
        (!found.is_empty())
            .then(|| format!("The machine differs from what the SKU {name} expects: {}.", found.join("; ")))
    }
}

fn differences(expected: &ExpectedHardware, inventory: &ReportedInventory) -> Vec<String> {
    let mut found = Vec::new();
    if let (Some(part), Some(model)) = (&expected.cpu_model, &inventory.cpu_model)
        && !folded(model).contains(&folded(part))
    {
        found.push(format!("its processor is a {model}, expected is {part}"));
    }
    let cores = (expected.cpu_cores.map(u64::from), u64::from(inventory.cpu_cores));
    found.extend(too_little(cores, 100, "logical processors"));
    found.extend(too_little((expected.memory_mib, inventory.memory_mib), ENOUGH_PERCENT, "MiB of memory"));
    found.extend(too_little((expected.storage_gib, inventory.storage_gib), ENOUGH_PERCENT, "GiB of storage"));
    let version = inventory.driver_version.as_ref().and_then(|text| text.parse::<DriverVersion>().ok());
    if let (Some(least), Some(version)) = (&expected.driver_version_min, version)
        && version < *least
    {
        found.push(format!("its driver is {version}, expected is {least} or a later one"));
    }
    found
}

fn too_little((expected, found): (Option<u64>, u64), percent: u64, what: &str) -> Option<String> {
    let expected = expected?;
    let is_enough = found.saturating_mul(100) >= expected.saturating_mul(percent);
    (found != 0 && !is_enough).then(|| format!("it has {found} {what}, expected are {expected}"))
}

/// Without regard to case and to the number of blanks.
pub(super) fn folded(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase()
}

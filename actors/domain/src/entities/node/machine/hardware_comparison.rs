//! The machine of a node beside what its SKU promises and expects, line by line. The rules are those by which a node is kept out of service
//! ([`NodeMachine::mismatch`]).

use super::hardware_drift::{ENOUGH_PERCENT, folded};
use super::{NodeMachine, ReportedInventory};
use crate::hardware::{DriverVersion, ExpectedHardware};

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HardwareComparison {
    pub item: &'static str,
    pub expected: String,
    /// `None`: the agent has not reported it.
    pub found: Option<String>,
    /// `None`: it cannot be compared.
    pub is_enough: Option<bool>,
}

impl NodeMachine {
    /// What the SKU promises of GPUs, what it sells of the rest of the machine, and what is expected of it.
    /// `missing` GPUs are not listed and were found missing.
    pub(in crate::entities::node) fn compared_hardware(&self, missing: u32) -> Vec<HardwareComparison> {
        let inventory = self.inventory.as_ref();
        let mut lines = self.compared_gpus(inventory, missing).to_vec();
        lines.extend(self.compared_with_sold_machine());
        lines.extend(self.expected_hardware.iter().flat_map(|expected| compared_machine(expected, inventory)));
        lines
    }

    fn compared_gpus(&self, inventory: Option<&ReportedInventory>, missing: u32) -> [HardwareComparison; 3] {
        let promise = &self.registration.sku;
        let gpus = inventory.map(|inventory| &inventory.gpus);
        let count = gpus.map(|gpus| u32::try_from(gpus.len()).unwrap_or(u32::MAX));
        let whole = count.map(|count| count.saturating_add(missing));
        let promised = promise.gpu_model.trim();
        let models = gpus.map(|gpus| {
            let mut models: Vec<_> = gpus.iter().map(|gpu| gpu.model.trim()).collect();
            models.sort_unstable();
            models.dedup();
            (models.join(", "), models.iter().all(|model| model.eq_ignore_ascii_case(promised)))
        });
        let least = gpus.and_then(|gpus| gpus.iter().map(|gpu| gpu.memory_mib).min());
        [
            HardwareComparison {
                item: "GPUs",
                expected: promise.gpu_count.to_string(),
                found: count.map(|count| count.to_string()),
                is_enough: whole.map(|whole| whole == promise.gpu_count),
            },
            HardwareComparison {
                item: "model of the GPUs",
                expected: promise.gpu_model.clone(),
                is_enough: models.as_ref().map(|(_, is_promised)| *is_promised),
                found: models.map(|(models, _)| models).filter(|models| !models.is_empty()),
            },
            HardwareComparison {
                item: "memory of each GPU",
                expected: format!("{} MiB", promise.gpu_memory_mib),
                found: least.map(|least| format!("{least} MiB")),
                is_enough: least.map(|least| is_enough(least, promise.gpu_memory_mib)),
            },
        ]
    }
}

fn compared_machine(expected: &ExpectedHardware, inventory: Option<&ReportedInventory>) -> Vec<HardwareComparison> {
    let amount = |item, expected: Option<u64>, found: fn(&ReportedInventory) -> u64, unit: &str, percent: u64| {
        // 0: the agent cannot read it.
        let found = inventory.map(found).filter(|found| *found != 0);
        expected.map(|expected| HardwareComparison {
            item,
            expected: format!("{expected}{unit}"),
            found: found.map(|found| format!("{found}{unit}")),
            is_enough: found.map(|found| found.saturating_mul(100) >= expected.saturating_mul(percent)),
        })
    };
    let processor = expected.cpu_model.as_ref().map(|part| {
        let found = inventory.and_then(|inventory| inventory.cpu_model.clone());
        HardwareComparison {
            item: "processor",
            expected: part.clone(),
            is_enough: found.as_ref().map(|model| folded(model).contains(&folded(part))),
            found,
        }
    });
    let driver = expected.driver_version_min.as_ref().map(|least| {
        let found = inventory.and_then(|inventory| inventory.driver_version.clone());
        let version = found.as_ref().and_then(|text| text.parse::<DriverVersion>().ok());
        HardwareComparison {
            item: "driver",
            expected: format!("{least} or later"),
            is_enough: version.map(|version| version >= *least),
            found,
        }
    });
    let cores = expected.cpu_cores.map(u64::from);
    [
        processor,
        amount("logical processors", cores, |inventory| u64::from(inventory.cpu_cores), "", 100),
        amount("memory", expected.memory_mib, |inventory| inventory.memory_mib, " MiB", ENOUGH_PERCENT),
        amount("storage", expected.storage_gib, |inventory| inventory.storage_gib, " GiB", ENOUGH_PERCENT),
        driver,
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// A driver reserves a part of the memory.
const fn is_enough(found: u64, promised: u64) -> bool {
    found.saturating_mul(100) >= promised.saturating_mul(ENOUGH_PERCENT)
}

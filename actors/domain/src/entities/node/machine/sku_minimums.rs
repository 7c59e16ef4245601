//! The processors, memory and storage that a node's SKU sells: a machine with less does not become `active` (decision 0057).
//!
//! A catalog says what a machine was bought with, and a machine reports what is left of it for programs. So the rule allows for what
//! hardware, firmware and kernel take:
//!
//! | of the SKU | the machine reports | enough is |
//! | --- | --- | --- |
//! | cores, without threads | logical processors | as many |
//! | memory, as the modules add up | memory, without what firmware, crash kernel and page tables of the kernel reserve | 90 % |
//! | storage, often in decimal units (a terabyte is 91 % of a tebibyte) | sizes of its local file systems, without their own tables | 85 % |
//!
//! What the agent cannot read (0) is no difference, as everywhere: a node must not be kept out by a reading that fails. The rule binds a
//! node that is to become active, for the first time or after its retirement. It takes no node out of service: what a machine must keep is
//! what its SKU expects of it (`expected_hardware`), whose drift quarantines.

use super::{HardwareComparison, NodeMachine, ReportedInventory};
use crate::hardware::SoldMachine;

/// One amount that a SKU sells.
struct Amount {
    item: &'static str,
    unit: &'static str,
    /// Of what, in a sentence.
    of_what: &'static str,
    sold: fn(&SoldMachine) -> u64,
    reported: fn(&ReportedInventory) -> u64,
    /// So much of what is sold is enough.
    enough_percent: u64,
}

#[rustfmt::skip]
const AMOUNTS: [Amount; 3] = [
    Amount { item: "processors of the SKU", unit: "logical processors", of_what: "", sold: |it| u64::from(it.cpu_cores), reported: |it| u64::from(it.cpu_cores), enough_percent: 100 },
    Amount { item: "memory of the SKU", unit: "MiB", of_what: " of memory", sold: |it| it.memory_mib, reported: |it| it.memory_mib, enough_percent: 90 },
    Amount { item: "storage of the SKU", unit: "GiB", of_what: " of storage", sold: |it| it.storage_gib, reported: |it| it.storage_gib, enough_percent: 85 },
];

impl Amount {
    /// `None` where the agent cannot read it.
    fn found(&self, inventory: &ReportedInventory) -> Option<u64> {
        Some((self.reported)(inventory)).filter(|found| *found != 0)
    }

    fn is_enough(&self, sold: &SoldMachine, found: u64) -> bool {
        found.saturating_mul(100) >= (self.sold)(sold).saturating_mul(self.enough_percent)
    }
}

impl NodeMachine {
    /// What the machine has less of than its SKU sells, in a sentence for an operator.
    pub(super) fn below_sku(&self) -> Option<String> {
        let (sku, inventory) = (&self.registration.sku, self.inventory.as_ref()?);
        let sold = sku.machine.as_ref()?;
        let short = AMOUNTS.iter().filter_map(|amount| {
            let found = amount.found(inventory).filter(|found| !amount.is_enough(sold, *found))?;
            let (sold, percent) = ((amount.sold)(sold), amount.enough_percent);
            let (unit, of_what) = (amount.unit, amount.of_what);
            let least = if percent == 100 { String::new() } else { format!(" ({percent} % are enough)") };
            Some(format!("it has {found} {unit}{of_what}, the SKU sells {sold}{least}"))
        });
        let short: Vec<_> = short.collect();
        let name = &sku.name;
        (!short.is_empty()).then(|| {
            let short = short.join("; ");
            format!("The machine is below the SKU {name}: {short}. Register it under a SKU that it fits.")
        })
    }

    /// The same line by line, in every state.
    pub(super) fn compared_with_sold_machine(&self) -> Vec<HardwareComparison> {
        let Some(sold) = &self.registration.sku.machine else { return Vec::new() };
        let line = |amount: &Amount| {
            let found = self.inventory.as_ref().and_then(|inventory| amount.found(inventory));
            HardwareComparison {
                item: amount.item,
                expected: format!("{} {}", (amount.sold)(sold), amount.unit),
                found: found.map(|found| format!("{found} {}", amount.unit)),
                is_enough: found.map(|found| amount.is_enough(sold, found)),
            }
        };
        AMOUNTS.iter().map(line).collect()
    }
}

//! Machines with less than their SKU sells: they do not become active, and nothing takes a node out of service.

use super::health::report_of;
use super::*;
use crate::hardware::SoldMachine;
use proptest::prelude::*;

/// 96 cores, modules of 512 GiB, four disks of 3.84 TB.
const SOLD: SoldMachine = SoldMachine { cpu_cores: 96, memory_mib: 524_288, storage_gib: 15_360 };

fn sold(machine: SoldMachine) -> Story {
    let mut story = node();
    story.node.machine.registration.sku.machine = Some(machine);
    story
}

/// What the agent of a machine reports that has this.
fn machine(cpu_cores: u32, memory_mib: u64, storage_gib: u64) -> ReportedInventory {
    ReportedInventory { cpu_cores, memory_mib, storage_gib, ..inventory(GPUS) }
}

/// As [`SOLD`] is: 192 threads, memory without page tables and crash kernel, disks in decimal units with file systems on them.
fn as_sold() -> ReportedInventory {
    machine(192, 514_900, 14_080)
}

impl Story {
    fn reports_machine(self, inventory: ReportedInventory) -> Self {
        let sent_at = self.now;
        self.agent(report_of(Vec::new(), sent_at, inventory))
    }

    fn short_lines(&self) -> Vec<&'static str> {
        let lines = self.node.compared_hardware();
        lines.into_iter().filter(|line| line.is_enough == Some(false)).map(|line| line.item).collect()
    }
}

#[test]
fn machine_below_its_sku_stays_enrolling_and_each_amount_is_named() {
    let cases = [
        (machine(95, 514_900, 14_080), "95 logical processors, the SKU sells 96", vec!["processors of the SKU"]),
        (
            machine(96, 471_859, 14_080),
            "471859 MiB of memory, the SKU sells 524288 (90 % are enough)",
            vec!["memory of the SKU"],
        ),
        (
            machine(96, 514_900, 13_055),
            "13055 GiB of storage, the SKU sells 15360 (85 % are enough)",
            vec!["storage of the SKU"],
        ),
        (machine(1, 1, 1), "1 MiB of memory", vec!["processors of the SKU", "memory of the SKU", "storage of the SKU"]),
    ];
    for (inventory, part, lines) in cases {
        let below = sold(SOLD).enrolled().reports_machine(inventory).expect("enrolling");
        assert_eq!(below.node.lifecycle.reason.code, StateCode::InventoryMismatch);
        let message = &below.node.lifecycle.reason.message;
        assert!(message.contains(part) && message.contains("h100x4"), "{message}");
        assert_eq!(below.short_lines(), lines);
        assert!(below.node.not_schedulable().is_some());
        below.reports_machine(as_sold()).expect("active");
    }
}

#[test]
fn what_firmware_kernel_and_file_systems_take_is_allowed_for() {
    for inventory in [as_sold(), machine(96, 471_860, 13_056), machine(400, 1 << 30, 1 << 30)] {
        let active = sold(SOLD).enrolled().reports_machine(inventory).expect("active");
        assert_eq!(active.short_lines(), Vec::<&str>::new());
    }
}

#[test]
fn amount_that_the_agent_cannot_read_is_no_difference() {
    let unread = sold(SOLD).enrolled().reports_machine(machine(0, 0, 0)).expect("active");
    let lines = unread.node.compared_hardware();
    assert_eq!(lines.iter().filter(|line| line.is_enough.is_none() && line.found.is_none()).count(), 3, "{lines:?}");
}

#[test]
fn node_in_service_stays_and_is_compared_again_when_it_is_reactivated() {
    let story = sold(SOLD).enrolled().reports_machine(as_sold()).ready().expect("active");
    let smaller = story.reports_machine(machine(96, 1, 1)).expect("active");
    assert_eq!(smaller.node.lifecycle.quarantine_holds(), Vec::new());
    assert_eq!(smaller.short_lines(), ["memory of the SKU", "storage of the SKU"], "an operator sees it");
    let retired = smaller.cleaning(1).reports(PROVED).retired().reports_machine(machine(96, 1, 1)).expect("retired");
    let back = Request::Reactivate { reason: "r".into() };
    let refused = retired.refuses(&admin(), back.clone());
    assert!(matches!(&refused, Rejection::NotInOrder { why } if why.contains("below the SKU")), "{refused}");
    retired.reports_machine(as_sold()).admin(back).expect("active");
}

#[test]
fn quarantine_of_a_node_in_service_is_released_whatever_its_sku_sells() {
    let story = sold(SOLD).enrolled().reports_machine(as_sold()).quarantined().reports_machine(machine(1, 1, 1));
    story.admin(Request::ReleaseQuarantine { reason: "r".into() }).expect("active");
}

#[test]
fn node_that_an_earlier_release_registered_is_bound_by_its_gpus_alone() {
    let snapshot = serde_json::to_value(&node().node).unwrap();
    assert_eq!(snapshot["registration"]["sku"].get("machine"), None, "as an earlier release writes it");
    let mut story = node();
    story.node = serde_json::from_value(snapshot).unwrap();
    story.enrolled().reports_machine(machine(1, 1, 1)).expect("active");
}

proptest! {
    #[test]
    fn more_hardware_is_never_below(cores in 1_u32..1000, memory in 1_u64..1 << 40, storage in 1_u64..1 << 30, more in 0_u32..1000) {
        let of_sku = SoldMachine { cpu_cores: cores, memory_mib: memory, storage_gib: storage };
        let reported = machine(cores + more, memory + u64::from(more), storage + u64::from(more));
        let state = sold(of_sku).enrolled().reports_machine(reported).node.lifecycle.phase;
        prop_assert_eq!(state, Phase::Active);
    }
}

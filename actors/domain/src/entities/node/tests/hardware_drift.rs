//! Drift of a machine from what its SKU expects of it beside its GPUs.

use super::health::report_of;
use super::*;
use crate::hardware::ExpectedHardware;
use proptest::prelude::*;
use std::collections::BTreeMap;

type Change<'a> = &'a dyn Fn(&mut ReportedInventory);

fn expected() -> ExpectedHardware {
    ExpectedHardware {
        cpu_model: Some("epyc  9654".into()),
        cpu_cores: Some(64),
        memory_mib: Some(512_000),
        storage_gib: Some(4_000),
        driver_version_min: "570.86".parse().ok(),
    }
}

/// What the agent of a machine reports that is as expected.
fn as_expected() -> ReportedInventory {
    ReportedInventory {
        cpu_model: Some("AMD EPYC 9654 96-Core Processor".into()),
        driver_version: Some("570.86.15".into()),
        ..inventory(GPUS)
    }
}

impl Story {
    fn expects(mut self, expected: Option<ExpectedHardware>) -> Self {
        let of_sku = expected.map(|expected| (self.node.machine.registration.sku.sku_id, expected));
        self.policy.set_expected_hardware(of_sku.into_iter().collect::<BTreeMap<_, _>>());
        self
    }

    fn shows(self, inventory: ReportedInventory) -> Self {
        let sent_at = self.now;
        self.agent(report_of(Vec::new(), sent_at, inventory))
    }

    fn drift(&self) -> Option<String> {
        let holds = self.node.lifecycle.quarantine_holds();
        holds.into_iter().find(|hold| hold.author == HoldAuthor::Drift).map(|hold| hold.message)
    }
}

#[test]
fn comparison_line_by_line_finds_what_quarantines_the_node() {
    let story = node().active().expects(Some(expected()));
    let cases: [(Change, &[&str]); 9] = [
        (&|_| (), &[]),
        (&|it| it.gpus.truncate(1), &["GPUs"]),
        (&|it| it.gpus[0].model = "A100".into(), &["model of the GPUs"]),
        (&|it| it.gpus[1].memory_mib = 1, &["memory of each GPU"]),
        (&|it| it.cpu_model = Some("AMD EPYC 9554".into()), &["processor"]),
        (&|it| it.cpu_cores = 63, &["logical processors"]),
        (&|it| (it.memory_mib, it.storage_gib) = (486_399, 3_799), &["memory", "storage"]),
        (&|it| it.driver_version = Some("570.9.99".into()), &["driver"]),
        (&|it| (it.cpu_model, it.driver_version, it.memory_mib) = (None, Some("of tomorrow".into()), 0), &[]),
    ];
    for (change, items) in cases {
        let mut inventory = as_expected();
        change(&mut inventory);
        let shown = story.clone().shows(inventory);
        let lines = shown.node.compared_hardware();
        assert_eq!(lines.len(), 8);
        let short: Vec<_> = lines.iter().filter(|line| line.is_enough == Some(false)).map(|line| line.item).collect();
        assert_eq!(short, items);
        assert_eq!(shown.node.mismatch().is_some(), !items.is_empty());
    }
    let mut unseen = story.node.clone();
    unseen.machine.inventory = None;
    assert!(unseen.compared_hardware().iter().all(|line| line.found.is_none() && line.is_enough.is_none()));
}

#[test]
fn each_difference_is_named_and_what_is_unknown_is_none() {
    let story = node().active().expects(Some(expected()));
    let shown = |change: &dyn Fn(&mut ReportedInventory)| {
        let mut inventory = as_expected();
        change(&mut inventory);
        story.clone().shows(inventory).drift()
    };
    let cases: [(Change, &str); 5] = [
        (&|it| it.cpu_model = Some("AMD EPYC 9554".into()), "9554"),
        (&|it| it.cpu_cores = 63, "63 logical processors, expected are 64"),
        (&|it| it.memory_mib = 486_399, "486399 MiB of memory"),
        (&|it| it.storage_gib = 3_799, "3799 GiB of storage"),
        (&|it| it.driver_version = Some("570.9.99".into()), "driver is 570.9.99, expected is 570.86 or a later one"),
    ];
    for (change, part) in cases {
        let drift = shown(change).expect(part);
        assert!(drift.contains(part) && drift.contains("h100x4") && !drift.contains("; "), "{drift}");
    }
    let harmless: [Change; 6] = [
        &|_| (),
        &|it| (it.cpu_model, it.driver_version) = (None, None),
        &|it| it.driver_version = Some("of tomorrow".into()),
        &|it| (it.cpu_cores, it.memory_mib, it.storage_gib) = (0, 0, 0),
        &|it| (it.memory_mib, it.storage_gib) = (486_400, 3_800),
        &|it| (it.cpu_cores, it.driver_version) = (128, Some("1000.1".into())),
    ];
    for change in harmless {
        assert_eq!(shown(change), None);
    }
    let all = shown(&|it| *it = ReportedInventory { cpu_cores: 1, memory_mib: 1, ..as_expected() });
    assert_eq!(all.unwrap().matches("; ").count(), 1);
}

#[test]
fn drift_takes_no_new_tenant_and_is_over_when_the_inventory_agrees_again() {
    let small = ReportedInventory { memory_mib: 1000, ..as_expected() };
    let smaller = ReportedInventory { cpu_cores: 8, ..small.clone() };
    let story = node().active().ready().expects(Some(expected())).shows(as_expected()).expect("active");
    let drifted = story.shows(small).expect("quarantined").publishes(&["node.state_changed"]);
    assert_eq!(drifted.node.lifecycle.reason.code, StateCode::InventoryDrift);
    assert!(matches!(drifted.node.tenancy.holds[&TENANT].phase, HoldPhase::Ready), "the tenant runs on");
    let refused = drifted.refuses(&worker(), reserve(AllocationId(Uuid::from_u128(77)), 1));
    assert!(matches!(refused, Rejection::NotSchedulable { .. }), "{refused}");
    let released = drifted.refuses(&admin(), Request::ReleaseQuarantine { reason: "r".into() });
    assert!(matches!(released, Rejection::NotInOrder { .. }), "{released}");
    let more = drifted.shows(smaller);
    assert!(more.drift().unwrap().contains("8 logical processors"), "the hold names the new difference");
    let more =
        more.publishes(&[]).shows(ReportedInventory { cpu_cores: 8, memory_mib: 1000, ..as_expected() }).unmoved();
    more.shows(as_expected()).expect("active");
}

#[test]
fn change_of_the_sku_is_in_force_from_the_next_contact_on() {
    let story = node().active().shows(inventory(GPUS)).expect("active");
    let more = ExpectedHardware { cpu_cores: Some(65), ..ExpectedHardware::default() };
    let drifted = story.expects(Some(more)).shows(inventory(GPUS)).expect("quarantined");
    drifted.expects(None).shows(inventory(GPUS)).expect("active");
    let unfit = ExpectedHardware { memory_mib: Some(u64::MAX), ..ExpectedHardware::default() };
    let enrolling = node().expects(Some(unfit)).enrolled().agent(poll()).expect("enrolling");
    assert_eq!(enrolling.node.lifecycle.reason.code, StateCode::InventoryMismatch);
}

proptest! {
    #[test]
    fn more_hardware_is_never_drift(cores in 1_u32..1000, memory in 1_u64..1_000_000, storage in 1_u64..100_000, more in 0_u64..1000) {
        let expected = ExpectedHardware {
            cpu_cores: Some(cores), memory_mib: Some(memory), storage_gib: Some(storage), ..ExpectedHardware::default()
        };
        let shown = ReportedInventory {
            cpu_cores: cores + u32::try_from(more).unwrap(),
            memory_mib: memory + more,
            storage_gib: storage + more,
            ..inventory(GPUS)
        };
        prop_assert_eq!(node().active().expects(Some(expected)).shows(shown).drift(), None);
    }
}

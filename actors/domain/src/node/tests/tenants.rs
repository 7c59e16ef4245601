//! Who holds the GPUs, and the work that sets tenants up and takes them down.

use super::*;

#[test]
fn gpus_are_given_away_by_uuid_and_never_twice() {
    let full = node().active().told(reserve(TENANT, 3)).told(reserve(OTHER, 1));
    assert_eq!(full.node.gpus_free(), 0);
    let third = AllocationId(Uuid::from_u128(0x300));
    assert_eq!(full.refuses(&worker(), reserve(third, 1)), Rejection::NotEnoughGpus { free: 0, wanted: 1 });
    let uuids: BTreeSet<_> =
        full.node.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| &device.uuid).collect();
    assert_eq!(uuids.len(), 4);
}

#[test]
fn asking_twice_for_a_reservation_gives_the_same_devices() {
    let first = node().active().reserved();
    let again = first.clone().reserved();
    assert_eq!(first.reply, again.reply);
    assert_eq!(first.node, again.node);
    again.says(&["node.devices_reserved"]);
}

#[test]
fn a_node_that_cannot_keep_tenants_apart_takes_one_at_a_time() {
    let open = Inventory { isolates_devices: false, ..inventory(GPUS) };
    let story = node().active().agent(heartbeat(HealthStatus::Ok, open)).reserved();
    assert!(matches!(story.refuses(&worker(), reserve(OTHER, 1)), Rejection::NotSchedulable { .. }));
}

#[test]
fn a_tenant_that_could_not_be_set_up_is_never_said_to_be_ready() {
    let failed = node().active().setup_failed().says(&["node.tenant_failed"]);
    let deadline_at = failed.now + TimeDelta::seconds(600);
    failed.told(Command::Provision { allocation_id: TENANT, deadline_at }).says(&["node.tenant_failed"]);
}

#[test]
fn nobody_is_let_in_on_a_machine_that_broke_while_they_were_set_up() {
    let succeeded = || Verdict::Succeeded { proof: None };
    let ordered = node().active().provisioning();
    let broken = ordered.clone().agent(heartbeat(HealthStatus::Critical, inventory(GPUS)));
    let broken = broken.says(&["node.state_changed", "node.tenant_faulted"]).reports(succeeded());
    let broken = broken.says(&["node.tenant_failed"]);
    assert!(matches!(&broken.said[0], Event::TenantFailed { reason, .. } if reason == "health_critical"));
    // Its answer may be lost, and it is asked again.
    let deadline_at = broken.now + TimeDelta::seconds(600);
    broken.told(Command::Provision { allocation_id: TENANT, deadline_at }).says(&["node.tenant_failed"]);
    // Ready, and broken before the allocation has heard of either.
    let ready = ordered.clone().reports(succeeded()).says(&["node.tenant_ready"]);
    let lost = ready.agent(heartbeat(HealthStatus::Ok, inventory(0)));
    lost.told(Command::Provision { allocation_id: TENANT, deadline_at }).says(&["node.tenant_failed"]);
    // What was repaired in time is no fault.
    let repaired = ordered.agent(heartbeat(HealthStatus::Critical, inventory(GPUS))).heard();
    repaired.reports(succeeded()).says(&["node.tenant_ready"]);
}

#[test]
fn gpus_come_back_only_with_the_proof_of_the_clean_up() {
    let releasing = node().active().releasing();
    assert_eq!(releasing.orders(), ["release"]);
    let unproven = releasing.clone().reports(Verdict::Succeeded { proof: None }).says(&["node.tenant_remains"]);
    assert_eq!(unproven.node.gpus_free(), 0);
    let proved = releasing.reports(PROVED).says(&["node.tenant_gone"]);
    assert_eq!(proved.node.gpus_free(), GPUS);
}

#[test]
fn what_a_clean_up_left_is_said_where_it_is_said_that_the_node_takes_nobody() {
    let left = Verdict::Failed { code: "cleanup_incomplete".into(), message: "not certainly gone: Tmp".into() };
    let unproven = node().active().releasing().reports(left);
    let why = unproven.node.not_schedulable().unwrap();
    assert!(why.ends_with("is not proved: not certainly gone: Tmp"), "{why}");
}

#[test]
fn gpus_are_withheld_where_an_alert_alone_keeps_tenants_from_them() {
    let alert = serde_json::json!({ "probe_id": "xid", "target": "GPU-1", "classifications": ["prevent_allocation"] });
    let alarmed = || Command::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory(GPUS)),
        health: Box::new(Health { status: HealthStatus::Warning, alerts: vec![alert.clone()] }),
    };
    let counts = |story: &Story| (story.node.gpus_free(), story.node.gpus_withheld());
    let ready = node().active().ready();
    assert_eq!(counts(&ready), (GPUS - 1, 0));
    assert_eq!(counts(&ready.agent(alarmed())), (0, GPUS - 1));
    // Without the alert it would take nobody either.
    let unproven = node().active().releasing().reports(Verdict::Succeeded { proof: None });
    assert_eq!(counts(&unproven.agent(alarmed())), (0, 0));
}

#[test]
fn a_node_with_an_unproven_clean_up_gets_every_task_but_provision() {
    let two = node().active().ready();
    let deadline_at = two.now + TimeDelta::seconds(600);
    let two = two.told(reserve(OTHER, 1)).told(Command::Provision { allocation_id: OTHER, deadline_at });
    assert_eq!(two.orders(), ["provision"]);
    let unproven = two.cleaning(1).reports(failed());
    assert_eq!(unproven.orders(), Vec::<&str>::new());
    assert_eq!(unproven.cleaning(2).reports(PROVED).orders(), ["provision"]);
}

#[test]
fn a_fence_keeps_tasks_away_and_lets_everything_else_pass() {
    let fenced = node().active().fenced();
    assert_eq!(fenced.refuses(&agent(), poll()), Rejection::Fenced { allocation_id: TENANT });
    let heard = fenced.heard().agent(Command::Renew { serial: SERIAL.into(), issued: certificate("02") });
    // An outstanding result still counts.
    let proved = heard.clone().reports(PROVED).says(&["node.tenant_gone"]);
    assert!(proved.node.fenced_by.is_empty());
    // So does the operator's order to try again.
    assert_eq!(heard.cleaning(2).orders(), ["release"]);
}

#[test]
fn facts_of_an_attempt_that_was_succeeded_say_nothing() {
    let second = node().active().release_failed().cleaning(2);
    second.clone().told(Command::MarkReleaseFailed { allocation_id: TENANT, attempt: 1 }).unmoved();
    second.clone().told(Command::Fence { allocation_id: TENANT, attempt: 1 }).unmoved();
    let stale = second.report(1, failed());
    assert_eq!(second.refuses(&agent(), stale), Rejection::StaleAttempt { given: 1, current: 2 });
    // A proof is a proof, whichever attempt it came from.
    let proof = second.report(1, PROVED);
    second.agent(proof).says(&["node.tenant_gone"]);
}

#[test]
fn an_order_that_was_overtaken_by_its_own_failure_does_not_open_the_node() {
    let ready = node().active().ready();
    let failed = ready.told(Command::Fence { allocation_id: TENANT, attempt: 1 });
    assert_eq!(held(&failed.node), "release_failed 1, fenced");
    // It is not begun anew; the allocation is told of the failure, should it not know.
    let late = failed.cleaning(1).says(&["node.tenant_remains"]);
    assert_eq!(held(&late.node), "release_failed 1, fenced");
    assert_eq!(late.node.gpus_free(), 0);
    late.cleaning(2).reports(PROVED).says(&["node.tenant_gone"]);
}

#[test]
fn a_release_by_force_quarantines_until_the_agent_proves_the_clean_up() {
    let forced = node().active().fenced().told(Command::Abandon { allocation_id: TENANT }).expect("quarantined");
    assert_eq!(forced.orders(), ["release"]);
    let release = Command::ReleaseQuarantine { reason: "r".into() };
    assert!(matches!(forced.refuses(&admin(), release.clone()), Rejection::NotInOrder { .. }));
    let tried = forced.reports(failed());
    assert_eq!(tried.orders(), ["release"], "it stays offered");
    tried.reports(PROVED).admin(release).expect("active");
}

#[test]
fn devices_that_were_set_up_for_nobody_are_cleaned_up_without_being_asked_again() {
    for story in [node().active().provisioning(), node().active().ready(), node().active().release_failed()] {
        let unwanted = story.told(Command::Unreserve { allocation_id: TENANT }).expect("active");
        assert_eq!(unwanted.node.gpus_free(), 0);
        assert_eq!(unwanted.orders(), ["release"]);
        assert_eq!(unwanted.reports(PROVED).node.gpus_free(), GPUS);
    }
}

#[test]
fn an_unwanted_reservation_that_is_then_forced_still_quarantines() {
    let unwanted = node().active().ready().told(Command::Unreserve { allocation_id: TENANT });
    let forced = unwanted.told(Command::Abandon { allocation_id: TENANT }).expect("quarantined");
    forced.told(Command::Abandon { allocation_id: TENANT }).unmoved();
}

#[test]
fn work_is_offered_oldest_first() {
    let story = node().active().ready().after(TimeDelta::seconds(1)).cleaning(1).after(TimeDelta::seconds(1));
    let deadline_at = story.now + TimeDelta::seconds(600);
    let story = story.told(reserve(OTHER, 1)).told(Command::Provision { allocation_id: OTHER, deadline_at });
    assert_eq!(story.orders(), ["release", "provision"]);
}

#[test]
fn a_result_of_a_task_that_is_not_here_is_refused() {
    let ready = node().active().ready();
    let report = ready.report(1, failed());
    assert_eq!(ready.refuses(&agent(), report), Rejection::TaskUnknown);
    assert_eq!(ready.refuses(&worker(), ready.report(1, failed())), Rejection::ForeignNode { id: NODE });
}

#[test]
fn a_login_is_short_and_its_allocations_own() {
    let name = user_name(TENANT);
    assert_eq!(name.len(), 20);
    assert_ne!(name, user_name(OTHER));
}

//! Holds on GPUs, and the tasks that set tenants up and clean them up.

use super::*;

#[test]
fn gpus_are_reserved_by_uuid_and_never_twice() {
    let full = node().active().after_fact(reserve(TENANT, 3)).after_fact(reserve(OTHER, 1));
    assert_eq!(full.node.gpus_free(), 0);
    let third = AllocationId(Uuid::from_u128(0x300));
    assert_eq!(full.refuses(&worker(), reserve(third, 1)), Rejection::NotEnoughGpus { free: 0, wanted: 1 });
    let uuids: BTreeSet<_> =
        full.node.tenancy.holds.values().flat_map(|hold| &hold.placed.devices).map(|device| &device.uuid).collect();
    assert_eq!(uuids.len(), 4);
}

#[test]
fn tenant_of_two_gpus_gets_a_pair_that_is_linked() {
    let mut pairs = inventory(GPUS);
    for gpu in &mut pairs.gpus {
        gpu.locality.nvlink_domain = Some(gpu.index % 2);
    }
    let reserved = node().active().agent(heartbeat(NodeHealthStatus::Ok, pairs)).after_fact(reserve(TENANT, 2));
    let devices = &reserved.node.tenancy.holds[&TENANT].placed.devices;
    assert_eq!(devices.iter().map(|device| device.index).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn heartbeat_without_later_fields_leaves_what_was_known_of_gpus_and_of_tenant_devices() {
    let heartbeat = |inventory: &ReportedInventory, session: Option<u128>| {
        let seen = Box::new(AgentContact { session: session.map(Uuid::from_u128), ..*seen("boot-1") });
        let (inventory, health) = (Box::new(inventory.clone()), Box::default());
        Request::Heartbeat { serial: SERIAL.into(), seen, inventory, health }
    };
    let mut whole = ReportedInventory { tenant_devices: vec!["/dev/fuse".into()], ..inventory(GPUS) };
    for gpu in &mut whole.gpus {
        gpu.locality = GpuLocality { numa_node: Some(0), nvlink_domain: Some(gpu.index % 2) };
    }
    let shown = |story: &Story| story.node.machine.inventory.clone().unwrap();
    let known = node().active().agent(heartbeat(&whole, Some(1)));
    let restarted = known.agent(heartbeat(&inventory(GPUS), None));
    assert_eq!(shown(&restarted), whole, "an agent that starts leaves later fields out of its first heartbeat");
    // The links of one GPU are down, and the locality of another was not read.
    let mut other = ReportedInventory { tenant_devices: Vec::new(), ..whole.clone() };
    other.gpus[0].locality.nvlink_domain = None;
    let mut sent = other.clone();
    sent.gpus[1].locality = GpuLocality::default();
    let story = restarted.agent(heartbeat(&sent, Some(1)));
    assert_eq!(shown(&story), other, "what is reported counts");
}

#[test]
fn repeated_reservation_returns_the_same_devices() {
    let first = node().active().reserved();
    let repeated = first.clone().reserved();
    assert_eq!(first.reply, repeated.reply);
    assert_eq!(first.node, repeated.node);
    repeated.publishes(&["node.devices_reserved"]);
}

#[test]
fn node_without_device_isolation_takes_one_tenant_at_a_time() {
    let open = ReportedInventory { isolates_devices: false, ..inventory(GPUS) };
    let story = node().active().agent(heartbeat(NodeHealthStatus::Ok, open)).reserved();
    assert!(matches!(story.refuses(&worker(), reserve(OTHER, 1)), Rejection::NotSchedulable { .. }));
}

#[test]
fn failed_set_up_never_publishes_tenant_ready() {
    let failed = node().active().setup_failed().publishes(&["node.tenant_failed"]);
    let deadline_at = failed.now + TimeDelta::seconds(600);
    failed.after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at }).publishes(&["node.tenant_failed"]);
}

#[test]
fn tenant_on_a_machine_with_a_fault_is_not_admitted() {
    let succeeded = || TaskOutcome::Succeeded { proof: None };
    let ordered = node().active().provisioning();
    let broken = ordered.clone().agent(heartbeat(NodeHealthStatus::Critical, inventory(GPUS)));
    let broken = broken.publishes(&["node.state_changed", "node.tenant_faulted"]).reports(succeeded());
    let broken = broken.publishes(&["node.tenant_failed"]);
    assert!(matches!(&broken.published[0], Event::TenantFailed { reason, .. } if reason == "health_critical"));
    // The answer may be lost, and the request repeated.
    let deadline_at = broken.now + TimeDelta::seconds(600);
    broken.after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at }).publishes(&["node.tenant_failed"]);
    // Ready, and then faulty before the allocation received either event.
    let ready = ordered.clone().reports(succeeded()).publishes(&["node.tenant_ready"]);
    let lost = ready.agent(heartbeat(NodeHealthStatus::Ok, inventory(0)));
    lost.after_fact(Instruction::Provision { allocation_id: TENANT, deadline_at }).publishes(&["node.tenant_failed"]);
    // A fault that was repaired in time does not count.
    let repaired = ordered.agent(heartbeat(NodeHealthStatus::Critical, inventory(GPUS))).after_heartbeat();
    repaired.reports(succeeded()).publishes(&["node.tenant_ready"]);
}

#[test]
fn gpus_are_freed_only_with_the_clean_up_proof() {
    let releasing = node().active().releasing();
    assert_eq!(releasing.pending_tasks(), ["release"]);
    let unproven =
        releasing.clone().reports(TaskOutcome::Succeeded { proof: None }).publishes(&["node.tenant_remains"]);
    assert_eq!(unproven.node.gpus_free(), 0);
    let proved = releasing.reports(PROVED).publishes(&["node.tenant_gone"]);
    assert_eq!(proved.node.gpus_free(), GPUS);
}

#[test]
fn unschedulable_reason_names_what_the_clean_up_left() {
    let left = TaskOutcome::Failed { code: "cleanup_incomplete".into(), message: "not certainly gone: Tmp".into() };
    let unproven = node().active().releasing().reports(left);
    let why = unproven.node.not_schedulable().unwrap();
    assert!(why.ends_with("is not proved: not certainly gone: Tmp"), "{why}");
}

#[test]
fn gpus_are_withheld_where_only_an_alert_prevents_placement() {
    let alert = serde_json::json!({ "probe_id": "xid", "target": "GPU-1", "classifications": ["prevent_allocation"] });
    let alarmed = || Request::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory(GPUS)),
        health: Box::new(NodeHealth {
            status: NodeHealthStatus::Warning,
            alerts: vec![alert.clone()],
            ..Default::default()
        }),
    };
    let counts = |story: &Story| (story.node.gpus_free(), story.node.gpus_withheld());
    let ready = node().active().ready();
    assert_eq!(counts(&ready), (GPUS - 1, 0));
    assert_eq!(counts(&ready.agent(alarmed())), (0, GPUS - 1));
    // Without the alert it would not take an allocation either.
    let unproven = node().active().releasing().reports(TaskOutcome::Succeeded { proof: None });
    assert_eq!(counts(&unproven.agent(alarmed())), (0, 0));
}

#[test]
fn a_node_with_an_unproven_clean_up_gets_every_task_but_provision() {
    let two = node().active().ready();
    let deadline_at = two.now + TimeDelta::seconds(600);
    let two =
        two.after_fact(reserve(OTHER, 1)).after_fact(Instruction::Provision { allocation_id: OTHER, deadline_at });
    assert_eq!(two.pending_tasks(), ["provision"]);
    let unproven = two.cleaning(1).reports(failed());
    assert_eq!(unproven.pending_tasks(), Vec::<&str>::new());
    assert_eq!(unproven.cleaning(2).reports(PROVED).pending_tasks(), ["provision"]);
}

#[test]
fn fenced_node_gets_no_tasks_and_may_do_everything_else() {
    let fenced = node().active().fenced();
    assert_eq!(fenced.refuses(&agent(), poll()), Rejection::Fenced { allocation_id: TENANT });
    let renewed = fenced.after_heartbeat().agent(Request::Renew { serial: SERIAL.into(), issued: certificate("02") });
    // An outstanding result is still accepted.
    let proved = renewed.clone().reports(PROVED).publishes(&["node.tenant_gone"]);
    assert!(proved.node.tenancy.fenced_by.is_empty());
    // So is the operator's retry.
    assert_eq!(renewed.cleaning(2).pending_tasks(), ["release"]);
}

#[test]
fn facts_of_an_earlier_attempt_are_ignored() {
    let second = node().active().release_failed().cleaning(2);
    second.clone().after_fact(Instruction::MarkReleaseFailed { allocation_id: TENANT, attempt: 1 }).unmoved();
    second.clone().after_fact(Instruction::Fence { allocation_id: TENANT, attempt: 1 }).unmoved();
    let stale = second.report(1, failed());
    assert_eq!(second.refuses(&agent(), stale), Rejection::StaleAttempt { given: 1, current: 2 });
    // A proof is valid from any attempt.
    let proof = second.report(1, PROVED);
    second.agent(proof).publishes(&["node.tenant_gone"]);
}

#[test]
fn late_clean_up_request_does_not_reopen_the_node() {
    let ready = node().active().ready();
    let failed = ready.after_fact(Instruction::Fence { allocation_id: TENANT, attempt: 1 });
    assert_eq!(held(&failed.node), "release_failed 1, fenced");
    // It is not restarted; the failure is published again, in case the allocation missed it.
    let late = failed.cleaning(1).publishes(&["node.tenant_remains"]);
    assert_eq!(held(&late.node), "release_failed 1, fenced");
    assert_eq!(late.node.gpus_free(), 0);
    late.cleaning(2).reports(PROVED).publishes(&["node.tenant_gone"]);
}

#[test]
fn a_release_by_force_quarantines_until_the_agent_proves_the_clean_up() {
    let forced =
        node().active().fenced().after_fact(Instruction::Abandon { allocation_id: TENANT }).expect("quarantined");
    assert_eq!(forced.pending_tasks(), ["release"]);
    let release = Request::ReleaseQuarantine { reason: "r".into() };
    assert!(matches!(forced.refuses(&admin(), release.clone()), Rejection::NotInOrder { .. }));
    let failed = forced.reports(failed());
    assert_eq!(failed.pending_tasks(), [""; 0], "it is tried again after a pause");
    let tried = failed.after(resend_timer::FIRST).ticked();
    assert_eq!(tried.pending_tasks(), ["release"]);
    tried.reports(PROVED).admin(release).expect("active");
}

#[test]
fn pauses_between_failed_clean_ups_of_an_abandoned_tenant_grow_to_an_hour_and_end_with_the_agents_process() {
    let mut story = node().active().abandoned();
    let (begin, mut attempts) = (story.now, Vec::new());
    while story.now < begin + TimeDelta::hours(6) {
        if story.pending_tasks() == ["release"] {
            attempts.push((story.now - begin).num_seconds());
            story = story.reports(failed());
        }
        let due_at = story.node.tenancy.next_resend_at().unwrap();
        assert!(story.node.timer().is_some_and(|at| at <= due_at), "the node's own timer ends the pause");
        story.now = due_at;
        story = story.ticked();
    }
    assert_eq!(attempts, [0, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 8720, 12320, 15920, 19520]);
    assert_eq!(story.clone().reports(failed()).pending_tasks(), [""; 0]);
    let health = Box::new(NodeHealth { status: NodeHealthStatus::Ok, alerts: Vec::new(), ..Default::default() });
    let restart = Request::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-2"),
        inventory: Box::new(inventory(GPUS)),
        health,
    };
    let restarted = story.reports(failed()).agent(restart);
    assert_eq!(restarted.pending_tasks(), ["release"]);
}

/// A member of the release before takes heartbeats without a session.
#[test]
fn heartbeat_without_a_session_ends_no_pause_of_a_clean_up() {
    let beat = |session: Option<u128>| Request::Heartbeat {
        serial: SERIAL.into(),
        seen: Box::new(AgentContact { session: session.map(Uuid::from_u128), ..*seen("boot-1") }),
        inventory: Box::new(inventory(GPUS)),
        health: Box::new(NodeHealth { status: NodeHealthStatus::Ok, alerts: Vec::new(), ..Default::default() }),
    };
    let paused = node().active().agent(beat(Some(1))).abandoned().reports(failed());
    let alternating = paused.agent(beat(None)).agent(beat(Some(1))).agent(beat(None));
    assert_eq!(alternating.pending_tasks(), [""; 0]);
    assert_eq!(alternating.agent(beat(Some(2))).pending_tasks(), ["release"]);
}

#[test]
fn unwanted_tenant_is_cleaned_up_without_another_request() {
    for story in [node().active().provisioning(), node().active().ready(), node().active().release_failed()] {
        let unwanted = story.after_fact(Instruction::Unreserve { allocation_id: TENANT }).expect("active");
        assert_eq!(unwanted.node.gpus_free(), 0);
        assert_eq!(unwanted.pending_tasks(), ["release"]);
        assert_eq!(unwanted.reports(PROVED).node.gpus_free(), GPUS);
    }
}

#[test]
fn an_unwanted_reservation_that_is_then_forced_still_quarantines() {
    let unwanted = node().active().ready().after_fact(Instruction::Unreserve { allocation_id: TENANT });
    let forced = unwanted.after_fact(Instruction::Abandon { allocation_id: TENANT }).expect("quarantined");
    forced.after_fact(Instruction::Abandon { allocation_id: TENANT }).unmoved();
}

#[test]
fn tasks_are_dispatched_oldest_first() {
    let story = node().active().ready().after(TimeDelta::seconds(1)).cleaning(1).after(TimeDelta::seconds(1));
    let deadline_at = story.now + TimeDelta::seconds(600);
    let story =
        story.after_fact(reserve(OTHER, 1)).after_fact(Instruction::Provision { allocation_id: OTHER, deadline_at });
    assert_eq!(story.pending_tasks(), ["release", "provision"]);
}

#[test]
fn result_of_an_unknown_task_is_rejected() {
    let ready = node().active().ready();
    let report = ready.report(1, failed());
    assert_eq!(ready.refuses(&agent(), report), Rejection::TaskUnknown);
    assert_eq!(ready.refuses(&worker(), ready.report(1, failed())), Rejection::ForeignNode { id: NODE });
}

#[test]
fn login_is_short_and_unique_to_its_allocation() {
    let name = user_name(TENANT);
    assert_eq!(name.len(), 20);
    assert_ne!(name, user_name(OTHER));
}

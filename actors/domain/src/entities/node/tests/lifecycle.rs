//! Onboarding, contact, and the actions of administrators.

use super::*;
use crate::invariants::HistoryEntry;

#[test]
fn nonexistent_node_can_only_be_registered() {
    let policy = PolicyBook::default();
    for (case, by, command) in life_commands().into_iter().skip(1) {
        assert_eq!(Node::decide(None, command, &ctx(start(), &policy, &by)).err(), Some(Rejection::NotFound), "{case}");
    }
}

#[test]
fn a_registration_must_agree_with_its_sku() {
    let wrong = Registration { gpus_total: 3, ..registration() };
    assert_eq!(register(wrong).err(), Some(Rejection::GpusDiffer { given: 3, promised: GPUS }));
    let abroad = Registration { region_code: "mars".into(), ..registration() };
    assert_eq!(register(abroad).err(), Some(Rejection::RegionNotAllowed { region_code: "mars".into() }));
}

#[test]
fn a_node_is_onboarded() {
    let active = node().expect("registered").invited().expect("bootstrap-issued").agent(enrollment());
    let active = active.expect("enrolling").agent(poll()).expect("active").publishes(&["node.state_changed"]);
    assert_eq!(active.node.gpus_free(), GPUS);
}

#[test]
fn token_enrolls_once() {
    let enrolled = node().enrolled();
    let refused = |cause| Rejection::TokenRefused { cause };
    assert_eq!(enrolled.refuses(&agent(), enrollment()), refused(EnrollmentTokenFault::Consumed));
    assert_eq!(node().refuses(&agent(), enrollment()), refused(EnrollmentTokenFault::NoneIssued));
    let late = node().invited().at_its_timer();
    assert_eq!(late.refuses(&agent(), enrollment()), refused(EnrollmentTokenFault::Expired));
    let other = Request::IssueToken { token_id: TokenId(Uuid::nil()), token_sha256: [8; 32], ttl_seconds: None };
    assert_eq!(node().invited().admin(other).refuses(&agent(), enrollment()), refused(EnrollmentTokenFault::Mismatch));
}

#[test]
fn presented_token_is_checked_as_for_an_enrollment_and_not_consumed() {
    let present = || Request::PresentToken { token_sha256: HASH };
    let invited = node().invited().agent(present()).agent(present()).expect("bootstrap-issued");
    let enrolled = invited.agent(enrollment()).expect("enrolling");
    let refused = |cause| Rejection::TokenRefused { cause };
    assert_eq!(enrolled.refuses(&agent(), present()), refused(EnrollmentTokenFault::Consumed));
    assert_eq!(node().refuses(&agent(), present()), refused(EnrollmentTokenFault::NoneIssued));
    assert_eq!(node().invited().at_its_timer().refuses(&agent(), present()), refused(EnrollmentTokenFault::Expired));
    let wrong = Request::PresentToken { token_sha256: [8; 32] };
    assert_eq!(node().invited().refuses(&agent(), wrong), refused(EnrollmentTokenFault::Mismatch));
    let stranger = Principal::Node(NodeId(Uuid::from_u128(77)));
    assert!(matches!(node().invited().refuses(&stranger, present()), Rejection::ForeignNode { .. }));
}

#[test]
fn unused_token_expires_after_its_ttl() {
    let short = Request::IssueToken { token_id: TokenId(Uuid::nil()), token_sha256: HASH, ttl_seconds: Some(5) };
    let story = node().admin(short);
    assert_eq!(story.node.timer(), Some(start() + TimeDelta::seconds(5)));
    let expired = story.at_its_timer().ticked().expect("registered");
    assert_eq!(expired.node.identity.token, None);
}

#[test]
fn lifetime_of_a_token_is_the_policys_where_the_order_names_none() {
    let ordered = |ttl_seconds| {
        let order = Request::IssueToken { token_id: TokenId(Uuid::nil()), token_sha256: HASH, ttl_seconds };
        node().policy(PolicyKey::NodeEnrollmentTokenTtl, 120).admin(order).node.timer()
    };
    assert_eq!(ordered(None), Some(start() + TimeDelta::seconds(120)));
    assert_eq!(ordered(Some(60)), Some(start() + TimeDelta::seconds(60)));
    let by_default = node().invited().node.timer();
    assert_eq!(by_default, Some(start() + TimeDelta::seconds(3600)));
}

#[test]
fn expired_enrollment_revokes_its_certificate() {
    let expired = node().enrolled().at_its_timer().ticked().expect("bootstrap-issued");
    assert_eq!(expired.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    assert_eq!(expired.effects, [Effect::CloseNode(NODE)]);
    expired.ticked().expect("registered").invited().agent(enrollment()).expect("enrolling");
}

#[test]
fn inventory_mismatch_prevents_activation() {
    let short = node().enrolled().agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS - 1))).expect("enrolling");
    assert_eq!(short.node.lifecycle.reason.code.as_str(), "inventory_mismatch");
    short.after_heartbeat().expect("active");
}

#[test]
fn inventory_mismatch_is_described_in_a_sentence() {
    let mut node = node().active().node;
    let mut table = String::new();
    let mut look = |inventory: Option<ReportedInventory>| {
        node.machine.inventory = inventory;
        writeln!(table, "{}", node.mismatch().unwrap_or_else(|| "as promised".into())).unwrap();
    };
    let changed = |change: &dyn Fn(&mut ReportedGpu)| {
        let mut inventory = inventory(GPUS);
        change(&mut inventory.gpus[1]);
        Some(inventory)
    };
    look(None);
    look(Some(inventory(GPUS)));
    look(Some(inventory(GPUS + 1)));
    look(changed(&|gpu| gpu.model = "A100".into()));
    look(changed(&|gpu| gpu.model = " h100 ".into()));
    look(changed(&|gpu| gpu.memory_mib = 75_999));
    look(changed(&|gpu| gpu.memory_mib = 76_000));
    look(changed(&|gpu| gpu.uuid = "GPU-0".into()));
    insta::assert_snapshot!(table, @r"
    No inventory was reported.
    as promised
    The SKU h100x4 has 4 GPUs, the machine reports 5.
    GPU 1 is a A100, the SKU promises H100.
    as promised
    GPU 1 has 75999 MiB of memory, the SKU promises 80000.
    as promised
    Two of the GPUs report the same UUID.
    ");
}

#[test]
fn certificate_is_valid_for_its_generation_time_and_node_only() {
    let active = node().active();
    assert_eq!(active.clone().after(TimeDelta::days(30)).refuses(&agent(), poll()), Rejection::CertificateExpired);
    assert_eq!(active.refuses(&Principal::Node(NodeId(Uuid::nil())), poll()), Rejection::ForeignNode { id: NODE });
    assert_eq!(active.refuses(&admin(), poll()), Rejection::ForeignNode { id: NODE });
    let mut cloned = active.clone();
    cloned.node.identity.generation += 1;
    assert_eq!(cloned.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    let renewed = active.agent(Request::Renew { serial: SERIAL.into(), issued: certificate("02") });
    // The agent uses the old one until the new one is stored.
    assert_eq!(renewed.node.identity.certificates.len(), 2);
    assert_eq!(renewed.node.identity.shown.as_deref(), Some(SERIAL), "what it was given it may never have stored");
    let polled = renewed.clone().agent(Request::Poll { serial: "02".into() });
    assert_eq!((polled.node.identity.shown.as_deref(), polled.wrote), (Some("02"), true));
    assert!(!polled.clone().agent(Request::Poll { serial: "02".into() }).wrote);
    // It returned to the former one: it crashed before it had stored the other.
    assert_eq!(polled.after_heartbeat().node.identity.shown.as_deref(), Some(SERIAL));
    renewed.agent(Request::Poll { serial: "02".into() }).agent(poll());
}

#[test]
fn removed_node_gets_nothing_after_the_reply() {
    let removing = node().active().retired().removing().expect("removing");
    assert_eq!(removing.effects, [Effect::CloseNode(NODE)]);
    let removed = removing.clone().at_its_timer().ticked().expect("removed");
    for story in [removing, removed] {
        let renew = Request::Renew { serial: SERIAL.into(), issued: certificate("02") };
        for command in [poll(), heartbeat(NodeHealthStatus::Ok, inventory(GPUS)), enrollment(), renew] {
            assert_eq!(story.refuses(&agent(), command), Rejection::Removed);
        }
        let step = |actor: &str, to_state: &str, refused| HistoryEntry {
            version: 1,
            command: "x".to_owned(),
            actor: actor.to_owned(),
            to_state: to_state.to_owned(),
            refused,
            audited: None,
        };
        let itself = format!("node:{NODE}");
        let before =
            [step(&itself, "retired", false), step("user:root", "removing", false), step(&itself, "removing", true)];
        assert!(story.node.gets_nothing_once_removed(&before), "what it did before, and what it was refused");
        let after = [before.as_slice(), &[step(&itself, "removing", false)]].concat();
        assert!(!story.node.gets_nothing_once_removed(&after));
        let mut known = story.node.clone();
        known.identity.certificates.insert(SERIAL.into(), certificate(SERIAL));
        assert!(!known.gets_nothing_once_removed(&[]));
    }
}

#[test]
fn silent_node_goes_offline_with_its_tenants_and_returns_on_contact() {
    let silent = node().active().ready().offline().expect("offline");
    assert_eq!(silent.now - start(), TimeDelta::seconds(90));
    assert_eq!(silent.node.tenancy.holds.len(), 1);
    assert_eq!(silent.node.gpus_free(), 0);
    let back = silent.agent(poll()).expect("active");
    assert_eq!(back.node.timer(), Some(back.now + TimeDelta::seconds(90)));
}

#[test]
fn restarted_machine_keeps_its_tenants_and_is_audited() {
    let rebooted = || {
        let Request::Heartbeat { serial, inventory, health, .. } = heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
        else {
            panic!("a heartbeat")
        };
        Request::Heartbeat { serial, seen: seen("boot-2"), inventory, health }
    };
    for story in [node().active().ready(), node().active().ready().offline()] {
        let step = story.ask(&agent(), rebooted()).unwrap();
        let restart = step.audit.iter().find(|audit| audit.action == AuditAction::NodesRestart).unwrap();
        assert_eq!(restart.metadata["old_boot_id"], "boot-1");
        let next = step.next.unwrap();
        assert_eq!((next.state(), next.tenancy.holds == story.node.tenancy.holds), ("active", true));
        assert_eq!(next.agent.contact.as_ref().unwrap().boot_id, "boot-2");
    }
    let back = node().active().ready().offline().agent(rebooted());
    assert_eq!(back.node.lifecycle.reason.code.as_str(), "restarted");
    let same = node().active().ready().offline().after_heartbeat();
    assert_eq!(same.node.lifecycle.reason.code.as_str(), "heard_again");
}

#[test]
fn deadline_of_an_enrolled_node_says_why_it_is_not_active() {
    let short = node().enrolled().agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS - 1)));
    let why = "The SKU h100x4 has 4 GPUs, the machine reports 3.";
    assert_eq!(
        (short.node.lifecycle.reason.message.as_str(), short.node.deadline().unwrap().reason.as_str()),
        (why, why)
    );
    let shorter = short.agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS - 2)));
    assert_eq!(shorter.node.lifecycle.reason.message, "The SKU h100x4 has 4 GPUs, the machine reports 2.");
}

#[test]
fn contact_is_committed_only_when_the_last_one_is_old() {
    let active = node().active();
    active.clone().after(TimeDelta::seconds(29)).agent(poll()).unmoved();
    let noted = active.after(TimeDelta::seconds(30)).agent(poll());
    assert!(noted.wrote);
    assert_eq!(noted.node.timer(), Some(noted.now + TimeDelta::seconds(90)));
}

#[test]
fn critical_health_quarantines_and_release_restores_the_phase() {
    let critical = || heartbeat(NodeHealthStatus::Critical, inventory(GPUS));
    for story in [node().enrolled(), node().active(), node().active().retired()] {
        let was = story.node.state();
        let sick = story.agent(critical()).expect("quarantined");
        assert_eq!(sick.node.lifecycle.reason.code.as_str(), "health_critical");
        let release = Request::ReleaseQuarantine { reason: "repaired".into() };
        assert!(matches!(sick.refuses(&admin(), release.clone()), Rejection::NotInOrder { .. }));
        sick.after_heartbeat().expect("quarantined").admin(release).expect(was);
    }
}

#[test]
fn inventory_drift_quarantines_the_node() {
    let drifted = node().active().ready().agent(heartbeat(NodeHealthStatus::Ok, inventory(GPUS - 1)));
    let drifted = drifted.expect("quarantined");
    assert_eq!(drifted.node.lifecycle.reason.code.as_str(), "inventory_drift");
    assert_eq!(drifted.node.tenancy.holds.len(), 1);
}

#[test]
fn quarantine_of_a_node_without_enrollment_can_be_released() {
    let release = Request::ReleaseQuarantine { reason: "r".into() };
    node().quarantined().admin(release.clone()).expect("registered");
    node().invited().quarantined().admin(release).expect("bootstrap-issued");
    // It cannot become active from there.
    let retired = node().quarantined().retired().expect("retired");
    let reactivate = Request::Reactivate { reason: "r".into() };
    assert!(matches!(retired.refuses(&admin(), reactivate), Rejection::NotInOrder { .. }));
}

#[test]
fn node_that_never_was_active_is_retired_with_its_token_and_certificate_and_then_removed() {
    let remove = || Request::Remove { reason: "r".into() };
    for story in [node(), node().invited(), node().enrolled(), node().invited().quarantined()] {
        assert!(matches!(story.refuses(&admin(), remove()), Rejection::WrongState { .. }), "{}", story.node.state());
        let retired = story.retired().expect("retired");
        assert_eq!((retired.node.identity.token.is_none(), retired.node.identity.certificates.len()), (true, 0));
        assert_eq!(retired.node.claims().len(), 0, "it never had GPUs");
        assert!(matches!(retired.refuses(&agent(), enrollment()), Rejection::TokenRefused { .. }));
        assert_eq!(retired.refuses(&agent(), poll()), Rejection::CertificateUnknown);
        retired.removing().expect("removing");
    }
}

#[test]
fn node_retired_before_activation_returns_only_with_a_new_identity() {
    let reactivate = || Request::Reactivate { reason: "r".into() };
    let retired = node().enrolled().retired();
    let refused = retired.refuses(&admin(), reactivate());
    assert!(refused.to_string().contains("reissue-enrollment"), "{refused}");
    let mut enrolled_once_more = enrollment();
    if let Request::Enroll(shown) = &mut enrolled_once_more {
        shown.token_sha256 = [8; 32];
    }
    retired.admin(reissue(false)).agent(enrolled_once_more).expect("retired").admin(reactivate()).expect("active");
}

#[test]
fn renewals_keep_few_certificates_and_those_in_use() {
    let mut story = node().active();
    // The agent never receives an answer: it renews repeatedly with what it has.
    for n in 0..500 {
        let mut issued = certificate(&format!("n{n}"));
        issued.not_after += TimeDelta::seconds(n);
        story = story.agent(Request::Renew { serial: SERIAL.into(), issued });
        assert!(story.node.identity.certificates.len() <= 8);
        assert!(story.node.identity.certificates.contains_key(SERIAL), "what it shows");
        assert!(story.node.identity.certificates.contains_key(&format!("n{n}")), "what it is given");
    }
    let size = serde_json::to_string(&story.node).unwrap().len();
    assert!(size < 8 * 1024, "{size} bytes");
    let mut issued = certificate("next");
    issued.not_after += TimeDelta::days(1);
    let next =
        story.agent(Request::Poll { serial: "n499".into() }).agent(Request::Renew { serial: "n499".into(), issued });
    assert!(next.node.identity.certificates.contains_key("n499"));
}

#[test]
fn alert_that_prevents_allocation_stops_placement_while_active() {
    let alert = json!({
        "probe_id": "xid", "target": "GPU-1", "classifications": ["prevent_allocation"],
        "message": "Xid 79", "tenant_message": "A GPU of this node has failed.",
    });
    let beat = |status, alerts: Vec<serde_json::Value>| Request::Heartbeat {
        serial: SERIAL.into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory(GPUS)),
        health: Box::new(NodeHealth { status, alerts, ..Default::default() }),
    };
    let warned = node().active().ready().agent(beat(NodeHealthStatus::Warning, vec![alert.clone()])).expect("active");
    assert_eq!(warned.node.gpus_free(), 0);
    let why = warned.node.not_schedulable().unwrap();
    assert!(why.contains("xid on GPU-1: Xid 79"), "{why}");
    assert!(matches!(warned.refuses(&worker(), reserve(OTHER, 1)), Rejection::NotSchedulable { .. }));
    // The tenant has GPU 0: the alert is about another tenant's GPU.
    let of = |index: u32| vec![crate::event::GpuDevice { index, uuid: format!("GPU-{index}") }];
    assert_eq!(warned.node.tenant_messages(&of(0), start()), Vec::<String>::new());
    assert_eq!(warned.node.tenant_messages(&of(1), start()), ["A GPU of this node has failed."]);
    let mut of_all = alert;
    of_all["target"] = "node".into();
    of_all["classifications"] = json!(["warn"]);
    let other = warned.clone().agent(beat(NodeHealthStatus::Ok, vec![of_all.clone(), of_all]));
    assert_eq!(
        other.node.tenant_messages(&of(0), start()),
        ["A GPU of this node has failed."],
        "once, however often it is reported"
    );
    assert_eq!(other.node.gpus_free(), GPUS - 1, "a warning prevents nothing");
    assert_eq!(warned.after_heartbeat().node.gpus_free(), GPUS - 1);
}

#[test]
fn a_quarantined_machine_that_is_beyond_repair_can_be_removed() {
    let used = node().active().ready().quarantined();
    assert_eq!(used.refuses(&admin(), retire(false)), Rejection::InUse { allocation_id: TENANT });
    let dead = node().active().abandoned().expect("quarantined").retired().expect("retired");
    let refused = dead.refuses(&admin(), Request::Reactivate { reason: "r".into() });
    assert!(matches!(refused, Rejection::NotInOrder { .. }), "what is left on it keeps it from coming back");
    let gone = dead.removing().at_its_timer().ticked().expect("removed");
    assert!(gone.node.tenancy.holds.is_empty());
}

#[test]
fn a_node_in_use_is_not_retired_but_drained() {
    for story in [
        node().active().reserved(),
        node().active().provisioning(),
        node().active().ready(),
        node().active().releasing(),
        node().active().release_failed(),
    ] {
        assert_eq!(story.refuses(&admin(), retire(false)), Rejection::InUse { allocation_id: TENANT });
        let draining = story.admin(retire(true)).expect("draining");
        assert_eq!(draining.node.gpus_free(), 0);
    }
    let last = node().active().ready().admin(retire(true)).cleaning(1).reports(PROVED);
    last.expect("retired").publishes(&["node.state_changed", "node.tenant_gone"]);
}

#[test]
fn quarantined_node_that_has_drained_is_retired_on_release() {
    let draining = node().active().ready().admin(retire(true)).quarantined();
    let emptied = draining.cleaning(1).reports(PROVED).expect("quarantined");
    emptied.admin(Request::ReleaseQuarantine { reason: "r".into() }).expect("retired");
}

#[test]
fn retired_node_is_reactivated_only_when_fit() {
    let reactivate = || Request::Reactivate { reason: "r".into() };
    let retired = node().active().retired();
    retired.clone().admin(reactivate()).expect("active");
    let silent = retired.after(TimeDelta::seconds(90));
    assert!(matches!(silent.refuses(&admin(), reactivate()), Rejection::NotInOrder { .. }));
    silent.after_heartbeat().expect("retired").admin(reactivate()).expect("active");
}

#[test]
fn retired_node_renews_and_gets_no_tasks() {
    let retired = node().active().retired();
    let renewed = retired.agent(Request::Renew { serial: SERIAL.into(), issued: certificate("02") }).expect("retired");
    assert!(renewed.node.identity.certificates.contains_key("02"));
    let polled = renewed.clone().agent(Request::Poll { serial: "02".into() });
    assert_eq!(polled.reply, Reply::Work { orders: Vec::new() });
    assert!(matches!(renewed.refuses(&worker(), reserve(TENANT, 1)), Rejection::NotSchedulable { .. }));
    assert_eq!(renewed.node.gpus_free(), 0);
}

#[test]
fn offline_timeout_is_a_policy() {
    let story = node().policy(PolicyKey::NodeOfflineAfter, 10).active();
    assert_eq!(story.node.timer(), Some(start() + TimeDelta::seconds(10)));
    let Reply::HeartbeatAccepted { next_heartbeat_seconds, .. } = story.after_heartbeat().reply else {
        panic!("no answer")
    };
    assert_eq!(next_heartbeat_seconds, 3);
}

/// The caller gets one public code, and may retry at once: the audit log records the true cause, one row a minute.
#[test]
fn refused_enrollment_is_audited_with_its_cause_once_a_minute() {
    let mut story = node().invited().by(&agent(), enrollment());
    let mut stored = Vec::new();
    for second in 0..130 {
        let rejection = story.refuses(&agent(), enrollment());
        let refused =
            story.node.audit_refusal(&enrollment().into(), &rejection, &ctx(story.now, &story.policy, &agent()));
        if let Some(refused) = refused {
            assert_eq!(refused.audit.action, AuditAction::NodesRefuseEnrollment);
            assert_eq!(refused.audit.metadata["cause"], "the enrollment token does not hold: it was used before");
            let mut others = refused.next.clone();
            others.identity.refusals = story.node.identity.refusals;
            assert_eq!(others, story.node, "nothing else changes");
            story.node = refused.next;
            stored.push(second);
        }
        story = story.after(TimeDelta::seconds(1));
    }
    assert_eq!(stored, [0, 60, 120]);
    let other = story.node.audit_refusal(
        &poll().into(),
        &Rejection::CertificateUnknown,
        &ctx(story.now, &story.policy, &agent()),
    );
    assert!(other.is_none(), "a refused poll is in the logs alone");
}

//! Recovery of a node's identity, and refused recoveries.

use super::*;

fn refused(cause: EnrollmentTokenFault) -> Rejection {
    Rejection::TokenRefused { cause }
}

fn polled_with(serial: &str) -> Request {
    Request::Poll { serial: serial.into() }
}

fn left(story: &Story) -> (u32, u32) {
    (story.node.identity.generation, story.node.identity.recoveries_left)
}

#[test]
fn used_token_recovers_an_expired_identity_and_revokes_the_old_one() {
    let expired = node().active().after(TimeDelta::days(31));
    assert_eq!(expired.refuses(&agent(), poll()), Rejection::CertificateExpired);
    let mut asked = recovery(2);
    asked.issued.not_after = start() + TimeDelta::days(62);
    let recovered = expired.agent(recover(asked)).expect("active");
    assert_eq!(left(&recovered), (2, 4));
    assert_eq!(recovered.effects, [Effect::CloseNode(NODE)]);
    assert_eq!(recovered.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    recovered.agent(polled_with("r2"));
}

#[test]
fn recovery_with_a_lost_answer_is_answered_again_and_counted_once() {
    let recovered = node().active().agent(recover(recovery(2)));
    let again = IdentityRecovery { nonce: recovery(3).nonce, issued: certificate("r3"), ..recovery(2) };
    let again = recovered.agent(recover(again));
    assert_eq!(left(&again), (2, 4));
    again.agent(polled_with("r3")).expect("active");
}

#[test]
fn enrollment_with_a_lost_answer_is_recovered_from_its_first_generation() {
    let recovered = node().enrolled().agent(recover(recovery(2))).expect("enrolling");
    recovered.agent(polled_with("r2")).expect("active");
}

#[test]
fn later_enrollment_with_a_lost_answer_is_recovered_too_and_is_no_clone() {
    let again = |story: Story| {
        let enrolled = Request::Enroll(Box::new(Enrollment {
            token_sha256: [8; 32],
            csr_sha256: [9; 32],
            issued: certificate("e2"),
            recovery_public_key: "k2".into(),
            boot_id: "boot-2".into(),
            agent_version: "1".into(),
            protocol: 3,
            inventory: inventory(GPUS),
        }));
        story.admin(reissue(true)).agent(enrolled)
    };
    // Its agent knows of no generation: it says the first.
    let of_new = |n: u8| IdentityRecovery { token_sha256: [8; 32], verified_with: "k2".into(), ..recovery(n) };
    let enrolled = again(node().active());
    assert_eq!(enrolled.node.identity.generation, 2);
    let recovered = enrolled.agent(recover(of_new(3))).expect("active");
    assert_eq!(
        (left(&recovered).0, &recovered.reply),
        (3, &Reply::Enrolled { identity_generation: 3, recoveries_left: 4 })
    );
    // The answer to the recovery was lost as well.
    let nonce = recovery(4).nonce;
    let recovered = recovered.agent(recover(IdentityRecovery { nonce, ..of_new(3) })).expect("active");
    assert_eq!(left(&recovered), (3, 4));
    let cloned = recovered.agent(recover(of_new(5))).expect("quarantined");
    assert_eq!(cloned.reply, Reply::CloneSuspected, "another machine with this state");
}

#[test]
fn old_generation_with_valid_token_and_signature_is_a_suspected_clone() {
    let recovered = node().active().agent(recover(recovery(2)));
    let cloned = recovered.agent(recover(recovery(3))).expect("quarantined");
    assert_eq!(
        (cloned.reply.clone(), cloned.node.lifecycle.reason.code.as_str()),
        (Reply::CloneSuspected, "clone_suspected")
    );
    assert_eq!(left(&cloned), (2, 4), "it got nothing");
    assert_eq!(cloned.refuses(&agent(), polled_with("r3")), Rejection::CertificateUnknown);
    cloned.agent(recover(recovery(4))).expect("quarantined");
}

#[test]
fn suspected_clone_takes_no_tenant_until_an_operator_releases_its_quarantine() {
    let cloned = node().active().agent(recover(recovery(2))).agent(recover(recovery(3))).expect("quarantined");
    assert!(cloned.ask(&worker(), reserve(TENANT, 1)).is_err());
    let of_the_recovered = Request::Heartbeat {
        serial: "r2".into(),
        seen: seen("boot-1"),
        inventory: Box::new(inventory(GPUS)),
        health: Box::new(NodeHealth { status: NodeHealthStatus::Ok, alerts: Vec::new(), ..Default::default() }),
    };
    let beating = cloned.agent(of_the_recovered).expect("quarantined");
    let released = beating.admin(Request::ReleaseQuarantine { reason: "the copy is off".into() }).expect("active");
    released.after_fact(reserve(TENANT, 1));
}

#[test]
fn two_agents_that_run_beside_each_other_are_suspected_clones_until_an_operator_has_found_the_copy() {
    let beat = |session: u128| {
        let seen = Box::new(AgentContact { session: Some(Uuid::from_u128(session)), ..*seen("boot-1") });
        let Request::Heartbeat { serial, inventory, health, .. } = heartbeat(NodeHealthStatus::Ok, inventory(GPUS))
        else {
            unreachable!()
        };
        Request::Heartbeat { serial, seen, inventory, health }
    };
    let restarted = node().active().agent(beat(1)).agent(beat(2)).agent(beat(1)).agent(beat(2)).expect("active");
    let cloned = restarted.agent(beat(1)).expect("quarantined");
    assert_eq!(cloned.node.lifecycle.reason.code.as_str(), "clone_suspected");
    let known = cloned.agent(beat(2)).expect("quarantined");
    let released = known.admin(Request::ReleaseQuarantine { reason: "found".into() }).agent(beat(2)).expect("active");
    released.agent(beat(1)).agent(beat(2)).agent(beat(1)).expect("quarantined");
}

#[test]
fn recovery_that_the_network_delayed_is_no_clone_and_takes_no_certificate_from_the_agent() {
    let given_out = |n: u8| {
        let until = start() + TimeDelta::days(60) + TimeDelta::microseconds(n.into());
        Nonce { until, ..recovery(n).nonce }
    };
    let delayed = |n: u8| {
        let issued = certificate(&format!("late-{n}"));
        recover(IdentityRecovery { nonce: given_out(n), issued, ..recovery(9) })
    };
    let sent = |n: u8| IdentityRecovery { nonce: given_out(n), issued: certificate(&format!("r{n}")), ..recovery(9) };
    // Of five requests the agent has had the answer to the third.
    let recovered = node().active().agent(recover(sent(3))).agent(polled_with("r3"));
    let recovered = recovered.agent(delayed(1)).agent(polled_with("r3"));
    let renewed = recovered.agent(Request::Renew { serial: "r3".into(), issued: certificate("renewed") });
    let renewed =
        renewed.agent(polled_with("renewed")).agent(delayed(2)).agent(polled_with("renewed")).expect("active");
    assert_eq!(left(&renewed), (2, 4));
    let next = IdentityRecovery { identity_generation: 2, csr_sha256: [10; 32], ..sent(6) };
    let again = renewed.agent(recover(next));
    for n in [4, 5] {
        assert_eq!(again.refuses(&agent(), delayed(n)), refused(EnrollmentTokenFault::NonceExpired));
    }
    let again = again.agent(polled_with("r6")).expect("active");
    assert_eq!(left(&again), (3, 3));
    again.agent(delayed(7)).expect("quarantined");
}

#[test]
fn duplicate_recovery_is_one_recovery_and_no_clone() {
    let recovered = node().active().agent(recover(recovery(2)));
    assert_eq!(recovered.refuses(&agent(), recover(recovery(2))), refused(EnrollmentTokenFault::NonceSpent));
    recovered.expect("active");
}

#[test]
fn invalid_recovery_is_refused_and_changes_nothing() {
    let active = node().active();
    let cases = [
        (IdentityRecovery { token_sha256: [9; 32], ..recovery(2) }, EnrollmentTokenFault::Mismatch),
        (IdentityRecovery { verified_with: "other".into(), ..recovery(2) }, EnrollmentTokenFault::KeyDiffers),
        (
            IdentityRecovery { nonce: Nonce { until: start(), ..recovery(2).nonce }, ..recovery(2) },
            EnrollmentTokenFault::NonceExpired,
        ),
        (IdentityRecovery { identity_generation: 2, ..recovery(2) }, EnrollmentTokenFault::GenerationUnknown),
        (IdentityRecovery { identity_generation: u32::MAX, ..recovery(2) }, EnrollmentTokenFault::GenerationUnknown),
    ];
    for (asked, cause) in cases {
        assert_eq!(active.refuses(&agent(), recover(asked)), refused(cause));
    }
    assert_eq!(node().refuses(&agent(), recover(recovery(2))), refused(EnrollmentTokenFault::NoneIssued));
    assert_eq!(node().invited().refuses(&agent(), recover(recovery(2))), refused(EnrollmentTokenFault::FirstBoot));
    let removed = node().active().retired().removing();
    assert_eq!(removed.refuses(&agent(), recover(recovery(2))), Rejection::Removed);
}

#[test]
fn recoveries_are_counted() {
    let once = node().policy(PolicyKey::NodeMaxRecoveries, 1).active().agent(recover(recovery(2)));
    let next = IdentityRecovery { identity_generation: 2, ..recovery(3) };
    assert_eq!(once.refuses(&agent(), recover(next)), refused(EnrollmentTokenFault::RecoveriesUsedUp));
    let never = node().policy(PolicyKey::NodeMaxRecoveries, 0).active();
    assert_eq!(never.refuses(&agent(), recover(recovery(2))), refused(EnrollmentTokenFault::RecoveriesUsedUp));
}

#[test]
fn spent_nonce_is_remembered_until_its_expiry() {
    let short = |n: u8| Nonce { until: start() + TimeDelta::seconds(60), ..recovery(n).nonce };
    let first = node().active().agent(recover(IdentityRecovery { nonce: short(2), ..recovery(2) }));
    let later = first.after(TimeDelta::seconds(61));
    let next = IdentityRecovery { identity_generation: 2, ..recovery(3) };
    let second = later.agent(recover(next));
    assert_eq!(second.node.identity.spent_nonces.keys().collect::<Vec<_>>(), ["nonce-3"]);
}

#[test]
fn reissued_token_revokes_the_older_one_and_enrolls() {
    let reissued = node().active().admin(reissue(false)).expect("active");
    assert_eq!(reissued.refuses(&agent(), enrollment()), refused(EnrollmentTokenFault::Mismatch));
    assert_eq!(reissued.refuses(&agent(), recover(recovery(2))), refused(EnrollmentTokenFault::Mismatch));
    let new = IdentityRecovery { token_sha256: [8; 32], ..recovery(2) };
    assert_eq!(reissued.refuses(&agent(), recover(new)), refused(EnrollmentTokenFault::FirstBoot));
    let reissued = reissued.agent(poll());
    let Request::Enroll(mut again) = enrollment() else { panic!("an enrollment") };
    (again.token_sha256, again.issued) = ([8; 32], certificate("02"));
    let enrolled = reissued.agent(Request::Enroll(again)).expect("active");
    assert_eq!(left(&enrolled), (2, 5));
    assert_eq!(enrolled.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    assert_eq!(enrolled.effects, [Effect::CloseNode(NODE)]);
}

#[test]
fn reissue_revokes_the_certificate_on_request() {
    let revoked = node().active().admin(reissue(true)).expect("active").publishes(&["terminal.cut_off"]);
    assert_eq!(revoked.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    assert_eq!(revoked.effects, [Effect::CloseNode(NODE)]);
}

#[test]
fn remembered_nonces_of_stale_recoveries_are_bounded() {
    let mut story = node().active().agent(recover(recovery(1)));
    let mut refused = 0;
    for n in 2..=255 {
        // A clone, which presents the former generation.
        match story.ask(&agent(), recover(recovery(n))) {
            Ok(step) => story.node = step.next.unwrap(),
            Err(Rejection::TokenRefused { cause: EnrollmentTokenFault::TooManyNonces }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((story.node.identity.spent_nonces.len(), refused), (64, 191));
}

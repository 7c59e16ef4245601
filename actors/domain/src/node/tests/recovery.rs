//! How a node comes back to its identity, and who does not.

use super::*;

fn refused(cause: TokenCause) -> Rejection {
    Rejection::TokenRefused { cause }
}

fn polled_with(serial: &str) -> Command {
    Command::Poll { serial: serial.into() }
}

fn left(story: &Story) -> (u32, u32) {
    (story.node.identity.generation, story.node.identity.recoveries_left)
}

#[test]
fn a_used_token_recovers_an_expired_identity_and_nothing_of_the_old_one_holds() {
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
fn a_recovery_whose_answer_was_lost_is_answered_again_and_counted_once() {
    let recovered = node().active().agent(recover(recovery(2)));
    let again = Recovery { nonce: recovery(3).nonce, issued: certificate("r3"), ..recovery(2) };
    let again = recovered.agent(recover(again));
    assert_eq!(left(&again), (2, 4));
    again.agent(polled_with("r3")).expect("active");
}

#[test]
fn an_enrollment_whose_answer_was_lost_is_recovered_from_its_first_generation() {
    let recovered = node().enrolled().agent(recover(recovery(2))).expect("enrolling");
    recovered.agent(polled_with("r2")).expect("active");
}

#[test]
fn an_old_generation_with_token_and_signature_means_a_clone() {
    let recovered = node().active().agent(recover(recovery(2)));
    let cloned = recovered.agent(recover(recovery(3))).expect("quarantined");
    assert_eq!((cloned.reply.clone(), cloned.node.reason.code.as_str()), (Reply::CloneSuspected, "clone_suspected"));
    assert_eq!(left(&cloned), (2, 4), "it got nothing");
    assert_eq!(cloned.refuses(&agent(), polled_with("r3")), Rejection::CertificateUnknown);
    cloned.agent(recover(recovery(4))).expect("quarantined");
}

#[test]
fn a_recovery_sent_twice_at_once_is_one_recovery_and_no_clone() {
    let recovered = node().active().agent(recover(recovery(2)));
    assert_eq!(recovered.refuses(&agent(), recover(recovery(2))), refused(TokenCause::NonceSpent));
    recovered.expect("active");
}

#[test]
fn what_does_not_hold_recovers_nothing_and_changes_nothing() {
    let active = node().active();
    let cases = [
        (Recovery { token_sha256: [9; 32], ..recovery(2) }, TokenCause::Mismatch),
        (Recovery { verified_with: "other".into(), ..recovery(2) }, TokenCause::KeyDiffers),
        (Recovery { nonce: Nonce { until: start(), ..recovery(2).nonce }, ..recovery(2) }, TokenCause::NonceExpired),
        (Recovery { identity_generation: 2, ..recovery(2) }, TokenCause::GenerationUnknown),
        (Recovery { identity_generation: u32::MAX, ..recovery(2) }, TokenCause::GenerationUnknown),
    ];
    for (asked, cause) in cases {
        assert_eq!(active.refuses(&agent(), recover(asked)), refused(cause));
    }
    assert_eq!(node().refuses(&agent(), recover(recovery(2))), refused(TokenCause::NoneIssued));
    assert_eq!(node().invited().refuses(&agent(), recover(recovery(2))), refused(TokenCause::FirstBoot));
    let removed = node().active().retired().removing();
    assert_eq!(removed.refuses(&agent(), recover(recovery(2))), Rejection::Removed);
}

#[test]
fn recoveries_are_counted() {
    let once = node().policy(Key::NodeMaxRecoveries, 1).active().agent(recover(recovery(2)));
    let next = Recovery { identity_generation: 2, ..recovery(3) };
    assert_eq!(once.refuses(&agent(), recover(next)), refused(TokenCause::RecoveriesUsedUp));
    let never = node().policy(Key::NodeMaxRecoveries, 0).active();
    assert_eq!(never.refuses(&agent(), recover(recovery(2))), refused(TokenCause::RecoveriesUsedUp));
}

#[test]
fn a_spent_nonce_is_remembered_until_it_would_have_ended_and_no_longer() {
    let short = |n: u8| Nonce { until: start() + TimeDelta::seconds(60), ..recovery(n).nonce };
    let first = node().active().agent(recover(Recovery { nonce: short(2), ..recovery(2) }));
    let later = first.after(TimeDelta::seconds(61));
    let next = Recovery { identity_generation: 2, ..recovery(3) };
    let second = later.agent(recover(next));
    assert_eq!(second.node.identity.spent_nonces.keys().collect::<Vec<_>>(), ["nonce-3"]);
}

#[test]
fn a_token_issued_anew_voids_the_older_one_and_is_for_enrollment() {
    let reissued = node().active().admin(reissue(false)).expect("active");
    assert_eq!(reissued.refuses(&agent(), enrollment()), refused(TokenCause::Mismatch));
    assert_eq!(reissued.refuses(&agent(), recover(recovery(2))), refused(TokenCause::Mismatch));
    let new = Recovery { token_sha256: [8; 32], ..recovery(2) };
    assert_eq!(reissued.refuses(&agent(), recover(new)), refused(TokenCause::FirstBoot));
    let reissued = reissued.agent(poll());
    let Command::Enroll(mut again) = enrollment() else { panic!("an enrollment") };
    (again.token_sha256, again.issued) = ([8; 32], certificate("02"));
    let enrolled = reissued.agent(Command::Enroll(again)).expect("active");
    assert_eq!(left(&enrolled), (2, 5));
    assert_eq!(enrolled.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    assert_eq!(enrolled.effects, [Effect::CloseNode(NODE)]);
}

#[test]
fn a_reissue_revokes_the_certificate_where_it_is_told_to() {
    let revoked = node().active().admin(reissue(true)).expect("active").says(&["terminal.cut_off"]);
    assert_eq!(revoked.refuses(&agent(), poll()), Rejection::CertificateUnknown);
    assert_eq!(revoked.effects, [Effect::CloseNode(NODE)]);
}

#[test]
fn recoveries_with_an_old_state_fill_the_record_with_no_more_than_a_few_nonces() {
    let mut story = node().active().agent(recover(recovery(1)));
    let mut refused = 0;
    for n in 2..=255 {
        // A clone, whose generation is the one before.
        match story.ask(&agent(), recover(recovery(n))) {
            Ok(step) => story.node = step.next.unwrap(),
            Err(Rejection::TokenRefused { cause: TokenCause::TooManyNonces }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!((story.node.identity.spent_nonces.len(), refused), (64, 191));
}

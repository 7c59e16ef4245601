use super::*;
use crate::authz::{CallerIdentity, TokenRole, authorize};
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
use crate::state_machine::Command as _;
use uuid::Uuid;

fn person(user_id: &str, roles: &[TokenRole]) -> Principal {
    Principal::Caller(CallerIdentity {
        org_id: Some("acme".into()),
        ..CallerIdentity::new(user_id, roles.iter().copied())
    })
}

fn ann() -> Principal {
    person("ann", &[TokenRole::User])
}

fn replica() -> Principal {
    Principal::system("console")
}

/// A number of seconds after the login.
fn after(seconds: i64) -> Timestamp {
    Timestamp::UNIX_EPOCH + TimeDelta::seconds(seconds)
}

fn decide(
    by: &Principal,
    state: Option<&BrowserSession>,
    command: impl Into<Command>,
    now: Timestamp,
) -> Result<Transition<BrowserSession>, Rejection> {
    decide_under(&PolicyBook::default(), by, state, command, now)
}

fn decide_under(
    policy: &PolicyBook,
    by: &Principal,
    state: Option<&BrowserSession>,
    command: impl Into<Command>,
    now: Timestamp,
) -> Result<Transition<BrowserSession>, Rejection> {
    let command = command.into();
    assert!(authorize(by, command.action()).is_ok(), "{by} may not {command:?}");
    let ctx = TransitionContext { id: Uuid::from_u128(7), ..TransitionContext::in_test(now, policy, by) };
    BrowserSession::decide(state, command, &ctx)
}

fn opening() -> Request {
    Request::Open(Box::new(Opening {
        secret_sha256: SecretDigest([1; 32]),
        subject: "sub-ann".into(),
        provider_session: Some("sid-1".into()),
        authenticated_at: after(0),
        place: Place { address: "192.0.2.7".into(), user_agent: "Firefox".into() },
        tokens_enc: "sealed".into(),
        token_ends_at: after(300),
    }))
}

fn opened() -> BrowserSession {
    decide(&ann(), None, opening(), after(0)).unwrap().next.unwrap()
}

fn begin() -> Instruction {
    Instruction::BeginRefresh { token_ends_at: after(300) }
}

fn finish(attempt: u32) -> Instruction {
    Instruction::FinishRefresh { attempt, tokens_enc: "fresh".into(), token_ends_at: after(600) }
}

#[track_caller]
fn ended(step: Transition<BrowserSession>) -> BrowserSession {
    let session = step.next.expect("it ends");
    let code = session.ended.as_ref().expect("it has ended").reason.code();
    let event = Event::BrowserSessionEnded {
        browser_session_id: session.id,
        user_id: session.owner.user_id.clone(),
        reason: code.to_owned(),
    };
    assert_eq!(step.events, [event]);
    assert_eq!(
        (step.audit[0].action, &step.audit[0].metadata["code"]),
        (AuditAction::BrowserSessionsEnd, &json!(code))
    );
    assert_eq!(session.tokens_enc, None, "its tokens are removed");
    assert!(session.violations(&[]).is_empty());
    session
}

#[test]
fn login_is_audited_with_its_place_and_completed_once() {
    let step = decide(&ann(), None, opening(), after(0)).unwrap();
    let place = json!({ "user_id": "ann", "address": "192.0.2.7", "user_agent": "Firefox" });
    assert_eq!((step.audit[0].action, &step.audit[0].metadata), (AuditAction::BrowserSessionsOpen, &place));
    let session = step.next.unwrap();
    assert_eq!((session.state(), session.idle_ends_at, session.ends_at), ("active", after(28_800), after(86_400)));
    assert_eq!(session.terms(), ["oidc-sid/sid-1".to_owned(), "oidc-sub/sub-ann".to_owned()].into());
    assert_eq!(decide(&ann(), Some(&session), opening(), after(1)).unwrap_err(), Rejection::Exists);
    assert_eq!(decide(&replica(), None, Instruction::Touch, after(1)).unwrap_err(), Rejection::NotFound);
}

#[test]
fn session_is_ended_by_its_user_and_administrators_and_by_no_other_user() {
    let session = opened();
    let bob = person("bob", &[TokenRole::User]);
    assert_eq!(decide(&bob, Some(&session), Request::EndByUser, after(1)).unwrap_err(), Rejection::NotFound);
    let over = ended(decide(&ann(), Some(&session), Request::EndByUser, after(1)).unwrap());
    assert_eq!(over.end_at(after(1)), Some("ended_by_user"));
    assert_eq!(over.terms(), BTreeSet::new());
    let root = person("root", &[TokenRole::Admin]);
    let by_admin = Request::EndByAdministrator { reason: "a stolen laptop".into() };
    let step = decide(&root, Some(&session), by_admin.clone(), after(1)).unwrap();
    assert_eq!(step.audit[0].metadata["reason"], "a stolen laptop");
    ended(step);
    assert!(authorize(&ann(), state_machine::Request::action(&by_admin)).is_err());
    let again = decide(&ann(), Some(&over), Request::EndByUser, after(2)).unwrap();
    assert!(again.next.is_none() && again.events.is_empty() && again.audit.is_empty());
}

#[test]
fn session_ends_after_a_pause_and_at_the_end_of_its_lifetime_however_it_is_used() {
    let session = opened();
    assert_eq!((session.end_at(after(28_799)), session.end_at(after(28_800))), (None, Some("idle")));
    assert_eq!(
        ended(decide(&replica(), Some(&session), Command::TICK, after(28_800)).unwrap()).end_at(after(0)),
        Some("idle")
    );
    // A request that comes too late does not revive it.
    ended(decide(&replica(), Some(&session), Instruction::Touch, after(28_800)).unwrap());
    let mut used = session;
    for hours in 1..24 {
        used = decide(&replica(), Some(&used), Instruction::Touch, after(hours * 3600)).unwrap().next.unwrap();
    }
    assert_eq!((used.last_seen_at, used.end_at(after(86_399))), (after(23 * 3600), None));
    assert_eq!(used.deadline().unwrap().at, after(86_400));
    let over = ended(decide(&replica(), Some(&used), Command::TICK, after(86_400)).unwrap());
    assert_eq!(over.ended.unwrap().reason, EndReason::Lifetime);
}

#[test]
fn two_replicas_that_need_a_token_cause_one_refresh() {
    let step = decide(&replica(), Some(&opened()), begin(), after(290)).unwrap();
    let leased = step.next.unwrap();
    assert!(matches!(step.reply, Reply::Leased { attempt: 1, .. }));
    let second = decide(&replica(), Some(&leased), begin(), after(291)).unwrap();
    assert_eq!((second.reply, second.next), (Reply::Wait, None));
    let fresh = decide(&replica(), Some(&leased), finish(1), after(292)).unwrap().next.unwrap();
    assert_eq!((fresh.tokens_enc.as_deref(), fresh.token_ends_at), (Some("fresh"), after(600)));
    // One that read the session before the refresh gets the fresh tokens.
    let late = decide(&replica(), Some(&fresh), begin(), after(300)).unwrap();
    assert!(late.next.is_none() && matches!(late.reply, Reply::Session { .. }));
}

#[test]
fn refresh_of_a_killed_replica_is_begun_again_after_its_lease_and_a_notice() {
    let leased = decide(&replica(), Some(&opened()), begin(), after(290)).unwrap().next.unwrap();
    let early = decide(&replica(), Some(&leased), begin(), after(304)).unwrap();
    assert_eq!((early.reply, early.next), (Reply::Wait, None));
    let notice = decide(&replica(), Some(&leased), begin(), after(305)).unwrap();
    assert_eq!(notice.reply, Reply::Wait);
    let overdue = notice.next.unwrap();
    let waits = decide(&replica(), Some(&overdue), begin(), after(316)).unwrap();
    assert_eq!((waits.reply, waits.next), (Reply::Wait, None));
    let step = decide(&replica(), Some(&overdue), begin(), after(317)).unwrap();
    assert!(matches!(step.reply, Reply::Leased { attempt: 2, .. }));
    let second = step.next.unwrap();
    // What the first one reports after all is for its own lease.
    for stale in [
        finish(1),
        Instruction::FailRefresh { attempt: 1 },
        Instruction::RefuseRefresh { attempt: 1, error: "x".into() },
    ] {
        let step = decide(&replica(), Some(&second), stale, after(318)).unwrap();
        assert!(step.next.is_none() && step.events.is_empty());
    }
}

#[test]
fn tokens_that_could_not_be_stored_within_the_lease_are_stored_after_the_outage_and_the_spent_ones_are_not_sent() {
    let leased = decide(&replica(), Some(&opened()), begin(), after(290)).unwrap().next.unwrap();
    // Nothing could be stored for ten minutes. Another tab comes first.
    let notice = decide(&replica(), Some(&leased), begin(), after(890)).unwrap();
    assert_eq!(notice.reply, Reply::Wait, "the spent refresh token would be sent");
    let fresh = decide(&replica(), notice.next.as_ref(), finish(1), after(901)).unwrap().next.unwrap();
    assert_eq!((fresh.tokens_enc.as_deref(), fresh.token_ends_at), (Some("fresh"), after(600)));
    // A lease of a release that gave no notice has had none.
    let stored = serde_json::to_value(leased.refresh).unwrap();
    assert_eq!(stored.get("is_overdue"), None);
    assert_eq!(serde_json::from_value::<RefreshState>(stored).unwrap(), leased.refresh);
}

#[test]
fn refused_refresh_ends_the_session_and_an_outage_does_not() {
    let leased = decide(&replica(), Some(&opened()), begin(), after(290)).unwrap().next.unwrap();
    let refused = Instruction::RefuseRefresh { attempt: 1, error: "invalid_grant".into() };
    let step = decide(&replica(), Some(&leased), refused, after(291)).unwrap();
    assert_eq!(step.audit[0].metadata["provider_error"], "invalid_grant");
    ended(step);
    let waits =
        decide(&replica(), Some(&leased), Instruction::FailRefresh { attempt: 1 }, after(291)).unwrap().next.unwrap();
    assert!(waits.is_active() && waits.tokens_enc.is_some());
    assert_eq!(decide(&replica(), Some(&waits), begin(), after(291)).unwrap().reply, Reply::Wait);
    assert!(matches!(decide(&replica(), Some(&waits), begin(), after(292)).unwrap().reply, Reply::Leased { .. }));
}

#[test]
fn logout_at_the_provider_ends_earlier_logins_alone() {
    let logout = |issued: i64| Instruction::EndByProvider { token_sha256: "0f".into(), issued_at: after(issued) };
    let session = opened();
    let over = ended(decide(&replica(), Some(&session), logout(10), after(11)).unwrap());
    assert_eq!(over.terms(), ["oidc-logout/0f".to_owned()].into());
    let replayed = decide(&replica(), Some(&session), logout(-1), after(11)).unwrap();
    assert!(replayed.next.is_none(), "the login is later than the token");
}

#[test]
fn ended_session_refuses_what_would_use_its_tokens() {
    let over = ended(decide(&replica(), Some(&opened()), Instruction::LogOut, after(1)).unwrap());
    for instruction in [Instruction::Touch, begin(), finish(1)] {
        let refused = decide(&replica(), Some(&over), instruction, after(2)).unwrap_err();
        assert_eq!(refused, Rejection::Ended { reason: "logged_out".into() });
    }
    assert!(decide(&replica(), Some(&over), Command::TICK, after(90_000)).unwrap().next.is_none());
    assert_eq!(over.deadline(), None);
}

#[test]
fn resealed_tokens_do_not_replace_refreshed_ones() {
    let reseal = |before: &str| Maintenance::Reseal { before: before.into(), tokens_enc: "resealed".into() };
    let session = opened();
    let resealed = decide(&replica(), Some(&session), reseal("sealed"), after(1)).unwrap().next.unwrap();
    assert_eq!(resealed.tokens_enc.as_deref(), Some("resealed"));
    let leased = decide(&replica(), Some(&session), begin(), after(1)).unwrap().next.unwrap();
    let fresh = decide(&replica(), Some(&leased), finish(1), after(2)).unwrap().next.unwrap();
    assert!(decide(&replica(), Some(&fresh), reseal("sealed"), after(3)).unwrap().next.is_none());
    let over = ended(decide(&replica(), Some(&session), Instruction::LogOut, after(1)).unwrap());
    assert!(decide(&replica(), Some(&over), reseal("sealed"), after(2)).unwrap().next.is_none());
}

#[test]
fn hash_of_the_secret_is_not_in_debug_output() {
    assert!(!format!("{:?}", opened()).contains("[1, 1"));
}

/// A policy of the user in force since the login.
fn policies(values: &[(PolicyKey, i64)]) -> PolicyBook {
    let mut book = PolicyBook::default();
    for (key, value) in values {
        book.set(*key, PolicyScope::UserId("ann".into()), after(0), PolicyValue::Int(*value)).unwrap();
    }
    book
}

#[test]
fn shorter_limits_hold_from_the_next_request_and_longer_ones_for_the_pause_alone() {
    let (idle, lifetime) = (PolicyKey::AuthBrowserSessionIdle, PolicyKey::AuthBrowserSessionMaxTtl);
    let session = opened();
    let touched = |values: &[(PolicyKey, i64)]| {
        let step = decide_under(&policies(values), &replica(), Some(&session), Instruction::Touch, after(600));
        step.unwrap().next.unwrap()
    };
    let shorter = touched(&[(idle, 300), (lifetime, 3600)]);
    assert_eq!((shorter.idle_ends_at, shorter.ends_at), (after(900), after(3600)));
    let longer = touched(&[(idle, 36_000), (lifetime, 172_800)]);
    assert_eq!((longer.idle_ends_at, longer.ends_at), (after(36_600), after(86_400)), "a login is not prolonged");
    // One that is over under the new lifetime is refused from then on, and ended by its timer.
    let over = touched(&[(lifetime, 300)]);
    assert_eq!(over.end_at(after(600)), Some("lifetime"));
    assert_eq!(over.deadline().unwrap().at, after(300));
}

#[test]
fn timer_that_fires_early_ends_nothing_and_a_late_one_names_the_lifetime() {
    let session = opened();
    assert_eq!(session.deadline().unwrap().at, after(28_800));
    let early = decide(&replica(), Some(&session), Command::TICK, after(28_799)).unwrap();
    assert_eq!((early.reply, early.next), (Reply::Done, None));
    // Nothing ran for more than a day: requests and the timer agree.
    let late = after(90_000);
    assert_eq!(session.end_at(late), Some("lifetime"));
    let over = ended(decide(&replica(), Some(&session), Command::TICK, late).unwrap());
    assert_eq!(over.ended.unwrap().reason, EndReason::Lifetime);
}

#[test]
fn refresh_has_a_pause_after_it_and_a_number_of_its_own() {
    let leased = decide(&replica(), Some(&opened()), begin(), after(290)).unwrap().next.unwrap();
    let fresh = decide(&replica(), Some(&leased), finish(1), after(292)).unwrap().next.unwrap();
    let next = Instruction::BeginRefresh { token_ends_at: after(600) };
    assert_eq!(decide(&replica(), Some(&fresh), next.clone(), after(292)).unwrap().reply, Reply::Wait);
    let step = decide(&replica(), Some(&fresh), next, after(293)).unwrap();
    assert!(matches!(step.reply, Reply::Leased { attempt: 2, .. }));
    // An answer that comes twice is applied once.
    assert!(decide(&replica(), Some(&fresh), finish(1), after(293)).unwrap().next.is_none());
}

#[test]
fn end_during_a_refresh_refuses_its_tokens() {
    let leased = decide(&replica(), Some(&opened()), begin(), after(290)).unwrap().next.unwrap();
    let over = ended(decide(&ann(), Some(&leased), Request::EndByUser, after(291)).unwrap());
    assert_eq!(over.refresh, RefreshState::Idle { not_before: after(291) });
    let refused = decide(&replica(), Some(&over), finish(1), after(292)).unwrap_err();
    assert_eq!(refused, Rejection::Ended { reason: "ended_by_user".into() });
    for late in [Instruction::FailRefresh { attempt: 1 }, Instruction::RefuseRefresh { attempt: 1, error: "x".into() }]
    {
        let step = decide(&replica(), Some(&over), late, after(292)).unwrap();
        assert!(step.next.is_none() && step.events.is_empty() && step.audit.is_empty());
    }
    // Tokens in an ended session would be a violation.
    let kept = BrowserSession { tokens_enc: Some("sealed".into()), ..over };
    assert_eq!(kept.violations(&[]), [Invariant::I6]);
}

#[test]
fn first_end_stays_whatever_ends_it_again() {
    let logout = || Instruction::EndByProvider { token_sha256: "0f".into(), issued_at: after(9) };
    let over = ended(decide(&replica(), Some(&opened()), Instruction::Displace, after(1)).unwrap());
    assert_eq!((over.end_at(after(1)), over.terms()), (Some("displaced"), BTreeSet::new()));
    let root = person("root", &[TokenRole::Admin]);
    let by_admin = Request::EndByAdministrator { reason: "x".into() };
    for (by, again) in [
        (replica(), Command::from(Instruction::LogOut)),
        (replica(), Instruction::Displace.into()),
        (replica(), logout().into()),
        (root, by_admin.into()),
    ] {
        let step = decide(&by, Some(&over), again, after(10)).unwrap();
        assert!(step.next.is_none() && step.events.is_empty() && step.audit.is_empty());
    }
}

#[test]
fn logout_at_the_provider_in_the_second_of_the_login_ends_it() {
    let at_once = Instruction::EndByProvider { token_sha256: "0f".into(), issued_at: after(0) };
    let over = ended(decide(&replica(), Some(&opened()), at_once, after(1)).unwrap());
    assert_eq!(over.end_at(after(1)), Some("provider_logout"));
}

#[test]
fn session_is_found_by_its_user_and_its_place_in_the_provider_while_it_is_active() {
    let session = opened();
    assert_eq!(session.keys(), IndexKeys { owner: Some("ann".into()), ..IndexKeys::default() });
    let without = BrowserSession { provider_session: None, ..session };
    assert_eq!(without.terms(), ["oidc-sub/sub-ann".to_owned()].into());
    assert!(without.is_transient() && without.violations(&[]).is_empty());
}

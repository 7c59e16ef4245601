use super::*;
use crate::authz::Principal;
use crate::policy::Scopes;
use proptest::prelude::*;
use uuid::Uuid;

const KEY: PolicyKey = PolicyKey::AllocationMaxConcurrent;

fn at(second: i64) -> Timestamp {
    Timestamp::from_timestamp(1_000_000 + second, 0).unwrap()
}

fn new(value: i64) -> PolicyWrite {
    PolicyWrite {
        scope: PolicyScope::Global,
        key: KEY,
        value: PolicyValue::Int(value),
        effective_at: None,
        reason: "a test".into(),
        expected: ExpectedValue::Anything,
    }
}

fn decide(
    state: Option<&ScopeValues>,
    new: PolicyWrite,
    now: i64,
    policy: &PolicyBook,
) -> Result<Transition<ScopeValues>, Rejection> {
    ask(state, Command::Write(Box::new(new)), now, policy)
}

fn ask(
    state: Option<&ScopeValues>,
    command: Command,
    now: i64,
    policy: &PolicyBook,
) -> Result<Transition<ScopeValues>, Rejection> {
    let by = Principal::system("test");
    let ctx = TransitionContext {
        seed: now.unsigned_abs().into(),
        id: Uuid::from_u128(1),
        ..TransitionContext::in_test(at(now), policy, &by)
    };
    ScopeValues::decide(state, command, &ctx)
}

fn in_force() -> PolicyRevocation {
    PolicyRevocation { key: KEY, effective_at: None, reason: "a test".into(), expected: ExpectedValue::Anything }
}

fn revoke(state: &ScopeValues, what: PolicyRevocation, now: i64) -> Result<ScopeValues, Rejection> {
    Ok(ask(Some(state), Command::TakeBack(what), now, &PolicyBook::default())?.next.unwrap())
}

fn write(state: Option<&ScopeValues>, new: PolicyWrite, now: i64) -> Result<ScopeValues, Rejection> {
    Ok(decide(state, new, now, &PolicyBook::default())?.next.unwrap())
}

fn holds_at(values: &ScopeValues, second: i64) -> PolicyValue {
    let mut book = PolicyBook::default();
    assert!(values.enter(&mut book).is_empty());
    book.resolve(KEY, &Scopes::global(), at(second)).0
}

#[test]
fn written_value_records_author_reason_and_replaced_value() {
    let first = write(None, new(10), 0).unwrap();
    let step = decide(Some(&first), new(20), 5, &PolicyBook::default()).unwrap();
    let Reply::Written { scope: PolicyScope::Global, written } = step.reply else { panic!("another reply") };
    assert_eq!(
        (written.old_value, written.value, written.effective_at),
        (Some(PolicyValue::Int(10)), PolicyValue::Int(20), at(5))
    );
    assert_eq!((written.written_by.as_str(), written.written_at), ("system:test", at(5)));
    let metadata = &step.audit[0].metadata;
    assert_eq!((&metadata["policy_key"], &metadata["reason"]), (&json!(KEY.name()), &json!("a test")));
    assert_eq!((&metadata["old_value"], &metadata["new_value"]), (&json!(10), &json!(20)));
    assert_eq!(step.events[0].subject(), "policy.invalidate.allocation.max_concurrent_per_user");
    assert_eq!(step.effects, [Effect::ReadPolicy]);
}

#[test]
fn later_write_wins_although_its_members_clock_is_behind() {
    let first = write(None, new(10), 30).unwrap();
    let expecting = PolicyWrite { expected: ExpectedValue::This(PolicyValue::Int(10)), ..new(20) };
    let second = write(Some(&first), expecting, 28).unwrap();
    assert_eq!((holds_at(&second, 30), holds_at(&second, 90)), (PolicyValue::Int(20), PolicyValue::Int(20)));
    let gone = revoke(&second, in_force(), 27).unwrap();
    assert_eq!(holds_at(&gone, 90), KEY.default_value());
    // A clock that was wrong by more than that delays no writer.
    let astray = write(None, new(10), 5000).unwrap();
    assert_eq!(holds_at(&write(Some(&astray), new(20), 30).unwrap(), 30), PolicyValue::Int(20));
}

#[test]
fn inadmissible_value_is_rejected_before_the_write() {
    for value in [
        PolicyValue::Int(-1),
        PolicyValue::Int(10_001),
        PolicyValue::Int(i64::MAX),
        PolicyValue::Bool(true),
        PolicyValue::Text("7".into()),
    ] {
        let refused = write(None, PolicyWrite { value: value.clone(), ..new(0) }, 0);
        assert_eq!(refused, Err(Rejection::OutOfBounds { key: KEY, value }));
    }
    for value in [0, 10_000] {
        assert!(write(None, new(value), 0).is_ok());
    }
}

#[test]
fn of_several_writers_that_expect_the_same_value_one_wins() {
    let first = write(None, PolicyWrite { expected: ExpectedValue::Nothing, ..new(10) }, 0).unwrap();
    let refused = write(Some(&first), PolicyWrite { expected: ExpectedValue::Nothing, ..new(11) }, 0);
    assert_eq!(refused, Err(Rejection::Differs { key: KEY, current: Some(PolicyValue::Int(10)) }));
    let expecting = |value| PolicyWrite { expected: ExpectedValue::This(PolicyValue::Int(10)), ..new(value) };
    let second = write(Some(&first), expecting(20), 1).unwrap();
    assert_eq!(
        write(Some(&second), expecting(21), 1),
        Err(Rejection::Differs { key: KEY, current: Some(PolicyValue::Int(20)) })
    );
    // The same for one instant ahead.
    let ahead = |value| PolicyWrite {
        effective_at: Some(at(60)),
        expected: ExpectedValue::This(PolicyValue::Int(20)),
        ..new(value)
    };
    let third = write(Some(&second), ahead(30), 2).unwrap();
    assert_eq!(
        write(Some(&third), ahead(31), 2),
        Err(Rejection::Differs { key: KEY, current: Some(PolicyValue::Int(30)) })
    );
}

#[test]
fn effective_at_beyond_the_tolerances_is_rejected() {
    let when = |at| PolicyWrite { effective_at: Some(at), ..new(7) };
    assert_eq!(write(None, when(at(-61)), 0), Err(Rejection::Past { now: at(0) }));
    assert_eq!(write(None, when(at(-60)), 0).unwrap().values[0].effective_at, at(0));
    let latest = at(0) + EFFECTIVE_AT_HORIZON;
    assert!(write(None, when(latest), 0).is_ok());
    assert_eq!(write(None, when(latest + TimeDelta::seconds(1)), 0), Err(Rejection::TooFarAhead { latest }));
    let fine = at(5) + TimeDelta::nanoseconds(1_234_567);
    let stored = write(None, when(fine), 0).unwrap().values[0].effective_at;
    assert_eq!(stored, at(5) + TimeDelta::microseconds(1234));
}

#[test]
fn revoked_value_ends_and_the_superseded_one_does_not_return() {
    let ahead = |value, second| PolicyWrite { effective_at: Some(at(second)), ..new(value) };
    let values = write(None, new(10), 0).unwrap();
    let values = write(Some(&values), ahead(20, 5), 1).unwrap();
    let values = write(Some(&values), ahead(30, 60), 1).unwrap();
    let left = revoke(&values, in_force(), 6).unwrap();
    assert_eq!((holds_at(&left, 6), holds_at(&left, 60)), (KEY.default_value(), PolicyValue::Int(30)));
    // One that lies ahead is named by its instant; those before it stay.
    let this = |second| PolicyRevocation { effective_at: Some(at(second)), ..in_force() };
    let left = revoke(&values, this(60), 6).unwrap();
    assert_eq!((holds_at(&left, 6), holds_at(&left, 60)), (PolicyValue::Int(20), PolicyValue::Int(20)));
    // So may be the one in force.
    assert_eq!(holds_at(&revoke(&values, this(5), 6).unwrap(), 6), KEY.default_value());
    let not_set = Err(Rejection::NotSet { key: KEY });
    for nothing in [this(0), this(7), this(61)] {
        assert_eq!(revoke(&values, nothing, 6), not_set);
    }
    assert_eq!(
        revoke(&left, PolicyRevocation { key: PolicyKey::MaasEnabled, ..in_force() }, 6).err(),
        Some(Rejection::NotSet { key: PolicyKey::MaasEnabled })
    );
    assert_eq!(
        ask(None, Command::TakeBack(in_force()), 0, &PolicyBook::default()).err(),
        Some(Rejection::NotSet { key: KEY })
    );
}

#[test]
fn value_is_revoked_only_as_expected_and_the_revocation_is_audited_and_published() {
    let values = write(None, new(10), 0).unwrap();
    for wrong in [ExpectedValue::Nothing, ExpectedValue::This(PolicyValue::Int(11))] {
        let refused = revoke(&values, PolicyRevocation { expected: wrong, ..in_force() }, 1);
        assert_eq!(refused, Err(Rejection::Differs { key: KEY, current: Some(PolicyValue::Int(10)) }));
    }
    let right = PolicyRevocation {
        expected: ExpectedValue::This(PolicyValue::Int(10)),
        reason: "a trial ended".into(),
        ..in_force()
    };
    let step = ask(Some(&values), Command::TakeBack(right), 1, &PolicyBook::default()).unwrap();
    let [audit] = step.audit.as_slice() else { panic!("{:?}", step.audit) };
    assert_eq!((audit.action, &audit.metadata["reason"]), (AuditAction::PoliciesTakeBack, &json!("a trial ended")));
    assert_eq!((&audit.metadata["old_value"], &audit.metadata["new_value"]), (&json!(10), &json!(null)));
    assert_eq!(step.events[0].subject(), KEY.invalidation());
    assert_eq!(step.effects, [Effect::ReadPolicy]);
}

#[test]
fn value_that_keeps_two_keys_in_order_is_not_revoked() {
    let (low, high) = (PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit);
    let deposit = |key, value| PolicyWrite { key, value: PolicyValue::Int(value), ..new(0) };
    let values = write(None, deposit(high, 500_000), 0).unwrap();
    let values = write(Some(&values), deposit(low, 200_000), 0).unwrap();
    let refused = revoke(&values, PolicyRevocation { key: high, ..in_force() }, 1);
    assert!(matches!(refused, Err(Rejection::Crosses { key, .. }) if key == high), "{refused:?}");
    let left = revoke(&values, PolicyRevocation { key: low, ..in_force() }, 1).unwrap();
    assert!(revoke(&left, PolicyRevocation { key: high, ..in_force() }, 1).unwrap().values.is_empty());
}

#[test]
fn future_values_are_bounded_and_the_same_instant_counts_once() {
    let ahead = |key, second| PolicyWrite { key, effective_at: Some(at(second)), ..new(7) };
    let mut values = write(None, new(1), 0).unwrap();
    for second in 1..=MAX_PENDING_PER_KEY as i64 {
        values = write(Some(&values), ahead(KEY, second), 0).unwrap();
    }
    assert_eq!(write(Some(&values), ahead(KEY, 1000), 0), Err(Rejection::TooManyAhead { limit: MAX_PENDING_PER_KEY }));
    let replaced = write(Some(&values), PolicyWrite { value: PolicyValue::Int(9), ..ahead(KEY, 20) }, 0).unwrap();
    assert_eq!((replaced.values.len(), holds_at(&replaced, 20)), (MAX_PENDING_PER_KEY + 1, PolicyValue::Int(9)));
    // When they have come to pass there is room again.
    let later = write(Some(&values), ahead(KEY, 1000), 20).unwrap();
    assert_eq!(later.values.len(), 2);
    let keys: Vec<PolicyKey> =
        PolicyKey::ALL.iter().copied().filter(|key| *key != KEY && key.admits(&PolicyValue::Int(300))).collect();
    let mut refused = None;
    for (n, key) in keys.iter().flat_map(|key| [key; 19]).enumerate() {
        let second = i64::try_from(n).unwrap() + 100;
        match write(Some(&values), PolicyWrite { value: PolicyValue::Int(300), ..ahead(*key, second) }, 0) {
            Ok(next) => values = next,
            Err(Rejection::Crosses { .. }) => {}
            Err(rejection) => refused = Some(rejection),
        }
    }
    assert_eq!(refused, Some(Rejection::TooManyAhead { limit: MAX_PENDING }));
}

#[test]
fn scopes_with_values_are_bounded() {
    let mut book = PolicyBook::default();
    for n in 0..MAX_SCOPES {
        book.set(KEY, PolicyScope::UserId(format!("user {n}").into()), at(0), PolicyValue::Int(1)).unwrap();
    }
    assert_eq!(decide(None, new(1), 0, &book).err(), Some(Rejection::TooManyScopes { limit: MAX_SCOPES }));
    let existing = write(None, new(1), 0).unwrap();
    assert!(decide(Some(&existing), new(2), 1, &book).is_ok());
}

#[test]
fn minimum_deposit_never_exceeds_the_maximum_for_any_subject_at_any_time() {
    let (low, high) = (PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit);
    let deposit = |scope: &PolicyScope, key, value, second| PolicyWrite {
        scope: scope.clone(),
        key,
        value: PolicyValue::Int(value),
        effective_at: Some(at(second)),
        ..new(0)
    };
    let (org, user) = (PolicyScope::OrgId("acme".into()), PolicyScope::UserId("ann".into()));
    let mut book = PolicyBook::default();
    let crosses = |answer: Result<Transition<ScopeValues>, Rejection>, second| match answer {
        Err(Rejection::Crosses { crossing, .. }) => assert_eq!(crossing.at, at(second)),
        other => panic!("{:?}", other.map(|step| step.why)),
    };
    // Against the default of the other key.
    crosses(decide(None, deposit(&org, high, 999, 10), 0, &book), 10);
    crosses(decide(None, deposit(&org, low, 100_001, 10), 0, &book), 10);
    assert!(decide(None, deposit(&org, high, 1000, 10), 0, &book).is_ok());
    // Against a less specific scope, from the instant at which they meet.
    book.set(high, org.clone(), at(50), PolicyValue::Int(5000)).unwrap();
    crosses(decide(None, deposit(&user, low, 5001, 10), 0, &book), 50);
    // Against a more specific one, and against what the scope itself has ahead.
    book.set(low, user.clone(), at(0), PolicyValue::Int(4000)).unwrap();
    crosses(decide(None, deposit(&PolicyScope::Global, high, 3999, 10), 0, &book), 10);
    let ahead = decide(None, deposit(&user, high, 4500, 30), 0, &book).unwrap().next.unwrap();
    crosses(decide(Some(&ahead), deposit(&user, low, 4600, 5), 0, &book), 30);
    assert!(decide(Some(&ahead), deposit(&user, low, 4500, 5), 0, &book).is_ok());
}

#[test]
fn values_of_another_release_are_stored_and_left_out_of_the_book() {
    let mut values = write(None, new(5), 0).unwrap();
    let foreign = PolicyVersion { key: "of.another_release".into(), ..values.values[0].clone() };
    values.values.push(PolicyVersion { id: PolicyValueId(Uuid::from_u128(9)), ..foreign });
    let stored = serde_json::to_string(&values).unwrap();
    let read: ScopeValues = serde_json::from_str(&stored).unwrap();
    assert_eq!(read, values);
    assert_eq!(read.enter(&mut PolicyBook::default()), ["of.another_release"]);
    assert_eq!(write(Some(&read), new(6), 9).unwrap().values.len(), 2);
}

proptest! {
    /// Against a model that keeps every write: what holds at any instant from now on is the same.
    #[test]
    fn pruning_preserves_present_and_future_values(writes in prop::collection::vec((0i64..5, 0i64..12, 0i64..100), 1..40)) {
        let mut model: Vec<(Timestamp, i64)> = Vec::new();
        let mut values: Option<ScopeValues> = None;
        let mut now = 0;
        for (passes, ahead, value) in writes {
            now += passes;
            let new = PolicyWrite { effective_at: Some(at(now + ahead)), ..new(value) };
            let next = write(values.as_ref(), new, now).unwrap();
            model.push((at(now + ahead), value));
            // The later write of one instant wins; sorting keeps their order.
            let mut by_time = model.clone();
            by_time.sort_by_key(|(from, _)| *from);
            for second in now..now + 20 {
                let expected = by_time.iter().rfind(|(from, _)| *from <= at(second)).map(|(_, value)| *value);
                if let Some(expected) = expected {
                    prop_assert_eq!(holds_at(&next, second), PolicyValue::Int(expected));
                }
            }
            prop_assert!(next.values.iter().filter(|written| written.effective_at <= at(now)).count() <= 1);
            values = Some(next);
        }
    }
}

#[test]
fn value_for_a_scope_that_its_key_does_not_apply_to_is_refused() {
    let window = |scope| PolicyWrite { scope, key: PolicyKey::BillingWindow, ..new(120) };
    let project = PolicyScope::ProjectId("p".into());
    let refused = write(None, window(project.clone()), 0);
    assert_eq!(refused, Err(Rejection::Scope { key: PolicyKey::BillingWindow, scope: project }));
    let (user, org) = (PolicyScope::UserId("ann".into()), PolicyScope::OrgId("acme".into()));
    for scope in [user, org, PolicyScope::Plan("pro".into()), PolicyScope::Global] {
        write(None, window(scope), 0).unwrap();
    }
}

#[test]
fn stored_value_of_an_inapplicable_scope_is_ignored_and_can_be_revoked() {
    let scope = PolicyScope::ProjectId("p".into());
    let mut stored = write(None, PolicyWrite { scope: scope.clone(), ..new(10) }, 0).unwrap();
    stored.values[0].key = PolicyKey::BillingWindow.name().to_owned();
    let mut book = PolicyBook::default();
    assert_eq!(stored.enter(&mut book), ["billing.window_seconds"]);
    let of_the_project = Scopes { project_id: Some("p".into()), ..Scopes::default() };
    assert_eq!(book.resolve(PolicyKey::BillingWindow, &of_the_project, at(1)), (PolicyValue::Int(60), None));
    let gone = revoke(&stored, PolicyRevocation { key: PolicyKey::BillingWindow, ..in_force() }, 5).unwrap();
    assert!(gone.values.is_empty());
}

/// The chains in which a key is resolved, most specific scope first, and why it has no others (decisions 3, *Which scopes a key has*). An
/// account is a user's or an organization's.
fn chains_of(key: PolicyKey) -> (&'static [&'static [&'static str]], &'static str) {
    match key.name() {
        "billing.window_seconds"
        | "billing.low_balance_threshold_minor"
        | "billing.depletion_grace_seconds"
        | "billing.adjustment_max_minor" => {
            (&[&["user_id", "plan", "global"], &["org_id", "plan", "global"]], "a billing account")
        }
        "notification.low_balance_enabled"
        | "notification.balance_depleted_enabled"
        | "notification.email_enabled"
        | "notification.endpoints_per_holder"
        | "notification.delivery_max_attempts" => {
            (&[&["user_id", "org_id", "plan", "global"]], "the recipient of a notification")
        }
        "billing.webhook_max_attempts"
        | "maas.deploy_timeout_seconds"
        | "maas.release_timeout_seconds"
        | "rate_limit.enrollment_requests_per_minute"
        | "rate_limit.authentication_failures_per_minute"
        | "sku.approval_ttl_seconds" => (&[&["global"]], "the service as a whole"),
        name if ["node.", "keys.", "retention.", "rate_limit.node_"].iter().any(|area| name.starts_with(area)) => {
            (&[&["global"]], "the service as a whole")
        }
        _ => (&[&["user_id", "project_id", "org_id", "plan", "global"]], "the caller of a request"),
    }
}

#[test]
fn every_key_takes_its_scopes_which_win_in_their_order_and_refuses_the_others_with_the_reason() {
    let all = [
        PolicyScope::UserId("ann".into()),
        PolicyScope::ProjectId("p".into()),
        PolicyScope::OrgId("acme".into()),
        PolicyScope::Plan("pro".into()),
        PolicyScope::Global,
    ];
    let of_kind = |kind: &str| all.iter().find(|scope| scope.kind() == kind).unwrap();
    for key in PolicyKey::ALL.iter().copied() {
        let (chains, reason) = chains_of(key);
        let write = |scope: &PolicyScope| {
            let value = PolicyWrite { key, scope: scope.clone(), value: key.default_value(), ..new(0) };
            self::write(None, value, 0)
        };
        for scope in all.iter().filter(|scope| !chains.iter().any(|chain| chain.contains(&scope.kind()))) {
            let refused = write(scope).unwrap_err();
            assert_eq!(refused, Rejection::Scope { key, scope: scope.clone() });
            let message = state_machine::Rejection::explain(refused).message;
            assert!(message.contains(key.name()) && message.contains(reason), "{message}");
        }
        for chain in chains {
            let is_of_a_user = chains.len() > 1 && chain.contains(&"user_id");
            let subject = Scopes {
                user_id: Some("ann".into()),
                project_id: Some("p".into()),
                // The account of a user is that of a token without an organization.
                org_id: (!is_of_a_user).then(|| "acme".into()),
                plan: Some("pro".into()),
            };
            let mut book = PolicyBook::default();
            for scope in chains.iter().flat_map(|other| other.iter()).filter(|kind| !chain.contains(*kind)) {
                assert!(write(of_kind(scope)).unwrap().enter(&mut book).is_empty());
            }
            assert_eq!(book.look_up(key, &subject, at(0)).by, None, "{}: another account's value", key.name());
            for kind in chain.iter().rev() {
                let scope = of_kind(kind);
                assert!(write(scope).unwrap().enter(&mut book).is_empty());
                let (_, won) = book.resolve(key, &subject, at(0));
                assert_eq!(won.as_ref(), Some(scope), "{}", key.name());
            }
        }
    }
}

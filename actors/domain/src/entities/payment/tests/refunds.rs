//! Refunds, and reversals by the payer's bank.

use super::*;

#[test]
fn refund_is_debited_before_it_is_paid() {
    let mut world = PaymentHarness::deposited(5_000);
    world.refund(1, Some(2_000)).unwrap();
    assert!(world.calls.is_empty(), "the account is asked first");
    world.hear_all();
    assert_eq!(world.balance(), 3_000);
    let due = ProcessorCall::Refund {
        payment_id: payment_id(0),
        refund_id: refund_id(1),
        processor_id: "pi_100".into(),
        amount_minor: 2_000,
        currency: eur(),
    };
    assert_eq!(world.calls, [due]);
    world.refund_at(1, RefundStatus::Pending, 2_000).unwrap();
    assert!(world.it().timer().is_some(), "it is looked after");
    world.refund_at(1, RefundStatus::Succeeded, 2_000).unwrap();
    world.refund_at(1, RefundStatus::Pending, 2_000).unwrap();
    assert!(world.it().is_settled() && world.it().timer().is_none());
    // The same id is the same refund, and the rest is what is left.
    world.refund(1, Some(2_000)).unwrap();
    assert_eq!(world.refund(2, Some(3_001)), Err(Rejection::MoreThanLeft { left: 3_000, currency: Some(eur()) }));
    for amount in [0, -1, i64::MIN] {
        assert_eq!(world.refund(2, Some(amount)), Err(Rejection::MoreThanLeft { left: 3_000, currency: Some(eur()) }));
    }
    world.refund(2, None).unwrap();
    world.hear_all();
    assert_eq!((world.balance(), world.it().left_minor()), (0, 0));
    assert_eq!(world.refund(3, None), Err(Rejection::MoreThanLeft { left: 0, currency: Some(eur()) }));
}

#[test]
fn refund_is_for_the_payer_only_and_within_the_window() {
    let mut world = PaymentHarness::open(5_000);
    assert_eq!(world.refund(1, None), Err(Rejection::NotPaid { state: PhaseName::Open }));
    world.pay(0);
    world.hear_all();
    let refund = Request::Refund { refund_id: refund_id(1), amount_minor: None, reason: "r".into() };
    for other in [user("bob"), Principal::system("x")] {
        assert_eq!(world.ask(&other, payment_id(0), refund.clone()), Err(Rejection::NotFound));
    }
    world.now += TimeDelta::days(30);
    world.refund(1, Some(1)).unwrap();
    world.now += TimeDelta::seconds(1);
    assert_eq!(world.refund(2, Some(1)), Err(Rejection::TooLate { days: 30 }));
    world.refund(1, Some(1)).unwrap();
}

#[test]
fn refund_window_of_a_payment_is_resolved_for_its_payer() {
    let mut world = PaymentHarness::deposited(5_000);
    let Principal::Caller(caller) = ann() else { unreachable!() };
    let payer = Principal::Caller(CallerIdentity {
        org_id: Some("acme".into()),
        project_id: Some("p".into()),
        plan: Some("pro".into()),
        ..caller
    });
    let scopes = [
        PolicyScope::Global,
        PolicyScope::Plan("pro".into()),
        PolicyScope::OrgId("acme".into()),
        PolicyScope::ProjectId("p".into()),
        PolicyScope::UserId("ann".into()),
    ];
    world.now += TimeDelta::days(10);
    let refund = |n| Request::Refund { refund_id: refund_id(n), amount_minor: Some(1), reason: "r".into() };
    for (n, scope) in (0..).zip(scopes) {
        let key = PolicyKey::AllocationRefundWindow;
        world.policy.set(key, scope.clone(), Timestamp::UNIX_EPOCH, PolicyValue::Int(9)).unwrap();
        assert_eq!(
            world.ask(&payer, payment_id(0), refund(n)),
            Err(Rejection::TooLate { days: 9 }),
            "the value of {scope}"
        );
        world.policy.set(key, scope, Timestamp::UNIX_EPOCH, PolicyValue::Int(10)).unwrap();
        world.ask(&payer, payment_id(0), refund(n)).unwrap();
    }
}

#[test]
fn refunds_that_the_account_has_refused_leave_room_for_one_that_it_grants() {
    let mut world = PaymentHarness::deposited(5_000);
    world.use_up(4_000);
    for n in 1..=MAX_REFUNDS as u128 {
        world.refund(n, Some(2_000)).unwrap();
        world.hear_all();
        assert!(matches!(world.taking(n), RefundDebit::Refused { .. }), "{n}");
        world.pass(TimeDelta::seconds(1));
    }
    let granted = MAX_REFUNDS as u128 + 1;
    world.refund(granted, Some(1_000)).unwrap();
    world.hear_all();
    assert_eq!(world.taking(granted), &RefundDebit::Taken { amount_minor: 1_000 });
    assert_eq!(world.it().refunds.len(), MAX_REFUNDS);
    assert!(!world.it().refunds.contains_key(&refund_id(1)), "the oldest refused one");
}

#[test]
fn spent_or_held_money_is_not_refunded() {
    let mut world = PaymentHarness::deposited(5_000);
    world.use_up(1_000);
    // A window costs 10, and the next one is reserved for the running allocation.
    world.rent(1, 600);
    world.refund(1, Some(3_991)).unwrap();
    world.hear_all();
    assert!(matches!(world.taking(1), RefundDebit::Refused { .. }));
    assert_eq!((world.balance(), world.it().left_minor()), (4_000, 5_000), "what was refused is not gone");
    world.refund(2, None).unwrap();
    world.hear_all();
    assert_eq!((world.balance(), world.taking(2)), (10, &RefundDebit::Taken { amount_minor: 3_990 }));
    // A refusal is final, also if money has come in before the request is repeated.
    let asked = Event::RefundRequested {
        payment_id: payment_id(0),
        refund_id: refund_id(1),
        holder: Holder::User("ann".into()),
        amount_minor: 1,
        is_exact: true,
    };
    world.create(1, 5_000);
    world.pay(1);
    world.hear_all();
    world.deliver(&asked);
    world.hear_all();
    assert_eq!(world.balance(), 5_010);
}

#[test]
fn refund_that_the_processor_fails_is_credited_again() {
    for first in [None, Some(RefundStatus::Pending), Some(RefundStatus::Succeeded)] {
        let mut world = PaymentHarness::deposited(5_000);
        world.refund(1, Some(5_000)).unwrap();
        world.hear_all();
        if let Some(status) = first {
            world.refund_at(1, status, 5_000).unwrap();
        }
        for _ in 0..100 {
            world.refund_at(1, RefundStatus::Failed, 5_000).unwrap();
        }
        let is_failed = |event: &&Event| matches!(event, Event::RefundFailed { .. });
        let failed = world.bus.iter().find(is_failed).cloned().unwrap();
        for _ in 0..100 {
            world.deliver(&failed);
        }
        world.hear_all();
        world.refund_at(1, RefundStatus::Succeeded, 5_000).unwrap();
        world.hear_all();
        assert_eq!((world.balance(), world.it().left_minor()), (5_000, 5_000), "{first:?}");
        assert!(world.it().is_settled());
    }
    let mut world = PaymentHarness::deposited(5_000);
    world.refund(1, Some(5_000)).unwrap();
    assert_eq!(world.refund_at(1, RefundStatus::Succeeded, 5_000), Err(Rejection::RefundUnknown), "nothing was taken");
    world.hear_all();
    assert!(matches!(world.refund_at(1, RefundStatus::Succeeded, 4_999), Err(Rejection::Differs { .. })));
}

#[test]
fn refund_at_the_processor_that_arrives_before_the_payment_is_posted_after_it() {
    let mut world = PaymentHarness::open(5_000);
    for _ in 0..100 {
        world.reversed("re_x", ReversalStep::Refund, 5_000);
    }
    world.hear_all();
    assert!(world.account.is_none());
    world.pay(0);
    world.hear_all();
    assert_eq!((world.balance(), world.it().left_minor()), (0, 0));
    let kinds: Vec<_> = world.ledger.iter().map(|posting| posting.kind).collect();
    assert_eq!(kinds, [PostingKind::Deposit, PostingKind::Reversal]);
}

#[test]
fn dispute_is_posted_in_full_ends_allocations_and_is_reversed_when_won() {
    let mut world = PaymentHarness::deposited(5_000);
    world
        .policy
        .set(PolicyKey::BillingDepletionGrace, PolicyScope::Global, world.now, PolicyValue::Int(3_600))
        .unwrap();
    world.use_up(1_000);
    world.rent(1, 600);
    world.reversed("dp_1", ReversalStep::DisputeOpened, 5_000);
    let reversed = world.bus[0].clone();
    world.deliver(&reversed);
    assert_eq!(world.balance(), -1_000);
    let uncovered = |event: &&Event| matches!(event, Event::AllocationUncovered { .. });
    assert_eq!(world.bus.iter().filter(uncovered).count(), 1, "there is no grace for what was taken back");
    assert_eq!(world.account.as_ref().unwrap().state(), "depleted");
    world.deliver(&reversed);
    world.hear_all();
    assert_eq!((world.balance(), world.it().left_minor()), (-1_000, 0));
    for _ in 0..10 {
        world.reversed("dp_1", ReversalStep::DisputeWon, 5_000);
        world.reversed("dp_1", ReversalStep::DisputeOpened, 5_000);
        world.hear_all();
    }
    assert_eq!((world.balance(), world.it().left_minor()), (4_000, 5_000));
    assert!(world.it().is_settled());
    // A dispute that was won before it was received has no posting.
    world.reversed("dp_2", ReversalStep::DisputeWon, 5_000);
    world.reversed("dp_2", ReversalStep::DisputeOpened, 5_000);
    world.hear_all();
    assert_eq!(world.balance(), 4_000);
}

#[test]
fn reversal_that_leaves_cover_ends_no_allocation() {
    let mut world = PaymentHarness::deposited(5_000);
    world.rent(1, 600);
    world.reversed("re_1", ReversalStep::Refund, 1_000);
    world.hear_all();
    assert_eq!((world.balance(), world.account.as_ref().unwrap().state()), (4_000, "open"));
    let before = world.it().clone();
    for (amount, currency) in [(999, "EUR"), (1_000, "USD")] {
        let currency = Currency::parse(currency).unwrap();
        let command = Fact::Reversed {
            reversal_id: "re_1".into(),
            what: ReversalStep::Refund,
            amount_minor: amount,
            currency,
            of: None,
        };
        assert!(matches!(world.send(0, command), Err(Rejection::Differs { .. })));
    }
    for amount_minor in [0, -1, i64::MIN, i64::MAX] {
        let command = Fact::Reversed {
            reversal_id: "re_2".into(),
            what: ReversalStep::Refund,
            amount_minor,
            currency: eur(),
            of: None,
        };
        assert!(matches!(world.send(0, command), Err(Rejection::Amount { .. })));
    }
    assert_eq!(world.it(), &before);
}

#[test]
fn own_refund_received_as_a_reversal_is_debited_once() {
    let mut world = PaymentHarness::deposited(5_000);
    world.refund(1, Some(2_000)).unwrap();
    world.hear_all();
    world.reversed("re_1", ReversalStep::Refund, 2_000);
    world.hear_all();
    assert_eq!(world.balance(), 1_000, "taken twice, for a moment");
    world.refund_at(1, RefundStatus::Succeeded, 2_000).unwrap();
    world.hear_all();
    world.reversed("re_1", ReversalStep::Refund, 2_000);
    world.hear_all();
    assert_eq!((world.balance(), world.it().left_minor()), (3_000, 3_000));
}

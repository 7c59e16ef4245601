//! Reviews: ended by an operator's decision, once, and never credited beside it.

use super::*;
use proptest::prelude::*;

fn in_gbp(processor_id: &str, amount_minor: i64) -> Fact {
    let currency = Currency::parse("GBP").unwrap();
    Fact::PaidOtherwise { processor_id: processor_id.into(), amount_minor, currency }
}

fn reversed(what: ReversalStep, of: &str, amount_minor: i64) -> Fact {
    let currency = Currency::parse("GBP").unwrap();
    Fact::Reversed { reversal_id: format!("rev_{of}"), what, amount_minor, currency, of: Some(of.into()) }
}

/// As the payments worker reports what was paid: where it is not what was ordered, as other money.
fn report(world: &mut PaymentHarness, paid: Fact) -> Result<(), Rejection> {
    let refused = world.send(0, paid.clone());
    if let (
        Err(Rejection::Differs { .. } | Rejection::Reviewed { .. }),
        Fact::Paid { processor_id, amount_minor, currency, .. },
    ) = (&refused, paid)
    {
        world.send(0, Fact::PaidOtherwise { processor_id, amount_minor, currency })?;
    }
    refused
}

#[test]
fn operator_ends_a_review_that_no_event_reported_once_and_another_decision_is_refused() {
    for (made, other, action, decision) in [
        (settle(), dismiss(), AuditAction::PaymentsSettleReview, ReviewDecision::Settled),
        (dismiss(), settle(), AuditAction::PaymentsDismissReview, ReviewDecision::Dismissed),
    ] {
        let mut world = under_review();
        let by = user("operator");
        let step = Payment::decide(Some(world.it()), made.clone().into(), &world.ctx(&by, payment_id(0).0)).unwrap();
        let audit = &step.audit[0];
        assert_eq!((step.audit.len(), audit.action), (1, action));
        for (field, value) in
            [("processor_id", json!("pi_100")), ("amount_minor", json!(4_200)), ("currency", json!("GBP"))]
        {
            assert_eq!(audit.metadata[field], value);
        }
        assert!(audit.metadata["reason"].is_string());
        world.ask(&by, payment_id(0), made.clone()).unwrap();
        assert_eq!((world.it().state(), world.it().deadline()), ("canceled", None));
        // Decided again it is the same, and is not audited again.
        let step = Payment::decide(Some(world.it()), made.into(), &world.ctx(&by, payment_id(0).0)).unwrap();
        assert!(step.next.is_none() && step.audit.is_empty());
        assert_eq!(world.ask(&by, payment_id(0), other), Err(Rejection::ReviewEnded { decision }));
        // The event of it may be dismissed, too.
        world.send(0, Fact::EventDismissed { processor_id: "pi_100".into() }).unwrap();
        assert!(world.ledger.is_empty() && world.it().reviews.len() == 1);
    }
}

#[test]
fn repeated_decision_is_not_about_other_money_that_is_under_review_by_then() {
    for (decide, other) in
        [(settle_of as fn(&str) -> Request, dismiss_of as fn(&str) -> Request), (dismiss_of, settle_of)]
    {
        let mut world = decided(decide(OF_POUNDS));
        world.send(0, in_gbp("pi_2", 700)).unwrap();
        let before = world.it().clone();
        let current = before.review().unwrap();
        assert_eq!(current.to_string(), "pi_2:700:GBP");
        // The answer to the first was lost.
        world.send(0, decide(OF_POUNDS)).unwrap();
        let decision = before.reviews[0].decision;
        assert_eq!(world.send(0, other(OF_POUNDS)), Err(Rejection::ReviewEnded { decision }));
        for never_seen in ["pi_9:700:GBP", "pi_2:701:GBP", "pi_2:700:USD", ""] {
            let refused = world.send(0, decide(never_seen));
            assert_eq!(refused, Err(Rejection::OtherReview { current: current.clone() }), "{never_seen}");
        }
        assert_eq!(world.it(), &before);
        world.send(0, other("pi_2:700:GBP")).unwrap();
        assert_eq!((world.it().state(), world.it().reviews.len()), ("canceled", 2));
    }
}

#[test]
fn payment_that_is_not_under_review_takes_no_decision() {
    for (mut world, state) in
        [(PaymentHarness::open(5_000), PhaseName::Open), (PaymentHarness::deposited(5_000), PhaseName::Deposited)]
    {
        for decision in [settle(), dismiss()] {
            assert_eq!(world.send(0, decision), Err(Rejection::NotUnderReview { state }));
        }
    }
    let mut none = PaymentHarness::new();
    assert_eq!(none.send(0, settle()), Err(Rejection::NotFound));
}

#[test]
fn review_that_a_refund_at_the_processor_ended_is_dismissed_and_not_settled() {
    let mut world = under_review();
    world.send(0, reversed(ReversalStep::Refund, "pi_100", 4_200)).unwrap();
    assert_eq!(world.it().state(), "canceled");
    world.send(0, dismiss()).unwrap();
    assert_eq!(world.send(0, settle()), Err(Rejection::ReviewEnded { decision: ReviewDecision::Refunded }));
}

#[test]
fn reviewed_money_in_the_terms_of_the_order_is_reviewed_again_and_not_credited() {
    let refunded = reversed(ReversalStep::Refund, "pi_100", 4_200);
    for decision in [Command::from(settle()), dismiss().into(), refunded.into()] {
        let mut world = under_review();
        world.send(0, decision).unwrap();
        let plain = world.paid(0);
        for _ in 0..2 {
            let refused = report(&mut world, plain.clone());
            assert!(matches!(refused, Err(Rejection::Reviewed { .. })), "{refused:?}");
            world.hear_all();
            assert_eq!((world.it().state(), world.ledger.len()), ("under_review", 0));
        }
        let reason = world.it().review_reason().unwrap();
        assert!(reason.contains("50.00 EUR") && reason.contains("after"), "{reason}");
        // This decision is about these terms, and every report of the money ends with it.
        world.send(0, settle_of("pi_100:5000:EUR")).unwrap();
        report(&mut world, plain).unwrap();
        world.send(0, pounds("pi_100")).unwrap();
        world.hear_all();
        assert_eq!((world.it().state(), world.ledger.len(), world.it().reviews.len()), ("canceled", 0, 2));
    }
}

#[test]
fn other_money_that_pays_the_order_after_a_review_is_credited() {
    let mut world = decided(dismiss());
    let Fact::Paid { amount_minor, currency, .. } = world.paid(0) else { panic!() };
    let paid = Fact::Paid { processor_id: "pi_2".into(), amount_minor, currency, charge_id: None, presented: None };
    report(&mut world, paid).unwrap();
    world.hear_all();
    assert_eq!((world.it().state(), world.balance()), ("deposited", 5_000));
    // What becomes of the dismissed money posts nothing.
    world.send(0, reversed(ReversalStep::Refund, "pi_100", 4_200)).unwrap();
    world.hear_all();
    assert_eq!((world.balance(), world.it().reversals.len()), (5_000, 0));
    let came_back = world.send(0, reversed(ReversalStep::RefundFailed, "pi_100", 4_200));
    assert!(matches!(came_back, Err(Rejection::Reviewed { .. })), "{came_back:?}");
}

#[test]
fn settled_money_that_goes_back_waits_for_an_operator_and_dismissed_money_for_none() {
    for (what, after_settling, after_dismissing) in [
        (ReversalStep::Refund, false, true),
        (ReversalStep::DisputeOpened, false, true),
        (ReversalStep::RefundFailed, false, false),
        (ReversalStep::DisputeWon, false, false),
    ] {
        for (decision, is_expected) in [(settle(), after_settling), (dismiss(), after_dismissing)] {
            let mut world = decided(decision);
            let reported = world.send(0, reversed(what, "pi_100", 4_200));
            match reported {
                Ok(()) => assert!(is_expected, "{what:?}"),
                Err(Rejection::Reviewed { .. }) => assert!(!is_expected, "{what:?}"),
                Err(rejection) => panic!("{rejection}"),
            }
            assert!(world.it().reversals.is_empty());
        }
    }
}

#[test]
fn refund_of_money_that_was_paid_beside_the_payment_is_not_taken_from_the_account() {
    let mut world = PaymentHarness::deposited(5_000);
    let second = Fact::Reversed {
        reversal_id: "re_2".into(),
        what: ReversalStep::Refund,
        amount_minor: 5_000,
        currency: eur(),
        of: Some("pi_2".into()),
    };
    let refused = world.send(0, second);
    assert_eq!(refused, Err(Rejection::PaidTwice { as_of: "pi_100".into(), again: "pi_2".into() }));
    world.hear_all();
    assert_eq!((world.balance(), world.it().left_minor()), (5_000, 5_000));
}

#[test]
fn refund_of_other_money_does_not_end_a_review() {
    let mut world = under_review();
    world.send(0, reversed(ReversalStep::Refund, "pi_2", 9_000)).unwrap_err();
    assert_eq!(world.it().state(), "under_review");
}

#[test]
fn other_money_that_is_reported_during_a_review_is_refused_until_the_review_has_ended() {
    let mut world = under_review();
    let Fact::Paid { amount_minor, currency, .. } = world.paid(0) else { panic!() };
    let as_ordered = |id: &str| Fact::Paid {
        processor_id: id.into(),
        amount_minor,
        currency: currency.clone(),
        charge_id: None,
        presented: None,
    };
    let twice = |again: &str| Err(Rejection::PaidTwice { as_of: "pi_100".into(), again: again.into() });
    let before = world.it().clone();
    assert_eq!(world.send(0, as_ordered("pi_2")), twice("pi_2"));
    assert_eq!(world.send(0, in_gbp("pi_3", 100)), twice("pi_3"));
    assert_eq!(world.it(), &before, "its event waits for an operator");
    // A repeated decision is about the money that was decided about.
    for _ in 0..2 {
        world.send(0, settle()).unwrap();
    }
    assert_eq!(world.it().reviews.len(), 1);
    world.send(0, as_ordered("pi_2")).unwrap();
    world.hear_all();
    assert_eq!((world.it().state(), world.balance()), ("deposited", 5_000));
    let again = Err(Rejection::PaidTwice { as_of: "pi_2".into(), again: "pi_4".into() });
    assert_eq!(world.send(0, as_ordered("pi_4")), again);
}

#[test]
fn payment_has_no_more_reviews_than_its_bound() {
    let mut world = PaymentHarness::open(5_000);
    for n in 0..review::MAX_REVIEWS {
        world.send(0, in_gbp(&format!("pi_{n}"), 4_200)).unwrap();
        world.send(0, dismiss_of(&format!("pi_{n}:4200:GBP"))).unwrap();
    }
    assert_eq!(world.send(0, in_gbp("pi_x", 4_200)), Err(Rejection::TooManyReviews));
    assert_eq!((world.it().state(), world.it().reviews.len()), ("canceled", review::MAX_REVIEWS));
}

/// What may happen to a payment of 50.00 EUR for which pounds were paid, under the id of the order.
fn happening() -> impl Strategy<Value = Command> {
    let step = prop_oneof![
        Just(ReversalStep::Refund),
        Just(ReversalStep::RefundFailed),
        Just(ReversalStep::DisputeOpened),
        Just(ReversalStep::DisputeWon),
    ];
    let paid = Fact::Paid {
        processor_id: "pi_100".into(),
        amount_minor: 5_000,
        currency: eur(),
        charge_id: None,
        presented: None,
    };
    let seen = prop_oneof![Just(OF_POUNDS), Just("pi_100:4300:GBP"), Just("pi_100:5000:EUR"), Just("")];
    prop_oneof![
        3 => prop_oneof![Just(4_200_i64), Just(4_300)].prop_map(|amount| in_gbp("pi_100", amount).into()),
        2 => Just(Command::from(paid)),
        2 => seen.clone().prop_map(|review| settle_of(review).into()),
        2 => seen.prop_map(|review| dismiss_of(review).into()),
        1 => Just(Command::from(Fact::EventDismissed { processor_id: "pi_100".into() })),
        2 => step.prop_map(|what| reversed(what, "pi_100", 4_200).into()),
        1 => Just(Command::from(Fact::NotPaid {
            processor_id: "pi_100".into(), outcome: PaymentFailure::Canceled, why: "w".into(),
        })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Reports and decisions in any order, each of them twice.
    #[test]
    fn money_that_was_ever_decided_about_is_never_credited(commands in prop::collection::vec(happening(), 0..40)) {
        let mut world = PaymentHarness::open(5_000);
        for command in commands {
            let before = world.it().reviews.len();
            let is_decided = before > 0;
            let _ = world.send(0, command.clone());
            let once = world.it().clone();
            let _ = world.send(0, command);
            prop_assert_eq!(&once, world.it(), "a repetition changes nothing");
            world.hear_all();
            prop_assert!(!is_decided || world.ledger.is_empty(), "{:#?}", world.it());
            prop_assert!(world.it().reviews.len() <= before + 1);
        }
        // Where anything waits, an operator can end it.
        if let Some(review) = world.it().review() {
            world.send(0, dismiss_of(&review.to_string())).unwrap();
        }
        prop_assert_ne!(world.it().state(), "under_review");
    }
}

//! Payments that the processor has converted into another currency: understood where the order is what was ordered, else under review.

use super::*;

fn gbp() -> Currency {
    Currency::parse("GBP").unwrap()
}

/// 50.00 EUR, of which the payer saw and paid 42.00 GBP.
fn converted(is_charged: bool) -> Fact {
    Fact::Paid {
        processor_id: "pi_100".into(),
        amount_minor: 5_000,
        currency: eur(),
        charge_id: None,
        presented: Some(Presentment { amount_minor: 4_200, currency: gbp(), is_charged }),
    }
}

fn in_pounds(amount_minor: i64) -> Fact {
    Fact::Paid { processor_id: "pi_100".into(), amount_minor, currency: gbp(), charge_id: None, presented: None }
}

#[test]
fn converted_payment_is_credited_in_its_own_currency_once() {
    for is_charged in [false, true] {
        let mut world = PaymentHarness::open(5_000);
        world.send(0, converted(is_charged)).unwrap();
        world.hear_all();
        world.send(0, converted(is_charged)).unwrap();
        world.hear_all();
        assert_eq!((world.it().state(), world.balance(), world.ledger.len()), ("deposited", 5_000, 1));
        assert_eq!(world.it().presented.as_ref().unwrap().amount_minor, 4_200);
    }
    // The processor's own payment, in the currency in which it was charged, is the same money.
    let mut world = PaymentHarness::open(5_000);
    world.send(0, converted(true)).unwrap();
    world.send(0, in_pounds(4_200)).unwrap();
    assert!(matches!(world.send(0, in_pounds(4_199)), Err(Rejection::Differs { .. })));
    world.send(0, pounds("pi_100")).unwrap();
    assert_eq!(world.it().state(), "paid");
}

#[test]
fn refunds_and_reversals_of_a_converted_payment_are_in_the_currency_that_was_charged() {
    let mut world = PaymentHarness::open(5_000);
    world.send(0, converted(true)).unwrap();
    world.hear_all();
    world.refund(1, Some(2_000)).unwrap();
    world.hear_all();
    let due = world.it().refund_due(refund_id(1)).unwrap();
    assert!(matches!(due, Event::RefundDue { amount_minor: 1_680, ref currency, .. } if *currency == gbp()), "{due:?}");
    world.refund_at(1, RefundStatus::Succeeded, 1_680).unwrap();
    assert!(world.refund_at(1, RefundStatus::Succeeded, 2_000).is_err());
    assert_eq!((world.it().left_minor(), world.balance()), (3_000, 3_000));
    let disputed = |amount_minor| Fact::Reversed {
        reversal_id: "dp_1".into(),
        what: ReversalStep::DisputeOpened,
        amount_minor,
        currency: gbp(),
        of: Some("pi_100".into()),
    };
    world.send(0, disputed(2_520)).unwrap();
    world.hear_all();
    assert_eq!((world.it().left_minor(), world.balance()), (0, 0));
}

#[test]
fn money_paid_otherwise_is_under_review_and_never_credited_after_it_was_settled() {
    let mut world = PaymentHarness::open(5_000);
    assert!(matches!(world.send(0, in_pounds(4_200)), Err(Rejection::Differs { .. })));
    world.send(0, pounds("pi_100")).unwrap();
    assert_eq!(world.it().state(), "under_review");
    let reason = world.it().review_reason().unwrap();
    assert!(reason.contains("42.00 GBP") && reason.contains("50.00 EUR") && reason.contains("operator"), "{reason}");
    let canceled = world.ask(&ann(), payment_id(0), cancel());
    assert_eq!(canceled, Err(Rejection::AlreadyPaid { state: PhaseName::UnderReview }));
    world.pass(OPEN_FOR);
    assert_eq!(world.it().state(), "under_review", "it does not lapse");

    world.send(0, Fact::EventDismissed { processor_id: "pi_other".into() }).unwrap();
    assert_eq!(world.it().state(), "under_review");
    world.send(0, Fact::EventDismissed { processor_id: "pi_100".into() }).unwrap();
    assert_eq!((world.it().state(), world.it().review_reason()), ("canceled", None));
    // The processor reports it again, and then in the terms of the order.
    world.send(0, pounds("pi_100")).unwrap();
    world.send(0, converted(true)).unwrap();
    world.hear_all();
    assert_eq!((world.it().state(), world.ledger.len()), ("canceled", 0));
}

#[test]
fn reviewed_money_that_goes_back_at_the_processor_ends_the_review_and_posts_nothing() {
    let of = Some("pi_100".to_owned());
    let reversed = |what, amount_minor| Fact::Reversed {
        reversal_id: "re_1".into(),
        what,
        amount_minor,
        currency: gbp(),
        of: of.clone(),
    };
    let mut world = under_review();
    world.send(0, reversed(ReversalStep::Refund, 4_200)).unwrap();
    assert_eq!(world.it().state(), "canceled");
    world.send(0, reversed(ReversalStep::Refund, 4_200)).unwrap();
    assert!(world.it().reversals.is_empty() && world.ledger.is_empty());
    // The money is at the processor again: an operator has to know.
    let failed = world.send(0, reversed(ReversalStep::RefundFailed, 4_200));
    assert!(matches!(failed, Err(Rejection::Reviewed { .. })), "{failed:?}");
}

#[test]
fn partial_refund_or_dispute_under_review_waits_and_is_posted_where_the_order_is_paid_after_all() {
    for (what, amount_minor) in [(ReversalStep::Refund, 1_000), (ReversalStep::DisputeOpened, 4_200)] {
        let of = Some("pi_100".to_owned());
        let reversed =
            || Fact::Reversed { reversal_id: "re_1".into(), what, amount_minor, currency: gbp(), of: of.clone() };
        let mut world = under_review();
        let refused = world.send(0, reversed());
        assert!(matches!(refused, Err(Rejection::Differs { .. })), "{what:?}: {refused:?}");
        assert_eq!(world.it().state(), "under_review");
        world.send(0, converted(true)).unwrap();
        world.hear_all();
        // The processor reports it again, as reports that are refused are retried.
        world.send(0, reversed()).unwrap();
        world.hear_all();
        assert_eq!(world.balance(), 5_000 - amount_minor * 5_000 / 4_200, "{what:?}");
    }
}

#[test]
fn review_ends_where_the_order_itself_is_paid() {
    let mut world = under_review();
    world.send(0, converted(true)).unwrap();
    world.hear_all();
    assert_eq!((world.it().state(), world.balance()), ("deposited", 5_000));
}

//! Deposits that the account refuses: the money goes back to its payer.

use super::*;

#[test]
fn refused_deposit_is_refunded_to_its_payer() {
    let mut world = refused();
    assert_eq!((world.it().state(), world.it().left_minor(), world.balance()), ("refused", 0, 100));
    let call = world.calls.pop();
    assert!(matches!(call, Some(ProcessorCall::Refund { amount_minor: 5_000, .. })), "{call:?}");
    // A repeated message is answered again, without an effect.
    world.send(0, Fact::DepositRefused { why: "w".into() }).unwrap();
    world.send(0, Fact::Deposited).unwrap();
    assert_eq!(world.refund(1, None), Err(Rejection::NotPaid { state: PhaseName::Refused }));
    // The processor is called until it has paid.
    world.pass(TimeDelta::hours(1));
    world.hear_all();
    assert_eq!(world.calls.len(), 1);
    world.paid_back(RefundStatus::Succeeded);
    world.hear_all();
    assert!(world.it().is_settled());
    assert_eq!((world.balance(), world.ledger.len()), (100, 1), "the account had nothing of it");
}

#[test]
fn failed_refund_of_a_refused_deposit_awaits_an_operator_and_credits_no_account() {
    let mut world = refused();
    world.paid_back(RefundStatus::Failed);
    world.pass(TimeDelta::hours(1));
    world.hear_all();
    let deadline = world.it().deadline().unwrap();
    assert!(deadline.at < world.now && deadline.reason.contains("operator"), "{deadline:?}");
    assert!(!world.it().is_settled());
    // A refund at the processor settles it.
    world.reversed("re_by_hand", ReversalStep::Refund, 5_000);
    world.hear_all();
    assert!(world.it().is_settled() && world.it().deadline().is_none());
    assert_eq!((world.balance(), world.ledger.len()), (100, 1));
}

/// The review of the money of a refused deposit.
fn own_money(world: &PaymentHarness) -> String {
    format!("{}:{}:EUR", world.it().processor_id.as_ref().unwrap(), world.it().amount_minor)
}

#[test]
fn operator_ends_the_wait_of_a_refused_deposit_that_cannot_be_refunded() {
    for decide in [[settle_of, dismiss_of], [dismiss_of, settle_of]] {
        let mut world = refused();
        let [decision, other] = decide.map(|decide| decide(&own_money(&world)));
        let early = world.send(0, decision.clone());
        assert_eq!(early, Err(Rejection::NotUnderReview { state: PhaseName::Refused }), "the processor pays it back");
        world.paid_back(RefundStatus::Failed);
        let of_other_money = world.send(0, settle());
        assert!(matches!(of_other_money, Err(Rejection::OtherReview { .. })), "{of_other_money:?}");
        world.send(0, decision.clone()).unwrap();
        assert_eq!((world.it().state(), world.it().deadline(), world.it().is_settled()), ("refused", None, true));
        let ended = world.it().clone();
        world.send(0, decision).unwrap();
        // The processor reports the payment for months.
        world.pay(0);
        world.hear_all();
        assert_eq!(world.it(), &ended);
        assert!(matches!(world.send(0, other), Err(Rejection::ReviewEnded { .. })));
        assert_eq!((world.balance(), world.ledger.len()), (100, 1));
    }
}

#[test]
fn settled_refused_deposit_that_goes_back_after_all_waits_for_an_operator() {
    let gone_back = |decide: fn(&str) -> Request| {
        let mut world = refused();
        world.paid_back(RefundStatus::Failed);
        world.send(0, decide(&own_money(&world))).unwrap();
        let reversed = Fact::Reversed {
            reversal_id: "re_by_hand".into(),
            what: ReversalStep::Refund,
            amount_minor: 5_000,
            currency: eur(),
            of: world.it().processor_id.clone(),
        };
        world.send(0, reversed)
    };
    let settled = gone_back(settle_of);
    assert!(matches!(settled, Err(Rejection::Reviewed { decision: ReviewDecision::Settled, .. })), "{settled:?}");
    assert_eq!(gone_back(dismiss_of), Ok(()));
}

#[test]
fn undone_reversal_of_a_refused_deposit_awaits_an_operator() {
    let mut world = PaymentHarness::open(5_000);
    world.pay(0);
    world.reversed("dp_1", ReversalStep::DisputeOpened, 2_000);
    world.send(0, Fact::DepositRefused { why: "w".into() }).unwrap();
    let back = Fact::RefundAt {
        refund_id: RefundId(payment_id(0).0),
        processor_refund_id: "re_0".into(),
        status: RefundStatus::Succeeded,
        amount_minor: 3_000,
    };
    world.send(0, back).unwrap();
    assert!(world.it().deadline().is_none(), "the bank has 2,000, and the payer the rest");
    world.reversed("dp_1", ReversalStep::DisputeWon, 2_000);
    assert!(world.it().deadline().unwrap().reason.contains("operator"));
    world.reversed("re_by_hand", ReversalStep::Refund, 2_000);
    assert!(world.it().deadline().is_none() && world.it().left_minor() == 0);
}

//! Payments under adverse conditions: messages of the processor, and between payment and account, arrive late, twice, out of order or
//! never. In the end the account has what the processor was paid, less what it paid back.

mod converted;
mod converted_parts;
mod event_order;
mod harness;
mod long_history;
mod refunds;
mod refused_deposits;
mod reviews;

use super::*;
use crate::authz::{CallerIdentity, Principal, TokenRole};
use crate::billing_account::{self, BillingAccount};
use crate::choreography::Reaction;
use crate::event::Event;
use crate::id::{AllocationId, BillingAccountId};
use crate::invariants;
use crate::ledger::{Posting, PostingKind};
use crate::money::{MicroAmount, Price};
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
use crate::state_machine::Command as _;
use harness::PaymentHarness;
use std::fmt::Write as _;
use uuid::Uuid;

fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

fn ann() -> Principal {
    user("ann")
}

fn user(id: &str) -> Principal {
    Principal::Caller(CallerIdentity::new(id, [TokenRole::User]))
}

fn payment_id(n: u128) -> PaymentId {
    PaymentId(Uuid::from_u128(100 + n))
}

fn refund_id(n: u128) -> RefundId {
    RefundId(Uuid::from_u128(200 + n))
}

/// The processor's id of the `n`th payment.
fn intent(id: PaymentId) -> String {
    format!("pi_{}", id.0.as_u128())
}

/// The first payment is canceled, and closed at the processor.
fn cancel() -> Request {
    Request::Cancel { closed: Some(intent(payment_id(0))) }
}

#[test]
fn payment_is_deposited_and_opens_the_account() {
    let mut world = PaymentHarness::new();
    world.create_as(0, 5_000).unwrap();
    assert_eq!((world.it().state(), world.it().left_minor()), ("created", 0));
    world.send(0, Fact::Opened { processor_id: "pi_100".into() }).unwrap();
    assert_eq!(world.it().state(), "open");
    let decline =
        Fact::NotPaid { processor_id: "pi_100".into(), outcome: PaymentFailure::Declined, why: "card_declined".into() };
    world.send(0, decline).unwrap();
    assert_eq!((world.it().state(), world.it().declined.as_deref()), ("open", Some("card_declined")));
    world.pay(0);
    assert_eq!(world.it().state(), "paid");
    world.hear_all();
    assert_eq!((world.it().state(), world.it().left_minor(), world.balance()), ("deposited", 5_000, 5_000));
    assert_eq!(world.it().timer(), None, "no call is owed");
    let posting = &world.ledger[0];
    assert_eq!(
        (posting.kind, posting.source.as_ref().unwrap().payment_id),
        (PostingKind::Deposit, Some(payment_id(0)))
    );
}

#[test]
fn repeated_payment_is_deposited_once() {
    let mut world = PaymentHarness::open(5_000);
    for _ in 0..100 {
        world.pay(0);
        world.send(0, Fact::Opened { processor_id: "pi_100".into() }).unwrap();
    }
    let event = world.bus[0].clone();
    for _ in 0..100 {
        world.deliver(&event);
    }
    world.hear_all();
    for _ in 0..100 {
        world.pay(0);
        world.deliver(&event);
        world.hear_all();
    }
    assert_eq!((world.balance(), world.ledger.len(), world.it().state()), (5_000, 1, "deposited"));
}

#[test]
fn payment_with_all_refunds_and_reversals_that_there_may_be_is_within_its_bound() {
    let mut payment = PaymentHarness::deposited(5_000).it().clone();
    let at = payment.created_at;
    let of_processor = |n: usize| format!("re_{n:0252}");
    for n in 0..MAX_REFUNDS {
        let refund = Refund {
            reason: "\u{1f511}".repeat(500),
            asked_at: at,
            taking: RefundDebit::GivenBack { amount_minor: 5_000 },
            charged_minor: Some(i64::MAX),
            returned_minor: Some(i64::MAX),
            at_processor: Some(ProcessorRefund { processor_refund_id: of_processor(n), status: RefundStatus::Failed }),
        };
        payment.refunds.insert(RefundId(Uuid::from_u128(n as u128)), refund);
        let reversal = Reversal {
            made: ReversalOrigin::Refund,
            amount_minor: 5_000,
            charged_minor: Some(i64::MAX),
            reported_at: at,
            is_undone: true,
            returned_minor: Some(i64::MAX),
            is_posting_requested: true,
            is_posted: true,
            is_posted_back: true,
        };
        payment.reversals.insert(of_processor(n + MAX_REFUNDS), reversal);
    }
    for n in 0..review::MAX_REVIEWS {
        let (processor_id, amount_minor, currency) = (of_processor(n), i64::MAX, eur());
        let decision = ReviewDecision::Dismissed;
        payment.reviews.push(EndedReview { processor_id, amount_minor, currency, decision, at });
    }
    payment.success_url = "u".repeat(2048);
    payment.cancel_url = "u".repeat(2048);
    let size = serde_json::to_string(&payment).unwrap().len();
    assert!(size < Payment::SNAPSHOT_MOST, "{size}");
}

#[test]
fn a_deposit_lies_within_its_bounds() {
    let mut world = PaymentHarness::new();
    let bounds = |max| Rejection::Amount { min: 1_000, max, currency: Some(eur()) };
    for amount in [i64::MIN, -1, 0, 999, 100_001, i64::MAX] {
        assert_eq!(world.create_as(0, amount), Err(bounds(100_000)), "{amount}");
    }
    world
        .policy
        .set(PolicyKey::BillingMaximumDeposit, PolicyScope::UserId("ann".into()), world.now, PolicyValue::Int(2_000))
        .unwrap();
    assert_eq!(world.create_as(0, 2_001), Err(bounds(2_000)));
    world.create_as(0, 2_000).unwrap();
}

#[test]
fn payment_matches_its_request_and_is_paid_once() {
    let mut world = PaymentHarness::open(5_000);
    let paid = |amount_minor, currency: &str, processor_id: &str| Fact::Paid {
        processor_id: processor_id.into(),
        amount_minor,
        currency: Currency::parse(currency).unwrap(),
        charge_id: None,
        presented: None,
    };
    for (amount, currency) in [(4_999, "EUR"), (5_001, "EUR"), (5_000, "USD"), (-5_000, "EUR"), (i64::MAX, "EUR")] {
        assert!(matches!(world.send(0, paid(amount, currency, "pi_100")), Err(Rejection::Differs { .. })));
    }
    assert_eq!(world.it().state(), "open");
    // The opened object may be a session, and the paid one the payment in it.
    world.send(0, paid(5_000, "EUR", "pi_7")).unwrap();
    assert!(matches!(world.send(0, paid(5_000, "EUR", "pi_8")), Err(Rejection::PaidTwice { .. })));
    world.pay_charge("pi_7", "ch_7");
    assert_eq!(world.it().charge_id.as_deref(), Some("ch_7"), "the charge may become known later");
}

impl PaymentHarness {
    fn pay_charge(&mut self, processor_id: &str, charge: &str) {
        let paid = Fact::Paid {
            processor_id: processor_id.into(),
            amount_minor: self.it().amount_minor,
            currency: eur(),
            charge_id: Some(charge.into()),
            presented: None,
        };
        self.send(0, paid).unwrap();
    }
}

#[test]
fn payment_after_its_end_counts_as_paid() {
    for outcome in [PaymentFailure::Canceled, PaymentFailure::Expired] {
        let mut world = PaymentHarness::open(5_000);
        let end = Fact::NotPaid { processor_id: "pi_100".into(), outcome, why: "w".into() };
        world.send(0, end.clone()).unwrap();
        assert_eq!(world.it().deadline(), None);
        world.pay(0);
        world.send(0, end).unwrap();
        world.hear_all();
        assert_eq!((world.it().state(), world.balance()), ("deposited", 5_000));
    }
    // The end of another object that was opened by mistake does not concern this one.
    let mut world = PaymentHarness::open(5_000);
    let other = Fact::NotPaid { processor_id: "pi_x".into(), outcome: PaymentFailure::Canceled, why: "w".into() };
    world.send(0, other).unwrap();
    assert_eq!(world.it().state(), "open");
}

#[test]
fn payer_alone_cancels_an_unpaid_payment_and_money_that_arrives_after_it_counts() {
    let mut world = PaymentHarness::open(5_000);
    for other in [user("bob"), Principal::system("x")] {
        assert_eq!(world.ask(&other, payment_id(0), cancel()), Err(Rejection::NotFound));
    }
    world.ask(&ann(), payment_id(0), cancel()).unwrap();
    assert_eq!((world.it().state(), world.it().deadline(), world.it().again), ("canceled", None, None));
    world.ask(&ann(), payment_id(0), cancel()).unwrap();
    // A checkout that was being opened meanwhile.
    let opened = world.send(0, Fact::Opened { processor_id: "pi_100".into() });
    assert_eq!(opened, Err(Rejection::Over { state: PhaseName::Canceled }));
    world.pay(0);
    world.hear_all();
    assert_eq!((world.it().state(), world.balance()), ("deposited", 5_000));
    let late = world.ask(&ann(), payment_id(0), cancel());
    assert_eq!(late, Err(Rejection::AlreadyPaid { state: PhaseName::Deposited }));
}

#[test]
fn payment_that_was_opened_after_its_checkout_was_looked_for_is_not_canceled() {
    let mut world = PaymentHarness::open(5_000);
    // The processor had none then, or another one.
    for closed in [None, Some("pi_7".to_owned())] {
        let refused = world.ask(&ann(), payment_id(0), Request::Cancel { closed });
        assert_eq!((refused, world.it().state()), (Err(Rejection::StillOpen), "open"));
    }
    world.ask(&ann(), payment_id(0), cancel()).unwrap();
    assert_eq!(world.it().state(), "canceled");
}

#[test]
fn unanswered_request_is_resent_until_it_is_answered() {
    let mut world = PaymentHarness::new();
    world.create_as(0, 5_000).unwrap();
    assert!(world.bus.is_empty(), "its creator is opening it");
    world.pass(TimeDelta::seconds(10));
    assert!(matches!(world.bus.pop(), Some(Event::PaymentOpeningDue { .. })));
    world.send(0, Fact::Opened { processor_id: "pi_100".into() }).unwrap();
    world.pass(TimeDelta::seconds(9));
    assert!(world.bus.is_empty());
    world.pass(TimeDelta::seconds(1));
    assert!(matches!(world.bus.pop(), Some(Event::PaymentCheckDue { is_over: false, .. })));
    for _ in 0..30 {
        world.pass(TimeDelta::hours(1));
    }
    let checks = std::mem::take(&mut world.bus);
    assert!(matches!(checks.last(), Some(Event::PaymentCheckDue { is_over: true, .. })), "the time to pay is over");
    world.pay(0);
    // Its message is lost twice.
    world.bus.clear();
    world.pass(TimeDelta::seconds(10));
    world.bus.clear();
    world.pass(TimeDelta::seconds(10));
    world.hear_all();
    assert_eq!((world.it().state(), world.balance()), ("deposited", 5_000));
    let mut lapsed = PaymentHarness::new();
    lapsed.create_as(0, 5_000).unwrap();
    lapsed.send(0, Fact::NotOpened { why: "not there".into() }).unwrap();
    assert_eq!(lapsed.it().state(), "created", "it may still be opened");
    lapsed.now += OPEN_FOR;
    lapsed.send(0, Fact::NotOpened { why: "not there".into() }).unwrap();
    assert_eq!((lapsed.it().state(), lapsed.it().timer()), ("expired", None));
    let opened = lapsed.send(0, Fact::Opened { processor_id: "pi_100".into() });
    assert!(matches!(opened, Err(Rejection::Over { .. })), "a checkout that was opened too late must be canceled");
}

/// A payment of 5,000 that was begun before an operator gave the account dollars.
fn refused() -> PaymentHarness {
    let mut world = PaymentHarness::open(5_000);
    let currency = Currency::parse("USD").unwrap();
    let holder = Holder::User("ann".into());
    world.tell_account(billing_account::Request::Open { holder, currency: currency.clone() }).unwrap();
    let reason = "a gift".to_owned();
    world.tell_account(billing_account::Request::Adjust { amount_minor: 100, currency, reason }).unwrap();
    world.pay(0);
    world.hear_all();
    world
}

/// 42.00 GBP were paid in the name of the first payment.
fn pounds(processor_id: &str) -> Fact {
    let currency = Currency::parse("GBP").unwrap();
    Fact::PaidOtherwise { processor_id: processor_id.into(), amount_minor: 4_200, currency }
}

/// A payment of 50.00 EUR for which pounds were paid.
fn under_review() -> PaymentHarness {
    let mut world = PaymentHarness::open(5_000);
    world.send(0, pounds("pi_100")).unwrap();
    world
}

/// The name of a review; none where it is empty, as a member of an earlier release sends it.
fn name_of(review: &str) -> Option<String> {
    (!review.is_empty()).then(|| review.to_owned())
}

fn settle_of(review: &str) -> Request {
    Request::SettleReview { review: name_of(review), reason: "credited by hand".into() }
}

fn dismiss_of(review: &str) -> Request {
    Request::DismissReview { review: name_of(review), reason: "it went back".into() }
}

/// The review of [`pounds`].
const OF_POUNDS: &str = "pi_100:4200:GBP";

fn settle() -> Request {
    settle_of(OF_POUNDS)
}

fn dismiss() -> Request {
    dismiss_of(OF_POUNDS)
}

/// A payment whose review an operator has ended.
fn decided(decision: Request) -> PaymentHarness {
    let mut world = under_review();
    world.send(0, decision).unwrap();
    world
}

/// A payment in each distinguished state, by name.
fn every_state() -> Vec<(&'static str, PaymentHarness)> {
    let mut created = PaymentHarness::new();
    created.create_as(0, 5_000).unwrap();
    let open = PaymentHarness::open(5_000);
    let mut paid = PaymentHarness::open(5_000);
    paid.pay(0);
    let ended = |outcome| {
        let mut world = PaymentHarness::open(5_000);
        world.send(0, Fact::NotPaid { processor_id: "pi_100".into(), outcome, why: "w".into() }).unwrap();
        world
    };
    let asked = || {
        let mut world = PaymentHarness::deposited(5_000);
        world.refund(1, Some(2_000)).unwrap();
        world
    };
    let taken = || {
        let mut world = asked();
        world.hear_all();
        world
    };
    let mut failed = taken();
    failed.refund_at(1, RefundStatus::Failed, 2_000).unwrap();
    let mut reversed = PaymentHarness::deposited(5_000);
    reversed.reversed("dp_1", ReversalStep::DisputeOpened, 5_000);
    let mut not_paid_back = refused();
    not_paid_back.paid_back(RefundStatus::Failed);
    vec![
        ("created", created),
        ("open", open),
        ("paid", paid),
        ("deposited", PaymentHarness::deposited(5_000)),
        ("refund asked", asked()),
        ("refund taken", taken()),
        ("refund failed", failed),
        ("reversed", reversed),
        ("refused", refused()),
        ("refused and not paid back", not_paid_back),
        ("under review", under_review()),
        ("review settled", decided(settle())),
        ("review dismissed", decided(dismiss())),
        ("canceled", ended(PaymentFailure::Canceled)),
        ("expired", ended(PaymentFailure::Expired)),
    ]
}

fn every_command(world: &PaymentHarness) -> Vec<(&'static str, Command)> {
    let not_paid = |outcome| Fact::NotPaid { processor_id: "pi_100".into(), outcome, why: "w".into() };
    let refund_at = |status| Fact::RefundAt {
        refund_id: refund_id(1),
        processor_refund_id: "re_1".into(),
        status,
        amount_minor: 2_000,
    };
    let of = Some(intent(payment_id(0)));
    let reversed = |what| {
        let of = of.clone();
        Fact::Reversed { reversal_id: "dp_1".into(), what, amount_minor: 5_000, currency: eur(), of }
    };
    let review = world.it().review().map_or_else(|| OF_POUNDS.to_owned(), |review| review.to_string());
    vec![
        ("opened", Fact::Opened { processor_id: "pi_100".into() }.into()),
        ("lapse", Fact::NotOpened { why: "w".into() }.into()),
        ("paid", world.paid(0).into()),
        ("paid otherwise", pounds("pi_100").into()),
        ("event dismissed", Fact::EventDismissed { processor_id: "pi_100".into() }.into()),
        ("settle review", settle_of(&review).into()),
        ("dismiss review", dismiss_of(&review).into()),
        ("settle another review", settle_of("pi_9:700:GBP").into()),
        ("settle review, by an earlier release", settle_of("").into()),
        ("declined", not_paid(PaymentFailure::Declined).into()),
        ("canceled", not_paid(PaymentFailure::Canceled).into()),
        ("expired", not_paid(PaymentFailure::Expired).into()),
        ("deposited", Fact::Deposited.into()),
        ("deposit refused", Fact::DepositRefused { why: "w".into() }.into()),
        ("cancel", cancel().into()),
        ("refund", Request::Refund { refund_id: refund_id(2), amount_minor: Some(1_000), reason: "r".into() }.into()),
        ("refund taken", Fact::RefundTaken { refund_id: refund_id(1), amount_minor: 2_000 }.into()),
        ("refund refused", Fact::RefundRefused { refund_id: refund_id(1), why: "w".into() }.into()),
        ("refund pending", refund_at(RefundStatus::Pending).into()),
        ("refund succeeded", refund_at(RefundStatus::Succeeded).into()),
        ("refund failed", refund_at(RefundStatus::Failed).into()),
        ("given back", Fact::GivenBack { refund_id: refund_id(1) }.into()),
        ("dispute opened", reversed(ReversalStep::DisputeOpened).into()),
        ("dispute won", reversed(ReversalStep::DisputeWon).into()),
        ("posted", Fact::ReversalPosted { reversal_id: "dp_1".into(), is_undone: false }.into()),
        ("posted back", Fact::ReversalPosted { reversal_id: "dp_1".into(), is_undone: true }.into()),
        ("tick", Command::TICK),
    ]
}

#[test]
fn every_command_in_every_state_does_what_was_reviewed() {
    let mut table = String::new();
    for (name, mut world) in every_state() {
        world.now += TimeDelta::minutes(1);
        writeln!(table, "{name}").unwrap();
        for (does, command) in every_command(&world) {
            let by = match &command {
                Command::Request(_) => ann(),
                Command::Instruction(_) | Command::Fact(_) | Command::Maintenance(_) => Principal::system("test"),
            };
            assert!(!command.name().is_empty());
            let so = match Payment::decide(Some(world.it()), command, &world.ctx(&by, payment_id(0).0)) {
                Err(rejection) => format!("refused: {rejection}"),
                Ok(Transition { next: None, .. }) => "nothing".to_owned(),
                Ok(step) => {
                    let published: Vec<_> = step.events.iter().map(Event::subject).collect();
                    let audited: Vec<_> = step.audit.iter().map(|audit| audit.action.as_str()).collect();
                    let next = step.next.unwrap();
                    format!(
                        "{}, left {} {} {}",
                        next.state(),
                        next.left_minor(),
                        published.join(" "),
                        audited.join(" ")
                    )
                }
            };
            writeln!(table, "  {does}: {}", so.trim_end()).unwrap();
        }
    }
    insta::assert_snapshot!(table);
}

#[test]
fn every_state_that_must_end_says_until_when_and_why() {
    let mut table = String::new();
    for (name, world) in every_state() {
        let begun = world.now;
        let ends = world.it().deadline().map_or("may last".to_owned(), |deadline| {
            format!("{} s: {}", (deadline.at - begun).num_seconds(), deadline.reason)
        });
        writeln!(table, "{name}: {ends}").unwrap();
    }
    insta::assert_snapshot!(table);
}

#[test]
fn a_payment_decodes_to_itself() {
    for (_, world) in every_state() {
        let stored = serde_json::to_string(world.it()).unwrap();
        assert_eq!(&serde_json::from_str::<Payment>(&stored).unwrap(), world.it());
    }
}

#[test]
fn sum_of_micro_amounts_equals_the_sum_of_minor_units() {
    let world = PaymentHarness::deposited(5_000);
    assert_eq!(world.account.unwrap().balance, MicroAmount::of_minor(5_000).unwrap());
}

//! Payments under adverse conditions: messages of the processor, and between payment and account, arrive late, twice, out of order or
//! never. In the end the account has what the processor was paid, less what it paid back.

mod event_order;

use super::*;
use crate::authz::{CallerIdentity, TokenRole};
use crate::billing_account::{self, BillingAccount};
use crate::cross_entity_invariants;
use crate::event::Event;
use crate::id::AllocationId;
use crate::ledger::{Posting, PostingKind};
use crate::money::{MicroAmount, Price};
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
use crate::reactions::Reaction;
use crate::state_machine::{Command as _, TraceContext};
use std::fmt::Write as _;
use uuid::Uuid;

fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

fn ann() -> Principal {
    user("ann")
}

fn user(id: &str) -> Principal {
    Principal::Caller(CallerIdentity {
        user_id: id.into(),
        roles: [TokenRole::User].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: None,
        service_account: None,
    })
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

/// Ann's account, her payments, and the messages between them.
struct PaymentHarness {
    payments: BTreeMap<PaymentId, Payment>,
    account: Option<BillingAccount>,
    ledger: Vec<Posting>,
    /// Messages in flight.
    bus: Vec<Event>,
    errands: Vec<ProcessorCall>,
    policy: PolicyBook,
    now: Timestamp,
}

impl PaymentHarness {
    fn new() -> Self {
        Self {
            payments: BTreeMap::new(),
            account: None,
            ledger: Vec::new(),
            bus: Vec::new(),
            errands: Vec::new(),
            policy: PolicyBook::default(),
            now: Timestamp::from_timestamp(1_800_000_000, 0).unwrap(),
        }
    }

    /// With an open payment.
    fn open(amount_minor: i64) -> Self {
        let mut world = Self::new();
        world.create(0, amount_minor);
        world
    }

    /// With a deposited payment.
    fn deposited(amount_minor: i64) -> Self {
        let mut world = Self::open(amount_minor);
        world.pay(0);
        world.hear_all();
        world
    }

    fn ctx<'a>(&'a self, by: &'a Principal, id: Uuid) -> TransitionContext<'a> {
        TransitionContext {
            now: self.now,
            policy: &self.policy,
            by,
            correlation_id: "c",
            trace: TraceContext::default(),
            seed: 7,
            id,
            version: 1,
        }
    }

    fn ask(&mut self, by: &Principal, id: PaymentId, command: impl Into<Command>) -> Result<(), Rejection> {
        let step = Payment::decide(self.payments.get(&id), command.into(), &self.ctx(by, id.0))?;
        assert!(step.postings.is_empty());
        let Some(next) = step.next else {
            assert!(step.events.is_empty(), "what is not written is lost");
            return Ok(());
        };
        assert!(next.has_deadline_where_transient(), "{next:#?}");
        assert!(next.refunds_no_more_than_was_paid(), "{next:#?}");
        self.bus.extend(step.events);
        self.payments.insert(id, next);
        Ok(())
    }

    fn send(&mut self, n: u128, command: impl Into<Command>) -> Result<(), Rejection> {
        self.ask(&Principal::system("test"), payment_id(n), command)
    }

    fn tell_account(&mut self, command: impl Into<billing_account::Command>) -> Result<(), billing_account::Rejection> {
        let by = Principal::system("test");
        let step = BillingAccount::decide(self.account.as_ref(), command.into(), &self.ctx(&by, Uuid::from_u128(9)))?;
        if step.next.is_none() {
            assert!(step.events.is_empty() && step.postings.is_empty(), "what is not written is lost");
            return Ok(());
        }
        self.ledger.extend(step.postings);
        self.bus.extend(step.events);
        self.account = step.next;
        assert!(cross_entity_invariants::i3_the_balance_is_the_sum_of_its_entries(
            self.account.as_ref().unwrap(),
            &self.ledger
        ));
        Ok(())
    }

    fn deliver(&mut self, event: &Event) {
        match event.reaction() {
            Reaction::Payment(id, fact) => self.ask(&Principal::system("test"), id, fact).unwrap(),
            Reaction::Billing { fact, .. } => self.tell_account(fact).unwrap(),
            Reaction::CallProcessor(errand) => self.errands.push(errand),
            Reaction::Nothing => {}
            // Allocations are not simulated here.
            Reaction::Allocation(..) => {}
            Reaction::Place(_)
            | Reaction::Node(..)
            | Reaction::Terminal(..)
            | Reaction::DriveMachine(_)
            | Reaction::ResolveSshKeys { .. }
            | Reaction::SendSshKeys { .. }
            | Reaction::CloseTerminals { .. }
            | Reaction::CloseNodeTerminals { .. }
            | Reaction::ApplyProcessorEvent(_)
            | Reaction::Rollout(..)
            | Reaction::FindRolloutNodes(_)
            | Reaction::Tenant { .. } => panic!("not of this world: {event:?}"),
        }
    }

    fn hear_all(&mut self) {
        while !self.bus.is_empty() {
            let event = self.bus.remove(0);
            self.deliver(&event);
        }
    }

    fn create_as(&mut self, n: u128, amount_minor: i64) -> Result<(), Rejection> {
        let create = Request::Create {
            account_id: BillingAccountId(Uuid::from_u128(9)),
            holder: Holder::User("ann".into()),
            payer: "ann".into(),
            amount_minor,
            currency: eur(),
            success_url: "https://a.test/done".into(),
            cancel_url: "https://a.test/back".into(),
        };
        self.ask(&ann(), payment_id(n), create)
    }

    fn create(&mut self, n: u128, amount_minor: i64) {
        self.create_as(n, amount_minor).unwrap();
        self.send(n, Fact::Opened { processor_id: intent(payment_id(n)) }).unwrap();
    }

    fn paid(&self, n: u128) -> Fact {
        let payment = &self.payments[&payment_id(n)];
        Fact::Paid {
            processor_id: intent(payment.id),
            amount_minor: payment.amount_minor,
            currency: eur(),
            charge_id: Some("ch_1".into()),
        }
    }

    fn pay(&mut self, n: u128) {
        let paid = self.paid(n);
        self.send(n, paid).unwrap();
    }

    fn refund(&mut self, n: u128, amount_minor: Option<i64>) -> Result<(), Rejection> {
        let refund = Request::Refund { refund_id: refund_id(n), amount_minor, reason: "r".into() };
        self.ask(&ann(), payment_id(0), refund)
    }

    fn refund_at(&mut self, n: u128, status: RefundStatus, amount_minor: i64) -> Result<(), Rejection> {
        let processor_refund_id = format!("re_{n}");
        self.send(0, Fact::RefundAt { refund_id: refund_id(n), processor_refund_id, status, amount_minor })
    }

    /// The money that the account cannot have.
    fn paid_back(&mut self, status: RefundStatus) {
        let id = payment_id(0);
        let back = Fact::RefundAt {
            refund_id: RefundId(id.0),
            processor_refund_id: "re_0".into(),
            status,
            amount_minor: self.it().amount_minor,
        };
        self.send(0, back).unwrap();
    }

    fn reversed(&mut self, id: &str, what: ReversalStep, amount_minor: i64) {
        let command = Fact::Reversed { reversal_id: id.into(), what, amount_minor, currency: eur() };
        self.send(0, command).unwrap();
    }

    fn it(&self) -> &Payment {
        &self.payments[&payment_id(0)]
    }

    fn balance(&self) -> i64 {
        self.account.as_ref().unwrap().balance.minor()
    }

    fn taking(&self, n: u128) -> &RefundDebit {
        &self.it().refunds[&refund_id(n)].taking
    }

    fn pass(&mut self, time: TimeDelta) {
        self.now += time;
        let ids: Vec<_> = self.payments.keys().copied().collect();
        for id in ids {
            self.ask(&Principal::system("test"), id, Command::TICK).unwrap();
        }
    }

    fn use_up(&mut self, minor: i64) {
        let reason = "used".to_owned();
        self.tell_account(billing_account::Request::Adjust { amount_minor: -minor, currency: eur(), reason }).unwrap();
    }

    /// Adds an allocation with this cost per hour.
    fn rent(&mut self, n: u128, price: i64) {
        let allocation_id = AllocationId(Uuid::from_u128(n));
        let hold = billing_account::Fact::Hold {
            holder: Holder::User("ann".into()),
            allocation_id,
            user_id: "ann".into(),
            price: Price::new("EUR", price).unwrap(),
            gpu_count: 1,
        };
        self.tell_account(hold).unwrap();
        let from = Some(self.now);
        self.tell_account(billing_account::Fact::Usage { allocation_id, from, until: None }).unwrap();
    }
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

#[test]
fn refused_deposit_is_refunded_to_its_payer() {
    let mut world = refused();
    assert_eq!((world.it().state(), world.it().left_minor(), world.balance()), ("refused", 0, 100));
    let errand = world.errands.pop();
    assert!(matches!(errand, Some(ProcessorCall::Refund { amount_minor: 5_000, .. })), "{errand:?}");
    // A repeated message is answered again, without an effect.
    world.send(0, Fact::DepositRefused { why: "w".into() }).unwrap();
    world.send(0, Fact::Deposited).unwrap();
    assert_eq!(world.refund(1, None), Err(Rejection::NotPaid { state: PhaseName::Refused }));
    // The processor is called until it has paid.
    world.pass(TimeDelta::hours(1));
    world.hear_all();
    assert_eq!(world.errands.len(), 1);
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
fn a_deposit_lies_within_its_bounds() {
    let mut world = PaymentHarness::new();
    for amount in [i64::MIN, -1, 0, 999, 100_001, i64::MAX] {
        assert_eq!(world.create_as(0, amount), Err(Rejection::Amount { min: 1_000, max: 100_000 }), "{amount}");
    }
    world
        .policy
        .set(PolicyKey::BillingMaximumDeposit, PolicyScope::UserId("ann".into()), world.now, PolicyValue::Int(2_000))
        .unwrap();
    assert_eq!(world.create_as(0, 2_001), Err(Rejection::Amount { min: 1_000, max: 2_000 }));
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
    lapsed.send(0, Fact::Lapse { why: "not there".into() }).unwrap();
    assert_eq!(lapsed.it().state(), "created", "it may still be opened");
    lapsed.now += OPEN_FOR;
    lapsed.send(0, Fact::Lapse { why: "not there".into() }).unwrap();
    assert_eq!((lapsed.it().state(), lapsed.it().timer()), ("expired", None));
    let opened = lapsed.send(0, Fact::Opened { processor_id: "pi_100".into() });
    assert!(matches!(opened, Err(Rejection::Over { .. })), "a checkout that was opened too late must be canceled");
}

#[test]
fn refund_is_debited_before_it_is_paid() {
    let mut world = PaymentHarness::deposited(5_000);
    world.refund(1, Some(2_000)).unwrap();
    assert!(world.errands.is_empty(), "the account is asked first");
    world.hear_all();
    assert_eq!(world.balance(), 3_000);
    let due = ProcessorCall::Refund {
        payment_id: payment_id(0),
        refund_id: refund_id(1),
        processor_id: "pi_100".into(),
        amount_minor: 2_000,
        currency: eur(),
    };
    assert_eq!(world.errands, [due]);
    world.refund_at(1, RefundStatus::Pending, 2_000).unwrap();
    assert!(world.it().timer().is_some(), "it is looked after");
    world.refund_at(1, RefundStatus::Succeeded, 2_000).unwrap();
    world.refund_at(1, RefundStatus::Pending, 2_000).unwrap();
    assert!(world.it().is_settled() && world.it().timer().is_none());
    // The same id is the same refund, and the rest is what is left.
    world.refund(1, Some(2_000)).unwrap();
    assert_eq!(world.refund(2, Some(3_001)), Err(Rejection::MoreThanLeft { left: 3_000 }));
    for amount in [0, -1, i64::MIN] {
        assert_eq!(world.refund(2, Some(amount)), Err(Rejection::MoreThanLeft { left: 3_000 }));
    }
    world.refund(2, None).unwrap();
    world.hear_all();
    assert_eq!((world.balance(), world.it().left_minor()), (0, 0));
    assert_eq!(world.refund(3, None), Err(Rejection::MoreThanLeft { left: 0 }));
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
        let command =
            Fact::Reversed { reversal_id: "re_1".into(), what: ReversalStep::Refund, amount_minor: amount, currency };
        assert!(matches!(world.send(0, command), Err(Rejection::Differs { .. })));
    }
    for amount_minor in [0, -1, i64::MIN, i64::MAX] {
        let command =
            Fact::Reversed { reversal_id: "re_2".into(), what: ReversalStep::Refund, amount_minor, currency: eur() };
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
    let reversed = |what| Fact::Reversed { reversal_id: "dp_1".into(), what, amount_minor: 5_000, currency: eur() };
    vec![
        ("opened", Fact::Opened { processor_id: "pi_100".into() }.into()),
        ("lapse", Fact::Lapse { why: "w".into() }.into()),
        ("paid", world.paid(0).into()),
        ("declined", not_paid(PaymentFailure::Declined).into()),
        ("canceled", not_paid(PaymentFailure::Canceled).into()),
        ("expired", not_paid(PaymentFailure::Expired).into()),
        ("deposited", Fact::Deposited.into()),
        ("deposit refused", Fact::DepositRefused { why: "w".into() }.into()),
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
            let by = if matches!(command, Command::Request(Request::Refund { .. })) {
                ann()
            } else {
                Principal::system("test")
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
        let kept = serde_json::to_string(world.it()).unwrap();
        assert_eq!(&serde_json::from_str::<Payment>(&kept).unwrap(), world.it());
    }
}

#[test]
fn sum_of_micro_amounts_equals_the_sum_of_minor_units() {
    let world = PaymentHarness::deposited(5_000);
    assert_eq!(world.account.unwrap().balance, MicroAmount::of_minor(5_000).unwrap());
}

//! Accounts under adverse conditions: usage of allocations arrives late, twice, out of order or never, clocks go back, policies change. In
//! the end every allocation has cost its usage, to the millionth.

mod coverage;
mod credit;
mod holder_plan;
mod long_history;
mod refunds;
mod simulation;

use super::*;
use crate::authz::Principal;
use crate::event::Event;
use crate::id::{PaymentId, RefundId};
use crate::invariants::i3_the_balance_is_the_sum_of_its_entries;
use crate::ledger::{LedgerAccount, Posting};
use crate::policy::{PolicyBook, PolicyScope, PolicyValue};
use crate::state_machine::Command as _;
use chrono::TimeDelta;
use std::collections::BTreeSet;
use uuid::Uuid;

/// The start of every test.
fn begin() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

fn allocation(n: u64) -> AllocationId {
    AllocationId(Uuid::from_u128(u128::from(n) + 1))
}

/// One account, its ledger, and its published events.
struct Bench {
    account: Option<BillingAccount>,
    ledger: Vec<Posting>,
    published: Vec<Event>,
    audited: Vec<AuditRecord>,
    policy: PolicyBook,
    now: Timestamp,
}

impl Bench {
    /// Without an account. A window lasts a minute.
    fn new() -> Self {
        let (policy, now) = (PolicyBook::default(), begin());
        Self { account: None, ledger: Vec::new(), published: Vec::new(), audited: Vec::new(), policy, now }
    }

    fn with(minor: i64) -> Self {
        let mut bench = Self::new();
        bench.set(PolicyKey::BillingAdjustmentMax, 100_000_000);
        bench.send(Request::Open { holder: Holder::User("ann".into()), currency: eur() }).unwrap();
        bench.give(minor);
        bench
    }

    fn set(&mut self, key: PolicyKey, value: i64) {
        self.policy.set(key, PolicyScope::Global, Timestamp::UNIX_EPOCH, PolicyValue::Int(value)).unwrap();
    }

    fn send(&mut self, command: impl Into<Command>) -> Result<(), Rejection> {
        let by = Principal::system("test");
        let ctx = TransitionContext {
            seed: 7,
            id: Uuid::from_u128(9),
            ..TransitionContext::in_test(self.now, &self.policy, &by)
        };
        let step = BillingAccount::decide(self.account.as_ref(), command.into(), &ctx)?;
        if step.next.is_none() {
            assert!(step.events.is_empty() && step.postings.is_empty(), "what is not written is lost");
            return Ok(());
        }
        self.ledger.extend(step.postings);
        self.published.extend(step.events);
        self.audited.extend(step.audit);
        self.account = step.next;
        assert!(self.it().is_covered_until_the_next_charge(), "I3 at {}: {:#?}", self.now, self.it());
        Ok(())
    }

    fn it(&self) -> &BillingAccount {
        self.account.as_ref().unwrap()
    }

    fn give(&mut self, amount_minor: i64) {
        self.send(Request::Adjust { amount_minor, currency: eur(), reason: "r".into() }).unwrap();
    }

    fn hold(&mut self, n: u64, price: i64, gpu_count: u32) -> Result<(), Rejection> {
        let (holder, price) = (Holder::User("ann".into()), Price::new("EUR", price).unwrap());
        let (allocation_id, user_id) = (allocation(n), "ann".into());
        self.send(Instruction::Hold { holder, allocation_id, user_id, price, gpu_count, plan: None })
    }

    fn use_of(&mut self, n: u64, from: Timestamp, until: Option<Timestamp>) {
        self.send(Instruction::MeterUsage { allocation_id: allocation(n), from: Some(from), until }).unwrap();
    }

    /// Adds an active allocation of so many GPUs at one unit an hour each.
    fn rent(&mut self, n: u64, price: i64) {
        self.hold(n, price, 1).unwrap();
        self.use_of(n, self.now, None);
    }

    fn pass(&mut self, seconds: i64) {
        self.now += TimeDelta::seconds(seconds);
        self.send(Command::TICK).unwrap();
    }

    /// Advances the clock to the account's next tick, and sends it.
    fn tick_when_due(&mut self) {
        self.now = self.it().timer().unwrap_or(self.now).max(self.now);
        self.send(Command::TICK).unwrap();
    }

    fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.published.iter().filter(|event| which(event)).count()
    }

    fn depletions(&self) -> usize {
        self.count(|event| matches!(event, Event::BalanceDepleted { .. }))
    }

    fn warnings(&self) -> usize {
        self.count(|event| matches!(event, Event::BalanceLow { .. }))
    }

    /// The cost of an allocation, and the written-off part of it.
    fn cost(&self, n: u64) -> (i64, i64) {
        let of_it = self.ledger.iter().filter(|it| it.usage.is_some_and(|usage| usage.allocation_id == allocation(n)));
        of_it.flat_map(Posting::entries).fold((0, 0), |(cost, ours), (book, amount)| match book {
            LedgerAccount::Revenue => (cost + amount.get(), ours),
            LedgerAccount::WriteOff => (cost, ours - amount.get()),
            LedgerAccount::Prepaid
            | LedgerAccount::Adjustments
            | LedgerAccount::ProcessorClearing
            | LedgerAccount::Refunds => (cost, ours),
        })
    }

    #[track_caller]
    fn check(&self) {
        assert!(i3_the_balance_is_the_sum_of_its_entries(self.it(), &self.ledger), "I3: {:#?}", self.it());
        let sums_to_zero = |it: &Posting| it.entries().iter().map(|(_, amount)| amount.get()).sum::<i64>() == 0;
        assert!(self.ledger.iter().all(sums_to_zero));
        let stored = serde_json::to_string(self.it()).unwrap();
        assert_eq!(&serde_json::from_str::<BillingAccount>(&stored).unwrap(), self.it());
    }
}

#[test]
fn an_hour_is_charged_window_by_window_and_costs_its_price() {
    let mut bench = Bench::with(10_000);
    bench.rent(1, 1_001);
    for minute in 1..=60 {
        bench.pass(60);
        assert_eq!(bench.ledger.len(), 1 + minute, "one posting a window");
        bench.check();
    }
    assert_eq!(bench.it().balance, MicroAmount::of_minor(10_000 - 1_001).unwrap());
    let first = bench.ledger[1].usage.unwrap();
    assert_eq!((first.from, first.until), (begin(), begin() + TimeDelta::seconds(60)));
    assert_eq!(bench.ledger[1].amount, MicroAmount::of(16_683_333), "1001 / 60, and the rest is carried");
}

#[test]
fn allocation_without_cover_is_rejected() {
    let mut bench = Bench::with(10);
    // A window of 600 an hour costs 10.
    assert_eq!(
        bench.hold(1, 601, 1),
        Err(Rejection::InsufficientBalance {
            needed: MicroAmount::of(10_016_666),
            available: MicroAmount::of(10_000_000),
            currency: Some(eur()),
        })
    );
    let text = bench.hold(1, 601, 1).map_err(|rejection| state_machine::Rejection::explain(rejection).message);
    let expected =
        "0.10016666 EUR are more than the 0.10 EUR that are available; take less, or pay in first.".to_owned();
    assert_eq!(text, Err(expected));
    bench.hold(1, 300, 1).unwrap();
    bench.hold(1, 300, 1).unwrap();
    bench.hold(2, 300, 1).unwrap();
    assert!(matches!(bench.hold(3, 1, 1), Err(Rejection::InsufficientBalance { .. })), "all of it is held");
    bench.send(Instruction::MeterUsage { allocation_id: allocation(1), from: None, until: Some(bench.now) }).unwrap();
    bench.hold(3, 300, 1).unwrap();
    bench.hold(4, 0, 1).unwrap();
    let dollars = Price::new("USD", 1).unwrap();
    let command = Instruction::Hold {
        holder: Holder::User("ann".into()),
        allocation_id: allocation(5),
        user_id: "ann".into(),
        price: dollars,
        gpu_count: 1,
        plan: None,
    };
    assert!(matches!(bench.send(command), Err(Rejection::CurrencyDiffers { .. })));
    bench.check();
}

#[test]
fn user_without_an_account_rents_free_allocations_only() {
    let mut bench = Bench::new();
    assert!(matches!(bench.hold(1, 1, 1), Err(Rejection::InsufficientBalance { .. })));
    assert!(bench.account.is_none());
    bench.hold(1, 0, 8).unwrap();
    bench.use_of(1, begin(), None);
    bench.pass(86_400);
    assert_eq!((bench.it().balance, bench.it().state(), bench.ledger.len()), (MicroAmount::ZERO, "open", 0));
}

#[test]
fn repeated_usage_is_charged_once() {
    let mut bench = Bench::with(10_000);
    bench.hold(1, 3_600, 1).unwrap();
    let until = begin() + TimeDelta::seconds(90);
    for _ in 0..100 {
        bench.use_of(1, begin(), None);
    }
    bench.pass(90);
    for _ in 0..100 {
        bench.use_of(1, begin(), Some(until));
        bench.use_of(1, begin(), None);
        bench.hold(1, 3_600, 1).unwrap();
    }
    bench.pass(600);
    assert_eq!(bench.cost(1), (90_000_000, 0));
    assert!(bench.it().meters.is_empty() && bench.it().window.is_none() && bench.it().timer().is_none());
    bench.check();
}

#[test]
fn end_before_the_last_charge_is_credited() {
    let mut bench = Bench::with(10_000);
    bench.rent(1, 3_600);
    bench.pass(600);
    assert_eq!(bench.cost(1), (600_000_000, 0));
    // The machine's fault began long before it was reported.
    bench.use_of(1, begin(), Some(begin() + TimeDelta::seconds(1)));
    assert_eq!(bench.cost(1), (1_000_000, 0));
    assert_eq!(bench.it().balance, MicroAmount::of_minor(9_999).unwrap());
    bench.check();
}

#[test]
fn low_balance_is_published_once_per_fall() {
    let mut bench = Bench::with(600);
    bench.rent(1, 6_000);
    assert_eq!(bench.warnings(), 0);
    bench.pass(60);
    assert_eq!((bench.it().balance.minor(), bench.warnings()), (500, 0), "500 is not below 500");
    bench.pass(60);
    bench.pass(60);
    assert_eq!(bench.warnings(), 1);
    bench.give(1_000);
    bench.pass(60);
    assert_eq!(bench.warnings(), 1);
    bench.pass(1_200);
    assert_eq!(bench.warnings(), 2);
    // An account that starts low was never above the threshold.
    assert_eq!(Bench::with(10).warnings(), 0);
}

#[test]
fn depletion_of_twenty_allocations_is_one_event_and_later_cost_is_written_off() {
    for (down_for, grace) in [(0, 0), (0, 90), (86_400, 0), (86_400, 90)] {
        let mut bench = Bench::with(1_000);
        bench.set(PolicyKey::BillingDepletionGrace, grace);
        // A window of all costs 20 x 10: after five the balance is used up.
        (0..20).for_each(|n| bench.rent(n, 600));
        (0..4).for_each(|_| bench.pass(60));
        assert_eq!((bench.it().balance.minor(), bench.depletions()), (200, 0));
        bench.pass(60 + down_for);
        bench.pass(grace);
        assert_eq!(bench.depletions(), 1);
        assert_eq!(bench.it().state(), "depleted");
        assert_eq!(bench.count(|event| matches!(event, Event::AllocationUncovered { .. })), 20);
        bench.pass(60);
        // They end slightly later than requested.
        let until = bench.now;
        (0..20).for_each(|n| bench.use_of(n, begin(), Some(until)));
        let all: i64 = (0..20).map(|n| bench.cost(n).0).sum();
        let ours: i64 = (0..20).map(|n| bench.cost(n).1).sum();
        let seconds = (until - begin()).num_seconds();
        assert_eq!(all, 20 * 600 * seconds * 1_000_000 / 3600, "nothing is lost");
        assert_eq!(all - ours, 20 * 600 * (300 + grace) * 1_000_000 / 3600, "charged up to the end of the grace");
        assert!(
            bench.it().balance
                >= MicroAmount::ZERO.minus(MicroAmount::of_minor(20 * 600 * (60 + grace) / 3600).unwrap())
        );
        assert!(matches!(bench.hold(99, 1, 1), Err(Rejection::InsufficientBalance { .. })), "at zero, nothing new");
        bench.check();
        // After a deposit the account is open again.
        bench.give(10_000);
        assert_eq!(bench.it().state(), "open");
        bench.rent(100, 600);
        assert_eq!(bench.depletions(), 1);
    }
}

#[test]
fn deposit_within_the_grace_period_keeps_allocations_running() {
    let mut bench = Bench::with(20);
    bench.set(PolicyKey::BillingDepletionGrace, 3_600);
    bench.rent(1, 600);
    bench.pass(120);
    assert_eq!((bench.it().state(), bench.depletions()), ("grace", 1));
    assert_eq!(bench.it().deadline().unwrap().at, begin() + TimeDelta::seconds(3_720));
    bench.pass(600);
    assert_eq!(bench.it().balance, MicroAmount::of_minor(-100).unwrap(), "the grace is the user's to pay");
    bench.give(50);
    assert_eq!(bench.it().state(), "grace", "that is not enough for another window");
    bench.give(1_000);
    assert_eq!(bench.it().state(), "open");
    bench.pass(6_000);
    assert_eq!(
        (bench.cost(1), bench.depletions()),
        ((1_120_000_000, 0), 2),
        "the new money is used up, and there is a grace again"
    );
    bench.check();
}

#[test]
fn allocation_covered_again_after_another_ends_continues() {
    let hour = TimeDelta::hours(1);
    for dear_runs in [true, false] {
        let mut bench = Bench::with(30);
        bench.set(PolicyKey::BillingDepletionGrace, 3_600);
        bench.rent(1, 60);
        // A window of it is 20: after one the next is not covered.
        bench.hold(2, 1_200, 1).unwrap();
        if dear_runs {
            bench.use_of(2, begin(), None);
        }
        bench.pass(60);
        while bench.it().state() == "open" {
            bench.pass(60);
        }
        let ends = bench.now;
        let from = dear_runs.then(begin);
        bench.send(Instruction::MeterUsage { allocation_id: allocation(2), from, until: Some(ends) }).unwrap();
        assert_eq!((bench.it().state(), bench.it().deadline()), ("open", None), "what is left covers the other");
        // It runs past the end of that grace period, until its own money is used up.
        let covered = bench.it().balance.minor() - 1;
        (0..covered).for_each(|_| bench.pass(60));
        assert_eq!(bench.count(|event| matches!(event, Event::AllocationUncovered { .. })), 0);
        assert!(bench.now < ends + hour);
        bench.pass(120);
        assert_eq!(
            (bench.it().state(), bench.depletions()),
            ("grace", 2),
            "it is another crossing, and has a grace of its own"
        );
        bench.check();
    }
}

#[test]
fn late_usage_of_a_timely_release_spares_the_others() {
    let mut bench = Bench::with(100);
    bench.set(PolicyKey::BillingDepletionGrace, 3_600);
    bench.rent(1, 1);
    bench.rent(2, 2_400);
    (0..2).for_each(|_| bench.pass(60));
    assert_eq!(bench.it().state(), "grace");
    let released = bench.now;
    // The account's worker was down until after the grace period.
    bench.now += TimeDelta::hours(2);
    bench.use_of(2, begin(), Some(released));
    bench.pass(0);
    assert_eq!((bench.it().state(), bench.depletions()), ("open", 1));
    assert_eq!(bench.count(|event| matches!(event, Event::AllocationUncovered { .. })), 0);
    bench.check();
}

#[test]
fn account_without_cost_takes_the_currency_of_the_first_deposit() {
    let deposit = |currency: &str| Instruction::Deposit {
        payment_id: PaymentId(Uuid::from_u128(5)),
        holder: Holder::User("ann".into()),
        currency: Currency::parse(currency).unwrap(),
        amount_minor: 1_000,
    };
    let free = |currency: &str| Instruction::Hold {
        holder: Holder::User("ann".into()),
        allocation_id: allocation(1),
        user_id: "ann".into(),
        price: Price::new(currency, 0).unwrap(),
        gpu_count: 1,
        plan: None,
    };
    let mut bench = Bench::new();
    bench.send(free("USD")).unwrap();
    for _ in 0..3 {
        bench.send(deposit("EUR")).unwrap();
    }
    assert_eq!((bench.it().currency.as_str(), bench.it().balance.minor(), bench.ledger.len()), ("EUR", 1_000, 1));
    assert_eq!(bench.ledger[0].currency.as_str(), "EUR");
    // Once it has money, the currency stays.
    let other = Instruction::Deposit {
        payment_id: PaymentId(Uuid::from_u128(6)),
        holder: Holder::User("ann".into()),
        currency: Currency::parse("USD").unwrap(),
        amount_minor: 1_000,
    };
    for is_again in [false, true] {
        bench.published.clear();
        bench.send(other.clone()).unwrap();
        assert!(matches!(&bench.published[..], [Event::DepositRefused { is_again: again, .. }] if *again == is_again));
    }
    assert_eq!((bench.it().balance.minor(), bench.ledger.len()), (1_000, 1));
    bench.check();
}

#[test]
fn resent_answer_to_a_payment_notifies_no_user() {
    let mut bench = Bench::with(100);
    let (payment_id, refund_id) = (PaymentId(Uuid::from_u128(5)), RefundId(Uuid::from_u128(6)));
    let holder = Holder::User("ann".into());
    let commands = [
        Instruction::Deposit { payment_id, holder, currency: eur(), amount_minor: 1_000 },
        Instruction::TakeRefund { refund_id, payment_id, amount_minor: 5_000, is_exact: true },
        Instruction::GiveBackRefund { refund_id, payment_id, amount_minor: 10 },
        Instruction::Reverse { reversal_id: "re_1".into(), payment_id, is_dispute: false, amount_minor: 10 },
        Instruction::UndoReversal { reversal_id: "re_1".into(), payment_id, is_dispute: false, amount_minor: 10 },
    ];
    for command in commands {
        bench.published.clear();
        for expected in [1, 0, 0] {
            bench.published.clear();
            bench.send(command.clone()).unwrap();
            // The payment gets an answer each time.
            assert_eq!(bench.published.len(), 1, "{command:?}");
            let notices = bench.published.iter().flat_map(Event::notifications).count();
            assert_eq!(notices, expected, "{:?}", bench.published);
        }
    }
}

#[test]
fn a_window_may_become_longer_or_shorter_while_it_runs() {
    let mut bench = Bench::with(100_000);
    bench.rent(1, 777);
    for length in [60, 1, 3_600, 7, 61, 1] {
        bench.set(PolicyKey::BillingWindow, length);
        bench.pass(1_000);
    }
    let until = bench.now;
    bench.use_of(1, begin(), Some(until));
    assert_eq!(bench.cost(1), (777 * 6_000 * 1_000_000 / 3600, 0));
    bench.check();
}

#[test]
fn clock_jump_charges_no_period_twice() {
    let mut bench = Bench::with(100_000);
    bench.rent(1, 3_600);
    bench.pass(3_600);
    bench.now -= TimeDelta::seconds(3_000);
    let before = bench.ledger.len();
    bench.pass(60);
    assert_eq!(bench.ledger.len(), before, "it has not caught up");
    let until = bench.now;
    bench.use_of(1, begin(), Some(until));
    assert_eq!(bench.cost(1), (660_000_000, 0));
    // An allocation that ended before it started, by two clocks.
    bench.rent(2, 3_600);
    bench.use_of(2, bench.now, Some(begin()));
    assert_eq!(bench.cost(2), (0, 0));
    bench.check();
}

#[test]
fn operator_credits_within_bounds_and_debits_available_money() {
    let mut bench = Bench::with(100);
    let adjust = |bench: &mut Bench, amount_minor| {
        bench.send(Request::Adjust { amount_minor, currency: eur(), reason: "r".into() })
    };
    for amount in [0, i64::MIN, i64::MAX, 100_000_001, -100_000_001] {
        assert_eq!(
            adjust(&mut bench, amount),
            Err(Rejection::Amount { max: 100_000_000, currency: Some(eur()) }),
            "{amount}"
        );
    }
    assert!(matches!(adjust(&mut bench, -101), Err(Rejection::InsufficientBalance { .. })));
    adjust(&mut bench, -100).unwrap();
    let dollars = Request::Adjust { amount_minor: 1, currency: Currency::parse("USD").unwrap(), reason: "r".into() };
    assert!(matches!(bench.send(dollars), Err(Rejection::CurrencyDiffers { .. })));
    let full = (0..1001).find_map(|_| adjust(&mut bench, 100_000_000).err());
    assert_eq!(full, Some(Rejection::Full { currency: Some(eur()) }));
    bench.check();
}

#[test]
fn no_two_charges_of_an_allocation_begin_at_the_same_instant() {
    let mut bench = Bench::with(100_000);
    bench.rent(1, 3_600);
    (0..100).for_each(|_| bench.pass(61));
    let starts: BTreeSet<_> = bench.ledger.iter().filter_map(|it| it.usage.map(|usage| usage.from)).collect();
    assert_eq!(starts.len(), bench.ledger.len() - 1);
}

//! Accounts in hostile hands: what is said of allocations comes late, twice, out of order or never, clocks go back, values change. In the
//! end every allocation has cost what it was used, to the millionth.

#![allow(clippy::unwrap_used)]

mod cover;
mod refunds;

use super::*;
use crate::authz::Principal;
use crate::event::Event;
use crate::invariant::{i3_the_balance_is_the_sum_of_its_entries, i3_what_accrues_is_covered};
use crate::ledger::{Book, Posting};
use crate::machine::Trace;
use crate::policy::{PolicyBook, Scope, Value};
use chrono::TimeDelta;
use proptest::prelude::*;
use std::collections::BTreeSet;
use uuid::Uuid;

/// When everything begins.
fn begin() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn eur() -> Currency {
    Currency::parse("EUR").unwrap()
}

fn allocation(n: u64) -> AllocationId {
    AllocationId(Uuid::from_u128(u128::from(n) + 1))
}

/// One account, its ledger, and what it has said.
struct Bench {
    account: Option<BillingAccount>,
    ledger: Vec<Posting>,
    said: Vec<Event>,
    policy: PolicyBook,
    now: Timestamp,
}

impl Bench {
    /// Nobody has an account yet. A window lasts a minute.
    fn new() -> Self {
        let (policy, now) = (PolicyBook::default(), begin());
        Self { account: None, ledger: Vec::new(), said: Vec::new(), policy, now }
    }

    fn with(minor: i64) -> Self {
        let mut bench = Self::new();
        bench.set(Key::BillingAdjustmentMax, 100_000_000);
        bench.tell(Command::Open { holder: Holder::User("ann".into()), currency: eur() }).unwrap();
        bench.give(minor);
        bench
    }

    fn set(&mut self, key: Key, value: i64) {
        self.policy.set(key, Scope::Global, Timestamp::UNIX_EPOCH, Value::Int(value)).unwrap();
    }

    fn tell(&mut self, command: Command) -> Result<(), Rejection> {
        let by = Principal::system("test");
        let ctx = Ctx {
            now: self.now,
            policy: &self.policy,
            by: &by,
            correlation_id: "c",
            trace: Trace::default(),
            seed: 7,
            id: Uuid::from_u128(9),
            version: 1,
        };
        let step = BillingAccount::decide(self.account.as_ref(), command, &ctx)?;
        if step.next.is_none() {
            assert!(step.events.is_empty() && step.postings.is_empty(), "what is not written is lost");
            return Ok(());
        }
        self.ledger.extend(step.postings);
        self.said.extend(step.events);
        self.account = step.next;
        assert!(i3_what_accrues_is_covered(self.it()), "I3 at {}: {:#?}", self.now, self.it());
        Ok(())
    }

    fn it(&self) -> &BillingAccount {
        self.account.as_ref().unwrap()
    }

    fn give(&mut self, amount_minor: i64) {
        self.tell(Command::Adjust { amount_minor, currency: eur(), reason: "r".into() }).unwrap();
    }

    fn hold(&mut self, n: u64, price: i64, gpu_count: u32) -> Result<(), Rejection> {
        let (holder, price) = (Holder::User("ann".into()), Price::new("EUR", price).unwrap());
        self.tell(Command::Hold { holder, allocation_id: allocation(n), user_id: "ann".into(), price, gpu_count })
    }

    fn use_of(&mut self, n: u64, from: Timestamp, until: Option<Timestamp>) {
        self.tell(Command::Usage { allocation_id: allocation(n), from: Some(from), until }).unwrap();
    }

    /// Rents so many GPUs for one unit an hour each, active at once.
    fn rent(&mut self, n: u64, price: i64) {
        self.hold(n, price, 1).unwrap();
        self.use_of(n, self.now, None);
    }

    fn pass(&mut self, seconds: i64) {
        self.now += TimeDelta::seconds(seconds);
        self.tell(Command::Tick).unwrap();
    }

    /// The clock goes on to when the account wants its next tick, which comes.
    fn tick_when_due(&mut self) {
        self.now = self.it().timer().unwrap_or(self.now).max(self.now);
        self.tell(Command::Tick).unwrap();
    }

    fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.said.iter().filter(|event| which(event)).count()
    }

    fn depletions(&self) -> usize {
        self.count(|event| matches!(event, Event::BalanceDepleted { .. }))
    }

    fn warnings(&self) -> usize {
        self.count(|event| matches!(event, Event::BalanceLow { .. }))
    }

    /// What an allocation has cost, and of that what was ours to bear.
    fn cost(&self, n: u64) -> (i64, i64) {
        let of_it = self.ledger.iter().filter(|it| it.usage.is_some_and(|usage| usage.allocation_id == allocation(n)));
        of_it.flat_map(Posting::entries).fold((0, 0), |(cost, ours), (book, amount)| match book {
            Book::Revenue => (cost + amount.get(), ours),
            Book::WriteOff => (cost, ours - amount.get()),
            Book::Prepaid | Book::Adjustments | Book::ProcessorClearing | Book::Refunds => (cost, ours),
        })
    }

    #[track_caller]
    fn check(&self) {
        assert!(i3_the_balance_is_the_sum_of_its_entries(self.it(), &self.ledger), "I3: {:#?}", self.it());
        let sums_to_zero = |it: &Posting| it.entries().iter().map(|(_, amount)| amount.get()).sum::<i64>() == 0;
        assert!(self.ledger.iter().all(sums_to_zero));
        let kept = serde_json::to_string(self.it()).unwrap();
        assert_eq!(&serde_json::from_str::<BillingAccount>(&kept).unwrap(), self.it());
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
    assert_eq!(bench.it().balance, Micro::of_minor(10_000 - 1_001).unwrap());
    let first = bench.ledger[1].usage.unwrap();
    assert_eq!((first.from, first.until), (begin(), begin() + TimeDelta::seconds(60)));
    assert_eq!(bench.ledger[1].amount, Micro::of(16_683_333), "1001 / 60, and the rest is carried");
}

#[test]
fn nothing_is_rented_that_is_not_covered() {
    let mut bench = Bench::with(10);
    // A window of 600 an hour costs 10.
    assert_eq!(
        bench.hold(1, 601, 1),
        Err(Rejection::InsufficientBalance { needed: Micro::of(10_016_666), available: Micro::of(10_000_000) })
    );
    bench.hold(1, 300, 1).unwrap();
    bench.hold(1, 300, 1).unwrap();
    bench.hold(2, 300, 1).unwrap();
    assert!(matches!(bench.hold(3, 1, 1), Err(Rejection::InsufficientBalance { .. })), "all of it is held");
    bench.tell(Command::Usage { allocation_id: allocation(1), from: None, until: Some(bench.now) }).unwrap();
    bench.hold(3, 300, 1).unwrap();
    bench.hold(4, 0, 1).unwrap();
    let dollars = Price::new("USD", 1).unwrap();
    let command = Command::Hold {
        holder: Holder::User("ann".into()),
        allocation_id: allocation(5),
        user_id: "ann".into(),
        price: dollars,
        gpu_count: 1,
    };
    assert!(matches!(bench.tell(command), Err(Rejection::CurrencyDiffers { .. })));
    bench.check();
}

#[test]
fn who_has_no_account_rents_what_is_free_and_nothing_else() {
    let mut bench = Bench::new();
    assert!(matches!(bench.hold(1, 1, 1), Err(Rejection::InsufficientBalance { .. })));
    assert!(bench.account.is_none());
    bench.hold(1, 0, 8).unwrap();
    bench.use_of(1, begin(), None);
    bench.pass(86_400);
    assert_eq!((bench.it().balance, bench.it().state(), bench.ledger.len()), (Micro::ZERO, "open", 0));
}

#[test]
fn what_is_said_a_hundred_times_is_charged_once() {
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
fn an_end_before_the_last_window_is_given_back() {
    let mut bench = Bench::with(10_000);
    bench.rent(1, 3_600);
    bench.pass(600);
    assert_eq!(bench.cost(1), (600_000_000, 0));
    // The machine's fault was there long before it was heard of.
    bench.use_of(1, begin(), Some(begin() + TimeDelta::seconds(1)));
    assert_eq!(bench.cost(1), (1_000_000, 0));
    assert_eq!(bench.it().balance, Micro::of_minor(9_999).unwrap());
    bench.check();
}

#[test]
fn a_low_balance_is_said_once_for_each_time_it_becomes_low() {
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
    // An account that begins low was never above.
    assert_eq!(Bench::with(10).warnings(), 0);
}

#[test]
fn twenty_that_run_are_depleted_with_one_word_and_what_they_cost_after_it_is_ours() {
    for (down_for, grace) in [(0, 0), (0, 90), (86_400, 0), (86_400, 90)] {
        let mut bench = Bench::with(1_000);
        bench.set(Key::BillingDepletionGrace, grace);
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
        // They end a little later than they were told to.
        let until = bench.now;
        (0..20).for_each(|n| bench.use_of(n, begin(), Some(until)));
        let all: i64 = (0..20).map(|n| bench.cost(n).0).sum();
        let ours: i64 = (0..20).map(|n| bench.cost(n).1).sum();
        let seconds = (until - begin()).num_seconds();
        assert_eq!(all, 20 * 600 * seconds * 1_000_000 / 3600, "nothing is lost");
        assert_eq!(all - ours, 20 * 600 * (300 + grace) * 1_000_000 / 3600, "charged up to the end of the grace");
        assert!(bench.it().balance >= Micro::ZERO.minus(Micro::of_minor(20 * 600 * (60 + grace) / 3600).unwrap()));
        assert!(matches!(bench.hold(99, 1, 1), Err(Rejection::InsufficientBalance { .. })), "at zero, nothing new");
        bench.check();
        // Money comes in, and it goes on.
        bench.give(10_000);
        assert_eq!(bench.it().state(), "open");
        bench.rent(100, 600);
        assert_eq!(bench.depletions(), 1);
    }
}

#[test]
fn money_that_comes_in_time_keeps_what_runs() {
    let mut bench = Bench::with(20);
    bench.set(Key::BillingDepletionGrace, 3_600);
    bench.rent(1, 600);
    bench.pass(120);
    assert_eq!((bench.it().state(), bench.depletions()), ("grace", 1));
    assert_eq!(bench.it().deadline().unwrap().at, begin() + TimeDelta::seconds(3_720));
    bench.pass(600);
    assert_eq!(bench.it().balance, Micro::of_minor(-100).unwrap(), "the grace is the user's to pay");
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
fn what_is_covered_again_since_something_else_has_ended_runs_on() {
    let hour = TimeDelta::hours(1);
    for dear_runs in [true, false] {
        let mut bench = Bench::with(30);
        bench.set(Key::BillingDepletionGrace, 3_600);
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
        bench.tell(Command::Usage { allocation_id: allocation(2), from, until: Some(ends) }).unwrap();
        assert_eq!((bench.it().state(), bench.it().deadline()), ("open", None), "what is left covers the other");
        // It runs past the end of that grace, until its own money is used up.
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
fn what_was_released_in_time_and_heard_of_late_spares_the_others_all_the_same() {
    let mut bench = Bench::with(100);
    bench.set(Key::BillingDepletionGrace, 3_600);
    bench.rent(1, 1);
    bench.rent(2, 2_400);
    (0..2).for_each(|_| bench.pass(60));
    assert_eq!(bench.it().state(), "grace");
    let released = bench.now;
    // The account's worker was away until after the end of the grace.
    bench.now += TimeDelta::hours(2);
    bench.use_of(2, begin(), Some(released));
    bench.pass(0);
    assert_eq!((bench.it().state(), bench.depletions()), ("open", 1));
    assert_eq!(bench.count(|event| matches!(event, Event::AllocationUncovered { .. })), 0);
    bench.check();
}

#[test]
fn an_account_that_costs_nothing_yet_takes_the_currency_of_the_first_money() {
    let deposit = |currency: &str| Command::Deposit {
        payment_id: PaymentId(Uuid::from_u128(5)),
        holder: Holder::User("ann".into()),
        currency: Currency::parse(currency).unwrap(),
        amount_minor: 1_000,
    };
    let free = |currency: &str| Command::Hold {
        holder: Holder::User("ann".into()),
        allocation_id: allocation(1),
        user_id: "ann".into(),
        price: Price::new(currency, 0).unwrap(),
        gpu_count: 1,
    };
    let mut bench = Bench::new();
    bench.tell(free("USD")).unwrap();
    for _ in 0..3 {
        bench.tell(deposit("EUR")).unwrap();
    }
    assert_eq!((bench.it().currency.as_str(), bench.it().balance.minor(), bench.ledger.len()), ("EUR", 1_000, 1));
    assert_eq!(bench.ledger[0].currency.as_str(), "EUR");
    // Once there is money in it, it stays.
    let other = Command::Deposit {
        payment_id: PaymentId(Uuid::from_u128(6)),
        holder: Holder::User("ann".into()),
        currency: Currency::parse("USD").unwrap(),
        amount_minor: 1_000,
    };
    for is_again in [false, true] {
        bench.said.clear();
        bench.tell(other.clone()).unwrap();
        assert!(matches!(&bench.said[..], [Event::DepositRefused { is_again: again, .. }] if *again == is_again));
    }
    assert_eq!((bench.it().balance.minor(), bench.ledger.len()), (1_000, 1));
    bench.check();
}

#[test]
fn what_is_said_again_since_the_payment_did_not_hear_it_is_news_to_nobody_else() {
    let mut bench = Bench::with(100);
    let (payment_id, refund_id) = (PaymentId(Uuid::from_u128(5)), RefundId(Uuid::from_u128(6)));
    let holder = Holder::User("ann".into());
    let commands = [
        Command::Deposit { payment_id, holder, currency: eur(), amount_minor: 1_000 },
        Command::TakeRefund { refund_id, payment_id, amount_minor: 5_000, is_exact: true },
        Command::GiveBackRefund { refund_id, payment_id, amount_minor: 10 },
        Command::Reverse { reversal_id: "re_1".into(), payment_id, is_dispute: false, amount_minor: 10 },
        Command::UndoReversal { reversal_id: "re_1".into(), payment_id, is_dispute: false, amount_minor: 10 },
    ];
    for command in commands {
        bench.said.clear();
        for told in [1, 0, 0] {
            bench.said.clear();
            bench.tell(command.clone()).unwrap();
            // The payment hears it each time.
            assert_eq!(bench.said.len(), 1, "{command:?}");
            let notices = bench.said.iter().flat_map(crate::notification::Notice::of).count();
            assert_eq!(notices, told, "{:?}", bench.said);
        }
    }
}

#[test]
fn a_window_may_become_longer_or_shorter_while_it_runs() {
    let mut bench = Bench::with(100_000);
    bench.rent(1, 777);
    for length in [60, 1, 3_600, 7, 61, 1] {
        bench.set(Key::BillingWindow, length);
        bench.pass(1_000);
    }
    let until = bench.now;
    bench.use_of(1, begin(), Some(until));
    assert_eq!(bench.cost(1), (777 * 6_000 * 1_000_000 / 3600, 0));
    bench.check();
}

#[test]
fn a_clock_that_goes_ahead_and_back_charges_no_second_twice() {
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
    // One that ended before it began, by two clocks.
    bench.rent(2, 3_600);
    bench.use_of(2, bench.now, Some(begin()));
    assert_eq!(bench.cost(2), (0, 0));
    bench.check();
}

#[test]
fn an_operator_gives_within_bounds_and_takes_what_is_there() {
    let mut bench = Bench::with(100);
    let adjust = |bench: &mut Bench, amount_minor| {
        bench.tell(Command::Adjust { amount_minor, currency: eur(), reason: "r".into() })
    };
    for amount in [0, i64::MIN, i64::MAX, 100_000_001, -100_000_001] {
        assert_eq!(adjust(&mut bench, amount), Err(Rejection::Amount { max: 100_000_000 }), "{amount}");
    }
    assert!(matches!(adjust(&mut bench, -101), Err(Rejection::InsufficientBalance { .. })));
    adjust(&mut bench, -100).unwrap();
    let dollars = Command::Adjust { amount_minor: 1, currency: Currency::parse("USD").unwrap(), reason: "r".into() };
    assert!(matches!(bench.tell(dollars), Err(Rejection::CurrencyDiffers { .. })));
    let full = (0..1001).find_map(|_| adjust(&mut bench, 100_000_000).err());
    assert_eq!(full, Some(Rejection::Full));
    bench.check();
}

/// What happens to an account. Numbers wrap around what there is.
#[derive(Clone, Copy, Debug)]
enum Move {
    Request {
        price: i64,
        gpus: u32,
    },
    Begin {
        which: u8,
    },
    End {
        which: u8,
    },
    Fault {
        which: u8,
        before: u16,
    },
    /// What was said arrives: any of it; `again`: and will once more.
    Hear {
        which: u8,
        again: bool,
    },
    Lose {
        which: u8,
    },
    Pass {
        seconds: u32,
    },
    /// The clock goes on, and no tick comes.
    Drift {
        millis: u32,
    },
    /// The next tick comes exactly when it is due.
    Due,
    GoBack {
        seconds: u16,
    },
    Window {
        seconds: u16,
    },
    Grace {
        seconds: u16,
    },
    Give {
        minor: u16,
    },
    Take {
        minor: u16,
    },
    /// The processor takes back a part of a payment.
    Reverse {
        minor: u16,
    },
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        3 => (0_i64..5_000, 1_u32..9).prop_map(|(price, gpus)| Move::Request { price, gpus }),
        4 => any::<u8>().prop_map(|which| Move::Begin { which }),
        2 => any::<u8>().prop_map(|which| Move::End { which }),
        1 => (any::<u8>(), any::<u16>()).prop_map(|(which, before)| Move::Fault { which, before }),
        8 => (any::<u8>(), any::<bool>()).prop_map(|(which, again)| Move::Hear { which, again }),
        1 => any::<u8>().prop_map(|which| Move::Lose { which }),
        6 => (0_u32..7_200).prop_map(|seconds| Move::Pass { seconds }),
        1 => (0_u32..200_000).prop_map(|seconds| Move::Pass { seconds }),
        1 => (0_u16..3_600).prop_map(|seconds| Move::GoBack { seconds }),
        1 => (1_u16..=3_600).prop_map(|seconds| Move::Window { seconds }),
        1 => (0_u16..7_200).prop_map(|seconds| Move::Grace { seconds }),
        2 => (0_u32..=120_000).prop_map(|millis| Move::Drift { millis }),
        4 => Just(Move::Due),
        2 => (1_u16..20_000).prop_map(|minor| Move::Give { minor }),
        1 => (1_u16..5_000).prop_map(|minor| Move::Take { minor }),
        1 => (1_u16..5_000).prop_map(|minor| Move::Reverse { minor }),
    ];
    prop::collection::vec(one, 0..120)
}

/// An allocation as it really was.
#[derive(Clone, Copy, Debug)]
struct Truth {
    rate: Rate,
    from: Option<Timestamp>,
    until: Option<Timestamp>,
    never: bool,
}

/// An account and the allocations that it pays for.
struct Life {
    bench: Bench,
    truths: Vec<Truth>,
    /// What was said and is on its way.
    bus: Vec<Command>,
    heard: usize,
    reversals: usize,
}

impl Life {
    fn new() -> Self {
        Self { bench: Bench::with(3_000), truths: Vec::new(), bus: Vec::new(), heard: 0, reversals: 0 }
    }

    fn say(&mut self, n: usize) {
        let Truth { from, until, never, .. } = self.truths[n];
        if from.is_none() && !never {
            return;
        }
        let until = if never { Some(self.bench.now) } else { until };
        self.bus.push(Command::Usage { allocation_id: allocation(n as u64), from, until });
    }

    fn end(&mut self, n: usize, at: Timestamp) {
        let truth = &mut self.truths[n];
        if truth.until.is_some() || truth.never {
            return;
        }
        match truth.from {
            Some(_) => truth.until = Some(at),
            None => truth.never = true,
        }
        self.say(n);
    }

    /// What the account says, its allocations do.
    fn obey(&mut self) {
        let news: Vec<_> = self.bench.said[self.heard..].to_vec();
        self.heard = self.bench.said.len();
        for event in news {
            let place = |id: AllocationId| usize::try_from(id.0.as_u128() - 1).unwrap();
            if let Event::AllocationUncovered { allocation_id, .. } = &event {
                self.end(place(*allocation_id), self.bench.now);
            }
            if let Event::AllocationMetered { allocation_id, .. } = &event {
                self.say(place(*allocation_id));
            }
        }
    }

    fn make(&mut self, step: Move) {
        let pick = |which: u8, of: usize| (of > 0).then(|| usize::from(which) % of);
        match step {
            Move::Request { price, gpus } => {
                let rate = Rate::of(&Price::new("EUR", price).unwrap(), gpus);
                if self.bench.hold(self.truths.len() as u64, price, gpus).is_ok() {
                    self.truths.push(Truth { rate, from: None, until: None, never: false });
                }
            }
            Move::Begin { which } => {
                if let Some(n) = pick(which, self.truths.len())
                    && self.truths[n].from.is_none()
                    && !self.truths[n].never
                {
                    self.truths[n].from = Some(self.bench.now);
                    self.say(n);
                }
            }
            Move::End { which } => {
                if let Some(n) = pick(which, self.truths.len()) {
                    self.end(n, self.bench.now);
                }
            }
            Move::Fault { which, before } => {
                if let Some(n) = pick(which, self.truths.len())
                    && let Some(from) = self.truths[n].from
                {
                    self.end(n, from.max(self.bench.now - TimeDelta::seconds(before.into())));
                }
            }
            Move::Hear { which, again } => {
                if let Some(place) = pick(which, self.bus.len()) {
                    let command = if again { self.bus[place].clone() } else { self.bus.remove(place) };
                    self.bench.tell(command).unwrap();
                }
            }
            Move::Lose { which } => {
                if let Some(place) = pick(which, self.bus.len()) {
                    self.bus.remove(place);
                }
            }
            Move::Pass { seconds } => self.bench.pass(seconds.into()),
            Move::Drift { millis } => self.bench.now += TimeDelta::milliseconds(millis.into()),
            Move::Due => self.bench.tick_when_due(),
            Move::GoBack { seconds } => self.bench.now -= TimeDelta::seconds(seconds.into()),
            Move::Window { seconds } => self.bench.set(Key::BillingWindow, seconds.into()),
            Move::Grace { seconds } => self.bench.set(Key::BillingDepletionGrace, seconds.into()),
            Move::Give { minor } => self.bench.give(minor.into()),
            Move::Take { minor } => {
                let amount_minor = -i64::from(minor);
                let taken = self.bench.tell(Command::Adjust { amount_minor, currency: eur(), reason: "r".into() });
                assert!(matches!(taken, Ok(()) | Err(Rejection::InsufficientBalance { .. })), "{taken:?}");
            }
            Move::Reverse { minor } => {
                self.reversals += 1;
                let (reversal_id, payment_id) = (format!("re_{}", self.reversals), PaymentId(Uuid::from_u128(5)));
                let amount_minor = minor.into();
                self.bench.tell(Command::Reverse { reversal_id, payment_id, is_dispute: false, amount_minor }).unwrap();
            }
        }
        self.obey();
        // All of it is added up in the end.
        let last = self.bench.ledger.last().map(|last| (last.number, last.balance)).unwrap_or_default();
        assert_eq!((self.bench.it().postings, self.bench.it().balance), last);
        let given = self.bench.ledger.iter().filter(|it| it.kind == PostingKind::Credit).count();
        assert!(
            self.bench.depletions() <= given + self.reversals + 2 * self.truths.len(),
            "depleted once for each time that money was there, something else was covered or something ended"
        );
    }

    /// Everybody ends, and everything is heard.
    fn settle(&mut self) {
        (0..self.truths.len()).for_each(|n| self.end(n, self.bench.now));
        for _ in 0..40 {
            while let Some(command) = self.bus.pop() {
                self.bench.tell(command).unwrap();
            }
            self.bench.pass(3_600);
            self.obey();
        }
        assert!(self.bench.it().meters.is_empty(), "somebody is metered for ever: {:#?}", self.bench.it());
        for (n, truth) in self.truths.iter().enumerate() {
            let used = truth.from.zip(truth.until);
            let owed = used.map_or(Micro::ZERO, |(from, until)| truth.rate.over(from, until));
            let (cost, ours) = self.bench.cost(n as u64);
            assert_eq!(cost, owed.get(), "allocation {n}: {truth:?}");
            assert!((0..=cost).contains(&ours), "allocation {n}: {ours} of {cost} is ours");
        }
        self.bench.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_every_allocation_costs_what_it_was_used(moves in moves()) {
        let mut life = Life::new();
        moves.into_iter().for_each(|step| life.make(step));
        life.settle();
    }
}

#[test]
fn no_two_charges_of_an_allocation_begin_at_the_same_instant() {
    let mut bench = Bench::with(100_000);
    bench.rent(1, 3_600);
    (0..100).for_each(|_| bench.pass(61));
    let starts: BTreeSet<_> = bench.ledger.iter().filter_map(|it| it.usage.map(|usage| usage.from)).collect();
    assert_eq!(starts.len(), bench.ledger.len() - 1);
}

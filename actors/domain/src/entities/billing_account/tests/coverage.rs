//! The balance covers what can accrue until the next charge, whatever changes within a window. `Bench::send` checks the invariant after
//! each command; here are sequences that once violated it, and their effect on the balance.

use super::simulation::{AccountSimulation, AccountStep, moves};
use super::*;
use proptest::prelude::*;

fn seconds(seconds: i64) -> TimeDelta {
    TimeDelta::seconds(seconds)
}

fn no_grace(minor: i64) -> Bench {
    let mut bench = Bench::with(minor);
    bench.set(PolicyKey::BillingDepletionGrace, 0);
    bench
}

/// A window of 60 s, which begins with an allocation at 1,000.00 an hour: it costs 16.67.
fn with_a_window_running(minor: i64) -> Bench {
    let mut bench = no_grace(minor);
    bench.rent(1, 100_000);
    bench
}

fn reverse(bench: &mut Bench, amount_minor: i64) {
    let payment_id = PaymentId(Uuid::from_u128(5));
    let command = Instruction::Reverse { reversal_id: "re_1".into(), payment_id, is_dispute: false, amount_minor };
    bench.send(command).unwrap();
}

fn is_uncovered(bench: &Bench, n: u64) -> bool {
    let of_it = |event: &Event| matches!(event, Event::AllocationUncovered { allocation_id, .. } if *allocation_id == allocation(n));
    bench.count(of_it) > 0
}

#[test]
fn four_short_holds_within_a_long_window_end_it_before_they_are_used_up() {
    let mut bench = with_a_window_running(10_000);
    bench.now += TimeDelta::milliseconds(2_825);
    bench.set(PolicyKey::BillingWindow, 1);
    (2..6).for_each(|n| bench.rent(n, 1_500_000));
    assert_eq!(bench.it().timer(), Some(bench.now + seconds(1)), "not the 60 s that the running window began with");
    while !is_uncovered(&bench, 2) {
        bench.tick_when_due();
        assert!(bench.it().balance >= MicroAmount::ZERO, "{}", bench.it().balance);
    }
    assert!((1..6).all(|n| is_uncovered(&bench, n)));
    let second = 4 * 1_500_000 / 3_600;
    assert!(
        bench.it().balance < MicroAmount::of_minor(second + 100_000 / 3_600 + 2).unwrap(),
        "less than one more window costs"
    );
    bench.check();
}

#[test]
fn hold_of_a_short_window_begins_a_short_window_after_windows_were_made_longer() {
    let mut bench = no_grace(1_000);
    bench.set(PolicyKey::BillingWindow, 1);
    bench.hold(1, 3_600_000, 1).unwrap();
    bench.set(PolicyKey::BillingWindow, 3_600);
    bench.use_of(1, begin(), None);
    assert_eq!(bench.it().timer(), Some(begin() + seconds(1)));
    bench.tick_when_due();
    assert_eq!((bench.it().balance, bench.it().state()), (MicroAmount::ZERO, "depleted"));
}

#[test]
fn usage_that_began_before_the_running_window_does_not_make_it_longer() {
    let mut bench = no_grace(1_000);
    bench.hold(2, 60, 1).unwrap();
    bench.now += seconds(10);
    bench.set(PolicyKey::BillingWindow, 1);
    bench.rent(1, 1_800_000);
    let ends_at = bench.it().window.unwrap().ends_at;
    bench.set(PolicyKey::BillingWindow, 3_600);
    bench.use_of(2, begin() + seconds(5), None);
    assert!(bench.it().window.unwrap().ends_at <= ends_at);
    bench.tick_when_due();
    assert!(bench.it().balance >= MicroAmount::ZERO, "{}", bench.it().balance);
}

#[test]
fn neither_an_adjustment_nor_a_hold_takes_what_covers_the_rest_of_a_long_window() {
    // One window costs 16.67 and is covered; of the rest 3.33 are free.
    let mut bench = with_a_window_running(2_000);
    bench.set(PolicyKey::BillingWindow, 1);
    let take = Request::Adjust { amount_minor: -334, currency: eur(), reason: "r".into() };
    assert!(matches!(bench.send(take), Err(Rejection::InsufficientBalance { .. })));
    assert!(matches!(bench.hold(2, 334 * 3_600, 1), Err(Rejection::InsufficientBalance { .. })));
    assert_eq!(bench.it().available(bench.now, seconds(1)), MicroAmount::of(333_333_334));
    bench.hold(2, 333 * 3_600, 1).unwrap();
}

#[test]
fn reversal_that_leaves_a_hold_uncovered_ends_no_allocation_that_runs() {
    let mut bench = no_grace(10_000);
    bench.rent(1, 100);
    bench.hold(2, 9_500 * 60, 1).unwrap();
    reverse(&mut bench, 600);
    assert!(!is_uncovered(&bench, 1), "94.00 cover it for days");
    bench.use_of(2, bench.now, None);
    assert!(is_uncovered(&bench, 2), "it is released when it begins");
    assert!(!is_uncovered(&bench, 1));
    bench.check();
}

#[test]
fn uncovered_hold_is_released_at_its_start_without_cost() {
    let mut bench = no_grace(100);
    bench.hold(1, 6_000, 1).unwrap();
    reverse(&mut bench, 50);
    bench.use_of(1, begin(), None);
    assert!(is_uncovered(&bench, 1));
    bench.pass(120);
    bench.use_of(1, begin(), Some(bench.now));
    assert_eq!(bench.cost(1), (200_000_000, 200_000_000), "all of it is ours");
    assert_eq!(bench.it().balance, MicroAmount::of_minor(50).unwrap());
    bench.check();
}

#[test]
fn free_allocation_starts_and_continues_at_a_negative_balance() {
    let mut bench = no_grace(100);
    bench.hold(1, 0, 1).unwrap();
    reverse(&mut bench, 200);
    bench.use_of(1, begin(), None);
    bench.pass(86_400);
    assert!(!is_uncovered(&bench, 1));
    assert_eq!(bench.it().state(), "open");
}

#[test]
fn usage_that_begins_within_a_grace_ends_with_it() {
    let mut bench = Bench::with(20);
    bench.set(PolicyKey::BillingDepletionGrace, 90);
    bench.rent(1, 300);
    bench.hold(2, 600, 1).unwrap();
    while bench.it().state() == "open" {
        bench.tick_when_due();
    }
    let release_at = bench.it().depletion.unwrap().release_at;
    bench.now += seconds(80);
    bench.use_of(2, bench.now, None);
    while bench.it().state() == "grace" {
        bench.tick_when_due();
    }
    assert_eq!(bench.now, release_at, "a longer grace for one is none");
    assert!(is_uncovered(&bench, 1) && is_uncovered(&bench, 2));
}

#[test]
fn usage_that_was_not_known_when_a_grace_began_costs_its_hold_and_the_grace_at_most() {
    let mut bench = Bench::with(110);
    bench.set(PolicyKey::BillingDepletionGrace, 60);
    bench.rent(1, 600);
    bench.hold(2, 600, 1).unwrap();
    bench.pass(600);
    assert_eq!((bench.it().state(), bench.it().balance.minor()), ("grace", 10));
    bench.use_of(2, begin(), None);
    bench.pass(60);
    assert!(is_uncovered(&bench, 1) && is_uncovered(&bench, 2));
    bench.use_of(2, begin(), Some(bench.now));
    assert_eq!(bench.cost(2), (110_000_000, 90_000_000), "one window was held, and the grace is another");
    assert_eq!(bench.it().balance, MicroAmount::of_minor(-20).unwrap());
    bench.check();
}

#[test]
fn usage_that_is_written_off_within_a_grace_stays_so_when_money_comes_in() {
    let mut bench = Bench::with(110);
    bench.set(PolicyKey::BillingDepletionGrace, 600);
    bench.rent(1, 600);
    bench.hold(2, 600, 1).unwrap();
    bench.pass(600);
    bench.use_of(2, begin(), None);
    bench.pass(180);
    let lost = bench.cost(2).1;
    assert!(bench.it().state() == "grace" && lost > 0, "its hold and the grace are used up before the grace ends");
    bench.give(1_000);
    assert!(bench.it().state() == "open" && is_uncovered(&bench, 2) && !is_uncovered(&bench, 1));
    bench.pass(60);
    bench.use_of(2, begin(), Some(bench.now));
    assert!(bench.cost(2).1 > lost, "what ran until its release is ours, too");
    bench.check();
}

#[test]
fn uncovered_usage_is_released_after_five_minutes_by_default() {
    let mut bench = Bench::with(10);
    bench.rent(1, 600);
    bench.pass(60);
    assert_eq!(bench.it().deadline().unwrap().at, bench.now + seconds(300));
    bench.pass(299);
    assert!(!is_uncovered(&bench, 1));
    bench.pass(1);
    assert!(is_uncovered(&bench, 1));
    bench.use_of(1, begin(), Some(bench.now));
    assert_eq!(bench.it().balance, MicroAmount::of_minor(-50).unwrap());
}

#[test]
fn longer_grace_set_within_a_grace_does_not_prolong_it() {
    let mut bench = Bench::with(10);
    bench.set(PolicyKey::BillingDepletionGrace, 30);
    bench.rent(1, 600);
    bench.pass(60);
    assert_eq!(bench.it().state(), "grace");
    bench.set(PolicyKey::BillingDepletionGrace, 86_400);
    bench.pass(30);
    assert_eq!(bench.it().state(), "depleted");
    bench.pass(3_600);
    assert_eq!(bench.it().balance, MicroAmount::of_minor(-5).unwrap());
}

#[test]
fn end_by_a_clock_that_is_ahead_charges_no_more_than_is_there() {
    let mut bench = no_grace(1_000);
    bench.rent(1, 36_000);
    bench.rent(2, 3_600);
    let ends_at = begin() + seconds(3_600);
    bench.use_of(1, begin(), Some(ends_at));
    // The other account has a window of its own.
    assert_eq!(bench.it().balance, MicroAmount::of_minor(60).unwrap());
    assert_eq!(bench.cost(1), (36_000_000_000, 36_000_000_000 - 940_000_000));
    bench.check();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn without_a_grace_no_usage_takes_a_balance_below_zero(moves in moves()) {
        let mut life = AccountSimulation::new();
        life.bench.set(PolicyKey::BillingDepletionGrace, 0);
        for step in moves {
            if !matches!(step, AccountStep::Grace { .. } | AccountStep::Reverse { .. }) {
                life.make(step);
                prop_assert!(life.bench.it().balance >= MicroAmount::ZERO, "after {step:?}: {:#?}", life.bench.it());
            }
        }
    }

    #[test]
    fn with_a_grace_usage_takes_a_balance_below_zero_by_one_grace_at_most(moves in moves(), grace in 1_u16..7_200) {
        let mut life = AccountSimulation::new();
        life.bench.set(PolicyKey::BillingDepletionGrace, grace.into());
        for step in moves {
            if !matches!(step, AccountStep::Reverse { .. }) {
                let step = if let AccountStep::Grace { seconds } = step { AccountStep::Grace { seconds: seconds.min(grace) } } else { step };
                life.make(step);
                let graces: MicroAmount = life.truths.iter().map(|it| it.rate.over(begin(), begin() + seconds(grace.into()))).sum();
                prop_assert!(life.bench.it().balance.plus(graces) >= MicroAmount::ZERO, "after {step:?}: {:#?}", life.bench.it());
            }
        }
    }
}

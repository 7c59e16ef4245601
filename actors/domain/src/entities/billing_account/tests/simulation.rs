//! Any sequence of usage, faults, policies and money, over a bus that loses, repeats and reorders.

use super::*;
use proptest::prelude::*;

/// A step of the simulation. Numbers wrap around the existing items.
#[derive(Clone, Copy, Debug)]
pub(super) enum AccountStep {
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
    /// Delivers any message; `again`: keeps it for another delivery.
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
    /// Advances the clock without a tick.
    Drift {
        millis: u32,
    },
    /// Sends the next tick exactly when it is due.
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
    /// Reverses a part of a payment.
    Reverse {
        minor: u16,
    },
}

pub(super) fn moves() -> impl Strategy<Value = Vec<AccountStep>> {
    let one = prop_oneof![
        3 => (0_i64..5_000, 1_u32..9).prop_map(|(price, gpus)| AccountStep::Request { price, gpus }),
        4 => any::<u8>().prop_map(|which| AccountStep::Begin { which }),
        2 => any::<u8>().prop_map(|which| AccountStep::End { which }),
        1 => (any::<u8>(), any::<u16>()).prop_map(|(which, before)| AccountStep::Fault { which, before }),
        8 => (any::<u8>(), any::<bool>()).prop_map(|(which, again)| AccountStep::Hear { which, again }),
        1 => any::<u8>().prop_map(|which| AccountStep::Lose { which }),
        6 => (0_u32..7_200).prop_map(|seconds| AccountStep::Pass { seconds }),
        1 => (0_u32..200_000).prop_map(|seconds| AccountStep::Pass { seconds }),
        1 => (0_u16..3_600).prop_map(|seconds| AccountStep::GoBack { seconds }),
        1 => (1_u16..=3_600).prop_map(|seconds| AccountStep::Window { seconds }),
        1 => (0_u16..7_200).prop_map(|seconds| AccountStep::Grace { seconds }),
        2 => (0_u32..=120_000).prop_map(|millis| AccountStep::Drift { millis }),
        4 => Just(AccountStep::Due),
        2 => (1_u16..20_000).prop_map(|minor| AccountStep::Give { minor }),
        1 => (1_u16..5_000).prop_map(|minor| AccountStep::Take { minor }),
        1 => (1_u16..5_000).prop_map(|minor| AccountStep::Reverse { minor }),
    ];
    prop::collection::vec(one, 0..120)
}

/// The true usage of an allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedAllocation {
    pub(super) rate: HourlyRate,
    from: Option<Timestamp>,
    until: Option<Timestamp>,
    never: bool,
}

/// An account and its allocations.
pub(super) struct AccountSimulation {
    pub(super) bench: Bench,
    pub(super) truths: Vec<ExpectedAllocation>,
    /// Messages in flight.
    bus: Vec<Command>,
    consumed: usize,
    reversals: usize,
}

impl AccountSimulation {
    pub(super) fn new() -> Self {
        Self { bench: Bench::with(3_000), truths: Vec::new(), bus: Vec::new(), consumed: 0, reversals: 0 }
    }

    fn publish_usage(&mut self, n: usize) {
        let ExpectedAllocation { from, until, never, .. } = self.truths[n];
        if from.is_none() && !never {
            return;
        }
        let until = if never { Some(self.bench.now) } else { until };
        self.bus.push(Instruction::MeterUsage { allocation_id: allocation(n as u64), from, until }.into());
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
        self.publish_usage(n);
    }

    /// The allocations react to the account's events.
    fn obey(&mut self) {
        let events: Vec<_> = self.bench.published[self.consumed..].to_vec();
        self.consumed = self.bench.published.len();
        for event in events {
            let place = |id: AllocationId| usize::try_from(id.0.as_u128() - 1).unwrap();
            if let Event::AllocationUncovered { allocation_id, .. } = &event {
                self.end(place(*allocation_id), self.bench.now);
            }
            if let Event::AllocationMetered { allocation_id, .. } = &event {
                self.publish_usage(place(*allocation_id));
            }
        }
    }

    pub(super) fn make(&mut self, step: AccountStep) {
        let pick = |which: u8, of: usize| (of > 0).then(|| usize::from(which) % of);
        match step {
            AccountStep::Request { price, gpus } => {
                let rate = HourlyRate::of(&Price::new("EUR", price).unwrap(), gpus);
                if self.bench.hold(self.truths.len() as u64, price, gpus).is_ok() {
                    self.truths.push(ExpectedAllocation { rate, from: None, until: None, never: false });
                }
            }
            AccountStep::Begin { which } => {
                if let Some(n) = pick(which, self.truths.len())
                    && self.truths[n].from.is_none()
                    && !self.truths[n].never
                {
                    self.truths[n].from = Some(self.bench.now);
                    self.publish_usage(n);
                }
            }
            AccountStep::End { which } => {
                if let Some(n) = pick(which, self.truths.len()) {
                    self.end(n, self.bench.now);
                }
            }
            AccountStep::Fault { which, before } => {
                if let Some(n) = pick(which, self.truths.len())
                    && let Some(from) = self.truths[n].from
                {
                    self.end(n, from.max(self.bench.now - TimeDelta::seconds(before.into())));
                }
            }
            AccountStep::Hear { which, again } => {
                if let Some(place) = pick(which, self.bus.len()) {
                    let command = if again { self.bus[place].clone() } else { self.bus.remove(place) };
                    self.bench.send(command).unwrap();
                }
            }
            AccountStep::Lose { which } => {
                if let Some(place) = pick(which, self.bus.len()) {
                    self.bus.remove(place);
                }
            }
            AccountStep::Pass { seconds } => self.bench.pass(seconds.into()),
            AccountStep::Drift { millis } => self.bench.now += TimeDelta::milliseconds(millis.into()),
            AccountStep::Due => self.bench.tick_when_due(),
            AccountStep::GoBack { seconds } => self.bench.now -= TimeDelta::seconds(seconds.into()),
            AccountStep::Window { seconds } => self.bench.set(PolicyKey::BillingWindow, seconds.into()),
            AccountStep::Grace { seconds } => self.bench.set(PolicyKey::BillingDepletionGrace, seconds.into()),
            AccountStep::Give { minor } => self.bench.give(minor.into()),
            AccountStep::Take { minor } => {
                let amount_minor = -i64::from(minor);
                let taken = self.bench.send(Request::Adjust { amount_minor, currency: eur(), reason: "r".into() });
                assert!(matches!(taken, Ok(()) | Err(Rejection::InsufficientBalance { .. })), "{taken:?}");
            }
            AccountStep::Reverse { minor } => {
                self.reversals += 1;
                let (reversal_id, payment_id) = (format!("re_{}", self.reversals), PaymentId(Uuid::from_u128(5)));
                let amount_minor = minor.into();
                self.bench
                    .send(Instruction::Reverse { reversal_id, payment_id, is_dispute: false, amount_minor })
                    .unwrap();
            }
        }
        self.obey();
        // All of it is summed at the end.
        let last = self.bench.ledger.last().map(|last| (last.number, last.balance)).unwrap_or_default();
        assert_eq!((self.bench.it().postings, self.bench.it().balance), last);
        let given = self.bench.ledger.iter().filter(|it| it.kind == PostingKind::Credit).count();
        assert!(
            self.bench.depletions() <= given + self.reversals + 2 * self.truths.len(),
            "depleted once for each time that money was there, something else was covered or something ended"
        );
    }

    /// All allocations end, and all messages are delivered.
    pub(super) fn settle(&mut self) {
        (0..self.truths.len()).for_each(|n| self.end(n, self.bench.now));
        for _ in 0..40 {
            while let Some(command) = self.bus.pop() {
                self.bench.send(command).unwrap();
            }
            self.bench.pass(3_600);
            self.obey();
        }
        assert!(self.bench.it().meters.is_empty(), "an allocation is metered for ever: {:#?}", self.bench.it());
        for (n, truth) in self.truths.iter().enumerate() {
            let used = truth.from.zip(truth.until);
            let owed = used.map_or(MicroAmount::ZERO, |(from, until)| truth.rate.over(from, until));
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
    fn any_sequence_charges_every_allocation_its_usage(moves in moves()) {
        let mut life = AccountSimulation::new();
        moves.into_iter().for_each(|step| life.make(step));
        life.settle();
    }
}

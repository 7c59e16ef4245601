//! Any order and any repetition of messages yields the same sum.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A step of the simulation. Numbers wrap around the existing items.
#[derive(Clone, Copy, Debug)]
enum PaymentStep {
    Create {
        amount: i64,
    },
    /// The payer pays.
    Pay {
        which: u8,
    },
    /// The processor expires or cancels it.
    End {
        which: u8,
        outcome: PaymentFailure,
    },
    Refund {
        which: u8,
        amount: Option<i64>,
    },
    /// A refund at the processor, or a dispute: it may be undone.
    Reverse {
        which: u8,
        amount: i64,
        what: ReversalStep,
    },
    /// The processor handles a request; `fails`: it fails in the end.
    Work {
        which: u8,
        fails: bool,
    },
    /// Delivers any message of the processor; `again`: keeps it for another delivery.
    Deliver {
        which: u8,
        again: bool,
    },
    /// Delivers any message between payments and account.
    Hear {
        which: u8,
        again: bool,
    },
    Lose {
        which: u8,
    },
    Spend {
        amount: i64,
    },
    Pass {
        seconds: u32,
    },
}

fn moves() -> impl Strategy<Value = Vec<PaymentStep>> {
    let what = prop_oneof![Just(ReversalStep::Refund), Just(ReversalStep::DisputeOpened)];
    let outcome =
        prop_oneof![Just(PaymentFailure::Declined), Just(PaymentFailure::Canceled), Just(PaymentFailure::Expired)];
    let one = prop_oneof![
        2 => (1_000_i64..9_000).prop_map(|amount| PaymentStep::Create { amount }),
        3 => any::<u8>().prop_map(|which| PaymentStep::Pay { which }),
        1 => (any::<u8>(), outcome).prop_map(|(which, outcome)| PaymentStep::End { which, outcome }),
        4 => (any::<u8>(), prop::option::of(1_i64..6_000)).prop_map(|(which, amount)| PaymentStep::Refund { which, amount }),
        2 => (any::<u8>(), 1_i64..6_000, what).prop_map(|(which, amount, what)| PaymentStep::Reverse { which, amount, what }),
        4 => (any::<u8>(), any::<bool>()).prop_map(|(which, fails)| PaymentStep::Work { which, fails }),
        8 => (any::<u8>(), any::<bool>()).prop_map(|(which, again)| PaymentStep::Deliver { which, again }),
        8 => (any::<u8>(), any::<bool>()).prop_map(|(which, again)| PaymentStep::Hear { which, again }),
        1 => any::<u8>().prop_map(|which| PaymentStep::Lose { which }),
        1 => (1_i64..3_000).prop_map(|amount| PaymentStep::Spend { amount }),
        3 => (0_u32..7_200).prop_map(|seconds| PaymentStep::Pass { seconds }),
    ];
    prop::collection::vec(one, 0..120)
}

/// The true state of the processor, and its undelivered messages.
#[derive(Default)]
struct FakeProcessor {
    paid: BTreeMap<PaymentId, i64>,
    /// Its refunds that the service requested, by their ids.
    refunds: BTreeMap<RefundId, (PaymentId, i64, RefundStatus)>,
    /// Its other refunds and disputes: payment, amount, step, and whether it was undone.
    reversals: BTreeMap<String, (PaymentId, i64, ReversalStep, bool)>,
    mail: Vec<(PaymentId, Fact)>,
}

impl FakeProcessor {
    fn refund_says(&self, refund_id: RefundId) -> (PaymentId, Fact) {
        let (payment_id, amount_minor, status) = self.refunds[&refund_id];
        let processor_refund_id = format!("re_{}", refund_id.0.as_u128());
        (payment_id, Fact::RefundAt { refund_id, processor_refund_id, status, amount_minor })
    }

    fn reversal_says(&self, id: &str, what: ReversalStep) -> (PaymentId, Fact) {
        let (payment_id, amount_minor, _, _) = self.reversals[id];
        let of = Some(intent(payment_id));
        (payment_id, Fact::Reversed { reversal_id: id.to_owned(), what, amount_minor, currency: eur(), of })
    }

    /// The sum of all payments less what went back.
    fn has(&self) -> i64 {
        let back = self.refunds.values().filter(|(_, _, status)| *status != RefundStatus::Failed);
        let back: i64 = back.map(|(_, amount, _)| amount).sum();
        let taken: i64 =
            self.reversals.values().filter(|(.., came_back)| !came_back).map(|(_, amount, ..)| amount).sum();
        self.paid.values().sum::<i64>() - back - taken
    }
}

struct PaymentSimulation {
    world: PaymentHarness,
    processor: FakeProcessor,
    spent: i64,
    refunds: u128,
}

impl PaymentSimulation {
    fn new() -> Self {
        Self { world: PaymentHarness::new(), processor: FakeProcessor::default(), spent: 0, refunds: 0 }
    }

    fn pick(&self, which: u8) -> Option<PaymentId> {
        let ids: Vec<_> = self.world.payments.keys().copied().collect();
        (!ids.is_empty()).then(|| ids[usize::from(which) % ids.len()])
    }

    fn make(&mut self, step: PaymentStep) {
        match step {
            PaymentStep::Create { amount } => self.world.create(self.world.payments.len() as u128, amount),
            PaymentStep::Pay { which } => self.pay(which),
            PaymentStep::End { which, outcome } => {
                if let Some(id) = self.pick(which).filter(|id| !self.processor.paid.contains_key(id)) {
                    let published = Fact::NotPaid { processor_id: intent(id), outcome, why: "w".into() };
                    self.processor.mail.push((id, published));
                }
            }
            PaymentStep::Refund { which, amount } => {
                if let Some(id) = self.pick(which) {
                    self.refunds += 1;
                    let refund_id = refund_id(self.refunds);
                    let refund = Request::Refund { refund_id, amount_minor: amount, reason: "r".into() };
                    // More than is left, or too early: a valid rejection.
                    let _ = self.world.ask(&ann(), id, refund);
                }
            }
            PaymentStep::Reverse { which, amount, what } => self.reverse(which, amount, what),
            PaymentStep::Work { which, fails } => self.work(which, fails),
            PaymentStep::Deliver { which, again } => {
                let mail = &mut self.processor.mail;
                if !mail.is_empty() {
                    let place = usize::from(which) % mail.len();
                    let (id, published) = if again { mail[place].clone() } else { mail.remove(place) };
                    self.world.ask(&Principal::system("test"), id, published).unwrap();
                }
            }
            PaymentStep::Hear { which, again } => {
                let bus = &mut self.world.bus;
                if !bus.is_empty() {
                    let place = usize::from(which) % bus.len();
                    let event = if again { bus[place].clone() } else { bus.remove(place) };
                    self.world.deliver(&event);
                }
            }
            PaymentStep::Lose { which } => {
                if !self.world.bus.is_empty() {
                    let place = usize::from(which) % self.world.bus.len();
                    self.world.bus.remove(place);
                }
            }
            PaymentStep::Spend { amount } => {
                let reason = "used".to_owned();
                let spend = billing_account::Request::Adjust { amount_minor: -amount, currency: eur(), reason };
                if self.world.tell_account(spend).is_ok() {
                    self.spent += amount;
                }
            }
            PaymentStep::Pass { seconds } => self.world.pass(TimeDelta::seconds(seconds.into())),
        }
    }

    fn pay(&mut self, which: u8) {
        let Some(id) = self.pick(which) else { return };
        let amount_minor = self.world.payments[&id].amount_minor;
        if self.processor.paid.insert(id, amount_minor).is_none() {
            let paid = Fact::Paid {
                processor_id: intent(id),
                amount_minor,
                currency: eur(),
                charge_id: Some("ch".into()),
                presented: None,
            };
            self.processor.mail.push((id, paid));
        }
    }

    /// A reversal, or the end of one.
    fn reverse(&mut self, which: u8, amount: i64, what: ReversalStep) {
        let Some(id) = self.pick(which).filter(|id| self.processor.paid.contains_key(id)) else { return };
        let standing =
            self.processor.reversals.iter_mut().find(|(_, (of, _, made, back))| *of == id && *made == what && !back);
        let (name, what) = match standing {
            Some((name, (.., came_back))) => {
                *came_back = true;
                let undone =
                    if what == ReversalStep::Refund { ReversalStep::RefundFailed } else { ReversalStep::DisputeWon };
                (name.clone(), undone)
            }
            None => {
                let name = format!("rev_{}", self.processor.reversals.len());
                self.processor.reversals.insert(name.clone(), (id, amount, what, false));
                (name, what)
            }
        };
        let published = self.processor.reversal_says(&name, what);
        self.processor.mail.push(published);
    }

    fn work(&mut self, which: u8, fails: bool) {
        if self.world.calls.is_empty() {
            return;
        }
        let place = usize::from(which) % self.world.calls.len();
        let call = self.world.calls.remove(place);
        let ProcessorCall::Refund { payment_id, refund_id, amount_minor, .. } = call else { return };
        let (_, amount, status) =
            self.processor.refunds.entry(refund_id).or_insert((payment_id, amount_minor, RefundStatus::Pending));
        assert_eq!(*amount, amount_minor, "asked again it is the same");
        if *status == RefundStatus::Pending {
            *status = if fails { RefundStatus::Failed } else { RefundStatus::Succeeded };
            let pending = self.processor.refund_says(refund_id);
            let Fact::RefundAt { processor_refund_id, .. } = pending.1.clone() else { unreachable!() };
            let as_pending = Fact::RefundAt {
                refund_id,
                processor_refund_id: processor_refund_id.clone(),
                status: RefundStatus::Pending,
                amount_minor,
            };
            self.processor.mail.push((payment_id, as_pending));
            // The processor may report it without the refund's id.
            if !fails {
                let stranger = Fact::Reversed {
                    reversal_id: processor_refund_id,
                    what: ReversalStep::Refund,
                    amount_minor,
                    currency: eur(),
                    of: Some(intent(payment_id)),
                };
                self.processor.mail.push((payment_id, stranger));
            }
        }
        let published = self.processor.refund_says(refund_id);
        self.processor.mail.push(published);
    }

    /// All messages are delivered, and the processor handles all requests.
    fn settle(&mut self) {
        for _ in 0..60 {
            while let Some((id, published)) = self.processor.mail.pop() {
                self.world.ask(&Principal::system("test"), id, published).unwrap();
            }
            self.world.hear_all();
            while !self.world.calls.is_empty() {
                self.work(0, false);
            }
            self.world.pass(TimeDelta::hours(1));
        }
        self.world.hear_all();
    }

    fn check(&self) {
        let paid: BTreeSet<_> = self.processor.paid.keys().collect();
        for (id, payment) in &self.world.payments {
            assert_eq!(payment.state() == "deposited", paid.contains(id), "{payment:#?}");
            assert!(payment.is_settled(), "a call is owed for ever: {payment:#?}");
            let stored = serde_json::to_string(payment).unwrap();
            assert_eq!(&serde_json::from_str::<Payment>(&stored).unwrap(), payment);
        }
        let balance = self.world.account.as_ref().map_or(0, |account| account.balance.get());
        assert_eq!(balance, (self.processor.has() - self.spent) * 1_000_000);
        let twice: BTreeSet<_> =
            self.world.ledger.iter().filter_map(|it| Some((it.kind, it.source.clone()?.reference))).collect();
        let once = self.world.ledger.iter().filter(|it| it.source.is_some()).count();
        assert_eq!(twice.len(), once, "of each kind there is one posting for one thing");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_messages_leaves_the_account_equal_to_the_processor(moves in moves()) {
        let mut life = PaymentSimulation::new();
        moves.into_iter().for_each(|step| life.make(step));
        life.settle();
        life.check();
    }

    #[test]
    fn any_order_of_processor_messages_yields_one_sum(order in Just((0..7).collect::<Vec<usize>>()).prop_shuffle(), times in prop::collection::vec(1_usize..4, 7)) {
        let mut world = PaymentHarness::open(5_000);
        let reversed = |id: &str, what, amount_minor| {
            let of = Some(intent(payment_id(0)));
            Fact::Reversed { reversal_id: id.to_owned(), what, amount_minor, currency: eur(), of }
        };
        let published = [
            world.paid(0),
            reversed("re_1", ReversalStep::Refund, 700),
            reversed("dp_1", ReversalStep::DisputeOpened, 1_000),
            reversed("dp_1", ReversalStep::DisputeWon, 1_000),
            reversed("dp_2", ReversalStep::DisputeOpened, 300),
            Fact::NotPaid { processor_id: intent(payment_id(0)), outcome: PaymentFailure::Canceled, why: "w".into() },
            Fact::NotPaid { processor_id: intent(payment_id(0)), outcome: PaymentFailure::Declined, why: "w".into() },
        ];
        for place in order {
            for _ in 0..times[place] {
                world.send(0, published[place].clone()).unwrap();
            }
            if times[place] > 1 {
                world.hear_all();
            }
        }
        world.hear_all();
        prop_assert_eq!(world.balance(), 4_000);
        prop_assert_eq!(world.it().left_minor(), 4_000);
        prop_assert!(world.it().is_settled());
    }

    /// As events are: one that is refused is retried later.
    #[test]
    fn any_order_of_messages_of_a_converted_payment_yields_one_sum(
        order in Just((0..9).collect::<Vec<usize>>()).prop_shuffle(),
        times in prop::collection::vec(1_usize..4, 9),
        hears in prop::collection::vec(any::<bool>(), 9),
        charged in prop_oneof![Just(777_i64), Just(4_200), Just(84_000)],
    ) {
        let mut world = PaymentHarness::open(5_000);
        let currency = Currency::parse("GBP").unwrap();
        let reversed = |id: &str, what, share: i64| {
            let (currency, of) = (currency.clone(), Some("pi_100".to_owned()));
            Fact::Reversed { reversal_id: id.to_owned(), what, amount_minor: charged * share / 100, currency, of }
        };
        let paid = |amount_minor, currency: &Currency, presented| Fact::Paid {
            processor_id: "pi_100".into(), amount_minor, currency: currency.clone(), charge_id: None, presented,
        };
        let presented = Presentment { amount_minor: charged, currency: currency.clone(), is_charged: true };
        let not_paid = |outcome| Fact::NotPaid { processor_id: "pi_100".into(), outcome, why: "w".into() };
        let published = [
            paid(5_000, &eur(), Some(presented)),
            paid(charged, &currency, None),
            reversed("re_1", ReversalStep::Refund, 14),
            reversed("dp_1", ReversalStep::DisputeOpened, 21),
            reversed("dp_1", ReversalStep::DisputeWon, 21),
            reversed("dp_2", ReversalStep::DisputeOpened, 6),
            reversed("dp_3", ReversalStep::DisputeOpened, 33),
            not_paid(PaymentFailure::Canceled),
            not_paid(PaymentFailure::Declined),
        ];
        let mut refused = Vec::new();
        for (place, hears) in order.into_iter().zip(hears) {
            for _ in 0..times[place] {
                if world.send(0, published[place].clone()).is_err() {
                    refused.push(published[place].clone());
                }
            }
            if hears {
                world.hear_all();
            }
        }
        while !refused.is_empty() {
            refused.retain(|fact| world.send(0, fact.clone()).is_err());
        }
        world.hear_all();
        let gone: i64 = [14, 6, 33].map(|share| charged * share / 100).iter().sum();
        prop_assert_eq!(world.balance(), 5_000 - gone * 5_000 / charged);
        prop_assert_eq!(world.it().left_minor(), world.balance());
        prop_assert!(world.it().is_settled());
    }
}

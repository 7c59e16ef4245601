//! The parts of a converted payment that go back add up to exactly the whole, in the account and at the processor.

use super::*;
use proptest::prelude::*;

/// Something that happens to a payment that was charged in another currency.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The payer requests a refund of so many thousandths of what is left. `is_reported_first`: the processor first reports it without the
    /// refund's id. `fails`: it does not reach the payer.
    Refund { share: i64, is_reported_first: bool, fails: bool },
    /// A dispute of so many thousandths of what the processor has.
    Dispute { share: i64 },
    /// One of the open disputes is won.
    Win { which: usize },
    /// Reports that arrived before arrive again.
    Replay,
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let share = || prop_oneof![3 => 0_i64..1_000, 1 => Just(1_000_i64), 2 => 0_i64..30];
    let part = prop_oneof![
        4 => (share(), any::<bool>(), prop::bool::weighted(0.3))
            .prop_map(|(share, is_reported_first, fails)| Part::Refund { share, is_reported_first, fails }),
        4 => share().prop_map(|share| Part::Dispute { share }),
        2 => any::<usize>().prop_map(|which| Part::Win { which }),
        1 => Just(Part::Replay),
    ];
    prop::collection::vec(part, 0..30)
}

/// What was charged, in which currency: of fewer, as many and more minor units than the payment, and in steps of ten.
fn charges() -> impl Strategy<Value = (i64, &'static str)> {
    prop_oneof![
        (1_i64..2_000).prop_map(|amount| (amount, "JPY")),
        (500_i64..20_000).prop_map(|amount| (amount, "GBP")),
        (10_000_i64..30_000_000).prop_map(|amount| (amount, "KRW")),
        (1_i64..5_000).prop_map(|amount| (amount * 10, "KWD")),
    ]
}

struct Simulation {
    world: PaymentHarness,
    currency: Currency,
    charged: i64,
    /// What the processor has of the payment.
    at_processor: i64,
    refunds: u128,
    open_disputes: Vec<(String, i64)>,
    disputes: usize,
    reports: Vec<Fact>,
}

impl Simulation {
    fn new(amount: i64, charged: i64, currency: &str) -> Self {
        let mut world = PaymentHarness::open(amount);
        let currency = Currency::parse(currency).unwrap();
        let presented = Presentment { amount_minor: charged, currency: currency.clone(), is_charged: true };
        let paid = Fact::Paid {
            processor_id: "pi_100".into(),
            amount_minor: amount,
            currency: eur(),
            charge_id: None,
            presented: Some(presented),
        };
        world.send(0, paid).unwrap();
        world.hear_all();
        Self {
            world,
            currency,
            charged,
            at_processor: charged,
            refunds: 0,
            open_disputes: Vec::new(),
            disputes: 0,
            reports: Vec::new(),
        }
    }

    fn report(&mut self, fact: Fact) {
        self.world.send(0, fact.clone()).unwrap();
        self.world.hear_all();
        self.reports.push(fact);
    }

    fn reversed(&self, id: &str, what: ReversalStep, amount_minor: i64) -> Fact {
        let (currency, of) = (self.currency.clone(), Some("pi_100".to_owned()));
        Fact::Reversed { reversal_id: id.to_owned(), what, amount_minor, currency, of }
    }

    fn make(&mut self, part: Part) {
        match part {
            Part::Refund { share, is_reported_first, fails } => {
                let wanted = self.world.it().left_minor() * share / 1_000;
                self.refund((wanted > 0).then_some(wanted), is_reported_first, fails);
            }
            Part::Dispute { share } => self.dispute((self.at_processor * share / 1_000).max(1)),
            Part::Win { which } if !self.open_disputes.is_empty() => {
                let (id, amount) = self.open_disputes.remove(which % self.open_disputes.len());
                self.at_processor += amount;
                let won = self.reversed(&id, ReversalStep::DisputeWon, amount);
                self.report(won);
            }
            Part::Win { .. } => {}
            Part::Replay => {
                for report in self.reports.clone() {
                    self.world.send(0, report).unwrap();
                    self.world.hear_all();
                }
            }
        }
    }

    /// A refund that the payer requests and the processor makes; one that cannot be made changes nothing.
    fn refund(&mut self, amount_minor: Option<i64>, is_reported_first: bool, fails: bool) {
        let before = self.world.balance();
        self.refunds += 1;
        let refund_id = refund_id(self.refunds);
        let request = Request::Refund { refund_id, amount_minor, reason: "r".into() };
        match self.world.ask(&ann(), payment_id(0), request) {
            Ok(()) => {}
            Err(Rejection::MoreThanLeft { .. } | Rejection::LessThanCharged { .. }) => return,
            Err(rejection) => panic!("{rejection}"),
        }
        self.world.hear_all();
        let Some(due) = self.world.it().refund_due(refund_id).filter(|_| self.is_due(refund_id)) else {
            assert_eq!(self.world.balance(), before, "what cannot be refunded is in the account again");
            return;
        };
        let Event::RefundDue { amount_minor: charged, currency, .. } = due else { panic!("no refund is due") };
        assert_eq!(currency, self.currency);
        assert!((1..=self.at_processor).contains(&charged), "{charged} of {}", self.at_processor);
        assert!(charged == self.at_processor || charged % self.currency.payment_step_minor() == 0, "{charged}");
        self.at_processor -= charged;
        let id = format!("re_{}", self.refunds);
        if is_reported_first {
            let unknown = self.reversed(&id, ReversalStep::Refund, charged);
            self.report(unknown);
        }
        let (processor_refund_id, status) = (id, if fails { RefundStatus::Failed } else { RefundStatus::Succeeded });
        if fails {
            self.at_processor += charged;
        }
        self.report(Fact::RefundAt { refund_id, processor_refund_id, status, amount_minor: charged });
    }

    fn is_due(&self, refund_id: RefundId) -> bool {
        let refund = &self.world.it().refunds[&refund_id];
        matches!(refund.taking, RefundDebit::Taken { .. }) && refund.at_processor.is_none()
    }

    fn dispute(&mut self, amount: i64) {
        if self.at_processor == 0 {
            return;
        }
        let amount = amount.min(self.at_processor);
        let id = format!("dp_{}", self.disputes);
        self.disputes += 1;
        self.at_processor -= amount;
        let opened = self.reversed(&id, ReversalStep::DisputeOpened, amount);
        self.open_disputes.push((id, amount));
        self.report(opened);
    }

    /// Nothing is over, and nothing is left on one side alone.
    fn check(&self) {
        let (payment, balance) = (self.world.it(), self.world.balance());
        assert_eq!(payment.left_minor(), balance, "{payment:#?}");
        assert!((0..=payment.amount_minor).contains(&balance) && (0..=self.charged).contains(&self.at_processor));
        assert_eq!(balance == 0, self.at_processor == 0, "{balance}, {} at the processor", self.at_processor);
        assert!(self.at_processor < self.charged || balance == payment.amount_minor, "{payment:#?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, max_shrink_iters: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_split_of_refunds_and_disputes_of_a_converted_payment_ends_at_exactly_its_amount(
        amount in 1_000_i64..20_000,
        (charged, currency) in charges(),
        parts in parts(),
        last_is_a_refund in any::<bool>(),
    ) {
        let mut life = Simulation::new(amount, charged, currency);
        for part in parts {
            life.make(part);
            life.check();
        }
        if last_is_a_refund {
            life.refund(None, false, false);
        } else {
            life.dispute(life.at_processor);
        }
        life.make(Part::Replay);
        life.check();
        prop_assert_eq!((life.world.balance(), life.world.it().left_minor(), life.at_processor), (0, 0, 0));
        prop_assert!(life.world.it().is_settled());
    }
}

/// 50.00 EUR that were charged as 777 JPY.
fn in_yen() -> Simulation {
    Simulation::new(5_000, 777, "JPY")
}

#[test]
fn thirds_of_a_converted_payment_add_up_to_what_was_charged() {
    let mut life = in_yen();
    for part in [1_667, 1_667] {
        life.refund(Some(part), false, false);
    }
    let charged: Vec<_> = life.world.it().refunds.values().map(|refund| refund.charged_minor.unwrap()).collect();
    assert_eq!(charged, [259, 259]);
    life.refund(None, false, false);
    assert_eq!((life.at_processor, life.world.balance()), (0, 0), "the last part is what is left on both sides");
}

#[test]
fn disputes_of_a_converted_payment_take_no_more_than_all_of_it() {
    let mut life = Simulation::new(1_000, 3, "JPY");
    for balance in [667, 334, 0] {
        life.dispute(1);
        assert_eq!(life.world.balance(), balance);
    }
}

#[test]
fn dispute_of_less_than_a_minor_unit_posts_nothing_and_is_counted_with_the_next_one() {
    let mut life = Simulation::new(1_000, 100_000, "KRW");
    life.dispute(60);
    assert_eq!((life.world.balance(), life.world.ledger.len(), life.world.it().is_settled()), (1_000, 1, true));
    life.dispute(60);
    assert_eq!(life.world.balance(), 999);
    life.make(Part::Win { which: 0 });
    life.make(Part::Win { which: 0 });
    assert_eq!((life.world.balance(), life.world.it().left_minor()), (1_000, 1_000));
}

#[test]
fn refund_that_is_no_whole_amount_where_it_was_charged_is_refused_with_the_least_that_is_one() {
    let mut life = in_yen();
    let small = Request::Refund { refund_id: refund_id(1), amount_minor: Some(6), reason: "r".into() };
    let refused = life.world.ask(&ann(), payment_id(0), small);
    let (currency, paid) = (Currency::parse("JPY").unwrap(), Some(eur()));
    assert_eq!(refused, Err(Rejection::LessThanCharged { least: 7, currency, paid }));
    life.refund(Some(7), false, false);
    assert_eq!((life.at_processor, life.world.balance()), (776, 4_993));
}

#[test]
fn refund_that_became_too_small_for_the_processor_is_in_the_account_again() {
    let mut life = in_yen();
    life.refund(Some(12), false, false);
    // 13 cents of the payment are 2.02 yen: each of two requests for another cent is the second yen, until one has it.
    for n in [2, 3] {
        let cent = Request::Refund { refund_id: refund_id(n), amount_minor: Some(1), reason: "r".into() };
        life.world.ask(&ann(), payment_id(0), cent).unwrap();
    }
    life.world.hear_all();
    let refunds = &life.world.it().refunds;
    assert_eq!([2, 3].map(|n| refunds[&refund_id(n)].charged_minor), [Some(1), Some(0)]);
    assert_eq!(refunds[&refund_id(3)].taking, RefundDebit::GivenBack { amount_minor: 1 });
    assert_eq!((life.world.balance(), life.world.it().left_minor()), (4_987, 4_987));
}

//! Credit of operators: it can be spent, and never leaves as the refund of a payment.

use super::*;
use proptest::prelude::*;

const PAYMENT: PaymentId = PaymentId(Uuid::from_u128(5));

impl Bench {
    /// An account of ann without a balance.
    fn empty() -> Self {
        let mut bench = Self::new();
        bench.set(PolicyKey::BillingAdjustmentMax, 100_000_000);
        bench.send(Request::Open { holder: Holder::User("ann".into()), currency: eur() }).unwrap();
        bench
    }

    fn pay(&mut self, n: u128, amount_minor: i64) {
        let (payment_id, holder) = (PaymentId(Uuid::from_u128(n)), Holder::User("ann".into()));
        self.send(Instruction::Deposit { payment_id, holder, currency: eur(), amount_minor }).unwrap();
    }

    /// A refund of at most so much, and what was debited for it.
    fn pay_back(&mut self, n: u128, amount_minor: i64, is_exact: bool) -> Result<i64, String> {
        let before = self.published.len();
        let refund_id = RefundId(Uuid::from_u128(n));
        self.send(Instruction::TakeRefund { refund_id, payment_id: PAYMENT, amount_minor, is_exact }).unwrap();
        let mut answers = self.published[before..].iter().filter_map(|event| {
            if let Event::RefundTaken { amount_minor, .. } = event {
                return Some(Ok(*amount_minor));
            }
            if let Event::RefundRefused { reason, .. } = event { Some(Err(reason.clone())) } else { None }
        });
        answers.next_back().expect("a refund is answered")
    }

    /// An allocation that costs so much in an hour.
    fn spend(&mut self, n: u64, minor: i64) {
        self.rent(n, minor);
        let from = self.now;
        self.pass(3_600);
        self.use_of(n, from, Some(self.now));
    }

    fn refund_cost(&mut self, refund: u128, n: u64, amount_minor: Option<i64>) -> Result<(), Rejection> {
        self.send(Request::RefundAllocation {
            refund_id: RefundId(Uuid::from_u128(refund)),
            allocation_id: allocation(n),
            cost: Some(MicroAmount::of(self.cost(n).0)),
            ended_at: Some(self.now),
            renter: None,
            amount_minor,
            reason: "a faulty switch".into(),
        })
    }
}

#[test]
fn credit_is_not_paid_out_as_the_refund_of_a_payment_that_was_spent() {
    let mut bench = Bench::empty();
    bench.pay(1, 10_000);
    bench.spend(1, 10_000);
    assert_eq!(bench.it().balance, MicroAmount::ZERO);
    bench.give(5_000);
    for is_exact in [true, false] {
        let refused = bench.pay_back(1 + u128::from(is_exact), 5_000, is_exact).unwrap_err();
        assert!(refused.starts_with("0.00 EUR were paid in"), "{refused}");
    }
    // It can be spent, and what is paid in beside it can be refunded.
    bench.pay(2, 1_000);
    assert_eq!(bench.pay_back(3, 5_000, false), Ok(1_000));
    bench.spend(2, 5_000);
    assert_eq!(bench.it().balance, MicroAmount::ZERO);
    bench.check();
}

#[test]
fn refund_of_all_in_a_currency_of_three_decimals_is_rounded_down_to_what_a_card_payment_carries() {
    for (code, refunded) in [("EUR", 4_994), ("JPY", 4_994), ("KWD", 4_990)] {
        let (mut bench, currency) = (Bench::new(), Currency::parse(code).unwrap());
        bench.set(PolicyKey::BillingAdjustmentMax, 100_000_000);
        let holder = Holder::User("ann".into());
        let deposit =
            Instruction::Deposit { payment_id: PAYMENT, holder, currency: currency.clone(), amount_minor: 5_000 };
        bench.send(deposit).unwrap();
        bench.send(Request::Adjust { amount_minor: -6, currency, reason: "r".into() }).unwrap();
        assert_eq!(bench.pay_back(1, 5_000, false), Ok(refunded), "{code}");
        bench.check();
    }
}

#[test]
fn credit_is_spent_before_money_that_was_paid() {
    let mut bench = Bench::empty();
    bench.pay(1, 10_000);
    bench.give(5_000);
    bench.spend(1, 5_000);
    assert_eq!(bench.pay_back(1, 10_001, true).unwrap_err(), "100.00 EUR are not spent or held");
    assert_eq!(bench.pay_back(2, 10_000, true), Ok(10_000));
    bench.check();
}

#[test]
fn refunded_cost_that_credit_had_paid_is_credit_again() {
    let mut bench = Bench::empty();
    bench.pay(1, 10_000);
    bench.spend(1, 10_000);
    bench.give(5_000);
    bench.spend(2, 5_000);
    bench.refund_cost(1, 2, None).unwrap();
    assert_eq!((bench.it().balance.minor(), bench.it().paid()), (5_000, MicroAmount::ZERO));
    assert!(bench.pay_back(2, 1, true).is_err());
    // The cost that was paid for is refunded as paid.
    bench.refund_cost(3, 1, None).unwrap();
    assert_eq!(bench.pay_back(4, 20_000, false), Ok(10_000));
    bench.check();
}

#[test]
fn usage_that_is_credited_after_a_fault_is_credit_again() {
    let mut bench = Bench::empty();
    bench.pay(1, 3_600);
    bench.spend(1, 3_600);
    bench.give(3_600);
    bench.rent(2, 3_600);
    let from = bench.now;
    bench.pass(1_800);
    // The fault was long before its report.
    bench.use_of(2, from, Some(from + TimeDelta::seconds(1)));
    assert_eq!(bench.it().balance.minor(), 3_599);
    assert!(bench.pay_back(1, 1, true).is_err());
    bench.check();
}

#[test]
fn dispute_that_is_won_again_leaves_credit_what_it_was() {
    let mut bench = Bench::empty();
    bench.pay(1, 10_000);
    bench.spend(1, 10_000);
    bench.give(5_000);
    let dispute = |amount_minor| Instruction::Reverse {
        reversal_id: "dp_1".into(),
        payment_id: PAYMENT,
        is_dispute: true,
        amount_minor,
    };
    bench.send(dispute(10_000)).unwrap();
    assert!(bench.pay_back(1, 1, true).is_err());
    let won = Instruction::UndoReversal {
        reversal_id: "dp_1".into(),
        payment_id: PAYMENT,
        is_dispute: true,
        amount_minor: 10_000,
    };
    bench.send(won).unwrap();
    assert_eq!(bench.it().balance.minor(), 5_000);
    assert!(bench.pay_back(2, 1, true).is_err());
    bench.check();
}

#[test]
fn debit_of_an_operator_takes_credit_back_first() {
    let mut bench = Bench::empty();
    bench.pay(1, 1_000);
    bench.give(500);
    bench.give(-700);
    assert_eq!(bench.pay_back(1, 1_000, false), Ok(800));
    bench.check();
}

#[derive(Clone, Copy, Debug)]
enum MoneyStep {
    Pay { minor: i64 },
    Give { minor: i64 },
    Take { minor: i64 },
    Spend { minor: i64, refunded: bool },
    PayBack { minor: i64, is_exact: bool, returns: bool },
    Reverse { minor: i64, is_undone: bool },
}

fn money_steps() -> impl Strategy<Value = Vec<MoneyStep>> {
    let minor = || 1_i64..5_000;
    let one = prop_oneof![
        3 => minor().prop_map(|minor| MoneyStep::Pay { minor }),
        2 => minor().prop_map(|minor| MoneyStep::Give { minor }),
        1 => minor().prop_map(|minor| MoneyStep::Take { minor }),
        4 => (minor(), any::<bool>()).prop_map(|(minor, refunded)| MoneyStep::Spend { minor, refunded }),
        3 => (minor(), any::<bool>(), any::<bool>())
            .prop_map(|(minor, is_exact, returns)| MoneyStep::PayBack { minor, is_exact, returns }),
        1 => (minor(), any::<bool>()).prop_map(|(minor, is_undone)| MoneyStep::Reverse { minor, is_undone }),
    ];
    prop::collection::vec(one, 0..40)
}

/// The money of payers that the ledger shows to be left: usage is theirs to pay where no credit was there, and what is credited of a usage is
/// theirs once all usage that credit has paid is credit again. The amounts are summed from the postings alone.
fn paid_by_the_ledger(ledger: &[Posting]) -> i128 {
    let (mut paid, mut credit, mut usage_by_credit) = (0_i128, 0_i128, 0_i128);
    for posting in ledger {
        let amount = i128::from(posting.amount.get());
        let is = |kinds: &[PostingKind]| kinds.contains(&posting.kind);
        let of_credit = if is(&[PostingKind::Credit]) {
            amount
        } else if is(&[PostingKind::Debit, PostingKind::Usage]) {
            -amount.min(credit)
        } else if is(&[PostingKind::UsageCredit, PostingKind::AllocationRefund]) {
            amount.min(usage_by_credit)
        } else {
            0
        };
        if !is(&[PostingKind::Credit, PostingKind::Debit]) {
            usage_by_credit -= of_credit;
        }
        credit += of_credit;
        paid += i128::from(posting.effect().get()) - of_credit;
        assert!(credit >= 0 && usage_by_credit >= 0, "{credit} {usage_by_credit}: {posting:?}");
    }
    paid
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, max_shrink_iters: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// A refund takes all that payers have left, and not a millionth of an operator's credit.
    #[test]
    fn any_sequence_pays_out_what_was_paid_in_and_no_credit(steps in money_steps()) {
        let mut bench = Bench::empty();
        for (n, step) in steps.into_iter().enumerate() {
            let (id, n) = (n as u128 + 1, n as u64);
            match step {
                MoneyStep::Pay { minor } => bench.pay(id, minor),
                MoneyStep::Give { minor } => bench.give(minor),
                MoneyStep::Take { minor } => {
                    drop(bench.send(Request::Adjust { amount_minor: -minor, currency: eur(), reason: "r".into() }));
                }
                MoneyStep::Spend { minor, refunded } => {
                    if bench.hold(n, minor, 1).is_ok() {
                        let from = bench.now;
                        bench.use_of(n, from, None);
                        bench.pass(1_800);
                        bench.use_of(n, from, Some(bench.now));
                        if refunded {
                            drop(bench.refund_cost(id, n, None));
                        }
                    }
                }
                MoneyStep::PayBack { minor, is_exact, returns } => {
                    let before = paid_by_the_ledger(&bench.ledger);
                    let there = i64::try_from(before.div_euclid(1_000_000)).unwrap().max(0);
                    let wanted = if is_exact { minor } else { minor.min(there) };
                    let taken = bench.pay_back(id, minor, is_exact);
                    if wanted > 0 && wanted <= there {
                        prop_assert_eq!(taken, Ok(wanted));
                        if returns {
                            let refund_id = RefundId(Uuid::from_u128(id));
                            bench.send(Instruction::GiveBackRefund { refund_id, payment_id: PAYMENT, amount_minor: wanted }).unwrap();
                            prop_assert_eq!(paid_by_the_ledger(&bench.ledger), before);
                        }
                    } else {
                        prop_assert!(taken.is_err(), "{:?} of {}", taken, there);
                    }
                }
                MoneyStep::Reverse { minor, is_undone } => {
                    let reversal_id = format!("dp_{id}");
                    bench.send(Instruction::Reverse { reversal_id: reversal_id.clone(), payment_id: PAYMENT, is_dispute: true, amount_minor: minor }).unwrap();
                    if is_undone {
                        bench.send(Instruction::UndoReversal { reversal_id, payment_id: PAYMENT, is_dispute: true, amount_minor: minor }).unwrap();
                    }
                }
            }
            prop_assert_eq!(i128::from(bench.it().paid().get()), paid_by_the_ledger(&bench.ledger));
        }
        bench.check();
    }
}

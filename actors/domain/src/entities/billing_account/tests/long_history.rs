//! The snapshot of an account that has been in use for months: it does not grow with its ledger.

use super::*;

const LARGEST: usize = 16 * 1024;

impl Bench {
    fn deposited(&mut self, payment: u128, amount_minor: i64) {
        let payment_id = PaymentId(Uuid::from_u128(payment));
        self.send(Instruction::Deposit {
            payment_id,
            holder: Holder::User("ann".into()),
            currency: eur(),
            amount_minor,
        })
        .unwrap();
    }

    fn size(&self) -> usize {
        serde_json::to_string(self.it()).unwrap().len()
    }
}

#[test]
fn snapshot_after_a_hundred_thousand_postings_and_five_hundred_payments_is_below_16_kib() {
    let mut bench = Bench::with(10_000_000);
    bench.rent(0, 60);
    let mut largest = 0;
    for payment in 1..=500 {
        bench.deposited(payment.into(), 1_000);
        bench.rent(2 * payment, 60);
        bench.rent(2 * payment + 1, 60);
        let from = bench.now;
        // Two hours, of which two more allocations run the first.
        for minute in 0..120 {
            bench.pass(60);
            if minute == 59 {
                bench.use_of(2 * payment, from, Some(bench.now));
                bench.use_of(2 * payment + 1, from, Some(bench.now));
            }
        }
        largest = largest.max(bench.size());
    }
    assert!(bench.ledger.len() >= 100_000, "{}", bench.ledger.len());
    assert!(largest < LARGEST, "{largest}");
    bench.check();
}

#[test]
fn posting_of_a_payment_that_still_resends_is_remembered_among_many_others() {
    let mut bench = Bench::with(1_000);
    for payment in 0..500 {
        bench.deposited(payment, 1_000);
    }
    let postings = bench.ledger.len();
    // The answer was lost, and each asks again after the longest pause.
    bench.pass(3_600);
    for payment in 0..500 {
        bench.deposited(payment, 1_000);
    }
    assert_eq!(bench.ledger.len(), postings, "none is posted twice");
    bench.check();
}

#[test]
fn refund_that_was_taken_is_never_refused_when_it_is_resent() {
    let mut bench = Bench::new();
    bench.deposited(1_000, 5_000);
    let (refund_id, payment_id) = (RefundId(Uuid::from_u128(6)), PaymentId(Uuid::from_u128(1_000)));
    let take = Instruction::TakeRefund { refund_id, payment_id, amount_minor: 3_000, is_exact: true };
    bench.send(take.clone()).unwrap();
    // The payment is parked for a day, and its answer waits. Meanwhile there are many other payments, and all money goes back to its payers.
    for payment in 0..100 {
        bench.deposited(payment, 1_000);
        let (refund_id, payment_id) = (RefundId(Uuid::from_u128(100 + payment)), PaymentId(Uuid::from_u128(payment)));
        bench.send(Instruction::TakeRefund { refund_id, payment_id, amount_minor: 1_000, is_exact: true }).unwrap();
        bench.pass(900);
    }
    let reversal_id = "dp_1".to_owned();
    bench.send(Instruction::Reverse { reversal_id, payment_id, is_dispute: true, amount_minor: 2_000 }).unwrap();
    let postings = bench.ledger.len();
    bench.published.clear();
    bench.send(take).unwrap();
    assert!(matches!(bench.published[..], [Event::RefundTaken { amount_minor: 3_000, .. }]), "{:?}", bench.published);
    assert_eq!(bench.ledger.len(), postings, "it is taken once");
}

#[test]
fn posting_that_follows_from_an_instruction_has_its_kind_and_reference() {
    let mut bench = Bench::new();
    bench.deposited(5, 5_000);
    let (payment_id, refund_id) = (PaymentId(Uuid::from_u128(5)), RefundId(Uuid::from_u128(6)));
    let (reversal_id, amount_minor) = ("dp_1".to_owned(), 100);
    let mut instructions = vec![
        Instruction::TakeRefund { refund_id, payment_id, amount_minor, is_exact: true },
        Instruction::GiveBackRefund { refund_id, payment_id, amount_minor },
    ];
    for is_dispute in [false, true] {
        let reversal_id = reversal_id.clone();
        instructions.push(Instruction::Reverse {
            reversal_id: reversal_id.clone(),
            payment_id,
            is_dispute,
            amount_minor,
        });
        instructions.push(Instruction::UndoReversal { reversal_id, payment_id, is_dispute, amount_minor });
    }
    for instruction in instructions {
        bench.send(instruction.clone()).unwrap();
        let posted = bench.ledger.last().unwrap();
        let reference = posted.source.as_ref().unwrap().reference.clone();
        assert_eq!(instruction.posting(), Some((posted.kind, reference)));
    }
}

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

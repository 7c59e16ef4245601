//! The snapshot of a payment with many refunds and disputes.

use super::*;

const LARGEST: usize = 16 * 1024;

#[test]
fn snapshot_of_a_payment_with_many_refunds_and_disputes_is_below_16_kib() {
    let mut world = PaymentHarness::deposited(5_000);
    for n in 0..30 {
        world.refund(n, Some(50)).unwrap();
        world.hear_all();
        for status in [RefundStatus::Pending, RefundStatus::Succeeded] {
            world.refund_at(n, status, 50).unwrap();
        }
        let dispute = format!("du_1PgafmB7WZ01zgkW{n:08}");
        for step in [ReversalStep::DisputeOpened, ReversalStep::DisputeWon] {
            world.reversed(&dispute, step, 10);
            world.hear_all();
        }
        world.pass(TimeDelta::hours(6));
    }
    let size = serde_json::to_string(world.it()).unwrap().len();
    assert!(size < LARGEST, "{size}");
}

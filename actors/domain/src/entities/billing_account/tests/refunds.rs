//! An operator's refunds of an allocation's cost. (Refunds of payments are in payment/tests.rs.)

use super::*;
use crate::id::RefundId;

impl Bench {
    fn refund(&mut self, refund: u128, n: u64, spent: Option<i64>, amount_minor: Option<i64>) -> Result<(), Rejection> {
        let ended_at = spent.map(|_| self.now);
        self.refund_later(refund, n, spent, ended_at, amount_minor)
    }

    fn refund_later(
        &mut self,
        refund: u128,
        n: u64,
        spent: Option<i64>,
        ended_at: Option<Timestamp>,
        amount_minor: Option<i64>,
    ) -> Result<(), Rejection> {
        self.send(Request::RefundAllocation {
            refund_id: RefundId(Uuid::from_u128(refund)),
            allocation_id: allocation(n),
            cost: spent.map(MicroAmount::of),
            ended_at,
            renter: None,
            amount_minor,
            reason: "a faulty switch".into(),
        })
    }

    /// An allocation that cost so many minor units an hour, for an hour.
    fn used(&mut self, n: u64, price: i64) {
        self.rent(n, price);
        let from = self.now;
        self.pass(3_600);
        self.use_of(n, from, Some(self.now));
    }
}

#[test]
fn refunds_of_an_allocation_never_exceed_its_cost() {
    let mut bench = Bench::with(10_000);
    bench.used(1, 1_000);
    let cost = bench.cost(1).0;
    assert_eq!(cost, 1_000_000_000);
    bench.refund(1, 1, Some(cost), Some(400)).unwrap();
    // The same id is the same refund.
    for _ in 0..100 {
        bench.refund(1, 1, Some(cost), Some(400)).unwrap();
    }
    assert_eq!(bench.it().balance.minor(), 9_400);
    let more_than = |left| Err(Rejection::MoreThanCost { left, currency: Some(eur()) });
    let left = MicroAmount::of_minor(600).unwrap();
    for amount in [601, 0, -1, i64::MIN, i64::MAX] {
        assert_eq!(bench.refund(2, 1, Some(cost), Some(amount)), more_than(left), "{amount}");
    }
    bench.refund(2, 1, Some(cost), None).unwrap();
    let nothing = more_than(MicroAmount::ZERO);
    assert_eq!((bench.it().balance.minor(), bench.refund(3, 1, Some(cost), None)), (10_000, nothing));
    let given = bench.ledger.last().unwrap();
    assert_eq!((given.kind, given.usage.unwrap().allocation_id), (PostingKind::AllocationRefund, allocation(1)));
    bench.check();
}

#[test]
fn full_refund_includes_the_last_millionth() {
    let mut bench = Bench::with(10_000);
    bench.rent(1, 1_001);
    bench.pass(61);
    bench.use_of(1, begin(), Some(bench.now));
    let cost = bench.cost(1).0;
    assert!(cost % 1_000_000 != 0, "{cost}");
    bench.refund(1, 1, Some(cost), None).unwrap();
    assert_eq!(bench.it().balance, MicroAmount::of_minor(10_000).unwrap());
    bench.check();
}

#[test]
fn running_allocation_is_refunded_up_to_its_charges_and_never_twice() {
    let mut bench = Bench::with(10_000);
    bench.rent(1, 3_600);
    bench.pass(600);
    // A caller with a stale read of the allocation's state has to retry.
    assert_eq!(bench.refund(1, 1, Some(600_000_000), None), Err(Rejection::Moved));
    assert_eq!(bench.refund(1, 2, None, None), Err(Rejection::Moved));
    bench.refund(1, 1, None, Some(500)).unwrap();
    assert_eq!(bench.it().balance.minor(), 9_900);
    // The machine was at fault after 200: of the 600 the user has 500 already.
    bench.use_of(1, begin(), Some(begin() + TimeDelta::seconds(200)));
    assert_eq!(bench.it().balance.minor(), 10_000, "given back once, and never more than was charged");
    let nothing = Err(Rejection::MoreThanCost { left: MicroAmount::ZERO, currency: Some(eur()) });
    assert_eq!(bench.refund(2, 1, Some(200_000_000), None), nothing);
    bench.check();
}

#[test]
fn refund_after_the_refund_window_is_rejected() {
    let mut bench = Bench::with(10_000);
    bench.used(1, 1_000);
    let ended = bench.now;
    bench.now += TimeDelta::days(30);
    bench.refund_later(1, 1, Some(1_000_000_000), Some(ended), Some(1)).unwrap();
    bench.now += TimeDelta::seconds(1);
    let late = |bench: &mut Bench| bench.refund_later(2, 1, Some(1_000_000_000), Some(ended), Some(1));
    assert_eq!(late(&mut bench), Err(Rejection::TooLate { days: 30 }));
    bench.set(PolicyKey::AllocationRefundWindow, 365);
    late(&mut bench).unwrap();
    bench.set(PolicyKey::AllocationRefundWindow, 0);
    assert_eq!(bench.refund(3, 1, Some(1_000_000_000), None), Err(Rejection::TooLate { days: 0 }));
    bench.check();
}

#[test]
fn account_of_the_previous_release_is_read() {
    let mut bench = Bench::with(10_000);
    bench.rent(1, 1_000);
    let mut stored = serde_json::to_value(bench.it()).unwrap();
    for field in ["moved", "refunded"] {
        stored.as_object_mut().unwrap().remove(field).unwrap();
    }
    assert_eq!(&serde_json::from_value::<BillingAccount>(stored).unwrap(), bench.it());
}

#[test]
fn refund_window_of_an_allocation_is_resolved_for_its_renter() {
    use crate::authz::ResourceOwner;
    let mut bench = Bench::with(10_000);
    bench.used(1, 1_000);
    let cost = MicroAmount::of(bench.cost(1).0);
    let renter = ResourceOwner {
        user_id: "ann".into(),
        org_id: Some("acme".into()),
        project_id: Some("p".into()),
        plan: Some("pro".into()),
    };
    let scopes = [
        PolicyScope::Global,
        PolicyScope::Plan("pro".into()),
        PolicyScope::OrgId("acme".into()),
        PolicyScope::ProjectId("p".into()),
        PolicyScope::UserId("ann".into()),
    ];
    let window = PolicyKey::AllocationRefundWindow;
    for (days, scope) in (1..).zip(scopes) {
        bench.policy.set(window, scope.clone(), Timestamp::UNIX_EPOCH, PolicyValue::Int(days)).unwrap();
        let mut refund = |refund: i64, age: TimeDelta| {
            let ended_at = Some(bench.now - age);
            bench.send(Request::RefundAllocation {
                refund_id: RefundId(Uuid::from_u128(refund.unsigned_abs().into())),
                allocation_id: allocation(1),
                cost: Some(cost),
                ended_at,
                renter: Some(renter.clone()),
                amount_minor: Some(1),
                reason: "a faulty switch".into(),
            })
        };
        assert_eq!(refund(1, TimeDelta::days(days + 1)), Err(Rejection::TooLate { days }), "{scope}");
        refund(100 + days, TimeDelta::days(days)).unwrap();
    }
    bench.check();
}

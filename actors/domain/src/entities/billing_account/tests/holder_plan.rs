//! The policies of an account, by its holder and by the plan that tokens name.

use super::*;
use crate::policy::Scopes;

fn user() -> Holder {
    Holder::User("ann".into())
}

fn org() -> Holder {
    Holder::Org("acme".into())
}

/// An administrator's question about ann, who pays from this holder's account and whose token names the plan `pro`.
fn query(holder: &Holder) -> Scopes {
    let org_id = holder.org_id().cloned();
    Scopes { user_id: Some("ann".into()), project_id: Some("p".into()), org_id, plan: Some("pro".into()) }
}

impl Bench {
    fn of(holder: &Holder, minor: i64) -> Self {
        let mut bench = Self::new();
        bench.set(PolicyKey::BillingAdjustmentMax, 100_000_000);
        bench.send(Request::Open { holder: holder.clone(), currency: eur() }).unwrap();
        bench.give(minor);
        bench
    }

    /// Adds an active allocation of ann, whose token named the plan when it was requested.
    fn rent_with(&mut self, n: u64, plan: Option<&str>, requested_at: Timestamp) {
        let holder = self.it().holder.clone();
        let plan = PlanClaim { plan: plan.map(str::to_owned), seen_at: requested_at };
        let (allocation_id, price) = (allocation(n), Price::new("EUR", 600).unwrap());
        let (user_id, gpu_count) = ("ann".into(), 1);
        self.send(Instruction::Hold { holder, allocation_id, user_id, price, gpu_count, plan: Some(plan) }).unwrap();
        self.use_of(n, self.now, None);
    }

    fn window_seconds(&self) -> i64 {
        let window = self.it().window.unwrap();
        (window.ends_at - window.began_at).num_seconds()
    }
}

#[test]
fn account_uses_the_policies_of_its_holder_and_plan() {
    let keys = [
        PolicyKey::BillingWindow,
        PolicyKey::BillingDepletionGrace,
        PolicyKey::BillingLowBalanceThreshold,
        PolicyKey::BillingAdjustmentMax,
    ];
    let of_user = [PolicyScope::Global, PolicyScope::Plan("pro".into()), PolicyScope::UserId("ann".into())];
    let of_org = [PolicyScope::Global, PolicyScope::Plan("pro".into()), PolicyScope::OrgId("acme".into())];
    for (holder, chain) in [(user(), of_user), (org(), of_org)] {
        let mut policy = PolicyBook::default();
        // In an organization's account no user has a value of their own.
        if holder == org() {
            for key in keys {
                policy.set(key, PolicyScope::UserId("ann".into()), Timestamp::UNIX_EPOCH, PolicyValue::Int(5)).unwrap();
            }
        }
        for (n, scope) in chain.into_iter().enumerate() {
            let value = 100 + i64::try_from(n).unwrap();
            for key in keys {
                policy.set(key, scope.clone(), Timestamp::UNIX_EPOCH, PolicyValue::Int(value)).unwrap();
            }
            let mut bench = Bench::of(&holder, 100);
            bench.policy = policy.clone();
            bench.rent_with(1, Some("pro"), bench.now);
            assert_eq!(bench.window_seconds(), value, "{scope} of {holder}");
            for key in keys {
                let resolved = bench.policy.look_up(key, &query(&holder), bench.now);
                assert_eq!(resolved, bench.policy.look_up(key, &bench.it().scopes(), bench.now));
                assert_eq!(resolved.by, Some((scope.clone(), Timestamp::UNIX_EPOCH)), "{} of {holder}", key.name());
            }
            let adjustment = |amount_minor| Request::Adjust { amount_minor, currency: eur(), reason: "r".into() };
            assert_eq!(bench.send(adjustment(value + 1)), Err(Rejection::Amount { max: value, currency: Some(eur()) }));
            bench.send(adjustment(value)).unwrap();
            while bench.depletions() == 0 {
                bench.tick_when_due();
            }
            let depletion = bench.it().depletion.unwrap();
            assert_eq!((depletion.release_at - depletion.at).num_seconds(), value, "{scope} of {holder}");
            assert_eq!(bench.warnings(), 1, "the balance fell below {value} once");
            bench.check();
        }
    }
}

#[test]
fn plan_of_a_later_token_is_in_force_from_the_next_window_and_audited() {
    for holder in [user(), org()] {
        let mut bench = Bench::of(&holder, 100_000);
        for (plan, seconds) in [("pro", 10), ("free", 100)] {
            let scope = PolicyScope::Plan(plan.into());
            let value = PolicyValue::Int(seconds);
            bench.policy.set(PolicyKey::BillingWindow, scope, Timestamp::UNIX_EPOCH, value).unwrap();
        }
        let requested_at = bench.now;
        bench.rent_with(1, Some("pro"), requested_at);
        assert_eq!(bench.window_seconds(), 10);
        bench.now += TimeDelta::seconds(1);
        bench.rent_with(2, Some("free"), bench.now);
        assert_eq!(bench.window_seconds(), 10, "the running window ends as it began");
        // A request of before that waited for capacity.
        bench.rent_with(3, Some("pro"), requested_at);
        // A member of an earlier release does not name it.
        bench.now += TimeDelta::seconds(1);
        let (allocation_id, price) = (allocation(4), Price::new("EUR", 600).unwrap());
        let hold = Instruction::Hold {
            holder: holder.clone(),
            allocation_id,
            user_id: "ann".into(),
            price,
            gpu_count: 1,
            plan: None,
        };
        bench.send(hold).unwrap();
        bench.pass(10);
        assert_eq!(bench.window_seconds(), 100);
        let plans: Vec<_> = bench.audited.iter().filter(|audit| audit.action == AuditAction::BillingPlan).collect();
        let changes: Vec<_> = plans.iter().map(|it| (&it.metadata["old_plan"], &it.metadata["new_plan"])).collect();
        assert_eq!(changes, [(&json!(null), &json!("pro")), (&json!("pro"), &json!("free"))]);
        assert!(plans.iter().all(|audit| audit.metadata["holder"] == holder.to_string()));
        bench.check();
    }
}

#[test]
fn plan_is_in_force_at_once_where_no_window_runs() {
    let mut bench = Bench::of(&user(), 100_000);
    let window = PolicyKey::BillingWindow;
    let pro = PolicyScope::Plan("pro".into());
    bench.policy.set(window, pro, Timestamp::UNIX_EPOCH, PolicyValue::Int(10)).unwrap();
    bench.rent_with(1, None, bench.now);
    assert_eq!(bench.window_seconds(), 60);
    let began_at = bench.now;
    bench.now += TimeDelta::seconds(1);
    bench.rent_with(2, Some("pro"), bench.now);
    // Both end before the window does.
    for n in [1, 2] {
        bench.use_of(n, began_at, Some(bench.now));
    }
    assert_eq!((bench.it().window, bench.it().scopes().plan.as_deref()), (None, Some("pro")));
    bench.rent_with(3, Some("pro"), bench.now);
    assert_eq!(bench.window_seconds(), 10);
    bench.check();
}

#[test]
fn account_of_an_earlier_release_has_no_plan_until_a_token_names_one() {
    let bench = Bench::of(&user(), 100);
    let stored = serde_json::to_value(bench.it()).unwrap();
    assert!(stored.get("plan").is_none());
    assert_eq!(serde_json::from_value::<BillingAccount>(stored).unwrap().scopes().plan, None);
}

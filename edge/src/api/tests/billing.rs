//! Billing accounts: adjustments, balances and ledgers. The callers' tokens name the organisation `acme`, which pays.

use super::harness::{ApiHarness, TestResponse};
use domain::allocation::{self, Allocation};
use domain::billing_account::{BillingAccount, Instruction};
use domain::policy::PolicyKey;
use domain::{AllocationId, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

pub(super) const ACCOUNTS: &str = "/api/v1/admin/billing/accounts";

pub(super) async fn opened(api: &ApiHarness) -> Uuid {
    api.bind("biller", "billing_operations").await.is(201);
    let account = api.post(ACCOUNTS).user("biller").json(&json!({"org_id": "acme", "currency": "EUR"})).send().await;
    account.is(201)["id"].as_str().unwrap().parse().unwrap()
}

pub(super) async fn adjust(api: &ApiHarness, account: Uuid, key: &str, amount: Value) -> TestResponse {
    let body = json!({"amount_minor": amount, "currency": "EUR", "reason": "a test"});
    api.post(&format!("{ACCOUNTS}/{account}/adjustments")).user("biller").key(key).json(&body).send().await
}

/// Meters an allocation of ann's that costs 3,600 minor units an hour.
pub(super) async fn metered(api: &ApiHarness, account: Uuid, allocation: AllocationId, from: Timestamp) {
    let hold = Instruction::Hold {
        holder: domain::billing_account::Holder::Org("acme".into()),
        allocation_id: allocation,
        user_id: "ann".into(),
        price: domain::money::Price::new("EUR", 3_600).unwrap(),
        gpu_count: 1,
        plan: None,
    };
    api.ask_as_system::<BillingAccount>(account, hold).await;
    let usage = Instruction::MeterUsage { allocation_id: allocation, from: Some(from), until: None };
    api.ask_as_system::<BillingAccount>(account, usage).await;
}

#[tokio::test]
async fn account_is_opened_once_and_shows_its_adjustments() {
    let api = ApiHarness::new().await;
    let nothing = api.get("/api/v1/billing/balance").user("ann").send().await;
    let nothing = nothing.is(200).clone();
    assert_eq!(
        (&nothing["balance_minor"], &nothing["currency"], &nothing["org_id"]),
        (&json!(0), &Value::Null, &json!("acme"))
    );
    let account = opened(&api).await;
    assert_eq!(nothing["id"], json!(account), "it has the same id before it is opened");
    let second = api.post(ACCOUNTS).user("biller").json(&json!({"org_id": "acme", "currency": "EUR"})).send().await;
    assert_eq!(second.is(200)["id"], json!(account));
    let dollars = api.post(ACCOUNTS).user("biller").json(&json!({"org_id": "acme", "currency": "USD"})).send().await;
    dollars.refused(409, "state_conflict");
    for body in [
        json!({"currency": "EUR"}),
        json!({"currency": "EUR", "user_id": "a", "org_id": "b"}),
        json!({"user_id": "a", "currency": "eur"}),
    ] {
        api.post(ACCOUNTS).user("biller").json(&body).send().await.refused(400, "invalid_request");
    }

    adjust(&api, account, "k", json!(700)).await.is(201);
    let repeated = adjust(&api, account, "k", json!(700)).await;
    assert!(repeated.is_replayed() && repeated.is(201)["balance_minor"] == 700);
    adjust(&api, account, "k", json!(701)).await.refused(422, "idempotency_key_reused");
    adjust(&api, account, "l", json!(-200)).await.is(201);
    let mut shown = api.get("/api/v1/billing/balance").user("ann").send().await.is(200).clone();
    shown["as_of"] = "<varies>".into();
    shown["id"] = "<varies>".into();
    insta::assert_json_snapshot!("billing_account", shown);
    let page = api.get("/api/v1/billing/ledger?limit=1").user("ann").send().await.is(200).clone();
    let token = page["next_page"].as_str().unwrap();
    let mut posting = page["items"][0].clone();
    posting["at"] = "<varies>".into();
    insta::assert_json_snapshot!("ledger_posting", posting);
    let rest = api.get(&format!("/api/v1/billing/ledger?limit=1&page_token={token}")).user("ann").send().await;
    assert_eq!(
        (&rest.is(200)["items"][0]["balance_micro"], &rest.body["next_page"]),
        (&json!(700_000_000), &Value::Null)
    );
    // A page token of another list is refused.
    let foreign =
        api.get(&format!("{ACCOUNTS}/{account}/ledger?limit=1&page_token={token}")).user("biller").send().await;
    foreign.refused(400, "invalid_request");
}

#[tokio::test]
async fn invalid_amount_is_refused_by_field_name() {
    let api = ApiHarness::new().await;
    let account = opened(&api).await;
    api.set_policy(PolicyKey::BillingAdjustmentMax, 500);
    let amounts = [
        json!(0),
        json!(501),
        json!(-501),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1.5),
        json!("10"),
        json!(null),
        json!([1]),
    ];
    let mut refusals = Vec::new();
    for amount in amounts {
        let answer = adjust(&api, account, &amount.to_string(), amount.clone()).await;
        answer.refused(400, "invalid_request");
        refusals.push(answer.line());
    }
    for amount in ["1e3", "1000.0"] {
        let path = format!("/api/v1/admin/billing/accounts/{account}/adjustments");
        let body = format!(r#"{{"amount_minor":{amount},"currency":"EUR","reason":"why"}}"#);
        let answer = api.post(&path).user("biller").key(amount).text(body).send().await;
        // It is read as 1000, which the policy does not allow.
        answer.refused(400, "invalid_request");
        assert!(answer.line().contains("from -5.00 EUR to 5.00 EUR"), "{amount}: {}", answer.line());
    }
    refusals.push(adjust(&api, account, "k", json!(-1)).await.line());
    let nobody = adjust(&api, Uuid::from_u128(7), "nobody", json!(1)).await;
    nobody.refused(404, "not_found");
    insta::assert_snapshot!("refused_adjustments", refusals.join("\n"));
}

#[tokio::test]
async fn running_allocation_shows_its_cost_and_account_how_long_it_lasts() {
    let api = ApiHarness::with_sku().await;
    let account = opened(&api).await;
    adjust(&api, account, "k", json!(3_600)).await.is(201);
    let estimate = api.get("/api/v1/billing/estimate?sku=h100x4&gpu_count=4&seconds=5400").user("ann").send().await;
    insta::assert_json_snapshot!("billing_estimate", estimate.is(200));

    let node = api.active_node("h100x4", 4).await;
    api.set_placement(super::harness::PlacementOutcome::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let rented = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = rented.is(201)["id"].as_str().unwrap().parse().unwrap();
    assert_eq!((&rented.body["cost_to_date_minor"], &rented.body["billed_until"]), (&json!(0), &Value::Null));
    api.ask_as_system::<Allocation>(id, allocation::Fact::Provisioned { node_id: node }).await;
    let from = chrono::Utc::now() - chrono::TimeDelta::seconds(125);
    metered(&api, account, AllocationId(id), from).await;

    let shown = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(shown.is(200)["cost_to_date_minor"], 120, "two windows are charged");
    let list = api.get("/api/v1/allocations").user("ann").send().await;
    assert_eq!(list.is(200)["items"][0]["cost_to_date_minor"], 120);
    let balance = api.get("/api/v1/billing/balance").user("ann").send().await;
    let balance = balance.is(200);
    assert_eq!((&balance["balance_minor"], &balance["burn_minor_per_hour"]), (&json!(3_480), &json!(3_600)));
    assert!((5..30).contains(&balance["accrued_minor"].as_i64().unwrap()), "{balance}");
    let lasts: chrono::DateTime<chrono::Utc> = balance["lasts_until"].as_str().unwrap().parse().unwrap();
    let seconds = (lasts - from).num_seconds();
    assert!((3_595..3_605).contains(&seconds), "the credit is for an hour: {seconds}");

    let metered = api.get(&format!("{ACCOUNTS}/{account}")).admin().send().await;
    let meters = metered.is(200)["meters"].as_array().unwrap();
    assert_eq!(
        (meters.len(), &meters[0]["user_id"], &meters[0]["charged_micro"]),
        (1, &json!("ann"), &json!(120_000_000))
    );
    let found = api.get(&format!("{ACCOUNTS}?org_id=acme")).user("biller").send().await;
    assert_eq!(found.is(200)["items"][0]["id"], json!(account));
    let overview = api.get("/api/v1/admin/overview").admin().send().await;
    let money = json!([{"currency": "EUR", "accounts": 1, "depleted": 0, "balance_minor": 3_480}]);
    assert_eq!(overview.is(200)["money"], money);
    let none = api.get(&format!("{ACCOUNTS}?user_id=acme")).user("biller").send().await;
    assert_eq!(none.is(200)["items"], json!([]));
}

#[tokio::test]
async fn uncovered_allocation_is_refused_with_the_missing_amount() {
    let api = ApiHarness::with_sku().await;
    api.set_placement(super::harness::PlacementOutcome::Unaffordable);
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let refused = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id = refused.refused(402, "insufficient_balance")["allocation_id"].as_str().unwrap().to_owned();
    let released = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(
        (&released.is(200)["state"], &released.body["failure"]["code"]),
        (&json!("released"), &json!("insufficient_balance"))
    );
}

#[tokio::test]
async fn instant_that_the_database_does_not_have_is_refused_in_every_filter_by_time() {
    let api = ApiHarness::new().await;
    let read = async |query: &str| {
        let ledger = api.get(&format!("/api/v1/billing/ledger?{query}")).user("ann").send().await;
        [ledger, api.get(&format!("/api/v1/admin/audit-log?{query}")).admin().send().await]
    };
    for field in ["from", "until"] {
        for at in ["-5000-01-01T00:00:00Z", "0000-12-31T23:59:59Z", "%2B10000-01-01T00:00:00Z"] {
            for answer in read(&format!("{field}={at}")).await {
                assert_eq!(answer.refused(400, "invalid_request")["field"], field, "{at}");
            }
        }
        for at in ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"] {
            for answer in read(&format!("{field}={at}")).await {
                answer.is(200);
            }
        }
    }
}

#[tokio::test]
async fn page_of_ones_own_money_is_reloaded_seven_times_in_a_minute() {
    let api = ApiHarness::new().await;
    opened(&api).await;
    api.set_policy(PolicyKey::RateLimitFinancial, 30);
    api.set_policy(PolicyKey::RateLimitApi, 120);
    for load in 1..=7 {
        // A page reads all of it again once its connection for notifications is there.
        for _ in 0..2 {
            for read in ["balance", "payments", "ledger", "ledger?kind=usage&limit=200", "statements"] {
                let answer = api.get(&format!("/api/v1/billing/{read}")).user("ann").send().await;
                assert_eq!(answer.status, 200, "{read} of load {load}: {}", answer.body);
            }
        }
    }
}

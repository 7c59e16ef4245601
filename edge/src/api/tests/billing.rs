//! Accounts, what is given to them, and what they show. The callers' tokens name the organisation `acme`, which pays.

use super::world::{Answer, World};
use domain::allocation::{Allocation, Command as ToAllocation};
use domain::billing_account::{BillingAccount, Command};
use domain::policy::Key;
use domain::{AllocationId, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

pub(super) const ACCOUNTS: &str = "/api/v1/admin/billing/accounts";

pub(super) async fn opened(world: &World) -> Uuid {
    world.bind("biller", "billing_operations").await.is(201);
    let account = world.post(ACCOUNTS).user("biller").json(&json!({"org_id": "acme", "currency": "EUR"})).send().await;
    account.is(201)["id"].as_str().unwrap().parse().unwrap()
}

pub(super) async fn adjust(world: &World, account: Uuid, key: &str, amount: Value) -> Answer {
    let body = json!({"amount_minor": amount, "currency": "EUR", "reason": "a test"});
    world.post(&format!("{ACCOUNTS}/{account}/adjustments")).user("biller").key(key).json(&body).send().await
}

/// Meters an allocation of ann's that costs 3,600 minor units an hour.
pub(super) async fn metered(world: &World, account: Uuid, allocation: AllocationId, from: Timestamp) {
    let hold = Command::Hold {
        holder: domain::billing_account::Holder::Org("acme".into()),
        allocation_id: allocation,
        user_id: "ann".into(),
        price: domain::money::Price::new("EUR", 3_600).unwrap(),
        gpu_count: 1,
    };
    world.tell::<BillingAccount>(account, hold).await;
    let usage = Command::Usage { allocation_id: allocation, from: Some(from), until: None };
    world.tell::<BillingAccount>(account, usage).await;
}

#[tokio::test]
async fn an_account_is_opened_once_and_shows_what_was_given() {
    let world = World::new().await;
    let nothing = world.get("/api/v1/billing/balance").user("ann").send().await;
    let nothing = nothing.is(200).clone();
    assert_eq!(
        (&nothing["balance_minor"], &nothing["currency"], &nothing["org_id"]),
        (&json!(0), &Value::Null, &json!("acme"))
    );
    let account = opened(&world).await;
    assert_eq!(nothing["id"], json!(account), "it has the same id before it is opened");
    let again = world.post(ACCOUNTS).user("biller").json(&json!({"org_id": "acme", "currency": "EUR"})).send().await;
    assert_eq!(again.is(200)["id"], json!(account));
    let dollars = world.post(ACCOUNTS).user("biller").json(&json!({"org_id": "acme", "currency": "USD"})).send().await;
    dollars.refused(409, "state_conflict");
    for body in [
        json!({"currency": "EUR"}),
        json!({"currency": "EUR", "user_id": "a", "org_id": "b"}),
        json!({"user_id": "a", "currency": "eur"}),
    ] {
        world.post(ACCOUNTS).user("biller").json(&body).send().await.refused(400, "invalid_request");
    }

    adjust(&world, account, "k", json!(700)).await.is(201);
    let repeated = adjust(&world, account, "k", json!(700)).await;
    assert!(repeated.is_replayed() && repeated.is(201)["balance_minor"] == 700);
    adjust(&world, account, "k", json!(701)).await.refused(422, "idempotency_key_reused");
    adjust(&world, account, "l", json!(-200)).await.is(201);
    let mut shown = world.get("/api/v1/billing/balance").user("ann").send().await.is(200).clone();
    shown["as_of"] = "<varies>".into();
    shown["id"] = "<varies>".into();
    insta::assert_json_snapshot!("billing_account", shown);
    let page = world.get("/api/v1/billing/ledger?limit=1").user("ann").send().await.is(200).clone();
    let token = page["next_page"].as_str().unwrap();
    let mut posting = page["items"][0].clone();
    posting["at"] = "<varies>".into();
    insta::assert_json_snapshot!("ledger_posting", posting);
    let rest = world.get(&format!("/api/v1/billing/ledger?limit=1&page_token={token}")).user("ann").send().await;
    assert_eq!(
        (&rest.is(200)["items"][0]["balance_micro"], &rest.body["next_page"]),
        (&json!(700_000_000), &Value::Null)
    );
    // A token of another list is none of this one.
    let foreign =
        world.get(&format!("{ACCOUNTS}/{account}/ledger?limit=1&page_token={token}")).user("biller").send().await;
    foreign.refused(400, "invalid_request");
}

#[tokio::test]
async fn what_is_no_amount_is_refused_by_name() {
    let world = World::new().await;
    let account = opened(&world).await;
    world.set_policy(Key::BillingAdjustmentMax, 500);
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
        let answer = adjust(&world, account, &amount.to_string(), amount.clone()).await;
        answer.refused(400, "invalid_request");
        refusals.push(answer.line());
    }
    for amount in ["1e3", "1000.0"] {
        let path = format!("/api/v1/admin/billing/accounts/{account}/adjustments");
        let body = format!(r#"{{"amount_minor":{amount},"currency":"EUR","reason":"why"}}"#);
        let answer = world.post(&path).user("biller").key(amount).text(body).send().await;
        // It is read as 1000, which the policy does not allow.
        answer.refused(400, "invalid_request");
        assert!(answer.line().contains("from -500 to 500"), "{amount}: {}", answer.line());
    }
    refusals.push(adjust(&world, account, "k", json!(-1)).await.line());
    let nobody = adjust(&world, Uuid::from_u128(7), "nobody", json!(1)).await;
    nobody.refused(404, "not_found");
    insta::assert_snapshot!("refused_adjustments", refusals.join("\n"));
}

#[tokio::test]
async fn what_runs_shows_its_cost_and_the_account_how_long_it_lasts() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let account = opened(&world).await;
    adjust(&world, account, "k", json!(3_600)).await.is(201);
    let estimate = world.get("/api/v1/billing/estimate?sku=h100x4&gpu_count=4&seconds=5400").user("ann").send().await;
    insta::assert_json_snapshot!("billing_estimate", estimate.is(200));

    let node = world.active_node("h100x4", 4).await;
    world.places(super::world::Placing::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let rented = world.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = rented.is(201)["id"].as_str().unwrap().parse().unwrap();
    assert_eq!((&rented.body["cost_to_date_minor"], &rented.body["billed_until"]), (&json!(0), &Value::Null));
    world.tell::<Allocation>(id, ToAllocation::Provisioned { node_id: node }).await;
    let from = chrono::Utc::now() - chrono::TimeDelta::seconds(125);
    metered(&world, account, AllocationId(id), from).await;

    let shown = world.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(shown.is(200)["cost_to_date_minor"], 120, "two windows are charged");
    let list = world.get("/api/v1/allocations").user("ann").send().await;
    assert_eq!(list.is(200)["items"][0]["cost_to_date_minor"], 120);
    let balance = world.get("/api/v1/billing/balance").user("ann").send().await;
    let balance = balance.is(200);
    assert_eq!((&balance["balance_minor"], &balance["burn_minor_per_hour"]), (&json!(3_480), &json!(3_600)));
    assert!((5..30).contains(&balance["accrued_minor"].as_i64().unwrap()), "{balance}");
    let lasts: chrono::DateTime<chrono::Utc> = balance["lasts_until"].as_str().unwrap().parse().unwrap();
    let seconds = (lasts - from).num_seconds();
    assert!((3_595..3_605).contains(&seconds), "the credit is for an hour: {seconds}");

    let metered = world.get(&format!("{ACCOUNTS}/{account}")).admin().send().await;
    let meters = metered.is(200)["meters"].as_array().unwrap();
    assert_eq!(
        (meters.len(), &meters[0]["user_id"], &meters[0]["charged_micro"]),
        (1, &json!("ann"), &json!(120_000_000))
    );
    let found = world.get(&format!("{ACCOUNTS}?org_id=acme")).user("biller").send().await;
    assert_eq!(found.is(200)["items"][0]["id"], json!(account));
    let overview = world.get("/api/v1/admin/overview").admin().send().await;
    let money = json!([{"currency": "EUR", "accounts": 1, "depleted": 0, "balance_minor": 3_480}]);
    assert_eq!(overview.is(200)["money"], money);
    let none = world.get(&format!("{ACCOUNTS}?user_id=acme")).user("biller").send().await;
    assert_eq!(none.is(200)["items"], json!([]));
}

#[tokio::test]
async fn an_allocation_that_is_not_covered_is_refused_with_what_is_missing() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    world.places(super::world::Placing::Unaffordable);
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let refused = world.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id = refused.refused(402, "insufficient_balance")["allocation_id"].as_str().unwrap().to_owned();
    let released = world.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(
        (&released.is(200)["state"], &released.body["failure"]["code"]),
        (&json!("released"), &json!("insufficient_balance"))
    );
}

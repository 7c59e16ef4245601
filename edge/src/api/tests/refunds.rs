//! Refunds, of payments by their payers and of allocations by those who may.

use super::billing::{ACCOUNTS, adjust, metered, opened};
use super::payments::{PAYMENTS, deposited};
use super::till::Till;
use super::world::{Answer, Placing, World};
use domain::allocation::{Allocation, Command as ToAllocation};
use domain::billing_account::{BillingAccount, Command as ToAccount};
use domain::payment::{Command, Payment, RefundStatus};
use domain::policy::Key;
use domain::{AllocationId, RefundId};
use serde_json::{Value, json};
use uuid::Uuid;

const REFUNDS: &str = "/api/v1/billing/refunds";

async fn refund(world: &World, by: &str, key: &str, of: Value, amount: Option<i64>) -> Answer {
    let mut body = json!({"reason": "it was too much"});
    body.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
    if let Some(amount) = amount {
        body["amount_minor"] = amount.into();
    }
    world.post(REFUNDS).user(by).key(key).json(&body).send().await
}

#[tokio::test]
async fn a_payer_gets_back_what_is_not_spent_once_and_after_it_left_the_account() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let id = deposited(&world, &till, "k", 5_000).await;
    let of = json!({"payment_id": id});
    let balance = async || {
        let shown = world.get("/api/v1/billing/balance").user("ann").send().await;
        shown.is(200)["balance_minor"].as_i64().unwrap()
    };
    let first = refund(&world, "ann", "r", of.clone(), Some(2_000)).await;
    assert_eq!(
        (&first.is(201)["state"], balance().await),
        (&json!("pending"), 3_000),
        "the processor is asked after it"
    );
    let again = refund(&world, "ann", "r", of.clone(), Some(2_000)).await;
    assert!(again.is_replayed() && again.is(201)["id"] == first.body["id"]);
    refund(&world, "ann", "r", of.clone(), Some(2_001)).await.refused(422, "idempotency_key_reused");
    assert_eq!(balance().await, 3_000);
    let mut shown = first.body.clone();
    for varies in ["id", "payment_id", "requested_at"] {
        shown[varies] = "<varies>".into();
    }
    insta::assert_json_snapshot!("refund", shown);

    let refund_id: RefundId = first.body["id"].as_str().unwrap().parse().unwrap();
    let succeeded = Command::RefundAt {
        refund_id,
        processor_refund_id: "re_1".into(),
        status: RefundStatus::Succeeded,
        amount_minor: 2_000,
    };
    world.tell::<Payment>(id.0, succeeded).await;
    let payment = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!(
        (&payment.is(200)["refunds"][0]["state"], &payment.body["left_minor"]),
        (&json!("succeeded"), &json!(3_000))
    );
    let rest = refund(&world, "ann", "s", of.clone(), None).await;
    assert_eq!((&rest.is(201)["amount_minor"], balance().await), (&json!(3_000), 0));
    refund(&world, "ann", "t", of, None).await.refused(409, "state_conflict");
}

#[tokio::test]
async fn what_cannot_be_given_back_is_refused_by_name() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let id = deposited(&world, &till, "k", 5_000).await;
    let of = json!({"payment_id": id});
    let mut lines = Vec::new();
    let mut note = |what: &str, answer: &Answer| lines.push(format!("{what}: {}", answer.line()));
    for (by, of) in [("bob", of.clone()), ("root", of.clone()), ("ann", json!({"payment_id": Uuid::from_u128(7)}))] {
        refund(&world, by, "none", of, None).await.refused(404, "not_found");
    }
    for body in [json!({}), json!({"payment_id": id, "allocation_id": id})] {
        let answer = refund(&world, "ann", &body.to_string(), body.clone(), None).await;
        answer.refused(400, "invalid_request");
        note("neither or both", &answer);
    }
    let more = refund(&world, "ann", "more", of.clone(), Some(5_001)).await;
    more.refused(400, "invalid_request");
    note("more than was paid", &more);
    let body = json!({"payment_id": id, "reason": "r"});
    world.post(REFUNDS).user("ann").json(&body).send().await.refused(400, "invalid_request");
    for amount in ["-1", "0", "9223372036854775808", "1e9", "\"10\""] {
        let text = format!(r#"{{"payment_id":"{id}","reason":"r","amount_minor":{amount}}}"#);
        world.post(REFUNDS).user("ann").key("r").text(text).send().await.refused(400, "invalid_request");
    }

    // What is spent is spent.
    let account: Uuid = {
        let shown = world.get("/api/v1/billing/balance").user("ann").send().await;
        shown.is(200)["id"].as_str().unwrap().parse().unwrap()
    };
    world.bind("biller", "billing_operations").await.is(201);
    adjust(&world, account, "a", json!(-1_000)).await.is(201);
    let spent = refund(&world, "ann", "r", of.clone(), Some(4_001)).await;
    assert!(spent.refused(402, "insufficient_balance")["refund_id"].is_string());
    note("spent", &spent);
    let again = refund(&world, "ann", "r", of.clone(), Some(4_001)).await;
    again.refused(402, "insufficient_balance");
    assert!(again.is_replayed(), "a refusal of the account stays one");
    world.set_policy(Key::AllocationRefundWindow, 0);
    let late = refund(&world, "ann", "s", of, None).await;
    assert_eq!(late.refused(409, "state_conflict")["policy_key"], "allocation.refund_window_days");
    note("late", &late);
    insta::assert_snapshot!("refused_refunds", lines.join("\n"));
}

#[tokio::test]
async fn what_the_processor_does_not_pay_back_is_there_again() {
    let till = Till::default();
    let world = World::with_till(&till).await;
    let id = deposited(&world, &till, "k", 5_000).await;
    let asked = refund(&world, "ann", "r", json!({"payment_id": id}), None).await;
    let refund_id: RefundId = asked.is(201)["id"].as_str().unwrap().parse().unwrap();
    let failed = Command::RefundAt {
        refund_id,
        processor_refund_id: "re_1".into(),
        status: RefundStatus::Failed,
        amount_minor: 5_000,
    };
    world.tell::<Payment>(id.0, failed).await;
    world
        .until::<Payment>(id.0, |payment| {
            matches!(payment.refunds[&refund_id].taking, domain::payment::Taking::GivenBack { .. })
        })
        .await;
    let payment = world.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!(
        (&payment.is(200)["refunds"][0]["state"], &payment.body["left_minor"]),
        (&json!("returned"), &json!(5_000))
    );
    assert_eq!(world.get("/api/v1/billing/balance").user("ann").send().await.is(200)["balance_minor"], 5_000);
}

#[tokio::test]
async fn an_allocations_cost_is_given_back_by_billing_operations_alone_and_never_twice() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let account = opened(&world).await;
    adjust(&world, account, "k", json!(3_600)).await.is(201);
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let rented = world.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = rented.is(201)["id"].as_str().unwrap().parse().unwrap();
    world.tell::<Allocation>(id, ToAllocation::Provisioned { node_id: node }).await;
    let from = chrono::Utc::now() - chrono::TimeDelta::seconds(125);
    metered(&world, account, AllocationId(id), from).await;

    let of = json!({"allocation_id": id});
    for by in ["ann", "root"] {
        refund(&world, by, "r", of.clone(), Some(20)).await.refused(403, "forbidden");
    }
    let given = refund(&world, "biller", "r", of.clone(), Some(20)).await;
    assert_eq!((&given.is(201)["amount_minor"], &given.body["state"]), (&json!(20), &json!("succeeded")));
    let again = refund(&world, "biller", "r", of.clone(), Some(20)).await;
    assert!(again.is_replayed() && again.is(201)["id"] == given.body["id"]);
    let over = refund(&world, "biller", "s", of.clone(), Some(200)).await;
    assert_eq!(over.refused(409, "state_conflict")["field"], "amount_minor");

    // It ends, and what is left of its cost is known to the ledger.
    let until = from + chrono::TimeDelta::seconds(125);
    let usage = ToAccount::Usage { allocation_id: AllocationId(id), from: Some(from), until: Some(until) };
    world.tell::<BillingAccount>(account, usage).await;
    let rest = refund(&world, "biller", "t", of.clone(), None).await;
    assert_eq!(rest.is(201)["amount_minor"], 105);
    refund(&world, "biller", "u", of.clone(), None).await.refused(409, "state_conflict");
    let shown = world.get(&format!("{ACCOUNTS}/{account}")).user("biller").send().await;
    assert_eq!(shown.is(200)["account"]["balance_minor"], 3_600);
    let cost = world.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(cost.is(200)["cost_to_date_minor"], 125, "what was given back was a cost");
    refund(&world, "biller", "v", json!({"allocation_id": Uuid::from_u128(7)}), None).await.refused(404, "not_found");
}

//! Refunds: of payments by their payers, and of allocations by billing operations.

use super::billing::{ACCOUNTS, adjust, metered, opened};
use super::harness::{ApiHarness, PlacementOutcome, TestResponse};
use super::payments::{PAYMENTS, deposited};
use axum::http::Method;
use domain::allocation::{self, Allocation};
use domain::billing_account::{self, BillingAccount};
use domain::payment::{Fact, Payment, RefundStatus};
use domain::policy::PolicyKey;
use domain::{AllocationId, RefundId, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

const REFUNDS: &str = "/api/v1/billing/refunds";

async fn refund(api: &ApiHarness, by: &str, key: &str, of: Value, amount: Option<i64>) -> TestResponse {
    let mut body = json!({"reason": "it was too much"});
    body.as_object_mut().unwrap().extend(of.as_object().unwrap().clone());
    if let Some(amount) = amount {
        body["amount_minor"] = amount.into();
    }
    api.post(REFUNDS).user(by).key(key).json(&body).send().await
}

#[tokio::test]
async fn payer_is_refunded_the_unspent_amount_once_after_it_left_the_account() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let id = deposited(&api, &processor, "k", 5_000).await;
    let of = json!({"payment_id": id});
    let balance = async || {
        let shown = api.get("/api/v1/billing/balance").user("ann").send().await;
        shown.is(200)["balance_minor"].as_i64().unwrap()
    };
    let first = refund(&api, "ann", "r", of.clone(), Some(2_000)).await;
    assert_eq!(
        (&first.is(201)["state"], balance().await),
        (&json!("pending"), 3_000),
        "the processor is asked after it"
    );
    let repeated = refund(&api, "ann", "r", of.clone(), Some(2_000)).await;
    assert!(repeated.is_replayed() && repeated.is(201)["id"] == first.body["id"]);
    refund(&api, "ann", "r", of.clone(), Some(2_001)).await.refused(422, "idempotency_key_reused");
    assert_eq!(balance().await, 3_000);
    let mut shown = first.body.clone();
    for varies in ["id", "payment_id", "requested_at"] {
        shown[varies] = "<varies>".into();
    }
    insta::assert_json_snapshot!("refund", shown);

    let refund_id: RefundId = first.body["id"].as_str().unwrap().parse().unwrap();
    let succeeded = Fact::RefundAt {
        refund_id,
        processor_refund_id: "re_1".into(),
        status: RefundStatus::Succeeded,
        amount_minor: 2_000,
    };
    api.ask_as_system::<Payment>(id.0, succeeded).await;
    let payment = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!(
        (&payment.is(200)["refunds"][0]["state"], &payment.body["left_minor"]),
        (&json!("succeeded"), &json!(3_000))
    );
    let rest = refund(&api, "ann", "s", of.clone(), None).await;
    assert_eq!((&rest.is(201)["amount_minor"], balance().await), (&json!(3_000), 0));
    refund(&api, "ann", "t", of, None).await.refused(409, "state_conflict");
}

#[tokio::test]
async fn invalid_refund_is_refused_by_field_name() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let id = deposited(&api, &processor, "k", 5_000).await;
    let of = json!({"payment_id": id});
    let mut lines = Vec::new();
    let mut note = |what: &str, answer: &TestResponse| lines.push(format!("{what}: {}", answer.line()));
    for (by, of) in [("bob", of.clone()), ("root", of.clone()), ("ann", json!({"payment_id": Uuid::from_u128(7)}))] {
        refund(&api, by, "none", of, None).await.refused(404, "not_found");
    }
    for body in [json!({}), json!({"payment_id": id, "allocation_id": id})] {
        let answer = refund(&api, "ann", &body.to_string(), body.clone(), None).await;
        answer.refused(400, "invalid_request");
        note("neither or both", &answer);
    }
    let more = refund(&api, "ann", "more", of.clone(), Some(5_001)).await;
    more.refused(400, "invalid_request");
    note("more than was paid", &more);
    let body = json!({"payment_id": id, "reason": "r"});
    api.post(REFUNDS).user("ann").json(&body).send().await.refused(400, "invalid_request");
    for amount in ["-1", "0", "9223372036854775807", "1e9"] {
        let text = format!(r#"{{"payment_id":"{id}","reason":"r","amount_minor":{amount}}}"#);
        let refused = api.post(REFUNDS).user("ann").key(amount).text(text).send().await;
        assert_eq!(refused.refused(400, "invalid_request")["field"], "amount_minor");
        assert!(refused.line().contains("Of the payment 50.00 EUR are left"), "{amount}: {}", refused.line());
    }
    for amount in ["9223372036854775808", "\"10\""] {
        let text = format!(r#"{{"payment_id":"{id}","reason":"r","amount_minor":{amount}}}"#);
        api.post(REFUNDS).user("ann").key("r").text(text).send().await.refused(400, "invalid_request");
    }

    // Spent money is not refundable.
    let account: Uuid = {
        let shown = api.get("/api/v1/billing/balance").user("ann").send().await;
        shown.is(200)["id"].as_str().unwrap().parse().unwrap()
    };
    api.bind("biller", "billing_operations").await.is(201);
    adjust(&api, account, "a", json!(-1_000)).await.is(201);
    let spent = refund(&api, "ann", "r", of.clone(), Some(4_001)).await;
    assert!(spent.refused(402, "insufficient_balance")["refund_id"].is_string());
    note("spent", &spent);
    let repeated = refund(&api, "ann", "r", of.clone(), Some(4_001)).await;
    repeated.refused(402, "insufficient_balance");
    assert!(repeated.is_replayed(), "a refusal of the account stays one");
    // Credit of an operator is not refundable either.
    adjust(&api, account, "b", json!(2_000)).await.is(201);
    let credit = refund(&api, "ann", "credit", of.clone(), Some(4_001)).await;
    credit.refused(402, "insufficient_balance");
    note("credit", &credit);
    api.set_policy(PolicyKey::AllocationRefundWindow, 0);
    let late = refund(&api, "ann", "s", of, None).await;
    assert_eq!(late.refused(409, "state_conflict")["policy_key"], "allocation.refund_window_days");
    note("late", &late);
    insta::assert_snapshot!("refused_refunds", lines.join("\n"));
}

#[tokio::test]
async fn failed_refund_returns_to_the_account() {
    let (processor, api) = ApiHarness::with_fake_processor().await;
    let id = deposited(&api, &processor, "k", 5_000).await;
    let asked = refund(&api, "ann", "r", json!({"payment_id": id}), None).await;
    let refund_id: RefundId = asked.is(201)["id"].as_str().unwrap().parse().unwrap();
    let failed = Fact::RefundAt {
        refund_id,
        processor_refund_id: "re_1".into(),
        status: RefundStatus::Failed,
        amount_minor: 5_000,
    };
    api.ask_as_system::<Payment>(id.0, failed).await;
    api.wait_until::<Payment>(id.0, |payment| {
        matches!(payment.refunds[&refund_id].taking, domain::payment::RefundDebit::GivenBack { .. })
    })
    .await;
    let payment = api.get(&format!("{PAYMENTS}/{id}")).user("ann").send().await;
    assert_eq!(
        (&payment.is(200)["refunds"][0]["state"], &payment.body["left_minor"]),
        (&json!("returned"), &json!(5_000))
    );
    assert_eq!(api.get("/api/v1/billing/balance").user("ann").send().await.is(200)["balance_minor"], 5_000);
}

/// An allocation of ann's that has cost 125 minor units, and since when.
async fn rented(api: &ApiHarness, account: Uuid) -> (Uuid, Timestamp) {
    api.sku("h100x4", 4).await;
    adjust(api, account, "k", json!(3_600)).await.is(201);
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let rented = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = rented.is(201)["id"].as_str().unwrap().parse().unwrap();
    api.ask_as_system::<Allocation>(id, allocation::Fact::Provisioned { node_id: node }).await;
    let from = chrono::Utc::now() - chrono::TimeDelta::seconds(125);
    metered(api, account, AllocationId(id), from).await;
    (id, from)
}

#[tokio::test]
async fn allocation_cost_is_refunded_by_billing_operations_alone_and_once() {
    let api = ApiHarness::new().await;
    let account = opened(&api).await;
    let (id, from) = rented(&api, account).await;
    let of = json!({"allocation_id": id});
    for by in ["ann", "root"] {
        refund(&api, by, "r", of.clone(), Some(20)).await.refused(403, "forbidden");
    }
    let given = refund(&api, "biller", "r", of.clone(), Some(20)).await;
    assert_eq!((&given.is(201)["amount_minor"], &given.body["state"]), (&json!(20), &json!("succeeded")));
    let repeated = refund(&api, "biller", "r", of.clone(), Some(20)).await;
    assert!(repeated.is_replayed() && repeated.is(201)["id"] == given.body["id"]);
    let over = refund(&api, "biller", "s", of.clone(), Some(200)).await;
    assert_eq!(over.refused(409, "state_conflict")["field"], "amount_minor");

    // The allocation ends, and the ledger has the rest of its cost.
    let until = from + chrono::TimeDelta::seconds(125);
    let usage = billing_account::Instruction::MeterUsage {
        allocation_id: AllocationId(id),
        from: Some(from),
        until: Some(until),
    };
    api.ask_as_system::<BillingAccount>(account, usage).await;
    let rest = refund(&api, "biller", "t", of.clone(), None).await;
    assert_eq!(rest.is(201)["amount_minor"], 105);
    refund(&api, "biller", "u", of.clone(), None).await.refused(409, "state_conflict");
    let shown = api.get(&format!("{ACCOUNTS}/{account}")).user("biller").send().await;
    assert_eq!(shown.is(200)["account"]["balance_minor"], 3_600);
    let cost = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!(cost.is(200)["cost_to_date_minor"], 125, "what was given back was a cost");
    refund(&api, "biller", "v", json!({"allocation_id": Uuid::from_u128(7)}), None).await.refused(404, "not_found");
}

#[tokio::test]
async fn stored_refund_of_an_allocation_is_not_replayed_to_a_caller_who_has_lost_the_role() {
    let api = ApiHarness::new().await;
    let account = opened(&api).await;
    let (id, _) = rented(&api, account).await;
    let of = json!({"allocation_id": id});
    let given = refund(&api, "biller", "r", of.clone(), Some(20)).await;
    given.is(201);
    let query = "/api/v1/admin/platform-roles/bindings?subject=biller&role=billing_operations";
    api.call(Method::DELETE, query).admin().send().await.is(204);
    let repeated = refund(&api, "biller", "r", of.clone(), Some(20)).await;
    repeated.refused(403, "forbidden");
    assert!(!repeated.is_replayed());
    refund(&api, "biller", "r", of.clone(), Some(21)).await.refused(403, "forbidden");
    api.bind("biller", "billing_operations").await.is(201);
    let repeated = refund(&api, "biller", "r", of, Some(20)).await;
    assert!(repeated.is_replayed() && repeated.is(201) == given.is(201));
}

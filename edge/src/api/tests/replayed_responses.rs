//! A replay equals the first response, although what the request refers to may be gone.

use super::contract::{document, operations};
use super::harness::{ANNS_KEY, ApiHarness, PlacementOutcome, TestResponse, node_body, sku_body};
use axum::http::Method;
use chrono::{TimeDelta, Utc};
use domain::allocation::{Allocation, Fact, Phase};
use domain::policy::PolicyKey;
use serde_json::{Value, json};
use uuid::Uuid;

/// The replay equals the first response.
#[track_caller]
fn is_replay(again: &TestResponse, first: &TestResponse) {
    assert!(again.is_replayed(), "{}", again.body);
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.headers.get("etag"), first.headers.get("etag"));
}

/// As [`is_replay`], except for the correlation id, which is the request's own.
#[track_caller]
fn is_refusal_replay(again: &TestResponse, first: &TestResponse) {
    assert!(again.is_replayed() && !first.is_replayed(), "{}", again.body);
    assert_eq!(again.line(), first.line());
}

async fn deactivate(api: &ApiHarness, sku: &str) {
    let review = json!({"reason": "x", "impact_review": "few", "rollback_plan": "activate it"});
    api.decide(&format!("/api/v1/admin/skus/{sku}/deactivate"), &review).await.is(200);
}

async fn sku_id(api: &ApiHarness, name: &str) -> String {
    let all = api.get("/api/v1/admin/skus").admin().send().await;
    let skus = all.is(200)["items"].as_array().unwrap().clone();
    skus.iter().find(|sku| sku["name"] == name).unwrap()["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn allocation_is_replayed_after_its_sku_was_deactivated_and_its_ssh_key_deleted() {
    let (api, _) = ApiHarness::with_free_node().await;
    let key = json!({"name": "laptop", "public_key": ANNS_KEY});
    let key = api.post("/api/v1/ssh-keys").user("ann").json(&key).send().await.is(201)["id"].clone();
    let body = json!({"sku": "h100x4", "gpu_count": 1, "ssh_key_ids": [key]});
    let rent = || api.post("/api/v1/allocations").user("ann").key("k").json(&body).send();
    let first = rent().await;
    first.is(201);
    let path = format!("/api/v1/ssh-keys/{}", key.as_str().unwrap());
    api.call(Method::DELETE, &path).user("ann").send().await.is(204);
    deactivate(&api, &sku_id(&api, "h100x4").await).await;
    is_replay(&rent().await, &first);
    // The process died between the commit and the stored response: the entity's reply suffices, and is replayed from then on.
    api.lose_responses().await;
    let repeated = rent().await;
    assert!(repeated.is_replayed());
    assert_eq!(repeated.is(201)["id"], first.body["id"]);
    is_replay(&rent().await, &repeated);
}

#[tokio::test]
async fn key_of_an_allocation_of_one_organization_rents_none_for_another() {
    let api = ApiHarness::new().await;
    api.sku("h100x4", 4).await;
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    let rent = async |org: &str, key: &str| {
        let body = json!({"sku": "h100x4", "gpu_count": 1});
        api.post("/api/v1/allocations").by(&api.token_of("ann", org)).key(key).json(&body).send().await
    };
    let first = rent("acme", "k").await;
    first.is(201);
    rent("umbrella", "k").await.refused(422, "idempotency_key_reused");
    is_replay(&rent("acme", "k").await, &first);
    // The stored response is of that organization, too.
    rent("umbrella", "k").await.refused(422, "idempotency_key_reused");
    assert_ne!(rent("umbrella", "l").await.is(201)["id"], first.body["id"]);
}

/// Whether the first request was carried out, or refused before or by its command.
#[tokio::test]
async fn key_of_a_request_for_one_organization_belongs_to_no_other() {
    let api = ApiHarness::with_sku().await;
    api.set_placement(PlacementOutcome::NoCapacity);
    let endpoint = json!({"kind": "webhook", "url": "https://receiver.example/hooks"});
    for (path, body, status) in [
        ("/api/v1/allocations", json!({"sku": "unknown", "gpu_count": 1}), 400),
        ("/api/v1/allocations", json!({"sku": "h100x4", "gpu_count": 1}), 409),
        ("/api/v1/notification-endpoints", endpoint, 201),
        ("/api/v1/service-accounts", json!({"name": "ci"}), 201),
        ("/api/v1/ssh-keys", json!({"name": "laptop", "public_key": ANNS_KEY}), 201),
        ("/api/v1/billing/refunds", json!({"payment_id": Uuid::nil(), "reason": "r"}), 404),
    ] {
        let of = async |org: &str| {
            api.post(path).by(&api.token_of("ann", org)).key(&format!("{path} {status}")).json(&body).send().await
        };
        let first = of("acme").await;
        assert_eq!(first.status, status, "{path}: {}", first.body);
        of("umbrella").await.refused(422, "idempotency_key_reused");
        assert_eq!(of("acme").await.status, status, "{path}");
    }
}

#[tokio::test]
async fn allocation_is_replayed_after_its_queue_time_ended() {
    let api = ApiHarness::with_sku().await;
    let body = json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60});
    let rent = || api.post("/api/v1/allocations").user("ann").key("k").json(&body).send();
    let first = rent().await;
    let id: Uuid = first.is(201)["id"].as_str().unwrap().parse().unwrap();
    api.stop_clock_at(&(Utc::now() + TimeDelta::seconds(90)).to_rfc3339());
    api.ask_as_system::<Allocation>(id, Fact::NoCapacity { suggestion: None }).await;
    api.wait_until::<Allocation>(id, |it| matches!(it.phase, Phase::Released { .. })).await;
    is_replay(&rent().await, &first);
}

#[tokio::test]
async fn failed_placement_is_replayed_after_capacity_is_free() {
    let api = ApiHarness::with_sku().await;
    api.set_placement(PlacementOutcome::NoCapacity);
    let rent = |key: &str| {
        let body = json!({"sku": "h100x4", "gpu_count": 1});
        api.post("/api/v1/allocations").user("ann").key(key).json(&body).send()
    };
    let first = rent("k").await;
    first.refused(409, "insufficient_capacity");
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    is_refusal_replay(&rent("k").await, &first);
    rent("l").await.is(201);
}

#[tokio::test]
async fn refusal_of_a_missing_reference_is_replayed_after_it_was_created() {
    let api = ApiHarness::new().await;
    let register =
        |key: &str, gpus: u32| api.post("/api/v1/admin/nodes").admin().key(key).json(&node_body("h100x4", gpus)).send();
    let first = register("k", 4).await;
    first.refused(400, "invalid_request");
    api.sku("h100x4", 4).await;
    is_refusal_replay(&register("k", 4).await, &first);
    register("k", 8).await.refused(422, "idempotency_key_reused");
    register("l", 4).await.is(201);
    assert_eq!(api.get("/api/v1/admin/nodes").admin().send().await.is(200)["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn rejection_is_replayed_after_its_precondition_holds() {
    let api = ApiHarness::with_sku().await;
    let path = format!("/api/v1/admin/nodes/{}", api.active_node("h100x4", 4).await);
    let order = |what: &str, key: &str| {
        api.post(&format!("{path}/{what}")).admin().key(key).json(&json!({"reason": "x"})).send()
    };
    let first = order("release-quarantine", "k").await;
    first.refused(400, "invalid_request");
    order("quarantine", "q").await.is(200);
    is_refusal_replay(&order("release-quarantine", "k").await, &first);
    assert_eq!(api.get(&path).admin().send().await.is(200)["state"], "quarantined");
    order("release-quarantine", "l").await.is(200);
}

#[tokio::test]
async fn late_replay_of_a_no_op_request_changes_nothing() {
    let api = ApiHarness::new().await;
    let path = "/api/v1/admin/platform-roles/bindings";
    let bind = |key: &str| {
        let binding = json!({"subject": "ann", "role": "auditor", "reason": "a test"});
        api.post(path).admin().key(key).json(&binding).send()
    };
    bind("a").await.is(201);
    let unchanged = bind("b").await;
    unchanged.is(200);
    let query = format!("{path}?subject=ann&role=auditor");
    api.call(Method::DELETE, &query).admin().send().await.is(204);
    is_replay(&bind("b").await, &unchanged);
    assert_eq!(api.get(path).admin().send().await.is(200)["items"], json!([]));
}

#[tokio::test]
async fn refusal_that_loses_to_a_commit_of_the_same_key_is_not_stored() {
    let api = ApiHarness::new().await;
    let create = |key: &str| api.post("/api/v1/admin/skus").admin().key(key).json(&sku_body("h100x4", 4)).send();
    let answers = futures::future::join_all((0..20).map(|_| create("k"))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201 && !answer.is_replayed()).count(), 1);
    for answer in &answers {
        assert!(answer.status == 201 || answer.body["code"] == "idempotency_in_progress", "{}", answer.body);
    }
    // Another key conflicts with the name: that is its own response, and is replayed too.
    let taken = create("l").await;
    taken.refused(409, "state_conflict");
    is_refusal_replay(&create("l").await, &taken);
    assert_eq!(create("k").await.is(201)["name"], "h100x4");
}

/// A value for each parameter of a path; none of the resources exists.
pub(super) fn path_with_values(path: &str) -> String {
    let part = |part: &str| match part {
        "{user_id}" => "nobody".to_owned(),
        part if part.starts_with('{') => Uuid::now_v7().to_string(),
        part => part.to_owned(),
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn every_route_with_an_idempotency_key_replays_its_response() {
    let api = ApiHarness::new().await;
    api.set_policy(PolicyKey::RateLimitApi, 10_000);
    api.set_policy(PolicyKey::RateLimitFinancial, 10_000);
    for role in ["platform_operations", "inventory_owner", "billing_operations"] {
        api.bind("root", role).await;
    }
    let document = document();
    let keyed = operations(&document).into_iter().filter(|(_, _, operation)| {
        let responses = operation["responses"].as_object().unwrap();
        responses.values().any(|response| !response["headers"]["Idempotency-Replayed"].is_null())
    });
    let mut replayed = 0;
    for (_, path, operation) in keyed {
        let body: Value = operation["requestBody"]["content"]["application/json"]["example"].clone();
        let path = path_with_values(&path);
        let send = || api.post(&path).admin().key(&path).json(&body).send();
        let first = send().await;
        // Without a payment processor checkouts are refused, and that refusal is not stored, since it may change.
        if first.status == 503 {
            assert!(path.ends_with("checkout-sessions"), "{path}: {}", first.body);
            continue;
        }
        assert_ne!(first.status, 401, "{path}");
        let repeated = send().await;
        assert!(repeated.is_replayed() && repeated.status == first.status, "{path}: {} {}", first.body, repeated.body);
        replayed += 1;
    }
    assert!(replayed > 25, "{replayed}");
}

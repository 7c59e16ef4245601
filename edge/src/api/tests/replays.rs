//! The stored answer comes before everything that a request refers to: what was there the first time may be gone.

use super::contract::{document, operations};
use super::world::{ANNS_KEY, Answer, Placing, World, node_body, sku_body};
use axum::http::Method;
use chrono::{TimeDelta, Utc};
use domain::allocation::{Allocation, Command, Phase};
use domain::policy::Key;
use serde_json::{Value, json};
use uuid::Uuid;

/// A repetition shows what was answered first.
#[track_caller]
fn is_replay(again: &Answer, first: &Answer) {
    assert!(again.is_replayed(), "{}", again.body);
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.headers.get("etag"), first.headers.get("etag"));
}

/// As [`is_replay`], but for the correlation id, which is the request's own.
#[track_caller]
fn is_refused_again(again: &Answer, first: &Answer) {
    assert!(again.is_replayed() && !first.is_replayed(), "{}", again.body);
    assert_eq!(again.line(), first.line());
}

async fn deactivate(world: &World, sku: &str) {
    let review = json!({"reason": "x", "impact_review": "few", "rollback_plan": "activate it"});
    world.decide(&format!("/api/v1/admin/skus/{sku}/deactivate"), &review).await.is(200);
}

async fn sku_id(world: &World, name: &str) -> String {
    let all = world.get("/api/v1/admin/skus").admin().send().await;
    let skus = all.is(200)["items"].as_array().unwrap().clone();
    skus.iter().find(|sku| sku["name"] == name).unwrap()["id"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn rental_is_replayed_after_its_sku_was_deactivated_and_its_key_deleted() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let key = json!({"name": "laptop", "public_key": ANNS_KEY});
    let key = world.post("/api/v1/ssh-keys").user("ann").json(&key).send().await.is(201)["id"].clone();
    let body = json!({"sku": "h100x4", "gpu_count": 1, "ssh_key_ids": [key]});
    let rent = || world.post("/api/v1/allocations").user("ann").key("k").json(&body).send();
    let first = rent().await;
    first.is(201);
    let path = format!("/api/v1/ssh-keys/{}", key.as_str().unwrap());
    world.call(Method::DELETE, &path).user("ann").send().await.is(204);
    deactivate(&world, &sku_id(&world, "h100x4").await).await;
    is_replay(&rent().await, &first);
    // Killed between the commit and the answer: the machine's reply is enough, and is shown the same from then on.
    world.lose_answers();
    let again = rent().await;
    assert!(again.is_replayed());
    assert_eq!(again.is(201)["id"], first.body["id"]);
    is_replay(&rent().await, &again);
}

#[tokio::test]
async fn rental_is_replayed_after_its_queue_time_ended() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let body = json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60});
    let rent = || world.post("/api/v1/allocations").user("ann").key("k").json(&body).send();
    let first = rent().await;
    let id: Uuid = first.is(201)["id"].as_str().unwrap().parse().unwrap();
    world.clock(&(Utc::now() + TimeDelta::seconds(90)).to_rfc3339());
    world.tell::<Allocation>(id, Command::NoCapacity { suggestion: None }).await;
    world.until::<Allocation>(id, |it| matches!(it.phase, Phase::Released { .. })).await;
    is_replay(&rent().await, &first);
}

#[tokio::test]
async fn refusal_of_the_saga_is_replayed_after_capacity_came() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    world.places(Placing::NoCapacity);
    let rent = |key: &str| {
        let body = json!({"sku": "h100x4", "gpu_count": 1});
        world.post("/api/v1/allocations").user("ann").key(key).json(&body).send()
    };
    let first = rent("k").await;
    first.refused(409, "insufficient_capacity");
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    is_refused_again(&rent("k").await, &first);
    rent("l").await.is(201);
}

#[tokio::test]
async fn refusal_of_a_reference_is_replayed_after_the_reference_was_made() {
    let world = World::new().await;
    let register = |key: &str, gpus: u32| {
        world.post("/api/v1/admin/nodes").admin().key(key).json(&node_body("h100x4", gpus)).send()
    };
    let first = register("k", 4).await;
    first.refused(400, "invalid_request");
    world.sku("h100x4", 4).await;
    is_refused_again(&register("k", 4).await, &first);
    register("k", 8).await.refused(422, "idempotency_key_reused");
    register("l", 4).await.is(201);
    assert_eq!(world.get("/api/v1/admin/nodes").admin().send().await.is(200)["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn refusal_of_a_machine_is_replayed_after_its_precondition_holds() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{}", world.active_node("h100x4", 4).await);
    let order = |what: &str, key: &str| {
        world.post(&format!("{path}/{what}")).admin().key(key).json(&json!({"reason": "x"})).send()
    };
    let first = order("release-quarantine", "k").await;
    first.refused(400, "invalid_request");
    order("quarantine", "q").await.is(200);
    is_refused_again(&order("release-quarantine", "k").await, &first);
    assert_eq!(world.get(&path).admin().send().await.is(200)["state"], "quarantined");
    order("release-quarantine", "l").await.is(200);
}

#[tokio::test]
async fn late_repetition_of_a_request_that_changed_nothing_changes_nothing() {
    let world = World::new().await;
    let path = "/api/v1/admin/platform-roles/bindings";
    let bind = |key: &str| {
        let binding = json!({"subject": "ann", "role": "auditor", "reason": "a test"});
        world.post(path).admin().key(key).json(&binding).send()
    };
    bind("a").await.is(201);
    let unchanged = bind("b").await;
    unchanged.is(200);
    let query = format!("{path}?subject=ann&role=auditor");
    world.call(Method::DELETE, &query).admin().send().await.is(204);
    is_replay(&bind("b").await, &unchanged);
    assert_eq!(world.get(path).admin().send().await.is(200)["items"], json!([]));
}

#[tokio::test]
async fn refusal_that_loses_to_a_commit_of_the_same_key_hides_nothing() {
    let world = World::new().await;
    let create = |key: &str| world.post("/api/v1/admin/skus").admin().key(key).json(&sku_body("h100x4", 4)).send();
    let answers = futures::future::join_all((0..20).map(|_| create("k"))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 201 && !answer.is_replayed()).count(), 1);
    for answer in &answers {
        assert!(answer.status == 201 || answer.body["code"] == "idempotency_in_progress", "{}", answer.body);
    }
    // Another key meets the name: that is its own answer, and stays so.
    let taken = create("l").await;
    taken.refused(409, "state_conflict");
    is_refused_again(&create("l").await, &taken);
    assert_eq!(create("k").await.is(201)["name"], "h100x4");
}

/// A value for each parameter of a path. Nothing of it is there.
pub(super) fn filled(path: &str) -> String {
    let part = |part: &str| match part {
        "{user_id}" => "nobody".to_owned(),
        part if part.starts_with('{') => Uuid::now_v7().to_string(),
        part => part.to_owned(),
    };
    path.split('/').map(part).collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn every_route_that_takes_a_key_replays_what_it_answered() {
    let world = World::new().await;
    world.set_policy(Key::RateLimitApi, 10_000);
    world.set_policy(Key::RateLimitFinancial, 10_000);
    for role in ["platform_operations", "inventory_owner", "billing_operations"] {
        world.bind("root", role).await;
    }
    let document = document();
    let keyed = operations(&document).into_iter().filter(|(_, _, operation)| {
        let responses = operation["responses"].as_object().unwrap();
        responses.values().any(|response| !response["headers"]["Idempotency-Replayed"].is_null())
    });
    let mut replayed = 0;
    for (_, path, operation) in keyed {
        let body: Value = operation["requestBody"]["content"]["application/json"]["example"].clone();
        let path = filled(&path);
        let send = || world.post(&path).admin().key(&path).json(&body).send();
        let first = send().await;
        // Without a payment processor nothing is paid in, which may change.
        if first.status == 503 {
            assert!(path.ends_with("checkout-sessions"), "{path}: {}", first.body);
            continue;
        }
        assert_ne!(first.status, 401, "{path}");
        let again = send().await;
        assert!(again.is_replayed() && again.status == first.status, "{path}: {} {}", first.body, again.body);
        replayed += 1;
    }
    assert!(replayed > 25, "{replayed}");
}

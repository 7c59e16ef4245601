//! A request that comes again.

use super::world::{Placing, World, node_body, sku_body};
use serde_json::json;

#[tokio::test]
async fn a_repeated_request_gets_the_first_answer() {
    let world = World::new().await;
    let create = |name: &str| world.post("/api/v1/admin/skus").admin().key("sku").json(&sku_body(name, 4));
    let sku = create("h100x4").send().await;
    sku.is(201);
    let again = create("h100x4").send().await;
    assert_eq!((again.is(201), again.is_replayed()), (&sku.body, true));
    // White space makes no difference, and another body does.
    let spaced = world
        .post("/api/v1/admin/skus")
        .admin()
        .key("sku")
        .text(serde_json::to_string_pretty(&sku_body("h100x4", 4)).unwrap());
    assert_eq!(spaced.send().await.is(201), &sku.body);
    create("other").send().await.refused(422, "idempotency_key_reused");
    let path = format!("/api/v1/admin/skus/{}", sku.body["id"].as_str().unwrap());
    world.decide(&format!("{path}/activate"), &json!({"reason": "x"})).await.is(200);

    let register = |body: &serde_json::Value| world.post("/api/v1/admin/nodes").admin().key("node").json(body);
    let node = register(&node_body("h100x4", 4)).send().await;
    node.is(201);
    let path = format!("/api/v1/admin/nodes/{}", node.body["id"].as_str().unwrap());
    let quarantine =
        |key: &str| world.post(&format!("{path}/quarantine")).admin().key(key).json(&json!({"reason": "x"}));
    let quarantined = quarantine("q").send().await;
    assert_eq!(quarantined.is(200)["generation"], 2);
    world.post(&format!("{path}/release-quarantine")).admin().json(&json!({"reason": "x"})).send().await.is(200);
    // The node has moved on; the answers are still those of the first time.
    let again = register(&node_body("h100x4", 4)).send().await;
    assert_eq!((again.is(201), again.is_replayed()), (&node.body, true));
    assert_eq!(again.headers["etag"], node.headers["etag"]);
    let again = quarantine("q").send().await;
    assert_eq!((again.is(200), again.is_replayed()), (&quarantined.body, true));
    assert_eq!(world.get(&path).admin().send().await.is(200)["state"], "registered");
    // One key for two nodes is one key for two requests.
    let other = world.node("h100x4", 4).await;
    let reused =
        world.post(&format!("/api/v1/admin/nodes/{other}/quarantine")).admin().key("q").json(&json!({"reason": "x"}));
    reused.send().await.refused(422, "idempotency_key_reused");
}

#[tokio::test]
async fn a_repeated_first_approval_is_answered_as_the_first_time_when_both_are_there() {
    let world = World::new().await;
    world.bind("root", "platform_operations").await;
    world.bind("owner", "inventory_owner").await;
    let created = world.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    let path = format!("/api/v1/admin/skus/{}/activate", created.is(201)["id"].as_str().unwrap());
    let first = || world.post(&path).admin().key("first").json(&json!({"reason": "tested"})).send();
    let waits = first().await;
    waits.is(202);
    world.post(&path).user("owner").json(&json!({"reason": "offered"})).send().await.is(200);
    let again = first().await;
    assert_eq!((again.is(202), again.is_replayed()), (&waits.body, true));
}

#[tokio::test]
async fn of_many_equal_requests_at_once_one_makes_something() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let rent = || {
        world.post("/api/v1/allocations").user("ann").key("k").json(&json!({"sku": "h100x4", "gpu_count": 1})).send()
    };
    let answers = futures::future::join_all((0..20).map(|_| rent())).await;
    let mut made = Vec::new();
    for answer in &answers {
        if answer.status == 201 {
            made.push((answer.body["id"].clone(), answer.is_replayed()));
        } else {
            answer.refused(409, "idempotency_in_progress");
        }
    }
    assert_eq!(made.iter().filter(|(_, replayed)| !replayed).count(), 1, "{made:?}");
    let last = rent().await;
    assert!(last.is_replayed());
    assert!(made.iter().all(|(id, _)| id == &last.is(201)["id"]));
    let other = world.post("/api/v1/allocations").user("ann").key("k").json(&json!({"sku": "h100x4", "gpu_count": 2}));
    other.send().await.refused(422, "idempotency_key_reused");
    let all = world.get("/api/v1/allocations").admin().send().await;
    assert_eq!(all.is(200)["items"].as_array().unwrap().len(), 1);
    // The same words of another user are another request, which shows nothing of the first.
    let bobs = world.post("/api/v1/allocations").user("bob").key("k").json(&json!({"sku": "h100x4", "gpu_count": 1}));
    let bobs = bobs.send().await;
    assert!(!bobs.is_replayed());
    assert_eq!(bobs.is(201)["user_id"], "bob");
    assert_ne!(bobs.body["id"], last.body["id"]);
}

//! Repeated requests with an idempotency key.

use super::harness::{ApiHarness, node_body, sku_body};
use serde_json::json;

#[tokio::test]
async fn repeated_request_gets_the_stored_response() {
    let api = ApiHarness::new().await;
    let create = |name: &str| api.post("/api/v1/admin/skus").admin().key("sku").json(&sku_body(name, 4));
    let sku = create("h100x4").send().await;
    sku.is(201);
    let repeated = create("h100x4").send().await;
    assert_eq!((repeated.is(201), repeated.is_replayed()), (&sku.body, true));
    // White space is ignored; another body is a different request.
    let spaced = api
        .post("/api/v1/admin/skus")
        .admin()
        .key("sku")
        .text(serde_json::to_string_pretty(&sku_body("h100x4", 4)).unwrap());
    assert_eq!(spaced.send().await.is(201), &sku.body);
    create("other").send().await.refused(422, "idempotency_key_reused");
    let path = format!("/api/v1/admin/skus/{}", sku.body["id"].as_str().unwrap());
    api.decide(&format!("{path}/activate"), &json!({"reason": "x"})).await.is(200);

    let register = |body: &serde_json::Value| api.post("/api/v1/admin/nodes").admin().key("node").json(body);
    let node = register(&node_body("h100x4", 4)).send().await;
    node.is(201);
    let path = format!("/api/v1/admin/nodes/{}", node.body["id"].as_str().unwrap());
    let quarantine = |key: &str| api.post(&format!("{path}/quarantine")).admin().key(key).json(&json!({"reason": "x"}));
    let quarantined = quarantine("q").send().await;
    assert_eq!(quarantined.is(200)["generation"], 2);
    api.post(&format!("{path}/release-quarantine")).admin().json(&json!({"reason": "x"})).send().await.is(200);
    // The node has changed since; the replayed responses have not.
    let repeated = register(&node_body("h100x4", 4)).send().await;
    assert_eq!((repeated.is(201), repeated.is_replayed()), (&node.body, true));
    assert_eq!(repeated.headers["etag"], node.headers["etag"]);
    let repeated = quarantine("q").send().await;
    assert_eq!((repeated.is(200), repeated.is_replayed()), (&quarantined.body, true));
    assert_eq!(api.get(&path).admin().send().await.is(200)["state"], "registered");
    // The same key for two nodes is two requests.
    let other = api.node("h100x4", 4).await;
    let reused =
        api.post(&format!("/api/v1/admin/nodes/{other}/quarantine")).admin().key("q").json(&json!({"reason": "x"}));
    reused.send().await.refused(422, "idempotency_key_reused");
}

#[tokio::test]
async fn repeated_first_approval_is_replayed_after_the_second() {
    let api = ApiHarness::new().await;
    api.bind("root", "platform_operations").await;
    api.bind("owner", "inventory_owner").await;
    let created = api.post("/api/v1/admin/skus").admin().json(&sku_body("h100x4", 4)).send().await;
    let path = format!("/api/v1/admin/skus/{}/activate", created.is(201)["id"].as_str().unwrap());
    let first = || api.post(&path).admin().key("first").json(&json!({"reason": "tested"})).send();
    let waits = first().await;
    waits.is(202);
    api.post(&path).user("owner").json(&json!({"reason": "offered"})).send().await.is(200);
    let repeated = first().await;
    assert_eq!((repeated.is(202), repeated.is_replayed()), (&waits.body, true));
}

#[tokio::test]
async fn concurrent_equal_requests_create_one_resource() {
    let (api, _) = ApiHarness::with_free_node().await;
    let rent =
        || api.post("/api/v1/allocations").user("ann").key("k").json(&json!({"sku": "h100x4", "gpu_count": 1})).send();
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
    let other = api.post("/api/v1/allocations").user("ann").key("k").json(&json!({"sku": "h100x4", "gpu_count": 2}));
    other.send().await.refused(422, "idempotency_key_reused");
    let all = api.get("/api/v1/allocations").admin().send().await;
    assert_eq!(all.is(200)["items"].as_array().unwrap().len(), 1);
    // The same request of another user is another request, which shows nothing of the first.
    let bobs = api.post("/api/v1/allocations").user("bob").key("k").json(&json!({"sku": "h100x4", "gpu_count": 1}));
    let bobs = bobs.send().await;
    assert!(!bobs.is_replayed());
    assert_eq!(bobs.is(201)["user_id"], "bob");
    assert_ne!(bobs.body["id"], last.body["id"]);
}

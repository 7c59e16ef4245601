//! The audit log over the API, and the counters of idempotency keys.

use super::harness::{ANNS_KEY, ApiHarness, node_body, sku_body};
use crate::api::idempotency::COUNTERS;
use axum::http::Method;
use prometheus::Registry;
use serde_json::{Value, json};

async fn log(api: &ApiHarness, query: &str) -> Vec<Value> {
    api.get(&format!("/api/v1/admin/audit-log{query}")).admin().send().await.is(200)["items"]
        .as_array()
        .unwrap()
        .clone()
}

#[tokio::test]
async fn administrators_read_the_audit_log_page_by_page() {
    let api = ApiHarness::new().await;
    let sku = api.sku("h100x4", 4).await;
    let node = api.node("h100x4", 4).await;
    let all = log(&api, "").await;
    let actions: Vec<_> = all.iter().map(|row| row["action"].as_str().unwrap()).collect();
    // Newest first; the rows of a SKU's activation are not this test's subject.
    assert_eq!((actions.first(), actions.last()), (Some(&"nodes.create"), Some(&"skus.create")), "{actions:?}");
    assert_eq!(actions.iter().filter(|action| **action == "skus.activate").count(), 1, "{actions:?}");
    let created = &all[0];
    assert_eq!((&created["actor"], &created["target"]), (&json!("user:root"), &json!({"kind": "node", "id": node})));
    assert_eq!(created["correlation_id"], "test");
    assert!(
        created["chain"]["seq"].as_i64() > Some(0) && created["chain"]["number"].is_null(),
        "no worker seals in this test"
    );

    let at = all[1]["at"].as_str().unwrap().replace('+', "%2B");
    let of_sku = all.iter().filter(|row| row["target"]["id"] == json!(sku)).count();
    let since = all.iter().filter(|row| row["at"].as_str() >= all[1]["at"].as_str()).count();
    for (query, count) in [
        (format!("?target_id={sku}"), of_sku),
        ("?target_kind=node".to_owned(), 1),
        ("?action=skus.create".to_owned(), 1),
        ("?actor=user:nobody".to_owned(), 0),
        ("?actor=user:ann".to_owned(), 0),
        ("?correlation_id=test".to_owned(), all.len()),
        (format!("?from={at}"), since),
        (format!("?until={at}"), all.len() - since),
    ] {
        assert_eq!(log(&api, &query).await.len(), count, "{query}");
    }
    let (mut seen, mut query) = (Vec::new(), "?limit=1".to_owned());
    loop {
        let page = api.get(&format!("/api/v1/admin/audit-log{query}")).admin().send().await;
        seen.extend(page.is(200)["items"].as_array().unwrap().clone());
        let Some(token) = page.body["next_page"].as_str() else { break };
        query = format!("?limit=1&page_token={token}");
    }
    assert_eq!(seen, all);

    let lines = [
        api.get("/api/v1/admin/audit-log").user("ann").send().await,
        api.get("/api/v1/admin/audit-log?from=yesterday").admin().send().await,
        api.get("/api/v1/admin/audit-log?target_id=7").admin().send().await,
        api.get("/api/v1/admin/audit-log?action=a%20b").admin().send().await,
        api.get("/api/v1/admin/audit-log?actor=%07").admin().send().await,
        api.get(&format!("/api/v1/admin/audit-log?correlation_id={}", "x".repeat(129))).admin().send().await,
        api.get("/api/v1/admin/audit-log?colour=red").admin().send().await,
        api.get("/api/v1/admin/audit-log?page_token=x").admin().send().await,
    ]
    .map(|answer| answer.line());
    insta::assert_snapshot!(lines.join("\n"));
}

#[tokio::test]
async fn ssh_key_changes_are_audited_with_their_result() {
    let api = ApiHarness::new().await;
    let add = |name: &str, key: &str| {
        api.post("/api/v1/ssh-keys").user("ann").json(&json!({"name": name, "public_key": key}))
    };
    add("laptop", ANNS_KEY).send().await.is(201);
    add("again", ANNS_KEY).send().await.refused(409, "state_conflict");
    let private = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n";
    api.post("/api/v1/ssh-keys")
        .user("bob")
        .json(&json!({"name": "x", "public_key": private}))
        .send()
        .await
        .refused(400, "invalid_request");
    let described = |row: &Value| {
        let metadata = &row["metadata"];
        let why = if metadata["code"].is_null() { &metadata["cause"] } else { &metadata["code"] };
        format!("{} {} {} {why}", row["actor"], row["action"], metadata["result"]).replace('"', "")
    };
    let rows: Vec<_> = log(&api, "?target_kind=tenant").await.iter().map(described).collect();
    assert_eq!(rows.len(), 3, "{rows:?}");
    assert_eq!(rows[0], "user:bob ssh_keys.create refused private_key");
    assert!(rows[1].starts_with("user:ann ssh_keys.create refused the key is registered already"), "{rows:?}");
    assert_eq!(rows[2], "user:ann ssh_keys.create ok null");
    // Repeated refusals add no rows.
    for _ in 0..20 {
        add("again", ANNS_KEY).send().await.refused(409, "state_conflict");
    }
    assert_eq!(log(&api, "?target_kind=tenant").await.len(), 3);
    let unknown_key = "/api/v1/ssh-keys/018f4e2a-7c1b-7000-8000-000000000001";
    api.call(Method::DELETE, unknown_key).user("cid").send().await.refused(404, "not_found");
}

fn counter(registry: &Registry, name: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).unwrap_or_else(|| panic!("no {name}"));
    family.get_metric()[0].get_counter().get_value()
}

/// The counters are global to the process, and a concurrent test may increment them.
#[tokio::test]
async fn idempotency_key_outcomes_are_counted() {
    let registry = Registry::new();
    COUNTERS.register(&registry).unwrap();
    let names = ["persisted_body_json", "skipped_body_empty", "skipped_body_non_json", "replays_served"];
    let figures = || names.map(|name| counter(&registry, &format!("api_idempotency_{name}_total")));
    let api = ApiHarness::with_sku().await;
    let before = figures();
    let create = || api.post("/api/v1/admin/skus").admin().key("k").json(&sku_body("b200", 8));
    create().send().await.is(201);
    create().send().await.is(201);
    // The response of a request that changed nothing is stored too, and so is a refusal.
    let bind = |key: &str| {
        let binding = json!({"subject": "ann", "role": "auditor", "reason": "a test"});
        api.post("/api/v1/admin/platform-roles/bindings").admin().key(key).json(&binding)
    };
    bind("b-1").send().await.is(201);
    bind("b-2").send().await.is(200);
    bind("b-2").send().await.is(200);
    let unknown = api.post("/api/v1/admin/nodes").admin().key("n").json(&node_body("b200", 8));
    unknown.send().await.refused(400, "invalid_request");
    let after = figures();
    let counted: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    // No keyed route responds without a body or with one that is not JSON: `idempotency::idempotency_metrics` tests how such are counted.
    assert!(counted[0] >= 4.0 && counted[3] >= 2.0, "{counted:?}");
    assert_eq!(counted[1..3], [0.0, 0.0]);
}

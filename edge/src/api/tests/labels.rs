//! Names and labels of nodes and allocations: setting, changing, showing and filtering.

use super::harness::{ApiHarness, PlacementOutcome, TestResponse, node_body};
use crate::api::allocation::AllocationFilter;
use crate::http::pagination::{Listing, Order, Position};
use axum::extract::FromRequestParts as _;
use axum::http::{Method, Request};
use chrono::DateTime;
use domain::allocation::{Allocation, Fact};
use serde_json::{Value, json};
use uuid::Uuid;

const ALLOCATIONS: &str = "/api/v1/allocations";
const NODES: &str = "/api/v1/admin/nodes";

async fn harness() -> ApiHarness {
    let api = ApiHarness::with_sku().await;
    api.set_placement(PlacementOutcome::Silent);
    api
}

/// An allocation that is queued, so that its first reply comes at once.
async fn rented(api: &ApiHarness, user: &str, key: &str, name: Value, labels: Value) -> Value {
    api.set_placement(PlacementOutcome::NoCapacity);
    let body = json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 600, "name": name, "labels": labels});
    api.post(ALLOCATIONS).user(user).key(key).json(&body).send().await.is(201).clone()
}

fn path_of(made: &Value) -> String {
    format!("{ALLOCATIONS}/{}", made["id"].as_str().unwrap())
}

async fn patched(api: &ApiHarness, path: &str, user: &str, change: &Value) -> TestResponse {
    api.call(Method::PATCH, path).user(user).json(change).send().await
}

async fn ids(api: &ApiHarness, path: &str, user: Option<&str>) -> Vec<String> {
    let call = api.get(path);
    let call = match user {
        Some(user) => call.user(user),
        None => call.admin(),
    };
    let page = call.send().await;
    page.is(200)["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn allocation_is_named_and_labelled_at_creation_and_changed_by_a_merge_patch() {
    let api = harness().await;
    let made = rented(&api, "ann", "k", json!("  train 7 "), json!({"env": "dev", "example.com/team": "ml"})).await;
    assert_eq!((&made["name"], &made["labels"]), (&json!("train 7"), &json!({"env": "dev", "example.com/team": "ml"})));
    let path = path_of(&made);
    let read = api.get(&path).user("ann").send().await;
    assert_eq!(read.is(200)["labels"], made["labels"]);

    let change = json!({"labels": {"env": "prod", "example.com/team": null, "tier": ""}});
    let changed = patched(&api, &path, "ann", &change).await;
    assert_eq!(changed.is(200)["labels"], json!({"env": "prod", "tier": ""}));
    assert_eq!(changed.body["name"], "train 7");
    let generation = changed.body["generation"].as_i64().unwrap();
    assert_eq!(generation, made["generation"].as_i64().unwrap() + 1);
    assert_eq!(changed.headers["etag"].to_str().unwrap(), format!("\"{generation}\""));
    let repeated = patched(&api, &path, "ann", &change).await;
    assert_eq!(repeated.is(200)["generation"], generation, "a repetition changes nothing");

    let unnamed = patched(&api, &path, "ann", &json!({"name": null})).await;
    assert_eq!(
        (&unnamed.is(200)["name"], &unnamed.body["labels"]),
        (&Value::Null, &json!({"env": "prod", "tier": ""}))
    );
    assert_eq!(patched(&api, &path, "ann", &json!({"labels": null})).await.is(200)["labels"], json!({}));
    let merge_patch = api.call(Method::PATCH, &path).user("ann").raw(r#"{"name":"a"}"#);
    let merge_patch = merge_patch.header("content-type", "application/merge-patch+json").send().await;
    assert_eq!(merge_patch.is(200)["name"], "a");
}

#[tokio::test]
async fn metadata_change_is_conditional_on_the_version_and_audited() {
    let api = harness().await;
    let made = rented(&api, "ann", "k", Value::Null, Value::Null).await;
    assert_eq!((&made["name"], &made["labels"]), (&Value::Null, &json!({})));
    let path = path_of(&made);
    patched(&api, &path, "bob", &json!({"name": "mine"})).await.refused(404, "not_found");
    let stale = api.call(Method::PATCH, &path).user("ann").header("if-match", "\"99\"").json(&json!({"name": "a"}));
    assert_eq!(stale.send().await.refused(409, "state_conflict")["field"], "If-Match");
    let etag = format!("\"{}\"", made["generation"]);
    let fresh = api.call(Method::PATCH, &path).user("ann").header("if-match", &etag).json(&json!({"name": "a"}));
    assert_eq!(fresh.send().await.is(200)["name"], "a");
    let by_admin = api.call(Method::PATCH, &path).admin().json(&json!({"labels": {"seen": "yes"}})).send().await;
    assert_eq!(by_admin.is(200)["labels"], json!({"seen": "yes"}));

    let id = made["id"].as_str().unwrap();
    let log = format!("/api/v1/admin/audit-log?action=allocations.update&target_id={id}");
    let rows = api.get(&log).admin().send().await;
    let rows = rows.is(200)["items"].as_array().unwrap().clone();
    let audited: Vec<_> = rows.iter().map(|row| (row["actor"].as_str().unwrap(), row["metadata"].clone())).collect();
    assert_eq!(audited.len(), 2, "{rows:?}");
    assert!(audited.contains(&("user:root", json!({"labels": {"seen": "yes"}}))), "{audited:?}");
    assert!(audited.iter().any(|(_, metadata)| *metadata == json!({"name": "a"})), "{audited:?}");
}

#[tokio::test]
async fn released_allocation_keeps_its_name_and_labels() {
    let api = harness().await;
    let made = rented(&api, "ann", "k", json!("train"), json!({"env": "dev"})).await;
    let path = path_of(&made);
    api.post(&format!("{path}/release")).user("ann").send().await.is(202);
    let refused = patched(&api, &path, "ann", &json!({"name": "other"})).await;
    assert_eq!(refused.refused(409, "state_conflict")["state"], "released");
    let shown = api.get(&path).user("ann").send().await;
    assert_eq!((&shown.is(200)["name"], &shown.body["labels"]), (&json!("train"), &json!({"env": "dev"})));
    assert_eq!(ids(&api, &format!("{ALLOCATIONS}?label=env"), Some("ann")).await.len(), 1);
}

#[tokio::test]
async fn empty_or_invalid_metadata_change_is_refused_by_field_name() {
    let api = harness().await;
    let full: serde_json::Map<_, _> = (0..32).map(|n| (format!("k{n}"), json!(""))).collect();
    let made = rented(&api, "ann", "k", Value::Null, json!(full)).await;
    let path = path_of(&made);
    patched(&api, &path, "ann", &json!({})).await.refused(400, "invalid_request");
    for (change, field) in [
        (json!({"labels": {"one-more": ""}}), "labels"),
        (json!({"labels": {"a": "x".repeat(64)}}), "labels.a"),
        (json!({"labels": {"ü": "x"}}), "labels"),
        (json!({"labels": []}), "labels"),
        (json!({"name": "a\u{7}"}), "name"),
        (json!({"name": ""}), "name"),
        (json!({"names": "a"}), "names"),
    ] {
        let refused = patched(&api, &path, "ann", &change).await;
        let at = refused.refused(400, "invalid_request")["field"].as_str().unwrap().to_owned();
        assert!(at.starts_with(field), "{change}: {at}");
    }
    let exchanged = patched(&api, &path, "ann", &json!({"labels": {"one-more": "", "k0": null}})).await;
    assert_eq!(exchanged.is(200)["labels"].as_object().unwrap().len(), 32);
    let many: serde_json::Map<_, _> = (0..33).map(|n| (format!("k{n}"), json!(""))).collect();
    let body = json!({"sku": "h100x4", "gpu_count": 1, "labels": many});
    let refused = api.post(ALLOCATIONS).user("ann").key("many").json(&body).send().await;
    assert_eq!(refused.refused(400, "invalid_request")["field"], "labels");
}

#[tokio::test]
async fn repetition_with_another_name_is_refused_and_with_the_same_is_replayed() {
    let api = harness().await;
    let made = rented(&api, "ann", "k", json!("train"), json!({"env": "dev"})).await;
    assert_eq!(rented(&api, "ann", "k", json!("train"), json!({"env": "dev"})).await, made);
    let body =
        json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 600, "name": "other", "labels": {"env": "dev"}});
    api.post(ALLOCATIONS).user("ann").key("k").json(&body).send().await.refused(422, "idempotency_key_reused");
}

#[tokio::test]
async fn lists_filter_by_name_and_all_labels() {
    let api = harness().await;
    let one = rented(&api, "ann", "1", json!("train"), json!({"env": "dev", "team": "ml"})).await["id"].clone();
    let two = rented(&api, "ann", "2", json!("train"), json!({"env": "prod"})).await["id"].clone();
    let three = rented(&api, "ann", "3", json!("100%"), json!({"env": "", "x.example/env": "dev"})).await["id"].clone();
    let other = rented(&api, "bob", "4", json!("train"), json!({"env": "dev"})).await["id"].clone();
    for (query, found) in [
        ("name=train", vec![&one, &two]),
        ("name=%20train", vec![&one, &two]),
        ("name=tra", vec![]),
        ("name=%25", vec![]),
        ("name=100%25", vec![&three]),
        ("label=env", vec![&one, &two, &three]),
        ("label=env=dev", vec![&one]),
        ("label=env=", vec![&three]),
        ("label=env&label=team", vec![&one]),
        ("label=env,team=ml", vec![&one]),
        ("label=env=dev&label=env=prod", vec![]),
        ("label=env=dev&label=env=dev", vec![&one]),
        ("name=train&label=env=prod&state=requested", vec![&two]),
        ("label=env&state=active", vec![]),
        ("label=x.example%2Fenv=dev", vec![&three]),
        ("label=e.v", vec![]),
        ("label=ENV", vec![]),
    ] {
        let found: Vec<_> = found.into_iter().map(|id| id.as_str().unwrap().to_owned()).collect();
        assert_eq!(ids(&api, &format!("{ALLOCATIONS}?{query}"), Some("ann")).await, found, "{query}");
    }
    let everybodys = ids(&api, &format!("{ALLOCATIONS}?label=env=dev"), None).await;
    assert_eq!(everybodys, [one.as_str().unwrap(), other.as_str().unwrap()]);

    // The filter finds the changed values.
    let path = format!("{ALLOCATIONS}/{}", two.as_str().unwrap());
    patched(&api, &path, "ann", &json!({"name": null, "labels": {"env": "dev"}})).await.is(200);
    assert_eq!(ids(&api, &format!("{ALLOCATIONS}?name=train"), Some("ann")).await.len(), 1);
    assert_eq!(ids(&api, &format!("{ALLOCATIONS}?label=env=prod"), Some("ann")).await.len(), 0);
    assert_eq!(ids(&api, &format!("{ALLOCATIONS}?label=env=dev"), Some("ann")).await.len(), 2);

    for bad in [
        "label=",
        "label==x",
        "label=a=b=c",
        "label=a,,b",
        "label=%C3%BC",
        "label=a%00",
        "labels=a",
        "name=",
        "name=a&name=b",
    ] {
        api.get(&format!("{ALLOCATIONS}?{bad}")).user("ann").send().await.refused(400, "invalid_request");
    }
    api.get("/api/v1/skus?label=env").user("ann").send().await.refused(400, "invalid_request");
}

#[tokio::test]
async fn page_token_of_a_filtered_list_is_bound_to_its_filter() {
    let api = harness().await;
    let mut expected = Vec::new();
    for n in 0..7 {
        let label = if n % 3 == 0 { "odd-one" } else { "env" };
        let made = rented(&api, "ann", &n.to_string(), Value::Null, json!({ label: "x", "of": "ann" })).await;
        expected.extend((label == "env").then(|| made["id"].as_str().unwrap().to_owned()));
    }
    let (mut found, mut token) = (Vec::new(), String::new());
    loop {
        // The order of the labels makes no difference to the next page.
        let labels = if found.is_empty() { "label=env&label=of=ann" } else { "label=of=ann,env" };
        let page = api.get(&format!("{ALLOCATIONS}?limit=2&{labels}{token}")).user("ann").send().await;
        found.extend(page.is(200)["items"].as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()));
        let Some(next) = page.body["next_page"].as_str() else { break };
        token = format!("&page_token={next}");
        let foreign = api.get(&format!("{ALLOCATIONS}?label=env{token}")).user("ann").send().await;
        assert_eq!(foreign.refused(400, "invalid_request")["field"], "page_token");
    }
    assert_eq!(found, expected);
}

#[tokio::test]
async fn node_has_name_and_labels_like_an_allocation() {
    let api = harness().await;
    let mut body = node_body("h100x4", 4);
    (body["name"], body["labels"]) = (json!("rack 7"), json!({"rack": "7", "row": "b"}));
    let made = api.post(NODES).admin().json(&body).send().await.is(201).clone();
    assert_eq!((&made["name"], &made["labels"]), (&json!("rack 7"), &json!({"rack": "7", "row": "b"})));
    api.node("h100x4", 4).await;
    let id = made["id"].as_str().unwrap().to_owned();
    let path = format!("{NODES}/{id}");
    for query in ["name=rack%207", "label=rack", "label=rack=7&label=row"] {
        assert_eq!(ids(&api, &format!("{NODES}?{query}"), None).await, [id.as_str()], "{query}");
    }
    let change = |change: Value| api.call(Method::PATCH, &path).admin().json(&change).send();
    let renamed = change(json!({"name": "rack 8", "labels": {"row": null}, "port": 2222})).await;
    assert_eq!((&renamed.is(200)["name"], &renamed.body["port"]), (&json!("rack 8"), &json!(2222)));
    assert_eq!(renamed.body["labels"], json!({"rack": "7"}));
    assert_eq!(ids(&api, &format!("{NODES}?label=row"), None).await.len(), 0);
    let many: serde_json::Map<_, _> = (0..32).map(|n| (format!("k{n}"), json!(""))).collect();
    assert_eq!(change(json!({"labels": many})).await.refused(400, "invalid_request")["field"], "labels");
    assert_eq!(change(json!({"name": "a\u{202e}"})).await.refused(400, "invalid_request")["field"], "name");
    let unlabelled = change(json!({"name": null, "labels": null})).await;
    assert_eq!((&unlabelled.is(200)["name"], &unlabelled.body["labels"]), (&Value::Null, &json!({})));
    api.call(Method::PATCH, &path).user("ann").json(&json!({"name": "a"})).send().await.refused(403, "forbidden");

    let log = api.get(&format!("/api/v1/admin/audit-log?action=nodes.update&target_id={id}")).admin().send().await;
    let rows = log.is(200)["items"].as_array().unwrap();
    let audited: Vec<_> = rows.iter().map(|row| &row["metadata"]).collect();
    assert!(
        audited.iter().any(|audited| audited["labels"] == json!({"row": null}) && audited["name"] == "rack 8"),
        "{audited:?}"
    );
}

#[tokio::test]
async fn labels_survive_the_allocation_saga() {
    let api = harness().await;
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    let body = json!({"sku": "h100x4", "gpu_count": 1, "labels": {"env": "dev"}});
    let made = api.post(ALLOCATIONS).user("ann").key("k").json(&body).send().await.is(201).clone();
    let path = path_of(&made);
    let id = made["id"].as_str().unwrap().parse().unwrap();
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    assert_eq!(patched(&api, &path, "ann", &json!({"name": "train"})).await.is(200)["state"], "active");
    let released = api.post(&format!("{path}/release")).user("ann").send().await;
    assert_eq!((&released.is(202)["name"], &released.body["labels"]), (&json!("train"), &json!({"env": "dev"})));
    assert!(!api.database_dump().contains("\"metadata\":{}"), "what has none is stored as before");
}

#[tokio::test]
async fn allocations_of_a_node_are_those_on_it_and_its_former_ones() {
    let api = harness().await;
    let (node, other) = (api.active_node("h100x4", 4).await, api.active_node("h100x4", 4).await);
    let rent = async |user: &str, key: &str, on| {
        api.set_placement(PlacementOutcome::On(on));
        let body = json!({"sku": "h100x4", "gpu_count": 1});
        api.post(ALLOCATIONS).user(user).key(key).json(&body).send().await.is(201).clone()
    };
    let former = rent("ann", "a", node).await;
    api.post(&format!("{}/release", path_of(&former))).user("ann").send().await.is(202);
    let present = rent("bob", "b", node).await;
    rent("ann", "c", other).await;
    // Without a node.
    rented(&api, "ann", "d", Value::Null, Value::Null).await;

    let id = |made: &Value| made["id"].as_str().unwrap().to_owned();
    let of_node = format!("{ALLOCATIONS}?node_id={node}");
    assert_eq!(ids(&api, &of_node, None).await, [id(&present), id(&former)], "newest first");
    let oldest_first = format!("{of_node}&order=oldest_first");
    assert_eq!(ids(&api, &oldest_first, None).await, [id(&former), id(&present)]);
    assert_eq!(ids(&api, &format!("{of_node}&user_id=bob"), None).await, [id(&present)]);
    assert_eq!(ids(&api, &of_node, Some("ann")).await, [id(&former)], "of no other user");
    assert_eq!(ids(&api, &of_node, Some("eve")).await, Vec::<String>::new());

    let first = api.get(&format!("{of_node}&limit=1")).admin().send().await.is(200).clone();
    assert_eq!(first["items"][0]["id"], present["id"]);
    let token = first["next_page"].as_str().unwrap();
    assert_eq!(ids(&api, &format!("{of_node}&limit=1&page_token={token}"), None).await, [id(&former)]);
    // A list that a replica of an earlier release has begun with an older one.
    let (mut parts, ()) = Request::get(format!("{of_node}&limit=1")).body(()).unwrap().into_parts();
    let listing = Listing::<AllocationFilter>::from_request_parts(&mut parts, &()).await.unwrap();
    let page = listing.page("allocations", "", Order::OldestFirst).unwrap();
    let older = Position { created_at: DateTime::UNIX_EPOCH, id: Uuid::nil() };
    let begun = page.answer(vec![older; 2], |row| *row, |_| ()).next_page.unwrap();
    assert_eq!(ids(&api, &format!("{of_node}&page_token={begun}"), None).await, [id(&former), id(&present)]);

    let elsewhere = format!("{ALLOCATIONS}?node_id={other}&limit=1&page_token={token}");
    assert_eq!(api.get(&elsewhere).admin().send().await.refused(400, "invalid_request")["field"], "page_token");
    let bad = api.get(&format!("{ALLOCATIONS}?node_id=here")).admin().send().await;
    assert_eq!(bad.refused(400, "invalid_request")["field"], "node_id");
}

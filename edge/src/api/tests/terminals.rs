//! The terminal sessions of an allocation, as its user lists them.

use super::harness::{ANNS_KEY, ApiHarness, PlacementOutcome};
use domain::allocation::{Allocation, Fact};
use serde_json::{Value, json};
use uuid::Uuid;

/// An active allocation of ann's.
async fn rented(api: &ApiHarness) -> String {
    api.sku("h100x4", 4).await;
    let node = api.active_node("h100x4", 4).await;
    api.set_placement(PlacementOutcome::On(node));
    let key = json!({"name": "laptop", "public_key": ANNS_KEY});
    api.post("/api/v1/ssh-keys").user("ann").json(&key).send().await.is(201);
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let made = api.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = made.is(201)["id"].as_str().unwrap().parse().unwrap();
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    format!("/api/v1/allocations/{id}")
}

/// A terminal session on the allocation.
async fn opened(api: &ApiHarness, allocation: &str) -> String {
    let issued = api.post(&format!("{allocation}/terminal-tokens")).user("ann").send().await;
    issued.is(201)["session_id"].as_str().unwrap().to_owned()
}

fn ids(page: &Value) -> Vec<&str> {
    page["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn open_terminal_sessions_are_listed_for_the_allocations_user_alone() {
    let api = ApiHarness::new().await;
    let allocation = rented(&api).await;
    let path = format!("{allocation}/terminal-sessions");
    assert_eq!(ids(api.get(&path).user("ann").send().await.is(200)), [""; 0]);
    let (first, second) = (opened(&api, &allocation).await, opened(&api, &allocation).await);
    let open = api.get(&path).user("ann").send().await;
    assert_eq!(ids(open.is(200)), [&first, &second]);
    assert_eq!((&open.body["items"][0]["state"], &open.body["items"][0]["user_id"]), (&json!("opened"), &json!("ann")));
    assert_eq!(ids(api.get(&path).admin().send().await.is(200)), [&first, &second]);
    api.get(&path).user("bob").send().await.refused(404, "not_found");

    // Page by page.
    let page = api.get(&format!("{path}?limit=1")).user("ann").send().await;
    assert_eq!(ids(page.is(200)), [&first]);
    let next = page.body["next_page"].as_str().unwrap();
    let page = api.get(&format!("{path}?limit=1&page_token={next}")).user("ann").send().await;
    assert_eq!((ids(page.is(200)), &page.body["next_page"]), (vec![&*second], &Value::Null));

    // Closed sessions are not listed.
    let kill = format!("/api/v1/admin/terminal-sessions/{first}/kill");
    api.post(&kill).admin().json(&json!({"reason": "a test"})).send().await.is(200);
    assert_eq!(ids(api.get(&path).user("ann").send().await.is(200)), [&second]);
}

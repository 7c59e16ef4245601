//! The terminal sessions of an allocation, as whoever rents it finds them again.

use super::world::{ANNS_KEY, Placing, World};
use domain::allocation::{Allocation, Command};
use serde_json::{Value, json};
use uuid::Uuid;

/// An active allocation of ann's.
async fn rented(world: &World) -> String {
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let key = json!({"name": "laptop", "public_key": ANNS_KEY});
    world.post("/api/v1/ssh-keys").user("ann").json(&key).send().await.is(201);
    let wanted = json!({"sku": "h100x4", "gpu_count": 1});
    let made = world.post("/api/v1/allocations").user("ann").key("k").json(&wanted).send().await;
    let id: Uuid = made.is(201)["id"].as_str().unwrap().parse().unwrap();
    world.tell::<Allocation>(id, Command::Provisioned { node_id: node }).await;
    format!("/api/v1/allocations/{id}")
}

/// A session that is opened there.
async fn opened(world: &World, allocation: &str) -> String {
    let issued = world.post(&format!("{allocation}/terminal-tokens")).user("ann").send().await;
    issued.is(201)["session_id"].as_str().unwrap().to_owned()
}

fn ids(page: &Value) -> Vec<&str> {
    page["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn whoever_rents_an_allocation_finds_its_open_terminals_and_nobody_elses() {
    let world = World::new().await;
    let allocation = rented(&world).await;
    let path = format!("{allocation}/terminal-sessions");
    assert_eq!(ids(world.get(&path).user("ann").send().await.is(200)), [""; 0]);
    let (first, second) = (opened(&world, &allocation).await, opened(&world, &allocation).await);
    let open = world.get(&path).user("ann").send().await;
    assert_eq!(ids(open.is(200)), [&first, &second]);
    assert_eq!((&open.body["items"][0]["state"], &open.body["items"][0]["user_id"]), (&json!("opened"), &json!("ann")));
    assert_eq!(ids(world.get(&path).admin().send().await.is(200)), [&first, &second]);
    world.get(&path).user("bob").send().await.refused(404, "not_found");

    // Page by page.
    let page = world.get(&format!("{path}?limit=1")).user("ann").send().await;
    assert_eq!(ids(page.is(200)), [&first]);
    let next = page.body["next_page"].as_str().unwrap();
    let page = world.get(&format!("{path}?limit=1&page_token={next}")).user("ann").send().await;
    assert_eq!((ids(page.is(200)), &page.body["next_page"]), (vec![&*second], &Value::Null));

    // What is over is not to be found here.
    let kill = format!("/api/v1/admin/terminal-sessions/{first}/kill");
    world.post(&kill).admin().json(&json!({"reason": "a test"})).send().await.is(200);
    assert_eq!(ids(world.get(&path).user("ann").send().await.is(200)), [&second]);
}

//! Renting, and what is said when nothing is to be had.

use super::world::{ANNS_KEY, Answer, Placing, World};
use domain::allocation::{Allocation, Command};
use domain::policy::Key;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use uuid::Uuid;

fn wanted() -> Value {
    json!({"sku": "h100x4", "gpu_count": 1})
}

async fn rent(world: &World, key: &str, body: &Value) -> Answer {
    world.post("/api/v1/allocations").user("ann").key(key).json(body).send().await
}

fn id_of(answer: &Answer) -> Uuid {
    answer.body["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn an_allocation_is_had_watched_and_given_back() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    world
        .post("/api/v1/ssh-keys")
        .user("ann")
        .json(&json!({"name": "laptop", "public_key": ANNS_KEY}))
        .send()
        .await
        .is(201);
    let began = Instant::now();
    let made =
        rent(&world, "k1", &json!({"sku": "h100x4", "gpu_count": 1, "region_code": "eu-1", "project_id": "p1"})).await;
    assert!(began.elapsed() < Duration::from_secs(2), "the saga's first answer is heard of, not waited for");
    let mut shown = made.is(201).clone();
    for field in ["id", "node_id", "requested_at", "deadline_at"] {
        assert!(shown[field].is_string(), "{field}");
        shown[field] = "<varies>".into();
    }
    shown["ssh"]["username"] = "<varies>".into();
    shown["status_history"].as_array_mut().unwrap().iter_mut().for_each(|entry| entry["at"] = "<varies>".into());
    insta::assert_json_snapshot!("allocation", shown);

    let id = id_of(&made);
    let path = format!("/api/v1/allocations/{id}");
    world.tell::<Allocation>(id, Command::Provisioned { node_id: node }).await;
    let active = world.get(&path).user("ann").send().await;
    assert_eq!((&active.is(200)["state"], &active.headers["etag"].to_str().unwrap()), (&json!("active"), &"\"3\""));

    let stream = world.get(&format!("{path}/events")).user("ann").response().await;
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    let told = tokio::spawn(axum::body::to_bytes(stream.into_body(), 1 << 20));
    let released = world.post(&format!("{path}/release")).user("ann").json(&json!({"issue": "done"})).send().await;
    assert_eq!(released.is(202)["state"], "releasing");
    assert_eq!(released.body["generation"], 4);
    let again = world.post(&format!("{path}/release")).user("ann").send().await;
    assert_eq!(again.is(202)["generation"], 4);
    world.tell::<Allocation>(id, Command::Cleaned { node_id: node, attempt: 1 }).await;
    // The stream ends by itself.
    let told = tokio::time::timeout(Duration::from_secs(5), told).await.unwrap().unwrap().unwrap();
    let told = String::from_utf8(told.to_vec()).unwrap();
    let ids: Vec<_> = told.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(ids, ["1", "2", "3", "4", "5"]);
    let states: Vec<Value> = told
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let states: Vec<_> = states.iter().map(|data| data["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["requested", "provisioning", "active", "releasing", "released"]);

    let resumed = world.get(&format!("{path}/events")).user("ann").header("last-event-id", "3").response().await;
    let told = axum::body::to_bytes(resumed.into_body(), 1 << 20).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&told).matches("data: ").count(), 2);
    world
        .get(&format!("{path}/events"))
        .user("ann")
        .header("last-event-id", "x")
        .send()
        .await
        .refused(400, "invalid_request");
}

#[tokio::test]
async fn what_is_not_to_be_had_is_answered_with_a_reason_and_again_the_same() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    world.places(Placing::NoCapacity);
    for replayed in [false, true] {
        let full = rent(&world, "full", &wanted()).await;
        let details = full.refused(409, "insufficient_capacity");
        assert_eq!(details["suggestion"], "Region us-1 has room for 4 GPUs.");
        let id = details["allocation_id"].as_str().unwrap();
        let refused = world.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
        assert_eq!(
            (&refused.is(200)["state"], &refused.body["failure"]["code"]),
            (&json!("released"), &json!("insufficient_capacity"))
        );
        assert_eq!(full.is_replayed(), replayed);
        // What would be said now makes no difference to a repetition.
        world.places(Placing::OverQuota);
    }
    let over = rent(&world, "over", &wanted()).await;
    assert!(over.refused(409, "concurrency_limit_exceeded")["allocation_id"].is_string());
}

#[tokio::test]
async fn a_request_that_queues_or_takes_long_is_answered_as_requested() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    world.places(Placing::NoCapacity);
    let queued = rent(&world, "queued", &json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60})).await;
    assert_eq!(queued.is(201)["state"], "requested");
    let cancelled = world.post(&format!("/api/v1/allocations/{}/release", id_of(&queued))).user("ann").send().await;
    assert_eq!(cancelled.is(202)["state"], "released");
    world.set_policy(Key::AllocationQueueMax, 30);
    let long = rent(&world, "long", &json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60})).await;
    assert_eq!(long.refused(400, "invalid_request")["field"], "queue_seconds");

    world.places(Placing::Silent);
    let began = Instant::now();
    let slow = rent(&world, "slow", &wanted()).await;
    assert_eq!(slow.is(201)["state"], "requested");
    assert!((Duration::from_millis(4900)..Duration::from_secs(8)).contains(&began.elapsed()));
}

#[tokio::test]
async fn what_cannot_be_rented_is_refused_before_anything_is_made() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let mut lines = Vec::new();
    // A key belongs to one request, refused or not.
    let mut refuse = async |body: Value| {
        let key = format!("k{}", lines.len());
        lines.push(rent(&world, &key, &body).await.line());
    };
    refuse(json!({})).await;
    refuse(json!([])).await;
    refuse(json!({"sku": "h100x4"})).await;
    for count in [json!(0), json!(-1), json!(65), json!(1e30), json!("1"), json!(1.5), json!(null)] {
        refuse(json!({"sku": "h100x4", "gpu_count": count})).await;
    }
    let with = |name: &str, value: Value| {
        let mut body = wanted();
        body[name] = value;
        body
    };
    refuse(with("sku", json!("unknown"))).await;
    refuse(with("sku", json!("018f4e2a-7c1b-7000-8000-000000000001"))).await;
    refuse(with("region_code", json!("mars"))).await;
    refuse(with("node_id", json!("node-1"))).await;
    refuse(with("project_id", json!("p2"))).await;
    refuse(with("ssh_key_ids", json!(["018f4e2a-7c1b-7000-8000-000000000001"]))).await;
    refuse(with("ssh_key_ids", json!(["x"]))).await;
    refuse(with("ssh_key_ids", json!((0..33).map(Uuid::from_u128).collect::<Vec<_>>()))).await;
    refuse(with("queue_seconds", json!(-1))).await;
    refuse(with("queue_seconds", json!(604_801))).await;
    refuse(with("price", json!(0))).await;
    lines.push(world.post("/api/v1/allocations").user("ann").json(&wanted()).send().await.line());
    lines.push(rent(&world, "", &wanted()).await.line());
    lines.push(rent(&world, &"k".repeat(256), &wanted()).await.line());
    lines.push(world.get("/api/v1/allocations?state=lost").user("ann").send().await.line());
    lines.push(world.get("/api/v1/allocations?limit=201").user("ann").send().await.line());
    lines.push(world.get("/api/v1/allocations/x").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
    let made = world.get("/api/v1/allocations").admin().send().await;
    assert!(made.is(200)["items"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn a_failed_release_is_an_administrators_to_move_on() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.active_node("h100x4", 4).await;
    world.places(Placing::On(node));
    let made = rent(&world, "k", &wanted()).await;
    made.is(201);
    let id = id_of(&made);
    let admin = |action: &str| format!("/api/v1/admin/allocations/{id}/{action}");
    let why = json!({"reason": "the node burnt"});
    world.post(&admin("force-release")).admin().json(&why).send().await.refused(409, "state_conflict");
    world.post(&format!("/api/v1/allocations/{id}/release")).user("ann").send().await.is(202);
    let failed = json!({"command": "cleanup_failed", "node_id": node, "attempt": 1, "reason": "home_remains", "detail": "a file"});
    world.tell::<Allocation>(id, serde_json::from_value(failed.clone()).unwrap()).await;
    let seen = world.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!((&seen.is(200)["state"], &seen.body["attempt"]), (&json!("release_failed"), &json!(1)));
    assert_eq!(seen.body["health"]["status"], "critical");
    world.post(&admin("retry-release")).user("ann").json(&why).send().await.refused(403, "forbidden");
    world.post(&admin("retry-release")).admin().json(&json!({})).send().await.refused(400, "invalid_request");
    let retried = world.post(&admin("retry-release")).admin().json(&why).send().await;
    assert_eq!((&retried.is(202)["state"], &retried.body["attempt"]), (&json!("releasing"), &json!(2)));
    let failed = json!({"command": "cleanup_failed", "node_id": node, "attempt": 2, "reason": "home_remains", "detail": "a file"});
    world.tell::<Allocation>(id, serde_json::from_value(failed).unwrap()).await;
    let forced = world.post(&admin("force-release")).admin().json(&why).send().await;
    assert_eq!((&forced.is(202)["state"], &forced.body["state_reason"]), (&json!("released"), &json!("forced")));
}

#[tokio::test]
async fn alert_of_the_machine_is_shown_to_the_tenant_whose_gpus_it_is_about() {
    let world = World::new().await;
    world.sku("h100x4", 4).await;
    let node = world.enrolled_node("h100x4", 4, "m").await;
    world.poll(node).await;
    world.places(Placing::On(node));
    let rented = rent(&world, "rented", &wanted()).await;
    let id = id_of(&rented);
    world.tell::<Allocation>(id, Command::Provisioned { node_id: node }).await;
    let path = format!("/api/v1/allocations/{id}");
    assert_eq!(world.get(&path).user("ann").send().await.is(200)["health"], Value::Null);
    let alert = |target: &str, message: &str| {
        json!({
            "probe_id": "xid", "target": target, "classifications": ["warn"], "message": "for operators",
            "tenant_message": message,
        })
    };
    let alerts = vec![alert("node", "The machine is warm."), alert("GPU-m-3", "Not for everybody.")];
    world.beats(node, "m", 4, alerts).await;
    let shown = world.get(&path).user("ann").send().await;
    let health = &shown.is(200)["health"];
    assert_eq!((&health["status"], &health["message"]), (&json!("warning"), &json!("The machine is warm.")));
    let listed = world.get("/api/v1/allocations").user("ann").send().await;
    assert_eq!(&listed.is(200)["items"][0]["health"], health);
}

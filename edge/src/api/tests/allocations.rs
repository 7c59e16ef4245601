//! Allocations, and the errors where none can be placed.

use super::super::allocation::FIRST_REPLY_TIMEOUT;
use super::harness::{ANNS_KEY, ApiHarness, PlacementOutcome, TestResponse};
use domain::AllocationId;
use domain::allocation::{Allocation, Fact};
use domain::node;
use domain::policy::PolicyKey;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use uuid::Uuid;

fn allocation_body() -> Value {
    json!({"sku": "h100x4", "gpu_count": 1})
}

async fn rent(api: &ApiHarness, key: &str, body: &Value) -> TestResponse {
    api.post("/api/v1/allocations").user("ann").key(key).json(body).send().await
}

fn id_of(answer: &TestResponse) -> Uuid {
    answer.body["id"].as_str().unwrap().parse().unwrap()
}

#[tokio::test]
async fn allocation_is_created_followed_and_released() {
    let (api, node) = ApiHarness::with_free_node().await;
    api.post("/api/v1/ssh-keys")
        .user("ann")
        .json(&json!({"name": "laptop", "public_key": ANNS_KEY}))
        .send()
        .await
        .is(201);
    let mut began = Instant::now();
    let made =
        rent(&api, "k1", &json!({"sku": "h100x4", "gpu_count": 1, "region_code": "eu-1", "project_id": "p1"})).await;
    let mut waited_out = 0;
    // A pause of the machine makes one of them late, and not all.
    while began.elapsed() >= FIRST_REPLY_TIMEOUT {
        waited_out += 1;
        assert!(waited_out < 4, "the saga's first reply is notified, not waited out");
        began = Instant::now();
        rent(&api, &format!("late-{waited_out}"), &allocation_body()).await.is(201);
    }
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
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let active = api.get(&path).user("ann").send().await;
    assert_eq!((&active.is(200)["state"], &active.headers["etag"].to_str().unwrap()), (&json!("active"), &"\"3\""));

    let stream = api.get(&format!("{path}/events")).user("ann").response().await;
    assert_eq!(stream.headers()["content-type"], "text/event-stream");
    let notified = tokio::spawn(axum::body::to_bytes(stream.into_body(), 1 << 20));
    let released = api.post(&format!("{path}/release")).user("ann").json(&json!({"issue": "done"})).send().await;
    assert_eq!(released.is(202)["state"], "releasing");
    assert_eq!(released.body["generation"], 4);
    let repeated = api.post(&format!("{path}/release")).user("ann").send().await;
    assert_eq!(repeated.is(202)["generation"], 4);
    api.ask_as_system::<Allocation>(id, Fact::Cleaned { node_id: node, attempt: 1 }).await;
    // The stream ends after `released`.
    let notified = tokio::time::timeout(Duration::from_secs(60), notified).await.unwrap().unwrap().unwrap();
    let notified = String::from_utf8(notified.to_vec()).unwrap();
    let ids: Vec<_> = notified.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    assert_eq!(ids, ["1", "2", "3", "4", "5"]);
    let states: Vec<Value> = notified
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let states: Vec<_> = states.iter().map(|data| data["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["requested", "provisioning", "active", "releasing", "released"]);

    let resumed = api.get(&format!("{path}/events")).user("ann").header("last-event-id", "3").response().await;
    let notified = axum::body::to_bytes(resumed.into_body(), 1 << 20).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&notified).matches("data: ").count(), 2);
    api.get(&format!("{path}/events"))
        .user("ann")
        .header("last-event-id", "x")
        .send()
        .await
        .refused(400, "invalid_request");
}

/// The events of a stream that has ended: their names, and of each transition its generation.
fn events_of(stream: &[u8]) -> Vec<String> {
    let text = std::str::from_utf8(stream).unwrap();
    text.lines()
        .filter_map(|line| {
            line.strip_prefix("id: ").or_else(|| line.strip_prefix("event: ").filter(|it| *it != "transition"))
        })
        .map(str::to_owned)
        .collect()
}

#[tokio::test]
async fn allocation_whose_history_was_removed_explains_itself_and_streams_what_is_retained() {
    let (api, node) = ApiHarness::with_free_node().await;
    let id = id_of(&rent(&api, "k1", &allocation_body()).await);
    let (path, report) =
        (format!("/api/v1/allocations/{id}"), format!("/api/v1/admin/runtime/entities/allocation/{id}"));
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let seen = api.get(&report).admin().send().await;
    assert_eq!(
        (&seen.is(200)["earlier_history_removed"], seen.body["history"].as_array().unwrap().len()),
        (&json!(false), 3)
    );

    api.remove_history().await;
    let seen = api.get(&report).admin().send().await;
    assert_eq!((&seen.is(200)["earlier_history_removed"], &seen.body["history"]), (&json!(true), &json!([])));
    assert_eq!(seen.body["entity"]["state"], "active");
    let shown = api.get(&path).user("ann").send().await;
    assert_eq!(shown.is(200)["status_history"].as_array().unwrap().len(), 3);

    let stream = api.get(&format!("{path}/events")).user("ann").response().await;
    let streamed = tokio::spawn(axum::body::to_bytes(stream.into_body(), 1 << 20));
    api.post(&format!("{path}/release")).user("ann").json(&json!({"issue": "done"})).send().await.is(202);
    api.ask_as_system::<Allocation>(id, Fact::Cleaned { node_id: node, attempt: 1 }).await;
    let streamed = tokio::time::timeout(Duration::from_secs(60), streamed).await.unwrap().unwrap().unwrap();
    assert_eq!(events_of(&streamed), ["history_removed", "4", "5"], "the stream had begun before");
    let seen = api.get(&report).admin().send().await;
    assert_eq!(
        (&seen.is(200)["earlier_history_removed"], seen.body["history"].as_array().unwrap().len()),
        (&json!(true), 2)
    );

    for (last, expected) in [("2", ["history_removed", "4", "5"].as_slice()), ("3", &["4", "5"]), ("4", &["5"])] {
        let resumed = api.get(&format!("{path}/events")).user("ann").header("last-event-id", last).response().await;
        let streamed = axum::body::to_bytes(resumed.into_body(), 1 << 20).await.unwrap();
        assert_eq!(events_of(&streamed), expected, "after {last}");
        let text = String::from_utf8_lossy(&streamed);
        assert_eq!(text.contains(&format!(r#"{{"allocation_id":"{id}","kept_from":4}}"#)), last == "2", "{text}");
    }

    // Nothing is kept of an allocation that has ended: the stream says so, and ends.
    api.remove_history().await;
    let resumed = api.get(&format!("{path}/events")).user("ann").header("last-event-id", "4").response().await;
    let ended = tokio::time::timeout(Duration::from_secs(60), axum::body::to_bytes(resumed.into_body(), 1 << 20)).await;
    assert_eq!(events_of(&ended.expect("it ends").unwrap()), ["history_removed"]);
}

#[tokio::test]
async fn failed_placement_is_answered_with_a_reason_and_replayed() {
    let api = ApiHarness::with_sku().await;
    api.set_placement(PlacementOutcome::NoCapacity);
    for replayed in [false, true] {
        let full = rent(&api, "full", &allocation_body()).await;
        let details = full.refused(409, "insufficient_capacity");
        assert_eq!(details["suggestion"], "Region us-1 has room for 4 GPUs.");
        let id = details["allocation_id"].as_str().unwrap();
        let refused = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
        assert_eq!(
            (&refused.is(200)["state"], &refused.body["failure"]["code"]),
            (&json!("released"), &json!("insufficient_capacity"))
        );
        assert_eq!(full.is_replayed(), replayed);
        // A different outcome now does not change the replay.
        api.set_placement(PlacementOutcome::OverQuota);
    }
    let over = rent(&api, "over", &allocation_body()).await;
    assert!(over.refused(409, "concurrency_limit_exceeded")["allocation_id"].is_string());
}

#[tokio::test]
async fn queued_or_slow_allocation_is_answered_as_requested() {
    let api = ApiHarness::with_sku().await;
    api.set_placement(PlacementOutcome::NoCapacity);
    let queued = rent(&api, "queued", &json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60})).await;
    assert_eq!(queued.is(201)["state"], "requested");
    let cancelled = api.post(&format!("/api/v1/allocations/{}/release", id_of(&queued))).user("ann").send().await;
    assert_eq!(cancelled.is(202)["state"], "released");
    api.set_policy(PolicyKey::AllocationQueueMax, 30);
    let long = rent(&api, "long", &json!({"sku": "h100x4", "gpu_count": 1, "queue_seconds": 60})).await;
    assert_eq!(long.refused(400, "invalid_request")["field"], "queue_seconds");

    api.set_placement(PlacementOutcome::Silent);
    let began = Instant::now();
    let slow = rent(&api, "slow", &allocation_body()).await;
    assert_eq!(slow.is(201)["state"], "requested");
    assert!((Duration::from_millis(4900)..Duration::from_secs(45)).contains(&began.elapsed()), "{:?}", began.elapsed());
}

#[tokio::test]
async fn invalid_allocation_is_refused_before_anything_is_created() {
    let api = ApiHarness::with_sku().await;
    let mut lines = Vec::new();
    // An idempotency key belongs to one request, refused or not.
    let mut refuse = async |body: Value| {
        let key = format!("k{}", lines.len());
        lines.push(rent(&api, &key, &body).await.line());
    };
    refuse(json!({})).await;
    refuse(json!([])).await;
    refuse(json!({"sku": "h100x4"})).await;
    for count in [json!(0), json!(-1), json!(65), json!(1e30), json!("1"), json!(1.5), json!(null)] {
        refuse(json!({"sku": "h100x4", "gpu_count": count})).await;
    }
    let with = |name: &str, value: Value| {
        let mut body = allocation_body();
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
    lines.push(api.post("/api/v1/allocations").user("ann").json(&allocation_body()).send().await.line());
    lines.push(rent(&api, "", &allocation_body()).await.line());
    lines.push(rent(&api, &"k".repeat(256), &allocation_body()).await.line());
    lines.push(api.get("/api/v1/allocations?state=lost").user("ann").send().await.line());
    lines.push(api.get("/api/v1/allocations?limit=201").user("ann").send().await.line());
    lines.push(api.get("/api/v1/allocations/x").user("ann").send().await.line());
    insta::assert_snapshot!(lines.join("\n"));
    let made = api.get("/api/v1/allocations").admin().send().await;
    assert!(made.is(200)["items"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn failed_release_is_resolved_by_an_administrator() {
    let (api, node) = ApiHarness::with_free_node().await;
    let made = rent(&api, "k", &allocation_body()).await;
    made.is(201);
    let id = id_of(&made);
    let admin = |action: &str| format!("/api/v1/admin/allocations/{id}/{action}");
    let why = json!({"reason": "the node burnt"});
    api.post(&admin("force-release")).admin().json(&why).send().await.refused(409, "state_conflict");
    api.post(&format!("/api/v1/allocations/{id}/release")).user("ann").send().await.is(202);
    let failed = json!({"command": "cleanup_failed", "node_id": node, "attempt": 1, "reason": "home_remains", "detail": "a file"});
    api.ask_as_system::<Allocation>(id, serde_json::from_value::<Fact>(failed.clone()).unwrap()).await;
    let seen = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    assert_eq!((&seen.is(200)["state"], &seen.body["attempt"]), (&json!("release_failed"), &json!(1)));
    assert_eq!(seen.body["health"]["status"], "critical");
    api.post(&admin("retry-release")).user("ann").json(&why).send().await.refused(403, "forbidden");
    api.post(&admin("retry-release")).admin().json(&json!({})).send().await.refused(400, "invalid_request");
    let retried = api.post(&admin("retry-release")).admin().json(&why).send().await;
    assert_eq!((&retried.is(202)["state"], &retried.body["attempt"]), (&json!("releasing"), &json!(2)));
    let failed = json!({"command": "cleanup_failed", "node_id": node, "attempt": 2, "reason": "home_remains", "detail": "a file"});
    api.ask_as_system::<Allocation>(id, serde_json::from_value::<Fact>(failed).unwrap()).await;
    let forced = api.post(&admin("force-release")).admin().json(&why).send().await;
    assert_eq!((&forced.is(202)["state"], &forced.body["state_reason"]), (&json!("released"), &json!("forced")));
}

#[tokio::test]
async fn gpu_alert_is_shown_to_the_tenant_of_the_gpu() {
    let api = ApiHarness::with_sku().await;
    let node = api.enrolled_node("h100x4", 4, "m").await;
    api.poll(node).await;
    api.set_placement(PlacementOutcome::On(node));
    let rented = rent(&api, "rented", &allocation_body()).await;
    let id = id_of(&rented);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let path = format!("/api/v1/allocations/{id}");
    assert_eq!(api.get(&path).user("ann").send().await.is(200)["health"], Value::Null);
    let alert = |target: &str, message: &str| {
        json!({
            "probe_id": "xid", "target": target, "classifications": ["warn"], "message": "for operators",
            "tenant_message": message,
        })
    };
    let alerts = vec![alert("node", "The machine is warm."), alert("GPU-m-3", "Not for everybody.")];
    api.heartbeat(node, "m", 4, alerts).await;
    let shown = api.get(&path).user("ann").send().await;
    let health = &shown.is(200)["health"];
    assert_eq!((&health["status"], &health["message"]), (&json!("warning"), &json!("The machine is warm.")));
    let listed = api.get("/api/v1/allocations").user("ann").send().await;
    assert_eq!(&listed.is(200)["items"][0]["health"], health);
}

#[tokio::test]
async fn further_devices_of_a_node_are_shown_with_it_and_to_the_tenant_of_an_active_allocation() {
    let api = ApiHarness::with_sku().await;
    let node = api.enrolled_node("h100x4", 4, "m").await;
    api.poll(node).await;
    let shown = api.get(&format!("/api/v1/admin/nodes/{node}")).admin().send().await;
    assert_eq!(shown.is(200)["inventory"]["tenant_devices"], json!(["/dev/fuse"]));
    api.set_placement(PlacementOutcome::On(node));
    let id = id_of(&rent(&api, "rented", &allocation_body()).await);
    let path = format!("/api/v1/allocations/{id}");
    let before = api.get(&path).user("ann").send().await;
    assert_eq!(before.is(200)["further_devices"], json!([]), "it has no programs yet");
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let active = api.get(&path).user("ann").send().await;
    assert_eq!(active.is(200)["further_devices"], json!(["/dev/fuse"]));
}

#[tokio::test]
async fn allocation_on_a_silent_machine_says_so_until_the_next_contact() {
    let api = ApiHarness::with_sku().await;
    let node = api.enrolled_node("h100x4", 4, "m").await;
    api.poll(node).await;
    api.set_placement(PlacementOutcome::On(node));
    let id = id_of(&rent(&api, "rented", &allocation_body()).await);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let path = format!("/api/v1/allocations/{id}");
    assert_eq!(api.get(&path).user("ann").send().await.is(200)["health"], Value::Null);
    // Longer than policy `node.offline_after_seconds`.
    api.stop_clock_at(&(chrono::Utc::now() + chrono::TimeDelta::seconds(120)).to_rfc3339());
    let shown = api.get(&path).user("ann").send().await;
    let health = &shown.is(200)["health"];
    assert_eq!((&health["status"], &health["release_at"]), (&json!("warning"), &Value::Null));
    let message = health["message"].as_str().unwrap();
    assert!(
        message.starts_with("Its machine is offline: the service has not been in contact with it since 20"),
        "{message}"
    );
    assert!(
        message.ends_with("terminals and logins wait until it is back. It is charged until you release it."),
        "{message}"
    );
    let listed = api.get("/api/v1/allocations").user("ann").send().await;
    assert_eq!(&listed.is(200)["items"][0]["health"], health);
    api.heartbeat(node, "m", 4, Vec::new()).await;
    assert_eq!(api.get(&path).user("ann").send().await.is(200)["health"], Value::Null);
}

#[tokio::test]
async fn allocation_on_a_draining_machine_says_so() {
    let (api, node) = ApiHarness::with_free_node().await;
    let id = id_of(&rent(&api, "rented", &allocation_body()).await);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let reserve = node::Instruction::Reserve {
        allocation_id: AllocationId(id),
        gpu_count: 1,
        keys: Vec::new(),
        revision: 0,
        reimages: false,
    };
    api.ask_as_system::<node::Node>(node.0, reserve).await;
    let retire = json!({ "reason": "to be repaired", "drain": true });
    let drained = api.post(&format!("/api/v1/admin/nodes/{node}/retire")).admin().json(&retire).send().await;
    assert_eq!(drained.is(200)["state"], "draining");
    let shown = api.get(&format!("/api/v1/allocations/{id}")).user("ann").send().await;
    let health = &shown.is(200)["health"];
    assert_eq!((&health["status"], &health["release_at"]), (&json!("warning"), &Value::Null));
    let message = health["message"].as_str().unwrap();
    assert!(message.starts_with("Its machine is taken out of service after its last allocation."), "{message}");
    assert!(!message.contains("repaired"), "the reason is for operators: {message}");
}

#[tokio::test]
async fn allocation_whose_column_of_owners_was_altered_is_in_no_other_users_list() {
    let (api, _) = ApiHarness::with_free_node().await;
    let id = id_of(&rent(&api, "k1", &allocation_body()).await);
    let listed =
        async |user: &'static str| api.get("/api/v1/allocations").user(user).send().await.is(200)["items"].clone();
    assert_eq!(listed("ann").await[0]["id"], json!(id));
    api.give_all_allocations_to_bob().await;
    assert_eq!(listed("bob").await, json!([]));
}

#[tokio::test]
async fn allocation_on_a_node_that_cannot_be_read_is_listed() {
    let (api, node) = ApiHarness::with_free_node().await;
    let id = id_of(&rent(&api, "k1", &allocation_body()).await);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    api.make_nodes_unreadable().await;
    let listed = api.get("/api/v1/allocations").user("ann").send().await;
    let item = &listed.is(200)["items"][0];
    assert_eq!((&item["id"], &item["health"]), (&json!(id), &Value::Null));
}

//! Rollouts, as administrators order, see and steer them.

use super::harness::{ApiHarness, TestResponse};
use crate::app_state::rollout_nodes::RolloutScope;
use axum::http::Method;
use domain::node::{Instruction as NodeInstruction, Node};
use domain::rollout::{Fact, FeedPosition, NodeSelector, NodesPage, PAGE, Rollout, RolloutCandidate};
use domain::rollout_outcome::{RolloutOutcome, SkipReason};
use domain::{NodeId, RolloutId};
use serde_json::{Value, json};
use uuid::Uuid;

const PATH: &str = "/api/v1/admin/rollouts";

fn digest(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

fn order() -> Value {
    json!({ "digest": digest('a'), "max_unavailable": 2, "reason": "release 1.4" })
}

fn with(name: &str, value: Value) -> Value {
    let mut order = order();
    order[name] = value;
    order
}

async fn create(api: &ApiHarness, body: &Value) -> TestResponse {
    api.post(PATH).admin().json(body).send().await
}

async fn steer(api: &ApiHarness, id: &str, verb: &str) -> TestResponse {
    api.post(&format!("{PATH}/{id}/{verb}")).admin().json(&json!({ "reason": "r" })).send().await
}

/// An API with a node, and a rollout that has it.
async fn begun() -> (ApiHarness, NodeId, Uuid) {
    let api = ApiHarness::with_sku().await;
    let node = api.active_node("h100x4", 4).await;
    let created = create(&api, &order()).await.is(201).clone();
    (api, node, created["id"].as_str().unwrap().parse().unwrap())
}

async fn found(api: &ApiHarness, rollout: Uuid, nodes: Vec<RolloutCandidate>) {
    let next = None::<FeedPosition>;
    let page = Box::new(NodesPage { after: None, nodes, next });
    api.ask_as_system::<Rollout>(rollout, Fact::NodesFound { page }).await;
}

#[tokio::test]
async fn rollout_is_ordered_shown_and_steered() {
    let (api, node, rollout) = begun().await;
    let path = format!("{PATH}/{rollout}");
    let shown = async || api.get(&path).admin().send().await.is(200).clone();
    let first = shown().await;
    assert_eq!((&first["state"], &first["stage"], &first["canary"]), (&json!("running"), &json!("canary"), &json!(1)));
    assert_eq!((&first["soak_seconds"], &first["soaks_until"]), (&json!(600), &Value::Null));
    assert_eq!((&first["digest"], &first["all_nodes_read"]), (&json!(digest('a')), &json!(false)));

    let offline = RolloutCandidate { node_id: NodeId(Uuid::from_u128(7)), skip: Some(SkipReason::Offline) };
    found(&api, rollout, vec![RolloutCandidate { node_id: node, skip: None }, offline]).await;
    let running = shown().await;
    assert_eq!((&running["in_flight"], &running["skipped"]), (&json!([node]), &json!(1)));
    assert_eq!(running["skips"], json!([{ "node_id": Uuid::from_u128(7), "reason": "offline" }]));

    let paused = steer(&api, &rollout.to_string(), "pause").await.is(200).clone();
    assert_eq!(paused["state"], "paused");
    assert_eq!(steer(&api, &rollout.to_string(), "resume").await.is(200)["state"], "running");
    let failed = RolloutOutcome::Failed { reason: "rolled_back".into() };
    api.ask_as_system::<Rollout>(rollout, Fact::NodeEnded { node_id: node, outcome: failed }).await;
    let stopped = shown().await;
    assert_eq!((&stopped["state"], &stopped["overdue"]), (&json!("stopped"), &json!(true)));
    assert_eq!(stopped["stopped_by"], json!({ "node_id": node, "reason": "rolled_back" }));
    assert_eq!(steer(&api, &rollout.to_string(), "pause").await.refused(409, "state_conflict")["state"], "stopped");
    assert_eq!(steer(&api, &rollout.to_string(), "abort").await.is(200)["state"], "aborted");
    assert_eq!(steer(&api, &rollout.to_string(), "resume").await.refused(409, "state_conflict")["state"], "aborted");

    let list = api.get(&format!("{PATH}?state=aborted")).admin().send().await.is(200).clone();
    assert_eq!(list["items"][0]["id"], json!(rollout));
    assert_eq!(api.get(&format!("{PATH}?state=running")).admin().send().await.is(200)["items"], json!([]));
    let log = api.get("/api/v1/admin/audit-log?target_kind=rollout").admin().send().await.is(200).clone();
    let mut actions: Vec<_> = log["items"].as_array().unwrap().iter().map(|row| row["action"].clone()).collect();
    actions.sort_by_key(Value::to_string);
    let expected = ["abort", "create", "pause", "resume", "stop"].map(|verb| json!(format!("rollouts.{verb}")));
    assert_eq!(actions, expected);
}

#[tokio::test]
async fn second_rollout_is_refused_until_the_first_has_ended() {
    let (api, _, rollout) = begun().await;
    let refused = create(&api, &order()).await;
    assert_eq!(refused.refused(409, "state_conflict")["rollout_id"], json!(rollout));
    steer(&api, &rollout.to_string(), "pause").await.is(200);
    create(&api, &order()).await.refused(409, "state_conflict");
    steer(&api, &rollout.to_string(), "abort").await.is(200);
    create(&api, &order()).await.is(201);
}

#[tokio::test]
async fn order_that_cannot_be_carried_out_is_refused_with_its_field() {
    let api = ApiHarness::with_sku().await;
    api.sku("a100x4", 4).await;
    let refused = async |body: &Value| create(&api, body).await.refused(400, "invalid_request")["field"].clone();
    assert_eq!(refused(&order()).await, "selector", "there is no node");
    let node = api.active_node("h100x4", 4).await;
    assert_eq!(refused(&with("selector", json!({ "sku": "a100x4" }))).await, "selector");
    assert_eq!(refused(&with("selector", json!({ "region_code": "mars" }))).await, "selector");
    assert_eq!(refused(&with("selector", json!({ "node_ids": [node], "sku": "a100x4" }))).await, "selector");
    assert_eq!(refused(&with("selector", json!({ "sku": "b200" }))).await, "selector.sku");
    assert_eq!(refused(&with("selector", json!({ "node_ids": [node, Uuid::nil()] }))).await, "selector.node_ids");
    assert_eq!(refused(&json!({ "max_unavailable": 1, "reason": "r" })).await, "digest", "nothing is published");
    let too_many: Vec<Uuid> = (0..501).map(Uuid::from_u128).collect();
    for (name, value) in [
        ("digest", json!("latest")),
        ("digest", json!(digest('F'))),
        ("max_unavailable", json!(0)),
        ("max_unavailable", json!(201)),
        ("canary", json!(-1)),
        ("canary", json!(201)),
        ("soak_seconds", json!(-1)),
        ("soak_seconds", json!(604_801)),
        ("reason", json!(" ")),
        ("selector", json!({ "node_ids": too_many })),
        ("selector", json!({ "state": "active" })),
    ] {
        create(&api, &with(name, value.clone())).await.refused(400, "invalid_request");
    }
    let none = create(&api, &with("selector", json!({ "node_ids": [] }))).await;
    assert_eq!(none.refused(400, "invalid_request")["field"], "selector");
    let chosen = create(&api, &with("selector", json!({ "node_ids": [node], "sku": "h100x4" }))).await.is(201).clone();
    assert_eq!(chosen["selector"]["node_ids"], json!([node]));
    api.get(&format!("{PATH}/{}", Uuid::nil())).admin().send().await.refused(404, "not_found");
    steer(&api, &Uuid::nil().to_string(), "pause").await.refused(404, "not_found");
    api.post(PATH).user("ann").json(&order()).send().await.refused(403, "forbidden");
}

#[tokio::test]
async fn repeated_order_is_answered_as_the_first_time() {
    let api = ApiHarness::with_sku().await;
    api.active_node("h100x4", 4).await;
    let send = async || api.post(PATH).admin().key("once").json(&order()).send().await;
    let first = send().await.is(201).clone();
    let repeated = send().await;
    assert_eq!((repeated.is_replayed(), &repeated.is(201)["id"]), (true, &first["id"]));
}

#[tokio::test]
async fn nodes_of_a_rollout_are_listed_with_their_outcomes() {
    let (api, node, rollout) = begun().await;
    let path = format!("{PATH}/{rollout}/nodes");
    assert_eq!(api.get(&path).admin().send().await.is(200)["items"], json!([]));
    let digest = digest('a').parse().unwrap();
    let order =
        NodeInstruction::UpdateForRollout { rollout_id: RolloutId(rollout), digest, soaks: true, includes_held: false };
    api.ask_as_system::<Node>(node.0, order).await;
    let rename = api.call(Method::PATCH, &format!("/api/v1/admin/nodes/{node}")).admin();
    rename.json(&json!({ "name": "rack-7" })).send().await.is(200);
    let listed = api.get(&path).admin().send().await.is(200).clone();
    let item = &listed["items"][0];
    // The harness's agent has no task for updates.
    assert_eq!((&item["node_id"], &item["outcome"]), (&json!(node), &json!("skipped")));
    assert_eq!((&item["reason"], &item["name"]), (&json!("unsupported"), &json!("rack-7")));
    let other = Uuid::from_u128(1);
    api.get(&format!("{PATH}/{other}/nodes")).admin().send().await.refused(404, "not_found");
}

#[tokio::test]
async fn selected_nodes_are_read_in_pages_without_removed_and_later_ones() {
    let api = ApiHarness::with_sku().await;
    api.sku("a100x4", 4).await;
    let removed = api.node("h100x4", 4).await;
    for verb in ["retire", "remove"] {
        let path = format!("/api/v1/admin/nodes/{removed}/{verb}");
        api.post(&path).admin().json(&json!({ "reason": "r" })).send().await;
    }
    api.wait_until::<Node>(removed.0, |node| node.lifecycle.phase.is_gone()).await;
    api.active_node("a100x4", 4).await;
    let mut nodes = Vec::new();
    for _ in 0..PAGE + 2 {
        nodes.push(api.node("h100x4", 4).await);
    }
    let created = create(&api, &with("selector", json!({ "sku": "h100x4" }))).await.is(201).clone();
    let later = api.node("h100x4", 4).await;
    let (selector, digest) = (selector_of(&created), digest('a').parse().unwrap());
    let created_at = created["created_at"].as_str().unwrap().parse().unwrap();
    let scope = RolloutScope { selector: &selector, digest: &digest, includes_held: false, created_at };
    let reads = &api.app.reads;

    let first = scope.page(reads, None).await.unwrap();
    assert_eq!(first.nodes.len(), PAGE);
    let second = scope.page(reads, first.next).await.unwrap();
    assert_eq!((second.nodes.len(), second.next), (2, None), "the last page, without {later}");
    let found: Vec<_> = first.nodes.iter().chain(&second.nodes).map(|candidate| candidate.node_id).collect();
    assert_eq!(found, nodes);
    assert!(first.nodes.iter().all(|candidate| candidate.skip == Some(SkipReason::NotActive)));

    // By their ids also removed ones, which are skipped, in the same order and as many at once.
    let ids = nodes.iter().copied().chain([removed, later]).collect();
    let selector = NodeSelector { node_ids: Some(ids), ..NodeSelector::default() };
    let scope = RolloutScope { selector: &selector, ..scope };
    let first = scope.page(reads, None).await.unwrap();
    assert_eq!(first.nodes[0], RolloutCandidate { node_id: removed, skip: Some(SkipReason::Removed) });
    let second = scope.page(reads, first.next).await.unwrap();
    assert_eq!((first.nodes.len(), second.nodes.len(), second.next), (PAGE, 3, None), "without {later}");
}

fn selector_of(created: &Value) -> NodeSelector {
    let sku_id = created["selector"]["sku_id"].as_str().unwrap().parse().unwrap();
    NodeSelector { sku_id: Some(sku_id), ..NodeSelector::default() }
}

//! The update of a node's agent, as administrators order it and see it.

use super::harness::ApiHarness;
use domain::node::{Node, Request, TaskOutcome};
use domain::{NodeId, Principal, TaskId};
use serde_json::json;

fn digest(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

async fn report(api: &ApiHarness, node: NodeId, task: &serde_json::Value, verdict: TaskOutcome) {
    let task_id = TaskId(task["task_id"].as_str().unwrap().parse().unwrap());
    let report = Request::Report { serial: "01".into(), task_id, attempt: 1, verdict, output: None, unproved: None };
    api.ask::<Node>(&Principal::Node(node), node.0, report).await.unwrap();
}

#[tokio::test]
async fn update_is_ordered_with_the_published_digest_and_shown_with_its_outcome() {
    let api = ApiHarness::with_sku().await;
    let node = api.active_node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{node}");
    let order =
        async |body: serde_json::Value| api.post(&format!("{path}/update-agent")).admin().json(&body).send().await;
    let shown = async || api.get(&path).admin().send().await.is(200)["agent_update"].clone();
    assert!(shown().await.is_null());
    // Nothing is published here, and what is no digest is none.
    let details = order(json!({"reason": "x"})).await;
    assert_eq!(details.refused(400, "invalid_request")["field"], "digest");
    for wrong in ["latest", "sha256:00", &digest('F')] {
        order(json!({"digest": wrong, "reason": "x"})).await.refused(400, "invalid_request");
    }
    order(json!({"digest": digest('a')})).await.refused(400, "invalid_request");

    let ordered = order(json!({"digest": digest('a'), "reason": "x"})).await.is(201).clone();
    assert_eq!((&ordered["type"], &ordered["state"]), (&json!("agent.update"), &json!("open")));
    let update = shown().await;
    assert_eq!((&update["state"], &update["digest"]), (&json!("open"), &json!(digest('a'))));
    order(json!({"digest": digest('b'), "reason": "x"})).await.refused(409, "state_conflict");
    let verdict = TaskOutcome::Failed { code: "rolled_back".into(), message: "no heartbeat".into() };
    report(&api, node, &ordered, verdict).await;
    let update = shown().await;
    assert_eq!((&update["state"], &update["error"]["code"]), (&json!("failed"), &json!("rolled_back")));

    let ordered = order(json!({"digest": digest('b'), "force": true, "reason": "x"})).await.is(201).clone();
    report(&api, node, &ordered, TaskOutcome::Succeeded { proof: None }).await;
    let update = shown().await;
    assert_eq!((&update["state"], &update["error"]), (&json!("succeeded"), &json!(null)));
    assert!(update["ended_at"].is_string());
}

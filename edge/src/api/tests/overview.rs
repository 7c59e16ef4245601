//! The overview of the service.

use super::harness::ApiHarness;
use domain::node::{Instruction, Node};
use domain::{AllocationId, Machine, NodeId};
use serde_json::{Value, json};
use uuid::Uuid;

#[tokio::test]
async fn overview_counts_entities_and_free_gpus() {
    let api = ApiHarness::new().await;
    let overview = async || api.get("/api/v1/admin/overview").admin().send().await.is(200).clone();
    let empty = overview().await;
    assert_eq!((&empty["gpus"], &empty["overdue"], &empty["parked"]), (&json!([]), &json!(0), &json!(0)));
    api.get("/api/v1/admin/overview").user("ann").send().await.refused(403, "forbidden");

    for name in ["h100x4", "h100x2"] {
        api.sku(name, if name == "h100x4" { 4 } else { 2 }).await;
    }
    let silent = api.node("h100x4", 4).await;
    let free = api.active_node("h100x4", 4).await;
    let rented = api.active_node("h100x4", 4).await;
    let retired = api.active_node("h100x4", 4).await;
    let removed = api.active_node("h100x4", 4).await;
    let small = api.active_node("h100x2", 2).await;
    let reserve = |n| Instruction::Reserve {
        allocation_id: AllocationId(Uuid::from_u128(n)),
        gpu_count: 1,
        keys: Vec::new(),
        revision: 0,
        reimages: false,
    };
    api.ask_as_system::<Node>(rented.0, reserve(1)).await;
    api.ask_as_system::<Node>(rented.0, reserve(2)).await;
    api.ask_as_system::<Node>(small.0, reserve(3)).await;
    for (node, orders) in [(retired, ["retire"].as_slice()), (removed, ["retire", "remove"].as_slice())] {
        for order in orders {
            let path = format!("/api/v1/admin/nodes/{node}/{order}");
            let answer = api.post(&path).admin().json(&json!({"reason": "old"})).send().await;
            assert!(matches!(answer.status, 200 | 202), "{}", answer.body);
        }
    }
    let seen = overview().await;
    let gpus: Vec<_> = seen["gpus"].as_array().unwrap().iter().map(|row| without_id(row.clone())).collect();
    assert_eq!(
        gpus,
        [
            json!({"sku": "h100x2", "region_code": "eu-1", "nodes": 1, "gpus_total": 2, "gpus_held": 1, "gpus_free": 1}),
            json!({"sku": "h100x4", "region_code": "eu-1", "nodes": 4, "gpus_total": 16, "gpus_held": 2, "gpus_free": 6}),
        ]
    );
    // As the node entities count.
    let mut own = 0;
    for id in [silent, free, rented, retired, removed] {
        own += node(&api, id).await.gpus_free();
    }
    assert_eq!(own, 6);
}

#[tokio::test]
async fn node_that_cannot_be_read_stays_in_the_counters_as_it_was_committed() {
    let api = ApiHarness::with_sku().await;
    api.active_node("h100x4", 4).await;
    api.make_nodes_unreadable().await;
    api.active_node("h100x4", 4).await;
    let overview = api.get("/api/v1/admin/overview").admin().send().await;
    let gpus = &overview.is(200)["gpus"];
    assert_eq!((&gpus[0]["nodes"], &gpus[0]["gpus_free"], &gpus[1]), (&json!(2), &json!(8), &Value::Null));
    let capacity = api.get("/api/v1/capacity").user("ann").send().await;
    let items = &capacity.is(200)["items"];
    assert_eq!((&items[0]["gpus_free"], &items[1]), (&json!(8), &Value::Null));
}

fn without_id(mut row: Value) -> Value {
    assert!(row.as_object_mut().unwrap().remove("sku_id").is_some_and(|id| id.is_string()));
    row
}

async fn node(api: &ApiHarness, id: NodeId) -> Node {
    let entity = domain::EntityRef { kind: Node::KIND, id: id.0 };
    serde_json::from_str(&api.app.reads.entity(entity).await.unwrap().unwrap().body).unwrap()
}

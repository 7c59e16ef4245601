//! Resets of GPUs, as administrators order them and see them.

use super::harness::{ApiHarness, TestResponse};
use domain::node::{Instruction, Node, NodeHealth};
use domain::{AllocationId, NodeId, TaskType};
use serde_json::{Value, json};
use uuid::Uuid;

const GPUS: u32 = 4;

struct Bench {
    api: ApiHarness,
    node: NodeId,
    machine: String,
}

impl Bench {
    async fn new() -> Self {
        let api = ApiHarness::new().await;
        api.sku("h100x4", GPUS).await;
        let machine = Uuid::new_v4().to_string();
        let node = api.enrolled_node("h100x4", GPUS, &machine).await;
        api.poll(node).await;
        Self { api, node, machine }
    }

    fn gpu(&self, index: u32) -> String {
        format!("GPU-{}-{index}", self.machine)
    }

    async fn reset(&self, gpu: &str) -> TestResponse {
        let path = format!("/api/v1/admin/nodes/{}/gpus/{gpu}/reset", self.node);
        self.api.post(&path).admin().json(&json!({ "reason": "slow" })).send().await
    }

    async fn shown(&self) -> Value {
        self.api.get(&format!("/api/v1/admin/nodes/{}", self.node)).admin().send().await.is(200).clone()
    }
}

#[tokio::test]
async fn reset_of_a_gpu_is_ordered_once_shown_and_audited_and_refused_beside_its_tenant() {
    let bench = Bench::new().await;
    let details = bench.reset(&bench.gpu(3)).await;
    let message = details.body["message"].as_str().unwrap_or_default().to_owned();
    details.refused(409, "state_conflict");
    assert!(message.contains("upgrade it"), "an agent without the task: {message}");
    let every = TaskType::ALL.iter().map(|it| it.name().to_owned()).collect();
    bench.api.heartbeat_of(bench.node, &bench.machine, GPUS, NodeHealth::default(), Some(every)).await;

    let unknown = bench.reset("GPU-of-another").await;
    let message = unknown.body["message"].as_str().unwrap_or_default().to_owned();
    unknown.refused(404, "not_found");
    assert!(message.contains(&bench.gpu(0)), "it names those that there are: {message}");
    for wrong in ["a%20b", "a%2Fb", &"G".repeat(97)] {
        bench.reset(wrong).await.refused(400, "invalid_request");
    }

    let allocation_id = AllocationId(Uuid::now_v7());
    let hold = Instruction::Reserve { allocation_id, gpu_count: 1, keys: Vec::new(), revision: 0, reimages: false };
    bench.api.ask_as_system::<Node>(bench.node.0, hold).await;
    let refused = bench.reset(&bench.gpu(0)).await;
    assert_eq!(refused.refused(409, "node_in_use")["allocation_id"], json!(allocation_id));

    let ordered = bench.reset(&bench.gpu(3)).await.is(201).clone();
    assert_eq!((&ordered["type"], &ordered["state"]), (&json!("node.gpu_reset"), &json!("open")));
    let repeated = bench.reset(&bench.gpu(3)).await.is(201).clone();
    assert_eq!(repeated["task_id"], ordered["task_id"]);
    bench.reset(&bench.gpu(2)).await.refused(409, "state_conflict");
    let node = bench.shown().await;
    assert_eq!(
        (&node["gpu_resets"][0]["gpu_uuid"], &node["gpu_resets"][0]["phase"]),
        (&json!(bench.gpu(3)), &json!("resetting"))
    );
    assert_eq!(node["gpus_free"], 2);
    let log = bench.api.get("/api/v1/admin/audit-log?action=nodes.reset_gpu").admin().send().await.is(200).clone();
    let rows = log["items"].as_array().unwrap();
    assert_eq!(
        (rows.len(), &rows[0]["metadata"]["gpu_uuid"], &rows[0]["metadata"]["reason"]),
        (1, &json!(bench.gpu(3)), &json!("slow"))
    );
}

//! Validations with load, and what a SKU wants of them.

use super::harness::{ApiHarness, POLLS, TestResponse, pause_before_poll, sku_body};
use axum::http::Method;
use domain::node::{Instruction, Node, Request, TaskOutcome};
use domain::validation::Measurement;
use domain::{AllocationId, NodeId, Principal, TaskId};
use serde_json::{Value, json};
use uuid::Uuid;

impl ApiHarness {
    async fn validate(&self, id: NodeId, level: &str) -> TestResponse {
        let body = json!({ "level": level, "reason": "new disk" });
        self.post(&format!("/api/v1/admin/nodes/{id}/validate")).admin().json(&body).send().await
    }

    /// Validates the node, whose agent reports that it has measured this of the disk. The node afterwards.
    async fn measured(&self, id: NodeId, disk_read: u64) -> Value {
        self.measured_by(id, "quick", disk_read).await
    }

    async fn measured_by(&self, id: NodeId, level: &str, disk_read: u64) -> Value {
        let others = Measurement::ALL.iter().filter(|it| **it != Measurement::DiskRead);
        let not_tested: serde_json::Map<_, _> = others.map(|it| (it.name().to_owned(), json!("no tool"))).collect();
        let measurements = json!({ "disk_read_mib_per_second": disk_read });
        let ordered = self.validate(id, level).await;
        let task_id = TaskId(ordered.is(201)["task_id"].as_str().unwrap().parse().unwrap());
        let report = Request::Report {
            serial: "01".into(),
            task_id,
            attempt: 1,
            verdict: TaskOutcome::Succeeded { proof: None },
            output: Some(json!({ "level": level, "measurements": measurements, "not_tested": not_tested })),
            unproved: None,
        };
        self.ask::<Node>(&Principal::Node(id), id.0, report).await.unwrap();
        self.get(&format!("/api/v1/admin/nodes/{id}")).admin().send().await.is(200).clone()
    }

    async fn change_sku(&self, id: &str, change: &Value) -> TestResponse {
        self.call(Method::PATCH, &format!("/api/v1/admin/skus/{id}")).admin().json(change).send().await
    }
}

#[tokio::test]
async fn minimums_of_a_sku_are_in_force_for_the_next_validation_of_its_nodes() {
    let api = ApiHarness::with_sku().await;
    let found = api.get("/api/v1/admin/skus").admin().send().await;
    let sku = found.is(200)["items"][0].clone();
    assert_eq!(sku["validation"], json!({}));
    let sku = sku["id"].as_str().unwrap();
    let id = api.active_node("h100x4", 4).await;
    assert_eq!(api.measured(id, 100).await["validation"]["passed"], true);

    let wants = json!({ "validation": { "disk_read_mib_per_second": 500 } });
    assert_eq!(api.change_sku(sku, &wants).await.is(200)["validation"], wants["validation"]);
    // Every process reads them again within a second.
    let mut node = api.measured(id, 100).await;
    for n in 0..POLLS {
        if node["state"] == "quarantined" {
            break;
        }
        tokio::time::sleep(pause_before_poll(n)).await;
        node = api.measured(id, 100).await;
    }
    let held = (&node["state"], &node["quarantine_holds"][0]["author"]);
    assert_eq!(held, (&json!("quarantined"), &json!("validation")), "{node}");
    let shown = &node["validation"];
    let wanted = json!(["disk_read_mib_per_second is 100, and the SKU wants at least 500"]);
    assert_eq!((&shown["passed"], &shown["level"], &shown["shortfalls"]), (&json!(false), &json!("quick"), &wanted));
    assert_eq!(shown["measurements"], json!({ "disk_read_mib_per_second": 100 }));

    let passed = api.measured(id, 500).await;
    assert_eq!((&passed["state"], &passed["validation"]["passed"]), (&json!("active"), &json!(true)));
    assert_eq!(passed["failed_validation_level"], Value::Null);

    let failed = api.measured_by(id, "deep", 100).await;
    assert_eq!((&failed["state"], &failed["failed_validation_level"]), (&json!("quarantined"), &json!("deep")));
    let quick = api.measured(id, 500).await;
    assert_eq!((&quick["state"], &quick["validation"]["passed"]), (&json!("quarantined"), &json!(true)));
    assert_eq!(quick["failed_validation_level"], "deep");
    assert_eq!(api.measured_by(id, "deep", 500).await["state"], "active");
    assert_eq!(api.change_sku(sku, &json!({ "validation": {} })).await.is(200)["validation"], json!({}));
}

#[tokio::test]
async fn load_is_refused_on_a_node_with_a_tenant_and_a_repeated_order_is_answered_as_before() {
    let api = ApiHarness::with_sku().await;
    let id = api.active_node("h100x4", 4).await;
    let path = format!("/api/v1/admin/nodes/{id}/validate");
    let body = json!({ "level": "deep", "reason": "new disk" });
    let order = async || api.post(&path).admin().key("once").json(&body).send().await;
    let first = order().await;
    assert_eq!((&first.is(201)["type"], &first.body["state"]), (&json!("node.validate"), &json!("open")));
    assert!(order().await.is_replayed());
    let node = api.get(&format!("/api/v1/admin/nodes/{id}")).admin().send().await;
    let why = (&node.is(200)["gpus_free"], &node.body["unschedulable_reason"]);
    assert_eq!(why, (&json!(0), &json!("it is being validated")));

    let other = api.enrolled_node("h100x4", 4, "other").await;
    api.poll(other).await;
    let allocation_id = AllocationId(Uuid::now_v7());
    let reserve = Instruction::Reserve { allocation_id, gpu_count: 1, keys: Vec::new(), revision: 0, reimages: false };
    api.ask_as_system::<Node>(other.0, reserve).await;
    for level in ["quick", "deep"] {
        let refused = api.validate(other, level).await;
        assert_eq!(refused.refused(409, "node_in_use")["allocation_id"], allocation_id.to_string());
    }
    api.validate(id, "slow").await.refused(400, "invalid_request");
    api.validate(NodeId(Uuid::nil()), "quick").await.refused(404, "not_found");
    let unenrolled = api.node("h100x4", 4).await;
    api.validate(unenrolled, "quick").await.refused(400, "invalid_request");
}

#[tokio::test]
async fn minimums_are_bounded_and_known_by_name() {
    let api = ApiHarness::new().await;
    let with = |validation: Value| {
        let mut body = sku_body("new", 4);
        body["validation"] = validation;
        body
    };
    for validation in [
        json!({ "disk_read_mib_per_second": 0 }),
        json!({ "disk_read_mib_per_second": 1_000_000_001_u64 }),
        json!({ "disk_read_mib_per_second": 1.5 }),
        json!({ "gpu_happiness": 3 }),
        json!([]),
    ] {
        api.post("/api/v1/admin/skus").admin().json(&with(validation)).send().await.refused(400, "invalid_request");
    }
    let made = api.post("/api/v1/admin/skus").admin().json(&with(json!({ "gpu_pcie_lanes": 16 }))).send().await;
    assert_eq!(made.is(201)["validation"], json!({ "gpu_pcie_lanes": 16 }));
}

//! What a SKU expects of its machines, and nodes that differ from it.

use super::harness::{ApiHarness, POLLS, TestResponse, pause_before_poll};
use super::nodes::findings;
use axum::http::Method;
use serde_json::{Value, json};

impl ApiHarness {
    async fn expect_hardware(&self, expected: Value) -> TestResponse {
        let skus = self.get("/api/v1/admin/skus").admin().send().await;
        let path = format!("/api/v1/admin/skus/{}", skus.is(200)["items"][0]["id"].as_str().unwrap());
        self.call(Method::PATCH, &path).admin().json(&json!({ "expected_hardware": expected })).send().await
    }
}

#[tokio::test]
async fn node_with_less_hardware_than_its_sku_expects_is_quarantined_until_it_agrees() {
    let api = ApiHarness::with_sku().await;
    let id = api.enrolled_node("h100x4", 4, "few").await;
    api.poll(id).await;
    let becomes = async |state: &str| {
        let mut last = Value::Null;
        for n in 0..POLLS {
            api.heartbeat_with(id, "few", 4, findings(&[])).await;
            let node = api.get(&format!("/api/v1/admin/nodes/{id}")).admin().send().await.is(200).clone();
            if node["state"] == state {
                return node;
            }
            last = node;
            tokio::time::sleep(pause_before_poll(n)).await;
        }
        panic!("the node does not become {state}: {last}");
    };
    becomes("active").await;
    let machine = becomes("active").await;
    let gpu = &machine["inventory"]["gpus"][3];
    assert_eq!((&gpu["index"], &gpu["is_free"], &gpu["allocation_id"]), (&json!(3), &json!(true), &Value::Null));
    let enough = |node: &Value| {
        let lines = node["hardware"].as_array().unwrap().clone();
        lines.into_iter().map(|line| (line["item"].clone(), line["is_enough"].clone())).collect::<Vec<_>>()
    };
    assert!(enough(&machine).iter().all(|(_, is_enough)| *is_enough == true), "{}", machine["hardware"]);
    let expected = json!({ "cpu_cores": 65, "memory_mib": 500_000, "driver_version_min": "570.86.15" });
    let revised = api.expect_hardware(expected).await;
    assert_eq!(revised.is(200)["expected_hardware"]["driver_version_min"], "570.86.15");
    assert_eq!(revised.body["expected_hardware"]["storage_gib"], Value::Null);
    let drifted = becomes("quarantined").await;
    assert_eq!(drifted["state_reason"]["code"], "inventory_drift");
    assert!(enough(&drifted).contains(&(json!("logical processors"), json!(false))), "{}", drifted["hardware"]);
    let message = drifted["state_reason"]["message"].as_str().unwrap();
    assert!(message.contains("64 logical processors, expected are 65") && !message.contains("MiB"), "{message}");
    assert_eq!(api.expect_hardware(json!({})).await.is(200)["expected_hardware"], Value::Null);
    becomes("active").await;
}

#[tokio::test]
async fn machine_with_less_than_its_sku_sells_does_not_become_active() {
    let api = ApiHarness::new().await;
    // Its agent reports 64 processors, 512,000 MiB and 4,000 GiB.
    let of_sku = json!({ "cpu": { "model": "any", "cores": 64 }, "memory_mib": 600_000, "storage_gib": 4_096 });
    api.sku_with("h100x4", 4, &of_sku).await;
    let id = api.enrolled_node("h100x4", 4, "few").await;
    api.poll(id).await;
    let node = api.get(&format!("/api/v1/admin/nodes/{id}")).admin().send().await.is(200).clone();
    assert_eq!((&node["state"], &node["state_reason"]["code"]), (&json!("enrolling"), &json!("inventory_mismatch")));
    let message = node["state_reason"]["message"].as_str().unwrap();
    assert!(message.contains("512000 MiB of memory, the SKU sells 600000"), "{message}");
    let lines = node["hardware"].as_array().unwrap();
    let short: Vec<_> = lines.iter().filter(|line| line["is_enough"] == false).map(|line| &line["item"]).collect();
    assert_eq!(short, ["memory of the SKU"]);
}

#[tokio::test]
async fn expected_hardware_has_bounds_and_known_fields() {
    let api = ApiHarness::with_sku().await;
    for bad in [
        json!({ "cpu_cores": 0 }),
        json!({ "cpu_cores": 65_537 }),
        json!({ "memory_mib": -1 }),
        json!({ "storage_gib": 1_u64 << 40 }),
        json!({ "driver_version_min": "latest" }),
        json!({ "driver_version_min": "570.86.15.1.2" }),
        json!({ "cpu_model": " " }),
        json!({ "cpu_model": "x".repeat(101) }),
        json!({ "colour": "green" }),
        json!([]),
    ] {
        api.expect_hardware(bad).await.refused(400, "invalid_request");
    }
    api.expect_hardware(Value::Null).await.refused(400, "invalid_request");
}

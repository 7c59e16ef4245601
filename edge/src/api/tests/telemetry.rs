//! The load of the fleet, and of an allocation's GPUs.

use super::harness::ApiHarness;
use crate::fleet_telemetry::{GpuSample, NodeSample};
use chrono::TimeDelta;
use domain::NodeId;
use domain::allocation::{Allocation, Fact};
use serde_json::{Value, json};
use uuid::Uuid;

/// The load of a node with these GPUs, each busy by its number in percent.
fn sample(api: &ApiHarness, gpus: &[&str]) -> NodeSample {
    let gpu = |(percent, uuid): (usize, &&str)| GpuSample {
        uuid: (*uuid).to_owned(),
        model: "H100".into(),
        memory_mib: 80_000,
        utilization_percent: Some(u32::try_from(percent).unwrap()),
        memory_used_mib: Some(1_000),
        temperature_celsius: None,
        power_milliwatts: Some(350_500),
    };
    NodeSample {
        received_at: api.app.environment.now(),
        cpu_cores: 64,
        cpu_percent: Some(12.5),
        memory_mib: 512_000,
        memory_used_mib: Some(1_000),
        storage_gib: 4_000,
        storage_used_gib: Some(7),
        gpus: gpus.iter().enumerate().map(gpu).collect(),
    }
}

#[tokio::test]
async fn fleet_is_rolled_up_by_sku_and_region_for_administrators_alone() {
    let api = ApiHarness::new().await;
    let fleet = async || api.get("/api/v1/admin/telemetry/fleet").admin().send().await.is(200).clone();
    api.get("/api/v1/admin/telemetry/fleet").user("ann").send().await.refused(403, "forbidden");
    api.sku("h100x4", 4).await;
    let reporting = api.active_node("h100x4", 4).await;
    let silent = api.active_node("h100x4", 4).await;
    // Its agent never came.
    api.node("h100x4", 4).await;
    api.app.fleet.record(reporting, sample(&api, &["GPU-0", "GPU-1"]));
    // Of a node that this service does not have.
    api.app.fleet.record(NodeId(Uuid::new_v4()), sample(&api, &["GPU-9"]));

    let mut shown = fleet().await;
    assert_eq!(shown["silent_nodes"]["nodes"][0]["node_id"], json!(silent.0));
    for pointer in [
        "/at",
        "/data_age/oldest_seconds",
        "/data_age/newest_seconds",
        "/items/0/sku_id",
        "/silent_nodes/nodes/0/node_id",
    ] {
        *shown.pointer_mut(pointer).unwrap() = Value::from("<varies>");
    }
    insta::assert_json_snapshot!("fleet", shown);
}

#[tokio::test]
async fn sku_and_region_of_a_node_are_read_once() {
    let api = ApiHarness::new().await;
    let read = async || api.app.fleet_directory.refresh(api.app.environment.now()).await.unwrap();
    api.sku("h100x4", 4).await;
    let node = api.active_node("h100x4", 4).await;
    let first = read().await;
    assert_eq!(first.iter().map(|it| (it.id, &*it.sku, it.is_expected)).collect::<Vec<_>>(), [(node, "h100x4", true)]);
    // Where its snapshot were read again, it would be left out.
    api.make_nodes_unreadable().await;
    assert_eq!(read().await, first);
    let new = api.node("h100x4", 4).await;
    let states: Vec<_> = read().await.iter().map(|it| (it.id, it.is_expected)).collect();
    assert_eq!(states.len(), 2);
    assert!(states.contains(&(new, false)), "its agent never came");
}

#[tokio::test]
async fn user_sees_the_load_of_their_own_gpus_since_the_allocation_is_active() {
    let (api, node) = ApiHarness::with_free_node().await;
    let made = api.post("/api/v1/allocations").user("ann").key("k1").json(&json!({"sku": "h100x4", "gpu_count": 1}));
    let id: Uuid = made.send().await.is(201)["id"].as_str().unwrap().parse().unwrap();
    let path = format!("/api/v1/allocations/{id}/telemetry");
    let telemetry = async || api.get(&path).user("ann").send().await.is(200).clone();
    assert_eq!(telemetry().await, json!({"allocation_id": id, "at": null, "gpus": []}), "it is not active yet");

    let before =
        NodeSample { received_at: api.app.environment.now() - TimeDelta::seconds(9), ..sample(&api, &["GPU-0"]) };
    api.app.fleet.record(node, before);
    api.ask_as_system::<Allocation>(id, Fact::Provisioned { node_id: node }).await;
    let shown = telemetry().await;
    assert_eq!(
        (&shown["at"], &shown["gpus"][0]["utilization_percent"]),
        (&json!(null), &json!(null)),
        "another tenant's"
    );

    // The allocation has GPU-0 alone; the neighbour's load is not its user's business.
    api.app.fleet.record(node, sample(&api, &["GPU-7", "GPU-0"]));
    let mut shown = telemetry().await;
    assert!(shown["at"].is_string());
    shown["at"] = Value::Null;
    let gpu = json!({
        "index": 0, "uuid": "GPU-0", "model": "H100", "utilization_percent": 1, "memory_total_mib": 80_000,
        "memory_used_mib": 1_000, "temperature_celsius": null, "power_watts": 350.5,
    });
    assert_eq!(shown, json!({"allocation_id": id, "at": null, "gpus": [gpu]}));

    api.get(&path).user("bob").send().await.refused(404, "not_found");
    assert_eq!(api.get(&path).admin().send().await.is(200)["gpus"][0]["uuid"], "GPU-0");
    api.post(&format!("/api/v1/allocations/{id}/release")).user("ann").send().await.is(202);
    assert_eq!(telemetry().await["gpus"], json!([]), "what is measured from here on is not theirs");
}

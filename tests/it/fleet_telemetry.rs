//! The load of the fleet: any replica shows that of every node, whichever replica received its heartbeat.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tests::cluster::TestCluster;

const FLEET: &str = "/api/v1/admin/telemetry/fleet";

#[tokio::test(flavor = "multi_thread")]
async fn every_replica_shows_the_load_of_every_node_and_names_the_silent_ones() {
    // A heartbeat in three seconds.
    let mut cluster = TestCluster::builder().replicas(2).policy("node.offline_after_seconds", 10).start().await;
    cluster.offer_sku("h100", 2).await;
    let (one, other) = (cluster.node("h100").await, cluster.node("h100").await);
    for replica in 0..2 {
        // On a busy machine a heartbeat may be late.
        let report =
            |fleet: &Value| group(fleet)["reporting"] == 2 && fleet["data_age"]["oldest_seconds"].as_f64() < Some(10.0);
        let fleet = cluster.at_replica(replica, "admin").wait_until(FLEET, "both nodes report", report).await;
        let group = group(&fleet);
        assert_eq!((&group["nodes"], &group["silent"], &group["gpus"]["count"]), (&json!(2), &json!(0), &json!(4)));
        assert!(group["cpu"]["cores"].as_u64() > Some(0) && group["memory"]["used_mib"].as_u64() > Some(0), "{group}");
        assert_eq!((&fleet["silent_members"], &fleet["silent_nodes"]["count"]), (&json!([]), &json!(0)));
    }

    let rental = cluster.rent_when_free("h100", 1).await;
    let path = format!("/api/v1/allocations/{}/telemetry", rental.id);
    for replica in 0..2 {
        let user = cluster.at_replica(replica, "user");
        let load = user.wait_until(&path, "its node has reported", |load| load["at"].is_string()).await;
        assert_eq!(load["gpus"].as_array().map(Vec::len), Some(1), "{load}");
        assert_eq!(load["gpus"][0]["model"], "H100");
    }

    cluster.lose_agent(&one);
    let admin = cluster.at_replica(1, "admin");
    // The other node may be silent for a moment, too.
    let is_silent = |fleet: &Value| {
        fleet["silent_nodes"]["nodes"][0]["node_id"] == json!(one.id)
            && fleet["silent_nodes"]["count"] == 1
            && group(fleet)["reporting"] == 1
    };
    let fleet = admin.wait_until(FLEET, "the lost node alone is silent", is_silent).await;
    assert!(fleet["silent_nodes"]["nodes"][0]["last_at"].is_string(), "{fleet}");
    for replica in 0..cluster.replicas.len() {
        let page = cluster.wait_for_metrics(replica, |page| page.value("fleet_nodes_silent", &[]) == Some(1.0)).await;
        assert!(!page.text.contains(&one.id.to_string()), "no node is a label: {}", page.text);
    }

    // A member that hangs is named, and what only it knows is missing.
    cluster.signal_replica(0, Signal::SIGSTOP);
    let fleet = admin.get(FLEET).await.ok();
    cluster.signal_replica(0, Signal::SIGCONT);
    assert_eq!(fleet["silent_members"].as_array().map(Vec::len), Some(1), "{fleet}");
    cluster.resume_agent(&one);
    admin.wait_until(FLEET, "both report again", |fleet| fleet["silent_nodes"]["count"] == 0).await;
    let _ = other;
    cluster.allow_error("did not answer");
    cluster.shutdown().await;
}

/// The one SKU in the one region.
fn group(fleet: &Value) -> &Value {
    &fleet["items"][0]
}

//! Runbooks about nodes and capacity, followed as `executed_runbooks` does. The waits of their rules are seconds here.

use super::executed_runbooks::follow;
use super::monitoring::{Monitoring, MonitoringOptions};
use crate::docs_recipes::{REFRESH, followed};
use crate::log_gateway::{CollectingNode, batch_of};
use serde_json::json;
use std::fs;
use std::time::Duration;
use tests::cluster::fake_agent::{EnrollmentAttempt, FakeAgent};
use tests::cluster::fake_log_store::FakeLogStore;
use tests::cluster::{AllocationHandle, REGION, TestCluster, id_of};
use tokio::time::sleep;

const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
/// More batches than may be refused in the alert's window, beside those that the log store does not take.
const REFUSED_BATCHES: usize = 40;
const REFUSED_ENROLLMENTS: &str = r#"http_requests_total{route="/internal/v1/nodes/{id}/enroll",status_class="4xx"}"#;
const BATCHES_NOT_STORED: &str = r#"node_log_gateway_store_failures_total{reason="outage"}"#;
const HURRIED: [&str; 3] = ["capacity.yaml", "node-onboarding.yaml", "node-logs.yaml"];

#[tokio::test(flavor = "multi_thread")]
async fn alerts_of_nodes_their_logs_and_capacity_are_resolved_by_their_runbooks() {
    const CAPACITY: &str = "runbooks/ops.capacity.md";
    const ONBOARDING: &str = "runbooks/ops.node.onboarding.md";
    const LOGS: &str = "runbooks/ops.node.logs.md";
    let store = FakeLogStore::start().await;
    let mut cluster = TestCluster::builder()
        .policy("node.offline_after_seconds", 10)
        .variable("SVC_LOG_STORE_URL", &store.url())
        .variable("SVC_LOG_STORE_CA_PATH", &store.authorities_path().display().to_string())
        .variable(REFRESH.0, REFRESH.1)
        .start()
        .await;
    cluster.offer_sku("h100", 1).await;
    let options = MonitoringOptions { hurried: &HURRIED, ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;
    let folder = followed(&cluster);

    // One node is sold, the other one's machine ends; a request waits. Batches are not stored, and an agent tries an old token.
    let (sold, lost) = (cluster.node("h100").await, cluster.node("h100").await);
    cluster.rent_active("h100", 1).await;
    let lost = if sold.get().await["gpus_free"] == 0 { lost } else { sold };
    cluster.kill9_agent(&lost);
    let collecting = CollectingNode::enroll(&mut cluster).await;
    let token = collecting.token().await;
    cluster.register_secret("a node's log token", &token);
    let batch = batch_of(collecting.node.id, "a line");
    cluster.allow_error("the log store");
    store.answer(500, "out of disk");
    let late = cluster.register("h100").await;
    let older = cluster.bundle(&late).await;
    cluster.bundle(&late).await;
    for attempts in [1, 30] {
        for _ in 0..attempts {
            collecting.push(&token, &batch).await.expect_error(503, "service_unavailable");
            let (attempt, _) = EnrollmentAttempt::valid(&older, 1);
            assert!(attempt.enroll().await.status.is_client_error());
        }
        monitoring.wait_for_samples(&[REFUSED_ENROLLMENTS, BATCHES_NOT_STORED]).await;
    }
    lost.expect_state("offline").await;
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "queue_seconds": 600 });
    let waiting = AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created()),
        cluster.user.clone(),
    );
    let offline = alerts.expect("tickets", "GPUAASNodesOffline", true).await;
    let queued = alerts.expect("tickets", "GPUAASRequestsQueue", true).await;
    let full = alerts.expect("tickets", "GPUAASNoFreeGpus", true).await;
    let out_of_service = alerts.expect("tickets", "GPUAASGpusOutOfService", true).await;
    let refused = alerts.expect("tickets", "GPUAASEnrollmentRefusedSpike", true).await;
    let not_stored = alerts.expect("tickets", "GPUAASNodeLogsNotStored", true).await;
    // A collector with another token than the node's.
    for _ in 0..REFUSED_BATCHES {
        assert!(collecting.push("gpusak_unknown", &batch).await.status.is_client_error());
    }
    let not_accepted = alerts.expect("tickets", "GPUAASNodeLogsRefused", true).await;

    for alert in [&offline, &queued, &full, &out_of_service] {
        let seen = follow(folder.path(), alert, CAPACITY, &["Look here"], "").await;
        assert!(seen.contains("offline") && seen.contains(&lost.name), "the page shows the node: {seen}");
    }
    // Its agent is started, as the page says.
    cluster.restart_agent(&lost);
    waiting.expect_state("active").await;
    for name in ["GPUAASNodesOffline", "GPUAASRequestsQueue"] {
        alerts.expect("tickets", name, false).await;
    }

    let seen = follow(folder.path(), &refused, ONBOARDING, &["Look here"], "").await;
    assert!(seen.contains(&late.name), "the page shows the node: {seen}");
    let given = format!("node={}", late.id);
    follow(folder.path(), &refused, ONBOARDING, &["Fix: issue another token"], &given).await;
    let bundle = fs::read(folder.path().join("bootstrap-bundle.json")).unwrap();
    let bundle: wire::bundle::BootstrapBundle = serde_json::from_slice(&bundle).unwrap();
    cluster.register_secret("an enrollment token", bundle.enrollment_token.expose());
    let agent = FakeAgent::onboard(&bundle, 1).await;
    late.expect_state("active").await;
    // In contact until the end: an offline node has no free GPU.
    let heartbeats = tokio::spawn(async move {
        loop {
            agent.heartbeat().await;
            sleep(HEARTBEAT_INTERVAL).await;
        }
    });
    follow(folder.path(), &refused, ONBOARDING, &["Afterwards"], "").await;
    // It is a node with a free GPU: everything was sold.
    let fixed = follow(folder.path(), &full, CAPACITY, &["Afterwards"], "").await;
    assert!(fixed.contains("h100"), "{fixed}");
    alerts.expect("tickets", "GPUAASNoFreeGpus", false).await;

    for alert in [&not_stored, &not_accepted] {
        follow(folder.path(), alert, LOGS, &["Look here"], "").await;
    }
    store.answer(204, "");
    assert_eq!(collecting.push(&token, &batch).await.status, 204);
    for name in ["GPUAASEnrollmentRefusedSpike", "GPUAASNodeLogsNotStored"] {
        alerts.expect("tickets", name, false).await;
    }
    heartbeats.abort();
    cluster.shutdown().await;
}

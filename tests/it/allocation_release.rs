//! Failures of provisioning and release on a node, and how operators resolve them.

use crate::alerts::executed_runbooks::follow;
use crate::alerts::monitoring::{Monitoring, MonitoringOptions};
use crate::docs_recipes::{REFRESH, followed};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use tests::cluster::{AllocationHandle, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT};

fn allocation_request() -> Value {
    json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 })
}

#[tokio::test(flavor = "multi_thread")]
async fn allocation_that_cannot_be_provisioned_is_released_with_its_failure_and_cleaned_up() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node_with("h100", &["--simulate-failure", "provision"]).await;
    let allocation = cluster.rent("h100", 4).await;
    let released = allocation.expect_state("released").await;
    let failure = &released["failure"];
    assert_eq!(
        (failure["phase"].as_str(), failure["code"].as_str()),
        (Some("provisioning"), Some("simulated_failure"))
    );
    assert!(failure["retryable"] == true && failure["message"].is_string(), "{failure}");
    assert!(released["active_at"].is_null(), "{released}");
    assert_eq!(cluster.states_of(allocation.id).await, ["requested", "provisioning", "releasing", "released"]);
    node.expect_all_free().await;
    cluster.restart_agent_with_flags(&node, &[]).await;
    let after = cluster.rent_active("h100", 8).await;
    after.release_fully().await;
    cluster.allow_error("simulated_failure");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn allocation_that_is_not_provisioned_in_time_is_released_and_cleaned_up() {
    let mut cluster = TestCluster::builder().policy("allocation.provisioning_timeout_seconds", 5).start().await;
    // The resumed agent has a task that has expired.
    cluster.allow_error("task_expired");
    let node = cluster.node("h100").await;
    cluster.lose_agent(&node);
    let allocation = cluster.rent("h100", 4).await;
    allocation.expect_state("releasing").await;
    cluster.resume_agent(&node);
    let released = allocation.expect_state("released").await;
    assert_eq!(released["failure"]["code"], "provisioning_timeout", "{released}");
    node.expect_all_free().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_release_is_retried_until_the_node_is_fenced_and_an_operator_lifts_the_fence() {
    const STUCK_PAGE: &str = "runbooks/ops.provisioning.stuck.md";
    let mut cluster = two_attempts().await;
    let (node, allocation) = fence_node(&mut cluster).await;

    // The node takes no new tenant and gets no tasks; its agent logs why.
    let refused =
        cluster.other_user.request_until_final(Method::POST, "/api/v1/allocations", Some(&allocation_request())).await;
    refused.expect_error(409, "insufficient_capacity");
    let seen = node.get().await;
    assert_eq!(seen["gpus_free"], 0, "{seen}");
    expect_logged(&cluster, &node, "node_fenced").await;
    // Users may not retry it, and it needs a reason.
    let retry = format!("/api/v1/admin/allocations/{}/retry-release", allocation.id);
    cluster
        .user
        .request_until_final(Method::POST, &retry, Some(&json!({ "reason": "please" })))
        .await
        .expect_error(403, "forbidden");
    cluster
        .admin
        .request_until_final(Method::POST, &retry, Some(&json!({})))
        .await
        .expect_error(400, "invalid_request");
    node.order("retire").await.expect_error(409, "node_in_use");

    // An allocation that waits for an operator is past its deadline.
    let options = MonitoringOptions { hurried: &["provisioning.yaml"], ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;
    let stuck = alerts.expect("pager", "GPUAASEntitiesStuck", true).await;
    let folder = followed(&cluster);
    let seen = follow(folder.path(), &stuck, STUCK_PAGE, &["Look here"], "").await;
    assert!(seen.contains(&allocation.id.to_string()), "the page shows the allocation: {seen}");

    cluster.restart_agent_with_flags(&node, &[]).await;
    cluster.admin.post(&retry, &json!({ "reason": "the machine was repaired" })).await.accepted();
    let released = allocation.expect_state("released").await;
    let fixed = follow(folder.path(), &stuck, STUCK_PAGE, &["Afterwards"], "").await;
    assert!(!fixed.contains(&allocation.id.to_string()), "{fixed}");
    alerts.expect("pager", "GPUAASEntitiesStuck", false).await;
    assert!(released["failure"].is_null(), "{released}");
    let free = node.expect_all_free().await;
    assert_eq!(free["state"], "active", "{free}");
    let audited: Vec<_> = cluster.audit_of(allocation.id).await.into_iter().map(|(_, action, ..)| action).collect();
    assert!(audited.iter().any(|action| action == "allocations.retry_release"), "{audited:?}");
    cluster
        .admin
        .request_until_final(Method::POST, &retry, Some(&json!({ "reason": "again" })))
        .await
        .expect_error_envelope();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forced_release_quarantines_the_node_until_its_clean_up_proof() {
    let mut cluster = two_attempts().await;
    let (node, allocation) = fence_node(&mut cluster).await;
    let force = format!("/api/v1/admin/allocations/{}/force-release", allocation.id);
    cluster
        .admin
        .request_until_final(Method::POST, &force, Some(&json!({})))
        .await
        .expect_error(400, "invalid_request");
    cluster.admin.post(&force, &json!({ "reason": "the tenant is gone for good" })).await.accepted();
    let released = allocation.expect_state("released").await;
    assert!(released.to_string().contains("forced"), "{released}");
    node.expect_state("quarantined").await;
    let refused =
        cluster.other_user.request_until_final(Method::POST, "/api/v1/allocations", Some(&allocation_request())).await;
    refused.expect_error(409, "insufficient_capacity");

    // The node stays in quarantine until the proof.
    let early = node.order("release-quarantine").await;
    assert_eq!(early.status.as_u16() / 100, 4, "{early}");
    cluster.restart_agent_with_flags(&node, &[]).await;
    let until = std::time::Instant::now() + WAIT_TIMEOUT;
    loop {
        let answer = node.order("release-quarantine").await;
        if answer.status.is_success() {
            break;
        }
        assert!(std::time::Instant::now() < until, "{answer}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    node.expect_state("active").await;
    node.expect_all_free().await;
    let after = cluster.rent_active("h100", 8).await;
    after.release_fully().await;
    cluster.shutdown().await;
}

/// A cluster in which a clean-up is attempted twice, with a short backoff.
async fn two_attempts() -> TestCluster {
    let mut cluster = TestCluster::builder()
        .policy("allocation.release_max_attempts", 2)
        .policy("allocation.release_backoff_max_seconds", 1)
        .variable(REFRESH.0, REFRESH.1)
        .start()
        .await;
    cluster.allow_error("simulated_failure");
    cluster.allow_error("node_fenced");
    cluster
}

/// A node that is fenced after the last failed attempt to clean up its tenant.
async fn fence_node(cluster: &mut TestCluster) -> (NodeHandle, AllocationHandle) {
    let node = cluster.node_with("h100", &["--simulate-failure", "release"]).await;
    let allocation = cluster.rent_active("h100", 4).await;
    allocation.release().await;
    allocation.expect_state("release_failed").await;
    let exhausted = "SELECT count(*) FROM history WHERE entity = $1 AND kind = 'node' AND command = 'fence'";
    let until = std::time::Instant::now() + WAIT_TIMEOUT;
    loop {
        let fenced: i64 = sqlx::query_scalar(exhausted).bind(node.id).fetch_one(&cluster.pool).await.unwrap();
        if fenced > 0 {
            break;
        }
        assert!(std::time::Instant::now() < until, "the node was never fenced: {:#}", node.get().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let states = cluster.states_of(allocation.id).await;
    let expected =
        ["requested", "provisioning", "active", "releasing", "release_failed", "releasing", "release_failed"];
    assert_eq!(states, expected);
    (node, allocation)
}

/// Waits until the node's agent has logged this.
async fn expect_logged(cluster: &TestCluster, node: &NodeHandle, text: &str) {
    let until = std::time::Instant::now() + WAIT_TIMEOUT;
    while !cluster.agent_log(node).contains(text) {
        assert!(std::time::Instant::now() < until, "the agent never logged {text}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

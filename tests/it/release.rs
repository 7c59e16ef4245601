//! What does not go well on a node, and the ways out.

use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use tests::world::{OnboardedNode, PATIENCE, REGION, Rented, World};

fn wanted() -> Value {
    json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 })
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_provisioned_is_released_with_its_failure_and_the_node_is_clean() {
    let mut world = World::start().await;
    let node = world.node_with("h100", &["--simulate-failure", "provision"]).await;
    let allocation = world.rent("h100", 4).await;
    let released = allocation.expect_state("released").await;
    let failure = &released["failure"];
    assert_eq!(
        (failure["phase"].as_str(), failure["code"].as_str()),
        (Some("provisioning"), Some("simulated_failure"))
    );
    assert!(failure["retryable"] == true && failure["message"].is_string(), "{failure}");
    assert!(released["active_at"].is_null(), "{released}");
    assert_eq!(world.states_of(allocation.id).await, ["requested", "provisioning", "releasing", "released"]);
    node.expect_all_free().await;
    world.mend_agent(&node, &[]).await;
    let after = world.rent("h100", 8).await;
    after.expect_state("active").await;
    after.release().await;
    after.expect_state("released").await;
    world.expects_error("simulated_failure");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_provisioned_in_time_is_given_up_and_cleaned_up() {
    let mut world = World::plan().policy("allocation.provisioning_timeout_seconds", 5).start().await;
    // The agent wakes with a task in its hands that is over.
    world.expects_error("task_expired");
    let node = world.node("h100").await;
    world.lose_agent(&node);
    let allocation = world.rent("h100", 4).await;
    allocation.expect_state("releasing").await;
    world.find_agent(&node);
    let released = allocation.expect_state("released").await;
    assert_eq!(released["failure"]["code"], "provisioning_timeout", "{released}");
    node.expect_all_free().await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_release_is_tried_again_until_the_node_is_fenced_and_an_operator_lifts_that() {
    let mut world = two_attempts().await;
    let (node, allocation) = fenced(&mut world).await;

    // The node takes no new tenant and gets no work; its agent says why.
    let refused = world.other_user.once(Method::POST, "/api/v1/allocations", Some(&wanted())).await;
    refused.refused(409, "insufficient_capacity");
    let seen = node.get().await;
    assert_eq!(seen["gpus_free"], 0, "{seen}");
    expect_told(&world, &node, "node_fenced").await;
    // It is no way out for a user, and needs a reason.
    let retry = format!("/api/v1/admin/allocations/{}/retry-release", allocation.id);
    world.user.once(Method::POST, &retry, Some(&json!({ "reason": "please" }))).await.refused(403, "forbidden");
    world.admin.once(Method::POST, &retry, Some(&json!({}))).await.refused(400, "invalid_request");
    node.order("retire").await.refused(409, "node_in_use");

    world.mend_agent(&node, &[]).await;
    world.admin.post(&retry, &json!({ "reason": "the machine was repaired" })).await.accepted();
    let released = allocation.expect_state("released").await;
    assert!(released["failure"].is_null(), "{released}");
    let free = node.expect_all_free().await;
    assert_eq!(free["state"], "active", "{free}");
    let audited: Vec<_> = world.audit_of(allocation.id).await.into_iter().map(|(_, action, ..)| action).collect();
    assert!(audited.iter().any(|action| action == "allocations.retry_release"), "{audited:?}");
    world.admin.once(Method::POST, &retry, Some(&json!({ "reason": "again" }))).await.in_envelope();
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_by_force_quarantines_the_node_until_it_has_proved_that_it_is_clean() {
    let mut world = two_attempts().await;
    let (node, allocation) = fenced(&mut world).await;
    let force = format!("/api/v1/admin/allocations/{}/force-release", allocation.id);
    world.admin.once(Method::POST, &force, Some(&json!({}))).await.refused(400, "invalid_request");
    world.admin.post(&force, &json!({ "reason": "the tenant is gone for good" })).await.accepted();
    let released = allocation.expect_state("released").await;
    assert!(released.to_string().contains("forced"), "{released}");
    node.expect_state("quarantined").await;
    let refused = world.other_user.once(Method::POST, "/api/v1/allocations", Some(&wanted())).await;
    refused.refused(409, "insufficient_capacity");

    // Without the proof there is no way back; with it there is.
    let early = node.order("release-quarantine").await;
    assert_eq!(early.status.as_u16() / 100, 4, "{early}");
    world.mend_agent(&node, &[]).await;
    let until = std::time::Instant::now() + PATIENCE;
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
    let after = world.rent("h100", 8).await;
    after.expect_state("active").await;
    after.release().await;
    after.expect_state("released").await;
    world.end().await;
}

/// A world in which a clean-up may fail twice, quickly.
async fn two_attempts() -> World {
    let mut world = World::plan()
        .policy("allocation.release_max_attempts", 2)
        .policy("allocation.release_backoff_max_seconds", 1)
        .start()
        .await;
    world.expects_error("simulated_failure");
    world.expects_error("node_fenced");
    world
}

/// A node whose tenant could not be cleaned up as often as it may be tried.
async fn fenced(world: &mut World) -> (OnboardedNode, Rented) {
    let node = world.node_with("h100", &["--simulate-failure", "release"]).await;
    let allocation = world.rent("h100", 4).await;
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("release_failed").await;
    let exhausted = "SELECT count(*) FROM history WHERE entity = $1 AND kind = 'node' AND command = 'fence'";
    let until = std::time::Instant::now() + PATIENCE;
    loop {
        let fenced: i64 = sqlx::query_scalar(exhausted).bind(node.id).fetch_one(&world.pool).await.unwrap();
        if fenced > 0 {
            break;
        }
        assert!(std::time::Instant::now() < until, "the node was never fenced: {:#}", node.get().await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let states = world.states_of(allocation.id).await;
    let expected =
        ["requested", "provisioning", "active", "releasing", "release_failed", "releasing", "release_failed"];
    assert_eq!(states, expected);
    (node, allocation)
}

/// Waits until the node's agent logs this.
async fn expect_told(world: &World, node: &OnboardedNode, text: &str) {
    let until = std::time::Instant::now() + PATIENCE;
    while !world.agent_log(node).contains(text) {
        assert!(std::time::Instant::now() < until, "the agent was never told {text}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

//! Crashes and outages of any process at any time: nothing acknowledged is lost, no GPU is held twice, every saga ends.

use nix::sys::signal::Signal;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::{AllocationHandle, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, id_of};

/// Every commit of one allocation, in the order of the saga.
const STEPS: [(&str, &str); 11] = [
    ("allocation", "request"),
    ("tenant", "admit"),
    ("node", "reserve"),
    ("allocation", "reserved"),
    ("node", "provision"),
    ("node", "report"),
    ("allocation", "provisioned"),
    ("allocation", "release"),
    ("node", "clean"),
    ("allocation", "cleaned"),
    ("tenant", "forget"),
];

#[tokio::test(flavor = "multi_thread")]
async fn crash_of_a_single_replica_between_any_two_saga_steps_loses_nothing() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    cluster.delay_commits_by(Duration::from_millis(60)).await;
    for (kind, command) in STEPS {
        kill_after_step(&mut cluster, &node, kind, command, |_| 0, true).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_of_either_of_two_replicas_between_any_two_saga_steps_loses_nothing() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    cluster.delay_commits_by(Duration::from_millis(60)).await;
    for (turn, (kind, command)) in STEPS.into_iter().enumerate() {
        // The other replica continues the saga; the killed one restarts for the next round.
        kill_after_step(&mut cluster, &node, kind, command, |_| turn % 2, false).await;
    }
    cluster.shutdown().await;
}

/// Rents and releases; kills a replica as soon as this step is committed.
async fn kill_after_step(
    cluster: &mut TestCluster,
    node: &NodeHandle,
    kind: &str,
    command: &str,
    victim: impl Fn(&TestCluster) -> usize,
    at_once: bool,
) {
    let before = cluster.count_transitions(kind, command).await;
    let user = cluster.user.clone();
    let story = tokio::spawn(async move {
        let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 4 });
        let allocation = AllocationHandle::new(id_of(&user.post("/api/v1/allocations", &wanted).await.created()), user);
        allocation.expect_state("active").await;
        allocation.release_fully().await;
        allocation
    });
    let until = Instant::now() + WAIT_TIMEOUT;
    while cluster.count_transitions(kind, command).await == before {
        assert!(Instant::now() < until, "{kind} {command} was never committed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let victim = victim(cluster);
    cluster.kill9_replica(victim);
    cluster.expect_every_gpu_held_once().await;
    if at_once {
        cluster.restart_replica(victim).await;
    }
    let allocation = story.await.unwrap_or_else(|error| panic!("after the death at {kind} {command}: {error}"));
    if !at_once {
        cluster.restart_replica(victim).await;
    }
    assert_eq!(
        cluster.states_of(allocation.id).await,
        ["requested", "provisioning", "active", "releasing", "released"],
        "after the death at {kind} {command}"
    );
    node.expect_all_free().await;
    cluster.expect_settled().await;
    cluster.expect_every_gpu_held_once().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_crash_between_effect_and_result_completes_the_task_once() {
    let mut cluster = TestCluster::start().await;
    // Long enough for the two looks and the signal that precede the effect, on a machine that is busy.
    let node = cluster.node_with("h100", &["--simulate-provision-delay-ms", "6000"]).await;
    let allocation = cluster.rent("h100", 2).await;
    allocation.expect_state("provisioning").await;
    let written = || journal_text(&cluster, &node).unwrap_or_default();
    wait_until("the task is begun", || written().contains("\"started\"")).await;
    // The effect happens, and its result is not delivered.
    cluster.signal_replica(0, Signal::SIGSTOP);
    let home = cluster.agent_folder(&node).join(format!("state/allocations/{}/home", allocation.id));
    wait_until("the tenant has a home", || home.is_dir()).await;
    wait_until("the effect is noted", || written().contains("\"done\"")).await;
    assert!(!written().contains("\"reported\""), "{}", written());
    cluster.kill9_agent(&node);
    cluster.signal_replica(0, Signal::SIGCONT);
    cluster.restart_agent(&node);
    allocation.expect_state("active").await;
    let started = journal_text(&cluster, &node).unwrap().matches("\"event\":\"started\"").count();
    assert!(started <= 1, "the effect was begun {started} times");
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

/// The agent's journal; `None` before its first task.
fn journal_text(cluster: &TestCluster, node: &NodeHandle) -> Option<String> {
    std::fs::read_to_string(cluster.agent_folder(node).join("state/journal.jsonl")).ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_crash_during_the_effect_restarts_the_effect() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node_with("h100", &["--simulate-provision-delay-ms", "3000"]).await;
    let allocation = cluster.rent("h100", 2).await;
    wait_until("the task is begun", || journal_text(&cluster, &node).unwrap_or_default().contains("\"started\"")).await;
    cluster.kill9_agent(&node);
    cluster.restart_agent(&node);
    allocation.expect_state("active").await;
    allocation.release_fully().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn saga_completes_after_a_nats_outage() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node_with("h100", &["--simulate-provision-delay-ms", "1000"]).await;
    // The agent begins in the outage.
    cluster.lose_agent(&node);
    let allocation = cluster.rent("h100", 2).await;
    allocation.expect_state("provisioning").await;
    cluster.nats.kill9();
    cluster.resume_agent(&node);
    tokio::time::sleep(Duration::from_secs(4)).await;
    cluster.nats.start_again().await.unwrap();
    allocation.expect_state("active").await;
    cluster.nats.kill9();
    let answer = cluster.user.post(&format!("{}/release", allocation.path()), &json!({})).await;
    // It is accepted as soon as an owner is reachable, at the latest when NATS is back.
    assert_eq!(answer.status.as_u16(), 202, "{answer}");
    cluster.nats.start_again().await.unwrap();
    allocation.expect_state("released").await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_replica_serves_without_nats() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    cluster.nats.kill9();
    let allocation = cluster.rent_active("h100", 2).await;
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.nats.start_again().await.unwrap();
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn saga_completes_after_a_postgres_outage() {
    let mut cluster = TestCluster::builder().own_postgres().replicas(2).start().await;
    let node = cluster.node_with("h100", &["--simulate-provision-delay-ms", "1500"]).await;
    // The agent begins in the outage.
    cluster.lose_agent(&node);
    let allocation = cluster.rent("h100", 2).await;
    allocation.expect_state("provisioning").await;
    cluster.postgres.kill9().await;
    cluster.resume_agent(&node);
    tokio::time::sleep(Duration::from_secs(2)).await;
    cluster.postgres.start_again().await;
    allocation.expect_state("active").await;
    let acknowledged = cluster.history_of(allocation.id).await.len();
    cluster.postgres.kill9().await;
    cluster.postgres.start_again().await;
    assert!(cluster.history_of(allocation.id).await.len() >= acknowledged, "nothing acknowledged is lost");
    allocation.release_fully().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_postgres_outages_under_load_park_no_entity() {
    let mut cluster = TestCluster::builder().own_postgres().replicas(2).start().await;
    let node = cluster.node_with("h100", &["--simulate-provision-delay-ms", "500"]).await;
    let key = json!({ "name": "stormy", "public_key": tests::cluster::ssh_public_key("stormy") });
    let key = id_of(&cluster.user.post("/api/v1/ssh-keys", &key).await.created());
    let calm = Arc::new(AtomicBool::new(false));
    let storm: Vec<_> = (0..8)
        .map(|n| {
            let (user, admin, calm) = (cluster.user.clone(), cluster.admin.clone(), Arc::clone(&calm));
            let (default, node) = (format!("/api/v1/ssh-keys/{key}/default"), node.path());
            tokio::spawn(async move {
                // The response does not matter: the requests do not conflict with others.
                while !calm.load(Ordering::Relaxed) {
                    let port = json!({ "port": 22 + n });
                    let _ = user.try_send(user.request(reqwest::Method::POST, &default)).await;
                    let _ = admin.try_send(admin.request(reqwest::Method::PATCH, &node).json(&port)).await;
                }
            })
        })
        .collect();
    for _ in 0..3 {
        let allocation = cluster.rent("h100", 2).await;
        cluster.postgres.kill9().await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        cluster.postgres.start_again().await;
        allocation.expect_state("active").await;
        cluster.postgres.kill9().await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        cluster.postgres.start_again().await;
        allocation.release_fully().await;
    }
    calm.store(true, Ordering::Relaxed);
    futures::future::join_all(storm).await;
    node.expect_all_free().await;
    // The final checks assert that nothing is parked and no ERROR was logged.
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_heartbeats_goes_offline_keeps_its_allocation_and_returns() {
    let mut cluster = TestCluster::builder().policy("node.offline_after_seconds", 10).start().await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 2).await;
    cluster.lose_agent(&node);
    node.expect_state("offline").await;
    let is_warned = |it: &serde_json::Value| {
        let message = it["health"]["message"].as_str().unwrap_or_default();
        it["health"]["status"] == "warning" && message.contains("Its machine is offline")
    };
    let silent = cluster.user.wait_until(&allocation.path(), "its user is warned", is_warned).await;
    assert_eq!(silent["state"], "active", "silence alone releases nothing: {silent}");
    let other = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1 });
    let refused =
        cluster.other_user.request_until_final(reqwest::Method::POST, "/api/v1/allocations", Some(&other)).await;
    refused.expect_error(409, "insufficient_capacity");
    cluster.resume_agent(&node);
    node.expect_state("active").await;
    let is_well = |it: &serde_json::Value| it["health"].is_null();
    cluster.user.wait_until(&allocation.path(), "the machine is in contact again", is_well).await;
    allocation.release_fully().await;
    cluster.shutdown().await;
}

async fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < until, "not within {WAIT_TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

//! Placement from memory: the indexes of free GPUs of several replicas follow the commits of all of them, and one that is wrong costs no
//! request.

use futures::future::join_all;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::{AllocationHandle, REGION, TestCluster, WAIT_TIMEOUT, client::Client, id_of};

/// Indexes are compared with the database this often, and a request may wait for the check that has just begun.
const CHECKED_WITHIN: Duration = Duration::from_secs(17);

fn wanted(gpus: u32) -> Value {
    json!({ "sku": "h100", "region_code": REGION, "gpu_count": gpus })
}

async fn rent(user: &Client, gpus: u32) -> AllocationHandle {
    let created = user.post("/api/v1/allocations", &wanted(gpus)).await.created();
    AllocationHandle::new(id_of(&created), user.clone())
}

async fn wait_until_owned_by(admin: &Client, members: usize) {
    let what = format!("{members} members own everything");
    let owns = |member: &&Value| member["shards"].as_array().is_some_and(|shards| !shards.is_empty());
    admin
        .wait_until("/api/v1/admin/runtime/cluster", &what, |report| {
            report["unowned_shards"] == 0
                && report["members"].as_array().unwrap().iter().filter(owns).count() == members
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn indexes_of_two_replicas_lack_no_commit_of_either_when_they_are_checked() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let nodes = [cluster.node("h100").await, cluster.node("h100").await];
    for _ in 0..3 {
        let rented = [rent(&cluster.at_replica(0, "user"), 8).await, rent(&cluster.at_replica(1, "user"), 8).await];
        for allocation in &rented {
            allocation.expect_state("active").await;
            allocation.release().await;
        }
        for node in &nodes {
            node.expect_all_free().await;
        }
    }
    // A check finds what a message did not bring.
    tokio::time::sleep(CHECKED_WITHIN).await;
    for replica in 0..2 {
        assert_eq!(cluster.metrics_of(replica).await.number("provisioning_index_nodes"), 2.0);
        let differences = cluster.metrics_of(replica).await.number("provisioning_index_differences_total");
        let gaps = cluster.metrics_of(replica).await.number("provisioning_index_gaps_total");
        assert_eq!((differences, gaps), (0.0, 0.0), "replica {replica}");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_replica_refuses_no_request_for_what_was_released_meanwhile() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let node = cluster.node("h100").await;
    let (user, admin) = (cluster.at_replica(0, "user"), cluster.at_replica(0, "admin"));
    let before = rent(&user, 8).await;
    before.expect_state("active").await;
    cluster.signal_replica(1, Signal::SIGSTOP);
    wait_until_owned_by(&admin, 1).await;
    before.release().await;
    node.expect_all_free().await;
    cluster.signal_replica(1, Signal::SIGCONT);
    // Either replica may process the request: each has room for it, and for no second one.
    let after = rent(&user, 8).await;
    after.expect_state("active").await;
    user.post("/api/v1/allocations", &wanted(1)).await.expect_error(409, "insufficient_capacity");
    wait_until_owned_by(&admin, 2).await;
    after.release().await;
    node.expect_all_free().await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_requests_for_the_only_node_gets_it_and_the_others_are_refused() {
    const REQUESTS: usize = 60;
    let mut cluster =
        TestCluster::builder().replicas(2).policy("allocation.max_concurrent_per_user", 1000).start().await;
    let node = cluster.node("h100").await;
    let users = [cluster.at_replica(0, "user"), cluster.at_replica(1, "user")];
    let last = wanted(8);
    let began = Instant::now();
    let answers = join_all((0..REQUESTS).map(|n| users[n % 2].post("/api/v1/allocations", &last))).await;
    let took = began.elapsed();
    let (created, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!(created.len(), 1, "{:?}", refused.first());
    for answer in refused {
        answer.expect_error(409, "insufficient_capacity");
    }
    assert!(took < WAIT_TIMEOUT, "{took:?}");
    cluster.expect_every_gpu_held_once().await;
    assert_eq!(node.get().await["gpus_free"], 0);
    cluster.shutdown().await;
}

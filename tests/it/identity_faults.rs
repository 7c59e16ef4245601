//! Crashes of any process during an enrollment, a recovery, a rotation or a release: no node is cut off, and no tenant is left half set up.

use serde_json::json;
use std::fs;
use std::time::{Duration, Instant};
use tests::cluster::{AllocationHandle, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, id_of};

#[derive(Clone, Copy, Debug)]
enum Victim {
    Postgres,
    Nats,
    ControlPlane,
    Agent,
}

const VICTIMS: [Victim; 4] = [Victim::Postgres, Victim::Nats, Victim::ControlPlane, Victim::Agent];

async fn wait_for_commit(cluster: &TestCluster, command: &str, before: i64) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while cluster.count_transitions("node", command).await == before {
        assert!(Instant::now() < until, "{command} was never committed");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Kills the process with SIGKILL and restarts it after a moment.
async fn kill(cluster: &mut TestCluster, victim: Victim, node: &NodeHandle) {
    match victim {
        Victim::Postgres => {
            cluster.postgres.kill9().await;
            tokio::time::sleep(Duration::from_millis(300)).await;
            cluster.postgres.start_again().await;
        }
        Victim::Nats => {
            cluster.nats.kill9();
            tokio::time::sleep(Duration::from_millis(300)).await;
            cluster.nats.start_again().await.unwrap();
        }
        Victim::ControlPlane => {
            cluster.kill9_replica(0);
            cluster.restart_replica(0).await;
        }
        Victim::Agent => {
            cluster.kill9_agent(node);
            cluster.restart_agent(node);
        }
    }
}

async fn rent(cluster: &TestCluster, node: &NodeHandle) -> AllocationHandle {
    // After a crash the node may be offline until its agent's next heartbeat.
    let wanted =
        json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id, "queue_seconds": 60 });
    let allocation = AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created()),
        cluster.user.clone(),
    );
    allocation.expect_state("active").await;
    allocation
}

async fn expect_released(allocation: &AllocationHandle, node: &NodeHandle) {
    allocation.expect_state("released").await;
    node.expect_all_free().await;
}

async fn start_cluster() -> TestCluster {
    let cluster = TestCluster::builder().own_postgres().start().await;
    cluster.delay_commits_by(Duration::from_millis(40)).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn enrollment_completes_after_a_crash_of_any_process() {
    let mut cluster = start_cluster().await;
    for victim in VICTIMS {
        let before = cluster.count_transitions("node", "enroll").await;
        let (node, bundle) = cluster.registered("h100").await;
        cluster.start_agent(&node.name, &bundle);
        wait_for_commit(&cluster, "enroll", before).await;
        kill(&mut cluster, victim, &node).await;
        let seen = node.expect_state("active").await;
        assert_eq!(seen["state_reason"]["code"], "first_poll", "{victim:?}: {seen}");
        let allocation = rent(&cluster, &node).await;
        allocation.release().await;
        expect_released(&allocation, &node).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recovery_completes_after_a_crash_of_any_process_and_detects_no_clone() {
    let mut cluster = start_cluster().await;
    let node = cluster.node("h100").await;
    for victim in VICTIMS {
        let before = cluster.count_transitions("node", "recover").await;
        let folder = cluster.agent_folder(&node);
        cluster.kill9_agent(&node);
        for file in ["node.key", "node.pem"] {
            fs::remove_file(folder.join(file)).unwrap();
        }
        cluster.restart_agent(&node);
        wait_for_commit(&cluster, "recover", before).await;
        kill(&mut cluster, victim, &node).await;
        let allocation = rent(&cluster, &node).await;
        allocation.release().await;
        expect_released(&allocation, &node).await;
        node.expect_state("active").await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clean_up_completes_after_a_crash_of_any_process() {
    let mut cluster = start_cluster().await;
    let node = cluster.node("h100").await;
    for (victim, step) in VICTIMS.into_iter().flat_map(|victim| [(victim, "clean"), (victim, "report")]) {
        let allocation = rent(&cluster, &node).await;
        let before = cluster.count_transitions("node", step).await;
        allocation.release().await;
        wait_for_commit(&cluster, step, before).await;
        kill(&mut cluster, victim, &node).await;
        expect_released(&allocation, &node).await;
        cluster.expect_every_gpu_held_once().await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn authority_rotation_completes_after_a_crash_of_any_process_and_cuts_off_no_node() {
    let builder = TestCluster::builder()
        .own_postgres()
        .policy("keys.renewal_spread_seconds", 1)
        .policy("node.offline_after_seconds", 10);
    let mut cluster = builder.start().await;
    cluster.delay_commits_by(Duration::from_millis(40)).await;
    let node = cluster.node("h100").await;
    for victim in VICTIMS {
        let step = async |cluster: &TestCluster, step: &str, key: Option<&str>| {
            let mut body = json!({ "purpose": "node_ca", "reason": "a test wants it" });
            if let Some(key) = key {
                body["key_id"] = key.into();
            }
            cluster.admin.post(&format!("/api/v1/admin/keys/{step}"), &body).await
        };
        let keys = cluster.admin.get("/api/v1/admin/keys").await.ok();
        let set = keys["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == "node_ca").unwrap();
        let old = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == "active").unwrap();
        let old = old["key_id"].as_str().unwrap().to_owned();
        let new = step(&cluster, "stage", None).await.created()["key_id"].as_str().unwrap().to_owned();
        let before = cluster.count_transitions("node", "renew").await;
        step(&cluster, "activate", Some(&new)).await.ok();
        wait_for_commit(&cluster, "renew", before).await;
        kill(&mut cluster, victim, &node).await;
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let retired = step(&cluster, "retire", Some(&old)).await;
            if retired.status.is_success() {
                break;
            }
            assert!(Instant::now() < until, "{victim:?}: {retired}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let allocation = rent(&cluster, &node).await;
        allocation.release().await;
        expect_released(&allocation, &node).await;
        node.expect_state("active").await;
    }
    // Not even an agent that died before it had stored its new certificate: the old authority is needed until the agent uses that.
    assert!(!cluster.agent_log(&node).contains("\"recovered\""), "no node was cut off");
    cluster.shutdown().await;
}

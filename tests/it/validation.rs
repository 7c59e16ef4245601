//! Validations of machines in a running cluster: minimums of a SKU at every replica, and the hold that they give and take back.

use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use test_host::simulated_machine::validation_report;
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{GPUS, NodeHandle, TestCluster};
use uuid::Uuid;
use wire::task::{Task, TaskResult};
use wire::validation::LoadLevel;

/// Far below the 20 s after which a replica reads the minimums again without an invalidation.
const BEFORE_REFRESH: Duration = Duration::from_secs(4);

struct Bench {
    cluster: TestCluster,
    sku: String,
}

impl Bench {
    async fn new() -> Self {
        let mut cluster = TestCluster::builder().replicas(2).start().await;
        let sku = cluster.offer_sku("h100-fast", GPUS).await;
        Self { cluster, sku: format!("/api/v1/admin/skus/{sku}") }
    }

    /// Changes what the SKU wants of the disk, at this replica.
    async fn want(&self, replica: usize, validation: Value) {
        let admin = self.cluster.at_replica(replica, "admin");
        let body = json!({ "validation": validation });
        let changed = admin.send_once(Method::PATCH, &self.sku, Some(&body)).await.ok();
        assert_eq!(changed["validation"], validation);
        // No poll finds out whether every replica has read it.
        tokio::time::sleep(BEFORE_REFRESH).await;
    }

    async fn node(&mut self) -> (NodeHandle, FakeAgent) {
        let node = self.cluster.register("h100-fast").await;
        let bundle = self.cluster.bundle(&node).await;
        let agent = FakeAgent::enroll(&bundle, GPUS).await;
        agent.heartbeat().await.ok();
        (node, agent)
    }
}

/// The agent's next task is a validation of this level: it reports that it has measured this of the disk.
async fn measures(agent: &FakeAgent, level: LoadLevel, disk_read: u64) -> Uuid {
    let task = agent.next_task().await;
    let Task::Validate { load: Some(load) } = &task.task else { panic!("{task:?}") };
    assert_eq!(load.level, level);
    let output = validation_report("disk_read_mib_per_second", disk_read);
    let result = TaskResult { output, ..agent.success(&task) };
    agent.report(task.task_id, &result).await.ok();
    // Its answer was lost: the same result is recorded once.
    agent.report(task.task_id, &result).await.ok();
    task.task_id
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_below_a_minimum_is_held_before_its_first_tenant_and_active_after_it_passed() {
    let mut bench = Bench::new().await;
    bench.want(0, json!({ "disk_read_mib_per_second": 500 })).await;
    let (node, agent) = bench.node().await;
    node.expect_state("enrolling").await;
    measures(&agent, LoadLevel::Quick, 499).await;
    let held = node.expect_state("quarantined").await;
    let hold = &held["quarantine_holds"][0];
    assert_eq!((&hold["author"], held["gpus_free"].as_u64()), (&json!("validation"), Some(0)), "{held}");
    let message = hold["message"].as_str().unwrap();
    assert!(message.contains("disk_read_mib_per_second is 499, and the SKU wants at least 500"), "{message}");

    // The minimum was wrong; it is changed at the other replica, and the machine is validated again.
    bench.want(1, json!({ "disk_read_mib_per_second": 400 })).await;
    node.order("release-quarantine").await.ok();
    measures(&agent, LoadLevel::Quick, 499).await;
    let active = node.expect_all_free().await;
    assert_eq!((&active["validation"]["passed"], &active["quarantine_holds"]), (&json!(true), &json!([])), "{active}");
    bench.cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deep_validation_is_refused_beside_a_tenant_and_survives_the_crash_of_its_owner() {
    let mut bench = Bench::new().await;
    let (node, agent) = bench.node().await;
    node.expect_all_free().await;
    let admin = bench.cluster.at_replica(0, "admin");
    let path = format!("{}/validate", node.path());
    let body = json!({ "level": "deep", "reason": "a new disk" });
    let rented = bench.cluster.rent("h100-fast", GPUS).await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    rented.expect_state("active").await;
    admin.send_once(Method::POST, &path, Some(&body)).await.expect_error(409, "node_in_use");
    rented.release().await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    rented.expect_state("released").await;

    let ordered = admin.post(&path, &body).await.created();
    let owner = bench.cluster.owner_of("node", node.id).await;
    bench.cluster.kill9_replica(owner);
    bench.cluster.restart_replica(owner).await;
    let task_id = measures(&agent, LoadLevel::Deep, 1).await;
    assert_eq!(ordered["task_id"], json!(task_id));
    let known = node.expect_all_free().await["validation"].clone();
    assert_eq!((&known["level"], &known["passed"]), (&json!("deep"), &json!(true)));
    assert_eq!(known["measurements"], json!({ "disk_read_mib_per_second": 1 }));
    bench.cluster.shutdown().await;
}

//! Health findings in a running cluster: the deadline of an evacuation, repair by itself, and overrides of the table.

use reqwest::Method;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{AllocationHandle, GPUS, NodeHandle, TestCluster};
use wire::task::Task;

/// Far below the 20 s after which a replica reads the overrides again without an invalidation.
const BEFORE_REFRESH: Duration = Duration::from_secs(5);

/// A node whose agent reports what a test lets it find.
struct SickNode {
    node: NodeHandle,
    agent: Arc<FakeAgent>,
}

impl SickNode {
    async fn new(cluster: &mut TestCluster) -> Self {
        let node = cluster.register("h100").await;
        let bundle = cluster.bundle(&node).await;
        let agent = Arc::new(FakeAgent::onboard(&bundle, GPUS).await);
        let sick = Self { node, agent };
        sick.reports(&[]).await;
        sick
    }

    /// A heartbeat with these Xids, each on the GPU of that index.
    async fn reports(&self, xids: &[(u32, usize)]) {
        let mut body = self.agent.heartbeat_body();
        let at = body["sent_at"].clone();
        let finding = |&(code, gpu): &(u32, usize)| {
            json!({
                "probe": "xid",
                "gpu_uuid": body["inventory"]["gpus"][gpu]["uuid"],
                "code": code.to_string(),
                "count": 1,
                "first_at": at,
                "last_at": at,
                "boot_id": self.agent.boot_id,
                "detail": "a test",
            })
        };
        let findings: Vec<Value> = xids.iter().map(finding).collect();
        body["findings"] = json!(findings);
        self.agent.send(Method::POST, "heartbeat", Some(&body)).await.ok();
    }

    async fn rent(&self, cluster: &TestCluster) -> AllocationHandle {
        let rented = cluster.rent("h100", GPUS).await;
        let task = self.agent.next_task().await;
        self.agent.report(task.task_id, &self.agent.success(&task)).await.ok();
        rented.expect_state("active").await;
        rented
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_of_a_failing_gpu_is_released_at_the_deadline_across_a_crash_and_not_when_the_finding_is_cleared() {
    let mut cluster = TestCluster::builder().replicas(2).policy("node.evacuate_seconds", 15).start().await;
    let sick = SickNode::new(&mut cluster).await;
    let rented = sick.rent(&cluster).await;
    let user = cluster.user.clone();

    // The finding is cleared before the deadline: the tenant stays.
    sick.reports(&[(46, 0)]).await;
    let warned = user.wait_until(&rented.path(), "it is to be left", |it| it["health"]["release_at"].is_string()).await;
    assert!(warned["health"]["message"].as_str().unwrap().contains("needs maintenance"), "{warned}");
    let finding = sick.node.get().await["health"]["findings"][0]["id"].as_str().unwrap().to_owned();
    sick.node.order(&format!("findings/{finding}/clear")).await.ok();
    user.wait_until(&rented.path(), "it can stay", |it| it["health"].is_null()).await;

    // It is not: the allocation is released, although the owner of the node dies meanwhile.
    sick.reports(&[(46, 0), (109, 0)]).await;
    let warned = user.wait_until(&rented.path(), "it is to be left", |it| it["health"]["release_at"].is_string()).await;
    assert_eq!(warned["state"], "active", "the first deadline ended with the finding");
    let owner = cluster.owner_of("node", sick.node.id).await;
    cluster.kill9_replica(owner);
    cluster.restart_replica(owner).await;
    rented.expect_state_within(Duration::from_secs(60), "releasing").await;
    let task = sick.agent.next_task().await;
    sick.agent.report(task.task_id, &sick.agent.success(&task)).await.ok();
    let released = rented.expect_state_within(Duration::from_secs(60), "released").await;
    let at = |value: &Value| value.as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap();
    let history = released["status_history"].as_array().unwrap();
    let releasing = history.iter().find(|entry| entry["state"] == "releasing").unwrap();
    assert!(at(&releasing["at"]) >= at(&warned["health"]["release_at"]), "{released}");
    assert!(releasing["reason"].as_str().unwrap().contains("the time to leave has ended"), "{released}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_is_rebooted_and_validated_by_itself_and_waits_for_an_operator_when_that_fails() {
    let mut cluster = TestCluster::builder().policy("node.repair_attempts", 1).start().await;
    let sick = SickNode::new(&mut cluster).await;
    // No repair while its tenant is there.
    let rented = sick.rent(&cluster).await;
    sick.reports(&[(79, 0)]).await;
    sick.reports(&[(79, 0)]).await;
    assert!(sick.node.get().await["repair"].is_null());
    rented.release().await;
    let release = sick.agent.next_task().await;
    sick.agent.report(release.task_id, &sick.agent.success(&release)).await.ok();
    rented.expect_state("released").await;

    let ordered = async |findings: &[(u32, usize)]| {
        sick.reports(findings).await;
        let task = sick.agent.next_task().await;
        sick.agent.report(task.task_id, &sick.agent.success(&task)).await.ok();
        task.task
    };
    assert!(matches!(ordered(&[(79, 0)]).await, Task::Reboot(_)));
    assert!(matches!(ordered(&[]).await, Task::Validate { load: Some(_) }));
    sick.reports(&[]).await;
    let repaired = sick.node.expect_all_free().await;
    assert_eq!((&repaired["repair"]["phase"], &repaired["repair"]["attempts"]), (&json!("succeeded"), &json!(1)));

    // The fault is back: the one attempt of the day is used up.
    sick.reports(&[(79, 0)]).await;
    let waits = sick.node.get().await;
    assert_eq!((&waits["repair"]["phase"], &waits["overdue"]), (&json!("awaits_operator"), &json!(true)), "{waits}");
    assert_eq!(waits["gpus_free"], GPUS - 1);
    let finding = waits["health"]["findings"][0]["id"].as_str().unwrap().to_owned();
    sick.node.order(&format!("findings/{finding}/clear")).await.ok();
    sick.reports(&[(79, 0)]).await;
    assert!(sick.node.expect_all_free().await["repair"].is_null());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn override_of_a_health_rule_holds_at_every_replica_before_its_next_refresh() {
    let mut cluster = TestCluster::builder().replicas(3).start().await;
    let sick = SickNode::new(&mut cluster).await;
    sick.reports(&[(4711, 0)]).await;
    sick.node.expect_all_free().await;
    let owner = cluster.owner_of("node", sick.node.id).await;
    // Written at another replica than the one that judges the finding.
    let admin = cluster.at_replica((owner + 1) % 3, "admin");
    let rule = json!({ "pattern": "xid/47*", "classes": ["prevent_allocation"], "reason": "a new Xid" });
    admin.post("/api/v1/admin/health-rules", &rule).await.created();
    let free = async |wanted: u64| {
        let begun = std::time::Instant::now();
        while sick.node.get().await["gpus_free"] != wanted {
            assert!(begun.elapsed() < BEFORE_REFRESH, "{wanted} GPUs are not free in time");
            sick.reports(&[(4711, 0)]).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let gpus = u64::from(GPUS);
    free(gpus - 1).await;
    let of_tenants = json!({ "pattern": "xid/*", "classes": ["billing_credit"], "tenant_message": "m", "reason": "r" });
    admin.post("/api/v1/admin/health-rules", &of_tenants).await.expect_error(400, "invalid_request");
    let path = "/api/v1/admin/health-rules?pattern=xid/47*&reason=known";
    assert_eq!(admin.send_once(Method::DELETE, path, None).await.status, 204);
    free(gpus).await;
    cluster.shutdown().await;
}

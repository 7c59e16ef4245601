//! Health findings in a running cluster: the deadline of an evacuation, repair by itself, overrides of the table, and what tenants pay.

use crate::billing::{BALANCE, cost, expect_exact, expected_cost, expensive_sku, short_windows};
use chrono::{DateTime, Utc};
use reqwest::Method;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tests::cluster::client::Client;
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{AllocationHandle, GPUS, NodeHandle, TestCluster};
use wire::inventory::ExecutorKind;
use wire::task::Task;

/// For six changes of the overrides. Without an invalidation each one but the first takes 20 s, until a replica reads them again.
const ALL_CHANGES: Duration = Duration::from_secs(60);

/// A node whose agent reports what a test lets it find.
struct SickNode {
    node: NodeHandle,
    agent: Arc<FakeAgent>,
}

impl SickNode {
    async fn new(cluster: &mut TestCluster) -> Self {
        Self::of(cluster, "h100", ExecutorKind::Sandbox).await
    }

    /// A node of this SKU that isolates its tenants so.
    async fn of(cluster: &mut TestCluster, sku: &str, executor: ExecutorKind) -> Self {
        let node = cluster.register(sku).await;
        let bundle = cluster.bundle(&node).await;
        let mut agent = FakeAgent::onboard(&bundle, GPUS).await;
        agent.machine.executor = executor;
        let sick = Self { node, agent: Arc::new(agent) };
        sick.reports(&[]).await;
        sick
    }

    /// A heartbeat with these Xids, each on the GPU of that index.
    async fn reports(&self, xids: &[(u32, usize)]) {
        let now = Utc::now();
        self.sends(xids.iter().map(|&(code, gpu)| self.xid(code, gpu, 1, now)).collect()).await;
    }

    /// This Xid on the GPU of that index, so often since then.
    fn xid(&self, code: u32, gpu: usize, count: u64, first_at: DateTime<Utc>) -> Value {
        let body = self.agent.heartbeat_body();
        let last_at = if count == 1 { first_at } else { Utc::now() };
        json!({
            "probe": "xid",
            "gpu_uuid": body["inventory"]["gpus"][gpu]["uuid"],
            "code": code.to_string(),
            "count": count,
            "first_at": first_at,
            "last_at": last_at,
            "boot_id": self.agent.boot_id,
            "detail": "a test",
        })
    }

    /// A heartbeat with these findings.
    async fn sends(&self, findings: Vec<Value>) {
        let body = || {
            let mut body = self.agent.heartbeat_body();
            body["findings"] = json!(findings);
            body
        };
        self.agent.post_until_final("heartbeat", body).await.ok();
    }

    async fn rent(&self, cluster: &TestCluster, sku: &str, gpus: u32) -> AllocationHandle {
        let rented = cluster.rent(sku, gpus).await;
        let task = self.agent.next_task().await;
        self.agent.report(task.task_id, &self.agent.success(&task)).await.ok();
        rented.expect_state("active").await;
        rented
    }

    /// Its tenant leaves, and the agent proves the clean-up.
    async fn release(&self, rented: &AllocationHandle) -> Value {
        rented.release().await;
        let task = self.agent.next_task().await;
        self.agent.report(task.task_id, &self.agent.success(&task)).await.ok();
        rented.expect_state("released").await
    }
}

/// The index of the allocation's one GPU.
fn gpu_of(allocation: &Value) -> usize {
    let devices = allocation["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 1, "{allocation}");
    usize::try_from(devices[0]["index"].as_u64().unwrap()).unwrap()
}

fn time(value: &Value) -> DateTime<Utc> {
    value.as_str().unwrap_or_else(|| panic!("{value} is no time")).parse().unwrap()
}

async fn wait_until_charged_beyond(user: &Client, rented: &AllocationHandle, instant: DateTime<Utc>) {
    let is_charged = |it: &Value| it["billed_until"].is_string() && time(&it["billed_until"]) > instant;
    user.wait_until(&rented.path(), "it is charged", is_charged).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tenant_of_a_failing_gpu_is_released_at_the_deadline_across_a_crash_and_not_when_the_finding_is_cleared() {
    let mut cluster = TestCluster::builder().replicas(2).policy("node.evacuate_seconds", 3600).start().await;
    let sick = SickNode::new(&mut cluster).await;
    let rented = sick.rent(&cluster, "h100", GPUS).await;
    let user = cluster.user.clone();

    // The finding is cleared before the deadline: the tenant stays.
    sick.reports(&[(46, 0)]).await;
    let warned = user.wait_until(&rented.path(), "it is to be left", |it| it["health"]["release_at"].is_string()).await;
    assert!(warned["health"]["message"].as_str().unwrap().contains("needs maintenance"), "{warned}");
    let finding = sick.node.get().await["health"]["findings"][0]["id"].as_str().unwrap().to_owned();
    sick.node.order(&format!("findings/{finding}/clear")).await.ok();
    user.wait_until(&rented.path(), "it can stay", |it| it["health"].is_null()).await;

    // It is not: the allocation is released, although the owner of the node dies meanwhile.
    let first = warned["health"]["release_at"].clone();
    cluster.set_policy("node.evacuate_seconds", 15).await;
    sick.reports(&[(46, 0), (109, 0)]).await;
    let warned = user.wait_until(&rented.path(), "it is to be left", |it| it["health"]["release_at"].is_string()).await;
    assert_eq!(warned["state"], "active");
    let second = &warned["health"]["release_at"];
    assert!(time(second) < time(&first), "the first deadline ended with the finding: {warned}");
    let owner = cluster.owner_of("node", sick.node.id).await;
    cluster.kill9_replica(owner);
    cluster.restart_replica(owner).await;
    rented.expect_state_within(Duration::from_secs(120), "releasing").await;
    let task = sick.agent.next_task().await;
    sick.agent.report(task.task_id, &sick.agent.success(&task)).await.ok();
    let released = rented.expect_state_within(Duration::from_secs(60), "released").await;
    let at = |value: &Value| value.as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap();
    let history = released["status_history"].as_array().unwrap();
    let releasing = history.iter().find(|entry| entry["state"] == "releasing").unwrap();
    assert!(at(&releasing["at"]) >= at(&warned["health"]["release_at"]), "{released}");
    assert_eq!(releasing["reason"], "evacuated", "{released}");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_machine_is_rebooted_and_validated_by_itself_and_waits_for_an_operator_when_that_fails() {
    let builder = TestCluster::builder().policy("node.repair_attempts", 1);
    let mut cluster = builder.policy("node.repair_delay_seconds", 0).start().await;
    let sick = SickNode::new(&mut cluster).await;
    // No repair while its tenant is there.
    let rented = sick.rent(&cluster, "h100", GPUS).await;
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
    let path = "/api/v1/admin/health-rules?pattern=xid/47*&reason=known";
    let begun = std::time::Instant::now();
    let free = async |wanted: u64| {
        while sick.node.get().await["gpus_free"] != wanted {
            assert!(begun.elapsed() < ALL_CHANGES, "{wanted} GPUs are not free after {:?}", begun.elapsed());
            sick.reports(&[(4711, 0)]).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let gpus = u64::from(GPUS);
    for _ in 0..3 {
        admin.post("/api/v1/admin/health-rules", &rule).await.created();
        free(gpus - 1).await;
        assert_eq!(admin.send_once(Method::DELETE, path, None).await.status, 204);
        free(gpus).await;
    }
    let of_tenants = json!({ "pattern": "xid/*", "classes": ["billing_credit"], "tenant_message": "m", "reason": "r" });
    admin.post("/api/v1/admin/health-rules", &of_tenants).await.expect_error(400, "invalid_request");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn crash_loop_of_a_tenant_is_charged_in_full_and_a_failed_gpu_ends_its_own_meter_at_the_fault() {
    /// Of one GPU, in minor units an hour.
    const RATE: i64 = 36_000;
    let mut cluster = short_windows().policy("node.repair_attempts", 0).start().await;
    expensive_sku(&mut cluster).await;
    cluster.credit("user", 90_000).await;
    let sick = SickNode::of(&mut cluster, "dear", ExecutorKind::System).await;
    let looping = sick.rent(&cluster, "dear", 1).await;
    let failing = sick.rent(&cluster, "dear", 1).await;
    let neighbour = sick.rent(&cluster, "dear", 1).await;
    let user = cluster.user.clone();
    let (loops_on, fails_on) = (gpu_of(&looping.get().await), gpu_of(&failing.get().await));

    // A program that accesses an invalid address, again and again.
    let begun = Utc::now();
    for count in 1..=3 {
        let reported_at = Utc::now();
        sick.sends(vec![sick.xid(31, loops_on, count, begun)]).await;
        wait_until_charged_beyond(&user, &looping, reported_at).await;
    }
    // A GPU falls off the bus, which is reported when time after it is charged already.
    let fault_at = Utc::now();
    wait_until_charged_beyond(&user, &failing, fault_at).await;
    let sent_at = Utc::now();
    sick.sends(vec![sick.xid(31, loops_on, 4, begun), sick.xid(79, fails_on, 1, fault_at)]).await;
    let latest = Utc::now() - (sent_at - fault_at);
    user.wait_until(BALANCE, "one meter has ended", |it| it["running"] == 2).await;
    let reported_at = Utc::now();
    sick.sends(vec![sick.xid(31, loops_on, 5, begun), sick.xid(79, fails_on, 1, fault_at)]).await;
    for charged in [&looping, &neighbour] {
        wait_until_charged_beyond(&user, charged, reported_at).await;
    }
    let node = sick.node.expect_state("active").await;
    let findings = node["health"]["findings"].as_array().unwrap();
    let crashes = findings.iter().find(|finding| finding["code"] == "31").unwrap();
    assert_eq!((&crashes["count"], &crashes["classes"]), (&json!(5), &json!(["warn"])), "{crashes}");
    let shown = neighbour.get().await;
    assert_eq!((&shown["state"], &shown["health"]), (&json!("active"), &Value::Null), "{shown}");

    let mut ended = Vec::new();
    for rented in [&failing, &looping, &neighbour] {
        ended.push(sick.release(rented).await);
    }
    user.wait_until(BALANCE, "nothing runs", |it| it["running"] == 0).await;
    let all = expect_exact(&user).await;
    for (rented, released) in [&looping, &neighbour].into_iter().zip(&ended[1..]) {
        assert_eq!(cost(&all, rented.id), (expected_cost(released, RATE), 0), "to the millionth: {released}");
    }
    // By the service's clock the fault is as long ago as the agent says when it reports it.
    let audited = cluster.audit_of(failing.id).await;
    let (.., fault, _) = audited.iter().find(|(_, action, ..)| action == "allocations.fault").unwrap();
    let (active_at, ended_at) = (time(&ended[0]["active_at"]), time(&fault["at"]));
    assert!((fault_at..=latest).contains(&ended_at), "{fault_at} to {latest}: {fault}");
    let used = ended_at.timestamp_micros() - active_at.timestamp_micros();
    assert_eq!(cost(&all, failing.id), (RATE * used / 3600, 0), "to the millionth, and not after the fault: {fault}");
    cluster.shutdown().await;
}

//! The lifecycle of a node as its operator sees it: machines that do not match their SKU, that are drained, that are rebooted, and tasks
//! that wait for an operator.

use crate::alerts::monitoring::{Monitoring, MonitoringOptions};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{AllocationHandle, GPUS, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, id_of};
use uuid::Uuid;
use wire::task::{Task, TaskPayload};

fn allocation_request(node: &NodeHandle) -> Value {
    json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id })
}

async fn rent(cluster: &TestCluster, node: &NodeHandle) -> AllocationHandle {
    AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &allocation_request(node)).await.created()),
        cluster.user.clone(),
    )
}

/// Asserts the reason that an operator sees at the node and in the entity tree.
async fn expect_reason(cluster: &TestCluster, node: &NodeHandle, state: &str, code: &str, words: &str) {
    let says = |seen: &Value| {
        seen["state"] == state
            && seen["state_reason"]["code"] == code
            && seen["state_reason"]["message"].as_str().is_some_and(|message| message.contains(words))
    };
    cluster.admin.wait_until(&node.path(), &format!("{} is {state}: {code}, {words}", node.name), says).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_does_not_match_its_sku_shows_why_and_is_active_once_it_matches() {
    let mut cluster = TestCluster::start().await;
    cluster.offer_sku("h100", GPUS).await;
    let (node, bundle) = cluster.registered("h100").await;
    cluster.start_agent_on(&node.name, &bundle, |machine| machine.gpus.model = "A100".to_owned());
    expect_reason(&cluster, &node, "enrolling", "inventory_mismatch", "is a A100, the SKU promises H100").await;
    let path = format!("/api/v1/admin/runtime/entities/node/{}", node.id);
    let entity = cluster.admin.get(&path).await.ok();
    assert!(entity.to_string().contains("is a A100, the SKU promises H100"), "{entity}");
    let refused = cluster.user.send_once(Method::POST, "/api/v1/allocations", Some(&allocation_request(&node))).await;
    refused.expect_error(409, "insufficient_capacity");

    cluster.reconfigure_agent(&node, |machine| (machine.gpus.model, machine.gpus.count) = ("H100".to_owned(), 7)).await;
    expect_reason(&cluster, &node, "enrolling", "inventory_mismatch", "has 8 GPUs, the machine reports 7").await;
    cluster.reconfigure_agent(&node, |machine| (machine.gpus.count, machine.gpus.memory_mib) = (8, 40_960)).await;
    expect_reason(&cluster, &node, "enrolling", "inventory_mismatch", "has 40960 MiB of memory").await;
    cluster.reconfigure_agent(&node, |machine| machine.gpus.memory_mib = 81_000).await;
    expect_reason(&cluster, &node, "active", "first_poll", "the inventory matches").await;

    // A node that changes later is quarantined, and its tenant stays.
    let allocation = rent(&cluster, &node).await;
    allocation.expect_state("active").await;
    cluster.reconfigure_agent(&node, |machine| machine.gpus.model = "H100 PCIe".to_owned()).await;
    expect_reason(&cluster, &node, "quarantined", "inventory_drift", "is a H100 PCIe").await;
    assert_eq!(allocation.get().await["state"], "active");
    let early = node.order("release-quarantine").await;
    assert!(
        early.expect_error(409, "state_conflict").body["message"].as_str().unwrap().contains("H100 PCIe"),
        "{early}"
    );
    cluster.reconfigure_agent(&node, |machine| machine.gpus.model = "H100".to_owned()).await;
    // The hold ends with its cause.
    node.expect_state("active").await;
    allocation.release_fully().await;
    cluster.shutdown().await;
}

/// Waits for the end of the node's agent.
async fn exit_code_of_agent(cluster: &mut TestCluster, node: &NodeHandle) -> i32 {
    let until = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(code) = cluster.agent_exit_code(node) {
            return code;
        }
        assert!(Instant::now() < until, "the agent of a removed node does not end:\n{}", cluster.agent_log(node));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_node_keeps_its_tenant_to_the_end_and_then_gets_nothing() {
    let mut cluster = TestCluster::start().await;
    cluster.allow_error("node_removed");
    let node = cluster.node("h100").await;
    let allocation = rent(&cluster, &node).await;
    allocation.expect_state("active").await;
    node.order("retire").await.expect_error(409, "node_in_use");
    node.order("remove").await.expect_error(400, "invalid_request");
    let drain = json!({ "reason": "it leaves", "drain": true });
    cluster.admin.post(&format!("{}/retire", node.path()), &drain).await.ok();
    let draining = node.expect_state("draining").await;
    assert_eq!(draining["unschedulable_reason"], "it is draining", "{draining}");
    cluster
        .user
        .send_once(Method::POST, "/api/v1/allocations", Some(&allocation_request(&node)))
        .await
        .expect_error(409, "insufficient_capacity");
    assert_eq!(allocation.get().await["state"], "active");
    allocation.release_fully().await;
    expect_reason(&cluster, &node, "retired", "drained", "the node is retired").await;
    // Its agent keeps running, and the node may be activated again.
    node.order("reactivate").await.accepted();
    node.expect_state("active").await;
    node.order("retire").await.accepted();
    node.order("remove").await.accepted();
    node.expect_state("removed").await;
    assert_eq!(exit_code_of_agent(&mut cluster, &node).await, 4);
    cluster.restart_agent(&node);
    assert_eq!(exit_code_of_agent(&mut cluster, &node).await, 4, "and gets nothing when it is started again");
    cluster.forget_agent(&node);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rebooted_machine_keeps_its_allocation() {
    let mut cluster = TestCluster::start().await;
    let (node, bundle) = cluster.registered("h100").await;
    let mut agent = FakeAgent::onboard(&bundle, GPUS).await;
    let allocation = rent(&cluster, &node).await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    allocation.expect_state("active").await;
    let before = std::mem::replace(&mut agent.machine.boot_id, Uuid::new_v4());
    agent.heartbeat().await.ok();
    assert_eq!(allocation.get().await["state"], "active");
    assert_eq!(node.get().await["agent"]["boot_id"], agent.boot_id.to_string());
    let audited = cluster.audit_of(node.id).await;
    let restart = audited.iter().find(|(_, action, ..)| action == "nodes.restart").expect("a restart is audited");
    assert_eq!(restart.2["old_boot_id"], before.to_string());
    // The clean-up proof names the boot in which it was made.
    allocation.release().await;
    let task = agent.next_task().await;
    let new_boot = std::mem::replace(&mut agent.machine.boot_id, before);
    let stale = agent.success(&task);
    agent.machine.boot_id = new_boot;
    agent.report(task.task_id, &stale).await.ok();
    let says = |seen: &Value| seen["unschedulable_reason"].as_str().is_some_and(|why| why.contains("another boot"));
    cluster.admin.wait_until(&node.path(), "the node shows why it takes no tenant", says).await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    allocation.expect_state("released").await;
    assert_eq!(node.expect_all_free().await["unschedulable_reason"], Value::Null);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reboot_without_a_result_waits_for_an_operator_and_diagnostics_do_not() {
    let mut cluster = TestCluster::builder().policy("node.task_timeout_seconds", 5).start().await;
    let options = MonitoringOptions { hurried: &["node-onboarding.yaml"], ..MonitoringOptions::default() };
    let monitoring = Monitoring::start_with(&cluster, &options).await;
    let alerts = &monitoring.alertmanager;
    let (node, bundle) = cluster.registered("h100").await;
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
    let tasks = format!("{}/tasks", node.path());
    let order = async |task_type: &str| {
        let body = json!({ "type": task_type, "reason": "a test" });
        cluster.admin.post(&tasks, &body).await.created()
    };
    for (task_type, code) in [("allocation.release", "invalid_request"), ("node.sing", "invalid_request")] {
        let body = json!({ "type": task_type, "reason": "a test" });
        cluster.admin.send_once(Method::POST, &tasks, Some(&body)).await.expect_error(400, code);
    }
    let reboot = order("node.reboot").await;
    let started = agent.next_task().await;
    assert!(matches!(&started.task, Task::Reboot(reboot) if reboot.boot_id == agent.boot_id), "{started:?}");
    let resume = format!("{tasks}/{}/resume", started.task_id);
    let why = json!({ "reason": "I looked: it did not restart" });
    cluster.admin.send_once(Method::POST, &resume, Some(&why)).await.expect_error(409, "state_conflict");
    // The agent does not report on it.
    let waits = |seen: &Value| seen["open"][0]["state"] == "awaits_operator" && seen["open"][0]["overdue"] == true;
    cluster.admin.wait_until(&tasks, "the restart waits for an operator", waits).await;
    assert_eq!(node.get().await["overdue"], true);
    let tree = cluster.admin.get("/api/v1/admin/runtime/tree?kind=node&overdue=true").await.ok();
    assert!(tree.to_string().contains("look and resume it"), "{tree}");
    let overdue = alerts.expect("tickets", "GPUAASNodeOverdue", true).await;
    assert_eq!(overdue.runbook, "ops.node.onboarding");
    agent.heartbeat().await.ok();
    assert!(agent.wait(2).await.is_none(), "it is not offered again by itself");
    cluster.user.send_once(Method::POST, &resume, Some(&why)).await.expect_error(403, "forbidden");
    let elsewhere = format!("{tasks}/{}/resume", Uuid::now_v7());
    cluster.admin.send_once(Method::POST, &elsewhere, Some(&why)).await.expect_error(404, "not_found");
    let resumed = cluster.admin.post(&resume, &why).await.ok();
    assert_eq!(
        (&resumed["task_id"], &resumed["attempt"], &resumed["state"]),
        (&reboot["task_id"], &json!(2), &json!("open"))
    );
    let repeated = agent.next_task().await;
    assert_eq!((repeated.task_id, repeated.attempt), (started.task_id, 2));
    agent.report(started.task_id, &agent.success(&started)).await.expect_error(409, "stale_attempt");
    agent.report(repeated.task_id, &agent.success(&repeated)).await.ok();
    assert_eq!(
        agent.report(repeated.task_id, &agent.success(&repeated)).await.status.as_u16() / 100,
        4,
        "another result"
    );
    assert_eq!(node.get().await["overdue"], false);

    // A task that may be executed twice is retried by itself.
    order("diagnostics.collect").await;
    let first = agent.next_task().await;
    let second: TaskPayload = agent.next_task().await;
    assert_eq!((second.task_id, second.attempt), (first.task_id, 2));
    agent.report(second.task_id, &agent.success(&second)).await.ok();
    let audited = cluster.audit_of(node.id).await;
    for action in ["nodes.order_task", "nodes.stall_task", "nodes.resume_task"] {
        assert!(audited.iter().any(|(_, audited, ..)| audited == action), "no {action}");
    }
    alerts.expect("tickets", "GPUAASNodeOverdue", false).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_reports_the_state_of_its_machine_and_refuses_unsupported_tasks() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.node("h100").await;
    let tasks = format!("{}/tasks", node.path());
    for task_type in ["node.validate", "diagnostics.collect", "node.reboot"] {
        cluster.admin.post(&tasks, &json!({ "type": task_type, "reason": "a test" })).await.created();
    }
    let ended = |seen: &Value| seen["ended"].as_array().is_some_and(|ended| ended.len() == 3);
    let seen = cluster.admin.wait_until(&tasks, "all three have ended", ended).await;
    let of = |task_type: &str| {
        let found = seen["ended"].as_array().unwrap().iter().find(|task| task["type"] == task_type);
        found.unwrap_or_else(|| panic!("no {task_type} in {seen}")).clone()
    };
    assert_eq!(of("node.validate")["succeeded"], true);
    let diagnosed = of("diagnostics.collect");
    assert_eq!(diagnosed["output"]["gpus"].as_array().map(Vec::len), Some(GPUS as usize), "{diagnosed}");
    assert_eq!(of("node.reboot")["error"]["code"], "unsupported");
    assert_eq!(node.get().await["state"], "active");
    cluster.shutdown().await;
}

//! A node's life as its operator lives it: machines that are not what they should be, that leave, that were started anew, and work that
//! waits for somebody to look.

use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tests::world::hand::HandAgent;
use tests::world::{GPUS, OnboardedNode, PATIENCE, REGION, Rented, World, id_of};
use uuid::Uuid;
use wire::task::{Task, TaskPayload};

fn wanted(node: &OnboardedNode) -> Value {
    json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id })
}

async fn rent(world: &World, node: &OnboardedNode) -> Rented {
    Rented::new(id_of(&world.user.post("/api/v1/allocations", &wanted(node)).await.created()), world.user.clone())
}

/// What an operator reads at the node, and in the tree.
async fn expect_reason(world: &World, node: &OnboardedNode, state: &str, code: &str, words: &str) {
    let says = |seen: &Value| {
        seen["state"] == state
            && seen["state_reason"]["code"] == code
            && seen["state_reason"]["message"].as_str().is_some_and(|message| message.contains(words))
    };
    world.admin.wait_until(&node.path(), &format!("{} is {state}: {code}, {words}", node.name), says).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_is_not_what_its_sku_promises_is_active_when_it_is_and_says_why_until_then() {
    let mut world = World::start().await;
    world.offer("h100", GPUS).await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    world.start_agent_on(&node.name, &bundle, |machine| machine.gpus.model = "A100".to_owned());
    expect_reason(&world, &node, "enrolling", "inventory_mismatch", "is a A100, the SKU promises H100").await;
    let path = format!("/api/v1/admin/runtime/entities/node/{}", node.id);
    let entity = world.admin.get(&path).await.ok();
    assert!(entity.to_string().contains("is a A100, the SKU promises H100"), "{entity}");
    let refused = world.user.once(Method::POST, "/api/v1/allocations", Some(&wanted(&node))).await;
    refused.refused(409, "insufficient_capacity");

    world.change_agent(&node, |machine| (machine.gpus.model, machine.gpus.count) = ("H100".to_owned(), 7)).await;
    expect_reason(&world, &node, "enrolling", "inventory_mismatch", "has 8 GPUs, the machine reports 7").await;
    world.change_agent(&node, |machine| (machine.gpus.count, machine.gpus.memory_mib) = (8, 40_960)).await;
    expect_reason(&world, &node, "enrolling", "inventory_mismatch", "has 40960 MiB of memory").await;
    world.change_agent(&node, |machine| machine.gpus.memory_mib = 81_000).await;
    expect_reason(&world, &node, "active", "first_poll", "the inventory matches").await;

    // A machine that changes later is taken out of rent, and its tenant stays.
    let allocation = rent(&world, &node).await;
    allocation.expect_state("active").await;
    world.change_agent(&node, |machine| machine.gpus.model = "H100 PCIe".to_owned()).await;
    expect_reason(&world, &node, "quarantined", "inventory_drift", "is a H100 PCIe").await;
    assert_eq!(allocation.get().await["state"], "active");
    let early = node.order("release-quarantine").await;
    assert!(early.refused(409, "state_conflict").body["message"].as_str().unwrap().contains("H100 PCIe"), "{early}");
    world.change_agent(&node, |machine| machine.gpus.model = "H100".to_owned()).await;
    let until = Instant::now() + PATIENCE;
    while !node.order("release-quarantine").await.status.is_success() {
        assert!(Instant::now() < until, "it stays in quarantine: {:#}", node.get().await);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    node.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_must_leave_keeps_its_tenant_to_the_end_and_then_gets_nothing() {
    let mut world = World::start().await;
    world.expects_error("node_removed");
    let node = world.node("h100").await;
    let allocation = rent(&world, &node).await;
    allocation.expect_state("active").await;
    node.order("retire").await.refused(409, "node_in_use");
    node.order("remove").await.refused(400, "invalid_request");
    let drain = json!({ "reason": "it leaves", "drain": true });
    world.admin.post(&format!("{}/retire", node.path()), &drain).await.ok();
    let draining = node.expect_state("draining").await;
    assert_eq!(draining["unschedulable_reason"], "it is draining", "{draining}");
    world
        .user
        .once(Method::POST, "/api/v1/allocations", Some(&wanted(&node)))
        .await
        .refused(409, "insufficient_capacity");
    assert_eq!(allocation.get().await["state"], "active");
    allocation.release().await;
    allocation.expect_state("released").await;
    expect_reason(&world, &node, "retired", "drained", "the node is retired").await;
    // Its agent lives on, and it may come back.
    node.order("reactivate").await.accepted();
    node.expect_state("active").await;
    node.order("retire").await.accepted();
    node.order("remove").await.accepted();
    node.expect_state("removed").await;
    let until = Instant::now() + PATIENCE;
    while world.agent_ended(&node).is_none() {
        assert!(Instant::now() < until, "the agent of a removed node ends");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(world.agent_ended(&node), Some(4));
    world.restart_agent(&node);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.agent_ended(&node), Some(4), "and gets nothing when it is started again");
    world.forget_agent(&node);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_was_started_anew_keeps_its_allocation() {
    let mut world = World::start().await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let mut agent = HandAgent::onboard(&bundle, GPUS).await;
    let allocation = rent(&world, &node).await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    allocation.expect_state("active").await;
    let before = std::mem::replace(&mut agent.boot_id, Uuid::new_v4());
    agent.heartbeat().await.ok();
    assert_eq!(allocation.get().await["state"], "active");
    assert_eq!(node.get().await["agent"]["boot_id"], agent.boot_id.to_string());
    let audited = world.audit_of(node.id).await;
    let restart = audited.iter().find(|(_, action, ..)| action == "nodes.restart").expect("a restart is audited");
    assert_eq!(restart.2["boot_id_before"], before.to_string());
    // The proof is of the boot that it was given in.
    allocation.release().await;
    let task = agent.next_task().await;
    let new_boot = std::mem::replace(&mut agent.boot_id, before);
    let stale = agent.success(&task);
    agent.boot_id = new_boot;
    agent.report(task.task_id, &stale).await.ok();
    let says = |seen: &Value| seen["unschedulable_reason"].as_str().is_some_and(|why| why.contains("another boot"));
    world.admin.wait_until(&node.path(), "the node says why it takes nobody", says).await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    allocation.expect_state("released").await;
    assert_eq!(node.expect_all_free().await["unschedulable_reason"], Value::Null);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_that_nobody_reported_on_waits_for_an_operator_and_diagnostics_do_not() {
    let mut world = World::plan().policy("node.task_timeout_seconds", 5).start().await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let agent = HandAgent::onboard(&bundle, GPUS).await;
    let tasks = format!("{}/tasks", node.path());
    let order = async |task_type: &str| {
        let body = json!({ "type": task_type, "reason": "a test" });
        world.admin.post(&tasks, &body).await.created()
    };
    for (task_type, code) in [("allocation.release", "invalid_request"), ("node.sing", "invalid_request")] {
        let body = json!({ "type": task_type, "reason": "a test" });
        world.admin.once(Method::POST, &tasks, Some(&body)).await.refused(400, code);
    }
    let reboot = order("node.reboot").await;
    let begun = agent.next_task().await;
    assert!(matches!(&begun.task, Task::Reboot(reboot) if reboot.boot_id == agent.boot_id), "{begun:?}");
    let resume = format!("{tasks}/{}/resume", begun.task_id);
    let why = json!({ "reason": "I looked: it did not restart" });
    world.admin.once(Method::POST, &resume, Some(&why)).await.refused(409, "state_conflict");
    // The agent says nothing of it.
    let waits = |seen: &Value| seen["open"][0]["state"] == "awaits_operator" && seen["open"][0]["overdue"] == true;
    world.admin.wait_until(&tasks, "the restart waits for an operator", waits).await;
    assert_eq!(node.get().await["overdue"], true);
    let tree = world.admin.get("/api/v1/admin/runtime/tree?kind=node&overdue=true").await.ok();
    assert!(tree.to_string().contains("look and resume it"), "{tree}");
    assert!(agent.wait(2).await.is_none(), "it is not offered again by itself");
    world.user.once(Method::POST, &resume, Some(&why)).await.refused(403, "forbidden");
    let elsewhere = format!("{tasks}/{}/resume", Uuid::now_v7());
    world.admin.once(Method::POST, &elsewhere, Some(&why)).await.refused(404, "not_found");
    let resumed = world.admin.post(&resume, &why).await.ok();
    assert_eq!(
        (&resumed["task_id"], &resumed["attempt"], &resumed["state"]),
        (&reboot["task_id"], &json!(2), &json!("open"))
    );
    let again = agent.next_task().await;
    assert_eq!((again.task_id, again.attempt), (begun.task_id, 2));
    agent.report(begun.task_id, &agent.success(&begun)).await.refused(409, "stale_attempt");
    agent.report(again.task_id, &agent.success(&again)).await.ok();
    assert_eq!(agent.report(again.task_id, &agent.success(&again)).await.status.as_u16() / 100, 4, "another result");
    assert_eq!(node.get().await["overdue"], false);

    // What may happen twice comes again by itself.
    order("diagnostics.collect").await;
    let first = agent.next_task().await;
    let second: TaskPayload = agent.next_task().await;
    assert_eq!((second.task_id, second.attempt), (first.task_id, 2));
    agent.report(second.task_id, &agent.success(&second)).await.ok();
    let audited = world.audit_of(node.id).await;
    for action in ["nodes.order_task", "nodes.stall_task", "nodes.resume_task"] {
        assert!(audited.iter().any(|(_, audited, ..)| audited == action), "no {action}");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_agent_says_how_its_machine_stands_and_refuses_what_it_cannot_do() {
    let mut world = World::start().await;
    let node = world.node("h100").await;
    let tasks = format!("{}/tasks", node.path());
    for task_type in ["node.validate", "diagnostics.collect", "node.reboot"] {
        world.admin.post(&tasks, &json!({ "type": task_type, "reason": "a test" })).await.created();
    }
    let ended = |seen: &Value| seen["ended"].as_array().is_some_and(|ended| ended.len() == 3);
    let seen = world.admin.wait_until(&tasks, "all three have ended", ended).await;
    let of = |task_type: &str| {
        let found = seen["ended"].as_array().unwrap().iter().find(|task| task["type"] == task_type);
        found.unwrap_or_else(|| panic!("no {task_type} in {seen}")).clone()
    };
    assert_eq!(of("node.validate")["succeeded"], true);
    let diagnosed = of("diagnostics.collect");
    assert_eq!(diagnosed["output"]["gpus"].as_array().map(Vec::len), Some(GPUS as usize), "{diagnosed}");
    assert_eq!(of("node.reboot")["error"]["code"], "unsupported");
    assert_eq!(node.get().await["state"], "active");
    world.end().await;
}

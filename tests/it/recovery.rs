//! How a machine comes back to its identity, and who does not (decisions 4, *Recovery*).

use chrono::TimeDelta;
use reqwest::Method;
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use tests::world::client::answer_to;
use tests::world::hand::{HandAgent, Showing};
use tests::world::recovering::Recovering;
use tests::world::{GPUS, OnboardedNode, PATIENCE, REGION, Rented, World, id_of};

const SHORT: i64 = 30;

async fn rents_and_returns(world: &World, node: &OnboardedNode) {
    let wanted =
        json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id, "queue_seconds": 60 });
    let created = world.user.post("/api/v1/allocations", &wanted).await.created();
    let allocation = Rented::new(id_of(&created), world.user.clone());
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
    node.expect_all_free().await;
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// On a connection of its own: those that it had are being closed.
async fn expect_unknown(agent: &HandAgent) {
    let asked = agent.request_with(&agent.client_without_pool(), agent.node_id, Method::POST, "heartbeat");
    let answer = answer_to(asked.json(&agent.beat())).await.unwrap();
    assert_eq!(answer.refused(401, "invalid_node_identity").body["details"]["reason"], "certificate_unknown");
}

async fn actions(world: &World, node: &OnboardedNode) -> Vec<String> {
    world.audit_of(node.id).await.into_iter().map(|(_, action, ..)| action).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_whose_certificate_ended_comes_back_by_itself_and_its_tenant_stays() {
    let mut world = World::plan().policy("node.certificate_ttl_seconds", SHORT).start().await;
    let (asleep, dead) = (world.node("h100").await, world.node("h100").await);
    let allocation = world.rent("h100", 4).await;
    allocation.expect_state("active").await;
    world.lose_agent(&asleep);
    world.kill9_agent(&dead);
    tokio::time::sleep(Duration::from_secs(SHORT.unsigned_abs() + 1)).await;
    world.set_policy("node.certificate_ttl_seconds", 3600).await;
    world.find_agent(&asleep);
    world.restart_agent(&dead);
    for node in [&asleep, &dead] {
        eventually("the agent has recovered", || world.agent_log(node).contains("\"recovered\"")).await;
        assert_eq!(actions(&world, node).await.iter().filter(|action| *action == "nodes.recover").count(), 1);
        assert_eq!(node.get().await["state"], "active");
    }
    assert_eq!(allocation.get().await["state"], "active");
    allocation.release().await;
    allocation.expect_state("released").await;
    for node in [&asleep, &dead] {
        rents_and_returns(&world, node).await;
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_was_made_under_a_clock_two_days_ahead_is_replaced_when_the_clock_is_right_again() {
    let mut world = World::plan().service_clock().start().await;
    let node = world.node("h100").await;
    for (ahead, recoveries) in [(TimeDelta::days(2), 1), (TimeDelta::zero(), 2)] {
        world.kill9_replica(0);
        world.service_clock.as_ref().unwrap().put(ahead);
        world.replicas[0].start_again().await.expect("it starts by another clock");
        eventually("the agent has recovered", || world.agent_log(&node).matches("\"recovered\"").count() == recoveries)
            .await;
    }
    rents_and_returns(&world, &node).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_lost_its_key_recovers_and_one_that_lost_everything_needs_a_new_token() {
    let mut world = World::start().await;
    world.expects_error("enrollment_rejected");
    let node = world.node("h100").await;
    let folder = world.agent_folder(&node);
    world.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        fs::remove_file(folder.join(file)).unwrap();
    }
    world.restart_agent(&node);
    eventually("the agent has recovered", || world.agent_log(&node).contains("\"recovered\"")).await;
    rents_and_returns(&world, &node).await;

    // Also the key that it would recover with.
    world.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        fs::remove_file(folder.join(file)).unwrap();
    }
    fs::remove_dir_all(folder.join("state/identity")).unwrap();
    world.restart_agent(&node);
    eventually("the agent gives up", || world.agent_ended(&node).is_some()).await;
    assert_eq!(world.agent_ended(&node), Some(3), "enrollment refused: an operator has to act");
    let (bundle, _) = world.reissue(&node, &json!({ "reason": "its disk was lost" })).await;
    world.install(&node, &bundle).await;
    rents_and_returns(&world, &node).await;
    assert!(actions(&world, &node).await.contains(&"nodes.reissue_enrollment".to_owned()));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recovery_that_does_not_hold_changes_nothing_and_has_one_public_answer() {
    let mut world = World::plan().replicas(2).policy("node.max_recoveries", 2).start().await;
    let (node, other) = (world.register("h100").await, world.register("h100").await);
    let (bundle, of_other) = (world.bundle(&node).await, world.bundle(&other).await);
    let agent = HandAgent::onboard(&bundle, GPUS).await;
    let neighbour = HandAgent::onboard(&of_other, GPUS).await;
    let (good, key) = Recovering::of(&agent);
    let wrong_key = Recovering { key: neighbour.recovery.clone(), ..good.clone() };
    let wrong_token = Recovering { token: neighbour.bundle.enrollment_token.clone(), ..good.clone() };
    let from_the_future = Recovering { generation: 7, ..good.clone() };
    let mut foreign = good.request().await;
    foreign.csr_pem = Recovering::of(&agent).0.csr_pem;
    let mut answers = vec![good.send(&foreign).await];
    for wrong in [&wrong_key, &wrong_token, &from_the_future] {
        answers.push(wrong.go().await);
    }
    let messages: Vec<Value> =
        answers.iter().map(|answer| answer.refused(401, "enrollment_rejected").body["message"].clone()).collect();
    assert!(messages.windows(2).all(|pair| pair[0] == pair[1]), "{messages:?}");
    agent.heartbeat().await.ok();

    // One nonce at both replicas and many times at once: one passes, and nobody is taken for a clone.
    let request = good.request().await;
    let answers = futures::future::join_all((0..20).map(|_| good.send(&request))).await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status.is_success());
    assert_eq!((won.len(), lost.len()), (1, 19));
    for answer in &lost {
        answer.refused(401, "enrollment_rejected");
    }
    assert_eq!(node.get().await["state"], "active");
    expect_unknown(&agent).await;

    // The answer was lost: the same request fetches it again, and it is counted once.
    let again = good.go().await.ok();
    assert_eq!(again["recovery"], json!({ "identity_generation": 2, "remaining": 1 }));
    let (showing, _) = Showing::honest(&bundle, GPUS);
    let showing = Showing { boot_id: agent.boot_id, recovery: agent.recovery.clone(), ..showing };
    let recovered = HandAgent::with_identity(&showing, &key, &again);
    recovered.heartbeat().await.ok();

    // As often as the policy allows, and not once more.
    let (last, last_key) = Recovering::of(&agent);
    let last = Recovering { generation: 2, ..last };
    assert_eq!(last.go().await.ok()["recovery"], json!({ "identity_generation": 3, "remaining": 0 }));
    let over = Recovering { generation: 3, csr_pem: Recovering::of(&agent).0.csr_pem, ..last.clone() };
    over.go().await.refused(401, "enrollment_rejected");
    drop(last_key);

    // An old generation with everything else in order: somebody has a copy.
    let clone = Recovering { csr_pem: Recovering::of(&agent).0.csr_pem, ..good.clone() };
    clone.go().await.refused(401, "enrollment_rejected");
    let seen = node.expect_state("quarantined").await;
    assert_eq!(seen["state_reason"]["code"], "clone_suspected", "{seen}");
    let audited = actions(&world, &node).await;
    for action in ["nodes.clone_suspected", "nodes.recover", "nodes.refuse_enrollment"] {
        assert!(audited.iter().any(|audited| audited == action), "no {action} in {audited:?}");
    }
    assert_eq!(neighbour.heartbeat().await.status.as_u16(), 200, "the neighbour lives on");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_token_voids_the_old_one_and_a_removed_node_gets_none() {
    let mut world = World::start().await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let agent = HandAgent::onboard(&bundle, GPUS).await;
    let (recovering, _) = Recovering::of(&agent);
    let (new, command) = world.reissue(&node, &json!({ "reason": "a test" })).await;
    assert!(command.contains(new.enrollment_token.expose()) && command.contains("systemctl restart"), "{command}");
    recovering.go().await.refused(401, "enrollment_rejected");
    Showing::honest(&bundle, GPUS).0.enroll().await.refused(401, "enrollment_rejected");
    // What it has goes on until it enrolls anew.
    agent.heartbeat().await.ok();
    let renewed = HandAgent::onboard(&new, GPUS).await;
    expect_unknown(&agent).await;
    // Revoked at once.
    let (newer, _) = world.reissue(&node, &json!({ "reason": "stolen", "revoke_current_certificate": true })).await;
    expect_unknown(&renewed).await;
    let back = HandAgent::onboard(&newer, GPUS).await;

    node.order("retire").await.accepted();
    node.order("remove").await.accepted();
    node.expect_state("removed").await;
    let (gone, _) = Recovering::of(&back);
    gone.go().await.refused(401, "enrollment_rejected");
    world.end().await;
}

/// In each state: what a reissue answers, and in which state the node is then.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_reissued_in_every_state_but_while_the_node_leaves() {
    let mut world = World::plan().policy("node.offline_after_seconds", 10).start().await;
    let by = world.admin.clone();
    let reissue = |node: &OnboardedNode| {
        let (path, admin) = (format!("{}/reissue-enrollment", node.path()), by.clone());
        async move { admin.once(Method::POST, &path, Some(&json!({ "reason": "a test" }))).await }
    };
    let registered = world.register("h100").await;
    assert_eq!(reissue(&registered).await.ok()["recovery_bundle"]["SVC_NODE_ID"], registered.id.to_string());
    registered.expect_state("bootstrap-issued").await;
    reissue(&registered).await.ok();
    registered.expect_state("bootstrap-issued").await;

    let enrolling = world.register("h100").await;
    let bundle = world.bundle(&enrolling).await;
    let _ = HandAgent::enroll(&bundle, GPUS).await;
    enrolling.expect_state("enrolling").await;
    reissue(&enrolling).await.ok();
    enrolling.expect_state("bootstrap-issued").await;

    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let agent = HandAgent::onboard(&bundle, GPUS).await;
    for (order, state) in
        [(None, "active"), (Some("quarantine"), "quarantined"), (Some("release-quarantine"), "active")]
    {
        if let Some(order) = order {
            agent.heartbeat().await.ok();
            node.order(order).await.accepted();
        }
        reissue(&node).await.ok();
        assert_eq!(node.get().await["state"], state);
    }
    node.expect_state("offline").await;
    reissue(&node).await.ok();
    assert_eq!(node.get().await["state"], "offline");
    agent.heartbeat().await.ok();
    node.expect_state("active").await;

    // A drain needs a tenant to wait for.
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id });
    let allocation =
        Rented::new(id_of(&world.user.post("/api/v1/allocations", &wanted).await.created()), world.user.clone());
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    allocation.expect_state("active").await;
    let drain = json!({ "reason": "it leaves", "drain": true });
    world.admin.post(&format!("{}/retire", node.path()), &drain).await.ok();
    let refused = reissue(&node).await;
    assert_eq!(refused.refused(400, "invalid_request").body["details"]["state"], "draining");
    assert!(refused.body["message"].as_str().unwrap().contains("until its last allocation ends"), "{refused}");
    allocation.release().await;
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    node.expect_state("retired").await;
    reissue(&node).await.ok();
    assert_eq!(node.get().await["state"], "retired");
    node.order("remove").await.accepted();
    node.expect_state("removed").await;
    let refused = reissue(&node).await;
    assert_eq!(refused.refused(400, "invalid_request").body["details"]["state"], "removed");
    assert!(refused.body["message"].as_str().unwrap().contains("Register the machine as a new node"), "{refused}");
    world.end().await;
}

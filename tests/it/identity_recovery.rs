//! Recovery of a node's identity, and who is refused (decisions 4, *Recovery*).

use chrono::TimeDelta;
use reqwest::Method;
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use tests::cluster::client::send_request;
use tests::cluster::fake_agent::{EnrollmentAttempt, FakeAgent};
use tests::cluster::recovery_attempt::RecoveryAttempt;
use tests::cluster::{AllocationHandle, GPUS, NodeHandle, REGION, TestCluster, WAIT_TIMEOUT, id_of};

const SHORT: i64 = 30;

async fn rent_and_release(cluster: &TestCluster, node: &NodeHandle) {
    let wanted =
        json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id, "queue_seconds": 60 });
    let created = cluster.user.post("/api/v1/allocations", &wanted).await.created();
    let allocation = AllocationHandle::new(id_of(&created), cluster.user.clone());
    allocation.expect_state("active").await;
    allocation.release_fully().await;
    node.expect_all_free().await;
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !holds() {
        assert!(Instant::now() < until, "not within {WAIT_TIMEOUT:?}: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// On a new connection: the agent's open ones are being closed.
async fn expect_unknown(agent: &FakeAgent) {
    let asked = agent.request_with(&agent.client_without_pool(), agent.node_id, Method::POST, "heartbeat");
    let answer = send_request(asked.json(&agent.heartbeat_body())).await.unwrap();
    assert_eq!(answer.expect_error(401, "invalid_node_identity").body["details"]["reason"], "certificate_unknown");
}

async fn actions(cluster: &TestCluster, node: &NodeHandle) -> Vec<String> {
    cluster.audit_of(node.id).await.into_iter().map(|(_, action, ..)| action).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_that_runs_beside_a_copy_of_its_state_is_found_and_its_node_gets_no_tenant() {
    let mut cluster = TestCluster::builder().policy("node.offline_after_seconds", 10).start().await;
    let node = cluster.node("h100").await;
    // A restart is none.
    cluster.kill9_agent(&node);
    cluster.restart_agent(&node);
    rent_and_release(&cluster, &node).await;
    node.expect_state("active").await;

    let copy = cluster.start_copy(&node, "copy");
    let quarantined = node.expect_state("quarantined").await;
    assert_eq!(quarantined["state_reason"]["code"], "clone_suspected", "{quarantined}");
    assert!(actions(&cluster, &node).await.contains(&"nodes.clone_suspected".to_owned()));
    drop(copy);
    let path = format!("{}/release-quarantine", node.path());
    cluster.admin.post(&path, &json!({ "reason": "the copy was found and ended" })).await.ok();
    node.expect_state("active").await;
    rent_and_release(&cluster, &node).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_with_an_expired_certificate_recovers_by_itself_and_keeps_its_tenant() {
    let mut cluster = TestCluster::builder().policy("node.certificate_ttl_seconds", SHORT).start().await;
    let (asleep, dead) = (cluster.node("h100").await, cluster.node("h100").await);
    let allocation = cluster.rent_active("h100", 4).await;
    cluster.lose_agent(&asleep);
    cluster.kill9_agent(&dead);
    tokio::time::sleep(Duration::from_secs(SHORT.unsigned_abs() + 1)).await;
    cluster.set_policy("node.certificate_ttl_seconds", 3600).await;
    cluster.resume_agent(&asleep);
    cluster.restart_agent(&dead);
    for node in [&asleep, &dead] {
        eventually("the agent has recovered", || cluster.agent_log(node).contains("\"recovered\"")).await;
        assert_eq!(actions(&cluster, node).await.iter().filter(|action| *action == "nodes.recover").count(), 1);
        node.expect_state("active").await;
    }
    assert_eq!(allocation.get().await["state"], "active");
    allocation.release_fully().await;
    for node in [&asleep, &dead] {
        rent_and_release(&cluster, node).await;
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_issued_under_a_clock_two_days_ahead_is_replaced_once_the_clock_is_right() {
    let mut cluster = TestCluster::builder().service_clock().start().await;
    let node = cluster.node("h100").await;
    for (ahead, recoveries) in [(TimeDelta::days(2), 1), (TimeDelta::zero(), 2)] {
        cluster.kill9_replica(0);
        cluster.service_clock.as_ref().unwrap().set_offset(ahead);
        cluster.replicas[0].start_again().await.expect("it starts by another clock");
        eventually("the agent has recovered", || {
            cluster.agent_log(&node).matches("\"recovered\"").count() == recoveries
        })
        .await;
    }
    rent_and_release(&cluster, &node).await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn machine_that_lost_its_key_recovers_and_one_that_lost_everything_needs_a_new_token() {
    let mut cluster = TestCluster::start().await;
    cluster.allow_error("enrollment_rejected");
    let node = cluster.node("h100").await;
    let folder = cluster.agent_folder(&node);
    cluster.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        fs::remove_file(folder.join(file)).unwrap();
    }
    cluster.restart_agent(&node);
    eventually("the agent has recovered", || cluster.agent_log(&node).contains("\"recovered\"")).await;
    rent_and_release(&cluster, &node).await;

    // Also the recovery key.
    cluster.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        fs::remove_file(folder.join(file)).unwrap();
    }
    fs::remove_dir_all(folder.join("state/identity")).unwrap();
    cluster.restart_agent(&node);
    eventually("the agent gives up", || cluster.agent_exit_code(&node).is_some()).await;
    assert_eq!(cluster.agent_exit_code(&node), Some(3), "enrollment refused: an operator has to act");
    let (bundle, _) = cluster.reissue(&node, &json!({ "reason": "its disk was lost" })).await;
    cluster.install(&node, &bundle).await;
    rent_and_release(&cluster, &node).await;
    assert!(actions(&cluster, &node).await.contains(&"nodes.reissue_enrollment".to_owned()));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_recovery_changes_nothing_and_has_one_public_response() {
    let mut cluster = TestCluster::builder().replicas(2).policy("node.max_recoveries", 2).start().await;
    let (node, other) = (cluster.register("h100").await, cluster.register("h100").await);
    let (bundle, of_other) = (cluster.bundle(&node).await, cluster.bundle(&other).await);
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
    let neighbour = FakeAgent::onboard(&of_other, GPUS).await;
    let (good, key) = RecoveryAttempt::of(&agent);
    let wrong_key = RecoveryAttempt { key: neighbour.recovery.clone(), ..good.clone() };
    let wrong_token = RecoveryAttempt { token: neighbour.bundle.enrollment_token.clone(), ..good.clone() };
    let from_the_future = RecoveryAttempt { generation: 7, ..good.clone() };
    let mut foreign = good.request().await;
    foreign.csr_pem = RecoveryAttempt::of(&agent).0.csr_pem;
    let mut answers = vec![good.send(&foreign).await];
    for wrong in [&wrong_key, &wrong_token, &from_the_future] {
        answers.push(wrong.execute().await);
    }
    let messages: Vec<Value> =
        answers.iter().map(|answer| answer.expect_error(401, "enrollment_rejected").body["message"].clone()).collect();
    assert!(messages.windows(2).all(|pair| pair[0] == pair[1]), "{messages:?}");
    agent.heartbeat().await.ok();

    // One nonce at both replicas, many times concurrently: one request succeeds, and none is taken for a clone.
    let request = good.request().await;
    let answers = futures::future::join_all((0..20).map(|_| good.send(&request))).await;
    let (won, lost): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status.is_success());
    assert_eq!((won.len(), lost.len()), (1, 19));
    for answer in &lost {
        answer.expect_error(401, "enrollment_rejected");
    }
    assert_eq!(node.get().await["state"], "active");
    expect_unknown(&agent).await;

    // After a lost response the same request gets it again, and it is counted once.
    let repeated = good.execute().await.ok();
    assert_eq!(repeated["recovery"], json!({ "identity_generation": 2, "remaining": 1 }));
    let (enrollment, _) = EnrollmentAttempt::valid(&bundle, GPUS);
    let enrollment = EnrollmentAttempt { machine: agent.machine.clone(), ..enrollment };
    let recovered = FakeAgent::with_identity(&enrollment, &key, &repeated);
    recovered.heartbeat().await.ok();

    // As often as the policy permits, and no more.
    let (last, last_key) = RecoveryAttempt::of(&agent);
    let last = RecoveryAttempt { generation: 2, ..last };
    assert_eq!(last.execute().await.ok()["recovery"], json!({ "identity_generation": 3, "remaining": 0 }));
    let over = RecoveryAttempt { generation: 3, csr_pem: RecoveryAttempt::of(&agent).0.csr_pem, ..last.clone() };
    over.execute().await.expect_error(401, "enrollment_rejected");
    drop(last_key);

    // An old generation with everything else valid: there is a clone.
    let clone = RecoveryAttempt { csr_pem: RecoveryAttempt::of(&agent).0.csr_pem, ..good.clone() };
    clone.execute().await.expect_error(401, "enrollment_rejected");
    let seen = node.expect_state("quarantined").await;
    assert_eq!(seen["state_reason"]["code"], "clone_suspected", "{seen}");
    let audited = actions(&cluster, &node).await;
    for action in ["nodes.clone_suspected", "nodes.recover", "nodes.refuse_enrollment"] {
        assert!(audited.iter().any(|audited| audited == action), "no {action} in {audited:?}");
    }
    assert_eq!(neighbour.heartbeat().await.status.as_u16(), 200, "the neighbour lives on");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reissued_token_voids_the_old_one_and_a_removed_node_gets_none() {
    let mut cluster = TestCluster::start().await;
    let (node, bundle) = cluster.registered("h100").await;
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
    let (attempt, _) = RecoveryAttempt::of(&agent);
    let (new, command) = cluster.reissue(&node, &json!({ "reason": "a test" })).await;
    assert!(command.contains(new.enrollment_token.expose()) && command.contains("systemctl restart"), "{command}");
    attempt.execute().await.expect_error(401, "enrollment_rejected");
    EnrollmentAttempt::valid(&bundle, GPUS).0.enroll().await.expect_error(401, "enrollment_rejected");
    // Its identity stays valid until it enrolls with the new token.
    agent.heartbeat().await.ok();
    let renewed = FakeAgent::onboard(&new, GPUS).await;
    expect_unknown(&agent).await;
    // The certificate is revoked at once.
    let (newer, _) = cluster.reissue(&node, &json!({ "reason": "stolen", "revoke_current_certificate": true })).await;
    expect_unknown(&renewed).await;
    let back = FakeAgent::onboard(&newer, GPUS).await;

    node.order("retire").await.accepted();
    node.order("remove").await.accepted();
    node.expect_state("removed").await;
    let (gone, _) = RecoveryAttempt::of(&back);
    gone.execute().await.expect_error(401, "enrollment_rejected");
    cluster.shutdown().await;
}

/// For each state: the response to a reissue, and the state of the node afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn token_is_reissued_in_every_state_but_draining_removing_and_removed() {
    let mut cluster = TestCluster::builder().policy("node.offline_after_seconds", 10).start().await;
    let by = cluster.admin.clone();
    let reissue = |node: &NodeHandle| {
        let (path, admin) = (format!("{}/reissue-enrollment", node.path()), by.clone());
        async move { admin.send_once(Method::POST, &path, Some(&json!({ "reason": "a test" }))).await }
    };
    let registered = cluster.register("h100").await;
    assert_eq!(reissue(&registered).await.ok()["recovery_bundle"]["SVC_NODE_ID"], registered.id.to_string());
    registered.expect_state("bootstrap-issued").await;
    reissue(&registered).await.ok();
    registered.expect_state("bootstrap-issued").await;

    let enrolling = cluster.register("h100").await;
    let bundle = cluster.bundle(&enrolling).await;
    let _ = FakeAgent::enroll(&bundle, GPUS).await;
    enrolling.expect_state("enrolling").await;
    reissue(&enrolling).await.ok();
    enrolling.expect_state("bootstrap-issued").await;

    let (node, bundle) = cluster.registered("h100").await;
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
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

    // Draining needs a tenant to wait for.
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id });
    let allocation = AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created()),
        cluster.user.clone(),
    );
    let task = agent.next_task().await;
    agent.report(task.task_id, &agent.success(&task)).await.ok();
    allocation.expect_state("active").await;
    let drain = json!({ "reason": "it leaves", "drain": true });
    cluster.admin.post(&format!("{}/retire", node.path()), &drain).await.ok();
    let refused = reissue(&node).await;
    assert_eq!(refused.expect_error(400, "invalid_request").body["details"]["state"], "draining");
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
    assert_eq!(refused.expect_error(400, "invalid_request").body["details"]["state"], "removed");
    assert!(refused.body["message"].as_str().unwrap().contains("Register the machine as a new node"), "{refused}");
    cluster.shutdown().await;
}

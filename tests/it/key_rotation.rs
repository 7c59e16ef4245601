//! Rotation of the service's keys under load: nodes enroll in every phase, one is offline meanwhile, replicas and Postgres are killed.

use crate::service_account_signing_keys::{ServiceAccountClient, statuses_of};
use nix::sys::signal::Signal;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::fake_agent::FakeAgent;
use tests::cluster::{GPUS, NodeHandle, TestCluster, WAIT_TIMEOUT};

const KEYS: &str = "/api/v1/admin/keys";

async fn rotate(cluster: &TestCluster, step: &str, body: &Value) -> ApiResponse {
    cluster.admin.post(&format!("{KEYS}/{step}"), body).await
}

fn step(purpose: &str, key: &str, force: bool) -> Value {
    json!({ "purpose": purpose, "key_id": key, "reason": "a test wants it", "force": force })
}

async fn stage_key(cluster: &TestCluster, purpose: &str) -> String {
    let body = json!({ "purpose": purpose, "reason": "a test wants it" });
    let answer = rotate(cluster, "stage", &body).await;
    answer.created()["key_id"].as_str().unwrap().to_owned()
}

async fn key_set(cluster: &TestCluster, purpose: &str) -> Value {
    let all = cluster.admin.get(KEYS).await.ok();
    all["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == purpose).unwrap().clone()
}

/// The id of the purpose's key in this phase.
async fn key_in_phase(cluster: &TestCluster, purpose: &str, phase: &str) -> String {
    let set = key_set(cluster, purpose).await;
    let key = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == phase);
    key.unwrap_or_else(|| panic!("none is {phase}: {set}"))["key_id"].as_str().unwrap().to_owned()
}

/// Rents the SKU's only node as a whole once it is back, and releases it, which executes tasks.
async fn rent_and_release(cluster: &TestCluster, sku: &str) {
    let allocation = cluster.rent_when_free(sku, GPUS).await;
    allocation.expect_state("active").await;
    allocation.release_fully().await;
}

/// The output of `gpuctl keys …` for an administrator. A step is confirmed on the command line.
pub(crate) async fn gpuctl_keys(cluster: &TestCluster, args: &[&str]) -> String {
    let confirmed: &[&str] = if args[0] == "list" { &[] } else { &["--yes"] };
    let gpuctl = cluster.logged_in("admin").await;
    gpuctl.run(&[&["keys"][..], args, confirmed].concat()).await.ok()
}

async fn wait_for_log(cluster: &TestCluster, node: &NodeHandle, words: &str, times: usize) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while cluster.agent_log(node).matches(words).count() < times {
        assert!(Instant::now() < until, "{} never logged {words:?}:\n{}", node.name, cluster.agent_log(node));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the agents have received this version: the half minute of the operator's chapter.
async fn wait_for_version(cluster: &TestCluster, nodes: &[&NodeHandle], version: u64) {
    let known_version = |node: &NodeHandle| {
        let log = cluster.agent_log(node);
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter(|line| line["message"] == "task-signing keys rotated")
            .filter_map(|line| line["version"].as_u64())
            .max()
    };
    let until = Instant::now() + WAIT_TIMEOUT;
    while !nodes.iter().all(|node| known_version(node) >= Some(version)) {
        assert!(Instant::now() < until, "an agent never received version {version}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sends the request while the replica that owns the key set is killed, and restarts that.
async fn with_owner_crash(cluster: &mut TestCluster, purpose: &str, path: &str, body: &Value) -> Value {
    let set = edge::trust::current_keys::set_id(if purpose == "node_ca" {
        domain::key_set::KeySetPurpose::NodeCa
    } else {
        domain::key_set::KeySetPurpose::TaskSigning
    });
    // Before the first rotation the key set has no owner.
    let victim = cluster.owner_of("key_set", set).await;
    let admin = cluster.admin.clone();
    let (asked, body) = (format!("{KEYS}/{path}"), body.clone());
    let asking = tokio::spawn(async move { admin.post(&asked, &body).await });
    tokio::time::sleep(Duration::from_millis(15)).await;
    cluster.kill9_replica(victim);
    let answer = asking.await.unwrap();
    cluster.restart_replica(victim).await;
    answer.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn task_keys_rotate_in_operation_and_an_agent_that_missed_two_rotations_follows() {
    // Heartbeats every three seconds.
    let mut cluster =
        TestCluster::builder().own_postgres().replicas(2).policy("node.offline_after_seconds", 10).start().await;
    let awake = cluster.node("awake").await;
    let sleeper = cluster.node("sleeper").await;
    let first = key_in_phase(&cluster, "task_signing", "active").await;
    cluster.kill9_agent(&sleeper);

    // With `gpuctl`, as in the operator's chapter, and a node enrolls in each phase.
    let second = gpuctl_keys(&cluster, &["stage", "task-signing", "--reason", "a year has passed"]).await;
    let second = second.trim().to_owned();
    rent_and_release(&cluster, "awake").await;
    let early_bird = cluster.node("while-staged").await;
    rent_and_release(&cluster, "while-staged").await;
    let body = step("task_signing", &second, false);
    with_owner_crash(&mut cluster, "task_signing", "activate", &body).await;
    assert_eq!(key_in_phase(&cluster, "task_signing", "active").await, second);
    rent_and_release(&cluster, "awake").await;
    let late = cluster.node("in-grace").await;
    rent_and_release(&cluster, "in-grace").await;
    rent_and_release(&cluster, "while-staged").await;
    wait_for_version(&cluster, &[&awake, &early_bird], 1).await;

    rotate(&cluster, "retire", &step("task_signing", &first, false)).await.expect_error(409, "state_conflict");
    // Postgres is killed during the request.
    let admin = cluster.admin.clone();
    let body = step("task_signing", &first, true);
    let retiring = tokio::spawn(async move { admin.post(&format!("{KEYS}/retire"), &body).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    cluster.postgres.kill9().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    cluster.postgres.start_again().await;
    retiring.await.unwrap().ok();
    rent_and_release(&cluster, "awake").await;

    // A second rotation, so that the offline agent knows none of the keys.
    let third = stage_key(&cluster, "task_signing").await;
    wait_for_version(&cluster, &[&awake, &early_bird, &late], 4).await;
    rotate(&cluster, "activate", &step("task_signing", &third, false)).await.ok();
    rotate(&cluster, "retire", &step("task_signing", &second, true)).await.ok();
    assert_eq!(key_set(&cluster, "task_signing").await["version"], 6);
    cluster.restart_agent(&sleeper);
    wait_for_version(&cluster, &[&sleeper], 6).await;
    sleeper.expect_state("active").await;
    rent_and_release(&cluster, "sleeper").await;
    assert!(!cluster.agent_log(&sleeper).contains("a task is refused"), "it received the verifier set before a task");
    for name in ["awake", "while-staged", "in-grace"] {
        rent_and_release(&cluster, name).await;
    }

    let output = gpuctl_keys(&cluster, &["list"]).await;
    for word in [&third, "active", "retired", "replica-1", "replica-2", "task_signing 6"] {
        assert!(output.contains(word), "no {word} in:\n{output}");
    }
    // Nothing of a retired key is stored.
    let stored: Vec<String> = sqlx::query_scalar("SELECT name FROM secret WHERE starts_with(name, 'task_signing/')")
        .fetch_all(&cluster.pool)
        .await
        .unwrap();
    assert_eq!(stored, [format!("task_signing/{third}")]);
    let actions: Vec<String> = sqlx::query_scalar("SELECT action FROM audit WHERE action LIKE 'keys.%' ORDER BY at")
        .fetch_all(&cluster.pool)
        .await
        .unwrap();
    assert_eq!(
        actions,
        ["keys.stage", "keys.activate", "keys.retire", "keys.stage", "keys.activate", "keys.retire"],
        "each step once, whatever died"
    );
    cluster.shutdown().await;
}

/// The number of certificates in a PEM file.
fn certificates(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().matches("BEGIN CERTIFICATE").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn node_authority_rotates_with_overlapping_trust_and_cut_off_nodes_recover() {
    let builder = TestCluster::builder().replicas(2).policy("keys.renewal_spread_seconds", 1);
    let mut cluster = builder.policy("node.offline_after_seconds", 10).start().await;
    let awake = cluster.node("awake").await;
    let sleeper = cluster.node("sleeper").await;
    let by_hand = cluster.register("by-hand").await;
    let bundle = cluster.bundle(&by_hand).await;
    let hand = FakeAgent::onboard(&bundle, GPUS).await;
    let first = key_in_phase(&cluster, "node_ca", "active").await;
    cluster.kill9_agent(&sleeper);

    let second = stage_key(&cluster, "node_ca").await;
    let _ = cluster.node("while-staged").await;
    let file = cluster.agent_folder(&awake).join("node-ca.pem");
    let until = Instant::now() + WAIT_TIMEOUT;
    while certificates(&file) != 2 {
        assert!(Instant::now() < until, "both authorities reach {}", file.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // A replica hangs: no certificate may be issued that it would refuse.
    cluster.signal_replica(1, Signal::SIGSTOP);
    let hung = cluster.at_replica(0, "admin");
    let early = hung.send_once(Method::POST, &format!("{KEYS}/activate"), Some(&step("node_ca", &second, false))).await;
    assert!(!early.status.is_success() || early.body["set"].is_object(), "{early}");
    let refused_while_hung = !early.status.is_success();
    cluster.signal_replica(1, Signal::SIGCONT);
    if refused_while_hung {
        let body = step("node_ca", &second, false);
        with_owner_crash(&mut cluster, "node_ca", "activate", &body).await;
    }
    assert_eq!(key_in_phase(&cluster, "node_ca", "active").await, second);
    let _ = cluster.node("in-grace").await;
    rent_and_release(&cluster, "in-grace").await;
    // Running agents renew by themselves.
    wait_for_log(&cluster, &awake, "certificate renewed", 1).await;
    rent_and_release(&cluster, "awake").await;

    // Two nodes have a certificate of the first authority only: the offline agent, and the fake one, which never renews.
    let until = Instant::now() + WAIT_TIMEOUT;
    let refused = loop {
        let refused = rotate(&cluster, "retire", &step("node_ca", &first, false)).await;
        refused.expect_error(409, "state_conflict");
        if refused.body["details"]["dependents"] == 2 {
            break refused;
        }
        assert!(Instant::now() < until, "{refused}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let named: Vec<_> =
        refused.body["details"]["nodes"].as_array().unwrap().iter().map(|it| it["node_id"].clone()).collect();
    assert!(named.contains(&json!(sleeper.id)) && named.contains(&json!(by_hand.id)), "{refused}");
    let resuming = hand.client_without_pool();
    let wait =
        |client: &reqwest::Client| hand.request_with(client, by_hand.id, Method::GET, "tasks/wait?timeout_seconds=1");
    assert_eq!(send_request(wait(&resuming)).await.unwrap().status.as_u16(), 204, "its session can be resumed");
    hand.heartbeat().await.ok();

    let retired = rotate(&cluster, "retire", &step("node_ca", &first, true)).await;
    assert_eq!(retired.status.as_u16(), 200, "no replica trusts it: {retired}");
    assert_eq!(retired.body["cut_off"].as_array().unwrap().len(), 2, "{retired}");
    // From the response on it is refused: on the open connection, on a resumed session, on a new one, at every replica.
    for _ in 0..4 {
        let fresh = hand.client_without_pool();
        for answer in [hand.poll(1).await, send_request(wait(&resuming)).await, send_request(wait(&fresh)).await] {
            assert!(answer.as_ref().map_or(true, |answer| answer.status.as_u16() == 401), "{answer:?}");
        }
    }
    for sku in ["awake", "while-staged", "in-grace"] {
        rent_and_release(&cluster, sku).await;
    }
    let _ = cluster.node("afterwards").await;
    // The offline agent returns with a certificate that every replica refuses, and recovers its identity.
    cluster.restart_agent(&sleeper);
    wait_for_log(&cluster, &sleeper, "recovered", 1).await;
    sleeper.expect_state("active").await;
    rent_and_release(&cluster, "sleeper").await;
    assert_eq!(certificates(&cluster.agent_folder(&sleeper).join("node-ca.pem")), 1);
    cluster.shutdown().await;
}

/// Writes the key ring of all replicas, and restarts the replica at `index` with it.
async fn restart_on_key_ring(cluster: &mut TestCluster, index: usize, lines: &[&str]) -> anyhow::Result<()> {
    std::fs::write(&cluster.settings.key_ring_path, lines.join("\n")).unwrap();
    cluster.replicas[index].stop().await;
    cluster.replicas[index].start_again().await
}

async fn count_sealed_under(cluster: &TestCluster, id: &str) -> u64 {
    let all = cluster.admin.get(KEYS).await.ok();
    let keys = all["at_rest"]["keys"].as_array().unwrap().clone();
    keys.iter().find(|key| key["key_id"] == id).map_or(0, |key| key["sealed"].as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn sealed_values_are_rewrapped_under_another_key_and_a_key_in_use_cannot_be_dropped() {
    let mut cluster = TestCluster::builder().own_postgres().replicas(2).start().await;
    cluster.allow_error("the key ring does not fit the database");
    let _node = cluster.node("h100").await;
    for _ in 0..4 {
        rent_and_release(&cluster, "h100").await;
    }
    let stored = cluster.rent_active("h100", 1).await;
    let program = ServiceAccountClient::create(&mut cluster).await;
    let shown_before = program.token(&cluster, 0).await;
    cluster.register_secret("a service account's access token", &shown_before);
    let ring = std::fs::read_to_string(&cluster.settings.key_ring_path).unwrap();
    let old = ring.lines().find(|line| line.starts_with("key dev")).unwrap().to_owned();
    let fresh = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, rand::random::<[u8; 32]>());
    cluster.register_secret("the new key of the key ring", &fresh);
    let new = format!("key second {fresh}");

    // First every replica has the key, then each seals with it.
    for index in 0..2 {
        restart_on_key_ring(&mut cluster, index, &[&old, &new, "active dev"]).await.unwrap();
    }
    restart_on_key_ring(&mut cluster, 0, &[&old, &new, "active second"]).await.unwrap();
    let body = json!({ "reason": "a year has passed" });
    let refused = cluster.at_replica(0, "admin").send_once(Method::POST, &format!("{KEYS}/rewrap"), Some(&body)).await;
    assert!(
        refused.expect_error(409, "state_conflict").body["message"].as_str().unwrap().contains("replica-2"),
        "{refused}"
    );
    restart_on_key_ring(&mut cluster, 1, &[&old, &new, "active second"]).await.unwrap();
    let before = count_sealed_under(&cluster, "dev").await;
    assert!(before >= 5 + 6, "allocations and secrets: {before}");

    // A replica and Postgres are killed meanwhile; the rewrap continues by itself.
    let admin = cluster.admin.clone();
    let asking = tokio::spawn(async move { admin.post(&format!("{KEYS}/rewrap"), &body).await });
    tokio::time::sleep(Duration::from_millis(25)).await;
    cluster.kill9_replica(1);
    cluster.postgres.kill9().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    cluster.postgres.start_again().await;
    cluster.restart_replica(1).await;
    assert_eq!(asking.await.unwrap().status.as_u16(), 202);
    let output = gpuctl_keys(&cluster, &["rewrap", "--reason", "is it done?"]).await;
    assert!(output.contains("dev seals nothing"), "{output}");
    assert_eq!((count_sealed_under(&cluster, "dev").await, count_sealed_under(&cluster, "second").await), (0, before));

    // The old key may be dropped; sealed values open without it.
    for index in 0..2 {
        restart_on_key_ring(&mut cluster, index, &[&new, "active second"]).await.unwrap();
    }
    assert_eq!(
        statuses_of(&cluster, &shown_before).await,
        [StatusCode::OK; 2],
        "what signs service accounts' tokens is the same"
    );
    stored.release_fully().await;
    rent_and_release(&cluster, "h100").await;

    // A key in use may not be dropped, and another key under its name is detected: the start fails, with what to do.
    let stranger = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, rand::random::<[u8; 32]>());
    cluster.register_secret("an unused key", &stranger);
    for (line, words) in [
        (format!("key third {stranger}\nactive third"), "which the key ring lacks: put its line back"),
        (format!("key second {stranger}\nactive second"), "this is another key under the same id"),
    ] {
        assert!(restart_on_key_ring(&mut cluster, 0, &[&line]).await.is_err(), "it must not start");
        let log = std::fs::read_to_string(cluster.replicas[0].log()).unwrap();
        assert!(log.contains(words), "no {words:?} in:\n{}", log.lines().rev().take(5).collect::<Vec<_>>().join("\n"));
    }
    restart_on_key_ring(&mut cluster, 0, &[&new, "active second"]).await.unwrap();
    rent_and_release(&cluster, "h100").await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn member_message_keys_rotate_without_a_failed_request() {
    const PURPOSE: &str = "member_messages";
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    // About half of the requests are forwarded to the other replica.
    let node = cluster.register("h100").await;
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    let asked = async |cluster: &TestCluster| {
        for replica in [0, 1] {
            let answer = cluster.at_replica(replica, "admin").send_once(Method::POST, &path, Some(&json!({}))).await;
            assert_eq!(answer.status, StatusCode::CREATED, "replica {replica}: {answer}");
        }
    };
    let first = key_in_phase(&cluster, PURPOSE, "active").await;
    asked(&cluster).await;
    let second = stage_key(&cluster, PURPOSE).await;
    asked(&cluster).await;
    rotate(&cluster, "activate", &step(PURPOSE, &second, false)).await.ok();
    asked(&cluster).await;
    assert_eq!(key_in_phase(&cluster, PURPOSE, "grace").await, first);
    rotate(&cluster, "retire", &step(PURPOSE, &first, true)).await.ok();
    asked(&cluster).await;
    assert_eq!(cluster.metric_total("member_messages_refused_total", &[]).await, 0.0);
    cluster.shutdown().await;
}

//! The service's own keys, rotated under load: nodes join in every phase, one sleeps through all of it, replicas and the database die.

use crate::service_tokens::{Program, shown};
use nix::sys::signal::Signal;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tests::world::client::{Answer, answer_to};
use tests::world::hand::HandAgent;
use tests::world::{GPUS, OnboardedNode, PATIENCE, World};

const KEYS: &str = "/api/v1/admin/keys";

async fn rotate(world: &World, step: &str, body: &Value) -> Answer {
    world.admin.post(&format!("{KEYS}/{step}"), body).await
}

fn step(purpose: &str, key: &str, force: bool) -> Value {
    json!({ "purpose": purpose, "key_id": key, "reason": "a test wants it", "force": force })
}

async fn staged(world: &World, purpose: &str) -> String {
    let body = json!({ "purpose": purpose, "reason": "a test wants it" });
    let answer = rotate(world, "stage", &body).await;
    answer.created()["key_id"].as_str().unwrap().to_owned()
}

async fn set(world: &World, purpose: &str) -> Value {
    let all = world.admin.get(KEYS).await.ok();
    all["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == purpose).unwrap().clone()
}

/// The key of the purpose in this phase.
async fn in_phase(world: &World, purpose: &str, phase: &str) -> String {
    let set = set(world, purpose).await;
    let key = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == phase);
    key.unwrap_or_else(|| panic!("none is {phase}: {set}"))["key_id"].as_str().unwrap().to_owned()
}

/// Rents all of the SKU's one node and gives it back: tasks go through, there and back.
async fn rented(world: &World, sku: &str) {
    let allocation = world.rent(sku, GPUS).await;
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
}

/// What `gpuctl keys …` prints for an administrator. A step is confirmed on the command line.
pub(crate) async fn gpuctl_keys(world: &World, args: &[&str]) -> String {
    let confirmed: &[&str] = if args[0] == "list" { &[] } else { &["--yes"] };
    let gpuctl = world.logged_in("admin").await;
    gpuctl.run(&[&["keys"][..], args, confirmed].concat()).await.ok()
}

async fn until_log_says(world: &World, node: &OnboardedNode, words: &str, times: usize) {
    let until = Instant::now() + PATIENCE;
    while world.agent_log(node).matches(words).count() < times {
        assert!(Instant::now() < until, "{} never said {words:?}:\n{}", node.name, world.agent_log(node));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Waits until the agents have heard of the version: what the operator's chapter calls half a minute.
async fn until_known(world: &World, nodes: &[&OnboardedNode], version: u64) {
    let heard = |node: &OnboardedNode| {
        let log = world.agent_log(node);
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines
            .filter(|line| line["message"] == "task-signing keys rotated")
            .filter_map(|line| line["version"].as_u64())
            .max()
    };
    let until = Instant::now() + PATIENCE;
    while !nodes.iter().all(|node| heard(node) >= Some(version)) {
        assert!(Instant::now() < until, "some agent never heard of version {version}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Does it while the replica that owns the keys is killed, and starts that again.
async fn with_a_death(world: &mut World, purpose: &str, path: &str, body: &Value) -> Value {
    let set = edge::keys::set_id(if purpose == "node_ca" {
        domain::key_set::Purpose::NodeCa
    } else {
        domain::key_set::Purpose::TaskSigning
    });
    // Where nothing was rotated yet there is no owner to ask for.
    let victim = world.owner_of("key_set", set).await;
    let admin = world.admin.clone();
    let (asked, body) = (format!("{KEYS}/{path}"), body.clone());
    let asking = tokio::spawn(async move { admin.post(&asked, &body).await });
    tokio::time::sleep(Duration::from_millis(15)).await;
    world.kill9_replica(victim);
    let answer = asking.await.unwrap();
    world.restart_replica(victim).await;
    answer.ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn task_keys_rotate_under_way_and_an_agent_that_slept_through_two_rotations_follows() {
    // Heartbeats every three seconds.
    let mut world = World::plan().replicas(2).policy("node.offline_after_seconds", 10).start().await;
    let awake = world.node("awake").await;
    let sleeper = world.node("sleeper").await;
    let first = in_phase(&world, "task_signing", "active").await;
    world.kill9_agent(&sleeper);

    // By hand, as the operator's chapter has it, and somebody joins in each phase.
    let second = gpuctl_keys(&world, &["stage", "task-signing", "--reason", "a year has passed"]).await;
    let second = second.trim().to_owned();
    rented(&world, "awake").await;
    let early_bird = world.node("while-staged").await;
    rented(&world, "while-staged").await;
    let body = step("task_signing", &second, false);
    with_a_death(&mut world, "task_signing", "activate", &body).await;
    assert_eq!(in_phase(&world, "task_signing", "active").await, second);
    rented(&world, "awake").await;
    let late = world.node("in-grace").await;
    rented(&world, "in-grace").await;
    rented(&world, "while-staged").await;
    until_known(&world, &[&awake, &early_bird], 1).await;

    rotate(&world, "retire", &step("task_signing", &first, false)).await.refused(409, "state_conflict");
    // The database dies while it is asked for.
    let admin = world.admin.clone();
    let body = step("task_signing", &first, true);
    let retiring = tokio::spawn(async move { admin.post(&format!("{KEYS}/retire"), &body).await });
    tokio::time::sleep(Duration::from_millis(10)).await;
    world.postgres.kill9();
    tokio::time::sleep(Duration::from_millis(500)).await;
    world.postgres.start_again().await.unwrap();
    retiring.await.unwrap().ok();
    rented(&world, "awake").await;

    // And once more, so that the sleeper knows none of the keys.
    let third = staged(&world, "task_signing").await;
    until_known(&world, &[&awake, &early_bird, &late], 4).await;
    rotate(&world, "activate", &step("task_signing", &third, false)).await.ok();
    rotate(&world, "retire", &step("task_signing", &second, true)).await.ok();
    assert_eq!(set(&world, "task_signing").await["version"], 6);
    world.restart_agent(&sleeper);
    until_known(&world, &[&sleeper], 6).await;
    sleeper.expect_state("active").await;
    rented(&world, "sleeper").await;
    assert!(!world.agent_log(&sleeper).contains("a task is refused"), "it was told before it was given work");
    for name in ["awake", "while-staged", "in-grace"] {
        rented(&world, name).await;
    }

    let said = gpuctl_keys(&world, &["list"]).await;
    for word in [&third, "active", "retired", "replica-1", "replica-2", "task_signing 6"] {
        assert!(said.contains(word), "no {word} in:\n{said}");
    }
    // Of what is retired nothing is left to steal.
    let kept: Vec<String> = sqlx::query_scalar("SELECT name FROM secret WHERE starts_with(name, 'task_signing/')")
        .fetch_all(&world.pool)
        .await
        .unwrap();
    assert_eq!(kept, [format!("task_signing/{third}")]);
    let actions: Vec<String> = sqlx::query_scalar("SELECT action FROM audit WHERE action LIKE 'keys.%' ORDER BY at")
        .fetch_all(&world.pool)
        .await
        .unwrap();
    assert_eq!(
        actions,
        ["keys.stage", "keys.activate", "keys.retire", "keys.stage", "keys.activate", "keys.retire"],
        "each step once, whatever died"
    );
    world.end().await;
}

/// How many certificates a PEM file has.
fn certificates(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().matches("BEGIN CERTIFICATE").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_authority_rotates_with_overlapping_trust_and_whoever_it_cuts_off_recovers() {
    let plan = World::plan().replicas(2).policy("keys.renewal_spread_seconds", 1);
    let mut world = plan.policy("node.offline_after_seconds", 10).start().await;
    let awake = world.node("awake").await;
    let sleeper = world.node("sleeper").await;
    let by_hand = world.register("by-hand").await;
    let bundle = world.bundle(&by_hand).await;
    let hand = HandAgent::onboard(&bundle, GPUS).await;
    let first = in_phase(&world, "node_ca", "active").await;
    world.kill9_agent(&sleeper);

    let second = staged(&world, "node_ca").await;
    let _ = world.node("while-staged").await;
    let file = world.agent_folder(&awake).join("node-ca.pem");
    let until = Instant::now() + PATIENCE;
    while certificates(&file) != 2 {
        assert!(Instant::now() < until, "both authorities reach {}", file.display());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // A replica hangs: nothing may be certified that it would not let in.
    world.signal_replica(1, Signal::SIGSTOP);
    let hung = world.at_replica(0, "admin");
    let early = hung.once(Method::POST, &format!("{KEYS}/activate"), Some(&step("node_ca", &second, false))).await;
    assert!(!early.status.is_success() || early.body["set"].is_object(), "{early}");
    let refused_while_hung = !early.status.is_success();
    world.signal_replica(1, Signal::SIGCONT);
    if refused_while_hung {
        let body = step("node_ca", &second, false);
        with_a_death(&mut world, "node_ca", "activate", &body).await;
    }
    assert_eq!(in_phase(&world, "node_ca", "active").await, second);
    let _ = world.node("in-grace").await;
    rented(&world, "in-grace").await;
    // Who is awake moves over by itself.
    until_log_says(&world, &awake, "certificate renewed", 1).await;
    rented(&world, "awake").await;

    // Two are left with a certificate by the first alone: the sleeper, and the one by hand, which never renews.
    let until = Instant::now() + PATIENCE;
    let refused = loop {
        let refused =
            world.admin.once(Method::POST, &format!("{KEYS}/retire"), Some(&step("node_ca", &first, false))).await;
        refused.refused(409, "state_conflict");
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
    assert_eq!(answer_to(wait(&resuming)).await.unwrap().status.as_u16(), 204, "its session can be resumed");
    hand.heartbeat().await.ok();

    let retired = rotate(&world, "retire", &step("node_ca", &first, true)).await;
    assert_eq!(retired.status.as_u16(), 200, "no replica trusts it: {retired}");
    assert_eq!(retired.body["cut_off"].as_array().unwrap().len(), 2, "{retired}");
    // From the answer on: not on the connection that was open, not on a resumed session, not on a new one, at no replica.
    for _ in 0..4 {
        let fresh = hand.client_without_pool();
        for answer in [hand.poll(1).await, answer_to(wait(&resuming)).await, answer_to(wait(&fresh)).await] {
            assert!(answer.as_ref().map_or(true, |answer| answer.status.as_u16() == 401), "{answer:?}");
        }
    }
    for sku in ["awake", "while-staged", "in-grace"] {
        rented(&world, sku).await;
    }
    let _ = world.node("afterwards").await;
    // The sleeper comes back with a certificate that nobody takes, and recovers its identity.
    world.restart_agent(&sleeper);
    until_log_says(&world, &sleeper, "recovered", 1).await;
    sleeper.expect_state("active").await;
    rented(&world, "sleeper").await;
    assert_eq!(certificates(&world.agent_folder(&sleeper).join("node-ca.pem")), 1);
    world.end().await;
}

/// Writes the key ring of all replicas, and starts the replica at `index` anew on it.
async fn on_ring(world: &mut World, index: usize, lines: &[&str]) -> anyhow::Result<()> {
    std::fs::write(&world.settings.key_ring_path, lines.join("\n")).unwrap();
    world.replicas[index].stop().await;
    world.replicas[index].start_again().await
}

async fn sealed_under(world: &World, id: &str) -> u64 {
    let all = world.admin.get(KEYS).await.ok();
    let keys = all["at_rest"]["keys"].as_array().unwrap().clone();
    keys.iter().find(|key| key["key_id"] == id).map_or(0, |key| key["sealed"].as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_sealed_moves_to_another_key_of_the_ring_and_none_that_is_needed_can_be_dropped() {
    let mut world = World::plan().replicas(2).start().await;
    world.expects_error("the key ring does not fit the database");
    let _node = world.node("h100").await;
    for _ in 0..4 {
        rented(&world, "h100").await;
    }
    let kept = world.rent("h100", 1).await;
    kept.expect_state("active").await;
    let program = Program::made(&mut world).await;
    let shown_before = program.token(&world, 0).await;
    world.keep_secret("a service account's access token", &shown_before);
    let ring = std::fs::read_to_string(&world.settings.key_ring_path).unwrap();
    let old = ring.lines().find(|line| line.starts_with("key dev")).unwrap().to_owned();
    let fresh = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, rand::random::<[u8; 32]>());
    world.keep_secret("the new key of the key ring", &fresh);
    let new = format!("key second {fresh}");

    // First every replica knows it, then each seals with it.
    for index in 0..2 {
        on_ring(&mut world, index, &[&old, &new, "active dev"]).await.unwrap();
    }
    on_ring(&mut world, 0, &[&old, &new, "active second"]).await.unwrap();
    let body = json!({ "reason": "a year has passed" });
    let refused = world.at_replica(0, "admin").once(Method::POST, &format!("{KEYS}/rewrap"), Some(&body)).await;
    assert!(
        refused.refused(409, "state_conflict").body["message"].as_str().unwrap().contains("replica-2"),
        "{refused}"
    );
    on_ring(&mut world, 1, &[&old, &new, "active second"]).await.unwrap();
    let before = sealed_under(&world, "dev").await;
    assert!(before >= 5 + 6, "allocations and secrets: {before}");

    // A replica and the database die on the way; it goes on by itself.
    let admin = world.admin.clone();
    let asking = tokio::spawn(async move { admin.post(&format!("{KEYS}/rewrap"), &body).await });
    tokio::time::sleep(Duration::from_millis(25)).await;
    world.kill9_replica(1);
    world.postgres.kill9();
    tokio::time::sleep(Duration::from_millis(300)).await;
    world.postgres.start_again().await.unwrap();
    world.restart_replica(1).await;
    assert_eq!(asking.await.unwrap().status.as_u16(), 202);
    let said = gpuctl_keys(&world, &["rewrap", "--reason", "is it done?"]).await;
    assert!(said.contains("dev seals nothing"), "{said}");
    assert_eq!((sealed_under(&world, "dev").await, sealed_under(&world, "second").await), (0, before));

    // The old one may leave; what is sealed opens without it.
    for index in 0..2 {
        on_ring(&mut world, index, &[&new, "active second"]).await.unwrap();
    }
    assert_eq!(
        shown(&world, &shown_before).await,
        [StatusCode::OK; 2],
        "what signs service accounts' tokens is the same"
    );
    kept.release().await;
    kept.expect_state("released").await;
    rented(&world, "h100").await;

    // One that is needed may not, and another under its name is found out: it is said at the start, with what to do.
    let stranger = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, rand::random::<[u8; 32]>());
    world.keep_secret("a key that nobody needs", &stranger);
    for (line, words) in [
        (format!("key third {stranger}\nactive third"), "which the key ring lacks: put its line back"),
        (format!("key second {stranger}\nactive second"), "this is another key under the same id"),
    ] {
        assert!(on_ring(&mut world, 0, &[&line]).await.is_err(), "it must not start");
        let log = std::fs::read_to_string(world.replicas[0].log()).unwrap();
        assert!(log.contains(words), "no {words:?} in:\n{}", log.lines().rev().take(5).collect::<Vec<_>>().join("\n"));
    }
    on_ring(&mut world, 0, &[&new, "active second"]).await.unwrap();
    rented(&world, "h100").await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_member_messages_are_rotated_while_every_request_is_answered() {
    const PURPOSE: &str = "member_messages";
    let mut world = World::plan().replicas(2).start().await;
    // Each goes through the other replica for about half of the requests.
    let node = world.register("h100").await;
    let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
    let asked = async |world: &World| {
        for replica in [0, 1] {
            let answer = world.at_replica(replica, "admin").once(Method::POST, &path, Some(&json!({}))).await;
            assert_eq!(answer.status, StatusCode::CREATED, "replica {replica}: {answer}");
        }
    };
    let first = in_phase(&world, PURPOSE, "active").await;
    asked(&world).await;
    let second = staged(&world, PURPOSE).await;
    asked(&world).await;
    rotate(&world, "activate", &step(PURPOSE, &second, false)).await.ok();
    asked(&world).await;
    assert_eq!(in_phase(&world, PURPOSE, "grace").await, first);
    rotate(&world, "retire", &step(PURPOSE, &first, true)).await.ok();
    asked(&world).await;
    for index in [0, 1] {
        let url = format!("{}/metrics", world.replicas[index].operations_url());
        let page = reqwest::get(url).await.unwrap().text().await.unwrap();
        let refused = page.lines().filter(|line| line.starts_with("member_messages_refused_total"));
        assert!(refused.clone().all(|line| line.ends_with(" 0")), "{:?}", refused.collect::<Vec<_>>());
    }
    world.end().await;
}

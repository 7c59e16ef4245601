//! The node authority rotated behind real proxies: nodes join, work and renew in every phase, however late the proxy is told, and whoever
//! is cut off recovers as a directly connected node does. And what is revoked is cut, though the connection is the proxy's.

use serde_json::json;
use std::time::{Duration, Instant};
use tests::world::client::Answer;
use tests::world::ingress::{Ingress, Kind};
use tests::world::{GPUS, OnboardedNode, PATIENCE, World};

const KEYS: &str = "/api/v1/admin/keys";

/// A world whose nodes come through a proxy of this kind.
async fn behind(kind: Kind) -> (World, Ingress) {
    let address = Ingress::address();
    let plan = World::plan().policy("keys.renewal_spread_seconds", 1).policy("node.offline_after_seconds", 10);
    let variables = Ingress::variables(kind, address).into_iter();
    let world = variables.fold(plan, |plan, (name, value)| plan.variable(name, &value)).start().await;
    let ingress = Ingress::start(kind, address, &world).await;
    (world, ingress)
}

async fn step(world: &World, step: &str, key: Option<&str>) -> Answer {
    let mut body = json!({ "purpose": "node_ca", "reason": "a test wants it" });
    if let Some(key) = key {
        body["key_id"] = key.into();
        body["force"] = (step == "retire").into();
    }
    world.admin.post(&format!("{KEYS}/{step}"), &body).await
}

async fn active(world: &World) -> String {
    let all = world.admin.get(KEYS).await.ok();
    let set = all["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == "node_ca").unwrap().clone();
    let key = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == "active").unwrap().clone();
    key["key_id"].as_str().unwrap().to_owned()
}

async fn rented(world: &World, sku: &str) {
    // A busy machine's agent may have been silent for too long, and be there again with its next heartbeat.
    let allocation = world.rent_when_free(sku, GPUS).await;
    allocation.expect_state("active").await;
    allocation.release().await;
    allocation.expect_state("released").await;
}

async fn until_log_says(world: &World, node: &OnboardedNode, words: &str) {
    let until = Instant::now() + PATIENCE;
    while !world.agent_log(node).contains(words) {
        assert!(Instant::now() < until, "{} never said {words:?}:\n{}", node.name, world.agent_log(node));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn story(kind: Kind) {
    let (mut world, mut ingress) = behind(kind).await;
    let awake = world.node("awake").await;
    let hung = world.node("hung").await;
    let sleeper = world.node("sleeper").await;
    world.kill9_agent(&sleeper);
    let first = active(&world).await;

    let second = step(&world, "stage", None).await.created()["key_id"].as_str().unwrap().to_owned();
    let staged = world.node("while-staged").await;
    rented(&world, "while-staged").await;

    // The operator is late: whoever renews by the new authority is refused by the proxy, and it costs time and nothing else.
    world.lose_agent(&hung);
    step(&world, "activate", Some(&second)).await.ok();
    until_log_says(&world, &awake, "certificate renewed").await;
    until_log_says(&world, &awake, "certificate_not_replaced").await;
    ingress.follow(&world).await;
    for (node, sku) in [(&awake, "awake"), (&staged, "while-staged")] {
        until_log_says(&world, node, "certificate renewed").await;
        node.expect_state("active").await;
        rented(&world, sku).await;
        assert!(!world.agent_log(node).contains("recovered"), "{}", world.agent_log(node));
    }
    let in_grace = world.node("in-grace").await;
    rented(&world, "in-grace").await;

    // To the proxy both are good, to the control plane one of them no more.
    let retired = step(&world, "retire", Some(&first)).await;
    assert_eq!((retired.status.as_u16(), retired.body["cut_off"].as_array().unwrap().len()), (200, 2), "{retired}");
    world.find_agent(&hung);
    until_log_says(&world, &hung, "recovered").await;
    hung.expect_state("active").await;
    rented(&world, "hung").await;

    // From here on the proxy itself turns the old one away.
    ingress.follow(&world).await;
    world.restart_agent(&sleeper);
    until_log_says(&world, &sleeper, "recovered").await;
    sleeper.expect_state("active").await;
    rented(&world, "sleeper").await;
    let _ = world.node("afterwards").await;
    rented(&world, "afterwards").await;
    for (node, sku) in [(&awake, "awake"), (&staged, "while-staged"), (&in_grace, "in-grace")] {
        rented(&world, sku).await;
        assert!(!world.agent_log(node).contains("recovered"), "{}", world.agent_log(node));
    }
    for node in [&hung, &sleeper] {
        assert_eq!(world.agent_log(node).matches("\"recovered\"").count(), 1, "once is enough");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_authority_rotates_behind_haproxy_and_whoever_is_cut_off_recovers() {
    story(Kind::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_authority_rotates_behind_nginx_and_whoever_is_cut_off_recovers() {
    story(Kind::Nginx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_authority_rotates_behind_envoy_and_whoever_is_cut_off_recovers() {
    story(Kind::Envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_terminal_of_a_revoked_identity_is_cut_though_the_connection_is_the_proxy_s() {
    let (mut world, _ingress) = behind(Kind::Haproxy).await;
    let node = world.node("h100").await;
    let allocation = world.rent("h100", 1).await;
    allocation.expect_state("active").await;
    let (mut terminal, _) = world.terminal(allocation.id).await;
    terminal.enter("stty -echo; echo be''gun\n").await;
    terminal.shows("begun").await;

    let body = json!({ "reason": "somebody has its key", "revoke_current_certificate": true });
    let (bundle, _) = world.reissue(&node, &body).await;
    terminal.enter("echo after-$((40 + 2))\n").await;
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        terminal.hear(Duration::from_millis(200)).await;
        assert!(!terminal.text().contains("after-42"), "a node that is nobody's shows its user's terminal");
    }
    // As the restart command does on its machine.
    world.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        std::fs::remove_file(world.agent_folder(&node).join(file)).unwrap();
    }
    world.install(&node, &bundle).await;
    allocation.release().await;
    allocation.expect_state("released").await;
    world.end().await;
}

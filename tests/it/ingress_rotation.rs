//! Rotation of the node authority behind real proxies: nodes enroll, work and renew in every phase, however late the proxy is updated, and
//! a node that is cut off recovers as a directly connected one does. A revoked identity is cut off although the connection is the proxy's.

use serde_json::json;
use std::time::{Duration, Instant};
use tests::cluster::client::ApiResponse;
use tests::cluster::ingress_proxy::{IngressProxy, ProxyKind};
use tests::cluster::{GPUS, NodeHandle, TestCluster, WAIT_TIMEOUT};

const KEYS: &str = "/api/v1/admin/keys";

/// A cluster whose nodes connect through a proxy of this kind.
async fn start_behind_proxy(kind: ProxyKind) -> (TestCluster, IngressProxy) {
    let address = IngressProxy::address();
    let builder =
        TestCluster::builder().policy("keys.renewal_spread_seconds", 1).policy("node.offline_after_seconds", 10);
    let variables = IngressProxy::variables(kind, address).into_iter();
    let cluster = variables.fold(builder, |builder, (name, value)| builder.variable(name, &value)).start().await;
    let ingress = IngressProxy::start(kind, address, &cluster).await;
    (cluster, ingress)
}

async fn step(cluster: &TestCluster, step: &str, key: Option<&str>) -> ApiResponse {
    let mut body = json!({ "purpose": "node_ca", "reason": "a test wants it" });
    if let Some(key) = key {
        body["key_id"] = key.into();
        body["force"] = (step == "retire").into();
    }
    cluster.admin.post(&format!("{KEYS}/{step}"), &body).await
}

async fn active_key(cluster: &TestCluster) -> String {
    let all = cluster.admin.get(KEYS).await.ok();
    let set = all["sets"].as_array().unwrap().iter().find(|set| set["purpose"] == "node_ca").unwrap().clone();
    let key = set["keys"].as_array().unwrap().iter().find(|key| key["phase"] == "active").unwrap().clone();
    key["key_id"].as_str().unwrap().to_owned()
}

async fn rent_and_release(cluster: &TestCluster, sku: &str) {
    // On a busy machine the agent may have been offline, until its next heartbeat.
    let allocation = cluster.rent_when_free(sku, GPUS).await;
    allocation.expect_state("active").await;
    allocation.release_fully().await;
}

async fn wait_for_log(cluster: &TestCluster, node: &NodeHandle, words: &str) {
    let until = Instant::now() + WAIT_TIMEOUT;
    while !cluster.agent_log(node).contains(words) {
        assert!(Instant::now() < until, "{} never logged {words:?}:\n{}", node.name, cluster.agent_log(node));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn rotate_behind_proxy(kind: ProxyKind) {
    let (mut cluster, mut ingress) = start_behind_proxy(kind).await;
    let awake = cluster.node("awake").await;
    let hung = cluster.node("hung").await;
    let sleeper = cluster.node("sleeper").await;
    cluster.kill9_agent(&sleeper);
    let first = active_key(&cluster).await;

    let second = step(&cluster, "stage", None).await.created()["key_id"].as_str().unwrap().to_owned();
    let staged = cluster.node("while-staged").await;
    rent_and_release(&cluster, "while-staged").await;

    // The operator is late: the proxy refuses agents with certificates of the new authority, which costs only time.
    cluster.lose_agent(&hung);
    step(&cluster, "activate", Some(&second)).await.ok();
    wait_for_log(&cluster, &awake, "certificate renewed").await;
    wait_for_log(&cluster, &awake, "certificate_not_replaced").await;
    ingress.reload_authorities(&cluster).await;
    for (node, sku) in [(&awake, "awake"), (&staged, "while-staged")] {
        wait_for_log(&cluster, node, "certificate renewed").await;
        node.expect_state("active").await;
        rent_and_release(&cluster, sku).await;
        assert!(!cluster.agent_log(node).contains("recovered"), "{}", cluster.agent_log(node));
    }
    let in_grace = cluster.node("in-grace").await;
    rent_and_release(&cluster, "in-grace").await;

    // The proxy accepts both authorities, the control plane only one.
    let retired = step(&cluster, "retire", Some(&first)).await;
    assert_eq!((retired.status.as_u16(), retired.body["cut_off"].as_array().unwrap().len()), (200, 2), "{retired}");
    cluster.resume_agent(&hung);
    wait_for_log(&cluster, &hung, "recovered").await;
    hung.expect_state("active").await;
    rent_and_release(&cluster, "hung").await;

    // From here on the proxy itself refuses the old one.
    ingress.reload_authorities(&cluster).await;
    cluster.restart_agent(&sleeper);
    wait_for_log(&cluster, &sleeper, "recovered").await;
    sleeper.expect_state("active").await;
    rent_and_release(&cluster, "sleeper").await;
    let _ = cluster.node("afterwards").await;
    rent_and_release(&cluster, "afterwards").await;
    for (node, sku) in [(&awake, "awake"), (&staged, "while-staged"), (&in_grace, "in-grace")] {
        rent_and_release(&cluster, sku).await;
        assert!(!cluster.agent_log(node).contains("recovered"), "{}", cluster.agent_log(node));
    }
    for node in [&hung, &sleeper] {
        assert_eq!(cluster.agent_log(node).matches("\"recovered\"").count(), 1, "once is enough");
    }
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_authority_rotates_behind_haproxy_and_cut_off_nodes_recover() {
    rotate_behind_proxy(ProxyKind::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_authority_rotates_behind_nginx_and_cut_off_nodes_recover() {
    rotate_behind_proxy(ProxyKind::Nginx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_authority_rotates_behind_envoy_and_cut_off_nodes_recover() {
    rotate_behind_proxy(ProxyKind::Envoy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_of_a_revoked_identity_is_closed_over_a_proxy_connection() {
    let (mut cluster, _ingress) = start_behind_proxy(ProxyKind::Haproxy).await;
    let node = cluster.node("h100").await;
    let allocation = cluster.rent_active("h100", 1).await;
    let (mut terminal, _) = cluster.terminal(allocation.id).await;
    terminal.enter("stty -echo; echo be''gun\n").await;
    terminal.expect_output("begun").await;

    let body = json!({ "reason": "its key is compromised", "revoke_current_certificate": true });
    let (bundle, _) = cluster.reissue(&node, &body).await;
    terminal.enter("echo after-$((40 + 2))\n").await;
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        terminal.receive(Duration::from_millis(200)).await;
        assert!(!terminal.text().contains("after-42"), "a node with a revoked identity shows its user's terminal");
    }
    // What the restart command does on its machine.
    cluster.kill9_agent(&node);
    for file in ["node.key", "node.pem"] {
        std::fs::remove_file(cluster.agent_folder(&node).join(file)).unwrap();
    }
    cluster.install(&node, &bundle).await;
    allocation.release_fully().await;
    cluster.shutdown().await;
}

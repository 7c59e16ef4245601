//! The node API behind real proxies, each configured by its file under `deploy/ingress`: agents, long polls, and clients with a forged
//! identity. How a replica treats a proxy that forwards such requests is tested in `edge/src/node_api/tests/forwarding.rs`.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use reqwest::{Client, Method, StatusCode};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::fake_agent::{FakeAgent, anonymous, anonymous_over_http1};
use tests::cluster::ingress_proxy::{IngressProxy, ProxyKind};
use tests::cluster::{AllocationHandle, GPUS, NodeHandle, REGION, TestCluster, id_of};
use uuid::Uuid;

const SHORT_WAIT: &str = "tasks/wait?timeout_seconds=1";

#[tokio::test(flavor = "multi_thread")]
async fn nodes_work_behind_haproxy_and_no_identity_can_be_forged() {
    run_scenario(ProxyKind::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_work_behind_nginx_and_no_identity_can_be_forged() {
    run_scenario(ProxyKind::Nginx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_work_behind_envoy_and_no_identity_can_be_forged() {
    run_scenario(ProxyKind::Envoy).await;
}

async fn run_scenario(kind: ProxyKind) {
    let address = IngressProxy::address();
    let variables = IngressProxy::variables(kind, address).into_iter();
    let mut cluster =
        variables.fold(TestCluster::builder(), |builder, (name, value)| builder.variable(name, &value)).start().await;
    let ingress = IngressProxy::start(kind, address, &cluster).await;

    // The longest poll, while everything else happens.
    let parked = onboard_fake_agent(&mut cluster, &ingress).await;
    let waiting = tokio::spawn(async move {
        loop {
            let began = Instant::now();
            let answer = parked.poll(55).await;
            // A replica whose lease lapsed in a pause of the machine ends the wait itself.
            if !answer.as_ref().is_ok_and(ApiResponse::is_transient) {
                return (answer, began.elapsed());
            }
        }
    });

    let expiring = node_with_expiring_certificate(&mut cluster).await;
    rent_and_release(&mut cluster).await;
    expect_forgeries_refused(&mut cluster, kind, &ingress).await;
    move_direct_node_behind_the_proxy(&mut cluster, &ingress).await;
    expect_removed_node_refused(&mut cluster, &ingress).await;
    expect_recovery(&mut cluster, expiring).await;

    let (answer, lasted) = waiting.await.unwrap();
    assert_eq!(answer.expect("the proxy leaves a wait alone").status, StatusCode::NO_CONTENT);
    assert!(lasted > Duration::from_secs(54), "{lasted:?}");
    cluster.shutdown().await;
}

/// A fake agent that has enrolled without a certificate, then sent a heartbeat and a poll with one.
async fn onboard_fake_agent(cluster: &mut TestCluster, ingress: &IngressProxy) -> FakeAgent {
    let (_, bundle) = cluster.registered("h100").await;
    assert_eq!(bundle.api_url, ingress.url());
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
    cluster.register_secret("a node's key", agent.key_pem.lines().nth(1).expect("PEM has lines"));
    agent
}

async fn rent_and_release(cluster: &mut TestCluster) {
    let node = cluster.node("h100").await;
    let rented = rent_on(cluster, &node).await;
    rented.expect_state("active").await;
    rented.release_fully().await;
}

async fn rent_on(cluster: &TestCluster, node: &NodeHandle) -> AllocationHandle {
    // A node whose agent was away may be offline until its next heartbeat.
    let wanted =
        json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id, "queue_seconds": 60 });
    AllocationHandle::new(
        id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created()),
        cluster.user.clone(),
    )
}

/// A node whose agent is dead, and whose certificate expires in half a minute.
async fn node_with_expiring_certificate(cluster: &mut TestCluster) -> (NodeHandle, Instant) {
    cluster.set_policy("node.certificate_ttl_seconds", json!(30)).await;
    let node = cluster.node("h100").await;
    // Killed before certificates get longer lifetimes: it must not renew again.
    cluster.kill9_agent(&node);
    cluster.set_policy("node.certificate_ttl_seconds", json!(86_400)).await;
    (node, Instant::now() + Duration::from_secs(31))
}

async fn expect_recovery(cluster: &mut TestCluster, (node, expired_at): (NodeHandle, Instant)) {
    tokio::time::sleep_until(expired_at.into()).await;
    cluster.restart_agent(&node);
    let rented = rent_on(cluster, &node).await;
    rented.expect_state("active").await;
    let log = cluster.agent_log(&node);
    assert!(log.contains("\"recovered\"") || log.contains("recovered"), "{log}");
    rented.release_fully().await;
}

async fn move_direct_node_behind_the_proxy(cluster: &mut TestCluster, ingress: &IngressProxy) {
    let node = cluster.register("h100").await;
    let mut bundle = cluster.bundle(&node).await;
    bundle.api_url = cluster.replicas[0].node_url();
    cluster.start_agent(&node.name, &bundle);
    node.expect_state("active").await;

    cluster.kill9_agent(&node);
    let path = cluster.agent_folder(&node).join("agent.env");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(&bundle.api_url));
    std::fs::write(&path, text.replace(&bundle.api_url, &ingress.url())).unwrap();
    cluster.restart_agent(&node);
    let rented = rent_on(cluster, &node).await;
    rented.expect_state("active").await;
    rented.release_fully().await;
    assert!(!cluster.agent_log(&node).contains("recovered"), "it keeps its identity");
}

async fn expect_removed_node_refused(cluster: &mut TestCluster, ingress: &IngressProxy) {
    let agent = onboard_fake_agent(cluster, ingress).await;
    let waiting = agent.poll(50);
    let removing = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        for step in ["retire", "remove"] {
            let path = format!("/api/v1/admin/nodes/{}/{step}", agent.node_id);
            let answer = cluster.admin.post(&path, &json!({ "reason": "a test wants it gone" })).await;
            assert!(answer.status.is_success(), "{answer}");
        }
    };
    let began = Instant::now();
    let (parked, ()) = tokio::join!(waiting, removing);
    assert_refused(&parked.expect("an answer, not a cut connection: it is shared"), "node_removed");
    // Before the end of the poll itself.
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
    assert_refused(&agent.poll(1).await.unwrap(), "node_removed");
    assert_refused(&agent.heartbeat().await, "node_removed");
}

fn assert_refused(answer: &ApiResponse, reason: &str) {
    let refused = answer.clone();
    assert_eq!(refused.expect_error(401, "invalid_node_identity").body["details"]["reason"], reason);
}

async fn expect_forgeries_refused(cluster: &mut TestCluster, kind: ProxyKind, ingress: &IngressProxy) {
    let (agent, victim) = (onboard_fake_agent(cluster, ingress).await, onboard_fake_agent(cluster, ingress).await);
    let asks = async |client: &Client, node: Uuid, headers: &[(&str, &str)]| {
        let request = agent.request_with(client, node, Method::GET, SHORT_WAIT);
        send_request(headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))).await
    };
    let forged = kind.header_value(&victim.certificate_pem);
    let name = kind.header();
    let alias = name.replace('-', "_");
    let behind_it = format!("{forged}%0D%0A{name}:%20{forged}");
    let (too_long, twice) = ("A".repeat(12 * 1024), format!("{forged}, {forged}"));
    let every: Vec<(&str, &str)> =
        [ProxyKind::Haproxy, ProxyKind::Nginx, ProxyKind::Envoy].map(|kind| (kind.header(), forged.as_str())).into();
    let writings: [&[(&str, &str)]; 7] = [
        &[],
        &[(name, &forged)],
        &[(name, &forged), (name, &forged)],
        &[(&alias, &forged)],
        &every,
        &[(name, &behind_it)],
        &[(name, &twice)],
    ];

    let bundle = &agent.bundle;
    for client in [anonymous(bundle), anonymous_over_http1(bundle)] {
        for headers in writings {
            let answer = asks(&client, victim.node_id, headers).await.unwrap();
            assert_refused(&answer, "certificate_missing");
        }
    }
    for client in [agent.client_without_pool(), agent.client_over_http1(None)] {
        for headers in writings {
            let own = asks(&client, agent.node_id, headers).await.unwrap();
            assert_eq!(own.status, StatusCode::NO_CONTENT, "{headers:?}: {own}");
            let others = asks(&client, victim.node_id, headers).await.unwrap();
            assert_refused(&others, "certificate_unknown");
        }
    }

    // Either the proxy or the replica may refuse a long header.
    for client in
        [anonymous(bundle), anonymous_over_http1(bundle), agent.client_without_pool(), agent.client_over_http1(None)]
    {
        if let Ok(answer) = asks(&client, victim.node_id, &[(name, &too_long)]).await {
            assert!(answer.status.is_client_error(), "{answer}");
        }
    }

    // Only HTTP/1.1 has headers that are dropped by a `Connection` header.
    let dropping = format!("close, {name}");
    for headers in [&[("connection", dropping.as_str())][..], &[("connection", &dropping), (name, &forged)]] {
        let own = asks(&agent.client_over_http1(None), agent.node_id, headers).await.unwrap();
        assert!(matches!(own.status.as_u16(), 204 | 400 | 401), "{own}");
        for client in [anonymous_over_http1(bundle), agent.client_over_http1(None)] {
            let others = asks(&client, victim.node_id, headers).await.unwrap();
            assert!(matches!(others.status.as_u16(), 400 | 401), "{others}");
        }
    }

    // Either the proxy or the replica may refuse another authority's certificate.
    let (certificate, key) = certificate_of_another_authority(victim.node_id);
    let client = agent.client_over_http1(Some((&certificate, &key)));
    if let Ok(answer) = asks(&client, victim.node_id, &[]).await {
        assert!(answer.status.is_client_error(), "{answer}");
    }

    // On a direct connection the header is ignored, whatever it contains; the connection's own certificate counts.
    let past = async |client: &Client, node: Uuid| {
        let url = format!("{}/internal/v1/nodes/{node}/{SHORT_WAIT}", cluster.replicas[0].node_url());
        send_request(client.get(url).header(name, &forged)).await.unwrap()
    };
    assert_refused(&past(&anonymous(bundle), victim.node_id).await, "certificate_missing");
    assert_refused(&past(&agent.client_without_pool(), victim.node_id).await, "certificate_unknown");
    assert_eq!(past(&agent.client_without_pool(), agent.node_id).await.status, StatusCode::NO_CONTENT);
}

/// A certificate for the node's name by another authority, with its key (PEM).
fn certificate_of_another_authority(node: Uuid) -> (String, String) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(format!("spiffe://gpuaas/node/{node}").as_str().try_into().unwrap())];
    (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
}

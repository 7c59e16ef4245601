//! The node API behind real proxies, each as its file under `deploy/ingress` sets it up: agents, long waits, and whoever would pass for
//! somebody else. What a replica makes of a proxy that lets such things through is tested in `edge/src/node_api/tests/forwarding.rs`.

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use reqwest::{Client, Method, StatusCode};
use serde_json::json;
use std::time::{Duration, Instant};
use tests::world::client::{Answer, answer_to};
use tests::world::hand::{HandAgent, anonymous, anonymous_over_http1};
use tests::world::ingress::{Ingress, Kind};
use tests::world::{GPUS, OnboardedNode, REGION, Rented, World, id_of};
use uuid::Uuid;

const SHORT_WAIT: &str = "tasks/wait?timeout_seconds=1";

#[tokio::test(flavor = "multi_thread")]
async fn behind_haproxy_nodes_live_and_nobody_passes_for_another() {
    story(Kind::Haproxy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_nginx_nodes_live_and_nobody_passes_for_another() {
    story(Kind::Nginx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_envoy_nodes_live_and_nobody_passes_for_another() {
    story(Kind::Envoy).await;
}

async fn story(kind: Kind) {
    let address = Ingress::address();
    let plan = Ingress::variables(kind, address).into_iter();
    let mut world = plan.fold(World::plan(), |plan, (name, value)| plan.variable(name, &value)).start().await;
    let ingress = Ingress::start(kind, address, &world).await;

    // The longest wait there is, while everything else happens.
    let parked = by_hand(&mut world, &ingress).await;
    let waiting = tokio::spawn(async move {
        let began = Instant::now();
        (parked.poll(55).await, began.elapsed())
    });

    let expiring = expires(&mut world).await;
    a_tenant_comes_and_goes(&mut world).await;
    nobody_passes_for_another(&mut world, kind, &ingress).await;
    a_direct_node_moves_behind_the_proxy(&mut world, &ingress).await;
    a_removed_node_is_told_so(&mut world, &ingress).await;
    recovers(&mut world, expiring).await;

    let (answer, lasted) = waiting.await.unwrap();
    assert_eq!(answer.expect("the proxy leaves a wait alone").status, StatusCode::NO_CONTENT);
    assert!(lasted > Duration::from_secs(54), "{lasted:?}");
    world.end().await;
}

/// Enrolled without a certificate, then heard and let wait with one.
async fn by_hand(world: &mut World, ingress: &Ingress) -> HandAgent {
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    assert_eq!(bundle.api_url, ingress.url());
    let agent = HandAgent::onboard(&bundle, GPUS).await;
    world.keep_secret("a node's key", agent.key_pem.lines().nth(1).expect("PEM has lines"));
    agent
}

async fn a_tenant_comes_and_goes(world: &mut World) {
    let node = world.node("h100").await;
    let rented = rent_on(world, &node).await;
    rented.expect_state("active").await;
    rented.release().await;
    rented.expect_state("released").await;
}

async fn rent_on(world: &World, node: &OnboardedNode) -> Rented {
    let wanted = json!({ "sku": "h100", "region_code": REGION, "gpu_count": 1, "node_id": node.id });
    Rented::new(id_of(&world.user.post("/api/v1/allocations", &wanted).await.created()), world.user.clone())
}

/// A node whose agent is dead, and whose certificate ends in half a minute.
async fn expires(world: &mut World) -> (OnboardedNode, Instant) {
    world.set_policy("node.certificate_ttl_seconds", json!(30)).await;
    let node = world.node("h100").await;
    // Before certificates live longer again: it must not renew once more.
    world.kill9_agent(&node);
    world.set_policy("node.certificate_ttl_seconds", json!(86_400)).await;
    (node, Instant::now() + Duration::from_secs(31))
}

async fn recovers(world: &mut World, (node, expired_at): (OnboardedNode, Instant)) {
    tokio::time::sleep_until(expired_at.into()).await;
    world.restart_agent(&node);
    let rented = rent_on(world, &node).await;
    rented.expect_state("active").await;
    let log = world.agent_log(&node);
    assert!(log.contains("\"recovered\"") || log.contains("recovered"), "{log}");
    rented.release().await;
    rented.expect_state("released").await;
}

async fn a_direct_node_moves_behind_the_proxy(world: &mut World, ingress: &Ingress) {
    let node = world.register("h100").await;
    let mut bundle = world.bundle(&node).await;
    bundle.api_url = world.replicas[0].node_url();
    world.start_agent(&node.name, &bundle);
    node.expect_state("active").await;

    world.kill9_agent(&node);
    let path = world.agent_folder(&node).join("agent.env");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(&bundle.api_url));
    std::fs::write(&path, text.replace(&bundle.api_url, &ingress.url())).unwrap();
    world.restart_agent(&node);
    let rented = rent_on(world, &node).await;
    rented.expect_state("active").await;
    rented.release().await;
    rented.expect_state("released").await;
    assert!(!world.agent_log(&node).contains("recovered"), "it keeps its identity");
}

async fn a_removed_node_is_told_so(world: &mut World, ingress: &Ingress) {
    let agent = by_hand(world, ingress).await;
    let waiting = agent.poll(50);
    let removing = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        for step in ["retire", "remove"] {
            let path = format!("/api/v1/admin/nodes/{}/{step}", agent.node_id);
            let answer = world.admin.post(&path, &json!({ "reason": "a test wants it gone" })).await;
            assert!(answer.status.is_success(), "{answer}");
        }
    };
    let began = Instant::now();
    let (parked, ()) = tokio::join!(waiting, removing);
    assert_not_let_in(&parked.expect("an answer, not a cut connection: it is shared"), "node_removed");
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_not_let_in(&agent.poll(1).await.unwrap(), "node_removed");
    assert_not_let_in(&agent.heartbeat().await, "node_removed");
}

fn assert_not_let_in(answer: &Answer, reason: &str) {
    let refused = answer.clone();
    assert_eq!(refused.refused(401, "invalid_node_identity").body["details"]["reason"], reason);
}

async fn nobody_passes_for_another(world: &mut World, kind: Kind, ingress: &Ingress) {
    let (agent, victim) = (by_hand(world, ingress).await, by_hand(world, ingress).await);
    let asks = async |client: &Client, node: Uuid, headers: &[(&str, &str)]| {
        let request = agent.request_with(client, node, Method::GET, SHORT_WAIT);
        answer_to(headers.iter().fold(request, |request, (name, value)| request.header(*name, *value))).await
    };
    let forged = kind.written(&victim.certificate_pem);
    let name = kind.header();
    let alias = name.replace('-', "_");
    let behind_it = format!("{forged}%0D%0A{name}:%20{forged}");
    let (too_long, twice) = ("A".repeat(12 * 1024), format!("{forged}, {forged}"));
    let every: Vec<(&str, &str)> =
        [Kind::Haproxy, Kind::Nginx, Kind::Envoy].map(|kind| (kind.header(), forged.as_str())).into();
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
            assert_not_let_in(&answer, "certificate_missing");
        }
    }
    for client in [agent.client_without_pool(), agent.client_over_http1(None)] {
        for headers in writings {
            let own = asks(&client, agent.node_id, headers).await.unwrap();
            assert_eq!(own.status, StatusCode::NO_CONTENT, "{headers:?}: {own}");
            let others = asks(&client, victim.node_id, headers).await.unwrap();
            assert_not_let_in(&others, "certificate_unknown");
        }
    }

    // Which of them gives up over a long header, and how, is all one.
    for client in
        [anonymous(bundle), anonymous_over_http1(bundle), agent.client_without_pool(), agent.client_over_http1(None)]
    {
        if let Ok(answer) = asks(&client, victim.node_id, &[(name, &too_long)]).await {
            assert!(answer.status.is_client_error(), "{answer}");
        }
    }

    // HTTP/1.1 alone knows headers that are dropped on the way.
    let dropping = format!("close, {name}");
    for headers in [&[("connection", dropping.as_str())][..], &[("connection", &dropping), (name, &forged)]] {
        let own = asks(&agent.client_over_http1(None), agent.node_id, headers).await.unwrap();
        assert!(matches!(own.status.as_u16(), 204 | 400 | 401), "{own}");
        for client in [anonymous_over_http1(bundle), agent.client_over_http1(None)] {
            let others = asks(&client, victim.node_id, headers).await.unwrap();
            assert!(matches!(others.status.as_u16(), 400 | 401), "{others}");
        }
    }

    // Whether the proxy or the replica says no to another authority's certificate is all one.
    let (certificate, key) = certificate_of_another_authority(victim.node_id);
    let client = agent.client_over_http1(Some((&certificate, &key)));
    if let Ok(answer) = asks(&client, victim.node_id, &[]).await {
        assert!(answer.status.is_client_error(), "{answer}");
    }

    // Past the proxy nobody's word is taken, whatever the header says; one's own certificate is one's own.
    let past = async |client: &Client, node: Uuid| {
        let url = format!("{}/internal/v1/nodes/{node}/{SHORT_WAIT}", world.replicas[0].node_url());
        answer_to(client.get(url).header(name, &forged)).await.unwrap()
    };
    assert_not_let_in(&past(&anonymous(bundle), victim.node_id).await, "certificate_missing");
    assert_not_let_in(&past(&agent.client_without_pool(), victim.node_id).await, "certificate_unknown");
    assert_eq!(past(&agent.client_without_pool(), agent.node_id).await.status, StatusCode::NO_CONTENT);
}

/// For the node's name, by somebody else. Certificate and key, PEM.
fn certificate_of_another_authority(node: Uuid) -> (String, String) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(format!("spiffe://gpuaas/node/{node}").as_str().try_into().unwrap())];
    (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
}

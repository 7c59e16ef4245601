//! The node API behind proxies. What a proxy does to a request before it comes here is tested with real ones in `tests/it/ingress.rs`.

use super::agent::{Agent, Applicant, enrollment, recovery_key};
use super::identity::{remove, short_lived};
use super::world::{Answer, World};
use crate::identity::TrustDomain;
use crate::identity::forwarded::Forwarding;
use crate::node_ca::NodeCa;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{TimeDelta, Utc};
use domain::policy::Key;
use reqwest::Method;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::time::Duration;
use uuid::Uuid;

/// Where all who connect are.
const HERE: &[&str] = &["127.0.0.0/8"];
const ELSEWHERE: &[&str] = &["192.0.2.0/24", "2001:db8::/32"];

/// The header's value as a well-configured proxy writes it for a client with this certificate.
fn written(way: Forwarding, certificate_pem: &str) -> String {
    let escaped = || {
        let byte = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        };
        certificate_pem.bytes().map(byte).collect::<String>()
    };
    match way {
        Forwarding::Rfc9440 => {
            format!(":{}:", BASE64.encode(CertificateDer::from_pem_slice(certificate_pem.as_bytes()).unwrap()))
        }
        Forwarding::Xfcc => format!("Hash=0f;Cert=\"{}\"", escaped()),
        Forwarding::Nginx => escaped(),
    }
}

/// A proxy's connection, over HTTP/1.1 or 2.
fn proxy(world: &World, http2: bool) -> reqwest::Client {
    let mut tls = ClientConfig::clone(&world.tls(None));
    tls.alpn_protocols = vec![if http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    world.client(&tls.into())
}

/// A wait of the agent that comes with these headers.
async fn wait(world: &World, agent: &Agent, headers: &[(&str, &str)]) -> Answer {
    let path = agent.at("tasks/wait?timeout_seconds=1");
    world.send_with(&proxy(world, false), Method::GET, &path, headers, None).await
}

async fn wait_as(world: &World, way: Forwarding, agent: &Agent, certificate_pem: &str) -> Answer {
    wait(world, agent, &[(way.header().as_str(), &written(way, certificate_pem))]).await
}

#[tokio::test]
async fn a_node_that_a_trusted_proxy_forwards_is_let_in_on_its_own_path_alone() {
    for way in Forwarding::ALL {
        let world = World::behind(way, HERE).await;
        let (agent, other) = (world.active().await, world.active().await);
        let (name, value) = (way.header(), written(way, agent.certificate_pem()));
        for http2 in [false, true] {
            let (client, headers) = (proxy(&world, http2), [(name.as_str(), value.as_str())]);
            let path = agent.at("tasks/wait?timeout_seconds=1");
            world.send_with(&client, Method::GET, &path, &headers, None).await.is(204);
            let body = agent.heartbeat().to_string().into_bytes();
            world.send_with(&client, Method::POST, &agent.at("heartbeat"), &headers, Some(body)).await.is(200);
            let path = other.at("tasks/wait?timeout_seconds=1");
            let answer = world.send_with(&client, Method::GET, &path, &headers, None).await;
            answer.not_let_in("certificate_unknown");
        }
        wait(&world, &agent, &[]).await.not_let_in("certificate_missing");
        // The proxy's own certificate is nobody's word for a node.
        agent.wait(&world, 1).await.not_let_in("certificate_missing");
    }
}

#[tokio::test]
async fn a_forwarded_identity_from_an_untrusted_peer_opens_nothing_and_takes_nothing_away() {
    for way in Forwarding::ALL {
        let world = World::behind(way, ELSEWHERE).await;
        let (agent, other) = (world.active().await, world.active().await);
        wait_as(&world, way, &agent, agent.certificate_pem()).await.not_let_in("certificate_missing");
        // With a certificate of its own it is who that says, whatever it writes.
        let (own, forged) = (world.client(&agent.tls), written(way, other.certificate_pem()));
        for other_way in Forwarding::ALL {
            let headers = [(other_way.header().to_string(), forged.clone())];
            let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let at = |agent: &Agent| agent.at("tasks/wait?timeout_seconds=1");
            world.send_with(&own, Method::GET, &at(&agent), &headers, None).await.is(204);
            let answer = world.send_with(&own, Method::GET, &at(&other), &headers, None).await;
            answer.not_let_in("certificate_unknown");
        }
    }
}

#[tokio::test]
async fn without_configured_proxies_no_header_is_anybodys_word() {
    let world = World::new().await;
    let agent = world.active().await;
    for way in Forwarding::ALL {
        wait_as(&world, way, &agent, agent.certificate_pem()).await.not_let_in("certificate_missing");
    }
}

#[tokio::test]
async fn a_trusted_proxy_is_heard_in_its_one_way_alone() {
    for way in Forwarding::ALL {
        let world = World::behind(way, HERE).await;
        let agent = world.active().await;
        for other in Forwarding::ALL.into_iter().filter(|other| *other != way) {
            wait_as(&world, other, &agent, agent.certificate_pem()).await.not_let_in("certificate_missing");
        }
    }
}

#[tokio::test]
async fn a_header_twice_with_underscores_or_dropped_by_a_connection_header_opens_nothing() {
    for way in Forwarding::ALL {
        let world = World::behind(way, HERE).await;
        let (agent, other) = (world.active().await, world.active().await);
        let (name, good) = (way.header(), written(way, agent.certificate_pem()));
        let (name, foreign) = (name.as_str(), written(way, other.certificate_pem()));
        let alias = name.replace('-', "_");
        for headers in [[(name, good.as_str()), (name, &foreign)], [(name, &foreign), (name, &good)]] {
            wait(&world, &agent, &headers).await.not_let_in("certificate_unknown");
        }
        wait(&world, &agent, &[(&alias, &good)]).await.not_let_in("certificate_missing");
        wait(&world, &agent, &[(&alias, &foreign), (name, &good)]).await.is(204);
        wait(&world, &agent, &[(name, &good), ("connection", name)]).await.not_let_in("certificate_unknown");
    }
}

#[tokio::test]
async fn what_is_no_single_certificate_opens_nothing_and_says_whose_fault_it_is() {
    for way in Forwarding::ALL {
        let world = World::behind(way, HERE).await;
        let agent = world.active().await;
        let (name, good) = (way.header(), written(way, agent.certificate_pem()));
        for bad in [
            format!("{good},{good}"),
            format!("{good}%0D%0Aclient-cert:%20x"),
            good.replace("CERTIFICATE", "SECRET").replace(':', ""),
            "A".repeat(17 * 1024),
            "not base64, not PEM".to_owned(),
        ] {
            let answer = wait(&world, &agent, &[(name.as_str(), &bad)]).await;
            answer.not_let_in("certificate_unknown");
            assert!(answer.body["message"].as_str().unwrap().contains("deploy/ingress"), "{way}: {}", answer.body);
            assert!(!answer.body.to_string().contains("AAAAAAA"));
        }
    }
}

#[tokio::test]
async fn a_forwarded_certificate_of_another_authority_an_expired_one_and_a_removed_nodes_open_nothing() {
    for way in Forwarding::ALL {
        let world = World::behind(way, HERE).await;
        let (agent, removed) = (world.active().await, world.active().await);
        // A proxy that verifies nothing, or trusts too many, changes nothing.
        let domain = TrustDomain::parse("gpu.example").unwrap();
        let now = Utc::now();
        let foreign = NodeCa::create(domain, now, now + TimeDelta::days(1)).unwrap().ca;
        let issued = foreign.issue(agent.node_id, &Applicant::new().csr_pem, now, now + TimeDelta::hours(1)).unwrap();
        wait_as(&world, way, &agent, &issued.certificate_pem).await.not_let_in("certificate_unknown");
        let stray = &world.services.trust.keys.load().node;
        let issued = stray.issue(agent.node_id, &Applicant::new().csr_pem, now, now + TimeDelta::hours(1)).unwrap();
        wait_as(&world, way, &agent, &issued.certificate_pem).await.not_let_in("certificate_unknown");

        let brief = short_lived(&world, &agent, TimeDelta::milliseconds(1_500)).await;
        tokio::time::sleep(Duration::from_millis(2_100)).await;
        wait_as(&world, way, &brief, brief.certificate_pem()).await.not_let_in("certificate_expired");

        wait_as(&world, way, &removed, removed.certificate_pem()).await.is(204);
        remove(&world, &removed).await;
        wait_as(&world, way, &removed, removed.certificate_pem()).await.not_let_in("node_removed");
    }
}

#[tokio::test]
async fn removing_a_node_ends_its_wait_on_a_proxys_shared_connection_and_no_others() {
    let way = Forwarding::Rfc9440;
    let world = World::behind(way, HERE).await;
    let (removed, other) = (world.active().await, world.active().await);
    let client = proxy(&world, true);
    let waiting = async |agent: &Agent, seconds: u32| {
        let path = agent.at(&format!("tasks/wait?timeout_seconds={seconds}"));
        let value = written(way, agent.certificate_pem());
        world.send_with(&client, Method::GET, &path, &[(way.header().as_str(), &value)], None).await
    };
    let began = std::time::Instant::now();
    let removing = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        remove(&world, &removed).await;
    };
    let (ended, lasted, ()) = tokio::join!(waiting(&removed, 30), waiting(&other, 2), removing);
    ended.not_let_in("node_removed");
    lasted.is(204);
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_node_without_a_certificate_enrolls_through_a_proxy_and_is_limited_by_its_own_address() {
    for way in Forwarding::ALL {
        let world = World::behind(way, HERE).await;
        world.set_policy(Key::RateLimitEnrollment, 2);
        let node_id = world.register().await;
        let token = world.token(node_id, None).await;
        let body = enrollment(&token, &Applicant::new().csr_pem, &recovery_key(), Uuid::new_v4()).to_string();
        let path = format!("/internal/v1/nodes/{node_id}/enroll");
        let from = async |addresses: &str, body: &str| {
            let (client, headers) = (proxy(&world, false), [("x-forwarded-for", addresses), ("ssl-client-cert", "x")]);
            world.send_with(&client, Method::POST, &path, &headers, Some(body.to_owned().into_bytes())).await
        };
        // A proxy's own copy of the client's certificate is of no use here, nor in the way.
        from("198.51.100.1", &body).await.is(201);
        from("203.0.113.9, 198.51.100.1", "{}").await.refused(400, "invalid_request");
        // What stands before the last address is the client's own writing, and proxies behind proxies are no clients.
        for same in ["198.51.100.1", "8.8.8.8, 198.51.100.1", "198.51.100.1, 127.0.0.9"] {
            from(same, "{}").await.refused(429, "rate_limited");
        }
        from("198.51.100.2", "{}").await.refused(400, "invalid_request");
    }
}

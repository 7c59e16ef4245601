//! The node API behind proxies. The changes that real proxies make to a request are tested in `tests/it/ingress.rs`.

use super::agent::Agent;
use super::harness::{NodeApiHarness, TestResponse};
use super::identity::{remove, short_lived};
use crate::tls::forwarded_client_certificate::Forwarding;
use crate::trust::node_ca::NodeCa;
use crate::trust::node_certificate::TrustDomain;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::{TimeDelta, Utc};
use domain::policy::PolicyKey;
use reqwest::Method;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::time::Duration;
use test_host::simulated_machine::{CertificateRequest, SimulatedMachine};
use uuid::Uuid;
use wire::error::RECOVERABLE;

/// The network of all clients of these tests.
const LOOPBACK: &[&str] = &["127.0.0.0/8"];
const OTHER_NETWORKS: &[&str] = &["192.0.2.0/24", "2001:db8::/32"];

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
fn proxy(harness: &NodeApiHarness, http2: bool) -> reqwest::Client {
    let mut tls = ClientConfig::clone(&harness.tls(None));
    tls.alpn_protocols = vec![if http2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
    harness.client(&tls.into())
}

/// A poll of the agent with these headers.
async fn wait(harness: &NodeApiHarness, agent: &Agent, headers: &[(&str, &str)]) -> TestResponse {
    let path = agent.at("tasks/wait?timeout_seconds=1");
    harness.send_with(&proxy(harness, false), Method::GET, &path, headers, None).await
}

async fn wait_as(harness: &NodeApiHarness, way: Forwarding, agent: &Agent, certificate_pem: &str) -> TestResponse {
    wait(harness, agent, &[(way.header().as_str(), &written(way, certificate_pem))]).await
}

#[tokio::test]
async fn node_forwarded_by_a_trusted_proxy_is_admitted_on_its_own_path_only() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, LOOPBACK).await;
        let (agent, other) = (harness.active().await, harness.active().await);
        let (name, value) = (way.header(), written(way, agent.certificate_pem()));
        for http2 in [false, true] {
            let (client, headers) = (proxy(&harness, http2), [(name.as_str(), value.as_str())]);
            let path = agent.at("tasks/wait?timeout_seconds=1");
            harness.send_with(&client, Method::GET, &path, &headers, None).await.is(204);
            let body = agent.heartbeat().to_string().into_bytes();
            harness.send_with(&client, Method::POST, &agent.at("heartbeat"), &headers, Some(body)).await.is(200);
            let path = other.at("tasks/wait?timeout_seconds=1");
            let answer = harness.send_with(&client, Method::GET, &path, &headers, None).await;
            answer.is_refused_as("certificate_unknown");
        }
        wait(&harness, &agent, &[]).await.is_refused_as("certificate_missing");
        // The proxy's own certificate does not identify a node.
        agent.wait(&harness, 1).await.is_refused_as("certificate_missing");
    }
}

#[tokio::test]
async fn forwarded_identity_of_an_untrusted_peer_is_ignored() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, OTHER_NETWORKS).await;
        let (agent, other) = (harness.active().await, harness.active().await);
        wait_as(&harness, way, &agent, agent.certificate_pem()).await.is_refused_as("certificate_missing");
        // With a certificate of its own it is identified by that, whatever its headers contain.
        let (own, forged) = (harness.client(&agent.tls), written(way, other.certificate_pem()));
        for other_way in Forwarding::ALL {
            let headers = [(other_way.header().to_string(), forged.clone())];
            let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
            let at = |agent: &Agent| agent.at("tasks/wait?timeout_seconds=1");
            harness.send_with(&own, Method::GET, &at(&agent), &headers, None).await.is(204);
            let answer = harness.send_with(&own, Method::GET, &at(&other), &headers, None).await;
            answer.is_refused_as("certificate_unknown");
        }
    }
}

#[tokio::test]
async fn certificate_headers_are_ignored_without_configured_proxies() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    for way in Forwarding::ALL {
        wait_as(&harness, way, &agent, agent.certificate_pem()).await.is_refused_as("certificate_missing");
    }
}

#[tokio::test]
async fn trusted_proxy_is_accepted_only_in_its_configured_format() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, LOOPBACK).await;
        let agent = harness.active().await;
        for other in Forwarding::ALL.into_iter().filter(|other| *other != way) {
            wait_as(&harness, other, &agent, agent.certificate_pem()).await.is_refused_as("certificate_missing");
        }
    }
}

#[tokio::test]
async fn ambiguous_certificate_header_is_refused() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, LOOPBACK).await;
        let (agent, other) = (harness.active().await, harness.active().await);
        let (name, good) = (way.header(), written(way, agent.certificate_pem()));
        let (name, foreign) = (name.as_str(), written(way, other.certificate_pem()));
        let alias = name.replace('-', "_");
        for headers in [[(name, good.as_str()), (name, &foreign)], [(name, &foreign), (name, &good)]] {
            wait(&harness, &agent, &headers).await.is_refused_as("certificate_unknown");
        }
        wait(&harness, &agent, &[(&alias, &good)]).await.is_refused_as("certificate_missing");
        wait(&harness, &agent, &[(&alias, &foreign), (name, &good)]).await.is(204);
        wait(&harness, &agent, &[(name, &good), ("connection", name)]).await.is_refused_as("certificate_unknown");
    }
}

#[tokio::test]
async fn invalid_forwarded_certificate_is_refused_with_the_party_at_fault() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, LOOPBACK).await;
        let agent = harness.active().await;
        let (name, good) = (way.header(), written(way, agent.certificate_pem()));
        for bad in [
            format!("{good},{good}"),
            format!("{good}%0D%0Aclient-cert:%20x"),
            good.replace("CERTIFICATE", "SECRET").replace(':', ""),
            "A".repeat(17 * 1024),
            "not base64, not PEM".to_owned(),
        ] {
            let answer = wait(&harness, &agent, &[(name.as_str(), &bad)]).await;
            answer.is_refused_as("certificate_unknown");
            assert!(answer.body["message"].as_str().unwrap().contains("deploy/ingress"), "{way}: {}", answer.body);
            assert!(!answer.body.to_string().contains("AAAAAAA"));
        }
    }
}

#[tokio::test]
async fn forwarded_certificate_that_is_foreign_expired_or_of_a_removed_node_is_refused() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, LOOPBACK).await;
        let (agent, removed) = (harness.active().await, harness.active().await);
        // A proxy that verifies nothing, or trusts too many, changes nothing.
        let domain = TrustDomain::parse("gpu.example").unwrap();
        let now = Utc::now();
        let foreign = NodeCa::create(domain, now, now + TimeDelta::days(1)).unwrap().ca;
        let issued = foreign
            .issue(agent.node_id, &CertificateRequest::generate().csr_pem, now, now + TimeDelta::hours(1))
            .unwrap();
        let answer = wait_as(&harness, way, &agent, &issued.certificate_pem).await;
        let details = answer.is_refused_as("certificate_unknown");
        assert!(details.get(RECOVERABLE).is_none(), "a recovery changes no proxy: {details}");
        let stray = &harness.app.trust.keys.load().node;
        let issued = stray
            .issue(agent.node_id, &CertificateRequest::generate().csr_pem, now, now + TimeDelta::hours(1))
            .unwrap();
        wait_as(&harness, way, &agent, &issued.certificate_pem).await.is_refused_as("certificate_unknown");

        let brief = short_lived(&harness, &agent, TimeDelta::milliseconds(1_500)).await;
        tokio::time::sleep(Duration::from_millis(2_100)).await;
        wait_as(&harness, way, &brief, brief.certificate_pem()).await.is_refused_as("certificate_expired");

        wait_as(&harness, way, &removed, removed.certificate_pem()).await.is(204);
        remove(&harness, &removed).await;
        wait_as(&harness, way, &removed, removed.certificate_pem()).await.is_refused_as("node_removed");
    }
}

#[tokio::test]
async fn removing_a_node_ends_only_its_poll_on_a_shared_proxy_connection() {
    let way = Forwarding::Rfc9440;
    let harness = NodeApiHarness::behind(way, LOOPBACK).await;
    let (removed, other) = (harness.active().await, harness.active().await);
    let client = proxy(&harness, true);
    let waiting = async |agent: &Agent, seconds: u32| {
        let path = agent.at(&format!("tasks/wait?timeout_seconds={seconds}"));
        let value = written(way, agent.certificate_pem());
        harness.send_with(&client, Method::GET, &path, &[(way.header().as_str(), &value)], None).await
    };
    let began = std::time::Instant::now();
    let removing = async {
        harness.until_polled(2).await;
        remove(&harness, &removed).await;
    };
    let (ended, lasted, ()) = tokio::join!(waiting(&removed, 55), waiting(&other, 5), removing);
    ended.is_refused_as("node_removed");
    lasted.is(204);
    // Before the end of the poll of the node that was removed.
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
}

#[tokio::test]
async fn node_enrolls_through_a_proxy_and_is_limited_by_its_own_address() {
    for way in Forwarding::ALL {
        let harness = NodeApiHarness::behind(way, LOOPBACK).await;
        harness.set_policy(PolicyKey::RateLimitEnrollment, 2);
        let node_id = harness.register().await;
        let token = harness.token(node_id, None).await;
        let body = SimulatedMachine::new(Uuid::nil(), 2)
            .enrollment_body(&token, &CertificateRequest::generate().csr_pem)
            .to_string();
        let path = format!("/internal/v1/nodes/{node_id}/enroll");
        let from = async |addresses: &str, body: &str| {
            let (client, headers) =
                (proxy(&harness, false), [("x-forwarded-for", addresses), ("ssl-client-cert", "x")]);
            harness.send_with(&client, Method::POST, &path, &headers, Some(body.to_owned().into_bytes())).await
        };
        // A proxy's own copy of the client's certificate neither helps nor hinders.
        from("198.51.100.1", &body).await.is(201);
        from("203.0.113.9, 198.51.100.1", "{}").await.refused(400, "invalid_request");
        // The entries before the last address are written by the client, and proxies behind proxies are not clients.
        for same in ["198.51.100.1", "8.8.8.8, 198.51.100.1", "198.51.100.1, 127.0.0.9"] {
            from(same, "{}").await.refused(429, "rate_limited");
        }
        from("198.51.100.2", "{}").await.refused(400, "invalid_request");
    }
}

use super::agent::Agent;
use super::harness::{NodeApiHarness, TestResponse};
use crate::api::node::bootstrap_bundle::bootstrap_bundle;
use chrono::{DateTime, TimeDelta, Utc};
use domain::NodeId;
use domain::node::{Phase, Request};
use domain::policy::PolicyKey;
use futures::StreamExt;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair, PKCS_RSA_SHA256, RsaKeySize, SanType};
use reqwest::Method;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use secrecy::SecretString;
use serde_json::{Value, json};
use test_host::CapturedLog;
use test_host::simulated_machine::{CertificateRequest, SimulatedMachine};
use uuid::Uuid;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::FromDer;

fn body_over(token: &str, csr_pem: &str) -> Value {
    SimulatedMachine::new(Uuid::nil(), 2).enrollment_body(token, csr_pem)
}

/// A body that is in order, over a fresh key.
fn body(token: &str) -> Value {
    body_over(token, &CertificateRequest::generate().csr_pem)
}

#[tokio::test]
async fn token_issues_one_certificate_for_its_node_and_validity() {
    let harness = NodeApiHarness::new().await;
    harness.set_policy(PolicyKey::NodeCertificateTtl, 7200);
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let answer = harness.enroll(node_id, &body(&token)).await;
    let enrolled = answer.is(201);
    assert_eq!(enrolled["recovery"], json!({"identity_generation": 1, "remaining": 5}));
    assert_eq!(enrolled["verifier_sets"], json!([]));
    assert_eq!(enrolled["chain_pem"], harness.app.trust.keys.load().node.bundle_pem());
    let der = CertificateDer::from_pem_slice(enrolled["certificate_pem"].as_str().unwrap().as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&der).unwrap();
    let names = &certificate.subject_alternative_name().unwrap().unwrap().value.general_names;
    assert_eq!(names, &[GeneralName::URI(&format!("spiffe://gpu.example/node/{node_id}"))]);
    let not_after: DateTime<Utc> = enrolled["not_after"].as_str().unwrap().parse().unwrap();
    assert_eq!(certificate.validity().not_after.timestamp(), not_after.timestamp());
    assert!((not_after - Utc::now() - TimeDelta::hours(2)).abs() < TimeDelta::seconds(60));
    let node = harness.node(node_id).await;
    assert!(matches!(node.lifecycle.phase, Phase::Enrolling { .. }));
    assert_eq!(node.machine.inventory.unwrap().gpus.len(), 2);
    let read: wire::enroll::EnrollAnswer = serde_json::from_value(answer.body).unwrap();
    assert_eq!(read.recovery.identity_generation, 1);
}

#[tokio::test]
async fn every_token_fault_has_one_response_and_its_cause_in_the_log() {
    let harness = NodeApiHarness::new().await;
    let [used, expired, other, gone, bare] = [
        harness.register().await,
        harness.register().await,
        harness.register().await,
        harness.register().await,
        harness.register().await,
    ];
    let token = harness.token(used, None).await;
    let first = body(&token);
    harness.enroll(used, &first).await.is(201);
    let late = harness.token(expired, Some(5)).await;
    let others = harness.token(other, None).await;
    let replaced = harness.token(other, None).await;
    let of_gone = harness.token(gone, None).await;
    harness.admin(gone, Request::Retire { reason: "test".into(), drain: false }).await;
    harness.admin(gone, Request::Remove { reason: "test".into() }).await;
    harness.advance(TimeDelta::seconds(6));

    let unknown = Uuid::now_v7();
    let cases = [
        (used, body(&token), "it was used before"),
        (used, first, "it was used before"),
        (expired, body(&late), "it has expired"),
        (used, body(&replaced), "it is another token"),
        (other, body(&others), "it is another token"),
        (bare, body(&replaced), "no token was issued"),
        (gone, body(&of_gone), "the node was removed"),
        (unknown, body(&replaced), "there is no such node"),
        (other, body("gpuenr_tooshort"), "not the form"),
        (other, body(""), "not the form"),
    ];
    let mut messages = Vec::new();
    for (node_id, body, cause) in cases {
        let answer = harness.enroll(node_id, &body).await;
        let fields: Vec<_> = answer.refused(401, "enrollment_rejected").as_object().unwrap().keys().collect();
        assert_eq!(fields, ["service", "span_id", "trace_id"], "no more than by what the operator finds it");
        messages.push(answer.body["message"].clone());
        let correlation = answer.headers["x-correlation-id"].to_str().unwrap();
        let logged =
            CapturedLog::of_process().lines_with(&[correlation, cause, &format!("node/{node_id}"), "\"WARN\""]);
        assert_eq!(logged.len(), 1, "{cause}");
    }
    messages.dedup();
    assert_eq!(messages.len(), 1);
    // What was not replaced is still valid.
    harness.enroll(other, &body(&replaced)).await.is(201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_fifty_uses_of_one_token_in_parallel_exactly_one_gets_a_certificate() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    // Half of them are the same request, half of them have keys of their own.
    let same = body(&token);
    let bodies: Vec<_> = (0..50).map(|n| if n % 2 == 0 { same.clone() } else { body(&token) }).collect();
    let answers = futures::future::join_all(bodies.iter().map(|body| harness.enroll(node_id, body))).await;
    let (winners, losers): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 201);
    assert_eq!(winners.len(), 1);
    for loser in losers {
        loser.refused(401, "enrollment_rejected");
    }
    let node = harness.node(node_id).await;
    assert_eq!((node.identity.certificates.len(), node.identity.generation), (1, 1));
}

#[tokio::test]
async fn a_request_for_foreign_names_or_as_an_authority_gets_a_plain_node_certificate() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["evil.example".to_owned()]).unwrap();
    let foreign = format!("spiffe://gpu.example/node/{}", Uuid::now_v7());
    params.subject_alt_names.push(SanType::URI(foreign.clone().try_into().unwrap()));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let csr = params.serialize_request(&key).unwrap().pem().unwrap();
    let answer = harness.enroll(node_id, &body_over(&token, &csr)).await;
    let pem = answer.is(201)["certificate_pem"].as_str().unwrap();
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&der).unwrap();
    assert!(!certificate.is_ca());
    let names = &certificate.subject_alternative_name().unwrap().unwrap().value.general_names;
    assert_eq!(names, &[GeneralName::URI(&format!("spiffe://gpu.example/node/{node_id}"))]);
}

#[tokio::test]
async fn invalid_enrollment_request_is_explained_and_does_not_spend_the_token() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let good = body(&token);
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = good.clone();
        change(&mut changed);
        changed
    };
    let weak = KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048);
    assert!(weak.is_ok(), "the weakest that is taken");
    let zero_key = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, [0; 32]);
    let cases: Vec<(Value, &str)> = vec![
        (with(&|body| body["csr_pem"] = "no pem".into()), "csr_pem"),
        (with(&|body| body["csr_pem"] = WEAK_CSR.into()), "csr_pem"),
        (with(&|body| body["csr_pem"] = damaged(good["csr_pem"].as_str().unwrap()).into()), "csr_pem"),
        (with(&|body| body["recovery_public_key"] = "AAAA".into()), "recovery_public_key"),
        (with(&|body| body["recovery_public_key"] = zero_key.clone().into()), "recovery_public_key"),
        (with(&|body| body["boot_id"] = "17".into()), "boot_id"),
        (with(&|body| body["inventory"]["gpus"][0]["index"] = (-1).into()), "inventory.gpus[0].index"),
        (with(&|body| body["inventory"]["memory_mib"] = u64::MAX.into()), "inventory.memory_mib"),
        (with(&|body| body["inventory"]["executor"] = "magic".into()), "inventory.executor"),
        (with(&|body| body["agent_version"] = "x".repeat(65).into()), "agent_version"),
        (with(&|body| body["bogus"] = 1.into()), "bogus"),
        (with(&|body| body["inventory"]["gpus"][1]["bogus"] = 1.into()), "inventory.gpus.[1].bogus"),
        (with(&|body| body["enrollment_token"] = json!([token])), "enrollment_token"),
    ];
    for (body, field) in cases {
        let answer = harness.enroll(node_id, &body).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], field, "{}", answer.body);
    }
    harness.enroll(node_id, &good).await.is(201);
}

/// A request over an RSA key of 1,024 bits, made with OpenSSL.
const WEAK_CSR: &str = include_str!("weak_csr.pem");

fn damaged(pem: &str) -> String {
    let middle = pem.len() / 2;
    let mut bytes = pem.as_bytes().to_vec();
    bytes[middle] = if bytes[middle] == b'A' { b'B' } else { b'A' };
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn unsupported_protocol_is_refused_with_the_supported_range() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let agent = harness.enrolled().await;
    let (oldest, newest) = (wire::OLDEST_PROTOCOL, wire::PROTOCOL);
    for protocol in [json!(0), json!(oldest - 1), json!(newest + 1), json!(70_000)] {
        let mut enrolling = body(&token);
        enrolling["protocol"] = protocol.clone();
        enrolling["a_field_of_the_future"] = 1.into();
        let mut beat = agent.heartbeat();
        beat["protocol"] = protocol;
        for answer in [harness.enroll(node_id, &enrolling).await, agent.post(&harness, "heartbeat", &beat).await] {
            let details = answer.refused(426, "upgrade_required");
            assert_eq!((&details["oldest_protocol"], &details["newest_protocol"]), (&json!(oldest), &json!(newest)));
        }
    }
    let mut old = body(&token);
    old["protocol"] = oldest.into();
    harness.enroll(node_id, &old).await.is(201);
}

#[tokio::test]
async fn malformed_enrollment_gets_the_envelope() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let path = format!("/internal/v1/nodes/{node_id}/enroll");
    let send = |body: Vec<u8>| harness.anonymous(Method::POST, &path, Some(body));
    send(b"{".to_vec()).await.refused(400, "invalid_request");
    send(b"[]".to_vec()).await.refused(400, "invalid_request");
    send(Vec::new()).await.refused(400, "invalid_request");
    send(vec![b' '; 10 << 20]).await.refused(413, "payload_too_large");
    send(vec![b' '; 300 << 10]).await.refused(413, "payload_too_large");
    harness.anonymous(Method::POST, &path, None).await.refused(415, "unsupported_media_type");
    harness.anonymous(Method::GET, &path, None).await.refused(405, "method_not_allowed");
    harness.anonymous(Method::GET, "/internal/v1/nodes", None).await.refused(404, "not_found");
    let bad_id = harness.anonymous(Method::POST, "/internal/v1/nodes/17/enroll", Some(b"{}".to_vec())).await;
    bad_id.refused(400, "invalid_request");
}

#[tokio::test]
async fn address_over_its_enrollment_rate_gets_retry_after() {
    let harness = NodeApiHarness::new().await;
    harness.set_policy(PolicyKey::RateLimitEnrollment, 240);
    let node_id = harness.register().await;
    // Over several connections: one that resets so many streams is closed.
    let clients: Vec<_> = (0..10).map(|_| harness.client(&harness.tls(None))).collect();
    let path = format!("/internal/v1/nodes/{node_id}/enroll");
    let flood = (0..400).map(|n| harness.send(&clients[n % 10], Method::POST, &path, Some(b"{".to_vec())));
    // Fewer at once than one address may send bodies.
    let answers: Vec<TestResponse> = futures::stream::iter(flood).buffer_unordered(32).collect().await;
    let limited = answers.iter().find(|answer| answer.status == 429).expect("a bound per address");
    let details = limited.refused(429, "rate_limited");
    assert_eq!((&details["limit"], &details["window_seconds"]), (&json!(240), &json!(60)));
    assert_eq!(details["policy_key"], "rate_limit.enrollment_requests_per_minute");
    assert!(limited.headers.contains_key("retry-after"));
    assert!(answers.iter().filter(|answer| answer.status == 400).count() >= 240);
}

#[tokio::test]
async fn node_over_its_renewal_rate_gets_retry_after_and_its_heartbeats_pass() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let mut admitted = 0;
    let limited = loop {
        let answer = agent.renew(&harness).await;
        if answer.status == 429 {
            break answer;
        }
        answer.is(200);
        admitted += 1;
        // 20 a minute, and one more every 3 s, of which a pause of the machine allows some.
        assert!(admitted <= 60, "renewals are not limited");
    };
    assert!(admitted >= 20, "{admitted}");
    let details = limited.refused(429, "rate_limited");
    assert_eq!(details["policy_key"], "rate_limit.node_renewals_per_minute");
    assert!(limited.headers.contains_key("retry-after"));
    assert!(harness.node(agent.node_id).await.identity.certificates.len() <= 8);
    agent.send_heartbeat(&harness).await.is(200);
}

#[tokio::test]
async fn node_over_its_request_rate_gets_retry_after_and_others_are_unaffected() {
    let harness = NodeApiHarness::new().await;
    harness.set_policy(PolicyKey::RateLimitNodeRequests, 600);
    let (loud, quiet) = (harness.active().await, harness.active().await);
    let mut limited = None;
    for _ in 0..40 {
        let flood = (0..50).map(|_| loud.get(&harness, "tasks/wait?timeout_seconds=0"));
        let answers: Vec<TestResponse> = futures::future::join_all(flood).await;
        limited = answers.into_iter().find(|answer| answer.status == 429);
        if limited.is_some() {
            break;
        }
    }
    let limited = limited.expect("a bound per node");
    assert_eq!(limited.refused(429, "rate_limited")["policy_key"], "rate_limit.node_requests_per_minute");
    quiet.send_heartbeat(&harness).await.is(200);
}

#[tokio::test]
async fn renewed_certificate_and_its_predecessor_are_both_valid() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let next = CertificateRequest::generate();
    let answer = agent.post(&harness, "certificate/renew", &json!({ "csr_pem": next.csr_pem })).await;
    assert_eq!(answer.is(200)["recovery"], json!({"identity_generation": 1, "remaining": 5}));
    let renewed = agent.with(&harness, answer.body["certificate_pem"].as_str().unwrap(), &next.key);
    assert_ne!(renewed.serial, agent.serial);
    agent.send_heartbeat(&harness).await.is(200);
    renewed.send_heartbeat(&harness).await.is(200);
    let bad = agent.post(&harness, "certificate/renew", &json!({ "csr_pem": WEAK_CSR })).await;
    assert_eq!(bad.refused(400, "invalid_request")["field"], "csr_pem");
    let unknown = agent.post(&harness, "certificate/renew", &json!({ "csr_pem": next.csr_pem, "ttl": 1 })).await;
    assert_eq!(unknown.refused(400, "invalid_request")["field"], "ttl");
}

#[tokio::test]
async fn bundle_contains_all_that_an_agent_needs_to_enroll() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let bundle = bootstrap_bundle(&harness.app, NodeId(node_id), SecretString::from(token.clone()));
    assert!(!format!("{bundle:?}").contains(&token));
    let served = serde_json::to_value(&bundle).unwrap();
    for name in [
        "SVC_NODE_ID",
        "SVC_ENROLLMENT_TOKEN",
        "SVC_API_URL",
        "SVC_TASK_SIGNING_PUBKEYS",
        "SVC_CA_BUNDLE_PATH",
        "SVC_NODE_CERT_CA_BUNDLE_PATH",
        "SVC_CERT_PATH",
        "SVC_KEY_PATH",
        "ca_bundle_pem",
        "ca_bundle_fingerprint",
    ] {
        assert!(!served[name].as_str().unwrap().is_empty(), "{name}");
    }
    assert_eq!(served["SVC_NODE_ID"], node_id.to_string());
    assert_eq!(served["SVC_API_URL"], format!("https://localhost:{}", harness.address.port()));
    let package = served["package"].as_object().unwrap();
    let items = [
        "oci_ref",
        "digest",
        "pull_delivery_mode",
        "install_root",
        "env_file_path",
        "systemd_unit_name",
        "release_keys",
        "registry_ca_pem",
        "pull_account",
    ];
    assert!(package.len() == items.len() && items.iter().all(|item| package[*item].is_null()), "{package:?}");
    // And it is an environment file that leads to a certificate.
    let read = wire::bundle::BootstrapBundle::from_env_file(&bundle.to_env_file().unwrap()).unwrap();
    assert_eq!(read.ca_bundle_fingerprint, wire::bundle::fingerprint(&read.ca_bundle_pem));
    wire::VerifierSet::from_env_value(&read.task_signing_pubkeys).unwrap();
    harness.enroll(read.node_id, &body(read.enrollment_token.expose())).await.is(201);
}

#[tokio::test]
async fn enrollment_with_an_uncertain_commit_completes() {
    let harness = NodeApiHarness::new().await;
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let (machine, request) = (SimulatedMachine::new(node_id, 2), CertificateRequest::generate());
    harness.memory.lose_next_response();
    let answer = harness.enroll(node_id, &machine.enrollment_body(&token, &request.csr_pem)).await;
    let certificate = answer.is(201)["certificate_pem"].as_str().unwrap();
    assert!(!harness.memory.loses_next_response());
    let agent = Agent::new(&harness, machine, certificate, &request.key);
    agent.wait(&harness, 1).await.is(204);
}

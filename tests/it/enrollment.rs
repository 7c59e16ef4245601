//! Enrollment of nodes, and who is refused.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, SanType};
use reqwest::Method;
use serde_json::json;
use std::time::{Duration, Instant};
use tests::cluster::client::{ApiResponse, send_request};
use tests::cluster::fake_agent::{EnrollmentAttempt, FakeAgent, anonymous};
use tests::cluster::{GPUS, TestCluster, WAIT_TIMEOUT};

/// A certificate request with an RSA key of 1024 bits, made with OpenSSL.
const WEAK_CSR: &str = "-----BEGIN CERTIFICATE REQUEST-----
MIIBTjCBuAIBADAPMQ0wCwYDVQQDDAR3ZWFrMIGfMA0GCSqGSIb3DQEBAQUAA4GN
ADCBiQKBgQC7tycZ7mAWL8OStcgzgsds4+d1L58fh6B0V5OVf5z9zChS90NoSlmw
pTY8lnkYRSMG9nGW7HIhu36W2I3awr2OnZobb2lyZ6zWViETCtyoICz/yLAiz+oj
u2n17J6NmM51h/E00OV0tsX2wsJpD8uCrmza7R1XBCyCvfdiwjOKbQIDAQABoAAw
DQYJKoZIhvcNAQELBQADgYEARC2i+6mLRfEk6L0Su8LQ7uyD4Kzeia411AoUOjR/
gmC7GeU8W+qtqBn1SJ9pLnhK50S7ZxFawXfgDBhbh7TTad7Bi40oqVWk5EWwr8Y9
KplWLjF5uCYuvF37UXLzuyiX4q7cXBs+WdhI0OkHR8R9gguPudpWtKfYPQVdolvY
Ai8=
-----END CERTIFICATE REQUEST-----
";

const SHORT_WAIT: &str = "tasks/wait?timeout_seconds=1";

#[tokio::test(flavor = "multi_thread")]
async fn token_enrolls_one_agent_of_its_node_once_and_before_it_expires() {
    let mut cluster = TestCluster::start().await;
    let (node, bundle) = cluster.registered("h100").await;
    let _agent = FakeAgent::onboard(&bundle, GPUS).await;
    node.expect_state("active").await;
    let (replay, _) = EnrollmentAttempt::valid(&bundle, GPUS);
    replay.enroll().await.expect_error(401, "enrollment_rejected");

    // A token of another node, in both directions.
    let (one, other) = (cluster.register("h100").await, cluster.register("h100").await);
    let (of_one, of_other) = (cluster.bundle(&one).await, cluster.bundle(&other).await);
    let (mut foreign, _) = EnrollmentAttempt::valid(&of_one, GPUS);
    foreign.machine.node_id = other.id;
    let refused = foreign.enroll().await;
    refused.expect_error(401, "enrollment_rejected");
    let (mut nobody, _) = EnrollmentAttempt::valid(&of_one, GPUS);
    nobody.machine.node_id = uuid::Uuid::now_v7();
    let unknown = nobody.enroll().await;
    assert_eq!(
        unknown.expect_error(401, "enrollment_rejected").body["message"],
        refused.body["message"],
        "one public answer"
    );
    // The token is not consumed by it.
    let _ = FakeAgent::onboard(&of_one, GPUS).await;
    let _ = FakeAgent::onboard(&of_other, GPUS).await;

    // A newer token voids the older one.
    let late = cluster.register("h100").await;
    let older = cluster.bundle(&late).await;
    let newer = cluster.bundle_for(&late, &json!({ "ttl_seconds": 5 })).await;
    let (with_older, _) = EnrollmentAttempt::valid(&older, GPUS);
    with_older.enroll().await.expect_error(401, "enrollment_rejected");
    tokio::time::sleep(Duration::from_millis(5200)).await;
    let (with_newer, _) = EnrollmentAttempt::valid(&newer, GPUS);
    with_newer.enroll().await.expect_error(401, "enrollment_rejected");
    late.expect_state("registered").await;
    let enrolled = cluster.audit_of(late.id).await.iter().any(|(_, action, ..)| action == "nodes.enroll");
    assert!(!enrolled);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_concurrent_enrollments_with_one_token_issue_one_certificate() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let (node, bundle) = cluster.registered("h100").await;
    let enrolling = (0..50).map(|_| {
        let (enrollment, _) = EnrollmentAttempt::valid(&bundle, GPUS);
        async move { enrollment.enroll().await }
    });
    let answers = futures::future::join_all(enrolling).await;
    let (won, lost): (Vec<ApiResponse>, Vec<ApiResponse>) =
        answers.into_iter().partition(|answer| answer.status.is_success());
    assert_eq!(won.len(), 1, "{won:?}");
    for answer in lost {
        answer.expect_error(401, "enrollment_rejected");
    }
    let enrolled =
        cluster.audit_of(node.id).await.into_iter().filter(|(_, action, ..)| action == "nodes.enroll").count();
    assert_eq!(enrolled, 1);
    let body: serde_json::Value = sqlx::query_scalar("SELECT body FROM entity WHERE id = $1")
        .bind(node.id)
        .fetch_one(&cluster.pool)
        .await
        .unwrap();
    assert_eq!(body["identity"]["certificates"].as_object().map(serde_json::Map::len), Some(1), "{}", body["identity"]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_key_of_a_certificate_request_is_used() {
    let mut cluster = TestCluster::start().await;
    let node = cluster.register("h100").await;
    let other = cluster.register("h100").await;
    let bundle = cluster.bundle(&node).await;
    let (honest, _) = EnrollmentAttempt::valid(&bundle, GPUS);
    let pem = |params: CertificateParams, key: &KeyPair| params.serialize_request(key).unwrap().pem().unwrap();
    let key = KeyPair::generate().unwrap();
    for (what, csr_pem) in [
        ("weak", WEAK_CSR.to_owned()),
        ("no request", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n".to_owned()),
        ("empty", String::new()),
        ("two", format!("{}{}", honest.csr_pem, honest.csr_pem)),
        ("altered", with_altered_signature(&honest.csr_pem)),
        ("a certificate", bundle.ca_bundle_pem.clone()),
    ] {
        let answer = EnrollmentAttempt { csr_pem, ..honest.clone() }.enroll().await;
        assert_eq!(answer.expect_error(400, "invalid_request").body["details"]["field"], "csr_pem", "{what}");
    }

    // Foreign names and the request to be an authority are ignored; and the refused attempts did not consume the token.
    let mut params = CertificateParams::new(vec!["api.example.com".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "admin");
    let foreign = format!("spiffe://gpuaas/node/{}", other.id);
    params.subject_alt_names.push(SanType::URI(foreign.as_str().try_into().unwrap()));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let greedy = EnrollmentAttempt { csr_pem: pem(params, &key), ..honest.clone() };
    let answer = greedy.enroll().await.created();
    let agent = FakeAgent::with_identity(&greedy, &key, &answer);
    let text = openssl_text(&agent.certificate_pem);
    assert!(text.contains(&format!("URI:spiffe://gpuaas/node/{}", node.id)), "{text}");
    for absent in ["api.example.com", "CA:TRUE", &foreign, "admin", "TLS Web Server Authentication"] {
        assert!(!text.contains(absent), "the certificate says {absent}:\n{text}");
    }
    assert!(text.contains("TLS Web Client Authentication"), "{text}");
    agent.heartbeat().await.ok();
    assert!(agent.wait(1).await.is_none());
    cluster.shutdown().await;
}

fn with_altered_signature(csr: &str) -> String {
    let middle = csr.len() / 2;
    let (at, old) = csr.char_indices().skip(middle).find(|(_, c)| c.is_ascii_alphanumeric()).unwrap();
    let new = if old == 'A' { 'B' } else { 'A' };
    let mut text = csr.to_owned();
    text.replace_range(at..=at, &new.to_string());
    text
}

/// A certificate as OpenSSL, an independent implementation, prints it.
fn openssl_text(pem: &str) -> String {
    use std::io::Write as _;
    use std::process::{Command, Stdio};
    let mut openssl = Command::new("openssl")
        .args(["x509", "-noout", "-text"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("openssl is installed");
    openssl.stdin.take().unwrap().write_all(pem.as_bytes()).unwrap();
    String::from_utf8(openssl.wait_with_output().unwrap().stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_authenticates_its_node_alone_and_not_after_the_removal() {
    let mut cluster = TestCluster::builder().replicas(2).start().await;
    let (one, other) = (cluster.register("h100").await, cluster.register("h100").await);
    let (of_one, of_other) = (cluster.bundle(&one).await, cluster.bundle(&other).await);
    let agent = FakeAgent::onboard(&of_one, GPUS).await;
    let neighbour = FakeAgent::onboard(&of_other, GPUS).await;

    // At another node's path, on a live connection and on resumed ones; the other node is not affected.
    let resuming = agent.client_without_pool();
    for path in [SHORT_WAIT, "heartbeat"] {
        let method = if path == "heartbeat" { Method::POST } else { Method::GET };
        for _ in 0..2 {
            let request = agent.request_with(&resuming, other.id, method.clone(), path).json(&json!({}));
            expect_reason(&send_request(request).await.unwrap(), "certificate_unknown");
        }
    }
    let bare = anonymous(&of_one);
    let request = agent.request_with(&bare, one.id, Method::GET, SHORT_WAIT);
    expect_reason(&send_request(request).await.unwrap(), "certificate_missing");

    // A pending poll ends when its node is removed, and nothing is served after the response: not on the connection that
    // was open, not on a resumed session, not on a new one, at no replica.
    let parked = tokio::spawn(async move { (agent.poll(50).await, agent) });
    tokio::time::sleep(Duration::from_millis(500)).await;
    one.order("retire").await.accepted();
    one.order("remove").await.accepted();
    one.expect_state("removed").await;
    // A poll that ended by itself would have another answer.
    let (ended, agent) = tokio::time::timeout(WAIT_TIMEOUT, parked).await.expect("the poll ends").unwrap();
    if let Ok(answer) = ended {
        expect_reason(&answer, "node_removed");
    }
    for _ in 0..4 {
        for http in [&resuming, &agent.client_without_pool()] {
            let request = agent.request_with(http, one.id, Method::GET, SHORT_WAIT);
            expect_reason(&send_request(request).await.unwrap(), "node_removed");
        }
        expect_reason(&agent.send(Method::GET, SHORT_WAIT, None).await, "node_removed");
    }
    expect_reason(&agent.heartbeat().await, "node_removed");
    let (enrollment, _) = EnrollmentAttempt::valid(&of_one, GPUS);
    expect_reason(
        &agent.send(Method::POST, "certificate/renew", Some(&json!({ "csr_pem": enrollment.csr_pem }))).await,
        "node_removed",
    );
    assert!(neighbour.wait(1).await.is_none(), "the neighbour lives on");
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_certificate_is_refused_on_live_and_resumed_connections() {
    /// Of a certificate: the requests before its end have to come in time on a busy machine.
    const LIFE: Duration = Duration::from_secs(40);
    let mut cluster = TestCluster::builder().policy("node.certificate_ttl_seconds", LIFE.as_secs()).start().await;
    let (node, bundle) = cluster.registered("h100").await;
    let agent = FakeAgent::onboard(&bundle, GPUS).await;
    let enrolled_at = Instant::now();
    let resuming = agent.client_without_pool();
    let wait = || agent.request_with(&resuming, node.id, Method::GET, SHORT_WAIT);
    assert_eq!(send_request(wait()).await.unwrap().status.as_u16(), 204, "its session can be resumed from here on");
    // The renewed certificate is valid; the old one is until it expires.
    let (enrollment, _) = EnrollmentAttempt::valid(&bundle, GPUS);
    let renewed =
        agent.send(Method::POST, "certificate/renew", Some(&json!({ "csr_pem": enrollment.csr_pem }))).await.ok();
    cluster.set_policy("node.certificate_ttl_seconds", 3600).await;
    let (longer, longer_key) = EnrollmentAttempt::valid(&bundle, GPUS);
    let longer_lived =
        agent.send(Method::POST, "certificate/renew", Some(&json!({ "csr_pem": longer.csr_pem }))).await.ok();
    assert_ne!(renewed["not_after"], longer_lived["not_after"]);
    // The connection is used, so that it is open when the certificate expires.
    while enrolled_at.elapsed() < LIFE + Duration::from_secs(2) {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let _ = agent.heartbeat().await;
    }
    expect_reason(&agent.heartbeat().await, "certificate_expired");
    expect_reason(&agent.send(Method::GET, SHORT_WAIT, None).await, "certificate_expired");
    // A resumed session does not verify the certificate again; a full handshake is refused before there is a request.
    expect_no_access(send_request(wait()).await);
    let fresh = agent.client_without_pool();
    let asked = agent.request_with(&fresh, node.id, Method::GET, SHORT_WAIT);
    expect_no_access(send_request(asked).await);
    let lives = FakeAgent::with_identity(&longer, &longer_key, &longer_lived);
    lives.heartbeat().await.ok();
    cluster.shutdown().await;
}

/// Asserts a refusal with a reason, or no connection: in TLS 1.3 the client sends its request before it reads the server's alert, and sees
/// that or the closed connection in one of several ways. Requests before and after show that the server runs.
#[track_caller]
fn expect_no_access(asked: reqwest::Result<ApiResponse>) {
    match asked {
        Ok(answer) => expect_reason(&answer, "certificate_expired"),
        Err(error) => assert!(error.is_request() || error.is_connect(), "{error:?}"),
    }
}

#[track_caller]
fn expect_reason(answer: &ApiResponse, reason: &str) {
    let body = &answer.expect_error(401, "invalid_node_identity").body;
    assert_eq!(body["details"]["reason"], reason, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_names_the_verifier_keys_that_the_operator_configures() {
    let keys: Vec<String> = (0..2)
        .map(|_| wire::PublicKey::from(&ed25519_dalek::SigningKey::from_bytes(&rand::random())).to_string())
        .collect();
    let configured = format!("first:active:{},second:staged:{}", keys[0], keys[1]);
    let mut cluster = TestCluster::builder().variable("NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS", &configured).start().await;
    cluster.offer_sku("h100", GPUS).await;
    let node = cluster.register("h100").await;
    assert_eq!(cluster.bundle(&node).await.task_signing_pubkeys, configured);
    cluster.shutdown().await;
}

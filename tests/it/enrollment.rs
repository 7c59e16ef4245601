//! How a node becomes one, and who does not.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, SanType};
use reqwest::Method;
use serde_json::json;
use std::time::Duration;
use tests::world::client::{Answer, answer_to};
use tests::world::hand::{HandAgent, Showing, anonymous};
use tests::world::{GPUS, World};

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

#[tokio::test(flavor = "multi_thread")]
async fn a_token_lets_in_one_agent_of_its_own_node_once_and_in_time() {
    let mut world = World::start().await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let _agent = HandAgent::onboard(&bundle, GPUS).await;
    node.expect_state("active").await;
    let (replay, _) = Showing::honest(&bundle, GPUS);
    replay.enroll().await.refused(401, "enrollment_rejected");

    // Of another node, both ways round.
    let (one, other) = (world.register("h100").await, world.register("h100").await);
    let (of_one, of_other) = (world.bundle(&one).await, world.bundle(&other).await);
    let (mut foreign, _) = Showing::honest(&of_one, GPUS);
    foreign.node_id = other.id;
    let refused = foreign.enroll().await;
    refused.refused(401, "enrollment_rejected");
    let (nobody, _) = Showing::honest(&of_one, GPUS);
    let nobody = Showing { node_id: uuid::Uuid::now_v7(), ..nobody };
    let unknown = nobody.enroll().await;
    assert_eq!(
        unknown.refused(401, "enrollment_rejected").body["message"],
        refused.body["message"],
        "one public answer"
    );
    // Nothing was spent by it.
    let _ = HandAgent::onboard(&of_one, GPUS).await;
    let _ = HandAgent::onboard(&of_other, GPUS).await;

    // A newer token voids the older one.
    let late = world.register("h100").await;
    let older = world.bundle(&late).await;
    let newer = world.bundle_for(&late, &json!({ "ttl_seconds": 5 })).await;
    let (with_older, _) = Showing::honest(&older, GPUS);
    with_older.enroll().await.refused(401, "enrollment_rejected");
    tokio::time::sleep(Duration::from_millis(5200)).await;
    let (with_newer, _) = Showing::honest(&newer, GPUS);
    with_newer.enroll().await.refused(401, "enrollment_rejected");
    late.expect_state("registered").await;
    let enrolled = world.audit_of(late.id).await.iter().any(|(_, action, ..)| action == "nodes.enroll");
    assert!(!enrolled);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_fifty_agents_that_show_one_token_at_once_one_gets_a_certificate() {
    let mut world = World::plan().replicas(2).start().await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let enrolling = (0..50).map(|_| {
        let (showing, _) = Showing::honest(&bundle, GPUS);
        async move { showing.enroll().await }
    });
    let answers = futures::future::join_all(enrolling).await;
    let (won, lost): (Vec<Answer>, Vec<Answer>) = answers.into_iter().partition(|answer| answer.status.is_success());
    assert_eq!(won.len(), 1, "{won:?}");
    for answer in lost {
        answer.refused(401, "enrollment_rejected");
    }
    let enrolled = world.audit_of(node.id).await.into_iter().filter(|(_, action, ..)| action == "nodes.enroll").count();
    assert_eq!(enrolled, 1);
    let body: serde_json::Value =
        sqlx::query_scalar("SELECT body FROM entity WHERE id = $1").bind(node.id).fetch_one(&world.pool).await.unwrap();
    assert_eq!(body["identity"]["certificates"].as_object().map(serde_json::Map::len), Some(1), "{}", body["identity"]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_certificate_request_the_key_alone_counts() {
    let mut world = World::start().await;
    let node = world.register("h100").await;
    let other = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let (honest, _) = Showing::honest(&bundle, GPUS);
    let pem = |params: CertificateParams, key: &KeyPair| params.serialize_request(key).unwrap().pem().unwrap();
    let key = KeyPair::generate().unwrap();
    for (what, csr_pem) in [
        ("weak", WEAK_CSR.to_owned()),
        ("no request", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n".to_owned()),
        ("empty", String::new()),
        ("two", format!("{}{}", honest.csr_pem, honest.csr_pem)),
        ("altered", altered(&honest.csr_pem)),
        ("a certificate", bundle.ca_bundle_pem.clone()),
    ] {
        let answer = Showing { csr_pem, ..honest.clone() }.enroll().await;
        assert_eq!(answer.refused(400, "invalid_request").body["details"]["field"], "csr_pem", "{what}");
    }

    // Foreign names and the wish to be an authority are heard, and come to nothing; and the token was not spent before.
    let mut params = CertificateParams::new(vec!["api.example.com".to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "admin");
    let foreign = format!("spiffe://gpuaas/node/{}", other.id);
    params.subject_alt_names.push(SanType::URI(foreign.as_str().try_into().unwrap()));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let greedy = Showing { csr_pem: pem(params, &key), ..honest.clone() };
    let answer = greedy.enroll().await.created();
    let agent = HandAgent::with_identity(&greedy, &key, &answer);
    let text = openssl_text(&agent.certificate_pem);
    assert!(text.contains(&format!("URI:spiffe://gpuaas/node/{}", node.id)), "{text}");
    for absent in ["api.example.com", "CA:TRUE", &foreign, "admin", "TLS Web Server Authentication"] {
        assert!(!text.contains(absent), "the certificate says {absent}:\n{text}");
    }
    assert!(text.contains("TLS Web Client Authentication"), "{text}");
    agent.heartbeat().await.ok();
    assert!(agent.wait(1).await.is_none());
    world.end().await;
}

fn altered(csr: &str) -> String {
    let middle = csr.len() / 2;
    let (at, old) = csr.char_indices().skip(middle).find(|(_, c)| c.is_ascii_alphanumeric()).unwrap();
    let new = if old == 'A' { 'B' } else { 'A' };
    let mut text = csr.to_owned();
    text.replace_range(at..=at, &new.to_string());
    text
}

/// A certificate as OpenSSL, an end that someone else wrote, reads it.
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
async fn a_certificate_speaks_for_its_node_alone_and_not_once_the_node_is_removed() {
    let mut world = World::plan().replicas(2).start().await;
    let (one, other) = (world.register("h100").await, world.register("h100").await);
    let (of_one, of_other) = (world.bundle(&one).await, world.bundle(&other).await);
    let agent = HandAgent::onboard(&of_one, GPUS).await;
    let neighbour = HandAgent::onboard(&of_other, GPUS).await;

    // On another's path, on a live connection and on resumed ones; the neighbour is not disturbed.
    let resuming = agent.client_without_pool();
    for path in ["tasks/wait?timeout_seconds=1", "heartbeat"] {
        let method = if path == "heartbeat" { Method::POST } else { Method::GET };
        for _ in 0..2 {
            let request = agent.request_with(&resuming, other.id, method.clone(), path).json(&json!({}));
            expect_reason(&answer_to(request).await.unwrap(), "certificate_unknown");
        }
    }
    let bare = anonymous(&of_one);
    let request = agent.request_with(&bare, one.id, Method::GET, "tasks/wait?timeout_seconds=1");
    expect_reason(&answer_to(request).await.unwrap(), "certificate_missing");

    // A poll that is parked when its node is removed ends, and nothing is served after the answer: not on the connection that
    // was open, not on a resumed session, not on a new one, on no replica.
    let parked = tokio::spawn(async move { (agent.poll(50).await, agent) });
    tokio::time::sleep(Duration::from_millis(500)).await;
    one.order("retire").await.accepted();
    one.order("remove").await.accepted();
    one.expect_state("removed").await;
    let (ended, agent) = tokio::time::timeout(Duration::from_secs(10), parked).await.expect("the poll ends").unwrap();
    if let Ok(answer) = ended {
        expect_reason(&answer, "node_removed");
    }
    for _ in 0..4 {
        for http in [&resuming, &agent.client_without_pool()] {
            let request = agent.request_with(http, one.id, Method::GET, "tasks/wait?timeout_seconds=1");
            expect_reason(&answer_to(request).await.unwrap(), "node_removed");
        }
        expect_reason(&agent.poll(1).await.unwrap(), "node_removed");
    }
    expect_reason(&agent.heartbeat().await, "node_removed");
    let (showing, _) = Showing::honest(&of_one, GPUS);
    expect_reason(
        &agent.send(Method::POST, "certificate/renew", Some(&json!({ "csr_pem": showing.csr_pem }))).await,
        "node_removed",
    );
    assert!(neighbour.wait(1).await.is_none(), "the neighbour lives on");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_certificate_gets_nothing_on_a_live_and_on_a_resumed_connection() {
    let mut world = World::plan().policy("node.certificate_ttl_seconds", 30).start().await;
    let node = world.register("h100").await;
    let bundle = world.bundle(&node).await;
    let agent = HandAgent::onboard(&bundle, GPUS).await;
    let resuming = agent.client_without_pool();
    let wait = || agent.request_with(&resuming, node.id, Method::GET, "tasks/wait?timeout_seconds=1");
    assert_eq!(answer_to(wait()).await.unwrap().status.as_u16(), 204, "its session can be resumed from here on");
    // A renewed one goes on living; the old one is good until its own end.
    let (showing, _) = Showing::honest(&bundle, GPUS);
    let renewed =
        agent.send(Method::POST, "certificate/renew", Some(&json!({ "csr_pem": showing.csr_pem }))).await.ok();
    world.set_policy("node.certificate_ttl_seconds", 3600).await;
    let (longer, longer_key) = Showing::honest(&bundle, GPUS);
    let longer_lived =
        agent.send(Method::POST, "certificate/renew", Some(&json!({ "csr_pem": longer.csr_pem }))).await.ok();
    assert_ne!(renewed["not_after"], longer_lived["not_after"]);
    // The connection is kept warm, so that it is live when the time comes.
    for _ in 0..15 {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let _ = agent.heartbeat().await;
    }
    expect_reason(&agent.heartbeat().await, "certificate_expired");
    expect_reason(&agent.poll(1).await.unwrap(), "certificate_expired");
    // A resumed session verifies nothing by itself; a whole handshake is refused before there is a request.
    expect_shut_out(answer_to(wait()).await);
    let fresh = agent.client_without_pool();
    let asked = agent.request_with(&fresh, node.id, Method::GET, "tasks/wait?timeout_seconds=1");
    expect_shut_out(answer_to(asked).await);
    let lives = HandAgent::with_identity(&longer, &longer_key, &longer_lived);
    lives.heartbeat().await.ok();
    world.end().await;
}

/// Told why, or not let in: in TLS 1.3 the client has sent its request before it reads the server's alert, and sees that, or the
/// closed connection in one of several ways. That the server lives is seen by what is asked before and after.
#[track_caller]
fn expect_shut_out(asked: reqwest::Result<Answer>) {
    match asked {
        Ok(answer) => expect_reason(&answer, "certificate_expired"),
        Err(error) => assert!(error.is_request() || error.is_connect(), "{error:?}"),
    }
}

#[track_caller]
fn expect_reason(answer: &Answer, reason: &str) {
    let body = &answer.refused(401, "invalid_node_identity").body;
    assert_eq!(body["details"]["reason"], reason, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_names_the_verifier_keys_that_the_operator_configures() {
    let keys: Vec<String> = (0..2)
        .map(|_| wire::PublicKey::from(&ed25519_dalek::SigningKey::from_bytes(&rand::random())).to_string())
        .collect();
    let configured = format!("first:active:{},second:staged:{}", keys[0], keys[1]);
    let mut world = World::plan().variable("NODE_BOOTSTRAP_TASK_SIGNING_PUBKEYS", &configured).start().await;
    world.offer("h100", GPUS).await;
    let node = world.register("h100").await;
    assert_eq!(world.bundle(&node).await.task_signing_pubkeys, configured);
    world.end().await;
}

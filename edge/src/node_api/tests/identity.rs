use super::agent::Agent;
use super::harness::NodeApiHarness;
use chrono::{TimeDelta, Utc};
use domain::NodeId;
use domain::Principal;
use domain::node::{CertificateRecord, Request};
use reqwest::Method;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, HandshakeKind};
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use test_host::simulated_machine::{CertificateRequest, SimulatedMachine};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use uuid::Uuid;
use wire::error::RECOVERABLE;

/// A connection that a test holds on to, over HTTP/1.1.
struct HttpsConnection(TlsStream<TcpStream>);

impl HttpsConnection {
    async fn open(harness: &NodeApiHarness, tls: &Arc<ClientConfig>) -> io::Result<Self> {
        let stream = TcpStream::connect(harness.address).await?;
        let connector = TlsConnector::from(Arc::clone(tls));
        connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.map(Self)
    }

    fn is_resumed(&self) -> bool {
        self.0.get_ref().1.handshake_kind() == Some(HandshakeKind::Resumed)
    }

    async fn get(&mut self, path: &str) -> io::Result<(u16, Value)> {
        self.0.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(self.0.read_u8().await?);
        }
        let head = String::from_utf8(head).unwrap().to_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        self.0.read_exact(&mut body).await?;
        Ok((status, if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() }))
    }

    #[track_caller]
    fn is_refused_as(answer: (u16, Value), reason: &str) {
        assert_eq!((answer.0, &answer.1["code"]), (401, &"invalid_node_identity".into()), "{}", answer.1);
        assert_eq!(answer.1["details"]["reason"], reason);
    }
}

/// Without ALPN, so that the connection speaks HTTP/1.1; its tickets are its own.
fn http1(tls: &Arc<ClientConfig>) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(tls);
    config.alpn_protocols.clear();
    Arc::new(config)
}

/// A certificate of the node that ends soon, known to its machine.
pub(super) async fn short_lived(harness: &NodeApiHarness, agent: &Agent, life: TimeDelta) -> Agent {
    let (request, now) = (CertificateRequest::generate(), Utc::now());
    let issued = harness.app.trust.keys.load().node.issue(agent.node_id, &request.csr_pem, now, now + life).unwrap();
    let renew = Request::Renew {
        serial: agent.serial.clone(),
        issued: CertificateRecord {
            serial: issued.serial.clone(),
            not_after: issued.not_after,
            generation: 0,
            authority: None,
        },
    };
    harness.ask(&Principal::Node(NodeId(agent.node_id)), agent.node_id, renew).await.unwrap();
    agent.with(harness, &issued.certificate_pem, &request.key)
}

#[tokio::test]
async fn request_without_a_certificate_or_with_another_nodes_is_refused() {
    let harness = NodeApiHarness::new().await;
    let (agent, other) = (harness.active().await, harness.active().await);
    let task = Uuid::now_v7();
    for (method, path) in [
        (Method::GET, "tasks/wait?timeout_seconds=1".to_owned()),
        (Method::POST, format!("tasks/{task}/result")),
        (Method::POST, "heartbeat".to_owned()),
        (Method::POST, "certificate/renew".to_owned()),
    ] {
        let body = (method == Method::POST).then(|| b"{}".to_vec());
        let answer = harness.anonymous(method.clone(), &agent.at(&path), body.clone()).await;
        answer.is_refused_as("certificate_missing");
        let foreign = harness.client(&other.tls);
        harness.send(&foreign, method, &agent.at(&path), body).await.is_refused_as("certificate_unknown");
    }
}

#[tokio::test]
async fn verified_certificate_unknown_to_the_node_is_refused() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    // Signed by the authority, and never committed.
    let (request, now) = (CertificateRequest::generate(), Utc::now());
    let issued = harness
        .app
        .trust
        .keys
        .load()
        .node
        .issue(agent.node_id, &request.csr_pem, now, now + TimeDelta::hours(1))
        .unwrap();
    let stray = agent.with(&harness, &issued.certificate_pem, &request.key);
    let answer = stray.wait(&harness, 1).await;
    assert_eq!(answer.is_refused_as("certificate_unknown")[RECOVERABLE], true, "a recovery replaces it");
    stray.send_heartbeat(&harness).await.is_refused_as("certificate_unknown");
    stray.renew(&harness).await.is_refused_as("certificate_unknown");
    // A node that the database has forgotten.
    let nobody = Uuid::now_v7();
    let issued =
        harness.app.trust.keys.load().node.issue(nobody, &request.csr_pem, now, now + TimeDelta::hours(1)).unwrap();
    let nobody = Agent::new(&harness, SimulatedMachine::new(nobody, 2), &issued.certificate_pem, &request.key);
    let answer = nobody.wait(&harness, 1).await;
    assert_eq!(answer.is_refused_as("certificate_unknown")[RECOVERABLE], Value::Null);
}

#[tokio::test]
async fn an_expired_certificate_is_refused_on_a_fresh_a_live_and_a_resumed_connection() {
    let harness = NodeApiHarness::new().await;
    let node = harness.active().await;
    // The first request is to arrive while it is valid.
    let agent = short_lived(&harness, &node, TimeDelta::milliseconds(8_000)).await;
    let (tls, path) = (http1(&agent.tls), agent.at("tasks/wait?timeout_seconds=1"));
    let mut live = HttpsConnection::open(&harness, &tls).await.unwrap();
    assert_eq!(live.get(&path).await.unwrap().0, 204);
    tokio::time::sleep(Duration::from_millis(7_500)).await;
    HttpsConnection::is_refused_as(live.get(&path).await.unwrap(), "certificate_expired");
    let mut resumed = HttpsConnection::open(&harness, &tls).await.unwrap();
    assert!(resumed.is_resumed());
    HttpsConnection::is_refused_as(resumed.get(&path).await.unwrap(), "certificate_expired");
    // TLS itself refuses it where it verifies, from the second after; with TLS 1.3 the client learns of it with its first read.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let fresh = http1(&agent.reconnected(&harness).tls);
    let outcome = match HttpsConnection::open(&harness, &fresh).await {
        Ok(mut line) => line.get(&path).await.map(|_| ()),
        Err(error) => Err(error),
    };
    assert!(outcome.is_err());
}

#[tokio::test]
async fn a_removed_node_is_refused_on_a_fresh_a_live_and_a_resumed_connection() {
    let harness = NodeApiHarness::new().await;
    // Its connections are left open, as on a replica that has not received the removal.
    harness.closes.store(false, Ordering::SeqCst);
    let agent = harness.active().await;
    let (tls, path) = (http1(&agent.tls), agent.at("tasks/wait?timeout_seconds=1"));
    let mut live = HttpsConnection::open(&harness, &tls).await.unwrap();
    assert_eq!(live.get(&path).await.unwrap().0, 204);
    remove(&harness, &agent).await;
    HttpsConnection::is_refused_as(live.get(&path).await.unwrap(), "node_removed");
    let mut resumed = HttpsConnection::open(&harness, &tls).await.unwrap();
    assert!(resumed.is_resumed());
    HttpsConnection::is_refused_as(resumed.get(&path).await.unwrap(), "node_removed");
    let fresh = agent.reconnected(&harness);
    fresh.wait(&harness, 1).await.is_refused_as("node_removed");
    fresh.send_heartbeat(&harness).await.is_refused_as("node_removed");
    fresh.renew(&harness).await.is_refused_as("node_removed");
}

#[tokio::test]
async fn removing_a_node_closes_its_waiting_poll() {
    let (harness, agent) = NodeApiHarness::with_active_node().await;
    let mut line = HttpsConnection::open(&harness, &http1(&agent.tls)).await.unwrap();
    let path = agent.at("tasks/wait?timeout_seconds=30");
    let waiting = tokio::spawn(async move { line.get(&path).await });
    harness.until_polled(1).await;
    remove(&harness, &agent).await;
    let ended = tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("the wait is cut").unwrap();
    assert!(ended.is_err());
}

#[tokio::test]
async fn a_certificate_of_an_earlier_identity_is_refused() {
    let harness = NodeApiHarness::new().await;
    let agent = harness.enrolled().await;
    // Enrolled once more, since the first response was of no use.
    harness.token(agent.node_id, None).await;
    agent.wait(&harness, 1).await.is_refused_as("certificate_unknown");
}

pub(super) async fn remove(harness: &NodeApiHarness, agent: &Agent) {
    harness.admin(agent.node_id, Request::Retire { reason: "test".into(), drain: false }).await;
    harness.admin(agent.node_id, Request::Remove { reason: "test".into() }).await;
}

use super::agent::{Agent, Applicant};
use super::world::World;
use chrono::{TimeDelta, Utc};
use domain::NodeId;
use domain::Principal;
use domain::node::{Certificate, Command};
use reqwest::Method;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, HandshakeKind};
use serde_json::Value;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use uuid::Uuid;

/// A connection that a test holds on to, over HTTP/1.1.
struct Line(TlsStream<TcpStream>);

impl Line {
    async fn open(world: &World, tls: &Arc<ClientConfig>) -> io::Result<Self> {
        let stream = TcpStream::connect(world.address).await?;
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
    fn not_let_in(answer: (u16, Value), reason: &str) {
        assert_eq!((answer.0, &answer.1["code"]), (401, &"invalid_node_identity".into()), "{}", answer.1);
        assert_eq!(answer.1["details"]["reason"], reason);
    }
}

/// Without ALPN, so that the line speaks HTTP/1.1; its tickets are its own.
fn http1(tls: &Arc<ClientConfig>) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(tls);
    config.alpn_protocols.clear();
    Arc::new(config)
}

/// A certificate of the node that ends soon, known to its machine.
pub(super) async fn short_lived(world: &World, agent: &Agent, life: TimeDelta) -> Agent {
    let (applicant, now) = (Applicant::new(), Utc::now());
    let issued =
        world.services.trust.keys.load().node.issue(agent.node_id, &applicant.csr_pem, now, now + life).unwrap();
    let renew = Command::Renew {
        serial: agent.serial.clone(),
        issued: Certificate {
            serial: issued.serial.clone(),
            not_after: issued.not_after,
            generation: 0,
            authority: None,
        },
    };
    world.ask(&Principal::Node(NodeId(agent.node_id)), agent.node_id, renew).await.unwrap();
    agent.with(world, &issued.certificate_pem, &applicant.key)
}

#[tokio::test]
async fn no_certificate_and_another_nodes_certificate_open_nothing() {
    let world = World::new().await;
    let (agent, other) = (world.active().await, world.active().await);
    let task = Uuid::now_v7();
    for (method, path) in [
        (Method::GET, "tasks/wait?timeout_seconds=1".to_owned()),
        (Method::POST, format!("tasks/{task}/result")),
        (Method::POST, "heartbeat".to_owned()),
        (Method::POST, "certificate/renew".to_owned()),
    ] {
        let body = (method == Method::POST).then(|| b"{}".to_vec());
        let answer = world.anonymous(method.clone(), &agent.at(&path), body.clone()).await;
        answer.not_let_in("certificate_missing");
        let foreign = world.client(&other.tls);
        world.send(&foreign, method, &agent.at(&path), body).await.not_let_in("certificate_unknown");
    }
}

#[tokio::test]
async fn a_certificate_that_the_machine_does_not_know_opens_nothing_although_it_verifies() {
    let world = World::new().await;
    let agent = world.active().await;
    // Signed by the authority, and never committed.
    let (applicant, now) = (Applicant::new(), Utc::now());
    let issued = world
        .services
        .trust
        .keys
        .load()
        .node
        .issue(agent.node_id, &applicant.csr_pem, now, now + TimeDelta::hours(1))
        .unwrap();
    let stray = agent.with(&world, &issued.certificate_pem, &applicant.key);
    stray.wait(&world, 1).await.not_let_in("certificate_unknown");
    stray.beat(&world).await.not_let_in("certificate_unknown");
    stray.renew(&world).await.not_let_in("certificate_unknown");
    // A node that the database has forgotten.
    let nobody = Uuid::now_v7();
    let issued = world
        .services
        .trust
        .keys
        .load()
        .node
        .issue(nobody, &applicant.csr_pem, now, now + TimeDelta::hours(1))
        .unwrap();
    let nobody =
        Agent::new(&world, nobody, agent.boot_id, agent.recovery.clone(), &issued.certificate_pem, &applicant.key);
    nobody.wait(&world, 1).await.not_let_in("certificate_unknown");
}

#[tokio::test]
async fn an_expired_certificate_is_refused_on_a_fresh_a_live_and_a_resumed_connection() {
    let world = World::new().await;
    let node = world.active().await;
    let agent = short_lived(&world, &node, TimeDelta::milliseconds(3_500)).await;
    let (tls, path) = (http1(&agent.tls), agent.at("tasks/wait?timeout_seconds=1"));
    let mut live = Line::open(&world, &tls).await.unwrap();
    assert_eq!(live.get(&path).await.unwrap().0, 204);
    tokio::time::sleep(Duration::from_millis(3_000)).await;
    Line::not_let_in(live.get(&path).await.unwrap(), "certificate_expired");
    let mut resumed = Line::open(&world, &tls).await.unwrap();
    assert!(resumed.is_resumed());
    Line::not_let_in(resumed.get(&path).await.unwrap(), "certificate_expired");
    // TLS itself refuses it where it verifies, from the second after; with TLS 1.3 the client learns of it with its first read.
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let fresh = http1(&agent.reconnected(&world).tls);
    let outcome = match Line::open(&world, &fresh).await {
        Ok(mut line) => line.get(&path).await.map(|_| ()),
        Err(error) => Err(error),
    };
    assert!(outcome.is_err());
}

#[tokio::test]
async fn a_removed_node_is_refused_on_a_fresh_a_live_and_a_resumed_connection() {
    let world = World::new().await;
    // Its connections are left open, as on a replica that has not heard of the removal.
    world.closes.store(false, Ordering::SeqCst);
    let agent = world.active().await;
    let (tls, path) = (http1(&agent.tls), agent.at("tasks/wait?timeout_seconds=1"));
    let mut live = Line::open(&world, &tls).await.unwrap();
    assert_eq!(live.get(&path).await.unwrap().0, 204);
    remove(&world, &agent).await;
    Line::not_let_in(live.get(&path).await.unwrap(), "node_removed");
    let mut resumed = Line::open(&world, &tls).await.unwrap();
    assert!(resumed.is_resumed());
    Line::not_let_in(resumed.get(&path).await.unwrap(), "node_removed");
    let fresh = agent.reconnected(&world);
    fresh.wait(&world, 1).await.not_let_in("node_removed");
    fresh.beat(&world).await.not_let_in("node_removed");
    fresh.renew(&world).await.not_let_in("node_removed");
}

#[tokio::test]
async fn removing_a_node_cuts_its_parked_wait() {
    let world = World::new().await;
    let agent = world.active().await;
    let mut line = Line::open(&world, &http1(&agent.tls)).await.unwrap();
    let path = agent.at("tasks/wait?timeout_seconds=30");
    let waiting = tokio::spawn(async move { line.get(&path).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    remove(&world, &agent).await;
    let ended = tokio::time::timeout(Duration::from_secs(2), waiting).await.expect("the wait is cut").unwrap();
    assert!(ended.is_err());
}

#[tokio::test]
async fn a_certificate_of_an_earlier_identity_is_refused() {
    let world = World::new().await;
    let agent = world.enrolled().await;
    // Enrolled anew, since the first answer was of no use.
    world.token(agent.node_id, None).await;
    agent.wait(&world, 1).await.not_let_in("certificate_unknown");
}

pub(super) async fn remove(world: &World, agent: &Agent) {
    world.admin(agent.node_id, Command::Retire { reason: "test".into(), drain: false }).await;
    world.admin(agent.node_id, Command::Remove { reason: "test".into() }).await;
}

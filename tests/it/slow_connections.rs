//! Thousands of connections without requests or with slow ones: they do not affect the users of the service.
//!
//! The attackers have one address and many, use HTTP/1.1 and HTTP/2, and stop at each point at which a connection can be stopped before
//! the caller is known.

use futures::future::join_all;
use reqwest::Method;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::client::ApiResponse;
use tests::cluster::{TestCluster, WAIT_TIMEOUT};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const TOKEN: &str = "/api/v1/service-accounts/token";

/// Connections without a byte, from one address and from many.
const SILENT: usize = 3000;
/// Connections with TLS and then nothing, or half a header.
const WITHOUT_A_REQUEST: usize = 400;
/// HTTP/1.1 requests whose body stops.
const SLOW_BODIES: usize = 1400;
/// HTTP/2 connections, and requests on each whose body stops.
const MULTIPLEXED: usize = 20;
const STREAMS: usize = 100;

/// How long users are observed after the attack has begun, and how many rounds of requests are all answered.
const WATCHED: Duration = Duration::from_secs(4);
const ROUNDS: usize = 3;

/// Attackers of one listener, with one protocol.
struct Attacker {
    tls: TlsConnector,
    to: SocketAddr,
}

impl Attacker {
    fn new(cluster: &TestCluster, to: SocketAddr, protocol: &str) -> Self {
        let mut roots = RootCertStore::empty();
        for authority in CertificateDer::pem_file_iter(cluster.authority.certificate_path()).unwrap() {
            roots.add(authority.unwrap()).unwrap();
        }
        let mut config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        Self { tls: TlsConnector::from(Arc::new(config)), to }
    }

    /// A connection from the `n`th of 250 addresses of this machine, or from the first one.
    async fn connect(&self, n: usize, one_address: bool) -> Option<TcpStream> {
        let last = if one_address { 1 } else { 2 + u8::try_from(n % 250).unwrap() };
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((Ipv4Addr::new(127, 0, 7, last), 0).into()).unwrap();
        socket.connect(self.to).await.ok()
    }

    async fn secured(&self, n: usize) -> Option<TlsStream<TcpStream>> {
        let stream = self.connect(n, n.is_multiple_of(10)).await?;
        self.tls.connect(ServerName::try_from("127.0.0.1").unwrap(), stream).await.ok()
    }

    /// Connections on which these bytes were sent.
    async fn stopped_after(&self, count: usize, bytes: &str) -> Vec<TlsStream<TcpStream>> {
        let mut stopped = Vec::new();
        // As many at once as two processors can handle in a moment.
        for some in (0..count).collect::<Vec<_>>().chunks(50) {
            let started = some.iter().map(|n| async move {
                let mut stream = self.secured(*n).await?;
                stream.write_all(bytes.as_bytes()).await.ok()?;
                Some(stream)
            });
            stopped.extend(join_all(started).await.into_iter().flatten());
        }
        stopped
    }

    /// Requests over HTTP/2 that announce a body and never send it.
    async fn multiplexed(&self, n: usize) -> Option<Vec<h2::SendStream<axum::body::Bytes>>> {
        let (mut client, connection) = h2::client::handshake(self.secured(n).await?).await.ok()?;
        tokio::spawn(connection);
        let mut streams = Vec::new();
        for _ in 0..STREAMS {
            client = client.ready().await.ok()?;
            let request = axum::http::Request::post(format!("https://127.0.0.1{TOKEN}"))
                .header("content-type", "application/x-www-form-urlencoded")
                .body(())
                .unwrap();
            let (_, body) = client.send_request(request, false).ok()?;
            streams.push(body);
        }
        Some(streams)
    }
}

fn announced(path: &str, kind: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\ncontent-length: 1000\r\n\r\n{{")
}

#[tokio::test(flavor = "multi_thread")]
async fn users_service_accounts_and_nodes_are_served_under_five_thousand_slow_connections() {
    let mut cluster = TestCluster::start().await;
    let account = cluster.user.post("/api/v1/service-accounts", &json!({ "name": "robot" })).await.created();
    let keys = format!("/api/v1/service-accounts/{}/keys", account["id"].as_str().unwrap());
    let key = cluster.user.post(&keys, &json!({})).await.created();
    let form = [
        ("grant_type", "client_credentials".to_owned()),
        ("client_id", account["id"].as_str().unwrap().to_owned()),
        ("client_secret", key["client_secret"].as_str().unwrap().to_owned()),
    ];
    let listens = cluster.replicas[0].listens();
    let users = Attacker::new(&cluster, listens.public, "http/1.1");
    let nodes = Attacker::new(&cluster, listens.node, "http/1.1");
    let multiplexing = Attacker::new(&cluster, listens.public, "h2");

    let attacked = AtomicBool::new(false);
    let attack = async {
        let silent = join_all((0..SILENT).map(|n| {
            let attacker = if n % 3 == 0 { &nodes } else { &users };
            // Three of four from one address: more than one address may have pending at the public listener.
            attacker.connect(n, n % 4 != 3)
        }));
        let silent: Vec<_> = silent.await.into_iter().flatten().collect();
        let token = announced(TOKEN, "application/x-www-form-urlencoded");
        let enroll = announced(&format!("/internal/v1/nodes/{}/enroll", uuid::Uuid::nil()), "application/json");
        let (nothing, half, tokens, enrollments, streams) = tokio::join!(
            users.stopped_after(WITHOUT_A_REQUEST / 2, ""),
            users.stopped_after(WITHOUT_A_REQUEST / 2, "GET /api/v1/skus HTTP/1.1\r\nhost: "),
            users.stopped_after(SLOW_BODIES - 300, &token),
            nodes.stopped_after(300, &enroll),
            join_all((0..MULTIPLEXED).map(|n| multiplexing.multiplexed(n))),
        );
        attacked.store(true, Ordering::SeqCst);
        (silent, [nothing, half, tokens, enrollments], streams)
    };
    let watch = async {
        let (mut attacked_at, mut rounds) = (None, 0);
        while attacked_at.is_none_or(|at: Instant| at.elapsed() < WATCHED) || rounds < ROUNDS {
            if attacked_at.is_none() && attacked.load(Ordering::SeqCst) {
                attacked_at = Some(Instant::now());
            }
            // Each on connections of its own, since users must also be able to connect.
            let user = cluster.at_replica(0, "user");
            let robot = cluster.anonymous_client().request(Method::POST, TOKEN).form(&form);
            let asking = async {
                tokio::join!(
                    user.send_once(Method::GET, "/api/v1/skus", None),
                    user.send(robot),
                    user.send_once(Method::GET, "/api/v1/healthz", None),
                )
            };
            let answers = tokio::time::timeout(WAIT_TIMEOUT, asking).await.expect("users are answered");
            let answers = <[_; 3]>::from(answers);
            // A database that the machine delays is refused as such, and a client repeats the request.
            let is_answered =
                |answer: &ApiResponse| answer.status == 200 || answer.body["code"] == "service_unavailable";
            assert!(answers.iter().all(is_answered), "{answers:?}");
            rounds += usize::from(attacked_at.is_some() && answers.iter().all(|answer| answer.status == 200));
            assert!(
                attacked_at.is_none_or(|at| at.elapsed() < WAIT_TIMEOUT),
                "{rounds} rounds of requests were answered, at last {answers:?}"
            );
        }
    };
    let ((silent, secured, streams), ()) = tokio::join!(attack, watch);
    let held = silent.len() + secured.iter().map(Vec::len).sum::<usize>();
    let multiplexed: usize = streams.iter().flatten().map(Vec::len).sum();
    assert!(held + multiplexed >= 5000, "{held} connections and {multiplexed} streams were begun");

    // A node can connect as well: it enrolls at the listener that is attacked.
    let node = cluster.node("h100").await;
    node.expect_all_free().await;
    let labels = [("reason", "address_pending")];
    let refused = cluster.metric_total("listener_connections_refused_total", &labels).await;
    assert!(refused > 0.0, "one address had more connections than it may have");
    drop((silent, secured, streams));
    cluster.shutdown().await;
}

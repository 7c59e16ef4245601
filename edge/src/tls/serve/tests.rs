use axum::{
    extract::{FromRef, ws::WebSocketUpgrade},
    routing::get,
};
use chrono::{Duration as Days, Utc};
use rustls::{ClientConfig, pki_types::ServerName};
use secrecy::SecretSlice;
use test_host::simulated_machine::{CertificateRequest, client_tls};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio_rustls::TlsConnector;
use uuid::Uuid;

use super::*;
use crate::http::correlation::Service;
use crate::http::router_layers::with_common_layers;
use crate::node_api::identity::NodeIdentity;
use crate::testing::{LocalhostCertificate, install_crypto};
use crate::tls::{ServerTls, server_config, tickets::SharedTickets};
use crate::trust::current_keys::{CurrentKeys, Keys, MemberKeys, NodeAuthorities, ServiceKeys, TaskKeys};
use crate::trust::node_ca::NodeCa;

mod hostile;

/// For what comes at once, on a machine that may pause: a hang, and no measurement.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// For a limit that must not end what a test is in the middle of.
const LONG: Duration = Duration::from_secs(600);

#[derive(Clone)]
struct App(TrustDomain, CurrentKeys);

impl FromRef<App> for CurrentKeys {
    fn from_ref(app: &App) -> Self {
        app.1.clone()
    }
}

impl FromRef<App> for TrustDomain {
    fn from_ref(app: &App) -> Self {
        app.0.clone()
    }
}

/// A running listener with its own authorities.
struct TlsHarness {
    address: SocketAddr,
    connections: Connections,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<io::Result<()>>,
    ca: NodeCa,
    settings: Settings,
}

fn domain() -> TrustDomain {
    TrustDomain::parse("gpu.example").unwrap()
}

fn router(ca: NodeCa) -> Router {
    let keys = Keys {
        task: TaskKeys::with_first_key(ed25519_dalek::SigningKey::from_bytes(&[1; 32]), Utc::now()).unwrap(),
        node: NodeAuthorities::with_first_key(ca, Utc::now()).unwrap(),
        service: ServiceKeys::with_first_key(ed25519_dalek::SigningKey::from_bytes(&[2; 32]), Utc::now()),
        member: MemberKeys::with_first_key(ed25519_dalek::SigningKey::from_bytes(&[3; 32]), Utc::now()),
    };
    let routes = Router::new()
        .route(
            "/nodes/{id}/hello",
            get(|node: NodeIdentity, ConnectInfo(peer): ConnectInfo<Peer>| async move {
                format!("{} resumed={}", node.node_id, peer.resumed)
            }),
        )
        .route(
            "/slow",
            get(|| async {
                tokio::time::sleep(LONG).await;
                "slow"
            }),
        )
        .route("/open", get(|| async { "open" }))
        .route(
            "/socket",
            get(|upgrade: WebSocketUpgrade| async {
                upgrade.on_upgrade(|mut socket| async move { while socket.recv().await.is_some() {} })
            }),
        )
        .with_state(App(domain(), CurrentKeys::new(keys)));
    with_common_layers(routes, crate::testing::scope_settings(Service { name: "node-api", shows_route: false }))
}

impl TlsHarness {
    async fn with(limits: ListenerLimits) -> Self {
        Self::shared(limits, None).await
    }

    /// `like`: a second replica, with the first one's authorities and ticket secret.
    async fn shared(limits: ListenerLimits, like: Option<&Settings>) -> Self {
        let settings = like.cloned().unwrap_or_else(Settings::make);
        let router = router(NodeCa::load(domain(), &settings.ca.0, &settings.ca.1).unwrap());
        Self::serving(limits, Some(&settings), router).await
    }

    async fn serving(limits: ListenerLimits, like: Option<&Settings>, router: Router) -> Self {
        install_crypto();
        let settings = match like {
            Some(settings) => settings.clone(),
            None => Settings::make(),
        };
        let tickets = SharedTickets::new(SecretSlice::from(vec![9; 32])).unwrap();
        let config = server_config(&ServerTls {
            certificate_chain_pem: &settings.server.chain,
            key_pem: &settings.server.key,
            client_authorities_pem: Some(settings.ca.0.as_str()),
            tickets: Some(Arc::new(tickets)),
        })
        .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, connections, stop) =
            (listener.local_addr().unwrap(), Connections::default(), CancellationToken::new());
        let server = TlsServer {
            tls: Arc::new(ArcSwap::from_pointee(config)),
            router,
            limits,
            connections: connections.clone(),
            trust_domain: Some(domain()),
            proxies: None,
            ingress: Arc::default(),
            strict_transport: None,
        };
        let serving = tokio::spawn(server.serve(listener, stop.clone()));
        let ca = NodeCa::load(domain(), &settings.ca.0, &settings.ca.1).unwrap();
        Self { address, connections, stop, serving, ca, settings }
    }

    fn certified(&self, node_id: Uuid, lives: Days) -> Identity {
        let CertificateRequest { key, csr_pem } = CertificateRequest::generate();
        let issued = self.ca.issue(node_id, &csr_pem, Utc::now() - Days::minutes(2), Utc::now() + lives).unwrap();
        Identity { certificate: issued.certificate_pem, key: key.serialize_pem() }
    }

    fn client(&self, identity: Option<&Identity>, alpn: &[&[u8]]) -> Arc<ClientConfig> {
        let identity = identity.map(|it| (it.certificate.as_str(), it.key.as_str()));
        let mut config = client_tls(&self.settings.server.authority, identity);
        config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(config)
    }

    async fn connect(&self, config: &Arc<ClientConfig>) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.address).await?;
        TlsConnector::from(Arc::clone(config)).connect(ServerName::try_from("localhost").unwrap(), stream).await
    }
}

struct Identity {
    certificate: String,
    key: String,
}

#[derive(Clone)]
struct Settings {
    server: LocalhostCertificate,
    ca: (String, secrecy::SecretString),
}

impl Settings {
    fn make() -> Self {
        let created = NodeCa::create(domain(), Utc::now() - Days::days(1), Utc::now() + Days::days(30)).unwrap();
        Self { server: LocalhostCertificate::issue(), ca: (created.ca.certificate_pem().to_owned(), created.key_pem) }
    }

    /// The server's authority.
    fn authority(&self) -> reqwest::Certificate {
        reqwest::Certificate::from_pem(self.server.authority.as_bytes()).unwrap()
    }
}

const H1: &[&[u8]] = &[b"http/1.1"];

/// One HTTP/1.1 request on a connection that stays open.
async fn ask<S: AsyncRead + AsyncWrite + Unpin>(stream: &mut S, path: &str) -> io::Result<(u16, String)> {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await?;
    answer(stream).await
}

async fn answer<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<(u16, String)> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |text| text.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok((status, String::from_utf8(body).unwrap()))
}

fn hello(node_id: Uuid) -> String {
    format!("/nodes/{node_id}/hello")
}

#[tokio::test]
async fn node_is_identified_by_its_certificate_on_its_own_path_only() {
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let node_id = Uuid::now_v7();
    let identity = harness.certified(node_id, Days::hours(24));
    let mut stream = harness.connect(&harness.client(Some(&identity), H1)).await.unwrap();
    assert_eq!(ask(&mut stream, &hello(node_id)).await.unwrap(), (200, format!("{node_id} resumed=false")));
    let (status, body) = ask(&mut stream, &hello(Uuid::now_v7())).await.unwrap();
    assert_eq!(status, 401);
    assert!(body.contains("invalid_node_identity") && body.contains("certificate_unknown"));
}

#[tokio::test]
async fn node_routes_need_a_certificate_and_others_do_not() {
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let mut stream = harness.connect(&harness.client(None, H1)).await.unwrap();
    let (status, body) = ask(&mut stream, &hello(Uuid::now_v7())).await.unwrap();
    assert_eq!(status, 401);
    assert!(body.contains("certificate_missing"), "{body}");
    assert_eq!(ask(&mut stream, "/open").await.unwrap(), (200, "open".into()));
}

#[tokio::test]
async fn a_certificate_of_another_authority_does_not_pass_the_handshake() {
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let foreign = TlsHarness::with(ListenerLimits::default()).await;
    let node_id = Uuid::now_v7();
    let config = harness.client(Some(&foreign.certified(node_id, Days::hours(1))), H1);
    // In TLS 1.3 the client learns of it with its first read.
    let outcome = match harness.connect(&config).await {
        Ok(mut stream) => ask(&mut stream, &hello(node_id)).await.map(|_| ()),
        Err(error) => Err(error),
    };
    assert!(outcome.is_err());
}

#[tokio::test]
async fn expired_certificate_is_refused_on_live_and_resumed_connections() {
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let node_id = Uuid::now_v7();
    // The first request is to arrive while it is valid.
    let identity = harness.certified(node_id, Days::milliseconds(8_000));
    let config = harness.client(Some(&identity), H1);
    let mut live = harness.connect(&config).await.unwrap();
    assert_eq!(ask(&mut live, &hello(node_id)).await.unwrap().0, 200);
    tokio::time::sleep(Duration::from_millis(8_100)).await;
    let (status, body) = ask(&mut live, &hello(node_id)).await.unwrap();
    assert_eq!(status, 401);
    assert!(body.contains("certificate_expired"), "{body}");
    let mut resumed = harness.connect(&config).await.unwrap();
    assert_eq!(resumed.get_ref().1.handshake_kind(), Some(HandshakeKind::Resumed));
    let (status, body) = ask(&mut resumed, &hello(node_id)).await.unwrap();
    assert_eq!(status, 401);
    assert!(body.contains("certificate_expired"), "{body}");
}

#[tokio::test]
async fn a_session_is_resumed_at_another_replica_with_its_identity() {
    let settings = Settings::make();
    let first = TlsHarness::shared(ListenerLimits::default(), Some(&settings)).await;
    let second = TlsHarness::shared(ListenerLimits::default(), Some(&settings)).await;
    let node_id = Uuid::now_v7();
    let config = first.client(Some(&first.certified(node_id, Days::hours(1))), H1);
    let mut stream = first.connect(&config).await.unwrap();
    assert_eq!(ask(&mut stream, &hello(node_id)).await.unwrap().0, 200);
    let mut stream = second.connect(&config).await.unwrap();
    assert_eq!(ask(&mut stream, &hello(node_id)).await.unwrap(), (200, format!("{node_id} resumed=true")));
    assert_eq!(second.connections.count(node_id), 1);
}

#[tokio::test]
async fn closing_a_node_ends_its_requests_and_websockets() {
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let (node_id, other) = (Uuid::now_v7(), Uuid::now_v7());
    let config = harness.client(Some(&harness.certified(node_id, Days::hours(1))), H1);
    let mut idle = harness.connect(&config).await.unwrap();
    assert_eq!(ask(&mut idle, "/open").await.unwrap().0, 200);
    let mut busy = harness.connect(&config).await.unwrap();
    busy.write_all(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    let mut socket = harness.connect(&config).await.unwrap();
    socket
        .write_all(b"GET /socket HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        .await
        .unwrap();
    assert_eq!(answer(&mut socket).await.unwrap().0, 101);
    let mut unconcerned =
        harness.connect(&harness.client(Some(&harness.certified(other, Days::hours(1))), H1)).await.unwrap();
    assert_eq!(ask(&mut unconcerned, "/open").await.unwrap().0, 200);
    assert_eq!(harness.connections.count(node_id), 3);
    assert_eq!(harness.connections.close_node(node_id), 3);
    for stream in [&mut idle, &mut busy, &mut socket] {
        let ended = timeout(WAIT_TIMEOUT, stream.read_u8()).await.expect("the connection is cut");
        assert!(ended.is_err());
    }
    assert_eq!(ask(&mut unconcerned, "/open").await.unwrap().0, 200);
    assert_eq!(harness.connections.count(node_id), 0);
}

#[tokio::test]
async fn stopping_finishes_running_requests_and_accepts_no_more() {
    let began = Arc::new(tokio::sync::Notify::new());
    let slow = {
        let began = Arc::clone(&began);
        move || {
            let began = Arc::clone(&began);
            async move {
                began.notify_one();
                tokio::time::sleep(Duration::from_millis(300)).await;
                "slow"
            }
        }
    };
    let router = Router::new().route("/slow", get(slow));
    let harness = TlsHarness::serving(ListenerLimits::default(), None, router).await;
    let mut stream = harness.connect(&harness.client(None, H1)).await.unwrap();
    stream.write_all(b"GET /slow HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    timeout(WAIT_TIMEOUT, began.notified()).await.expect("the request begins");
    harness.stop.cancel();
    assert_eq!(answer(&mut stream).await.unwrap(), (200, "slow".into()));
    timeout(WAIT_TIMEOUT, harness.serving).await.unwrap().unwrap().unwrap();
    assert!(TcpStream::connect(harness.address).await.is_err());
}

#[tokio::test]
async fn unfinished_request_is_closed_at_the_end_of_the_drain_time() {
    let began = Arc::new(tokio::sync::Notify::new());
    let endless = {
        let began = Arc::clone(&began);
        move || async move {
            began.notify_one();
            std::future::pending::<()>().await;
        }
    };
    let limits = ListenerLimits { drain: Duration::from_millis(50), ..ListenerLimits::default() };
    let harness = TlsHarness::serving(limits, None, Router::new().route("/endless", get(endless))).await;
    let mut stream = harness.connect(&harness.client(None, H1)).await.unwrap();
    stream.write_all(b"GET /endless HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
    timeout(WAIT_TIMEOUT, began.notified()).await.expect("the request begins");
    harness.stop.cancel();
    timeout(WAIT_TIMEOUT, harness.serving).await.expect("it ends").unwrap().unwrap();
    assert!(answer(&mut stream).await.is_err());
}

#[tokio::test]
async fn missing_handshake_times_out_and_blocks_no_client() {
    // Long enough for the client that is served.
    let limits = ListenerLimits { handshake_timeout: Duration::from_secs(3), ..ListenerLimits::default() };
    let harness = TlsHarness::with(limits).await;
    let mut silent = TcpStream::connect(harness.address).await.unwrap();
    let mut served = harness.connect(&harness.client(None, H1)).await.unwrap();
    assert_eq!(ask(&mut served, "/open").await.unwrap().0, 200);
    let mut byte = [0];
    let ended = timeout(WAIT_TIMEOUT, silent.read(&mut byte)).await.expect("the connection is closed");
    assert!(matches!(ended, Ok(0) | Err(_)));
}

#[tokio::test]
async fn idle_client_is_closed_over_both_protocols() {
    let harness = TlsHarness::with(ListenerLimits {
        header_read_timeout: Duration::from_millis(200),
        ..ListenerLimits::default()
    })
    .await;
    for alpn in [b"http/1.1".as_slice(), b"h2"] {
        let mut stream = harness.connect(&harness.client(None, &[alpn])).await.unwrap();
        let reading = async {
            let mut bytes = [0; 256];
            while stream.read(&mut bytes).await.is_ok_and(|read| read > 0) {}
        };
        timeout(WAIT_TIMEOUT, reading).await.expect("the connection is closed");
    }
    let mut slow = harness.connect(&harness.client(None, H1)).await.unwrap();
    slow.write_all(b"GET /open HTTP/1.1\r\nx: ").await.unwrap();
    let mut rest = Vec::new();
    timeout(WAIT_TIMEOUT, slow.read_to_end(&mut rest)).await.expect("the connection is closed").ok();
}

#[tokio::test]
async fn headers_over_the_limits_are_refused() {
    let harness =
        TlsHarness::with(ListenerLimits { header_bytes: 8192, header_count: 20, ..ListenerLimits::default() }).await;
    for headers in [format!("x: {}\r\n", "a".repeat(9_000)), (0..30).map(|n| format!("x{n}: 1\r\n")).collect()] {
        let mut stream = harness.connect(&harness.client(None, H1)).await.unwrap();
        stream.write_all(format!("GET /open HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n").as_bytes()).await.unwrap();
        let status = answer(&mut stream).await.map(|(status, _)| status);
        assert!(matches!(status, Ok(431)), "{status:?}");
    }
}

#[tokio::test]
async fn http_2_is_negotiated_where_the_client_offers_it() {
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let client = reqwest::Client::builder()
        .tls_certs_only([harness.settings.authority()])
        .resolve("localhost", harness.address)
        .build()
        .unwrap();
    let response = client.get(format!("https://localhost:{}/open", harness.address.port())).send().await.unwrap();
    assert_eq!(response.version(), reqwest::Version::HTTP_2);
    assert_eq!(response.text().await.unwrap(), "open");
    let missing = client.get(format!("https://localhost:{}/nowhere", harness.address.port())).send().await.unwrap();
    assert_eq!(missing.status(), 404);
    let body: serde_json::Value = missing.json().await.unwrap();
    assert_eq!((&body["code"], &body["details"]["service"]), (&"not_found".into(), &"node-api".into()));
}

#[tokio::test]
async fn listener_of_nodes_asks_http_2_clients_to_have_no_header_remembered() {
    const HEADER_TABLE_SIZE: u16 = 1;
    let harness = TlsHarness::with(ListenerLimits::default()).await;
    let mut stream = harness.connect(&harness.client(None, &[b"h2"])).await.unwrap();
    // The preface, and settings without an entry (RFC 9113, sections 3.4 and 6.5).
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let mut head = [0; 9];
    stream.read_exact(&mut head).await.unwrap();
    assert_eq!(head[3], 4, "the first frame has the settings: {head:?}");
    let mut settings = vec![0; usize::from(u16::from_be_bytes([head[1], head[2]]))];
    stream.read_exact(&mut settings).await.unwrap();
    let entries = settings.as_chunks::<6>().0.iter();
    let entries: Vec<_> = entries
        .map(|it| (u16::from_be_bytes([it[0], it[1]]), u32::from_be_bytes([it[2], it[3], it[4], it[5]])))
        .collect();
    assert!(entries.contains(&(HEADER_TABLE_SIZE, 0)), "{entries:?}");
}

#[tokio::test]
async fn a_body_of_ten_megabytes_is_answered_over_the_wire() {
    install_crypto();
    let routes = Router::new().route(
        "/",
        axum::routing::post(
            |crate::http::request_body::Json(_): crate::http::request_body::Json<serde_json::Value>| async { "read" },
        ),
    );
    let settings = Settings::make();
    let config = server_config(&ServerTls {
        certificate_chain_pem: &settings.server.chain,
        key_pem: &settings.server.key,
        client_authorities_pem: None,
        tickets: None,
    })
    .unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = TlsServer {
        tls: Arc::new(ArcSwap::from_pointee(config)),
        router: with_common_layers(routes, crate::testing::scope_settings(Service { name: "api", shows_route: false })),
        limits: ListenerLimits::default(),
        connections: Connections::default(),
        trust_domain: None,
        proxies: None,
        ingress: Arc::default(),
        strict_transport: Some(HeaderValue::from_static("max-age=31536000")),
    };
    tokio::spawn(server.serve(listener, CancellationToken::new()));
    for http1 in [true, false] {
        let mut client =
            reqwest::Client::builder().tls_certs_only([settings.authority()]).resolve("localhost", address);
        if http1 {
            client = client.http1_only();
        }
        let response = client
            .build()
            .unwrap()
            .post(format!("https://localhost:{}/", address.port()))
            .header("content-type", "application/json")
            .body(vec![b' '; 10 << 20])
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 413);
        assert_eq!(response.headers()["strict-transport-security"], "max-age=31536000");
        assert!(response.text().await.unwrap().contains("payload_too_large"));
    }
}

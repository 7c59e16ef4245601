//! The telemetry edge of a node as a process: in front of Debian's netdata, in front of an agent with a newer user interface, and with
//! clients that mean it no good.

use crate::external_tools::installed;
use axum::Router;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::routing::get;
use local_servers::pki::Authority;
use local_servers::ports::free_port;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch, tail};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use reqwest::{Client, Identity, Method, StatusCode};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const WITHIN: Duration = Duration::from_secs(60);
/// How long a connection may say nothing.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECTIONS_OF_ADDRESS_MAX: usize = 32;

struct Edge {
    port: u16,
    scheme: &'static str,
    client: Client,
    _process: ChildProcess,
    folder: TempDir,
}

impl Edge {
    /// The edge in front of this port.
    async fn start(upstream: u16, variables: &[(&str, &Path)], client: Client) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = private_files::find_sibling(&std::env::current_exe().unwrap(), "gpuaas-telemetry-edge").unwrap();
        let port = free_port().unwrap();
        let mut launch = Launch::new("gpuaas-telemetry-edge", program, folder.path().join("log"))
            .variable("SVC_TELEMETRY_EDGE_LISTEN", format!("127.0.0.1:{port}"))
            .variable("SVC_TELEMETRY_EDGE_UPSTREAM", format!("127.0.0.1:{upstream}"));
        for (name, value) in variables {
            launch = launch.variable(name, value);
        }
        let scheme = if variables.is_empty() { "http" } else { "https" };
        let edge = Self { port, scheme, client, _process: launch.spawn().unwrap(), folder };
        let until = Instant::now() + WITHIN;
        while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            assert!(Instant::now() < until, "{}", tail(&edge.folder.path().join("log"), 20));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        edge
    }

    async fn get(&self, path: &str) -> reqwest::Response {
        self.send(Method::GET, path).await
    }

    async fn send(&self, method: Method, path: &str) -> reqwest::Response {
        let url = format!("{}://localhost:{}{path}", self.scheme, self.port);
        self.client.request(method, url).send().await.unwrap()
    }

    async fn status(&self, path: &str) -> u16 {
        self.get(path).await.status().as_u16()
    }

    /// Where the way to the user interface leads.
    async fn interface(&self) -> String {
        let answer = self.get("/svc/telemetry/netdata/").await;
        assert_eq!(answer.status(), StatusCode::TEMPORARY_REDIRECT);
        answer.headers()["location"].to_str().unwrap().to_owned()
    }
}

fn client() -> reqwest::ClientBuilder {
    Client::builder().redirect(reqwest::redirect::Policy::none()).timeout(WITHIN)
}

/// A telemetry agent with these versions of its user interface, which remembers the headers that it got.
async fn fake_agent(paths: &[&str]) -> (u16, Arc<Mutex<Vec<HeaderMap>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&seen);
    let mut router = Router::new();
    for path in paths {
        let record = Arc::clone(&record);
        let answer = move |request: Request| async move {
            record.lock().unwrap().push(request.headers().clone());
            ([("set-cookie", "session=1"), ("content-type", "text/html")], "the user interface")
        };
        router = router.route(path, get(answer));
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (port, seen)
}

/// Debian's netdata, with its stock dashboard and nothing that collects.
fn netdata(folder: &Path) -> (u16, ChildProcess) {
    let tree = installed("netdata/usr/sbin/netdata").ancestors().nth(3).unwrap().to_owned();
    let port = free_port().unwrap();
    let mut config = "[directories]\n".to_owned();
    for name in ["home", "config", "cache", "lib", "log"] {
        std::fs::create_dir(folder.join(name)).unwrap();
        writeln!(config, "{name} = {}", folder.join(name).display()).unwrap();
    }
    let user = nix::unistd::User::from_uid(nix::unistd::Uid::effective()).unwrap().unwrap().name;
    write!(
        config,
        "web = {web}\nplugins = {config_dir}\nstock config = {config_dir}\n[global]\nrun as user = {user}\n[db]\nmode = ram\n[web]\n\
         bind to = 127.0.0.1:{port}\n[plugins]\nenable running new plugins = no\ncgroups = no\ntc = no\nidlejitter = no\n",
        web = tree.join("usr/share/netdata/web").display(),
        config_dir = folder.join("config").display(),
    )
    .unwrap();
    let path = folder.join("config/netdata.conf");
    std::fs::write(&path, config).unwrap();
    let libraries = tree.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    let launch = Launch::new("netdata", tree.join("usr/sbin/netdata"), folder.join("netdata.log"))
        .arguments(["-D", "-c"])
        .argument(path)
        .variable("LD_LIBRARY_PATH", libraries);
    (port, launch.spawn().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn netdata_of_debian_is_served_without_its_management() {
    let folder = tempfile::tempdir().unwrap();
    let (upstream, _netdata) = netdata(folder.path());
    let edge = Edge::start(upstream, &[], client().build().unwrap()).await;
    assert_eq!(edge.get("/svc/telemetry/health").await.text().await.unwrap(), "ok", "whether netdata is up or not");
    let until = Instant::now() + WITHIN;
    while edge.status("/api/v1/info").await != 200 {
        assert!(Instant::now() < until, "{}", tail(&folder.path().join("netdata.log"), 20));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // It has no `/v1/` and no later one.
    assert_eq!(edge.interface().await, "/");
    let page = edge.get("/").await;
    assert_eq!(page.status(), 200);
    assert!(page.text().await.unwrap().contains("netdata"), "its dashboard");
    // It serves both to the machine itself, which every request of the edge comes from.
    for path in ["/netdata.conf", "/api/v1/manage/health?cmd=SILENCE%20ALL"] {
        assert_eq!(edge.status(path).await, 403, "{path}");
    }
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::HEAD, Method::OPTIONS] {
        let answer = edge.send(method, "/api/v1/info").await;
        assert_eq!((answer.status().as_u16(), answer.headers()["allow"].to_str().unwrap()), (405, "GET"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn newest_interface_of_the_agent_is_the_one_and_no_secret_passes() {
    let (upstream, seen) = fake_agent(&["/v1/", "/v3/", "/"]).await;
    let edge = Edge::start(upstream, &[], client().build().unwrap()).await;
    assert_eq!(edge.interface().await, "/v3/");
    let request = edge.client.get(format!("http://localhost:{}/v3/", edge.port));
    let answer = request.header("cookie", "s=1").bearer_auth("token").header("x-auth-token", "t").send().await.unwrap();
    assert!(!answer.headers().contains_key("set-cookie") && answer.headers().contains_key("content-type"));
    assert_eq!(answer.text().await.unwrap(), "the user interface");
    let last = seen.lock().unwrap().last().unwrap().clone();
    for name in ["cookie", "authorization", "x-auth-token"] {
        assert!(!last.contains_key(name), "{name} reached the agent");
    }
    let nothing = Edge::start(free_port().unwrap(), &[], client().build().unwrap()).await;
    assert_eq!((nothing.status("/svc/telemetry/netdata/").await, nothing.status("/").await), (503, 503));
    assert_eq!(nothing.get("/svc/telemetry/health").await.text().await.unwrap(), "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_certificate_of_the_configured_authority_is_required_for_all_but_the_health() {
    let folder = tempfile::tempdir().unwrap();
    let server = Authority::create(&folder.path().join("server")).unwrap();
    let certificate = server.server_certificate("node").unwrap();
    let (ours, others) = (ClientAuthority::new(), ClientAuthority::new());
    let client_ca = folder.path().join("client-ca.pem");
    std::fs::write(&client_ca, ours.issuer.pem()).unwrap();
    let variables = [
        ("SVC_TELEMETRY_EDGE_CERT_FILE", certificate.certificate_path.as_path()),
        ("SVC_TELEMETRY_EDGE_KEY_FILE", certificate.key_path.as_path()),
        ("SVC_TELEMETRY_EDGE_CLIENT_CA_FILE", client_ca.as_path()),
    ];
    let (upstream, seen) = fake_agent(&["/v2/"]).await;
    let root = reqwest::Certificate::from_pem(server.certificate_pem().as_bytes()).unwrap();
    let trusting = || client().tls_certs_only([root.clone()]);
    let mut edge = Edge::start(upstream, &variables, trusting().build().unwrap()).await;
    assert_eq!(edge.status("/svc/telemetry/health").await, 200);
    for path in ["/v2/", "/svc/telemetry/netdata/"] {
        assert_eq!(edge.status(path).await, 403, "{path}");
    }
    assert!(seen.lock().unwrap().is_empty(), "the agent was not asked");

    edge.client = trusting().identity(ours.client()).build().unwrap();
    assert_eq!((edge.interface().await.as_str(), edge.status("/v2/").await), ("/v2/", 200));
    let stranger = trusting().identity(others.client()).build().unwrap();
    let refused = stranger.get(format!("https://localhost:{}/svc/telemetry/health", edge.port)).send().await;
    assert!(refused.is_err(), "a certificate of another authority ends the handshake");
    let clear = client().build().unwrap().get(format!("http://localhost:{}/svc/telemetry/health", edge.port)).send();
    assert!(clear.await.is_err(), "there is no clear text beside it");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_crowded_and_oversized_connections_are_closed_and_the_others_served() {
    let (upstream, _) = fake_agent(&["/"]).await;
    let edge = Edge::start(upstream, &[], client().build().unwrap()).await;
    let connect = async || TcpStream::connect(("127.0.0.1", edge.port)).await.unwrap();
    let (mut slow, began) = loop {
        let (mut slow, began) = (Vec::new(), Instant::now());
        for _ in 0..CONNECTIONS_OF_ADDRESS_MAX {
            let mut stream = connect().await;
            let _ = stream.write_all(b"GET /svc/telemetry/health HTTP/1.1\r\n").await;
            slow.push(stream);
        }
        // Over the bound of one address, even a whole request is closed without an answer.
        let mut one_more = connect().await;
        let request = b"GET /svc/telemetry/health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        let _ = one_more.write_all(request).await;
        let answer = read_to_end(&mut one_more).await;
        if answer.is_empty() {
            break (slow, began);
        }
        // A machine that paused for so long has closed a slow one before: they are made again.
        let elapsed = began.elapsed();
        assert!(elapsed >= HEAD_TIMEOUT, "after {elapsed:?}: {answer}");
    };
    for stream in &mut slow {
        let answer = read_to_end(stream).await;
        assert!(!answer.contains("200 OK"), "{answer}");
    }
    let elapsed = began.elapsed();
    assert!(elapsed < HEAD_TIMEOUT + WITHIN, "a slow head is closed: {elapsed:?}");

    let mut large = connect().await;
    let head = format!("GET / HTTP/1.1\r\nhost: x\r\nx-large: {}\r\n\r\n", "a".repeat(64 * 1024));
    let _ = large.write_all(head.as_bytes()).await;
    assert!(!read_to_end(&mut large).await.contains("200 OK"));
    assert_eq!(edge.status("/").await, 200, "it serves on");
}

/// What the edge sends until it closes the connection.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    // A reset is an end, too.
    let _ = tokio::time::timeout(WITHIN, stream.read_to_end(&mut text)).await.expect("the edge closes it");
    String::from_utf8_lossy(&text).into_owned()
}

/// An authority of client certificates.
struct ClientAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl ClientAuthority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    fn client(&self) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["control-plane".to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Identity::from_pem(format!("{}{}", certificate.pem(), key.serialize_pem()).as_bytes()).unwrap()
    }
}

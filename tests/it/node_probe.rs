//! The probe of a node's reachability: it connects to the address that an administrator sets, and never to this machine or its network.

use nix::sched::{CloneFlags, setns};
use reqwest::Method;
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tests::cluster::{TestCluster, WAIT_TIMEOUT, node_body};

#[tokio::test(flavor = "multi_thread")]
async fn no_spelling_of_a_forbidden_address_is_connected_to() {
    let mut cluster = TestCluster::start().await;
    cluster.offer_sku("h100", 8).await;
    let connections = Arc::new(AtomicUsize::new(0));
    let port = listen_on_all_of_loopback(&connections);
    let denied = [
        "127.0.0.1",
        "127.1.2.3",
        "localhost",
        "localhost.",
        "LOCALHOST",
        "::1",
        "[::1]",
        "0:0:0:0:0:0:0:1",
        "::ffff:127.0.0.1",
        "::ffff:7f00:1",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "0.0.0.0",
        "::",
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "::ffff:a9fe:a9fe",
        "64:ff9b::a9fe:a9fe",
        "fd00:ec2::254",
        "169.254.1.1",
        "fe80::1",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
    ];
    for host in denied {
        let answer = register(&cluster, host, port).await;
        assert!(matches!(answer.code(), "probe_target_denied" | "invalid_request"), "{host}: {answer}");
        answer.expect_error(400, answer.code());
    }
    // Spellings that only some resolvers accept as an address: none of them may be connected to.
    for host in [
        "127.1",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "0x7f000001",
        "2130706433",
        "017700000001",
        "127.0.0.1.",
        "127.000.000.001",
        "[::ffff:127.0.0.1]",
        "::1%lo",
        "[::1%25lo]",
        "localhost:22",
        "127.0.0.1:22",
        "user@localhost",
        "ⓛocalhost",
        "127。0。0。1",
        "2852039166",
        "0xa9fea9fe",
        "0",
        "0x0",
    ] {
        let answer = register(&cluster, host, port).await;
        assert_eq!(answer.status.as_u16(), 400, "{host}: {answer}");
        answer.expect_error_envelope();
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0, "a loopback listener saw a connection");
    let nodes = cluster.admin.get("/api/v1/admin/nodes").await.ok();
    assert_eq!(nodes["items"].as_array().map(Vec::len), Some(0), "nothing was registered: {nodes}");
    cluster.shutdown().await;
}

async fn register(cluster: &TestCluster, host: &str, port: u16) -> tests::cluster::client::ApiResponse {
    let mut body = node_body("probed", "h100", 8);
    body["host"] = json!(host);
    body["port"] = json!(port);
    body["probe"] = json!(true);
    cluster.admin.send_once(Method::POST, "/api/v1/admin/nodes", Some(&body)).await
}

/// Listens on one port of every loopback address, IPv4 and IPv6, and counts connections.
fn listen_on_all_of_loopback(connections: &Arc<AtomicUsize>) -> u16 {
    let four = TcpListener::bind(("0.0.0.0", 0)).expect("a port");
    let port = four.local_addr().unwrap().port();
    // A machine without IPv6 has no such listener.
    let six = TcpListener::bind(("::1", port)).ok();
    for listener in std::iter::once(four).chain(six) {
        let connections = Arc::clone(connections);
        std::thread::spawn(move || {
            for _ in listener.incoming().flatten() {
                connections.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn reachable_node_is_reported_and_no_address_outside_the_allowlist_is_connected_to() {
    let far = RemoteHost::make();
    let listener = far.listen();
    let at = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    std::thread::spawn(move || {
        for _ in listener.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
        }
    });
    let network = format!("{}/32", at.ip());
    let mut cluster = TestCluster::builder().variable("NODE_PROBE_ALLOWED_CIDRS", &network).start().await;
    cluster.offer_sku("h100", 8).await;
    let node = register(&cluster, &at.ip().to_string(), at.port()).await.created();
    assert!(is_reachable(&node), "{}: {node:#}", far.description());
    // The thread that counts them may run later than the probe's answer.
    let until = Instant::now() + WAIT_TIMEOUT;
    while connections.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < until, "no connection is counted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1, "one connection and no more");

    let IpAddr::V4(ip) = at.ip() else { panic!("the far end has an IPv4 address") };
    let neighbour = std::net::Ipv4Addr::from(u32::from(ip) ^ 4);
    register(&cluster, &neighbour.to_string(), at.port()).await.expect_error(400, "probe_target_denied");
    // The port is closed: the node is registered, and the probe reports that.
    let silent = register(&cluster, &at.ip().to_string(), 1).await.created();
    assert!(!is_reachable(&silent) && silent["probe"]["error"].is_string(), "{silent:#}");
    assert_eq!(connections.load(Ordering::SeqCst), 1);
    cluster.shutdown().await;
}

fn is_reachable(node: &Value) -> bool {
    node["probe"]["result"] == "reachable"
}

/// An address that the probe takes for another machine's: in a network namespace if one can be created, else an address of one of
/// this machine's outward interfaces, which is no loopback address either.
enum RemoteHost {
    Namespace { name: String, address: IpAddr },
    Outward { address: IpAddr, why: String },
}

impl RemoteHost {
    fn make() -> Self {
        let tag = hex::encode(rand::random::<[u8; 3]>());
        let (name, here, there) = (format!("gpuaas-{tag}"), format!("gh{tag}"), format!("gt{tag}"));
        // 198.18.0.0/15 is for tests of network devices (RFC 2544).
        let [a, b]: [u8; 2] = rand::random();
        let base = b & 0xf8;
        let steps = [
            format!("netns add {name}"),
            format!("link add {here} type veth peer name {there} netns {name}"),
            format!("addr add 198.18.{a}.{}/30 dev {here}", base + 1),
            format!("link set {here} up"),
            format!("-n {name} addr add 198.18.{a}.{}/30 dev {there}", base + 2),
            format!("-n {name} link set {there} up"),
        ];
        match steps.iter().try_for_each(|step| ip(step)) {
            Ok(()) => {
                let address = format!("198.18.{a}.{}", base + 2).parse().unwrap();
                Self::Namespace { name, address }
            }
            Err(why) => {
                let _ = ip(&format!("netns del {name}"));
                eprintln!(
                    "no network namespace can be made here ({why}): an outward address of this machine stands in"
                );
                Self::Outward { address: outward_address(&why), why }
            }
        }
    }

    fn description(&self) -> String {
        match self {
            Self::Namespace { name, address } => format!("{address} in the network namespace {name}"),
            Self::Outward { address, why } => format!("{address} of this machine, since {why}"),
        }
    }

    fn listen(&self) -> TcpListener {
        match self {
            Self::Namespace { name, address } => {
                let (path, at) = (format!("/run/netns/{name}"), SocketAddr::new(*address, 0));
                // Only this thread enters the namespace; the socket stays there when the thread has ended.
                let bound = std::thread::spawn(move || {
                    let namespace = std::fs::File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
                    setns(namespace, CloneFlags::CLONE_NEWNET).expect("root may enter a network namespace");
                    TcpListener::bind(at).expect("a port in the namespace")
                });
                bound.join().unwrap()
            }
            Self::Outward { address, .. } => TcpListener::bind(SocketAddr::new(*address, 0)).expect("a port"),
        }
    }
}

impl Drop for RemoteHost {
    fn drop(&mut self) {
        if let Self::Namespace { name, .. } = self {
            // Its interfaces are deleted with it.
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(arguments: &str) -> Result<(), String> {
    let ran = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let output = String::from_utf8_lossy(&ran.stderr).trim().to_owned();
    if ran.status.success() { Ok(()) } else { Err(format!("ip {arguments}: {output}")) }
}

/// The source address of this machine's outward connections. No packet is sent to find it.
fn outward_address(why: &str) -> IpAddr {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0)).expect("a socket");
    let found = socket.connect(("198.18.0.1", 9)).and_then(|()| socket.local_addr());
    match found {
        Ok(at) if !at.ip().is_loopback() && !at.ip().is_unspecified() => at.ip(),
        _ => panic!(
            "{why}; and this machine has no outward address: a positive probe cannot be tested here. Run as root, with iproute2."
        ),
    }
}

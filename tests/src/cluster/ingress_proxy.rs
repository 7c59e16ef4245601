//! A real proxy in front of a replica's node API, configured by its file under `deploy/ingress`.
//!
//! Everything here is on the loopback: the proxy connects to the replica from an address of its own, so that its headers are trusted and
//! those of direct connections are not.

use super::TestCluster;
use local_servers::ports::free_port;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};
use secrecy::ExposeSecret as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The address from which proxies connect to replicas.
const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const STARTS_WITHIN: Duration = Duration::from_secs(60);
const STOPS_WITHIN: Duration = Duration::from_secs(2);

/// A kind of proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyKind {
    Haproxy,
    Nginx,
    Envoy,
}

impl ProxyKind {
    /// The format of its headers, as `SVC_NODE_CLIENT_IDENTITY` names it.
    #[must_use]
    pub const fn identity_format(self) -> &'static str {
        match self {
            Self::Haproxy => "rfc9440",
            Self::Nginx => "nginx",
            Self::Envoy => "xfcc",
        }
    }

    /// The header in which it forwards client certificates.
    #[must_use]
    pub const fn header(self) -> &'static str {
        match self {
            Self::Haproxy => "client-cert",
            Self::Nginx => "ssl-client-cert",
            Self::Envoy => "x-forwarded-client-cert",
        }
    }

    /// The header's value as the proxy writes it for a client with this certificate.
    #[must_use]
    pub fn header_value(self, certificate_pem: &str) -> String {
        let byte = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        };
        let escaped = || certificate_pem.bytes().map(byte).collect::<String>();
        match self {
            Self::Haproxy => {
                let base64 = certificate_pem.lines().filter(|line| !line.starts_with("-----")).collect::<String>();
                format!(":{base64}:")
            }
            Self::Nginx => escaped(),
            Self::Envoy => format!("Hash=0f;Cert=\"{}\"", escaped()),
        }
    }

    const fn file(self) -> &'static str {
        match self {
            Self::Haproxy => "haproxy.cfg",
            Self::Nginx => "nginx.conf",
            Self::Envoy => "envoy.yaml",
        }
    }

    fn program(self) -> PathBuf {
        let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map_or_else(|| checkout().join(".dev/tools"), PathBuf::from);
        let (name, own) = match self {
            Self::Haproxy => ("haproxy", tools.join("debian/usr/sbin/haproxy")),
            Self::Nginx => ("nginx", tools.join("debian/usr/sbin/nginx")),
            Self::Envoy => ("envoy", tools.join("envoy")),
        };
        let found = private_files::find_programs(name).into_iter().chain([own]).find(|path| path.is_file());
        found.unwrap_or_else(|| panic!("there is no {name}: `deploy/test --tools` installs it"))
    }
}

/// A running proxy. Dropping it stops it.
pub struct IngressProxy {
    kind: ProxyKind,
    address: SocketAddr,
    process: ChildProcess,
    folder: tempfile::TempDir,
}

impl IngressProxy {
    /// An address for a proxy that is started later, since bundles name it.
    #[must_use]
    pub fn address() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], free_port().expect("there is a free port")))
    }

    /// The variables of a replica behind a proxy of this kind, which will be at `address`.
    #[must_use]
    pub fn variables(kind: ProxyKind, address: SocketAddr) -> [(&'static str, String); 3] {
        [
            ("SVC_NODE_CLIENT_IDENTITY", kind.identity_format().to_owned()),
            ("SVC_NODE_TRUSTED_PROXIES", format!("{FROM}/32")),
            ("SVC_NODE_PUBLIC_URL", format!("https://{address}")),
        ]
    }

    /// Starts it in front of the first replica.
    pub async fn start(kind: ProxyKind, address: SocketAddr, cluster: &TestCluster) -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-ingress-").tempdir().expect("a folder can be made");
        let certificate = cluster.authority.server_certificate("ingress").expect("a certificate can be made");
        let [chain, key] = [&certificate.certificate_path, &certificate.key_path].map(|path| read(path));
        let node_ca = node_ca(cluster);
        let files = [
            // HAProxy expects the key in the chain's file; the others read the first certificates alone.
            ("node-api.pem", format!("{chain}{key}")),
            ("node-api.key", key),
            ("node-ca.pem", node_ca),
            ("api-ca.pem", read(cluster.authority.certificate_path())),
        ];
        for (name, text) in files {
            private_files::write_private(&folder.path().join(name), text.as_bytes()).expect("a file can be written");
        }
        let path = folder.path().join(kind.file());
        let configuration = configuration_of(kind, folder.path(), address, cluster.replicas[0].listens().node);
        private_files::write_private(&path, configuration.as_bytes()).expect("a file can be written");

        let process = launch(kind, address, folder.path()).await;
        Self { kind, address, process, folder }
    }

    /// Restarts it with the current authorities of node certificates.
    pub async fn reload_authorities(&mut self, cluster: &TestCluster) {
        let path = self.folder.path().join("node-ca.pem");
        private_files::write_private(&path, node_ca(cluster).as_bytes()).expect("a file can be written");
        self.process.stop(STOPS_WITHIN).await;
        self.process = launch(self.kind, self.address, self.folder.path()).await;
    }

    /// The base URL that agents connect to.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }
}

/// Starts the program on the files of the folder, and waits until it listens.
async fn launch(kind: ProxyKind, address: SocketAddr, folder: &Path) -> ChildProcess {
    let path = folder.join(kind.file());
    let launch = Launch::new("the proxy", kind.program(), folder.join("log"));
    let launch = match kind {
        ProxyKind::Haproxy => launch.argument("-db").argument("-f").argument(&path),
        ProxyKind::Nginx => {
            launch.argument("-p").argument(folder).argument("-g").argument("daemon off;").argument("-c").argument(&path)
        }
        ProxyKind::Envoy => {
            launch.arguments(["--concurrency", "1", "--disable-hot-restart", "-l", "warn", "-c"]).argument(&path)
        }
    };
    let mut process = launch.spawn().expect("the proxy starts");
    let until = Instant::now() + STARTS_WITHIN;
    while tokio::net::TcpStream::connect(address).await.is_err() {
        let ended = process.exit_status();
        assert!(
            ended.is_none() && Instant::now() < until,
            "{kind:?} does not listen: {ended:?}\n{}",
            process.log_tail()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    process
}

/// The configuration of the checkout with its paths and addresses replaced. Each of them must occur in it.
fn configuration_of(kind: ProxyKind, folder: &Path, listen: SocketAddr, replica: SocketAddr) -> String {
    let text = read(&checkout().join("deploy/ingress").join(kind.file()));
    let (here, port) = (folder.display(), listen.port());
    let files = ("/etc/gpuaas/ingress/".to_owned(), format!("{here}/"));
    let own: Vec<(String, String)> = match kind {
        ProxyKind::Haproxy => vec![
            ("bind :9443".to_owned(), format!("bind {listen}")),
            (
                "server replica-1 control-plane.internal:9443".to_owned(),
                format!("server replica-1 {replica} source {FROM}"),
            ),
            ("control-plane.internal".to_owned(), "localhost".to_owned()),
            // As many as this machine's limit of open files allows.
            ("maxconn 20000".to_owned(), "maxconn 500".to_owned()),
        ],
        ProxyKind::Nginx => vec![
            ("listen 9443".to_owned(), format!("listen {listen}")),
            ("server control-plane.internal:9443".to_owned(), format!("server {replica}")),
            ("control-plane.internal".to_owned(), "localhost".to_owned()),
            ("/run/gpuaas-ingress.pid".to_owned(), format!("{here}/pid")),
            ("worker_rlimit_nofile 40000;\n".to_owned(), String::new()),
            ("worker_connections 20000".to_owned(), "worker_connections 500".to_owned()),
            ("proxy_http_version 1.1;".to_owned(), format!("proxy_http_version 1.1;\nproxy_bind {FROM};")),
            ("http {\n".to_owned(), format!("http {{\n{}", temporary_paths(folder))),
        ],
        ProxyKind::Envoy => vec![
            ("address: 0.0.0.0, port_value: 9443".to_owned(), format!("address: {}, port_value: {port}", listen.ip())),
            (
                "address: control-plane.internal, port_value: 9443".to_owned(),
                format!("address: {}, port_value: {}", replica.ip(), replica.port()),
            ),
            ("control-plane.internal".to_owned(), "localhost".to_owned()),
            (
                "      connect_timeout: 5s\n".to_owned(),
                format!(
                    "      connect_timeout: 5s\n      upstream_bind_config: {{ source_address: {{ address: {FROM}, port_value: 0 }} }}\n"
                ),
            ),
        ],
    };
    std::iter::once(files).chain(own).fold(text, |text, (written, meant)| {
        assert!(text.contains(&written), "{} has no {written:?} any more", kind.file());
        text.replace(&written, &meant)
    })
}

/// Debian's nginx has folders for temporary files that other users may not write to.
fn temporary_paths(folder: &Path) -> String {
    let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    kinds.map(|kind| format!("{kind}_temp_path {}/{kind};\n", folder.display())).concat()
}

/// The authorities of node certificates, as an operator downloads them.
fn node_ca(cluster: &TestCluster) -> String {
    let settings = &cluster.settings;
    let output = Command::new(&settings.executable)
        .arg("node-ca")
        .env("SVC_DATABASE_URL", settings.database_url.expose_secret())
        .env("SVC_DATABASE_CA_PATH", &settings.database_ca_path)
        .env("SVC_KEK_FILE", &settings.key_ring_path)
        .output()
        .expect("gpuaas runs");
    assert!(output.status.success(), "gpuaas node-ca: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("PEM is text")
}

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the checkout").to_owned()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

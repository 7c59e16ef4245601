//! A real proxy in front of a replica's node API, configured by its file under `deploy/ingress`.
//!
//! Everything here is on the loopback: the proxy speaks to the replica from an address of its own, so that its word is taken and that of
//! whoever connects directly is not.

use super::World;
use secrecy::ExposeSecret as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use supervisors::dev::files;
use supervisors::dev::process::{ChildProcess, Launch, free_port};

/// From where proxies speak to replicas.
const FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const STARTS_WITHIN: Duration = Duration::from_secs(20);
const STOPS_WITHIN: Duration = Duration::from_secs(2);

/// A kind of proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Haproxy,
    Nginx,
    Envoy,
}

impl Kind {
    /// As `SVC_NODE_CLIENT_IDENTITY` names its way.
    #[must_use]
    pub const fn way(self) -> &'static str {
        match self {
            Self::Haproxy => "rfc9440",
            Self::Nginx => "nginx",
            Self::Envoy => "xfcc",
        }
    }

    /// The header in which it forwards certificates.
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
    pub fn written(self, certificate_pem: &str) -> String {
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
        let found = files::find_programs(name).into_iter().chain([own]).find(|path| path.is_file());
        found.unwrap_or_else(|| panic!("there is no {name}: `deploy/test --tools` installs it"))
    }
}

/// A proxy that runs. Dropping it stops it.
pub struct Ingress {
    kind: Kind,
    address: SocketAddr,
    process: ChildProcess,
    folder: tempfile::TempDir,
}

impl Ingress {
    /// An address for a proxy that is started later: bundles are to name it.
    #[must_use]
    pub fn address() -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], free_port().expect("there is a free port")))
    }

    /// The variables of a replica behind a proxy of this kind, which will be at `address`.
    #[must_use]
    pub fn variables(kind: Kind, address: SocketAddr) -> [(&'static str, String); 3] {
        [
            ("SVC_NODE_CLIENT_IDENTITY", kind.way().to_owned()),
            ("SVC_NODE_TRUSTED_PROXIES", format!("{FROM}/32")),
            ("SVC_NODE_PUBLIC_URL", format!("https://{address}")),
        ]
    }

    /// Starts it in front of the first replica.
    pub async fn start(kind: Kind, address: SocketAddr, world: &World) -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-ingress-").tempdir().expect("a folder can be made");
        let certificate = world.authority.server_certificate("ingress").expect("a certificate can be made");
        let [chain, key] = [&certificate.certificate_path, &certificate.key_path].map(|path| read(path));
        let node_ca = node_ca(world);
        let files = [
            // HAProxy wants the key beside the chain; the others read the first certificates alone.
            ("node-api.pem", format!("{chain}{key}")),
            ("node-api.key", key),
            ("node-ca.pem", node_ca),
            ("api-ca.pem", read(world.authority.certificate_path())),
        ];
        for (name, text) in files {
            files::write_private(&folder.path().join(name), text.as_bytes()).expect("a file can be written");
        }
        let path = folder.path().join(kind.file());
        let configuration = placed(kind, folder.path(), address, world.replicas[0].listens().node);
        files::write_private(&path, configuration.as_bytes()).expect("a file can be written");

        let process = launch(kind, address, folder.path()).await;
        Self { kind, address, process, folder }
    }

    /// Gives it the authorities of nodes as they are now, and starts it anew with them.
    pub async fn follow(&mut self, world: &World) {
        let path = self.folder.path().join("node-ca.pem");
        files::write_private(&path, node_ca(world).as_bytes()).expect("a file can be written");
        self.process.stop(STOPS_WITHIN).await;
        self.process = launch(self.kind, self.address, self.folder.path()).await;
    }

    /// What agents connect to.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}", self.address)
    }
}

/// Starts the program on what lies in the folder, and waits until it listens.
async fn launch(kind: Kind, address: SocketAddr, folder: &Path) -> ChildProcess {
    let path = folder.join(kind.file());
    let launch = Launch::new("the proxy", kind.program(), folder.join("log"));
    let launch = match kind {
        Kind::Haproxy => launch.argument("-db").argument("-f").argument(&path),
        Kind::Nginx => {
            launch.argument("-p").argument(folder).argument("-g").argument("daemon off;").argument("-c").argument(&path)
        }
        Kind::Envoy => {
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

/// The configuration as it is in the checkout, but for where things are: each of these is in it.
fn placed(kind: Kind, folder: &Path, listen: SocketAddr, replica: SocketAddr) -> String {
    let text = read(&checkout().join("deploy/ingress").join(kind.file()));
    let (here, port) = (folder.display(), listen.port());
    let files = ("/etc/gpuaas/ingress/".to_owned(), format!("{here}/"));
    let own: Vec<(String, String)> = match kind {
        Kind::Haproxy => vec![
            ("bind :9443".to_owned(), format!("bind {listen}")),
            (
                "server replica-1 control-plane.internal:9443".to_owned(),
                format!("server replica-1 {replica} source {FROM}"),
            ),
            ("control-plane.internal".to_owned(), "localhost".to_owned()),
            // What this machine's limit of open files allows.
            ("maxconn 20000".to_owned(), "maxconn 500".to_owned()),
        ],
        Kind::Nginx => vec![
            ("listen 9443".to_owned(), format!("listen {listen}")),
            ("server control-plane.internal:9443".to_owned(), format!("server {replica}")),
            ("control-plane.internal".to_owned(), "localhost".to_owned()),
            ("/run/gpuaas-ingress.pid".to_owned(), format!("{here}/pid")),
            ("worker_rlimit_nofile 40000;\n".to_owned(), String::new()),
            ("worker_connections 20000".to_owned(), "worker_connections 500".to_owned()),
            ("proxy_http_version 1.1;".to_owned(), format!("proxy_http_version 1.1;\nproxy_bind {FROM};")),
            ("http {\n".to_owned(), format!("http {{\n{}", temporary_paths(folder))),
        ],
        Kind::Envoy => vec![
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

/// Debian's nginx has places for files that another user may not write to.
fn temporary_paths(folder: &Path) -> String {
    let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    kinds.map(|kind| format!("{kind}_temp_path {}/{kind};\n", folder.display())).concat()
}

/// The authorities of node certificates, as an operator gets them.
fn node_ca(world: &World) -> String {
    let settings = &world.settings;
    let output = Command::new(&settings.executable)
        .arg("node-ca")
        .env("SVC_DATABASE_URL", settings.database_url.expose_secret())
        .env("SVC_DATABASE_CA_PATH", &settings.ca_path)
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

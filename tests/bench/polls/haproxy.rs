//! The baseline: HAProxy with the same requests over the same mutual TLS in its tarpit.

use super::parked_polls::ANSWERED_AT_ONCE;
use anyhow::Context;
use local_servers::ports::free_port;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tests::cluster::TestCluster;

pub(crate) struct Haproxy {
    address: SocketAddr,
    process: ChildProcess,
    _folder: tempfile::TempDir,
}

impl Haproxy {
    pub(crate) fn start(cluster: &TestCluster, authorities: &str, polls: usize) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpuaas-haproxy-").tempdir()?;
        let at = |name: &str| folder.path().join(name);
        let certificate = cluster.authority.server_certificate("haproxy")?;
        let chain = std::fs::read_to_string(&certificate.certificate_path)?;
        let key = std::fs::read_to_string(&certificate.key_path)?;
        private_files::write_private(&at("server.pem"), format!("{chain}{key}").as_bytes())?;
        private_files::write_private(&at("node-ca.pem"), authorities.as_bytes())?;
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let configuration = format!(
            "global\n    maxconn {}\n    no strict-limits\n    ssl-default-bind-options ssl-min-ver TLSv1.2\n\
             defaults\n    mode http\n    timeout http-request 30s\n    timeout client 600s\n    timeout tarpit 600s\n\
             frontend tarpit\n    bind {address} ssl crt {} ca-file {} verify required alpn h2,http/1.1\n\
             \x20   http-request return status 404 if {{ path {ANSWERED_AT_ONCE} }}\n    http-request tarpit\n",
            polls + 100,
            at("server.pem").display(),
            at("node-ca.pem").display(),
        );
        private_files::write_private(&at("haproxy.cfg"), configuration.as_bytes())?;
        let launch = Launch::new("HAProxy", program()?, at("log"));
        let mut process = launch.argument("-db").argument("-f").argument(at("haproxy.cfg")).spawn()?;
        let until = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(address).is_err() {
            let ended = process.exit_status();
            anyhow::ensure!(
                ended.is_none() && Instant::now() < until,
                "HAProxy does not start: {}",
                process.log_tail()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(Self { address, process, _folder: folder })
    }

    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }
}

fn program() -> anyhow::Result<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map(PathBuf::from);
    let own = tools.map(|tools| tools.join("debian/usr/sbin/haproxy"));
    let found = private_files::find_programs("haproxy").into_iter().chain(own).find(|path| path.is_file());
    found.context("there is no haproxy: deploy/bench and `deploy/test --tools` install it")
}

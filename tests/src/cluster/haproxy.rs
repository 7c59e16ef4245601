//! The balancer of `deploy/ha`: HAProxy with the file that is shipped, in front of three replicas.

use super::patroni::{checkout, tool};
use local_servers::ports::free_port;
use local_servers::process::{ChildProcess, Launch};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use supervisors::dev::replica::Replica;

/// Where HAProxy listens. Replicas need both addresses before it starts.
#[derive(Clone, Copy, Debug)]
pub struct HaproxyAddresses {
    public: SocketAddr,
    node: SocketAddr,
}

impl HaproxyAddresses {
    /// Ports of 127.0.0.1 that this process has until it ends.
    ///
    /// # Errors
    /// Where there is no free port.
    pub fn on_free_ports() -> std::io::Result<Self> {
        let port = || Ok::<_, std::io::Error>(SocketAddr::from(([127, 0, 0, 1], free_port()?)));
        Ok(Self { public: port()?, node: port()? })
    }

    #[must_use]
    pub const fn public(&self) -> SocketAddr {
        self.public
    }

    #[must_use]
    pub fn public_url(&self) -> String {
        format!("https://{}", self.public)
    }

    #[must_use]
    pub fn node_url(&self) -> String {
        format!("https://{}", self.node)
    }

    /// Starts HAProxy in front of these replicas. Dropping the process stops it.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn start(&self, replicas: &[Replica], folder: &Path) -> anyhow::Result<ChildProcess> {
        let program = tool("debian/usr/sbin/haproxy").unwrap_or_else(|| PathBuf::from("/usr/sbin/haproxy"));
        let mut launch = Launch::new("haproxy", program, folder.join("haproxy.log"))
            .arguments(["-db", "-f"])
            .argument(checkout().join("deploy/ha/haproxy.cfg"))
            .variable("PUBLIC_BIND", self.public.to_string())
            .variable("NODE_BIND", self.node.to_string());
        for (number, replica) in (1..).zip(replicas) {
            let listens = replica.listens();
            launch = launch
                .variable(format!("PUBLIC_{number}"), listens.public.to_string())
                .variable(format!("NODE_{number}"), listens.node.to_string())
                .variable(format!("OPERATIONS_PORT_{number}"), listens.operations.port().to_string());
        }
        launch.spawn()
    }
}

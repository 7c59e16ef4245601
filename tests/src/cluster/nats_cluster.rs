//! The NATS of `deploy/ha`: three servers with the file that is shipped.

use super::patroni::checkout;
use anyhow::Context as _;
use local_servers::nats::{NatsUser, find_program};
use local_servers::pki::Authority;
use local_servers::ports::free_port;
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch};
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::path::{Path, PathBuf};

const SERVERS: usize = 3;

/// The running servers. Dropping it stops them.
pub struct NatsCluster {
    pub servers: Vec<ClusteredNats>,
    users: Vec<NatsUser>,
    ca_path: PathBuf,
}

/// One server.
pub struct ClusteredNats {
    name: String,
    folder: PathBuf,
    port: u16,
    environment: Vec<(String, String)>,
    process: Option<ChildProcess>,
}

impl NatsCluster {
    /// Starts three servers for these users.
    pub fn start(folder: &Path, users: Vec<NatsUser>) -> anyhow::Result<Self> {
        let folder = folder.join("nats");
        private_files::private_folder(&folder)?;
        let authority = Authority::create(&folder.join("pki"))?;
        let mut ports = Vec::new();
        for _ in 0..SERVERS {
            ports.push((free_port()?, free_port()?));
        }
        let mut servers = Vec::new();
        for (number, (port, cluster_port)) in ports.iter().enumerate() {
            let name = format!("nats-{}", number + 1);
            let own = folder.join(&name);
            private_files::private_folder(&own)?;
            private_files::write_private(
                &own.join("nats.conf"),
                &std::fs::read(checkout().join("deploy/ha/nats.conf"))?,
            )?;
            private_files::write_private(&own.join("users.conf"), users_file(&users)?.as_bytes())?;
            let certificate = authority.peer_certificate(&name)?;
            let mut environment = vec![
                ("NATS_NAME".to_owned(), name.clone()),
                ("NATS_HOST".to_owned(), "127.0.0.1".to_owned()),
                ("NATS_PORT".to_owned(), port.to_string()),
                ("NATS_CLUSTER_PORT".to_owned(), cluster_port.to_string()),
                ("NATS_CERTIFICATE".to_owned(), certificate.certificate_path.display().to_string()),
                ("NATS_KEY".to_owned(), certificate.key_path.display().to_string()),
                ("NATS_CA".to_owned(), authority.certificate_path().display().to_string()),
                ("NATS_STORE".to_owned(), own.join("store").display().to_string()),
            ];
            for (route, (_, cluster_port)) in ports.iter().enumerate() {
                environment
                    .push((format!("NATS_ROUTE_{}", route + 1), format!("nats-route://127.0.0.1:{cluster_port}")));
            }
            let mut server = ClusteredNats { name, folder: own, port: *port, environment, process: None };
            server.start()?;
            servers.push(server);
        }
        Ok(Self { servers, users, ca_path: authority.certificate_path().to_owned() })
    }

    #[must_use]
    pub fn ca_path(&self) -> &Path {
        &self.ca_path
    }

    /// All servers in one URL, for this user.
    pub fn url(&self, user: &str) -> anyhow::Result<String> {
        let user = self.users.iter().find(|known| known.name == user).context("there is no such user")?;
        let hosts: Vec<_> = self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        Ok(format!("tls://{}:{}@{}", user.name, user.password.expose_secret(), hosts.join(",")))
    }

    /// Connects as one of the users.
    pub async fn connect(&self, user: &str) -> anyhow::Result<async_nats::Client> {
        let url = self.url(user)?.into();
        supervisors::cluster::nats::connect(&url, Some(&self.ca_path), user).await
    }

    /// The server of this name.
    #[must_use]
    pub fn position(&self, name: &str) -> Option<usize> {
        self.servers.iter().position(|server| server.name == name)
    }
}

impl ClusteredNats {
    pub fn start(&mut self) -> anyhow::Result<()> {
        let launch = Launch::new(&self.name, find_program()?, self.folder.with_extension("log"))
            .arguments(["--config", &self.folder.join("nats.conf").display().to_string()]);
        let launch = self.environment.iter().fold(launch, |launch, (name, value)| launch.variable(name, value));
        self.process = Some(launch.spawn()?);
        Ok(())
    }

    /// SIGKILL, as a crash.
    pub fn kill9(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill9();
        }
    }

    /// Removes what a killed server had stored: its machine is replaced.
    pub fn lose_store(&self) -> anyhow::Result<()> {
        private_files::remove_folder(&self.folder.join("store"))
    }
}

fn users_file(users: &[NatsUser]) -> anyhow::Result<String> {
    let users: Vec<_> = users
        .iter()
        .map(|user| json!({ "user": user.name, "password": user.password.expose_secret(), "permissions": user.permissions }))
        .collect();
    Ok(format!("authorization: {}\n", serde_json::to_string(&json!({ "timeout": 30, "users": users }))?))
}

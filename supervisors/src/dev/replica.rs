//! Control-plane replicas: `gpuaas serve` as child processes, configured by `SVC_…` variables alone.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use secrecy::{ExposeSecret as _, SecretString};

use crate::cluster::nats_permissions;
use crate::process_roles::ProcessRole;
use crate::shutdown::SHUTDOWN_TIMEOUT;
use local_servers::identity::IdentityProvider;
use local_servers::identity::browser_login::CONSOLE_CLIENT_ID;
use local_servers::nats::NatsUser;
use local_servers::pki::ServerCertificate;
use local_servers::ports::free_port;
use local_servers::process::{ChildProcess, Launch};
use local_servers::settings::SavedSettings;

const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// A replica drains its listeners, polls, shards and outbox before it ends. It gives up by itself before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(SHUTDOWN_TIMEOUT.as_secs() + 15);

/// The NATS user of a member with these roles.
pub fn member(name: &str, roles: &BTreeSet<ProcessRole>) -> NatsUser {
    NatsUser::limited(name, nats_permissions::for_member(name, roles).as_config())
}

/// The settings that all replicas of one environment share.
#[derive(Clone)]
pub struct ReplicaSettings {
    /// The `gpuaas` program.
    pub executable: PathBuf,
    /// The folder of the logs.
    pub folder: PathBuf,
    pub database_url: SecretString,
    /// Trust anchor for Postgres.
    pub database_ca_path: PathBuf,
    /// Trust anchor for NATS, and of the replicas' own certificate.
    pub ca_path: PathBuf,
    pub certificate: ServerCertificate,
    pub key_ring_path: PathBuf,
    pub issuer: String,
    pub audience: String,
    /// The URLs of the public API and the node API: through the balancer.
    pub public_url: String,
    pub node_public_url: String,
    /// The token that opens a replica's stats.
    pub stats_token: SecretString,
    /// Further variables, which override those that are set here.
    pub variables: Vec<(String, String)>,
}

/// The addresses of one replica's listeners.
#[derive(Debug, Clone, Copy)]
pub struct ListenAddresses {
    pub public: SocketAddr,
    pub node: SocketAddr,
    /// For webhooks of the payment processor, where one is configured.
    pub webhook: SocketAddr,
    /// In clear, for operators.
    pub operations: SocketAddr,
}

impl ListenAddresses {
    /// Ports of 127.0.0.1 that this process has until it ends.
    pub fn on_free_ports() -> std::io::Result<Self> {
        let port = || Ok::<_, std::io::Error>(SocketAddr::from(([127, 0, 0, 1], free_port()?)));
        Ok(Self { public: port()?, node: port()?, webhook: port()?, operations: port()? })
    }

    /// The ports of the replica of this name at an earlier start, or new ones.
    pub fn restore(name: &str, saved: &SavedSettings) -> anyhow::Result<Self> {
        let port = |of: &str| {
            anyhow::Ok(SocketAddr::from(([127, 0, 0, 1], saved.port(&format!("{name}'s port for {of}"))?.number)))
        };
        Ok(Self {
            public: port("the public API")?,
            node: port("nodes")?,
            webhook: port("webhooks")?,
            operations: port("operators")?,
        })
    }
}

/// One replica. Dropping it stops it.
pub struct Replica {
    name: String,
    settings: ReplicaSettings,
    nats_url: SecretString,
    listens: ListenAddresses,
    process: Option<ChildProcess>,
}

impl Replica {
    /// Starts a replica and waits until it is ready to serve.
    pub async fn start(
        name: &str,
        settings: &ReplicaSettings,
        nats_url: SecretString,
        listens: ListenAddresses,
    ) -> anyhow::Result<Self> {
        let mut replica = Self { name: name.to_owned(), settings: settings.clone(), nats_url, listens, process: None };
        replica.start_again().await?;
        Ok(replica)
    }

    /// Starts a stopped or killed replica under its name, on its ports, and waits until it is ready.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        if !self.is_running() {
            self.process = Some(self.launch().spawn()?);
        }
        self.wait_until_ready(READY_TIMEOUT).await
    }

    /// The program that its next start runs.
    pub fn set_executable(&mut self, executable: PathBuf) {
        self.settings.executable = executable;
    }

    /// Waits until `GET /api/v1/readyz` answers 200, on the address that every process has, whatever its roles.
    pub async fn wait_until_ready(&mut self, limit: Duration) -> anyhow::Result<()> {
        let client = reqwest::Client::new();
        let url = format!("{}/api/v1/readyz", self.operations_url());
        let until = Instant::now() + limit;
        loop {
            let last = match client.get(&url).timeout(Duration::from_secs(2)).send().await {
                Ok(answer) if answer.status().is_success() => return Ok(()),
                Ok(answer) => format!("it answers {}", answer.status()),
                Err(error) => format!("{:#}", anyhow::Error::from(error)),
            };
            let process = self.process.as_mut().context("the replica was not started")?;
            if let Some(status) = process.exit_status() {
                bail!("{} ended while starting ({status}); its log ends with:\n{}", self.name, process.log_tail());
            }
            if Instant::now() > until {
                let log = process.log().display();
                bail!("{} is not ready after {} s: {last}; its log is {log}", self.name, limit.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Whether it has this role.
    pub fn has_role(&self, role: &str) -> bool {
        let notified = self.settings.variables.iter().rev().find(|(name, _)| name == "SVC_ROLES");
        notified.is_none_or(|(_, roles)| roles.split(',').any(|named| named.trim() == role || named.trim() == "all"))
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn public_url(&self) -> String {
        format!("https://{}", self.listens.public)
    }

    pub fn node_url(&self) -> String {
        format!("https://{}", self.listens.node)
    }

    /// The URL for the payment processor's webhooks.
    pub fn webhook_url(&self) -> String {
        format!("https://{}{}", self.listens.webhook, edge::payment_webhook::PATH)
    }

    /// The URL of its metrics.
    pub fn operations_url(&self) -> String {
        format!("http://{}", self.listens.operations)
    }

    pub fn listens(&self) -> ListenAddresses {
        self.listens
    }

    pub fn log(&self) -> PathBuf {
        self.settings.folder.join(format!("{}.log", self.name))
    }

    /// The pid of the process that was started last.
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(ChildProcess::pid)
    }

    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(ChildProcess::is_running)
    }

    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.process.as_mut().and_then(ChildProcess::exit_status)
    }

    /// SIGKILL, as a crash.
    pub fn kill9(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill9();
        }
    }

    /// An orderly end.
    pub async fn stop(&mut self) {
        if let Some(process) = &mut self.process {
            process.stop(STOP_TIMEOUT).await;
        }
    }

    /// Sets a variable for the next start.
    pub fn set_variable(&mut self, name: &str, value: &str) {
        self.settings.variables.push((name.to_owned(), value.to_owned()));
    }

    /// Another subcommand of `gpuaas` with the settings of this replica.
    pub fn command(&self, arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(&self.settings.executable);
        command.args(arguments).env_clear().envs(self.variables()).kill_on_drop(true);
        command
    }

    fn launch(&self) -> Launch {
        let launch = Launch::new(&self.name, &self.settings.executable, self.log()).argument("serve");
        self.variables().into_iter().fold(launch, |launch, (name, value)| launch.variable(name, value))
    }

    /// The environment; of a variable that is set twice the later value holds.
    fn variables(&self) -> Vec<(String, OsString)> {
        let settings = &self.settings;
        let path = |path: &Path| path.as_os_str().to_owned();
        let variables: [(&str, OsString); 21] = [
            ("SVC_DATABASE_URL", settings.database_url.expose_secret().into()),
            ("SVC_DATABASE_CA_PATH", path(&settings.database_ca_path)),
            ("SVC_NATS_URL", self.nats_url.expose_secret().into()),
            ("SVC_NATS_CA_PATH", path(&settings.ca_path)),
            ("SVC_KEK_FILE", path(&settings.key_ring_path)),
            ("SVC_PUBLIC_LISTEN", self.listens.public.to_string().into()),
            ("SVC_NODE_LISTEN", self.listens.node.to_string().into()),
            ("SVC_WEBHOOK_LISTEN", self.listens.webhook.to_string().into()),
            ("SVC_OPERATIONS_LISTEN", self.listens.operations.to_string().into()),
            ("INTERNAL_STATS_TOKEN", settings.stats_token.expose_secret().into()),
            ("SVC_PUBLIC_URL", settings.public_url.clone().into()),
            ("SVC_NODE_PUBLIC_URL", settings.node_public_url.clone().into()),
            ("SVC_TLS_CERT_PATH", path(&settings.certificate.certificate_path)),
            ("SVC_TLS_KEY_PATH", path(&settings.certificate.key_path)),
            ("SVC_TLS_CA_PATH", path(&settings.ca_path)),
            ("SVC_OIDC_ISSUER", settings.issuer.clone().into()),
            ("SVC_OIDC_CLIENT_ID", local_servers::identity::CLIENT_ID.into()),
            ("SVC_OIDC_AUDIENCE", settings.audience.clone().into()),
            ("SVC_MEMBER_NAME", self.name.clone().into()),
            ("SVC_ROLES", "all".into()),
            ("RUST_LOG", std::env::var_os("RUST_LOG").unwrap_or_else(|| "info".into())),
        ];
        let own = settings.variables.iter().map(|(name, value)| (name.clone(), value.into()));
        variables.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(own).collect()
    }
}

/// The settings of the login to the web console, at the development identity provider.
#[must_use]
pub fn console_login(identity: &IdentityProvider) -> [(String, String); 2] {
    [
        ("SVC_OIDC_CONSOLE_CLIENT_ID".to_owned(), CONSOLE_CLIENT_ID.to_owned()),
        ("SVC_OIDC_CONSOLE_CLIENT_SECRET".to_owned(), identity.console_secret().expose_secret().to_owned()),
    ]
}

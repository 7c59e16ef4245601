//! A private NATS server: a real one, with JetStream, TLS, and users with passwords and subject permissions.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::{Value, json};
use tokio::io::AsyncReadExt as _;

use crate::pki::Authority;
use crate::private_files;
use crate::process::{ChildProcess, Launch, tail};
use crate::settings::SavedSettings;

const MIN_VERSION: [u32; 2] = [2, 10];
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// A user of the server, with a random password and its permissions as in the server's configuration (`permissions`).
#[derive(Debug, Clone)]
pub struct NatsUser {
    pub name: String,
    pub password: SecretString,
    pub permissions: Value,
}

impl NatsUser {
    /// A user with all permissions: for the operator, and for tests that observe everything.
    pub fn operator(name: &str) -> Self {
        Self::limited(name, json!({ "publish": { "allow": ">" }, "subscribe": { "allow": ">" } }))
    }

    pub fn limited(name: &str, permissions: Value) -> Self {
        Self { name: name.to_owned(), password: private_files::random_hex(24).into(), permissions }
    }
}

/// A running server. Dropping it stops it; what it stored stays in its folder.
#[derive(Debug)]
pub struct NatsServer {
    program: PathBuf,
    config: PathBuf,
    users: Vec<NatsUser>,
    port: u16,
    ca_path: PathBuf,
    log: PathBuf,
    process: Option<ChildProcess>,
}

impl NatsServer {
    /// Starts a server with an empty store in `folder`, removing an earlier one's, for `users` alone.
    pub async fn start(folder: &Path, authority: &Authority, users: Vec<NatsUser>) -> anyhow::Result<Self> {
        Self::restore(folder, authority, users, &SavedSettings::ephemeral()).await
    }

    /// The same, on the store, the port and the passwords of an earlier start, where there was one.
    pub async fn restore(
        folder: &Path,
        authority: &Authority,
        mut users: Vec<NatsUser>,
        saved: &SavedSettings,
    ) -> anyhow::Result<Self> {
        const PORT: &str = "NATS' port";
        for user in &mut users {
            user.password = saved.secret(&format!("NATS' password for {}", user.name), "", 24)?;
        }
        let program = find_program()?;
        private_files::private_folder(folder)?;
        let folder = folder.canonicalize()?;
        let store = folder.join("store");
        if !saved.is_persistent() {
            private_files::remove_folder(&store)?;
        }
        let mut nats = Self {
            program,
            config: folder.join("nats.conf"),
            users,
            port: 0,
            ca_path: authority.certificate_path().to_owned(),
            log: folder.join("nats.log"),
            process: None,
        };
        let mut attempts = 0;
        let mut port = saved.port(PORT)?;
        loop {
            nats.port = port.number;
            attempts += 1;
            nats.configure(&store, authority)?;
            match nats.start_again().await {
                Ok(()) => return Ok(nats),
                // Another process took the port between the check and the bind.
                Err(_) if attempts < 5 && !port.is_known && tail(&nats.log, 5).contains("address already in use") => {
                    port = saved.another_port(PORT)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a stopped or killed server on the store and the port that it had.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        if self.is_running() {
            return Ok(());
        }
        let process =
            Launch::new("nats-server", &self.program, &self.log).argument("--config").argument(&self.config).spawn()?;
        let process = self.process.insert(process);
        let until = Instant::now() + START_TIMEOUT;
        while !sends_greeting(self.port).await {
            if let Some(status) = process.exit_status() {
                bail!("nats-server ended while starting ({status}); its log ends with:\n{}", process.log_tail());
            }
            if Instant::now() > until {
                bail!("nats-server does not answer; its log is {}", self.log.display());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// `tls://NAME:PASSWORD@127.0.0.1:PORT` of one of the users, or `None` where there is no such user.
    pub fn url(&self, user: &str) -> Option<SecretString> {
        self.url_through(user, self.address())
    }

    /// The same, through another address: where a proxy is between the user and the server.
    pub fn url_through(&self, user: &str, address: SocketAddr) -> Option<SecretString> {
        let user = self.users.iter().find(|known| known.name == user)?;
        Some(format!("tls://{}:{}@{address}", user.name, user.password.expose_secret()).into())
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// Connects as one of the users. (The client takes no credentials from a URL: they are passed separately.)
    pub async fn connect(&self, user: &str) -> anyhow::Result<async_nats::Client> {
        let known = self.users.iter().find(|known| known.name == user).with_context(|| format!("no user {user}"))?;
        let client = async_nats::ConnectOptions::new()
            .user_and_password(known.name.clone(), known.password.expose_secret().to_owned())
            .add_root_certificates(self.ca_path.clone())
            .require_tls(true)
            .connect(format!("tls://127.0.0.1:{}", self.port))
            .await?;
        Ok(client)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(ChildProcess::pid)
    }

    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(ChildProcess::is_running)
    }

    /// SIGKILL, as a crash.
    pub fn kill9(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill9();
        }
    }

    /// An orderly end; the store stays.
    pub async fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.stop(STOP_TIMEOUT).await;
        }
    }

    /// Writes the configuration as JSON, which the server reads as its own format; every text is quoted, so that none is
    /// taken for a variable.
    fn configure(&self, store: &Path, authority: &Authority) -> anyhow::Result<()> {
        let certificate = authority.server_certificate("nats")?;
        let users: Vec<_> = self
            .users
            .iter()
            .map(|user| {
                json!({
                    "user": user.name,
                    "password": user.password.expose_secret(),
                    "permissions": user.permissions,
                })
            })
            .collect();
        let config = json!({
            "server_name": "gpuaas-dev",
            "host": "127.0.0.1",
            "port": self.port,
            "jetstream": { "store_dir": store },
            "tls": { "cert_file": certificate.certificate_path, "key_file": certificate.key_path, "timeout": 20 },
            "authorization": { "timeout": 20, "users": users },
        });
        private_files::write_private(&self.config, &serde_json::to_vec_pretty(&config)?)
    }
}

/// Whether a server that is ready for clients sends its greeting (the first line of the protocol is plain text, before TLS).
async fn sends_greeting(port: u16) -> bool {
    let greeting = async {
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
        let mut start = [0_u8; 5];
        stream.read_exact(&mut start).await?;
        Ok::<_, std::io::Error>(&start == b"INFO ")
    };
    matches!(tokio::time::timeout(Duration::from_secs(1), greeting).await, Ok(Ok(true)))
}

pub fn find_program() -> anyhow::Result<PathBuf> {
    private_files::find_programs("nats-server")
        .into_iter()
        .find(|program| private_files::version_of(program).is_some_and(|version| version.as_slice() >= MIN_VERSION.as_slice()))
        .context(
            "no nats-server of version 2.10 or later on PATH, in $GPUAAS_TOOLS_DIR or in .dev/tools; `deploy/up` installs one",
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn users_connect_over_tls_and_stay_within_their_subjects() {
        use futures::StreamExt as _;

        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("pki")).unwrap();
        let own = || json!({ "publish": { "allow": "own.>" }, "subscribe": { "allow": "own.>" } });
        let users = vec![NatsUser::operator("operator"), NatsUser::limited("member", own())];
        let mut nats = NatsServer::start(dir.path(), &authority, users).await.unwrap();
        let operator = nats.connect("operator").await.unwrap();
        let mut seen = operator.subscribe(">").await.unwrap();
        operator.flush().await.unwrap();
        let member = nats.connect("member").await.unwrap();
        member.publish("foreign.subject", "refused".into()).await.unwrap();
        member.publish("own.subject", "taken".into()).await.unwrap();
        member.flush().await.unwrap();
        assert_eq!(seen.next().await.unwrap().subject.as_str(), "own.subject");

        let stranger = async_nats::ConnectOptions::new()
            .add_root_certificates(authority.certificate_path().to_owned())
            .user_and_password("member".to_owned(), "wrong".to_owned())
            .connect(format!("tls://127.0.0.1:{}", nats.port()))
            .await;
        assert!(stranger.is_err());
        nats.stop().await;
        assert!(!nats.is_running());
    }

    #[tokio::test]
    async fn messages_stored_by_jetstream_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let authority = Authority::create(&dir.path().join("pki")).unwrap();
        let mut nats = NatsServer::start(dir.path(), &authority, vec![NatsUser::operator("operator")]).await.unwrap();
        let stream = async_nats::jetstream::stream::Config {
            name: "KEPT".to_owned(),
            subjects: vec!["kept.>".to_owned()],
            ..Default::default()
        };
        let jetstream = async_nats::jetstream::new(nats.connect("operator").await.unwrap());
        jetstream.create_stream(stream).await.unwrap();
        jetstream.publish("kept.one", "1".into()).await.unwrap().await.unwrap();
        nats.stop().await;
        nats.start_again().await.unwrap();
        let jetstream = async_nats::jetstream::new(nats.connect("operator").await.unwrap());
        let mut saved = jetstream.get_stream("KEPT").await.unwrap();
        assert_eq!(saved.info().await.unwrap().state.messages, 1);
    }
}

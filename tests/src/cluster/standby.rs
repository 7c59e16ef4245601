//! A standby of a test's own Postgres, which can be promoted, and a proxy in front of both that is switched from one to the other and knows
//! nothing of their roles, as a virtual address or a balancer of TCP does.

use anyhow::Context as _;
use local_servers::ports::free_port;
use local_servers::postgres::{account, program};
use local_servers::process::{ChildProcess, Launch, as_account};
use local_servers::test_database::TestDatabase;
use secrecy::ExposeSecret as _;
use sqlx::ConnectOptions as _;
use sqlx::postgres::PgConnectOptions;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running standby. Dropping it stops it; its data is removed with that of its primary.
pub struct StandbyServer {
    /// As the primary's, with the standby's port.
    url: String,
    port: u16,
    process: ChildProcess,
}

impl StandbyServer {
    /// Copies the primary and follows it.
    ///
    /// # Errors
    /// Where the copy or its server cannot be started.
    pub async fn of(primary: &TestDatabase) -> anyhow::Result<Self> {
        let data = primary.data_folder().await;
        let access = std::fs::OpenOptions::new().append(true).open(data.join("pg_hba.conf"));
        access?.write_all(b"local replication all trust\n")?;
        primary.execute("SELECT pg_reload_conf()").await;

        let (folder, account) = (data.with_file_name("standby"), account()?);
        let (socket_folder, primary_port) = primary.socket_address();
        let mut copy = Command::new(program("pg_basebackup")?);
        copy.args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync", "--username=gpuaas"]);
        copy.arg("--pgdata").arg(&folder).arg("--host").arg(socket_folder).arg("--port").arg(primary_port.to_string());
        as_account(copy.current_dir("/"), account);
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let output = copy.output()?;
            if output.status.success() {
                break;
            }
            // The server reads its settings a moment after it was asked to.
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            anyhow::ensure!(error.contains("pg_hba.conf") && Instant::now() < until, "pg_basebackup: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }

        let port = free_port()?;
        let settings = [
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "ssl=on",
            "ssl_cert_file=server.pem",
            "ssl_key_file=server.key",
            // A standby has at least as many as its primary.
            "max_connections=300",
        ];
        let process = Launch::new("standby", program("postgres")?, primary.log().with_file_name("standby.log"))
            .argument("-D")
            .argument(&folder)
            .arguments(["-p", &port.to_string()])
            .arguments(settings.into_iter().flat_map(|setting| ["-c", setting]))
            .variable("LC_ALL", "C")
            .account(account)
            .stop_signal(nix::sys::signal::Signal::SIGINT)
            .spawn()?;
        let url = primary.url().expose_secret().replace(&format!(":{primary_port}/"), &format!(":{port}/"));
        let standby = Self { url, port, process };
        while standby.ask("SELECT pg_is_in_recovery()::text").await.is_err() {
            anyhow::ensure!(Instant::now() < until, "the standby takes no connection: {}", standby.process.log_tail());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(standby)
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// `postgres://…` of the standby, with the password.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Makes it the primary. It takes writes when this returns.
    ///
    /// # Errors
    /// Where it does not become one within a minute.
    pub async fn promote(&self) -> anyhow::Result<()> {
        let promoted = self.ask("SELECT pg_promote()::text").await?;
        anyhow::ensure!(promoted == "true", "the standby is not promoted: {}", self.process.log_tail());
        Ok(())
    }

    async fn ask(&self, question: &'static str) -> anyhow::Result<String> {
        let options: PgConnectOptions = self.url.parse()?;
        let mut connection = options.connect().await?;
        sqlx::query_scalar(question).fetch_one(&mut connection).await.context("the standby does not answer")
    }
}

/// A proxy of TCP with one target at a time. Dropping it closes it.
pub struct SwitchedProxy {
    address: SocketAddr,
    target: watch::Sender<SocketAddr>,
    accept_task: JoinHandle<()>,
}

impl SwitchedProxy {
    /// # Errors
    /// Where no port can be bound.
    pub async fn to(target: SocketAddr) -> std::io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (target, current) = watch::channel(target);
        let accept_task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(carry(client, current.clone()));
            }
        });
        Ok(Self { address, target, accept_task })
    }

    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections to the target before are closed.
    pub fn switch_to(&self, target: SocketAddr) {
        self.target.send_replace(target);
    }
}

impl Drop for SwitchedProxy {
    fn drop(&mut self) {
        self.accept_task.abort();
    }
}

async fn carry(mut client: TcpStream, mut current: watch::Receiver<SocketAddr>) {
    let target = *current.borrow_and_update();
    let Ok(mut server) = TcpStream::connect(target).await else { return };
    if client.set_nodelay(true).and_then(|()| server.set_nodelay(true)).is_err() {
        return;
    }
    tokio::select! {
        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
        _ = current.changed() => {}
    }
}

//! PgBouncer in front of a test's Postgres, in any of its modes.

use super::patroni::tool;
use anyhow::Context as _;
use local_servers::ports::free_port;
use local_servers::postgres::{ROLE, account};
use local_servers::process::{ChildProcess, Launch};
use local_servers::test_database::TestDatabase;
use nix::unistd::{Uid, User};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

const START_TIMEOUT: Duration = Duration::from_secs(30);

/// What the programs of Debian's packages, unpacked and not installed, are linked against.
const LIBRARIES: [&str; 2] = ["usr/lib", "lib"];

/// A running pooler. Dropping it stops it.
pub struct PgBouncer {
    process: ChildProcess,
    port: u16,
    _folder: tempfile::TempDir,
}

impl PgBouncer {
    /// What the machine lacks for it, if anything.
    #[must_use]
    pub fn missing() -> Option<String> {
        program().is_none().then(|| "there is no pgbouncer".to_owned())
    }

    /// In this mode (`session`, `transaction` or `statement`), with further lines of its settings.
    ///
    /// # Errors
    /// Where it does not start.
    pub async fn start(database: &TestDatabase, mode: &str, settings: &[&str]) -> anyhow::Result<Self> {
        let program = program().context("there is no pgbouncer")?;
        let (folder, port) = (tempfile::tempdir()?, free_port()?);
        let (socket_folder, server_port) = database.socket_address();
        // It gives root's rights up itself. The server's socket asks its own user for no password.
        let user = match account()? {
            Some(account) => {
                let found = User::from_uid(Uid::from_raw(account.uid))?.context("the account has a name")?;
                format!("user = {}\n", found.name)
            }
            None => String::new(),
        };
        let text = format!(
            "[databases]\n{ROLE} = host={} port={server_port} dbname={} user={ROLE}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = {mode}\ndefault_pool_size = 80\nmax_client_conn = 300\n{user}{}\n",
            socket_folder.display(),
            database.name(),
            settings.join("\n"),
        );
        let path = folder.path().join("pgbouncer.ini");
        std::fs::write(&path, text)?;
        let machine = format!("{}-linux-gnu", std::env::consts::ARCH);
        let root = program.ancestors().nth(3).context("it lies in usr/sbin")?;
        let libraries = std::env::join_paths(LIBRARIES.map(|folder| root.join(folder).join(&machine)))?;
        let mut process = Launch::new("pgbouncer", &program, folder.path().join("pgbouncer.log"))
            .argument(&path)
            .variable("LD_LIBRARY_PATH", libraries)
            .spawn()?;
        let until = Instant::now() + START_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            anyhow::ensure!(process.is_running() && Instant::now() < until, "no pgbouncer: {}", process.log_tail());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(Self { process, port, _folder: folder })
    }

    /// `postgres://…` of the database through it. It asks for no password.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://{ROLE}@127.0.0.1:{}/{ROLE}", self.port)
    }

    /// The end of its log, for messages.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }
}

fn program() -> Option<PathBuf> {
    let installed = PathBuf::from("/usr/sbin/pgbouncer");
    tool("pgbouncer/usr/sbin/pgbouncer").or_else(|| installed.is_file().then_some(installed))
}

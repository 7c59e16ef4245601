//! A durable Postgres for a benchmark: fsync on, reached over its socket by ours and by the baseline alike, so that neither pays
//! for the link.

use anyhow::{Context, bail, ensure};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{Connection, PgConnection};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The Postgres role of all connections.
pub const ROLE: &str = "bench";

/// The settings that differ from the server's defaults: memory for the working set, and no checkpoint within a round.
pub const SETTINGS: [(&str, &str); 4] =
    [("shared_buffers", "512MB"), ("min_wal_size", "4GB"), ("max_wal_size", "8GB"), ("checkpoint_timeout", "30min")];

/// The number of 16 MiB WAL segments that are allocated before the first round.
const WAL_SEGMENTS: i32 = 160;

/// A private server; dropping it stops it and removes its data.
pub struct Postgres {
    folder: tempfile::TempDir,
    child: Child,
}

impl Postgres {
    /// # Errors
    /// If the programs are not installed or do not start.
    pub fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpuaas-bench").tempdir()?;
        if nix::unistd::geteuid().is_root() {
            let user = nix::unistd::User::from_name("postgres")?
                .context("Postgres does not run as root, and there is no user postgres")?;
            nix::unistd::chown(folder.path(), Some(user.uid), Some(user.gid))?;
        }
        let data = folder.path().join("data");
        let made = as_server(&program("initdb")?)
            .arg("-D")
            .arg(&data)
            .args(["-U", ROLE, "-A", "trust", "-E", "UTF8", "--locale=C"])
            .current_dir("/")
            .output()
            .context("running initdb")?;
        ensure!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let mut server = as_server(&program("postgres")?);
        server.arg("-D").arg(&data).arg("-k").arg(folder.path()).args(["-c", "listen_addresses=", "-c", "fsync=on"]);
        for (name, value) in SETTINGS {
            server.arg("-c").arg(format!("{name}={value}"));
        }
        server.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let postgres = Self { child: server.spawn().context("starting postgres")?, folder };
        let began = Instant::now();
        while !Command::new(program("pg_isready")?)
            .arg("-q")
            .arg("-h")
            .arg(postgres.socket_folder())
            .status()?
            .success()
        {
            if began.elapsed() > Duration::from_secs(30) {
                bail!("postgres does not come up");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(postgres)
    }

    /// Preallocates WAL segments, as on a server that has run for a while. A new server fills each new segment with zeros
    /// first, while commits wait.
    ///
    /// # Errors
    /// If the server fails.
    pub async fn age(&self) -> anyhow::Result<()> {
        let mut connection = PgConnection::connect_with(&self.options("postgres")).await?;
        for _ in 0..WAL_SEGMENTS {
            sqlx::query("SELECT pg_logical_emit_message(false, 'bench', 'x')").execute(&mut connection).await?;
            sqlx::query("SELECT pg_switch_wal()").execute(&mut connection).await?;
        }
        sqlx::query("CHECKPOINT").execute(&mut connection).await?;
        connection.close().await?;
        Ok(())
    }

    fn options(&self, database: &str) -> PgConnectOptions {
        let options = PgConnectOptions::new_without_pgpass().socket(self.socket_folder()).port(5432);
        options.username(ROLE).database(database)
    }

    #[must_use]
    pub fn socket_folder(&self) -> &Path {
        self.folder.path()
    }

    /// A pool on a new database with our schema.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn database(&self, name: &str) -> anyhow::Result<PgPool> {
        let postgres = PgPool::connect_with(self.options("postgres")).await?;
        sqlx::query(sqlx::AssertSqlSafe(format!("CREATE DATABASE \"{name}\""))).execute(&postgres).await?;
        postgres.close().await;
        let pool = PgPoolOptions::new().max_connections(4).connect_with(self.options(name)).await?;
        persistence::migrate::run(&pool).await?;
        persistence::sweep::make_partitions(&pool, 1).await?;
        Ok(pool)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        // An immediate shutdown without a checkpoint: the data is removed anyway. An error means that the server has ended.
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGQUIT);
        let _ = self.child.wait();
    }
}

/// Postgres refuses to run as root, so it runs as the user `postgres` then. It dies with this process.
fn as_server(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    if nix::unistd::geteuid().is_root() {
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
    }
    command.arg("--pdeathsig=QUIT").arg("--").arg(program);
    command
}

/// The path of a Postgres program.
///
/// # Errors
/// If it is neither on the PATH nor where Debian installs it.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|folder| folder.join(name));
    let debian = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut installed = on_path.chain(debian.map(|version| version.path().join("bin").join(name)));
    installed.find(|program| program.exists()).with_context(|| format!("{name} is not installed"))
}

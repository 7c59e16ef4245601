//! A durable Postgres for a benchmark: fsync on, reached over its socket by ours and by the baseline alike, so that neither pays
//! for the link.

use anyhow::Context as _;
use local_servers::pki::Authority;
use local_servers::postgres::{PostgresOptions, PostgresServer};
pub use local_servers::postgres::{ROLE, program};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{Connection, PgConnection};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// The settings that differ from the server's defaults: memory for the working set, and no checkpoint within a round.
pub const SETTINGS: [(&str, &str); 4] =
    [("shared_buffers", "512MB"), ("min_wal_size", "4GB"), ("max_wal_size", "8GB"), ("checkpoint_timeout", "30min")];

/// The number of 16 MiB WAL segments that are allocated before the first round.
const WAL_SEGMENTS: i32 = 160;

/// A private server; dropping it stops it and removes its data.
pub struct Postgres {
    server: PostgresServer,
    _folder: tempfile::TempDir,
}

impl Postgres {
    /// # Errors
    /// If the programs are not installed or do not start.
    pub async fn start() -> anyhow::Result<Self> {
        // The server's user has to reach its data.
        let traversable = std::fs::Permissions::from_mode(0o711);
        let folder = tempfile::Builder::new().prefix("gpuaas-bench").permissions(traversable).tempdir()?;
        let authority = Authority::create(&folder.path().join("pki"))?;
        let settings = SETTINGS.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let options = PostgresOptions { settings, has_socket: true, ..PostgresOptions::default() };
        let server = PostgresServer::start_with(&folder.path().join("postgres"), &authority, options).await?;
        Ok(Self { server, _folder: folder })
    }

    /// Preallocates WAL segments, as on a server that has run for a while. A new server fills each new segment with zeros
    /// first, while commits wait.
    ///
    /// # Errors
    /// If the server fails.
    pub async fn age(&self) -> anyhow::Result<()> {
        let mut connection = PgConnection::connect_with(&self.options("postgres")?).await?;
        for _ in 0..WAL_SEGMENTS {
            sqlx::query("SELECT pg_logical_emit_message(false, 'bench', 'x')").execute(&mut connection).await?;
            sqlx::query("SELECT pg_switch_wal()").execute(&mut connection).await?;
        }
        sqlx::query("CHECKPOINT").execute(&mut connection).await?;
        connection.close().await?;
        Ok(())
    }

    fn options(&self, database: &str) -> anyhow::Result<PgConnectOptions> {
        let options = PgConnectOptions::new_without_pgpass().socket(self.socket_folder()?).port(self.server.port());
        Ok(options.username(ROLE).database(database))
    }

    fn socket_folder(&self) -> anyhow::Result<&Path> {
        self.server.socket_folder().context("the server has a socket")
    }

    /// `pgbench` against this server, as its owner.
    ///
    /// # Errors
    /// If it is not installed.
    pub fn pgbench(&self) -> anyhow::Result<Command> {
        let mut pgbench = Command::new(program("pgbench")?);
        pgbench.arg("-h").arg(self.socket_folder()?).args(["-p", &self.server.port().to_string(), "-U", ROLE]);
        Ok(pgbench)
    }

    /// A pool on a new database with our schema.
    ///
    /// # Errors
    /// If it cannot be created.
    pub async fn database(&self, name: &str) -> anyhow::Result<PgPool> {
        self.server.create_database(name).await?;
        let pool = PgPoolOptions::new().max_connections(4).connect_with(self.options(name)?).await?;
        persistence::migrate::run(&pool).await?;
        persistence::table_maintenance::make_partitions(&pool, 1).await?;
        Ok(pool)
    }
}

//! A migrated database for one test: on a server that all tests of a run share, or on one of its own that the test may stop.
//!
//! The shared server starts with the first test that needs it and stops with the run: with the process of nextest, or, without nextest, with the
//! own process of the test. The database of a test is copied from a migrated template.

// A test's database that cannot be made is a failed test: it panics.
#![allow(clippy::expect_used, clippy::missing_panics_doc)]

use crate::pki::Authority;
use crate::postgres::{PostgresOptions, PostgresServer, ROLE, connection_url, program};
use crate::private_files;
use anyhow::Context as _;
use nix::unistd::getppid;
use persistence::pool::PoolConfig;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{ConnectOptions as _, Connection as _};
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::sync::{Mutex, OnceCell};

const TEMPLATE: &str = "template_of_tests";

/// Databases of ended tests that a new test removes at most: as many as one test leaves, and some more.
const REMOVED_AT_ONCE: usize = 3;

/// How long a test waits for a connection to the shared server, and for its answer.
const SHARED_SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// A migrated database, removed with its server or by a later test.
pub struct TestDatabase {
    /// A pool on the database, as its owner, through the server's Unix socket.
    pub pool: PgPool,
    name: String,
    address: ServerAddress,
    own: Option<OwnServer>,
}

/// Where a server is, for the tests that share it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct ServerAddress {
    socket_folder: PathBuf,
    port: u16,
    pid: u32,
    password: String,
    ca_path: PathBuf,
    log: PathBuf,
}

/// A server of one test alone. The order of the fields is the order in which a drop removes them.
struct OwnServer {
    server: Mutex<PostgresServer>,
    _folder: tempfile::TempDir,
}

impl TestDatabase {
    /// A database on the shared server, whose data does not survive a crash of the machine (fsync is off).
    pub async fn fresh() -> Self {
        static SHARED: OnceCell<ServerAddress> = OnceCell::const_new();
        let address = SHARED.get_or_init(|| async { shared_server().await.expect("the tests' Postgres starts") }).await;
        Self::create(address.clone(), None).await.expect("a database can be made")
    }

    /// A database on a server of its own, with fsync, which the test may stop and kill.
    pub async fn alone() -> Self {
        Self::with_environment(Vec::new()).await
    }

    /// As [`TestDatabase::alone`], with further variables in the server's environment.
    pub async fn with_environment(environment: Vec<(String, String)>) -> Self {
        let options = PostgresOptions { environment, has_socket: true, ..PostgresOptions::default() };
        Self::on_own_server(options).await.expect("a Postgres of the test's own starts")
    }

    /// As [`TestDatabase::alone`], on a server with these options and a Unix socket.
    pub async fn with_options(options: PostgresOptions) -> Self {
        let options = PostgresOptions { has_socket: true, ..options };
        Self::on_own_server(options).await.expect("a Postgres of the test's own starts")
    }

    async fn on_own_server(options: PostgresOptions) -> anyhow::Result<Self> {
        // The server's user has to reach its data.
        let traversable = std::fs::Permissions::from_mode(0o711);
        let folder = tempfile::Builder::new().prefix("gpuaas-postgres-").permissions(traversable).tempdir()?;
        let authority = Authority::create(&folder.path().join("pki"))?;
        let server = PostgresServer::start_with(&folder.path().join("postgres"), &authority, options).await?;
        let address = address_of(&server)?;
        prepare_template(&address).await?;
        Self::create(address, Some(OwnServer { server: Mutex::new(server), _folder: folder })).await
    }

    async fn create(address: ServerAddress, own: Option<OwnServer>) -> anyhow::Result<Self> {
        let mut connection = address.options("postgres").connect().await?;
        remove_databases_of_ended_tests(&mut connection).await?;
        let name = format!("test_{}_{}", std::process::id(), private_files::random_hex(4));
        // Without fsync a copy of the template's files costs a third of one through the write-ahead log.
        let strategy = if own.is_none() { "FILE_COPY" } else { "WAL_LOG" };
        run(&mut connection, format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY {strategy}")).await?;
        connection.close().await?;
        // Of a server that a test stops, the test expects the error.
        let acquire_timeout = if own.is_none() { SHARED_SERVER_TIMEOUT } else { Duration::from_secs(30) };
        let pool = PgPoolOptions::new()
            .max_connections(8)
            .acquire_timeout(acquire_timeout)
            .connect_lazy_with(address.options(&name));
        Ok(Self { pool, name, address, own })
    }

    /// `postgres://…` over TCP and TLS, with the password.
    #[must_use]
    pub fn url(&self) -> SecretString {
        let ServerAddress { port, password, ca_path, .. } = &self.address;
        connection_url(*port, &password.as_str().into(), ca_path, &self.name).into()
    }

    /// The authority that signed the server's certificate.
    #[must_use]
    pub fn ca_path(&self) -> &Path {
        &self.address.ca_path
    }

    /// The settings of a pool through the server's Unix socket. The shared server is never away: on a machine that pauses it answers late.
    #[must_use]
    pub fn pool_config(&self) -> PoolConfig {
        let ServerAddress { socket_folder, port, .. } = &self.address;
        let url = format!("postgres://{ROLE}@localhost:{port}/{}?host={}", self.name, socket_folder.display());
        let mut config = PoolConfig::new(url.into(), None);
        if self.own.is_none() {
            (config.acquire_timeout, config.statement_timeout) = (SHARED_SERVER_TIMEOUT, SHARED_SERVER_TIMEOUT);
        }
        config
    }

    /// The folder of the data (`PGDATA`) of a server of the test's own.
    pub async fn data_folder(&self) -> PathBuf {
        self.own_server().lock().await.data_folder().join("data")
    }

    /// The name of the database.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The folder of the server's Unix socket, and its port.
    #[must_use]
    pub fn socket_address(&self) -> (&Path, u16) {
        (&self.address.socket_folder, self.address.port)
    }

    /// The server's Unix socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.address.socket_folder.join(format!(".s.PGSQL.{}", self.address.port))
    }

    #[must_use]
    pub fn log(&self) -> &Path {
        &self.address.log
    }

    /// The process id of the server as it was started first.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.address.pid
    }

    /// All that the database stores, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let mut dump = Command::new(program("pg_dump").expect("pg_dump is installed"));
        let output = dump.args(["--data-only", "--dbname", self.pool_config().url.expose_secret()]).output();
        let output = output.expect("pg_dump runs");
        assert!(output.status.success(), "pg_dump: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Executes one statement, past everything of ours.
    pub async fn execute(&self, statement: &'static str) {
        sqlx::query(statement).execute(&self.pool).await.expect("the statement is executed");
    }

    /// As [`TestDatabase::execute`], for text that the test makes.
    pub async fn execute_raw(&self, statement: &str) {
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement.to_owned()))
            .execute(&self.pool)
            .await
            .expect("the statement is executed");
    }

    /// SIGKILL to the server, as a crash of it.
    pub async fn kill9(&self) {
        self.own_server().lock().await.kill9();
    }

    /// An orderly end of the server.
    pub async fn stop(&self) {
        self.own_server().lock().await.stop().await;
    }

    /// Starts a stopped or killed server on its data and its port.
    pub async fn start_again(&self) {
        self.own_server().lock().await.start_again().await.expect("Postgres starts again");
    }

    fn own_server(&self) -> &Mutex<PostgresServer> {
        let own = self.own.as_ref();
        &own.expect("this test stops Postgres, so it needs a server of its own (`TestDatabase::alone`)").server
    }
}

impl ServerAddress {
    fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass()
            .socket(&self.socket_folder)
            .port(self.port)
            .username(ROLE)
            .database(database)
    }
}

/// The server that all tests of this run share. The first one starts it while the others wait for the lock.
async fn shared_server() -> anyhow::Result<ServerAddress> {
    let (run, owner) = match std::env::var("NEXTEST_RUN_ID") {
        Ok(run) => (run, getppid().as_raw().cast_unsigned()),
        Err(_) => (private_files::random_hex(16), std::process::id()),
    };
    let folder = std::env::temp_dir().join(format!("gpuaas-tests-{run}"));
    private_files::traversable_folder(&folder)?;
    let lock = File::create(folder.join("lock"))?;
    let lock = tokio::task::spawn_blocking(move || lock.lock().map(|()| lock)).await??;
    let state = folder.join("server.json");
    if let Ok(state) = std::fs::read(&state) {
        return serde_json::from_slice(&state).context("the shared server's address cannot be read");
    }
    let authority = Authority::create(&folder.join("pki"))?;
    let options = PostgresOptions {
        settings: [
            "fsync=off",
            "full_page_writes=off",
            "max_connections=500",
            "wal_level=minimal",
            "max_wal_senders=0",
            // Its databases live for seconds: nothing in them is worth the processor time.
            "autovacuum=off",
            "jit=off",
        ]
        .map(str::to_owned)
        .to_vec(),
        has_socket: true,
        is_detached: true,
        ..PostgresOptions::default()
    };
    let server = PostgresServer::start_with(&folder.join("postgres"), &authority, options).await?;
    let address = address_of(&server)?;
    prepare_template(&address).await?;
    server.detach(owner, &folder)?;
    private_files::write_private(&state, &serde_json::to_vec(&address)?)?;
    drop(lock);
    Ok(address)
}

fn address_of(server: &PostgresServer) -> anyhow::Result<ServerAddress> {
    Ok(ServerAddress {
        socket_folder: server.socket_folder().context("the server has a socket")?.to_owned(),
        port: server.port(),
        pid: server.pid().context("the server runs")?,
        password: server.password().expose_secret().to_owned(),
        ca_path: server.ca_path().to_owned(),
        log: server.log().to_owned(),
    })
}

async fn prepare_template(address: &ServerAddress) -> anyhow::Result<()> {
    let mut connection = address.options("postgres").connect().await?;
    run(&mut connection, format!("CREATE DATABASE {TEMPLATE}")).await?;
    connection.close().await?;
    let pool = PgPoolOptions::new().max_connections(2).connect_with(address.options(TEMPLATE)).await?;
    persistence::migrate::run(&pool).await?;
    persistence::table_maintenance::make_partitions(&pool, 2).await?;
    // A template with open connections cannot be copied.
    pool.close().await;
    Ok(())
}

/// Removes databases whose test's process has ended.
async fn remove_databases_of_ended_tests(connection: &mut sqlx::PgConnection) -> anyhow::Result<()> {
    let names: Vec<String> = sqlx::query_scalar("SELECT datname FROM pg_database WHERE datname LIKE 'test\\_%'")
        .fetch_all(&mut *connection)
        .await?;
    let has_ended = |name: &&String| {
        let pid = name.split('_').nth(1).unwrap_or_default();
        !Path::new("/proc").join(pid).exists()
    };
    for name in names.iter().filter(has_ended).take(REMOVED_AT_ONCE) {
        // Another test may remove it at the same time.
        let _ = run(connection, format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await;
    }
    Ok(())
}

async fn run(connection: &mut sqlx::PgConnection, statement: String) -> anyhow::Result<()> {
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(connection).await?;
    Ok(())
}

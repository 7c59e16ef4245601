//! A private Postgres for tests: one server for the tests of a process, one database for each test, copied from a migrated one.

use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::time::{Duration, Instant};

const TEMPLATE: &str = "template_of_tests";

pub(crate) struct PostgresServer {
    dir: tempfile::TempDir,
    child: Mutex<Option<Child>>,
    databases: AtomicU32,
}

/// A migrated database for one test, on the shared server unless the test needs its own.
pub(crate) struct TestDatabase {
    pub(crate) server: Arc<PostgresServer>,
    pub(crate) pool: PgPool,
}

static SHARED: Mutex<Weak<PostgresServer>> = Mutex::new(Weak::new());

impl TestDatabase {
    pub(crate) async fn fresh() -> Self {
        let server = {
            let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            shared.upgrade().unwrap_or_else(|| {
                let server = Arc::new(PostgresServer::start());
                *shared = Arc::downgrade(&server);
                server
            })
        };
        Self::on(server).await
    }

    /// On a server that the test may break.
    pub(crate) async fn alone() -> Self {
        Self::on(Arc::new(PostgresServer::start())).await
    }

    async fn on(server: Arc<PostgresServer>) -> Self {
        let name = format!("test_{}", server.databases.fetch_add(1, Ordering::Relaxed));
        let postgres = PgPool::connect_with(server.options("postgres")).await.unwrap();
        let create = format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}");
        sqlx::query(sqlx::AssertSqlSafe(create)).execute(&postgres).await.unwrap();
        postgres.close().await;
        let pool = PgPoolOptions::new()
            .max_connections(8)
            .acquire_timeout(Duration::from_secs(10))
            .connect_lazy_with(server.options(&name));
        Self { server, pool }
    }
}

impl PostgresServer {
    fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("gpuaas-pg").tempdir().unwrap();
        if let Some(owner) = server_user() {
            std::os::unix::fs::chown(dir.path(), Some(owner), Some(owner)).unwrap();
        }
        let data = dir.path().join("data");
        let made = as_server_user(&program("initdb"))
            .arg("-D")
            .arg(&data)
            .args(["-U", "svc", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])
            .current_dir("/")
            .stdout(Stdio::null())
            .output()
            .unwrap();
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let server = Self { dir, child: Mutex::new(None), databases: AtomicU32::new(0) };
        server.run();
        server.prepare_template();
        server
    }

    /// Starts the postmaster, or restarts it after a kill.
    pub(crate) fn run(&self) {
        let mut command = as_server_user(&program("postgres"));
        command
            .arg("-D")
            .arg(self.dir.path().join("data"))
            .arg("-k")
            .arg(self.dir.path())
            // The machine does not crash in these tests, only processes do: data in the kernel's cache is not lost.
            .args([
                "-c",
                "listen_addresses=",
                "-c",
                "fsync=off",
                "-c",
                "shared_buffers=64MB",
                "-c",
                "max_connections=200",
            ])
            .args(["-c", "log_min_messages=fatal"])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        // The server dies with the thread that started it: that one lives as long as the process.
        let (started, child) = mpsc::channel();
        std::thread::spawn(move || {
            started.send(command.spawn().unwrap()).unwrap();
            loop {
                std::thread::park();
            }
        });
        *self.child.lock().unwrap() = Some(child.recv().unwrap());
        let began = Instant::now();
        while !self.socket().exists() || !self.answers() {
            assert!(began.elapsed() < Duration::from_secs(30), "the server does not come up");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn answers(&self) -> bool {
        Command::new(program("pg_isready")).arg("-q").arg("-h").arg(self.dir.path()).status().unwrap().success()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join(".s.PGSQL.5432")
    }

    pub(crate) fn options(&self, database: &str) -> PgConnectOptions {
        PgConnectOptions::new_without_pgpass().socket(self.dir.path()).port(5432).username("svc").database(database)
    }

    /// `kill -9` of the postmaster; its backends follow.
    pub(crate) fn kill(&self) {
        let mut child = self.child.lock().unwrap().take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // The next start refuses while a backend still holds the shared memory.
        let pid = self.dir.path().join("data/postmaster.pid");
        let began = Instant::now();
        while backends_of(&pid) && began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = std::fs::remove_file(self.socket());
    }

    fn prepare_template(&self) {
        let options = self.options("postgres");
        let template = self.options(TEMPLATE);
        // On a separate runtime: the first test may run inside one.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let postgres = PgPool::connect_with(options).await.unwrap();
                let create = format!("CREATE DATABASE {TEMPLATE}");
                sqlx::query(sqlx::AssertSqlSafe(create)).execute(&postgres).await.unwrap();
                let pool = PgPool::connect_with(template).await.unwrap();
                persistence::migrate::run(&pool).await.unwrap();
                persistence::sweep::make_partitions(&pool, 2).await.unwrap();
                pool.close().await;
                postgres.close().await;
            });
        })
        .join()
        .unwrap();
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take() {
            // SIGQUIT: at once and without a checkpoint, but with its backends.
            let _ = Command::new("kill").args(["-QUIT", &child.id().to_string()]).status();
            let _ = child.wait();
        }
    }
}

/// True while a process still uses the data folder whose lock file this is.
fn backends_of(pid_file: &Path) -> bool {
    let data = pid_file.parent().unwrap().to_path_buf();
    let Ok(processes) = std::fs::read_dir("/proc") else { return false };
    processes.flatten().any(|process| std::fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == data))
}

/// Postgres refuses to run as root: it then runs as its own user.
fn server_user() -> Option<u32> {
    let id = |args: &[&str]| {
        let out = Command::new("id").args(args).output().ok()?;
        String::from_utf8(out.stdout).ok()?.trim().parse::<u32>().ok()
    };
    (id(&["-u"]) == Some(0)).then(|| id(&["-u", "postgres"]).expect("a user named postgres"))
}

fn as_server_user(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    if server_user().is_some() {
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups"]);
    }
    command.arg("--pdeathsig=QUIT").arg("--").arg(program);
    command
}

fn program(name: &str) -> PathBuf {
    let on_path =
        std::env::var_os("PATH").into_iter().flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let installed =
        std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|dir| dir.path().join("bin"));
    on_path.chain(installed).map(|dir| dir.join(name)).find(|path| path.exists()).unwrap_or_else(|| panic!("no {name}"))
}

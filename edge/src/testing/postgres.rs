//! A private Postgres, and the shell's store over it.

use actors::ports::{Store, StoreReadError};
use domain::commit::{CompletedCommand, Snapshot};
use domain::{CommandId, Commit, CommitOutcome, EntityRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::pool::PoolConfig;
use persistence::{Committer, Reads};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(crate) struct Postgres {
    dir: tempfile::TempDir,
    child: Mutex<Child>,
}

impl Postgres {
    /// An empty server in a folder of its own, without a network address.
    pub(crate) fn start() -> Self {
        let dir = tempfile::Builder::new().prefix("gpuaas-pg").tempdir_in("/tmp").unwrap();
        if let Some(owner) = server_user() {
            std::os::unix::fs::chown(dir.path(), Some(owner), Some(owner)).unwrap();
        }
        let data = dir.path().join("data");
        let made = as_server_user(&program("initdb"))
            .arg("-D")
            .arg(&data)
            .args(["-U", "svc", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])
            .current_dir("/")
            .output()
            .unwrap();
        assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let child = as_server_user(&program("postgres"))
            .arg("-D")
            .arg(&data)
            .arg("-k")
            .arg(dir.path())
            .args(["-c", "listen_addresses=", "-c", "fsync=off", "-c", "shared_buffers=32MB"])
            .args(["-c", "log_min_messages=fatal"])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let began = Instant::now();
        let answers =
            || Command::new(program("pg_isready")).arg("-q").arg("-h").arg(dir.path()).status().unwrap().success();
        while !answers() {
            assert!(began.elapsed() < Duration::from_secs(30), "the server does not come up");
            std::thread::sleep(Duration::from_millis(20));
        }
        Self { dir, child: Mutex::new(child) }
    }

    pub(crate) fn config(&self) -> PoolConfig {
        let url = format!("postgres://svc@localhost/postgres?host={}", self.dir.path().display());
        PoolConfig::new(url.into(), None)
    }
}

impl Postgres {
    /// All that is stored, as text.
    pub(crate) fn dump(&self) -> String {
        let mut dump = Command::new(program("pg_dump"));
        let output =
            dump.args(["--data-only", "-U", "svc", "-h"]).arg(self.dir.path()).arg("postgres").output().unwrap();
        assert!(output.status.success(), "pg_dump: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Carries out one statement, past everything of ours.
    pub(crate) fn execute(&self, statement: &str) {
        let mut psql = Command::new(program("psql"));
        psql.args(["-v", "ON_ERROR_STOP=1", "-U", "svc", "-h"])
            .arg(self.dir.path())
            .args(["-c", statement, "postgres"]);
        let done = psql.output().unwrap();
        assert!(done.status.success(), "psql: {}", String::from_utf8_lossy(&done.stderr));
    }

    /// SIGQUIT: without a checkpoint, but with its backends. None of them commits after this returns.
    pub(crate) fn stop(&self) {
        let mut child = self.child.lock().unwrap();
        if matches!(child.try_wait(), Ok(None)) {
            let _ = Command::new("kill").args(["-QUIT", &child.id().to_string()]).status();
            let _ = child.wait();
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Postgres refuses to run as root: then it runs as its own user.
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
    command.arg("--").arg(program);
    command
}

fn program(name: &str) -> PathBuf {
    let on_path =
        std::env::var_os("PATH").into_iter().flat_map(|path| std::env::split_paths(&path).collect::<Vec<_>>());
    let installed =
        std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|dir| dir.path().join("bin"));
    on_path.chain(installed).map(|dir| dir.join(name)).find(|path| path.exists()).unwrap_or_else(|| panic!("no {name}"))
}

pub(crate) struct PgTestStore {
    pub(crate) committer: Committer,
    pub(crate) reads: Reads,
}

impl Store for PgTestStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move { self.reads.snapshot(entity).await.map_err(unreadable) }.boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        self.committer.commit(commit).boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>> {
        async move { self.reads.command(id).await.map_err(unreadable) }.boxed()
    }
}

fn unreadable(error: persistence::StoreError) -> StoreReadError {
    StoreReadError::unavailable(error.to_string())
}

//! A machine with a database and its backups: pgBackRest with the settings and scripts of `deploy/backup`.

use super::patroni::{checkout, tool};
use local_servers::postgres::{PostgresOptions, account, program};
use local_servers::process::tail;
use local_servers::test_database::TestDatabase;
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A Postgres server that is backed up, as pgBackRest on its machine reaches it.
#[derive(Clone, Debug)]
pub struct BackedUpServer {
    pub data: PathBuf,
    pub socket_folder: PathBuf,
    pub port: u16,
    /// A superuser that the socket admits.
    pub user: String,
    /// The service's database.
    pub database: String,
}

impl BackedUpServer {
    /// The server of this database.
    pub async fn of(db: &TestDatabase) -> Self {
        let (socket_folder, port) = db.socket_address();
        Self {
            data: db.data_folder().await,
            socket_folder: socket_folder.to_owned(),
            port,
            user: "gpuaas".to_owned(),
            database: db.name().to_owned(),
        }
    }
}

/// The machine: a repository, the shipped settings with this test's paths, and the shipped scripts.
pub struct BackupMachine {
    folder: tempfile::TempDir,
    repository: PathBuf,
    environment: BTreeMap<String, String>,
}

impl Default for BackupMachine {
    fn default() -> Self {
        Self::new()
    }
}

impl BackupMachine {
    /// A machine with a repository of its own.
    #[must_use]
    pub fn new() -> Self {
        let mut machine = Self::without_repository();
        machine.repository = machine.folder.path().join("repository");
        fs::create_dir(&machine.repository).unwrap();
        give(&machine.repository);
        machine
    }

    /// Another machine, with the same repository.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self { repository: self.repository.clone(), ..Self::without_repository() }
    }

    fn without_repository() -> Self {
        let folder = tempfile::Builder::new().prefix("gpuaas-backup-").tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let work = folder.path().join("work");
        fs::create_dir(&work).unwrap();
        give(&work);
        let installed =
            tool("pgbackrest/pgbackrest").expect("pgBackRest is missing: `deploy/test --tools` installs it");
        // Postgres' user may not enter the home folder of root, in which the tools are, and perhaps the checkout.
        fs::copy(installed, folder.path().join("pgbackrest")).unwrap();
        for script in ["gpuaas-backup", "gpuaas-restore", "gpuaas-key-ring-copy"] {
            fs::copy(checkout().join("deploy/backup").join(script), folder.path().join(script)).unwrap();
        }
        let programs = program("psql").unwrap();
        let path = [folder.path(), programs.parent().unwrap()].map(|it| it.display().to_string());
        let environment = BTreeMap::from([
            ("PATH".to_owned(), format!("{}:/usr/bin:/bin", path.join(":"))),
            ("PGBACKREST_CONFIG".to_owned(), folder.path().join("pgbackrest.conf").display().to_string()),
            ("LC_ALL".to_owned(), "C".to_owned()),
        ]);
        Self { folder, repository: PathBuf::new(), environment }
    }

    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What Postgres' environment needs for its `archive_command`.
    #[must_use]
    pub const fn environment(&self) -> &BTreeMap<String, String> {
        &self.environment
    }

    /// The shipped settings of Postgres.
    #[must_use]
    pub fn postgres(&self) -> PostgresOptions {
        let shipped = fs::read_to_string(checkout().join("deploy/backup/postgresql.conf")).unwrap();
        let settings = shipped.lines().filter(|line| !line.starts_with('#'));
        let settings = settings.filter_map(|line| line.split_once(" = "));
        let settings = settings.map(|(name, value)| format!("{name}={}", value.trim_matches('\'')));
        PostgresOptions {
            environment: self.environment.clone().into_iter().collect(),
            settings: settings.collect(),
            ..PostgresOptions::default()
        }
    }

    /// Writes the shipped settings of pgBackRest, for this server.
    pub fn configure(&mut self, server: &BackedUpServer) {
        let BackedUpServer { data, socket_folder, port, user, database } = server;
        let shipped = fs::read_to_string(checkout().join("deploy/backup/pgbackrest.conf")).unwrap();
        let work = self.folder.path().join("work");
        let config = shipped
            .replace("repo1-path=/var/lib/pgbackrest", &format!("repo1-path={}", self.repository.display()))
            .replace("pg1-path=/var/lib/postgresql/15/main", &format!("pg1-path={}", data.display()))
            .replace("[gpuaas]\n", &format!("lock-path={}\n[gpuaas]\n", work.display()));
        assert_ne!(config, shipped);
        // Debian's defaults are another port, socket and user.
        let own = format!("pg1-port={port}\npg1-socket-path={}\npg1-user={user}\n", socket_folder.display());
        let file = self.folder.path().join("pgbackrest.conf");
        fs::write(&file, config + &own).unwrap();
        give(&file);
        let own = [
            ("PGHOST", socket_folder.display().to_string()),
            ("PGPORT", port.to_string()),
            ("PGUSER", user.clone()),
            ("GPUAAS_DATABASE", database.clone()),
        ];
        self.environment.extend(own.map(|(name, value)| (name.to_owned(), value)));
    }

    /// Runs a script as Postgres' user. Returns its exit status and what it printed.
    pub async fn run(&self, script: &str, variables: &[(&str, &str)]) -> (Option<i32>, String) {
        let mut command = Command::new("bash");
        command.args(["-euc", script]).env_clear().envs(&self.environment).envs(variables.iter().copied());
        command.current_dir(self.folder.path());
        if let Some(account) = account().unwrap() {
            command.uid(account.uid).gid(account.gid);
        }
        output_of(command).await
    }

    /// As [`Self::run`], for a script that has to succeed.
    pub async fn expect(&self, script: &str) -> String {
        let (code, printed) = self.run(script, &[]).await;
        assert_eq!(code, Some(0), "{script}: {printed}");
        printed
    }

    /// The files of the repository whose path contains all of these, sorted.
    #[must_use]
    pub fn files(&self, parts: &[&str]) -> Vec<PathBuf> {
        fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_symlink() {
                    continue;
                }
                if path.is_dir() { walk(&path, found) } else { found.push(path) }
            }
        }
        let mut found = Vec::new();
        walk(&self.repository, &mut found);
        found.retain(|path| parts.iter().all(|part| path.to_string_lossy().contains(part)));
        found.sort();
        found
    }
}

/// Runs a command to its end. Returns its exit status and what it printed.
pub async fn output_of(mut command: Command) -> (Option<i32>, String) {
    let output = tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&text).into_owned())
}

/// Gives a file or an empty folder to Postgres' user.
pub fn give(path: &Path) {
    if let Some(account) = account().unwrap() {
        chown(path, Some(account.uid), Some(account.gid)).unwrap();
    }
}

/// Makes an empty data directory.
pub fn make_empty_data(data: &Path) {
    fs::create_dir(data).unwrap();
    fs::set_permissions(data, fs::Permissions::from_mode(0o700)).unwrap();
    give(data);
}

/// Waits until what is committed so far is archived.
pub async fn wait_until_archived(pool: &PgPool) {
    let segment: String = sqlx::query_scalar("SELECT pg_walfile_name(pg_switch_wal())").fetch_one(pool).await.unwrap();
    let until = Instant::now() + LIMIT;
    let archived = "SELECT coalesce(last_archived_wal, '') >= $1 FROM pg_stat_archiver";
    while !sqlx::query_scalar::<_, bool>(archived).bind(&segment).fetch_one(pool).await.unwrap() {
        if Instant::now() > until {
            let state = "SELECT pg_stat_archiver::text FROM pg_stat_archiver";
            let state: String = sqlx::query_scalar(state).fetch_one(pool).await.unwrap();
            panic!("{segment} is not archived: {state}");
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Waits until Postgres, which writes this log, has recovered and takes writes.
pub async fn wait_until_recovered(pool: &PgPool, log: &Path) {
    let until = Instant::now() + LIMIT;
    loop {
        let recovering = sqlx::query_scalar::<_, bool>("SELECT pg_is_in_recovery()").fetch_one(pool).await;
        if matches!(recovering, Ok(false)) {
            return;
        }
        let has_time = Instant::now() < until;
        assert!(has_time, "Postgres does not recover: {recovering:?}; its log: {}", tail(log, 30));
        sleep(POLL_INTERVAL).await;
    }
}

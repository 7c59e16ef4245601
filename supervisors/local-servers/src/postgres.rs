//! A private Postgres: a real one, from the installed programs, with TLS, a password of its own and fsync on, on a random
//! port of 127.0.0.1 and, unless [`PostgresOptions`] ask for a socket, nowhere else.
//!
//! Postgres refuses to run as root. Started by root, it runs as `postgres` (else `nobody`); where that user cannot reach the
//! folder it was given (a checkout below `/root`, say), its data lies in a new folder below `/var/tmp`.

use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use nix::unistd::{User, geteuid};
use secrecy::{ExposeSecret as _, SecretString};
use sqlx::{ConnectOptions as _, Connection as _};

use crate::pki::Authority;
use crate::private_files;
use crate::process::{ChildProcess, Launch, RunAsAccount, as_account, tail};
use crate::settings::SavedSettings;

/// The role that owns everything, and the database that the control plane uses.
pub const ROLE: &str = "gpuaas";
pub const DATABASE: &str = "gpuaas";

const MIN_VERSION: u32 = 15;
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// A file in the data folder, written once the database is created: data without it is of an incomplete start.
const COMPLETE: &str = "complete";

/// How a server differs from the default.
#[derive(Debug, Clone, Default)]
pub struct PostgresOptions {
    /// Further variables of its environment.
    pub environment: Vec<(String, String)>,
    /// Further settings (`name=value`), which override the default ones.
    pub settings: Vec<String>,
    /// Whether it also listens on a Unix socket beside its data, where it asks for no password. Only the server's user and root reach it.
    pub has_socket: bool,
    /// Whether it may outlive this process ([`PostgresServer::detach`]).
    pub is_detached: bool,
}

/// A running server. Dropping it stops it; data outside of the folder that it was given is removed then, unless it is kept.
#[derive(Debug)]
pub struct PostgresServer {
    programs: PathBuf,
    home: Home,
    account: Option<RunAsAccount>,
    port: u16,
    password: SecretString,
    ca_path: PathBuf,
    log: PathBuf,
    options: PostgresOptions,
    process: Option<ChildProcess>,
    keeps: bool,
}

impl PostgresServer {
    /// Starts a server with empty data in `folder`, removing the data of an earlier one there, with a certificate from
    /// `authority` and the database [`DATABASE`] made.
    pub async fn start(folder: &Path, authority: &Authority) -> anyhow::Result<Self> {
        Self::start_with(folder, authority, PostgresOptions::default()).await
    }

    /// The same, on the data, the port and the password of an earlier start, where there was one.
    pub async fn restore(folder: &Path, authority: &Authority, saved: &SavedSettings) -> anyhow::Result<Self> {
        Self::open(folder, authority, PostgresOptions::default(), saved).await
    }

    /// Removes the data that a server of an earlier start has left, wherever it lies.
    pub fn remove_data(folder: &Path) -> anyhow::Result<()> {
        let pointer = folder.join("elsewhere");
        if let Some(left) = Home::elsewhere(&pointer) {
            private_files::remove_folder(&left)?;
        }
        private_files::remove_file(&pointer)?;
        private_files::remove_folder(&folder.join("cluster"))
    }

    /// As [`PostgresServer::start`], with other options than the default.
    pub async fn start_with(folder: &Path, authority: &Authority, options: PostgresOptions) -> anyhow::Result<Self> {
        Self::open(folder, authority, options, &SavedSettings::ephemeral()).await
    }

    async fn open(
        folder: &Path,
        authority: &Authority,
        options: PostgresOptions,
        saved: &SavedSettings,
    ) -> anyhow::Result<Self> {
        const PORT: &str = "Postgres' port";
        let programs = find_programs()?;
        let account = account()?;
        let found = if saved.is_persistent() { Home::find(folder, account)? } else { None };
        let is_new = found.is_none();
        let home = match found {
            Some(home) => home,
            None => Home::create(folder, account)?,
        };
        let password = saved.secret("Postgres' password", "", 24)?;
        let certificate = authority.server_certificate("postgres")?;
        if is_new {
            initialise(&programs, &home, account, &password).await?;
        } else {
            home.expect_version_of(&programs)?;
        }
        for (from, to) in [(&certificate.certificate_path, "server.pem"), (&certificate.key_path, "server.key")] {
            home.write_file(&std::fs::read(from)?, &format!("data/{to}"))?;
        }
        // Over TCP: TLS or nothing, and never without the password.
        let local: &[u8] = if options.has_socket { b"local all all trust\n" } else { b"" };
        let access = [local, b"hostssl all all 127.0.0.1/32 scram-sha-256\n"].concat();
        home.write_file(&access, "data/pg_hba.conf")?;

        let mut postgres = Self {
            programs,
            home,
            account,
            port: 0,
            password,
            ca_path: authority.certificate_path().to_owned(),
            log: folder.join("postgres.log"),
            options,
            process: None,
            keeps: saved.is_persistent(),
        };
        let mut attempts = 0;
        let mut port = saved.port(PORT)?;
        loop {
            postgres.port = port.number;
            attempts += 1;
            match postgres.start_again().await {
                Ok(()) => break,
                // Another process took the port between the check and the bind.
                Err(_)
                    if attempts < 5 && !port.is_known && tail(&postgres.log, 5).contains("Address already in use") =>
                {
                    port = saved.another_port(PORT)?;
                }
                Err(error) => return Err(error),
            }
        }
        if is_new {
            postgres.create_database(DATABASE).await?;
            postgres.home.write_file(b"", COMPLETE)?;
        }
        Ok(postgres)
    }

    /// Starts a stopped or killed server on the data and the port that it had.
    pub async fn start_again(&mut self) -> anyhow::Result<()> {
        if self.process.as_mut().is_some_and(ChildProcess::is_running) {
            return Ok(());
        }
        let process = self.launch()?;
        let mut process = self.process.insert(process);
        let options: sqlx::postgres::PgConnectOptions =
            connection_url(self.port, &self.password, &self.ca_path, "postgres").parse()?;
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let last = match options.connect().await {
                Ok(connection) => return Ok(connection.close().await?),
                Err(error) => error,
            };
            if let Some(status) = process.exit_status() {
                // The sessions of a killed server outlive it for a moment, and hold its shared memory.
                if process.log_tail().contains("pre-existing shared memory block") && Instant::now() < until {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    let repeated = self.launch()?;
                    process = self.process.insert(repeated);
                    continue;
                }
                bail!("postgres ended while starting ({status}); its log ends with:\n{}", process.log_tail());
            }
            if Instant::now() > until {
                return Err(last).context(format!("postgres takes no connection; its log is {}", self.log.display()));
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    /// `postgres://…` of the database [`DATABASE`], with the password, `sslmode=verify-full` and the authority's certificate.
    pub fn url(&self) -> SecretString {
        self.url_of(DATABASE)
    }

    /// The same for another database of this server.
    pub fn url_of(&self, database: &str) -> SecretString {
        connection_url(self.port, &self.password, &self.ca_path, database).into()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of the data: the given one, or one of its own that the database's user can reach.
    pub fn data_folder(&self) -> &Path {
        &self.home.path
    }

    pub fn data_is_elsewhere(&self) -> bool {
        self.home.elsewhere
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

    /// Makes an empty database. `name` may hold letters, digits and `_`.
    pub async fn create_database(&self, name: &str) -> anyhow::Result<()> {
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            bail!("{name:?} is no name for a database here: letters, digits and _ only");
        }
        let options: sqlx::postgres::PgConnectOptions = self.url_of("postgres").expose_secret().parse()?;
        let mut connection = options.connect().await?;
        let statement = format!("CREATE DATABASE \"{name}\"");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut connection).await?;
        Ok(connection.close().await?)
    }

    /// The folder of the Unix socket, if there is one.
    pub fn socket_folder(&self) -> Option<&Path> {
        self.options.has_socket.then_some(self.home.path.as_path())
    }

    /// The password of the role [`ROLE`].
    pub fn password(&self) -> &SecretString {
        &self.password
    }

    /// The certificate of the authority that signed the server's certificate.
    pub fn ca_path(&self) -> &Path {
        &self.ca_path
    }

    /// Lets the server run until the process `owner` ends; `folder` is removed then. It was started with [`PostgresOptions::is_detached`].
    pub fn detach(mut self, owner: u32, folder: &Path) -> anyhow::Result<()> {
        self.keeps = true;
        match self.process.take() {
            Some(process) => process.detach(owner, folder),
            None => bail!("a stopped Postgres cannot be left running"),
        }
    }

    fn launch(&self) -> anyhow::Result<ChildProcess> {
        let socket = format!("unix_socket_directories={}", self.socket_folder().unwrap_or(Path::new("")).display());
        let settings = [
            "listen_addresses=127.0.0.1",
            &socket,
            "ssl=on",
            "ssl_cert_file=server.pem",
            "ssl_key_file=server.key",
            "ssl_min_protocol_version=TLSv1.2",
            "password_encryption=scram-sha-256",
            "fsync=on",
            "synchronous_commit=on",
            "full_page_writes=on",
            "max_connections=300",
            "log_line_prefix=%m [%p] %q%u@%d ",
        ];
        let launch = Launch::new("postgres", self.programs.join("postgres"), &self.log)
            .argument("-D")
            .argument(self.home.path.join("data"))
            .argument("-p")
            .argument(self.port.to_string())
            .arguments(
                settings.into_iter().chain(self.options.settings.iter().map(String::as_str)).flat_map(|it| ["-c", it]),
            )
            .variable("LC_ALL", "C")
            .account(self.account)
            // Fast shutdown: ends the sessions, writes a checkpoint.
            .stop_signal(Signal::SIGINT);
        let launch = if self.options.is_detached { launch.detached() } else { launch };
        self.options.environment.iter().fold(launch, |launch, (name, value)| launch.variable(name, value)).spawn()
    }

    /// SIGKILL to the server, as a crash of it. `start_again` recovers from the write-ahead log.
    pub fn kill9(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill9();
        }
    }

    /// An orderly end; the data stays until the value is dropped.
    pub async fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.stop(STOP_TIMEOUT).await;
        }
    }
}

/// The folder of the newest installed Postgres of version 15 or later.
fn find_programs() -> anyhow::Result<PathBuf> {
    let mut candidates = private_files::find_programs("postgres");
    if let Ok(versions) = std::fs::read_dir("/usr/lib/postgresql") {
        candidates.extend(versions.flatten().map(|version| version.path().join("bin/postgres")));
    }
    candidates
        .into_iter()
        .filter(|program| program.with_file_name("initdb").exists())
        .filter_map(|program| Some((private_files::version_of(&program)?, program)))
        .filter(|(version, _)| version.first().is_some_and(|major| *major >= MIN_VERSION))
        .max_by(|(one, _), (other, _)| one.cmp(other))
        .and_then(|(_, program)| program.parent().map(Path::to_owned))
        .with_context(|| {
            format!(
                "no Postgres of version {MIN_VERSION} or later on PATH or in /usr/lib/postgresql; `deploy/up` installs one"
            )
        })
}

/// The path of a program of the newest installed Postgres, such as `pg_dump`.
///
/// # Errors
/// If no Postgres is installed.
pub fn program(name: &str) -> anyhow::Result<PathBuf> {
    Ok(find_programs()?.join(name))
}

/// The user that the server runs as: this one, or an ordinary one where this is root.
///
/// # Errors
/// Where this is root and there is no ordinary user for it.
pub fn account() -> anyhow::Result<Option<RunAsAccount>> {
    if !geteuid().is_root() {
        return Ok(None);
    }
    for name in ["postgres", "nobody"] {
        if let Some(user) = User::from_name(name)? {
            return Ok(Some(RunAsAccount { uid: user.uid.as_raw(), gid: user.gid.as_raw() }));
        }
    }
    bail!("Postgres does not run as root, and there is neither a user `postgres` nor `nobody`")
}

async fn initialise(
    programs: &Path,
    home: &Home,
    account: Option<RunAsAccount>,
    password: &SecretString,
) -> anyhow::Result<()> {
    let password_file = home.write_file(password.expose_secret().as_bytes(), "password")?;
    let mut command = Command::new(programs.join("initdb"));
    command
        .arg("--pgdata")
        .arg(home.path.join("data"))
        .arg("--pwfile")
        .arg(&password_file)
        .args(["--username", ROLE, "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C"])
        // Skips the flush of the empty cluster alone; the server itself runs with fsync.
        .args(["--no-sync", "--no-instructions"])
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap_or_default())
        .env("LC_ALL", "C")
        .current_dir("/");
    as_account(&mut command, account);
    let output = tokio::process::Command::from(command)
        .kill_on_drop(true)
        .output()
        .await
        .with_context(|| format!("cannot run initdb of {}", programs.display()))?;
    std::fs::remove_file(&password_file)?;
    if !output.status.success() {
        bail!("initdb failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// `postgres://…` with `sslmode=verify-full`.
pub(crate) fn connection_url(port: u16, password: &SecretString, ca_path: &Path, database: &str) -> String {
    let ca: String = ca_path
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' => char::from(*byte).to_string(),
            other => format!("%{other:02X}"),
        })
        .collect();
    let password = password.expose_secret();
    format!("postgres://{ROLE}:{password}@127.0.0.1:{port}/{database}?sslmode=verify-full&sslrootcert={ca}")
}

/// A folder that the database's user owns and can reach.
#[derive(Debug)]
struct Home {
    path: PathBuf,
    account: Option<RunAsAccount>,
    elsewhere: bool,
    /// Writes the location of the data to the given folder, for the next start to remove it.
    pointer: PathBuf,
}

impl Home {
    const ELSEWHERE: &str = "/var/tmp/gpuaas-postgres-";

    /// The location of the data by the file in `folder`, if it is elsewhere.
    fn elsewhere(pointer: &Path) -> Option<PathBuf> {
        let left = std::fs::read_to_string(pointer).ok()?;
        (left.starts_with(Self::ELSEWHERE) && !left.contains("..")).then(|| PathBuf::from(left))
    }

    /// The complete data of an earlier start, if there is any.
    fn find(folder: &Path, account: Option<RunAsAccount>) -> anyhow::Result<Option<Self>> {
        let Ok(folder) = folder.canonicalize() else { return Ok(None) };
        let pointer = folder.join("elsewhere");
        let found = Self::elsewhere(&pointer);
        let (path, elsewhere) = (found.clone().unwrap_or_else(|| folder.join("cluster")), found.is_some());
        if !path.join(COMPLETE).exists() {
            return Ok(None);
        }
        Ok(Some(Self { path, account, elsewhere, pointer }))
    }

    /// Data of one major version is of no use to the programs of another.
    fn expect_version_of(&self, programs: &Path) -> anyhow::Result<()> {
        let is = std::fs::read_to_string(self.path.join("data/PG_VERSION"))?;
        let has = private_files::version_of(&programs.join("postgres")).and_then(|version| version.first().copied());
        if has.is_some_and(|major| is.trim() != major.to_string()) {
            bail!(
                "the data in {} is of Postgres {}, and the programs in {} are of another version; start over with --fresh",
                self.path.display(),
                is.trim(),
                programs.display()
            );
        }
        Ok(())
    }

    fn create(folder: &Path, account: Option<RunAsAccount>) -> anyhow::Result<Self> {
        private_files::traversable_folder(folder)?;
        let folder = folder.canonicalize()?;
        let pointer = folder.join("elsewhere");
        if let Some(left) = Self::elsewhere(&pointer) {
            private_files::remove_folder(&left)?;
        }
        let here = folder.join("cluster");
        private_files::remove_folder(&here)?;
        if Self::own(&here, account)? {
            return Ok(Self { path: here, account, elsewhere: false, pointer });
        }
        std::fs::remove_dir_all(&here)?;
        let path = PathBuf::from(format!("{}{}", Self::ELSEWHERE, private_files::random_hex(8)));
        private_files::write_private(&pointer, path.as_os_str().as_encoded_bytes())?;
        if !Self::own(&path, account)? {
            bail!("the user that Postgres runs as can reach neither {} nor {}", here.display(), path.display());
        }
        Ok(Self { path, account, elsewhere: true, pointer })
    }

    /// Creates the folder (it must not exist, so that no other user's is taken over) and returns whether its owner can write in it.
    fn own(path: &Path, account: Option<RunAsAccount>) -> anyhow::Result<bool> {
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        if let Some(RunAsAccount { uid, gid }) = account {
            std::os::unix::fs::chown(path, Some(uid), Some(gid))?;
        }
        let mut probe = Command::new("/bin/sh");
        probe.args(["-c", r#"cd "$0" && : >probe && rm probe"#]).arg(path).current_dir("/");
        as_account(&mut probe, account);
        Ok(probe.output()?.status.success())
    }

    /// Writes a file here that only the database's user can read.
    fn write_file(&self, content: &[u8], name: &str) -> anyhow::Result<PathBuf> {
        let path = self.path.join(name);
        private_files::write_private(&path, content)?;
        if let Some(RunAsAccount { uid, gid }) = self.account {
            std::os::unix::fs::chown(&path, Some(uid), Some(gid))?;
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        Ok(path)
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // The server first, then what it writes to.
        self.process = None;
        if self.home.elsewhere && !self.keeps {
            let _ = std::fs::remove_dir_all(&self.home.path);
            let _ = std::fs::remove_file(&self.home.pointer);
        }
    }
}

#[cfg(test)]
#[path = "../../../agent/tests/skipped_tests/mod.rs"]
mod skipped_tests;

#[cfg(test)]
mod tests {
    use super::*;

    async fn asks(postgres: &PostgresServer, question: &'static str) -> String {
        let options: sqlx::postgres::PgConnectOptions = postgres.url().expose_secret().parse().unwrap();
        let mut connection = options.connect().await.unwrap();
        sqlx::query_scalar(question).fetch_one(&mut connection).await.unwrap()
    }

    /// A folder that any user can enter, like a checkout outside of a home folder.
    fn reachable() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        dir
    }

    #[tokio::test]
    async fn server_uses_tls_and_fsync_and_refuses_a_wrong_password() {
        let dir = reachable();
        let authority = Authority::create(&dir.path().join("pki")).unwrap();
        let postgres = PostgresServer::start(&dir.path().join("dev"), &authority).await.unwrap();
        assert_eq!(asks(&postgres, "show fsync").await, "on");
        assert_eq!(asks(&postgres, "show listen_addresses").await, "127.0.0.1");
        let ssl = "select ssl::text from pg_stat_ssl where pid = pg_backend_pid()";
        assert_eq!(asks(&postgres, ssl).await, "true");

        let right = postgres.url().expose_secret().to_owned();
        let password = postgres.password.expose_secret();
        let wrong: sqlx::postgres::PgConnectOptions = right.replace(password, "wrong").parse().unwrap();
        assert!(wrong.connect().await.unwrap_err().to_string().contains("password authentication failed"));
        let plain: sqlx::postgres::PgConnectOptions = right.replace("verify-full", "disable").parse().unwrap();
        assert!(plain.connect().await.is_err());
    }

    #[tokio::test]
    async fn data_and_port_survive_a_crash() {
        let dir = reachable();
        let authority = Authority::create(&dir.path().join("pki")).unwrap();
        let mut postgres = PostgresServer::start(&dir.path().join("dev"), &authority).await.unwrap();
        let port = postgres.port();
        let options: sqlx::postgres::PgConnectOptions = postgres.url().expose_secret().parse().unwrap();
        let mut connection = options.connect().await.unwrap();
        sqlx::raw_sql("create table kept (v text); insert into kept values ('kept')")
            .execute(&mut connection)
            .await
            .unwrap();
        postgres.kill9();
        assert!(!postgres.is_running());
        postgres.start_again().await.unwrap();
        assert_eq!(asks(&postgres, "select v from kept").await, "kept");
        assert_eq!(postgres.port(), port);
        postgres.stop().await;
        assert!(options.connect().await.is_err());
    }

    #[tokio::test]
    async fn unreachable_data_folder_is_replaced_by_a_reachable_one() {
        if !geteuid().is_root() {
            return skipped_tests::report_skipped(
                "it needs root: an ordinary user runs the server itself, and reaches what it made",
            );
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
        let authority = Authority::create(&dir.path().join("pki")).unwrap();
        let folder = dir.path().join("dev");
        let postgres = PostgresServer::start(&folder, &authority).await.unwrap();
        assert!(postgres.data_is_elsewhere());
        let elsewhere = postgres.data_folder().to_owned();
        assert!(elsewhere.starts_with("/var/tmp"));
        assert_eq!(asks(&postgres, "select 'here'").await, "here");
        drop(postgres);
        assert!(!elsewhere.exists());

        let dir = reachable();
        let reached = PostgresServer::start(&dir.path().join("dev"), &authority).await.unwrap();
        assert!(!reached.data_is_elsewhere());
    }
}

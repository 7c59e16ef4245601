//! The database of `deploy/ha`: three Postgres servers under Patroni, with the file that is shipped, over three members of etcd. Each server
//! reaches etcd over a link of its own, which a test can cut.

use super::backup_machine::{BackedUpServer, output_of};
use super::flaky_link::FlakyLink;
use anyhow::{Context as _, bail};
use local_servers::pki::Authority;
use local_servers::ports::free_port;
use local_servers::postgres::{account, program};
use local_servers::private_files;
use local_servers::process::{ChildProcess, Launch, RunAsAccount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid, User};
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgSslMode};
use sqlx::{AssertSqlSafe, ConnectOptions as _};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Servers of Postgres, and members of etcd.
const SERVERS: usize = 3;
const START_TIMEOUT: Duration = Duration::from_secs(90);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
const SUPERUSER: &str = "postgres";
/// The service's role, and its database.
const ROLE: &str = "gpuaas";

/// Kills the Postgres of the data in `$0` when it is asked to end: Patroni's Postgres is no child of the test, and would outlive one that is killed.
const GUARD: &str = r#"
trap 'kill -s KILL "$(head -n 1 "$0/postmaster.pid")"; exit' TERM
while :; do sleep 1 & wait "$!"; done
"#;

/// The running topology. The order of the fields is the order in which a drop stops them.
pub struct PatroniCluster {
    pub servers: Vec<PatroniServer>,
    pub etcd: Vec<EtcdMember>,
    password: SecretString,
    superuser_password: SecretString,
    ca_path: PathBuf,
    http: reqwest::Client,
    folder: tempfile::TempDir,
}

/// One Postgres server and its Patroni.
pub struct PatroniServer {
    name: String,
    folder: PathBuf,
    port: u16,
    rest: SocketAddr,
    /// Its way to the members of etcd.
    pub etcd_links: Vec<FlakyLink>,
    environment: Vec<(String, String)>,
    account: Option<RunAsAccount>,
    patroni: Option<ChildProcess>,
    /// Ends with this process.
    _guard: ChildProcess,
}

/// One member of etcd.
pub struct EtcdMember {
    launch: Vec<String>,
    program: PathBuf,
    log: PathBuf,
    client: SocketAddr,
    process: Option<ChildProcess>,
}

impl PatroniCluster {
    /// What the machine lacks for it, if anything.
    #[must_use]
    pub fn missing() -> Option<String> {
        let lacks = |name: &str, found: Option<PathBuf>| found.is_none().then(|| format!("there is no {name}"));
        lacks("patroni", tool("patroni/bin/patroni")).or_else(|| lacks("etcd", tool("etcd/usr/bin/etcd")))
    }

    /// Starts everything, and waits until a primary has a synchronous standby.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(&[]).await
    }

    /// As [`Self::start`], with these further variables in the environment of each server.
    pub async fn start_with(environments: &[BTreeMap<String, String>]) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpuaas-ha-").permissions(traversable()).tempdir()?;
        let authority = Authority::create(&folder.path().join("pki"))?;
        let etcd = start_etcd(folder.path())?;
        let secret = || SecretString::from(private_files::random_hex(16));
        let (password, superuser_password) = (secret(), secret());
        let others = [private_files::random_hex(16), private_files::random_hex(16)];
        let mut servers = Vec::new();
        for number in 1..=SERVERS {
            let mut links = Vec::new();
            for member in &etcd {
                links.push(FlakyLink::to(member.client).await?);
            }
            let mut server = PatroniServer::prepare(folder.path(), number, &authority, links)?;
            let passwords = [superuser_password.expose_secret(), others[0].as_str(), others[1].as_str()];
            for (user, password) in ["SUPERUSER", "REPLICATION", "REWIND"].into_iter().zip(passwords) {
                server.environment.push((format!("PATRONI_{user}_PASSWORD"), password.to_owned()));
            }
            let own = environments.get(number - 1).into_iter().flatten();
            server.environment.extend(own.map(|(name, value)| (name.clone(), value.clone())));
            server.start()?;
            servers.push(server);
        }
        let http = reqwest::Client::builder().timeout(Duration::from_secs(2)).build()?;
        let ca_path = authority.certificate_path().to_owned();
        let cluster = Self { servers, etcd, password, superuser_password, ca_path, http, folder };
        cluster.wait_healthy().await?;
        cluster.create_database().await?;
        Ok(cluster)
    }

    async fn create_database(&self) -> anyhow::Result<()> {
        let leader = self.wait_for_any_leader().await?;
        let password = self.password.expose_secret();
        let mut statements = vec![
            format!("CREATE ROLE {ROLE} LOGIN PASSWORD '{password}' IN ROLE pg_monitor"),
            format!("CREATE DATABASE {ROLE} OWNER {ROLE}"),
        ];
        // The user that the socket admits, where it is not Debian's user.
        let user = system_user()?;
        if user != SUPERUSER {
            statements.push(format!("CREATE ROLE \"{user}\" LOGIN SUPERUSER"));
        }
        for statement in &statements {
            self.execute(leader, statement).await?;
        }
        let mut connection = self.options(leader, ROLE).connect().await?;
        sqlx::raw_sql("CREATE TABLE bare (written_at timestamptz NOT NULL)").execute(&mut connection).await?;
        Ok(())
    }

    /// All servers in one URL, as libpq writes it.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        let password = self.password.expose_secret();
        format!("postgres://{ROLE}:{password}@{}/{ROLE}?target_session_attrs=read-write", hosts.join(","))
    }

    #[must_use]
    pub fn ca_path(&self) -> &Path {
        &self.ca_path
    }

    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn options(&self, server: usize, role: &str) -> PgConnectOptions {
        let (password, database) =
            if role == ROLE { (&self.password, ROLE) } else { (&self.superuser_password, "postgres") };
        PgConnectOptions::new_without_pgpass()
            .host("127.0.0.1")
            .port(self.servers[server].port)
            .username(role)
            .password(password.expose_secret())
            .database(database)
            .ssl_mode(PgSslMode::VerifyFull)
            .ssl_root_cert(&self.ca_path)
    }

    /// Executes a statement as the superuser.
    pub async fn execute(&self, server: usize, statement: &str) -> anyhow::Result<()> {
        let mut connection: PgConnection = self.options(server, SUPERUSER).connect().await?;
        sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await?;
        Ok(())
    }

    /// Counts on one server, as the superuser of the service's database.
    pub async fn count(&self, server: usize, query: &str) -> anyhow::Result<i64> {
        let mut connection = self.options(server, SUPERUSER).database(ROLE).connect().await?;
        Ok(sqlx::query_scalar(AssertSqlSafe(query.to_owned())).fetch_one(&mut connection).await?)
    }

    /// A pool on one server, as the superuser of the service's database.
    #[must_use]
    pub fn superuser(&self, server: usize) -> PgPool {
        PgPoolOptions::new().max_connections(1).connect_lazy_with(self.options(server, SUPERUSER).database(ROLE))
    }

    /// A server as pgBackRest on its machine reaches it.
    pub async fn backed_up(&self, server: usize) -> anyhow::Result<BackedUpServer> {
        let setting = "SELECT split_part(current_setting('unix_socket_directories'), ',', 1)";
        // A standby may not have the service's database yet.
        let mut connection = self.options(server, SUPERUSER).connect().await?;
        let socket_folder: String = sqlx::query_scalar(setting).fetch_one(&mut connection).await?;
        Ok(BackedUpServer {
            data: self.data_folder(server),
            socket_folder: socket_folder.into(),
            port: self.servers[server].port,
            user: system_user()?,
            database: ROLE.to_owned(),
        })
    }

    /// The folder of a server's data (`PGDATA`).
    #[must_use]
    pub fn data_folder(&self, server: usize) -> PathBuf {
        self.servers[server].data_folder()
    }

    /// A server's name at Patroni.
    #[must_use]
    pub fn name(&self, server: usize) -> &str {
        &self.servers[server].name
    }

    /// Runs a script with `patronictl` in it, which has to succeed.
    pub async fn expect_control(&self, script: &str) {
        self.expect_control_with(script, &[]).await;
    }

    /// As [`Self::expect_control`], with further variables.
    pub async fn expect_control_with(&self, script: &str, variables: &[(&str, &str)]) {
        let server = &self.servers[0];
        let patroni = tool("patroni/bin/patronictl").expect("patronictl is there");
        let programs = patroni.parent().expect("it lies in a folder").display();
        let mut command = Command::new("bash");
        command.args(["-euc", script]).env_clear().envs(server.environment.iter().map(|(name, value)| (name, value)));
        command.env("PATH", format!("{programs}:/usr/bin:/bin"));
        command.env("PATRONICTL_CONFIG_FILE", server.folder.join("patroni.yml"));
        command.envs(variables.iter().copied()).stdin(std::process::Stdio::null());
        let (code, printed) = output_of(command).await;
        assert_eq!(code, Some(0), "{script}: {printed}");
    }

    /// The end of all machines, with their data.
    pub fn lose_data(&mut self) -> anyhow::Result<()> {
        self.servers.iter_mut().for_each(PatroniServer::kill9);
        self.servers.iter().try_for_each(|server| {
            server.remove_socket_lock()?;
            private_files::remove_folder(&server.data_folder())
        })
    }

    /// Writes one row past everything of ours, again and again at whichever server takes it, and returns when that first succeeds.
    pub async fn first_bare_write(&self) -> Instant {
        loop {
            for server in 0..SERVERS {
                let write = async {
                    let mut connection = self.options(server, ROLE).connect().await?;
                    let insert = sqlx::raw_sql("INSERT INTO bare VALUES (clock_timestamp())");
                    insert.execute(&mut connection).await.map(drop)
                };
                if matches!(tokio::time::timeout(Duration::from_secs(1), write).await, Ok(Ok(()))) {
                    return Instant::now();
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The roles and states of the servers, as Patroni has them; `None` where no Patroni answers.
    async fn members(&self) -> Option<Vec<Value>> {
        for server in &self.servers {
            let url = format!("http://{}/cluster", server.rest);
            let Ok(response) = self.http.get(url).send().await else { continue };
            if let Ok(body) = response.json::<Value>().await
                && let Some(members) = body["members"].as_array()
            {
                return Some(members.clone());
            }
        }
        None
    }

    async fn with_role(&self, role: &str) -> Option<usize> {
        let members = self.members().await?;
        let member = members.iter().find(|member| {
            member["role"] == role && matches!(member["state"].as_str(), Some("running" | "streaming"))
        })?;
        self.servers.iter().position(|server| member["name"] == server.name.as_str())
    }

    /// The primary.
    pub async fn leader(&self) -> Option<usize> {
        self.with_role("leader").await
    }

    /// The standby for which commits wait.
    pub async fn synchronous_standby(&self) -> Option<usize> {
        self.with_role("sync_standby").await
    }

    /// Waits until there are a primary, a synchronous standby and another standby.
    pub async fn wait_healthy(&self) -> anyhow::Result<()> {
        self.wait_for_members(SERVERS).await
    }

    /// Waits until there is a primary other than that server, with a synchronous standby.
    pub async fn wait_for_other_leader(&self, than: usize) -> anyhow::Result<usize> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(leader) = self.leader().await
                && leader != than
            {
                return Ok(leader);
            }
            if Instant::now() > until {
                bail!("no other server became the primary: {:?}; the logs: {}", self.members().await, self.logs());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    async fn wait_for_any_leader(&self) -> anyhow::Result<usize> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(leader) = self.leader().await {
                return Ok(leader);
            }
            if Instant::now() > until {
                bail!("there is no leader: {:?}; the logs: {}", self.members().await, self.logs());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits until that server is the primary.
    pub async fn wait_for_leader(&self, server: usize) -> anyhow::Result<()> {
        let until = Instant::now() + START_TIMEOUT;
        while self.leader().await != Some(server) {
            if Instant::now() > until {
                bail!("it does not become the primary: {:?}; the logs: {}", self.members().await, self.logs());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Waits until there are so many servers, a primary and a synchronous standby among them.
    pub async fn wait_for_members(&self, servers: usize) -> anyhow::Result<()> {
        let until = Instant::now() + START_TIMEOUT;
        loop {
            let members = self.members().await.unwrap_or_default();
            let roles: Vec<_> = members
                .iter()
                .filter(|member| matches!(member["state"].as_str(), Some("running" | "streaming")))
                .filter_map(|member| member["role"].as_str())
                .collect();
            if roles.len() >= servers && roles.contains(&"leader") && roles.contains(&"sync_standby") {
                return Ok(());
            }
            if Instant::now() > until {
                bail!("the database is not healthy: {members:?}; the logs: {}", self.logs());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn logs(&self) -> String {
        let log = |server: &PatroniServer| local_servers::process::tail(&server.log(), 15);
        self.servers.iter().map(log).collect::<Vec<_>>().join("\n---\n")
    }
}

impl PatroniServer {
    fn prepare(root: &Path, number: usize, authority: &Authority, etcd_links: Vec<FlakyLink>) -> anyhow::Result<Self> {
        let name = format!("postgres-{number}");
        let folder = root.join(&name);
        private_files::private_folder(&folder)?;
        let account = account()?;
        let certificate = authority.server_certificate(&name)?;
        let template = checkout().join("deploy/ha/patroni.yml");
        for (from, to) in [
            (certificate.certificate_path.as_path(), "server.pem"),
            (certificate.key_path.as_path(), "server.key"),
            (authority.certificate_path(), "ca.pem"),
            (template.as_path(), "patroni.yml"),
        ] {
            let to = folder.join(to);
            private_files::write_private(&to, &std::fs::read(from)?)?;
            own(&to, account)?;
        }
        own(&folder, account)?;
        let (port, rest) = (free_port()?, SocketAddr::from(([127, 0, 0, 1], free_port()?)));
        let etcd: Vec<_> = etcd_links.iter().map(|link| link.address().to_string()).collect();
        let postgres = format!("127.0.0.1:{port}");
        let programs = program("postgres")?.parent().context("Postgres lies in a folder")?.display().to_string();
        let mut environment: Vec<(String, String)> = [
            ("PATRONI_NAME", name.clone()),
            ("PATRONI_ETCD3_HOSTS", etcd.join(",")),
            ("PATRONI_RESTAPI_LISTEN", rest.to_string()),
            ("PATRONI_RESTAPI_CONNECT_ADDRESS", rest.to_string()),
            ("PATRONI_POSTGRESQL_LISTEN", postgres.clone()),
            ("PATRONI_POSTGRESQL_CONNECT_ADDRESS", postgres),
            ("PATRONI_POSTGRESQL_DATA_DIR", folder.join("data").display().to_string()),
            ("PATRONI_POSTGRESQL_BIN_DIR", programs),
            ("PATRONI_POSTGRESQL_PGPASS", folder.join("pgpass").display().to_string()),
            ("HOME", folder.display().to_string()),
            ("LC_ALL", "C".to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .to_vec();
        for user in ["SUPERUSER", "REPLICATION", "REWIND"] {
            let ca = folder.join("ca.pem").display().to_string();
            environment.push((format!("PATRONI_{user}_SSLROOTCERT"), ca));
        }
        let data = folder.join("data");
        let guard = Launch::new("guard", "/bin/sh", folder.with_extension("log")).arguments(["-c", GUARD]);
        let guard = guard.argument(data).spawn()?;
        Ok(Self { name, folder, port, rest, etcd_links, environment, account, patroni: None, _guard: guard })
    }

    fn log(&self) -> PathBuf {
        // The folder above is this process's own.
        self.folder.with_extension("log")
    }

    /// Starts Patroni, which starts Postgres.
    pub fn start(&mut self) -> anyhow::Result<()> {
        let patroni = tool("patroni/bin/patroni").context("there is no patroni")?;
        self.patroni =
            Some(self.launch("patroni", &patroni, &[self.folder.join("patroni.yml").display().to_string()])?);
        Ok(())
    }

    /// Starts the data by hand, without Patroni, with these settings.
    pub fn start_alone(&self, settings: &[&str]) -> anyhow::Result<ChildProcess> {
        let mut arguments = vec!["-D".to_owned(), self.folder.join("data").display().to_string()];
        for setting in settings {
            arguments.extend(["-c".to_owned(), (*setting).to_owned()]);
        }
        self.launch("postgres", &program("postgres")?, &arguments)
    }

    /// Starts restored data without Patroni. Its settings may be those of another server; on real machines these have the same ports and paths.
    pub fn start_restored(&self) -> anyhow::Result<ChildProcess> {
        let data = self.data_folder();
        let [hba, ident] = ["pg_hba.conf", "pg_ident.conf"].map(|name| data.join(name).display().to_string());
        let (port, hba, ident) =
            (format!("port={}", self.port), format!("hba_file={hba}"), format!("ident_file={ident}"));
        self.start_alone(&[&port, &hba, &ident, "synchronous_standby_names="])
    }

    fn data_folder(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn launch(&self, name: &str, program: &Path, arguments: &[String]) -> anyhow::Result<ChildProcess> {
        let launch = match self.account {
            // The interpreter of Python may lie below a folder that only root enters.
            Some(RunAsAccount { uid, gid }) => Launch::new(name, "/usr/bin/setpriv", self.log())
                .argument(format!("--reuid={uid}"))
                .argument(format!("--regid={gid}"))
                .arguments(["--clear-groups", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"])
                .argument(program),
            None => Launch::new(name, program, self.log()),
        };
        let launch = launch.arguments(arguments).stop_signal(Signal::SIGINT);
        self.environment.iter().fold(launch, |launch, (name, value)| launch.variable(name, value)).spawn()
    }

    /// SIGKILL to Postgres alone: Patroni sees it.
    pub fn kill9_postgres(&self) {
        for pid in self.postgres() {
            let _ = kill(pid, Signal::SIGKILL);
        }
    }

    /// SIGKILL to Patroni and Postgres, as the end of the machine.
    pub fn kill9(&mut self) {
        self.kill9_patroni();
        self.kill9_postgres();
    }

    /// Removes the lock of the Unix socket of a Postgres that was killed. It is in `/run`, which ends with a machine; here the killed process keeps
    /// its number until the first process of the system reaps it, and Postgres would not start beside that.
    fn remove_socket_lock(&self) -> anyhow::Result<()> {
        // It is not there where Postgres has ended.
        let file = std::fs::read_to_string(self.data_folder().join("postmaster.pid")).unwrap_or_default();
        let [port, folder] = [3, 4].map(|line| file.lines().nth(line).unwrap_or_default());
        match std::fs::remove_file(Path::new(folder).join(format!(".s.PGSQL.{port}.lock"))) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// SIGKILL to Patroni alone: Postgres runs on.
    pub fn kill9_patroni(&mut self) {
        if let Some(mut patroni) = self.patroni.take() {
            patroni.kill9();
        }
    }

    /// SIGSTOP or SIGCONT to Patroni and Postgres.
    pub fn signal_all(&mut self, signal: Signal) {
        if let Some(patroni) = &mut self.patroni {
            patroni.signal(signal);
        }
        for pid in self.postgres() {
            let _ = kill(pid, signal);
        }
    }

    /// The processes whose folder is that of the data.
    fn postgres(&self) -> Vec<Pid> {
        let data = self.folder.join("data");
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let of_data =
            processes.filter(|process| std::fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == data));
        of_data.filter_map(|process| process.file_name().to_str()?.parse().ok().map(Pid::from_raw)).collect()
    }
}

impl Drop for PatroniServer {
    fn drop(&mut self) {
        self.kill9();
    }
}

impl EtcdMember {
    pub fn start(&mut self) -> anyhow::Result<()> {
        let launch = Launch::new("etcd", &self.program, &self.log).arguments(&self.launch);
        self.process = Some(launch.variable("HOME", "/").spawn()?);
        Ok(())
    }

    pub fn kill9(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill9();
        }
    }
}

fn start_etcd(folder: &Path) -> anyhow::Result<Vec<EtcdMember>> {
    let program = tool("etcd/usr/bin/etcd").context("there is no etcd")?;
    let mut ports = Vec::new();
    for _ in 0..SERVERS {
        ports.push((free_port()?, free_port()?));
    }
    let peers = ports.iter().enumerate().map(|(n, (_, peer))| format!("etcd-{n}=http://127.0.0.1:{peer}"));
    let initial = peers.collect::<Vec<_>>().join(",");
    let mut members = Vec::new();
    for (n, (client, peer)) in ports.iter().enumerate() {
        let (client_url, peer_url) = (format!("http://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
        let data = folder.join(format!("etcd-{n}")).display().to_string();
        let launch = [
            ["--name", &format!("etcd-{n}")],
            ["--data-dir", &data],
            ["--listen-client-urls", &client_url],
            ["--advertise-client-urls", &client_url],
            ["--listen-peer-urls", &peer_url],
            ["--initial-advertise-peer-urls", &peer_url],
            ["--initial-cluster", &initial],
        ];
        let mut member = EtcdMember {
            launch: launch.iter().flatten().map(|part| (*part).to_owned()).collect(),
            program: program.clone(),
            log: folder.join(format!("etcd-{n}.log")),
            client: SocketAddr::from(([127, 0, 0, 1], *client)),
            process: None,
        };
        member.start()?;
        members.push(member);
    }
    Ok(members)
}

fn traversable() -> std::fs::Permissions {
    std::fs::Permissions::from_mode(0o711)
}

fn own(path: &Path, account: Option<RunAsAccount>) -> anyhow::Result<()> {
    if let Some(RunAsAccount { uid, gid }) = account {
        std::os::unix::fs::chown(path, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// The name of the user that runs Postgres, which its socket admits.
fn system_user() -> anyhow::Result<String> {
    let uid = account()?.map_or_else(Uid::effective, |account| Uid::from_raw(account.uid));
    Ok(User::from_uid(uid)?.context("the user of Postgres has no name")?.name)
}

pub(super) fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A program among the tools of the tests.
pub(super) fn tool(path: &str) -> Option<PathBuf> {
    let tools = std::env::var_os("GPUAAS_TOOLS_DIR").map_or_else(|| checkout().join(".dev/tools"), PathBuf::from);
    Some(tools.join(path)).filter(|path| path.is_file())
}

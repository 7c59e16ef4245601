//! The settings of a test cluster, and its start.

use super::client::Client;
use super::fake_clock::FakeClock;
use super::flaky_link::FlakyLink;
use super::payments::LinkedProcessor;
use super::{CREDIT, ExpectedFindings, GPUS, TestCluster, simulated};
use anyhow::Context as _;
use futures::future::{join_all, try_join_all};
use local_servers::balancer::Balancer;
use local_servers::identity::browser_login::RegisteredConsole;
use local_servers::identity::{self, IdentityProvider};
use local_servers::nats::{NatsServer, NatsUser};
use local_servers::pki::Authority;
use local_servers::postgres::PostgresOptions;
use local_servers::private_files;
use local_servers::test_database::TestDatabase;
use persistence::envelope_encryption::KeyRing;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use supervisors::dev::agents::AgentSettings;
use supervisors::dev::replica::{self, ListenAddresses, Replica, ReplicaSettings};
use supervisors::process_roles::{ProcessRole, parse_roles};

/// The NATS user with which tests inspect subjects and streams.
pub(super) const OPERATOR: &str = "operator";

/// Defaults for rate limits, whose catalog values would slow down every test. A policy of the builder wins.
const RATE_LIMIT_DEFAULTS: [(&str, i64); 4] = [
    ("rate_limit.api_requests_per_minute", 1_000_000),
    ("rate_limit.terminal_token_requests_per_minute", 100_000),
    ("rate_limit.financial_requests_per_minute", 100_000),
    ("rate_limit.admin_overview_requests_per_minute", 1_000_000),
];

/// The settings of a cluster that is not started.
#[must_use]
pub struct TestClusterBuilder {
    replicas: usize,
    policies: Vec<(String, Value)>,
    variables: Vec<(String, String)>,
    /// Variables of one replica, by its index.
    own_variables: Vec<(usize, String, String)>,
    binaries: Option<PathBuf>,
    /// Whether the schema is that of the binaries, not that of this build.
    migrated_by_binaries: bool,
    /// The users whose accounts are credited at the start.
    funded: Vec<String>,
    /// `None` without a payment processor; else whether its webhooks are delivered.
    processor: Option<bool>,
    /// Whether the test stops Postgres, so that it needs a server of its own.
    stops_postgres: bool,
    /// The options of such a server, where they are not the default.
    postgres_options: Option<PostgresOptions>,
    /// Whether the replicas, and whether Postgres, have a fake clock.
    own_clocks: (bool, bool),
    /// The only replica with the fake clock; `None`: all of them.
    clocked_replica: Option<usize>,
}

impl Default for TestClusterBuilder {
    fn default() -> Self {
        Self {
            replicas: 1,
            policies: Vec::new(),
            variables: Vec::new(),
            own_variables: Vec::new(),
            binaries: None,
            migrated_by_binaries: false,
            funded: ["admin", "user", "user2"].map(str::to_owned).to_vec(),
            processor: None,
            stops_postgres: false,
            postgres_options: None,
            own_clocks: (false, false),
            clocked_replica: None,
        }
    }
}

impl TestClusterBuilder {
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// Sets a global policy value from the start.
    pub fn policy(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.policies.push((key.to_owned(), value.into()));
        self
    }

    /// No account is credited at the start.
    pub fn without_credit(mut self) -> Self {
        self.funded.clear();
        self
    }

    /// Starts a payment processor ([`TestCluster::processor`]).
    pub fn with_processor(mut self) -> Self {
        self.processor = Some(true);
        self
    }

    /// Starts a payment processor whose webhooks are not delivered.
    pub fn with_processor_without_webhooks(mut self) -> Self {
        self.processor = Some(false);
        self
    }

    /// Sets an environment variable of every replica.
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets an environment variable of one replica.
    pub fn variable_of(mut self, replica: usize, name: &str, value: &str) -> Self {
        self.own_variables.push((replica, name.to_owned(), value.to_owned()));
        self
    }

    /// Gives the replicas a clock that the test sets forward and back.
    pub fn service_clock(mut self) -> Self {
        self.own_clocks.0 = true;
        self
    }

    /// Gives this replica alone a fake clock, so that its time differs from that of the others.
    pub fn clock_of(mut self, replica: usize) -> Self {
        self.clocked_replica = Some(replica);
        self.service_clock()
    }

    /// Gives the cluster a Postgres of its own, with fsync, which the test may stop and kill.
    pub fn own_postgres(mut self) -> Self {
        self.stops_postgres = true;
        self
    }

    /// As [`Self::own_postgres`], with these options.
    pub fn postgres_with(mut self, options: PostgresOptions) -> Self {
        self.postgres_options = Some(options);
        self.own_postgres()
    }

    /// Gives Postgres a clock that the test sets forward and back.
    pub fn postgres_clock(mut self) -> Self {
        self.own_clocks.1 = true;
        self
    }

    /// Uses the programs in this folder instead of those of this build.
    pub fn binaries(mut self, folder: &Path) -> Self {
        self.binaries = Some(folder.to_owned());
        self
    }

    /// Begins with the schema that these programs' own `gpuaas migrate` makes.
    pub fn migrated_by_its_binaries(mut self) -> Self {
        self.migrated_by_binaries = true;
        self
    }

    pub async fn start(self) -> TestCluster {
        match self.try_start().await {
            Ok(cluster) => cluster,
            Err(error) => panic!("the cluster does not start: {error:#}"),
        }
    }

    async fn try_start(mut self) -> anyhow::Result<TestCluster> {
        // Fails only if a provider is installed already, which is the same one.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let binaries = self.binaries.clone().map_or_else(own_build, Ok)?;
        let (gpuaas, agent) = (program(&binaries, "gpuaas")?, program(&binaries, "gpuaas-agent")?);
        let holder = tempfile::Builder::new().prefix("gpuaas-cluster-").tempdir()?;
        let folder = holder.path().canonicalize()?;
        // Agents that root starts run as another user, who has to reach their folders.
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o711))?;
        let (run, logs) = (folder.join("run"), folder.join("logs"));
        private_files::traversable_folder(&run)?;
        private_files::private_folder(&logs)?;
        let authority = Authority::create(&folder.join("pki"))?;
        let names: Vec<String> = (1..=self.replicas).map(|number| format!("replica-{number}")).collect();
        let members = names.iter().enumerate().map(|(index, name)| Ok(replica::member(name, &self.roles_of(index)?)));
        let users = std::iter::once(Ok(NatsUser::operator(OPERATOR))).chain(members);
        let users = users.collect::<anyhow::Result<Vec<_>>>()?;
        let clock = |wanted: bool, name: &str| wanted.then(|| FakeClock::new(&run.join(name))).transpose();
        let service_clock = clock(self.own_clocks.0, "service-clock")?;
        let postgres_clock = clock(self.own_clocks.1, "postgres-clock")?;
        let clocked = service_clock.iter().flat_map(FakeClock::variables);
        match self.clocked_replica {
            Some(index) => self.own_variables.extend(clocked.map(|(name, value)| (index, name, value))),
            None => self.variables.extend(clocked),
        }
        let database = async {
            Ok(match (&postgres_clock, self.postgres_options) {
                (_, Some(options)) => TestDatabase::with_options(options).await,
                (Some(clock), None) => TestDatabase::with_environment(clock.variables()).await,
                (None, None) if self.stops_postgres => TestDatabase::alone().await,
                (None, None) => TestDatabase::fresh().await,
            })
        };
        let nats_folder = folder.join("nats");
        let (postgres, nats, identity) =
            tokio::try_join!(database, NatsServer::start(&nats_folder, &authority, users), IdentityProvider::start(),)?;
        let pool = postgres.pool.clone();
        if self.migrated_by_binaries {
            sqlx::raw_sql("DROP SCHEMA public CASCADE; CREATE SCHEMA public").execute(&pool).await?;
            migrate(&gpuaas, &postgres).await?;
        }

        let mut payments = match self.processor {
            Some(_) => Some(LinkedProcessor::start(&folder.join("processor"), &authority).await?),
            None => None,
        };
        let listens = names.iter().map(|_| ListenAddresses::on_free_ports()).collect::<Result<Vec<_>, _>>()?;
        let public = Balancer::start(listens.iter().map(|listens| listens.public).collect()).await?;
        let node_balancer = Balancer::start(listens.iter().map(|listens| listens.node).collect()).await?;
        let key_ring_path = run.join("key-ring");
        KeyRing::create(&key_ring_path)?;
        let settings = ReplicaSettings {
            executable: gpuaas,
            folder: logs.clone(),
            database_url: postgres.url(),
            database_ca_path: postgres.ca_path().to_owned(),
            ca_path: authority.certificate_path().to_owned(),
            certificate: authority.server_certificate("control-plane")?,
            key_ring_path: key_ring_path.clone(),
            issuer: identity.issuer(),
            audience: identity::AUDIENCE.to_owned(),
            public_url: format!("https://{}", public.address()),
            node_public_url: format!("https://{}", node_balancer.address()),
            stats_token: private_files::random_hex(32).into(),
            variables: payments
                .iter()
                .flat_map(LinkedProcessor::variables)
                .chain(replica::console_login(&identity))
                .chain(self.variables)
                .collect(),
        };
        let ca_pem = std::fs::read_to_string(authority.certificate_path())?;
        identity.register_console(RegisteredConsole { url: settings.public_url.clone(), ca_pem });
        let nats_links = try_join_all(names.iter().map(|_| FlakyLink::to(nats.address()))).await?;
        let starting =
            names.iter().zip(listens).zip(&nats_links).enumerate().map(|(index, ((name, listens), line))| {
                let url = nats.url_through(name, line.address());
                let mut settings = settings.clone();
                let own = self.own_variables.iter().filter(|(replica, ..)| *replica == index);
                settings.variables.extend(own.map(|(_, name, value)| (name.clone(), value.clone())));
                async move { Replica::start(name, &settings, url.context("it has no NATS user")?, listens).await }
            });
        let replicas = try_join_all(starting).await?;
        if let (Some(payments), Some(true)) = (&mut payments, self.processor) {
            payments.register_webhooks(&replicas).await?;
        }

        let agent_settings = AgentSettings {
            executable: agent,
            folder: run.join("agents"),
            logs: logs.clone(),
            gpus: simulated(GPUS),
            flags: Vec::new(),
            system: None,
        };
        let mut secrets = Vec::new();
        let mut caller = |username: &str| -> anyhow::Result<Client> {
            let token = identity.token_of(username)?;
            secrets.push((format!("the bearer token of {username}"), token.expose_secret().to_owned()));
            let ca = authority.certificate_path();
            Ok(Client::new(ca, &settings.public_url, Some(token.expose_secret().to_owned())))
        };
        let (admin, second_admin) = (caller("admin")?, caller("admin2")?);
        let (user, other_user) = (caller("user")?, caller("user2")?);
        secrets.push(("the console's secret".to_owned(), identity.console_secret().expose_secret().to_owned()));
        secrets.push(("the operator's stats token".to_owned(), settings.stats_token.expose_secret().to_owned()));
        secrets.extend(payments.iter().flat_map(LinkedProcessor::secrets));
        secrets.extend(passwords(&postgres, &nats, &names));
        secrets.extend(lines_of("the key ring", &key_ring_path)?);
        secrets.extend(lines_of("the server's private key", &settings.certificate.key_path)?);
        let cluster = TestCluster {
            agents: BTreeMap::new(),
            replicas,
            nats_links,
            public,
            node_balancer,
            identity,
            nats,
            postgres,
            authority,
            pool,
            service_clock,
            postgres_clock,
            admin,
            second_admin,
            user,
            other_user,
            payments,
            agent_settings,
            stats_token: settings.stats_token.expose_secret().to_owned(),
            settings,
            logs,
            declared: ExpectedFindings::default(),
            secrets,
            offered: BTreeMap::new(),
            ended: false,
            folder: Some(holder),
        };
        cluster.set_policies(policies(self.policies)).await;
        let (_, admin) = cluster.trusting_replica(0).await.context(super::NO_REPLICA)?;
        cluster.bind_by(&admin, "admin", "billing_operations").await;
        join_all(self.funded.iter().map(|username| cluster.credit_by(&admin, username, CREDIT))).await;
        Ok(cluster)
    }
}

impl TestClusterBuilder {
    /// The roles of a replica, parsed as its process does.
    fn roles_of(&self, replica: usize) -> anyhow::Result<BTreeSet<ProcessRole>> {
        let own =
            self.own_variables.iter().filter(|(index, ..)| *index == replica).map(|(_, name, value)| (name, value));
        let mut all = self.variables.iter().map(|(name, value)| (name, value)).chain(own);
        let named = all.rfind(|(name, _)| *name == "SVC_ROLES");
        parse_roles(named.map_or("all", |(_, roles)| roles))
    }
}

fn policies(planned: Vec<(String, Value)>) -> BTreeMap<String, Value> {
    let open = RATE_LIMIT_DEFAULTS.iter().map(|(key, value)| ((*key).to_owned(), json!(value)));
    open.chain(planned).collect()
}

/// Runs this program's `gpuaas migrate`.
async fn migrate(gpuaas: &Path, postgres: &TestDatabase) -> anyhow::Result<()> {
    let mut command = tokio::process::Command::new(gpuaas);
    command.arg("migrate").env_clear();
    command.env("SVC_DATABASE_URL", postgres.url().expose_secret()).env("SVC_DATABASE_CA_PATH", postgres.ca_path());
    let output = command.output().await?;
    anyhow::ensure!(
        output.status.success(),
        "{} migrate: {}",
        gpuaas.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// The folder of the programs of this test's build.
fn own_build() -> anyhow::Result<PathBuf> {
    let this = std::env::current_exe()?;
    let deps = this.parent().and_then(Path::parent);
    deps.map(Path::to_owned).ok_or_else(|| anyhow::anyhow!("{} lies in no build folder", this.display()))
}

fn program(folder: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = folder.join(name);
    anyhow::ensure!(path.is_file(), "{} is missing: run `cargo build --bins` first", path.display());
    Ok(path)
}

fn passwords(postgres: &TestDatabase, nats: &NatsServer, members: &[String]) -> Vec<(String, String)> {
    let urls = std::iter::once(("the database's password".to_owned(), postgres.url()))
        .chain(members.iter().filter_map(|name| Some((format!("the NATS password of {name}"), nats.url(name)?))));
    let password_in =
        |url: &str| url.split_once("://")?.1.split_once('@')?.0.split_once(':').map(|(_, it)| it.to_owned());
    urls.filter_map(|(what, url)| Some((what, password_in(url.expose_secret())?))).collect()
}

/// The lines of a secret file that are long enough to be recognized in a log.
pub(super) fn lines_of(what: &str, path: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let text = std::fs::read_to_string(path)?;
    let lines = text.lines().map(str::trim).filter(|line| line.len() >= 20 && !line.starts_with("-----"));
    Ok(lines.map(|line| (what.to_owned(), line.to_owned())).collect())
}

//! How a world is set up, and its start.

use super::client::Client;
use super::clock::Clock;
use super::line::Line;
use super::payments::Payments;
use super::{CREDIT, Declared, GPUS, World, simulated};
use anyhow::Context as _;
use futures::future::try_join_all;
use persistence::envelope::KeyRing;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use supervisors::config::{Role, parse_roles};
use supervisors::dev::agents::AgentSettings;
use supervisors::dev::balancer::Balancer;
use supervisors::dev::files;
use supervisors::dev::identity::{self, IdentityProvider};
use supervisors::dev::nats::{Nats, NatsUser};
use supervisors::dev::pki::Authority;
use supervisors::dev::postgres::Postgres;
use supervisors::dev::replica::{self, Listens, Replica, ReplicaSettings};

/// The NATS user of whoever looks from outside.
pub(super) const OPERATOR: &str = "operator";

/// Values that would slow every test and are few tests' subject: what is limited per minute. A plan that names one has its own.
const OPEN: [(&str, i64); 4] = [
    ("rate_limit.api_requests_per_minute", 1_000_000),
    ("rate_limit.terminal_token_requests_per_minute", 100_000),
    ("rate_limit.financial_requests_per_minute", 100_000),
    ("rate_limit.admin_overview_requests_per_minute", 1_000_000),
];

/// A world that has not begun.
#[must_use]
pub struct Plan {
    replicas: usize,
    policies: Vec<(String, Value)>,
    variables: Vec<(String, String)>,
    /// Of one replica, by its index.
    own_variables: Vec<(usize, String, String)>,
    binaries: Option<PathBuf>,
    /// Who begins with money.
    funded: Vec<String>,
    /// Whether somebody processes payments, and whether its webhooks arrive.
    processor: Option<bool>,
    /// Whether the replicas, and Postgres, have a clock of their own.
    own_clocks: (bool, bool),
    /// The one replica that has it, where the others go by the machine's.
    clocked_replica: Option<usize>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            replicas: 1,
            policies: Vec::new(),
            variables: Vec::new(),
            own_variables: Vec::new(),
            binaries: None,
            funded: ["admin", "user", "user2"].map(str::to_owned).to_vec(),
            processor: None,
            own_clocks: (false, false),
            clocked_replica: None,
        }
    }
}

impl Plan {
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// A value of the policy catalog, for everybody, from the start.
    pub fn policy(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.policies.push((key.to_owned(), value.into()));
        self
    }

    /// Nobody begins with money.
    pub fn penniless(mut self) -> Self {
        self.funded.clear();
        self
    }

    /// With a payment processor ([`World::processor`]).
    pub fn with_processor(mut self) -> Self {
        self.processor = Some(true);
        self
    }

    /// The same, and none of its webhooks arrives.
    pub fn with_unheard_processor(mut self) -> Self {
        self.processor = Some(false);
        self
    }

    /// A variable of every replica's environment.
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A variable of one replica's environment.
    pub fn variable_of(mut self, replica: usize, name: &str, value: &str) -> Self {
        self.own_variables.push((replica, name.to_owned(), value.to_owned()));
        self
    }

    /// The replicas have a clock that the test puts on and back.
    pub fn service_clock(mut self) -> Self {
        self.own_clocks.0 = true;
        self
    }

    /// This replica alone has one: it and the others do not agree about the time.
    pub fn clock_of(mut self, replica: usize) -> Self {
        self.clocked_replica = Some(replica);
        self.service_clock()
    }

    /// Postgres has one.
    pub fn postgres_clock(mut self) -> Self {
        self.own_clocks.1 = true;
        self
    }

    /// The folder of the programs, where they are not of this build.
    pub fn binaries(mut self, folder: &Path) -> Self {
        self.binaries = Some(folder.to_owned());
        self
    }

    pub async fn start(self) -> World {
        match self.try_start().await {
            Ok(world) => world,
            Err(error) => panic!("the world does not begin: {error:#}"),
        }
    }

    async fn try_start(mut self) -> anyhow::Result<World> {
        // Fails only where one is installed already, which is this one.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let binaries = self.binaries.clone().map_or_else(own_build, Ok)?;
        let (gpuaas, agent) = (program(&binaries, "gpuaas")?, program(&binaries, "gpuaas-agent")?);
        let holder = tempfile::Builder::new().prefix("gpuaas-world-").tempdir()?;
        let folder = holder.path().canonicalize()?;
        // Agents that root starts are somebody else, and have to come to their own folders.
        std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o711))?;
        let (run, logs) = (folder.join("run"), folder.join("logs"));
        files::passable_folder(&run)?;
        files::private_folder(&logs)?;
        let authority = Authority::create(&folder.join("pki"))?;
        let names: Vec<String> = (1..=self.replicas).map(|number| format!("replica-{number}")).collect();
        let members = names.iter().enumerate().map(|(index, name)| Ok(replica::member(name, &self.roles_of(index)?)));
        let users = std::iter::once(Ok(NatsUser::operator(OPERATOR))).chain(members);
        let users = users.collect::<anyhow::Result<Vec<_>>>()?;
        let clock = |wanted: bool, name: &str| wanted.then(|| Clock::new(&run.join(name))).transpose();
        let service_clock = clock(self.own_clocks.0, "service-clock")?;
        let postgres_clock = clock(self.own_clocks.1, "postgres-clock")?;
        let clocked = service_clock.iter().flat_map(Clock::variables);
        match self.clocked_replica {
            Some(index) => self.own_variables.extend(clocked.map(|(name, value)| (index, name, value))),
            None => self.variables.extend(clocked),
        }
        let environment = postgres_clock.as_ref().map(Clock::variables).unwrap_or_default();
        let (postgres_folder, nats_folder) = (folder.join("postgres"), folder.join("nats"));
        let (postgres, nats, identity) = tokio::try_join!(
            Postgres::start_in(&postgres_folder, &authority, environment),
            Nats::start(&nats_folder, &authority, users),
            IdentityProvider::start(),
        )?;
        let pool =
            sqlx::postgres::PgPoolOptions::new().max_connections(8).connect(postgres.url().expose_secret()).await?;
        persistence::migrate::run(&pool).await?;

        let mut payments = match self.processor {
            Some(_) => Some(Payments::start(&folder.join("processor"), &authority).await?),
            None => None,
        };
        let listens = names.iter().map(|_| Listens::anywhere()).collect::<Result<Vec<_>, _>>()?;
        let public = Balancer::start(listens.iter().map(|listens| listens.public).collect()).await?;
        let node_balancer = Balancer::start(listens.iter().map(|listens| listens.node).collect()).await?;
        let key_ring_path = run.join("key-ring");
        KeyRing::create(&key_ring_path)?;
        let settings = ReplicaSettings {
            executable: gpuaas,
            folder: logs.clone(),
            database_url: postgres.url(),
            ca_path: authority.certificate_path().to_owned(),
            certificate: authority.server_certificate("control-plane")?,
            key_ring_path: key_ring_path.clone(),
            issuer: identity.issuer(),
            audience: identity::AUDIENCE.to_owned(),
            public_url: format!("https://{}", public.address()),
            node_public_url: format!("https://{}", node_balancer.address()),
            stats_token: files::random_hex(32).into(),
            variables: payments.iter().flat_map(Payments::variables).chain(self.variables).collect(),
        };
        let nats_lines = try_join_all(names.iter().map(|_| Line::to(nats.address()))).await?;
        let starting =
            names.iter().zip(listens).zip(&nats_lines).enumerate().map(|(index, ((name, listens), line))| {
                let url = nats.url_by_way_of(name, line.address());
                let mut settings = settings.clone();
                let own = self.own_variables.iter().filter(|(replica, ..)| *replica == index);
                settings.variables.extend(own.map(|(_, name, value)| (name.clone(), value.clone())));
                async move { Replica::start(name, &settings, url.context("it has no NATS user")?, listens).await }
            });
        let replicas = try_join_all(starting).await?;
        if let (Some(payments), Some(true)) = (&mut payments, self.processor) {
            payments.tell(&replicas).await?;
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
        secrets.push(("the operator's stats token".to_owned(), settings.stats_token.expose_secret().to_owned()));
        secrets.extend(payments.iter().flat_map(Payments::secrets));
        secrets.extend(passwords(&postgres, &nats, &names));
        secrets.extend(lines_of("the key ring", &key_ring_path)?);
        secrets.extend(lines_of("the server's private key", &settings.certificate.key_path)?);
        let world = World {
            agents: BTreeMap::new(),
            replicas,
            nats_lines,
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
            declared: Declared::default(),
            secrets,
            offered: BTreeMap::new(),
            ended: false,
            folder: Some(holder),
        };
        for (key, value) in policies(self.policies) {
            world.set_policy(&key, value).await;
        }
        world.bind_by(&world.believed_admin().await, "admin", "billing_operations").await;
        for username in self.funded {
            world.credit(&username, CREDIT).await;
        }
        Ok(world)
    }
}

impl Plan {
    /// As its process reads them.
    fn roles_of(&self, replica: usize) -> anyhow::Result<BTreeSet<Role>> {
        let own =
            self.own_variables.iter().filter(|(index, ..)| *index == replica).map(|(_, name, value)| (name, value));
        let mut all = self.variables.iter().map(|(name, value)| (name, value)).chain(own);
        let named = all.rfind(|(name, _)| *name == "SVC_ROLES");
        parse_roles(named.map_or("all", |(_, roles)| roles))
    }
}

fn policies(planned: Vec<(String, Value)>) -> BTreeMap<String, Value> {
    let open = OPEN.iter().map(|(key, value)| ((*key).to_owned(), json!(value)));
    open.chain(planned).collect()
}

/// Where the programs of the build lie that this test belongs to.
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

fn passwords(postgres: &Postgres, nats: &Nats, members: &[String]) -> Vec<(String, String)> {
    let urls = std::iter::once(("the database's password".to_owned(), postgres.url()))
        .chain(members.iter().filter_map(|name| Some((format!("the NATS password of {name}"), nats.url(name)?))));
    let password_in =
        |url: &str| url.split_once("://")?.1.split_once('@')?.0.split_once(':').map(|(_, it)| it.to_owned());
    urls.filter_map(|(what, url)| Some((what, password_in(url.expose_secret())?))).collect()
}

/// The lines of a secret file that are long enough to be recognised.
pub(super) fn lines_of(what: &str, path: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let text = std::fs::read_to_string(path)?;
    let lines = text.lines().map(str::trim).filter(|line| line.len() >= 20 && !line.starts_with("-----"));
    Ok(lines.map(|line| (what.to_owned(), line.to_owned())).collect())
}

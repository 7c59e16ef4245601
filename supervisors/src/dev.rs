//! `gpuaas dev`: a whole environment on one machine, of real servers, with the first rental run through it.
//!
//! Its servers are those of [`local_servers`], from which the tests build their clusters too.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use domain::policy::{PolicyBook, PolicyKey, Scopes};
use futures::future::try_join_all;
use nix::fcntl::Flock;
use persistence::envelope_encryption::KeyRing;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::process_roles::ProcessRole;
use agents::{AgentDirectories, AgentProcess, AgentSettings, SimulatedGpus, SystemAgent};
use api::DevApi;
use environment::{EnvironmentFile, EnvironmentVariables};
use first_rental::{FirstRental, StepListener};
use local_servers::balancer::Balancer;
use local_servers::identity::IdentityProvider;
use local_servers::identity::browser_login::RegisteredConsole;
use local_servers::nats::{NatsServer, NatsUser};
use local_servers::payment_processor::card_form::CardForm;
use local_servers::payment_processor::{PaymentProcessor, SCRIPT_URL};
use local_servers::pki::Authority;
use local_servers::postgres::PostgresServer;
use local_servers::settings::SavedSettings;
use local_servers::{identity, private_files};
use replica::{ListenAddresses, Replica, ReplicaSettings};

pub mod agents;
pub mod api;
pub mod environment;
pub mod first_rental;
mod folder;
pub mod replica;

/// The SKU of the first rental, by its name.
const SKU: &str = "the first rental's SKU";

/// The setting that enables the forced refresh of the identity provider's keys; it is passed on to the environment's users.
const REFRESH_TOKEN: &str = "INTERNAL_JWKS_REFRESH_TOKEN";

/// Variables that are passed on to the replicas: the proxies in front of them, and where notifications may be sent.
const FORWARDED_VARIABLES: [&str; 6] = [
    "SVC_NODE_CLIENT_IDENTITY",
    "SVC_NODE_TRUSTED_PROXIES",
    "SVC_NOTIFICATION_ALLOWED_CIDRS",
    "SVC_NOTIFICATION_CA_PATH",
    "SVC_SMTP_URL",
    "SVC_SMTP_FROM",
];

/// The NATS user for clients outside the replicas: `SVC_NATS_URL` of `.dev/env`.
const OPERATOR: &str = "operator";
/// An upper bound of the first rental's requests about one node.
const REQUESTS_PER_NODE: i64 = 25;
/// How long the agents of an earlier start may take until they are in contact again.
const AGENT_RESUME_TIMEOUT: Duration = Duration::from_secs(30);
/// The log message of an agent whose heartbeat was accepted.
const IN_CONTACT: &str = "\"in contact\"";
/// Saved when the first rental is done: data of an earlier start without it is not resumed.
const DONE: &str = "the first rental is done";
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Flags of `gpuaas dev`.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    /// Run the first rental in a new environment below --dir, stop it and exit: with 0 when it succeeded. Its logs stay in `once/logs`
    #[arg(long)]
    pub once: bool,
    /// Start over: remove the data, addresses and passwords of earlier starts
    #[arg(long)]
    pub fresh: bool,
    /// Control-plane replicas
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub replicas: u8,
    /// Keep tenants in folders, also as root: no users are created on this machine
    #[arg(long)]
    pub sandbox: bool,
    /// Nodes, each with an agent and simulated GPUs; those of earlier starts are kept
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub nodes: u8,
    /// Simulated GPUs of each node
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub gpus: u8,
    /// Where data, logs and `env` go
    #[arg(long, default_value = ".dev", overrides_with = "dir")]
    pub dir: PathBuf,
}

/// Starts everything, with the data of the last start where there is some, else runs the first rental; then stays up until it is interrupted
/// (or ends, with `--once`).
///
/// # Errors
/// Names the part or the step that failed, and the reason. Everything that was started is stopped in this case, too.
pub async fn run(args: DevArgs) -> anyhow::Result<()> {
    let begin = Instant::now();
    let mut interrupted = InterruptSignal::listen()?;
    let mut environment = tokio::select! {
        started = DevEnvironment::start(&args) => started?,
        () = interrupted.wait() => bail!("interrupted while starting"),
    };
    let result = tokio::select! {
        result = environment.first_rental(&args) => result,
        () = interrupted.wait() => Err(anyhow::anyhow!("interrupted during the first rental")),
    };
    match &result {
        Ok(()) if environment.is_resumed => print_line(&format!(
            "Up with the data, addresses and passwords of the last start, after {:.1} s. To start over: --fresh",
            begin.elapsed().as_secs_f32()
        )),
        Ok(()) => {
            print_line(&format!("The first rental is done, {:.1} s after the start.", begin.elapsed().as_secs_f32()));
        }
        Err(_) => print_line(&format!("The first rental failed. Logs: {}", environment.logs.display())),
    }
    if result.is_ok() && !args.once {
        environment.print_addresses();
        tokio::select! {
            () = environment.watch() => {}
            () = interrupted.wait() => {}
        }
    }
    print_line("Stopping.");
    if !args.once && environment.makes_users {
        print_line("Allocations that run keep their users on this machine for the next start; --fresh removes them.");
    }
    environment.stop().await;
    result
}

/// A running environment. The order of the fields is the order in which a drop stops them.
struct DevEnvironment {
    env_file: EnvironmentFile,
    agents: Vec<AgentProcess>,
    replicas: Vec<Replica>,
    public: Balancer,
    node: Balancer,
    webhook: Balancer,
    identity: IdentityProvider,
    processor: PaymentProcessor,
    /// What the payment page loads in place of the processor's script.
    _card_form: CardForm,
    nats: NatsServer,
    postgres: PostgresServer,
    authority: Authority,
    logs: PathBuf,
    agent_settings: AgentSettings,
    makes_users: bool,
    /// The directories of agents that create users, where this process is root.
    directories: Option<AgentDirectories>,
    saved: SavedSettings,
    is_resumed: bool,
    _lock: Flock<std::fs::File>,
}

impl DevEnvironment {
    async fn start(args: &DevArgs) -> anyhow::Result<Self> {
        let clock = Stopwatch::default();
        let dir = if args.once { args.dir.join("once") } else { args.dir.clone() };
        folder::refuse_foreign(&dir)?;
        private_files::traversable_folder(&dir)?;
        let folder = dir.canonicalize()?;
        let lock = folder::lock(&folder)?;
        let saved_path = folder.join("kept.json");
        let is_resumed = !args.once && !args.fresh && SavedSettings::open(&saved_path)?.get(DONE).is_some();
        let run = folder.join("run");
        let logs = folder.join("logs");
        let gpuaas = std::env::current_exe().context("this program's own path is unknown")?;
        let agent = private_files::find_sibling(&gpuaas, "gpuaas-agent")?;
        let is_root = nix::unistd::Uid::effective().is_root();
        let directories = if is_root { Some(AgentDirectories::claim(&folder)?) } else { None };
        private_files::remove_folder(&logs)?;
        if !is_resumed {
            // An earlier start may have left tenants on this machine; their agents' state names them.
            agents::clean_up(&agent, &run.join("agents"))?;
            // First, so that nothing resumes half-removed data.
            for file in ["kept.json", "key-ring"] {
                private_files::remove_file(&folder.join(file))?;
            }
            PostgresServer::remove_data(&folder.join("postgres"))?;
            let parts = ["pki", "nats", "localstripe"].map(|part| folder.join(part));
            for left in parts.iter().chain([&run]).chain(directories.as_ref().map(|directories| &directories.folder)) {
                private_files::remove_folder(left)?;
            }
        }
        for new in [&run, &logs] {
            private_files::private_folder(new)?;
        }
        let saved = if args.once { SavedSettings::ephemeral() } else { SavedSettings::open(&saved_path)? };

        let authority = Authority::restore(&folder.join("pki"))?;
        let names: Vec<String> = (1..=args.replicas).map(|number| format!("replica-{number}")).collect();
        let users = std::iter::once(NatsUser::operator(OPERATOR))
            .chain(names.iter().map(|name| replica::member(name, &ProcessRole::ALL.into())));
        let (postgres_folder, nats_folder) = (folder.join("postgres"), folder.join("nats"));
        let (processor_folder, processor_log) = (folder.join("localstripe"), logs.join("localstripe.log"));
        let (postgres, nats, identity, mut processor) = tokio::try_join!(
            PostgresServer::restore(&postgres_folder, &authority, &saved),
            NatsServer::restore(&nats_folder, &authority, users.collect(), &saved),
            IdentityProvider::restore(&saved),
            PaymentProcessor::restore(&processor_folder, &processor_log, authority.certificate_path(), &saved),
        )?;
        let at = postgres.data_folder().display();
        clock.lap(&format!("Postgres on port {} (data in {at})", postgres.port()));
        clock.lap(&format!("NATS on port {}, identity provider at {}", nats.port(), identity.auth_url()));
        clock.lap(&format!("payment processor (localstripe) at {}", processor.url()));

        let listens =
            names.iter().map(|name| ListenAddresses::restore(name, &saved)).collect::<anyhow::Result<Vec<_>>>()?;
        let balancer = async |name: &str, target: fn(&ListenAddresses) -> std::net::SocketAddr| {
            let port = saved.port(name)?.number;
            anyhow::Ok(Balancer::start_at(port, listens.iter().map(target).collect()).await?)
        };
        let public = balancer("the public API's port", |listens| listens.public).await?;
        let node = balancer("the node API's port", |listens| listens.node).await?;
        let webhook = balancer("the webhooks' port", |listens| listens.webhook).await?;
        let key_ring_path = folder.join("key-ring");
        if !key_ring_path.exists() {
            KeyRing::create(&key_ring_path)?;
        }
        let public_url = format!("https://{}", public.address());
        let ca_pem = std::fs::read_to_string(authority.certificate_path())?;
        let card_form = CardForm::restore(&processor, &public_url, &saved).await?;
        identity.register_console(RegisteredConsole { url: public_url.clone(), ca_pem });
        let settings = ReplicaSettings {
            executable: gpuaas,
            folder: logs.clone(),
            database_url: postgres.url(),
            database_ca_path: authority.certificate_path().to_owned(),
            ca_path: authority.certificate_path().to_owned(),
            certificate: authority.server_certificate("control-plane")?,
            key_ring_path,
            issuer: identity.issuer(),
            audience: identity::AUDIENCE.to_owned(),
            public_url,
            node_public_url: format!("https://{}", node.address()),
            stats_token: saved.secret("INTERNAL_STATS_TOKEN", "", 32)?,
            variables: std::iter::once((
                REFRESH_TOKEN.to_owned(),
                saved.value(REFRESH_TOKEN, || Ok(private_files::random_hex(32)))?,
            ))
            .chain(std::iter::once(("SVC_MIGRATE_ON_START".to_owned(), "true".to_owned())))
            .chain(replica::console_login(&identity))
            .chain(processor.variables(first_rental::CURRENCY).into_iter().filter(|(name, _)| name != SCRIPT_URL))
            .chain([(SCRIPT_URL.to_owned(), card_form.script_url())])
            .chain(FORWARDED_VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?))))
            .collect(),
        };
        let starting = names.iter().zip(listens).map(|(name, listens)| {
            let nats_url = nats.url(name).context("every replica has a NATS user");
            let settings = &settings;
            async move { Replica::start(name, settings, nats_url?, listens).await }
        });
        let replicas = try_join_all(starting).await?;
        processor.send_webhooks_to(&format!("https://{}{}", webhook.address(), edge::payment_webhook::PATH)).await?;
        clock.lap(&format!("control plane at {} ({} replicas)", settings.public_url, replicas.len()));

        let env_file = variables(&settings, &replicas, &identity, &nats)?.write(&folder.join("env"))?;
        let no_users = if args.sandbox { Some("--sandbox".to_owned()) } else { agents::why_no_users(&run) };
        let agents_folder = match (&no_users, &directories) {
            // They run as `nobody`, who may not enter this folder.
            (Some(_), Some(directories)) => directories.folder.join("agents"),
            (Some(_), None) | (None, _) => run.join("agents"),
        };
        let gpus = saved.value("GPUs of a node", || Ok(args.gpus.to_string()))?.parse()?;
        let agent_settings = AgentSettings {
            executable: agent,
            folder: agents_folder,
            logs: logs.clone(),
            gpus: SimulatedGpus { count: gpus, model: "H100".to_owned(), memory_mib: 81_920 },
            flags: Vec::new(),
            system: None,
        };
        clock.lap(&match &no_users {
            None => "agents use the executor system: tenants are Linux users of this machine".to_owned(),
            Some(why) => format!("agents use the executor sandbox, which admits no SSH login: {why}"),
        });
        Ok(Self {
            env_file,
            agents: Vec::new(),
            replicas,
            public,
            node,
            webhook,
            identity,
            processor,
            _card_form: card_form,
            nats,
            postgres,
            authority,
            logs,
            agent_settings,
            makes_users: no_users.is_none(),
            directories,
            saved,
            is_resumed,
            _lock: lock,
        })
    }

    /// Runs the first rental; or, on the data of an earlier start, starts its agents again, and adds nodes where more are requested.
    async fn first_rental(&mut self, args: &DevArgs) -> anyhow::Result<()> {
        let clock = Stopwatch::default();
        if self.is_resumed {
            self.resume_agents(&clock).await?;
        }
        let there = u8::try_from(self.agents.len()).unwrap_or(u8::MAX);
        if self.is_resumed && there >= args.nodes {
            return Ok(());
        }
        let admin = self.api("admin").await?;
        let second_admin = self.api("admin2").await?;
        let user = self.api("user").await?;
        clock.lap("admin, admin2 and user logged in");
        self.raise_rate_limit(&admin, args.nodes, &clock).await?;
        let admin_subjects = [subject(&self.identity, "admin")?, subject(&self.identity, "admin2")?];
        let job = FirstRental {
            admin: &admin,
            second_admin: &second_admin,
            admin_subjects,
            user: &user,
            processor: &self.processor,
            listener: &clock,
        };
        let sku = match self.saved.get(SKU) {
            Some(sku) if self.is_resumed => sku,
            Some(_) | None => job.publish_sku(&self.agent_settings).await?,
        };
        self.saved.set(SKU, &sku)?;
        let names: Vec<String> = (there + 1..=args.nodes).map(|number| format!("node-{number}")).collect();
        let settings = (u32::from(there)..).zip(&names).map(|(number, _)| self.agent_settings_of(number));
        let settings = settings.collect::<anyhow::Result<Vec<_>>>()?;
        let onboarding = names.iter().zip(&settings).map(|(name, settings)| job.onboard(name, &sku, settings));
        for (name, (id, agent)) in names.iter().zip(try_join_all(onboarding).await?) {
            self.saved.set(name, &id)?;
            self.agents.push(agent);
        }
        if self.is_resumed {
            return Ok(());
        }
        job.pay_in().await?;
        first_rental::top_up(&self.api("user2").await?, "user2", &self.processor, &clock).await?;
        job.rent_and_release(&sku, self.agent_settings.gpus.count.div_ceil(2)).await?;
        self.saved.set(DONE, "yes")
    }

    /// Starts the agents of an earlier start and waits until the control plane has accepted a heartbeat of each.
    async fn resume_agents(&mut self, clock: &Stopwatch) -> anyhow::Result<()> {
        let names = (1_u32..).map(|number| (number - 1, format!("node-{number}")));
        let there = names.map_while(|(number, name)| self.saved.get(&name).map(|_| (number, name)));
        let there: Vec<_> = there.collect();
        for (number, name) in &there {
            let settings = self.agent_settings_of(*number)?;
            let agent = AgentProcess::restore(name, &settings).with_context(|| {
                format!(
                    "the agent of {name} cannot start on what it left in {}; start over with --fresh",
                    settings.folder.display()
                )
            })?;
            self.agents.push(agent);
        }
        let until = Instant::now() + AGENT_RESUME_TIMEOUT;
        // The agent of a node that was removed meanwhile exits; that does not fail the start.
        for agent in &mut self.agents {
            let name = agent.name().to_owned();
            let is_in_contact =
                |agent: &AgentProcess| std::fs::read_to_string(agent.log()).is_ok_and(|log| log.contains(IN_CONTACT));
            while !is_in_contact(agent) && agent.is_running() && Instant::now() < until {
                tokio::time::sleep(CHECK_INTERVAL / 5).await;
            }
            clock.lap(&match agent.exit_status() {
                Some(status) => format!("the agent of {name} has ended ({status}): {}", agent.log().display()),
                None if is_in_contact(agent) => format!("{name} is in contact again"),
                None => format!("{name} is not in contact yet: {}", agent.log().display()),
            });
        }
        Ok(())
    }

    /// The settings of the agent with this number.
    fn agent_settings_of(&self, number: u32) -> anyhow::Result<AgentSettings> {
        let system = match &self.directories {
            Some(directories) if self.makes_users => Some(SystemAgent::new(directories, number)?),
            Some(_) | None => None,
        };
        Ok(AgentSettings { system, ..self.agent_settings.clone() })
    }

    /// Raises the rate limit as an operator would: many nodes at once are more requests than an administrator has in a minute.
    async fn raise_rate_limit(&self, admin: &DevApi, nodes: u8, clock: &Stopwatch) -> anyhow::Result<()> {
        let key = PolicyKey::RateLimitApi;
        let has = PolicyBook::default().int(key, &Scopes::global(), chrono::Utc::now());
        let needed = i64::from(nodes) * REQUESTS_PER_NODE;
        if needed <= has {
            return Ok(());
        }
        let id = self.identity.person("admin").context("there is an administrator")?.id;
        let body = json!({
            "key": key.name(), "value": needed, "scope": { "user_id": id }, "reason": "the first rental onboards many nodes at once",
        });
        admin.post("/api/v1/admin/policy-values", &body).await?;
        clock
            .lap(&format!("policy {}: {needed} for admin, not {has}: {nodes} nodes are onboarded at once", key.name()));
        Ok(())
    }

    async fn api(&self, username: &str) -> anyhow::Result<DevApi> {
        let person = self.identity.person(username).with_context(|| format!("there is no user {username}"))?;
        let client = (identity::CLIENT_ID, self.identity.client_secret());
        let person = (person.username.as_str(), &person.password);
        let token = api::log_in(self.identity.auth_url(), identity::REALM, client, person).await?;
        let http = api::https_client(self.authority.certificate_path())?;
        Ok(DevApi::new(http, &format!("https://{}", self.public.address()), token))
    }

    /// Prints the addresses of the environment.
    fn print_addresses(&self) {
        let mut lines = vec![
            String::new(),
            format!("  web console        https://{}/console/", self.public.address()),
            format!("  public API         https://{}", self.public.address()),
            format!("  its description    https://{}/api/v1/docs", self.public.address()),
            format!("  node API           https://{}", self.node.address()),
            format!("  webhooks           https://{}{}", self.webhook.address(), edge::payment_webhook::PATH),
            format!("  a terminal         https://{}/terminal/ALLOCATION_ID, in a browser", self.public.address()),
        ];
        for replica in &self.replicas {
            let pid = replica.pid().unwrap_or_default();
            let (name, public, node) = (replica.name(), replica.public_url(), replica.node_url());
            lines.push(format!("  {name:<18} {public}, nodes {node}, pid {pid}"));
        }
        lines.push(format!("  identity provider  {}", self.identity.issuer()));
        lines.push(format!(
            "  payment processor  {} (localstripe); the payment page offers its test cards",
            self.processor.url()
        ));
        for username in ["admin", "admin2", "user", "user2"] {
            if let Some(person) = self.identity.person(username) {
                lines.push(format!("  {username:<18} password {}", person.password.expose_secret()));
            }
        }
        lines.push(format!("  trust anchor       {}", self.authority.certificate_path().display()));
        lines.push(format!("  logs               {}", self.logs.display()));
        lines.push("\nNext, in another terminal:".to_owned());
        lines.push(format!("  . {}", self.env_file.path().display()));
        // Built by deploy/up with everything else; the book's user/login.md says how to use it.
        if let Ok(gpuctl) = private_files::find_sibling(&self.agent_settings.executable, "gpuctl") {
            let gpuctl = gpuctl.display();
            lines.push(format!(
                "  printf '%s\\n' \"$SVC_USER_PASSWORD\" | {gpuctl} login --username \"$SVC_USER_USERNAME\" --password-stdin && {gpuctl} skus list"
            ));
        }
        lines.push("\nUp until Ctrl-C; the next start goes on with the same data, addresses and passwords.".to_owned());
        print_line(&lines.join("\n"));
    }

    /// Reports parts that end by themselves. They are not restarted, so that killing one shows the failover.
    async fn watch(&mut self) {
        let mut reported = std::collections::BTreeSet::new();
        loop {
            let replicas = self.replicas.iter_mut().map(|replica| (replica.is_running(), replica.name().to_owned()));
            let agents = self.agents.iter_mut().map(|agent| (agent.is_running(), agent.name().to_owned()));
            let stores = [
                (self.postgres.is_running(), "Postgres".to_owned()),
                (self.nats.is_running(), "NATS".to_owned()),
                (self.processor.is_running(), "localstripe".to_owned()),
            ];
            for (running, name) in replicas.chain(agents).chain(stores) {
                if !running && reported.insert(name.clone()) {
                    print_line(&format!("{name} has ended."));
                }
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }

    /// Stops the parts in the order of their dependencies: agents, control plane, stores.
    async fn stop(mut self) {
        futures::future::join_all(self.agents.iter_mut().map(AgentProcess::stop)).await;
        // Tenants are data: they are kept with it.
        if !self.saved.is_persistent() {
            if let Err(error) = agents::clean_up(&self.agent_settings.executable, &self.agent_settings.folder) {
                print_line(&format!("{error:#}. The next start tries again."));
            }
            if let Some(directories) = &self.directories {
                let _ = private_files::remove_folder(&directories.folder);
            }
        }
        futures::future::join_all(self.replicas.iter_mut().map(Replica::stop)).await;
        self.processor.stop().await;
        self.nats.stop().await;
        self.postgres.stop().await;
    }
}

/// The variables of `.dev/env`, for clients of the environment in a shell.
///
/// # Errors
/// Where a part lacks a variable.
pub fn variables(
    settings: &ReplicaSettings,
    replicas: &[Replica],
    identity: &IdentityProvider,
    nats: &NatsServer,
) -> anyhow::Result<EnvironmentVariables> {
    let exposed = |secret: &SecretString| secret.expose_secret().to_owned();
    let mut env = EnvironmentVariables::default();
    env.set_all("SVC_BASE_URL", Some(settings.public_url.clone()), replicas.iter().map(Replica::public_url));
    env.set_all("SVC_NODE_API_URL", Some(settings.node_public_url.clone()), replicas.iter().map(Replica::node_url));
    env.set_all("SVC_OPERATIONS_URL", None, replicas.iter().map(Replica::operations_url));
    env.set("INTERNAL_STATS_TOKEN", exposed(&settings.stats_token));
    let pids = replicas.iter().filter_map(Replica::pid).map(|pid| pid.to_string());
    env.set_all("SVC_REPLICA_PID", None, pids);
    env.set("SVC_AUTH_URL", identity.auth_url());
    env.set("SVC_OIDC_ISSUER", identity.issuer());
    env.set("SVC_CA_BUNDLE_PATH", settings.ca_path.display().to_string());
    env.set("SVC_DATABASE_URL", exposed(&settings.database_url));
    // For a proxy in front of the replicas.
    env.set("SVC_TLS_CERT_PATH", settings.certificate.certificate_path.display().to_string());
    env.set("SVC_TLS_KEY_PATH", settings.certificate.key_path.display().to_string());
    // For `gpuaas audit`.
    env.set("SVC_DATABASE_CA_PATH", settings.database_ca_path.display().to_string());
    env.set("SVC_NATS_CA_PATH", settings.ca_path.display().to_string());
    env.set("SVC_KEK_FILE", settings.key_ring_path.display().to_string());
    env.set("SVC_NATS_URL", exposed(&nats.url(OPERATOR).context("the operator has a NATS user")?));
    env.set("SVC_REALM", identity::REALM);
    let given_on = settings.variables.iter().find(|(name, _)| name == REFRESH_TOKEN);
    env.set(REFRESH_TOKEN, given_on.map(|(_, value)| value.clone()).context("the replicas have a refresh token")?);
    // The address for paying, and the secret that signs the processor's webhooks.
    for (name, value) in settings.variables.iter().filter(|(name, _)| name.starts_with("SVC_PAYMENTS_")) {
        env.set(name, value);
    }
    env.set("SVC_CLIENT_ID", identity::CLIENT_ID);
    env.set("SVC_CLIENT_SECRET", exposed(identity.client_secret()));
    for (username, prefix, suffix) in [
        ("admin", "SVC_ADMIN", ""),
        ("user", "SVC_USER", ""),
        ("admin2", "SVC_ADMIN", "_2"),
        ("user2", "SVC_USER", "_2"),
    ] {
        let person = identity.person(username).with_context(|| format!("there is no user {username}"))?;
        env.set(format!("{prefix}_SUBJECT{suffix}"), person.id.to_string());
        env.set(format!("{prefix}_USERNAME{suffix}"), person.username);
        env.set(format!("{prefix}_PASSWORD{suffix}"), exposed(&person.password));
    }
    Ok(env)
}

/// The `sub` of this user's tokens.
fn subject(identity: &IdentityProvider, username: &str) -> anyhow::Result<String> {
    let person = identity.person(username).with_context(|| format!("there is no user {username}"))?;
    Ok(person.id.to_string())
}

/// Ctrl-C, or a termination signal of the parent.
struct InterruptSignal {
    signals: [tokio::signal::unix::Signal; 3],
}

impl InterruptSignal {
    fn listen() -> std::io::Result<Self> {
        let signals =
            [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?, signal(SignalKind::hangup())?];
        Ok(Self { signals })
    }

    async fn wait(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

/// Prints steps with their time.
struct Stopwatch {
    last: std::sync::Mutex<Instant>,
}

impl Default for Stopwatch {
    fn default() -> Self {
        Self { last: std::sync::Mutex::new(Instant::now()) }
    }
}

impl Stopwatch {
    /// A step that began when the one before it ended.
    fn lap(&self, step: &str) {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.done(step, last.elapsed());
        *last = Instant::now();
    }
}

impl StepListener for Stopwatch {
    fn done(&self, step: &str, took: Duration) {
        print_line(&format!("{:>8.3} s  {step}", took.as_secs_f64()));
    }
}

fn print_line(text: &str) {
    // Standard output may be closed; the child processes must be stopped all the same.
    let _ = writeln!(std::io::stdout(), "{text}");
}

//! `gpuaas dev`: a whole environment on one machine, of real parts, with the main job run through it.
//!
//! Each part is a value that starts, says where it is, and stops what it started when it is dropped; a child process stops even
//! when this one is killed ([`process`]). The test harness builds its worlds of the same parts.

use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use domain::policy::{Key, PolicyBook, Scopes};
use futures::future::try_join_all;
use nix::fcntl::{Flock, FlockArg};
use persistence::envelope::KeyRing;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::Role;
use agents::{AgentProcess, AgentSettings, Place, SimulatedGpus, SystemAgent};
use api::Api;
use balancer::Balancer;
use environment::{Environment, EnvironmentFile};
use identity::IdentityProvider;
use kept::Kept;
use main_job::{Listener, MainJob};
use nats::{Nats, NatsUser};
use pki::Authority;
use postgres::Postgres;
use processor::PaymentProcessor;
use replica::{Listens, Replica, ReplicaSettings};

pub mod agents;
pub mod api;
pub mod balancer;
pub mod environment;
pub mod files;
pub mod identity;
pub mod kept;
pub mod main_job;
pub mod nats;
pub mod pki;
pub mod postgres;
pub mod process;
pub mod processor;
pub mod replica;

/// The SKU of the main job, by its name.
const SKU: &str = "the main job's SKU";

/// The setting that opens the forced refresh of the identity provider's keys; given on to whoever uses the environment.
const REFRESH_TOKEN: &str = "INTERNAL_JWKS_REFRESH_TOKEN";

/// What the replicas are told as this process is: which proxies stand in front of them.
const HANDED_ON: [&str; 2] = ["SVC_NODE_CLIENT_IDENTITY", "SVC_NODE_TRUSTED_PROXIES"];

/// The NATS user of whoever looks from outside: `SVC_NATS_URL` of `.dev/env`.
const OPERATOR: &str = "operator";
/// What the main job asks about one node, with room.
const REQUESTS_OF_A_NODE: i64 = 25;
/// Until the agents of an earlier start are in contact again.
const COMES_BACK_WITHIN: Duration = Duration::from_secs(30);
/// What an agent logs once it is in contact.
const POLLS: &str = "\"polling\"";
/// Noted when the main job is done: what an earlier start left without it is not gone on with.
const DONE: &str = "the main job is done";
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Flags of `gpuaas dev`.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    /// Run the main job in a new environment below --dir, which is thrown away, and end: with 0 when it succeeded
    #[arg(long)]
    pub once: bool,
    /// Begin anew: remove the data, addresses and passwords of earlier starts
    #[arg(long)]
    pub fresh: bool,
    /// Control-plane replicas
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub replicas: u8,
    /// Keep tenants in folders, also where this is root: no users are made on this machine
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

/// Starts everything, with the data of the last start where there is some, else runs the main job; then stays up until it is interrupted (or
/// ends, with `--once`).
///
/// # Errors
/// Says which part or which step failed, and why. Everything that was started is stopped then too.
pub async fn run(args: DevArgs) -> anyhow::Result<()> {
    let begin = Instant::now();
    let mut interrupted = Interrupted::listen()?;
    let mut environment = tokio::select! {
        started = Dev::start(&args) => started?,
        () = interrupted.wait() => bail!("interrupted while starting"),
    };
    let result = tokio::select! {
        result = environment.main_job(&args) => result,
        () = interrupted.wait() => Err(anyhow::anyhow!("interrupted during the main job")),
    };
    match &result {
        Ok(()) if environment.is_resumed => say(&format!(
            "Up with the data, addresses and passwords of the last start, after {:.1} s. To begin anew: --fresh",
            begin.elapsed().as_secs_f32()
        )),
        Ok(()) => say(&format!("The main job is done, {:.1} s after the start.", begin.elapsed().as_secs_f32())),
        Err(_) => say(&format!("The main job failed. Logs: {}", environment.logs.display())),
    }
    if result.is_ok() && !args.once {
        environment.introduce();
        tokio::select! {
            () = environment.watch() => {}
            () = interrupted.wait() => {}
        }
    }
    say("Stopping.");
    environment.stop().await;
    result
}

/// A running environment. The order of the fields is the order in which a drop stops them.
struct Dev {
    env_file: EnvironmentFile,
    agents: Vec<AgentProcess>,
    replicas: Vec<Replica>,
    public: Balancer,
    node: Balancer,
    webhook: Balancer,
    identity: IdentityProvider,
    processor: PaymentProcessor,
    nats: Nats,
    postgres: Postgres,
    authority: Authority,
    logs: PathBuf,
    agent_settings: AgentSettings,
    makes_users: bool,
    /// What agents have for themselves alone, where this process is root.
    place: Option<Place>,
    kept: Kept,
    is_resumed: bool,
    _lock: Flock<std::fs::File>,
}

impl Dev {
    async fn start(args: &DevArgs) -> anyhow::Result<Self> {
        let clock = Clock::default();
        let dir = if args.once { args.dir.join("once") } else { args.dir.clone() };
        files::passable_folder(&dir)?;
        let folder = dir.canonicalize()?;
        let lock = lock(&folder)?;
        let kept_path = folder.join("kept.json");
        let is_resumed = !args.once && !args.fresh && Kept::open(&kept_path)?.get(DONE).is_some();
        let run = folder.join("run");
        let logs = folder.join("logs");
        let gpuaas = std::env::current_exe().context("this program's own path is unknown")?;
        let agent = files::find_beside(&gpuaas, "gpuaas-agent")?;
        let is_root = nix::unistd::Uid::effective().is_root();
        let place = if is_root { Some(Place::take(&folder)?) } else { None };
        files::remove_folder(&logs)?;
        if !is_resumed {
            // An earlier start may have left tenants on this machine, and their agents' state says who they are.
            agents::clean_up(&agent, &run.join("agents"))?;
            // First, so that nothing goes on with what is half removed.
            for file in ["kept.json", "key-ring"] {
                files::remove_file(&folder.join(file))?;
            }
            Postgres::remove_data(&folder.join("postgres"))?;
            let parts = ["pki", "nats", "localstripe"].map(|part| folder.join(part));
            for left in parts.iter().chain([&run]).chain(place.as_ref().map(|place| &place.folder)) {
                files::remove_folder(left)?;
            }
        }
        for new in [&run, &logs] {
            files::private_folder(new)?;
        }
        let kept = if args.once { Kept::nothing() } else { Kept::open(&kept_path)? };

        let authority = Authority::restore(&folder.join("pki"))?;
        let names: Vec<String> = (1..=args.replicas).map(|number| format!("replica-{number}")).collect();
        let users = std::iter::once(NatsUser::operator(OPERATOR))
            .chain(names.iter().map(|name| replica::member(name, &Role::ALL.into())));
        let (postgres_folder, nats_folder) = (folder.join("postgres"), folder.join("nats"));
        let (processor_folder, processor_log) = (folder.join("localstripe"), logs.join("localstripe.log"));
        let (postgres, nats, identity, mut processor) = tokio::try_join!(
            Postgres::restore(&postgres_folder, &authority, &kept),
            Nats::restore(&nats_folder, &authority, users.collect(), &kept),
            IdentityProvider::restore(&kept),
            PaymentProcessor::restore(&processor_folder, &processor_log, authority.certificate_path(), &kept),
        )?;
        let at = postgres.data_folder().display();
        clock.lap(&format!("Postgres on port {} (data in {at})", postgres.port()));
        clock.lap(&format!("NATS on port {}, identity provider at {}", nats.port(), identity.auth_url()));
        clock.lap(&format!("payment processor (localstripe) at {}", processor.url()));

        let listens = names.iter().map(|name| Listens::restore(name, &kept)).collect::<anyhow::Result<Vec<_>>>()?;
        let balancer = async |name: &str, target: fn(&Listens) -> std::net::SocketAddr| {
            let port = kept.port(name)?.number;
            anyhow::Ok(Balancer::start_at(port, listens.iter().map(target).collect()).await?)
        };
        let public = balancer("the public API's port", |listens| listens.public).await?;
        let node = balancer("the node API's port", |listens| listens.node).await?;
        let webhook = balancer("the webhooks' port", |listens| listens.webhook).await?;
        let key_ring_path = folder.join("key-ring");
        if !key_ring_path.exists() {
            KeyRing::create(&key_ring_path)?;
        }
        let settings = ReplicaSettings {
            executable: gpuaas,
            folder: logs.clone(),
            database_url: postgres.url(),
            ca_path: authority.certificate_path().to_owned(),
            certificate: authority.server_certificate("control-plane")?,
            key_ring_path,
            issuer: identity.issuer(),
            audience: identity::AUDIENCE.to_owned(),
            public_url: format!("https://{}", public.address()),
            node_public_url: format!("https://{}", node.address()),
            stats_token: kept.secret("INTERNAL_STATS_TOKEN", "", 32)?,
            variables: std::iter::once((
                REFRESH_TOKEN.to_owned(),
                kept.value(REFRESH_TOKEN, || Ok(files::random_hex(32)))?,
            ))
            .chain(processor.variables(main_job::CURRENCY))
            .chain(HANDED_ON.iter().filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?))))
            .collect(),
        };
        let starting = names.iter().zip(listens).map(|(name, listens)| {
            let nats_url = nats.url(name).context("every replica has a NATS user");
            let settings = &settings;
            async move { Replica::start(name, settings, nats_url?, listens).await }
        });
        let replicas = try_join_all(starting).await?;
        processor.send_webhooks_to(&format!("https://{}{}", webhook.address(), edge::webhook::PATH)).await?;
        clock.lap(&format!("control plane at {} ({} replicas)", settings.public_url, replicas.len()));

        let env_file = variables(&settings, &replicas, &identity, &nats, &postgres)?.write(&folder.join("env"))?;
        let no_users = if args.sandbox { Some("--sandbox".to_owned()) } else { agents::why_no_users(&run) };
        let agents_folder = match (&no_users, &place) {
            // They are nobody, who may not come to this folder.
            (Some(_), Some(place)) => place.folder.join("agents"),
            (Some(_), None) | (None, _) => run.join("agents"),
        };
        let gpus = kept.value("GPUs of a node", || Ok(args.gpus.to_string()))?.parse()?;
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
            Some(why) => format!("agents use the executor sandbox, which lets nobody in by SSH: {why}"),
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
            nats,
            postgres,
            authority,
            logs,
            agent_settings,
            makes_users: no_users.is_none(),
            place,
            kept,
            is_resumed,
            _lock: lock,
        })
    }

    /// The main job; or, on the data of an earlier start, its agents again, and more nodes where more are wanted.
    async fn main_job(&mut self, args: &DevArgs) -> anyhow::Result<()> {
        let clock = Clock::default();
        if self.is_resumed {
            self.agents_again(&clock).await?;
        }
        let there = u8::try_from(self.agents.len()).unwrap_or(u8::MAX);
        if self.is_resumed && there >= args.nodes {
            return Ok(());
        }
        let admin = self.api("admin").await?;
        let second_admin = self.api("admin2").await?;
        let user = self.api("user").await?;
        clock.lap("admin, admin2 and user logged in");
        self.make_room(&admin, args.nodes, &clock).await?;
        let admin_subjects = [subject(&self.identity, "admin")?, subject(&self.identity, "admin2")?];
        let job = MainJob {
            admin: &admin,
            second_admin: &second_admin,
            admin_subjects,
            user: &user,
            processor: &self.processor,
            listener: &clock,
        };
        let sku = match self.kept.get(SKU) {
            Some(sku) if self.is_resumed => sku,
            Some(_) | None => job.offer(&self.agent_settings).await?,
        };
        self.kept.set(SKU, &sku)?;
        let names: Vec<String> = (there + 1..=args.nodes).map(|number| format!("node-{number}")).collect();
        let settings = (u32::from(there)..).zip(&names).map(|(number, _)| self.agent_settings_of(number));
        let settings = settings.collect::<anyhow::Result<Vec<_>>>()?;
        let onboarding = names.iter().zip(&settings).map(|(name, settings)| job.onboard(name, &sku, settings));
        for (name, (id, agent)) in names.iter().zip(try_join_all(onboarding).await?) {
            self.kept.set(name, &id)?;
            self.agents.push(agent);
        }
        if self.is_resumed {
            return Ok(());
        }
        job.pay_in().await?;
        main_job::top_up(&self.api("user2").await?, "user2", &self.processor, &clock).await?;
        job.rent_and_return(&sku, self.agent_settings.gpus.count.div_ceil(2)).await?;
        self.kept.set(DONE, "yes")
    }

    /// Starts the agents of an earlier start and waits until they are in contact.
    async fn agents_again(&mut self, clock: &Clock) -> anyhow::Result<()> {
        let names = (1_u32..).map(|number| (number - 1, format!("node-{number}")));
        let there = names.map_while(|(number, name)| self.kept.get(&name).map(|_| (number, name)));
        let there: Vec<_> = there.collect();
        for (number, name) in &there {
            let settings = self.agent_settings_of(*number)?;
            let agent = AgentProcess::restore(name, &settings).with_context(|| {
                format!(
                    "the agent of {name} cannot start on what it left in {}; begin anew with --fresh",
                    settings.folder.display()
                )
            })?;
            self.agents.push(agent);
        }
        let until = Instant::now() + COMES_BACK_WITHIN;
        // A node that was removed meanwhile has an agent that ends, and is no reason to refuse the start.
        for agent in &mut self.agents {
            let name = agent.name().to_owned();
            let polls =
                |agent: &AgentProcess| std::fs::read_to_string(agent.log()).is_ok_and(|log| log.contains(POLLS));
            while !polls(agent) && agent.is_running() && Instant::now() < until {
                tokio::time::sleep(LOOK_EVERY / 5).await;
            }
            clock.lap(&match agent.exit_status() {
                Some(status) => format!("the agent of {name} has ended ({status}): {}", agent.log().display()),
                None if polls(agent) => format!("{name} is in contact again"),
                None => format!("{name} is not in contact yet: {}", agent.log().display()),
            });
        }
        Ok(())
    }

    /// How the agent of this number is started.
    fn agent_settings_of(&self, number: u32) -> anyhow::Result<AgentSettings> {
        let system = match &self.place {
            Some(place) if self.makes_users => Some(SystemAgent::new(place, number)?),
            Some(_) | None => None,
        };
        Ok(AgentSettings { system, ..self.agent_settings.clone() })
    }

    /// Many nodes at once are more requests than an administrator has in a minute: the limit is raised as any operator would.
    async fn make_room(&self, admin: &Api, nodes: u8, clock: &Clock) -> anyhow::Result<()> {
        let key = Key::RateLimitApi;
        let has = PolicyBook::default().int(key, &Scopes::global(), chrono::Utc::now());
        let needed = i64::from(nodes) * REQUESTS_OF_A_NODE;
        if needed <= has {
            return Ok(());
        }
        let id = self.identity.person("admin").context("there is an administrator")?.id;
        let body = json!({
            "key": key.name(), "value": needed, "scope": { "user_id": id }, "reason": "the main job onboards many nodes at once",
        });
        admin.post("/api/v1/admin/policy-values", &body).await?;
        clock
            .lap(&format!("policy {}: {needed} for admin, not {has}: {nodes} nodes are onboarded at once", key.name()));
        Ok(())
    }

    async fn api(&self, username: &str) -> anyhow::Result<Api> {
        let person = self.identity.person(username).with_context(|| format!("nobody is called {username}"))?;
        let client = (identity::CLIENT_ID, self.identity.client_secret());
        let person = (person.username.as_str(), &person.password);
        let token = api::log_in(self.identity.auth_url(), identity::REALM, client, person).await?;
        let http = api::https_client(self.authority.certificate_path())?;
        Ok(Api::new(http, &format!("https://{}", self.public.address()), token))
    }

    /// Where everything is, for the person at the terminal.
    fn introduce(&self) {
        let mut lines = vec![
            String::new(),
            format!("  public API         https://{}", self.public.address()),
            format!("  its description    https://{}/api/v1/docs", self.public.address()),
            format!("  node API           https://{}", self.node.address()),
            format!("  webhooks           https://{}{}", self.webhook.address(), edge::webhook::PATH),
            format!("  a terminal         https://{}/terminal/ALLOCATION_ID, in a browser", self.public.address()),
        ];
        for replica in &self.replicas {
            let pid = replica.pid().unwrap_or_default();
            let (name, public, node) = (replica.name(), replica.public_url(), replica.node_url());
            lines.push(format!("  {name:<18} {public}, nodes {node}, pid {pid}"));
        }
        lines.push(format!("  identity provider  {}", self.identity.issuer()));
        lines.push(format!("  payment processor  {} (localstripe)", self.processor.url()));
        for username in ["admin", "admin2", "user", "user2"] {
            if let Some(person) = self.identity.person(username) {
                lines.push(format!("  {username:<18} password {}", person.password.expose_secret()));
            }
        }
        lines.push(format!("  trust anchor       {}", self.authority.certificate_path().display()));
        lines.push(format!("  logs               {}", self.logs.display()));
        lines.push("\nNext, in another terminal:".to_owned());
        lines.push(format!("  . {}", self.env_file.path().display()));
        // Built by deploy/up with everything else; README, "By command line".
        if let Ok(gpuctl) = files::find_beside(&self.agent_settings.executable, "gpuctl") {
            let gpuctl = gpuctl.display();
            lines.push(format!(
                "  printf '%s\\n' \"$SVC_USER_PASSWORD\" | {gpuctl} login --username \"$SVC_USER_USERNAME\" --password-stdin && {gpuctl} skus list"
            ));
        }
        lines.push("\nUp until Ctrl-C; the next start goes on with the same data, addresses and passwords.".to_owned());
        say(&lines.join("\n"));
    }

    /// Says so when a part ends that nobody stopped. It is not started again: killing one is how failover is looked at.
    async fn watch(&mut self) {
        let mut told = std::collections::BTreeSet::new();
        loop {
            let replicas = self.replicas.iter_mut().map(|replica| (replica.is_running(), replica.name().to_owned()));
            let agents = self.agents.iter_mut().map(|agent| (agent.is_running(), agent.name().to_owned()));
            let stores = [
                (self.postgres.is_running(), "Postgres".to_owned()),
                (self.nats.is_running(), "NATS".to_owned()),
                (self.processor.is_running(), "localstripe".to_owned()),
            ];
            for (running, name) in replicas.chain(agents).chain(stores) {
                if !running && told.insert(name.clone()) {
                    say(&format!("{name} has ended."));
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Stops in the order in which nobody misses what is gone: agents, control plane, the stores.
    async fn stop(mut self) {
        futures::future::join_all(self.agents.iter_mut().map(AgentProcess::stop)).await;
        // Tenants are data: they stay with it.
        if !self.kept.keeps() {
            if let Err(error) = agents::clean_up(&self.agent_settings.executable, &self.agent_settings.folder) {
                say(&format!("{error:#}. The next start tries again."));
            }
            if let Some(place) = &self.place {
                let _ = files::remove_folder(&place.folder);
            }
        }
        futures::future::join_all(self.replicas.iter_mut().map(Replica::stop)).await;
        self.processor.stop().await;
        self.nats.stop().await;
        self.postgres.stop().await;
    }
}

/// What whoever works in a shell with an environment of these parts is to know: `.dev/env`.
///
/// # Errors
/// A part lacks what every environment has.
pub fn variables(
    settings: &ReplicaSettings,
    replicas: &[Replica],
    identity: &IdentityProvider,
    nats: &Nats,
    postgres: &Postgres,
) -> anyhow::Result<Environment> {
    let exposed = |secret: &SecretString| secret.expose_secret().to_owned();
    let mut env = Environment::default();
    env.set_all("SVC_BASE_URL", Some(settings.public_url.clone()), replicas.iter().map(Replica::public_url));
    env.set_all("SVC_NODE_API_URL", Some(settings.node_public_url.clone()), replicas.iter().map(Replica::node_url));
    env.set_all("SVC_OPERATIONS_URL", None, replicas.iter().map(Replica::operations_url));
    env.set("INTERNAL_STATS_TOKEN", exposed(&settings.stats_token));
    let pids = replicas.iter().filter_map(Replica::pid).map(|pid| pid.to_string());
    env.set_all("SVC_REPLICA_PID", None, pids);
    env.set("SVC_AUTH_URL", identity.auth_url());
    env.set("SVC_OIDC_ISSUER", identity.issuer());
    env.set("SVC_CA_BUNDLE_PATH", settings.ca_path.display().to_string());
    env.set("SVC_DATABASE_URL", exposed(&postgres.url()));
    // What a proxy in front of them can show.
    env.set("SVC_TLS_CERT_PATH", settings.certificate.certificate_path.display().to_string());
    env.set("SVC_TLS_KEY_PATH", settings.certificate.key_path.display().to_string());
    // What `gpuaas audit` needs beside.
    env.set("SVC_DATABASE_CA_PATH", settings.ca_path.display().to_string());
    env.set("SVC_NATS_CA_PATH", settings.ca_path.display().to_string());
    env.set("SVC_KEK_FILE", settings.key_ring_path.display().to_string());
    env.set("SVC_NATS_URL", exposed(&nats.url(OPERATOR).context("the operator has a NATS user")?));
    env.set("SVC_REALM", identity::REALM);
    let given_on = settings.variables.iter().find(|(name, _)| name == REFRESH_TOKEN);
    env.set(REFRESH_TOKEN, given_on.map(|(_, value)| value.clone()).context("the replicas have a refresh token")?);
    // Where somebody pays, and what signs the processor's webhooks.
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
        let person = identity.person(username).with_context(|| format!("nobody is called {username}"))?;
        env.set(format!("{prefix}_SUBJECT{suffix}"), person.id.to_string());
        env.set(format!("{prefix}_USERNAME{suffix}"), person.username);
        env.set(format!("{prefix}_PASSWORD{suffix}"), exposed(&person.password));
    }
    Ok(env)
}

/// The `sub` of this person's tokens.
fn subject(identity: &IdentityProvider, username: &str) -> anyhow::Result<String> {
    let person = identity.person(username).with_context(|| format!("nobody is called {username}"))?;
    Ok(person.id.to_string())
}

/// Two environments in one folder would remove each other's data. The lock ends with this process.
fn lock(folder: &std::path::Path) -> anyhow::Result<Flock<std::fs::File>> {
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(folder.join("lock"))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|_| {
            anyhow::anyhow!(
                "another environment is up in {}: stop it (Ctrl-C where it runs), or start this one in another folder with --dir FOLDER",
                folder.display()
            )
        })
}

/// Ctrl-C, or a polite signal from whoever runs this.
struct Interrupted {
    signals: [tokio::signal::unix::Signal; 3],
}

impl Interrupted {
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
struct Clock {
    last: std::sync::Mutex<Instant>,
}

impl Default for Clock {
    fn default() -> Self {
        Self { last: std::sync::Mutex::new(Instant::now()) }
    }
}

impl Clock {
    /// A step that began when the one before it ended.
    fn lap(&self, step: &str) {
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        self.done(step, last.elapsed());
        *last = Instant::now();
    }
}

impl Listener for Clock {
    fn done(&self, step: &str, took: Duration) {
        say(&format!("{:>8.3} s  {step}", took.as_secs_f64()));
    }
}

fn say(text: &str) {
    // Nobody may be listening any more; that is no reason to leave processes behind.
    let _ = writeln!(std::io::stdout(), "{text}");
}

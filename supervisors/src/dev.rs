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

use agents::{AgentProcess, AgentSettings, SimulatedGpus, SystemAgent};
use api::Api;
use balancer::Balancer;
use environment::{Environment, EnvironmentFile};
use identity::IdentityProvider;
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
pub mod main_job;
pub mod nats;
pub mod pki;
pub mod postgres;
pub mod process;
pub mod processor;
pub mod replica;

/// The setting that opens the forced refresh of the identity provider's keys; given on to whoever uses the environment.
const REFRESH_TOKEN: &str = "INTERNAL_JWKS_REFRESH_TOKEN";

/// What the replicas are told as this process is: which proxies stand in front of them.
const HANDED_ON: [&str; 2] = ["SVC_NODE_CLIENT_IDENTITY", "SVC_NODE_TRUSTED_PROXIES"];

/// The NATS user of whoever looks from outside: `SVC_NATS_URL` of `.dev/env`.
const OPERATOR: &str = "operator";
/// What the main job asks about one node, with room.
const REQUESTS_OF_A_NODE: i64 = 25;
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Flags of `gpuaas dev`.
#[derive(Debug, Clone, clap::Args)]
pub struct DevArgs {
    /// End after the main job: with 0 when it succeeded
    #[arg(long)]
    pub once: bool,
    /// Control-plane replicas
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub replicas: u8,
    /// Nodes, each with an agent and simulated GPUs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub nodes: u8,
    /// Simulated GPUs of each node
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub gpus: u8,
    /// Where data, logs and `env` go; what an earlier run left there is removed
    #[arg(long, default_value = ".dev", overrides_with = "dir")]
    pub dir: PathBuf,
}

/// Starts everything, runs the main job, and stays up until it is interrupted (or ends, with `--once`).
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
    /// Where agents have what is theirs alone, where this process is root.
    system_folder: Option<PathBuf>,
    _lock: Flock<std::fs::File>,
}

impl Dev {
    async fn start(args: &DevArgs) -> anyhow::Result<Self> {
        let clock = Clock::default();
        files::passable_folder(&args.dir)?;
        let folder = args.dir.canonicalize()?;
        let lock = lock(&folder)?;
        let run = folder.join("run");
        let logs = folder.join("logs");
        let gpuaas = std::env::current_exe().context("this program's own path is unknown")?;
        let agent = files::find_beside(&gpuaas, "gpuaas-agent")?;
        // A run that was killed may have left tenants on this machine, and their agents' state says who they are.
        agents::clean_up(&agent, &run.join("agents"))?;
        let own_folder = nix::unistd::Uid::effective().is_root().then(|| system_folder(&folder));
        for left in [&run, &logs].into_iter().chain(&own_folder) {
            files::remove_folder(left)?;
        }
        for new in [&run, &logs] {
            files::private_folder(new)?;
        }

        let authority = Authority::create(&folder.join("pki"))?;
        let names: Vec<String> = (1..=args.replicas).map(|number| format!("replica-{number}")).collect();
        let users = std::iter::once(NatsUser::operator(OPERATOR)).chain(names.iter().map(|name| replica::member(name)));
        let (postgres_folder, nats_folder) = (folder.join("postgres"), folder.join("nats"));
        let (processor_folder, processor_log) = (folder.join("localstripe"), logs.join("localstripe.log"));
        let (postgres, nats, identity, mut processor) = tokio::try_join!(
            Postgres::start(&postgres_folder, &authority),
            Nats::start(&nats_folder, &authority, users.collect()),
            IdentityProvider::start(),
            PaymentProcessor::start(&processor_folder, &processor_log, authority.certificate_path()),
        )?;
        let place = postgres.data_folder().display();
        clock.lap(&format!("Postgres on port {} (data in {place})", postgres.port()));
        clock.lap(&format!("NATS on port {}, identity provider at {}", nats.port(), identity.auth_url()));
        clock.lap(&format!("payment processor (localstripe) at {}", processor.url()));

        let listens = names.iter().map(|_| Listens::anywhere()).collect::<Result<Vec<_>, _>>()?;
        let public = Balancer::start(listens.iter().map(|listens| listens.public).collect()).await?;
        let node = Balancer::start(listens.iter().map(|listens| listens.node).collect()).await?;
        let webhook = Balancer::start(listens.iter().map(|listens| listens.webhook).collect()).await?;
        let key_ring_path = run.join("key-ring");
        KeyRing::create(&key_ring_path)?;
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
            stats_token: files::random_hex(32).into(),
            variables: std::iter::once((REFRESH_TOKEN.to_owned(), files::random_hex(32)))
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
        let no_users = agents::why_no_users(&run);
        let agents_folder = match (&no_users, &own_folder) {
            // They are nobody, who may not come to this folder.
            (Some(_), Some(own)) => own.join("agents"),
            (Some(_), None) | (None, _) => run.join("agents"),
        };
        let agent_settings = AgentSettings {
            executable: agent,
            folder: agents_folder,
            logs: logs.clone(),
            gpus: SimulatedGpus { count: u32::from(args.gpus), model: "H100".to_owned(), memory_mib: 81_920 },
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
            system_folder: own_folder,
            _lock: lock,
        })
    }

    async fn main_job(&mut self, args: &DevArgs) -> anyhow::Result<()> {
        let clock = Clock::default();
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
        let sku = job.offer(&self.agent_settings).await?;
        let names: Vec<String> = (1..=args.nodes).map(|number| format!("node-{number}")).collect();
        let settings = (0..).zip(&names).map(|(number, _)| self.agent_settings_of(number));
        let settings = settings.collect::<anyhow::Result<Vec<_>>>()?;
        let onboarding = names.iter().zip(&settings).map(|(name, settings)| job.onboard(name, &sku, settings));
        let onboarded = try_join_all(onboarding).await?;
        self.agents.extend(onboarded.into_iter().map(|(_, agent)| agent));
        job.pay_in().await?;
        main_job::top_up(&self.api("user2").await?, "user2", &self.processor, &clock).await?;
        job.rent_and_return(&sku, u32::from(args.gpus.div_ceil(2))).await
    }

    /// How the agent of this number is started.
    fn agent_settings_of(&self, number: u32) -> anyhow::Result<AgentSettings> {
        let system = match &self.system_folder {
            Some(folder) if self.makes_users => Some(SystemAgent::new(folder, number)?),
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
        lines.push(format!("  for a shell        . {}", self.env_file.path().display()));
        // Built by deploy/up with everything else; README, "By command line".
        if let Ok(gpuctl) = files::find_beside(&self.agent_settings.executable, "gpuctl") {
            lines.push(format!("  command line       {}", gpuctl.display()));
        }
        lines.push("\nUp until Ctrl-C.".to_owned());
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
        if let Err(error) = agents::clean_up(&self.agent_settings.executable, &self.agent_settings.folder) {
            say(&format!("{error:#}. The next start tries again."));
        }
        if let Some(folder) = &self.system_folder {
            let _ = files::remove_folder(folder);
        }
        futures::future::join_all(self.replicas.iter_mut().map(Replica::stop)).await;
        self.processor.stop().await;
        self.nats.stop().await;
        self.postgres.stop().await;
    }
}

/// Outside of the checkout, which others may not be able to pass through; the same for every run in this folder.
fn system_folder(folder: &std::path::Path) -> PathBuf {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut hasher = DefaultHasher::new();
    folder.hash(&mut hasher);
    PathBuf::from(format!("/run/gpuaas-dev-{:016x}", hasher.finish()))
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
        .map_err(|_| anyhow::anyhow!("another `gpuaas dev` is up in {}; stop it, or give --dir", folder.display()))
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

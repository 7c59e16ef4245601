//! A world: the whole service as real processes, for one test. Real Postgres and NATS, replicas of `gpuaas serve`, node agents over
//! mutual TLS, one authority for all servers; only the identity provider lives in the test's own process.
//!
//! ```no_run
//! # async fn story() {
//! use tests::world::World;
//! let mut world = World::plan().replicas(3).start().await;
//! let node = world.node("h100").await;
//! let allocation = world.rent("h100", 4).await;
//! allocation.expect_state("active").await;
//! world.lose_agent(&node);
//! node.expect_state("offline").await;
//! world.end().await;
//! # }
//! ```
//!
//! A world has to be ended: [`World::end`] fails the test where something was left behind that nobody spoke of (an outbox row, a
//! parked entity, an ERROR in a log, a secret in a log, a GPU held twice).

// A step of a world that fails is a failed test: it says so and stops.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc)]

pub mod client;
pub mod clock;
pub mod desk;
mod end;
pub mod gpuctl;
pub mod hand;
pub mod held;
pub mod ingress;
pub mod line;
mod logs;
pub mod machine;
pub mod mail;
mod member;
pub mod notifications;
pub mod payments;
mod plan;
pub mod receiver;
pub mod recovering;
mod store;
mod stored;
pub mod tenants;
pub mod terminal;

use client::Client;
use clock::Clock;
use domain::Shard;
pub use end::Declared;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
pub use plan::Plan;
use reqwest::StatusCode;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use supervisors::dev::agents::{AgentProcess, AgentSettings, SimulatedGpus};
use supervisors::dev::balancer::Balancer;
use supervisors::dev::identity::IdentityProvider;
use supervisors::dev::nats::Nats;
use supervisors::dev::pki::Authority;
use supervisors::dev::postgres::Postgres;
use supervisors::dev::replica::{Replica, ReplicaSettings};
pub use tenants::{OnboardedNode, Rented};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;

/// The one region of a world.
pub const REGION: &str = "test-1";
/// GPUs of a node, unless told.
pub const GPUS: u32 = 8;
pub const GPU_MODEL: &str = "H100";
pub const GPU_MEMORY_MIB: u64 = 81_920;

/// What everything is priced in.
pub const CURRENCY: &str = "USD";

/// What each of a world's people begins with, in minor units: more than any test spends.
pub const CREDIT: i64 = 100_000;

/// How long anything may take that is waited for. Where the machine is slow, a test is slow, and not wrong.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running world. The order of the fields is the order in which a drop stops them.
pub struct World {
    agents: BTreeMap<Uuid, AgentLife>,
    pub replicas: Vec<Replica>,
    /// Of each replica to NATS, in their order.
    pub nats_lines: Vec<line::Line>,
    pub public: Balancer,
    pub node_balancer: Balancer,
    pub identity: IdentityProvider,
    pub nats: Nats,
    pub postgres: Postgres,
    pub authority: Authority,
    /// The database, as its owner.
    pub pool: PgPool,
    /// Of every replica, where the plan asked for one.
    pub service_clock: Option<Clock>,
    /// Of Postgres, likewise.
    pub postgres_clock: Option<Clock>,
    /// Through the balancer, as an administrator.
    pub admin: Client,
    /// Through the balancer, as `admin2`: no status of a SKU changes on one person's word.
    pub second_admin: Client,
    /// Through the balancer, as `user`.
    pub user: Client,
    /// Through the balancer, as `user2`.
    pub other_user: Client,
    /// Who processes payments, where the plan says so.
    payments: Option<payments::Payments>,
    agent_settings: AgentSettings,
    /// How every replica is started.
    pub settings: ReplicaSettings,
    /// Lets an operator read a replica's stats.
    pub stats_token: String,
    logs: PathBuf,
    declared: Declared,
    /// What must not stand in any log, by what it is.
    secrets: Vec<(String, String)>,
    offered: BTreeMap<String, Uuid>,
    ended: bool,
    folder: Option<tempfile::TempDir>,
}

/// A node's agent, running or not, and how it is started again.
struct AgentLife {
    process: Option<AgentProcess>,
    settings: AgentSettings,
    bundle: BootstrapBundle,
}

impl World {
    pub fn plan() -> Plan {
        Plan::default()
    }

    /// One replica, and nothing special.
    pub async fn start() -> Self {
        Self::plan().start().await
    }

    /// A caller of the replica at `index`, as this person.
    #[must_use]
    pub fn at_replica(&self, index: usize, username: &str) -> Client {
        let token = self.identity.token_of(username).expect("the provider signs");
        let base = self.replicas[index].public_url();
        Client::new(self.authority.certificate_path(), &base, Some(token.expose_secret().to_owned()))
    }

    /// An operator's tool at the operators' address of the replica at `index`.
    #[must_use]
    pub fn operator_at(&self, index: usize) -> Client {
        Client::new(self.authority.certificate_path(), &self.replicas[index].operations_url(), None)
    }

    /// A caller without a token.
    #[must_use]
    pub fn stranger(&self) -> Client {
        Client::new(self.authority.certificate_path(), &format!("https://{}", self.public.address()), None)
    }

    /// What agents connect to, through the balancer.
    #[must_use]
    pub fn node_url(&self) -> String {
        format!("https://{}", self.node_balancer.address())
    }

    /// Offers a kind of machine for rent, once: an active SKU of that name, of so many GPUs.
    pub async fn offer(&mut self, name: &str, gpus: u32) -> Uuid {
        if let Some(id) = self.offered.get(name) {
            return *id;
        }
        let sku = self.admin.post("/api/v1/admin/skus", &sku_body(name, gpus)).await.created();
        self.activate(id_of(&sku)).await;
        let path = format!("/api/v1/admin/skus/{}", id_of(&sku));
        self.admin.wait_until(&path, "the SKU is active", |sku| sku["status"] == "active").await;
        self.offered.insert(name.to_owned(), id_of(&sku));
        id_of(&sku)
    }

    /// Until every replica has its share of the shards. A shard that changes hands begins with empty rate cells (decisions/0006), so
    /// that whoever counts to the last request begins after it.
    pub async fn settled(&self) {
        let share = Shard::COUNT / self.replicas.len();
        let all_have = |cluster: &Value| {
            let members = cluster["members"].as_array().map_or(&[][..], Vec::as_slice);
            let shares = members.iter().filter_map(|member| Some(member["shards"].as_array()?.len()));
            members.len() == self.replicas.len() && shares.min() >= Some(share - self.replicas.len())
        };
        self.admin.wait_until("/api/v1/admin/runtime/cluster", "every replica has its share", all_have).await;
    }

    /// Both administrators' approval of a SKU.
    pub async fn activate(&self, sku: Uuid) {
        self.bind("admin", "platform_operations").await;
        self.bind("admin2", "inventory_owner").await;
        let path = format!("/api/v1/admin/skus/{sku}/activate");
        for approver in [&self.admin, &self.second_admin] {
            approver.post(&path, &json!({ "reason": "a test needs it" })).await.accepted();
        }
    }

    /// Binds a platform role to a person, or finds it bound.
    pub async fn bind(&self, username: &str, role: &str) {
        self.bind_by(&self.admin, username, role).await;
    }

    async fn bind_by(&self, admin: &Client, username: &str, role: &str) {
        let subject = self.identity.person(username).expect("the person can log in").id;
        let binding = json!({ "subject": subject, "role": role, "reason": "a test needs it" });
        admin.post("/api/v1/admin/platform-roles/bindings", &binding).await.ok();
    }

    /// Opens the person's billing account, or finds it, and gives them so much. Everybody here rents from an account of their own.
    pub async fn credit(&self, username: &str, amount_minor: i64) -> Uuid {
        let subject = self.identity.person(username).expect("the person can log in").id;
        let account = json!({ "user_id": subject, "currency": CURRENCY });
        let admin = self.believed_admin().await;
        let account = id_of(&admin.post("/api/v1/admin/billing/accounts", &account).await.ok());
        let credit = json!({ "amount_minor": amount_minor, "currency": CURRENCY, "reason": "a test needs it" });
        admin.post(&format!("/api/v1/admin/billing/accounts/{account}/adjustments"), &credit).await.created();
        account
    }

    /// The administrator, at a replica that serves the API and believes this world's identity provider; a test may give one another.
    async fn believed_admin(&self) -> Client {
        let serves = |index: &usize| self.replicas[*index].pid().is_some() && self.replicas[*index].serves("api");
        for index in (0..self.replicas.len()).filter(serves) {
            let admin = self.at_replica(index, "admin");
            if admin.get("/api/v1/admin/policies").await.status != StatusCode::UNAUTHORIZED {
                return admin;
            }
        }
        panic!("no replica that serves the API believes this world's identity provider")
    }

    /// A node in the inventory without an agent.
    pub async fn register(&mut self, sku: &str) -> OnboardedNode {
        let gpus = self.gpus_of(sku).await;
        let name = format!("{sku}-{}", hex::encode(rand::random::<[u8; 4]>()));
        let node = self.admin.post("/api/v1/admin/nodes", &node_body(&name, sku, gpus)).await.created();
        OnboardedNode::new(id_of(&node), name, self.admin.clone())
    }

    /// A fresh enrollment token of the node, in its bundle.
    pub async fn bundle(&mut self, node: &OnboardedNode) -> BootstrapBundle {
        self.bundle_for(node, &json!({})).await
    }

    pub async fn bundle_for(&mut self, node: &OnboardedNode, body: &Value) -> BootstrapBundle {
        let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
        let issued = self.admin.post(&path, body).await.created();
        let bundle: BootstrapBundle =
            serde_json::from_value(issued["bootstrap_bundle"].clone()).expect("the answer has a bootstrap bundle");
        self.keep_secret("an enrollment token", bundle.enrollment_token.expose());
        bundle
    }

    /// A node of the SKU with an agent and simulated GPUs, active.
    pub async fn node(&mut self, sku: &str) -> OnboardedNode {
        self.node_with(sku, &[]).await
    }

    /// The same, its agent started with further flags.
    pub async fn node_with(&mut self, sku: &str, flags: &[&str]) -> OnboardedNode {
        let node = self.register(sku).await;
        let bundle = self.bundle(&node).await;
        let mut settings = self.agent_settings.clone();
        settings.gpus.count = self.gpus_of(sku).await;
        settings.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let process = AgentProcess::start(&node.name, &settings, &bundle).expect("the agent starts");
        self.agents.insert(node.id, AgentLife { process: Some(process), settings, bundle });
        node.expect_state("active").await;
        node
    }

    /// An agent with simulated GPUs on a bundle that came another way.
    pub fn start_agent(&mut self, name: &str, bundle: &BootstrapBundle) {
        self.start_agent_on(name, bundle, |_| {});
    }

    /// The same, on another machine than the usual.
    pub fn start_agent_on(&mut self, name: &str, bundle: &BootstrapBundle, change: impl FnOnce(&mut AgentSettings)) {
        let mut settings = self.agent_settings.clone();
        change(&mut settings);
        let process = AgentProcess::start(name, &settings, bundle).expect("the agent starts");
        self.agents.insert(bundle.node_id, AgentLife { process: Some(process), settings, bundle: bundle.clone() });
    }

    async fn gpus_of(&mut self, sku: &str) -> u32 {
        self.offer(sku, GPUS).await;
        let offered = self.admin.get(&format!("/api/v1/admin/skus/{}", self.offered[sku])).await.ok();
        u32::try_from(offered["gpu"]["count"].as_u64().expect("a SKU says how many GPUs it has")).unwrap()
    }

    /// Rents `gpus` of the SKU as `user`.
    pub async fn rent(&self, sku: &str, gpus: u32) -> Rented {
        self.rented(json!({ "sku": sku, "region_code": REGION, "gpu_count": gpus })).await
    }

    /// As [`World::rent`], waiting for a node that is about to come back.
    pub async fn rent_when_free(&self, sku: &str, gpus: u32) -> Rented {
        self.rented(json!({ "sku": sku, "region_code": REGION, "gpu_count": gpus, "queue_seconds": 60 })).await
    }

    async fn rented(&self, wanted: Value) -> Rented {
        let created = self.user.post("/api/v1/allocations", &wanted).await.created();
        Rented::new(id_of(&created), self.user.clone())
    }

    /// The folder in which a node's agent keeps everything.
    #[must_use]
    pub fn agent_folder(&self, node: &OnboardedNode) -> PathBuf {
        self.agent_settings.folder.join(&node.name)
    }

    /// What the node's agent logged so far.
    #[must_use]
    pub fn agent_log(&self, node: &OnboardedNode) -> String {
        std::fs::read_to_string(self.logs.join(format!("{}.log", node.name))).unwrap_or_default()
    }

    /// SIGSTOP: the agent is there and says nothing.
    pub fn lose_agent(&self, node: &OnboardedNode) {
        self.signal_agent(node, Signal::SIGSTOP);
    }

    /// SIGCONT: the agent goes on where it was.
    pub fn find_agent(&self, node: &OnboardedNode) {
        self.signal_agent(node, Signal::SIGCONT);
    }

    fn signal_agent(&self, node: &OnboardedNode, signal: Signal) {
        let process = self.agents[&node.id].process.as_ref().expect("the node's agent runs");
        signal_process(process.pid(), signal);
    }

    /// The process of the node's agent.
    #[must_use]
    pub fn agent_pid(&self, node: &OnboardedNode) -> u32 {
        self.agents[&node.id].process.as_ref().expect("the node's agent runs").pid()
    }

    pub fn kill9_agent(&mut self, node: &OnboardedNode) {
        let life = self.agents.get_mut(&node.id).expect("the node has an agent");
        life.process.as_mut().expect("the node's agent runs").kill9();
    }

    /// Starts a killed agent on the state that it had.
    pub fn restart_agent(&mut self, node: &OnboardedNode) {
        let life = self.agents.get_mut(&node.id).expect("the node has an agent");
        life.process.as_mut().expect("the node had an agent").start_again().expect("the agent starts");
    }

    /// Starts the node's agent anew with other flags, as after a repair of the machine.
    pub async fn mend_agent(&mut self, node: &OnboardedNode, flags: &[&str]) {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        self.change_agent(node, |settings| settings.flags = flags).await;
    }

    /// Starts the node's agent anew on a machine that was changed.
    pub async fn change_agent(&mut self, node: &OnboardedNode, change: impl FnOnce(&mut AgentSettings)) {
        let life = self.agents.get_mut(&node.id).expect("the node has an agent");
        if let Some(mut process) = life.process.take() {
            process.stop().await;
        }
        change(&mut life.settings);
        let process = AgentProcess::start(&node.name, &life.settings, &life.bundle).expect("the agent starts");
        life.process = Some(process);
    }

    /// A fresh token for a node that had one, in its recovery bundle, and the command that is to be run with it.
    pub async fn reissue(&mut self, node: &OnboardedNode, body: &Value) -> (BootstrapBundle, String) {
        let path = format!("{}/reissue-enrollment", node.path());
        let issued = self.admin.post(&path, body).await.ok();
        let bundle = &issued["recovery_bundle"];
        let command = bundle["restart_command"].as_str().expect("a recovery bundle has its command").to_owned();
        let bundle: BootstrapBundle = serde_json::from_value(bundle.clone()).expect("it is a bundle");
        self.keep_secret("a reissued enrollment token", bundle.enrollment_token.expose());
        (bundle, command)
    }

    /// Puts another bundle on the node's machine and starts its agent with it, on the state that it has.
    pub async fn install(&mut self, node: &OnboardedNode, bundle: &BootstrapBundle) {
        self.agents.get_mut(&node.id).expect("the node has an agent").bundle = bundle.clone();
        self.change_agent(node, |_| {}).await;
    }

    /// The node's agent has ended for good, and not in order.
    pub fn forget_agent(&mut self, node: &OnboardedNode) {
        self.agents.remove(&node.id);
    }

    /// How the node's agent ended; `None` while it runs.
    pub fn agent_ended(&mut self, node: &OnboardedNode) -> Option<i32> {
        let life = self.agents.get_mut(&node.id).expect("the node has an agent");
        life.process.as_mut().expect("the node had an agent").exit_status()?.code()
    }

    pub fn kill9_replica(&mut self, index: usize) {
        self.replicas[index].kill9();
    }

    /// Starts a killed or stopped replica and waits until it is ready.
    pub async fn restart_replica(&mut self, index: usize) {
        self.replicas[index].start_again().await.expect("the replica starts");
    }

    /// SIGSTOP or SIGCONT to a replica.
    pub fn signal_replica(&self, index: usize, signal: Signal) {
        signal_process(self.replicas[index].pid().expect("the replica runs"), signal);
    }

    /// The index of the replica that owns the shard of this entity.
    pub async fn owner_of(&self, kind: &str, id: Uuid) -> usize {
        let until = Instant::now() + PATIENCE;
        loop {
            let path = format!("/api/v1/admin/runtime/entities/{kind}/{id}");
            let entity = self.admin.get(&path).await.ok();
            let name = find_text(&entity, "member_name");
            let owner = self.replicas.iter().position(|replica| Some(replica.name()) == name.as_deref());
            match owner {
                Some(index) => return index,
                None if Instant::now() > until => panic!("nobody owns {kind} {id}: {entity}"),
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// The lines that a replica has logged, as far as they are structured.
    #[must_use]
    pub fn replica_lines(&self, index: usize) -> Vec<Value> {
        let text = std::fs::read_to_string(self.replicas[index].log()).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// This must not stand in any log.
    pub fn keep_secret(&mut self, what: &str, secret: &str) {
        self.secrets.push((what.to_owned(), secret.to_owned()));
    }

    /// ERROR lines that hold this text are part of the story.
    pub fn expects_error(&mut self, text: &str) {
        self.declared.errors.push(text.to_owned());
    }

    /// This test changes the audit log: that is not to be complained of at the end.
    pub fn expects_a_changed_audit_log(&mut self) {
        self.declared.audit = true;
        // The control plane notices, too.
        self.expects_error("\"invariant\":\"I7\"");
    }

    /// This entity may be parked at the end.
    pub fn expects_parked(&mut self, id: Uuid) {
        self.declared.parked.push(id);
    }
}

/// The body that creates a SKU.
#[must_use]
pub fn sku_body(name: &str, gpus: u32) -> Value {
    json!({
        "name": name,
        "gpu": { "vendor": "NVIDIA", "model": GPU_MODEL, "memory_mib": GPU_MEMORY_MIB, "count": gpus },
        "cpu": { "model": "any", "cores": 2 },
        "memory_mib": 4096,
        "storage_gib": 10,
        "interconnect": "nvlink",
        "allowed_regions": [REGION],
        "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 250 },
    })
}

/// The body that registers a node.
#[must_use]
pub fn node_body(name: &str, sku: &str, gpus: u32) -> Value {
    json!({
        "host": format!("{name}.internal"),
        "port": 22,
        "ssh_username": "gpuaas",
        "ssh_public_key": ssh_public_key(name),
        "sku": sku,
        "gpus_total": gpus,
        "region_code": REGION,
        "onboarding_mode": "manual",
        "probe": false,
    })
}

/// The public half of a fresh Ed25519 pair in OpenSSH's text form (RFC 8709). Its private half is gone.
#[must_use]
pub fn ssh_public_key(comment: &str) -> String {
    use base64::Engine as _;
    let secret: [u8; 32] = rand::random();
    let public = ed25519_dalek::SigningKey::from_bytes(&secret).verifying_key();
    let mut blob = Vec::new();
    for part in [b"ssh-ed25519".as_slice(), public.as_bytes()] {
        blob.extend_from_slice(&u32::try_from(part.len()).unwrap().to_be_bytes());
        blob.extend_from_slice(part);
    }
    format!("ssh-ed25519 {} {comment}", base64::engine::general_purpose::STANDARD.encode(blob))
}

/// The `id` of an answer.
#[must_use]
pub fn id_of(resource: &Value) -> Uuid {
    let id = resource["id"].as_str().unwrap_or_else(|| panic!("no id in {resource}"));
    id.parse().unwrap_or_else(|_| panic!("{id:?} is no UUID"))
}

/// The first text under this name, however deep.
#[must_use]
pub fn find_text(value: &Value, name: &str) -> Option<String> {
    match value {
        Value::Object(fields) => match fields.get(name) {
            Some(Value::String(text)) => Some(text.clone()),
            _ => fields.values().find_map(|inner| find_text(inner, name)),
        },
        Value::Array(items) => items.iter().find_map(|inner| find_text(inner, name)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    }
}

fn signal_process(pid: u32, signal: Signal) {
    kill(Pid::from_raw(pid.cast_signed()), signal).unwrap_or_else(|error| panic!("{signal} to {pid}: {error}"));
}

fn simulated(count: u32) -> SimulatedGpus {
    SimulatedGpus { count, model: GPU_MODEL.to_owned(), memory_mib: GPU_MEMORY_MIB }
}

//! A test cluster: the whole service as real processes, for one test. It has a real Postgres and NATS, replicas of `gpuaas serve`, node
//! agents over mutual TLS and one authority for all servers; only the identity provider runs in the test's own process.
//!
//! ```no_run
//! # async fn story() {
//! use tests::cluster::TestCluster;
//! let mut cluster = TestCluster::builder().replicas(3).start().await;
//! let node = cluster.node("h100").await;
//! let allocation = cluster.rent("h100", 4).await;
//! allocation.expect_state("active").await;
//! cluster.lose_agent(&node);
//! node.expect_state("offline").await;
//! cluster.shutdown().await;
//! # }
//! ```
//!
//! A test calls [`TestCluster::shutdown`] at its end, which fails the test if it finds what the test did not declare (an outbox row, a
//! parked entity, an ERROR in a log, a secret in a log, a GPU held twice).
//!
//! | module | what |
//! | --- | --- |
//! | `builder`, `final_checks` | the settings and the start of a cluster; its checks at the end |
//! | `client`, `console`, `gpuctl`, `notifications`, `terminal` | clients: of the API, in a browser, on a command line, of notifications, of terminals |
//! | `resource_handles`, `payments`, `recovery_attempt` | nodes and allocations; payments; recoveries |
//! | `fake_agent`, `updatable_agent`, `test_machine` | agents without a machine; agents that update themselves; a machine to lose |
//! | `fake_clock`, `fake_log_store`, `fake_maas`, `fake_processor`, `mail_server`, `webhook_receiver` | what is outside of the service |
//! | `backup_machine`, `haproxy`, `ingress_proxy`, `nats_cluster`, `patroni`, `pgbouncer`, `standby` | real servers beside, as `deploy` sets them up |
//! | `crash_sweep`, `db_lock`, `flaky_link` | faults at a certain moment |
//! | `database`, `logs`, `member_bus`, `metrics_page`, `storage_dump` | what a cluster has stored, logged, sent and counted |

// A step of the cluster that fails is a failed test: it panics.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc)]

pub mod backup_machine;
mod builder;
pub mod client;
pub mod console;
pub mod crash_sweep;
mod database;
pub mod db_lock;
pub mod fake_agent;
pub mod fake_clock;
pub mod fake_log_store;
pub mod fake_maas;
pub mod fake_processor;
mod final_checks;
pub mod flaky_link;
pub mod gpuctl;
pub mod haproxy;
pub mod ingress_proxy;
mod logs;
pub mod mail_server;
mod member_bus;
pub mod metrics_page;
pub mod nats_cluster;
pub mod notifications;
pub mod patroni;
pub mod payments;
pub mod pgbouncer;
pub mod recovery_attempt;
pub mod resource_handles;
pub mod standby;
mod storage_dump;
pub mod terminal;
pub mod test_machine;
pub mod updatable_agent;
pub mod webhook_receiver;

pub use builder::TestClusterBuilder;
use client::Client;
use domain::Shard;
use fake_clock::FakeClock;
pub use final_checks::ExpectedFindings;
use local_servers::balancer::Balancer;
use local_servers::identity::IdentityProvider;
use local_servers::nats::NatsServer;
use local_servers::pki::Authority;
use local_servers::test_database::TestDatabase;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use reqwest::StatusCode;
pub use resource_handles::{AllocationHandle, NodeHandle};
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use sqlx::PgPool;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use supervisors::dev::agents::{AgentProcess, AgentSettings, SimulatedGpus};
use supervisors::dev::replica::{Replica, ReplicaSettings};
pub use test_host::simulated_machine::{GPU_MEMORY_MIB, GPU_MODEL};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;

/// The only region of a test cluster.
pub const REGION: &str = "test-1";
/// The default number of GPUs of a node.
pub const GPUS: u32 = 8;

/// The currency of all prices.
pub const CURRENCY: &str = "USD";

/// The initial balance of each user of a cluster, in minor units: more than any test spends.
pub const CREDIT: i64 = 100_000;

const NO_REPLICA: &str = "no replica that serves the API trusts this cluster's identity provider";

/// The timeout of every wait. It is generous, so that a slow machine makes a test slow and does not fail it.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

/// A running test cluster. The order of the fields is the order in which a drop stops them.
pub struct TestCluster {
    agents: BTreeMap<Uuid, ManagedAgent>,
    pub replicas: Vec<Replica>,
    /// The link from each replica to NATS, in the order of the replicas.
    pub nats_links: Vec<flaky_link::FlakyLink>,
    pub public: Balancer,
    pub node_balancer: Balancer,
    pub identity: IdentityProvider,
    pub nats: NatsServer,
    pub postgres: TestDatabase,
    pub authority: Authority,
    /// A pool on the database, as its owner.
    pub pool: PgPool,
    /// The clock of every replica, if the builder asked for one.
    pub service_clock: Option<FakeClock>,
    /// The clock of Postgres, if the builder asked for one.
    pub postgres_clock: Option<FakeClock>,
    /// A client through the load balancer, as an administrator.
    pub admin: Client,
    /// A client through the load balancer, as `admin2`: the status of a SKU changes with two approvals only.
    pub second_admin: Client,
    /// A client through the load balancer, as `user`.
    pub user: Client,
    /// A client through the load balancer, as `user2`.
    pub other_user: Client,
    /// The payment processor, if the builder asked for one.
    payments: Option<payments::LinkedProcessor>,
    agent_settings: AgentSettings,
    /// The settings that every replica is started with.
    pub settings: ReplicaSettings,
    /// The token with which an operator reads a replica's stats.
    pub stats_token: String,
    logs: PathBuf,
    declared: ExpectedFindings,
    /// The secrets that no log may contain, each with its description.
    secrets: Vec<(String, String)>,
    offered: BTreeMap<String, Uuid>,
    ended: bool,
    folder: Option<tempfile::TempDir>,
}

/// A node's agent, running or not, with what is needed to restart it.
struct ManagedAgent {
    process: Option<AgentProcess>,
    settings: AgentSettings,
    bundle: BootstrapBundle,
}

impl TestCluster {
    pub fn builder() -> TestClusterBuilder {
        TestClusterBuilder::default()
    }

    /// A cluster of one replica with the default settings.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// A client of the replica at `index`, as this user.
    #[must_use]
    pub fn at_replica(&self, index: usize, username: &str) -> Client {
        let token = self.identity.token_of(username).expect("the provider signs");
        let base = self.replicas[index].public_url();
        Client::new(self.authority.certificate_path(), &base, Some(token.expose_secret().to_owned()))
    }

    /// A client of the operations address of the replica at `index`.
    #[must_use]
    pub fn operator_at(&self, index: usize) -> Client {
        Client::new(self.authority.certificate_path(), &self.replicas[index].operations_url(), None)
    }

    /// A client without a token.
    #[must_use]
    pub fn anonymous_client(&self) -> Client {
        Client::new(self.authority.certificate_path(), &format!("https://{}", self.public.address()), None)
    }

    /// The base URL that agents connect to, through the load balancer.
    #[must_use]
    pub fn node_url(&self) -> String {
        format!("https://{}", self.node_balancer.address())
    }

    /// Creates and activates a SKU of this name and number of GPUs, unless it exists.
    pub async fn offer_sku(&mut self, name: &str, gpus: u32) -> Uuid {
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

    /// Waits until every replica owns its share of the shards. A shard that changes its owner has empty rate cells (decisions/0006):
    /// a test that counts requests exactly begins after it.
    pub async fn wait_for_balanced_shards(&self) {
        let share = Shard::COUNT / self.replicas.len();
        let all_have = |cluster: &Value| {
            let members = cluster["members"].as_array().map_or(&[][..], Vec::as_slice);
            let shares = members.iter().filter_map(|member| Some(member["shards"].as_array()?.len()));
            members.len() == self.replicas.len() && shares.min() >= Some(share - self.replicas.len())
        };
        self.admin.wait_until("/api/v1/admin/runtime/cluster", "every replica has its share", all_have).await;
    }

    /// Approves the activation of a SKU as both administrators.
    pub async fn activate(&self, sku: Uuid) {
        self.bind("admin", "platform_operations").await;
        self.bind("admin2", "inventory_owner").await;
        let path = format!("/api/v1/admin/skus/{sku}/activate");
        for approver in [&self.admin, &self.second_admin] {
            approver.post(&path, &json!({ "reason": "a test needs it" })).await.accepted();
        }
    }

    /// Binds a platform role to a user, unless it is bound.
    pub async fn bind(&self, username: &str, role: &str) {
        self.bind_by(&self.admin, username, role).await;
    }

    async fn bind_by(&self, admin: &Client, username: &str, role: &str) {
        let subject = self.identity.person(username).expect("the person can log in").id;
        let binding = json!({ "subject": subject, "role": role, "reason": "a test needs it" });
        admin.post("/api/v1/admin/platform-roles/bindings", &binding).await.ok();
    }

    /// Opens the user's billing account, unless it exists, and credits it. Every user here rents from an account of their own.
    pub async fn credit(&self, username: &str, amount_minor: i64) -> Uuid {
        let (_, admin) = self.trusting_replica(0).await.expect(NO_REPLICA);
        self.credit_by(&admin, username, amount_minor).await
    }

    async fn credit_by(&self, admin: &Client, username: &str, amount_minor: i64) -> Uuid {
        let subject = self.identity.person(username).expect("the person can log in").id;
        let account = json!({ "user_id": subject, "currency": CURRENCY });
        let account = id_of(&admin.post("/api/v1/admin/billing/accounts", &account).await.ok());
        let credit = json!({ "amount_minor": amount_minor, "currency": CURRENCY, "reason": "a test needs it" });
        admin.post(&format!("/api/v1/admin/billing/accounts/{account}/adjustments"), &credit).await.created();
        account
    }

    /// The administrator at the first replica from this index on that serves the API and trusts this cluster's identity provider; a test may
    /// configure another.
    async fn trusting_replica(&self, first: usize) -> Option<(usize, Client)> {
        let serves = |index: &usize| self.replicas[*index].pid().is_some() && self.replicas[*index].has_role("api");
        for index in (first..self.replicas.len()).filter(serves) {
            let admin = self.at_replica(index, "admin");
            if admin.get("/api/v1/admin/policies").await.status != StatusCode::UNAUTHORIZED {
                return Some((index, admin));
            }
        }
        None
    }

    /// Registers a node of the SKU, without an agent.
    pub async fn register(&mut self, sku: &str) -> NodeHandle {
        let gpus = self.gpus_of(sku).await;
        let name = format!("{sku}-{}", hex::encode(rand::random::<[u8; 4]>()));
        let node = self.admin.post("/api/v1/admin/nodes", &node_body(&name, sku, gpus)).await.created();
        NodeHandle::new(id_of(&node), name, self.admin.clone())
    }

    /// Issues an enrollment token of the node, in its bootstrap bundle.
    pub async fn bundle(&mut self, node: &NodeHandle) -> BootstrapBundle {
        self.bundle_for(node, &json!({})).await
    }

    /// A registered node with its bundle.
    pub async fn registered(&mut self, sku: &str) -> (NodeHandle, BootstrapBundle) {
        let node = self.register(sku).await;
        let bundle = self.bundle(&node).await;
        (node, bundle)
    }

    pub async fn bundle_for(&mut self, node: &NodeHandle, body: &Value) -> BootstrapBundle {
        let path = format!("/api/v1/admin/nodes/{}/enrollment-token", node.id);
        let issued = self.admin.post(&path, body).await.created();
        let bundle: BootstrapBundle =
            serde_json::from_value(issued["bootstrap_bundle"].clone()).expect("the answer has a bootstrap bundle");
        self.register_secret("an enrollment token", bundle.enrollment_token.expose());
        bundle
    }

    /// An active node of the SKU with an agent and simulated GPUs.
    pub async fn node(&mut self, sku: &str) -> NodeHandle {
        self.node_with(sku, &[]).await
    }

    /// As [`TestCluster::node`], with further flags for the agent.
    pub async fn node_with(&mut self, sku: &str, flags: &[&str]) -> NodeHandle {
        let node = self.register(sku).await;
        let bundle = self.bundle(&node).await;
        let mut settings = self.agent_settings.clone();
        settings.gpus.count = self.gpus_of(sku).await;
        settings.flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let process = AgentProcess::start(&node.name, &settings, &bundle).expect("the agent starts");
        self.agents.insert(node.id, ManagedAgent { process: Some(process), settings, bundle });
        node.expect_state("active").await;
        node
    }

    /// Starts an agent with simulated GPUs on this bundle.
    pub fn start_agent(&mut self, name: &str, bundle: &BootstrapBundle) {
        self.start_agent_on(name, bundle, |_| {});
    }

    /// As [`TestCluster::start_agent`], with other settings than the default.
    pub fn start_agent_on(&mut self, name: &str, bundle: &BootstrapBundle, change: impl FnOnce(&mut AgentSettings)) {
        let mut settings = self.agent_settings.clone();
        change(&mut settings);
        let process = AgentProcess::start(name, &settings, bundle).expect("the agent starts");
        self.agents.insert(bundle.node_id, ManagedAgent { process: Some(process), settings, bundle: bundle.clone() });
    }

    async fn gpus_of(&mut self, sku: &str) -> u32 {
        self.offer_sku(sku, GPUS).await;
        let offered = self.admin.get(&format!("/api/v1/admin/skus/{}", self.offered[sku])).await.ok();
        u32::try_from(offered["gpu"]["count"].as_u64().expect("a SKU says how many GPUs it has")).unwrap()
    }

    /// Rents `gpus` of the SKU as `user`.
    pub async fn rent(&self, sku: &str, gpus: u32) -> AllocationHandle {
        self.allocate(json!({ "sku": sku, "region_code": REGION, "gpu_count": gpus })).await
    }

    /// As [`TestCluster::rent`], and waits until the allocation is active.
    pub async fn rent_active(&self, sku: &str, gpus: u32) -> AllocationHandle {
        let allocation = self.rent(sku, gpus).await;
        allocation.expect_state("active").await;
        allocation
    }

    /// As [`TestCluster::rent`], queued until a node is free. On a busy machine one may be offline until its next heartbeat.
    pub async fn rent_when_free(&self, sku: &str, gpus: u32) -> AllocationHandle {
        self.allocate(json!({ "sku": sku, "region_code": REGION, "gpu_count": gpus, "queue_seconds": 60 })).await
    }

    async fn allocate(&self, wanted: Value) -> AllocationHandle {
        let created = self.user.post("/api/v1/allocations", &wanted).await.created();
        AllocationHandle::new(id_of(&created), self.user.clone())
    }

    /// The folder with all files of a node's agent.
    #[must_use]
    pub fn agent_folder(&self, node: &NodeHandle) -> PathBuf {
        self.agent_settings.folder.join(&node.name)
    }

    /// The log of the node's agent until now.
    #[must_use]
    pub fn agent_log(&self, node: &NodeHandle) -> String {
        std::fs::read_to_string(self.logs.join(format!("{}.log", node.name))).unwrap_or_default()
    }

    /// Sends SIGSTOP: the agent's process exists and sends nothing.
    pub fn lose_agent(&self, node: &NodeHandle) {
        self.signal_agent(node, Signal::SIGSTOP);
    }

    /// Sends SIGCONT: the agent continues.
    pub fn resume_agent(&self, node: &NodeHandle) {
        self.signal_agent(node, Signal::SIGCONT);
    }

    fn signal_agent(&self, node: &NodeHandle, signal: Signal) {
        let process = self.agents[&node.id].process.as_ref().expect("the node's agent runs");
        signal_process(process.pid(), signal);
    }

    /// Starts another agent on a copy of the node's state, under this name. It ends with what is returned.
    #[must_use]
    pub fn start_copy(&self, node: &NodeHandle, name: &str) -> AgentProcess {
        let ManagedAgent { settings, bundle, .. } = &self.agents[&node.id];
        let (from, to) = (self.agent_folder(node), self.agent_settings.folder.join(name));
        let copied = std::process::Command::new("cp").arg("--archive").arg(from).arg(to).status();
        assert!(copied.is_ok_and(|status| status.success()), "the agent's folder cannot be copied");
        AgentProcess::start(name, settings, bundle).expect("the copy starts")
    }

    /// The process id of the node's agent.
    #[must_use]
    pub fn agent_pid(&self, node: &NodeHandle) -> u32 {
        self.agents[&node.id].process.as_ref().expect("the node's agent runs").pid()
    }

    pub fn kill9_agent(&mut self, node: &NodeHandle) {
        let agent = self.agents.get_mut(&node.id).expect("the node has an agent");
        agent.process.as_mut().expect("the node's agent runs").kill9();
    }

    /// Restarts a killed agent on the state that it had.
    pub fn restart_agent(&mut self, node: &NodeHandle) {
        let agent = self.agents.get_mut(&node.id).expect("the node has an agent");
        agent.process.as_mut().expect("the node had an agent").start_again().expect("the agent starts");
    }

    /// Restarts the node's agent with other flags, as after a repair of the machine.
    pub async fn restart_agent_with_flags(&mut self, node: &NodeHandle, flags: &[&str]) {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        self.reconfigure_agent(node, |settings| settings.flags = flags).await;
    }

    /// Restarts the node's agent with changed settings.
    pub async fn reconfigure_agent(&mut self, node: &NodeHandle, change: impl FnOnce(&mut AgentSettings)) {
        let agent = self.agents.get_mut(&node.id).expect("the node has an agent");
        if let Some(mut process) = agent.process.take() {
            process.stop().await;
        }
        change(&mut agent.settings);
        let process = AgentProcess::start(&node.name, &agent.settings, &agent.bundle).expect("the agent starts");
        agent.process = Some(process);
    }

    /// Reissues the node's enrollment token. Returns its recovery bundle and the restart command.
    pub async fn reissue(&mut self, node: &NodeHandle, body: &Value) -> (BootstrapBundle, String) {
        let path = format!("{}/reissue-enrollment", node.path());
        let issued = self.admin.post(&path, body).await.ok();
        let bundle = &issued["recovery_bundle"];
        let command = bundle["restart_command"].as_str().expect("a recovery bundle has its command").to_owned();
        let bundle: BootstrapBundle = serde_json::from_value(bundle.clone()).expect("it is a bundle");
        self.register_secret("a reissued enrollment token", bundle.enrollment_token.expose());
        (bundle, command)
    }

    /// Installs another bundle on the node and restarts its agent with it, on the state that it has.
    pub async fn install(&mut self, node: &NodeHandle, bundle: &BootstrapBundle) {
        self.agents.get_mut(&node.id).expect("the node has an agent").bundle = bundle.clone();
        self.reconfigure_agent(node, |_| {}).await;
    }

    /// Drops the node's agent, whose process has failed for good, from the final checks.
    pub fn forget_agent(&mut self, node: &NodeHandle) {
        self.agents.remove(&node.id);
    }

    /// The exit code of the node's agent; `None` while it runs.
    pub fn agent_exit_code(&mut self, node: &NodeHandle) -> Option<i32> {
        let agent = self.agents.get_mut(&node.id).expect("the node has an agent");
        agent.process.as_mut().expect("the node had an agent").exit_status()?.code()
    }

    pub fn kill9_replica(&mut self, index: usize) {
        self.replicas[index].kill9();
    }

    /// Restarts a killed or stopped replica and waits until it is ready.
    pub async fn restart_replica(&mut self, index: usize) {
        self.replicas[index].start_again().await.expect("the replica starts");
    }

    /// Sends SIGSTOP or SIGCONT to a replica.
    pub fn signal_replica(&self, index: usize, signal: Signal) {
        signal_process(self.replicas[index].pid().expect("the replica runs"), signal);
    }

    /// The index of the replica that owns the shard of this entity.
    pub async fn owner_of(&self, kind: &str, id: Uuid) -> usize {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let path = format!("/api/v1/admin/runtime/entities/{kind}/{id}");
            let entity = self.admin.get(&path).await.ok();
            let name = find_text(&entity, "member_name");
            let owner = self.replicas.iter().position(|replica| Some(replica.name()) == name.as_deref());
            match owner {
                Some(index) => return index,
                None if Instant::now() > until => panic!("no replica owns {kind} {id}: {entity}"),
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// The structured log lines of a replica.
    #[must_use]
    pub fn replica_lines(&self, index: usize) -> Vec<Value> {
        let text = std::fs::read_to_string(self.replicas[index].log()).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Registers a secret that no log may contain.
    pub fn register_secret(&mut self, what: &str, secret: &str) {
        self.secrets.push((what.to_owned(), secret.to_owned()));
    }

    /// Allows ERROR lines that contain this text.
    pub fn allow_error(&mut self, text: &str) {
        self.declared.errors.push(text.to_owned());
    }

    /// Allows changes of the audit log, which the final checks otherwise report.
    pub fn allow_changed_audit_log(&mut self) {
        self.declared.audit = true;
        // The control plane reports them as well.
        self.allow_error("\"invariant\":\"I7\"");
    }

    /// Allows this entity to be parked at the end.
    pub fn allow_parked(&mut self, id: Uuid) {
        self.declared.parked.push(id);
    }
}

/// The body of the request that creates a SKU.
#[must_use]
pub fn sku_body(name: &str, gpus: u32) -> Value {
    json!({
        "name": name,
        "gpu": { "vendor": "NVIDIA", "model": GPU_MODEL, "memory_mib": GPU_MEMORY_MIB, "count": gpus },
        // What any machine has that agents run on in tests.
        "cpu": { "model": "any", "cores": 1 },
        "memory_mib": 512,
        "storage_gib": 1,
        "interconnect": "nvlink",
        "allowed_regions": [REGION],
        "price": { "currency": CURRENCY, "amount_minor_per_gpu_hour": 250 },
    })
}

/// The body of the request that registers a node.
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

/// The public key of a new Ed25519 pair in OpenSSH's text form (RFC 8709). Its private key is dropped.
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

/// The `id` of a resource.
#[must_use]
pub fn id_of(resource: &Value) -> Uuid {
    let id = resource["id"].as_str().unwrap_or_else(|| panic!("no id in {resource}"));
    id.parse().unwrap_or_else(|_| panic!("{id:?} is no UUID"))
}

/// The first text with this field name, at any depth.
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

//! The node API as it runs: a TLS listener, the actors behind it, and a store.

use super::agent::Agent;
use crate::agent_package::AgentPackage;
use crate::app_state::{Addresses, AppState, Parts};
use crate::auth::jwks::{Jwks, JwksSettings};
use crate::auth::opaque_token::{TokenPurpose, mint};
use crate::auth::{Authenticator, TokenRules};
use crate::http::long_poll::LongPolls;
use crate::outbound::node_probe::{Probe, ProbeTargets, SystemResolver};
use crate::outbound::package_registry::PackageRegistry;
use crate::testing::{LocalhostCertificate, install_crypto};
use crate::tls::connections::Connections;
use crate::tls::forwarded_client_certificate::Forwarding;
use crate::tls::proxies::Proxies;
use crate::tls::serve::{ListenerLimits, TlsServer};
use crate::tls::tickets::SharedTickets;
use crate::tls::{ServerTls, server_config};
use crate::trust::current_keys::{Keys, MemberKeys, NodeAuthorities, ServiceKeys, TaskKeys};
use crate::trust::node_ca::NodeCa;
use actors::AskResult;
use actors::shell_dependencies::{Effects, Environment as _, Store, Term};
use arc_swap::ArcSwap;
use chrono::{TimeDelta, Utc};
use domain::authz::TokenRole;
use domain::node::{Command, Instruction, Node, Reply, Request};
use domain::policy::{PolicyKey, PolicyValue};
use domain::{AllocationId, Effect, NodeId, Principal, SkuId, Timestamp, TokenId};
use ed25519_dalek::SigningKey;
use ipnet::IpNet;
use local_servers::test_database::TestDatabase;
use persistence::pool::PoolConfig;
use persistence::{Reads, Secrets};
use reqwest::Method;
use rustls::ClientConfig;
use secrecy::{ExposeSecret, SecretSlice};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use test_host::simulated_machine::{CertificateRequest, GPU_MEMORY_MIB, SimulatedMachine, client_tls};
use test_host::{CapturedLog, MemoryStore, PgMember, TestEnvironment, TestHost, first_terms, registration, system};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use wire::task::{TaskPayload, open};
use wire::{VerifierSet, Verifiers};

pub(super) struct NodeApiHarness {
    pub(super) app: AppState,
    pub(super) address: SocketAddr,
    /// While false, removed nodes keep their connections: then the machine's refusal shows on them.
    pub(super) closes: Arc<AtomicBool>,
    /// The store, where it is not Postgres.
    pub(super) memory: Arc<MemoryStore>,
    environment: Arc<TestEnvironment>,
    server_ca_pem: String,
    tokens: Mutex<Vec<String>>,
    _serving: tokio_util::sync::DropGuard,
    _postgres: Option<TestDatabase>,
}

/// A response.
#[derive(Debug)]
pub(super) struct TestResponse {
    pub(super) status: u16,
    pub(super) headers: reqwest::header::HeaderMap,
    /// Null where there was none.
    pub(super) body: Value,
}

impl TestResponse {
    /// Asserts a refusal and gives its details.
    #[track_caller]
    pub(super) fn refused(&self, status: u16, code: &str) -> &Value {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{}", self.body);
        assert_eq!(self.body["details"]["service"], "node-api");
        assert!(self.headers.contains_key("x-correlation-id"));
        assert!(!self.body["message"].as_str().unwrap().is_empty());
        &self.body["details"]
    }

    /// Asserts that the node is not authenticated, and for what reason.
    #[track_caller]
    pub(super) fn is_refused_as(&self, reason: &str) -> &Value {
        let details = self.refused(401, "invalid_node_identity");
        assert_eq!(details["reason"], reason);
        details
    }

    #[track_caller]
    pub(super) fn is(&self, status: u16) -> &Value {
        assert_eq!(self.status, status, "{}", self.body);
        assert_eq!(self.headers["cache-control"], "no-store");
        &self.body
    }
}

impl NodeApiHarness {
    pub(super) async fn new() -> Self {
        Self::in_memory(None, AgentPackage::default()).await
    }

    /// A harness, and the agent of a node that accepts allocations.
    pub(super) async fn with_active_node() -> (Self, Agent) {
        let harness = Self::new().await;
        let agent = harness.active().await;
        (harness, agent)
    }

    /// Behind proxies at `networks`. All clients connect from 127.0.0.1.
    pub(super) async fn behind(forwarding: Forwarding, networks: &[&str]) -> Self {
        let networks = networks.iter().map(|network| network.parse().unwrap()).collect();
        Self::in_memory(Some((forwarding, networks)), AgentPackage::default()).await
    }

    /// With this registry of the agent's package.
    pub(super) async fn relaying(registry: PackageRegistry) -> Self {
        Self::in_memory(None, AgentPackage { registry: Some(registry), ..AgentPackage::default() }).await
    }

    async fn in_memory(proxies: Option<(Forwarding, Vec<IpNet>)>, agent_package: AgentPackage) -> Self {
        let unreachable = PoolConfig::new("postgres://nobody@127.0.0.1:1/none".into(), None);
        let pool = persistence::pool::open(&unreachable).unwrap();
        let memory = Arc::new(MemoryStore::default());
        let store_handles = (Reads::new(pool.clone()), Secrets::new(pool, crate::testing::key_ring()));
        let store = (Arc::clone(&memory) as Arc<dyn Store>, first_terms().collect());
        let mut harness = Self::over(store, store_handles, None, proxies, agent_package).await;
        harness.memory = memory;
        harness
    }

    pub(super) async fn on_postgres() -> Self {
        let postgres = TestDatabase::fresh().await;
        let pool = persistence::pool::open(&postgres.pool_config()).unwrap();
        let member = PgMember::start(&pool).await;
        let (reads, secrets) = (Reads::new(pool.clone()), Secrets::new(pool, crate::testing::key_ring()));
        let (store, terms) = (Arc::new(member.store(&reads)), member.terms().collect());
        member.drop_published();
        Self::over((store, terms), (reads, secrets), Some(postgres), None, AgentPackage::default()).await
    }

    async fn over(
        (store, terms): (Arc<dyn Store>, Vec<Term>),
        (reads, secrets): (Reads, Secrets),
        postgres: Option<TestDatabase>,
        proxies: Option<(Forwarding, Vec<IpNet>)>,
        agent_package: AgentPackage,
    ) -> Self {
        install_crypto();
        let _ = CapturedLog::of_process();
        let (polls, connections, closes) =
            (LongPolls::default(), Connections::default(), Arc::new(AtomicBool::new(true)));
        let effects =
            ImmediateEffects { polls: polls.clone(), connections: connections.clone(), closes: Arc::clone(&closes) };
        let host = TestHost::start(store, terms, Arc::default(), Arc::new(effects)).await;
        let domain = crate::testing::trust_domain();
        let now = Utc::now();
        let node_ca = NodeCa::create(domain.clone(), now - TimeDelta::days(1), now + TimeDelta::days(365)).unwrap().ca;
        let keys = Keys {
            task: TaskKeys::with_first_key(new_key(), now).unwrap(),
            node: NodeAuthorities::with_first_key(node_ca, now).unwrap(),
            service: ServiceKeys::with_first_key(new_key(), now),
            member: MemberKeys::with_first_key(new_key(), now),
        };
        let authorities_pem = keys.node.bundle_pem();
        let tls = LocalhostCertificate::issue();
        let trust = crate::testing::trust(keys, secrets, tls.authority.clone());
        let jwks = Jwks::new(JwksSettings::new("http://127.0.0.1:1/realms/none")).unwrap();
        let authenticator = Authenticator::new(TokenRules::new("http://127.0.0.1:1/realms/none", "gpuaas"), jwks);
        let config = server_config(&ServerTls {
            certificate_chain_pem: &tls.chain,
            key_pem: &tls.key,
            client_authorities_pem: Some(&authorities_pem),
            tickets: Some(Arc::new(SharedTickets::new(SecretSlice::from(vec![9; 32])).unwrap())),
        })
        .unwrap();
        let proxies = proxies
            .map(|(forwarding, networks)| Arc::new(Proxies::new(forwarding, networks, &authorities_pem).unwrap()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = AppState::new(Parts {
            probe: Probe::new(ProbeTargets { allowed: Vec::new() }, Arc::new(SystemResolver), Duration::from_secs(1)),
            polls,
            connections: connections.clone(),
            addresses: Addresses {
                public_url: "https://api.gpu.example".into(),
                node_url: format!("https://localhost:{}", address.port()),
                terminal_url: "wss://api.gpu.example/ws/v1/terminal".into(),
                terminal_origins: Vec::new(),
            },
            agent_package,
            ..crate::testing::parts(&host, reads, authenticator, trust)
        });
        let stop = CancellationToken::new();
        let server = TlsServer {
            tls: Arc::new(ArcSwap::from_pointee(config)),
            router: crate::node_api::router(app.clone()),
            limits: ListenerLimits { drain: Duration::from_millis(100), ..ListenerLimits::default() },
            connections,
            trust_domain: Some(domain),
            proxies,
            ingress: Arc::default(),
            strict_transport: None,
        };
        tokio::spawn(server.serve(listener, stop.clone()));
        Self {
            app,
            address,
            closes,
            memory: Arc::default(),
            environment: host.environment,
            server_ca_pem: tls.authority,
            tokens: Mutex::default(),
            _serving: stop.drop_guard(),
            _postgres: postgres,
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.environment.now()
    }

    /// Moves the state machines' clock. TLS uses the real one.
    pub(super) fn advance(&self, by: TimeDelta) {
        self.environment.advance(by);
    }

    pub(super) fn set_policy(&self, key: PolicyKey, value: i64) {
        self.environment.set_policy(key, PolicyValue::Int(value));
    }

    /// Waits until polls of so many nodes wait.
    pub(super) async fn until_polled(&self, nodes: usize) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.app.polls.nodes() < nodes {
            let waiting = self.app.polls.nodes();
            assert!(Instant::now() < end, "polls of {waiting} nodes wait after 60 s, and not of {nodes}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    // ---- actions of administrators and of the saga

    pub(super) async fn ask(&self, by: &Principal, node_id: Uuid, command: impl Into<Command>) -> AskResult<Node> {
        test_host::ask::<Node>(&self.app.directory, self.environment.as_ref(), by, node_id, command).await
    }

    pub(super) async fn admin(&self, node_id: Uuid, command: impl Into<Command>) -> Reply {
        self.ask(&admin(), node_id, command).await.unwrap().reply
    }

    pub(super) async fn tell(&self, node_id: Uuid, command: impl Into<Command>) -> Reply {
        self.ask(&system(), node_id, command).await.unwrap().reply
    }

    /// The node's committed state.
    pub(super) async fn node(&self, node_id: Uuid) -> Node {
        let revise = Request::Revise {
            host: None,
            port: None,
            ssh_username: None,
            probe: None,
            metadata: domain::metadata::MetadataPatch::default(),
            if_version: None,
        };
        match self.admin(node_id, revise).await {
            Reply::Node { node } => *node,
            other => panic!("{other:?}"),
        }
    }

    /// A node with two H100s in the inventory.
    pub(super) async fn register(&self) -> Uuid {
        let node_id = Uuid::now_v7();
        let mut registration = registration(SkuId(Uuid::nil()), 2);
        (registration.host, registration.region_code) = ("10.0.0.1".to_owned(), "eu-1".to_owned());
        (registration.sku.gpu_memory_mib, registration.sku.allowed_regions) = (GPU_MEMORY_MIB, vec!["eu-1".to_owned()]);
        self.admin(node_id, Request::Register { registration: Box::new(registration), probe: None, machine: None })
            .await;
        node_id
    }

    pub(super) async fn token(&self, node_id: Uuid, ttl_seconds: Option<u32>) -> String {
        let minted = mint(TokenPurpose::Enrollment);
        let token = minted.token.expose_secret().to_owned();
        self.tokens.lock().unwrap().push(token.clone());
        let token_sha256 = minted.hash.to_bytes();
        self.admin(node_id, Request::IssueToken { token_id: TokenId(Uuid::now_v7()), token_sha256, ttl_seconds }).await;
        token
    }

    /// A node whose agent has its certificate and has not polled.
    pub(super) async fn enrolled(&self) -> Agent {
        let node_id = self.register().await;
        let token = self.token(node_id, None).await;
        let (machine, request) = (SimulatedMachine::new(node_id, 2), CertificateRequest::generate());
        let answer = self.enroll(node_id, &machine.enrollment_body(&token, &request.csr_pem)).await;
        let certificate = answer.is(201)["certificate_pem"].as_str().unwrap();
        Agent::new(self, machine, certificate, &request.key)
    }

    /// A node that accepts allocations.
    pub(super) async fn active(&self) -> Agent {
        let agent = self.enrolled().await;
        let poll = Request::Poll { serial: agent.serial.clone() };
        self.ask(&Principal::Node(NodeId(agent.node_id)), agent.node_id, poll).await.unwrap();
        assert_eq!(self.node(agent.node_id).await.lifecycle.phase, domain::node::Phase::Active);
        agent
    }

    /// Orders a tenant of one GPU.
    pub(super) async fn rent(&self, agent: &Agent) -> AllocationId {
        let allocation_id = AllocationId(Uuid::now_v7());
        self.tell(
            agent.node_id,
            Instruction::Reserve { allocation_id, gpu_count: 1, keys: Vec::new(), revision: 0, reimages: false },
        )
        .await;
        let deadline_at = self.now() + TimeDelta::minutes(10);
        self.tell(agent.node_id, Instruction::Provision { allocation_id, deadline_at }).await;
        allocation_id
    }

    pub(super) async fn clean(&self, agent: &Agent, allocation_id: AllocationId, attempt: u32) {
        let deadline_at = self.now() + TimeDelta::minutes(10);
        self.tell(agent.node_id, Instruction::Clean { allocation_id, attempt, deadline_at }).await;
    }

    /// The next task, opened as an agent opens it.
    pub(super) async fn task(&self, agent: &Agent) -> TaskPayload {
        self.opened(&agent.wait(self, 5).await)
    }

    #[track_caller]
    pub(super) fn opened(&self, answer: &TestResponse) -> TaskPayload {
        let envelope = serde_json::from_value(answer.is(200).clone()).unwrap();
        let keys = VerifierSet::from_env_value(&self.app.trust.bundled_verifier_keys()).unwrap();
        open(&envelope, &Verifiers::trusting(keys).unwrap()).unwrap()
    }

    // ---- HTTP

    pub(super) fn tls(&self, identity: Option<(&str, &str)>) -> Arc<ClientConfig> {
        Arc::new(client_tls(&self.server_ca_pem, identity))
    }

    pub(super) fn client(&self, tls: &Arc<ClientConfig>) -> reqwest::Client {
        reqwest::Client::builder()
            .tls_backend_preconfigured(ClientConfig::clone(tls))
            .resolve("localhost", self.address)
            .no_proxy()
            .build()
            .unwrap()
    }

    pub(super) async fn anonymous(&self, method: Method, path: &str, body: Option<Vec<u8>>) -> TestResponse {
        self.send(&self.client(&self.tls(None)), method, path, body).await
    }

    pub(super) async fn enroll(&self, node_id: Uuid, body: &Value) -> TestResponse {
        let path = format!("/internal/v1/nodes/{node_id}/enroll");
        self.anonymous(Method::POST, &path, Some(body.to_string().into_bytes())).await
    }

    pub(super) async fn send(
        &self,
        client: &reqwest::Client,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> TestResponse {
        self.send_with(client, method, path, &[], body).await
    }

    pub(super) async fn send_with(
        &self,
        client: &reqwest::Client,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<Vec<u8>>,
    ) -> TestResponse {
        let mut request = client.request(method, format!("https://localhost:{}{path}", self.address.port()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let text = response.text().await.unwrap();
        self.assert_no_token_in(&text);
        let body = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() };
        TestResponse { status, headers, body }
    }

    fn assert_no_token_in(&self, text: &str) {
        for token in self.tokens.lock().unwrap().iter() {
            let secret = token.strip_prefix(TokenPurpose::Enrollment.prefix()).unwrap();
            assert!(!text.contains(token.as_str()) && !text.contains(secret), "a token is in: {text}");
        }
    }
}

/// In every test: no token is ever in a log.
impl Drop for NodeApiHarness {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_no_token_in(&CapturedLog::of_process().text());
        }
    }
}

pub(super) fn admin() -> Principal {
    test_host::caller("root", TokenRole::Admin)
}

fn new_key() -> SigningKey {
    SigningKey::from_bytes(&rand::random())
}

struct ImmediateEffects {
    polls: LongPolls,
    connections: Connections,
    closes: Arc<AtomicBool>,
}

impl Effects for ImmediateEffects {
    fn perform(&self, effect: Effect) {
        match effect {
            Effect::WakeNode(node) => self.polls.wake(node),
            Effect::CloseNode(node) if self.closes.load(Ordering::SeqCst) => {
                // Behind a proxy it has no connection of its own.
                if self.connections.close_node(node.0) == 0 {
                    self.polls.wake(node);
                }
            }
            Effect::CloseNode(_) | Effect::WakeTerminal(_) | Effect::ReadPolicy | Effect::ReadKeys => {}
        }
    }
}

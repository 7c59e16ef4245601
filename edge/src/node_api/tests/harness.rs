//! The node API as it runs: a TLS listener, the actors behind it, and a store.

use super::agent::{Agent, Applicant, enrollment_of, recovery_key};
use super::store::MemoryStore;
use crate::auth::jwks::{Jwks, JwksSettings};
use crate::auth::platform_roles::PlatformRoleCounters;
use crate::auth::token::{TokenPurpose, mint};
use crate::auth::{Authenticator, TokenRules};
use crate::http::long_poll::LongPolls;
use crate::limits::connection_quota::ConnectionQuotas;
use crate::limits::rate_limit::RateLimiter;
use crate::outbound::node_probe::{Probe, ProbeTargets, SystemResolver};
use crate::services::operator_view::{
    ClusterReport, EntityNode, Readiness, RestartOutcome, Runtime, RuntimeError, Stats, Tree, TreeFilter, WorkerNode,
};
use crate::services::{Addresses, Parts, Services, Trust};
use crate::testing::install_crypto;
use crate::testing::postgres::PgTestStore;
use crate::tls::connections::Connections;
use crate::tls::forwarded::Forwarding;
use crate::tls::proxies::Proxies;
use crate::tls::serve::{ListenerLimits, TlsServer};
use crate::tls::tickets::SharedTickets;
use crate::tls::{ServerTls, server_config};
use crate::trust::keys_in_force::{Keys, KeysInForce, MemberKeys, NodeAuthorities, ServiceKeys, TaskKeys};
use crate::trust::node_ca::NodeCa;
use crate::trust::node_certificate::TrustDomain;
use actors::interfaces::{Effects, Environment as Clock, Remote, RemoteError, Store, Term};
use actors::{AskResult, CommandContext, Directory, Host, HostConfig};
use arc_swap::ArcSwap;
use chrono::{TimeDelta, Utc};
use domain::authz::{CallerIdentity, TokenRole, authorize};
use domain::commit::Epoch;
use domain::machine::Command as _;
use domain::node::{Command, Node, OnboardingMode, PromisedHardware, Registration, Reply};
use domain::policy::{PolicyBook, PolicyKey, PolicyScope, PolicyValue};
use domain::runtime::RuntimePart;
use domain::{AllocationId, Effect, EntityRef, MemberId, NodeId, Principal, Shard, SkuId, Timestamp, TokenId};
use futures::FutureExt;
use futures::future::BoxFuture;
use ipnet::IpNet;
use local_servers::test_database::TestDatabase;
use persistence::committer::CommitterMetrics;
use persistence::pool::PoolConfig;
use persistence::{Cluster, Committer, CommitterConfig, Reads, Secrets};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use reqwest::Method;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use secrecy::{ExposeSecret, SecretSlice};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use wire::task::{TaskPayload, open};
use wire::{VerifierSet, Verifiers};

pub(super) struct NodeApiHarness {
    pub(super) services: Services,
    pub(super) address: SocketAddr,
    /// While false, removed nodes keep their connections: then the machine's refusal shows on them.
    pub(super) closes: Arc<AtomicBool>,
    /// The store, where it is not Postgres.
    pub(super) memory: Arc<MemoryStore>,
    clock: Arc<Watch>,
    server_ca: CertificateDer<'static>,
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
        Self::in_memory(None).await
    }

    /// Behind proxies at `networks`. All clients connect from 127.0.0.1.
    pub(super) async fn behind(forwarding: Forwarding, networks: &[&str]) -> Self {
        let networks = networks.iter().map(|network| network.parse().unwrap()).collect();
        Self::in_memory(Some((forwarding, networks))).await
    }

    async fn in_memory(proxies: Option<(Forwarding, Vec<IpNet>)>) -> Self {
        let unreachable = PoolConfig::new("postgres://nobody@127.0.0.1:1/none".into(), None);
        let pool = persistence::pool::open(&unreachable).unwrap();
        let terms = Shard::all().map(|shard| Term { shard, epoch: Epoch(1) }).collect();
        let memory = Arc::new(MemoryStore::default());
        let store_handles = (Reads::new(pool.clone()), Secrets::new(pool, crate::testing::key_ring()));
        let mut harness = Self::over(Arc::clone(&memory) as Arc<dyn Store>, store_handles, terms, None, proxies).await;
        harness.memory = memory;
        harness
    }

    pub(super) async fn on_postgres() -> Self {
        let postgres = TestDatabase::fresh().await;
        let pool = persistence::pool::open(&postgres.pool_config()).unwrap();
        let (cluster, me) = (Cluster::new(pool.clone()), MemberId(Uuid::now_v7()));
        let seen = cluster.shards().await.unwrap();
        let won = cluster.take_over(me, &seen, &std::collections::BTreeMap::new()).await.unwrap();
        let terms = won.into_iter().map(|(shard, epoch)| Term { shard, epoch }).collect();
        let metrics = CommitterMetrics::register(&prometheus::Registry::new()).unwrap();
        let (publish, mut published) = tokio::sync::mpsc::channel(1000);
        tokio::spawn(async move { while published.recv().await.is_some() {} });
        let committer = Committer::start(&pool, CommitterConfig::new(me), metrics, publish);
        let (reads, secrets) = (Reads::new(pool.clone()), Secrets::new(pool, crate::testing::key_ring()));
        let store = Arc::new(PgTestStore { committer, reads: reads.clone() });
        Self::over(store, (reads, secrets), terms, Some(postgres), None).await
    }

    async fn over(
        store: Arc<dyn Store>,
        (reads, secrets): (Reads, Secrets),
        terms: Vec<Term>,
        postgres: Option<TestDatabase>,
        proxies: Option<(Forwarding, Vec<IpNet>)>,
    ) -> Self {
        install_crypto();
        logs();
        let (polls, connections, closes) =
            (LongPolls::default(), Connections::default(), Arc::new(AtomicBool::new(true)));
        let clock = Arc::new(Watch::default());
        let effects =
            ImmediateEffects { polls: polls.clone(), connections: connections.clone(), closes: Arc::clone(&closes) };
        let host = Host::new(HostConfig::default(), store, Arc::new(effects), Arc::clone(&clock) as Arc<dyn Clock>);
        for term in terms {
            host.open(term, None).await.unwrap();
        }
        let domain = TrustDomain::parse("gpu.example").unwrap();
        let now = Utc::now();
        let node_ca = NodeCa::create(domain.clone(), now - TimeDelta::days(1), now + TimeDelta::days(365)).unwrap().ca;
        let keys = KeysInForce::new(Keys {
            task: TaskKeys::with_first_key(recovery_key(), now).unwrap(),
            node: NodeAuthorities::with_first_key(node_ca, now).unwrap(),
            service: ServiceKeys::with_first_key(recovery_key(), now),
            member: MemberKeys::with_first_key(recovery_key(), now),
        });
        let tls = Tls::make();
        let jwks = Jwks::new(JwksSettings::new("http://127.0.0.1:1/realms/none")).unwrap();
        let authenticator = Authenticator::new(TokenRules::new("http://127.0.0.1:1/realms/none", "gpuaas"), jwks);
        let config = server_config(&ServerTls {
            certificate_chain_pem: &tls.chain,
            key_pem: &tls.key,
            client_authorities_pem: Some(&keys.load().node.bundle_pem()),
            tickets: Some(Arc::new(SharedTickets::new(SecretSlice::from(vec![9; 32])).unwrap())),
        })
        .unwrap();
        let proxies = proxies.map(|(forwarding, networks)| {
            Arc::new(Proxies::new(forwarding, networks, &keys.load().node.bundle_pem()).unwrap())
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let directory = Directory::new(host, Arc::new(Alone));
        let services = Services::new(Parts {
            delivery: crate::testing::delivery(),
            connection_quotas: ConnectionQuotas::new(directory.clone()),
            limiter: RateLimiter::register(directory.clone(), &prometheus::Registry::new()).unwrap(),
            directory,
            reads,
            environment: Arc::clone(&clock) as Arc<dyn Clock>,
            runtime: Arc::new(NoRuntime),
            authenticator: Arc::new(authenticator),
            jwks_refresh_token: None,
            probe: Probe::new(ProbeTargets { allowed: Vec::new() }, Arc::new(SystemResolver), Duration::from_secs(1)),
            polls,
            terminals: crate::testing::terminals(),
            notifications: crate::testing::notifications(),
            connections: connections.clone(),
            metrics: crate::testing::metrics(),
            sampling: telemetry::Sampling::NEVER,
            stats_token: None,
            platform_roles: PlatformRoleCounters::register(&prometheus::Registry::new()).unwrap(),
            trust: Trust {
                domain: domain.clone(),
                keys,
                secrets,
                bootstrap_verifier_keys: Vec::new(),
                api_ca_pem: tls.authority_pem,
                nonces: crate::trust::recovery_nonce::Nonces::new(&secrecy::SecretSlice::from(vec![9; 32])).unwrap(),
                at_rest: crate::testing::key_ring(),
            },
            addresses: Addresses {
                public_url: "https://api.gpu.example".into(),
                node_url: format!("https://localhost:{}", address.port()),
                terminal_url: "wss://api.gpu.example/ws/v1/terminal".into(),
                terminal_origins: Vec::new(),
            },
            payments: None,
            package: wire::bundle::Package::default(),
            log_store: None,
            stopping: CancellationToken::new(),
        });
        let stop = CancellationToken::new();
        let server = TlsServer {
            tls: Arc::new(ArcSwap::from_pointee(config)),
            router: crate::node_api::router(services.clone()),
            limits: ListenerLimits { drain: Duration::from_millis(100), ..ListenerLimits::default() },
            connections,
            trust_domain: Some(domain),
            proxies,
            ingress: Arc::default(),
        };
        tokio::spawn(server.serve(listener, stop.clone()));
        Self {
            services,
            address,
            closes,
            memory: Arc::default(),
            clock,
            server_ca: tls.authority,
            tokens: Mutex::default(),
            _serving: stop.drop_guard(),
            _postgres: postgres,
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Moves the state machines' clock. TLS uses the real one.
    pub(super) fn advance(&self, by: TimeDelta) {
        self.clock.ahead_ms.fetch_add(by.num_milliseconds(), Ordering::SeqCst);
    }

    pub(super) fn set_policy(&self, key: PolicyKey, value: i64) {
        let mut book = PolicyBook::clone(&self.clock.policy.load());
        book.set(key, PolicyScope::Global, Timestamp::UNIX_EPOCH, PolicyValue::Int(value)).unwrap();
        self.clock.policy.store(Arc::new(book));
    }

    // ---- actions of administrators and of the saga

    pub(super) async fn ask(&self, by: &Principal, node_id: Uuid, command: Command) -> AskResult<Node> {
        let permit = authorize(by, command.action()).unwrap();
        let asked = CommandContext::new(&permit, "test", self.now() + TimeDelta::seconds(10));
        self.services.directory.ask::<Node>(&permit, node_id, command, asked).await
    }

    pub(super) async fn admin(&self, node_id: Uuid, command: Command) -> Reply {
        self.ask(&admin(), node_id, command).await.unwrap().reply
    }

    pub(super) async fn tell(&self, node_id: Uuid, command: Command) -> Reply {
        self.ask(&Principal::system("test"), node_id, command).await.unwrap().reply
    }

    /// The node's committed state.
    pub(super) async fn node(&self, node_id: Uuid) -> Node {
        let revise = Command::Revise {
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
        let registration = Registration {
            host: "10.0.0.1".into(),
            port: 22,
            ssh_username: "root".into(),
            ssh_public_key: "ssh-ed25519 AAAA".into(),
            ssh_key_fingerprint: "SHA256:x".into(),
            sku: PromisedHardware {
                sku_id: SkuId(Uuid::nil()),
                name: "h100".into(),
                gpu_model: "H100".into(),
                gpu_memory_mib: 81_559,
                gpu_count: 2,
                allowed_regions: vec!["eu-1".into()],
            },
            region_code: "eu-1".into(),
            gpus_total: 2,
            onboarding_mode: OnboardingMode::Manual,
            metadata: domain::metadata::Metadata::default(),
        };
        self.admin(node_id, Command::Register { registration: Box::new(registration), probe: None }).await;
        node_id
    }

    pub(super) async fn token(&self, node_id: Uuid, ttl_seconds: Option<u32>) -> String {
        let minted = mint(TokenPurpose::Enrollment);
        let token = minted.token.expose_secret().to_owned();
        self.tokens.lock().unwrap().push(token.clone());
        let token_sha256 = minted.hash.to_bytes();
        self.admin(node_id, Command::IssueToken { token_id: TokenId(Uuid::now_v7()), token_sha256, ttl_seconds }).await;
        token
    }

    /// A node whose agent has its certificate and has not polled.
    pub(super) async fn enrolled(&self) -> Agent {
        let node_id = self.register().await;
        let token = self.token(node_id, None).await;
        let (applicant, recovery, boot_id) = (Applicant::new(), recovery_key(), Uuid::new_v4());
        let answer =
            self.enroll(node_id, &enrollment_of(node_id, &token, &applicant.csr_pem, &recovery, boot_id)).await;
        let certificate = answer.is(201)["certificate_pem"].as_str().unwrap().to_owned();
        Agent::new(self, node_id, boot_id, recovery, &certificate, &applicant.key)
    }

    /// A node that accepts allocations.
    pub(super) async fn active(&self) -> Agent {
        let agent = self.enrolled().await;
        let poll = Command::Poll { serial: agent.serial.clone() };
        self.ask(&Principal::Node(NodeId(agent.node_id)), agent.node_id, poll).await.unwrap();
        assert_eq!(self.node(agent.node_id).await.life, domain::node::Phase::Active);
        agent
    }

    /// Orders a tenant of one GPU.
    pub(super) async fn rent(&self, agent: &Agent) -> AllocationId {
        let allocation_id = AllocationId(Uuid::now_v7());
        self.tell(agent.node_id, Command::Reserve { allocation_id, gpu_count: 1, keys: Vec::new(), revision: 0 }).await;
        let deadline_at = self.now() + TimeDelta::minutes(10);
        self.tell(agent.node_id, Command::Provision { allocation_id, deadline_at }).await;
        allocation_id
    }

    pub(super) async fn clean(&self, agent: &Agent, allocation_id: AllocationId, attempt: u32) {
        let deadline_at = self.now() + TimeDelta::minutes(10);
        self.tell(agent.node_id, Command::Clean { allocation_id, attempt, deadline_at }).await;
    }

    /// The next task, opened as an agent opens it.
    pub(super) async fn task(&self, agent: &Agent) -> TaskPayload {
        self.opened(&agent.wait(self, 5).await)
    }

    #[track_caller]
    pub(super) fn opened(&self, answer: &TestResponse) -> TaskPayload {
        let envelope = serde_json::from_value(answer.is(200).clone()).unwrap();
        let keys = VerifierSet::from_env_value(&self.services.trust.bundled_verifier_keys()).unwrap();
        open(&envelope, &Verifiers::trusting(keys).unwrap()).unwrap()
    }

    // ---- HTTP

    pub(super) fn tls(&self, identity: Option<(&str, &str)>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(self.server_ca.clone()).unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<_, _>>().unwrap();
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Arc::new(config)
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
            self.assert_no_token_in(&logs().text());
        }
    }
}

pub(super) fn admin() -> Principal {
    Principal::Caller(CallerIdentity {
        user_id: "root".into(),
        roles: [TokenRole::Admin].into(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: None,
        service_account: None,
    })
}

struct Tls {
    chain: String,
    key: String,
    authority: CertificateDer<'static>,
    authority_pem: String,
}

impl Tls {
    fn make() -> Self {
        let mut authority = CertificateParams::default();
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        Self {
            chain: leaf.pem(),
            key: key.serialize_pem(),
            authority: authority.der().clone(),
            authority_pem: authority.pem(),
        }
    }
}

/// The real time, moved on by a test.
#[derive(Default)]
struct Watch {
    ahead_ms: AtomicI64,
    policy: ArcSwap<PolicyBook>,
}

impl Clock for Watch {
    fn now(&self) -> Timestamp {
        Utc::now() + TimeDelta::milliseconds(self.ahead_ms.load(Ordering::SeqCst))
    }

    fn seed(&self) -> u128 {
        rand::random()
    }

    fn policy(&self) -> Arc<PolicyBook> {
        self.policy.load_full()
    }
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

struct Alone;

impl Remote for Alone {
    fn request(&self, _: Shard, _: Vec<u8>, _: Duration) -> BoxFuture<'_, Result<Vec<u8>, RemoteError>> {
        async { Err(RemoteError::NoResponders) }.boxed()
    }
}

struct NoRuntime;

fn none<T>() -> Result<T, RuntimeError> {
    Err(RuntimeError("there is no runtime in this test".into()))
}

impl Runtime for NoRuntime {
    fn tree(&self, _: TreeFilter) -> BoxFuture<'_, Result<Tree, RuntimeError>> {
        async { none() }.boxed()
    }
    fn entity(&self, _: EntityRef) -> BoxFuture<'_, Result<Option<EntityNode>, RuntimeError>> {
        async { none() }.boxed()
    }
    fn worker(&self, _: MemberId, _: &str) -> BoxFuture<'_, Result<Option<WorkerNode>, RuntimeError>> {
        async { none() }.boxed()
    }
    fn restart(&self, _: RuntimePart) -> BoxFuture<'_, Result<RestartOutcome, RuntimeError>> {
        async { none() }.boxed()
    }
    fn cluster(&self) -> BoxFuture<'_, Result<ClusterReport, RuntimeError>> {
        async { none() }.boxed()
    }
    fn provider_keys_changed(&self) {}

    fn readiness(&self) -> BoxFuture<'_, Readiness> {
        async { Readiness { ready: true, checks: BTreeMap::new(), starting: false } }.boxed()
    }
    fn stats(&self) -> Stats {
        Stats::default()
    }

    fn metrics(&self) -> String {
        String::new()
    }
}

/// Everything that this process has logged, as an operator would read it.
#[derive(Clone, Default)]
pub(super) struct Logs(Arc<Mutex<Vec<u8>>>);

impl Logs {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// The lines that contain all of these words.
    pub(super) fn lines(&self, words: &[&str]) -> Vec<String> {
        self.text().lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
    }
}

impl Write for Logs {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub(super) fn logs() -> Logs {
    static LOGS: OnceLock<Logs> = OnceLock::new();
    LOGS.get_or_init(|| {
        let logs = Logs::default();
        let writer = logs.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(move || writer.clone())
            .finish();
        let _ = tracing::subscriber::set_global_default(subscriber);
        logs
    })
    .clone()
}

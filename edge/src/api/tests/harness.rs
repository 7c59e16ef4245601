//! The harness of the API tests: the router over the actors and Postgres, an identity provider, and a scripted saga.

use super::fake_processor::FakeProcessor;
use crate::api;
use crate::auth::internal_route_auth::InternalToken;
use crate::auth::jwks::{Jwks, JwksSettings};
use crate::auth::token::jwt::service_account::ServiceTokens;
use crate::auth::token::{TokenPurpose, read};
use crate::auth::{Authenticator, TokenRules};
use crate::outbound::node_probe::{Probe, ProbeTargets, Resolve};
use crate::services::{Parts, Payments, Services, Trust};
use crate::testing::install_crypto;
use crate::trust::keys_in_force::{Keys, KeysInForce};
use crate::trust::node_certificate::TrustDomain;
use actors::AskResult;
use actors::sharding::id_of_name;
use actors::shell_dependencies::{Effects, Environment as _};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{TimeDelta, Utc};
use domain::allocation::{self, Allocation, Placement};
use domain::billing_account::BillingAccount;
use domain::event::{Event, GpuDevice};
use domain::node::{self, CertificateRecord, Enrollment, Node, ReportedGpu, ReportedInventory};
use domain::payment::Payment;
use domain::policy::{PolicyKey, PolicyValue};
use domain::reactions::Reaction;
use domain::{AllocationId, Effect, EntityKind, Machine, NodeId, PaymentId, Principal};
use jsonwebtoken::{Algorithm, EncodingKey};
use local_servers::test_database::TestDatabase;
use persistence::{OutboxRow, Reads, Secrets};
use rcgen::{KeyPair, PKCS_ED25519};
use secrecy::SecretString;
use serde_json::{Value, json};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use test_host::{PgMember, TestEnvironment, TestHost, system};
use tower::ServiceExt;
use uuid::Uuid;
use wiremock::matchers::path;
use wiremock::{Mock, MockServer, ResponseTemplate};

/// The operator's token.
pub(super) const STATS_TOKEN: &str = "stats-stats-stats-stats-stats-stats-stats";

/// The outcome of placing an allocation, as the scripted saga reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlacementOutcome {
    Silent,
    On(NodeId),
    NoCapacity,
    OverQuota,
    Unaffordable,
    NotIsolated,
}

/// The token for the forced refresh of the provider's keys.
pub(super) const REFRESH_TOKEN: &str = "refresh-refresh-refresh-refresh-refresh";

pub(super) struct ApiHarness {
    pub(super) services: Services,
    router: Router,
    identities: IdentityProvider,
    placement: Arc<Mutex<PlacementOutcome>>,
    environment: Arc<TestEnvironment>,
    postgres: TestDatabase,
}

/// A response of the API.
#[derive(Clone, Debug)]
pub(super) struct TestResponse {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    /// The body as JSON; null where there was none.
    pub(super) body: Value,
}

impl TestResponse {
    #[track_caller]
    pub(super) fn is(&self, status: u16) -> &Value {
        assert_eq!(self.status, status, "{}", self.body);
        &self.body
    }

    #[track_caller]
    pub(super) fn refused(&self, status: u16, code: &str) -> &Value {
        assert_eq!((self.status, self.body["code"].as_str()), (status, Some(code)), "{}", self.body);
        assert_eq!(self.body["details"]["service"], "api");
        &self.body["details"]
    }

    pub(super) fn is_replayed(&self) -> bool {
        self.headers.get("idempotency-replayed").is_some_and(|value| value == "true")
    }

    /// Status, code and message on one line, ids left out.
    pub(super) fn line(&self) -> String {
        let details = &self.body["details"];
        let field = details["field"].as_str().map(|field| format!(" [{field}]")).unwrap_or_default();
        let text = |name: &str| self.body[name].as_str().unwrap_or("-").to_owned();
        without_ids(&format!("{} {}{field}: {}", self.status, text("code"), text("message")))
    }
}

/// UUIDs differ in each run.
pub(super) fn without_ids(text: &str) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in text.split(' ') {
        let bare = word.trim_matches(|c: char| !c.is_ascii_hexdigit());
        words.push(if Uuid::parse_str(bare).is_ok() { word.replace(bare, "<id>") } else { word.to_owned() });
    }
    words.join(" ")
}

/// A request that is being built.
pub(super) struct TestRequest<'a> {
    harness: &'a ApiHarness,
    request: axum::http::request::Builder,
    body: Body,
}

impl<'a> TestRequest<'a> {
    pub(super) fn by(self, token: &str) -> Self {
        self.header("authorization", &format!("Bearer {token}"))
    }

    pub(super) fn admin(self) -> Self {
        let token = self.harness.token("root", &["admin"]);
        self.by(&token)
    }

    pub(super) fn user(self, name: &str) -> Self {
        let token = self.harness.token(name, &["user"]);
        self.by(&token)
    }

    pub(super) fn header(mut self, name: &str, value: &str) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    /// Over a connection from this address; without one there is no rate limit by address.
    pub(super) fn from(mut self, address: [u8; 4]) -> Self {
        let peer = crate::tls::Peer::new((address, 4711).into(), None, false);
        self.request = self.request.extension(axum::extract::ConnectInfo(peer));
        self
    }

    pub(super) fn key(self, key: &str) -> Self {
        self.header("idempotency-key", key)
    }

    pub(super) fn json(self, body: &Value) -> Self {
        self.text(body.to_string())
    }

    pub(super) fn text(self, body: impl Into<Body>) -> Self {
        let mut call = self.header("content-type", "application/json");
        call.body = body.into();
        call
    }

    pub(super) fn raw(mut self, body: impl Into<Body>) -> Self {
        self.body = body.into();
        self
    }

    pub(super) async fn response(self) -> axum::response::Response {
        self.harness.router.clone().oneshot(self.request.body(self.body).unwrap()).await.unwrap()
    }

    pub(super) async fn send(self) -> TestResponse {
        let response = self.response().await;
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = axum::body::to_bytes(response.into_body(), 16 << 20).await.unwrap();
        let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap_or(Value::Null) };
        assert!(!String::from_utf8_lossy(&bytes).contains("_enc\""), "a sealed field is served");
        TestResponse { status, headers, body }
    }
}

impl ApiHarness {
    pub(super) async fn new() -> Self {
        Self::with_targets(ProbeTargets::default()).await
    }

    pub(super) async fn with_targets(targets: ProbeTargets) -> Self {
        Self::with(TestDatabase::fresh().await, targets, None).await
    }

    /// A harness with payments.
    pub(super) async fn with_payments(payments: Payments) -> Self {
        Self::with(TestDatabase::fresh().await, ProbeTargets::default(), Some(payments)).await
    }

    /// A harness with this payment processor.
    pub(super) async fn with_processor(processor: &FakeProcessor) -> Self {
        Self::with_payments(processor.payments()).await
    }

    /// A harness with a Postgres of its own, which the test may stop, and with payments.
    pub(super) async fn with_own_postgres(payments: Option<Payments>) -> Self {
        Self::with(TestDatabase::alone().await, ProbeTargets::default(), payments).await
    }

    async fn with(postgres: TestDatabase, targets: ProbeTargets, payments: Option<Payments>) -> Self {
        install_crypto();
        let pool = persistence::pool::open(&postgres.pool_config()).unwrap();
        let member = PgMember::start(&pool).await;
        let (reads, secrets) = (Reads::new(pool.clone()), Secrets::new(pool, crate::testing::key_ring()));
        let trust = trust(&reads, secrets).await;
        let environment = Arc::new(TestEnvironment::default());
        let keys = (trust.keys.clone(), trust.secrets.clone(), trust.domain.clone());
        let effects = EffectRunner { reads: reads.clone(), environment: Arc::clone(&environment), keys };
        let store = Arc::new(member.store(&reads));
        let host = TestHost::start(store, member.terms(), environment, Arc::new(effects)).await;
        let identities = IdentityProvider::start().await;
        let service_tokens = ServiceTokens::new("https://api.gpu.example", trust.keys.clone(), reads.clone());
        let authenticator = identities.authenticator().with_service_tokens(service_tokens);
        let placement = Arc::new(Mutex::new(PlacementOutcome::Silent));
        let services = Services::new(Parts {
            jwks_refresh_token: InternalToken::new(REFRESH_TOKEN),
            probe: Probe::new(targets, Arc::new(TestResolver), Duration::from_secs(1)),
            stats_token: InternalToken::new(STATS_TOKEN),
            payments,
            ..crate::testing::parts(&host, reads, authenticator, trust)
        });
        let router = api::router(services.clone());
        // Rate limits are the subject of their own tests alone: most tests send all requests as one user.
        host.environment.set_policy(PolicyKey::RateLimitApi, PolicyValue::Int(1_000_000));
        host.environment.set_policy(PolicyKey::RateLimitFinancial, PolicyValue::Int(100_000));
        tokio::spawn(run_placements(services.clone(), Arc::clone(&placement), member.published));
        Self { services, router, identities, placement, environment: host.environment, postgres }
    }

    pub(super) fn call(&self, method: Method, path: &str) -> TestRequest<'_> {
        let request = Request::builder().method(method).uri(path).header("x-correlation-id", "test");
        TestRequest { harness: self, request, body: Body::empty() }
    }

    pub(super) fn get(&self, path: &str) -> TestRequest<'_> {
        self.call(Method::GET, path)
    }

    pub(super) fn post(&self, path: &str) -> TestRequest<'_> {
        self.call(Method::POST, path)
    }

    /// A token as the identity provider issues it.
    pub(super) fn token(&self, user: &str, roles: &[&str]) -> String {
        self.identities.token(user, "acme", roles)
    }

    /// The same, for a user of this organisation.
    pub(super) fn token_of(&self, user: &str, org: &str) -> String {
        self.identities.token(user, org, &["user"])
    }

    /// Kills Postgres: nothing can be read or written from here on.
    pub(super) async fn kill_postgres(&self) {
        self.postgres.kill9().await;
    }

    /// A dump of the database, as text.
    pub(super) fn database_dump(&self) -> String {
        self.postgres.dump()
    }

    /// Keeps the commits of all requests and removes their stored responses, as if the process had been killed between the two.
    pub(super) async fn lose_responses(&self) {
        self.postgres.execute("UPDATE command SET answer = NULL WHERE reply IS NOT NULL").await;
    }

    pub(super) fn set_placement(&self, placement: PlacementOutcome) {
        *self.placement.lock().unwrap() = placement;
    }

    pub(super) fn set_policy(&self, key: PolicyKey, value: i64) {
        self.set_value(key, PolicyValue::Int(value));
    }

    /// Stops the service's clock at this instant.
    pub(super) fn stop_clock_at(&self, at: &str) {
        self.environment.stop_clock_at(at.parse().unwrap());
    }

    pub(super) fn set_switch(&self, key: PolicyKey, on: bool) {
        self.set_value(key, PolicyValue::Bool(on));
    }

    pub(super) fn set_value(&self, key: PolicyKey, value: PolicyValue) {
        self.environment.set_policy(key, value);
    }

    /// Stops the identity provider.
    pub(super) async fn stop_provider(&self) {
        self.identities.server.reset().await;
    }

    /// Binds a platform role, as `root`.
    pub(super) async fn bind(&self, subject: &str, role: &str) -> TestResponse {
        let binding = json!({"subject": subject, "role": role, "reason": "a test"});
        self.post("/api/v1/admin/platform-roles/bindings").admin().json(&binding).send().await
    }

    /// An active SKU, by id.
    pub(super) async fn sku(&self, name: &str, gpus: u32) -> String {
        let created = self.post("/api/v1/admin/skus").admin().json(&sku_body(name, gpus)).send().await;
        let id = created.is(201)["id"].as_str().unwrap().to_owned();
        self.decide(&format!("/api/v1/admin/skus/{id}/activate"), &json!({"reason": "a test"})).await.is(200);
        id
    }

    /// Both approvals of a SKU's change: of `root` in role `platform_operations` and of `owner` in role `inventory_owner`.
    pub(super) async fn decide(&self, path: &str, decision: &Value) -> TestResponse {
        self.bind("root", "platform_operations").await;
        self.bind("owner", "inventory_owner").await;
        self.post(path).admin().json(decision).send().await.is(202);
        self.post(path).user("owner").json(decision).send().await
    }

    /// A registered node of the SKU.
    pub(super) async fn node(&self, sku: &str, gpus: u32) -> NodeId {
        let created = self.post("/api/v1/admin/nodes").admin().json(&node_body(sku, gpus)).send().await;
        created.is(201)["id"].as_str().unwrap().parse().unwrap()
    }

    /// The same, with an agent that has enrolled and polled.
    pub(super) async fn active_node(&self, sku: &str, gpus: u32) -> NodeId {
        let id = self.enrolled_node(sku, gpus, &Uuid::new_v4().to_string()).await;
        self.poll(id).await;
        id
    }

    /// The first poll of the node's agent.
    pub(super) async fn poll(&self, id: NodeId) {
        self.ask::<Node>(&Principal::Node(id), id.0, node::Request::Poll { serial: "01".into() }).await.unwrap();
    }

    /// A heartbeat of such a node.
    pub(super) async fn heartbeat(&self, id: NodeId, machine: &str, gpus: u32, alerts: Vec<Value>) {
        let status = node::NodeHealthStatus::Warning;
        self.heartbeat_with(id, machine, gpus, node::NodeHealth { status, alerts, ..Default::default() }).await;
    }

    /// A heartbeat of such a node with this health.
    pub(super) async fn heartbeat_with(&self, id: NodeId, machine: &str, gpus: u32, health: node::NodeHealth) {
        let now = self.environment.now();
        let seen = node::AgentContact {
            boot_id: "boot".into(),
            agent_version: "1.0.0".into(),
            protocol: 3,
            last_seen_at: now,
            silent_at: now,
            task_types: None,
            package_digest: None,
        };
        let command = node::Request::Heartbeat {
            serial: "01".into(),
            seen: Box::new(seen),
            inventory: Box::new(inventory(machine, gpus)),
            health: Box::new(health),
        };
        self.ask::<Node>(&Principal::Node(id), id.0, command).await.unwrap();
    }

    /// An enrolled node whose GPUs' UUIDs contain this name.
    pub(super) async fn enrolled_node(&self, sku: &str, gpus: u32, machine: &str) -> NodeId {
        let id = self.node(sku, gpus).await;
        let issued = self.post(&format!("/api/v1/admin/nodes/{id}/enrollment-token")).admin().send().await;
        let token = issued.is(201)["bootstrap_bundle"]["SVC_ENROLLMENT_TOKEN"].as_str();
        let token = token.or(issued.body["bootstrap_bundle"]["enrollment_token"].as_str()).expect("a token").to_owned();
        let hash = read(TokenPurpose::Enrollment, &SecretString::from(token)).unwrap();
        let now = self.environment.now();
        let agent = Principal::Node(id);
        let enrollment = Enrollment {
            token_sha256: hash.to_bytes(),
            csr_sha256: [0; 32],
            issued: CertificateRecord {
                serial: "01".into(),
                not_after: now + TimeDelta::days(1),
                generation: 0,
                authority: None,
            },
            recovery_public_key: "key".into(),
            boot_id: "boot".into(),
            agent_version: "1.0.0".into(),
            protocol: 3,
            inventory: inventory(machine, gpus),
        };
        self.ask::<Node>(&agent, id.0, node::Request::Enroll(Box::new(enrollment))).await.unwrap();
        id
    }

    pub(super) async fn ask<M: Machine>(
        &self,
        by: &Principal,
        id: Uuid,
        command: impl Into<M::Command>,
    ) -> AskResult<M> {
        test_host::ask::<M>(&self.services.directory, self.environment.as_ref(), by, id, command).await
    }

    /// Waits until the condition holds for the entity.
    pub(super) async fn wait_until<M: Machine>(&self, id: Uuid, is_so: impl Fn(&M) -> bool) {
        let found = crate::services::read_model::wait_until::<M>(&self.services, id, Duration::from_secs(10), &is_so)
            .await
            .unwrap();
        assert!(found.is_some_and(|found| is_so(&found.it)), "it did not come to that");
    }

    pub(super) async fn wait_until_payment(&self, id: PaymentId, state: &str) {
        self.wait_until::<Payment>(id.0, |payment| payment.state() == state).await;
    }

    /// Sends a command with the system as the principal, as the saga's workers do.
    pub(super) async fn ask_as_system<M: Machine>(&self, id: Uuid, command: impl Into<M::Command>) {
        self.ask::<M>(&system(), id, command).await.unwrap();
    }
}

pub(super) fn sku_body(name: &str, gpus: u32) -> Value {
    json!({
        "name": name,
        "gpu": {"vendor": "NVIDIA", "model": "H100", "memory_mib": 80_000, "count": gpus},
        "cpu": {"model": "any", "cores": 64},
        "memory_mib": 512_000,
        "storage_gib": 4_000,
        "interconnect": "nvlink",
        "allowed_regions": ["eu-1", "us-1"],
        "price": {"currency": "EUR", "amount_minor_per_gpu_hour": 250},
    })
}

pub(super) const ANNS_KEY: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAINEoqqkY4e7bJe1Jl4MhWXVh60tJIaoDRJGRhDuzPvaA ann@laptop";

pub(super) fn node_body(sku: &str, gpus: u32) -> Value {
    json!({
        "host": "gpu-17.internal",
        "port": 22,
        "ssh_username": "ops",
        "ssh_public_key": ANNS_KEY,
        "sku": sku,
        "gpus_total": gpus,
        "region_code": "eu-1",
        "onboarding_mode": "manual",
    })
}

fn inventory(machine: &str, gpus: u32) -> ReportedInventory {
    let gpu =
        |index| ReportedGpu { index, uuid: format!("GPU-{machine}-{index}"), model: "H100".into(), memory_mib: 80_000 };
    ReportedInventory {
        gpus: (0..gpus).map(gpu).collect(),
        gpu_source: "simulated".into(),
        executor: "sandbox".into(),
        isolates_devices: true,
        cpu_model: None,
        cpu_cores: 64,
        memory_mib: 512_000,
        storage_gib: 4_000,
        driver_version: None,
        host_fingerprint: None,
        system: None,
    }
}

/// Replies to allocation requests with the outcome that the test has set.
async fn run_placements(
    services: Services,
    placement: Arc<Mutex<PlacementOutcome>>,
    mut published: tokio::sync::mpsc::Receiver<OutboxRow>,
) {
    while let Some(row) = published.recv().await {
        let Event::AllocationRequested { allocation_id } = row.event else {
            run_payments(&services, row.event).await;
            continue;
        };
        let placement = *placement.lock().unwrap();
        let command = match placement {
            PlacementOutcome::Silent => continue,
            PlacementOutcome::On(node_id) => allocation::Fact::Reserved { node_id, placed: placed(allocation_id) },
            PlacementOutcome::NoCapacity => {
                allocation::Fact::NoCapacity { suggestion: Some("Region us-1 has room for 4 GPUs.".into()) }
            }
            PlacementOutcome::NotIsolated => allocation::Fact::NotIsolated,
            PlacementOutcome::OverQuota => allocation::Fact::OverQuota { limit: 50 },
            PlacementOutcome::Unaffordable => {
                allocation::Fact::Unaffordable { message: "There is nothing to pay it from.".into() }
            }
        };
        ask_as_system::<Allocation>(&services, allocation_id.0, command).await;
    }
}

/// Forwards events between payments and their accounts. There is no processor.
async fn run_payments(services: &Services, event: Event) {
    match event.reaction() {
        Reaction::Payment(id, fact) => {
            ask_as_system::<Payment>(services, id.0, fact).await;
        }
        Reaction::Billing { holder, fact }
            if matches!(
                event,
                Event::PaymentPaid { .. }
                    | Event::RefundRequested { .. }
                    | Event::RefundFailed { .. }
                    | Event::PaymentReversed { .. }
            ) =>
        {
            let account = id_of_name(EntityKind::BillingAccount, &holder.to_string());
            ask_as_system::<BillingAccount>(services, account, fact).await;
        }
        _ => {}
    }
}

async fn ask_as_system<M: Machine>(services: &Services, id: Uuid, command: impl Into<M::Command>) {
    test_host::ask::<M>(&services.directory, services.environment.as_ref(), &system(), id, command).await.unwrap();
}

fn placed(allocation_id: AllocationId) -> Placement {
    Placement {
        devices: vec![GpuDevice { index: 0, uuid: "GPU-0".into() }],
        host: "gpu-17.internal".into(),
        port: 22,
        user_name: node::user_name(allocation_id),
        region_code: "eu-1".into(),
        host_fingerprint: None,
    }
}

async fn trust(reads: &Reads, secrets: Secrets) -> Trust {
    let domain = crate::testing::trust_domain();
    let keys = Keys::read(&secrets, reads, &domain).await.unwrap();
    let api_ca_pem = keys.node.bundle_pem();
    crate::testing::trust(keys, secrets, api_ca_pem)
}

/// An identity provider on loopback with one key.
struct IdentityProvider {
    server: MockServer,
    key: EncodingKey,
}

impl IdentityProvider {
    async fn start() -> Self {
        let server = MockServer::start().await;
        let pair = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let x = URL_SAFE_NO_PAD.encode(pair.public_key_raw());
        let jwk = json!({"kty": "OKP", "crv": "Ed25519", "x": x, "kid": "one", "use": "sig"});
        let issuer = format!("{}/realms/gpu", server.uri());
        let discovery = json!({"issuer": issuer, "jwks_uri": format!("{issuer}/certs")});
        for (at, body) in
            [("/realms/gpu/.well-known/openid-configuration", discovery), ("/realms/gpu/certs", json!({"keys": [jwk]}))]
        {
            Mock::given(path(at)).respond_with(ResponseTemplate::new(200).set_body_json(body)).mount(&server).await;
        }
        Self { server, key: EncodingKey::from_ed_pem(pair.serialize_pem().as_bytes()).unwrap() }
    }

    fn issuer(&self) -> String {
        format!("{}/realms/gpu", self.server.uri())
    }

    fn authenticator(&self) -> Authenticator {
        let jwks = Jwks::new(JwksSettings::new(self.issuer())).unwrap();
        Authenticator::new(TokenRules::new(self.issuer(), "gpuaas"), jwks)
    }

    fn token(&self, user: &str, org: &str, roles: &[&str]) -> String {
        let now = Utc::now().timestamp();
        let claims = json!({
            "iss": self.issuer(), "aud": "gpuaas", "sub": user, "typ": "Bearer", "iat": now, "exp": now + 300,
            "org_id": org, "project_id": "p1", "plan": "gold", "realm_access": {"roles": roles},
        });
        let header = json!({"typ": "JWT", "alg": "EdDSA", "kid": "one"});
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(&header), part(&claims));
        let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &self.key, Algorithm::EdDSA).unwrap();
        format!("{signed}.{signature}")
    }
}

struct EffectRunner {
    reads: Reads,
    environment: Arc<TestEnvironment>,
    keys: (KeysInForce, Secrets, TrustDomain),
}

impl Effects for EffectRunner {
    fn perform(&self, effect: Effect) {
        let (reads, environment, keys) = (self.reads.clone(), Arc::clone(&self.environment), self.keys.clone());
        tokio::spawn(async move {
            match effect {
                Effect::ReadPolicy => environment.policy.store(Arc::new(reads.policy_book().await.unwrap())),
                Effect::ReadKeys => {
                    let (in_force, secrets, domain) = keys;
                    in_force.replace(Keys::read(&secrets, &reads, &domain).await.unwrap());
                }
                Effect::WakeNode(_) | Effect::CloseNode(_) | Effect::WakeTerminal(_) => {}
            }
        });
    }
}

/// `nowhere.example` does not resolve. Every other name resolves to loopback, which may not be probed.
struct TestResolver;

impl Resolve for TestResolver {
    fn resolve<'a>(
        &'a self,
        name: &'a str,
    ) -> std::pin::Pin<Box<dyn Future<Output = std::io::Result<Vec<IpAddr>>> + Send + 'a>> {
        if name == "nowhere.example" {
            return Box::pin(async { Err(std::io::Error::other("no such name")) });
        }
        Box::pin(async { Ok(vec![IpAddr::from([127, 0, 0, 1])]) })
    }
}

//! A fake node agent: it uses the node API over mutual TLS as the real one does, and does exactly what a test wants, also what is
//! invalid. With [`FakeAgent::serve`] it is the cheapest simulated node, of which benchmarks run many.

use super::client::{ApiResponse, send_request};
use super::{GPU_MEMORY_MIB, GPU_MODEL, WAIT_TIMEOUT};
use chrono::Utc;
use domain::validation::Measurement;
use ed25519_dalek::SigningKey;
use rcgen::{CertificateParams, KeyPair};
use reqwest::{Method, StatusCode};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;
use wire::bundle::BootstrapBundle;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, CleanupReport, FindingOutcome};
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, GpuTopology, NodeInventory};
use wire::task::{SignedEnvelope, Task, TaskError, TaskPayload, TaskResult, TaskStatus, Verifiers, open};
use wire::{PublicKey, VerifierSet};

/// Beyond the service's own timeouts, and pauses of a busy machine.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// A fake agent with an identity.
pub struct FakeAgent {
    pub node_id: Uuid,
    pub bundle: BootstrapBundle,
    pub certificate_pem: String,
    pub chain_pem: String,
    pub key_pem: String,
    pub recovery: SigningKey,
    pub boot_id: Uuid,
    /// How it isolates tenants, by its heartbeats and clean-up proofs.
    pub executor: ExecutorKind,
    session: Uuid,
    gpus: u32,
    verifiers: Verifiers,
    http: reqwest::Client,
}

/// What an agent sends to enroll.
#[derive(Clone)]
pub struct EnrollmentAttempt {
    /// The node in the request's path.
    pub node_id: Uuid,
    pub bundle: BootstrapBundle,
    pub csr_pem: String,
    pub recovery: SigningKey,
    pub boot_id: Uuid,
    pub gpus: u32,
}

impl EnrollmentAttempt {
    /// A valid attempt with a new key.
    #[must_use]
    pub fn valid(bundle: &BootstrapBundle, gpus: u32) -> (Self, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(Vec::new()).unwrap();
        let csr_pem = params.serialize_request(&key).unwrap().pem().unwrap();
        let enrollment = Self {
            node_id: bundle.node_id,
            bundle: bundle.clone(),
            csr_pem,
            recovery: SigningKey::from_bytes(&rand::random()),
            boot_id: Uuid::new_v4(),
            gpus,
        };
        (enrollment, key)
    }

    #[must_use]
    pub fn body(&self) -> Value {
        json!({
            "enrollment_token": self.bundle.enrollment_token.expose(),
            "csr_pem": self.csr_pem,
            "recovery_public_key": PublicKey::from(&self.recovery),
            "boot_id": self.boot_id,
            "agent_version": "0.0.0-hand",
            "protocol": wire::PROTOCOL,
            "inventory": inventory(self.node_id, self.gpus),
        })
    }

    /// Sends the request.
    pub async fn enroll(&self) -> ApiResponse {
        let http = anonymous(&self.bundle);
        let url = format!("{}/internal/v1/nodes/{}/enroll", self.bundle.api_url, self.node_id);
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            match send_request(http.post(&url).json(&self.body())).await {
                Ok(answer) => return answer,
                // A connection that is not made is made again: nothing was sent.
                Err(error) => assert!(error.is_connect() && Instant::now() < until, "no answer: {error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

/// The output of a validation that has measured this alone, since the machine has no tool for the other tests.
#[must_use]
pub fn validation_report(measured: &str, value: u64) -> serde_json::Map<String, Value> {
    let others = Measurement::ALL.iter().map(|it| it.name()).filter(|name| *name != measured);
    let not_tested: serde_json::Map<_, _> = others.map(|name| (name.to_owned(), json!("no tool"))).collect();
    let output = [("measurements", json!({ measured: value })), ("not_tested", not_tested.into())];
    output.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

impl FakeAgent {
    /// Enrolls with the bundle's token, and sends a first heartbeat and poll.
    pub async fn onboard(bundle: &BootstrapBundle, gpus: u32) -> Self {
        let agent = Self::enroll(bundle, gpus).await;
        agent.heartbeat().await.ok();
        assert!(agent.wait(1).await.is_none(), "a new node has nothing to do");
        agent
    }

    /// Enrolls with the bundle's token and sends nothing else.
    pub async fn enroll(bundle: &BootstrapBundle, gpus: u32) -> Self {
        let (enrollment, key) = EnrollmentAttempt::valid(bundle, gpus);
        let until = Instant::now() + WAIT_TIMEOUT;
        let mut answer = enrollment.enroll().await;
        // As an agent does.
        while answer.is_transient() && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(100)).await;
            answer = enrollment.enroll().await;
        }
        Self::with_identity(&enrollment, &key, &answer.created())
    }

    /// The agent with the identity of this response.
    #[must_use]
    pub fn with_identity(enrollment: &EnrollmentAttempt, key: &KeyPair, answer: &Value) -> Self {
        let text = |name: &str| answer[name].as_str().unwrap_or_else(|| panic!("no {name} in {answer}")).to_owned();
        let keys =
            VerifierSet::from_env_value(&enrollment.bundle.task_signing_pubkeys).expect("the bundle's keys parse");
        let (certificate_pem, chain_pem, key_pem) = (text("certificate_pem"), text("chain_pem"), key.serialize_pem());
        let http = with_certificate(&enrollment.bundle, &certificate_pem, &chain_pem, &key_pem, true);
        Self {
            node_id: enrollment.node_id,
            bundle: enrollment.bundle.clone(),
            certificate_pem,
            chain_pem,
            key_pem,
            recovery: enrollment.recovery.clone(),
            boot_id: enrollment.boot_id,
            executor: ExecutorKind::Sandbox,
            session: Uuid::new_v4(),
            gpus: enrollment.gpus,
            verifiers: Verifiers::trusting(keys).expect("the bundle's keys can be trusted"),
            http,
        }
    }

    /// A client with this node's certificate that opens a new connection for every request: the first handshake is a full one, the later
    /// ones resume its TLS session.
    #[must_use]
    pub fn client_without_pool(&self) -> reqwest::Client {
        with_certificate(&self.bundle, &self.certificate_pem, &self.chain_pem, &self.key_pem, false)
    }

    /// A client with this node's certificate over HTTP/1.1, or with another certificate and its key (PEM).
    #[must_use]
    pub fn client_over_http1(&self, other: Option<(&str, &str)>) -> reqwest::Client {
        let (certificate, key) = other.unwrap_or((&self.certificate_pem, &self.key_pem));
        let roots = tls().with_root_certificates(roots(&self.bundle));
        over(roots.with_client_auth_cert(chain_of(certificate), key_of(key)).unwrap(), &[b"http/1.1"])
    }

    /// A request at this node's path of the node API.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.request_with(&self.http, self.node_id, method, path)
    }

    /// A request with this client, at the path of this node.
    pub fn request_with(
        &self,
        http: &reqwest::Client,
        node: Uuid,
        method: Method,
        path: &str,
    ) -> reqwest::RequestBuilder {
        http.request(method, format!("{}/internal/v1/nodes/{node}/{path}", self.bundle.api_url))
    }

    /// Sends a request, and sends it again, as an agent does, where the connection was closed: the control plane closes a node's connections
    /// when its identity changes. A connection that is not made is made again.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> ApiResponse {
        let until = Instant::now() + WAIT_TIMEOUT;
        let mut closed = 0;
        loop {
            let request = self.request(method.clone(), path);
            let request = body.iter().fold(request, |request, body| request.json(body));
            match send_request(request).await {
                Ok(response) => return response,
                Err(error) => {
                    closed += u32::from(!error.is_connect());
                    assert!(closed < 3 && Instant::now() < until, "{path}: no answer: {error:?}");
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Polls for a task and returns the response, whatever it is.
    pub async fn poll(&self, seconds: u32) -> Result<ApiResponse, reqwest::Error> {
        let path = format!("tasks/wait?timeout_seconds={seconds}&session={}", self.session);
        let timeout = REQUEST_TIMEOUT + Duration::from_secs(seconds.into());
        send_request(self.request(Method::GET, &path).timeout(timeout)).await
    }

    /// The next task, with its signature verified. A transient refusal is retried.
    pub async fn wait(&self, seconds: u32) -> Option<TaskPayload> {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let answer = self.poll(seconds).await;
            let answer = answer.unwrap_or_else(|error| panic!("no answer to the task wait: {error:?}"));
            if answer.status == StatusCode::NO_CONTENT {
                return None;
            }
            if !answer.is_transient() || Instant::now() >= until {
                return Some(self.opened(answer));
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    /// The task in the response to a poll, with its signature verified.
    #[must_use]
    pub fn opened(&self, answer: ApiResponse) -> TaskPayload {
        let envelope: SignedEnvelope = serde_json::from_value(answer.ok()).expect("a task is an envelope");
        open(&envelope, &self.verifiers).expect("a task is signed by a key of the bundle")
    }

    /// The next task; fails if there is none. As an agent does, it polls again after an answer that is transient.
    pub async fn next_task(&self) -> TaskPayload {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let seen = match self.poll(5).await {
                Ok(answer) if answer.status == StatusCode::NO_CONTENT || answer.is_transient() => answer.to_string(),
                Ok(answer) => return self.opened(answer),
                Err(error) => format!("{error:?}"),
            };
            assert!(
                Instant::now() < until,
                "no task for node {} within {WAIT_TIMEOUT:?}; the last: {seen}",
                self.node_id
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The body of a heartbeat.
    #[must_use]
    pub fn heartbeat_body(&self) -> Value {
        let inventory = NodeInventory { executor: self.executor, ..inventory(self.node_id, self.gpus) };
        json!({
            "boot_id": self.boot_id,
            "agent_version": "0.0.0-hand",
            "protocol": wire::PROTOCOL,
            "sent_at": Utc::now(),
            "inventory": inventory,
            "telemetry": {},
            "health": { "status": "ok", "alerts": [] },
            "verifier_set_version": 0,
            "running": [],
        })
    }

    pub async fn heartbeat(&self) -> ApiResponse {
        self.post_until_final("heartbeat", || self.heartbeat_body()).await
    }

    pub async fn report(&self, task_id: Uuid, result: &TaskResult) -> ApiResponse {
        let body = serde_json::to_value(result).unwrap();
        self.post_until_final(&format!("tasks/{task_id}/result"), || body.clone()).await
    }

    /// Retries, as an agent does, until the response is not transient.
    pub async fn post_until_final(&self, path: &str, body: impl Fn() -> Value) -> ApiResponse {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let answer = self.send(Method::POST, path, Some(&body())).await;
            if !answer.is_transient() || Instant::now() >= until {
                return answer;
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    /// The result of a successful task; for a release, with the clean-up proof.
    #[must_use]
    pub fn success(&self, task: &TaskPayload) -> TaskResult {
        let proof = match &task.task {
            Task::Release(release) => Some(self.proof(task, release.allocation_id)),
            // A terminal is reported as open, without a shell.
            Task::Provision(_)
            | Task::ReconcileSshKeys(_)
            | Task::OpenTerminal(_)
            | Task::Validate { .. }
            | Task::Diagnose {}
            | Task::Reboot(_)
            | Task::ResetGpu(_)
            | Task::UpdateAgent(_) => None,
        };
        let output = match &task.task {
            Task::Validate { load: Some(_) } => validation_report("gpu_pcie_lanes", 16),
            Task::Validate { load: None }
            | Task::Provision(_)
            | Task::Release(_)
            | Task::ReconcileSshKeys(_)
            | Task::OpenTerminal(_)
            | Task::Diagnose {}
            | Task::Reboot(_)
            | Task::ResetGpu(_)
            | Task::UpdateAgent(_) => serde_json::Map::new(),
        };
        let now = Utc::now();
        TaskResult {
            attempt: task.attempt,
            status: TaskStatus::Succeeded,
            output,
            error: None,
            proof,
            started_at: now,
            finished_at: now,
        }
    }

    #[must_use]
    pub fn failure(&self, task: &TaskPayload) -> TaskResult {
        let error = TaskError { code: "made_up".to_owned(), message: "a test wants it to fail".to_owned() };
        TaskResult { status: TaskStatus::Failed, error: Some(error), proof: None, ..self.success(task) }
    }

    fn proof(&self, task: &TaskPayload, allocation_id: Uuid) -> SignedEnvelope {
        let findings = CleanupCheck::required(self.executor).map(|what| CleanupFinding {
            what,
            looked_for: allocation_id.to_string(),
            outcome: FindingOutcome::Gone,
            detail: None,
        });
        let report = CleanupReport {
            node_id: self.node_id,
            allocation_id,
            task_id: task.task_id,
            attempt: task.attempt,
            boot_id: self.boot_id,
            checked_at: Utc::now(),
            findings: findings.collect(),
        };
        report.seal(&self.recovery).expect("a report can be signed")
    }

    /// Executes every task at once and sends heartbeats, until it is dropped.
    pub async fn serve(self: Arc<Self>) {
        let heartbeats = Arc::clone(&self);
        tokio::join!(async move { self.execute_tasks().await }, async move {
            loop {
                heartbeats.heartbeat().await;
                tokio::time::sleep(Duration::from_secs(20)).await;
            }
        });
    }

    async fn execute_tasks(self: &Arc<Self>) {
        loop {
            let Some(task) = self.wait(30).await else { continue };
            // The next poll is sent before the result: a machine executes tasks concurrently.
            let this = Arc::clone(self);
            tokio::spawn(async move { this.report(task.task_id, &this.success(&task)).await.ok() });
        }
    }
}

/// The inventory of a machine with simulated GPUs.
#[must_use]
pub fn inventory(node: Uuid, gpus: u32) -> NodeInventory {
    let gpu = |index: u32| GpuInfo {
        index,
        uuid: format!("GPU-{}", Uuid::from_u128(node.as_u128() ^ u128::from(index + 1))),
        vendor: "NVIDIA".to_owned(),
        model: GPU_MODEL.to_owned(),
        memory_mib: GPU_MEMORY_MIB,
        topology: GpuTopology::default(),
    };
    NodeInventory {
        hostname: "by-hand".to_owned(),
        kernel: "6.1.0".to_owned(),
        cpu_model: "made up".to_owned(),
        cpu_cores: 8,
        memory_mib: 65_536,
        storage_gib: 1000,
        gpus: (0..gpus).map(gpu).collect(),
        gpu_source: GpuSource::Simulated,
        driver_version: None,
        executor: ExecutorKind::Sandbox,
        ssh_host_key_fingerprint: None,
        system: None,
        tenant_devices: Vec::new(),
    }
}

fn roots(bundle: &BootstrapBundle) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.ca_bundle_pem.as_bytes()) {
        roots.add(certificate.expect("the bundle's CA parses")).expect("the bundle's CA can be trusted");
    }
    roots
}

fn tls() -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap()
}

/// A client without a certificate.
#[must_use]
pub fn anonymous(bundle: &BootstrapBundle) -> reqwest::Client {
    client(tls().with_root_certificates(roots(bundle)).with_no_client_auth(), false)
}

fn with_certificate(
    bundle: &BootstrapBundle,
    certificate: &str,
    chain: &str,
    key: &str,
    pooled: bool,
) -> reqwest::Client {
    let chain = chain_of(&format!("{certificate}\n{chain}"));
    client(tls().with_root_certificates(roots(bundle)).with_client_auth_cert(chain, key_of(key)).unwrap(), pooled)
}

fn chain_of(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().unwrap()
}

fn key_of(pem: &str) -> PrivateKeyDer<'static> {
    PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap()
}

/// A client without a certificate over HTTP/1.1.
#[must_use]
pub fn anonymous_over_http1(bundle: &BootstrapBundle) -> reqwest::Client {
    over(tls().with_root_certificates(roots(bundle)).with_no_client_auth(), &[b"http/1.1"])
}

/// A client with a connection for every request, over one of these protocols.
fn over(mut tls: ClientConfig, protocols: &[&[u8]]) -> reqwest::Client {
    tls.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let builder = reqwest::Client::builder().tls_backend_preconfigured(tls).no_proxy().timeout(REQUEST_TIMEOUT);
    builder.pool_max_idle_per_host(0).build().unwrap()
}

fn client(mut tls: ClientConfig, pooled: bool) -> reqwest::Client {
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let builder = reqwest::Client::builder().tls_backend_preconfigured(tls).no_proxy().timeout(REQUEST_TIMEOUT);
    let builder = if pooled { builder } else { builder.pool_max_idle_per_host(0) };
    builder.build().unwrap()
}

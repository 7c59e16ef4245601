//! A node's agent by hand: it speaks the node API over mutual TLS as the real one does, and does exactly what a test tells it, wrong
//! things too. As a fleet of them ([`HandAgent::serve`]) it is the cheapest simulated machine there is.

use super::client::{Answer, answer_to};
use super::{GPU_MEMORY_MIB, GPU_MODEL};
use chrono::Utc;
use ed25519_dalek::SigningKey;
use rcgen::{CertificateParams, KeyPair};
use reqwest::{Method, StatusCode};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;
use wire::bundle::BootstrapBundle;
use wire::inventory::{ExecutorKind, Gpu, GpuSource, Inventory};
use wire::proof::{Checked, CleanupReport, Finding, Outcome};
use wire::task::{Envelope, Task, TaskError, TaskPayload, TaskResult, TaskStatus, Verifiers, open};
use wire::{PublicKey, VerifierSet};

/// An agent with an identity.
pub struct HandAgent {
    pub node_id: Uuid,
    pub bundle: BootstrapBundle,
    pub certificate_pem: String,
    pub chain_pem: String,
    pub key_pem: String,
    pub recovery: SigningKey,
    pub boot_id: Uuid,
    session: Uuid,
    gpus: u32,
    verifiers: Verifiers,
    http: reqwest::Client,
}

/// What an agent shows to get an identity.
#[derive(Clone)]
pub struct Showing {
    /// Whose path it asks at.
    pub node_id: Uuid,
    pub bundle: BootstrapBundle,
    pub csr_pem: String,
    pub recovery: SigningKey,
    pub boot_id: Uuid,
    pub gpus: u32,
}

impl Showing {
    /// An honest one, with a fresh key.
    #[must_use]
    pub fn honest(bundle: &BootstrapBundle, gpus: u32) -> (Self, KeyPair) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(Vec::new()).unwrap();
        let csr_pem = params.serialize_request(&key).unwrap().pem().unwrap();
        let showing = Self {
            node_id: bundle.node_id,
            bundle: bundle.clone(),
            csr_pem,
            recovery: SigningKey::from_bytes(&rand::random()),
            boot_id: Uuid::new_v4(),
            gpus,
        };
        (showing, key)
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

    /// Sends it.
    pub async fn enroll(&self) -> Answer {
        let http = anonymous(&self.bundle);
        let url = format!("{}/internal/v1/nodes/{}/enroll", self.bundle.api_url, self.node_id);
        answer_to(http.post(url).json(&self.body())).await.unwrap_or_else(|error| panic!("no answer: {error:?}"))
    }
}

impl HandAgent {
    /// Enrolls with the bundle's token, and sends a first heartbeat and poll.
    pub async fn onboard(bundle: &BootstrapBundle, gpus: u32) -> Self {
        let agent = Self::enroll(bundle, gpus).await;
        agent.heartbeat().await.ok();
        assert!(agent.wait(1).await.is_none(), "a new node has nothing to do");
        agent
    }

    /// Enrolls with the bundle's token, and no more.
    pub async fn enroll(bundle: &BootstrapBundle, gpus: u32) -> Self {
        let (showing, key) = Showing::honest(bundle, gpus);
        let answer = showing.enroll().await.created();
        Self::with_identity(&showing, &key, &answer)
    }

    /// The agent that this answer makes.
    #[must_use]
    pub fn with_identity(showing: &Showing, key: &KeyPair, answer: &Value) -> Self {
        let text = |name: &str| answer[name].as_str().unwrap_or_else(|| panic!("no {name} in {answer}")).to_owned();
        let keys = VerifierSet::from_env_value(&showing.bundle.task_signing_pubkeys).expect("the bundle's keys parse");
        let (certificate_pem, chain_pem, key_pem) = (text("certificate_pem"), text("chain_pem"), key.serialize_pem());
        let http = with_certificate(&showing.bundle, &certificate_pem, &chain_pem, &key_pem, true);
        Self {
            node_id: showing.node_id,
            bundle: showing.bundle.clone(),
            certificate_pem,
            chain_pem,
            key_pem,
            recovery: showing.recovery.clone(),
            boot_id: showing.boot_id,
            session: Uuid::new_v4(),
            gpus: showing.gpus,
            verifiers: Verifiers::trusting(keys).expect("the bundle's keys can be trusted"),
            http,
        }
    }

    /// A client with this node's certificate that makes a new connection for every request; with `resumes`, the first is a whole
    /// handshake and the later ones resume its TLS session.
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

    /// A request of this node's own API.
    pub fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        self.request_with(&self.http, self.node_id, method, path)
    }

    /// A request with this client, at the path of that node.
    pub fn request_with(
        &self,
        http: &reqwest::Client,
        node: Uuid,
        method: Method,
        path: &str,
    ) -> reqwest::RequestBuilder {
        http.request(method, format!("{}/internal/v1/nodes/{node}/{path}", self.bundle.api_url))
    }

    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Answer {
        let request = self.request(method, path);
        let request = body.iter().fold(request, |request, body| request.json(body));
        answer_to(request).await.unwrap_or_else(|error| panic!("{path}: no answer: {error:?}"))
    }

    /// The task wait, answered as it is.
    pub async fn poll(&self, seconds: u32) -> Result<Answer, reqwest::Error> {
        let path = format!("tasks/wait?timeout_seconds={seconds}&session={}", self.session);
        answer_to(self.request(Method::GET, &path).timeout(Duration::from_secs(u64::from(seconds) + 20))).await
    }

    /// The next task, its signature verified.
    pub async fn wait(&self, seconds: u32) -> Option<TaskPayload> {
        let answer = self.poll(seconds).await.unwrap_or_else(|error| panic!("no answer to the task wait: {error:?}"));
        if answer.status == StatusCode::NO_CONTENT {
            return None;
        }
        let envelope: Envelope = serde_json::from_value(answer.ok()).expect("a task is an envelope");
        Some(open(&envelope, &self.verifiers).expect("a task is signed by a key of the bundle"))
    }

    /// The next task; there has to be one.
    pub async fn next_task(&self) -> TaskPayload {
        for _ in 0..6 {
            if let Some(task) = self.wait(5).await {
                return task;
            }
        }
        panic!("no task for node {} within 30 s", self.node_id)
    }

    /// What it says in a heartbeat.
    #[must_use]
    pub fn beat(&self) -> Value {
        json!({
            "boot_id": self.boot_id,
            "agent_version": "0.0.0-hand",
            "protocol": wire::PROTOCOL,
            "sent_at": Utc::now(),
            "inventory": inventory(self.node_id, self.gpus),
            "telemetry": {},
            "health": { "status": "ok", "alerts": [] },
            "verifier_set_version": 0,
            "running": [],
        })
    }

    pub async fn heartbeat(&self) -> Answer {
        self.send(Method::POST, "heartbeat", Some(&self.beat())).await
    }

    pub async fn report(&self, task_id: Uuid, result: &TaskResult) -> Answer {
        let body = serde_json::to_value(result).unwrap();
        self.send(Method::POST, &format!("tasks/{task_id}/result"), Some(&body)).await
    }

    /// What an agent says that did what it was told; of a release, with the proof.
    #[must_use]
    pub fn success(&self, task: &TaskPayload) -> TaskResult {
        let proof = match &task.task {
            Task::Release(release) => Some(self.proof(task, release.allocation_id)),
            // Of a terminal it says that it began, and has no shell.
            Task::Provision(_)
            | Task::ReconcileSshKeys(_)
            | Task::OpenTerminal(_)
            | Task::Validate {}
            | Task::Diagnose {}
            | Task::Reboot(_) => None,
        };
        let now = Utc::now();
        TaskResult {
            attempt: task.attempt,
            status: TaskStatus::Succeeded,
            output: serde_json::Map::new(),
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

    fn proof(&self, task: &TaskPayload, allocation_id: Uuid) -> Envelope {
        let findings = Checked::REQUIRED.iter().map(|what| Finding {
            what: *what,
            looked_for: allocation_id.to_string(),
            outcome: Outcome::Gone,
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

    /// Does what it is told, at once, until it is dropped; says that it lives.
    pub async fn serve(self: Arc<Self>) {
        let beating = Arc::clone(&self);
        tokio::join!(async move { self.work().await }, async move {
            loop {
                beating.heartbeat().await;
                tokio::time::sleep(Duration::from_secs(20)).await;
            }
        });
    }

    async fn work(self: &Arc<Self>) {
        loop {
            let Some(task) = self.wait(30).await else { continue };
            // The next wait is on its way before the result is: a machine does several things at once.
            let this = Arc::clone(self);
            tokio::spawn(async move { this.report(task.task_id, &this.success(&task)).await.ok() });
        }
    }
}

/// A machine of simulated GPUs, as an agent describes it.
#[must_use]
pub fn inventory(node: Uuid, gpus: u32) -> Inventory {
    let gpu = |index: u32| Gpu {
        index,
        uuid: format!("GPU-{}", Uuid::from_u128(node.as_u128() ^ u128::from(index + 1))),
        vendor: "NVIDIA".to_owned(),
        model: GPU_MODEL.to_owned(),
        memory_mib: GPU_MEMORY_MIB,
    };
    Inventory {
        hostname: "by-hand".to_owned(),
        kernel: "6.1.0".to_owned(),
        cpu_model: "made up".to_owned(),
        cpu_cores: 8,
        memory_mib: 65_536,
        storage_gib: 1000,
        gpus: (0..gpus).map(gpu).collect(),
        gpu_source: GpuSource::Simulated,
        executor: ExecutorKind::Sandbox,
        ssh_host_key_fingerprint: None,
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

/// With a connection for every request, speaking one of these.
fn over(mut tls: ClientConfig, protocols: &[&[u8]]) -> reqwest::Client {
    tls.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    let builder = reqwest::Client::builder().tls_backend_preconfigured(tls).no_proxy().timeout(Duration::from_secs(20));
    builder.pool_max_idle_per_host(0).build().unwrap()
}

fn client(mut tls: ClientConfig, pooled: bool) -> reqwest::Client {
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let builder = reqwest::Client::builder().tls_backend_preconfigured(tls).no_proxy().timeout(Duration::from_secs(20));
    let builder = if pooled { builder } else { builder.pool_max_idle_per_host(0) };
    builder.build().unwrap()
}

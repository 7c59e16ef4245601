//! A machine with an agent that does not exist, for tests with and without processes: what the agent sends and signs, and its side of mutual TLS.
//! It has no connection: the tests of the node's routes send to a listener of their own process, and `tests::cluster` to replicas.

use chrono::Utc;
use domain::validation::Measurement;
use ed25519_dalek::SigningKey;
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use std::sync::Arc;
use uuid::Uuid;
use wire::PublicKey;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, CleanupReport, FindingOutcome};
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, GpuTopology, NodeInventory};
use wire::task::{Task, TaskError, TaskPayload, TaskResult, TaskStatus};

/// The model of its GPUs.
pub const GPU_MODEL: &str = "H100";
/// The memory of each of its GPUs, in MiB.
pub const GPU_MEMORY_MIB: u64 = 81_920;
/// The version that its agent names.
pub const AGENT_VERSION: &str = "0.0.0-fake";

/// A new key, and a request for a certificate over it (PKCS #10).
pub struct CertificateRequest {
    pub key: KeyPair,
    pub csr_pem: String,
}

impl CertificateRequest {
    #[must_use]
    pub fn generate() -> Self {
        let key = KeyPair::generate().unwrap();
        let csr_pem = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        Self { key, csr_pem }
    }
}

/// A machine, with what its agent stores.
#[derive(Clone)]
pub struct SimulatedMachine {
    pub node_id: Uuid,
    pub boot_id: Uuid,
    /// The key that signs recoveries and clean-up reports.
    pub recovery: SigningKey,
    pub gpus: u32,
    /// How it isolates tenants, by its heartbeats and clean-up reports.
    pub executor: ExecutorKind,
}

impl SimulatedMachine {
    /// A machine that has just been booted, with GPUs and a recovery key of its own.
    #[must_use]
    pub fn new(node_id: Uuid, gpus: u32) -> Self {
        let recovery = SigningKey::from_bytes(&rand::random());
        Self { node_id, boot_id: Uuid::new_v4(), recovery, gpus, executor: ExecutorKind::Sandbox }
    }

    /// Its simulated GPUs have UUIDs that no other node's have.
    #[must_use]
    pub fn inventory(&self) -> NodeInventory {
        let gpu = |index: u32| GpuInfo {
            index,
            uuid: format!("GPU-{}", Uuid::from_u128(self.node_id.as_u128() ^ u128::from(index + 1))),
            vendor: "NVIDIA".to_owned(),
            model: GPU_MODEL.to_owned(),
            memory_mib: GPU_MEMORY_MIB,
            topology: GpuTopology::default(),
        };
        NodeInventory {
            hostname: "fake".to_owned(),
            kernel: "6.1.0".to_owned(),
            cpu_model: "made up".to_owned(),
            cpu_cores: 8,
            memory_mib: 65_536,
            storage_gib: 1000,
            gpus: (0..self.gpus).map(gpu).collect(),
            gpu_source: GpuSource::Simulated,
            driver_version: None,
            executor: self.executor,
            ssh_host_key_fingerprint: None,
            system: None,
            tenant_devices: Vec::new(),
        }
    }

    /// The body of an enrollment.
    #[must_use]
    pub fn enrollment_body(&self, token: &str, csr_pem: &str) -> Value {
        json!({
            "enrollment_token": token,
            "csr_pem": csr_pem,
            "recovery_public_key": PublicKey::from(&self.recovery).to_string(),
            "boot_id": self.boot_id,
            "agent_version": AGENT_VERSION,
            "protocol": wire::PROTOCOL,
            "inventory": self.inventory(),
        })
    }

    /// The body of a heartbeat of a machine on which all is well.
    #[must_use]
    pub fn heartbeat_body(&self) -> Value {
        json!({
            "boot_id": self.boot_id,
            "agent_version": AGENT_VERSION,
            "protocol": wire::PROTOCOL,
            "sent_at": Utc::now(),
            "inventory": self.inventory(),
            "telemetry": {},
            "health": { "status": "ok", "alerts": [] },
            "verifier_set_version": 0,
            "running": [],
        })
    }

    /// A report that nothing is left of the task's allocation.
    #[must_use]
    pub fn cleanup_report(&self, task: &TaskPayload) -> CleanupReport {
        let allocation_id = task.task.allocation_id().expect("the task is of an allocation");
        let findings = CleanupCheck::required(self.executor).map(|what| CleanupFinding {
            what,
            looked_for: allocation_id.to_string(),
            outcome: FindingOutcome::Gone,
            detail: None,
        });
        CleanupReport {
            node_id: self.node_id,
            allocation_id,
            task_id: task.task_id,
            attempt: task.attempt,
            boot_id: self.boot_id,
            checked_at: Utc::now(),
            findings: findings.collect(),
        }
    }

    /// The result of this task where it succeeded; for a release, with the clean-up proof.
    #[must_use]
    pub fn success(&self, task: &TaskPayload) -> TaskResult {
        let proof = match &task.task {
            Task::Release(_) => Some(self.cleanup_report(task).seal(&self.recovery).expect("a report can be signed")),
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

    /// The result of this task where it failed.
    #[must_use]
    pub fn failure(&self, task: &TaskPayload) -> TaskResult {
        let error = TaskError { code: "made_up".to_owned(), message: "a test wants it to fail".to_owned() };
        TaskResult { status: TaskStatus::Failed, error: Some(error), proof: None, ..self.success(task) }
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

/// The configuration of an agent's connections: it trusts these authorities alone, and has the certificate with its chain, and the key (PEM).
#[must_use]
pub fn client_tls(authorities_pem: &str, identity: Option<(&str, &str)>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(authorities_pem.as_bytes()) {
        roots.add(authority.expect("the authority parses")).expect("the authority can be trusted");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some((chain, key)) => {
            let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).collect::<Result<_, _>>().unwrap();
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap()).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

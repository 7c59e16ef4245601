//! A node's agent, as far as a test needs one.

use super::harness::{NodeApiHarness, TestResponse};
use crate::trust::node_certificate::NodeCertificate;
use chrono::Utc;
use ed25519_dalek::SigningKey;
use rcgen::{CertificateParams, KeyPair};
use reqwest::Method;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use std::sync::Arc;
use uuid::Uuid;
use wire::cleanup_proof::{CleanupCheck, CleanupFinding, CleanupReport, FindingOutcome};
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, GpuTopology, NodeInventory};
use wire::task::TaskPayload;

pub(crate) fn h100s(count: u32) -> NodeInventory {
    h100s_of(Uuid::nil(), count)
}

/// The GPUs of this node alone.
pub(crate) fn h100s_of(node_id: Uuid, count: u32) -> NodeInventory {
    let gpu = |index| GpuInfo {
        index,
        uuid: format!("GPU-{}", Uuid::from_u128(node_id.as_u128() ^ (u128::from(index) + 1))),
        vendor: "NVIDIA".into(),
        model: "H100".into(),
        memory_mib: 81_559,
        topology: GpuTopology::default(),
    };
    NodeInventory {
        hostname: "node-1".into(),
        kernel: "6.1.0".into(),
        cpu_model: "EPYC".into(),
        cpu_cores: 64,
        memory_mib: 1 << 20,
        storage_gib: 4096,
        gpus: (0..count).map(gpu).collect(),
        gpu_source: GpuSource::Simulated,
        driver_version: None,
        executor: ExecutorKind::Sandbox,
        ssh_host_key_fingerprint: None,
        system: None,
        tenant_devices: Vec::new(),
    }
}

/// A key and a request for a certificate over it.
pub(super) struct Applicant {
    pub(super) key: KeyPair,
    pub(super) csr_pem: String,
}

impl Applicant {
    pub(super) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let csr_pem = CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap();
        Self { key, csr_pem }
    }
}

pub(super) fn recovery_key() -> SigningKey {
    SigningKey::from_bytes(&rand::random())
}

/// The same, of a machine with GPUs of its own.
pub(super) fn enrollment_of(node_id: Uuid, token: &str, csr_pem: &str, recovery: &SigningKey, boot_id: Uuid) -> Value {
    let mut body = enrollment(token, csr_pem, recovery, boot_id);
    body["inventory"] = json!(h100s_of(node_id, 2));
    body
}

/// The body of an enrollment that is in order.
pub(super) fn enrollment(token: &str, csr_pem: &str, recovery: &SigningKey, boot_id: Uuid) -> Value {
    json!({
        "enrollment_token": token,
        "csr_pem": csr_pem,
        "recovery_public_key": wire::PublicKey::from(recovery).to_string(),
        "boot_id": boot_id,
        "agent_version": "0.1.0",
        "protocol": 3,
        "inventory": h100s(2),
    })
}

/// An enrolled agent.
pub(super) struct Agent {
    pub(super) node_id: Uuid,
    pub(super) boot_id: Uuid,
    pub(super) recovery: SigningKey,
    pub(super) serial: String,
    pub(super) tls: Arc<ClientConfig>,
    client: reqwest::Client,
    /// Certificate and key, PEM.
    identity: (String, String),
}

impl Agent {
    pub(super) fn new(
        harness: &NodeApiHarness,
        node_id: Uuid,
        boot_id: Uuid,
        recovery: SigningKey,
        certificate_pem: &str,
        key: &KeyPair,
    ) -> Self {
        let identity = (certificate_pem.to_owned(), key.serialize_pem());
        Self::identified(harness, node_id, boot_id, recovery, identity)
    }

    fn identified(
        harness: &NodeApiHarness,
        node_id: Uuid,
        boot_id: Uuid,
        recovery: SigningKey,
        identity: (String, String),
    ) -> Self {
        let (certificate_pem, key_pem) = &identity;
        let tls = harness.tls(Some((certificate_pem, key_pem)));
        let der = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).unwrap();
        let certificate = NodeCertificate::parse(&der, &harness.app.trust.domain).unwrap();
        Self { node_id, boot_id, recovery, serial: certificate.serial, client: harness.client(&tls), tls, identity }
    }

    /// The same node with another certificate.
    pub(super) fn with(&self, harness: &NodeApiHarness, certificate_pem: &str, key: &KeyPair) -> Self {
        Self::new(harness, self.node_id, self.boot_id, self.recovery.clone(), certificate_pem, key)
    }

    pub(super) fn certificate_pem(&self) -> &str {
        &self.identity.0
    }

    /// The same certificate, and nothing of the connections and sessions that there were.
    pub(super) fn reconnected(&self, harness: &NodeApiHarness) -> Self {
        Self::identified(harness, self.node_id, self.boot_id, self.recovery.clone(), self.identity.clone())
    }

    pub(super) async fn get(&self, harness: &NodeApiHarness, path: &str) -> TestResponse {
        harness.send(&self.client, Method::GET, &self.at(path), None).await
    }

    pub(super) async fn post(&self, harness: &NodeApiHarness, path: &str, body: &Value) -> TestResponse {
        harness.send(&self.client, Method::POST, &self.at(path), Some(body.to_string().into_bytes())).await
    }

    pub(super) fn at(&self, path: &str) -> String {
        format!("/internal/v1/nodes/{}/{path}", self.node_id)
    }

    pub(super) async fn wait(&self, harness: &NodeApiHarness, seconds: u32) -> TestResponse {
        self.get(harness, &format!("tasks/wait?timeout_seconds={seconds}")).await
    }

    pub(super) async fn report(&self, harness: &NodeApiHarness, task: &TaskPayload, result: &Value) -> TestResponse {
        self.post(harness, &format!("tasks/{}/result", task.task_id), result).await
    }

    pub(super) async fn renew(&self, harness: &NodeApiHarness) -> TestResponse {
        self.post(harness, "certificate/renew", &json!({ "csr_pem": Applicant::new().csr_pem })).await
    }

    pub(super) fn heartbeat(&self) -> Value {
        json!({
            "boot_id": self.boot_id,
            "agent_version": "0.1.0",
            "protocol": 3,
            "sent_at": Utc::now(),
            "inventory": h100s_of(self.node_id, 2),
            "telemetry": {"cpu_percent": 3.5, "gpus": [{"uuid": "GPU-1", "utilization_percent": 7}]},
            "health": {"status": "ok", "alerts": []},
            "verifier_set_version": 0,
            "running": [],
        })
    }

    pub(super) async fn send_heartbeat(&self, harness: &NodeApiHarness) -> TestResponse {
        self.post(harness, "heartbeat", &self.heartbeat()).await
    }

    /// A report that everything is gone.
    pub(super) fn clean(&self, task: &TaskPayload) -> CleanupReport {
        let finding =
            |what| CleanupFinding { what, looked_for: "/tmp/x".into(), outcome: FindingOutcome::Gone, detail: None };
        CleanupReport {
            node_id: self.node_id,
            allocation_id: task.task.allocation_id().unwrap(),
            task_id: task.task_id,
            attempt: task.attempt,
            boot_id: self.boot_id,
            checked_at: Utc::now(),
            findings: CleanupCheck::REQUIRED.into_iter().map(finding).collect(),
        }
    }
}

pub(super) fn succeeded(attempt: u32) -> Value {
    json!({
        "attempt": attempt, "status": "succeeded", "output": {"uid": 100_001},
        "started_at": "2026-11-21T08:00:00Z", "finished_at": "2026-11-21T08:00:01Z",
    })
}

pub(super) fn failed(attempt: u32, code: &str, message: &str) -> Value {
    let mut result = succeeded(attempt);
    result["status"] = "failed".into();
    result["error"] = json!({"code": code, "message": message});
    result
}

pub(super) fn proved(attempt: u32, proof: &wire::SignedEnvelope) -> Value {
    let mut result = succeeded(attempt);
    result["proof"] = serde_json::to_value(proof).unwrap();
    result
}

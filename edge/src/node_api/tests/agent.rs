//! The agent of a fake machine at this harness.

use super::harness::{NodeApiHarness, TestResponse};
use crate::trust::node_certificate::NodeCertificate;
use rcgen::KeyPair;
use reqwest::Method;
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use std::ops::Deref;
use std::sync::Arc;
use test_host::simulated_machine::{CertificateRequest, SimulatedMachine};
use wire::task::TaskPayload;

/// An enrolled agent.
pub(super) struct Agent {
    machine: SimulatedMachine,
    pub(super) serial: String,
    pub(super) tls: Arc<ClientConfig>,
    client: reqwest::Client,
    /// Certificate and key, PEM.
    identity: (String, String),
}

impl Deref for Agent {
    type Target = SimulatedMachine;

    fn deref(&self) -> &SimulatedMachine {
        &self.machine
    }
}

impl Agent {
    pub(super) fn new(
        harness: &NodeApiHarness,
        machine: SimulatedMachine,
        certificate_pem: &str,
        key: &KeyPair,
    ) -> Self {
        Self::identified(harness, machine, (certificate_pem.to_owned(), key.serialize_pem()))
    }

    fn identified(harness: &NodeApiHarness, machine: SimulatedMachine, identity: (String, String)) -> Self {
        let (certificate_pem, key_pem) = &identity;
        let tls = harness.tls(Some((certificate_pem, key_pem)));
        let der = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).unwrap();
        let certificate = NodeCertificate::parse(&der, &harness.app.trust.domain).unwrap();
        Self { machine, serial: certificate.serial, client: harness.client(&tls), tls, identity }
    }

    /// The same node with another certificate.
    pub(super) fn with(&self, harness: &NodeApiHarness, certificate_pem: &str, key: &KeyPair) -> Self {
        Self::new(harness, self.machine.clone(), certificate_pem, key)
    }

    pub(super) fn certificate_pem(&self) -> &str {
        &self.identity.0
    }

    /// The same certificate, and nothing of the connections and sessions that there were.
    pub(super) fn reconnected(&self, harness: &NodeApiHarness) -> Self {
        Self::identified(harness, self.machine.clone(), self.identity.clone())
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
        self.post(harness, "certificate/renew", &json!({ "csr_pem": CertificateRequest::generate().csr_pem })).await
    }

    pub(super) fn heartbeat(&self) -> Value {
        let mut body = self.heartbeat_body();
        body["telemetry"] = json!({"cpu_percent": 3.5, "gpus": [{"uuid": "GPU-1", "utilization_percent": 7}]});
        body
    }

    pub(super) async fn send_heartbeat(&self, harness: &NodeApiHarness) -> TestResponse {
        self.post(harness, "heartbeat", &self.heartbeat()).await
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

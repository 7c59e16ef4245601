//! Agents of the two previous protocol generations (`agent/wire/tests/protocol`) are served: their recorded requests are accepted, and the
//! responses contain every field that they read.

use super::agent::Agent;
use super::harness::{NodeApiHarness, TestResponse};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use chrono::TimeDelta;
use domain::TaskType;
use domain::node::Request;
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use test_host::simulated_machine::{CertificateRequest, SimulatedMachine};
use wire::cleanup_proof::{CleanupFinding, CleanupReport, FindingOutcome};
use wire::{OLDEST_PROTOCOL, PROTOCOL, PublicKey};

/// A generation's messages.
#[derive(Clone, Copy)]
struct Generation(u16);

impl Generation {
    fn before() -> impl Iterator<Item = Self> {
        (OLDEST_PROTOCOL..PROTOCOL).map(Self)
    }

    /// The message as it was recorded.
    fn recorded(self, name: &str) -> Value {
        let folder =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../agent/wire/tests/protocol").join(self.0.to_string());
        let text = std::fs::read_to_string(folder.join(name).with_extension("json"));
        serde_json::from_str(&text.unwrap_or_else(|error| panic!("{name} of generation {}: {error}", self.0))).unwrap()
    }

    /// Asserts that an agent of this generation finds in `answer` every field that it reads.
    #[track_caller]
    fn reads(self, name: &str, answer: &Value) {
        let missing = missing(&self.recorded(name), answer, name);
        assert!(missing.is_empty(), "an agent of generation {} misses {missing:?} in {answer:#}", self.0);
    }

    /// The recorded message with some of its fields as they are in this test; each has to be in it.
    fn with(self, name: &str, fields: &Value) -> Value {
        let mut message = self.recorded(name);
        for (field, value) in fields.as_object().unwrap() {
            assert!(message.get(field).is_some(), "{name} of generation {} has no {field}", self.0);
            message[field] = value.clone();
        }
        message
    }

    async fn waits(self, harness: &NodeApiHarness, agent: &Agent) -> TestResponse {
        let query = self.with("wait_query", &json!({ "timeout_seconds": 5 }));
        let pairs = query.as_object().unwrap().iter();
        let pairs: Vec<_> =
            pairs.map(|(name, value)| format!("{name}={}", value.to_string().trim_matches('"'))).collect();
        agent.get(harness, &format!("tasks/wait?{}", pairs.join("&"))).await
    }

    /// The next task, read as this generation reads it.
    async fn task(self, harness: &NodeApiHarness, agent: &Agent, name: &str) -> Value {
        let answer = self.waits(harness, agent).await;
        self.reads("task_envelope", answer.is(200));
        let payload = BASE64.decode(answer.body["payload"].as_str().unwrap()).unwrap();
        let payload = serde_json::from_slice(&payload).unwrap();
        self.reads(name, &payload);
        payload
    }

    async fn reports(self, harness: &NodeApiHarness, agent: &Agent, task: &Value, result: &Value) {
        let path = format!("tasks/{}/result", task["task_id"].as_str().unwrap());
        let answer = agent.post(harness, &path, result).await;
        self.reads("result_answers", &json!([answer.is(200), answer.is(200)]));
    }
}

/// The fields of `known` that are missing in `answer`, or have another form. Lists may be longer or shorter.
fn missing(known: &Value, answer: &Value, at: &str) -> Vec<String> {
    match (known, answer) {
        (Value::Object(known), Value::Object(answer)) => {
            let of = |(key, value): (&String, &Value)| match answer.get(key) {
                Some(found) => missing(value, found, &format!("{at}.{key}")),
                None => vec![format!("{at}.{key}")],
            };
            known.iter().flat_map(of).collect()
        }
        (Value::Array(known), Value::Array(answer)) => {
            let pairs = known.iter().zip(answer);
            pairs.flat_map(|(known, answer)| missing(known, answer, &format!("{at}[]"))).collect()
        }
        _ if std::mem::discriminant(known) == std::mem::discriminant(answer) => Vec::new(),
        _ => vec![at.to_owned()],
    }
}

/// An agent of this generation that has enrolled.
async fn enrolled(generation: Generation, harness: &NodeApiHarness) -> (Agent, String) {
    let node_id = harness.register().await;
    let token = harness.token(node_id, None).await;
    let (machine, new) = (SimulatedMachine::new(node_id, 2), CertificateRequest::generate());
    let mut request = generation.with(
        "enroll_request",
        &json!({
            "enrollment_token": token, "csr_pem": new.csr_pem, "boot_id": machine.boot_id,
            "recovery_public_key": PublicKey::from(&machine.recovery).to_string(),
        }),
    );
    request["inventory"]["gpus"] = json!(machine.inventory().gpus);
    let answer = harness.enroll(node_id, &request).await;
    generation.reads("enroll_answer", answer.is(201));
    let certificate = answer.body["certificate_pem"].as_str().unwrap();
    (Agent::new(harness, machine, certificate, &new.key), token)
}

#[tokio::test]
async fn agents_of_the_two_previous_protocols_enroll_work_and_renew() {
    for generation in Generation::before() {
        let harness = NodeApiHarness::on_postgres().await;
        let (agent, _) = enrolled(generation, &harness).await;
        generation.waits(&harness, &agent).await.is(204);

        let mut beat = generation.with("heartbeat", &json!({ "boot_id": agent.boot_id, "running": [] }));
        beat["inventory"]["gpus"] = json!(agent.inventory().gpus);
        beat["health"]["status"] = "ok".into();
        beat["health"]["alerts"] = json!([]);
        let answer = agent.post(&harness, "heartbeat", &beat).await;
        generation.reads("heartbeat_answer", answer.is(200));
        let seen = harness.node(agent.node_id).await;
        assert_eq!(seen.lifecycle.phase, domain::node::Phase::Active);

        let allocation_id = harness.rent(&agent).await;
        let task = generation.task(&harness, &agent, "provision_payload").await;
        let done = generation.with("succeeded_result", &json!({ "attempt": task["attempt"] }));
        let mut made = done.clone();
        made.as_object_mut().unwrap().remove("proof");
        generation.reports(&harness, &agent, &task, &made).await;

        harness.clean(&agent, allocation_id, 1).await;
        let task = generation.task(&harness, &agent, "release_payload").await;
        let mut gone = done;
        gone["attempt"] = task["attempt"].clone();
        gone["proof"] = serde_json::to_value(proof(generation, &agent, &task).seal(&agent.recovery).unwrap()).unwrap();
        generation.reports(&harness, &agent, &task, &gone).await;
        assert!(harness.node(agent.node_id).await.tenancy.holds.is_empty());

        let renewal = generation.with("renew_request", &json!({ "csr_pem": CertificateRequest::generate().csr_pem }));
        let answer = agent.post(&harness, "certificate/renew", &renewal).await;
        generation.reads("enroll_answer", answer.is(200));
    }
}

/// A report in the recorded form, of everything that is required.
fn proof(generation: Generation, agent: &Agent, task: &Value) -> CleanupReport {
    let recorded = generation.with(
        "cleanup_report",
        &json!({
            "node_id": agent.node_id, "allocation_id": task["task"]["allocation_id"], "task_id": task["task_id"],
            "attempt": task["attempt"], "boot_id": agent.boot_id,
        }),
    );
    let mut report: CleanupReport = serde_json::from_value(recorded).unwrap();
    let gone = |what| CleanupFinding { what, looked_for: "/tmp/x".into(), outcome: FindingOutcome::Gone, detail: None };
    report.findings = wire::cleanup_proof::CleanupCheck::REQUIRED.into_iter().map(gone).collect();
    report.checked_at = chrono::Utc::now();
    report
}

#[tokio::test]
async fn agent_of_an_older_protocol_with_recovery_recovers() {
    let generation = Generation(2);
    let harness = NodeApiHarness::on_postgres().await;
    let (agent, token) = enrolled(generation, &harness).await;
    generation.waits(&harness, &agent).await.is(204);
    harness.advance(TimeDelta::days(2));
    let path = format!("/internal/v1/nodes/{}/recover", agent.node_id);
    let nonce = harness.anonymous(Method::GET, &format!("{path}/nonce"), None).await;
    generation.reads("nonce_answer", nonce.is(200));
    let applicant = CertificateRequest::generate();
    let request = generation.with(
        "recover_request",
        &json!({
            "enrollment_token": token, "csr_pem": applicant.csr_pem, "boot_id": agent.boot_id,
            "nonce": nonce.body["nonce"], "identity_generation": 1,
        }),
    );
    let mut request: wire::enroll::RecoverRequest = serde_json::from_value(request).unwrap();
    request.sign(agent.node_id, &agent.recovery);
    let body = serde_json::to_vec(&request).unwrap();
    let answer = harness.anonymous(Method::POST, &path, Some(body)).await;
    generation.reads("enroll_answer", answer.is(200));
}

#[tokio::test]
async fn refusals_of_an_older_agent_are_in_the_form_that_it_reads() {
    for generation in Generation::before() {
        let harness = NodeApiHarness::new().await;
        let (agent, _) = enrolled(generation, &harness).await;
        generation.waits(&harness, &agent).await.is(204);
        for order in ["retire", "remove"] {
            let reason = "test".to_owned();
            let command =
                if order == "retire" { Request::Retire { reason, drain: false } } else { Request::Remove { reason } };
            harness.admin(agent.node_id, command).await;
        }
        let refused = agent.reconnected(&harness).wait(&harness, 1).await;
        refused.is_refused_as("node_removed");
        generation.reads("error_envelope", &refused.body);
    }
}

#[tokio::test]
async fn agent_of_an_older_protocol_gets_only_the_task_types_that_it_supports() {
    for generation in Generation::before() {
        let harness = NodeApiHarness::new().await;
        let (agent, _) = enrolled(generation, &harness).await;
        generation.waits(&harness, &agent).await.is(204);
        let order = async |task_type| {
            harness.admin(agent.node_id, Request::OrderTask { task_type, reason: "test".to_owned() }).await;
        };
        order(TaskType::DiagnosticsCollect).await;
        order(TaskType::NodeReboot).await;
        generation.waits(&harness, &agent).await.is(204);
        let node = harness.node(agent.node_id).await;
        assert!(domain::Machine::deadline(&node).unwrap().reason.contains("upgrade it"), "it says why they wait");
        order(TaskType::NodeValidate).await;
        generation.task(&harness, &agent, "validate_payload").await;
    }
}

#[tokio::test]
async fn unsupported_agent_must_upgrade_and_nothing_else_happens() {
    let harness = NodeApiHarness::new().await;
    let (agent, _) = enrolled(Generation(OLDEST_PROTOCOL), &harness).await;
    let too_old = |name: &str| Generation(OLDEST_PROTOCOL).with(name, &json!({ "protocol": OLDEST_PROTOCOL - 1 }));
    let enrolling = harness.enroll(agent.node_id, &too_old("enroll_request")).await;
    let beating = agent.post(&harness, "heartbeat", &too_old("heartbeat")).await;
    for answer in [enrolling, beating] {
        let details = answer.refused(426, "upgrade_required");
        assert_eq!(
            (&details["oldest_protocol"], &details["newest_protocol"]),
            (&json!(OLDEST_PROTOCOL), &json!(PROTOCOL))
        );
        assert!(answer.body["message"].as_str().unwrap().contains("upgrade the agent"), "{}", answer.body);
    }
}

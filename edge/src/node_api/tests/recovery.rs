use super::agent::Agent;
use super::harness::{NodeApiHarness, TestResponse};
use chrono::TimeDelta;
use domain::TokenId;
use domain::node::{Phase, Reissue, Request};
use domain::policy::PolicyKey;
use ed25519_dalek::SigningKey;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use std::ops::Deref;
use test_host::CapturedLog;
use test_host::simulated_machine::{AGENT_VERSION, CertificateRequest, SimulatedMachine};
use uuid::Uuid;
use wire::SecretToken;
use wire::enroll::RecoverRequest;

use crate::auth::opaque_token::{TokenPurpose, mint};

/// A machine that is enrolled, with all that its agent remembers.
struct Machine {
    machine: SimulatedMachine,
    token: String,
    generation: u64,
}

impl Deref for Machine {
    type Target = SimulatedMachine;

    fn deref(&self) -> &SimulatedMachine {
        &self.machine
    }
}

impl Machine {
    async fn enrolled(harness: &NodeApiHarness) -> (Self, Agent) {
        let node_id = harness.register().await;
        let token = harness.token(node_id, None).await;
        let (machine, request) = (SimulatedMachine::new(node_id, 2), CertificateRequest::generate());
        let answer = harness.enroll(node_id, &machine.enrollment_body(&token, &request.csr_pem)).await;
        let certificate = answer.is(201)["certificate_pem"].as_str().unwrap();
        let agent = Agent::new(harness, machine.clone(), certificate, &request.key);
        agent.send_heartbeat(harness).await.is(200);
        (Self { machine, token, generation: 1 }, agent)
    }

    fn path(&self) -> String {
        format!("/internal/v1/nodes/{}/recover", self.node_id)
    }

    async fn nonce(&self, harness: &NodeApiHarness) -> String {
        let answer = harness.anonymous(Method::GET, &format!("{}/nonce", self.path()), None).await;
        answer.is(200)["nonce"].as_str().unwrap().to_owned()
    }

    /// A recovery that is in order.
    async fn request(&self, harness: &NodeApiHarness, new: &CertificateRequest) -> RecoverRequest {
        let mut request = RecoverRequest {
            enrollment_token: SecretToken::new(&self.token),
            identity_generation: self.generation,
            nonce: self.nonce(harness).await,
            csr_pem: new.csr_pem.clone(),
            nonce_signature: Vec::new(),
            boot_id: self.boot_id,
            agent_version: AGENT_VERSION.into(),
            protocol: wire::PROTOCOL,
            verifier_set_version: 0,
        };
        request.sign(self.node_id, &self.recovery);
        request
    }

    async fn send(&self, harness: &NodeApiHarness, request: &RecoverRequest) -> TestResponse {
        self.send_json(harness, &serde_json::to_value(request).unwrap()).await
    }

    async fn send_json(&self, harness: &NodeApiHarness, body: &Value) -> TestResponse {
        harness.anonymous(Method::POST, &self.path(), Some(body.to_string().into_bytes())).await
    }

    async fn recover(&self, harness: &NodeApiHarness, new: &CertificateRequest) -> TestResponse {
        self.send(harness, &self.request(harness, new).await).await
    }
}

#[tokio::test]
async fn node_with_an_expired_certificate_recovers_with_token_generation_and_key() {
    let harness = NodeApiHarness::on_postgres().await;
    harness.set_policy(PolicyKey::NodeCertificateTtl, 30);
    let (machine, agent) = Machine::enrolled(&harness).await;
    harness.advance(TimeDelta::seconds(31));
    agent.reconnected(&harness).send_heartbeat(&harness).await.is_refused_as("certificate_expired");
    let new = CertificateRequest::generate();
    let answer = machine.recover(&harness, &new).await;
    assert_eq!(answer.is(200)["recovery"], json!({"identity_generation": 2, "remaining": 4}));
    let recovered = agent.with(&harness, answer.body["certificate_pem"].as_str().unwrap(), &new.key);
    recovered.send_heartbeat(&harness).await.is(200);
    assert_eq!(harness.node(machine.node_id).await.lifecycle.phase, Phase::Active);
    agent.reconnected(&harness).send_heartbeat(&harness).await.is_refused_as("certificate_unknown");
}

#[tokio::test]
async fn recovery_with_a_lost_response_is_repeated_with_the_same_request() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&harness).await;
    let new = CertificateRequest::generate();
    machine.recover(&harness, &new).await.is(200);
    let repeated = machine.recover(&harness, &new).await;
    assert_eq!(repeated.is(200)["recovery"], json!({"identity_generation": 2, "remaining": 4}));
    agent
        .with(&harness, repeated.body["certificate_pem"].as_str().unwrap(), &new.key)
        .send_heartbeat(&harness)
        .await
        .is(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_recoveries_with_one_nonce_succeed_once_without_a_clone_alarm() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, _) = Machine::enrolled(&harness).await;
    let request = machine.request(&harness, &CertificateRequest::generate()).await;
    let answers = futures::future::join_all((0..20).map(|_| machine.send(&harness, &request))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 1);
    answers.iter().filter(|answer| answer.status != 200).for_each(|answer| {
        answer.refused(401, "enrollment_rejected");
    });
    let node = harness.node(machine.node_id).await;
    assert_eq!((node.lifecycle.phase, node.identity.generation), (Phase::Active, 2));
}

#[tokio::test]
async fn recovery_with_an_old_generation_quarantines_the_node_as_a_clone() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&harness).await;
    let new = CertificateRequest::generate();
    let first = machine.recover(&harness, &new).await;
    let genuine = agent.with(&harness, first.is(200)["certificate_pem"].as_str().unwrap(), &new.key);
    let clone = machine.recover(&harness, &CertificateRequest::generate()).await;
    clone.refused(401, "enrollment_rejected");
    let correlation = clone.headers["x-correlation-id"].to_str().unwrap();
    assert_eq!(CapturedLog::of_process().lines_with(&[correlation, "an old identity generation", "\"WARN\""]).len(), 1);
    let node = harness.node(machine.node_id).await;
    assert_eq!(
        (domain::Machine::state(&node), node.lifecycle.reason.code.as_str()),
        ("quarantined", "clone_suspected")
    );
    // The recovered machine's credentials stay valid: an operator decides.
    genuine.send_heartbeat(&harness).await.is(200);
}

#[tokio::test]
async fn invalid_recovery_has_one_response_and_changes_nothing() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&harness).await;
    let (other, _) = Machine::enrolled(&harness).await;
    let never =
        Machine { machine: SimulatedMachine::new(harness.register().await, 2), ..Machine::enrolled(&harness).await.0 };
    let nowhere = Machine { machine: SimulatedMachine::new(Uuid::now_v7(), 2), ..Machine::enrolled(&harness).await.0 };
    let new = CertificateRequest::generate();
    let good = machine.request(&harness, &new).await;
    let signed = |change: &dyn Fn(&mut RecoverRequest), key: &SigningKey| {
        let mut request = good.clone();
        change(&mut request);
        request.sign(machine.node_id, key);
        request
    };
    let foreign_nonce = other.nonce(&harness).await;
    let cases = [
        (signed(&|_| {}, &other.recovery), "the signature is not of the node's recovery key"),
        (RecoverRequest { identity_generation: 2, ..good.clone() }, "the signature is not"),
        (RecoverRequest { csr_pem: CertificateRequest::generate().csr_pem, ..good.clone() }, "the signature is not"),
        (RecoverRequest { nonce_signature: vec![0; 10_000], ..good.clone() }, "the signature is not"),
        (signed(&|it| it.identity_generation = 2, &machine.recovery), "never of that generation"),
        (signed(&|it| it.identity_generation = u64::MAX, &machine.recovery), "never of that generation"),
        (signed(&|it| it.nonce = foreign_nonce.clone(), &machine.recovery), "the nonce was not given out here"),
        (signed(&|it| it.nonce = "*".into(), &machine.recovery), "the nonce was not given out here"),
        (signed(&|it| it.enrollment_token = SecretToken::new(&other.token), &machine.recovery), "it is another token"),
        (signed(&|it| it.enrollment_token = SecretToken::new("x"), &machine.recovery), "not the form"),
    ];
    for (request, cause) in cases {
        let answer = machine.send(&harness, &request).await;
        answer.refused(401, "enrollment_rejected");
        let correlation = answer.headers["x-correlation-id"].to_str().unwrap();
        assert_eq!(CapturedLog::of_process().lines_with(&[correlation, cause, "\"WARN\""]).len(), 1, "{cause}");
    }
    for elsewhere in [&never, &nowhere] {
        elsewhere.recover(&harness, &new).await.refused(401, "enrollment_rejected");
    }
    // Late by a second: the nonce has ended.
    let late = machine.request(&harness, &new).await;
    harness.advance(TimeDelta::seconds(301));
    machine.send(&harness, &late).await.refused(401, "enrollment_rejected");
    agent.send_heartbeat(&harness).await.is(200);
    assert_eq!(harness.node(machine.node_id).await.identity.generation, 1);
}

#[tokio::test]
async fn malformed_recovery_is_refused_with_its_field() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, _) = Machine::enrolled(&harness).await;
    let good = serde_json::to_value(machine.request(&harness, &CertificateRequest::generate()).await).unwrap();
    for (field, value) in [
        ("identity_generation", json!(-1)),
        ("identity_generation", json!("1")),
        ("nonce_signature", json!("not base64!")),
        ("boot_id", json!("17")),
        ("agent_version", json!("x".repeat(65))),
        ("bogus", json!(1)),
    ] {
        let mut body = good.clone();
        body[field] = value;
        let answer = machine.send_json(&harness, &body).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], field);
    }
    let mut old = good.clone();
    old["protocol"] = (wire::PROTOCOL + 1).into();
    machine.send_json(&harness, &old).await.refused(426, "upgrade_required");
    machine.send_json(&harness, &good).await.is(200);
}

#[tokio::test]
async fn removed_node_cannot_recover() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, _) = Machine::enrolled(&harness).await;
    harness.admin(machine.node_id, Request::Retire { reason: "r".into(), drain: false }).await;
    harness.admin(machine.node_id, Request::Remove { reason: "r".into() }).await;
    machine.recover(&harness, &CertificateRequest::generate()).await.refused(401, "enrollment_rejected");
}

#[tokio::test]
async fn reissue_invalidates_the_old_token() {
    let harness = NodeApiHarness::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&harness).await;
    let minted = mint(TokenPurpose::Enrollment);
    let reissue = Reissue {
        token_id: TokenId(Uuid::now_v7()),
        token_sha256: minted.hash.to_bytes(),
        ttl_seconds: None,
        reason: "the machine lost its disk".into(),
        revoke_current_certificate: false,
    };
    harness.admin(machine.node_id, Request::Reissue(Box::new(reissue))).await;
    machine.recover(&harness, &CertificateRequest::generate()).await.refused(401, "enrollment_rejected");
    agent.send_heartbeat(&harness).await.is(200);
    let reinstalled = SimulatedMachine::new(Uuid::nil(), 2);
    let body = reinstalled.enrollment_body(minted.token.expose_secret(), &CertificateRequest::generate().csr_pem);
    let answer = harness.enroll(machine.node_id, &body).await;
    assert_eq!(answer.is(201)["recovery"], json!({"identity_generation": 2, "remaining": 5}));
    agent.reconnected(&harness).send_heartbeat(&harness).await.is_refused_as("certificate_unknown");
}

use super::agent::{Agent, Applicant, enrollment, enrollment_of, recovery_key};
use super::world::{Answer, World, logs};
use chrono::TimeDelta;
use domain::TokenId;
use domain::node::{Command, Life, Reissue};
use domain::policy::Key;
use ed25519_dalek::SigningKey;
use reqwest::Method;
use secrecy::ExposeSecret as _;
use serde_json::{Value, json};
use uuid::Uuid;
use wire::Token;
use wire::enroll::RecoverRequest;

use crate::token::{Purpose, mint};

/// A machine that is enrolled, with all that its agent remembers.
struct Machine {
    node_id: Uuid,
    token: String,
    key: SigningKey,
    boot_id: Uuid,
    generation: u64,
}

impl Machine {
    async fn enrolled(world: &World) -> (Self, Agent) {
        let node_id = world.register().await;
        let token = world.token(node_id, None).await;
        let (applicant, key, boot_id) = (Applicant::new(), recovery_key(), Uuid::new_v4());
        let answer = world.enroll(node_id, &enrollment_of(node_id, &token, &applicant.csr_pem, &key, boot_id)).await;
        let certificate = answer.is(201)["certificate_pem"].as_str().unwrap().to_owned();
        let agent = Agent::new(world, node_id, boot_id, key.clone(), &certificate, &applicant.key);
        agent.beat(world).await.is(200);
        (Self { node_id, token, key, boot_id, generation: 1 }, agent)
    }

    fn path(&self) -> String {
        format!("/internal/v1/nodes/{}/recover", self.node_id)
    }

    async fn nonce(&self, world: &World) -> String {
        let answer = world.anonymous(Method::GET, &format!("{}/nonce", self.path()), None).await;
        answer.is(200)["nonce"].as_str().unwrap().to_owned()
    }

    /// A recovery that is in order.
    async fn request(&self, world: &World, applicant: &Applicant) -> RecoverRequest {
        let mut request = RecoverRequest {
            enrollment_token: Token::new(&self.token),
            identity_generation: self.generation,
            nonce: self.nonce(world).await,
            csr_pem: applicant.csr_pem.clone(),
            nonce_signature: Vec::new(),
            boot_id: self.boot_id,
            agent_version: "0.1.0".into(),
            protocol: 3,
            verifier_set_version: 0,
        };
        request.sign(self.node_id, &self.key);
        request
    }

    async fn send(&self, world: &World, request: &RecoverRequest) -> Answer {
        self.send_json(world, &serde_json::to_value(request).unwrap()).await
    }

    async fn send_json(&self, world: &World, body: &Value) -> Answer {
        world.anonymous(Method::POST, &self.path(), Some(body.to_string().into_bytes())).await
    }

    async fn recover(&self, world: &World, applicant: &Applicant) -> Answer {
        self.send(world, &self.request(world, applicant).await).await
    }
}

#[tokio::test]
async fn a_machine_whose_certificate_has_ended_comes_back_with_token_generation_and_key() {
    let world = World::on_postgres().await;
    world.set_policy(Key::NodeCertificateTtl, 30);
    let (machine, agent) = Machine::enrolled(&world).await;
    world.advance(TimeDelta::seconds(31));
    agent.reconnected(&world).beat(&world).await.not_let_in("certificate_expired");
    let applicant = Applicant::new();
    let answer = machine.recover(&world, &applicant).await;
    assert_eq!(answer.is(200)["recovery"], json!({"identity_generation": 2, "remaining": 4}));
    let recovered = agent.with(&world, answer.body["certificate_pem"].as_str().unwrap(), &applicant.key);
    recovered.beat(&world).await.is(200);
    assert_eq!(world.node(machine.node_id).await.life, Life::Active);
    agent.reconnected(&world).beat(&world).await.not_let_in("certificate_unknown");
}

#[tokio::test]
async fn a_recovery_whose_answer_was_lost_is_fetched_again_with_the_same_request() {
    let world = World::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&world).await;
    let applicant = Applicant::new();
    machine.recover(&world, &applicant).await.is(200);
    let again = machine.recover(&world, &applicant).await;
    assert_eq!(again.is(200)["recovery"], json!({"identity_generation": 2, "remaining": 4}));
    agent.with(&world, again.body["certificate_pem"].as_str().unwrap(), &applicant.key).beat(&world).await.is(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_recoveries_with_one_nonce_at_once_one_passes_and_the_node_is_not_taken_for_a_clone() {
    let world = World::on_postgres().await;
    let (machine, _) = Machine::enrolled(&world).await;
    let request = machine.request(&world, &Applicant::new()).await;
    let answers = futures::future::join_all((0..20).map(|_| machine.send(&world, &request))).await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 1);
    answers.iter().filter(|answer| answer.status != 200).for_each(|answer| {
        answer.refused(401, "enrollment_rejected");
    });
    let node = world.node(machine.node_id).await;
    assert_eq!((node.life, node.identity.generation), (Life::Active, 2));
}

#[tokio::test]
async fn an_old_generation_shows_a_clone_and_quarantines_the_node() {
    let world = World::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&world).await;
    let applicant = Applicant::new();
    let first = machine.recover(&world, &applicant).await;
    let genuine = agent.with(&world, first.is(200)["certificate_pem"].as_str().unwrap(), &applicant.key);
    let clone = machine.recover(&world, &Applicant::new()).await;
    clone.refused(401, "enrollment_rejected");
    let correlation = clone.headers["x-correlation-id"].to_str().unwrap();
    assert_eq!(logs().lines(&[correlation, "an old identity generation", "\"WARN\""]).len(), 1);
    let node = world.node(machine.node_id).await;
    assert_eq!((domain::Machine::state(&node), node.reason.code.as_str()), ("quarantined", "clone_suspected"));
    // What the machine that recovered has still counts: an operator decides.
    genuine.beat(&world).await.is(200);
}

#[tokio::test]
async fn whatever_does_not_hold_is_one_answer_and_changes_nothing() {
    let world = World::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&world).await;
    let (other, _) = Machine::enrolled(&world).await;
    let never = Machine { node_id: world.register().await, ..Machine::enrolled(&world).await.0 };
    let nowhere = Machine { node_id: Uuid::now_v7(), ..Machine::enrolled(&world).await.0 };
    let applicant = Applicant::new();
    let good = machine.request(&world, &applicant).await;
    let signed = |change: &dyn Fn(&mut RecoverRequest), key: &SigningKey| {
        let mut request = good.clone();
        change(&mut request);
        request.sign(machine.node_id, key);
        request
    };
    let foreign_nonce = other.nonce(&world).await;
    let cases = [
        (signed(&|_| {}, &recovery_key()), "the signature is not of the node's recovery key"),
        (RecoverRequest { identity_generation: 2, ..good.clone() }, "the signature is not"),
        (RecoverRequest { csr_pem: Applicant::new().csr_pem, ..good.clone() }, "the signature is not"),
        (RecoverRequest { nonce_signature: vec![0; 10_000], ..good.clone() }, "the signature is not"),
        (signed(&|it| it.identity_generation = 2, &machine.key), "never of that generation"),
        (signed(&|it| it.identity_generation = u64::MAX, &machine.key), "never of that generation"),
        (signed(&|it| it.nonce = foreign_nonce.clone(), &machine.key), "the nonce was not given out here"),
        (signed(&|it| it.nonce = "*".into(), &machine.key), "the nonce was not given out here"),
        (signed(&|it| it.enrollment_token = Token::new(&other.token), &machine.key), "it is another token"),
        (signed(&|it| it.enrollment_token = Token::new("x"), &machine.key), "not the form"),
    ];
    for (request, cause) in cases {
        let answer = machine.send(&world, &request).await;
        answer.refused(401, "enrollment_rejected");
        let correlation = answer.headers["x-correlation-id"].to_str().unwrap();
        assert_eq!(logs().lines(&[correlation, cause, "\"WARN\""]).len(), 1, "{cause}");
    }
    for elsewhere in [&never, &nowhere] {
        elsewhere.recover(&world, &applicant).await.refused(401, "enrollment_rejected");
    }
    // Late by a second: the nonce has ended.
    let late = machine.request(&world, &applicant).await;
    world.advance(TimeDelta::seconds(301));
    machine.send(&world, &late).await.refused(401, "enrollment_rejected");
    agent.beat(&world).await.is(200);
    assert_eq!(world.node(machine.node_id).await.identity.generation, 1);
}

#[tokio::test]
async fn a_body_that_is_not_in_order_is_told_its_field() {
    let world = World::on_postgres().await;
    let (machine, _) = Machine::enrolled(&world).await;
    let good = serde_json::to_value(machine.request(&world, &Applicant::new()).await).unwrap();
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
        let answer = machine.send_json(&world, &body).await;
        assert_eq!(answer.refused(400, "invalid_request")["field"], field);
    }
    let mut old = good.clone();
    old["protocol"] = (wire::PROTOCOL + 1).into();
    machine.send_json(&world, &old).await.refused(426, "upgrade_required");
    machine.send_json(&world, &good).await.is(200);
}

#[tokio::test]
async fn a_removed_node_recovers_nothing() {
    let world = World::on_postgres().await;
    let (machine, _) = Machine::enrolled(&world).await;
    world.admin(machine.node_id, Command::Retire { reason: "r".into(), drain: false }).await;
    world.admin(machine.node_id, Command::Remove { reason: "r".into() }).await;
    machine.recover(&world, &Applicant::new()).await.refused(401, "enrollment_rejected");
}

#[tokio::test]
async fn after_a_reissue_the_old_token_is_good_for_nothing() {
    let world = World::on_postgres().await;
    let (machine, agent) = Machine::enrolled(&world).await;
    let minted = mint(Purpose::Enrollment);
    let reissue = Reissue {
        token_id: TokenId(Uuid::now_v7()),
        token_sha256: minted.hash.to_bytes(),
        ttl_seconds: None,
        reason: "the machine lost its disk".into(),
        revoke_current_certificate: false,
    };
    world.admin(machine.node_id, Command::Reissue(Box::new(reissue))).await;
    machine.recover(&world, &Applicant::new()).await.refused(401, "enrollment_rejected");
    agent.beat(&world).await.is(200);
    let (applicant, key) = (Applicant::new(), recovery_key());
    let body = enrollment(minted.token.expose_secret(), &applicant.csr_pem, &key, Uuid::new_v4());
    let answer = world.enroll(machine.node_id, &body).await;
    assert_eq!(answer.is(201)["recovery"], json!({"identity_generation": 2, "remaining": 5}));
    agent.reconnected(&world).beat(&world).await.not_let_in("certificate_unknown");
}

//! A fake control plane in this process, as far as an agent sees it: real TLS, real client certificates, real signatures.

use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use chrono::{DateTime, TimeDelta, Utc};
use ed25519_dalek::SigningKey;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use serde_json::Value;
use tokio::net::TcpListener;
use uuid::Uuid;
use wire::bundle::{BootstrapBundle, fingerprint};
use wire::cleanup_proof::CleanupReport;
use wire::finding::AcceptedFinding;
use wire::heartbeat::Heartbeat;
use wire::task::{
    DeviceRef, Provision, Release, SignedEnvelope, TASK_TYPE, Task, TaskPayload, TaskResult, TaskStatus, sign,
};
use wire::verifier_set::{KeyStatus, VerifierKey};
use wire::{PROTOCOL, PublicKey, SecretToken, VerifierSet};

pub mod log_gateway;
mod node_routes;
pub mod spawned_agent;
pub mod terminal;

use node_routes::{certify, refuse, serve};
pub use spawned_agent::SpawnedAgent;

pub const TOKEN: &str = "token-that-must-not-be-logged";

/// Longer than a busy machine, and the longest pause between two attempts of an agent, take.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// The control plane of one node.
pub struct FakeControlPlane {
    pub node_id: Uuid,
    pub url: String,
    ca_pem: String,
    shared: Arc<Shared>,
    /// The signer of the bundle's verifier key.
    pub signer: SigningKey,
}

struct Shared {
    node_id: Uuid,
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
    seen: Mutex<RecordedCalls>,
    behaviour: Mutex<FakeBehaviour>,
    log_gateway: Mutex<log_gateway::FakeLogGateway>,
}

impl Shared {
    fn now(&self) -> DateTime<Utc> {
        Utc::now() + self.behaviour.lock().unwrap().clock_ahead
    }
}

/// The agent's requests.
#[derive(Default)]
pub struct RecordedCalls {
    pub csrs: Vec<String>,
    pub renewals: usize,
    /// The generation of the node's identity; 0 before it enrolled.
    pub generation: u64,
    /// That of the last enrollment.
    pub enrolled_generation: u64,
    /// The token that the last enrollment has spent.
    pub spent_token: Option<String>,
    /// By certificate (DER): the generation that it was issued in. Of these alone, those of the current generation are accepted.
    pub issued: BTreeMap<Vec<u8>, u64>,
    /// CSRs of recoveries, each once.
    pub recoveries: Vec<String>,
    /// Recoveries from a generation that another one has left already.
    #[allow(dead_code)]
    pub clones: usize,
    /// Since the last recovery.
    pub nonces: Vec<String>,
    pub recovery_key: Option<PublicKey>,
    pub heartbeats: Vec<Heartbeat>,
    polls_since_heartbeat: usize,
    #[allow(dead_code)]
    pub most_polls_between_heartbeats: usize,
    /// Results in order, with the status of their answers.
    pub results: Vec<(Uuid, TaskResult, u16)>,
    /// Client certificates of task polls, each once, in order.
    pub certificates: Vec<Vec<u8>>,
    tasks: VecDeque<SignedEnvelope>,
    /// By session.
    pub terminals: BTreeMap<Uuid, terminal::SeenTerminal>,
    /// The paths of requests that the proxy in front has answered.
    pub pages: Vec<String>,
}

/// The configured behaviour of the control plane.
pub struct FakeBehaviour {
    pub token: String,
    /// The first enroll requests get 503, after they have been recorded.
    pub lose_enroll_answers: usize,
    /// The answers to so many enrollments are lost, which have spent the token.
    pub lose_answers_of_enrolled: usize,
    pub refuse_enrollment: bool,
    /// The answers to so many recoveries are lost, which have raised the generation.
    pub lose_recovery_answers: usize,
    /// The nonces of so many recoveries have expired.
    pub expire_nonces: usize,
    pub node_removed: bool,
    /// Status of every result, unless 200.
    pub results: StatusCode,
    pub certificate_life: TimeDelta,
    /// How long before their issue certificates are valid.
    pub backdated_by: TimeDelta,
    pub verifier_sets: Vec<VerifierSet>,
    /// Sent independently of the agent's version.
    pub lowest_set: Option<VerifierSet>,
    /// The bundle of node authorities, PEM.
    pub node_authorities: Option<String>,
    pub renew_within_seconds: Option<u32>,
    /// What an operator has accepted.
    pub accepted_findings: Vec<AcceptedFinding>,
    /// The first certificate is refused, as a control plane behind a proxy does.
    pub refuse_the_first_certificate: bool,
    /// The authorities in the answer to a nonce request; `None`: as a control plane that does not send them.
    pub trusted_authorities: Option<Vec<String>>,
    /// Answers are reduced to the fields of this generation of the protocol; those of the current one are complete.
    pub generation: u16,
    /// Whether heartbeats with `wire::heartbeat::LATER_FIELDS` are read; a control plane of the previous release refuses them.
    pub reads_later_fields: bool,
    /// Heartbeats and enrollments of a newer protocol are refused.
    pub newest_protocol: u16,
    /// The agent's protocol is older than any that is supported.
    pub refuse_as_too_old: bool,
    /// How far its clock is ahead.
    pub clock_ahead: TimeDelta,
    /// A proxy in front answers every request with a page of its own and this status, and cuts terminals' streams.
    pub page: Option<StatusCode>,
}

impl FakeControlPlane {
    pub async fn start() -> Self {
        Self::start_ahead(TimeDelta::zero(), (-TimeDelta::days(30), TimeDelta::days(30))).await
    }

    /// A control plane whose clock is this much ahead of the machine's, so that the machine's is behind. By its clock, its own certificate is
    /// valid from and until so long after the start.
    pub async fn start_ahead(clock_ahead: TimeDelta, (begins, ends): (TimeDelta, TimeDelta)) -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let started_at = Utc::now() + clock_ahead;
        let registered = uuid::Timestamp::from_unix_time(started_at.timestamp().try_into().unwrap(), 0, 0, 0);
        let node_id = Uuid::new_v7(registered);
        let (issuer, ca_pem) = authority();
        let behaviour = FakeBehaviour {
            token: TOKEN.to_owned(),
            lose_enroll_answers: 0,
            lose_answers_of_enrolled: 0,
            refuse_enrollment: false,
            lose_recovery_answers: 0,
            expire_nonces: 0,
            node_removed: false,
            results: StatusCode::OK,
            certificate_life: TimeDelta::hours(24),
            backdated_by: TimeDelta::zero(),
            verifier_sets: vec![],
            lowest_set: None,
            node_authorities: None,
            renew_within_seconds: None,
            accepted_findings: Vec::new(),
            refuse_the_first_certificate: false,
            trusted_authorities: None,
            generation: PROTOCOL,
            reads_later_fields: true,
            newest_protocol: PROTOCOL,
            refuse_as_too_old: false,
            clock_ahead,
            page: None,
        };
        let shared = Arc::new(Shared {
            node_id,
            issuer,
            ca_pem: ca_pem.clone(),
            seen: Mutex::default(),
            behaviour: Mutex::new(behaviour),
            log_gateway: Mutex::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://127.0.0.1:{}", listener.local_addr().unwrap().port());
        tokio::spawn(serve(listener, Arc::clone(&shared), (started_at + begins, started_at + ends)));
        Self { node_id, url, ca_pem, shared, signer: SigningKey::from_bytes(&[1; 32]) }
    }

    pub fn calls(&self) -> MutexGuard<'_, RecordedCalls> {
        self.shared.seen.lock().unwrap()
    }

    pub fn behaviour(&self) -> MutexGuard<'_, FakeBehaviour> {
        self.shared.behaviour.lock().unwrap()
    }

    #[allow(dead_code)]
    pub fn log_gateway(&self) -> MutexGuard<'_, log_gateway::FakeLogGateway> {
        self.shared.log_gateway.lock().unwrap()
    }

    /// Its time.
    pub fn now(&self) -> DateTime<Utc> {
        self.shared.now()
    }

    pub fn payload(&self, task: Task) -> TaskPayload {
        let issued_at = self.now();
        let expires_at = issued_at + TimeDelta::minutes(5);
        TaskPayload {
            node_id: self.node_id,
            task_id: Uuid::now_v7(),
            attempt: 1,
            issued_at,
            expires_at,
            origin: None,
            task,
        }
    }

    /// The first simulated GPU, as the agent's own inventory names it.
    pub fn device(&self) -> DeviceRef {
        DeviceRef::from(&self.calls().heartbeats.first().unwrap().inventory.gpus[0])
    }

    pub fn provision(&self, allocation_id: Uuid) -> TaskPayload {
        self.payload(Task::Provision(Provision {
            allocation_id,
            user_name: "tenant".into(),
            authorized_keys: vec!["ssh-ed25519 AAAA someone".into()],
            devices: vec![self.device()],
            sku: "h100".into(),
            deadline_at: self.now() + TimeDelta::minutes(5),
        }))
    }

    pub fn release(&self, allocation_id: Uuid) -> TaskPayload {
        let devices = vec![self.device()];
        self.payload(Task::Release(Release { allocation_id, user_name: "tenant".into(), devices }))
    }

    pub fn sign(&self, payload: &TaskPayload) -> SignedEnvelope {
        sign(&self.signer, &PublicKey::from(&self.signer).key_id(), payload).unwrap()
    }

    pub fn dispatch(&self, payload: &TaskPayload) {
        self.dispatch_envelope(self.sign(payload));
    }

    /// Dispatches the task as a control plane of that generation signs it; `name` is its payload's recorded message.
    pub fn dispatch_as(&self, generation: u16, name: &str, payload: &TaskPayload) {
        let output = as_answered_by(generation, name, serde_json::to_value(payload).unwrap());
        let (bytes, key_id) = (serde_json::to_vec(&output).unwrap(), PublicKey::from(&self.signer).key_id());
        self.dispatch_envelope(SignedEnvelope::sign(&self.signer, &key_id, TASK_TYPE, bytes));
    }

    pub fn dispatch_envelope(&self, envelope: SignedEnvelope) {
        self.calls().tasks.push_back(envelope);
    }

    /// The first result of the task that was answered with 200.
    #[track_caller]
    pub fn result_of(&self, task_id: Uuid) -> impl Future<Output = TaskResult> {
        eventually(move || {
            let seen = self.calls();
            seen.results.iter().find(|result| result.0 == task_id && result.2 == 200).map(|result| result.1.clone())
        })
    }

    /// Dispatches the task. Returns its result, once there is one.
    #[track_caller]
    pub fn execute(&self, payload: &TaskPayload) -> impl Future<Output = TaskResult> {
        self.dispatch(payload);
        self.result_of(payload.task_id)
    }

    /// Sets a tenant up.
    pub async fn set_up(&self, allocation_id: Uuid) -> TaskResult {
        let made = self.execute(&self.provision(allocation_id)).await;
        assert_eq!(made.status, TaskStatus::Succeeded, "{made:?}");
        made
    }

    /// Releases a tenant. Returns the report that its agent has signed.
    pub async fn end(&self, allocation_id: Uuid) -> CleanupReport {
        let gone = self.execute(&self.release(allocation_id)).await;
        assert_eq!(gone.status, TaskStatus::Succeeded, "{gone:?}");
        let recovery_key = self.calls().recovery_key.unwrap();
        CleanupReport::open(&gone.proof.unwrap(), &recovery_key).unwrap()
    }

    /// The agent executes what it is sent.
    pub async fn validate(&self) {
        let validated = self.execute(&self.payload(Task::Validate { load: None })).await;
        assert_eq!(validated.status, TaskStatus::Succeeded, "{validated:?}");
    }

    pub fn bundle(&self, folder: &Path) -> BootstrapBundle {
        let at = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        BootstrapBundle {
            node_id: self.node_id,
            enrollment_token: SecretToken::new(TOKEN),
            api_url: self.url.clone(),
            task_signing_pubkeys: PublicKey::from(&self.signer).to_string(),
            ca_bundle_path: at("etc/ca.pem"),
            node_cert_ca_bundle_path: at("etc/node-ca.pem"),
            cert_path: at("etc/node.pem"),
            key_path: at("etc/node.key"),
            ca_bundle_pem: self.ca_pem.clone(),
            ca_bundle_fingerprint: fingerprint(&self.ca_pem),
            package: Default::default(),
        }
    }

    /// Puts a certificate in the place of a stopped agent's: it is for the same key, and its time is over.
    pub fn expire_certificate(&self, bundle: &BootstrapBundle) {
        self.replace_certificate(bundle, (TimeDelta::seconds(-1), TimeDelta::hours(24)));
    }

    /// The same, with a certificate that is valid for so long, and was for so long.
    pub fn replace_certificate(&self, bundle: &BootstrapBundle, validity: (TimeDelta, TimeDelta)) {
        let csr_pem = self.calls().csrs.last().unwrap().clone();
        let set = |(life, backdated_by)| {
            let mut behaviour = self.behaviour();
            let before = (behaviour.certificate_life, behaviour.backdated_by);
            (behaviour.certificate_life, behaviour.backdated_by) = (life, backdated_by);
            before
        };
        let before = set(validity);
        let answer = certify(&self.shared, &csr_pem);
        set(before);
        std::fs::write(&bundle.cert_path, answer.certificate_pem + &answer.chain_pem).unwrap();
    }

    /// A set of one active key that `by` signs.
    pub fn rotation(version: u64, active: &SigningKey, by: &SigningKey) -> VerifierSet {
        let keys = vec![VerifierKey::new(PublicKey::from(active), KeyStatus::Active)];
        VerifierSet::sign(version, keys, &[(&PublicKey::from(by).key_id(), by)]).unwrap()
    }
}

/// The answer of a control plane of that generation: `answer` without the fields that its recorded message (`name`, in
/// `wire/tests/protocol`) lacks.
pub fn as_answered_by(generation: u16, name: &str, answer: Value) -> Value {
    if generation == PROTOCOL {
        return answer;
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("wire/tests/protocol").join(generation.to_string());
    let recorded = std::fs::read_to_string(folder.join(name).with_extension("json")).unwrap();
    pruned(answer, &serde_json::from_str(&recorded).unwrap())
}

fn pruned(answer: Value, known: &Value) -> Value {
    match (answer, known) {
        (Value::Object(answer), Value::Object(known)) => {
            let stored =
                answer.into_iter().filter_map(|(key, value)| Some((key.clone(), pruned(value, known.get(&key)?))));
            Value::Object(stored.collect())
        }
        (Value::Array(answer), Value::Array(known)) if !known.is_empty() => {
            Value::Array(answer.into_iter().map(|answer| pruned(answer, &known[0])).collect())
        }
        (answer, _) => answer,
    }
}

/// A self-signed CA.
pub fn authority() -> (Issuer<'static, KeyPair>, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    (Issuer::new(params, key), pem)
}

/// What `look` finds, once it does. Where it does not, the caller is named.
#[track_caller]
pub fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> impl Future<Output = T> {
    let (caller, begun) = (Location::caller(), Instant::now());
    async move {
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(begun.elapsed() < WAIT_TIMEOUT, "what is waited for at {caller} has not come about");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

//! A fake control plane in this process, as far as an agent sees it: real TLS, real client certificates, real signatures.

use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use axum::http::header::DATE;
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use chrono::{DateTime, TimeDelta, Utc};
use ed25519_dalek::SigningKey;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, SanType,
};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::time_provider::TimeProvider;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use uuid::Uuid;
use wire::bundle::{BootstrapBundle, fingerprint};
use wire::enroll::{EnrollAnswer, EnrollRequest, NonceAnswer, RecoverRequest, RecoveryState, RenewRequest};
use wire::finding::AcceptedFinding;
use wire::heartbeat::{Heartbeat, HeartbeatAnswer, PollSettings};
use wire::task::{
    DeviceRef, Provision, Release, ResultAnswer, ResultReceipt, SignedEnvelope, TASK_TYPE, Task, TaskPayload,
    TaskResult, sign,
};
use wire::verifier_set::{KeyStatus, VerifierKey};
use wire::{PROTOCOL, PublicKey, SecretToken, VerifierSet};

pub mod log_gateway;
pub mod terminal;

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

/// Its clock, by which it verifies certificates.
struct FakeClock(Arc<Shared>);

impl std::fmt::Debug for FakeClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeClock")
    }
}

impl TimeProvider for FakeClock {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = self.0.now().timestamp().try_into().unwrap();
        Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
    }
}

/// The agent's requests.
#[derive(Default)]
pub struct RecordedCalls {
    pub csrs: Vec<String>,
    pub renewals: usize,
    /// The generation of the node's identity; 0 before it enrolled.
    pub generation: u64,
    /// CSRs of recoveries, each once.
    pub recoveries: Vec<String>,
    /// Since the last recovery.
    pub nonces: Vec<String>,
    pub recovery_key: Option<PublicKey>,
    pub heartbeats: Vec<Heartbeat>,
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
    /// The first enroll requests get 503, after they have been recorded.
    pub lose_enroll_answers: usize,
    pub refuse_enrollment: bool,
    /// The first answer to each recovery is lost.
    pub lose_recovery_answers: bool,
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
    /// Heartbeats and enrollments of a newer protocol are refused.
    pub newest_protocol: u16,
    /// The agent's protocol is older than any that is supported.
    pub refuse_as_too_old: bool,
    /// How far its clock is ahead.
    pub clock_ahead: TimeDelta,
    /// A proxy in front answers every request with a page of its own and this status, and cuts terminals' streams.
    pub page: Option<StatusCode>,
}

#[derive(Clone)]
struct Peer(Option<CertificateDer<'static>>);

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
            lose_enroll_answers: 0,
            refuse_enrollment: false,
            lose_recovery_answers: false,
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
        let csr_pem = self.calls().csrs.last().unwrap().clone();
        let set = |(life, backdated_by)| {
            let mut behaviour = self.behaviour();
            let before = (behaviour.certificate_life, behaviour.backdated_by);
            (behaviour.certificate_life, behaviour.backdated_by) = (life, backdated_by);
            before
        };
        let before = set((TimeDelta::seconds(-1), TimeDelta::hours(24)));
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

/// Refuses requests of another protocol, as the control plane of an older or a newer one does.
fn reject_unsupported_protocol(shared: &Shared, protocol: u16) -> Option<Response> {
    let newest = match &*shared.behaviour.lock().unwrap() {
        behaviour if behaviour.refuse_as_too_old => protocol + 3,
        behaviour => behaviour.newest_protocol,
    };
    let oldest = newest.saturating_sub(2);
    (!(oldest..=newest).contains(&protocol)).then(|| {
        let details = json!({"newest_protocol": newest, "oldest_protocol": oldest});
        let message = format!("Protocol {protocol} is not supported, {oldest} to {newest} are.");
        let body = json!({"code": "upgrade_required", "message": message, "correlation_id": "c", "details": details});
        (StatusCode::UPGRADE_REQUIRED, Json(body)).into_response()
    })
}

fn record(shared: &Shared, name: &str, answer: impl serde::Serialize) -> Json<Value> {
    let generation = shared.behaviour.lock().unwrap().generation;
    Json(as_answered_by(generation, name, serde_json::to_value(answer).unwrap()))
}

/// A self-signed CA.
pub fn authority() -> (Issuer<'static, KeyPair>, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![]).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    (Issuer::new(params, key), pem)
}

async fn serve(listener: TcpListener, shared: Arc<Shared>, validity: (DateTime<Utc>, DateTime<Utc>)) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    (params.not_before, params.not_after) = (certificate_time(validity.0), certificate_time(validity.1));
    let certificate = params.signed_by(&key, &shared.issuer).unwrap();
    let mut roots = RootCertStore::empty();
    let (_, ca) = x509_parser::pem::parse_x509_pem(shared.ca_pem.as_bytes()).unwrap();
    roots.add(CertificateDer::from(ca.contents)).unwrap();
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).allow_unauthenticated().build().unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_details(provider, Arc::new(FakeClock(Arc::clone(&shared))))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate.der().clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        .unwrap();
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let router = router(shared);
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (acceptor, router) = (acceptor.clone(), router.clone());
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let peer = stream.get_ref().1.peer_certificates().map(|chain| chain[0].clone().into_owned());
            let service = TowerToHyperService::new(router.layer(Extension(Peer(peer))));
            let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
            let _ = server.serve_connection_with_upgrades(TokioIo::new(stream), service).await;
        });
    }
}

fn router(shared: Arc<Shared>) -> Router {
    let with_certificate = Router::new()
        .route("/tasks/wait", get(wait))
        .route("/tasks/{task_id}/result", post(result))
        .route("/heartbeat", post(heartbeat))
        .route("/certificate/renew", post(renew))
        .route("/log-token", post(log_gateway::token))
        .route("/terminals/{session_id}/stream", get(terminal::stream))
        .route("/terminals/{session_id}/recording/{seq}", put(terminal::store_chunk))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&shared), identify));
    let all = with_certificate
        .route("/enroll", post(enroll))
        .route("/recover/nonce", get(nonce))
        .route("/recover", post(recover))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&shared), answer_with_a_page))
        .with_state(Arc::clone(&shared));
    let logs = Router::new().route(log_gateway::PATH, post(log_gateway::push)).with_state(Arc::clone(&shared));
    Router::new()
        .nest(&format!("/internal/v1/nodes/{}", shared.node_id), all)
        .merge(logs)
        .layer(middleware::from_fn_with_state(shared, date))
}

fn certificate_time(time: DateTime<Utc>) -> time::OffsetDateTime {
    time::OffsetDateTime::from_unix_timestamp(time.timestamp()).unwrap()
}

/// The header `Date` by its clock.
async fn date(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let date = shared.now().format("%a, %d %b %Y %H:%M:%S GMT").to_string();
    response.headers_mut().insert(DATE, date.parse().unwrap());
    response
}

fn refuse(status: StatusCode, code: &str, reason: &str) -> Response {
    let body = json!({"code": code, "message": "no", "correlation_id": "c", "details": {"reason": reason}});
    (status, [("x-correlation-id", "c")], Json(body)).into_response()
}

/// The proxy in front.
async fn answer_with_a_page(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let Some(status) = shared.behaviour.lock().unwrap().page else { return next.run(request).await };
    shared.seen.lock().unwrap().pages.push(request.uri().path().to_owned());
    (status, Html("<html><body>nothing of the control plane</body></html>")).into_response()
}

async fn identify(State(shared): State<Arc<Shared>>, peer: Extension<Peer>, request: Request, next: Next) -> Response {
    let Some(certificate) = &peer.0.0 else {
        return refuse(StatusCode::UNAUTHORIZED, "invalid_node_identity", "certificate_missing");
    };
    if shared.behaviour.lock().unwrap().node_removed {
        return refuse(StatusCode::UNAUTHORIZED, "invalid_node_identity", "node_removed");
    }
    let is_the_first =
        shared.seen.lock().unwrap().certificates.first().map(Vec::as_slice) == Some(certificate.as_ref());
    if is_the_first && shared.behaviour.lock().unwrap().refuse_the_first_certificate {
        return refuse(StatusCode::UNAUTHORIZED, "invalid_node_identity", "certificate_unknown");
    }
    if request.uri().path().ends_with("/tasks/wait") {
        let mut seen = shared.seen.lock().unwrap();
        if seen.certificates.last().map(Vec::as_slice) != Some(certificate.as_ref()) {
            seen.certificates.push(certificate.to_vec());
        }
    }
    next.run(request).await
}

fn certify(shared: &Shared, csr_pem: &str) -> EnrollAnswer {
    let (life, backdated_by) = {
        let behaviour = shared.behaviour.lock().unwrap();
        (behaviour.certificate_life, behaviour.backdated_by)
    };
    let mut request = CertificateSigningRequestParams::from_pem(csr_pem).unwrap();
    let uri = format!("spiffe://test/node/{}", shared.node_id);
    request.params.subject_alt_names = vec![SanType::URI(uri.try_into().unwrap())];
    request.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    request.params.use_authority_key_identifier_extension = true;
    let not_after = shared.now() + life;
    request.params.not_before = certificate_time(shared.now() - backdated_by);
    request.params.not_after = certificate_time(not_after);
    EnrollAnswer {
        certificate_pem: request.signed_by(&shared.issuer).unwrap().pem(),
        chain_pem: shared.ca_pem.clone(),
        not_after,
        recovery: RecoveryState { identity_generation: shared.seen.lock().unwrap().generation, remaining: 5 },
        verifier_sets: vec![],
        node_ca_bundle_pem: None,
    }
}

async fn nonce(State(shared): State<Arc<Shared>>) -> Response {
    let nonce = Uuid::new_v4().to_string();
    shared.seen.lock().unwrap().nonces.push(nonce.clone());
    let node_authorities = shared.behaviour.lock().unwrap().trusted_authorities.clone();
    let expires_at = shared.now() + TimeDelta::minutes(5);
    Json(NonceAnswer { nonce, expires_at, server_time: Some(shared.now()), node_authorities }).into_response()
}

async fn recover(State(shared): State<Arc<Shared>>, Json(request): Json<RecoverRequest>) -> Response {
    let lost = {
        let mut seen = shared.seen.lock().unwrap();
        let key = seen.recovery_key.as_ref();
        let signed = key.is_some_and(|key| request.is_signed_by(shared.node_id, key));
        let fresh = seen.nonces.last() == Some(&request.nonce);
        let repeated =
            seen.recoveries.last() == Some(&request.csr_pem) && request.identity_generation + 1 == seen.generation;
        let next = request.identity_generation == seen.generation && seen.generation > 0;
        if !signed || !fresh || request.enrollment_token.expose() != TOKEN || !(repeated || next) {
            return refuse(StatusCode::UNAUTHORIZED, "enrollment_rejected", "");
        }
        seen.nonces.clear();
        if next {
            seen.generation += 1;
            seen.recoveries.push(request.csr_pem.clone());
        }
        next && shared.behaviour.lock().unwrap().lose_recovery_answers
    };
    if lost {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", "");
    }
    record(&shared, "enroll_answer", certify(&shared, &request.csr_pem)).into_response()
}

async fn enroll(State(shared): State<Arc<Shared>>, Json(request): Json<EnrollRequest>) -> Response {
    if let Some(refused) = reject_unsupported_protocol(&shared, request.protocol) {
        return refused;
    }
    let mut seen = shared.seen.lock().unwrap();
    seen.csrs.push(request.csr_pem.clone());
    seen.recovery_key = Some(request.recovery_public_key);
    let count = seen.csrs.len();
    drop(seen);
    let (refused, lost) = {
        let behaviour = shared.behaviour.lock().unwrap();
        (behaviour.refuse_enrollment, behaviour.lose_enroll_answers)
    };
    if refused || request.enrollment_token.expose() != TOKEN {
        return refuse(StatusCode::UNAUTHORIZED, "enrollment_rejected", "");
    }
    if count <= lost {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", "");
    }
    shared.seen.lock().unwrap().generation += 1;
    (StatusCode::CREATED, record(&shared, "enroll_answer", certify(&shared, &request.csr_pem))).into_response()
}

async fn renew(State(shared): State<Arc<Shared>>, Json(request): Json<RenewRequest>) -> Response {
    shared.seen.lock().unwrap().renewals += 1;
    record(&shared, "enroll_answer", certify(&shared, &request.csr_pem)).into_response()
}

async fn wait(State(shared): State<Arc<Shared>>) -> Response {
    for _ in 0..100 {
        if let Some(envelope) = shared.seen.lock().unwrap().tasks.pop_front() {
            return record(&shared, "task_envelope", envelope).into_response();
        }
        if shared.behaviour.lock().unwrap().node_removed {
            return refuse(StatusCode::UNAUTHORIZED, "invalid_node_identity", "node_removed");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    StatusCode::NO_CONTENT.into_response()
}

async fn result(
    State(shared): State<Arc<Shared>>,
    UrlPath(task_id): UrlPath<Uuid>,
    Json(result): Json<TaskResult>,
) -> Response {
    let status = shared.behaviour.lock().unwrap().results;
    let mut seen = shared.seen.lock().unwrap();
    let known = seen.results.iter().any(|(id, other, status)| *id == task_id && *other == result && *status == 200);
    seen.results.push((task_id, result, status.as_u16()));
    if status != StatusCode::OK {
        return refuse(status, "stale_attempt", "");
    }
    drop(seen);
    let answer = ResultAnswer { recorded: if known { ResultReceipt::Already } else { ResultReceipt::New } };
    Json(record(&shared, "result_answers", [answer]).0[0].clone()).into_response()
}

async fn heartbeat(State(shared): State<Arc<Shared>>, Json(heartbeat): Json<Heartbeat>) -> Response {
    let (known, protocol) = (heartbeat.verifier_set_version, heartbeat.protocol);
    let stored = heartbeat.node_ca_bundle_fingerprint.clone();
    shared.seen.lock().unwrap().heartbeats.push(heartbeat);
    if let Some(refused) = reject_unsupported_protocol(&shared, protocol) {
        return refused;
    }
    let (sets, lowest, authorities, renew_within_seconds) = {
        let behaviour = shared.behaviour.lock().unwrap();
        let lowest = behaviour.lowest_set.clone();
        (behaviour.verifier_sets.clone(), lowest, behaviour.node_authorities.clone(), behaviour.renew_within_seconds)
    };
    let answer = HeartbeatAnswer {
        server_time: shared.now(),
        next_heartbeat_seconds: 1,
        verifier_sets: sets.into_iter().filter(|set| set.version > known).chain(lowest).collect(),
        poll: PollSettings { timeout_seconds: 5, backoff_max_seconds: 1 },
        node_ca_bundle_pem: authorities.filter(|pem| stored != Some(fingerprint(pem))),
        renew_within_seconds,
        accepted_findings: shared.behaviour.lock().unwrap().accepted_findings.clone(),
    };
    record(&shared, "heartbeat_answer", answer).into_response()
}

/// The agent as a process, over a folder that outlives it.
pub struct SpawnedAgent {
    child: Child,
    pub log: PathBuf,
}

impl SpawnedAgent {
    /// Starts an agent in `folder` with the bundle's environment file.
    pub fn start(folder: &Path, bundle: &BootstrapBundle, more: &[&str]) -> Self {
        let args = [&["--simulate-gpus", "2"], more].concat();
        Self::start_with(folder, bundle, &args, &[])
    }

    /// As [`start`](Self::start), without simulated GPUs and in this environment.
    pub fn start_with(folder: &Path, bundle: &BootstrapBundle, args: &[&str], environment: &[(&str, String)]) -> Self {
        let mut agent = Command::new(env!("CARGO_BIN_EXE_gpuaas-agent"));
        agent.env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        Self::start_by(agent, folder, bundle, args)
    }

    /// Starts it by a command, to which the agent's flags are added.
    pub fn start_by(mut command: Command, folder: &Path, bundle: &BootstrapBundle, args: &[&str]) -> Self {
        let env_file = folder.join("agent.env");
        std::fs::write(&env_file, bundle.to_env_file().unwrap()).unwrap();
        let log = folder.join(format!("{}.log", Uuid::now_v7()));
        // The sandbox executor does not run as root.
        let nobody =
            nix::unistd::User::from_name("nobody").unwrap().filter(|_| nix::unistd::Uid::effective().is_root());
        let as_nobody: &[&str] = if nobody.is_some() { &["--user", "nobody"] } else { &[] };
        if let Some(nobody) = nobody {
            give_away(folder, &nobody);
        }
        let child = command
            .arg("--env-file")
            .arg(&env_file)
            .arg("--state-dir")
            .arg(folder.join("state"))
            .args(as_nobody)
            .args(args)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        Self { child, log }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Kills it as a power failure would.
    pub fn kill_9(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub async fn exit(&mut self) -> ExitStatus {
        eventually(|| self.child.try_wait().unwrap()).await
    }

    /// Lines so far; each has to be JSON.
    pub fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.log).unwrap();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}"))).collect()
    }

    pub fn count(&self, message: &str) -> usize {
        self.lines().iter().filter(|line| line["message"] == message).count()
    }

    pub fn has_code(&self, error_code: &str) -> bool {
        self.lines().iter().any(|line| line["error_code"] == error_code)
    }

    #[track_caller]
    pub fn wait_for_message(&self, message: &str) -> impl Future<Output = ()> {
        eventually(move || (self.count(message) > 0).then_some(()))
    }

    #[track_caller]
    pub fn wait_for_error_code(&self, error_code: &str) -> impl Future<Output = ()> {
        eventually(move || self.has_code(error_code).then_some(()))
    }
}

impl Drop for SpawnedAgent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(&self.log).unwrap_or_default());
        }
    }
}

/// A control plane, and an agent that has enrolled and sent a heartbeat.
pub async fn enrolled(more: &[&str]) -> (FakeControlPlane, TempDir, SpawnedAgent) {
    enrolled_at(FakeControlPlane::start().await, more).await
}

/// As [`enrolled`], at this control plane.
pub async fn enrolled_at(fake: FakeControlPlane, more: &[&str]) -> (FakeControlPlane, TempDir, SpawnedAgent) {
    let folder = tempfile::tempdir().unwrap();
    let agent = SpawnedAgent::start(folder.path(), &fake.bundle(folder.path()), more);
    eventually(|| (!fake.calls().heartbeats.is_empty()).then_some(())).await;
    (fake, folder, agent)
}

fn give_away(path: &Path, user: &nix::unistd::User) {
    std::os::unix::fs::lchown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw())).unwrap();
    if path.is_dir() && !path.is_symlink() {
        std::fs::read_dir(path).unwrap().for_each(|entry| give_away(&entry.unwrap().path(), user));
    }
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

//! The routes of the fake control plane, over TLS.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use axum::http::header::DATE;
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Extension, Json, Router};
use chrono::{DateTime, TimeDelta, Utc};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rcgen::{CertificateParams, CertificateSigningRequestParams, ExtendedKeyUsagePurpose, KeyPair, SanType};
use rustls::RootCertStore;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::time_provider::TimeProvider;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use uuid::Uuid;
use wire::bundle::fingerprint;
use wire::enroll::{EnrollAnswer, EnrollRequest, NonceAnswer, RecoverRequest, RecoveryState, RenewRequest};
use wire::heartbeat::{Heartbeat, HeartbeatAnswer, LATER_FIELDS, PollSettings};
use wire::task::{ResultAnswer, ResultReceipt, TaskResult};

use super::{Shared, as_answered_by, log_gateway, terminal};

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

#[derive(Clone)]
struct Peer(Option<CertificateDer<'static>>);

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

pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>, validity: (DateTime<Utc>, DateTime<Utc>)) {
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

pub(super) fn refuse(status: StatusCode, code: &str, reason: &str) -> Response {
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
    let is_known = {
        let seen = shared.seen.lock().unwrap();
        seen.issued.get(certificate.as_ref()) == Some(&seen.generation)
    };
    if !is_known {
        let details = json!({"reason": "certificate_unknown", "recoverable": true});
        let body = json!({"code": "invalid_node_identity", "message": "no", "correlation_id": "c", "details": details});
        return (StatusCode::UNAUTHORIZED, Json(body)).into_response();
    }
    if request.uri().path().ends_with("/tasks/wait") {
        let mut seen = shared.seen.lock().unwrap();
        if seen.certificates.last().map(Vec::as_slice) != Some(certificate.as_ref()) {
            seen.certificates.push(certificate.to_vec());
        }
    }
    next.run(request).await
}

pub(super) fn certify(shared: &Shared, csr_pem: &str) -> EnrollAnswer {
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
    let certificate = request.signed_by(&shared.issuer).unwrap();
    let identity_generation = {
        let mut seen = shared.seen.lock().unwrap();
        let generation = seen.generation;
        seen.issued.insert(certificate.der().to_vec(), generation);
        generation
    };
    EnrollAnswer {
        certificate_pem: certificate.pem(),
        chain_pem: shared.ca_pem.clone(),
        not_after,
        recovery: RecoveryState { identity_generation, remaining: 5 },
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

/// As `domain` judges it.
async fn recover(State(shared): State<Arc<Shared>>, Json(request): Json<RecoverRequest>) -> Response {
    let refused = || refuse(StatusCode::UNAUTHORIZED, "enrollment_rejected", "");
    {
        let mut seen = shared.seen.lock().unwrap();
        let mut behaviour = shared.behaviour.lock().unwrap();
        let key = seen.recovery_key.as_ref();
        let signed = key.is_some_and(|key| request.is_signed_by(shared.node_id, key));
        let fresh = seen.nonces.last() == Some(&request.nonce) && !counts_down(&mut behaviour.expire_nonces);
        let token = request.enrollment_token.expose();
        let spent = token == behaviour.token && seen.spent_token.as_deref() == Some(token);
        let from = match request.identity_generation {
            1 => seen.enrolled_generation,
            given => given,
        };
        let is_repeated = seen.recoveries.last() == Some(&request.csr_pem) && from + 1 == seen.generation;
        let is_next = from == seen.generation;
        if !signed || !fresh || !spent {
            return refused();
        }
        if !(is_repeated || is_next) {
            seen.clones += usize::from(from < seen.generation);
            return refused();
        }
        seen.nonces.clear();
        if is_next {
            seen.generation += 1;
            seen.recoveries.push(request.csr_pem.clone());
        }
    }
    let answer = certify(&shared, &request.csr_pem);
    if counts_down(&mut shared.behaviour.lock().unwrap().lose_recovery_answers) {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", "");
    }
    record(&shared, "enroll_answer", answer).into_response()
}

/// Whether something is to be so once more.
fn counts_down(left: &mut usize) -> bool {
    let holds = *left > 0;
    *left = left.saturating_sub(1);
    holds
}

async fn enroll(State(shared): State<Arc<Shared>>, Json(request): Json<EnrollRequest>) -> Response {
    if let Some(refused) = reject_unsupported_protocol(&shared, request.protocol) {
        return refused;
    }
    let token = request.enrollment_token.expose();
    let lost = {
        let mut seen = shared.seen.lock().unwrap();
        let mut behaviour = shared.behaviour.lock().unwrap();
        seen.csrs.push(request.csr_pem.clone());
        if behaviour.refuse_enrollment || token != behaviour.token || seen.spent_token.as_deref() == Some(token) {
            return refuse(StatusCode::UNAUTHORIZED, "enrollment_rejected", "");
        }
        if seen.csrs.len() <= behaviour.lose_enroll_answers {
            return refuse(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", "");
        }
        seen.recovery_key = Some(request.recovery_public_key);
        seen.spent_token = Some(token.to_owned());
        seen.generation += 1;
        seen.enrolled_generation = seen.generation;
        counts_down(&mut behaviour.lose_answers_of_enrolled)
    };
    let answer = certify(&shared, &request.csr_pem);
    if lost {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", "");
    }
    (StatusCode::CREATED, record(&shared, "enroll_answer", answer)).into_response()
}

async fn renew(State(shared): State<Arc<Shared>>, Json(request): Json<RenewRequest>) -> Response {
    shared.seen.lock().unwrap().renewals += 1;
    record(&shared, "enroll_answer", certify(&shared, &request.csr_pem)).into_response()
}

async fn wait(State(shared): State<Arc<Shared>>) -> Response {
    {
        let mut seen = shared.seen.lock().unwrap();
        seen.polls_since_heartbeat += 1;
        seen.most_polls_between_heartbeats = seen.most_polls_between_heartbeats.max(seen.polls_since_heartbeat);
    }
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
    let has_later_fields = heartbeat != heartbeat.clone().without_later_fields();
    {
        let mut seen = shared.seen.lock().unwrap();
        seen.heartbeats.push(heartbeat);
        seen.polls_since_heartbeat = 0;
    }
    if let Some(refused) = reject_unsupported_protocol(&shared, protocol) {
        return refused;
    }
    let reads_later_fields = shared.behaviour.lock().unwrap().reads_later_fields;
    if has_later_fields && !reads_later_fields {
        return refuse(StatusCode::BAD_REQUEST, "invalid_request", "");
    }
    let (sets, lowest, authorities, renew_within_seconds) = {
        let behaviour = shared.behaviour.lock().unwrap();
        let lowest = behaviour.lowest_set.clone();
        (behaviour.verifier_sets.clone(), lowest, behaviour.node_authorities.clone(), behaviour.renew_within_seconds)
    };
    let answer = HeartbeatAnswer {
        later_fields: LATER_FIELDS.into_iter().filter(|_| reads_later_fields).map(str::to_owned).collect(),
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

//! The client of the node API: TLS to the bundle's CA only, with the node's certificate as client identity.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::header::{CONTENT_TYPE, DATE, HeaderMap, RETRY_AFTER};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::time_provider::TimeProvider;
use rustls::{AlertDescription, CertificateError, ClientConfig, RootCertStore};
use secrecy::ExposeSecret as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;
use wire::enroll::{EnrollAnswer, EnrollRequest, NonceAnswer, RecoverRequest, RenewRequest};
use wire::error::{ErrorEnvelope, INVALID_NODE_IDENTITY, RECOVERABLE, reason};
use wire::heartbeat::{Heartbeat, HeartbeatAnswer};
use wire::log_gateway_access::LogTokenAnswer;
use wire::recording::ChunkAnswer;
use wire::task::{ResultAnswer, SignedEnvelope, TaskOrigin, TaskResult};

use crate::config::AgentConfig;
use crate::identity::AgentIdentity;
use crate::server_clock::{ServerClock, TimeBounds, since_boot};

mod clock_correction;

/// Every response of the control plane has it.
pub const CORRELATION_ID: &str = "x-correlation-id";
const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// What a long poll may take beyond its requested timeout.
const WAIT_MARGIN: Duration = Duration::from_secs(10);
/// The resolution of the header `Date`.
const DATE_STEP: Duration = Duration::from_secs(1);
/// The longest response body that is read.
const MAX_RESPONSE_BYTES: usize = 4 * 1024 * 1024;
/// The longest pause that an answer may ask for: a node is silent for no longer.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// A client of the node API.
#[derive(Debug, Clone)]
pub struct NodeApiClient {
    client: Client,
    base: String,
    /// Unique for each client, and so for each certificate.
    made: Uuid,
    /// The bundle's CA, PEM.
    authorities_pem: Arc<str>,
    clock: ServerClock,
}

/// A task as received.
#[derive(Debug, Clone)]
pub struct ReceivedTask {
    pub envelope: SignedEnvelope,
    pub correlation_id: String,
}

/// Why a call did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum NodeApiError {
    #[error(
        "the control plane's certificate is refused: it does not chain to the bootstrap bundle's CA, or is for another host"
    )]
    Untrusted(#[source] reqwest::Error),
    #[error("the control plane's certificate {validity}: {why}")]
    CertificateTime {
        validity: ServerCertificateValidity,
        why: TimeDoubt,
        #[source]
        source: reqwest::Error,
    },
    #[error("the node's certificate is not taken: its authority is not trusted, or it has ended")]
    CertificateRefused(#[source] reqwest::Error),
    #[error("the control plane could not be reached")]
    Unreachable(#[source] reqwest::Error),
    #[error("the control plane answered {status}{}", describe(.error.as_ref()))]
    Refused { status: StatusCode, error: Option<ErrorEnvelope>, retry_after: Option<Duration> },
    #[error("the control plane's answer is not understood: {why}")]
    Unreadable { why: String },
}

/// Which end of a certificate's validity it is beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerCertificateValidity {
    /// `None` where TLS does not say when.
    EndedAt(Option<DateTime<Utc>>),
    BeginsAt(Option<DateTime<Utc>>),
}

impl ServerCertificateValidity {
    /// What the verification says, if it is about time alone.
    fn of(error: &CertificateError) -> Option<Self> {
        let time = |at: UnixTime| DateTime::from_timestamp(i64::try_from(at.as_secs()).ok()?, 0);
        match error {
            CertificateError::Expired => Some(Self::EndedAt(None)),
            CertificateError::ExpiredContext { not_after, .. } => Some(Self::EndedAt(time(*not_after))),
            CertificateError::NotValidYet => Some(Self::BeginsAt(None)),
            CertificateError::NotValidYetContext { not_before, .. } => Some(Self::BeginsAt(time(*not_before))),
            _ => None,
        }
    }

    /// The moment within the validity that is nearest to the time of the verification.
    fn nearest(self) -> Option<DateTime<Utc>> {
        let (Self::EndedAt(at) | Self::BeginsAt(at)) = self;
        at
    }
}

impl fmt::Display for ServerCertificateValidity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EndedAt(Some(at)) => write!(f, "ended at {at}"),
            Self::EndedAt(None) => f.write_str("has ended"),
            Self::BeginsAt(Some(at)) => write!(f, "is valid from {at} on"),
            Self::BeginsAt(None) => f.write_str("is not valid yet"),
        }
    }
}

/// Why the control plane's certificate is not verified at another time than the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimeDoubt {
    /// There is no answer that has the control plane's time.
    NoTime,
    /// It is not valid by the control plane's own time.
    ByServerTime(DateTime<Utc>),
    /// The answer's time is before the last one that this node has known.
    TooEarly { server: DateTime<Utc>, last: DateTime<Utc> },
}

impl fmt::Display for TimeDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTime => f.write_str("the control plane has not answered with its time"),
            Self::ByServerTime(at) => {
                write!(f, "it is not valid by the control plane's own time either, {at}; replace it")
            }
            Self::TooEarly { server, last } => write!(
                f,
                "the control plane's time, {server}, is before the last one that this node has known, {last}; set this machine's clock \
                 by a time service (chrony or systemd-timesyncd)"
            ),
        }
    }
}

fn describe(error: Option<&ErrorEnvelope>) -> String {
    error.map_or_else(String::new, |error| {
        let reason = error.reason().map(|reason| format!(" ({reason})")).unwrap_or_default();
        format!(" {}{reason}: {} [correlation {}]", error.code, error.message, error.correlation_id)
    })
}

impl NodeApiError {
    /// The `Retry-After` of the control plane.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            Self::Untrusted(_)
            | Self::CertificateTime { .. }
            | Self::CertificateRefused(_)
            | Self::Unreachable(_)
            | Self::Unreadable { .. } => None,
        }
    }

    /// The status, if there was a response.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            Self::Untrusted(_)
            | Self::CertificateTime { .. }
            | Self::CertificateRefused(_)
            | Self::Unreachable(_)
            | Self::Unreadable { .. } => None,
        }
    }

    /// A code for the log field `error_code`.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::Untrusted(_) => "tls_untrusted",
            Self::CertificateTime { .. } => "server_certificate_time",
            Self::CertificateRefused(_) => "certificate_refused",
            Self::Unreachable(_) => "unreachable",
            Self::Refused { error, .. } => error.as_ref().map_or("refused", |error| &error.code),
            Self::Unreadable { .. } => "unreadable_answer",
        }
    }

    /// Whether the error's details name this key.
    #[must_use]
    pub fn has_detail(&self, detail: &str) -> bool {
        matches!(self, Self::Refused { error: Some(error), .. } if error.details.contains_key(detail))
    }

    /// Whether the control plane speaks an older protocol than this agent, as replicas do before their upgrade.
    #[must_use]
    pub fn is_from_older_control_plane(&self) -> bool {
        match self {
            Self::Refused { status: StatusCode::UPGRADE_REQUIRED, error: Some(error), .. } => {
                let newest = error.details.get("newest_protocol").and_then(serde_json::Value::as_u64);
                newest.is_some_and(|newest| newest < u64::from(wire::PROTOCOL))
            }
            Self::Refused { .. }
            | Self::Untrusted(_)
            | Self::CertificateTime { .. }
            | Self::CertificateRefused(_)
            | Self::Unreachable(_)
            | Self::Unreadable { .. } => false,
        }
    }

    /// Whether the node's certificate was refused: with a TLS alert by whatever terminates TLS, or with an error code by a control plane
    /// behind a proxy.
    #[must_use]
    pub fn is_certificate_refusal(&self) -> bool {
        match self {
            // nginx completes the handshake first, and refuses each request with an error page of its own.
            Self::CertificateRefused(_) | Self::Refused { status: StatusCode::BAD_REQUEST, error: None, .. } => true,
            Self::Refused { status: StatusCode::UNAUTHORIZED, error: Some(error), .. } => {
                let of_the_certificate = [reason::CERTIFICATE_UNKNOWN, reason::CERTIFICATE_EXPIRED];
                error.code == INVALID_NODE_IDENTITY
                    && error.reason().is_some_and(|reason| of_the_certificate.contains(&reason))
            }
            Self::Refused { .. }
            | Self::Untrusted(_)
            | Self::CertificateTime { .. }
            | Self::Unreachable(_)
            | Self::Unreadable { .. } => false,
        }
    }

    /// Whether the control plane says that its state lacks the certificate, so that a recovery replaces it.
    #[must_use]
    pub fn is_certificate_forgotten(&self) -> bool {
        self.is_certificate_refusal()
            && matches!(self, Self::Refused { error: Some(error), .. } if error.details.get(RECOVERABLE) == Some(&true.into()))
    }

    /// Whether the response is the control plane's own, not that of a proxy in between.
    #[must_use]
    pub fn is_from_control_plane(&self) -> bool {
        matches!(self, Self::Refused { error: Some(_), .. })
    }

    /// Whether the control plane has refused the request with one of these statuses. The page of a proxy in between is none of its refusals.
    #[must_use]
    pub fn is_refused_with(&self, statuses: &[StatusCode]) -> bool {
        self.is_from_control_plane() && self.status().is_some_and(|status| statuses.contains(&status))
    }

    /// Whether the node was removed from the inventory permanently.
    #[must_use]
    pub fn is_node_removed(&self) -> bool {
        match self {
            Self::Refused { status, error: Some(error), .. } => {
                *status == StatusCode::UNAUTHORIZED
                    && error.code == INVALID_NODE_IDENTITY
                    && error.reason() == Some(reason::NODE_REMOVED)
            }
            Self::Refused { .. }
            | Self::Untrusted(_)
            | Self::CertificateTime { .. }
            | Self::CertificateRefused(_)
            | Self::Unreachable(_)
            | Self::Unreadable { .. } => false,
        }
    }
}

/// Why no client can be built from the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("the CA bundle holds no usable certificate; install the bootstrap bundle again")]
    CaBundle(#[source] Option<rustls::Error>),
    #[error("the node's certificate and key cannot be used; ask an administrator to reissue the node's enrollment")]
    Identity(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the HTTP client could not be made")]
    Client(#[source] reqwest::Error),
}

impl NodeApiClient {
    /// A client without a certificate, for enrollment.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn anonymous(config: &AgentConfig, clock: &ServerClock) -> Result<Self, ClientError> {
        Self::build(config, tls_of(&config.ca_bundle_pem, clock)?, clock)
    }

    /// A client that authenticates as the node.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn with_identity(
        config: &AgentConfig,
        identity: &AgentIdentity,
        clock: &ServerClock,
    ) -> Result<Self, ClientError> {
        Self::build(config, tls_as_node(config, identity, clock)?, clock)
    }

    fn build(config: &AgentConfig, tls: ClientConfig, clock: &ServerClock) -> Result<Self, ClientError> {
        Ok(Self {
            client: http_client(tls)?,
            base: format!("{}/internal/v1/nodes/{}", config.api_url, config.node_id),
            made: Uuid::new_v4(),
            authorities_pem: config.ca_bundle_pem.as_str().into(),
            clock: clock.clone(),
        })
    }
    /// Whether both present the same certificate, or both none.
    #[must_use]
    pub fn has_same_certificate(&self, other: &Self) -> bool {
        self.made == other.made
    }

    /// Spends the enrollment token.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn enroll(&self, request: &EnrollRequest) -> Result<EnrollAnswer, NodeApiError> {
        self.post("enroll", request).await
    }

    /// Requests a nonce to sign.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn nonce(&self) -> Result<NonceAnswer, NodeApiError> {
        let requested_at = since_boot();
        let answer: NonceAnswer = read(self.send(self.request(Method::GET, "recover/nonce")).await?).await?;
        if let Some(server_time) = answer.server_time {
            self.clock.learn(server_time, requested_at);
        }
        Ok(answer)
    }

    /// Requests the next identity with the spent token and the recovery key.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn recover(&self, request: &RecoverRequest) -> Result<EnrollAnswer, NodeApiError> {
        self.post("recover", request).await
    }

    /// Requests a new certificate.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn renew(&self, request: &RenewRequest) -> Result<EnrollAnswer, NodeApiError> {
        self.post("certificate/renew", request).await
    }

    /// The time of whatever answers, by the header `Date` of its response to a path that does not exist, which changes nothing. `None`: the
    /// response has no time.
    ///
    /// # Errors
    /// [`NodeApiError`] where there is no response.
    pub async fn server_time(&self) -> Result<Option<DateTime<Utc>>, NodeApiError> {
        let requested_at = since_boot();
        let response = self.attempt(self.client.get(&self.base)).await?;
        Ok(date_bounds(response.headers(), requested_at).map(|bounds| bounds.earliest))
    }

    /// Long-polls up to `timeout_seconds` (1 to 55) for a task. `session` identifies this process: a task that was dispatched to it is
    /// not dispatched to it again while it works; a task that was dispatched to an earlier process is.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn wait_task(&self, timeout_seconds: u32, session: Uuid) -> Result<Option<ReceivedTask>, NodeApiError> {
        let within = Duration::from_secs(u64::from(timeout_seconds)) + WAIT_MARGIN;
        let query = [("timeout_seconds", timeout_seconds.to_string()), ("session", session.to_string())];
        let request = self.request(Method::GET, "tasks/wait").query(&query).timeout(within);
        let response = self.send(request).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(None);
        }
        let correlation_id = header(response.headers(), CORRELATION_ID).unwrap_or_default();
        Ok(Some(ReceivedTask { envelope: read(response).await?, correlation_id }))
    }

    /// Reports a result, within the trace of its task.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn post_result(
        &self,
        task_id: Uuid,
        result: &TaskResult,
        origin: &TaskOrigin,
    ) -> Result<ResultAnswer, NodeApiError> {
        let path = format!("tasks/{task_id}/result");
        let mut request = self.request_of(Method::POST, &path, &origin.correlation_id);
        if let Some(traceparent) = &origin.traceparent {
            request = request.header(TRACEPARENT, traceparent);
            // `tracestate` has no meaning without `traceparent`.
            if let Some(tracestate) = &origin.tracestate {
                request = request.header(TRACESTATE, tracestate);
            }
        }
        read(self.send(request.json(result)).await?).await
    }

    /// Sends a heartbeat.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn heartbeat(&self, heartbeat: &Heartbeat) -> Result<HeartbeatAnswer, NodeApiError> {
        let requested_at = since_boot();
        let answer: HeartbeatAnswer = self.post("heartbeat", heartbeat).await?;
        self.clock.learn(answer.server_time, requested_at);
        Ok(answer)
    }

    /// Requests a token for the log gateway.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn log_token(&self) -> Result<LogTokenAnswer, NodeApiError> {
        read(self.send(self.request(Method::POST, "log-token")).await?).await
    }

    /// Uploads a chunk of a terminal session's recording.
    ///
    /// # Errors
    /// [`NodeApiError`].
    pub async fn put_recording_chunk(
        &self,
        session_id: Uuid,
        seq: u32,
        frames: Vec<u8>,
    ) -> Result<ChunkAnswer, NodeApiError> {
        let path = format!("terminals/{session_id}/recording/{seq}");
        let request = self.request(Method::PUT, &path).header(CONTENT_TYPE, "application/octet-stream").body(frames);
        read(self.send(request).await?).await
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.request_of(method, path, &Uuid::now_v7().to_string())
    }

    fn request_of(&self, method: Method, path: &str, correlation_id: &str) -> RequestBuilder {
        self.client.request(method, format!("{}/{path}", self.base)).header(CORRELATION_ID, correlation_id)
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, NodeApiError> {
        read(self.send(self.request(Method::POST, path).json(body)).await?).await
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, NodeApiError> {
        let response = self.attempt(request).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let retry_after = header(response.headers(), RETRY_AFTER.as_str())
            .and_then(|text| parse_retry_after(&text, self.clock.now()));
        let error = body(response).await.ok().and_then(|bytes| strict_json::from_slice(&bytes).ok());
        Err(NodeApiError::Refused { status, error, retry_after })
    }

    /// The response, whatever its status. A request whose handshake fails by the time alone is sent again once the time is corrected: nothing
    /// of it has left the machine.
    async fn attempt(&self, request: RequestBuilder) -> Result<Response, NodeApiError> {
        let (again, requested_at) = (request.try_clone(), since_boot());
        let response = match (request.send().await.map_err(transport_error), again) {
            (Err(refused @ NodeApiError::CertificateTime { .. }), Some(again)) => {
                self.correct_clock(refused, requested_at).await?;
                again.send().await.map_err(transport_error)?
            }
            (sent, _) => sent?,
        };
        if let Some(bounds) = date_bounds(response.headers(), requested_at) {
            self.clock.learn_date(bounds);
        }
        Ok(response)
    }
}

fn http_client(mut tls: ClientConfig) -> Result<Client, ClientError> {
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Client::builder()
        .tls_backend_preconfigured(tls)
        // The node calls this one host only: no proxy from the environment, no redirects.
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(RESPONSE_TIMEOUT)
        // Detects a dead replica while a long poll waits on it.
        .tcp_keepalive(Duration::from_secs(15))
        .http2_keep_alive_interval(Duration::from_secs(10))
        .http2_keep_alive_timeout(Duration::from_secs(5))
        .http2_keep_alive_while_idle(true)
        .user_agent(concat!("gpuaas-agent/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(ClientError::Client)
}

/// What the header `Date` says, if there is one.
fn date_bounds(headers: &HeaderMap, requested_at: Duration) -> Option<TimeBounds> {
    let date = DateTime::parse_from_rfc2822(&header(headers, DATE.as_str())?).ok()?.to_utc();
    Some(TimeBounds::at_arrival(date, DATE_STEP, since_boot().saturating_sub(requested_at)))
}

/// TLS to the bundle's CA only, with the node's certificate.
///
/// # Errors
/// [`ClientError`].
pub fn tls_as_node(
    config: &AgentConfig,
    identity: &AgentIdentity,
    clock: &ServerClock,
) -> Result<ClientConfig, ClientError> {
    let chain = CertificateDer::pem_slice_iter(identity.certificate_chain_pem.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| ClientError::Identity(error.into()))?;
    let key = PrivateKeyDer::from_pem_slice(identity.key_pem.expose_secret().as_bytes())
        .map_err(|error| ClientError::Identity(error.into()))?;
    client_config(&config.ca_bundle_pem, Arc::new(clock.clone()))?
        .with_client_auth_cert(chain, key)
        .map_err(|error| ClientError::Identity(error.into()))
}

/// TLS to these authorities only, without a certificate.
///
/// # Errors
/// [`ClientError`].
pub fn tls_of(authorities_pem: &str, clock: &ServerClock) -> Result<ClientConfig, ClientError> {
    Ok(client_config(authorities_pem, Arc::new(clock.clone()))?.with_no_client_auth())
}

fn client_config(
    authorities_pem: &str,
    time: Arc<dyn TimeProvider>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, ClientError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authorities_pem.as_bytes()) {
        let certificate = certificate.map_err(|_| ClientError::CaBundle(None))?;
        roots.add(certificate).map_err(|error| ClientError::CaBundle(Some(error)))?;
    }
    if roots.is_empty() {
        return Err(ClientError::CaBundle(None));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_details(provider, time)
        .with_safe_default_protocol_versions()
        .map_err(|error| ClientError::CaBundle(Some(error)))?;
    Ok(builder.with_root_certificates(roots))
}

async fn read<T: DeserializeOwned>(response: Response) -> Result<T, NodeApiError> {
    let bytes = body(response).await?;
    strict_json::from_slice(&bytes).map_err(|error| NodeApiError::Unreadable { why: error.to_string() })
}

async fn body(mut response: Response) -> Result<Vec<u8>, NodeApiError> {
    let mut bytes = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(transport_error)? {
        if bytes.len() + chunk.len() > MAX_RESPONSE_BYTES {
            return Err(NodeApiError::Unreadable { why: format!("longer than {MAX_RESPONSE_BYTES} bytes") });
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

fn transport_error(error: reqwest::Error) -> NodeApiError {
    let mut cause = std::error::Error::source(&error);
    while let Some(inner) = cause {
        if let Some(rustls::Error::InvalidCertificate(refusal)) = tls_error(inner) {
            return match ServerCertificateValidity::of(refusal) {
                Some(validity) => NodeApiError::CertificateTime { validity, why: TimeDoubt::NoTime, source: error },
                None => NodeApiError::Untrusted(error),
            };
        }
        if is_certificate_refusal(inner) {
            return NodeApiError::CertificateRefused(error);
        }
        cause = inner.source();
    }
    NodeApiError::Unreachable(error)
}

/// The alerts `unknown_ca` and `certificate_expired` (RFC 8446, section 6.2). In TLS 1.3 they arrive after the handshake is complete on
/// this side, and HTTP/2 keeps only the text of the read error.
fn is_certificate_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    [AlertDescription::UnknownCA, AlertDescription::CertificateExpired].into_iter().any(|alert| {
        let alert = rustls::Error::AlertReceived(alert);
        tls_error(error) == Some(&alert) || error.to_string().contains(&alert.to_string())
    })
}

/// TLS errors are wrapped into I/O errors, more than once, and those skip the wrapped error in `source`.
fn tls_error<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a rustls::Error> {
    let mut error = error;
    while let Some(wrapped) = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        error = wrapped;
    }
    error.downcast_ref()
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// The wait that a header `Retry-After` asks for; [`RETRY_AFTER_MAX`] at most.
pub(crate) fn parse_retry_after(text: &str, now: DateTime<Utc>) -> Option<Duration> {
    Some(failures::retry_after::parse(text, now)?.min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_read_as_seconds_or_as_a_date() {
        let now = DateTime::parse_from_rfc3339("2026-11-21T08:00:00Z").unwrap().to_utc();
        assert_eq!(parse_retry_after("7", now), Some(Duration::from_secs(7)));
        let date = "Sat, 21 Nov 2026 08:00:30 GMT";
        assert_eq!(parse_retry_after(date, now), Some(Duration::from_secs(30)));
        assert_eq!(parse_retry_after(date, now + Duration::from_secs(60)), Some(Duration::ZERO));
        assert_eq!(parse_retry_after("soon", now), None);
        for distant in ["86400", "Fri, 31 Dec 9999 23:59:59 GMT"] {
            assert_eq!(
                parse_retry_after(distant, now),
                Some(RETRY_AFTER_MAX),
                "a node is not silent for longer: {distant}"
            );
        }
    }

    #[test]
    fn only_reason_node_removed_means_permanent_removal() {
        let refused = |status: u16, code: &str, reason: &str| NodeApiError::Refused {
            status: StatusCode::from_u16(status).unwrap(),
            error: Some(ErrorEnvelope {
                code: code.into(),
                message: String::new(),
                correlation_id: String::new(),
                details: serde_json::json!({ "reason": reason }).as_object().unwrap().clone(),
            }),
            retry_after: None,
        };
        assert!(refused(401, INVALID_NODE_IDENTITY, reason::NODE_REMOVED).is_node_removed());
        assert!(!refused(401, INVALID_NODE_IDENTITY, reason::NODE_FENCED).is_node_removed());
        assert!(!refused(503, INVALID_NODE_IDENTITY, reason::NODE_REMOVED).is_node_removed());
    }
}

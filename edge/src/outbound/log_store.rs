//! The client of the log store behind the gateway for nodes' logs: any service with the push API of Loki.

#[cfg(test)]
mod tests;

use crate::http::error::{ApiError, Code};
use crate::outbound::http_client::{
    client_builder, error_chain, is_tls_failure, is_web_page, read_bounded_body, retry_after,
};
use crate::outbound::service_access::{ServiceAccess, ServiceAccessError};
use axum::body::Bytes;
use chrono::Utc;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION};
use reqwest::{Client, StatusCode, Url};
use std::time::Duration;
use strum::{EnumIter, IntoStaticStr};
use thiserror::Error;
use wire::address::{AddressError, ServiceUrl};

/// The path of the push API, below the address of the store or of the gateway.
pub const PUSH_PATH: &str = "/loki/api/v1/push";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How much of a refusal is read, and how much of it the collector is shown.
const REFUSAL_BYTES: usize = 16 * 1024;
const REFUSAL_SHOWN: usize = 300;
/// The longest pause that is passed on from the store to a collector.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);

/// What Loki says of lines, in lower case (`pkg/validation/validate.go` and `pkg/loghttp/push` of grafana/loki).
const LOKI_REFUSALS: [&str; 17] = [
    "entry for stream",
    "entry out of order",
    "entry too far behind",
    "timestamp too old",
    "timestamp too new",
    "max entry size",
    "at least one label pair is required",
    "at least one valid stream is required",
    "label names; limit",
    "label name too long",
    "label value too long",
    "duplicate label name",
    "missing required labels",
    "structured metadata",
    "loghttp.pushrequest",
    "error parsing labels",
    "couldn't parse labels",
];

/// Why the client could not be built.
#[derive(Debug, Error)]
pub enum LogStoreError {
    #[error("{0}")]
    Address(AddressError),
    #[error(transparent)]
    Access(#[from] ServiceAccessError),
    #[error("the client for the log store cannot be made: {0}")]
    Client(String),
}

/// A store that receives the batches. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LogStore {
    push: Url,
    client: Client,
}

/// Why a batch was not stored. The reason decides who acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum PushFailureKind {
    /// The store refuses our user, token or tenant.
    Credentials,
    /// The address is another service's, or the certificate is not by the authorities or for the name that are configured.
    Address,
    /// The store takes no more for now.
    RateLimit,
    /// The store refuses these lines: too old, too new, or too long.
    Batch,
    /// The store, or a proxy in front of it, takes fewer lines at once.
    BatchSize,
    /// What is in front of the store refuses the content of these lines, as a web application firewall does, and admits an empty batch.
    Filtered,
    /// The store does not answer, or fails.
    Outage,
}

impl PushFailureKind {
    /// The value of the metric's label.
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the store is there, admits this service, and speaks of the lines alone.
    pub(crate) const fn is_of_lines(self) -> bool {
        match self {
            Self::RateLimit | Self::Batch | Self::BatchSize | Self::Filtered => true,
            Self::Credentials | Self::Address | Self::Outage => false,
        }
    }
}

/// Why a batch was not stored.
#[derive(Debug)]
pub(crate) struct PushFailure {
    pub(crate) kind: PushFailureKind,
    /// What the store has answered, or why it did not: bounded, on one line.
    text: String,
    /// The pause that the store asks for.
    retry_after: Option<Duration>,
}

/// An answer that is no success.
struct Refusal {
    failure: PushFailure,
    /// The reason where the store admits an empty batch, if it is another one then.
    of_lines: Option<PushFailureKind>,
}

impl LogStore {
    /// `base` is the store's address, without [`PUSH_PATH`]; `authorities_pem` are trusted beside the system's.
    ///
    /// # Errors
    /// Where the address is none of a service or has the path of the push API, the access cannot be carried, or the authorities cannot be
    /// read.
    pub fn new(base: &str, authorities_pem: Option<&str>, access: &ServiceAccess) -> Result<Self, LogStoreError> {
        let base = ServiceUrl::parse(base).map_err(LogStoreError::Address)?;
        if let Some(path) =
            ["/loki/api/v1/push", "/loki/api/v1", "/loki/api"].iter().find(|it| base.as_str().ends_with(*it))
        {
            let why = format!("ends in {path}, and {PUSH_PATH} is added to it; leave that path out");
            return Err(LogStoreError::Address(base.refuse(why)));
        }
        let push = Url::parse(&format!("{}{PUSH_PATH}", base.as_str()));
        let push = push.map_err(|error| LogStoreError::Client(error.to_string()))?;
        let client = client_builder(authorities_pem).map_err(LogStoreError::Client)?;
        let client =
            client.timeout(REQUEST_TIMEOUT).connect_timeout(CONNECT_TIMEOUT).default_headers(access.headers()?);
        let client = client.build().map_err(|error| LogStoreError::Client(error.to_string()))?;
        Ok(Self { push, client })
    }

    /// Whether the store is at its address and admits this service. Sends a batch without streams, of which nothing is stored.
    ///
    /// # Errors
    /// What keeps it from storing batches, for an operator.
    pub async fn check(&self) -> Result<(), String> {
        match self.probe(HeaderValue::from_static("application/json")).await {
            Ok(()) => Ok(()),
            // It is there, and admits this service.
            Err(failure) if failure.kind == PushFailureKind::RateLimit => Ok(()),
            Err(failure) if failure.kind == PushFailureKind::BatchSize => {
                Err(format!("{}: it refuses an empty batch as too large", operators_step(PushFailureKind::Address)))
            }
            Err(PushFailure { kind, text, .. }) => Err(format!("{}: {text}", operators_step(kind))),
        }
    }

    /// Sends an empty batch of this type. Stores differ in whether an empty batch is one: what Loki says of it is an admission, too.
    async fn probe(&self, content_type: HeaderValue) -> Result<(), PushFailure> {
        let is_json = content_type.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("json"));
        // Of protobuf the empty message, compressed with snappy.
        let empty = Bytes::from_static(if is_json { br#"{"streams":[]}"# } else { &[0] });
        match self.send(content_type, empty).await {
            Ok(()) => Ok(()),
            Err(Refusal { failure, .. }) if failure.kind == PushFailureKind::Batch => Ok(()),
            Err(Refusal { failure, .. }) => Err(failure),
        }
    }

    /// Passes a batch on as it came. Where the answer may be about its lines or about this service, an empty batch decides.
    ///
    /// # Errors
    /// [`PushFailure`]
    pub(crate) async fn push(&self, content_type: HeaderValue, batch: Bytes) -> Result<(), PushFailure> {
        let Err(Refusal { mut failure, of_lines }) = self.send(content_type.clone(), batch).await else {
            return Ok(());
        };
        if let Some(of_lines) = of_lines
            && self.probe(content_type).await.is_ok()
        {
            failure.kind = of_lines;
        }
        Err(failure)
    }

    async fn send(&self, content_type: HeaderValue, batch: Bytes) -> Result<(), Refusal> {
        let request = self.client.post(self.push.clone()).header(CONTENT_TYPE, content_type).body(batch);
        let response = request.send().await.map_err(|error| {
            let kind = if is_tls_failure(&error) { PushFailureKind::Address } else { PushFailureKind::Outage };
            Refusal { failure: PushFailure { kind, text: error_chain(error), retry_after: None }, of_lines: None }
        })?;
        let (status, headers) = (response.status(), response.headers().clone());
        let is_page = is_web_page(&headers);
        if status.is_success() && !is_page {
            return Ok(());
        }
        let body = read_bounded_body(response, REFUSAL_BYTES).await.unwrap_or_default();
        let body = String::from_utf8_lossy(&body);
        let (kind, of_lines) = kind_of(status, is_page, &body);
        let body = if is_page { "a web page" } else { body.trim() };
        let body: String = body.chars().filter(|character| !character.is_control()).take(REFUSAL_SHOWN).collect();
        let to = headers.get(LOCATION).filter(|_| status.is_redirection()).and_then(|value| value.to_str().ok());
        let text = match to {
            _ if kind.is_of_lines() => body,
            Some(to) => {
                format!("it answered {status}, and names {}", to.chars().take(REFUSAL_SHOWN).collect::<String>())
            }
            None => format!("it answered {status}: {body}"),
        };
        Err(Refusal { failure: PushFailure { kind, text, retry_after: pause(&headers) }, of_lines })
    }
}

/// The reason of a refusal, and the one where the store admits an empty batch. Only a refusal of the lines lets the collector drop them; any
/// other is an operator's to correct. Many services answer 400 to a path that they do not know.
fn kind_of(status: StatusCode, is_page: bool, body: &str) -> (PushFailureKind, Option<PushFailureKind>) {
    use PushFailureKind::{Address, Batch, BatchSize, Credentials, Filtered, Outage, RateLimit};
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::PROXY_AUTHENTICATION_REQUIRED => (Credentials, None),
        // Firewalls answer so to words in a line, some of them with a page and another status.
        StatusCode::FORBIDDEN => (Credentials, Some(Filtered)),
        StatusCode::NOT_ACCEPTABLE => (Address, Some(Filtered)),
        StatusCode::TOO_MANY_REQUESTS => (RateLimit, None),
        // Also by a proxy in front of the store: fewer lines at once may pass it.
        StatusCode::PAYLOAD_TOO_LARGE => (BatchSize, None),
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY if !is_page => {
            let body = body.to_ascii_lowercase();
            if body.contains("org id") {
                // "no org id", "multiple org IDs present": about the tenant, not about a line.
                (Credentials, None)
            } else if LOKI_REFUSALS.iter().any(|refusal| body.contains(refusal)) {
                (Batch, None)
            } else {
                (Address, Some(Batch))
            }
        }
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => (Address, Some(Filtered)),
        // A page.
        status if status.is_success() => (Address, Some(Filtered)),
        StatusCode::REQUEST_TIMEOUT => (Outage, None),
        status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => (Outage, None),
        _ => (Address, None),
    }
}

fn pause(headers: &HeaderMap) -> Option<Duration> {
    Some(retry_after(headers, Utc::now())?.clamp(Duration::from_secs(1), RETRY_AFTER_MAX))
}

const fn operators_step(kind: PushFailureKind) -> &'static str {
    match kind {
        PushFailureKind::Credentials => {
            "the log store refuses this service's credentials or its tenant; correct SVC_LOG_STORE_TENANT, \
             SVC_LOG_STORE_USER with its password, or SVC_LOG_STORE_TOKEN"
        }
        PushFailureKind::Address => {
            "there is no log store with the push API of Loki at the address; correct SVC_LOG_STORE_URL or SVC_LOG_STORE_CA_PATH"
        }
        PushFailureKind::RateLimit => {
            "the log store takes no more at the moment; raise its limits, or find the node that logs so much"
        }
        PushFailureKind::Batch | PushFailureKind::BatchSize | PushFailureKind::Filtered => {
            "the log store, or what is in front of it, refuses these lines"
        }
        PushFailureKind::Outage => "the log store does not answer, or fails",
    }
}

/// The answer to the collector. It drops lines after `invalid_request` and `payload_too_large` alone, which only a refusal of the lines has.
impl From<PushFailure> for ApiError {
    fn from(failure: PushFailure) -> Self {
        let PushFailure { kind, text, retry_after } = failure;
        let (code, reason, message) = match kind {
            PushFailureKind::Credentials => (
                Code::ServiceUnavailable,
                "log_store_credentials",
                "The log store refuses the service's own credentials, which its operator has to correct; keep the batch and send it \
                 again after Retry-After.",
            ),
            PushFailureKind::Address => (
                Code::ServiceUnavailable,
                "log_store_address",
                "There is no log store at the address that the service's operator has set; keep the batch and send it again after \
                 Retry-After.",
            ),
            PushFailureKind::Outage => (
                Code::ServiceUnavailable,
                "log_store_outage",
                "The log store does not take the batch at the moment; keep it and send it again after Retry-After.",
            ),
            PushFailureKind::RateLimit => (
                Code::RateLimited,
                "log_store_rate_limit",
                "The log store takes no more at the moment; send the batch again after Retry-After.",
            ),
            PushFailureKind::BatchSize => (
                Code::PayloadTooLarge,
                "log_store_refused",
                "The log store refuses the batch as too large; send it in parts.",
            ),
            PushFailureKind::Filtered => (
                Code::PayloadTooLarge,
                "log_store_filtered",
                "What is in front of the log store refuses the content of the batch; send it in parts, and drop the line that is refused \
                 alone.",
            ),
            PushFailureKind::Batch => (
                Code::InvalidRequest,
                "log_store_refused",
                "The log store refuses the batch; drop it, since it will be refused again.",
            ),
        };
        let error = Self::new(code, message).detail("reason", reason);
        // What a store says of lines is for the node; what it says of this service is for the operator's log.
        let error = match kind.is_of_lines() {
            true => error.detail("log_store", text),
            false => error.because(format!("{}: {text}", operators_step(kind))),
        };
        let waits = matches!(code, Code::ServiceUnavailable | Code::RateLimited);
        match retry_after.filter(|_| waits) {
            Some(pause) => error.retry_after(pause),
            None => error,
        }
    }
}

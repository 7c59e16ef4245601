//! The client of the log store behind the gateway for nodes' logs: any service with the push API of Loki.

#[cfg(test)]
mod tests;

use crate::http::error::{ApiError, Code};
use crate::outbound::http_client::{client_builder, error_chain, is_tls_failure, is_web_page, read_bounded_body};
use crate::outbound::service_access::{ServiceAccess, ServiceAccessError};
use axum::body::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER};
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
const RETRY_AFTER_MAX: u64 = 300;

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
            Self::RateLimit | Self::Batch | Self::BatchSize => true,
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
        let empty = Bytes::from_static(br#"{"streams":[]}"#);
        match self.push(HeaderValue::from_static("application/json"), empty).await {
            // Stores differ in whether an empty batch is one.
            Ok(()) => Ok(()),
            Err(failure) if failure.kind.is_of_lines() => Ok(()),
            Err(PushFailure { kind, text, .. }) => Err(format!("{}: {text}", operators_step(kind))),
        }
    }

    /// Passes a batch on as it came.
    ///
    /// # Errors
    /// [`PushFailure`]
    pub(crate) async fn push(&self, content_type: HeaderValue, batch: Bytes) -> Result<(), PushFailure> {
        let request = self.client.post(self.push.clone()).header(CONTENT_TYPE, content_type).body(batch);
        let response = request.send().await.map_err(|error| {
            let kind = if is_tls_failure(&error) { PushFailureKind::Address } else { PushFailureKind::Outage };
            PushFailure { kind, text: error_chain(error), retry_after: None }
        })?;
        let (status, headers) = (response.status(), response.headers().clone());
        let is_page = is_web_page(&headers);
        if status.is_success() && !is_page {
            return Ok(());
        }
        let body = read_bounded_body(response, REFUSAL_BYTES).await.unwrap_or_default();
        let body = String::from_utf8_lossy(&body);
        let kind = kind_of(status, is_page, &body);
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
        Err(PushFailure { kind, text, retry_after: pause(&headers) })
    }
}

/// The reason of a refusal. Only a refusal of the lines by Loki lets the collector drop them; any other is an operator's to correct.
fn kind_of(status: StatusCode, is_page: bool, body: &str) -> PushFailureKind {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            PushFailureKind::Credentials
        }
        StatusCode::TOO_MANY_REQUESTS => PushFailureKind::RateLimit,
        // Also by a proxy in front of the store: fewer lines at once may pass it.
        StatusCode::PAYLOAD_TOO_LARGE => PushFailureKind::BatchSize,
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY if is_page => PushFailureKind::Address,
        StatusCode::BAD_REQUEST | StatusCode::UNPROCESSABLE_ENTITY => {
            // "no org id", "multiple org IDs present": about the tenant, not about a line.
            let is_about_tenant = body.to_ascii_lowercase().contains("org id");
            if is_about_tenant { PushFailureKind::Credentials } else { PushFailureKind::Batch }
        }
        StatusCode::REQUEST_TIMEOUT => PushFailureKind::Outage,
        status if status.is_server_error() && status != StatusCode::NOT_IMPLEMENTED => PushFailureKind::Outage,
        _ => PushFailureKind::Address,
    }
}

/// In seconds; a store's date is not passed on, since its clock is another one.
fn pause(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds.clamp(1, RETRY_AFTER_MAX)))
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
        PushFailureKind::Batch | PushFailureKind::BatchSize => "the log store refuses these lines",
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

//! The client of the log store behind the gateway for nodes' logs: any service with the push API of Loki.

use crate::http::error::{ApiError, Code};
use crate::outbound::http_client::{client_builder, error_chain, is_secure, read_bounded_body};
use axum::body::Bytes;
use reqwest::header::{CONTENT_TYPE, HeaderValue};
use reqwest::{Client, StatusCode, Url};
use std::time::Duration;
use thiserror::Error;

/// The path of the push API, below the address of the store or of the gateway.
pub const PUSH_PATH: &str = "/loki/api/v1/push";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How much of a refusal is read, and how much of it the collector is shown.
const REFUSAL_BYTES: usize = 16 * 1024;
const REFUSAL_SHOWN: usize = 300;

/// Why the client could not be built.
#[derive(Debug, Error)]
pub enum LogStoreError {
    #[error("{0} is no https address (http only on this machine)")]
    Insecure(String),
    #[error("{0} already ends in {PUSH_PATH}, which is added to it; leave the path out")]
    HasPushPath(String),
    #[error("the client for the log store cannot be made: {0}")]
    Client(String),
}

/// A store that receives the batches. Cheap to clone.
#[derive(Clone, Debug)]
pub struct LogStore {
    push: Url,
    client: Client,
}

impl LogStore {
    /// `base` is the store's address, without [`PUSH_PATH`]; `authorities_pem` are trusted beside the system's.
    ///
    /// # Errors
    /// Where the address is not on HTTPS or has the path of the push API, or the authorities cannot be read.
    pub fn new(base: &str, authorities_pem: Option<&str>) -> Result<Self, LogStoreError> {
        let base = base.trim_end_matches('/');
        let shown = || base.chars().take(200).collect();
        if base.ends_with(PUSH_PATH) {
            return Err(LogStoreError::HasPushPath(shown()));
        }
        let push = Url::parse(&format!("{base}{PUSH_PATH}")).ok().filter(|_| is_secure(base));
        let push = push.ok_or_else(|| LogStoreError::Insecure(shown()))?;
        let client = client_builder(authorities_pem).map_err(LogStoreError::Client)?;
        let client = client.timeout(REQUEST_TIMEOUT).connect_timeout(CONNECT_TIMEOUT).build();
        let client = client.map_err(|error| LogStoreError::Client(error.to_string()))?;
        Ok(Self { push, client })
    }

    /// Passes a batch on as it came.
    ///
    /// # Errors
    /// As [`refused`] says where the store refuses the batch, `service_unavailable` where it does not answer or fails.
    pub(crate) async fn push(&self, content_type: HeaderValue, batch: Bytes) -> Result<(), PushError> {
        let request = self.client.post(self.push.clone()).header(CONTENT_TYPE, content_type).body(batch);
        let response = request.send().await.map_err(|error| PushError::Failed(error_chain(error)))?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let body = read_bounded_body(response, REFUSAL_BYTES).await.unwrap_or_default();
        let body = String::from_utf8_lossy(&body);
        let text: String =
            body.trim().chars().filter(|character| !character.is_control()).take(REFUSAL_SHOWN).collect();
        if status.is_client_error() && status != StatusCode::UNAUTHORIZED && status != StatusCode::FORBIDDEN {
            return Err(PushError::Refused { status, text });
        }
        Err(PushError::Failed(format!("the log store answered {status}: {text}")))
    }
}

/// Why a batch was not stored.
#[derive(Debug)]
pub(crate) enum PushError {
    /// It is the batch's fault, or there are too many of them.
    Refused { status: StatusCode, text: String },
    /// The store could not be reached or failed.
    Failed(String),
}

impl From<PushError> for ApiError {
    fn from(error: PushError) -> Self {
        match error {
            PushError::Refused { status, text } => refused(status, &text),
            PushError::Failed(why) => {
                let message =
                    "The log store does not take the batch at the moment; keep it and send it again after Retry-After.";
                Self::new(Code::ServiceUnavailable, message).because(why)
            }
        }
    }
}

/// The answer to a batch that the store has refused; a collector sends it again only after `rate_limited`.
fn refused(status: StatusCode, text: &str) -> ApiError {
    let (code, message) = match status {
        StatusCode::TOO_MANY_REQUESTS => {
            (Code::RateLimited, "The log store takes no more at the moment; send the batch again after Retry-After.")
        }
        StatusCode::PAYLOAD_TOO_LARGE => {
            (Code::PayloadTooLarge, "The log store refuses the batch as too large; send it in parts.")
        }
        _ => (Code::InvalidRequest, "The log store refuses the batch; drop it, since it will be refused again."),
    };
    ApiError::new(code, message).detail("reason", "log_store_refused").detail("log_store", text.to_owned())
}

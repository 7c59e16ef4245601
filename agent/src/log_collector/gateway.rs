//! The log gateway as the collector calls it: the node's token for it, and a push.

use super::settings::PUSH_PATH;
use super::{CollectorConfig, CollectorError};
use crate::identity::{AgentIdentity, IdentityStore};
use crate::node_api_client::{NodeApiClient, NodeApiError, parse_retry_after, tls_of};
use crate::server_clock::ServerClock;
use crate::{chain, config::AgentConfig};
use chrono::TimeDelta;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use std::time::Duration;
use wire::error::ErrorEnvelope;
use wire::log_gateway_access::LogTokenAnswer;

/// A token is replaced so long before its end.
const RENEW_BEFORE: TimeDelta = TimeDelta::minutes(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The gateway waits for its log store for less.
const PUSH_TIMEOUT: Duration = Duration::from_secs(40);
/// What is read of an answer that is not a success.
const ANSWER_BYTES: usize = 64 * 1024;

/// What became of a push.
#[derive(Debug)]
pub(super) enum PushOutcome {
    Accepted,
    /// These lines are not taken, however often they are sent.
    Refused {
        status: StatusCode,
        message: String,
    },
    /// They may be taken later.
    Later {
        retry_after: Option<Duration>,
        why: String,
    },
}

/// Why there is no token.
#[derive(Debug)]
pub(super) enum TokenError {
    NodeRemoved,
    Later { retry_after: Option<Duration>, why: String },
}

pub(super) struct Gateway {
    client: Client,
    url: String,
    agent: AgentConfig,
    clock: ServerClock,
    identities: IdentityStore,
    token: Option<LogTokenAnswer>,
}

impl Gateway {
    pub(super) fn new(config: &CollectorConfig) -> Result<Self, CollectorError> {
        let clock = ServerClock::peek(&config.agent.state_dir, config.agent.node_id);
        let client = Client::builder()
            .tls_backend_preconfigured(tls_of(&config.gateway_ca_pem, &clock)?)
            .https_only(true)
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(PUSH_TIMEOUT)
            .user_agent(concat!("gpuaas-log-collector/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(CollectorError::Gateway)?;
        Ok(Self {
            client,
            url: format!("{}{PUSH_PATH}", config.endpoint),
            agent: config.agent.clone(),
            clock,
            identities: IdentityStore::new(&config.agent),
            token: None,
        })
    }

    /// Pushes a batch with a token that is valid for long enough.
    pub(super) async fn push(&mut self, body: Vec<u8>) -> Result<PushOutcome, TokenError> {
        let authorization = self.authorization().await?;
        let request = self.client.post(&self.url).header(AUTHORIZATION, authorization);
        let sent = request.header(CONTENT_TYPE, "application/json").body(body).send().await;
        let response = match sent {
            Ok(response) => response,
            Err(error) => return Ok(later(None, format!("it cannot be reached: {}", chain(&error.without_url())))),
        };
        let status = response.status();
        if status.is_success() {
            return Ok(PushOutcome::Accepted);
        }
        let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        let retry_after = retry_after.and_then(|text| parse_retry_after(text, self.clock.now()));
        let (is_from_gateway, message) = message(response).await;
        Ok(match status {
            StatusCode::BAD_REQUEST | StatusCode::UNSUPPORTED_MEDIA_TYPE if is_from_gateway => {
                PushOutcome::Refused { status, message }
            }
            // Whatever is in between and has this bound: fewer lines at once may pass it.
            StatusCode::PAYLOAD_TOO_LARGE => PushOutcome::Refused { status, message },
            StatusCode::UNAUTHORIZED => {
                self.token = None;
                later(retry_after, format!("it does not take the token: {message}"))
            }
            StatusCode::NOT_FOUND => {
                later(retry_after, format!("there is no gateway at {}; check the endpoint", self.url))
            }
            // Also what a proxy in between answers: it says nothing about the lines.
            _ => later(retry_after, format!("it answers {status}: {message}")),
        })
    }

    async fn authorization(&mut self) -> Result<HeaderValue, TokenError> {
        let now = self.clock.now();
        let token = match self.token.take().filter(|token| token.expires_at - RENEW_BEFORE > now) {
            Some(token) => token,
            None => self.fetch_token().await?,
        };
        let value = HeaderValue::from_str(&format!("Bearer {}", token.token.expose()));
        let mut value = value.map_err(|_| token_later("the control plane's token is no header".to_owned()))?;
        value.set_sensitive(true);
        self.token = Some(token);
        Ok(value)
    }

    /// The agent renews the certificate, so it is read each time. Until the control plane's time is known, the control plane judges it.
    async fn fetch_token(&self) -> Result<LogTokenAnswer, TokenError> {
        let identity = self.identities.peek().map_err(|error| token_later(chain(&error)))?;
        let now = self.clock.known_now();
        let identity: Option<AgentIdentity> =
            identity.filter(|identity| now.is_none_or(|now| identity.is_in_force(now)));
        let identity = identity.ok_or_else(|| token_later("the node has no valid certificate yet".to_owned()))?;
        let client = NodeApiClient::with_identity(&self.agent, &identity, &self.clock);
        let client = client.map_err(|error| token_later(chain(&error)))?;
        client.log_token().await.map_err(|error| match error {
            error if error.is_node_removed() => TokenError::NodeRemoved,
            error => TokenError::Later { retry_after: error.retry_after(), why: token_failure(&error) },
        })
    }
}

fn token_failure(error: &NodeApiError) -> String {
    format!("there is no token for it: {}", chain(error))
}

const fn later(retry_after: Option<Duration>, why: String) -> PushOutcome {
    PushOutcome::Later { retry_after, why }
}

const fn token_later(why: String) -> TokenError {
    TokenError::Later { retry_after: None, why }
}

/// Whether a failure is the gateway's own, and what its message is, within a bound and on one line.
async fn message(mut response: Response) -> (bool, String) {
    let mut bytes = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        let room = ANSWER_BYTES - bytes.len();
        bytes.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if bytes.len() >= ANSWER_BYTES {
            break;
        }
    }
    let envelope: Option<ErrorEnvelope> = strict_json::from_slice(&bytes).ok();
    let is_from_gateway = envelope.is_some();
    let text = envelope.map_or_else(
        || String::from_utf8_lossy(&bytes).into_owned(),
        |error| match error.details.get("log_store").and_then(|store| store.as_str()) {
            Some(store) => format!("{} ({store})", error.message),
            None => error.message,
        },
    );
    (is_from_gateway, text.chars().filter(|character| !character.is_control()).take(500).collect())
}

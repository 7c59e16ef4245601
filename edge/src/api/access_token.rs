//! Access tokens for service accounts: OAuth 2.0 client credentials (RFC 6749, section 4.4).
//!
//! Errors use the service's own envelope; `details.error` has the code of the RFC (section 5.2).

use actors::rate_cells::RateCells;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::{Extension, Json};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::TimeDelta;
use domain::gcra::WINDOW;
use domain::policy::PolicyKey;
use domain::service_account::ServiceAccount;
use domain::{ServiceAccountId, ServiceAccountKeyId};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::app_state::AppState;
use crate::auth::opaque_token::{TokenHash, TokenPurpose, read};
use crate::auth::signed_tokens::service_account::ServiceTokens;
use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};
use crate::http::request_body::Form;
use crate::limits::rate_limit::{LimitedRoute, cell_of};
use crate::tls::Peer;

const BASIC: &str = "Basic realm=\"gpuaas\"";

/// Failed attempts a minute: a secret of 256 bits cannot be guessed, but attempts fill the log. A correct secret is never limited.
const PER_ACCOUNT: u32 = 10;
const PER_ADDRESS: u32 = 60;
const MAX_TRACKED: usize = 16_384;

/// The recent failed attempts, by account and by network address.
#[derive(Clone)]
pub(super) struct FailedAttempts(Arc<(RateCells, RateCells)>);

impl Default for FailedAttempts {
    fn default() -> Self {
        Self(Arc::new((RateCells::with_capacity(MAX_TRACKED), RateCells::with_capacity(MAX_TRACKED))))
    }
}

impl FailedAttempts {
    /// Counts a failed attempt, and returns `rate_limited` in place of `refused` where there were too many.
    fn record(&self, account: Option<Uuid>, address: IpAddr, refused: ApiError) -> ApiError {
        let now = Instant::now();
        let (accounts, addresses) = &*self.0;
        let by_address = addresses.take_or_share(cell_of(address), PER_ADDRESS, now);
        let by_account = account.map(|account| accounts.take_or_share(account, PER_ACCOUNT, now));
        let (wait, limit) = match (by_account, by_address) {
            (Some(decision), _) if !decision.admitted => (decision.retry_after, PER_ACCOUNT),
            (_, decision) if !decision.admitted => (decision.retry_after, PER_ADDRESS),
            _ => return refused,
        };
        let message = "Too many attempts with a wrong `client_id` or `client_secret`; correct them, then try again after Retry-After.";
        ApiError::new(Code::RateLimited, message)
            .retry_after(wait)
            .detail("error", "invalid_client")
            .detail("limit", limit)
            .detail("window_seconds", WINDOW.as_secs())
            .detail("retry_after_seconds", wait.as_secs() + 1)
    }
}

/// A request for an access token. The credentials are here or in an `Authorization: Basic` header.
#[derive(Deserialize, ToSchema)]
pub(super) struct AccessTokenRequest {
    /// `client_credentials`.
    #[schema(value_type = String, pattern = "^client_credentials$")]
    grant_type: Option<String>,
    /// The service account's id.
    #[schema(value_type = Option<Uuid>)]
    client_id: Option<String>,
    /// One of its keys.
    #[schema(value_type = Option<String>)]
    client_secret: Option<SecretString>,
    /// There are no scopes: leave it out.
    #[schema(max_length = 0)]
    scope: Option<String>,
}

/// The response of RFC 6749, section 5.1.
#[derive(Serialize, ToSchema)]
pub(super) struct AccessToken {
    access_token: String,
    /// `Bearer`.
    token_type: &'static str,
    /// Seconds.
    expires_in: i64,
}

/// Gives a service account an access token.
///
/// OAuth 2.0 client credentials (RFC 6749, section 4.4). An error has the code of section 5.2 in `details.error`. The response is a
/// secret: it is not stored. It counts as a request of the account's owner.
#[utoipa::path(
    post,
    path = "/",
    request_body(content = AccessTokenRequest, content_type = "application/x-www-form-urlencoded"),
    responses((status = 200, description = "The token. `Cache-Control: no-store`.", body = AccessToken)),
    extensions(("x-without-console" = json!("for programs: OAuth's client credentials"))),
)]
pub(super) async fn issue(
    State(app): State<AppState>,
    Extension(failures): Extension<FailedAttempts>,
    peer: Option<Extension<ConnectInfo<Peer>>>,
    limited: Option<Extension<LimitedRoute>>,
    scope: Scope,
    headers: HeaderMap,
    Form(request): Form<AccessTokenRequest>,
) -> Result<([(HeaderName, HeaderValue); 2], Json<AccessToken>), ApiError> {
    let address = peer.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |Extension(ConnectInfo(peer))| peer.address.ip());
    let credentials = Credentials::of(&headers, &request).map_err(|error| match error.code() {
        Code::Unauthenticated => failures.record(None, address, error),
        _ => error,
    })?;
    match request.grant_type.as_deref() {
        Some("client_credentials") => {}
        Some(_) => return Err(malformed("unsupported_grant_type", "`grant_type` must be `client_credentials`.")),
        None => return Err(malformed("invalid_request", "`grant_type` is missing; send `client_credentials`.")),
    }
    if request.scope.as_deref().is_some_and(|scope| !scope.is_empty()) {
        return Err(malformed("invalid_scope", "There are no scopes here; leave `scope` out."));
    }
    let Credentials { client_id, secret, by_header } = credentials;
    scope.record_resource(format_args!("service_account/{client_id}"));
    let tokens = app.authenticator.service_tokens();
    let tokens = tokens.ok_or_else(|| ApiError::internal("this process signs no tokens"))?;
    let (account, key) = authenticate(tokens, client_id, &secret)
        .await?
        .map_err(|why| failures.record(Some(client_id), address, unauthenticated(by_header, why)))?;
    let (policy, now) = (app.environment.policy(), app.environment.now());
    // It counts against the owner's rate limit.
    app.limiter.take(limited.as_deref(), &account.scopes(), &policy, now).await?;
    let life = policy.int(PolicyKey::AuthServiceAccountTokenTtl, &account.scopes(), now);
    let token = tokens.issue(account.id, key, now, TimeDelta::seconds(life))?;
    tracing::info!(service_account.id = %account.id, key.id = %key, "service account {} got an access token", account.id);
    let headers = [
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::PRAGMA, HeaderValue::from_static("no-cache")),
    ];
    let access_token = token.expose_secret().to_owned();
    Ok((headers, Json(AccessToken { access_token, token_type: "Bearer", expires_in: life })))
}

/// The credentials of a client, from the form or from the header.
struct Credentials {
    client_id: Uuid,
    secret: SecretString,
    by_header: bool,
}

impl Credentials {
    fn of(headers: &HeaderMap, request: &AccessTokenRequest) -> Result<Self, ApiError> {
        let mut given = headers.get_all(header::AUTHORIZATION).iter();
        let (by_header, client_id, secret) = match (given.next(), given.next()) {
            (None, _) => (false, request.client_id.clone(), request.client_secret.clone()),
            (Some(_), Some(_)) => return Err(unauthenticated(true, "two Authorization headers")),
            (Some(_), None) if request.client_secret.is_some() => {
                let message = "Send the credentials in the form or in the Authorization header, not in both.";
                return Err(malformed("invalid_request", message));
            }
            (Some(value), None) => {
                let (id, secret) =
                    basic(value).ok_or_else(|| unauthenticated(true, "no Basic credentials in the header"))?;
                if request.client_id.as_ref().is_some_and(|named| *named != id) {
                    let message = "`client_id` in the form is another than in the Authorization header; leave it out.";
                    return Err(malformed("invalid_request", message));
                }
                (true, Some(id), Some(secret))
            }
        };
        let (Some(client_id), Some(secret)) = (client_id, secret) else {
            return Err(unauthenticated(by_header, "no credentials"));
        };
        let client_id =
            Uuid::try_parse(&client_id).map_err(|_| unauthenticated(by_header, "a client_id that is no UUID"))?;
        Ok(Self { client_id, secret, by_header })
    }
}

/// RFC 6749, section 2.3.1. Ids and keys hold nothing that would have to be percent-encoded.
fn basic(value: &HeaderValue) -> Option<(String, SecretString)> {
    let (scheme, encoded) = value.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(STANDARD.decode(encoded.trim_matches(' ')).ok()?).ok()?;
    let (id, secret) = text.split_once(':')?;
    Some((id.to_owned(), secret.to_owned().into()))
}

/// The account and the key whose secret was sent, or the reason why authentication failed.
async fn authenticate(
    tokens: &ServiceTokens,
    client_id: Uuid,
    secret: &SecretString,
) -> Result<Result<(ServiceAccount, ServiceAccountKeyId), &'static str>, ApiError> {
    // A text that has not the form of a key is refused without a read.
    let Some(shown) = read(TokenPurpose::ServiceAccountKey, secret) else { return Ok(Err("what was shown is no key")) };
    let found = tokens.account(ServiceAccountId(client_id)).await?;
    let Some(account) = found else { return Ok(Err("there is no such account")) };
    // Every key is compared, so that the time does not depend on which one matches.
    let matching = account.keys.iter().fold(None, |found, (id, key)| {
        if TokenHash::from_bytes(key.sha256).matches(&shown) { Some(*id) } else { found }
    });
    Ok(matching.map(|key| (account, key)).ok_or("no key of the account's"))
}

/// The same response for every reason: the caller does not learn whether the account exists.
fn unauthenticated(by_header: bool, why: &'static str) -> ApiError {
    let message =
        "The service account or its key is not known; check `client_id` and `client_secret`, or have a new key made.";
    let error = ApiError::new(Code::Unauthenticated, message).detail("error", "invalid_client").because(why);
    // RFC 6749, section 5.2: the response to a client that used the header names its scheme.
    if by_header { error.header(header::WWW_AUTHENTICATE, HeaderValue::from_static(BASIC)) } else { error }
}

fn malformed(error: &'static str, message: &'static str) -> ApiError {
    ApiError::invalid_request(message).detail("error", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_attempts_over_the_limit_of_an_account_or_an_address_are_refused() {
        let failures = FailedAttempts::default();
        let is_limited = |account: u128, address: &str| {
            let refused = unauthenticated(false, "a test");
            let answer = failures.record(Some(Uuid::from_u128(account)), address.parse().unwrap(), refused);
            matches!(answer.code(), Code::RateLimited)
        };
        let over = (0..30).filter(|n| is_limited(1, &format!("192.0.2.{n}"))).count();
        assert_eq!(over, 20, "an account has ten a minute, whatever the addresses");
        assert!(!is_limited(2, "192.0.2.0"), "another account has its own");
        let over = (0..90).filter(|n| is_limited(1000 + n, "198.51.100.1")).count();
        assert_eq!(over, 30, "an address has sixty a minute, whatever the accounts");
    }
}

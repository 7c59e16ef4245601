//! Authentication: OAuth 2.0 bearer tokens (RFC 6750) that are JSON Web Tokens of the identity provider (RFC 9068 in spirit; Keycloak's
//! claims by default), verified against its published keys.
//!
//! A token is verified by a key of the provider under an algorithm of the allowlist, never by what its own header contains (`jwk`, `jku`,
//! `x5u`, `x5c` are not read). Tokens of service accounts are signed by the control plane itself
//! ([`signed_tokens::service_account`]) and distinguished by their key id.
//!
//! | module | what |
//! | --- | --- |
//! | `token_verification`, `claims`, `role_claims`, `token_report` | the verification of tokens; their claims; their roles; how this service reads one |
//! | `jwks`, `openid_provider`, `openid_claims` | the provider's keys; the provider as its client sees it; ID tokens and logout tokens |
//! | `signed_tokens`, `opaque_token` | tokens that the service signs, and those that it draws |
//! | `browser_session`, `internal_route_auth`, `platform_role_metrics` | sessions of browsers; tokens of internal routes; metrics of platform roles |

use std::{collections::BTreeSet, sync::Arc};

use axum::{
    extract::{FromRef, FromRequestParts},
    http::{HeaderMap, HeaderValue, header, request},
};
use chrono::{DateTime, Duration, Utc};
use domain::authz::{CallerIdentity, TokenRole};
use domain::{BrowserSessionId, OrgId, ProjectId, ServiceAccountId, ServiceAccountKeyId, UserId};

use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};

pub mod browser_session;
pub mod claims;
pub mod internal_route_auth;
pub mod jwks;
pub mod opaque_token;
pub(crate) mod openid_claims;
pub mod openid_provider;
pub mod platform_role_metrics;
pub mod role_claims;
pub mod signed_tokens;
mod token_report;
mod token_verification;

use browser_session::SessionReader;
use claims::ClaimPaths;
pub use jsonwebtoken::Algorithm;
use jwks::Jwks;
use role_claims::{RemarkLog, RoleRules};
use signed_tokens::service_account::ServiceTokens;
pub use token_report::TokenReport;

/// The longest token read, in bytes.
const MAX_TOKEN_LEN: usize = 16 * 1024;

/// The program that makes a request, and the key by which it was known when it got its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActingServiceAccount {
    pub account: ServiceAccountId,
    pub key: ServiceAccountKeyId,
    /// The service's own key that the token is signed with.
    pub signed_by: String,
}

/// A login that can be revoked before its token ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevocableLogin {
    ServiceAccount(ActingServiceAccount),
    BrowserSession(BrowserSessionId),
}

/// The caller of a request, by its token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub user_id: UserId,
    pub roles: BTreeSet<TokenRole>,
    pub org_id: Option<OrgId>,
    pub project_id: Option<ProjectId>,
    pub plan: Option<String>,
    pub token_expires_at: DateTime<Utc>,
    /// The service account that acts for the user; `None` where the user acts.
    pub acting: Option<ActingServiceAccount>,
    /// The browser session by whose cookie the caller was authenticated; `None` where it was by a bearer token.
    pub browser_session: Option<BrowserSessionId>,
    /// The name under which the user logs in, where the provider says it.
    pub username: Option<String>,
    /// The user's e-mail address, where the provider has verified it.
    pub verified_email: Option<String>,
}

impl Caller {
    #[must_use]
    pub fn is_admin(&self) -> bool {
        self.roles.contains(&TokenRole::Admin)
    }

    /// The caller as the domain knows callers.
    #[must_use]
    pub fn into_identity(self) -> CallerIdentity {
        CallerIdentity {
            roles: self.roles,
            user_id: self.user_id,
            org_id: self.org_id,
            project_id: self.project_id,
            plan: self.plan,
            grant: None,
            service_account: self.acting.as_ref().map(|acting| acting.account),
            browser_session: self.browser_session,
        }
    }

    /// The login to check again while a connection of the caller's is open; `None` where it cannot be revoked before its token ends.
    #[must_use]
    pub fn revocable_login(&self) -> Option<RevocableLogin> {
        let acting = self.acting.clone().map(RevocableLogin::ServiceAccount);
        acting.or(self.browser_session.map(RevocableLogin::BrowserSession))
    }

    /// # Errors
    /// `forbidden` where the caller has not the role `admin`.
    pub fn into_admin(self) -> Result<Admin, ApiError> {
        if self.is_admin() {
            return Ok(Admin(self));
        }
        Err(ApiError::forbidden("This needs the role `admin`.")
            .header(header::WWW_AUTHENTICATE, HeaderValue::from_static(SCOPE))
            .because(format!("caller {} is no admin", self.user_id)))
    }
}

/// A caller with the role `admin`; every other caller is answered `forbidden`.
#[derive(Clone, Debug)]
pub struct Admin(pub Caller);

/// What a token must satisfy to be accepted.
#[derive(Clone, Debug)]
pub struct TokenRules {
    /// Exactly the `iss` claim.
    pub issuer: String,
    /// At least one of them is in the claim of [`ClaimPaths::audience`].
    pub audiences: Vec<String>,
    /// Asymmetric ones only.
    pub algorithms: Vec<Algorithm>,
    pub claims: ClaimPaths,
    pub roles: RoleRules,
    /// How far the provider's clock may be ahead, for `nbf` and `iat`. `exp` has no leeway.
    pub leeway: Duration,
    /// The provider's client as which `gpuctl` logs people in. Tokens of other clients are good, too.
    pub client_id: String,
}

impl TokenRules {
    /// The algorithms that are accepted where none are configured.
    pub const ALGORITHMS: [Algorithm; 6] =
        [Algorithm::RS256, Algorithm::PS256, Algorithm::ES256, Algorithm::ES384, Algorithm::EdDSA, Algorithm::RS384];

    /// The longest that a token may live: a role in it ends only with it.
    pub const MAX_LIFETIME: Duration = Duration::hours(24);

    /// The rules for one issuer and audience, otherwise as a Keycloak realm needs them.
    #[must_use]
    pub fn new(issuer: impl Into<String>, audience: impl Into<String>) -> Self {
        Self {
            issuer: issuer.into(),
            audiences: vec![audience.into()],
            algorithms: Self::ALGORITHMS.to_vec(),
            claims: ClaimPaths::default(),
            roles: RoleRules::default(),
            leeway: Duration::seconds(60),
            client_id: "gpuctl".to_owned(),
        }
    }
}

/// Verifies tokens (`token_verification.rs`).
pub struct Authenticator {
    rules: TokenRules,
    jwks: Jwks,
    service_tokens: Option<ServiceTokens>,
    browser_sessions: Option<SessionReader>,
    remarks: RemarkLog,
}

impl Authenticator {
    #[must_use]
    pub fn new(rules: TokenRules, jwks: Jwks) -> Self {
        Self { rules, jwks, service_tokens: None, browser_sessions: None, remarks: RemarkLog::default() }
    }

    /// Accepts the tokens that the control plane signs for service accounts, too.
    #[must_use]
    pub fn with_service_tokens(self, service_tokens: ServiceTokens) -> Self {
        Self { service_tokens: Some(service_tokens), ..self }
    }

    /// Accepts browser sessions, too.
    #[must_use]
    pub fn with_browser_sessions(self, sessions: SessionReader) -> Self {
        Self { browser_sessions: Some(sessions), ..self }
    }

    /// What reads the browser sessions.
    ///
    /// # Errors
    /// Where this process has none.
    pub(crate) fn browser_sessions(&self) -> Result<&SessionReader, ApiError> {
        self.browser_sessions.as_ref().ok_or_else(|| ApiError::internal("this process reads no browser sessions"))
    }

    /// What signs the tokens of service accounts.
    #[must_use]
    pub const fn service_tokens(&self) -> Option<&ServiceTokens> {
        self.service_tokens.as_ref()
    }

    /// The issuer of accepted tokens: the identity provider's URL, under which its discovery document lies.
    #[must_use]
    pub fn issuer(&self) -> &str {
        &self.rules.issuer
    }

    /// The provider's client as which `gpuctl` logs people in.
    #[must_use]
    pub fn client_id(&self) -> &str {
        &self.rules.client_id
    }

    /// The provider's keys, for a forced refresh.
    #[must_use]
    pub fn jwks(&self) -> &Jwks {
        &self.jwks
    }

    /// The caller that the request's bearer token names.
    ///
    /// # Errors
    /// `unauthenticated` where there is no valid token; `service_unavailable` where the provider's keys were never fetched.
    pub async fn authenticate(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        self.verify_token(bearer(headers)?).await
    }

    /// Whether the service account and key of a verified token, or the browser session, are still valid: for connections that outlast a
    /// request.
    ///
    /// # Errors
    /// Where Postgres cannot be read.
    pub async fn is_still_authorized(&self, login: &RevocableLogin) -> Result<bool, ApiError> {
        match (login, &self.service_tokens) {
            (RevocableLogin::ServiceAccount(acting), Some(tokens)) => Ok(tokens.account_of(acting).await?.is_some()),
            (RevocableLogin::ServiceAccount(_), None) => Ok(false),
            (RevocableLogin::BrowserSession(id), _) => Ok(self.browser_sessions()?.is_active(*id, Utc::now()).await?),
        }
    }
}

pub(crate) const MISSING: &str = "Bearer realm=\"gpuaas\"";
pub(crate) const INVALID: &str = "Bearer realm=\"gpuaas\", error=\"invalid_token\"";
const SCOPE: &str = "Bearer realm=\"gpuaas\", error=\"insufficient_scope\"";

pub(crate) fn challenge(message: &'static str, challenge: &'static str) -> ApiError {
    ApiError::new(Code::Unauthenticated, message).header(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge))
}

/// The token of the request's one `Authorization: Bearer` header.
pub(crate) fn bearer(headers: &HeaderMap) -> Result<&str, ApiError> {
    let missing = |why: &'static str| {
        challenge("This route needs an access token; send it as Authorization: Bearer <token>, once.", MISSING)
            .because(why)
    };
    let mut given = headers.get_all(header::AUTHORIZATION).iter();
    let value = match (given.next(), given.next()) {
        (Some(value), None) => value,
        (None, _) => return Err(missing("there is no Authorization header")),
        (Some(_), Some(_)) => return Err(missing("there are two Authorization headers")),
    };
    let not_bearer = || missing("the Authorization header holds no bearer token");
    let text = value.to_str().map_err(|_| not_bearer())?;
    let (scheme, token) = text.split_once(' ').ok_or_else(not_bearer)?;
    let token = token.trim_matches(' ');
    if !scheme.eq_ignore_ascii_case("bearer") || token.is_empty() {
        return Err(not_bearer());
    }
    if token.len() > MAX_TOKEN_LEN {
        let why = format!(
            "a token of {} bytes, and at most {MAX_TOKEN_LEN} are read: leave long lists, such as groups, out of access tokens",
            token.len()
        );
        return Err(
            challenge("The access token is too long; get one from the identity provider.", INVALID).because(why)
        );
    }
    Ok(token)
}

impl<S> FromRequestParts<S> for Caller
where
    S: Send + Sync,
    Arc<Authenticator>: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let caller = Arc::<Authenticator>::from_ref(state).authenticate(&parts.headers).await?;
        if let Some(scope) = parts.extensions.get::<Scope>() {
            scope.record_caller(caller.org_id.as_deref(), caller.project_id.as_deref());
        }
        Ok(caller)
    }
}

impl<S> FromRequestParts<S> for Admin
where
    S: Send + Sync,
    Arc<Authenticator>: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        Caller::from_request_parts(parts, state).await?.into_admin()
    }
}

#[cfg(test)]
mod tests;

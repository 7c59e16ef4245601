//! The verification of tokens: access tokens of the identity provider and of service accounts, and the provider's ID and logout tokens.
//!
//! A token of the provider is signed with one of its published keys ([`super::jwks`]) under an algorithm of the allowlist; its claims are
//! checked in [`super::claims`] and [`super::openid_claims`]. Tokens of service accounts verify themselves
//! ([`super::signed_tokens::service_account`]).

use super::claims::{self, TokenFault, UnverifiedToken};
use super::jwks::{JwksError, TokenSource};
use super::openid_claims::{Expected, IdToken, LogoutToken, OpenIdFault};
use super::{Authenticator, Caller, INVALID, MAX_TOKEN_LEN, challenge};
use crate::http::error::{ApiError, Code};
use chrono::{DateTime, Utc};
use serde_json::{Map, Value};

const EXPIRED: &str = "Bearer realm=\"gpuaas\", error=\"invalid_token\", error_description=\"expired\"";
const UNKNOWN_KEYS: &str = "Many tokens of keys that the identity provider has not published are being sent; try again after the time in Retry-After.";

impl Authenticator {
    /// The caller that an access token names at this moment.
    ///
    /// # Errors
    /// As [`Authenticator::authenticate`].
    pub async fn verify_token(&self, token: &str) -> Result<Caller, ApiError> {
        self.caller_of(token, TokenSource::Request).await
    }

    /// The caller of an access token that the provider has just issued to this service: made-up key ids of other requests never have it
    /// refused.
    ///
    /// # Errors
    /// As [`Authenticator::authenticate`].
    pub(crate) async fn verify_issued_token(&self, token: &str) -> Result<Caller, ApiError> {
        self.caller_of(token, TokenSource::Provider).await
    }

    async fn caller_of(&self, token: &str, source: TokenSource) -> Result<Caller, ApiError> {
        self.verify_from(token, Utc::now(), source).await.map_err(|fault| {
            let error = match &fault {
                // No fault of the service, and no verdict about the token: a client with a valid one repeats its request.
                TokenFault::NoKeys(JwksError::TooManyUnknown) => ApiError::new(Code::RateLimited, UNKNOWN_KEYS),
                TokenFault::NoKeys(_) | TokenFault::Store(_) => return ApiError::unavailable(fault),
                TokenFault::Expired => challenge("The access token has expired; get a new one.", EXPIRED),
                TokenFault::Revoked => challenge(
                    "The service account or the key that this access token was got with is gone; get one with another key.",
                    INVALID,
                ),
                TokenFault::Retired => challenge(
                    "The key that this access token was signed with is retired; get a new token with the service account's key.",
                    INVALID,
                ),
                TokenFault::Malformed
                | TokenFault::Encrypted
                | TokenFault::Algorithm
                | TokenFault::KeyId
                | TokenFault::Header
                | TokenFault::Kind(_)
                | TokenFault::UnknownKey
                | TokenFault::Signature
                | TokenFault::Issuer
                | TokenFault::ForeignIssuer(_)
                | TokenFault::Audience
                | TokenFault::ForeignAudience(_)
                | TokenFault::NotYet
                | TokenFault::TooLong
                | TokenFault::Claim(_) => {
                    challenge("The access token is not accepted here; get one from the identity provider.", INVALID)
                }
            };
            error.because(fault)
        })
    }

    /// The login that an ID token confirms (OpenID Connect Core 1.0, section 3.1.3.7).
    pub(crate) async fn verify_id_token(
        &self,
        token: &str,
        client_id: &str,
        nonce: &str,
        now: DateTime<Utc>,
    ) -> Result<IdToken, OpenIdFault> {
        let is_type = |kind: Option<&str>| kind.is_none_or(|kind| kind == "jwt");
        let claims = self.provider_claims(token, TokenSource::Provider, is_type).await?;
        self.expected(client_id, now).id_token(&claims, nonce)
    }

    /// What a logout token says (OpenID Connect Back-Channel Logout 1.0, section 2.6).
    pub(crate) async fn verify_logout_token(
        &self,
        token: &str,
        client_id: &str,
        now: DateTime<Utc>,
    ) -> Result<LogoutToken, OpenIdFault> {
        let is_type = |kind: Option<&str>| {
            kind.is_none_or(|kind| ["jwt", "logout+jwt", "application/logout+jwt"].contains(&kind))
        };
        let claims = self.provider_claims(token, TokenSource::Request, is_type).await?;
        self.expected(client_id, now).logout_token(&claims)
    }

    /// Whether the caller of an access token is the subject of an ID token. Where a claim of its own has the user's id, the two tokens come
    /// from one response of the provider alone.
    pub(crate) fn is_of_subject(&self, caller: &Caller, subject: &str) -> bool {
        self.rules.claims.user_id != "sub" || caller.user_id == *subject
    }

    fn expected<'a>(&'a self, client_id: &'a str, now: DateTime<Utc>) -> Expected<'a> {
        Expected { issuer: &self.rules.issuer, client_id, leeway: self.rules.leeway, now }
    }

    /// The claims of a token that the provider has signed. They are the caller's to check.
    async fn provider_claims(
        &self,
        token: &str,
        source: TokenSource,
        is_type: impl Fn(Option<&str>) -> bool,
    ) -> Result<Map<String, Value>, TokenFault> {
        if token.len() > MAX_TOKEN_LEN {
            return Err(TokenFault::Malformed);
        }
        let token = UnverifiedToken::parse_typed(token, is_type)?;
        self.verify_signature_from(&token, source).await?;
        token.claims()
    }

    #[cfg(test)]
    pub(super) async fn verify(&self, token: &str, now: DateTime<Utc>) -> Result<Caller, TokenFault> {
        self.verify_from(token, now, TokenSource::Request).await
    }

    async fn verify_from(&self, token: &str, now: DateTime<Utc>, source: TokenSource) -> Result<Caller, TokenFault> {
        let token = UnverifiedToken::parse(token)?;
        if let Some(tokens) = self.service_tokens.as_ref().filter(|tokens| tokens.is_own_key(&token.kid)) {
            return tokens.caller(&token, now).await;
        }
        self.verify_signature_from(&token, source).await?;
        let (caller, remark) = claims::read(&token.claims()?, &self.rules, now)?;
        if let Some(remark) = remark {
            self.remarks.write(&remark);
        }
        Ok(caller)
    }

    pub(super) async fn verify_provider_signature(&self, token: &UnverifiedToken<'_>) -> Result<(), TokenFault> {
        self.verify_signature_from(token, TokenSource::Request).await
    }

    async fn verify_signature_from(&self, token: &UnverifiedToken<'_>, source: TokenSource) -> Result<(), TokenFault> {
        let algorithm = token.algorithm(&self.rules.algorithms)?;
        let keys = self.jwks.keys_for(token.as_signed(algorithm, source)).await.map_err(TokenFault::NoKeys)?;
        if keys.is_empty() {
            return Err(TokenFault::UnknownKey);
        }
        let is_signed = keys.iter().any(|key| token.is_signed_by(key, algorithm));
        if is_signed { Ok(()) } else { Err(TokenFault::Signature) }
    }
}

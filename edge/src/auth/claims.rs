//! The claims of a token, parsed strictly.

use std::collections::BTreeSet;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use chrono::{DateTime, Duration, Utc};
use domain::{OrgId, ProjectId};
use jsonwebtoken::Algorithm;
use persistence::StoreError;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::outbound::email_address::is_address;

use super::{
    Caller, TokenRules,
    jwks::{JwksError, PublishedKey},
};

/// The longest id accepted in a claim, in bytes.
const MAX_ID_LEN: usize = 255;
const MAX_ROLES: usize = 200;

/// The header `typ` of an access token, in lower case.
const ACCESS_TOKEN_TYPES: [&str; 3] = ["jwt", "at+jwt", "application/at+jwt"];

/// Where the claims are: a claim's name, or the path to it with dots between.
#[derive(Clone, Debug)]
pub struct ClaimPaths {
    pub user_id: String,
    pub roles: String,
    pub org_id: String,
    pub project_id: String,
    pub plan: String,
}

impl Default for ClaimPaths {
    fn default() -> Self {
        Self {
            user_id: "sub".into(),
            roles: "realm_access.roles".into(),
            org_id: "org_id".into(),
            project_id: "project_id".into(),
            plan: "plan".into(),
        }
    }
}

/// Why a token is refused; for the operator, the caller gets less detail.
#[derive(Debug, Error)]
pub enum TokenFault {
    #[error("the token is no signed JSON Web Token")]
    Malformed,
    #[error("the token's algorithm is not in the allowlist")]
    Algorithm,
    #[error("the token names no key, or not in plain text")]
    KeyId,
    #[error("the token asks for an extension or is of another type")]
    Header,
    #[error("the token's key is not one of the provider's")]
    UnknownKey,
    #[error("the token's signature does not verify")]
    Signature,
    #[error("the token is of another issuer")]
    Issuer,
    #[error("the token is for another audience")]
    Audience,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    NotYet,
    #[error("the token lives longer than 24 hours")]
    TooLong,
    #[error("claim {0} is missing or of the wrong type")]
    Claim(String),
    #[error("the service account or its key is gone")]
    Revoked,
    #[error("the service's own key that signed the token is retired")]
    Retired,
    #[error("the identity provider's keys have not been fetched")]
    NoKeys(#[source] JwksError),
    #[error("the service account cannot be read")]
    Store(#[source] StoreError),
}

/// A parsed token whose signature is not verified yet.
pub(super) struct UnverifiedToken<'a> {
    signed: &'a str,
    signature: &'a str,
    payload: &'a str,
    pub(super) algorithm: String,
    pub(super) kid: String,
}

impl<'a> UnverifiedToken<'a> {
    /// An access token.
    pub(super) fn parse(token: &'a str) -> Result<Self, TokenFault> {
        Self::parse_typed(token, |kind| kind.is_none_or(|kind| ACCESS_TOKEN_TYPES.contains(&kind)))
    }

    /// A token whose header `typ`, in lower case, is accepted by `is_type` (RFC 8725, section 3.11).
    pub(super) fn parse_typed(token: &'a str, is_type: impl Fn(Option<&str>) -> bool) -> Result<Self, TokenFault> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenFault::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(TokenFault::Malformed)?;
        if payload.contains('.') || signature.is_empty() {
            return Err(TokenFault::Malformed);
        }
        let header = object(header)?;
        // RFC 7515, section 4.1.11: an extension that must be understood and is not refuses the token.
        if header.contains_key("crit") || header.contains_key("enc") {
            return Err(TokenFault::Header);
        }
        let kind = match header.get("typ") {
            None => None,
            Some(Value::String(kind)) => Some(kind.to_ascii_lowercase()),
            Some(_) => return Err(TokenFault::Header),
        };
        if !is_type(kind.as_deref()) {
            return Err(TokenFault::Header);
        }
        let algorithm = header.get("alg").and_then(Value::as_str).ok_or(TokenFault::Algorithm)?;
        let kid = header.get("kid").and_then(Value::as_str).filter(|kid| is_plain(kid)).ok_or(TokenFault::KeyId)?;
        Ok(Self { signed, signature, payload, algorithm: algorithm.to_owned(), kid: kid.to_owned() })
    }

    pub(super) fn algorithm(&self, allowed: &[Algorithm]) -> Result<Algorithm, TokenFault> {
        let algorithm: Algorithm = self.algorithm.parse().map_err(|_| TokenFault::Algorithm)?;
        let symmetric = matches!(algorithm, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512);
        if !symmetric && allowed.contains(&algorithm) { Ok(algorithm) } else { Err(TokenFault::Algorithm) }
    }

    pub(super) fn is_signed_by(&self, key: &PublishedKey, algorithm: Algorithm) -> bool {
        jsonwebtoken::crypto::verify(self.signature, self.signed.as_bytes(), key.decoding(), algorithm).unwrap_or(false)
    }

    /// The bytes that were signed, and the signature.
    pub(super) fn signed(&self) -> Result<(&[u8], Vec<u8>), TokenFault> {
        let signature = URL_SAFE_NO_PAD.decode(self.signature).map_err(|_| TokenFault::Malformed)?;
        Ok((self.signed.as_bytes(), signature))
    }

    pub(super) fn claims(&self) -> Result<Map<String, Value>, TokenFault> {
        object(self.payload)
    }
}

fn object(encoded: &str) -> Result<Map<String, Value>, TokenFault> {
    let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| TokenFault::Malformed)?;
    serde_json::from_slice(&bytes).map_err(|_| TokenFault::Malformed)
}

/// Of bounded length and on one line wherever it is shown: U+2028 and U+2029 end lines too, and direction marks change the order of text.
fn is_plain(text: &str) -> bool {
    let forges = |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (1..=MAX_ID_LEN).contains(&text.len()) && !text.chars().any(forges)
}

/// Reads the claims of a token with a valid signature.
pub(super) fn read(claims: &Map<String, Value>, rules: &TokenRules, now: DateTime<Utc>) -> Result<Caller, TokenFault> {
    if claims.get("iss").and_then(Value::as_str) != Some(rules.issuer.as_str()) {
        return Err(TokenFault::Issuer);
    }
    let is_ours =
        |audience: &Value| audience.as_str().is_some_and(|text| rules.audiences.iter().any(|ours| ours == text));
    let meant_for_us = match claims.get("aud") {
        Some(Value::Array(audiences)) => audiences.iter().any(is_ours),
        Some(audience) => is_ours(audience),
        None => false,
    };
    if !meant_for_us {
        return Err(TokenFault::Audience);
    }
    // Keycloak signs ID and refresh tokens with the same keys and distinguishes them by this claim.
    if claims.get("typ").and_then(Value::as_str).is_some_and(|kind| !kind.eq_ignore_ascii_case("bearer")) {
        return Err(TokenFault::Header);
    }
    let token_expires_at = read_times(claims, rules.leeway, now)?;
    let paths = &rules.claims;
    Ok(Caller {
        user_id: text(claims, &paths.user_id)?.ok_or_else(|| TokenFault::Claim(paths.user_id.clone()))?.into(),
        roles: roles(claims, &paths.roles)?,
        org_id: text(claims, &paths.org_id)?.map(OrgId),
        project_id: text(claims, &paths.project_id)?.map(ProjectId),
        plan: text(claims, &paths.plan)?,
        token_expires_at,
        acting: None,
        browser_session: None,
        username: username(claims),
        verified_email: verified_email(claims),
    })
}

/// OpenID Connect's claim `preferred_username`. An invalid value is no reason to refuse a token.
fn username(claims: &Map<String, Value>) -> Option<String> {
    claims.get("preferred_username").and_then(Value::as_str).filter(|name| is_plain(name)).map(str::to_owned)
}

/// The address of OpenID Connect's claims `email` and `email_verified`. An invalid value is no reason to refuse a token.
fn verified_email(claims: &Map<String, Value>) -> Option<String> {
    let is_verified = claims.get("email_verified").and_then(Value::as_bool).unwrap_or(false);
    let address = claims.get("email").and_then(Value::as_str).filter(|_| is_verified)?;
    is_address(address).then(|| address.to_owned())
}

pub(super) fn read_times(
    claims: &Map<String, Value>,
    leeway: Duration,
    now: DateTime<Utc>,
) -> Result<DateTime<Utc>, TokenFault> {
    let expires_at = read_seconds(claims, "exp")?.ok_or_else(|| TokenFault::Claim("exp".into()))?;
    if expires_at <= now {
        return Err(TokenFault::Expired);
    }
    let issued_at = read_seconds(claims, "iat")?;
    if read_seconds(claims, "nbf")?.is_some_and(|not_before| not_before > now + leeway)
        || issued_at.is_some_and(|at| at > now + leeway)
    {
        return Err(TokenFault::NotYet);
    }
    // Without `iat` the age is not known, but how long it has still to go is.
    let longest = TokenRules::MAX_LIFETIME;
    if expires_at - now > longest + leeway || issued_at.is_some_and(|at| expires_at - at > longest) {
        return Err(TokenFault::TooLong);
    }
    Ok(expires_at)
}

/// A NumericDate (RFC 7519, section 2): seconds, perhaps with a fraction, never text. `None` where the claim is missing.
pub(super) fn read_seconds(claims: &Map<String, Value>, name: &str) -> Result<Option<DateTime<Utc>>, TokenFault> {
    let Some(value) = claims.get(name) else { return Ok(None) };
    let fault = || TokenFault::Claim(name.to_owned());
    let millis = match value.as_i64() {
        Some(seconds) => seconds.checked_mul(1000).ok_or_else(fault)?,
        None => {
            let millis = value.as_f64().ok_or_else(fault)? * 1000.0;
            // Far enough for any date, and exact within it.
            if !(-1e15..=1e15).contains(&millis) {
                return Err(fault());
            }
            #[allow(clippy::cast_possible_truncation)]
            {
                millis.floor() as i64
            }
        }
    };
    // No token is from before 1970; a negative time is an arithmetic error.
    let at = DateTime::from_timestamp_millis(millis).filter(|at| *at >= DateTime::UNIX_EPOCH);
    at.map(Some).ok_or_else(fault)
}

/// The claim at a path; a claim whose own name contains the dots comes first.
fn at<'a>(claims: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    if let Some(value) = claims.get(path) {
        return Some(value);
    }
    let mut names = path.split('.');
    let mut value = claims.get(names.next()?)?;
    for name in names {
        value = value.get(name)?;
    }
    Some(value)
}

pub(super) fn text(claims: &Map<String, Value>, path: &str) -> Result<Option<String>, TokenFault> {
    match at(claims, path) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if is_plain(text) => Ok(Some(text.clone())),
        Some(_) => Err(TokenFault::Claim(path.to_owned())),
    }
}

fn roles(claims: &Map<String, Value>, path: &str) -> Result<BTreeSet<String>, TokenFault> {
    match at(claims, path) {
        None | Some(Value::Null) => Ok(BTreeSet::new()),
        Some(Value::Array(roles)) if roles.len() <= MAX_ROLES => roles
            .iter()
            .map(|role| role.as_str().map(ToOwned::to_owned).ok_or_else(|| TokenFault::Claim(path.to_owned())))
            .collect(),
        Some(_) => Err(TokenFault::Claim(path.to_owned())),
    }
}

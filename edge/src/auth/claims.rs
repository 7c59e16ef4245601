//! The claims of a token, parsed strictly.

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
    jwks::{JwksError, PublishedKey, SignedToken, TokenSource},
    role_claims::{RoleReading, RoleRemark},
};

/// The longest id accepted in a claim, in bytes.
const MAX_ID_LEN: usize = 255;

/// The claim that names the audience (RFC 7519, section 4.1.3).
const AUDIENCE: &str = "aud";

/// Claims by which providers distinguish the tokens that they sign with one key, with the value that an access token has: Keycloak's, and
/// Amazon Cognito's.
const TOKEN_KINDS: [(&str, &str); 2] = [("typ", "bearer"), ("token_use", "access")];

/// What the issuer of Entra ID's tokens of version 1 begins with.
const ENTRA_V1: &str = "https://sts.windows.net/";

/// The header `typ` of an access token, in lower case.
const ACCESS_TOKEN_TYPES: [&str; 3] = ["jwt", "at+jwt", "application/at+jwt"];

/// Where the claims are: a claim's name, or the path to it with dots between.
#[derive(Clone, Debug)]
pub struct ClaimPaths {
    /// What the token is issued for: `aud`, or another one where the provider's access tokens have none.
    pub audience: String,
    pub user_id: String,
    pub roles: String,
    pub org_id: String,
    pub project_id: String,
    pub plan: String,
}

impl Default for ClaimPaths {
    fn default() -> Self {
        Self {
            audience: AUDIENCE.into(),
            user_id: "sub".into(),
            roles: "realm_access.roles".into(),
            org_id: "org_id".into(),
            project_id: "project_id".into(),
            plan: "plan".into(),
        }
    }
}

/// Why a token is refused, with the setting that decides it; for the operator, the caller gets less detail. No value of the token is in it.
#[derive(Debug, Error)]
pub enum TokenFault {
    #[error(
        "the token is no signed JSON Web Token: the provider has to issue such tokens for SVC_OIDC_AUDIENCE, since an opaque one cannot be verified"
    )]
    Malformed,
    #[error("the token is encrypted: the provider has to issue signed JSON Web Tokens for SVC_OIDC_AUDIENCE")]
    Encrypted,
    #[error("the token's algorithm is not in the allowlist (SVC_OIDC_ALGORITHMS)")]
    Algorithm,
    #[error("the token's header names no key (`kid`), or not in plain text")]
    KeyId,
    #[error("the token's header asks for an extension, or its `typ` is not of an access token (JWT, at+jwt)")]
    Header,
    #[error(
        "claim `{0}` says that the token is no access token: send the access token, not the ID token or the refresh token"
    )]
    Kind(&'static str),
    #[error("the token's key is not one of the provider's (SVC_OIDC_ISSUER)")]
    UnknownKey,
    #[error("the token's signature does not verify")]
    Signature,
    #[error("the token is of another issuer")]
    Issuer,
    #[error("the token is of another issuer: {0}")]
    ForeignIssuer(&'static str),
    #[error("the token is for another audience")]
    Audience,
    #[error("the token is for another audience: {0}")]
    ForeignAudience(String),
    #[error("the token has expired")]
    Expired,
    #[error(
        "the token is not valid yet (claim `nbf` or `iat`): compare the clocks of the provider and of this machine"
    )]
    NotYet,
    #[error(
        "the token lives longer than 24 hours (claims `exp` and `iat`): shorten the life of access tokens at the provider"
    )]
    TooLong,
    /// The claim, what is wrong with it, and the setting.
    #[error("claim {0}")]
    Claim(String),
    #[error("the service account or its key is gone")]
    Revoked,
    #[error("the service's own key that signed the token is retired")]
    Retired,
    #[error("the identity provider's keys, by which the token would be verified, cannot be fetched (SVC_OIDC_ISSUER)")]
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
            // Five parts, of which the first names an encryption (RFC 7516, section 3.1).
            let is_encrypted = token.split('.').count() == 5 && object(header)?.contains_key("enc");
            return Err(if is_encrypted { TokenFault::Encrypted } else { TokenFault::Malformed });
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

    /// What is needed to find its key.
    pub(super) fn as_signed(&self, algorithm: Algorithm, source: TokenSource) -> SignedToken<'_> {
        SignedToken { kid: &self.kid, algorithm, content: (self.signed, self.signature), source }
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
    strict_json::from_slice(&bytes).map_err(|_| TokenFault::Malformed)
}

/// Of bounded length and on one line wherever it is shown: U+2028 and U+2029 end lines too, and direction marks change the order of text.
fn is_plain(text: &str) -> bool {
    let forges = |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (1..=MAX_ID_LEN).contains(&text.len()) && !text.chars().any(forges)
}

/// Reads the claims of a token with a valid signature: its caller, and what of the roles could not be read.
pub(super) fn read(
    claims: &Map<String, Value>,
    rules: &TokenRules,
    now: DateTime<Utc>,
) -> Result<(Caller, Option<RoleRemark>), TokenFault> {
    check_issuer(claims, &rules.issuer)?;
    check_audience(claims, rules)?;
    for (claim, access) in TOKEN_KINDS {
        if claims.get(claim).and_then(Value::as_str).is_some_and(|kind| !kind.eq_ignore_ascii_case(access)) {
            return Err(TokenFault::Kind(claim));
        }
    }
    let token_expires_at = read_times(claims, rules.leeway, now)?;
    let paths = &rules.claims;
    let user_id = configured(claims, &paths.user_id, "SVC_OIDC_CLAIM_USER_ID")?
        .ok_or_else(|| missing(&paths.user_id, "SVC_OIDC_CLAIM_USER_ID names the claim with the user's id"))?;
    let RoleReading { granted, remark } = rules.roles.read(claims, &paths.roles);
    let caller = Caller {
        user_id: user_id.into(),
        roles: granted,
        org_id: only_one(claims, &paths.org_id, "SVC_OIDC_CLAIM_ORG_ID")?.map(OrgId),
        project_id: only_one(claims, &paths.project_id, "SVC_OIDC_CLAIM_PROJECT_ID")?.map(ProjectId),
        plan: only_one(claims, &paths.plan, "SVC_OIDC_CLAIM_PLAN")?,
        token_expires_at,
        acting: None,
        browser_session: None,
        username: username(claims),
        verified_email: verified_email(claims),
    };
    Ok((caller, remark))
}

/// The issuer is compared as text (OpenID Connect Core 1.0, section 3.1.3.7): another one that looks alike is another one.
fn check_issuer(claims: &Map<String, Value>, ours: &str) -> Result<(), TokenFault> {
    let Some(issuer) = claims.get("iss").and_then(Value::as_str) else {
        return Err(TokenFault::ForeignIssuer("claim `iss` is missing, or no text"));
    };
    if issuer == ours {
        return Ok(());
    }
    Err(TokenFault::ForeignIssuer(if issuer.trim_end_matches('/') == ours.trim_end_matches('/') {
        "claim `iss` and SVC_OIDC_ISSUER differ in the slash at their end"
    } else if issuer.starts_with(ENTRA_V1) && !ours.starts_with(ENTRA_V1) {
        "claim `iss` is that of Entra ID's tokens of version 1: `requestedAccessTokenVersion` in the manifest of the API's registration has to be 2"
    } else {
        "claim `iss` is not SVC_OIDC_ISSUER"
    }))
}

/// The configured claim names us. So does `aud` where the token has it, too (RFC 7519, section 4.1.3).
fn check_audience(claims: &Map<String, Value>, rules: &TokenRules) -> Result<(), TokenFault> {
    let is_ours =
        |audience: &Value| audience.as_str().is_some_and(|text| rules.audiences.iter().any(|ours| ours == text));
    let names_us = |value: &Value| match value {
        Value::Array(audiences) => audiences.iter().any(is_ours),
        audience => is_ours(audience),
    };
    let path = rules.claims.audience.as_str();
    let foreign = |why: String| Err(TokenFault::ForeignAudience(why));
    match at(claims, path) {
        None => foreign(format!(
            "claim `{path}` is missing; SVC_OIDC_CLAIM_AUDIENCE names the claim where it is another one"
        )),
        Some(value) if !names_us(value) => foreign(format!("claim `{path}` has none of SVC_OIDC_AUDIENCE")),
        Some(_) => match claims.get(AUDIENCE) {
            Some(value) if !value.is_null() && !names_us(value) => {
                foreign("claim `aud`, which the token has, too, has none of SVC_OIDC_AUDIENCE".into())
            }
            Some(_) | None => Ok(()),
        },
    }
}

/// OpenID Connect's claim `preferred_username`, or `username` (Amazon Cognito). An invalid value is no reason to refuse a token.
fn username(claims: &Map<String, Value>) -> Option<String> {
    let names = ["preferred_username", "username"].into_iter().filter_map(|claim| claims.get(claim)?.as_str());
    names.filter(|name| is_plain(name)).map(str::to_owned).next()
}

/// The address of OpenID Connect's claims `email` and `email_verified`; some providers write the latter as text. An invalid value is no reason
/// to refuse a token.
fn verified_email(claims: &Map<String, Value>) -> Option<String> {
    let is_verified = match claims.get("email_verified") {
        Some(Value::Bool(is_verified)) => *is_verified,
        Some(Value::String(text)) => text == "true",
        _ => false,
    };
    let address = claims.get("email").and_then(Value::as_str).filter(|_| is_verified)?;
    is_address(address).then(|| address.to_owned())
}

pub(super) fn read_times(
    claims: &Map<String, Value>,
    leeway: Duration,
    now: DateTime<Utc>,
) -> Result<DateTime<Utc>, TokenFault> {
    let expires_at = read_seconds(claims, "exp")?.ok_or_else(|| missing("exp", "a token has to end"))?;
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
    let fault =
        || TokenFault::Claim(format!("`{name}` is {}, and has to be a number of seconds since 1970", kind_of(value)));
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

/// The claim at a path. The longest name goes first: names of claims, and of objects in them, may have dots themselves.
pub(super) fn at<'a>(claims: &'a Map<String, Value>, path: &str) -> Option<&'a Value> {
    claims.get(path).or_else(|| {
        let mut dots = path.rmatch_indices('.');
        dots.find_map(|(dot, _)| at(claims.get(&path[..dot])?.as_object()?, &path[dot + 1..]))
    })
}

/// The kind of a value, for a message without the value.
pub(super) const fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn missing(claim: &str, what: &str) -> TokenFault {
    TokenFault::Claim(format!("`{claim}` is missing: {what}"))
}

/// The text at a path; an empty one counts as missing.
pub(super) fn text(claims: &Map<String, Value>, path: &str) -> Result<Option<String>, TokenFault> {
    text_of(at(claims, path), path)
}

fn text_of(value: Option<&Value>, path: &str) -> Result<Option<String>, TokenFault> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.is_empty() => Ok(None),
        Some(Value::String(text)) if is_plain(text) => Ok(Some(text.clone())),
        Some(Value::String(_)) => {
            Err(TokenFault::Claim(format!("`{path}` has more than {MAX_ID_LEN} bytes, or is not on one line")))
        }
        Some(other) => Err(TokenFault::Claim(format!("`{path}` is {}, and has to be a text", kind_of(other)))),
    }
}

/// The text at a path that this setting names.
fn configured(claims: &Map<String, Value>, path: &str, setting: &str) -> Result<Option<String>, TokenFault> {
    text(claims, path).map_err(named(setting))
}

/// As there, of a claim that may also be a list of one text, or an object with one name: Keycloak's `organization` is either, the object with
/// the organization's id below its name where the mapper adds it. The id is taken, since a name may change.
fn only_one(claims: &Map<String, Value>, path: &str, setting: &str) -> Result<Option<String>, TokenFault> {
    let value = at(claims, path);
    let several = |of: &Value, count: usize| {
        let kind = kind_of(of);
        let why = format!("`{path}` is {kind} of {count}, and has to name one: ask the provider for a token of one");
        named(setting)(TokenFault::Claim(why))
    };
    match value {
        Some(list @ Value::Array(values)) if values.len() > 1 => Err(several(list, values.len())),
        Some(Value::Array(values)) => text_of(values.first(), path).map_err(named(setting)),
        Some(object @ Value::Object(names)) if names.len() > 1 => Err(several(object, names.len())),
        Some(Value::Object(names)) => {
            let Some((name, about)) = names.iter().next() else { return Ok(None) };
            let name = Value::String(name.clone());
            text_of(Some(about.get("id").filter(|id| !id.is_null()).unwrap_or(&name)), path).map_err(named(setting))
        }
        value => text_of(value, path).map_err(named(setting)),
    }
}

/// Adds the setting to a fault of a claim.
fn named(setting: &str) -> impl Fn(TokenFault) -> TokenFault {
    move |fault| match fault {
        TokenFault::Claim(why) => TokenFault::Claim(format!("{why} ({setting})")),
        other => other,
    }
}

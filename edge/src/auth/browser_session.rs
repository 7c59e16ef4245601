//! Browser sessions (decisions/0070): the cookie's secret, the sealed tokens of the identity provider, and the check at each request.
//!
//! The session is read from Postgres at each request, as service accounts are (decisions/0007), so that every replica refuses an ended one
//! from the moment its end was answered. The caller's identity comes from the provider's access token, which is verified at each request too.

use std::fmt;
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderValue, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chrono::{DateTime, TimeDelta, Utc};
use domain::browser_session::{BrowserSession, SecretDigest};
use domain::{BrowserSessionId, EntityKind, EntityRef};
use persistence::envelope_encryption::{EnvelopeError, KeyRing};
use persistence::key_rewrap::session_tokens_context;
use persistence::{Reads, StoreError};
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::opaque_token::{self, TokenHash, TokenPurpose};
use crate::http::error::{ApiError, Code};

/// The name of the cookie. The prefix makes browsers refuse it from subdomains and without TLS (RFC 6265bis, section 4.1.3.2).
pub(crate) const COOKIE: &str = "__Host-gpuaas-session";

/// The longest tokens of one session, in bytes: an access token may have 16 KiB.
const MAX_TOKENS: usize = 32 * 1024;

/// What a browser presents: the session's id, and its secret.
#[derive(Clone)]
pub(crate) struct SessionCookie {
    pub(crate) id: BrowserSessionId,
    hash: TokenHash,
}

impl SessionCookie {
    /// A new secret of the session, as the cookie's value, and its hash.
    pub(crate) fn mint(id: Uuid) -> (SecretString, SecretDigest) {
        let minted = opaque_token::mint(TokenPurpose::BrowserSession);
        let value = format!("{}.{}", minted.token.expose_secret(), id.simple());
        (value.into(), SecretDigest(minted.hash.to_bytes()))
    }

    fn parse(value: &str) -> Option<Self> {
        let (secret, id) = value.rsplit_once('.')?;
        let well_formed = id.len() == 32 && id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let id = Uuid::try_parse(id).ok().filter(|_| well_formed)?;
        let hash = opaque_token::read(TokenPurpose::BrowserSession, &secret.to_owned().into())?;
        Some(Self { id: BrowserSessionId(id), hash })
    }

    fn opens(&self, session: &BrowserSession) -> bool {
        TokenHash::from_bytes(session.secret_sha256.0).matches(&self.hash)
    }
}

impl fmt::Debug for SessionCookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionCookie").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The value of the cookie of this name; `None` where there is none or several.
pub(crate) fn cookie_value<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let lines = headers.get_all(header::COOKIE).iter().filter_map(|line| line.to_str().ok());
    let pairs = lines.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let mut values = pairs.filter(|(given, _)| *given == name).map(|(_, value)| value);
    values.next().filter(|_| values.next().is_none())
}

/// Whether the request has the cookie, whatever its value.
pub(crate) fn has_session_cookie(headers: &HeaderMap) -> bool {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|line| line.to_str().ok())
        .any(|line| line.split(';').any(|pair| pair.trim().split('=').next() == Some(COOKIE)))
}

/// The session that the request's cookie names.
///
/// # Errors
/// `session_ended` where the cookie's value is none of ours, or the cookie was sent twice.
pub(crate) fn presented(headers: &HeaderMap) -> Result<SessionCookie, ApiError> {
    cookie_value(headers, COOKIE)
        .and_then(SessionCookie::parse)
        .ok_or_else(|| session_ended("unknown").because("the cookie holds no secret of a session"))
}

/// A `Set-Cookie` of the session for the rest of its life.
pub(crate) fn set_cookie(value: &SecretString, life: TimeDelta) -> Result<HeaderValue, ApiError> {
    let (value, seconds) = (value.expose_secret(), life.num_seconds().max(0));
    let text = format!("{COOKIE}={value}; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age={seconds}");
    let mut header = HeaderValue::from_str(&text).map_err(ApiError::internal)?;
    header.set_sensitive(true);
    Ok(header)
}

/// A `Set-Cookie` that removes the session's cookie.
pub(crate) const CLEARED: HeaderValue =
    HeaderValue::from_static("__Host-gpuaas-session=; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=0");

/// The refusal of a request by a session that has ended. `reason`: a code.
pub(crate) fn session_ended(reason: &str) -> ApiError {
    ApiError::new(Code::SessionEnded, "Your login has ended; log in again.")
        .header(header::WWW_AUTHENTICATE, HeaderValue::from_static(super::MISSING))
        .detail("reason", reason)
}

/// The tokens that the identity provider has issued for a session.
#[derive(Deserialize, Serialize)]
pub(crate) struct SessionTokens {
    #[serde(with = "exposed")]
    pub(crate) access: SecretString,
    /// None where the provider issued none: the session ends with the access token.
    #[serde(default, with = "exposed_option")]
    pub(crate) refresh: Option<SecretString>,
    /// The hint of the logout at the provider.
    #[serde(with = "exposed")]
    pub(crate) id_token: SecretString,
}

/// Seals the tokens of sessions, and opens them.
#[derive(Clone)]
pub struct SessionReader {
    reads: Reads,
    ring: Arc<KeyRing>,
}

/// Why a session does not authenticate its browser.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionFault {
    #[error("there is no such session")]
    Unknown,
    #[error("the session has ended: {0}")]
    Ended(&'static str),
    #[error("the session cannot be read")]
    Store(#[source] StoreError),
    #[error("the session's tokens cannot be opened")]
    Sealed(#[source] EnvelopeError),
    #[error("the session's stored form cannot be read")]
    Unreadable,
}

impl From<SessionFault> for ApiError {
    fn from(fault: SessionFault) -> Self {
        match &fault {
            SessionFault::Unknown => session_ended("unknown").because(fault),
            SessionFault::Ended(reason) => session_ended(reason).because(fault),
            SessionFault::Store(_) => Self::unavailable(fault),
            SessionFault::Sealed(_) | SessionFault::Unreadable => Self::internal(fault),
        }
    }
}

impl SessionReader {
    #[must_use]
    pub const fn new(reads: Reads, ring: Arc<KeyRing>) -> Self {
        Self { reads, ring }
    }

    /// The session as committed in Postgres, where the cookie opens it and it is active. Never from a cache that may be stale.
    pub(crate) async fn session(
        &self,
        cookie: &SessionCookie,
        now: DateTime<Utc>,
    ) -> Result<BrowserSession, SessionFault> {
        let session = self.stored(cookie.id).await?.filter(|session| cookie.opens(session));
        let session = session.ok_or(SessionFault::Unknown)?;
        match session.end_at(now) {
            Some(reason) => Err(SessionFault::Ended(reason)),
            None => Ok(session),
        }
    }

    /// Whether the session is active: for connections that outlast a request.
    pub(crate) async fn is_active(&self, id: BrowserSessionId, now: DateTime<Utc>) -> Result<bool, SessionFault> {
        Ok(self.stored(id).await?.is_some_and(|session| session.end_at(now).is_none()))
    }

    async fn stored(&self, id: BrowserSessionId) -> Result<Option<BrowserSession>, SessionFault> {
        let entity = EntityRef { kind: EntityKind::BrowserSession, id: id.0 };
        let Some(snapshot) = self.reads.snapshot(entity).await.map_err(SessionFault::Store)? else { return Ok(None) };
        serde_json::from_str(&snapshot.body).map(Some).map_err(|_| SessionFault::Unreadable)
    }

    /// Base64, for the session's entity.
    pub(crate) fn seal(&self, id: BrowserSessionId, tokens: &SessionTokens) -> Result<String, ApiError> {
        let plain = zeroize::Zeroizing::new(serde_json::to_vec(tokens).map_err(ApiError::internal)?);
        if plain.len() > MAX_TOKENS {
            return Err(ApiError::internal(format!("the provider's tokens have {} bytes", plain.len())));
        }
        let row = id.0.to_string();
        let sealed = self.ring.seal(&session_tokens_context(&row), &plain).map_err(ApiError::internal)?;
        Ok(STANDARD.encode(sealed))
    }

    pub(crate) fn open(&self, session: &BrowserSession) -> Result<SessionTokens, SessionFault> {
        let sealed = session.tokens_enc.as_deref().ok_or(SessionFault::Unreadable)?;
        let sealed = STANDARD.decode(sealed).map_err(|_| SessionFault::Unreadable)?;
        let row = session.id.0.to_string();
        let plain = self.ring.open(&session_tokens_context(&row), &sealed).map_err(SessionFault::Sealed)?;
        serde_json::from_slice(plain.expose_secret()).map_err(|_| SessionFault::Unreadable)
    }
}

/// A secret in the plain text that is sealed.
mod exposed {
    use secrecy::{ExposeSecret as _, SecretString};
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(secret: &SecretString, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(secret.expose_secret())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SecretString, D::Error> {
        String::deserialize(deserializer).map(SecretString::from)
    }
}

/// The same, where there may be none.
mod exposed_option {
    use secrecy::{ExposeSecret as _, SecretString};
    use serde::{Deserialize, Deserializer, Serialize as _, Serializer};

    pub(super) fn serialize<S: Serializer>(secret: &Option<SecretString>, serializer: S) -> Result<S::Ok, S::Error> {
        secret.as_ref().map(|secret| secret.expose_secret()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SecretString>, D::Error> {
        Ok(Option::<String>::deserialize(deserializer)?.map(SecretString::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[&str]) -> HeaderMap {
        lines.iter().map(|line| (header::COOKIE, HeaderValue::from_str(line).unwrap())).collect()
    }

    #[test]
    fn cookie_is_read_among_others_and_never_from_two() {
        let (value, digest) = SessionCookie::mint(Uuid::from_u128(7));
        let value = value.expose_secret();
        let line = format!("a=b; {COOKIE}={value}; c");
        let read = presented(&headers(&[&line])).unwrap();
        assert_eq!((read.id.0, read.hash.to_bytes()), (Uuid::from_u128(7), digest.0));
        assert_eq!(presented(&headers(&["a=b", &format!("{COOKIE}={value}")])).unwrap().id.0, Uuid::from_u128(7));
        let twice = format!("{COOKIE}={value}; {COOKIE}={value}");
        for bad in
            ["", "a=b", &twice, &format!("{COOKIE}="), &format!("{COOKIE}={value}x"), &format!("{COOKIE}=x{value}")]
        {
            assert_eq!(presented(&headers(&[bad])).unwrap_err().code(), Code::SessionEnded, "{bad}");
        }
        assert!(has_session_cookie(&headers(&[&format!("{COOKIE}=x")])) && !has_session_cookie(&headers(&["a=b"])));
        assert!(!format!("{read:?}").contains(value));
    }
}

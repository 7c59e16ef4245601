//! A logout in flight: the ID token, which the provider needs as the hint of the user to log out (OpenID Connect RP-Initiated Logout 1.0, section 2).
//! It is in a cookie of the browser that no script can read, sealed under the key ring, for a minute; nothing of it is stored here.

use axum::http::{HeaderMap, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use persistence::envelope_encryption::{KeyRing, SealContext};
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize};

use super::pending_login::CONSOLE;
use crate::auth::browser_session::cookie_value;
use crate::auth::openid_provider::OpenIdProvider;
use crate::http::error::ApiError;

const COOKIE: &str = "__Host-gpuaas-logout";

/// How long a browser may take from the answer of the logout to the provider.
const LIFE: TimeDelta = TimeDelta::minutes(1);

const CONTEXT: SealContext<'static> = SealContext { table: "cookie", column: "logout", row: "" };

/// What browsers store of a cookie's name and value together (RFC 6265bis, section 5.6).
const MAX_COOKIE: usize = 4096;

#[derive(Deserialize, Serialize)]
struct Sealed {
    /// None where the ID token is too long for a cookie, or cannot be opened: the provider asks its user then.
    id_token: Option<String>,
    expires_at: DateTime<Utc>,
}

/// What a browser takes to the identity provider.
pub(crate) struct PendingLogout {
    id_token: Option<SecretString>,
}

impl PendingLogout {
    /// A `Set-Cookie` with the sealed logout.
    pub(crate) fn set_cookie(
        id_token: Option<&SecretString>,
        ring: &KeyRing,
        now: DateTime<Utc>,
    ) -> Result<HeaderValue, ApiError> {
        let sealed = |id_token: Option<&str>| {
            let logout = Sealed { id_token: id_token.map(str::to_owned), expires_at: now + LIFE };
            let plain = zeroize::Zeroizing::new(serde_json::to_vec(&logout).map_err(ApiError::internal)?);
            ring.seal(&CONTEXT, &plain).map(|sealed| URL_SAFE_NO_PAD.encode(sealed)).map_err(ApiError::internal)
        };
        let mut value = sealed(id_token.map(|token| token.expose_secret()))?;
        if COOKIE.len() + value.len() > MAX_COOKIE {
            value = sealed(None)?;
        }
        let seconds = LIFE.num_seconds();
        let text = format!("{COOKIE}={value}; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age={seconds}");
        HeaderValue::from_str(&text).map_err(ApiError::internal)
    }

    /// A `Set-Cookie` that removes it.
    pub(crate) const CLEARED: HeaderValue =
        HeaderValue::from_static("__Host-gpuaas-logout=; Path=/; Secure; HttpOnly; SameSite=Strict; Max-Age=0");

    /// The logout of the request's cookie.
    pub(crate) fn of(headers: &HeaderMap, ring: &KeyRing, now: DateTime<Utc>) -> Option<Self> {
        let sealed = URL_SAFE_NO_PAD.decode(cookie_value(headers, COOKIE)?).ok()?;
        let plain = ring.open(&CONTEXT, &sealed).ok()?;
        let logout: Sealed = serde_json::from_slice(plain.expose_secret()).ok()?;
        (now < logout.expires_at).then(|| Self { id_token: logout.id_token.map(SecretString::from) })
    }

    /// The provider's page at which its own session ends (RP-Initiated Logout 1.0, section 2).
    pub(crate) fn url(&self, end_session_endpoint: &Url, provider: &OpenIdProvider, public_url: &str) -> Url {
        let back = format!("{}{CONSOLE}", public_url.trim_end_matches('/'));
        let mut url = end_session_endpoint.clone();
        let mut query = url.query_pairs_mut();
        if let Some(id_token) = &self.id_token {
            query.append_pair("id_token_hint", id_token.expose_secret());
        }
        // Amazon Cognito has a name of its own for it; other providers ignore what they do not know.
        for name in ["post_logout_redirect_uri", "logout_uri"] {
            query.append_pair(name, &back);
        }
        query.append_pair("client_id", &provider.settings.client_id);
        drop(query);
        url
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::key_ring;
    use axum::http::header;

    #[test]
    fn logout_is_read_from_its_own_cookie_and_for_a_minute() {
        let (ring, now) = (key_ring(), Utc::now());
        let set =
            PendingLogout::set_cookie(Some(&"eyJhbGciOiJFUzI1NiJ9.e30.c2ln".to_owned().into()), &ring, now).unwrap();
        let line = set.to_str().unwrap().split(';').next().unwrap();
        assert!(!line.contains("eyJ"), "the ID token is readable in the browser");
        let headers = |line: &str| -> HeaderMap {
            [(header::COOKIE, HeaderValue::from_str(line).unwrap())].into_iter().collect()
        };
        let read = |line: &str, at| PendingLogout::of(&headers(line), &ring, at);
        let found = read(line, now).unwrap().id_token.unwrap();
        assert_eq!(found.expose_secret(), "eyJhbGciOiJFUzI1NiJ9.e30.c2ln");
        assert!(read(line, now + LIFE).is_none());
        assert!(read(&format!("{line}AAAA"), now).is_none());
        assert!(read("a=b", now).is_none());
    }

    #[test]
    fn id_token_that_no_cookie_can_have_is_left_out() {
        let (ring, now) = (key_ring(), Utc::now());
        for (length, is_kept) in [(2_500, true), (4_000, false), (16_000, false)] {
            let set = PendingLogout::set_cookie(Some(&"t".repeat(length).into()), &ring, now).unwrap();
            let line = set.to_str().unwrap().split(';').next().unwrap();
            assert!(line.len() <= MAX_COOKIE + 1, "{length}: browsers drop a cookie of {}", line.len());
            let headers = [(header::COOKIE, HeaderValue::from_str(line).unwrap())].into_iter().collect();
            let found = PendingLogout::of(&headers, &ring, now).unwrap();
            assert_eq!(found.id_token.is_some(), is_kept, "{length}");
        }
    }
}

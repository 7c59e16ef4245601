//! A login in flight: what the callback is compared with. It is in a cookie of the browser, sealed under the key ring, for an hour;
//! nothing of it is stored here.

use axum::http::{HeaderMap, HeaderValue};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use persistence::envelope_encryption::{KeyRing, SealContext};
use rand::Rng as _;
use reqwest::Url;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use uuid::Uuid;

use crate::auth::browser_session::cookie_value;
use crate::auth::openid_provider::{OpenIdProvider, ProviderMetadata};
use crate::http::error::ApiError;

/// `SameSite=Lax`: it is needed on the way back from the identity provider, which is another site.
const COOKIE: &str = "__Host-gpuaas-login";

/// How long a login may take at the identity provider.
const LIFE: TimeDelta = TimeDelta::minutes(10);

/// How long the browser stores the cookie: where a login took too long, the next one still leads where it was to lead.
const COOKIE_LIFE: TimeDelta = TimeDelta::hours(1);

const CONTEXT: SealContext<'static> = SealContext { table: "cookie", column: "login", row: "" };

/// Where a login may lead, and where it leads without a wish.
const DESTINATIONS: [&str; 4] = ["/console/", "/terminal/", "/recordings/", "/billing/"];
pub(crate) const CONSOLE: &str = "/console/";
const MAX_DESTINATION: usize = 1024;

/// What the callback must agree with.
#[derive(Deserialize, Serialize)]
pub(crate) struct PendingLogin {
    /// The id of the session that it opens, so that it opens one at most.
    pub(crate) session: Uuid,
    state: String,
    pub(crate) nonce: String,
    pub(crate) verifier: String,
    pub(crate) return_to: String,
    expires_at: DateTime<Utc>,
}

impl PendingLogin {
    pub(crate) fn begin(return_to: Option<&str>, now: DateTime<Utc>) -> Self {
        Self {
            session: Uuid::now_v7(),
            state: random_text(),
            nonce: random_text(),
            verifier: random_text(),
            return_to: destination(return_to),
            expires_at: now + LIFE,
        }
    }

    /// The authorization request (RFC 6749, section 4.1.1; RFC 7636, section 4.3).
    pub(crate) fn authorization_url(&self, provider: &OpenIdProvider, metadata: &ProviderMetadata) -> Url {
        let mut url = metadata.authorization_endpoint.clone();
        let challenge = URL_SAFE_NO_PAD.encode(Sha256::digest(&self.verifier));
        url.query_pairs_mut().extend_pairs([
            ("response_type", "code"),
            ("client_id", &provider.settings.client_id),
            ("redirect_uri", provider.redirect_uri()),
            ("scope", &provider.settings.scope),
            ("state", &self.state),
            ("nonce", &self.nonce),
            ("code_challenge", &challenge),
            ("code_challenge_method", "S256"),
        ]);
        if let Some(resource) = &provider.settings.resource {
            url.query_pairs_mut().append_pair("resource", resource);
        }
        url
    }

    /// A `Set-Cookie` with the sealed login. A browser has one at a time: the last one that it began.
    pub(crate) fn set_cookie(&self, ring: &KeyRing) -> Result<HeaderValue, ApiError> {
        let plain = zeroize::Zeroizing::new(serde_json::to_vec(self).map_err(ApiError::internal)?);
        let sealed = URL_SAFE_NO_PAD.encode(ring.seal(&CONTEXT, &plain).map_err(ApiError::internal)?);
        let seconds = COOKIE_LIFE.num_seconds();
        let text = format!("{COOKIE}={sealed}; Path=/; Secure; HttpOnly; SameSite=Lax; Max-Age={seconds}");
        HeaderValue::from_str(&text).map_err(ApiError::internal)
    }

    /// A `Set-Cookie` that removes it.
    pub(crate) const CLEARED: HeaderValue =
        HeaderValue::from_static("__Host-gpuaas-login=; Path=/; Secure; HttpOnly; SameSite=Lax; Max-Age=0");

    /// The login of the request's cookie, where it is the one that the callback's `state` is of.
    pub(crate) fn of_callback(headers: &HeaderMap, ring: &KeyRing, state: &str, now: DateTime<Utc>) -> Option<Self> {
        let login = Self::of_cookie(headers, ring)?;
        let is_same = bool::from(login.state.as_bytes().ct_eq(state.as_bytes()));
        (is_same && now < login.expires_at).then_some(login)
    }

    /// Where the login of the request's cookie was to lead, whatever became of it.
    pub(crate) fn return_to_of(headers: &HeaderMap, ring: &KeyRing) -> Option<String> {
        Self::of_cookie(headers, ring).map(|login| login.return_to)
    }

    fn of_cookie(headers: &HeaderMap, ring: &KeyRing) -> Option<Self> {
        let sealed = URL_SAFE_NO_PAD.decode(cookie_value(headers, COOKIE)?).ok()?;
        let plain = ring.open(&CONTEXT, &sealed).ok()?;
        serde_json::from_slice(plain.expose_secret()).ok()
    }
}

/// Where to go after the login: a path below those of our pages, or the console.
pub(crate) fn destination(wanted: Option<&str>) -> String {
    let own = || CONSOLE.to_owned();
    let Some(wanted) = wanted.filter(|wanted| wanted.len() <= MAX_DESTINATION) else { return own() };
    // Browsers read a backslash as a slash, and drop tabs and line ends.
    if !wanted.starts_with('/') || !wanted.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\') {
        return own();
    }
    let Some(base) = Url::parse("https://own.invalid/").ok() else { return own() };
    match base.join(wanted) {
        Ok(url) if url.origin() == base.origin() && DESTINATIONS.iter().any(|below| url.path().starts_with(below)) => {
            let part = |mark: char, text: Option<&str>| text.map(|text| format!("{mark}{text}")).unwrap_or_default();
            format!("{}{}{}", url.path(), part('?', url.query()), part('#', url.fragment()))
        }
        Ok(_) | Err(_) => own(),
    }
}

/// 256 random bits, as text of 43 characters: a verifier needs at least 43 (RFC 7636, section 4.1).
fn random_text() -> String {
    let mut bytes = [0_u8; 32];
    rand::rng().fill_bytes(&mut bytes);
    URL_SAFE_NO_PAD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::key_ring;
    use axum::http::header;

    #[test]
    fn login_leads_to_our_own_pages_alone() {
        for good in
            ["/console/", "/console/nodes?state=active#x", "/terminal/018f", "/recordings/1", "/billing/returned"]
        {
            assert_eq!(destination(Some(good)), good);
        }
        for bad in [
            "",
            "https://evil.example/",
            "//evil.example/console/",
            "/\\evil.example/console/",
            "\\/evil.example",
            "/console/../api/v1/me",
            "/console/%2e%2e/api",
            "/api/v1/me",
            "/console",
            "console/",
            "javascript:alert(1)",
            "/\t/evil.example/console/",
            "/console/ x",
            "/.//evil.example/console/",
            "/console/\u{e9}",
        ] {
            let leads_to = destination(Some(bad));
            assert_eq!(leads_to, CONSOLE, "{bad:?}");
        }
        let long = format!("/console/{}", "a".repeat(MAX_DESTINATION));
        assert_eq!((destination(None).as_str(), destination(Some(&long)).as_str()), (CONSOLE, CONSOLE));
    }

    #[test]
    fn login_is_read_from_its_own_browser_for_its_own_state_and_for_a_time() {
        let (ring, now) = (key_ring(), Utc::now());
        let login = PendingLogin::begin(Some("/console/nodes"), now);
        let cookie = login.set_cookie(&ring).unwrap();
        let line = cookie.to_str().unwrap().split(';').next().unwrap();
        let headers: HeaderMap = [(header::COOKIE, HeaderValue::from_str(line).unwrap())].into_iter().collect();
        let read = |headers: &HeaderMap, state: &str, at| PendingLogin::of_callback(headers, &ring, state, at);
        assert_eq!(read(&headers, &login.state, now).unwrap().return_to, "/console/nodes");
        assert!(read(&headers, "another", now).is_none());
        assert!(read(&headers, &login.state, now + LIFE).is_none());
        assert!(read(&HeaderMap::new(), &login.state, now).is_none());
        // The secrets are not readable in the browser.
        assert!(!line.contains(&login.nonce) && !line.contains(&login.verifier));
    }
}

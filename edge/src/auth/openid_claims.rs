//! The claims of ID tokens (OpenID Connect Core 1.0, section 3.1.3.7) and of logout tokens (OpenID Connect Back-Channel Logout 1.0, section
//! 2.6), of the client as which people log in to the web console.

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use thiserror::Error;

use super::claims::{TokenFault, read_seconds, text};

/// The event of a logout token.
const LOGOUT_EVENT: &str = "http://schemas.openid.net/event/backchannel-logout";

/// How old a logout token may be. Providers send it at once, and retry for a short time.
const LOGOUT_MAX_AGE: TimeDelta = TimeDelta::minutes(10);

/// Why a verified token of the provider is not what it was presented as.
#[derive(Debug, Error)]
pub(crate) enum OpenIdFault {
    #[error(transparent)]
    Token(#[from] TokenFault),
    #[error("the token is of another issuer")]
    Issuer,
    #[error("the token is for another client")]
    Client,
    #[error("the token's nonce is not that of this login")]
    Nonce,
    #[error("the token has expired, or is older than such a token may be")]
    Expired,
    #[error("the token is from the future")]
    NotYet,
    #[error("the token has no logout event")]
    Event,
    #[error("the token names neither a subject nor a session")]
    NoSubject,
}

/// What an ID token must agree with.
pub(crate) struct Expected<'a> {
    pub(crate) issuer: &'a str,
    pub(crate) client_id: &'a str,
    pub(crate) leeway: TimeDelta,
    pub(crate) now: DateTime<Utc>,
}

/// A confirmed login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IdToken {
    pub(crate) subject: String,
    pub(crate) provider_session: Option<String>,
    pub(crate) issued_at: DateTime<Utc>,
}

/// The provider logged out a subject, or one session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogoutToken {
    pub(crate) subject: Option<String>,
    pub(crate) provider_session: Option<String>,
    pub(crate) issued_at: DateTime<Utc>,
    /// The hash of its `jti`, in hexadecimal digits.
    pub(crate) jti_sha256: String,
}

impl Expected<'_> {
    /// # Errors
    /// [`OpenIdFault`]: what of the token is wrong.
    pub(crate) fn id_token(&self, claims: &Map<String, Value>, nonce: &str) -> Result<IdToken, OpenIdFault> {
        self.issuer_and_client(claims)?;
        if claims.get("nonce").and_then(Value::as_str) != Some(nonce) {
            return Err(OpenIdFault::Nonce);
        }
        let issued_at = self.issued_at(claims)?;
        if read_seconds(claims, "exp")?.is_none_or(|expires_at| expires_at + self.leeway <= self.now) {
            return Err(OpenIdFault::Expired);
        }
        let subject = text(claims, "sub")?.ok_or(OpenIdFault::NoSubject)?;
        Ok(IdToken { subject, provider_session: text(claims, "sid")?, issued_at })
    }

    /// # Errors
    /// [`OpenIdFault`]: what of the token is wrong.
    pub(crate) fn logout_token(&self, claims: &Map<String, Value>) -> Result<LogoutToken, OpenIdFault> {
        self.issuer_and_client(claims)?;
        let event = claims.get("events").and_then(Value::as_object).and_then(|events| events.get(LOGOUT_EVENT));
        if !event.is_some_and(Value::is_object) {
            return Err(OpenIdFault::Event);
        }
        // An ID token is no logout token (section 2.4).
        if claims.contains_key("nonce") {
            return Err(OpenIdFault::Nonce);
        }
        let issued_at = self.issued_at(claims)?;
        let is_over = read_seconds(claims, "exp")?.is_some_and(|expires_at| expires_at + self.leeway <= self.now);
        if is_over || issued_at + LOGOUT_MAX_AGE <= self.now {
            return Err(OpenIdFault::Expired);
        }
        let jti = text(claims, "jti")?.ok_or_else(|| TokenFault::Claim("`jti` is missing".to_owned()))?;
        let (subject, provider_session) = (text(claims, "sub")?, text(claims, "sid")?);
        if subject.is_none() && provider_session.is_none() {
            return Err(OpenIdFault::NoSubject);
        }
        let jti_sha256 = hex::encode(Sha256::digest(jti.as_bytes()));
        Ok(LogoutToken { subject, provider_session, issued_at, jti_sha256 })
    }

    fn issuer_and_client(&self, claims: &Map<String, Value>) -> Result<(), OpenIdFault> {
        if claims.get("iss").and_then(Value::as_str) != Some(self.issuer) {
            return Err(OpenIdFault::Issuer);
        }
        let (meant_for_us, several) = match claims.get("aud") {
            Some(Value::Array(all)) => (all.iter().any(|one| one.as_str() == Some(self.client_id)), all.len() > 1),
            Some(one) => (one.as_str() == Some(self.client_id), false),
            None => (false, false),
        };
        // Where there are several audiences, the client to which it was issued must be named.
        let to_us = match claims.get("azp") {
            Some(client) => client.as_str() == Some(self.client_id),
            None => !several,
        };
        if meant_for_us && to_us { Ok(()) } else { Err(OpenIdFault::Client) }
    }

    fn issued_at(&self, claims: &Map<String, Value>) -> Result<DateTime<Utc>, OpenIdFault> {
        let issued_at = read_seconds(claims, "iat")?.ok_or_else(|| TokenFault::Claim("`iat` is missing".to_owned()))?;
        if issued_at > self.now + self.leeway { Err(OpenIdFault::NotYet) } else { Ok(issued_at) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn expected() -> Expected<'static> {
        let now = DateTime::from_timestamp(1_800_000_000, 0).unwrap();
        Expected { issuer: "https://idp.example", client_id: "console", leeway: TimeDelta::seconds(60), now }
    }

    fn with(base: &Value, change: &Value) -> Map<String, Value> {
        let mut claims = base.as_object().unwrap().clone();
        for (name, value) in change.as_object().unwrap() {
            if value.is_null() {
                claims.remove(name)
            } else {
                claims.insert(name.clone(), value.clone())
            };
        }
        claims
    }

    #[test]
    fn id_token_of_another_login_client_or_issuer_is_refused() {
        let base = json!({
            "iss": "https://idp.example", "aud": "console", "sub": "ann", "sid": "s", "nonce": "n",
            "iat": 1_800_000_000_i64, "exp": 1_800_000_300_i64,
        });
        let read = |change: Value| expected().id_token(&with(&base, &change), "n");
        let login = read(json!({})).unwrap();
        assert_eq!((login.subject.as_str(), login.provider_session.as_deref()), ("ann", Some("s")));
        read(json!({"aud": ["console", "api"], "azp": "console"})).unwrap();
        for (change, fault) in [
            (json!({"iss": "https://other.example"}), "issuer"),
            (json!({"aud": "other"}), "client"),
            (json!({"aud": ["console", "api"]}), "client"),
            (json!({"azp": "other"}), "client"),
            (json!({"nonce": "m"}), "nonce"),
            (json!({"nonce": null}), "nonce"),
            (json!({"exp": 1_799_999_940_i64}), "expired"),
            (json!({"exp": null}), "expired"),
            (json!({"iat": 1_800_000_061_i64}), "future"),
            (json!({"iat": null}), "iat"),
            (json!({"sub": null}), "neither"),
            (json!({"sub": 7}), "sub"),
        ] {
            let refused = read(change.clone()).unwrap_err().to_string();
            assert!(refused.contains(fault), "{change}: {refused}");
        }
    }

    #[test]
    fn forged_forms_of_a_logout_token_are_refused() {
        let base = json!({
            "iss": "https://idp.example", "aud": "console", "sub": "ann", "jti": "j", "iat": 1_800_000_000_i64,
            "events": { LOGOUT_EVENT: {} },
        });
        let read = |change: Value| expected().logout_token(&with(&base, &change));
        assert_eq!(read(json!({})).unwrap().subject.as_deref(), Some("ann"));
        read(json!({"sub": null, "sid": "s", "exp": 1_800_000_120_i64})).unwrap();
        for (change, fault) in [
            (json!({"iss": "https://other.example"}), "issuer"),
            (json!({"aud": "other"}), "client"),
            (json!({"events": null}), "event"),
            (json!({"events": {"other": {}}}), "event"),
            (json!({"events": {LOGOUT_EVENT: "yes"}}), "event"),
            (json!({"nonce": "n"}), "nonce"),
            (json!({"jti": null}), "jti"),
            (json!({"sub": null}), "neither"),
            (json!({"iat": 1_799_999_399_i64}), "older"),
            (json!({"exp": 1_799_999_000_i64}), "expired"),
            (json!({"iat": 1_800_000_100_i64}), "future"),
        ] {
            let refused = read(change.clone()).unwrap_err().to_string();
            assert!(refused.contains(fault), "{change}: {refused}");
        }
    }
}

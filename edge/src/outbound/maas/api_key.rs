//! MAAS's API key of three parts, and the header with it: OAuth 1 with the signature method PLAINTEXT (RFC 5849, 3.4.4), which is safe over
//! TLS alone. It is composed here: it hashes nothing, and the crates for OAuth 1 bring signature methods that MAAS does not use.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rand::RngExt as _;
use reqwest::header::HeaderValue;
use secrecy::{ExposeSecret as _, SecretString};
use std::time::{SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// What is not encoded (RFC 5849, 3.6).
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// `consumer:token:secret`, as MAAS shows it to its user.
#[derive(Clone, Debug)]
pub struct ApiKey {
    consumer: String,
    token: String,
    secret: SecretString,
}

/// The text is no API key. It is not shown: it may be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("an API key has three parts with colons between, consumer:token:secret, as the provider shows it to its user")]
pub struct ApiKeyError;

impl ApiKey {
    /// # Errors
    /// Where the text does not have three parts.
    pub fn parse(text: &SecretString) -> Result<Self, ApiKeyError> {
        let parts: Vec<&str> = text.expose_secret().trim().split(':').collect();
        let is_part = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_graphic());
        let [consumer, token, secret] = parts[..] else { return Err(ApiKeyError) };
        if ![consumer, token, secret].into_iter().all(is_part) {
            return Err(ApiKeyError);
        }
        Ok(Self { consumer: consumer.to_owned(), token: token.to_owned(), secret: secret.into() })
    }

    /// The header of one request, with a nonce of its own.
    pub(super) fn authorization(&self) -> HeaderValue {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let nonce: u128 = rand::rng().random();
        let encoded = |text: &str| utf8_percent_encode(text, ENCODED).to_string();
        // The consumer has no secret at MAAS: the key begins with the separator.
        let signature = encoded(&format!("&{}", encoded(self.secret.expose_secret())));
        let text = format!(
            "OAuth realm=\"\", oauth_version=\"1.0\", oauth_signature_method=\"PLAINTEXT\", oauth_consumer_key=\"{}\", \
             oauth_token=\"{}\", oauth_signature=\"{signature}\", oauth_timestamp=\"{seconds}\", oauth_nonce=\"{nonce:032x}\"",
            encoded(&self.consumer),
            encoded(&self.token),
        );
        // All of it is printable ASCII.
        let mut value = HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("OAuth"));
        value.set_sensitive(true);
        value
    }
}

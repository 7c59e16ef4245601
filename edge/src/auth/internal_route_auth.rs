//! Tokens of the operator's own, for internal routes. Compared as hashes, in constant time.

use axum::http::HeaderMap;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::{INVALID, bearer, challenge};
use crate::http::error::ApiError;

/// The shortest token accepted, in characters: a shorter one can be guessed.
const MIN_LEN: usize = 32;

/// The hash of a configured token.
#[derive(Clone)]
pub struct InternalToken([u8; 32]);

impl InternalToken {
    /// `None` where the text is too short to be a secret.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        (text.len() >= MIN_LEN && !text.contains(char::is_whitespace)).then(|| Self(Sha256::digest(text).into()))
    }

    /// # Errors
    /// `unauthenticated` where the request does not bring this token.
    pub fn admit(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let presented: [u8; 32] = Sha256::digest(bearer(headers)?).into();
        if self.0.ct_eq(&presented).into() {
            return Ok(());
        }
        let message = "This is not the token of this route; send the configured one as Authorization: Bearer <token>.";
        Err(challenge(message, INVALID).because("a wrong internal token"))
    }
}

impl std::fmt::Debug for InternalToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InternalToken(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::header;

    fn with(authorization: &[&str]) -> HeaderMap {
        authorization.iter().map(|text| (header::AUTHORIZATION, text.parse().unwrap())).collect()
    }

    #[test]
    fn only_the_configured_token_is_admitted() {
        let text = "0123456789abcdef0123456789abcdef";
        let token = InternalToken::new(text).unwrap();
        let good = format!("Bearer {text}");
        assert!(token.admit(&with(&[&good])).is_ok());
        for wrong in [vec![], vec!["Bearer x"], vec![&*good, &*good], vec![text], vec![&good[..good.len() - 1]]] {
            assert!(token.admit(&with(&wrong)).is_err(), "{wrong:?}");
        }
        assert!(!format!("{token:?}").contains("0123"));
    }

    #[test]
    fn short_internal_token_is_refused() {
        for weak in ["", "changeme", "0123456789abcdef 123456789abcdef"] {
            assert!(InternalToken::new(weak).is_none(), "{weak}");
        }
    }
}

//! Tokens that the service mints: 256 random bits behind a readable prefix, shown once, stored as a SHA-256 hash,
//! compared in constant time.
//!
//! A plain hash is enough: the input is random, so it cannot be guessed. The prefix identifies the token for people and secret scanners.
//!
//! Tokens that are signed and not stored are in [`super::signed_tokens`].

use std::fmt;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use rand::Rng;
use secrecy::{ExposeSecret, SecretString};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use zeroize::Zeroize;

const SECRET_BYTES: usize = 32;
const SECRET_CHARS: usize = 43;

/// The purpose of a token; each has its own prefix, so that one is never accepted for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenPurpose {
    /// Admits a node to enrollment, later to recovery (service specification, "Enrollment token").
    Enrollment,
    /// Lets a service account get access tokens (specification, "Authentication" 8).
    ServiceAccountKey,
    /// Admits one connection to a terminal session (specification, "Authentication" 7).
    Terminal,
    /// Authenticates the browser of a session of the web console.
    BrowserSession,
}

impl TokenPurpose {
    pub const ALL: [Self; 4] = [Self::Enrollment, Self::ServiceAccountKey, Self::Terminal, Self::BrowserSession];

    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Enrollment => "gpuenr_",
            Self::ServiceAccountKey => "gpusak_",
            Self::Terminal => "gputrm_",
            Self::BrowserSession => "gpubrs_",
        }
    }
}

/// The stored form of a token.
#[derive(Clone, Copy)]
pub struct TokenHash([u8; 32]);

/// A fresh token and its hash.
pub struct MintedToken {
    pub token: SecretString,
    pub hash: TokenHash,
}

/// Makes a token.
#[must_use]
pub fn mint(purpose: TokenPurpose) -> MintedToken {
    let mut secret = [0_u8; SECRET_BYTES];
    rand::rng().fill_bytes(&mut secret);
    let mut text = String::with_capacity(purpose.prefix().len() + SECRET_CHARS);
    text.push_str(purpose.prefix());
    URL_SAFE_NO_PAD.encode_string(secret, &mut text);
    secret.zeroize();
    MintedToken { hash: TokenHash::of(&text), token: text.into() }
}

/// The hash of a presented token; `None` where the text does not have the form of one.
#[must_use]
pub fn read(purpose: TokenPurpose, presented: &SecretString) -> Option<TokenHash> {
    let text = presented.expose_secret();
    let secret = text.strip_prefix(purpose.prefix())?;
    let well_formed = secret.len() == SECRET_CHARS
        && secret.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    well_formed.then(|| TokenHash::of(text))
}

impl TokenHash {
    fn of(text: &str) -> Self {
        Self(Sha256::digest(text.as_bytes()).into())
    }

    #[must_use]
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    #[must_use]
    pub const fn to_bytes(self) -> [u8; 32] {
        self.0
    }

    /// Whether both are of one token, in constant time.
    #[must_use]
    pub fn matches(&self, stored: &Self) -> bool {
        self.0.ct_eq(&stored.0).into()
    }
}

/// Not even the hash belongs in a log: writing it into the database would make a token valid.
impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_minted_token_is_read_back_to_its_hash() {
        let minted = mint(TokenPurpose::Enrollment);
        assert!(minted.token.expose_secret().starts_with("gpuenr_"));
        assert_eq!(minted.token.expose_secret().len(), "gpuenr_".len() + 43);
        assert!(read(TokenPurpose::Enrollment, &minted.token).unwrap().matches(&minted.hash));
        assert!(TokenHash::from_bytes(minted.hash.to_bytes()).matches(&minted.hash));
    }

    #[test]
    fn no_two_tokens_are_alike() {
        let tokens: HashSet<[u8; 32]> = (0..1_000).map(|_| mint(TokenPurpose::Enrollment).hash.to_bytes()).collect();
        assert_eq!(tokens.len(), 1_000);
    }

    #[test]
    fn invalid_token_is_not_hashed() {
        let good = mint(TokenPurpose::Enrollment).token;
        let good = good.expose_secret();
        let too_short = &good[..good.len() - 1];
        for bad in
            ["", "gpuenr_", too_short, &format!("{good}x"), &format!(" {good}"), &good.replace("gpuenr_", "gpuxxx_")]
        {
            assert!(read(TokenPurpose::Enrollment, &SecretString::from(bad.to_owned())).is_none(), "{bad}");
        }
    }

    #[test]
    fn another_token_does_not_match() {
        assert!(!mint(TokenPurpose::Enrollment).hash.matches(&mint(TokenPurpose::Enrollment).hash));
    }

    #[test]
    fn neither_token_nor_hash_shows_in_debug_output() {
        let minted = mint(TokenPurpose::Enrollment);
        assert_eq!(format!("{:?}", minted.hash), "TokenHash(..)");
        assert!(!format!("{:?}", minted.token).contains("gpuenr_"));
    }
}

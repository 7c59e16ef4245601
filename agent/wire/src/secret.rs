//! Secrets that are transmitted.

use secrecy::{ExposeSecret as _, SecretString};
use serde::{Deserialize, Serialize, Serializer};

/// A bearer secret, such as an enrollment token. It serialises, since the peer needs it, but neither `Debug` nor an error shows it, and
/// its memory is cleared when it is dropped.
#[derive(Clone, Deserialize)]
#[serde(transparent)]
pub struct SecretToken(SecretString);

impl SecretToken {
    /// Wraps the text of a token.
    pub fn new(text: impl Into<String>) -> Self {
        Self(SecretString::from(text.into()))
    }

    /// The text itself, for hashing, comparing or sending.
    #[must_use]
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

impl Serialize for SecretToken {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.expose())
    }
}

impl std::fmt::Debug for SecretToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token([REDACTED])")
    }
}

//! The digest by which a package of the agent is pulled (decision 0046).

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

const PREFIX: &str = "sha256:";
const DIGITS: usize = 64;

/// `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PackageDigest(String);

/// The text is no digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not sha256: and 64 lower-case hexadecimal digits")]
pub struct PackageDigestError;

impl FromStr for PackageDigest {
    type Err = PackageDigestError;

    fn from_str(text: &str) -> Result<Self, PackageDigestError> {
        let digits = text.strip_prefix(PREFIX).ok_or(PackageDigestError)?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if digits.len() == DIGITS && digits.bytes().all(is_digit) {
            Ok(Self(text.to_owned()))
        } else {
            Err(PackageDigestError)
        }
    }
}

impl TryFrom<String> for PackageDigest {
    type Error = PackageDigestError;

    fn try_from(text: String) -> Result<Self, PackageDigestError> {
        text.parse()
    }
}

impl From<PackageDigest> for String {
    fn from(digest: PackageDigest) -> Self {
        digest.0
    }
}

impl fmt::Display for PackageDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl PackageDigest {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_exactly_the_text_of_a_registry() {
        let text = format!("sha256:{}", "0f".repeat(32));
        assert_eq!(text.parse::<PackageDigest>().unwrap().to_string(), text);
        for wrong in ["", "sha256:0f", &text.to_uppercase(), &text.replace('f', "g"), &format!("{text}0"), &text[7..]] {
            assert!(wrong.parse::<PackageDigest>().is_err(), "{wrong}");
            assert!(serde_json::from_value::<PackageDigest>(wrong.into()).is_err(), "{wrong}");
        }
    }
}

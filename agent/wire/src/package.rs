//! The names of the agent's package in an OCI registry, and how a node gets it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};

/// Where the package is installed on a node, where its bundle does not say.
pub const DEFAULT_INSTALL_ROOT: &str = "/opt/gpuaas";
/// The agent's environment file, where its bundle does not say.
pub const DEFAULT_ENV_FILE: &str = "/etc/gpuaas/agent.env";
/// The agent's unit, where its bundle does not say.
pub const DEFAULT_UNIT: &str = "gpuaas-agent.service";

/// Whether a text can name a service of systemd: it is an argument of systemctl and journalctl, a file's name, and stands in units.
#[must_use]
pub fn is_service_unit(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.@\\".contains(&byte);
    text.ends_with(".service") && text.len() <= UNIT_CHARS && text.bytes().all(allowed) && !text.starts_with(['-', '.'])
}

/// The path below a node's own routes under which the control plane serves the registry, for [`PullDeliveryMode::NodeApi`].
pub const RELAY_PATH: &str = "package";

/// The largest manifest of an image that is read, in bytes.
pub const MANIFEST_BYTES: u64 = 256 * 1024;

const REFERENCE_CHARS: usize = 512;
/// systemd's `UNIT_NAME_MAX`.
const UNIT_CHARS: usize = 255;

/// A SHA-256 digest as OCI registries write it: `sha256:` and 64 lower-case hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

/// The text is no digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not sha256: and 64 hexadecimal digits")]
pub struct DigestError;

impl Digest {
    /// The digest of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The result of a SHA-256 that was computed in pieces.
    #[must_use]
    pub fn finish(hasher: Sha256) -> Self {
        Self(hasher.finalize().into())
    }

    /// The digest as the name of a folder, or of a part of a tag: `sha256-` and the digits.
    #[must_use]
    pub fn name(&self) -> String {
        format!("sha256-{}", self.hex())
    }

    /// The tag under which the signature of the manifest with this digest is stored: registries without the referrers API have tags.
    #[must_use]
    pub fn signature_tag(&self) -> String {
        format!("{}.sig", self.name())
    }

    /// The digits.
    #[must_use]
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let digits = text.strip_prefix("sha256:").ok_or(DigestError)?;
        if digits.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(DigestError);
        }
        let mut bytes = [0; 32];
        hex::decode_to_slice(digits, &mut bytes).map_err(|_| DigestError)?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.hex())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({self})")
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A repository in an OCI registry: `registry.example:5000/gpuaas/agent`. A tag after it is accepted and has no meaning, since packages
/// are pulled by digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// Host, and port where it is not 443.
    pub registry: String,
    pub repository: String,
}

/// The text is no reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a reference such as registry.example:5000/gpuaas/agent, which begins with the registry's host and has no digest"
)]
pub struct ReferenceError;

impl FromStr for Reference {
    type Err = ReferenceError;

    fn from_str(text: &str) -> Result<Self, ReferenceError> {
        if text.len() > REFERENCE_CHARS {
            return Err(ReferenceError);
        }
        let (registry, path) = text.split_once('/').ok_or(ReferenceError)?;
        // A tag is after the last slash.
        let repository = match path.rsplit_once(':') {
            Some((repository, tag)) if is_tag(tag) => repository,
            Some(_) => return Err(ReferenceError),
            None => path,
        };
        // Docker's rule: a first part without one of these would be a repository of a registry that is not named.
        let names_a_host = registry.contains(['.', ':']) || registry == "localhost";
        if !names_a_host || !is_host(registry) || !repository.split('/').all(is_component) {
            return Err(ReferenceError);
        }
        Ok(Self { registry: registry.to_owned(), repository: repository.to_owned() })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)
    }
}

fn is_tag(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=128).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with(['.', '-'])
}

/// A host with or without a port; an IPv6 address is in brackets.
fn is_host(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
    !text.is_empty() && text.bytes().all(allowed)
}

/// One part of a repository's path, as the OCI distribution specification has it.
fn is_component(text: &str) -> bool {
    let is_edge = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let (first, last) = (text.as_bytes().first(), text.as_bytes().last());
    let allowed = |byte: u8| is_edge(&byte) || b"._-".contains(&byte);
    first.is_some_and(is_edge) && last.is_some_and(is_edge) && text.bytes().all(allowed) && !text.contains("..")
}

/// How a node is given access to its package.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, strum::IntoStaticStr, strum::EnumString)]
pub enum PullDeliveryMode {
    /// The node pulls from the registry with the account in its bundle, if there is one.
    #[default]
    #[strum(serialize = "bundle")]
    Bundle,
    /// The node pulls through the control plane, as itself.
    #[strum(serialize = "node-api")]
    NodeApi,
}

/// The user and password of an account that may pull, as `user:password` in a bundle.
#[must_use]
pub fn pull_account(text: &str) -> Option<(&str, &str)> {
    text.split_once(':').filter(|(user, password)| !user.is_empty() && !password.is_empty())
}

/// What a registry asks for before it answers (`WWW-Authenticate`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Challenge {
    /// User and password with each request.
    Basic,
    /// A short-lived token, which `realm` issues for the user and password.
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

impl Challenge {
    /// Reads the header. `None` for a scheme that is not known, and for a realm that is not on HTTPS.
    #[must_use]
    pub fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut scope) = (None, None, None);
        let mut rest = rest.trim();
        while let Some((name, after)) = rest.split_once("=\"") {
            let (value, after) = after.split_once('"')?;
            match name.trim_matches([',', ' ']) {
                "realm" => realm = Some(value.to_owned()),
                "service" => service = Some(value.to_owned()),
                "scope" => scope = Some(value.to_owned()),
                _ => {}
            }
            rest = after;
        }
        let realm = realm.filter(|realm| realm.starts_with("https://"))?;
        Some(Self::Bearer { realm, service, scope })
    }
}

/// The answer of a realm.
#[derive(Deserialize)]
pub struct RealmAnswer {
    token: Option<crate::SecretToken>,
    access_token: Option<crate::SecretToken>,
}

impl RealmAnswer {
    /// The token, under either of its two names.
    #[must_use]
    pub fn token(self) -> Option<crate::SecretToken> {
        self.token.or(self.access_token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_service_unit_is_one_for_the_settings_the_installer_and_the_collector() {
        for unit in [DEFAULT_UNIT, "rented.service", "gpu@rack-7.service", r"a\x2db.service"] {
            assert!(is_service_unit(unit), "{unit}");
        }
        let long = format!("{}.service", "a".repeat(UNIT_CHARS));
        let wrong = [
            "",
            "gpuaas-agent",
            "-a.service",
            ".service",
            "../a.service",
            "a b.service",
            "*.service",
            "a.timer",
            &long,
        ];
        for unit in wrong {
            assert!(!is_service_unit(unit), "{unit}");
        }
    }

    #[test]
    fn digest_is_exactly_the_text_of_a_registry() {
        let text = format!("sha256:{}", "0f".repeat(32));
        let digest: Digest = text.parse().unwrap();
        assert_eq!(digest.to_string(), text);
        assert_eq!(digest.signature_tag(), format!("sha256-{}.sig", "0f".repeat(32)));
        for wrong in
            ["sha256:0f", "0f", "sha512:00", &text.to_uppercase(), &text.replace('f', "F"), &text.replace('f', "g")]
        {
            assert!(wrong.parse::<Digest>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn reference_names_its_registry_and_never_a_digest() {
        let parse = |text: &str| text.parse::<Reference>();
        let expected = Reference { registry: "registry.example:5000".into(), repository: "gpuaas/agent".into() };
        assert_eq!(parse("registry.example:5000/gpuaas/agent").unwrap(), expected);
        assert_eq!(parse("registry.example:5000/gpuaas/agent:1.2.3").unwrap(), expected);
        assert_eq!(parse("localhost/agent").unwrap().registry, "localhost");
        for wrong in [
            "gpuaas/agent",
            "registry.example",
            "registry.example/",
            "registry.example/../agent",
            "registry.example/a//b",
            "registry.example/Agent",
            "registry.example/agent@sha256:00",
            "registry.example/agent:a/b",
            "registry.example/agent?x",
            "user@registry.example/agent",
            "https://registry.example/agent",
        ] {
            assert_eq!(parse(wrong), Err(ReferenceError), "{wrong}");
        }
    }

    #[test]
    fn challenges_are_read_as_registries_write_them() {
        assert_eq!(Challenge::parse("Basic realm=\"registry\""), Some(Challenge::Basic));
        let bearer =
            r#"Bearer realm="https://auth.example/token",service="registry.example",scope="repository:a/b:pull""#;
        let expected = Challenge::Bearer {
            realm: "https://auth.example/token".into(),
            service: Some("registry.example".into()),
            scope: Some("repository:a/b:pull".into()),
        };
        assert_eq!(Challenge::parse(bearer), Some(expected));
        for refused in ["", "Negotiate", "Bearer", "Bearer realm=\"http://auth.example\"", "Bearer realm=\"https://a"] {
            assert_eq!(Challenge::parse(refused), None, "{refused}");
        }
    }

    #[test]
    fn delivery_modes_and_accounts_are_read_by_their_names() {
        assert_eq!("bundle".parse(), Ok(PullDeliveryMode::Bundle));
        assert_eq!("node-api".parse(), Ok(PullDeliveryMode::NodeApi));
        assert!("letter".parse::<PullDeliveryMode>().is_err());
        assert_eq!(pull_account("puller:a:b"), Some(("puller", "a:b")));
        for wrong in ["puller", "puller:", ":secret", ""] {
            assert_eq!(pull_account(wrong), None, "{wrong}");
        }
    }
}

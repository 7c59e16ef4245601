//! The bootstrap bundle: everything that a node needs to enroll, and the only source of it.
//!
//! It is served as JSON under the names of the agent's environment variables, and rendered to an environment file that a POSIX shell,
//! systemd's `EnvironmentFile=` and the agent all read alike.

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::secret::SecretToken;

pub mod env_file;

pub use env_file::{EnvFileError, Variables};

/// The items of the specification's section "Bootstrap bundle".
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BootstrapBundle {
    #[serde(rename = "SVC_NODE_ID")]
    pub node_id: Uuid,
    #[serde(rename = "SVC_ENROLLMENT_TOKEN")]
    pub enrollment_token: SecretToken,
    /// Base URL of the node-facing API.
    #[serde(rename = "SVC_API_URL")]
    pub api_url: String,
    /// See [`crate::VerifierSet::from_env_value`].
    #[serde(rename = "SVC_TASK_SIGNING_PUBKEYS")]
    pub task_signing_pubkeys: String,
    #[serde(rename = "SVC_CA_BUNDLE_PATH")]
    pub ca_bundle_path: String,
    #[serde(rename = "SVC_NODE_CERT_CA_BUNDLE_PATH")]
    pub node_cert_ca_bundle_path: String,
    #[serde(rename = "SVC_CERT_PATH")]
    pub cert_path: String,
    #[serde(rename = "SVC_KEY_PATH")]
    pub key_path: String,
    /// Trust anchor for the API: one or more certificates.
    pub ca_bundle_pem: String,
    /// [`fingerprint`] of `ca_bundle_pem`.
    pub ca_bundle_fingerprint: String,
    #[serde(default, deserialize_with = "null_as_default")]
    pub package: Package,
}

/// The source and the target of the agent's package, as far as the installation configures them: null otherwise.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Package {
    /// Reference in an OCI registry.
    pub oci_ref: Option<String>,
    /// Digest by which it is pulled.
    pub digest: Option<String>,
    /// How the pull credential is delivered: [`crate::package::PullDeliveryMode`].
    pub pull_delivery_mode: Option<String>,
    pub install_root: Option<String>,
    pub env_file_path: Option<String>,
    pub systemd_unit_name: Option<String>,
    /// Ed25519 public keys of releases, base64, with commas: a package without a signature by one of them is not installed.
    #[serde(default)]
    pub release_keys: Option<String>,
    /// Trust anchor for the registry, where it is not that of the API.
    #[serde(default)]
    pub registry_ca_pem: Option<String>,
    /// `user:password` of an account that may pull, in the delivery mode `bundle`.
    #[serde(default)]
    pub pull_account: Option<SecretToken>,
}

impl Package {
    /// The items under their names in the environment.
    fn items(&self) -> [(&'static str, Option<&str>); 9] {
        [
            (names::PACKAGE_OCI_REF, self.oci_ref.as_deref()),
            (names::PACKAGE_DIGEST, self.digest.as_deref()),
            (names::PACKAGE_PULL_DELIVERY_MODE, self.pull_delivery_mode.as_deref()),
            (names::INSTALL_ROOT, self.install_root.as_deref()),
            (names::ENV_FILE, self.env_file_path.as_deref()),
            (names::SYSTEMD_UNIT, self.systemd_unit_name.as_deref()),
            (names::PACKAGE_RELEASE_KEYS, self.release_keys.as_deref()),
            (names::PACKAGE_REGISTRY_CA_PEM, self.registry_ca_pem.as_deref()),
            (names::PACKAGE_PULL_ACCOUNT, self.pull_account.as_ref().map(SecretToken::expose)),
        ]
    }
}

/// Older bundles had null for a package without any item.
fn null_as_default<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Package, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// `sha256:` and the hexadecimal SHA-256 of the PEM text's bytes, so that `sha256sum` of the written file shows the same.
#[must_use]
pub fn fingerprint(pem: &str) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(pem.as_bytes())))
}

/// Names of the environment variables beside those that are JSON names of [`BootstrapBundle`] already.
pub mod names {
    pub const NODE_ID: &str = "SVC_NODE_ID";
    pub const ENROLLMENT_TOKEN: &str = "SVC_ENROLLMENT_TOKEN";
    pub const API_URL: &str = "SVC_API_URL";
    pub const TASK_SIGNING_PUBKEYS: &str = "SVC_TASK_SIGNING_PUBKEYS";
    pub const CA_BUNDLE_PATH: &str = "SVC_CA_BUNDLE_PATH";
    pub const NODE_CERT_CA_BUNDLE_PATH: &str = "SVC_NODE_CERT_CA_BUNDLE_PATH";
    pub const CERT_PATH: &str = "SVC_CERT_PATH";
    pub const KEY_PATH: &str = "SVC_KEY_PATH";
    pub const CA_BUNDLE_PEM: &str = "SVC_CA_BUNDLE_PEM";
    pub const CA_BUNDLE_FINGERPRINT: &str = "SVC_CA_BUNDLE_FINGERPRINT";
    pub const PACKAGE_OCI_REF: &str = "SVC_NODE_AGENT_PACKAGE_OCI_REF";
    pub const PACKAGE_DIGEST: &str = "SVC_NODE_AGENT_PACKAGE_DIGEST";
    pub const PACKAGE_PULL_DELIVERY_MODE: &str = "SVC_NODE_AGENT_PACKAGE_PULL_DELIVERY_MODE";
    pub const PACKAGE_RELEASE_KEYS: &str = "SVC_NODE_AGENT_PACKAGE_RELEASE_KEYS";
    pub const PACKAGE_REGISTRY_CA_PEM: &str = "SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PEM";
    pub const PACKAGE_PULL_ACCOUNT: &str = "SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT";
    pub const INSTALL_ROOT: &str = "SVC_NODE_AGENT_INSTALL_ROOT";
    pub const ENV_FILE: &str = "SVC_NODE_AGENT_ENV_FILE";
    pub const SYSTEMD_UNIT: &str = "SVC_NODE_AGENT_SYSTEMD_UNIT";
}

impl BootstrapBundle {
    /// The bundle as name and value pairs, in the order in which they are written.
    #[must_use]
    pub fn variables(&self) -> Variables {
        let node_id = self.node_id.to_string();
        let mut pairs = vec![
            (names::NODE_ID, node_id.as_str()),
            (names::ENROLLMENT_TOKEN, self.enrollment_token.expose()),
            (names::API_URL, &self.api_url),
            (names::TASK_SIGNING_PUBKEYS, &self.task_signing_pubkeys),
            (names::CA_BUNDLE_PATH, &self.ca_bundle_path),
            (names::NODE_CERT_CA_BUNDLE_PATH, &self.node_cert_ca_bundle_path),
            (names::CERT_PATH, &self.cert_path),
            (names::KEY_PATH, &self.key_path),
            (names::CA_BUNDLE_FINGERPRINT, &self.ca_bundle_fingerprint),
            (names::CA_BUNDLE_PEM, &self.ca_bundle_pem),
        ];
        pairs.extend(self.package.items().into_iter().filter_map(|(name, value)| Some((name, value?))));
        pairs.into_iter().collect()
    }

    /// The environment file. It holds the enrollment token: write it with mode 0600.
    ///
    /// # Errors
    /// [`EnvFileError`] when a value holds a NUL, which no environment can carry.
    pub fn to_env_file(&self) -> Result<String, EnvFileError> {
        self.variables().render()
    }

    /// Reads an environment file that [`BootstrapBundle::to_env_file`] wrote.
    ///
    /// # Errors
    /// [`EnvFileError`] when the file does not parse or an item of the bundle is missing.
    pub fn from_env_file(text: &str) -> Result<Self, EnvFileError> {
        let variables = Variables::parse(text)?;
        let required = |name: &'static str| variables.require(name).map(str::to_owned);
        let optional = |name| variables.get(name).map(str::to_owned);
        let package = Package {
            oci_ref: optional(names::PACKAGE_OCI_REF),
            digest: optional(names::PACKAGE_DIGEST),
            pull_delivery_mode: optional(names::PACKAGE_PULL_DELIVERY_MODE),
            install_root: optional(names::INSTALL_ROOT),
            env_file_path: optional(names::ENV_FILE),
            systemd_unit_name: optional(names::SYSTEMD_UNIT),
            release_keys: optional(names::PACKAGE_RELEASE_KEYS),
            registry_ca_pem: optional(names::PACKAGE_REGISTRY_CA_PEM),
            pull_account: optional(names::PACKAGE_PULL_ACCOUNT).map(SecretToken::new),
        };
        Ok(Self {
            node_id: required(names::NODE_ID)?
                .parse()
                .map_err(|_| EnvFileError::Value { name: names::NODE_ID, expected: "a UUID" })?,
            enrollment_token: SecretToken::new(required(names::ENROLLMENT_TOKEN)?),
            api_url: required(names::API_URL)?,
            task_signing_pubkeys: required(names::TASK_SIGNING_PUBKEYS)?,
            ca_bundle_path: required(names::CA_BUNDLE_PATH)?,
            node_cert_ca_bundle_path: required(names::NODE_CERT_CA_BUNDLE_PATH)?,
            cert_path: required(names::CERT_PATH)?,
            key_path: required(names::KEY_PATH)?,
            ca_bundle_pem: required(names::CA_BUNDLE_PEM)?,
            ca_bundle_fingerprint: required(names::CA_BUNDLE_FINGERPRINT)?,
            package,
        })
    }
}

//! Where a node pulls its package from, and with what, according to its bootstrap bundle.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use secrecy::SecretString;
use wire::PublicKey;
use wire::bundle::{BootstrapBundle, names};
use wire::package::{
    DEFAULT_ENV_FILE, DEFAULT_INSTALL_ROOT, DEFAULT_UNIT, Digest, PullDeliveryMode, RELAY_PATH, Reference,
    is_service_unit, pull_account,
};

use crate::registry::{ClientIdentity, Credential, Location, Registry, RegistryError};

/// A bundle by which nothing can be installed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("{0} is not set; ask an administrator to configure the agent's package, and for a new bootstrap script")]
    Missing(&'static str),
    #[error("{name} is not {expected}; ask an administrator to correct it")]
    Value { name: &'static str, expected: &'static str },
    #[error("{} cannot be read; the node has no identity yet: run a bootstrap script", path.display())]
    Identity {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
}

/// Who the node is for the control plane, in the delivery mode `node-api`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeCredential {
    /// Its certificate.
    Certificate,
    /// Its enrollment token, before it has a certificate. It is not spent.
    EnrollmentToken,
}

/// What is installed, from where, and to where.
#[derive(Debug)]
pub struct PackageSource {
    pub digest: Digest,
    pub release_keys: Vec<PublicKey>,
    pub install_root: PathBuf,
    pub env_file: PathBuf,
    pub unit: String,
    location: Location,
    identity: Option<ClientIdentity>,
    credential: Credential,
}

impl PackageSource {
    /// Reads the package's items of a bundle.
    ///
    /// # Errors
    /// [`SourceError`] names the item that is missing or wrong.
    pub fn from_bundle(bundle: &BootstrapBundle, credential: NodeCredential) -> Result<Self, SourceError> {
        let package = &bundle.package;
        let reference: Reference =
            parsed(names::PACKAGE_OCI_REF, package.oci_ref.as_deref(), "a reference in an OCI registry")?;
        let digest = parsed(names::PACKAGE_DIGEST, package.digest.as_deref(), "sha256: and 64 hexadecimal digits")?;
        let mode = package.pull_delivery_mode.as_deref().unwrap_or("bundle");
        let mode = parsed(names::PACKAGE_PULL_DELIVERY_MODE, Some(mode), "bundle or node-api")?;
        let (location, identity, credential) = match mode {
            PullDeliveryMode::Bundle => of_registry(bundle, &reference)?,
            PullDeliveryMode::NodeApi => of_relay(bundle, credential)?,
        };
        Ok(Self {
            digest,
            release_keys: release_keys(package.release_keys.as_deref())?,
            install_root: path(names::INSTALL_ROOT, package.install_root.as_deref().unwrap_or(DEFAULT_INSTALL_ROOT))?,
            env_file: path(names::ENV_FILE, package.env_file_path.as_deref().unwrap_or(DEFAULT_ENV_FILE))?,
            unit: unit(package.systemd_unit_name.as_deref().unwrap_or(DEFAULT_UNIT))?,
            location,
            identity,
            credential,
        })
    }

    /// The client for it.
    ///
    /// # Errors
    /// Where a certificate or key cannot be used.
    pub fn open(self, deadline: Instant) -> Result<Registry, RegistryError> {
        Registry::new(self.location, self.identity.as_ref(), self.credential, deadline)
    }
}

type Access = (Location, Option<ClientIdentity>, Credential);

fn of_registry(bundle: &BootstrapBundle, reference: &Reference) -> Result<Access, SourceError> {
    let package = &bundle.package;
    let credential = match &package.pull_account {
        Some(account) => {
            let expected = SourceError::Value { name: names::PACKAGE_PULL_ACCOUNT, expected: "user:password" };
            let (user, password) = pull_account(account.expose()).ok_or(expected)?;
            Credential::Account { user: user.to_owned(), password: SecretString::from(password) }
        }
        None => Credential::Nothing,
    };
    let location = Location {
        host: reference.registry.clone(),
        base: format!("https://{}/v2/{}", reference.registry, reference.repository),
        authorities_pem: package.registry_ca_pem.clone().unwrap_or_else(|| bundle.ca_bundle_pem.clone()),
    };
    Ok((location, None, credential))
}

fn of_relay(bundle: &BootstrapBundle, credential: NodeCredential) -> Result<Access, SourceError> {
    let api = bundle.api_url.trim_end_matches('/');
    let host = api.strip_prefix("https://").filter(|host| !host.is_empty());
    let host = host.ok_or(SourceError::Value { name: names::API_URL, expected: "an https URL" })?;
    let location = Location {
        host: host.to_owned(),
        base: format!("{api}/internal/v1/nodes/{}/{RELAY_PATH}", bundle.node_id),
        authorities_pem: bundle.ca_bundle_pem.clone(),
    };
    match credential {
        NodeCredential::EnrollmentToken => {
            let token = SecretString::from(bundle.enrollment_token.expose());
            Ok((location, None, Credential::Token(token)))
        }
        NodeCredential::Certificate => {
            let read = |path: &str| {
                let path = Path::new(path);
                fs::read(path).map_err(|source| SourceError::Identity { path: path.to_owned(), source })
            };
            let (certificate_pem, key_pem) = (read(&bundle.cert_path)?, read(&bundle.key_path)?.into());
            Ok((location, Some(ClientIdentity { certificate_pem, key_pem }), Credential::Nothing))
        }
    }
}

fn parsed<T: std::str::FromStr>(
    name: &'static str,
    value: Option<&str>,
    expected: &'static str,
) -> Result<T, SourceError> {
    let value = value.ok_or(SourceError::Missing(name))?;
    value.parse().map_err(|_| SourceError::Value { name, expected })
}

fn release_keys(list: Option<&str>) -> Result<Vec<PublicKey>, SourceError> {
    let name = names::PACKAGE_RELEASE_KEYS;
    let list = list.filter(|list| !list.trim().is_empty()).ok_or(SourceError::Missing(name))?;
    let keys = list.split(',').map(|key| key.trim().parse());
    keys.collect::<Result<_, _>>()
        .map_err(|_| SourceError::Value { name, expected: "Ed25519 public keys, base64, with commas" })
}

/// A path that a unit can have in a command line as it is.
fn path(name: &'static str, text: &str) -> Result<PathBuf, SourceError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    let is_plain = text.starts_with('/') && text.bytes().all(allowed) && !text.split('/').any(|part| part == "..");
    let expected = "an absolute path of letters, digits, `.`, `_` and `-`";
    if is_plain { Ok(PathBuf::from(text)) } else { Err(SourceError::Value { name, expected }) }
}

fn unit(text: &str) -> Result<String, SourceError> {
    let expected = "the name of a systemd unit, such as gpuaas-agent.service";
    if is_service_unit(text) {
        Ok(text.to_owned())
    } else {
        Err(SourceError::Value { name: names::SYSTEMD_UNIT, expected })
    }
}

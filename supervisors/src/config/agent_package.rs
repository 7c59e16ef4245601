//! The settings of the agent's package: where it is, by what it is verified, and how nodes get it.

use super::variables::Variables;
use anyhow::Context as _;
use edge::agent_package::{AgentPackage, FirstProgram, INSTALLER_BYTES, INSTALLER_PATH};
use edge::outbound::package_registry::{PackageRegistry, PullAccount};
use secrecy::SecretString;
use std::path::PathBuf;
use wire::bundle::{Package, names};
use wire::package::{Digest, PullDeliveryMode, Reference, is_service_unit, pull_account};
use wire::{PublicKey, SecretToken};

const REGISTRY_CA: &str = "SVC_NODE_AGENT_PACKAGE_REGISTRY_CA_PATH";
const ACCOUNT: &str = "SVC_NODE_AGENT_PACKAGE_PULL_ACCOUNT_PATH";

/// What is configured of the package.
#[derive(Debug, Default)]
pub struct AgentPackageSettings {
    /// Its items in bundles, as far as they are set by variables.
    pub bundled: Package,
    /// The static installer that scripts carry.
    pub installer: Option<PathBuf>,
    /// Authorities for the registry.
    pub registry_ca: Option<PathBuf>,
    /// The file of an account that may pull.
    pub account: Option<PathBuf>,
    mode: PullDeliveryMode,
    reference: Option<Reference>,
}

impl AgentPackageSettings {
    /// Reads the files, and makes the client for the registry that the node API relays.
    ///
    /// # Errors
    /// Names the variable that cannot be used.
    pub fn open(&self) -> anyhow::Result<AgentPackage> {
        let mut bundled = self.bundled.clone();
        let authorities = match &self.registry_ca {
            Some(path) => Some(read_text(REGISTRY_CA, path)?),
            None => None,
        };
        let account = match &self.account {
            Some(path) => Some(read_account(path)?),
            None => None,
        };
        let first_program = self.installer.as_ref().map(read_installer).transpose()?;
        let registry = match (self.mode, &self.reference) {
            (PullDeliveryMode::NodeApi, Some(reference)) => {
                let client = PackageRegistry::new(reference, authorities.as_deref(), account);
                Some(client.context(REGISTRY_CA)?)
            }
            (PullDeliveryMode::NodeApi, None) => None,
            (PullDeliveryMode::Bundle, _) => {
                bundled.registry_ca_pem = authorities;
                bundled.pull_account = account.map(|account| {
                    use secrecy::ExposeSecret as _;
                    SecretToken::new(format!("{}:{}", account.user, account.password.expose_secret()))
                });
                None
            }
        };
        Ok(AgentPackage { bundled, first_program, registry })
    }
}

/// Reads the package's settings. A value that is not set is null in the bundle.
pub(super) fn agent_package(variables: &mut Variables<'_>) -> AgentPackageSettings {
    let mut checked = |name: &str, what: &str, is_one: fn(&str) -> bool| {
        let value = variables.optional(name)?;
        if !is_one(&value) {
            variables.wrong(format!("{name} is {value:?}; it must be {what}"));
        }
        Some(value)
    };
    let reference = "a repository in an OCI registry, such as registry.example:5000/gpuaas/agent, without a digest";
    let bundled = Package {
        oci_ref: checked(names::PACKAGE_OCI_REF, reference, |text| text.parse::<Reference>().is_ok()),
        digest: checked(names::PACKAGE_DIGEST, "sha256: and 64 hexadecimal digits", |text| {
            text.parse::<Digest>().is_ok()
        }),
        pull_delivery_mode: checked(names::PACKAGE_PULL_DELIVERY_MODE, "bundle or node-api", |text| {
            text.parse::<PullDeliveryMode>().is_ok()
        }),
        install_root: checked(
            names::INSTALL_ROOT,
            "an absolute path of letters, digits, `.`, `_` and `-`",
            is_plain_path,
        ),
        env_file_path: checked(names::ENV_FILE, "an absolute path", |text| {
            text.starts_with('/') && !text.contains(char::is_control)
        }),
        systemd_unit_name: checked(
            names::SYSTEMD_UNIT,
            "the name of a systemd unit, such as gpuaas-agent.service",
            is_service_unit,
        ),
        release_keys: checked(names::PACKAGE_RELEASE_KEYS, "Ed25519 public keys, base64, with commas", |text| {
            text.split(',').all(|key| key.trim().parse::<PublicKey>().is_ok())
        }),
        registry_ca_pem: None,
        pull_account: None,
    };
    // A reference without a digest depends on the registry's current content.
    if bundled.oci_ref.is_some() != bundled.digest.is_some() {
        let (reference, digest) = (names::PACKAGE_OCI_REF, names::PACKAGE_DIGEST);
        variables.wrong(format!("{reference} and {digest} go together: a package is pulled by its digest"));
    }
    let mode = bundled.pull_delivery_mode.as_deref().and_then(|mode| mode.parse().ok()).unwrap_or_default();
    let reference = bundled.oci_ref.as_deref().and_then(|reference| reference.parse().ok());
    let settings = AgentPackageSettings {
        bundled,
        installer: variables.optional(INSTALLER_PATH).map(PathBuf::from),
        registry_ca: variables.optional_certificates(REGISTRY_CA),
        account: variables.optional(ACCOUNT).map(PathBuf::from),
        mode,
        reference,
    };
    // Files that cannot be used are problems of the configuration, and all are listed.
    for problem in [
        settings.installer.as_ref().and_then(|path| read_installer(path).err()),
        settings.account.as_ref().and_then(|path| read_account(path).err()),
    ] {
        problem.into_iter().for_each(|problem| variables.wrong(format!("{problem:#}")));
    }
    settings
}

fn is_plain_path(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte);
    text.starts_with('/') && text.bytes().all(allowed) && !text.split('/').any(|part| part == "..")
}

fn read_installer(path: &PathBuf) -> anyhow::Result<FirstProgram> {
    let context = || format!("{INSTALLER_PATH} is {}", path.display());
    let length = std::fs::metadata(path).with_context(context)?.len();
    anyhow::ensure!(length <= INSTALLER_BYTES, "{}, of {length} bytes; at most {INSTALLER_BYTES}", context());
    FirstProgram::new(&std::fs::read(path).with_context(context)?).with_context(context)
}

fn read_account(path: &PathBuf) -> anyhow::Result<PullAccount> {
    let text = SecretString::from(read_text(ACCOUNT, path)?);
    let pair = pull_account(secrecy::ExposeSecret::expose_secret(&text).trim());
    let (user, password) =
        pair.with_context(|| format!("{ACCOUNT} is {}; it must hold user:password", path.display()))?;
    Ok(PullAccount { user: user.to_owned(), password: SecretString::from(password) })
}

fn read_text(name: &str, path: &PathBuf) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{name} is {}, which cannot be read", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    fn digest() -> String {
        format!("sha256:{}", "0f".repeat(32))
    }

    #[test]
    fn package_is_null_where_unset_and_identified_by_its_digest() {
        let nothing = read_from(&[], agent_package).unwrap().open().unwrap();
        assert!(nothing.bundled.oci_ref.is_none() && nothing.registry.is_none() && nothing.first_program.is_none());
        let digest = digest();
        let settings = [
            (names::PACKAGE_OCI_REF, "registry.example/gpuaas/agent:1"),
            (names::PACKAGE_DIGEST, digest.as_str()),
            (names::ENV_FILE, "/srv/agent.env"),
        ];
        let read = read_from(&settings, agent_package).unwrap().bundled;
        assert_eq!((read.digest.as_deref(), read.install_root), (Some(digest.as_str()), None));
        for (name, value) in [
            (names::PACKAGE_OCI_REF, "registry.example/agent:1"),
            (names::PACKAGE_OCI_REF, "registry.example/agent@sha256:00"),
            (names::PACKAGE_DIGEST, "sha256:0f"),
            (names::PACKAGE_PULL_DELIVERY_MODE, "letter"),
            (names::INSTALL_ROOT, "opt/gpuaas"),
            (names::INSTALL_ROOT, "/opt/$(id)"),
            (names::ENV_FILE, "/etc/a\nb"),
            (names::SYSTEMD_UNIT, "--now.service"),
            (names::SYSTEMD_UNIT, "gpuaas agent.service"),
            (names::PACKAGE_RELEASE_KEYS, "AAAA"),
            (INSTALLER_PATH, "/proc/self/exe.none"),
            (INSTALLER_PATH, "/etc/hostname"),
            (ACCOUNT, "/etc/hostname"),
        ] {
            let error = read_from(&[(name, value)], agent_package).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn registry_account_reaches_bundles_in_that_mode_alone() {
        let folder = tempfile::tempdir().unwrap();
        let account = folder.path().join("account");
        std::fs::write(&account, "puller:s3cret\n").unwrap();
        let digest = digest();
        let settings = |mode: &'static str| {
            let settings = [
                (names::PACKAGE_OCI_REF, "registry.example/gpuaas/agent"),
                (names::PACKAGE_DIGEST, digest.as_str()),
                (names::PACKAGE_PULL_DELIVERY_MODE, mode),
                (ACCOUNT, account.to_str().unwrap()),
            ];
            read_from(&settings, agent_package).unwrap().open().unwrap()
        };
        let in_bundle = settings("bundle");
        assert_eq!(in_bundle.bundled.pull_account.unwrap().expose(), "puller:s3cret");
        assert!(in_bundle.registry.is_none());
        let relayed = settings("node-api");
        assert!(relayed.bundled.pull_account.is_none() && relayed.registry.is_some());
        assert!(!format!("{:?}", relayed.registry).contains("s3cret"));
    }
}

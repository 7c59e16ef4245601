//! The settings of the node API: the proxies in front of it, and the agent's package in bundles.

use super::variables::Variables;
use edge::tls::forwarded::Forwarding;
use ipnet::IpNet;
use wire::bundle::{Package, names};

const CLIENT_IDENTITY: &str = "SVC_NODE_CLIENT_IDENTITY";
const NETWORKS: &str = "SVC_NODE_TRUSTED_PROXIES";

/// Proxies that terminate TLS for the node API, and how they forward a client's certificate.
#[derive(Debug, PartialEq, Eq)]
pub struct NodeProxies {
    pub forwarding: Forwarding,
    pub networks: Vec<IpNet>,
}

pub(super) fn node_proxies(variables: &mut Variables<'_>) -> Option<NodeProxies> {
    let way = variables.optional(CLIENT_IDENTITY).unwrap_or_else(|| "tls".to_owned());
    let names_networks = !variables.list(NETWORKS).is_empty();
    let networks = variables.networks(NETWORKS);
    if way == "tls" {
        if names_networks {
            variables.wrong(format!(
                "{NETWORKS} is set, but {CLIENT_IDENTITY} does not say how those proxies forward a certificate"
            ));
        }
        return None;
    }
    let forwarding = Forwarding::ALL.into_iter().find(|known| known.name() == way);
    if forwarding.is_none() {
        let known = Forwarding::ALL.map(Forwarding::name).join(", ");
        variables.wrong(format!("{CLIENT_IDENTITY} is {way:?}; it must be tls, or one of {known}"));
    }
    if !names_networks {
        variables.wrong(format!(
            "{CLIENT_IDENTITY} is {way}; {NETWORKS} must name the proxies' networks: only their word is taken"
        ));
    }
    if let Some(everybody) = networks.iter().find(|network| network.prefix_len() == 0) {
        variables.wrong(format!("{NETWORKS}: {everybody} would let everybody be any node"));
    }
    Some(NodeProxies { forwarding: forwarding?, networks })
}

/// Reads the package's settings. A value that is not set is null in the bundle.
pub(super) fn package(variables: &mut Variables<'_>) -> Package {
    let mut checked = |name: &str, what: &str, is_one: fn(&str) -> bool| {
        let value = variables.optional(name)?;
        if !is_one(&value) {
            variables.wrong(format!("{name} is {value:?}; it must be {what}"));
        }
        Some(value)
    };
    let is_word = |text: &str| !text.contains(|character: char| character.is_whitespace() || character.is_control());
    let is_digest = |text: &str| {
        text.strip_prefix("sha256:")
            .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
    };
    let is_path = |text: &str| text.starts_with('/') && !text.contains(char::is_control);
    let is_unit = |text: &str| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.@\\".contains(&byte);
        text.ends_with(".service") && !text.starts_with('-') && text.bytes().all(allowed)
    };
    let package = Package {
        oci_ref: checked(names::PACKAGE_OCI_REF, "a reference in an OCI registry", is_word),
        digest: checked(names::PACKAGE_DIGEST, "sha256: and 64 hexadecimal digits", is_digest),
        pull_delivery_mode: checked(names::PACKAGE_PULL_DELIVERY_MODE, "one word", is_word),
        install_root: checked(names::INSTALL_ROOT, "an absolute path", is_path),
        env_file_path: checked(names::ENV_FILE, "an absolute path", is_path),
        systemd_unit_name: checked(
            names::SYSTEMD_UNIT,
            "the name of a systemd unit, such as gpuaas-agent.service",
            is_unit,
        ),
    };
    // A reference without a digest depends on the registry's current content.
    if package.oci_ref.is_some() != package.digest.is_some() {
        let (reference, digest) = (names::PACKAGE_OCI_REF, names::PACKAGE_DIGEST);
        variables.wrong(format!("{reference} and {digest} go together: a package is pulled by its digest"));
    }
    package
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::{ConfigError, read_from};

    fn proxies_of(variables: &[(&str, &str)]) -> Result<Option<NodeProxies>, ConfigError> {
        read_from(variables, node_proxies)
    }

    #[test]
    fn node_api_terminates_tls_unless_proxies_and_their_forwarding_are_configured() {
        assert_eq!(proxies_of(&[]).unwrap(), None);
        assert_eq!(proxies_of(&[(CLIENT_IDENTITY, "tls")]).unwrap(), None);
        let proxies =
            proxies_of(&[(CLIENT_IDENTITY, "rfc9440"), (NETWORKS, "10.0.0.7/32, fd00::/64")]).unwrap().unwrap();
        assert_eq!((proxies.forwarding, proxies.networks.len()), (Forwarding::Rfc9440, 2));
        for (variables, named) in [
            (vec![(CLIENT_IDENTITY, "rfc9440")], NETWORKS),
            (vec![(NETWORKS, "10.0.0.0/8")], CLIENT_IDENTITY),
            (vec![(CLIENT_IDENTITY, "spiffe"), (NETWORKS, "10.0.0.0/8")], "xfcc"),
            (vec![(CLIENT_IDENTITY, "xfcc"), (NETWORKS, "10.0.0.0/8, 0.0.0.0/0")], "everybody"),
            (vec![(CLIENT_IDENTITY, "nginx"), (NETWORKS, "proxy.internal")], "proxy.internal"),
        ] {
            let error = proxies_of(&variables).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn package_is_null_where_unset_and_identified_by_its_digest() {
        assert_eq!(read_from(&[], package).unwrap(), Package::default());
        let digest = format!("sha256:{}", "0f".repeat(32));
        let settings = [
            (names::PACKAGE_OCI_REF, "registry.example/gpuaas/agent:1"),
            (names::PACKAGE_DIGEST, digest.as_str()),
            (names::ENV_FILE, "/srv/agent.env"),
        ];
        let read = read_from(&settings, package).unwrap();
        assert_eq!((read.digest.as_deref(), read.install_root), (Some(digest.as_str()), None));
        for (name, value) in [
            (names::PACKAGE_OCI_REF, "registry.example/agent:1"),
            (names::PACKAGE_DIGEST, "sha256:0f"),
            (names::PACKAGE_PULL_DELIVERY_MODE, "in a letter"),
            (names::INSTALL_ROOT, "opt/gpuaas"),
            (names::ENV_FILE, "/etc/a\nb"),
            (names::SYSTEMD_UNIT, "--now.service"),
            (names::SYSTEMD_UNIT, "gpuaas agent.service"),
        ] {
            let error = read_from(&[(name, value)], package).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}

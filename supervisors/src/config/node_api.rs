//! The settings of the node API: the proxies in front of it.

use super::variables::Variables;
use edge::tls::forwarded_client_certificate::Forwarding;
use ipnet::IpNet;

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
            "{CLIENT_IDENTITY} is {way}; {NETWORKS} must name the proxies' networks: only they are believed"
        ));
    }
    if let Some(everybody) = networks.iter().find(|network| network.prefix_len() == 0) {
        variables.wrong(format!("{NETWORKS}: {everybody} would let any client act as any node"));
    }
    Some(NodeProxies { forwarding: forwarding?, networks })
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
            (vec![(CLIENT_IDENTITY, "xfcc"), (NETWORKS, "10.0.0.0/8, 0.0.0.0/0")], "any client"),
            (vec![(CLIENT_IDENTITY, "nginx"), (NETWORKS, "proxy.internal")], "proxy.internal"),
        ] {
            let error = proxies_of(&variables).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}

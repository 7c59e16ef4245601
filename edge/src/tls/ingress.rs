//! Load balancers and HTTP proxies in front of the listeners, whose connections carry many clients.

use axum::http::HeaderMap;
use ipnet::IpNet;
use std::net::IpAddr;

/// Proxies and balancers by their own addresses.
#[derive(Clone, Debug, Default)]
pub struct Ingress {
    /// HTTP proxies: the client is the last address of `X-Forwarded-For` that is not a proxy's.
    pub proxies: Vec<IpNet>,
    /// Balancers that pass TLS through and do not name the client. An `X-Forwarded-For` behind them is written by the client and proves
    /// nothing.
    pub balancers: Vec<IpNet>,
}

impl Ingress {
    pub(crate) fn is_proxy(&self, address: IpAddr) -> bool {
        is_within(&self.proxies, address)
    }

    pub(crate) fn is_balancer(&self, address: IpAddr) -> bool {
        is_within(&self.balancers, address)
    }
}

pub(crate) fn is_within(networks: &[IpNet], address: IpAddr) -> bool {
    let address = address.to_canonical();
    networks.iter().any(|network| network.contains(&address))
}

/// The last address of `X-Forwarded-For` that is not a proxy's: the entries before it are written by the client. `None` where an entry is
/// not an address, or there is none.
pub(crate) fn forwarded_client(headers: &HeaderMap, is_proxy: impl Fn(IpAddr) -> bool) -> Option<IpAddr> {
    let lines: Vec<_> = headers.get_all("x-forwarded-for").iter().filter_map(|line| line.to_str().ok()).collect();
    for entry in lines.iter().rev().flat_map(|line| line.rsplit(',')) {
        let address = entry.trim().parse::<IpAddr>().ok()?.to_canonical();
        if !is_proxy(address) {
            return Some(address);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::Peer;
    use crate::tls::proxies::peer_of;

    fn ingress() -> Ingress {
        let networks = |text: &str| vec![text.parse().unwrap()];
        Ingress { proxies: networks("10.0.0.0/24"), balancers: networks("10.0.1.0/24") }
    }

    /// The network that a request counts against.
    fn network(from: &str, forwarded: &[&str]) -> Option<String> {
        let peer = Peer::connected((from.parse::<IpAddr>().unwrap(), 4711).into(), None, false, &ingress());
        let mut headers = HeaderMap::new();
        for line in forwarded {
            headers.append("x-forwarded-for", line.parse().unwrap());
        }
        peer_of(None, &ingress(), &peer, &mut headers).network().map(|network| network.to_string())
    }

    #[test]
    fn forwarded_addresses_count_from_trusted_proxies_alone() {
        assert_eq!(network("192.0.2.1", &["198.51.100.7"]).as_deref(), Some("192.0.2.1"));
        assert_eq!(network("10.0.0.1", &["198.51.100.7"]).as_deref(), Some("198.51.100.7"));
        assert_eq!(network("::ffff:10.0.0.1", &["198.51.100.7"]).as_deref(), Some("198.51.100.7"));
        assert_eq!(network("10.0.0.1", &["1.1.1.1, 198.51.100.7", "10.0.0.2"]).as_deref(), Some("198.51.100.7"));
        assert_eq!(network("10.0.0.1", &["2001:db8::1:2:3:4"]).as_deref(), Some("2001:db8::"));
    }

    #[test]
    fn balancer_and_proxy_without_a_named_client_count_as_many_clients() {
        assert_eq!(network("10.0.0.1", &[]), None);
        assert_eq!(network("10.0.0.1", &["unknown"]), None);
        assert_eq!(network("10.0.1.1", &[]), None);
        assert_eq!(network("10.0.1.1", &["198.51.100.7"]), None, "the client wrote that itself");
    }
}

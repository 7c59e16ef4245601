//! Load balancers and HTTP proxies in front of the listeners, whose connections carry many clients.

use ipnet::IpNet;
use std::net::IpAddr;
use std::str::FromStr;

/// Proxies and balancers by their own addresses.
#[derive(Clone, Debug, Default)]
pub struct Ingress {
    /// HTTP proxies: the client is the last address of `header` that is not a proxy's.
    pub proxies: Vec<IpNet>,
    /// Balancers that pass TLS through and do not name the client. A header behind them is written by the client and proves nothing.
    pub balancers: Vec<IpNet>,
    pub header: ClientAddressHeader,
}

/// The header in which proxies name the client. The other one is not read: a proxy that does not write it passes on what a client wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientAddressHeader {
    #[default]
    XForwardedFor,
    /// RFC 7239.
    Forwarded,
}

impl ClientAddressHeader {
    /// As the request and the configuration have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::Forwarded => "forwarded",
        }
    }
}

impl FromStr for ClientAddressHeader {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::XForwardedFor, Self::Forwarded];
        let found = known.into_iter().find(|header| text.eq_ignore_ascii_case(header.name()));
        found.ok_or_else(|| format!("it must be {}", known.map(Self::name).join(" or ")))
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::Peer;
    use crate::tls::proxies::peer_of;
    use axum::http::HeaderMap;

    fn ingress() -> Ingress {
        let networks = |text: &str| vec![text.parse().unwrap()];
        Ingress { proxies: networks("10.0.0.0/24"), balancers: networks("10.0.1.0/24"), ..Ingress::default() }
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
    fn client_with_a_port_counts_against_its_own_network() {
        for written in ["203.0.113.7:51008", "\"203.0.113.7:51008\"", "[::ffff:203.0.113.7]:51008"] {
            assert_eq!(network("10.0.0.1", &[written]).as_deref(), Some("203.0.113.7"), "{written}");
        }
    }

    #[test]
    fn unreadable_client_counts_against_the_proxys_own_address() {
        for written in ["unknown", "_hidden", "198.51.100.7, client.example.com", "unix:"] {
            assert_eq!(network("10.0.0.1", &[written]).as_deref(), Some("10.0.0.1"), "{written}");
        }
    }

    #[test]
    fn balancer_and_proxy_without_a_named_client_count_as_many_clients() {
        assert_eq!(network("10.0.0.1", &[]), None);
        assert_eq!(network("10.0.1.1", &[]), None);
        assert_eq!(network("10.0.1.1", &["198.51.100.7"]), None, "the client wrote that itself");
    }
}

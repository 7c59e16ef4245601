//! The listeners of a process: their variables, which of them its roles open, and whether they can be open at once.

use super::variables::Variables;
use crate::process_roles::ProcessRole;
use std::net::{IpAddr, SocketAddr};

/// The variable of a listener, and its address without it.
pub(crate) type ListenSetting = (&'static str, &'static str);

pub(crate) const PUBLIC_LISTEN: ListenSetting = ("SVC_PUBLIC_LISTEN", "0.0.0.0:8443");
pub(crate) const NODE_LISTEN: ListenSetting = ("SVC_NODE_LISTEN", "0.0.0.0:9443");
pub(crate) const WEBHOOK_LISTEN: ListenSetting = ("SVC_WEBHOOK_LISTEN", "0.0.0.0:7443");
pub(crate) const OPERATIONS_LISTEN: ListenSetting = ("SVC_OPERATIONS_LISTEN", "127.0.0.1:9464");

/// The listeners that a process with these roles opens. The payment processor's one is open where payments are configured.
pub(crate) fn opened(has_role: impl Fn(ProcessRole) -> bool, has_payments: bool) -> Vec<ListenSetting> {
    let has = |roles: &[ProcessRole]| roles.iter().any(|role| has_role(*role));
    let all = [
        (PUBLIC_LISTEN, has(&[ProcessRole::Api, ProcessRole::TerminalGateway])),
        (NODE_LISTEN, has(&[ProcessRole::NodeApi, ProcessRole::NodeLogGateway])),
        (WEBHOOK_LISTEN, has(&[ProcessRole::Webhook]) && has_payments),
        (OPERATIONS_LISTEN, true),
    ];
    all.into_iter().filter(|(_, is_opened)| *is_opened).map(|(listener, _)| listener).collect()
}

/// Records those of these listeners that the kernel would not open beside each other. A port of 0 is any free one.
pub(super) fn check_apart(it: &mut Variables<'_>, listeners: &[(ListenSetting, SocketAddr)]) {
    for (number, ((name, _), address)) in listeners.iter().enumerate() {
        for ((earlier, _), other) in listeners.iter().take(number) {
            if address.port() != 0 && address.port() == other.port() && overlap(address.ip(), other.ip()) {
                it.wrong(format!(
                    "{earlier} is {other} and {name} is {address}: a port has one listener; give them different ports"
                ));
            }
        }
    }
}

/// Whether one socket takes connections to an address of the other one. One of all IPv6 addresses takes those of IPv4, too (`ipv6(7)`).
fn overlap(one: IpAddr, other: IpAddr) -> bool {
    let takes = |all: IpAddr, ip: IpAddr| all.is_unspecified() && (all.is_ipv6() || ip.is_ipv4());
    one == other || takes(one, other) || takes(other, one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    #[test]
    fn listeners_of_one_port_are_a_problem_where_their_addresses_overlap() {
        for (public, node, is_wrong) in [
            ("0.0.0.0:8443", "0.0.0.0:8443", true),
            ("0.0.0.0:8443", "127.0.0.1:8443", true),
            ("[::]:8443", "127.0.0.1:8443", true),
            ("[::]:8443", "0.0.0.0:8443", true),
            ("192.0.2.1:8443", "192.0.2.1:8443", true),
            ("192.0.2.1:8443", "192.0.2.2:8443", false),
            ("0.0.0.0:8443", "[::1]:8443", false),
            ("0.0.0.0:8443", "0.0.0.0:9443", false),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            let [one, other] = [public, node].map(|text| text.parse().unwrap());
            let read = read_from(&[], |it| check_apart(it, &[(PUBLIC_LISTEN, one), (NODE_LISTEN, other)]));
            let problem = read.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(
                problem.contains("SVC_PUBLIC_LISTEN is") && problem.contains("SVC_NODE_LISTEN is"),
                is_wrong,
                "{public} {node}: {problem}"
            );
        }
    }

    #[test]
    fn address_that_a_wildcard_takes_cannot_be_listened_on() {
        let (Ok(all), Ok(all_of_6)) = (std::net::TcpListener::bind("0.0.0.0:0"), std::net::TcpListener::bind("[::]:0"))
        else {
            return;
        };
        for (wildcard, ip) in [(all, "127.0.0.1"), (all_of_6, "127.0.0.1")] {
            let taken = wildcard.local_addr().unwrap();
            let ip: IpAddr = ip.parse().unwrap();
            assert!(overlap(taken.ip(), ip) && std::net::TcpListener::bind((ip, taken.port())).is_err(), "{taken}");
        }
    }
}

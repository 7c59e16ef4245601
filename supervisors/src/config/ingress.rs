//! The proxies and load balancers in front of the listeners, which hold connections for many clients.

use super::variables::Variables;
use edge::tls::ingress::{ClientAddressHeader, Ingress};

const PROXIES: &str = "SVC_TRUSTED_PROXIES";
const BALANCERS: &str = "SVC_TCP_BALANCERS";
const HEADER: &str = "SVC_CLIENT_ADDRESS_HEADER";

pub(super) fn ingress(variables: &mut Variables<'_>) -> Ingress {
    let mut read = |name: &str| {
        let networks = variables.networks(name);
        if let Some(everybody) = networks.iter().find(|network| network.prefix_len() == 0) {
            variables.wrong(format!("{name}: {everybody} is every address; name those of your own machines"));
        }
        networks
    };
    let (proxies, balancers) = (read(PROXIES), read(BALANCERS));
    let header = variables.optional(HEADER).map_or_else(
        || Ok(ClientAddressHeader::default()),
        |text| text.parse::<ClientAddressHeader>().map_err(|why| format!("{HEADER} is {text:?}; {why}")),
    );
    let header = variables.take(header);
    Ingress { proxies, balancers, header }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::variables::read_from;

    #[test]
    fn ingress_networks_are_parsed_and_the_whole_internet_is_refused() {
        assert_eq!(read_from(&[(PROXIES, "10.0.0.7/32, fd00::/64")], ingress).unwrap().proxies.len(), 2);
        assert_eq!(read_from(&[(BALANCERS, "10.0.0.8/32")], ingress).unwrap().balancers.len(), 1);
        let header_of = |text: &str| read_from(&[(HEADER, text)], ingress).map(|ingress| ingress.header);
        assert_eq!(read_from(&[], ingress).unwrap().header, ClientAddressHeader::XForwardedFor);
        assert_eq!(header_of("Forwarded").unwrap(), ClientAddressHeader::Forwarded);
        let error = header_of("x-real-ip").unwrap_err().to_string();
        assert!(error.contains(HEADER) && error.contains("forwarded"), "{error}");
        for everybody in [(PROXIES, "0.0.0.0/0"), (BALANCERS, "::/0")] {
            let error = read_from(&[everybody], ingress).unwrap_err().to_string();
            assert!(error.contains(everybody.0) && error.contains("every address"), "{error}");
        }
    }
}

//! The network of a client's address, for limits by address.

use std::net::{IpAddr, Ipv6Addr};

/// The network of an address: the owner of one IPv6 address has the other 2^64 of its network.
pub(crate) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_network_counts_as_one_address_and_a_mapped_ipv4_address_as_itself() {
        let [a, b, c] = ["2001:db8::1", "2001:db8::ffff:0:0:1", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        assert_eq!(network_of(a), network_of(b));
        assert_ne!(network_of(a), network_of(c));
        assert_eq!(network_of("::ffff:10.0.0.1".parse().unwrap()), "10.0.0.1".parse::<IpAddr>().unwrap());
    }
}

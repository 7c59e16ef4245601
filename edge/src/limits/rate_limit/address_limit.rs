//! A rate limit per address, for unauthenticated callers: each process has its own.

use super::limited;
use crate::http::error::ApiError;
use crate::tls::Peer;
use crate::tls::client_network::network_of;
use actors::rate_cells::RateCells;
use axum::extract::ConnectInfo;
use axum::http::Extensions;
use domain::Timestamp;
use domain::gcra::RateDecision;
use domain::policy::{PolicyBook, PolicyKey, Scopes};
use std::net::IpAddr;
use std::time::Instant;
use uuid::Uuid;

/// Addresses with a cell of their own, about 5 MB; the others share one.
const MAX_ADDRESSES: usize = 65_536;

/// The rate cells of the addresses.
#[derive(Debug)]
pub struct AddressLimit(RateCells);

impl Default for AddressLimit {
    fn default() -> Self {
        Self(RateCells::with_capacity(MAX_ADDRESSES))
    }
}

impl AddressLimit {
    /// Admits one request on the connection in the extensions.
    ///
    /// # Errors
    /// `rate_limited` where its address is over the rate of policy `key`.
    pub fn admit(
        &self,
        connection: &Extensions,
        key: PolicyKey,
        policy: &PolicyBook,
        now: Timestamp,
    ) -> Result<(), ApiError> {
        // Without a connection there is no address to limit: the router is called in the same process.
        let Some(ConnectInfo(peer)) = connection.get::<ConnectInfo<Peer>>() else { return Ok(()) };
        let limit = u32::try_from(policy.int(key, &Scopes::global(), now)).unwrap_or(1);
        let RateDecision { admitted, retry_after, .. } = self.take(peer.address.ip(), limit, Instant::now());
        if admitted {
            return Ok(());
        }
        let message =
            format!("Too many requests from this address, {limit} a minute are the most; go on after Retry-After.");
        Err(limited(message, key, limit, retry_after))
    }

    fn take(&self, address: IpAddr, limit: u32, now: Instant) -> RateDecision {
        self.0.take_or_share(cell_of(address), limit, now)
    }
}

/// The id of the cell of an address: each network has one.
pub(crate) fn cell_of(address: IpAddr) -> Uuid {
    Uuid::from_u128(match network_of(address) {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn address_gets_its_burst_then_its_rate_independently_of_others() {
        let (limit, now) = (AddressLimit::default(), Instant::now());
        let admitted = |text: &str, now| (0..500).filter(|_| limit.take(address(text), 120, now).admitted).count();
        assert_eq!(admitted("192.0.2.1", now), 120);
        assert_eq!(admitted("192.0.2.2", now), 120);
        assert_eq!(admitted("192.0.2.1", now + Duration::from_millis(500)), 1);
        assert_eq!(admitted("192.0.2.1", now + Duration::from_secs(61)), 120);
    }
}

//! A bound per address for routes that ask for no certificate (decisions 4). It keeps strangers from spending our processor time on
//! signatures; tokens of 256 bits need no protection against guessing.

use crate::error::{ApiError, Code};
use crate::node_api::NodeApi;
use crate::tls::Peer;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request;
use dashmap::DashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Requests of one address at once, after a pause.
const BURST: u32 = 240;
/// Between requests of one address, lastingly. A balancer in front of the service is one address.
const INTERVAL: Duration = Duration::from_millis(50);
/// Addresses that are remembered, about 5 MB.
const ADDRESSES: usize = 65_536;
/// The least time between two searches for addresses that need not be remembered.
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Token buckets by address, kept as the time at which each is full again (the generic cell rate algorithm, ITU-T I.371).
pub(super) struct Gate {
    full_at: DashMap<IpAddr, Instant>,
    /// For addresses that there is no room to remember: they share one bucket.
    others_full_at: Mutex<Instant>,
    swept_at: Mutex<Instant>,
    addresses: usize,
}

impl Gate {
    pub(super) fn of_enrollment() -> Self {
        Self::remembering(ADDRESSES, Instant::now())
    }

    fn remembering(addresses: usize, now: Instant) -> Self {
        Self { full_at: DashMap::new(), others_full_at: Mutex::new(now), swept_at: Mutex::new(now), addresses }
    }

    /// Lets one request of `address` in.
    ///
    /// # Errors
    /// How long the address has to wait.
    fn admit(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let key = network_of(address);
        if let Some(mut full_at) = self.full_at.get_mut(&key) {
            return take(&mut full_at, now);
        }
        if self.full_at.len() >= self.addresses {
            self.sweep(now);
        }
        if self.full_at.len() >= self.addresses {
            return take(&mut self.others_full_at.lock().unwrap_or_else(std::sync::PoisonError::into_inner), now);
        }
        take(&mut self.full_at.entry(key).or_insert(now), now)
    }

    /// A full bucket says nothing that a new one would not.
    fn sweep(&self, now: Instant) {
        let Ok(mut swept_at) = self.swept_at.try_lock() else { return };
        if now.saturating_duration_since(*swept_at) >= SWEEP_EVERY {
            *swept_at = now;
            self.full_at.retain(|_, full_at| *full_at > now);
        }
    }
}

fn take(full_at: &mut Instant, now: Instant) -> Result<(), Duration> {
    let after = (*full_at).max(now) + INTERVAL;
    let empty_for = after.saturating_duration_since(now).saturating_sub(INTERVAL * BURST);
    if empty_for.is_zero() {
        *full_at = after;
        Ok(())
    } else {
        Err(empty_for)
    }
}

/// Who has one IPv6 address has the other 2^64 of its network.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
    }
}

/// A request whose address was within its bound. Extracted before the body, which is not even read otherwise.
pub(super) struct Admitted;

impl FromRequestParts<NodeApi> for Admitted {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, api: &NodeApi) -> Result<Self, ApiError> {
        let Some(ConnectInfo(peer)) = parts.extensions.get::<ConnectInfo<Peer>>() else {
            return Err(ApiError::internal("a node route is served without TLS"));
        };
        api.gate.admit(peer.address.ip(), Instant::now()).map(|()| Self).map_err(|wait| {
            let seconds = wait.as_secs() + 1;
            ApiError::new(Code::RateLimited, "Too many enrollments from this address; try again after Retry-After.")
                .retry_after(wait)
                .detail("limit", BURST)
                .detail("window_seconds", (INTERVAL * BURST).as_secs())
                .detail("retry_after_seconds", seconds)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn address(n: u32) -> IpAddr {
        IpAddr::from(n.to_be_bytes())
    }

    #[test]
    fn an_address_has_its_burst_then_its_rate_and_hinders_no_other() {
        let now = Instant::now();
        let gate = Gate::remembering(10, now);
        for _ in 0..BURST {
            gate.admit(address(1), now).unwrap();
        }
        assert_eq!(gate.admit(address(1), now), Err(INTERVAL));
        gate.admit(address(2), now).unwrap();
        gate.admit(address(1), now + INTERVAL).unwrap();
        assert!(gate.admit(address(1), now + INTERVAL).is_err());
        let later = now + INTERVAL * (BURST + 1);
        for _ in 0..BURST {
            gate.admit(address(1), later).unwrap();
        }
    }

    #[test]
    fn however_many_addresses_come_no_more_are_remembered_and_the_rest_share_a_bucket() {
        let now = Instant::now();
        let gate = Gate::remembering(10, now);
        let admitted = (0..10_000).filter(|n| gate.admit(address(*n), now).is_ok()).count();
        assert_eq!(admitted, 10 + BURST as usize);
        assert_eq!(gate.full_at.len(), 10);
        let later = now + SWEEP_EVERY;
        gate.admit(address(70_000), later).unwrap();
        assert_eq!(gate.full_at.len(), 1, "those that are idle were forgotten");
    }

    #[test]
    fn an_ipv6_network_is_one_address_and_a_mapped_ipv4_address_is_itself() {
        let [a, b, c] = ["2001:db8::1", "2001:db8::ffff:0:0:1", "2001:db8:0:1::1"].map(|text| text.parse().unwrap());
        assert_eq!(network_of(a), network_of(b));
        assert_ne!(network_of(a), network_of(c));
        assert_eq!(network_of("::ffff:10.0.0.1".parse().unwrap()), "10.0.0.1".parse::<IpAddr>().unwrap());
    }
}

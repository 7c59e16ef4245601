//! A bound per address for routes that ask for no certificate (decisions 4). It keeps strangers from spending our processor time on
//! signatures; tokens of 256 bits need no protection against guessing.

use crate::buckets::{Buckets, Rate, network_of};
use crate::error::{ApiError, Code};
use crate::node_api::NodeApi;
use crate::tls::Peer;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Requests of one address: at once, after a pause, and lastingly. A balancer in front of the service is one address.
const RATE: Rate = Rate { burst: 240, interval: Duration::from_millis(50) };
/// Addresses that are remembered, about 5 MB.
const ADDRESSES: usize = 65_536;

/// A bucket for each address.
pub(super) struct Gate(Buckets<IpAddr>);

impl Gate {
    pub(super) fn of_enrollment() -> Self {
        Self(Buckets::new(RATE, ADDRESSES, Instant::now()))
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
        api.gate.0.take(network_of(peer.address.ip()), Instant::now()).map(|()| Self).map_err(|wait| {
            let seconds = wait.as_secs() + 1;
            ApiError::new(Code::RateLimited, "Too many enrollments from this address; try again after Retry-After.")
                .retry_after(wait)
                .detail("limit", RATE.burst)
                .detail("window_seconds", (RATE.interval * RATE.burst).as_secs())
                .detail("retry_after_seconds", seconds)
        })
    }
}

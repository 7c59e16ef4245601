//! A bound per node for routes that ask for its certificate, and one per address for those that ask for none (decisions 4). The latter
//! keeps strangers from spending our processor time on
//! signatures; tokens of 256 bits need no protection against guessing.

use crate::error::ApiError;
use crate::identity::NodeIdentity;
use crate::node_api::NodeApi;
use crate::rate_limit::NodeLimit;
use crate::tls::Peer;
use axum::extract::{ConnectInfo, FromRequestParts, MatchedPath};
use axum::http::request;
use domain::NodeId;
use domain::policy::Key;

/// A request whose address was within its bound. Extracted before the body is parsed.
pub(super) struct Admitted;

impl FromRequestParts<NodeApi> for Admitted {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, api: &NodeApi) -> Result<Self, ApiError> {
        if parts.extensions.get::<ConnectInfo<Peer>>().is_none() {
            return Err(ApiError::internal("a node route is served without TLS"));
        }
        let world = &api.services.world;
        api.enrolling.admit(&parts.extensions, Key::RateLimitEnrollment, &world.policy(), world.now()).map(|()| Self)
    }
}

/// A request with the node's certificate, within the node's bound for its route. Extracted before the body, which is not even read
/// otherwise. It does not follow that the node is in service: its machine says so.
pub(super) struct Speaker(pub(super) NodeIdentity);

impl FromRequestParts<NodeApi> for Speaker {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, api: &NodeApi) -> Result<Self, ApiError> {
        let node = NodeIdentity::from_request_parts(parts, api).await?;
        let path = parts.extensions.get::<MatchedPath>().map(MatchedPath::as_str).unwrap_or_default();
        let limit = if path.ends_with("/certificate/renew") {
            &api.limits.renewals
        } else if path.ends_with("/recording/{seq}") {
            &api.limits.recordings
        } else {
            &api.limits.requests
        };
        let world = &api.services.world;
        limit.admit(NodeId(node.node_id), &world.policy(), world.now())?;
        Ok(Self(node))
    }
}

/// What each node has used up.
pub(super) struct Limits {
    requests: NodeLimit,
    renewals: NodeLimit,
    recordings: NodeLimit,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests: NodeLimit::of(Key::RateLimitNodeRequests),
            renewals: NodeLimit::of(Key::RateLimitNodeRenewals),
            recordings: NodeLimit::of(Key::RateLimitNodeRecordings),
        }
    }
}

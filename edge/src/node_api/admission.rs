//! A rate limit per node for routes that need its certificate, and one per address for those that need none (decisions 4). The latter keeps
//! unauthenticated clients from spending our processor time on signatures; tokens of 256 bits need no protection against guessing.

use crate::http::error::ApiError;
use crate::limits::rate_limit::NodeLimit;
use crate::node_api::NodeApi;
use crate::node_api::identity::NodeIdentity;
use crate::tls::Peer;
use axum::extract::{ConnectInfo, FromRequestParts, MatchedPath};
use axum::http::request;
use domain::NodeId;
use domain::policy::PolicyKey;

/// A request whose address is within its limit. Extracted before the body is parsed.
pub(super) struct AdmittedAddress;

impl FromRequestParts<NodeApi> for AdmittedAddress {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, api: &NodeApi) -> Result<Self, ApiError> {
        if parts.extensions.get::<ConnectInfo<Peer>>().is_none() {
            return Err(ApiError::internal("a node route is served without TLS"));
        }
        let environment = &api.app.environment;
        api.enrolling
            .admit(&parts.extensions, PolicyKey::RateLimitEnrollment, &environment.policy(), environment.now())
            .map(|()| Self)
    }
}

/// A request with the node's certificate, within the node's limit for its route. Extracted before the body, which is not even read
/// otherwise. It does not imply that the node is in service: its state machine decides that.
pub(super) struct AuthenticatedNode(pub(super) NodeIdentity);

impl FromRequestParts<NodeApi> for AuthenticatedNode {
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
        let environment = &api.app.environment;
        limit.admit(NodeId(node.node_id), &environment.policy(), environment.now())?;
        Ok(Self(node))
    }
}

/// The requests of each node.
pub(super) struct NodeLimits {
    requests: NodeLimit,
    renewals: NodeLimit,
    recordings: NodeLimit,
}

impl Default for NodeLimits {
    fn default() -> Self {
        Self {
            requests: NodeLimit::of(PolicyKey::RateLimitNodeRequests),
            renewals: NodeLimit::of(PolicyKey::RateLimitNodeRenewals),
            recordings: NodeLimit::of(PolicyKey::RateLimitNodeRecordings),
        }
    }
}

//! A bound per address for routes that ask for no certificate (decisions 4). It keeps strangers from spending our processor time on
//! signatures; tokens of 256 bits need no protection against guessing.

use crate::error::ApiError;
use crate::node_api::NodeApi;
use crate::tls::Peer;
use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request;
use domain::policy::Key;

/// A request whose address was within its bound. Extracted before the body, which is not even read otherwise.
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

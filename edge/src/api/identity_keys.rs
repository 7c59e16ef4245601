//! The forced refresh of the identity provider's keys (specification, *Endpoints*).

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use serde::Serialize;
use utoipa::ToSchema;

use super::internal::admitted;
use crate::auth::jwks::JwksError;
use crate::http::error::{ApiError, Code};
use crate::services::Services;

/// The keys that the provider publishes now.
#[derive(Serialize, ToSchema)]
pub(super) struct RefreshedKeys {
    /// How many keys it signs with.
    keys: usize,
}

/// Fetches the identity provider's keys at once, at every replica.
///
/// A key that the provider has withdrawn is refused from then on. Without `INTERNAL_JWKS_REFRESH_TOKEN` the route does not exist. The
/// response is this replica's; the others are notified.
#[utoipa::path(
    post,
    path = "/",
    responses((status = 200, description = "They were fetched.", body = RefreshedKeys)),
)]
pub(super) async fn refresh(State(services): State<Services>, parts: Parts) -> Result<Json<RefreshedKeys>, ApiError> {
    admitted(&services, services.jwks_refresh_token.as_ref(), &parts)?;
    let refreshed = services.authenticator.jwks().refresh().await;
    if !matches!(refreshed, Err(JwksError::TooSoon)) {
        services.runtime.provider_keys_changed();
    }
    match refreshed {
        Ok(keys) => Ok(Json(RefreshedKeys { keys })),
        Err(error @ JwksError::TooSoon) => {
            let message = "The keys were fetched a moment ago; try again after Retry-After.";
            Err(ApiError::new(Code::RateLimited, message).because(error))
        }
        Err(error) => {
            let message =
                "The identity provider's keys could not be fetched; those from before stay. Look at the provider.";
            Err(ApiError::new(Code::UpstreamError, message).because(error))
        }
    }
}

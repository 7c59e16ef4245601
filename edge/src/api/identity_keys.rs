//! The forced refresh of the identity provider's keys (specification, *Endpoints*).

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use serde::Serialize;
use utoipa::ToSchema;

use super::internal::admitted;
use crate::app_state::AppState;
use crate::auth::jwks::JwksError;
use crate::http::error::{ApiError, Code};

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
    extensions(
        ("x-without-gpuctl" = json!("for the identity provider, which has a token of its own")),
        ("x-without-console" = json!("for the identity provider, which has a token of its own")),
    ),
)]
pub(super) async fn refresh(State(app): State<AppState>, parts: Parts) -> Result<Json<RefreshedKeys>, ApiError> {
    admitted(&app, app.jwks_refresh_token.as_ref(), &parts)?;
    let refreshed = app.authenticator.jwks().refresh().await;
    if !matches!(refreshed, Err(JwksError::TooSoon)) {
        app.runtime.provider_keys_changed();
    }
    match refreshed {
        Ok(keys) => Ok(Json(RefreshedKeys { keys })),
        Err(error @ JwksError::TooSoon) => {
            let message = "The keys were fetched a moment ago; try again after the time in Retry-After.";
            Err(ApiError::new(Code::RateLimited, message).because(error))
        }
        Err(error) => {
            let message =
                "The identity provider's keys could not be fetched; the previous ones stay in use. Check the provider.";
            Err(ApiError::new(Code::UpstreamError, message).because(error))
        }
    }
}

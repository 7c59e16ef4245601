//! What a process says of itself to those who operate it, under a token of their own.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;

use crate::auth::internal::InternalToken;
use crate::error::ApiError;
use crate::runtime::Stats;
use crate::services::Services;

/// What the process that answers has and does, from its memory.
///
/// For the operator's own tools. Without `INTERNAL_STATS_TOKEN` the route is not there.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The process as it stands.", body = Stats)))]
pub(super) async fn stats(State(services): State<Services>, parts: Parts) -> Result<Json<Stats>, ApiError> {
    admitted(&services, services.stats_token.as_ref(), &parts)?;
    Ok(Json(services.runtime.stats()))
}

/// Whether the request brings the route's own token. Who guesses is held up like whoever brings access tokens that are none.
pub(super) fn admitted(services: &Services, token: Option<&InternalToken>, parts: &Parts) -> Result<(), ApiError> {
    let configured = token.ok_or_else(|| ApiError::not_found("route"))?;
    configured.admit(&parts.headers).map_err(|refused| {
        let (policy, now) = (services.world.policy(), services.world.now());
        services.limiter.token_refused(parts, &policy, now).err().unwrap_or(refused)
    })
}

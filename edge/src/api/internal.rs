//! Statistics of one process, for its operator's token.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;

use crate::auth::internal_route_auth::InternalToken;
use crate::http::error::ApiError;
use crate::services::Services;
use crate::services::runtime_interface::Stats;

/// Statistics of the process that serves the request, from its memory.
///
/// For the operator's tools. Without `INTERNAL_STATS_TOKEN` the route does not exist.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The process as it stands.", body = Stats)))]
pub(super) async fn stats(State(services): State<Services>, parts: Parts) -> Result<Json<Stats>, ApiError> {
    admitted(&services, services.stats_token.as_ref(), &parts)?;
    Ok(Json(services.runtime.stats()))
}

/// Checks the operator's token of the route. Wrong tokens are rate-limited like invalid access tokens.
pub(super) fn admitted(services: &Services, token: Option<&InternalToken>, parts: &Parts) -> Result<(), ApiError> {
    let configured = token.ok_or_else(|| ApiError::not_found("route"))?;
    configured.admit(&parts.headers).map_err(|refused| {
        let (policy, now) = (services.environment.policy(), services.environment.now());
        services.limiter.count_refused_token(parts, &policy, now).err().unwrap_or(refused)
    })
}

//! Statistics of one process, for its operator's token.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;

use crate::app_state::AppState;
use crate::app_state::runtime_interface::Stats;
use crate::auth::internal_route_auth::InternalToken;
use crate::http::error::ApiError;

/// Statistics of the process that serves the request, from its memory.
///
/// For the operator's tools. Without `INTERNAL_STATS_TOKEN` the route does not exist.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The process's statistics.", body = Stats)),
    extensions(
        ("x-without-gpuctl" = json!("for operators' tools, which have a token of their own")),
        ("x-without-console" = json!("for the operators' listener, which browsers do not reach")),
    ),
)]
pub(super) async fn stats(State(app): State<AppState>, parts: Parts) -> Result<Json<Stats>, ApiError> {
    admitted(&app, app.stats_token.as_ref(), &parts)?;
    Ok(Json(app.runtime.stats()))
}

/// Checks the operator's token of the route. Wrong tokens are rate-limited like invalid access tokens.
pub(super) fn admitted(app: &AppState, token: Option<&InternalToken>, parts: &Parts) -> Result<(), ApiError> {
    let configured = token.ok_or_else(|| ApiError::not_found("route"))?;
    configured.admit(&parts.headers).map_err(|refused| {
        let (policy, now) = (app.environment.policy(), app.environment.now());
        app.limiter.count_refused_token(parts, &policy, now).err().unwrap_or(refused)
    })
}

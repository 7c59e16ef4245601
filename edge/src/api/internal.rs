//! What a process says of itself to those who operate it, under a token of their own.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;

use crate::error::ApiError;
use crate::runtime::Stats;
use crate::services::Services;

/// What the process that answers has and does, from its memory.
///
/// For the operator's own tools. Without `INTERNAL_STATS_TOKEN` the route is not there.
#[utoipa::path(get, path = "/", responses((status = 200, description = "The process as it stands.", body = Stats)))]
pub(super) async fn stats(State(services): State<Services>, headers: HeaderMap) -> Result<Json<Stats>, ApiError> {
    let configured = services.stats_token.as_ref();
    configured.ok_or_else(|| ApiError::not_found("route"))?.admit(&headers)?;
    Ok(Json(services.runtime.stats()))
}

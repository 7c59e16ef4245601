//! Liveness, readiness and metrics of this process.

use axum::Json;
use axum::extract::State;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, header};
use serde::Serialize;
use utoipa::ToSchema;

use super::internal::admitted;
use crate::app_state::AppState;
use crate::app_state::runtime_interface::Readiness;
use crate::http::error::{ApiError, Code};

type Metrics = ([(HeaderName, HeaderValue); 1], String);

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`: the process answers.
    status: &'static str,
    /// The release that answers.
    version: &'static str,
}

/// Whether the process lives.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "It lives.", body = Health)),
    extensions(
        ("x-without-gpuctl" = json!("for probes")),
        ("x-without-console" = json!("for load balancers")),
    ),
)]
pub(super) async fn healthz() -> Json<Health> {
    Json(Health { status: "ok", version: env!("CARGO_PKG_VERSION") })
}

/// Whether the process can serve.
///
/// For load balancers and the operator's tools. While it cannot serve, the response is an error with the checks in its details. Without
/// `INTERNAL_STATS_TOKEN` the route does not exist; on the operators' listener it needs no token.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "It can serve.", body = Readiness)),
    extensions(
        ("x-without-gpuctl" = json!("for probes")),
        ("x-without-console" = json!("for the operators' listener, which browsers do not reach")),
    ),
)]
pub(super) async fn readyz(State(app): State<AppState>, parts: Parts) -> Result<Json<Readiness>, ApiError> {
    admitted(&app, app.stats_token.as_ref(), &parts)?;
    readiness(State(app)).await
}

/// As [`readyz`], on the operators' listener.
pub(super) async fn readiness(State(app): State<AppState>) -> Result<Json<Readiness>, ApiError> {
    let readiness = app.runtime.readiness().await;
    if app.stopping.is_cancelled() {
        return Err(ApiError::new(Code::ServiceUnavailable, "This process is stopping; ask another.").expected());
    }
    if readiness.ready {
        return Ok(Json(readiness));
    }
    let checks = serde_json::to_value(&readiness.checks).map_err(ApiError::internal)?;
    let failing =
        readiness.checks.iter().filter(|(_, check)| *check != "ok").map(|(name, check)| format!("{name}: {check}"));
    let failing = failing.collect::<Vec<_>>().join(", ");
    let message = "This process cannot serve at the moment; details.checks says why.";
    let error = ApiError::new(Code::ServiceUnavailable, message).detail("checks", checks).because(failing);
    Err(if readiness.starting { error.expected() } else { error })
}

/// Metrics of this process in the Prometheus text format.
///
/// For the operator's tools. Without `INTERNAL_STATS_TOKEN` the route does not exist; on the operators' listener it needs no token.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The metrics.", content_type = "text/plain", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("for Prometheus")),
        ("x-without-console" = json!("for the operators' listener, which browsers do not reach")),
    ),
)]
pub(super) async fn metrics(State(app): State<AppState>, parts: Parts) -> Result<Metrics, ApiError> {
    admitted(&app, app.stats_token.as_ref(), &parts)?;
    Ok(metrics_page(State(app)).await)
}

/// As [`metrics`], on the operators' listener.
pub(super) async fn metrics_page(State(app): State<AppState>) -> Metrics {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], app.runtime.metrics())
}

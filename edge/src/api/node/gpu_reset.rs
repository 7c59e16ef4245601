//! Resets of single GPUs on an administrator's order.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use domain::node::{Node, Request};
use uuid::Uuid;

use super::tasks::{TaskView, shown};
use crate::api::idempotency::request_layer::Idempotent;
use crate::api::request_context::AdminRequest;
use crate::api::request_fields::{GpuUuid, ReasonBody};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::request_body::{self, Path};

/// Resets one GPU, and validates it afterwards.
///
/// For a GPU that no allocation holds; those of other GPUs of the node stay. It gets no tenant before it has passed its validation. One GPU of a
/// node is reset at a time; where that GPU is being reset, the answer is the task of that reset.
#[utoipa::path(
    post,
    path = "/",
    request_body = ReasonBody,
    responses((status = 201, description = "The task, to be read where the node's tasks are.", body = TaskView)),
)]
pub(in crate::api) async fn reset_gpu(
    AdminRequest(context): AdminRequest,
    State(app): State<AppState>,
    Path((id, gpu_uuid)): Path<(Uuid, GpuUuid)>,
    Idempotent(request_body::Json(why)): Idempotent<request_body::Json<ReasonBody>>,
) -> Result<Response, ApiError> {
    let command = Request::ResetGpu { gpu_uuid: gpu_uuid.to_string(), reason: why.reason.to_string() };
    let answered = context.ask::<Node>(id, command).await?;
    shown(&app, StatusCode::CREATED, &answered)
}

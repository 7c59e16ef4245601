//! Changes of an allocation's name and labels.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use domain::allocation::{Allocation, Request};
use domain::metadata::PatchValue;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{replayed, response};
use crate::api::request_context::UserRequest;
use crate::api::request_fields::{LabelChanges, ResourceName, metadata_patch};
use crate::app_state::AppState;
use crate::app_state::read_model::{IfMatch, if_match};
use crate::http::error::ApiError;
use crate::http::request_body::{self, Path};

/// A change of an allocation (RFC 7396). Absent fields stay; give at least one.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 1)]
pub(in crate::api) struct AllocationChange {
    /// Null: the allocation has no name any more.
    #[serde(default, skip_serializing_if = "PatchValue::is_keep")]
    #[schema(value_type = Option<ResourceName>)]
    name: PatchValue<ResourceName>,
    /// Null: the allocation has no labels any more.
    #[serde(default, skip_serializing_if = "PatchValue::is_keep")]
    #[schema(value_type = Option<LabelChanges>)]
    labels: PatchValue<LabelChanges>,
}

/// Changes an allocation's name and labels, until it is released.
#[utoipa::path(
    patch,
    path = "/",
    params(IfMatch),
    request_body = AllocationChange,
    responses((status = 200, description = "The allocation.", body = super::view::AllocationView)),
)]
pub(in crate::api) async fn revise(
    UserRequest(context): UserRequest,
    State(app): State<AppState>,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
    request_body::Json(change): request_body::Json<AllocationChange>,
) -> Result<Response, ApiError> {
    let metadata = metadata_patch(change.name, change.labels);
    if metadata.is_empty() {
        return Err(ApiError::invalid_request("Nothing is to be changed; give `name` or `labels`."));
    }
    let command = Request::Revise { metadata, if_version: if_match(&headers)? };
    let answered = context.ask::<Allocation>(id, command).await?;
    response(&app, StatusCode::OK, replayed(&answered), &answered.reply, answered.version).await
}

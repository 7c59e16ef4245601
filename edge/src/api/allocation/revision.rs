//! The name and the labels of an allocation.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use domain::allocation::{Allocation, Command};
use domain::metadata::Patch;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::{replayed, shown};
use crate::api::asking::ByUser;
use crate::api::field::{LabelChanges, ResourceName, metadata_patch};
use crate::api::stored::if_match;
use crate::body::{self, Path};
use crate::error::ApiError;
use crate::services::Services;

/// What changes of an allocation (RFC 7396). What is left out stays; give at least one.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 1)]
pub(in crate::api) struct AllocationChange {
    /// Null: the allocation has no name any more.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<ResourceName>)]
    name: Patch<ResourceName>,
    /// Null: the allocation has no labels any more.
    #[serde(default, skip_serializing_if = "Patch::is_keep")]
    #[schema(value_type = Option<LabelChanges>)]
    labels: Patch<LabelChanges>,
}

/// Changes an allocation's name and labels, until it is released.
#[utoipa::path(
    patch,
    path = "/",
    params(
        ("id" = Uuid, Path, description = "The allocation's id"),
        ("If-Match" = Option<String>, Header, description = "The `ETag` that the change is based on",
            pattern = r#"^"[0-9]{1,18}"$"#),
    ),
    request_body = AllocationChange,
    responses((status = 200, description = "The allocation.", body = super::view::AllocationView)),
)]
pub(in crate::api) async fn revise(
    ByUser(asking): ByUser,
    State(services): State<Services>,
    Path(id): Path<Uuid>,
    headers: HeaderMap,
    body::Json(change): body::Json<AllocationChange>,
) -> Result<Response, ApiError> {
    let metadata = metadata_patch(change.name, change.labels);
    if metadata.is_empty() {
        return Err(ApiError::invalid_request("Nothing is to be changed; give `name` or `labels`."));
    }
    let command = Command::Revise { metadata, if_version: if_match(&headers)? };
    let answered = asking.ask::<Allocation>(id, command).await?;
    shown(&services, StatusCode::OK, replayed(&answered), &answered.reply, answered.version).await
}

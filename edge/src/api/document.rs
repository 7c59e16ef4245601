//! The API's own description.

use axum::Extension;
use axum::body::Bytes;
use axum::http::{HeaderName, HeaderValue, header};
use utoipa::openapi::OpenApi;

/// The description, written down once.
#[derive(Clone)]
pub(super) struct Document(Bytes);

impl Document {
    pub(super) fn of(api: &OpenApi) -> Self {
        Self(serde_json::to_vec(api).unwrap_or_default().into())
    }
}

/// This description, OpenAPI 3.1.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The description.", content_type = "application/json", body = Object)),
)]
pub(super) async fn openapi(Extension(Document(text)): Extension<Document>) -> ([(HeaderName, HeaderValue); 1], Bytes) {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text)
}

//! Where people and their programs log in: OAuth 2.0 Protected Resource Metadata (RFC 9728).

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use crate::app_state::AppState;

/// The metadata of this API as a protected resource (RFC 9728, section 2).
#[derive(Serialize, ToSchema)]
pub(super) struct ProtectedResource {
    /// The API's own address. A client that requested another address must ignore the rest.
    resource: String,
    /// The issuer of access tokens.
    authorization_servers: [String; 1],
    bearer_methods_supported: [&'static str; 1],
    /// The description of this API, for people.
    resource_documentation: String,
    /// The client of the issuer as which `gpuctl` logs people in.
    gpuctl_client_id: String,
}

/// Where to log in.
///
/// It names the issuer of access tokens and the client of the command line, so that an address of this API is all that a user needs.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The metadata.", body = ProtectedResource)),
    extensions(
        ("x-without-gpuctl" = json!("`login` calls it before there is a login")),
        ("x-without-console" = json!("for OAuth clients, which find the identity provider by it")),
    ),
)]
pub(super) async fn metadata(State(app): State<AppState>) -> Json<ProtectedResource> {
    let resource = app.addresses.public_url.trim_end_matches('/').to_owned();
    Json(ProtectedResource {
        authorization_servers: [app.authenticator.issuer().to_owned()],
        bearer_methods_supported: ["header"],
        resource_documentation: format!("{resource}/api/v1/docs"),
        gpuctl_client_id: app.authenticator.client_id().to_owned(),
        resource,
    })
}

//! The OpenAPI description of the API, as JSON for programs and as a page for people.

mod common_parts;
mod error_responses;
mod example;
mod shared_parts;

pub(super) use common_parts::add_common_parts;
#[cfg(test)]
pub(super) use error_responses::CODES;
pub(super) use error_responses::error_responses;
pub(super) use shared_parts::share_parts;

use std::sync::{Arc, LazyLock};

use axum::Extension;
use axum::body::Bytes;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use utoipa::openapi::security::{ClientCredentials, Flow, OAuth2, OpenIdConnect, Scopes, SecurityScheme};
use utoipa::openapi::{OpenApi, Server};

use super::browser_page::{PAGE_STYLES, page_with_styles};
use super::routing::RowDescriptions;
use crate::app_state::AppState;
use crate::http::error::ApiError;

/// The description as this installation serves it, made and serialized for the first request.
#[derive(Clone)]
pub(super) struct Document(Arc<LazyLock<Bytes, Box<dyn FnOnce() -> Bytes + Send>>>);

impl Document {
    pub(super) fn of(descriptions: RowDescriptions, app: &AppState) -> Self {
        let public_url = app.addresses.public_url.trim_end_matches('/').to_owned();
        let issuer = app.authenticator.issuer().trim_end_matches('/').to_owned();
        Self(Arc::new(LazyLock::new(Box::new(move || {
            let api = with_addresses(descriptions.complete(), &public_url, &issuer);
            serde_json::to_vec(&api).unwrap_or_default().into()
        }))))
    }
}

fn with_addresses(mut api: OpenApi, public_url: &str, issuer: &str) -> OpenApi {
    api.servers = Some(vec![Server::new(public_url)]);
    let provider = OpenIdConnect::with_description(
        format!("{issuer}/.well-known/openid-configuration"),
        "Where access tokens come from: the token URL is in the provider's discovery document.".to_owned(),
    );
    let token_url = format!("{public_url}/api/v1/service-accounts/token");
    let client = OAuth2::with_description(
        [Flow::ClientCredentials(ClientCredentials::new(token_url, Scopes::new()))],
        "How a program gets its token: a service account's id and key.",
    );
    let components = api.components.get_or_insert_default();
    components.add_security_scheme(PROVIDER, SecurityScheme::OpenIdConnect(provider));
    components.add_security_scheme(SERVICE_ACCOUNT, SecurityScheme::OAuth2(client));
    share_parts(&mut api);
    api
}

/// The security schemes that name the sources of access tokens.
pub(super) const PROVIDER: &str = "identity_provider";
pub(super) const SERVICE_ACCOUNT: &str = "client_credentials";

/// This description, OpenAPI 3.1.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The description.", content_type = "application/json", body = Object)),
    extensions(
        ("x-without-gpuctl" = json!("the description itself")),
        ("x-without-console" = json!("the description itself")),
    ),
)]
pub(super) async fn openapi(Extension(Document(text)): Extension<Document>) -> ([(HeaderName, HeaderValue); 1], Bytes) {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], Bytes::clone(&text))
}

/// The page is the API reference viewer's (Scalar), with all requests to other hosts switched off. The viewer mounts itself on the element
/// `api-reference`.
const PAGE: &str = include_str!("document/page.html");

/// The page's content security policy: it runs the viewer and fetches from its own origin, and nothing else. The viewer's style sheets have
/// the nonce.
const PAGE_CSP: &str = "default-src 'none'; script-src 'self'; style-src 'nonce-{{nonce}}'; img-src data:; font-src data:; \
                        connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The one style attribute in the viewer's markup, of line numbers: `page.html` says their width.
const LINE_NUMBERS: &str = r#" style="--line-count: ${s}; --line-digits: ${s.toString().length};""#;

/// The viewer, after the script that lets it make styles.
static READER: LazyLock<Option<Bytes>> = LazyLock::new(|| {
    let viewer = scalar_api_reference::get_asset("scalar.js")?;
    let viewer = String::from_utf8_lossy(&viewer).replacen(LINE_NUMBERS, "", 1);
    Some(format!("{PAGE_STYLES}{viewer}").into())
});

type Asset<const N: usize> = ([(HeaderName, HeaderValue); N], Bytes);

/// This description as a page to read.
///
/// It sends no request to another host.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The page.", content_type = "text/html", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("a page")),
        ("x-without-console" = json!("a document of its own, with its own content security policy")),
    ),
)]
pub(super) async fn page() -> Result<Response, ApiError> {
    page_with_styles(PAGE, PAGE_CSP)
}

/// The script of the page.
#[utoipa::path(
    get,
    path = "/",
    responses((status = 200, description = "The script.", content_type = "text/javascript", body = String)),
    extensions(
        ("x-without-gpuctl" = json!("a part of a page")),
        ("x-without-console" = json!("a part of a document")),
    ),
)]
pub(super) async fn reader() -> Result<Asset<3>, ApiError> {
    let script = READER.clone().ok_or_else(|| ApiError::internal("the reader of the description is not built in"))?;
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/javascript; charset=utf-8")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=3600")),
    ];
    Ok((headers, script))
}

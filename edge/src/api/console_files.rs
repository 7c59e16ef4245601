//! Serves the web console: its document for every address below `/console/`, and its hashed files. They are built in (`build.rs`, `edge/console/`).
//!
//! The document is read at each load; a hashed file never changes. A file that this build does not have is 404 and never the document: a tab of another
//! release learns by it that there is a new version. These routes are no part of the API's description.

use std::sync::LazyLock;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::Path;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;

use crate::http::error::ApiError;
use crate::http::router_layers::{Concurrency, RequestTimeout, bounded, unknown_route};

/// The console's document. Its address is also where a browser that opens `/` is sent.
const DOCUMENT: &str = "/console/";

const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_CONCURRENT_REQUESTS: usize = 256;

/// Scripts and styles of this origin alone, no markup from text, in no frame of another page. The console's own tests serve it with the same policy.
const CONTENT_SECURITY_POLICY: &str = include_str!("../../console/content-security-policy.txt").trim_ascii();

static FILES: LazyLock<Vec<ConsoleFile>> = LazyLock::new(|| BUILT_IN.iter().map(ConsoleFile::from).collect());

/// Name, content, and the content compressed by brotli.
type BuiltIn = (&'static str, &'static [u8], &'static [u8]);

const BUILT_IN: &[BuiltIn] = include!(concat!(env!("OUT_DIR"), "/console_files.rs"));

/// One file of the console.
struct ConsoleFile {
    name: &'static str,
    media_type: HeaderValue,
    plain: Bytes,
    brotli: Bytes,
}

impl From<&BuiltIn> for ConsoleFile {
    fn from(&(name, plain, brotli): &BuiltIn) -> Self {
        let media_type = match name.rsplit('.').next().unwrap_or_default() {
            "html" => "text/html; charset=utf-8",
            "js" => "text/javascript; charset=utf-8",
            "css" => "text/css; charset=utf-8",
            "svg" => "image/svg+xml",
            _ => "application/octet-stream",
        };
        let (plain, brotli) = (Bytes::from_static(plain), Bytes::from_static(brotli));
        Self { name, media_type: HeaderValue::from_static(media_type), plain, brotli }
    }
}

/// The routes of the console, and of `/` for browsers.
pub(super) fn router<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let routes = Router::new()
        // Other methods on `/` are an unknown route, as for every path that is none.
        .route("/", get(root).fallback(unknown_route))
        .route("/console", get(|| async { Redirect::permanent(DOCUMENT) }))
        .route(DOCUMENT, get(document))
        .route("/console/{*page}", get(document))
        .route("/console/assets/{name}", get(asset));
    bounded(routes, RequestTimeout(REQUEST_TIMEOUT), Concurrency::at_most(MAX_CONCURRENT_REQUESTS))
}

/// A browser is sent to the console. Any other client asked for something that is not there.
async fn root(request_headers: HeaderMap) -> Response {
    let accepts = request_headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    if accepts
        .flat_map(|value| value.split(','))
        .any(|range| range.split(';').next().map(str::trim) == Some("text/html"))
    {
        return (vary(header::ACCEPT), Redirect::to(DOCUMENT)).into_response();
    }
    (vary(header::ACCEPT), unknown_route().await).into_response()
}

async fn document(request_headers: HeaderMap) -> Result<Response, ApiError> {
    let headers = [
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY)),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // A page that opened the console has no reference to its window.
        (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
        (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
    ];
    Ok((headers, file("index.html", &request_headers)?).into_response())
}

async fn asset(Path(name): Path<String>, request_headers: HeaderMap) -> Result<Response, ApiError> {
    let served = file(&format!("assets/{name}"), &request_headers)?;
    let headers = [(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=31536000, immutable"))];
    Ok((headers, served).into_response())
}

fn file(name: &str, request_headers: &HeaderMap) -> Result<Response, ApiError> {
    let found = FILES.iter().find(|file| file.name == name);
    let file = found.ok_or_else(|| {
        ApiError::not_found("file of the console").header(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))
    })?;
    let headers = [
        (header::CONTENT_TYPE, file.media_type.clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    let response = (headers, vary(header::ACCEPT_ENCODING));
    if accepts_brotli(request_headers) {
        let encoding = [(header::CONTENT_ENCODING, HeaderValue::from_static("br"))];
        return Ok((response, encoding, file.brotli.clone()).into_response());
    }
    Ok((response, file.plain.clone()).into_response())
}

fn vary(by: HeaderName) -> [(HeaderName, HeaderValue); 1] {
    [(header::VARY, by.into())]
}

/// Whether `Accept-Encoding` names brotli, and not with the weight of nothing (RFC 9110, 12.5.3).
fn accepts_brotli(request_headers: &HeaderMap) -> bool {
    let values = request_headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let is_brotli = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("br"));
        let is_refused = |weight: &str| weight.strip_prefix("q=").is_some_and(|q| q.parse() == Ok(0.0_f32));
        is_brotli && !parts.any(is_refused)
    })
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use axum::http::{Method, Request};
    use tower::ServiceExt as _;

    use super::*;
    use crate::http::correlation::Service;
    use crate::http::router_layers::with_common_layers;
    use crate::testing::{body_json, scope_settings};

    async fn send(method: Method, path: &str, headers: &[(HeaderName, &str)]) -> Response {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        let router = with_common_layers(router::<()>(), scope_settings(Service { name: "api", shows_route: false }));
        router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap()
    }

    async fn get(path: &str) -> Response {
        send(Method::GET, path, &[]).await
    }

    async fn text(response: Response) -> String {
        String::from_utf8(to_bytes(response.into_body(), 1 << 24).await.unwrap().to_vec()).unwrap()
    }

    fn header_of(response: &Response, name: HeaderName) -> &str {
        response.headers().get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }

    #[tokio::test]
    async fn document_is_not_stored_and_its_policy_allows_this_origin_alone() {
        for path in
            ["/console/", "/console/allocations/0199e3f4-5c1b-7a00-8000-3f2a10c0ffee", "/console/money?kind=usage"]
        {
            let response = get(path).await;
            assert_eq!(
                (response.status().as_u16(), header_of(&response, header::CONTENT_TYPE)),
                (200, "text/html; charset=utf-8"),
                "{path}"
            );
            assert_eq!(header_of(&response, header::CACHE_CONTROL), "no-store");
            assert_eq!(header_of(&response, header::X_CONTENT_TYPE_OPTIONS), "nosniff");
            assert_eq!(header_of(&response, header::REFERRER_POLICY), "no-referrer");
            assert_eq!(header_of(&response, HeaderName::from_static("cross-origin-opener-policy")), "same-origin");
            let policy = header_of(&response, header::CONTENT_SECURITY_POLICY).to_owned();
            for directive in [
                "default-src 'none'",
                "script-src 'self'",
                "style-src 'self'",
                "frame-ancestors 'none'",
                "trusted-types 'none'",
            ] {
                assert!(policy.split("; ").any(|found| found == directive), "{policy}: {directive}");
            }
            assert!(!policy.contains("unsafe") && !policy.contains("://") && !policy.contains("data:"), "{policy}");
            let page = text(response).await;
            assert!(!page.contains("<style") && !page.contains("://") && !page.contains("<script>"), "{page}");
        }
    }

    #[tokio::test]
    async fn files_of_the_document_are_immutable_and_compressed_where_the_client_takes_it() {
        let page = text(get("/console/").await).await;
        let files: Vec<_> = page.split('"').filter(|part| part.starts_with("/console/assets/")).collect();
        assert!(
            files.iter().any(|name| name.ends_with(".js")) && files.iter().any(|name| name.ends_with(".css")),
            "{page}"
        );
        for name in files {
            let plain = get(name).await;
            assert_eq!((plain.status().as_u16(), header_of(&plain, header::CONTENT_ENCODING)), (200, ""), "{name}");
            assert_eq!(header_of(&plain, header::CACHE_CONTROL), "public, max-age=31536000, immutable");
            assert_eq!(header_of(&plain, header::VARY), "accept-encoding");
            assert!(!header_of(&plain, header::CONTENT_TYPE).is_empty());
            let plain = to_bytes(plain.into_body(), 1 << 24).await.unwrap();
            for accepted in ["br", "gzip, deflate, br, zstd", "gzip;q=1.0, BR;q=0.5"] {
                let response = send(Method::GET, name, &[(header::ACCEPT_ENCODING, accepted)]).await;
                assert_eq!(header_of(&response, header::CONTENT_ENCODING), "br", "{name}: {accepted}");
                let compressed = to_bytes(response.into_body(), 1 << 24).await.unwrap();
                assert!(compressed != plain && (compressed.len() < plain.len() || plain.len() < 300), "{name}");
            }
            for refused in ["gzip", "br;q=0", "identity"] {
                let response = send(Method::GET, name, &[(header::ACCEPT_ENCODING, refused)]).await;
                assert_eq!(header_of(&response, header::CONTENT_ENCODING), "", "{name}: {refused}");
            }
        }
    }

    #[tokio::test]
    async fn file_of_another_release_is_an_error_and_not_the_document() {
        for path in [
            "/console/assets/index-OfAnotherRelease.js",
            "/console/assets/..%2Findex.html",
            "/console/assets/index.html",
        ] {
            let response = get(path).await;
            assert_eq!(response.status(), 404, "{path}");
            assert_eq!(header_of(&response, header::CACHE_CONTROL), "no-store", "{path}");
            assert_eq!(body_json(response).await["code"], "not_found");
        }
    }

    #[tokio::test]
    async fn root_sends_browsers_to_the_console_and_is_unknown_to_other_clients() {
        let browser =
            send(Method::GET, "/", &[(header::ACCEPT, "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8")]).await;
        assert_eq!((browser.status().as_u16(), header_of(&browser, header::LOCATION)), (303, "/console/"));
        for (method, accepted) in [(Method::GET, "*/*"), (Method::GET, "application/json"), (Method::POST, "text/html")]
        {
            let other = send(method, "/", &[(header::ACCEPT, accepted)]).await;
            assert_eq!(other.status(), 404, "{accepted}");
            assert_eq!(body_json(other).await["code"], "not_found");
        }
        let console = get("/console").await;
        assert_eq!((console.status().as_u16(), header_of(&console, header::LOCATION)), (308, "/console/"));
    }

    #[tokio::test]
    async fn other_methods_on_the_console_are_refused() {
        let response = send(Method::POST, "/console/allocations", &[]).await;
        assert_eq!(response.status(), 405);
    }
}

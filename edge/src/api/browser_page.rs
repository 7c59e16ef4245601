//! What the browser pages have in common: the headers of a page, and its built-in asset files.

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rand::Rng as _;
use sha2::{Digest as _, Sha256};

use crate::http::error::ApiError;

pub(super) const SCRIPT: &str = "text/javascript; charset=utf-8";
pub(super) const STYLE: &str = "text/css; charset=utf-8";

/// Lets the libraries of a page make styles under a policy without `unsafe-inline`.
pub(super) const PAGE_STYLES: &str = include_str!("browser_page/page-styles.js");

/// Where a page, and its policy, have the nonce of the response.
const NONCE: &str = "{{nonce}}";

/// The asset files of pages.
pub(super) struct PageFiles(Vec<PageFile>);

/// One file, with the `ETag` of its version.
struct PageFile {
    name: &'static str,
    headers: [(HeaderName, HeaderValue); 4],
    bytes: Bytes,
}

impl PageFiles {
    /// From the name, the media type and the content of each file.
    pub(super) fn built_in(files: &[(&'static str, &'static str, &'static str)]) -> Self {
        let file = |&(name, kind, text): &(&'static str, &'static str, &'static str)| {
            let digest = hex::encode(&Sha256::digest(text)[..16]);
            let etag = HeaderValue::from_str(&format!("\"{digest}\"")).unwrap_or(HeaderValue::from_static("\"\""));
            let headers = [
                (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
                (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
                // Revalidated at each load, and sent where it has changed: a page does not mix files of two versions for long.
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
                (header::ETAG, etag),
            ];
            PageFile { name, headers, bytes: Bytes::from_static(text.as_bytes()) }
        };
        Self(files.iter().map(file).collect())
    }

    /// The file of this name, or 304 where it is the one that `If-None-Match` names (RFC 9110, 13.1.2).
    ///
    /// # Errors
    /// `not_found` where there is no file of this name.
    pub(super) fn response(&self, name: &str, request_headers: &HeaderMap) -> Result<Response, ApiError> {
        let found = self.0.iter().find(|file| file.name == name);
        let PageFile { headers, bytes, .. } = found.ok_or_else(|| ApiError::not_found("file of this page"))?;
        let [.., (_, etag)] = headers;
        if request_headers.get(header::IF_NONE_MATCH) == Some(etag) {
            return Ok((StatusCode::NOT_MODIFIED, headers.clone()).into_response());
        }
        Ok((headers.clone(), bytes.clone()).into_response())
    }
}

/// The response with a page whose libraries make styles. `html` and `csp` name the nonce, which is another one in each response.
///
/// # Errors
/// Where `csp` is no header's text.
pub(super) fn page_with_styles(html: &str, csp: &str) -> Result<Response, ApiError> {
    let mut random = [0_u8; 16];
    rand::rng().fill_bytes(&mut random);
    let nonce = STANDARD.encode(random);
    let csp = HeaderValue::from_str(&csp.replace(NONCE, &nonce))
        .map_err(|_| ApiError::internal("an address in a page's policy is no header's text"))?;
    let mut response = page_response(html.replace(NONCE, &nonce), csp);
    // A nonce is used once.
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// The response with a page and its `Content-Security-Policy`.
pub(super) fn page_response(html: impl IntoResponse, csp: HeaderValue) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, csp),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // A page that opened this one has no reference to its window.
        (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    ];
    (headers, html).into_response()
}

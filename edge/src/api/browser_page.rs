//! What the pages for browsers have in common: the headers of a page, and the files that it loads, which are built in.

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest as _, Sha256};

use crate::error::ApiError;

pub(super) const SCRIPT: &str = "text/javascript; charset=utf-8";
pub(super) const STYLE: &str = "text/css; charset=utf-8";

/// The files that pages load.
pub(super) struct Files(Vec<File>);

/// One file, with what tells its versions apart.
struct File {
    name: &'static str,
    headers: [(HeaderName, HeaderValue); 4],
    bytes: Bytes,
}

impl Files {
    /// Of the name, the kind and the text of each.
    pub(super) fn built_in(files: &[(&'static str, &'static str, &'static str)]) -> Self {
        let file = |&(name, kind, text): &(&'static str, &'static str, &'static str)| {
            let digest = hex::encode(&Sha256::digest(text)[..16]);
            let etag = HeaderValue::from_str(&format!("\"{digest}\"")).unwrap_or(HeaderValue::from_static("\"\""));
            let headers = [
                (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
                (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
                // Asked for each time, and sent where it is another: no page is put together of two versions for long.
                (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
                (header::ETAG, etag),
            ];
            File { name, headers, bytes: Bytes::from_static(text.as_bytes()) }
        };
        Self(files.iter().map(file).collect())
    }

    /// The file of this name, or that it is the one which `If-None-Match` names (RFC 9110, 13.1.2).
    ///
    /// # Errors
    /// Where there is no file of this name.
    pub(super) fn answer(&self, name: &str, asked: &HeaderMap) -> Result<Response, ApiError> {
        let found = self.0.iter().find(|file| file.name == name);
        let File { headers, bytes, .. } = found.ok_or_else(|| ApiError::not_found("file of this page"))?;
        let [.., (_, etag)] = headers;
        if asked.get(header::IF_NONE_MATCH) == Some(etag) {
            return Ok((StatusCode::NOT_MODIFIED, headers.clone()).into_response());
        }
        Ok((headers.clone(), bytes.clone()).into_response())
    }
}

/// A page, and what it may do (its `Content-Security-Policy`).
pub(super) fn shown(html: impl IntoResponse, may: HeaderValue) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, may),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // Whoever opened this page in a window has no hold on it.
        (HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin")),
    ];
    (headers, html).into_response()
}

//! The fields of a request's body, in either form that MAAS's clients send.

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use std::collections::HashMap;

/// `application/x-www-form-urlencoded`, or `multipart/form-data` whose parts are in base64, as python-libmaas sends it.
pub(super) fn fields(headers: &HeaderMap, body: &[u8]) -> HashMap<String, String> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let text = String::from_utf8_lossy(body);
    match kind.split_once("boundary=") {
        Some((_, boundary)) if kind.starts_with("multipart/form-data") => {
            let delimiter = format!("--{}", boundary.trim_matches('"'));
            text.split(&delimiter).filter_map(part).collect()
        }
        Some(_) | None => {
            let form = reqwest::Url::parse(&format!("http://form/?{text}"));
            form.map(|form| form.query_pairs().into_owned().collect()).unwrap_or_default()
        }
    }
}

fn part(text: &str) -> Option<(String, String)> {
    let (headers, content) = text.split_once("\r\n\r\n")?;
    let name = headers.split_once("name=\"")?.1.split('"').next()?;
    let content: String = content.split_ascii_whitespace().collect();
    let content = if headers.contains("base64") { STANDARD.decode(content).ok()? } else { content.into_bytes() };
    Some((name.to_owned(), String::from_utf8_lossy(&content).into_owned()))
}

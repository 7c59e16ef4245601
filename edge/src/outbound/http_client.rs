//! Rules for every outbound HTTP request: TLS is required, and responses are bounded in length.

use std::error::Error;
use std::sync::LazyLock;
use std::time::Duration;

use chrono::{DateTime, Utc};
use failures::retry_after;
use reqwest::header::{CONTENT_TYPE, DATE, HeaderMap, RETRY_AFTER};
use reqwest::{Certificate, Client, ClientBuilder, Response, Url, redirect};
use wire::address::is_this_machine;

/// Whether the system had an authority at the first client: some hundred files are read for it.
static HAS_SYSTEM_AUTHORITIES: LazyLock<bool> =
    LazyLock::new(|| !rustls_native_certs::load_native_certs().certs.is_empty());

/// HTTPS, or HTTP on this machine.
pub(crate) fn is_secure(address: &str) -> bool {
    let Ok(url) = Url::parse(address) else { return false };
    let is_local = url.host().is_some_and(|host| is_this_machine(&host));
    url.scheme() == "https" || (url.scheme() == "http" && is_local)
}

/// A builder of clients that follow no redirects and trust `authorities_pem` beside the system's. Without either a client verifies no server, and
/// reaches those without TLS alone: a container may have no authorities, and need none.
///
/// # Errors
/// Where the authorities cannot be read.
pub fn client_builder(authorities_pem: Option<&str>) -> Result<ClientBuilder, String> {
    let builder = Client::builder().redirect(redirect::Policy::none());
    let Some(pem) = authorities_pem else {
        // The library makes no client for an empty list of the system's.
        return Ok(if *HAS_SYSTEM_AUTHORITIES { builder } else { builder.tls_certs_only([]) });
    };
    let authorities = Certificate::from_pem_bundle(pem.as_bytes()).map_err(|error| error.to_string())?;
    Ok(builder.tls_certs_merge(authorities))
}

/// The whole body of a response, or why it could not be read.
pub(crate) async fn read_bounded_body(mut response: Response, max_bytes: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(error_chain)? {
        if body.len() + chunk.len() > max_bytes {
            return Err(format!("more than {max_bytes} bytes"));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// An external text on one line, without control characters and marks of direction.
pub(crate) fn one_line(text: &str, max_chars: usize) -> String {
    let turns = |c: char| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let words = text.split(|c: char| c.is_control() || c.is_whitespace() || turns(c)).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(" ").chars().take(max_chars).collect()
}

/// How long the server asks to wait (`Retry-After`), by its own clock where the answer has a `Date`: that of this machine may differ.
pub(crate) fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let text = |name| headers.get(name)?.to_str().ok();
    retry_after::parse(text(RETRY_AFTER)?, text(DATE).and_then(retry_after::date).unwrap_or(now))
}

/// Whether the answer is a page for people: what is there is another service, or a proxy's login.
#[must_use]
pub fn is_web_page(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    media_type.eq_ignore_ascii_case("text/html") || media_type.eq_ignore_ascii_case("application/xhtml+xml")
}

/// Whether the connection was made and TLS failed: a certificate by another authority or for another name, or a server without TLS. A
/// retry does not help, unlike in an outage.
#[must_use]
pub fn is_tls_failure(error: &(dyn Error + 'static)) -> bool {
    // What an I/O error wraps is not among its sources.
    let wrapped = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
    error.is::<rustls::Error>()
        || wrapped.is_some_and(|wrapped| is_tls_failure(wrapped))
        || error.source().is_some_and(is_tls_failure)
}

/// The error with its sources, without the URL, which may contain secrets.
#[must_use]
pub fn error_chain(error: reqwest::Error) -> String {
    failures::chain(&error.without_url())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_is_accepted_only_on_loopback() {
        for secure in ["https://api.example/v1", "http://localhost:8420", "http://127.0.0.1:8420", "http://[::1]:1"] {
            assert!(is_secure(secure), "{secure}");
        }
        for insecure in ["http://api.example", "http://127.0.0.1.example", "ftp://localhost", "api.example", ""] {
            assert!(!is_secure(insecure), "{insecure}");
        }
    }
}

//! The HTTP client: allowed addresses, trusted certificates, and the bound on response bodies.

use crate::failure::{Failure, chain};
use crate::text_encoding;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use reqwest::{Certificate, ClientBuilder, Response, Url, redirect};
use std::fs;
use std::path::Path;
use std::time::Duration;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest file of authorities.
const MAX_BUNDLE_BYTES: u64 = 1024 * 1024;

/// Checks an address that tokens and passwords are sent to: HTTPS, or the loopback interface.
pub(crate) fn address(text: &str) -> Result<Url, Failure> {
    let wrong = |why: &str| Failure::usage(format!("`{text}` is no address of a server: {why}"));
    let is_quote = |it: char| matches!(it, '"' | '\'' | '“' | '”' | '‘' | '’');
    if text.starts_with(is_quote) || text.ends_with(is_quote) {
        return Err(wrong("it is in quotes; write it without them"));
    }
    if text.contains(char::is_whitespace) {
        return Err(wrong("it has a blank"));
    }
    if !text.contains("://") {
        return Err(wrong("it must begin with https://"));
    }
    let url = Url::parse(text).map_err(|error| wrong(&error.to_string()))?;
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    if host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_unspecified()) {
        return Err(wrong("its host is the unspecified address, to which no client can connect"));
    }
    match url.scheme() {
        _ if url.host_str().is_none() => Err(wrong("it names no host")),
        _ if !url.username().is_empty() || url.password().is_some() => Err(wrong("it must hold no credentials")),
        "https" => Ok(url),
        "http" if is_local(&url) => Ok(url),
        "http" => Err(wrong("over http your token could be read on the network; use https")),
        _ => Err(wrong("it must begin with https://")),
    }
}

/// Whether the address is on the loopback interface.
pub(crate) fn is_local(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// How a server's certificate is verified.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trust<'a> {
    /// By the system's authorities.
    System,
    /// By the authorities in this file alone.
    Only(&'a Path),
    /// By the system's and by those in this file.
    Also(&'a Path),
}

/// A client for `url`. It follows no redirect, since the request's credentials would go to another server.
pub(crate) fn client(url: &Url, trust: Trust<'_>) -> Result<ClientBuilder, Failure> {
    let mut client = reqwest::Client::builder()
        .user_agent(concat!("gpuctl/", env!("CARGO_PKG_VERSION")))
        .redirect(redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT);
    if is_local(url) {
        client = client.no_proxy();
    }
    Ok(match trust {
        Trust::System => client,
        Trust::Only(path) => client.tls_certs_only(authorities(path)?),
        Trust::Also(path) => client.tls_certs_merge(authorities(path)?),
    })
}

pub(crate) fn build(client: ClientBuilder) -> Result<reqwest::Client, Failure> {
    client.build().map_err(|error| Failure::usage(format!("no client can be made: {}", chain(&error))))
}

/// The failure for a file of authorities.
pub(crate) fn unusable_bundle(path: &Path, why: &str) -> Failure {
    Failure::usage(format!("the authorities in {} cannot be used: {why}", path.display()))
        .next("Give the file with the authority of the server's certificate: --ca-bundle FILE (or SVC_CA_BUNDLE_PATH)")
}

fn authorities(path: &Path) -> Result<Vec<Certificate>, Failure> {
    let wrong = |why: String| unusable_bundle(path, &why);
    let length = fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
    if length > MAX_BUNDLE_BYTES {
        return Err(wrong(format!("the file is over {MAX_BUNDLE_BYTES} bytes")));
    }
    let pem = fs::read(path).map_err(|error| wrong(error.to_string()))?;
    // Comments in a bundle may be of any encoding.
    let pem = text_encoding::decoded(pem.clone()).map_or(pem, String::into_bytes);
    match Certificate::from_pem_bundle(&pem) {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(wrong("it holds no certificate in PEM (`-----BEGIN CERTIFICATE-----`)".to_owned())),
        Err(error) => Err(wrong(chain(&error))),
    }
}

/// Why a body could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the answer was cut off")]
    Cut(#[source] reqwest::Error),
    #[error("the answer is over {0} bytes")]
    TooLong(usize),
}

/// The body, of at most `max` bytes.
pub(crate) async fn body(mut answer: Response, max: usize) -> Result<Vec<u8>, BodyError> {
    let mut read = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(BodyError::Cut)? {
        if read.len() + chunk.len() > max {
            return Err(BodyError::TooLong(max));
        }
        read.extend_from_slice(&chunk);
    }
    Ok(read)
}

/// Whether the answer is a page for a browser.
pub(crate) fn is_page(headers: &HeaderMap) -> bool {
    let media_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    media_type.trim_start().to_ascii_lowercase().starts_with("text/html")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_sent_over_https_or_loopback_alone() {
        for good in ["https://gpu.example", "http://127.0.0.1:8080", "http://[::1]:8080", "http://localhost:1"] {
            assert!(address(good).is_ok(), "{good}");
        }
        for bad in [
            "http://gpu.example",
            "http://127.0.0.1.evil.example",
            "ftp://gpu.example",
            "gpu.example",
            "https://user:secret@gpu.example",
            "file:///etc/passwd",
            " https://gpu.example",
            "\"https://gpu.example\"",
            "https:gpu.example",
            "https://0.0.0.0:8443",
            "https://[::]:8443",
            "",
        ] {
            assert_eq!(address(bad).unwrap_err().exit_status.code(), 2, "{bad}");
        }
    }
}

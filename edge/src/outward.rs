//! What holds for every request that this service makes of others: over TLS, with an answer of bounded length.

use std::error::Error;
use std::fmt;
use std::net::IpAddr;

use reqwest::{Response, Url};

/// HTTPS, or HTTP on this machine.
pub(crate) fn is_secure(address: &str) -> bool {
    let Ok(url) = Url::parse(address) else { return false };
    let host = url.host_str().unwrap_or_default();
    let here = host == "localhost"
        || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    url.scheme() == "https" || (url.scheme() == "http" && here)
}

/// The whole body of an answer, or why it could not be had.
pub(crate) async fn body_of(mut response: Response, max_bytes: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(broken)? {
        if body.len() + chunk.len() > max_bytes {
            return Err(format!("more than {max_bytes} bytes"));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// Without the address, which may hold what nobody should read.
pub(crate) fn broken(error: reqwest::Error) -> String {
    Chain(&error.without_url()).to_string()
}

/// An error with its sources on one line.
struct Chain<'a>(&'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(inner) = source {
            write!(f, ": {inner}")?;
            source = inner.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clear_text_stays_on_this_machine() {
        for secure in ["https://api.example/v1", "http://localhost:8420", "http://127.0.0.1:8420", "http://[::1]:1"] {
            assert!(is_secure(secure), "{secure}");
        }
        for insecure in ["http://api.example", "http://127.0.0.1.example", "ftp://localhost", "api.example", ""] {
            assert!(!is_secure(insecure), "{insecure}");
        }
    }
}

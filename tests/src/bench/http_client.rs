//! An HTTP client of minimal cost: hand-written requests on one persistent connection, and responses that are read just far enough to find
//! their end.

use anyhow::{Context, bail, ensure};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use uuid::Uuid;

/// One connection.
pub struct BenchClient {
    stream: TlsStream<TcpStream>,
    read: Vec<u8>,
}

/// A whole request.
pub struct Request(String);

impl Request {
    #[must_use]
    pub fn get(path: &str, token: &str) -> Self {
        Self(format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n\r\n"))
    }

    /// A POST without a body, with an idempotency key of its own.
    #[must_use]
    pub fn post(path: &str, token: &str) -> Self {
        let key = Uuid::new_v4();
        Self(format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\nidempotency-key: {key}\r\n\
             content-length: 0\r\n\r\n"
        ))
    }
}

impl Request {
    /// A signed webhook of the payment processor.
    #[must_use]
    pub fn signed(path: &str, signature: &str, body: &str) -> Self {
        Self(format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json; charset=utf-8\r\n\
             stripe-signature: {signature}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))
    }
}

impl Request {
    /// A batch of log lines for the push API.
    #[must_use]
    pub fn push(path: &str, token: &str, body: &str) -> Self {
        Self(format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        ))
    }
}

impl BenchClient {
    /// Connects to `https://HOST:PORT`, whose certificate the authority in `ca` has signed.
    ///
    /// # Errors
    /// If it cannot be reached, or has another certificate.
    pub async fn connect(base: &str, ca: &Path) -> anyhow::Result<Self> {
        let address = base.strip_prefix("https://").context("the base is no https URL")?;
        let (host, _) = address.rsplit_once(':').context("the base has no port")?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&std::fs::read(ca)?) {
            roots.add(certificate?)?;
        }
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::try_from(host.to_owned())?;
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        Ok(Self { stream, read: Vec::with_capacity(16 * 1024) })
    }

    /// Sends a request and reads the whole response, which must be a success.
    ///
    /// # Errors
    /// If it is none, or the connection breaks.
    pub async fn send(&mut self, request: &Request) -> anyhow::Result<()> {
        let status = self.status_of(request).await?;
        if !(200..300).contains(&status) {
            let line = request.0.lines().next().unwrap_or_default();
            bail!("{line}: {}", String::from_utf8_lossy(&self.read));
        }
        Ok(())
    }

    /// Sends a request and returns the status of the response, whatever it is.
    ///
    /// # Errors
    /// If the connection breaks.
    pub async fn status_of(&mut self, Request(request): &Request) -> anyhow::Result<u16> {
        self.stream.write_all(request.as_bytes()).await?;
        self.stream.flush().await?;
        self.read.clear();
        loop {
            ensure!(self.stream.read_buf(&mut self.read).await? > 0, "the connection was closed");
            let Some(head) = self.read.windows(4).position(|end| end == b"\r\n\r\n") else { continue };
            let text = std::str::from_utf8(&self.read[..head])?.to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
            let ended = match length {
                Some(length) => self.read.len() >= head + 4 + length.parse::<usize>()?,
                // The body is chunked (RFC 9112, section 7.1); the last chunk is empty.
                None if text.contains("transfer-encoding: chunked") => self.read.ends_with(b"\r\n0\r\n\r\n"),
                None => true,
            };
            if ended {
                return text.get(9..12).context("an answer has no status")?.parse().context("a status is no number");
            }
        }
    }
}

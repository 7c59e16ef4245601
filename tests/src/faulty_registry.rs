//! A proxy in front of a registry, over TLS, that fails in one way: it answers slowly or not at all, cuts blobs off, or sends its clients
//! elsewhere.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use crate::package_registry::PackageRegistryServer;
use axum::http::{HeaderMap, StatusCode};
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;

const DRIBBLE: Duration = Duration::from_millis(100);
const HEAD_BYTES: usize = 64 * 1024;

/// What is wrong.
#[derive(Clone, Debug)]
pub enum RegistryFault {
    /// No request is answered.
    Silent,
    /// Blobs come byte by byte.
    Slow,
    /// Blobs end after half of their bytes.
    Cut,
    /// Requests for this part (`manifests`, `blobs`) are sent to that address, to which the path is added.
    Redirect { part: &'static str, to: String },
}

/// A running proxy. Dropping it stops it.
pub struct FaultyRegistry {
    pub port: u16,
    /// The paths of requests, with whether they had a credential.
    requests: Arc<Mutex<Vec<(String, bool)>>>,
    serving: AbortHandle,
}

impl Drop for FaultyRegistry {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl FaultyRegistry {
    pub async fn start(behind: &PackageRegistryServer, fault: Option<RegistryFault>) -> Self {
        let certificate = behind.authority.server_certificate("faulty").unwrap();
        let chain = CertificateDer::pem_file_iter(&certificate.certificate_path).unwrap();
        let chain: Vec<_> = chain.collect::<Result<_, _>>().unwrap();
        let key = PrivateKeyDer::from_pem_file(&certificate.key_path).unwrap();
        let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let authority = reqwest::Certificate::from_pem(behind.authority.certificate_pem().as_bytes()).unwrap();
        let client = reqwest::Client::builder().tls_certs_only([authority]).build().unwrap();
        let upstream = format!("https://localhost:{}", behind.port);
        let requests: Arc<Mutex<Vec<(String, bool)>>> = Arc::default();
        let shared = Arc::clone(&requests);
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let one = Connection {
                    acceptor: acceptor.clone(),
                    client: client.clone(),
                    upstream: upstream.clone(),
                    fault: fault.clone(),
                    requests: Arc::clone(&shared),
                };
                // A client that goes away in the middle ends its own connection.
                tokio::spawn(async move { one.serve(stream).await.ok() });
            }
        });
        Self { port, requests, serving: serving.abort_handle() }
    }

    /// The paths of the requests so far, with whether they had a credential.
    #[must_use]
    pub fn requests(&self) -> Vec<(String, bool)> {
        self.requests.lock().unwrap().clone()
    }
}

struct Connection {
    acceptor: TlsAcceptor,
    client: reqwest::Client,
    upstream: String,
    fault: Option<RegistryFault>,
    requests: Arc<Mutex<Vec<(String, bool)>>>,
}

impl Connection {
    /// Serves one request.
    async fn serve(self, stream: TcpStream) -> anyhow::Result<()> {
        let mut stream = self.acceptor.accept(stream).await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            anyhow::ensure!(head.len() < HEAD_BYTES, "a head without an end");
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8(head)?;
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let header = |name: &str| {
            let lines = head.lines().filter_map(|line| line.split_once(": "));
            lines.into_iter().find(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
        };
        let authorization = header("authorization");
        self.requests.lock().unwrap().push((path.clone(), authorization.is_some()));
        let is_blob = path.contains("/blobs/");
        match &self.fault {
            Some(RegistryFault::Silent) => {
                std::future::pending::<()>().await;
            }
            Some(RegistryFault::Redirect { part, to }) if path.contains(&format!("/{part}/")) => {
                let answer = format!(
                    "HTTP/1.1 307 Temporary Redirect\r\nLocation: {to}{path}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                );
                stream.write_all(answer.as_bytes()).await?;
                stream.shutdown().await?;
                return Ok(());
            }
            _ => {}
        }
        let mut request = self.client.get(format!("{}{path}", self.upstream));
        for (name, value) in [("authorization", authorization), ("accept", header("accept"))] {
            request = value.into_iter().fold(request, |request, value| request.header(name, value));
        }
        let response = request.send().await?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = response.bytes().await?;
        stream.write_all(head_of(status, &headers, body.len()).as_bytes()).await?;
        let is_content = is_blob && status.is_success();
        match &self.fault {
            Some(RegistryFault::Cut) if is_content => stream.write_all(&body[..body.len() / 2]).await?,
            Some(RegistryFault::Slow) if is_content => {
                for byte in body {
                    stream.write_u8(byte).await?;
                    stream.flush().await?;
                    tokio::time::sleep(DRIBBLE).await;
                }
            }
            _ => stream.write_all(&body).await?,
        }
        stream.shutdown().await?;
        Ok(())
    }
}

fn head_of(status: StatusCode, headers: &HeaderMap, length: usize) -> String {
    let mut head = format!("HTTP/1.1 {} -\r\nContent-Length: {length}\r\nConnection: close\r\n", status.as_u16());
    for name in ["www-authenticate", "content-type"] {
        if let Some(value) = headers.get(name).and_then(|value| value.to_str().ok()) {
            let _ = write!(head, "{name}: {value}\r\n");
        }
    }
    head + "\r\n"
}

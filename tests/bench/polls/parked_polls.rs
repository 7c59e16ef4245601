//! Long polls of agents, each with a connection and a certificate of its own, at minimal cost.

use super::fleet::{Fleet, Identity};
use anyhow::{Context, bail, ensure};
use axum::body::Bytes;
use axum::http::Request;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use h2::client::SendRequest;
use rustls::client::Resumption;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use uuid::Uuid;

/// Concurrent handshakes.
const AT_ONCE: usize = 32;
/// What an agent has asked before, on its connection of HTTP/2: a header table grows with requests.
const REQUESTS_BEFORE: usize = 10;
/// Both servers answer it at once, with 404.
pub(crate) const ANSWERED_AT_ONCE: &str = "/internal/v1/answered-at-once";
/// The longest poll.
const WAIT_SECONDS: u32 = 55;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HttpVersion {
    Http1,
    Http2,
}

/// A server and the HTTP version of the polls.
pub(crate) struct Target {
    address: SocketAddr,
    roots: Arc<RootCertStore>,
    speaks: HttpVersion,
}

impl Target {
    pub(crate) fn new(base: &str, ca: &Path, speaks: HttpVersion) -> anyhow::Result<Self> {
        let address = base.strip_prefix("https://").context("the base is no https URL")?.parse()?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&std::fs::read(ca)?) {
            roots.add(certificate?)?;
        }
        Ok(Self { address, roots: Arc::new(roots), speaks })
    }

    async fn connect(&self, identity: &Identity) -> anyhow::Result<TlsStream<TcpStream>> {
        let config = ClientConfig::builder().with_root_certificates(Arc::clone(&self.roots));
        let mut config = config.with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())?;
        config.resumption = Resumption::disabled();
        config.alpn_protocols = vec![match self.speaks {
            HttpVersion::Http1 => b"http/1.1".to_vec(),
            HttpVersion::Http2 => b"h2".to_vec(),
        }];
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let name = ServerName::from(self.address.ip());
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        Ok(tokio::time::timeout(Duration::from_secs(30), connecting).await.context("no handshake within 30 s")??)
    }
}

/// Pending polls at a target. Dropping them closes their connections.
pub(crate) struct ParkedPolls {
    target: Arc<Target>,
    waiting: Vec<JoinHandle<anyhow::Result<()>>>,
    tasks: mpsc::UnboundedReceiver<(usize, Instant)>,
    tell: mpsc::UnboundedSender<(usize, Instant)>,
}

impl ParkedPolls {
    pub(crate) fn at(target: Target) -> Self {
        #[expect(clippy::disallowed_methods, reason = "an answered poll sends one message")]
        let (tell, tasks) = mpsc::unbounded_channel();
        Self { target: Arc::new(target), waiting: Vec::new(), tasks, tell }
    }

    /// Starts the polls of the fleet up to `count` that do not exist yet.
    pub(crate) async fn grow_to(&mut self, count: usize, fleet: &Fleet) -> anyhow::Result<()> {
        let parking = stream::iter(self.waiting.len()..count).map(|number| {
            let (target, identity, tell) = (Arc::clone(&self.target), fleet.identity(number), self.tell.clone());
            async move {
                let stream = target.connect(&identity).await.with_context(|| format!("the poll {number}"))?;
                let path = format!(
                    "/internal/v1/nodes/{}/tasks/wait?timeout_seconds={WAIT_SECONDS}&session={}",
                    identity.node,
                    Uuid::new_v4()
                );
                anyhow::Ok(match target.speaks {
                    HttpVersion::Http1 => tokio::spawn(wait_over_http1(stream, path, number, tell)),
                    HttpVersion::Http2 => tokio::spawn(wait_over_http2(stream, path, number, tell)),
                })
            }
        });
        let parked: Vec<_> = parking.buffered(AT_ONCE).try_collect().await?;
        self.waiting.extend(parked);
        Ok(())
    }

    /// Asserts that all polls are still pending.
    pub(crate) fn expect_all_open(&self) -> anyhow::Result<()> {
        let gone = self.waiting.iter().filter(|waiting| waiting.is_finished()).count();
        ensure!(gone == 0, "{gone} of {} polls have ended", self.waiting.len());
        Ok(())
    }

    /// The time when the poll of this number got a task.
    pub(crate) async fn wait_for_task(&mut self, number: usize) -> anyhow::Result<Instant> {
        loop {
            let (whose, at) = self.tasks.recv().await.context("no poll is pending")?;
            if whose == number {
                return Ok(at);
            }
        }
    }
}

impl Drop for ParkedPolls {
    fn drop(&mut self) {
        for waiting in &self.waiting {
            waiting.abort();
        }
    }
}

/// Polls, and polls again after each response.
async fn wait_over_http1(
    mut stream: TlsStream<TcpStream>,
    path: String,
    number: usize,
    tell: mpsc::UnboundedSender<(usize, Instant)>,
) -> anyhow::Result<()> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nuser-agent: bench\r\naccept: */*\r\n\r\n");
    loop {
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let at = Instant::now();
        let head = String::from_utf8(head)?.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(Ok(0), str::parse)?];
        stream.read_exact(&mut body).await?;
        record_task(head.split(' ').nth(1).context("an answer has a status")?.parse()?, number, at, &tell)?;
    }
}

async fn wait_over_http2(
    stream: TlsStream<TcpStream>,
    path: String,
    number: usize,
    tell: mpsc::UnboundedSender<(usize, Instant)>,
) -> anyhow::Result<()> {
    let (mut requests, connection): (SendRequest<Bytes>, _) = h2::client::handshake(stream).await?;
    let mut answered = async |path: &str| {
        requests = requests.clone().ready().await?;
        let request = Request::get(format!("https://localhost{path}")).header("user-agent", "bench").body(())?;
        let (answer, _) = requests.send_request(request, true)?;
        let answer = answer.await?;
        let (at, status) = (Instant::now(), answer.status().as_u16());
        let mut body = answer.into_body();
        while let Some(chunk) = body.data().await {
            body.flow_control().release_capacity(chunk?.len())?;
        }
        anyhow::Ok((status, at))
    };
    let waiting = async {
        for _ in 0..REQUESTS_BEFORE {
            let (status, _) = answered(ANSWERED_AT_ONCE).await?;
            ensure!(status == 404, "the request before the poll {number} was answered {status}");
        }
        loop {
            let (status, at) = answered(&path).await?;
            record_task(status, number, at, &tell)?;
        }
    };
    tokio::select! {
        ended = connection => bail!("the connection ended: {ended:?}"),
        failed = waiting => failed,
    }
}

fn record_task(
    status: u16,
    number: usize,
    at: Instant,
    tell: &mpsc::UnboundedSender<(usize, Instant)>,
) -> anyhow::Result<()> {
    match status {
        200 => Ok(tell.send((number, at))?),
        204 => Ok(()),
        other => bail!("the poll {number} was answered {other}"),
    }
}

//! The baseline: the same messages to plain subscribers with a TLS connection to NATS each, one subject, and nothing else of the protocol.

use super::websocket_subscribers::{Latencies, LatencyRecorder};
use anyhow::{Context, ensure};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use secrecy::ExposeSecret as _;
use serde_json::json;
use std::net::SocketAddr;
use std::sync::Arc;
use tests::cluster::TestCluster;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const AT_ONCE: usize = 32;

pub(crate) struct NatsSubscribers {
    address: SocketAddr,
    tls: TlsConnector,
    greeting: String,
    book: LatencyRecorder,
    reading: Vec<JoinHandle<()>>,
}

impl NatsSubscribers {
    pub(crate) fn at(cluster: &TestCluster) -> anyhow::Result<Self> {
        // The credentials of a member, which may subscribe to notifications.
        let url = cluster.nats.url("replica-1").context("a replica has a NATS user")?;
        let (user, password) = url
            .expose_secret()
            .strip_prefix("tls://")
            .and_then(|rest| rest.split_once('@')?.0.split_once(':'))
            .context("a URL with credentials")?;
        let connect = json!({
            "verbose": false, "pedantic": false, "tls_required": true, "lang": "bench", "version": "0", "protocol": 1,
            "user": user, "pass": password,
        });
        let config: ClientConfig = cluster.gateway().client_config();
        Ok(Self {
            address: cluster.nats.address(),
            tls: TlsConnector::from(Arc::new(config)),
            greeting: format!("CONNECT {connect}\r\n"),
            book: LatencyRecorder::new()?,
            reading: Vec::new(),
        })
    }

    /// Connects until there are `count`; `subject` is the subject of the nth.
    pub(crate) async fn grow_to(&mut self, count: usize, subject: impl Fn(usize) -> String) -> anyhow::Result<()> {
        let opening = stream::iter(self.reading.len()..count).map(|n| self.open(subject(n)));
        let open: Vec<_> = opening.buffer_unordered(AT_ONCE).try_collect().await?;
        for connection in open {
            self.reading.push(tokio::spawn(read(connection, self.book.clone())));
        }
        Ok(())
    }

    async fn open(&self, subject: String) -> anyhow::Result<BufReader<TlsStream<TcpStream>>> {
        let mut stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        // The server's greeting is one line without TLS; TLS follows.
        let mut byte = [0];
        while byte != *b"\n" {
            ensure!(stream.read(&mut byte).await? == 1, "the server does not greet");
        }
        let name = ServerName::try_from(self.address.ip().to_string())?;
        let mut stream = BufReader::new(self.tls.connect(name, stream).await?);
        stream.write_all(format!("{}SUB {subject} 1\r\nPING\r\n", self.greeting).as_bytes()).await?;
        stream.flush().await?;
        let mut line = String::new();
        while line != "PONG\r\n" {
            line.clear();
            ensure!(stream.read_line(&mut line).await? > 0 && !line.starts_with("-ERR"), "refused: {line}");
        }
        Ok(stream)
    }

    pub(crate) fn begin(&self) {
        self.book.begin();
    }

    pub(crate) async fn taken(&self, expected: usize) -> anyhow::Result<Latencies> {
        let ended = self.reading.iter().filter(|task| task.is_finished()).count();
        ensure!(ended == 0, "{ended} plain subscribers have ended");
        self.book.taken(expected).await
    }

    pub(crate) fn close(self) {
        self.reading.iter().for_each(JoinHandle::abort);
    }
}

/// Reads until the connection ends or sends an unknown message.
async fn read(mut connection: BufReader<TlsStream<TcpStream>>, book: LatencyRecorder) {
    let mut line = String::new();
    loop {
        line.clear();
        if !matches!(connection.read_line(&mut line).await, Ok(1..)) {
            return;
        }
        // MSG <subject> <sid> <bytes>
        if let Some(rest) = line.strip_prefix("MSG ") {
            let Some(Ok(length)) = rest.trim_end().rsplit(' ').next().map(str::parse::<usize>) else { return };
            let mut message = vec![0; length + 2];
            if connection.read_exact(&mut message).await.is_err() {
                return;
            }
            message.truncate(length);
            if let Ok(text) = str::from_utf8(&message) {
                book.note(text);
            }
        } else if line.starts_with("PING")
            && (connection.write_all(b"PONG\r\n").await.is_err() || connection.flush().await.is_err())
        {
            return;
        }
    }
}

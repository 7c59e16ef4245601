//! A client of terminals: a WebSocket as a browser opens it, which counts what it receives and sends what a test wants.

use super::client::{ApiResponse, Client};
use super::{TestCluster, WAIT_TIMEOUT};
use futures::{SinkExt as _, StreamExt as _};
use reqwest::Method;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::CloseFrame;
use tokio_tungstenite::tungstenite::{Error, Message};
use tokio_tungstenite::{WebSocketStream, client_async};
use uuid::Uuid;

pub type Socket = WebSocketStream<TlsStream<TcpStream>>;

/// The address of a terminal gateway, with the authority to trust.
#[derive(Clone)]
pub struct TerminalGateway {
    ca: PathBuf,
    /// `host:port`.
    at: String,
    /// The size of the kernel's receive buffer; `None`: its default.
    receives: Option<u32>,
}

/// The parameters of the upgrade request.
#[derive(Clone, Debug, Default)]
pub struct TerminalRequest {
    pub token: Option<String>,
    pub origin: Option<String>,
    pub from: Option<u64>,
    pub query: Option<String>,
}

/// An issued terminal token.
#[derive(Clone, Debug)]
pub struct TerminalToken {
    pub token: String,
    pub session: Uuid,
}

/// An open terminal.
pub struct Terminal {
    socket: Socket,
    session: Uuid,
    /// All output.
    pub shown: Vec<u8>,
    /// The position after the output.
    pub position: u64,
    /// The received control messages that the test has not read.
    pub unread: Vec<Value>,
    pub closed: Option<(u16, String)>,
}

impl TestCluster {
    /// The gateway behind the load balancer.
    #[must_use]
    pub fn gateway(&self) -> TerminalGateway {
        TerminalGateway {
            ca: self.authority.certificate_path().to_owned(),
            at: self.public.address().to_string(),
            receives: None,
        }
    }

    /// The gateway of one replica.
    #[must_use]
    pub fn gateway_at(&self, replica: usize) -> TerminalGateway {
        let at = self.replicas[replica].public_url().trim_start_matches("https://").to_owned();
        TerminalGateway { at, ..self.gateway() }
    }

    /// Issues a token for a terminal on the allocation, as this user.
    pub async fn issue_terminal_token(
        &mut self,
        by: &Client,
        allocation: Uuid,
        session: Option<Uuid>,
    ) -> TerminalToken {
        let issued = self.request_terminal_token(by, allocation, session).await.created();
        let token = issued["token"].as_str().expect("a token").to_owned();
        self.register_secret("a terminal token", &token);
        TerminalToken { token, session: issued["session_id"].as_str().unwrap().parse().unwrap() }
    }

    /// The response to a request for a terminal token.
    pub async fn request_terminal_token(&self, by: &Client, allocation: Uuid, session: Option<Uuid>) -> ApiResponse {
        let body = session.map_or_else(|| json!({}), |session| json!({ "session_id": session }));
        by.send_once(Method::POST, &format!("/api/v1/allocations/{allocation}/terminal-tokens"), Some(&body)).await
    }

    /// A new terminal of `user` on the allocation, through the load balancer.
    pub async fn terminal(&mut self, allocation: Uuid) -> (Terminal, Uuid) {
        let ticket = self.issue_terminal_token(&self.user.clone(), allocation, None).await;
        let mut terminal = self.gateway().open(&ticket.token, None).await;
        terminal.attached().await;
        (terminal, ticket.session)
    }

    /// A new terminal of `user`, at the replica with the node's stream or, if `relayed`, at another; and the replica with the stream.
    pub async fn terminal_joined(&mut self, allocation: Uuid, relayed: bool) -> (Terminal, usize) {
        let before = self.settled_terminal_streams().await;
        let ticket = self.issue_terminal_token(&self.user.clone(), allocation, None).await;
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        let streams_at = loop {
            let streams = self.terminal_streams().await;
            if let Some(at) = (0..streams.len()).find(|at| streams[*at] > before[*at]) {
                break at;
            }
            assert!(tokio::time::Instant::now() < until, "no stream comes: {before:?}, {streams:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let at = if relayed { (streams_at + 1) % self.replicas.len() } else { streams_at };
        let mut terminal = self.gateway_at(at).open(&ticket.token, None).await;
        terminal.attached().await;
        (terminal, streams_at)
    }

    /// The number of node streams at each replica, once each session that is not closed has one, and those of closed sessions are gone.
    async fn settled_terminal_streams(&self) -> Vec<u64> {
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        loop {
            let listed = self.admin.get("/api/v1/admin/terminal-sessions").await.ok();
            let sessions = listed["items"].as_array().expect("a list of sessions").iter();
            let open = sessions.filter(|session| session["state"] != "closed").count();
            let streams = self.terminal_streams().await;
            if streams.iter().sum::<u64>() == open as u64 {
                return streams;
            }
            assert!(tokio::time::Instant::now() < until, "{open} sessions are open, and the streams are {streams:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The number of node streams at each replica.
    async fn terminal_streams(&self) -> Vec<u64> {
        let mut streams = Vec::new();
        for index in 0..self.replicas.len() {
            streams.push(self.metrics_of(index).await.number("terminal_streams") as u64);
        }
        streams
    }
}

impl TerminalGateway {
    /// The same gateway behind another balancer.
    #[must_use]
    pub fn at(self, address: SocketAddr) -> Self {
        Self { at: address.to_string(), ..self }
    }

    /// Sets the size of the kernel's receive buffer.
    #[must_use]
    pub fn receiving(self, bytes: u32) -> Self {
        Self { receives: Some(bytes), ..self }
    }

    /// A TLS configuration that trusts the cluster's authority alone.
    #[must_use]
    pub fn client_config(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(&self.ca).unwrap() {
            roots.add(certificate.unwrap()).unwrap();
        }
        ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.at
    }

    async fn tls_on(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        stream.set_nodelay(true).unwrap();
        let host = self.at.rsplit_once(':').expect("a port").0.to_owned();
        let name = ServerName::try_from(host).unwrap();
        TlsConnector::from(Arc::new(self.client_config())).connect(name, stream).await
    }

    async fn connection(&self) -> std::io::Result<TlsStream<TcpStream>> {
        let socket = TcpSocket::new_v4().unwrap();
        if let Some(bytes) = self.receives {
            socket.set_recv_buffer_size(bytes).unwrap();
        }
        self.tls_on(socket.connect(self.at.parse().unwrap()).await?).await
    }

    /// Opens a terminal; the upgrade has to succeed. As clients do, it asks again where the service is not available at the moment.
    pub async fn open(&self, token: &str, from: Option<u64>) -> Terminal {
        let asking = TerminalRequest { token: Some(token.to_owned()), from, ..TerminalRequest::default() };
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        loop {
            match self.connect(&asking).await {
                Ok(terminal) => return terminal,
                Err((503, _)) if tokio::time::Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(refused) => panic!("the gateway answers {refused:?}"),
            }
        }
    }

    /// # Errors
    /// Status and body of a response that is no upgrade.
    pub async fn connect(&self, asking: &TerminalRequest) -> Result<Terminal, (u16, Value)> {
        let query = asking.query.as_ref().map(|query| format!("?{query}")).unwrap_or_default();
        let mut offered = vec!["gpu.terminal.v1".to_owned()];
        offered.extend(asking.token.iter().map(|token| format!("token.{token}")));
        offered.extend(asking.from.map(|from| format!("from.{from}")));
        let headers = asking.origin.iter().map(|origin| ("origin", origin.as_str()));
        let socket = self.upgrade(&format!("/ws/v1/terminal{query}"), &offered, headers).await?;
        Ok(Terminal { socket, session: Uuid::nil(), shown: Vec::new(), position: 0, unread: Vec::new(), closed: None })
    }

    /// Opens a WebSocket with the first of the offered subprotocols, over a connection of its own. One that is not made is made again, as
    /// where a balancer does not know yet that a replica is gone.
    ///
    /// # Errors
    /// Status and body of a response that is no upgrade.
    pub async fn upgrade<'a>(
        &self,
        path: &str,
        offered: &[String],
        headers: impl IntoIterator<Item = (&'static str, &'a str)>,
    ) -> Result<Socket, (u16, Value)> {
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        let stream = loop {
            match self.connection().await {
                Ok(stream) => break stream,
                Err(error) => assert!(tokio::time::Instant::now() < until, "{} takes no connection: {error}", self.at),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        self.upgrade_over(stream, path, offered, headers).await
    }

    /// As [`TerminalGateway::upgrade`], over this connection.
    ///
    /// # Errors
    /// Status and body of a response that is no upgrade.
    pub async fn upgrade_on<'a>(
        &self,
        stream: TcpStream,
        path: &str,
        offered: &[String],
        headers: impl IntoIterator<Item = (&'static str, &'a str)>,
    ) -> Result<Socket, (u16, Value)> {
        self.upgrade_over(self.tls_on(stream).await.expect("TLS"), path, offered, headers).await
    }

    async fn upgrade_over<'a>(
        &self,
        stream: TlsStream<TcpStream>,
        path: &str,
        offered: &[String],
        headers: impl IntoIterator<Item = (&'static str, &'a str)>,
    ) -> Result<Socket, (u16, Value)> {
        let mut request = format!("wss://{}{path}", self.at).into_client_request().expect("a URL");
        if !offered.is_empty() {
            request.headers_mut().insert("sec-websocket-protocol", offered.join(", ").parse().unwrap());
        }
        for (name, value) in headers {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        match timeout(WAIT_TIMEOUT, client_async(request, stream)).await.expect("it answers") {
            Ok((socket, answer)) => {
                assert_eq!(answer.headers()["sec-websocket-protocol"], offered[0].as_str());
                Ok(socket)
            }
            Err(Error::Http(answer)) => {
                let body = answer.body().as_deref().and_then(|body| serde_json::from_slice(body).ok());
                Err((answer.status().as_u16(), body.unwrap_or_default()))
            }
            Err(error) => panic!("no upgrade: {error}"),
        }
    }
}

impl Terminal {
    /// Sends input.
    pub async fn enter(&mut self, text: &str) {
        self.socket.send(Message::Binary(text.as_bytes().to_vec().into())).await.expect("the terminal takes input");
    }

    pub async fn control(&mut self, message: &Value) {
        self.socket.send(Message::Text(message.to_string().into())).await.expect("the terminal takes control");
    }

    /// Sends any message.
    ///
    /// # Errors
    /// If the connection is closed.
    pub async fn send(&mut self, message: Message) -> Result<(), Error> {
        self.socket.send(message).await
    }

    /// Sends raw bytes that are no message.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        let stream = self.socket.get_mut();
        stream.write_all(bytes).await.expect("the connection takes bytes");
        stream.flush().await.expect("the connection takes bytes");
    }

    /// Receives until the shell has ended. `context` is printed where it does not end in time.
    pub async fn receive_exit(&mut self, within: Duration, context: impl Fn() -> String) -> Value {
        let until = tokio::time::Instant::now() + within;
        while !self.unread.iter().any(|message| message["type"] == "exit") {
            assert!(self.closed.is_none() && tokio::time::Instant::now() < until, "{:?} {}", self.closed, context());
            self.receive(Duration::from_millis(200)).await;
        }
        self.expect_control("exit").await
    }

    /// Receives one message. `false`: no message within that time, or the connection is closed.
    pub async fn receive(&mut self, within: Duration) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let Ok(message) = timeout(within, self.socket.next()).await else { return false };
        match message {
            Some(Ok(Message::Binary(bytes))) => {
                self.position += bytes.len() as u64;
                self.shown.extend_from_slice(&bytes);
            }
            Some(Ok(Message::Text(text))) => {
                let received: Value = serde_json::from_str(&text).expect("control is JSON");
                if received["type"] == "attached" {
                    self.position = received["position"].as_u64().expect("a position");
                    self.session = received["session_id"].as_str().and_then(|id| id.parse().ok()).expect("a session");
                }
                self.unread.push(received);
            }
            Some(Ok(Message::Close(frame))) => {
                let received = frame.map(|CloseFrame { code, reason }| (u16::from(code), reason.to_string()));
                self.closed = Some(received.unwrap_or((1005, String::new())));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Err(_)) | None => self.closed = Some((1006, "cut".to_owned())),
        }
        true
    }

    /// Waits for a control message of that type.
    pub async fn expect_control(&mut self, kind: &str) -> Value {
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(at) = self.unread.iter().position(|received| received["type"] == kind) {
                return self.unread.remove(at);
            }
            assert!(
                tokio::time::Instant::now() < until && self.closed.is_none(),
                "never received {kind}: {:?}",
                self.closed
            );
            self.receive(Duration::from_millis(200)).await;
        }
    }

    pub async fn attached(&mut self) -> Value {
        self.expect_control("attached").await
    }

    /// Waits until the output contains this.
    pub async fn expect_output(&mut self, text: &str) {
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        while !self.text().contains(text) {
            let late = tokio::time::Instant::now() >= until || self.closed.is_some();
            assert!(!late, "{text:?} is never shown ({:?}): {}", self.closed, self.text());
            self.receive(Duration::from_millis(200)).await;
        }
    }

    /// The session, once it is attached.
    #[must_use]
    pub const fn session(&self) -> Uuid {
        self.session
    }

    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown).into_owned()
    }

    /// Waits for the close frame and returns its code.
    pub async fn close_code(&mut self) -> u16 {
        let until = tokio::time::Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some((code, _)) = &self.closed {
                return *code;
            }
            assert!(tokio::time::Instant::now() < until, "it is never closed");
            self.receive(Duration::from_millis(200)).await;
        }
    }
}

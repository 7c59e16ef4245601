//! A user's terminal by hand: a WebSocket as a browser makes one, that counts what it gets and says what a test tells it.

use super::client::{Answer, Client};
use super::{PATIENCE, World};
use futures::{SinkExt as _, StreamExt as _};
use reqwest::Method;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
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

/// The way to a gateway.
#[derive(Clone)]
pub struct Gateway {
    ca: PathBuf,
    /// `host:port`.
    at: String,
    /// The kernel's buffer for what comes, where that is not to be as large as it likes.
    receives: Option<u32>,
}

/// How a connection is asked for.
#[derive(Clone, Debug, Default)]
pub struct Asking {
    pub token: Option<String>,
    pub origin: Option<String>,
    pub from: Option<u64>,
    pub query: Option<String>,
}

/// A token, as it was issued.
#[derive(Clone, Debug)]
pub struct Ticket {
    pub token: String,
    pub session: Uuid,
}

/// An open terminal.
pub struct Terminal {
    socket: Socket,
    session: Uuid,
    /// Everything that was shown.
    pub shown: Vec<u8>,
    /// The position after it.
    pub position: u64,
    /// The control messages that were not asked for yet.
    pub told: Vec<Value>,
    pub closed: Option<(u16, String)>,
}

impl World {
    /// Through the balancer.
    #[must_use]
    pub fn gateway(&self) -> Gateway {
        Gateway {
            ca: self.authority.certificate_path().to_owned(),
            at: self.public.address().to_string(),
            receives: None,
        }
    }

    /// Of one replica.
    #[must_use]
    pub fn gateway_at(&self, replica: usize) -> Gateway {
        let at = self.replicas[replica].public_url().trim_start_matches("https://").to_owned();
        Gateway { at, ..self.gateway() }
    }

    /// A token for a terminal on the allocation, as this person.
    pub async fn ticket(&mut self, by: &Client, allocation: Uuid, session: Option<Uuid>) -> Ticket {
        let issued = self.try_ticket(by, allocation, session).await.created();
        let token = issued["token"].as_str().expect("a token").to_owned();
        self.keep_secret("a terminal token", &token);
        Ticket { token, session: issued["session_id"].as_str().unwrap().parse().unwrap() }
    }

    /// The answer to one who asks for a token.
    pub async fn try_ticket(&self, by: &Client, allocation: Uuid, session: Option<Uuid>) -> Answer {
        let body = session.map_or_else(|| json!({}), |session| json!({ "session_id": session }));
        by.once(Method::POST, &format!("/api/v1/allocations/{allocation}/terminal-tokens"), Some(&body)).await
    }

    /// A fresh terminal of `user` on the allocation, through the balancer.
    pub async fn terminal(&mut self, allocation: Uuid) -> (Terminal, Uuid) {
        let ticket = self.ticket(&self.user.clone(), allocation, None).await;
        let mut terminal = self.gateway().open(&ticket.token, None).await;
        terminal.attached().await;
        (terminal, ticket.session)
    }

    /// A fresh terminal of `user`, at the replica where the node's stream of it ends or, `relayed`, at another. With that replica.
    pub async fn terminal_joined(&mut self, allocation: Uuid, relayed: bool) -> (Terminal, usize) {
        let before = self.terminal_streams().await;
        let ticket = self.ticket(&self.user.clone(), allocation, None).await;
        let until = tokio::time::Instant::now() + PATIENCE;
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

    /// How many nodes' streams end at each replica.
    async fn terminal_streams(&self) -> Vec<u64> {
        let mut streams = Vec::new();
        for index in 0..self.replicas.len() {
            let page = self.operator_at(index).once(Method::GET, "/metrics", None).await.text;
            let count = page.lines().find_map(|line| line.strip_prefix("terminal_streams "));
            streams.push(count.and_then(|count| count.parse().ok()).expect("it is counted"));
        }
        streams
    }
}

impl Gateway {
    /// For a reader whose kernel takes little in for them.
    #[must_use]
    pub fn receiving(self, bytes: u32) -> Self {
        Self { receives: Some(bytes), ..self }
    }

    /// Trusts the world's authority alone.
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

    async fn tls_on(&self, stream: TcpStream) -> TlsStream<TcpStream> {
        stream.set_nodelay(true).unwrap();
        let host = self.at.rsplit_once(':').expect("a port").0.to_owned();
        let name = ServerName::try_from(host).unwrap();
        TlsConnector::from(Arc::new(self.client_config())).connect(name, stream).await.expect("TLS")
    }

    /// Opens a terminal, which the gateway has to let in as far as the upgrade.
    pub async fn open(&self, token: &str, from: Option<u64>) -> Terminal {
        let asking = Asking { token: Some(token.to_owned()), from, ..Asking::default() };
        self.ask(&asking).await.unwrap_or_else(|refused| panic!("the gateway answers {refused:?}"))
    }

    /// # Errors
    /// Status and body of an answer that is no upgrade.
    pub async fn ask(&self, asking: &Asking) -> Result<Terminal, (u16, Value)> {
        let query = asking.query.as_ref().map(|query| format!("?{query}")).unwrap_or_default();
        let mut offered = vec!["gpu.terminal.v1".to_owned()];
        offered.extend(asking.token.iter().map(|token| format!("token.{token}")));
        offered.extend(asking.from.map(|from| format!("from.{from}")));
        let headers = asking.origin.iter().map(|origin| ("origin", origin.as_str()));
        let socket = self.upgrade(&format!("/ws/v1/terminal{query}"), &offered, headers).await?;
        Ok(Terminal { socket, session: Uuid::nil(), shown: Vec::new(), position: 0, told: Vec::new(), closed: None })
    }

    /// A WebSocket that speaks the first of what is offered, over a connection of its own.
    ///
    /// # Errors
    /// Status and body of an answer that is no upgrade.
    pub async fn upgrade<'a>(
        &self,
        path: &str,
        offered: &[String],
        headers: impl IntoIterator<Item = (&'static str, &'a str)>,
    ) -> Result<Socket, (u16, Value)> {
        let socket = TcpSocket::new_v4().unwrap();
        if let Some(bytes) = self.receives {
            socket.set_recv_buffer_size(bytes).unwrap();
        }
        let stream = socket.connect(self.at.parse().unwrap()).await.expect("it listens");
        self.upgrade_on(stream, path, offered, headers).await
    }

    /// The same, over this connection.
    ///
    /// # Errors
    /// Status and body of an answer that is no upgrade.
    pub async fn upgrade_on<'a>(
        &self,
        stream: TcpStream,
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
        let stream = self.tls_on(stream).await;
        match timeout(PATIENCE, client_async(request, stream)).await.expect("it answers") {
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
    /// The connection itself, for whoever counts on their own.
    #[must_use]
    pub fn into_socket(self) -> Socket {
        self.socket
    }

    /// What is typed.
    pub async fn enter(&mut self, text: &str) {
        self.socket.send(Message::Binary(text.as_bytes().to_vec().into())).await.expect("the terminal takes input");
    }

    pub async fn control(&mut self, message: &Value) {
        self.socket.send(Message::Text(message.to_string().into())).await.expect("the terminal takes control");
    }

    /// Any message at all.
    ///
    /// # Errors
    /// Where the connection is gone.
    pub async fn send(&mut self, message: Message) -> Result<(), Error> {
        self.socket.send(message).await
    }

    /// Bytes that are no message, as they are.
    pub async fn send_raw(&mut self, bytes: &[u8]) {
        let stream = self.socket.get_mut();
        stream.write_all(bytes).await.expect("the connection takes bytes");
        stream.flush().await.expect("the connection takes bytes");
    }

    /// Takes in one message. `false`: nothing came in that time, or nothing comes any more.
    pub async fn hear(&mut self, within: Duration) -> bool {
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
                let said: Value = serde_json::from_str(&text).expect("control is JSON");
                if said["type"] == "attached" {
                    self.position = said["position"].as_u64().expect("a position");
                    self.session = said["session_id"].as_str().and_then(|id| id.parse().ok()).expect("a session");
                }
                self.told.push(said);
            }
            Some(Ok(Message::Close(frame))) => {
                let said = frame.map(|CloseFrame { code, reason }| (u16::from(code), reason.to_string()));
                self.closed = Some(said.unwrap_or((1005, String::new())));
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Err(_)) | None => self.closed = Some((1006, "cut".to_owned())),
        }
        true
    }

    /// Waits for a control message of that type.
    pub async fn told(&mut self, kind: &str) -> Value {
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.told.iter().position(|said| said["type"] == kind) {
                return self.told.remove(at);
            }
            assert!(
                tokio::time::Instant::now() < until && self.closed.is_none(),
                "never told {kind}: {:?}",
                self.closed
            );
            self.hear(Duration::from_millis(200)).await;
        }
    }

    pub async fn attached(&mut self) -> Value {
        self.told("attached").await
    }

    /// Waits until this is shown.
    pub async fn shows(&mut self, text: &str) {
        let until = tokio::time::Instant::now() + PATIENCE;
        while !self.text().contains(text) {
            let late = tokio::time::Instant::now() >= until || self.closed.is_some();
            assert!(!late, "{text:?} is never shown ({:?}): {}", self.closed, self.text());
            self.hear(Duration::from_millis(200)).await;
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

    /// Waits for the close frame and answers with its code.
    pub async fn close_code(&mut self) -> u16 {
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            if let Some((code, _)) = &self.closed {
                return *code;
            }
            assert!(tokio::time::Instant::now() < until, "it is never closed");
            self.hear(Duration::from_millis(200)).await;
        }
    }
}

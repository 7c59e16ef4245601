//! Somebody who listens to notifications, as a page or a program does, and remembers what they heard.

use super::terminal::{Gateway, Socket};
use super::{PATIENCE, World};
use futures::{SinkExt as _, StreamExt as _};
use secrecy::ExposeSecret as _;
use serde_json::Value;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::time::{Instant, timeout};
use tokio_tungstenite::tungstenite::{Error, Message};

const PATH: &str = "/api/v1/notifications/ws";
pub const PROTOCOL: &str = "gpu.notifications.v1";

/// One connection.
pub struct Ear {
    socket: Socket,
    /// The notifications that were not asked for yet.
    pub told: Vec<Value>,
    pub closed: Option<(u16, String)>,
}

impl World {
    /// Somebody's, at this replica: from here on they hear.
    pub async fn ear(&self, replica: usize, username: &str) -> Ear {
        let token = self.identity.token_of(username).expect("the provider signs");
        self.ear_of(replica, token.expose_secret()).await
    }

    /// Of whoever this token names.
    pub async fn ear_of(&self, replica: usize, token: &str) -> Ear {
        let mut ear = Ear::open(&self.gateway_at(replica), token).await;
        ear.told("notifications.ready").await;
        ear
    }
}

impl Ear {
    /// As a page connects, which has to be let in as far as the upgrade.
    pub async fn open(at: &Gateway, token: &str) -> Self {
        let offered = [PROTOCOL.to_owned(), format!("bearer.{token}")];
        Self::ask(at, "", &offered, &[]).await.unwrap_or_else(|refused| panic!("it is answered {refused:?}"))
    }

    /// # Errors
    /// Status and body of an answer that is no upgrade.
    pub async fn ask(
        at: &Gateway,
        query: &str,
        offered: &[String],
        headers: &[(&'static str, &str)],
    ) -> Result<Self, (u16, Value)> {
        let socket = at.upgrade(&format!("{PATH}{query}"), offered, headers.iter().copied()).await?;
        Ok(Self::on(socket))
    }

    /// One whose machine has room for few bytes.
    pub async fn with_a_small_window(at: &Gateway, token: &str) -> Self {
        let stream = tokio::net::TcpSocket::new_v4().expect("a socket");
        stream.set_recv_buffer_size(4096).expect("a small window");
        let stream = stream.connect(at.address().parse().expect("an address")).await.expect("it listens");
        let offered = [PROTOCOL.to_owned(), format!("bearer.{token}")];
        Self::on(at.upgrade_on(stream, PATH, &offered, []).await.expect("it is let in"))
    }

    const fn on(socket: Socket) -> Self {
        Self { socket, told: Vec::new(), closed: None }
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
            Some(Ok(Message::Text(text))) => {
                self.told.push(serde_json::from_str(&text).expect("a notification is JSON"));
            }
            Some(Ok(Message::Close(frame))) => {
                let said = frame.map(|frame| (u16::from(frame.code), frame.reason.to_string()));
                self.closed = Some(said.unwrap_or((1005, String::new())));
            }
            Some(Ok(Message::Binary(_))) => panic!("a notification is text"),
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Err(_)) | None => self.closed = Some((1006, "cut".to_owned())),
        }
        true
    }

    /// Waits for one of this type.
    pub async fn told(&mut self, kind: &str) -> Value {
        self.told_where(kind, |_| true).await
    }

    /// Waits for one of this type of which that is true.
    pub async fn told_where(&mut self, kind: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.told.iter().position(|told| told["type"] == kind && wanted(told)) {
                return self.told.remove(at);
            }
            let late = Instant::now() >= until || self.closed.is_some();
            assert!(!late, "never told {kind}: {:?}, {:#?}", self.closed, self.told);
            self.hear(Duration::from_millis(200)).await;
        }
    }

    /// All that has come and was not asked for, once nothing has come for a while.
    pub async fn rest(&mut self) -> Vec<Value> {
        while self.hear(Duration::from_millis(500)).await {}
        std::mem::take(&mut self.told)
    }

    /// Waits for the close frame and answers with its code.
    pub async fn close_code(&mut self) -> u16 {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some((code, _)) = &self.closed {
                return *code;
            }
            assert!(Instant::now() < until, "it is never closed");
            self.hear(Duration::from_millis(200)).await;
        }
    }
}

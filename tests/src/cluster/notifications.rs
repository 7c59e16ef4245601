//! A subscriber to notifications over a WebSocket, as a page or a program connects, with the notifications that it received.

use super::terminal::{Socket, TerminalGateway};
use super::{TestCluster, WAIT_TIMEOUT};
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
pub struct NotificationSubscriber {
    socket: Socket,
    /// The received notifications that the test has not read.
    pub unread: Vec<Value>,
    pub closed: Option<(u16, String)>,
}

impl TestCluster {
    /// A subscriber as this user at this replica, once it is ready.
    pub async fn subscriber(&self, replica: usize, username: &str) -> NotificationSubscriber {
        let token = self.identity.token_of(username).expect("the provider signs");
        self.subscriber_with_token(replica, token.expose_secret()).await
    }

    /// A subscriber with this token.
    pub async fn subscriber_with_token(&self, replica: usize, token: &str) -> NotificationSubscriber {
        let mut subscriber = NotificationSubscriber::open(&self.gateway_at(replica), token).await;
        subscriber.expect_notification("notifications.ready").await;
        subscriber
    }
}

impl NotificationSubscriber {
    /// Connects as a page does; the upgrade has to succeed.
    pub async fn open(at: &TerminalGateway, token: &str) -> Self {
        let offered = [PROTOCOL.to_owned(), format!("bearer.{token}")];
        Self::connect(at, "", &offered, &[]).await.unwrap_or_else(|refused| panic!("it is answered {refused:?}"))
    }

    /// # Errors
    /// Status and body of a response that is no upgrade.
    pub async fn connect(
        at: &TerminalGateway,
        query: &str,
        offered: &[String],
        headers: &[(&'static str, &str)],
    ) -> Result<Self, (u16, Value)> {
        let socket = at.upgrade(&format!("{PATH}{query}"), offered, headers.iter().copied()).await?;
        Ok(Self::on(socket))
    }

    /// A connection with a small receive buffer.
    pub async fn open_with_small_window(at: &TerminalGateway, token: &str) -> Self {
        let stream = tokio::net::TcpSocket::new_v4().expect("a socket");
        stream.set_recv_buffer_size(4096).expect("a small window");
        let stream = stream.connect(at.address().parse().expect("an address")).await.expect("it listens");
        let offered = [PROTOCOL.to_owned(), format!("bearer.{token}")];
        Self::on(at.upgrade_on(stream, PATH, &offered, []).await.expect("it is let in"))
    }

    const fn on(socket: Socket) -> Self {
        Self { socket, unread: Vec::new(), closed: None }
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

    /// Receives one message. `false`: no message within that time, or the connection is closed.
    pub async fn receive(&mut self, within: Duration) -> bool {
        if self.closed.is_some() {
            return false;
        }
        let Ok(message) = timeout(within, self.socket.next()).await else { return false };
        match message {
            Some(Ok(Message::Text(text))) => {
                self.unread.push(serde_json::from_str(&text).expect("a notification is JSON"));
            }
            Some(Ok(Message::Close(frame))) => {
                let received = frame.map(|frame| (u16::from(frame.code), frame.reason.to_string()));
                self.closed = Some(received.unwrap_or((1005, String::new())));
            }
            Some(Ok(Message::Binary(_))) => panic!("a notification is text"),
            Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
            Some(Err(_)) | None => self.closed = Some((1006, "cut".to_owned())),
        }
        true
    }

    /// Receives what has arrived. The service disconnects a subscriber that answers no ping for 45 s, which only one that receives does.
    pub async fn receive_pending(&mut self) {
        while self.receive(Duration::from_millis(1)).await {}
    }

    /// Waits for a notification of this type.
    pub async fn expect_notification(&mut self, kind: &str) -> Value {
        self.expect_notification_where(kind, |_| true).await
    }

    /// Waits for a notification of this type that satisfies the condition.
    pub async fn expect_notification_where(&mut self, kind: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some(at) =
                self.unread.iter().position(|notification| notification["type"] == kind && wanted(notification))
            {
                return self.unread.remove(at);
            }
            let late = Instant::now() >= until || self.closed.is_some();
            assert!(!late, "never received {kind}: {:?}, {:#?}", self.closed, self.unread);
            self.receive(Duration::from_millis(200)).await;
        }
    }

    /// All unread notifications, once no more arrive for half a second.
    pub async fn drain(&mut self) -> Vec<Value> {
        while self.receive(Duration::from_millis(500)).await {}
        std::mem::take(&mut self.unread)
    }

    /// Waits for the close frame and returns its code.
    pub async fn close_code(&mut self) -> u16 {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            if let Some((code, _)) = &self.closed {
                return *code;
            }
            assert!(Instant::now() < until, "it is never closed");
            self.receive(Duration::from_millis(200)).await;
        }
    }
}

//! Terminals of this node's tenants: begun by a task, reached over a stream of the node's own.

use std::sync::Arc;

use chrono::Utc;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use reqwest::StatusCode;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tracing::info;
use uuid::Uuid;
use wire::task::OpenTerminal;
use wire::terminal::MESSAGE;

use super::Agent;
use crate::api::tls_as_node;
use crate::executor::{Failure, Output};
use crate::terminal::{NoStream, NotSent, Socket, Way};

impl Agent {
    pub(super) async fn open_terminal(self: &Arc<Self>, task: &OpenTerminal) -> Result<Output, Failure> {
        let (executor, asked) = (Arc::clone(&self.executor), task.clone());
        let shell = tokio::task::spawn_blocking(move || executor.shell(&asked)).await;
        let shell = shell.unwrap_or_else(|panic| {
            Err(Failure::new("executor_panicked", format!("the executor ended without an answer: {panic}")))
        })?;
        self.terminals.begin(task, &shell, self.own_way()).await?;
        Ok(Output::new())
    }
}

impl Agent {
    /// Recordings that an earlier agent has left are sent.
    pub(super) fn send_recordings_left(self: &Arc<Self>) {
        self.terminals.send_what_is_left(&self.own_way());
    }

    fn own_way(self: &Arc<Self>) -> Arc<dyn Way> {
        Arc::new(OwnWay(Arc::clone(self)))
    }

    /// A shell does not outlive its agent: those of the agent's life before are lost, and nobody has said so.
    pub(super) fn say_what_is_lost(self: &Arc<Self>) {
        let lost = self.journal.terminals_begun(Utc::now());
        if lost.is_empty() {
            return;
        }
        info!(sessions = lost.len(), "terminal sessions from before the restart may be lost");
        let agent = Arc::clone(self);
        self.tasks.spawn(async move {
            let way = OwnWay(Arc::clone(&agent));
            agent.terminals.say_lost(lost, &way).await;
        });
    }
}

/// The way of this node, with the certificate that it has at that moment.
struct OwnWay(Arc<Agent>);

impl Way for OwnWay {
    fn open(&self, session_id: Uuid) -> BoxFuture<'_, Result<Socket, NoStream>> {
        async move {
            let Agent { config, .. } = self.0.as_ref();
            let cut = |error: &dyn std::error::Error| NoStream::Cut(crate::chain(error));
            let mut tls = tls_as_node(config, &self.0.identity()).map_err(|error| cut(&error))?;
            // A WebSocket begins with an upgrade, which HTTP/2 does not have.
            tls.alpn_protocols = vec![b"http/1.1".to_vec()];
            let base = reqwest::Url::parse(&config.api_url).map_err(|error| cut(&error))?;
            let host = base.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
            let port = base.port_or_known_default().unwrap_or(443);
            let stream = TcpStream::connect((host.as_str(), port)).await.map_err(|error| cut(&error))?;
            stream.set_nodelay(true).map_err(|error| cut(&error))?;
            let name = ServerName::try_from(host).map_err(|error| cut(&error))?;
            let stream = TlsConnector::from(Arc::new(tls)).connect(name, stream).await.map_err(|error| cut(&error))?;
            let url = format!("{}/internal/v1/nodes/{}/terminals/{session_id}/stream", config.api_url, config.node_id);
            let request = url.replacen("http", "ws", 1).into_client_request().map_err(|error| cut(&error))?;
            let limits = WebSocketConfig::default()
                .max_message_size(Some(MESSAGE))
                .max_frame_size(Some(MESSAGE))
                .read_buffer_size(4 * 1024)
                .write_buffer_size(MESSAGE)
                .max_write_buffer_size(8 * MESSAGE);
            match client_async_with_config(request, stream, Some(limits)).await {
                Ok((socket, _)) => Ok(socket),
                Err(Error::Http(answer)) if matches!(answer.status().as_u16(), 404 | 409) => Err(NoStream::Over),
                Err(Error::Http(answer)) => Err(NoStream::Cut(format!("answered {}", answer.status()))),
                Err(error) => Err(cut(&error)),
            }
        }
        .boxed()
    }

    fn send_recorded(&self, session_id: Uuid, seq: u32, frames: Vec<u8>) -> BoxFuture<'_, Result<(), NotSent>> {
        async move {
            let sent = self.0.api().put_recorded(session_id, seq, frames).await;
            sent.map(|_| ()).map_err(|error| match error.status() {
                Some(StatusCode::BAD_REQUEST | StatusCode::CONFLICT | StatusCode::PAYLOAD_TOO_LARGE) => {
                    NotSent::Refused(crate::chain(&error))
                }
                // A replica of the release before knows no recordings, and says so without naming the session.
                Some(StatusCode::NOT_FOUND) if error.names("session_id") => NotSent::Refused(crate::chain(&error)),
                // An identity that has expired is renewed by other parts of the agent.
                Some(_) | None => NotSent::Later { after: error.retry_after(), why: crate::chain(&error) },
            })
        }
        .boxed()
    }
}

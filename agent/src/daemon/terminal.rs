//! Terminals of this node's tenants: started by a task, reached over a stream that the node opens.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use reqwest::StatusCode;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;
use tokio_tungstenite::tungstenite::http::Response;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tracing::info;
use uuid::Uuid;
use wire::task::OpenTerminal;
use wire::terminal::MESSAGE;

use super::Agent;
use crate::node_api_client::{CORRELATION_ID, tls_as_node};
use crate::task_outcome::{TaskFailure, TaskOutput};
use crate::terminal::{StreamError, TerminalSocket, TerminalTransport, UploadError};

impl Agent {
    pub(super) async fn open_terminal(self: &Arc<Self>, task: &OpenTerminal) -> Result<TaskOutput, TaskFailure> {
        let (executor, asked) = (Arc::clone(&self.executor), task.clone());
        let shell = tokio::task::spawn_blocking(move || executor.shell(&asked)).await;
        let shell = shell.unwrap_or_else(|panic| {
            Err(TaskFailure::new("executor_panicked", format!("the executor ended without an answer: {panic}")))
        })?;
        self.terminals.begin(task, &shell, self.transport()).await?;
        Ok(TaskOutput::new())
    }
}

impl Agent {
    /// Continues the sessions that the previous process left. The others are lost, of which the control plane has not been notified, and
    /// what is left of their recordings is uploaded.
    pub(super) fn continue_terminals(self: &Arc<Self>) {
        let continued = self.terminals.adopt(&self.transport());
        self.terminals.upload_leftovers(&continued, &self.transport());
        // Those that this process is going to start are not among them.
        let mut lost = self.journal.terminals_begun(DateTime::<Utc>::MIN_UTC);
        lost.retain(|session| !continued.contains(&session.session_id));
        if lost.is_empty() {
            return;
        }
        let agent = Arc::clone(self);
        self.tasks.spawn(async move {
            tokio::select! {
                () = agent.clock.wait_until_known() => {}
                () = agent.stop.cancelled() => return,
            }
            let now = agent.clock.now();
            lost.retain(|session| now < session.ends_at);
            if lost.is_empty() {
                return;
            }
            info!(sessions = lost.len(), "terminal sessions from before the restart may be lost");
            let transport = NodeTransport(Arc::clone(&agent));
            agent.terminals.report_lost(lost, &transport).await;
        });
    }

    fn transport(self: &Arc<Self>) -> Arc<dyn TerminalTransport> {
        Arc::new(NodeTransport(Arc::clone(self)))
    }
}

/// The transport of this node, with its certificate at the time of the call.
struct NodeTransport(Arc<Agent>);

impl TerminalTransport for NodeTransport {
    fn open(&self, session_id: Uuid) -> BoxFuture<'_, Result<TerminalSocket, StreamError>> {
        async move {
            let Agent { config, .. } = self.0.as_ref();
            let cut = |error: &dyn std::error::Error| StreamError::Cut(crate::chain(error));
            let mut tls = tls_as_node(config, &self.0.identity(), &self.0.clock).map_err(|error| cut(&error))?;
            // A WebSocket starts with an upgrade, which HTTP/2 does not have.
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
                Err(Error::Http(answer)) if is_over(&answer) => Err(StreamError::Over),
                Err(Error::Http(answer)) => Err(StreamError::Cut(format!("answered {}", answer.status()))),
                Err(error) => Err(cut(&error)),
            }
        }
        .boxed()
    }

    fn send_chunk(&self, session_id: Uuid, seq: u32, frames: Vec<u8>) -> BoxFuture<'_, Result<(), UploadError>> {
        async move {
            let sent = self.0.api().put_recording_chunk(session_id, seq, frames).await;
            sent.map(|_| ()).map_err(|error| {
                let final_statuses = [StatusCode::BAD_REQUEST, StatusCode::CONFLICT, StatusCode::PAYLOAD_TOO_LARGE];
                // A replica of the previous release has no recordings, and answers without naming the session.
                let is_unknown = error.is_refused_with(&[StatusCode::NOT_FOUND]) && error.has_detail("session_id");
                let why = crate::chain(&error);
                match error.is_refused_with(&final_statuses) || is_unknown {
                    true => UploadError::Refused(why),
                    // An expired identity is renewed by other parts of the agent.
                    false => UploadError::Later { after: error.retry_after(), why },
                }
            })
        }
        .boxed()
    }
}

/// Whether the control plane answers that it has no such session, or that the session is over. The page of a proxy in between ends no
/// session; a part of the body may not have arrived with the head, by which alone it is recognized.
fn is_over<T>(answer: &Response<T>) -> bool {
    let is_from_control_plane = answer.headers().contains_key(CORRELATION_ID);
    is_from_control_plane && [StatusCode::NOT_FOUND, StatusCode::CONFLICT].contains(&answer.status())
}

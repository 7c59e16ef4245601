//! The node's end of a terminal: the stream that the agent opens for a session that it started, for as long as the session lives.

use super::admission::AuthenticatedNode;
use super::rejection_response::refused;
use super::{ASK_TIMEOUT, NodeApi};
use crate::app_state::read_model::current;
use crate::http::correlation::Scope;
use crate::http::error::{ApiError, Code};
use crate::http::request_body::Path;
use crate::terminal::recording::on_the_wire;
use crate::terminal_gateway::until_session_ends;
use crate::tls::connections::ConnectionGuard;
use actors::AskError;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket};
use axum::extract::{State, WebSocketUpgrade};
use axum::response::Response;
use domain::authz::authorize;
use domain::node::Request;
use domain::policy::Scopes;
use domain::recording::RecordingTerms;
use domain::state_machine::Timestamp;
use domain::terminal_session::{self, Rejection, Reply, ShellExit, TerminalSession};
use domain::{Action, NodeId, Principal, TerminalSessionId};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tracing::debug;
use uuid::Uuid;
use wire::terminal::{KEEPALIVE_SECONDS, MESSAGE, SILENCE_TIMEOUT_SECONDS, TerminalCommand, TerminalEvent};

const QUEUE: usize = 16;
/// Messages that go out together, at most.
const SEND_BATCH: usize = 16;
const SEND_TIMEOUT: Duration = Duration::from_secs(SILENCE_TIMEOUT_SECONDS);
/// The principal that notifies a session of a possible policy change.
const NODE_API: &str = "node-api";
/// How soon a live session follows a policy change.
const POLICY_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout for notifying the agent that the session is over.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// `GET /internal/v1/nodes/{id}/terminals/{session_id}/stream`.
pub(super) async fn stream(
    State(api): State<NodeApi>,
    AuthenticatedNode(node): AuthenticatedNode,
    scope: Scope,
    Path((_, session)): Path<(Uuid, Uuid)>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let (node_id, session) = (NodeId(node.node_id), TerminalSessionId(session));
    let held = api.app.connections.hold(node.node_id, node.authority);
    let identify = Request::Identify { serial: node.serial };
    api.ask(&scope, node_id, identify, |context| context).await.map_err(refused)?;
    let found = current::<TerminalSession>(&api.app, session.0).await?;
    let found = found.filter(|found| found.it.node_id == node_id);
    let found = found.ok_or_else(|| ApiError::not_found("terminal session"))?;
    if let Some(reason) = found.it.closed() {
        return Err(ApiError::new(Code::StateConflict, "The terminal session is over; end its processes.")
            .detail("reason", reason.code()));
    }
    let upgrade = upgrade.map_err(|error| {
        ApiError::new(Code::UpgradeRequired, "This is a WebSocket: connect with one (RFC 6455, over HTTP/1.1).")
            .because(error)
    })?;
    let upgrade = upgrade
        .max_message_size(MESSAGE)
        .max_frame_size(MESSAGE)
        // Per session, and most are idle most of the time; a long message gets a buffer of its own.
        .read_buffer_size(4 * 1024)
        // Messages that arrive together are written together: acknowledgements and keystrokes are short.
        .write_buffer_size(4 * 1024)
        .max_write_buffer_size(8 * MESSAGE);
    let (scopes, ends_at) = (found.it.scopes(), found.it.ends_at);
    Ok(upgrade
        .on_upgrade(move |socket| AgentConnection { api, scope, node_id, session, ends_at, scopes, held }.run(socket)))
}

/// It lives as long as the session and mostly waits: rare calls are boxed, so that they leave no room reserved.
pub(super) struct AgentConnection {
    api: NodeApi,
    scope: Scope,
    node_id: NodeId,
    session: TerminalSessionId,
    ends_at: Timestamp,
    /// Of its owner.
    scopes: Scopes,
    /// A proxy's connection is not the node's: what runs over it is closed here.
    held: ConnectionGuard,
}

impl AgentConnection {
    pub(super) async fn run(self, socket: WebSocket) {
        let app = self.api.app.clone();
        let (mut sink, stream) = socket.split();
        let (down, downs) = mpsc::channel(QUEUE);
        let agent_stream = app.terminals.register_stream(self.session, down.clone());
        let is_over = tokio::select! {
            why = self.receive(stream, &agent_stream) => { debug!(why, "an agent's terminal stream ended"); false }
            () = self.follow_recording_policy(&down) => false,
            why = send(&mut sink, downs) => { debug!(why, "an agent's terminal stream ended"); false }
            () = agent_stream.replaced() => false,
            () = self.held.cut() => false,
            () = app.stopping.cancelled() => false,
            _ = until_session_ends(&app, self.session, self.ends_at, None) => true,
        };
        if is_over {
            let close = Message::Binary(TerminalCommand::Close.encode().into());
            let _ = timeout(CLOSE_TIMEOUT, sink.send(close)).await;
        }
        let _ = timeout(CLOSE_TIMEOUT, sink.close()).await;
    }

    /// Compares the policies with the session's terms every second, and has its state machine apply them where they differ. As long as they
    /// are equal, no command is sent. It never ends.
    async fn follow_recording_policy(&self, down: &mpsc::Sender<TerminalCommand>) {
        let app = &self.api.app;
        let mut sent_terms: Option<RecordingTerms> = None;
        let mut check = interval(POLICY_CHECK_INTERVAL);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            check.tick().await;
            let by_policy = RecordingTerms::from_policy(&app.environment.policy(), &self.scopes, app.environment.now());
            if sent_terms == Some(by_policy) {
                continue;
            }
            match Box::pin(self.apply_policy()).await {
                Ok(terms) => {
                    // The agent received the first terms with its task; sending them once more does no harm.
                    let record = TerminalCommand::Record { terms: on_the_wire(terms) };
                    if down.send(record).await.is_ok() {
                        sent_terms = Some(terms);
                    }
                }
                Err(error) => debug!(%error, "a policy could not be applied to a terminal session"),
            }
        }
    }

    /// The terms as its machine has them then.
    async fn apply_policy(&self) -> Result<RecordingTerms, AskError<Rejection>> {
        let app = &self.api.app;
        let permit = authorize(&Principal::system(NODE_API), Action::Advance).map_err(|_| AskError::Denied)?;
        let context = self.scope.command_context(&permit, app.environment.now() + ASK_TIMEOUT);
        let command = terminal_session::Instruction::ApplyRecordingPolicy;
        match app.directory.ask::<TerminalSession>(&permit, self.session.0, command.into(), context).await?.reply {
            Reply::Session { session } => Ok(session.recording),
            Reply::Issued { .. } | Reply::Attached { .. } | Reply::Done => Ok(RecordingTerms::default()),
        }
    }

    async fn receive(&self, mut stream: SplitStream<WebSocket>, agent_stream: &crate::terminal::AgentStream) -> String {
        let silent_after = Duration::from_secs(SILENCE_TIMEOUT_SECONDS);
        let mut silent_at = Instant::now() + silent_after;
        loop {
            let message = tokio::select! {
                message = stream.next() => message,
                () = sleep_until(silent_at) => return "the agent is silent".to_owned(),
            };
            let event = match message {
                Some(Ok(Message::Binary(bytes))) => TerminalEvent::decode(&bytes),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Text(_))) => {
                    silent_at = Instant::now() + silent_after;
                    continue;
                }
                Some(Ok(Message::Close(_))) | None => return "closed".to_owned(),
                Some(Err(error)) => return error.to_string(),
            };
            let event = match event {
                Ok(event) => event,
                Err(error) => return error.to_string(),
            };
            let over = match &event {
                TerminalEvent::Exited { exit } => Some(end_command(*exit)),
                TerminalEvent::Lost => Some(terminal_session::Request::Lose),
                TerminalEvent::Attached { .. }
                | TerminalEvent::Output { .. }
                | TerminalEvent::Taken { .. }
                | TerminalEvent::Recording { .. } => None,
            };
            agent_stream.deliver(event).await;
            if let Some(over) = over {
                Box::pin(self.report_end(over)).await;
            }
            // Counted from when a message could be read: its recipient may have been slow.
            silent_at = Instant::now() + silent_after;
        }
    }

    /// The agent repeats it until it is notified that the session is over.
    async fn report_end(&self, request: terminal_session::Request) {
        let Ok(permit) = authorize(&Principal::Node(self.node_id), Action::SpeakForNode) else { return };
        let app = &self.api.app;
        let context = self.scope.command_context(&permit, app.environment.now() + ASK_TIMEOUT).urgent();
        if let Err(error) = app.directory.ask::<TerminalSession>(&permit, self.session.0, request.into(), context).await
        {
            debug!(error = %error, "the end of a terminal's program could not be reported");
        }
    }
}

fn end_command(exit: wire::terminal::ProgramExit) -> terminal_session::Request {
    let exit = match exit {
        wire::terminal::ProgramExit::Code(code) => ShellExit::Code(code),
        wire::terminal::ProgramExit::Signal(signal) => ShellExit::Signal(signal),
    };
    terminal_session::Request::End { exit }
}

async fn send(sink: &mut SplitSink<WebSocket, Message>, mut downs: mpsc::Receiver<TerminalCommand>) -> String {
    let mut heartbeat = interval(Duration::from_secs(KEEPALIVE_SECONDS));
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            down = downs.recv() => match down {
                Some(down) => Message::Binary(down.encode().into()),
                None => return "the session has no sender".to_owned(),
            },
            _ = heartbeat.tick() => Message::Ping(Vec::new().into()),
        };
        let sending = async {
            sink.feed(message).await?;
            for _ in 0..SEND_BATCH {
                let Ok(down) = downs.try_recv() else { break };
                sink.feed(Message::Binary(down.encode().into())).await?;
            }
            sink.flush().await
        };
        match timeout(SEND_TIMEOUT, sending).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return "the agent reads nothing".to_owned(),
        }
    }
}

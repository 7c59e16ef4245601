//! The node's end of a terminal: the stream that the agent opens for a session that it began, and keeps for as long as the session lives.

use super::answer::refused;
use super::gate::Speaker;
use super::{ASK_WITHIN, NodeApi};
use crate::api::current;
use crate::body::Path;
use crate::correlation::Scope;
use crate::error::{ApiError, Code};
use crate::recording::on_the_wire;
use crate::terminal::until_over;
use crate::tls::connections::Held;
use actors::AskError;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket};
use axum::extract::{State, WebSocketUpgrade};
use axum::response::Response;
use domain::authz::authorize;
use domain::machine::Timestamp;
use domain::node::Command;
use domain::policy::Scopes;
use domain::recording::Terms;
use domain::terminal_session::{self, Exit, Rejection, Reply, TerminalSession};
use domain::{Action, NodeId, Principal, TerminalSessionId};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt as _, StreamExt as _};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tracing::debug;
use uuid::Uuid;
use wire::terminal::{Down, MESSAGE, SAYS_EVERY_SECONDS, SILENT_AFTER_SECONDS, Up};

const QUEUE: usize = 16;
/// Messages that go out together, at most.
const TOGETHER: usize = 16;
const SENDS_WITHIN: Duration = Duration::from_secs(SILENT_AFTER_SECONDS);
/// Who tells a session that a policy may have changed.
const NODE_API: &str = "node-api";
/// How soon a living session heeds a policy.
const LOOKS_AT_POLICY_EVERY: Duration = Duration::from_secs(1);
/// How long the agent may take to hear that the session is over.
const CLOSES_WITHIN: Duration = Duration::from_secs(2);

/// `GET /internal/v1/nodes/{id}/terminals/{session_id}/stream`.
pub(super) async fn stream(
    State(api): State<NodeApi>,
    Speaker(node): Speaker,
    scope: Scope,
    Path((_, session)): Path<(Uuid, Uuid)>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let (node_id, session) = (NodeId(node.node_id), TerminalSessionId(session));
    let held = api.services.connections.hold(node.node_id, node.authority);
    let identify = Command::Identify { serial: node.serial };
    api.ask(&scope, node_id, identify, |asked| asked).await.map_err(refused)?;
    let found = current::<TerminalSession>(&api.services, session.0).await?;
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
        // Of each session, and most say nothing most of the time; a long message gets room of its own.
        .read_buffer_size(4 * 1024)
        // What is said together goes out together: acknowledgements and keystrokes are short.
        .write_buffer_size(4 * 1024)
        .max_write_buffer_size(8 * MESSAGE);
    let (scopes, ends_at) = (found.it.scopes(), found.it.ends_at);
    Ok(upgrade.on_upgrade(move |socket| NodeEnd { api, scope, node_id, session, ends_at, scopes, held }.run(socket)))
}

/// It lives as long as the session and mostly waits: questions that are asked now and then are in boxes, and leave no room behind.
pub(super) struct NodeEnd {
    api: NodeApi,
    scope: Scope,
    node_id: NodeId,
    session: TerminalSessionId,
    ends_at: Timestamp,
    /// Of its owner.
    scopes: Scopes,
    /// A proxy's connection is not the node's: what runs over it is cut here.
    held: Held,
}

impl NodeEnd {
    pub(super) async fn run(self, socket: WebSocket) {
        let services = self.api.services.clone();
        let (mut sink, stream) = socket.split();
        let (down, downs) = mpsc::channel(QUEUE);
        let here = services.terminals.take_in(self.session, down.clone());
        let is_over = tokio::select! {
            why = self.hear(stream, &here) => { debug!(why, "an agent's terminal stream ended"); false }
            () = self.keep_terms(&down) => false,
            why = speak(&mut sink, downs) => { debug!(why, "an agent's terminal stream ended"); false }
            () = here.gone() => false,
            () = self.held.cut() => false,
            () = services.stopping.cancelled() => false,
            _ = until_over(&services, self.session, self.ends_at, None) => true,
        };
        if is_over {
            let close = Message::Binary(Down::Close.encode().into());
            let _ = timeout(CLOSES_WITHIN, sink.send(close)).await;
        }
        let _ = timeout(CLOSES_WITHIN, sink.close()).await;
    }

    /// Looks every second whether the policies still say what the session was told, and has its machine say it where they do not. No
    /// question is asked for that as long as they do. It never ends.
    async fn keep_terms(&self, down: &mpsc::Sender<Down>) {
        let services = &self.api.services;
        let mut told: Option<Terms> = None;
        let mut look = interval(LOOKS_AT_POLICY_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            let by_policy = Terms::by_policy(&services.world.policy(), &self.scopes, services.world.now());
            if told == Some(by_policy) {
                continue;
            }
            match Box::pin(self.heed_policy()).await {
                Ok(terms) => {
                    // The agent was told the first terms with its task; once more does no harm.
                    let record = Down::Record { terms: on_the_wire(terms) };
                    if down.send(record).await.is_ok() {
                        told = Some(terms);
                    }
                }
                Err(error) => debug!(%error, "a terminal session could not be told of a policy"),
            }
        }
    }

    /// The terms as its machine has them then.
    async fn heed_policy(&self) -> Result<Terms, AskError<Rejection>> {
        let services = &self.api.services;
        let permit = authorize(&Principal::system(NODE_API), Action::Advance).map_err(|_| AskError::Denied)?;
        let asked = self.scope.asked(&permit, services.world.now() + ASK_WITHIN);
        let heed = terminal_session::Command::HeedPolicy;
        match services.directory.ask::<TerminalSession>(&permit, self.session.0, heed, asked).await?.reply {
            Reply::Session { session } => Ok(session.recording),
            Reply::Issued { .. } | Reply::Attached { .. } | Reply::Done => Ok(Terms::default()),
        }
    }

    async fn hear(&self, mut stream: SplitStream<WebSocket>, here: &crate::terminal::Stream) -> String {
        let silent_after = Duration::from_secs(SILENT_AFTER_SECONDS);
        let mut silent_at = Instant::now() + silent_after;
        loop {
            let message = tokio::select! {
                message = stream.next() => message,
                () = sleep_until(silent_at) => return "the agent says nothing".to_owned(),
            };
            let said = match message {
                Some(Ok(Message::Binary(bytes))) => Up::decode(&bytes),
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Text(_))) => {
                    silent_at = Instant::now() + silent_after;
                    continue;
                }
                Some(Ok(Message::Close(_))) | None => return "closed".to_owned(),
                Some(Err(error)) => return error.to_string(),
            };
            let said = match said {
                Ok(said) => said,
                Err(error) => return error.to_string(),
            };
            let over = match &said {
                Up::Exited { exit } => Some(ended(*exit)),
                Up::Lost => Some(terminal_session::Command::Lose),
                Up::Attached { .. } | Up::Output { .. } | Up::Taken { .. } | Up::Recording { .. } => None,
            };
            here.deliver(said).await;
            if let Some(over) = over {
                Box::pin(self.tell(over)).await;
            }
            // Counted from when it could be heard: whoever it was for may have been slow.
            silent_at = Instant::now() + silent_after;
        }
    }

    /// The agent says so again until it is told that the session is over.
    async fn tell(&self, command: terminal_session::Command) {
        let Ok(permit) = authorize(&Principal::Node(self.node_id), Action::SpeakForNode) else { return };
        let services = &self.api.services;
        let asked = self.scope.asked(&permit, services.world.now() + ASK_WITHIN).urgently();
        if let Err(error) = services.directory.ask::<TerminalSession>(&permit, self.session.0, command, asked).await {
            debug!(error = %error, "a terminal session could not be told of its program's end");
        }
    }
}

fn ended(exit: wire::terminal::Exit) -> terminal_session::Command {
    let exit = match exit {
        wire::terminal::Exit::Code(code) => Exit::Code(code),
        wire::terminal::Exit::Signal(signal) => Exit::Signal(signal),
    };
    terminal_session::Command::End { exit }
}

async fn speak(sink: &mut SplitSink<WebSocket, Message>, mut downs: mpsc::Receiver<Down>) -> String {
    let mut beat = interval(Duration::from_secs(SAYS_EVERY_SECONDS));
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            down = downs.recv() => match down {
                Some(down) => Message::Binary(down.encode().into()),
                None => return "nobody is here".to_owned(),
            },
            _ = beat.tick() => Message::Ping(Vec::new().into()),
        };
        let sending = async {
            sink.feed(message).await?;
            for _ in 0..TOGETHER {
                let Ok(down) = downs.try_recv() else { break };
                sink.feed(Message::Binary(down.encode().into())).await?;
            }
            sink.flush().await
        };
        match timeout(SENDS_WITHIN, sending).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return "the agent takes nothing".to_owned(),
        }
    }
}

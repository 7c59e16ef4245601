//! Closes terminal sessions: those of an allocation that is no longer active, and those of a node whose certificates were revoked.

use super::reactor::{Effect, Heard, Reactor};
use actors::place::command_id;
use actors::{AskError, CommandKey};
use domain::machine::Command as _;
use domain::terminal_session::{Command, Phase, TerminalSession};
use domain::{AllocationId, Kind, NodeId, TerminalSessionId};
use persistence::StoreError;
use persistence::read::ListFilter;

/// Sessions that are read at once: more live ones than any user may have.
const PAGE: u32 = 1000;

/// Closes them one by one, each once. A session that is opened from here on is refused by its own commit, which rests on the allocation
/// as it was while it was active; so none is missed.
pub(super) async fn close(by: &Reactor, heard: &Heard, allocation: AllocationId, user_id: &str) -> Effect {
    let live = live(by, Some(user_id), |session| session.allocation_id == allocation).await;
    close_each(by, heard, live, &Command::Revoke).await
}

/// The same of a node. A session that is opened from here on begins only where the node has proved anew who it is.
pub(super) async fn cut(by: &Reactor, heard: &Heard, node: NodeId) -> Effect {
    let live = live(by, None, |session| session.node_id == node).await;
    close_each(by, heard, live, &Command::CutOff).await
}

async fn close_each(
    by: &Reactor,
    heard: &Heard,
    sessions: Result<Vec<TerminalSessionId>, StoreError>,
    command: &Command,
) -> Effect {
    let sessions = match sessions {
        Ok(sessions) => sessions,
        Err(error) => return Effect::Later { why: error.to_string() },
    };
    for session in sessions {
        let id = command_id(&[b"event", heard.id.0.as_bytes(), command.name().as_bytes(), session.0.as_bytes()]);
        // The row goes with the last of them.
        let key = CommandKey { id, consumes: None, ..CommandKey::of_event(heard.id, command.name()) };
        let asked = by.asked(heard).once(key);
        match by.directory.ask::<TerminalSession>(&by.permit, session.0, command.clone(), asked).await {
            Ok(_) | Err(AskError::AlreadyDone) => {}
            Err(AskError::Rejected(rejection)) => tracing::warn!("a terminal session was not closed: {rejection}"),
            Err(error) => return Effect::Later { why: error.to_string() },
        }
    }
    by.settle(heard).await
}

/// The sessions that may have a shell, of that owner or of everybody, as far as they are meant.
async fn live(
    by: &Reactor,
    owner: Option<&str>,
    is_meant: impl Fn(&TerminalSession) -> bool,
) -> Result<Vec<TerminalSessionId>, StoreError> {
    let states = Phase::LIVE.map(str::to_owned).into();
    let filter = ListFilter { owner: owner.map(str::to_owned), states, ..ListFilter::default() };
    let (mut live, mut after) = (Vec::new(), None);
    loop {
        let page = by.reads.list(Kind::TerminalSession, &filter, after, PAGE).await?;
        let sessions = page.items.iter().filter_map(|row| serde_json::from_str::<TerminalSession>(&row.body).ok());
        live.extend(sessions.filter(|session| is_meant(session)).map(|session| session.id));
        after = page.next;
        if after.is_none() {
            return Ok(live);
        }
    }
}

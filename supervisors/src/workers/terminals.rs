//! Closes the terminal sessions of an allocation that is no longer active.

use super::reactor::{Effect, Heard, Reactor};
use actors::place::command_id;
use actors::{AskError, CommandKey};
use domain::machine::Command as _;
use domain::terminal_session::{Command, Phase, TerminalSession};
use domain::{AllocationId, Kind, TerminalSessionId};
use persistence::StoreError;
use persistence::read::ListFilter;

/// More live sessions than any user may have.
const ALL: u32 = 1000;

/// Closes them one by one, each once. A session that is opened from here on is refused by its own commit, which rests on the allocation
/// as it was while it was active; so none is missed.
pub(super) async fn close(by: &Reactor, heard: &Heard, allocation: AllocationId, user_id: &str) -> Effect {
    let sessions = match live(by, allocation, user_id).await {
        Ok(sessions) => sessions,
        Err(error) => return Effect::Later { why: error.to_string() },
    };
    for session in sessions {
        let command = Command::Revoke;
        let id = command_id(&[b"event", heard.id.0.as_bytes(), command.name().as_bytes(), session.0.as_bytes()]);
        // The row goes with the last of them.
        let key = CommandKey { id, consumes: None, ..CommandKey::of_event(heard.id, command.name()) };
        let asked = by.asked(heard).once(key);
        match by.directory.ask::<TerminalSession>(&by.permit, session.0, command, asked).await {
            Ok(_) | Err(AskError::AlreadyDone) => {}
            Err(AskError::Rejected(rejection)) => tracing::warn!("a terminal session was not closed: {rejection}"),
            Err(error) => return Effect::Later { why: error.to_string() },
        }
    }
    by.settle(heard).await
}

async fn live(by: &Reactor, allocation: AllocationId, user_id: &str) -> Result<Vec<TerminalSessionId>, StoreError> {
    let mut live = Vec::new();
    for state in Phase::LIVE {
        let filter = ListFilter { owner: Some(user_id.to_owned()), state: Some(state.to_owned()), sku: None };
        let rows = by.reads.list(Kind::TerminalSession, &filter, None, ALL).await?.items;
        let sessions = rows.iter().filter_map(|row| serde_json::from_str::<TerminalSession>(&row.body).ok());
        live.extend(sessions.filter(|session| session.allocation_id == allocation).map(|session| session.id));
    }
    Ok(live)
}

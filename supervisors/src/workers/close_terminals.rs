//! Closes terminal sessions: those of an allocation that is not active, those of a node whose certificates were revoked, and those of a
//! browser session that has ended.
//!
//! A row that cannot be read may be one of them. Its entity is asked, which may have it in memory; the instruction names what it has to belong to.

use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use actors::sharding::command_id;
use actors::{AskError, CommandKey};
use domain::state_machine::CommandSort as _;
use domain::terminal_session::{Instruction, Phase, TerminalSession};
use domain::{AllocationId, BrowserSessionId, EntityKind, NodeId, TerminalSessionId, UserId};
use persistence::StoreError;
use persistence::queries::ListFilter;

#[cfg(test)]
mod tests;

/// Sessions that are read at once: more than any user may have live.
const PAGE_SIZE: u32 = 1000;

/// Closes the sessions of an allocation, each once. A session that is opened from here on is refused by its own commit, whose
/// precondition is the version of the active allocation; so none is missed.
pub(super) async fn revoke_sessions(
    by: &ReactionContext,
    delivery: &EventDelivery,
    allocation: AllocationId,
    user_id: &UserId,
) -> Disposition {
    let live = live_sessions(by, Some(user_id), |session| session.allocation_id == allocation).await;
    close_each(by, delivery, live, |session| Instruction::Revoke { allocation_id: session.named(allocation) }).await
}

/// The same for a node. A session that is opened from here on starts only where the node has proved its identity again.
pub(super) async fn cut_sessions(by: &ReactionContext, delivery: &EventDelivery, node: NodeId) -> Disposition {
    let live = live_sessions(by, None, |session| session.node_id == node).await;
    close_each(by, delivery, live, |session| Instruction::CutOff { node_id: session.named(node) }).await
}

/// The same for a browser session. A session that is opened from here on is refused when its user connects.
pub(super) async fn log_out_sessions(
    by: &ReactionContext,
    delivery: &EventDelivery,
    browser_session_id: BrowserSessionId,
    user_id: &UserId,
) -> Disposition {
    let live = live_sessions(by, Some(user_id), |session| session.is_of_login(browser_session_id)).await;
    close_each(by, delivery, live, |_| Instruction::LogOut { browser_session_id }).await
}

/// A session that may have a shell, and is to be closed, or whose row cannot be read.
struct ListedSession {
    id: TerminalSessionId,
    is_readable: bool,
}

impl ListedSession {
    /// What the instruction names: the session's entity compares it where its row cannot be read here.
    fn named<T>(&self, id: T) -> Option<T> {
        if self.is_readable { None } else { Some(id) }
    }
}

/// One that cannot be closed yet does not keep the others open: the event is delivered again for it.
async fn close_each(
    by: &ReactionContext,
    delivery: &EventDelivery,
    sessions: Result<Vec<ListedSession>, StoreError>,
    instruction_for: impl Fn(&ListedSession) -> Instruction,
) -> Disposition {
    let sessions = match sessions {
        Ok(sessions) => sessions,
        Err(error) => return Disposition::Later { why: error.to_string() },
    };
    let mut waits: Option<String> = None;
    for session in sessions {
        let (id, instruction) = (session.id, instruction_for(&session));
        if !session.is_readable {
            tracing::warn!("the row of terminal session {id} cannot be read; its entity decides whether it is closed");
        }
        let command = command_id(&[b"event", delivery.id.0.as_bytes(), instruction.tag().as_bytes(), id.0.as_bytes()]);
        // The outbox row is settled after the last of them.
        let key = CommandKey { id: command, consumes: None, ..CommandKey::for_event(delivery.id, instruction.tag()) };
        let context = by.context_for(delivery).with_key(key);
        match by.directory.ask::<TerminalSession>(&by.permit, id.0, instruction.into(), context).await {
            Ok(_) | Err(AskError::AlreadyDone) => {}
            Err(AskError::Rejected(rejection)) => tracing::warn!("a terminal session was not closed: {rejection}"),
            Err(error) => waits = waits.or_else(|| Some(format!("terminal session {id}: {error}"))),
        }
    }
    match waits {
        Some(why) => Disposition::Later { why },
        None => by.settle(delivery).await,
    }
}

/// The sessions that may have a shell, of that owner or of all: those for which `is_meant` holds, and those that cannot be read, or whose
/// seal does not hold.
async fn live_sessions(
    by: &ReactionContext,
    owner: Option<&str>,
    is_meant: impl Fn(&TerminalSession) -> bool,
) -> Result<Vec<ListedSession>, StoreError> {
    let states = Phase::LIVE.map(str::to_owned).into();
    let filter = ListFilter { owner: owner.map(str::to_owned), states, ..ListFilter::default() };
    let (mut live, mut after) = (Vec::new(), None);
    loop {
        let page = by.reads.list(EntityKind::TerminalSession, &filter, after, PAGE_SIZE).await?;
        for listed in &page.items {
            let body = listed.row.as_ref().ok().map(|row| row.body.as_str());
            let session = body.and_then(|body| serde_json::from_str::<TerminalSession>(body).ok());
            if session.as_ref().is_none_or(&is_meant) {
                let id = TerminalSessionId(listed.entity.id);
                live.push(ListedSession { id, is_readable: session.is_some() });
            }
        }
        after = page.next;
        if after.is_none() {
            return Ok(live);
        }
    }
}

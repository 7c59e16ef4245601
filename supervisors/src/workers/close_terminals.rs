//! Closes terminal sessions: those of an allocation that is not active, and those of a node whose certificates were revoked.

use super::event_delivery::{Disposition, EventDelivery, ReactionContext};
use actors::sharding::command_id;
use actors::{AskError, CommandKey};
use domain::state_machine::CommandSort as _;
use domain::terminal_session::{Fact, Phase, TerminalSession};
use domain::{AllocationId, EntityKind, NodeId, TerminalSessionId, UserId};
use persistence::StoreError;
use persistence::queries::ListFilter;

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
    close_each(by, delivery, live, &Fact::Revoke).await
}

/// The same for a node. A session that is opened from here on starts only where the node has proved its identity again.
pub(super) async fn cut_sessions(by: &ReactionContext, delivery: &EventDelivery, node: NodeId) -> Disposition {
    let live = live_sessions(by, None, |session| session.node_id == node).await;
    close_each(by, delivery, live, &Fact::CutOff).await
}

async fn close_each(
    by: &ReactionContext,
    delivery: &EventDelivery,
    sessions: Result<Vec<TerminalSessionId>, StoreError>,
    fact: &Fact,
) -> Disposition {
    let sessions = match sessions {
        Ok(sessions) => sessions,
        Err(error) => return Disposition::Later { why: error.to_string() },
    };
    for session in sessions {
        let id = command_id(&[b"event", delivery.id.0.as_bytes(), fact.tag().as_bytes(), session.0.as_bytes()]);
        // The outbox row is settled after the last of them.
        let key = CommandKey { id, consumes: None, ..CommandKey::for_event(delivery.id, fact.tag()) };
        let context = by.context_for(delivery).with_key(key);
        match by.directory.ask::<TerminalSession>(&by.permit, session.0, fact.clone().into(), context).await {
            Ok(_) | Err(AskError::AlreadyDone) => {}
            Err(AskError::Rejected(rejection)) => tracing::warn!("a terminal session was not closed: {rejection}"),
            Err(error) => return Disposition::Later { why: error.to_string() },
        }
    }
    by.settle(delivery).await
}

/// The sessions that may have a shell, of that owner or of all, for which `is_meant` holds.
async fn live_sessions(
    by: &ReactionContext,
    owner: Option<&str>,
    is_meant: impl Fn(&TerminalSession) -> bool,
) -> Result<Vec<TerminalSessionId>, StoreError> {
    let states = Phase::LIVE.map(str::to_owned).into();
    let filter = ListFilter { owner: owner.map(str::to_owned), states, ..ListFilter::default() };
    let (mut live, mut after) = (Vec::new(), None);
    loop {
        let page = by.reads.list(EntityKind::TerminalSession, &filter, after, PAGE_SIZE).await?;
        let sessions = page.items.iter().filter_map(|row| serde_json::from_str::<TerminalSession>(&row.body).ok());
        live.extend(sessions.filter(|session| is_meant(session)).map(|session| session.id));
        after = page.next;
        if after.is_none() {
            return Ok(live);
        }
    }
}

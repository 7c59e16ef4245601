//! The members that have the connections of terminal sessions, as terms: where a member has ended, its sessions are found by them.

use super::{Phase, TerminalSession};
use crate::id::MemberId;
use uuid::Uuid;

/// How the term of an attached session begins; the id of the member with its connection follows.
pub const GATEWAY_TERM: &str = "gateway/";

/// The term of every session that has its connection at this member.
#[must_use]
pub fn gateway_term(gateway: MemberId) -> String {
    format!("{GATEWAY_TERM}{gateway}")
}

/// The member of a term; `None` where it is another one's.
#[must_use]
pub fn gateway_of_term(term: &str) -> Option<MemberId> {
    let id = term.strip_prefix(GATEWAY_TERM)?;
    Uuid::parse_str(id).ok().map(MemberId)
}

impl TerminalSession {
    /// The member that has its connection. `None` where it has none, or a member of an earlier release has admitted it.
    #[must_use]
    pub const fn gateway(&self) -> Option<MemberId> {
        match self.phase {
            Phase::Attached { gateway, .. } => gateway,
            Phase::Opened { .. } | Phase::Detached { .. } | Phase::Closed { .. } => None,
        }
    }
}

//! Close codes (decisions 5), each with a reason phrase.

use crate::websocket::Close;
pub(in crate::terminal_gateway) use crate::websocket::{REVOKED, TOKEN};
use domain::terminal_session::CloseReason;

pub(in crate::terminal_gateway) const LIFETIME: Close = (4408, "lifetime");
pub(in crate::terminal_gateway) const REPLACED: Close = (4409, "replaced");
pub(in crate::terminal_gateway) const EXITED: Close = (1000, "exited");
/// A session without a connection expired: a connection that arrives at that moment gets this code.
const DETACHED: Close = (4408, "no connection came back in time");
/// Its user wanted it, as with the end of its program.
const ENDED: Close = (1000, "ended by its user");
const FAILED: Close = (1011, "the node could not run the session, or lost it; open another");
pub(in crate::terminal_gateway) const RESTARTS: Close = (1012, "connect again with a new token");
pub(in crate::terminal_gateway) const AWAY: Close = (1013, "the node cannot be reached; connect again later");

pub(in crate::terminal_gateway) const fn of(reason: &CloseReason) -> Close {
    match reason {
        CloseReason::Exited { .. } => EXITED,
        CloseReason::Failed { .. } => FAILED,
        CloseReason::NeverAttached => TOKEN,
        CloseReason::Killed | CloseReason::AllocationEnded => REVOKED,
        CloseReason::Lifetime => LIFETIME,
        CloseReason::DetachedExpired | CloseReason::Displaced => DETACHED,
        CloseReason::EndedByUser => ENDED,
    }
}

/// As [`of`], of a reason's code.
pub(in crate::terminal_gateway) fn of_code(code: &str) -> Close {
    match code {
        "exited" => EXITED,
        "failed" => FAILED,
        "never_attached" => TOKEN,
        "lifetime" => LIFETIME,
        "detached_expired" | "displaced" => DETACHED,
        "ended_by_user" => ENDED,
        _ => REVOKED,
    }
}

//! Close codes (decisions 5), each with a reason phrase.

use crate::http::websocket::Close;
pub(in crate::terminal_gateway) use crate::http::websocket::{REVOKED, TOKEN};
use domain::terminal_session::CloseCode;

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

pub(in crate::terminal_gateway) const fn of(reason: CloseCode) -> Close {
    match reason {
        CloseCode::Exited => EXITED,
        CloseCode::Failed => FAILED,
        CloseCode::NeverAttached => TOKEN,
        CloseCode::Killed | CloseCode::AllocationEnded | CloseCode::LoggedOut => REVOKED,
        CloseCode::Lifetime => LIFETIME,
        CloseCode::DetachedExpired | CloseCode::Displaced => DETACHED,
        CloseCode::EndedByUser => ENDED,
    }
}

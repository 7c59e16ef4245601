//! When an end of a session has to be closed: the session is over, or another connection took its place.

use crate::api::current;
use crate::services::Services;
use domain::TerminalSessionId;
use domain::terminal_session::{CloseReason, TerminalSession};
use std::time::Duration;

/// How often a session is looked at by whoever holds an end of it. Usually it is told at once; a word may be lost.
const LOOKS_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Closed(CloseReason),
    /// Another connection came.
    Replaced,
}

/// Until the session is over, or has let in a later connection than `attachment`. Its lifetime is kept to here, whoever else sleeps.
pub(crate) async fn until_over(services: &Services, session: TerminalSessionId, attachment: Option<u32>) -> Ending {
    let wait = services.terminals.waits().park(session);
    loop {
        // Before the look: what happens meanwhile is not missed.
        let woken = wait.woken();
        let mut look_again = LOOKS_EVERY;
        // In a box: most of the time it is not being looked at, and the wait is long.
        match Box::pin(current::<TerminalSession>(services, session.0)).await {
            Ok(Some(found)) => {
                if let Some(reason) = found.it.closed() {
                    return Ending::Closed(reason.clone());
                }
                if attachment.is_some_and(|attachment| found.it.attachments > attachment) {
                    return Ending::Replaced;
                }
                let left = found.it.ends_at - services.world.now();
                match left.to_std() {
                    Ok(left) if !left.is_zero() => look_again = look_again.min(left),
                    Ok(_) | Err(_) => return Ending::Closed(CloseReason::Lifetime),
                }
            }
            // A database that was restored has forgotten it.
            Ok(None) => return Ending::Closed(CloseReason::Failed { code: "unknown".to_owned() }),
            Err(error) => tracing::debug!(%error, "a terminal session cannot be looked at now"),
        }
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep(look_again) => {}
        }
    }
}

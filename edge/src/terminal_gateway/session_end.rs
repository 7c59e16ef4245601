//! When a connection of a session has to be closed: the session is over, another connection replaced it, or it counts as gone.

use crate::app_state::AppState;
use crate::app_state::read_model::current;
use domain::TerminalSessionId;
use domain::state_machine::Timestamp;
use domain::terminal_session::{CloseReason, Phase, TerminalSession};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::cmp::Ordering;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// How often a connection loads its session. Usually it is woken at once; a wake-up may be lost.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SessionEnd {
    Closed(CloseReason),
    /// A later connection was admitted.
    Replaced,
    /// It counts as gone: this member was taken for an ended one.
    Detached,
}

/// Completes when the session is over, has admitted a later connection than `attachment`, or counts as having none. The session's fixed
/// lifetime is enforced here, also while the session's entity or the store cannot be reached.
pub(crate) async fn until_session_ends(
    app: &AppState,
    session: TerminalSessionId,
    ends_at: Timestamp,
    attachment: Option<u32>,
) -> SessionEnd {
    let wait = app.terminals.waits().park(session);
    let load = || {
        // Boxed: most of the time nothing is loaded, and the wait is long.
        let found = current::<TerminalSession>(app, session.0);
        found.map(|found| found.map(|found| found.map(|found| found.it))).boxed()
    };
    watch(ends_at, attachment, || app.environment.now(), || wait.woken(), load).await
}

async fn watch<'a, W: Future<Output = ()>, E: Display>(
    ends_at: Timestamp,
    attachment: Option<u32>,
    now: impl Fn() -> Timestamp,
    woken: impl Fn() -> W,
    load: impl Fn() -> BoxFuture<'a, Result<Option<Arc<TerminalSession>>, E>>,
) -> SessionEnd {
    loop {
        let left = (ends_at - now()).to_std().unwrap_or_default();
        if left.is_zero() {
            return SessionEnd::Closed(CloseReason::Lifetime);
        }
        // Registered before loading: a change meanwhile is not missed.
        let woken = woken();
        match timeout(left, load()).await {
            Ok(Ok(found)) => {
                if let Some(ending) = session_end(found.as_deref(), attachment) {
                    return ending;
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "a terminal session could not be loaded"),
            Err(_) => continue,
        }
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep(CHECK_INTERVAL.min(left)) => {}
        }
    }
}

fn session_end(found: Option<&TerminalSession>, attachment: Option<u32>) -> Option<SessionEnd> {
    // A database that was restored has forgotten it.
    let Some(session) = found else {
        return Some(SessionEnd::Closed(CloseReason::Failed { code: "unknown".to_owned() }));
    };
    if let Some(reason) = session.closed() {
        return Some(SessionEnd::Closed(reason.clone()));
    }
    match session.attachments.cmp(&attachment?) {
        // An earlier state than that of this connection says nothing.
        Ordering::Less => None,
        Ordering::Equal => matches!(session.phase, Phase::Detached { .. }).then_some(SessionEnd::Detached),
        Ordering::Greater => Some(SessionEnd::Replaced),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use tokio::time::Instant;

    const LIFETIME: Duration = Duration::from_millis(300);

    /// The outcome of watching a session for which this is loaded.
    async fn watched(
        load: impl Fn() -> BoxFuture<'static, Result<Option<Arc<TerminalSession>>, &'static str>>,
    ) -> (SessionEnd, Duration) {
        let began = Instant::now();
        let now = || Timestamp::UNIX_EPOCH + began.elapsed();
        let ending = watch(Timestamp::UNIX_EPOCH + LIFETIME, Some(1), now, pending, load);
        let ending = timeout(CHECK_INTERVAL / 2, ending).await.expect("it ends with the lifetime");
        (ending, began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn lifetime_ends_a_session_that_cannot_be_loaded() {
        let (refused, after) = watched(|| ready(Err("the database is away")).boxed()).await;
        assert_eq!(refused, SessionEnd::Closed(CloseReason::Lifetime));
        assert!(after >= LIFETIME, "{after:?}");
        let (hanging, _) = watched(|| pending().boxed()).await;
        assert_eq!(hanging, SessionEnd::Closed(CloseReason::Lifetime));
    }

    #[tokio::test(start_paused = true)]
    async fn session_missing_after_a_restore_ends_at_once() {
        let (ending, after) = watched(|| ready(Ok(None)).boxed()).await;
        assert_eq!(ending, SessionEnd::Closed(CloseReason::Failed { code: "unknown".to_owned() }));
        assert!(after < LIFETIME, "{after:?}");
    }
}

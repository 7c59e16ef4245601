//! When an end of a session has to be closed: the session is over, or another connection took its place.

use crate::api::current;
use crate::services::Services;
use domain::TerminalSessionId;
use domain::machine::Timestamp;
use domain::terminal_session::{CloseReason, TerminalSession};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// How often a session is looked at by whoever holds an end of it. Usually it is told at once; a word may be lost.
const LOOKS_EVERY: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Closed(CloseReason),
    /// Another connection came.
    Replaced,
}

/// Until the session is over, or has let in a later connection than `attachment`. Its lifetime, which was fixed at its beginning, is kept to
/// here, whoever else sleeps and whatever cannot be asked.
pub(crate) async fn until_over(
    services: &Services,
    session: TerminalSessionId,
    ends_at: Timestamp,
    attachment: Option<u32>,
) -> Ending {
    let wait = services.terminals.waits().park(session);
    let look = || {
        // In a box: most of the time it is not being looked at, and the wait is long.
        let found = current::<TerminalSession>(services, session.0);
        found.map(|found| found.map(|found| found.map(|found| found.it))).boxed()
    };
    watch(ends_at, attachment, || services.world.now(), || wait.woken(), look).await
}

async fn watch<'a, W: Future<Output = ()>, E: Display>(
    ends_at: Timestamp,
    attachment: Option<u32>,
    now: impl Fn() -> Timestamp,
    woken: impl Fn() -> W,
    look: impl Fn() -> BoxFuture<'a, Result<Option<Arc<TerminalSession>>, E>>,
) -> Ending {
    loop {
        let left = (ends_at - now()).to_std().unwrap_or_default();
        if left.is_zero() {
            return Ending::Closed(CloseReason::Lifetime);
        }
        // Before the look: what happens meanwhile is not missed.
        let woken = woken();
        match timeout(left, look()).await {
            Ok(Ok(found)) => {
                if let Some(ending) = ending_of(found.as_deref(), attachment) {
                    return ending;
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "a terminal session cannot be looked at now"),
            Err(_) => continue,
        }
        tokio::select! {
            () = woken => {}
            () = tokio::time::sleep(LOOKS_EVERY.min(left)) => {}
        }
    }
}

fn ending_of(found: Option<&TerminalSession>, attachment: Option<u32>) -> Option<Ending> {
    // A database that was restored has forgotten it.
    let Some(session) = found else { return Some(Ending::Closed(CloseReason::Failed { code: "unknown".to_owned() })) };
    if let Some(reason) = session.closed() {
        return Some(Ending::Closed(reason.clone()));
    }
    attachment.is_some_and(|attachment| session.attachments > attachment).then_some(Ending::Replaced)
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use super::*;
    use std::future::{pending, ready};
    use tokio::time::Instant;

    const LIFETIME: Duration = Duration::from_millis(300);

    /// What comes of watching a session of which this is found.
    async fn watched(
        look: impl Fn() -> BoxFuture<'static, Result<Option<Arc<TerminalSession>>, &'static str>>,
    ) -> (Ending, Duration) {
        let began = Instant::now();
        let now = || Timestamp::UNIX_EPOCH + began.elapsed();
        let ending = watch(Timestamp::UNIX_EPOCH + LIFETIME, Some(1), now, pending, look);
        let ending = timeout(LOOKS_EVERY / 2, ending).await.expect("it ends with the lifetime");
        (ending, began.elapsed())
    }

    #[tokio::test]
    async fn a_lifetime_ends_though_nobody_can_say_what_became_of_the_session() {
        let (refused, after) = watched(|| ready(Err("the database is away")).boxed()).await;
        assert_eq!(refused, Ending::Closed(CloseReason::Lifetime));
        assert!(after >= LIFETIME, "{after:?}");
        let (hanging, _) = watched(|| pending().boxed()).await;
        assert_eq!(hanging, Ending::Closed(CloseReason::Lifetime));
    }

    #[tokio::test]
    async fn a_session_that_a_restored_database_has_forgotten_is_over_at_once() {
        let (ending, after) = watched(|| ready(Ok(None)).boxed()).await;
        assert_eq!(ending, Ending::Closed(CloseReason::Failed { code: "unknown".to_owned() }));
        assert!(after < LIFETIME, "{after:?}");
    }
}

//! The attachment of a user's connection to a terminal session, from its admission to its end.
//!
//! A connection can end at each point after its admission: the client leaves before the answer, the upgrade fails, the connection breaks off.
//! Each of these drops the [`Attachment`], and its drop reports the end.

use super::ask;
use crate::app_state::AppState;
use crate::http::correlation::Scope;
use actors::AskError;
use domain::TerminalSessionId;
use domain::retry;
use domain::state_machine::Timestamp;
use domain::terminal_session::{Instruction, TerminalSession};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::sleep;

/// The pause after a first report of the connection's end that failed; it doubles with each further one.
const DETACH_PAUSE: Duration = Duration::from_secs(1);
const MAX_DETACH_PAUSE: Duration = Duration::from_secs(30);

/// The attachment of that number. The session is detached when this is dropped. Where this process ends before that is stored, the worker
/// `terminal-gateways` detaches the session.
pub(super) struct Attachment {
    pub(super) number: u32,
    reporter: Option<Reporter>,
}

/// Reports the end of an attachment.
struct Reporter {
    app: AppState,
    scope: Scope,
    session: TerminalSessionId,
    ends_at: Timestamp,
}

impl Attachment {
    pub(super) fn new(app: AppState, scope: Scope, session: &TerminalSession, number: u32) -> Self {
        Self { number, reporter: Some(Reporter { app, scope, session: session.id, ends_at: session.ends_at }) }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if let (Some(reporter), Ok(runtime)) = (self.reporter.take(), Handle::try_current()) {
            runtime.spawn(reporter.detach(self.number));
        }
    }
}

impl Reporter {
    /// Sends the report until it is stored, or the session is over.
    async fn detach(self, attachment: u32) {
        let mut failures = 0;
        loop {
            match ask(&self.app, &self.scope, self.session, Instruction::Detach { attachment }).await {
                Ok(_) | Err(AskError::Rejected(_)) => return,
                Err(error) => tracing::debug!(%error, "a terminal's connection could not be detached"),
            }
            if self.app.environment.now() >= self.ends_at {
                return;
            }
            failures += 1;
            // An outage of the database makes many connections wait together.
            let jitter = DETACH_PAUSE.mul_f64(rand::random());
            tokio::select! {
                () = sleep(retry::pause(DETACH_PAUSE, failures, MAX_DETACH_PAUSE) + jitter) => {}
                () = self.app.stopping.cancelled() => return,
            }
        }
    }
}

//! The task `agent.update`: the agent that began it leaves it open when it is restarted, and the one that runs afterwards reports it.

use std::sync::Arc;
use std::time::Duration;

use tracing::{Instrument as _, info, warn};
use uuid::Uuid;
use wire::task::{TaskOrigin, TaskPayload, UpdateAgent};

use super::execute::{AttemptStage, Effect, outcome};
use super::{Agent, locked};
use crate::agent_update::{Begun, in_use};
use crate::bounded_reading::BoundedReading;
use crate::chain;
use crate::task_journal::JournalEntry;
use crate::task_outcome::TaskFailure;

/// How often the outcome is looked for.
const PAUSE: Duration = Duration::from_millis(300);

impl Agent {
    /// Begins the update and waits for its outcome. `None` where the agent is stopped before: the next one reports it.
    pub(super) async fn update_agent(&self, task_id: Uuid, task: UpdateAgent) -> Option<Result<Effect, TaskFailure>> {
        let updates = Arc::clone(&self.updates);
        let digest = task.digest;
        let begun = tokio::task::spawn_blocking(move || updates.begin(task_id, &task)).await;
        match begun {
            Ok(Ok(Begun::InUse)) => Some(Ok(Effect::plain(in_use(env!("CARGO_PKG_VERSION"), digest)))),
            Ok(Ok(Begun::Started)) => {
                info!(%digest, "the finalizer carries the update out");
                self.update_outcome(task_id).await
            }
            Ok(Err(failure)) => Some(Err(failure)),
            Err(panic) => Some(Err(TaskFailure::new("executor_panicked", panic.to_string()))),
        }
    }

    /// Waits for the outcome of the update that an earlier process began, and reports it.
    pub(super) fn spawn_update_outcome(self: &Arc<Self>, payload: TaskPayload, origin: TaskOrigin) {
        let agent = Arc::clone(self);
        let (task_id, attempt) = (payload.task_id, payload.attempt);
        if locked(&self.in_flight).insert((task_id, attempt), AttemptStage::Executing).is_some() {
            return;
        }
        self.tasks.spawn(
            async move {
                agent.continue_update().await;
                let found = agent.update_outcome(task_id).await;
                if let Some(found) = found {
                    let now = agent.clock.now();
                    let result = outcome(&payload, found, now, now);
                    match &result.error {
                        None => info!("the update of the agent is complete"),
                        Some(error) => {
                            warn!(error_code = error.code, error = error.message, "the update of the agent has failed");
                        }
                    }
                    if agent.append_to_journal(JournalEntry::Done { task_id, result: result.clone() }).await {
                        locked(&agent.in_flight).insert((task_id, attempt), AttemptStage::Reporting);
                        agent.report(task_id, result, &origin).await;
                    }
                }
                locked(&agent.in_flight).remove(&(task_id, attempt));
            }
            .instrument(tracing::Span::current()),
        );
    }

    /// An agent that was killed may have left a record and no finalizer.
    async fn continue_update(&self) {
        let updates = Arc::clone(&self.updates);
        let started = tokio::task::spawn_blocking(move || match updates.is_updating() {
            true => updates.start_finalizer(),
            false => Ok(()),
        });
        if let Ok(Err(failure)) = started.await {
            warn!(error_code = failure.code, error = failure.message, "the update is not continued");
        }
    }

    /// `None` where the agent is stopped before.
    async fn update_outcome(&self, task_id: Uuid) -> Option<Result<Effect, TaskFailure>> {
        loop {
            match self.updates.outcome(task_id) {
                Ok(None) => {}
                Ok(Some(output)) => return Some(Ok(Effect::plain(output))),
                Err(failure) => return Some(Err(failure)),
            }
            if !self.pause(PAUSE).await {
                return None;
            }
        }
    }

    /// After an answered heartbeat.
    pub(super) async fn prove_update(&self, proof: &mut BoundedReading<()>) {
        let updates = Arc::clone(&self.updates);
        let prove = move || {
            if let Err(error) = updates.prove() {
                warn!(error_code = "update_proof", error = chain(&error), "the finalizer gets no proof; trying again");
            }
        };
        // The next heartbeat looks for it where it is late.
        proof.read(prove).await;
    }
}

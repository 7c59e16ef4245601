//! The execution of a task and the delivery of its result.
//!
//! ```text
//! accepted -> [waits for the allocation's task before it] -> started* -> effect -> done* -> reported       (* synced)
//! ```

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::StatusCode;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tracing::{Instrument as _, error, info, warn};
use uuid::Uuid;
use wire::proof::{CleanupReport, Finding};
use wire::task::{Envelope, Origin, Reboot, Release, Task, TaskError, TaskPayload, TaskResult, TaskStatus};

use super::poll::scope_of;
use super::{Agent, BACKOFF_BASE, Fatal, held};
use crate::api::ApiError;
use crate::backoff::Backoff;
use crate::chain;
use crate::diagnose;
use crate::executor::{Executor, Failure, Output};
use crate::journal::{Ended, Line, Phase};
use crate::plan::{Plan, plan};

const REPORT_BACKOFF_MAX: Duration = Duration::from_secs(30);

/// How far this process is with an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Executing,
    Reporting,
}

/// The tail of an allocation's queue: resolves when the task that holds the other end is over.
pub(super) struct Lane {
    last: (Uuid, u32),
    over: oneshot::Receiver<()>,
}

/// A task's place in its allocation's queue. Dropping it lets the next one go on.
struct Place {
    before: Option<oneshot::Receiver<()>>,
    _over: Option<oneshot::Sender<()>>,
}

impl Agent {
    /// Goes on with what the journal says is unfinished.
    pub(super) fn resume(self: &Arc<Self>) {
        for record in self.journal.unreported() {
            let payload = record.payload.clone();
            let (span, origin) = scope_of(&payload, &Uuid::now_v7().to_string());
            let _entered = span.enter();
            match plan(record.attempt, payload.task.is_idempotent(), Some(&record), false) {
                Plan::Resend(result) => {
                    info!("a result from before the restart is sent again");
                    self.spawn_report(payload.task_id, result, origin);
                }
                Plan::Execute if payload.expires_at <= Utc::now() => {
                    warn!(error_code = "task_expired", "the task expired before its end; the control plane decides");
                }
                Plan::Execute => {
                    info!(was_started = record.phase == Phase::Started, "a task from before the restart goes on");
                    self.spawn_execution(payload, origin, None);
                }
                Plan::OutcomeUnknown => self.spawn_unknown_outcome(payload, origin),
                Plan::UnderWay | Plan::Stale { .. } => {}
            }
        }
    }

    pub(super) fn is_under_way(&self, task_id: Uuid, attempt: u32) -> bool {
        held(&self.under_way).contains_key(&(task_id, attempt))
    }

    /// Executes and reports beside the polling. `slot` bounds how many execute at once; a task from before a restart has
    /// none yet.
    pub(super) fn spawn_execution(
        self: &Arc<Self>,
        payload: TaskPayload,
        origin: Origin,
        slot: Option<OwnedSemaphorePermit>,
    ) {
        let agent = Arc::clone(self);
        let key = (payload.task_id, payload.attempt);
        held(&self.under_way).insert(key, Stage::Executing);
        // Taken here, so that the order of arrival is the order of execution.
        let place = self.queue_up(&payload);
        self.tasks.spawn(
            async move {
                if let Some(result) = agent.execute(&payload, place, slot).await {
                    agent.report(payload.task_id, result, &origin).await;
                }
                held(&agent.under_way).remove(&key);
            }
            .instrument(tracing::Span::current()),
        );
    }

    /// Sends a stored result again, unless that is under way.
    pub(super) fn spawn_report(self: &Arc<Self>, task_id: Uuid, result: TaskResult, origin: Origin) {
        let key = (task_id, result.attempt);
        if held(&self.under_way).insert(key, Stage::Reporting).is_some() {
            return;
        }
        let agent = Arc::clone(self);
        self.tasks.spawn(
            async move {
                agent.report(task_id, result, &origin).await;
                held(&agent.under_way).remove(&key);
            }
            .instrument(tracing::Span::current()),
        );
    }

    /// Says of a task that must not happen twice that nobody knows whether it happened.
    pub(super) fn spawn_unknown_outcome(self: &Arc<Self>, payload: TaskPayload, origin: Origin) {
        let known = match &payload.task {
            Task::Reboot(reboot) => restarted(reboot, self.boot_id),
            Task::Provision(_)
            | Task::Release(_)
            | Task::ReconcileSshKeys(_)
            | Task::OpenTerminal(_)
            | Task::Validate {}
            | Task::Diagnose {} => None,
        };
        let unknown = || Err(Failure::new("outcome_unknown", "the agent ended while the task was under way"));
        let now = Utc::now();
        let result = outcome(&payload, known.unwrap_or_else(unknown), now, now);
        let agent = Arc::clone(self);
        self.tasks.spawn(
            async move {
                if agent.write(Line::Done { task_id: payload.task_id, result: result.clone() }).await {
                    agent.spawn_report(payload.task_id, result, origin);
                }
            }
            .instrument(tracing::Span::current()),
        );
    }

    async fn execute(
        self: &Arc<Self>,
        payload: &TaskPayload,
        mut place: Place,
        slot: Option<OwnedSemaphorePermit>,
    ) -> Option<TaskResult> {
        if let Some(before) = place.before.take() {
            // An error means that the one before is over too.
            let _ = before.await;
        }
        let _slot = match slot {
            Some(slot) => slot,
            None => Arc::clone(&self.slots).acquire_owned().await.ok()?,
        };
        if self.stop.is_cancelled() {
            return None;
        }
        let started_at = Utc::now();
        if started_at >= payload.expires_at {
            warn!(error_code = "task_expired", "the task expired while it waited, and is not begun");
            return None;
        }
        let (task_id, attempt) = (payload.task_id, payload.attempt);
        if !self.write(Line::Started { task_id, attempt, at: started_at }).await {
            return None;
        }
        info!("task started");
        let done = self.do_task(payload).await;
        let result = outcome(payload, done, started_at, Utc::now());
        if !self.write(Line::Done { task_id, result: result.clone() }).await {
            return None;
        }
        let duration_ms = (result.finished_at - result.started_at).num_milliseconds();
        match &result.error {
            None => info!(status = "succeeded", duration_ms, "task finished"),
            Some(error) => {
                warn!(status = "failed", duration_ms, error_code = error.code, error = error.message, "task finished");
            }
        }
        held(&self.under_way).insert((task_id, attempt), Stage::Reporting);
        Some(result)
    }

    async fn do_task(self: &Arc<Self>, payload: &TaskPayload) -> Result<Effect, Failure> {
        if let Task::Provision(provision) = &payload.task
            && self.journal.has_released(provision.allocation_id)
        {
            return Err(Failure::new("allocation_released", "the allocation was cleaned up on this node already"));
        }
        if let Task::ReconcileSshKeys(reconcile) = &payload.task
            && self.journal.is_leaving(reconcile.allocation_id)
        {
            return Err(Failure::new("allocation_released", "the allocation is being cleaned up on this node"));
        }
        let (executor, gpus) = (Arc::clone(&self.executor), Arc::clone(&self.gpus));
        let seal = Seal {
            node_id: self.config.node_id,
            task_id: payload.task_id,
            attempt: payload.attempt,
            boot_id: self.boot_id,
            key: self.recovery_key.clone(),
        };
        let done: Box<dyn FnOnce() -> Result<Effect, Failure> + Send> = match payload.task.clone() {
            Task::Provision(provision) => Box::new(move || executor.provision(&provision).map(Effect::plain)),
            Task::Release(release) => {
                self.terminals.give_back(release.allocation_id);
                Box::new(move || seal.release(executor.as_ref(), &release))
            }
            Task::ReconcileSshKeys(task) => Box::new(move || executor.reconcile_keys(&task).map(Effect::plain)),
            Task::Validate {} => Box::new(move || executor.validate().map(Effect::plain)),
            Task::Diagnose {} => Box::new(move || Ok(Effect::plain(diagnose::collect(&gpus, executor.as_ref())))),
            Task::Reboot(reboot) => {
                Box::new(move || restarted(&reboot, seal.boot_id).unwrap_or_else(|| Err(executor.reboot())))
            }
            // A terminal lives on after its task, and is no matter of the executor's alone.
            Task::OpenTerminal(open) => return self.open_terminal(&open).await.map(Effect::plain),
        };
        tokio::task::spawn_blocking(done).await.unwrap_or_else(|panic| {
            let message = format!("the executor ended without an answer: {panic}");
            Err(Failure::new("executor_panicked", message))
        })
    }

    /// Sends the result until it is recorded, or refused for good.
    async fn report(&self, task_id: Uuid, result: TaskResult, origin: &Origin) {
        let attempt = result.attempt;
        let mut backoff = Backoff::new(BACKOFF_BASE, REPORT_BACKOFF_MAX);
        let ended = loop {
            let api = self.api();
            let answer = tokio::select! {
                answer = api.post_result(task_id, &result, origin) => answer,
                // A result that is on its way gets a last moment; what fails then waits in the journal.
                () = self.stopped_for(Duration::from_secs(2)) => return,
            };
            match answer {
                Ok(_) => break Ended::Recorded,
                Err(error) if self.may_be_overtaken(task_id) && is_overtaken(&error) => {
                    info!("nobody waits for the result any more");
                    break Ended::GivenUp;
                }
                Err(error) if is_refused_for_good(&error) => {
                    error!(
                        error_code = error.code(),
                        error = chain(&error),
                        "the control plane will not take the result; giving it up"
                    );
                    break Ended::GivenUp;
                }
                Err(error) => {
                    if !self.recover_from(&api, error, "reporting the result", &mut backoff).await {
                        return;
                    }
                }
            }
        };
        self.write(Line::Reported { task_id, attempt, ended, at: Utc::now() }).await;
    }

    /// A session may be over before its beginning is reported, keys may have changed again, and the tenant may be gone.
    fn may_be_overtaken(&self, task_id: Uuid) -> bool {
        let of_passing = |task: &Task| matches!(task, Task::OpenTerminal(_) | Task::ReconcileSshKeys(_));
        self.journal.record(task_id).is_some_and(|record| of_passing(&record.payload.task))
    }

    async fn stopped_for(&self, length: Duration) {
        self.stop.cancelled().await;
        tokio::time::sleep(length).await;
    }

    /// An agent that cannot write its journal must not act.
    async fn write(&self, line: Line) -> bool {
        match self.journal.append(line).await {
            Ok(()) => true,
            Err(error) => {
                self.fail(Fatal::Journal(error));
                false
            }
        }
    }

    fn queue_up(&self, payload: &TaskPayload) -> Place {
        let Some(allocation_id) = payload.task.allocation_id() else { return Place { before: None, _over: None } };
        let mut lanes = held(&self.lanes);
        // Lanes whose last task is over are of no use to anybody.
        lanes.retain(|_, lane| matches!(lane.over.try_recv(), Err(oneshot::error::TryRecvError::Empty)));
        let (sender, over) = oneshot::channel();
        let last = (payload.task_id, payload.attempt);
        let before = lanes.insert(allocation_id, Lane { last, over });
        if let Some(before) = &before {
            info!(waits_for = %before.last.0, "the task waits for the allocation's task before it");
        }
        Place { before: before.map(|lane| lane.over), _over: Some(sender) }
    }
}

/// The outcome of a restart that has happened: the machine is in another boot than the one that was to end.
fn restarted(task: &Reboot, boot_id: Uuid) -> Option<Result<Effect, Failure>> {
    (task.boot_id != boot_id).then(|| {
        let output = [("boot_id".to_owned(), boot_id.to_string().into())];
        Ok(Effect::plain(output.into_iter().collect()))
    })
}

/// What is said of a task that this agent does not know.
pub(super) fn not_done(kind: &str, attempt: u32) -> TaskResult {
    let now = Utc::now();
    let (version, protocol) = (env!("CARGO_PKG_VERSION"), wire::PROTOCOL);
    let message = format!("agent {version} (protocol {protocol}) knows no task of type {kind:?}; upgrade the agent");
    TaskResult {
        attempt,
        status: TaskStatus::Failed,
        output: Output::new(),
        error: Some(TaskError { code: "task_type_unknown".to_owned(), message }),
        proof: None,
        started_at: now,
        finished_at: now,
    }
}

/// What a task that did not fail outright came to.
struct Effect {
    output: Output,
    proof: Option<Envelope>,
    /// The effect is not what was asked for, though there is a proof of what it is.
    shortfall: Option<Failure>,
}

impl Effect {
    fn plain(output: Output) -> Self {
        Self { output, proof: None, shortfall: None }
    }
}

/// What binds a clean-up proof to its occasion.
struct Seal {
    node_id: Uuid,
    task_id: Uuid,
    attempt: u32,
    boot_id: Uuid,
    key: ed25519_dalek::SigningKey,
}

impl Seal {
    fn release(&self, executor: &dyn Executor, task: &Release) -> Result<Effect, Failure> {
        let released = executor.release(task)?;
        let report = CleanupReport {
            node_id: self.node_id,
            allocation_id: task.allocation_id,
            task_id: self.task_id,
            attempt: self.attempt,
            boot_id: self.boot_id,
            checked_at: Utc::now(),
            findings: released.findings,
        };
        let proof = report.seal(&self.key).map_err(|error| Failure::new("proof", error.to_string()))?;
        let left: Vec<String> = report.leftovers().map(described).collect();
        let shortfall = (!report.is_clean(executor.kind()))
            .then(|| Failure::new("cleanup_incomplete", format!("not certainly gone: {}", left.join(", "))));
        Ok(Effect { output: released.output, proof: Some(proof), shortfall })
    }
}

/// A finding with what was found, or why the look failed.
pub(super) fn described(finding: &Finding) -> String {
    let detail = finding.detail.as_deref().map(|detail| format!(" ({detail})")).unwrap_or_default();
    format!("{:?} {}{detail}", finding.what, finding.looked_for)
}

fn outcome(
    payload: &TaskPayload,
    done: Result<Effect, Failure>,
    started_at: DateTime<Utc>,
    finished_at: DateTime<Utc>,
) -> TaskResult {
    let (output, proof, failure) = match done {
        Ok(effect) => (effect.output, effect.proof, effect.shortfall),
        Err(failure) => (Output::new(), None, Some(failure)),
    };
    TaskResult {
        attempt: payload.attempt,
        status: if failure.is_none() { TaskStatus::Succeeded } else { TaskStatus::Failed },
        output,
        error: failure.map(|failure| TaskError { code: failure.code.to_owned(), message: failure.message }),
        proof,
        started_at,
        finished_at,
    }
}

/// The task is not there any more, or at a later attempt.
fn is_overtaken(error: &ApiError) -> bool {
    error.status() == Some(StatusCode::NOT_FOUND) || error.code() == "stale_attempt"
}

/// Answers that no repetition of the same result changes: the attempt is over, the task is not this node's, or the result is
/// malformed.
fn is_refused_for_good(error: &ApiError) -> bool {
    // What a proxy on the way says of it is not the control plane's word.
    error.is_the_control_planes()
        && error.status().is_some_and(|status| {
            matches!(
                status,
                StatusCode::CONFLICT
                    | StatusCode::NOT_FOUND
                    | StatusCode::GONE
                    | StatusCode::BAD_REQUEST
                    | StatusCode::PAYLOAD_TOO_LARGE
                    | StatusCode::UNPROCESSABLE_ENTITY
            )
        })
}

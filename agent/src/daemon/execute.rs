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
use wire::cleanup_proof::{CleanupFinding, CleanupReport};
use wire::task::{Reboot, Release, SignedEnvelope, Task, TaskError, TaskOrigin, TaskPayload, TaskResult, TaskStatus};

use super::poll::task_span;
use super::{Agent, BACKOFF_BASE, Fatal, locked};
use crate::chain;
use crate::diagnostics;
use crate::executor::Executor;
use crate::full_jitter::Backoff;
use crate::node_api_client::NodeApiError;
use crate::server_clock::ServerClock;
use crate::task_journal::{JournalEntry, JournalError, Phase, ReportOutcome};
use crate::task_outcome::{TaskFailure, TaskOutput};
use crate::task_plan::{TaskPlan, plan};
use crate::validation;

const REPORT_BACKOFF_MAX: Duration = Duration::from_secs(30);

/// The stage of an attempt in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptStage {
    Executing,
    Reporting,
}

/// The tail of an allocation's queue: resolves when the task that holds the other end is finished.
pub(super) struct QueueTail {
    last: (Uuid, u32),
    over: oneshot::Receiver<()>,
}

/// A task's slot in its allocation's queue. Dropping it releases the next task.
struct QueueSlot {
    before: Option<oneshot::Receiver<()>>,
    _over: Option<oneshot::Sender<()>>,
}

impl Agent {
    /// Continues the attempts that are unfinished in the journal.
    pub(super) fn resume(self: &Arc<Self>) {
        for record in self.journal.unreported() {
            let payload = record.payload.clone();
            let (span, origin) = task_span(&payload, &Uuid::now_v7().to_string());
            let _entered = span.enter();
            match plan(record.attempt, payload.task.is_idempotent(), Some(&record), false) {
                TaskPlan::Resend(result) => {
                    info!("a result from before the restart is sent again");
                    self.spawn_report(payload.task_id, result, origin);
                }
                TaskPlan::Execute if payload.expires_at <= self.clock.now() => {
                    warn!(error_code = "task_expired", "the task expired before its end; the control plane decides");
                }
                TaskPlan::Execute if may_be_resumed(&payload.task) => {
                    info!(was_started = record.phase == Phase::Started, "a task from before the restart goes on");
                    self.spawn_execution(payload, origin, None);
                }
                // The control plane sends it again if it is still wanted.
                TaskPlan::Execute => {}
                TaskPlan::OutcomeUnknown => self.spawn_unknown_outcome(payload, origin),
                TaskPlan::InFlight | TaskPlan::Stale { .. } => {}
            }
        }
    }

    pub(super) fn is_in_flight(&self, task_id: Uuid, attempt: u32) -> bool {
        locked(&self.in_flight).contains_key(&(task_id, attempt))
    }

    /// Executes and reports in a task of its own, beside the polling. `place` bounds the tasks that were polled and are not over.
    pub(super) fn spawn_execution(
        self: &Arc<Self>,
        payload: TaskPayload,
        origin: TaskOrigin,
        place: Option<OwnedSemaphorePermit>,
    ) {
        let agent = Arc::clone(self);
        let key = (payload.task_id, payload.attempt);
        locked(&self.in_flight).insert(key, AttemptStage::Executing);
        // Enqueued here, so that tasks are executed in their order of arrival.
        let queue_slot = self.enqueue(&payload);
        self.tasks.spawn(
            async move {
                if let Some(result) = agent.execute(&payload, queue_slot, place).await {
                    agent.report(payload.task_id, result, &origin).await;
                }
                locked(&agent.in_flight).remove(&key);
            }
            .instrument(tracing::Span::current()),
        );
    }

    /// Resends a stored result, unless it is in flight.
    pub(super) fn spawn_report(self: &Arc<Self>, task_id: Uuid, result: TaskResult, origin: TaskOrigin) {
        let key = (task_id, result.attempt);
        if locked(&self.in_flight).insert(key, AttemptStage::Reporting).is_some() {
            return;
        }
        let agent = Arc::clone(self);
        self.tasks.spawn(
            async move {
                agent.report(task_id, result, &origin).await;
                locked(&agent.in_flight).remove(&key);
            }
            .instrument(tracing::Span::current()),
        );
    }

    /// Reports that the outcome of a task that must not be executed twice is unknown.
    pub(super) fn spawn_unknown_outcome(self: &Arc<Self>, payload: TaskPayload, origin: TaskOrigin) {
        if let Task::UpdateAgent(_) = &payload.task {
            return self.spawn_update_outcome(payload, origin);
        }
        let known = match &payload.task {
            Task::Reboot(reboot) => reboot_outcome(reboot, self.boot_id),
            // It was begun just before the restart, and goes on.
            Task::OpenTerminal(open) => {
                self.terminals.is_live(open.session_id).then(|| Ok(Effect::plain(TaskOutput::new())))
            }
            Task::Provision(_)
            | Task::Release(_)
            | Task::ReconcileSshKeys(_)
            | Task::Validate { .. }
            | Task::ResetGpu(_)
            | Task::Diagnose {}
            | Task::UpdateAgent(_) => None,
        };
        let unknown = || Err(TaskFailure::new("outcome_unknown", "the agent ended while the task was in progress"));
        let now = self.clock.now();
        let result = outcome(&payload, known.unwrap_or_else(unknown), now, now);
        let agent = Arc::clone(self);
        self.tasks.spawn(
            async move {
                if agent
                    .append_to_journal(JournalEntry::Done { task_id: payload.task_id, result: result.clone() })
                    .await
                {
                    agent.spawn_report(payload.task_id, result, origin);
                }
            }
            .instrument(tracing::Span::current()),
        );
    }

    async fn execute(
        self: &Arc<Self>,
        payload: &TaskPayload,
        mut queue_slot: QueueSlot,
        _place: Option<OwnedSemaphorePermit>,
    ) -> Option<TaskResult> {
        if let Some(before) = queue_slot.before.take() {
            // An error means that the task before is finished, too.
            let _ = before.await;
        }
        // A tenant's end waits for no other task.
        let _slot = match &payload.task {
            Task::Release(_) => None,
            Task::Provision(_)
            | Task::ReconcileSshKeys(_)
            | Task::OpenTerminal(_)
            | Task::Validate { .. }
            | Task::ResetGpu(_)
            | Task::Diagnose {}
            | Task::Reboot(_)
            | Task::UpdateAgent(_) => Some(self.slots.acquire().await.ok()?),
        };
        if self.stop.is_cancelled() {
            return None;
        }
        let started_at = self.clock.now();
        if started_at >= payload.expires_at {
            warn!(error_code = "task_expired", "the task expired while it waited, and is not begun");
            return None;
        }
        let (task_id, attempt) = (payload.task_id, payload.attempt);
        let done = match self.journal.append(JournalEntry::Started { task_id, attempt, at: started_at }).await {
            Ok(()) => {
                info!("task started");
                self.do_task(payload).await?
            }
            // It is not begun, so its failure is certain.
            Err(error @ JournalError::Write(_)) => Err(TaskFailure::new("node_storage", chain(&error))),
            Err(error) => {
                self.fail(Fatal::Journal(error));
                return None;
            }
        };
        let result = outcome(payload, done, started_at, self.clock.now());
        if !self.append_to_journal(JournalEntry::Done { task_id, result: result.clone() }).await {
            return None;
        }
        if let (Task::Release(_), None, Some(integrity)) = (&payload.task, &result.error, &self.integrity) {
            integrity.renew();
        }
        if matches!(payload.task, Task::Release(_)) {
            // Which of its GPUs are not proved is in the next heartbeat.
            self.heartbeat_now.notify_one();
        }
        let duration_ms = (result.finished_at - result.started_at).num_milliseconds();
        match &result.error {
            None => info!(status = "succeeded", duration_ms, "task finished"),
            Some(error) => {
                warn!(status = "failed", duration_ms, error_code = error.code, error = error.message, "task finished");
            }
        }
        locked(&self.in_flight).insert((task_id, attempt), AttemptStage::Reporting);
        Some(result)
    }

    /// `None` where the task is left open, for the next agent to report.
    async fn do_task(self: &Arc<Self>, payload: &TaskPayload) -> Option<Result<Effect, TaskFailure>> {
        if let Task::Provision(provision) = &payload.task
            && self.journal.has_released(provision.allocation_id)
        {
            let message = "the allocation was cleaned up on this node already";
            return Some(Err(TaskFailure::new("allocation_released", message)));
        }
        if let Task::ReconcileSshKeys(reconcile) = &payload.task
            && self.journal.is_in_clean_up(reconcile.allocation_id)
        {
            let message = "the allocation is being cleaned up on this node";
            return Some(Err(TaskFailure::new("allocation_released", message)));
        }
        let (executor, gpus) = (Arc::clone(&self.executor), Arc::clone(&self.gpus));
        let proof_context = ProofContext {
            node_id: self.config.node_id,
            task_id: payload.task_id,
            attempt: payload.attempt,
            boot_id: self.boot_id,
            key: self.recovery_key.clone(),
            clock: self.clock.clone(),
        };
        let done: Box<dyn FnOnce() -> Result<Effect, TaskFailure> + Send> = match payload.task.clone() {
            Task::Provision(provision) => Box::new(move || executor.provision(&provision).map(Effect::plain)),
            Task::Release(release) => {
                self.terminals.release_allocation(release.allocation_id);
                Box::new(move || proof_context.release(executor.as_ref(), &release))
            }
            Task::ReconcileSshKeys(task) => Box::new(move || executor.reconcile_keys(&task).map(Effect::plain)),
            Task::Validate { load: None } => Box::new(move || {
                validation::check_modes(&gpus, None)?;
                executor.validate().map(Effect::plain)
            }),
            Task::Validate { load: Some(load) } => {
                let validator = Arc::clone(&self.validator);
                Box::new(move || {
                    let one_gpu = load.gpu_uuid.as_deref().map(|uuid| executor.withhold_gpu(uuid));
                    let _withheld = one_gpu.transpose()?;
                    validation::check_modes(&gpus, load.gpu_uuid.as_deref())?;
                    validator.run(&load, executor.validate()?, &gpus).map(Effect::plain)
                })
            }
            Task::ResetGpu(reset) => {
                let (resetter, validator) = (Arc::clone(&self.gpu_resetter), Arc::clone(&self.validator));
                Box::new(move || {
                    // Before it waits: no tenant gets the GPU meanwhile.
                    let _withheld = executor.withhold_gpu(&reset.gpu_uuid)?;
                    // A load would have the driver open.
                    let _alone = validator.alone();
                    resetter.reset(&gpus, executor.as_ref(), &reset.gpu_uuid).map(Effect::plain)
                })
            }
            Task::Diagnose {} => Box::new(move || Ok(Effect::plain(diagnostics::collect(&gpus, executor.as_ref())))),
            Task::Reboot(reboot) => Box::new(move || {
                reboot_outcome(&reboot, proof_context.boot_id).unwrap_or_else(|| Err(executor.reboot()))
            }),
            // A terminal outlives its task and needs more than the executor.
            Task::OpenTerminal(open) => return Some(self.open_terminal(&open).await.map(Effect::plain)),
            Task::UpdateAgent(update) => return self.update_agent(payload.task_id, update).await,
        };
        let done = tokio::task::spawn_blocking(done).await;
        Some(done.unwrap_or_else(|panic| {
            let message = format!("the executor ended without an answer: {panic}");
            Err(TaskFailure::new("executor_panicked", message))
        }))
    }

    /// Sends the result until it is recorded, or refused permanently.
    pub(super) async fn report(&self, task_id: Uuid, result: TaskResult, origin: &TaskOrigin) {
        let attempt = result.attempt;
        let mut backoff = Backoff::new(BACKOFF_BASE, REPORT_BACKOFF_MAX);
        let ended = loop {
            let api = self.api();
            let answer = tokio::select! {
                answer = api.post_result(task_id, &result, origin) => answer,
                // A result in flight gets a short grace period; after that it waits in the journal.
                () = self.grace_after_stop(Duration::from_secs(2)) => return,
            };
            match answer {
                Ok(_) => break ReportOutcome::Recorded,
                Err(error) if self.may_be_superseded(task_id) && is_superseded(&error) => {
                    info!("the task is superseded: its result is discarded");
                    break ReportOutcome::GivenUp;
                }
                Err(error) if is_refused_for_good(&error) => {
                    error!(
                        error_code = error.code(),
                        error = chain(&error),
                        "the control plane will not take the result; giving it up"
                    );
                    break ReportOutcome::GivenUp;
                }
                Err(error) => {
                    if !self.retry_after_failure(&api, error, "reporting the result", &mut backoff).await {
                        return;
                    }
                }
            }
        };
        self.append_to_journal(JournalEntry::Reported { task_id, attempt, ended, at: self.clock.now() }).await;
    }

    /// A session may have ended before its beginning is reported, keys may have changed again, and an allocation may have been released
    /// while it was provisioned: its release is the node's next task.
    fn may_be_superseded(&self, task_id: Uuid) -> bool {
        let ends_early =
            |task: &Task| matches!(task, Task::OpenTerminal(_) | Task::ReconcileSshKeys(_) | Task::Provision(_));
        self.journal.record(task_id).is_some_and(|record| ends_early(&record.payload.task))
    }

    async fn grace_after_stop(&self, length: Duration) {
        self.stop.cancelled().await;
        tokio::time::sleep(length).await;
    }

    /// An agent that cannot write its journal must not act.
    pub(super) async fn append_to_journal(&self, line: JournalEntry) -> bool {
        match self.journal.append(line).await {
            Ok(()) => true,
            Err(error) => {
                self.fail(Fatal::Journal(error));
                false
            }
        }
    }

    fn enqueue(&self, payload: &TaskPayload) -> QueueSlot {
        let Some(allocation_id) = payload.task.allocation_id() else { return QueueSlot { before: None, _over: None } };
        let mut lanes = locked(&self.lanes);
        // Queues whose last task is finished are dropped.
        lanes.retain(|_, lane| matches!(lane.over.try_recv(), Err(oneshot::error::TryRecvError::Empty)));
        let (sender, over) = oneshot::channel();
        let last = (payload.task_id, payload.attempt);
        let before = lanes.insert(allocation_id, QueueTail { last, over });
        if let Some(before) = &before {
            info!(waits_for = %before.last.0, "the task waits for the allocation's task before it");
        }
        QueueSlot { before: before.map(|lane| lane.over), _over: Some(sender) }
    }
}

/// Whether the agent goes on with a task that the journal has as unfinished. The journal may lack its end, and what came after it, such as the
/// release of its tenant. A release ends a tenant that it names, and a GPU is not reset where it has one: both take nothing from a later tenant.
const fn may_be_resumed(task: &Task) -> bool {
    match task {
        Task::Release(_) | Task::ResetGpu(_) => true,
        Task::Provision(_)
        | Task::ReconcileSshKeys(_)
        | Task::OpenTerminal(_)
        | Task::Validate { .. }
        | Task::Diagnose {}
        | Task::Reboot(_)
        | Task::UpdateAgent(_) => false,
    }
}

/// The outcome of a reboot that has happened: the machine has another boot id than the task names.
fn reboot_outcome(task: &Reboot, boot_id: Uuid) -> Option<Result<Effect, TaskFailure>> {
    (task.boot_id != boot_id).then(|| {
        let output = [("boot_id".to_owned(), boot_id.to_string().into())];
        Ok(Effect::plain(output.into_iter().collect()))
    })
}

/// The result of a task whose type this agent does not know.
pub(super) fn unknown_type_result(kind: &str, attempt: u32, now: DateTime<Utc>) -> TaskResult {
    let (version, protocol) = (env!("CARGO_PKG_VERSION"), wire::PROTOCOL);
    let message = format!("agent {version} (protocol {protocol}) knows no task of type {kind:?}; upgrade the agent");
    TaskResult {
        attempt,
        status: TaskStatus::Failed,
        output: TaskOutput::new(),
        error: Some(TaskError { code: "task_type_unknown".to_owned(), message }),
        proof: None,
        started_at: now,
        finished_at: now,
    }
}

/// What a task that did not fail outright produced.
pub(super) struct Effect {
    output: TaskOutput,
    proof: Option<SignedEnvelope>,
    /// Why the outcome falls short of what was requested, although there is a proof.
    shortfall: Option<TaskFailure>,
}

impl Effect {
    pub(super) fn plain(output: TaskOutput) -> Self {
        Self { output, proof: None, shortfall: None }
    }
}

/// What binds a clean-up proof to its attempt and boot.
struct ProofContext {
    node_id: Uuid,
    task_id: Uuid,
    attempt: u32,
    boot_id: Uuid,
    key: ed25519_dalek::SigningKey,
    clock: ServerClock,
}

impl ProofContext {
    fn release(&self, executor: &dyn Executor, task: &Release) -> Result<Effect, TaskFailure> {
        let released = executor.release(task)?;
        let report = CleanupReport {
            node_id: self.node_id,
            allocation_id: task.allocation_id,
            task_id: self.task_id,
            attempt: self.attempt,
            boot_id: self.boot_id,
            checked_at: self.clock.now(),
            findings: released.findings,
        };
        let proof = report.seal(&self.key).map_err(|error| TaskFailure::new("proof", error.to_string()))?;
        let left: Vec<String> = report.leftovers().map(describe_finding).collect();
        let shortfall = (!report.is_clean(executor.kind()))
            .then(|| TaskFailure::new("cleanup_incomplete", format!("not certainly gone: {}", left.join(", "))));
        Ok(Effect { output: released.output, proof: Some(proof), shortfall })
    }
}

/// A finding with what was found, or why the check failed.
pub(super) fn describe_finding(finding: &CleanupFinding) -> String {
    let detail = finding.detail.as_deref().map(|detail| format!(" ({detail})")).unwrap_or_default();
    format!("{:?} {}{detail}", finding.what, finding.looked_for)
}

pub(super) fn outcome(
    payload: &TaskPayload,
    done: Result<Effect, TaskFailure>,
    started_at: DateTime<Utc>,
    finished_at: DateTime<Utc>,
) -> TaskResult {
    let (output, proof, failure) = match done {
        Ok(effect) => (effect.output, effect.proof, effect.shortfall),
        Err(failure) => (TaskOutput::new(), None, Some(failure)),
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

/// The task does not exist any more, or is at a later attempt.
fn is_superseded(error: &NodeApiError) -> bool {
    is_refused_for_good(error) && (error.status() == Some(StatusCode::NOT_FOUND) || error.code() == "stale_attempt")
}

/// Answers that resending the same result cannot change: the attempt is over, the task is not this node's, or the result is malformed.
fn is_refused_for_good(error: &NodeApiError) -> bool {
    error.is_refused_with(&[
        StatusCode::CONFLICT,
        StatusCode::NOT_FOUND,
        StatusCode::GONE,
        StatusCode::BAD_REQUEST,
        StatusCode::PAYLOAD_TOO_LARGE,
        StatusCode::UNPROCESSABLE_ENTITY,
    ])
}

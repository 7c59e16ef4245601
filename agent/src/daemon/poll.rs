//! The task poll: request, verify, decide, dispatch, repeat.

use std::sync::Arc;
use std::time::{Duration, Instant};

use telemetry::SpanContext;
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, Span, error, error_span, field, info, warn};
use wire::task::{EnvelopeSignatureError, SignedEnvelope, TaskOpenError, TaskOrigin, TaskPayload, TaskRefusal, open};

use super::execute::unknown_type_result;
use super::{Agent, BACKOFF_BASE, Fatal, locked};
use crate::chain;
use crate::full_jitter::Backoff;
use crate::node_api_client::ReceivedTask;
use crate::task_journal::{JournalEntry, JournalError};
use crate::task_plan::{TaskPlan, plan};

/// "No task" before this time is the answer of a server that does not wait, such as one that is being stopped.
const MIN_EMPTY_POLL: Duration = Duration::from_millis(500);

/// Longest pause after a poll without a new task; the next task may be executable.
const FRUITLESS_BACKOFF_MAX: Duration = Duration::from_secs(2);

/// How long the first poll, and a task with an unknown key, wait for the answer to a heartbeat. A heartbeat itself may wait a second for
/// the GPUs' driver, and some for a lost packet to be sent again.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether a poll brought a new task.
#[derive(PartialEq, Eq)]
enum PollOutcome {
    Task,
    /// The task was refused, or is known; an immediate poll would return it again.
    NoNewTask,
}

impl Agent {
    pub(super) async fn poll(self: &Arc<Self>) {
        let settings = *self.poll_settings.borrow();
        let mut backoff = Backoff::new(BACKOFF_BASE, Duration::from_secs(u64::from(settings.backoff_max_seconds)));
        let mut fruitless = Backoff::new(BACKOFF_BASE, FRUITLESS_BACKOFF_MAX);
        let mut is_polling = false;
        // Which tasks of the journal are over is judged by the control plane's time, which is known already in the boot in which an agent was
        // in contact.
        tokio::select! {
            () = self.clock.wait_until_known() => {}
            () = self.stop.cancelled() => return,
        }
        self.journal.forget_past(&self.clock);
        self.resume();
        // Keys may have rotated while the agent was down: the answer to a heartbeat announces them, so that the first task can be
        // verified.
        let mut heartbeats = self.heartbeats_answered.subscribe();
        tokio::select! {
            _ = heartbeats.wait_for(|answers| *answers > 0) => {}
            () = tokio::time::sleep(HEARTBEAT_TIMEOUT) => {}
            () = self.stop.cancelled() => return,
        }
        loop {
            // Also while all slots are taken: the next task may be a release, which needs none.
            let place = tokio::select! {
                place = Arc::clone(&self.admission).acquire_owned() => place,
                () = self.stop.cancelled() => return,
            };
            let Ok(place) = place else { return };
            if !self.ensure_valid_certificate().await {
                return;
            }
            let settings = *self.poll_settings.borrow();
            backoff.saturate_at(Duration::from_secs(u64::from(settings.backoff_max_seconds)));
            let polled_at = Instant::now();
            let api = self.api();
            let answer = tokio::select! {
                answer = api.wait_task(settings.timeout_seconds.clamp(1, 55), self.process) => answer,
                () = self.stop.cancelled() => return,
            };
            match answer {
                Ok(received) => {
                    if !std::mem::replace(&mut is_polling, true) {
                        info!("polling");
                    }
                    let outcome = match received {
                        Some(received) => self.accept(received, place).await,
                        None if polled_at.elapsed() < MIN_EMPTY_POLL => PollOutcome::NoNewTask,
                        None => PollOutcome::Task,
                    };
                    backoff.reset();
                    if outcome == PollOutcome::Task {
                        fruitless.reset();
                    } else if !self.pause(fruitless.next(rand::random(), None)).await {
                        return;
                    }
                }
                Err(error) => {
                    is_polling = false;
                    if !self.retry_after_failure(&api, error, "polling", &mut backoff).await {
                        return;
                    }
                }
            }
        }
    }

    async fn accept(self: &Arc<Self>, received: ReceivedTask, place: OwnedSemaphorePermit) -> PollOutcome {
        let correlation_id = received.correlation_id.as_str();
        let payload = match self.open(&received.envelope).await {
            Ok(payload) => payload,
            Err(error) => {
                error!(correlation_id, error_code = error_code_of(&error), error = chain(&error), "a task is refused");
                self.reject_unknown_type(error, correlation_id);
                return PollOutcome::NoNewTask;
            }
        };
        let (span, origin) = task_span(&payload, correlation_id);
        self.accept_verified(payload, origin, place).instrument(span).await
    }

    /// The task, if a trusted key signed it. Keys may rotate faster than heartbeats follow each other: before a task is rejected for an
    /// unknown key, a heartbeat asks the control plane for newer keys.
    async fn open(&self, envelope: &SignedEnvelope) -> Result<TaskPayload, TaskOpenError> {
        let mut heartbeats = self.heartbeats_answered.subscribe();
        // The first answer may belong to a heartbeat that was in flight before.
        for _ in 0..2 {
            match self.try_open(envelope) {
                Err(TaskOpenError::Signature(EnvelopeSignatureError::UnknownKey)) => {}
                opened => return opened,
            }
            self.heartbeat_now.notify_one();
            tokio::select! {
                _ = heartbeats.changed() => {}
                () = tokio::time::sleep(HEARTBEAT_TIMEOUT) => break,
                () = self.stop.cancelled() => break,
            }
        }
        self.try_open(envelope)
    }

    fn try_open(&self, envelope: &SignedEnvelope) -> Result<TaskPayload, TaskOpenError> {
        let verifiers = locked(&self.verifiers).clone();
        open(envelope, &verifiers)
    }

    /// A task for this node of an unknown type gets a result, so that the control plane does not wait for it.
    fn reject_unknown_type(self: &Arc<Self>, error: TaskOpenError, correlation_id: &str) {
        let TaskOpenError::UnknownKind { kind, bound } = error else { return };
        if bound.node_id != self.config.node_id || self.clock.now() >= bound.expires_at {
            return;
        }
        let own_origin =
            || TaskOrigin { correlation_id: correlation_id.to_owned(), traceparent: None, tracestate: None };
        let origin = bound.origin.unwrap_or_else(own_origin);
        self.spawn_report(bound.task_id, unknown_type_result(&kind, bound.attempt, self.clock.now()), origin);
    }

    async fn accept_verified(
        self: &Arc<Self>,
        payload: TaskPayload,
        origin: TaskOrigin,
        place: OwnedSemaphorePermit,
    ) -> PollOutcome {
        if let Err(refused) = payload.check(self.config.node_id, self.clock.now()) {
            let error = chain(&refused);
            match refused {
                TaskRefusal::ForAnotherNode { .. } => {
                    error!(error_code = "task_for_another_node", error, "a task is refused");
                }
                // It was delayed in transit; the control plane redispatches it if it is still wanted.
                TaskRefusal::Expired { .. } => warn!(error_code = "task_expired", error, "a task is refused"),
            }
            return PollOutcome::NoNewTask;
        }
        let (task_id, attempt) = (payload.task_id, payload.attempt);
        let record = self.journal.record(task_id);
        let in_flight = record.as_ref().is_some_and(|record| self.is_in_flight(task_id, record.attempt));
        match plan(attempt, payload.task.is_idempotent(), record.as_ref(), in_flight) {
            TaskPlan::Execute => match self.journal.append(JournalEntry::Accepted { payload: payload.clone() }).await {
                Ok(()) => {
                    self.spawn_execution(payload, origin, Some(place));
                    PollOutcome::Task
                }
                Err(error) => self.fail_on_journal(error),
            },
            TaskPlan::InFlight => {
                info!("the task is in progress already");
                PollOutcome::NoNewTask
            }
            TaskPlan::Resend(result) => {
                info!("the task was done before: sending its result again");
                self.spawn_report(task_id, result, origin);
                PollOutcome::NoNewTask
            }
            TaskPlan::Stale { begun } => {
                warn!(begun, error_code = "stale_attempt", "an older attempt than the one begun is ignored");
                PollOutcome::NoNewTask
            }
            TaskPlan::OutcomeUnknown => {
                error!(
                    error_code = "outcome_unknown",
                    "the task began before a restart and must not be executed twice"
                );
                self.spawn_unknown_outcome(payload, origin);
                PollOutcome::Task
            }
        }
    }

    fn fail_on_journal(&self, error: JournalError) -> PollOutcome {
        self.fail(Fatal::Journal(error));
        PollOutcome::NoNewTask
    }
}

/// The span of a task, and the origin that its result returns: the request that the task names, in a span of the agent's own.
/// `correlation_id`: that of the answer in which the task came, for a control plane that names none.
pub(super) fn task_span(payload: &TaskPayload, correlation_id: &str) -> (Span, TaskOrigin) {
    let named = payload.origin.as_ref();
    let trace = named.and_then(|named| SpanContext::parse(named.traceparent.as_deref()?)).map(SpanContext::child);
    let origin = TaskOrigin {
        correlation_id: named.map_or_else(|| correlation_id.to_owned(), |named| named.correlation_id.clone()),
        traceparent: trace.map(SpanContext::traceparent),
        tracestate: named.and_then(|named| named.tracestate.clone()),
    };
    let allocation_id = payload.task.allocation_id();
    let span = error_span!(
        "task",
        task_id = %payload.task_id,
        attempt = payload.attempt,
        task_type = payload.task.kind(),
        correlation_id = origin.correlation_id,
        trace_id = trace.map(|trace| field::display(trace.trace_id())),
        span_id = trace.map(|trace| field::display(trace.span_id())),
        allocation_id = allocation_id.map(field::display),
        resource_name = allocation_id.map(|id| field::display(format!("allocation/{id}"))),
    );
    (span, origin)
}

fn error_code_of(error: &TaskOpenError) -> &'static str {
    match error {
        TaskOpenError::Signature(EnvelopeSignatureError::UnknownKey) => "task_key_unknown",
        TaskOpenError::Signature(EnvelopeSignatureError::Mismatch) => "task_signature_invalid",
        TaskOpenError::NotATask { .. } => "not_a_task",
        TaskOpenError::UnknownKind { .. } => "task_kind_unknown",
        TaskOpenError::Malformed(_) => "task_malformed",
    }
}

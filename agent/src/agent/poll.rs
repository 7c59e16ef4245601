//! The task wait: ask, verify, decide, hand over, ask again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::Utc;
use telemetry::Trace;
use tracing::{Instrument as _, Span, error, error_span, field, info, warn};
use wire::task::{Envelope, OpenError, Origin, SignatureError, TaskPayload, TaskRefused, open};

use super::execute::not_done;
use super::{Agent, BACKOFF_BASE, Fatal, held};
use crate::api::Received;
use crate::backoff::Backoff;
use crate::chain;
use crate::journal::{JournalError, Line};
use crate::plan::{Plan, plan};

/// "No task" before this time is an answer of a server that does not wait, such as one that is being stopped.
const TOO_SOON: Duration = Duration::from_millis(500);

/// Longest pause after a poll that brought nothing to do; the next task may be a good one.
const FRUITLESS_MAX: Duration = Duration::from_secs(2);

/// How long the first poll, and a task by an unknown key, wait for the answer to a heartbeat.
const HEARD_WITHIN: Duration = Duration::from_secs(3);

/// Whether something was gained by a poll.
#[derive(PartialEq, Eq)]
enum Gain {
    Task,
    /// The task was refused, or is known; asking at once would bring it again.
    Nothing,
}

impl Agent {
    pub(super) async fn poll(self: &Arc<Self>) {
        let settings = *self.poll_settings.borrow();
        let mut backoff = Backoff::new(BACKOFF_BASE, Duration::from_secs(u64::from(settings.backoff_max_seconds)));
        let mut fruitless = Backoff::new(BACKOFF_BASE, FRUITLESS_MAX);
        let mut is_polling = false;
        let session = uuid::Uuid::new_v4();
        // Keys may have rotated while nobody was here: the answer to a heartbeat says so, and the first task is then known.
        let mut heard = self.heard.subscribe();
        tokio::select! {
            _ = heard.wait_for(|answers| *answers > 0) => {}
            () = tokio::time::sleep(HEARD_WITHIN) => {}
            () = self.stop.cancelled() => return,
        }
        loop {
            // No task is asked for that could not be begun.
            let slot = tokio::select! {
                slot = Arc::clone(&self.slots).acquire_owned() => slot,
                () = self.stop.cancelled() => return,
            };
            let Ok(slot) = slot else { return };
            if !self.certificate_holds().await {
                return;
            }
            let settings = *self.poll_settings.borrow();
            backoff.saturate_at(Duration::from_secs(u64::from(settings.backoff_max_seconds)));
            let asked_at = Instant::now();
            let api = self.api();
            let answer = tokio::select! {
                answer = api.wait_task(settings.timeout_seconds.clamp(1, 55), session) => answer,
                () = self.stop.cancelled() => return,
            };
            match answer {
                Ok(received) => {
                    if !std::mem::replace(&mut is_polling, true) {
                        info!("polling");
                    }
                    let gain = match received {
                        Some(received) => self.take(received, slot).await,
                        None if asked_at.elapsed() < TOO_SOON => Gain::Nothing,
                        None => Gain::Task,
                    };
                    backoff.reset();
                    if gain == Gain::Task {
                        fruitless.reset();
                    } else if !self.pause(fruitless.next(rand::random(), None)).await {
                        return;
                    }
                }
                Err(error) => {
                    is_polling = false;
                    if !self.recover_from(&api, error, "polling", &mut backoff).await {
                        return;
                    }
                }
            }
        }
    }

    async fn take(self: &Arc<Self>, received: Received, slot: tokio::sync::OwnedSemaphorePermit) -> Gain {
        let correlation_id = received.correlation_id.as_str();
        let payload = match self.open(&received.envelope).await {
            Ok(payload) => payload,
            Err(error) => {
                error!(correlation_id, error_code = code_of(&error), error = chain(&error), "a task is refused");
                self.decline(error, correlation_id);
                return Gain::Nothing;
            }
        };
        let (span, origin) = scope_of(&payload, correlation_id);
        self.take_verified(payload, origin, slot).instrument(span).await
    }

    /// The task, where a trusted key signed it. The keys may have been rotated faster than heartbeats follow one another: before one is
    /// taken for a stranger's, the control plane is asked.
    async fn open(&self, envelope: &Envelope) -> Result<TaskPayload, OpenError> {
        let mut heard = self.heard.subscribe();
        // The first answer may be to a heartbeat that was under way before.
        for _ in 0..2 {
            match self.opened(envelope) {
                Err(OpenError::Signature(SignatureError::UnknownKey)) => {}
                opened => return opened,
            }
            self.beat_now.notify_one();
            tokio::select! {
                _ = heard.changed() => {}
                () = tokio::time::sleep(HEARD_WITHIN) => break,
                () = self.stop.cancelled() => break,
            }
        }
        self.opened(envelope)
    }

    fn opened(&self, envelope: &Envelope) -> Result<TaskPayload, OpenError> {
        let verifiers = held(&self.verifiers).clone();
        open(envelope, &verifiers)
    }

    /// A task for this node of a kind that it does not know is answered, so that nobody waits for it.
    fn decline(self: &Arc<Self>, error: OpenError, correlation_id: &str) {
        let OpenError::UnknownKind { kind, bound } = error else { return };
        if bound.node_id != self.config.node_id || Utc::now() >= bound.expires_at {
            return;
        }
        let unsaid = || Origin { correlation_id: correlation_id.to_owned(), traceparent: None, tracestate: None };
        let origin = bound.origin.unwrap_or_else(unsaid);
        self.spawn_report(bound.task_id, not_done(&kind, bound.attempt), origin);
    }

    async fn take_verified(
        self: &Arc<Self>,
        payload: TaskPayload,
        origin: Origin,
        slot: tokio::sync::OwnedSemaphorePermit,
    ) -> Gain {
        if let Err(refused) = payload.check(self.config.node_id, Utc::now()) {
            let error = chain(&refused);
            match refused {
                TaskRefused::ForAnotherNode { .. } => {
                    error!(error_code = "task_for_another_node", error, "a task is refused");
                }
                // It lay too long on its way; the control plane offers what still stands anew.
                TaskRefused::Expired { .. } => warn!(error_code = "task_expired", error, "a task is refused"),
            }
            return Gain::Nothing;
        }
        let (task_id, attempt) = (payload.task_id, payload.attempt);
        let record = self.journal.record(task_id);
        let under_way = record.as_ref().is_some_and(|record| self.is_under_way(task_id, record.attempt));
        match plan(attempt, payload.task.is_idempotent(), record.as_ref(), under_way) {
            Plan::Execute => match self.journal.append(Line::Accepted { payload: payload.clone() }).await {
                Ok(()) => {
                    self.spawn_execution(payload, origin, Some(slot));
                    Gain::Task
                }
                Err(error) => self.lose_journal(error),
            },
            Plan::UnderWay => {
                info!("the task is under way already");
                Gain::Nothing
            }
            Plan::Resend(result) => {
                info!("the task was done before: sending its result again");
                self.spawn_report(task_id, result, origin);
                Gain::Nothing
            }
            Plan::Stale { begun } => {
                warn!(begun, error_code = "stale_attempt", "an older attempt than the one begun is ignored");
                Gain::Nothing
            }
            Plan::OutcomeUnknown => {
                error!(error_code = "outcome_unknown", "the task began in an earlier life and must not happen twice");
                self.spawn_unknown_outcome(payload, origin);
                Gain::Task
            }
        }
    }

    fn lose_journal(&self, error: JournalError) -> Gain {
        self.fail(Fatal::Journal(error));
        Gain::Nothing
    }
}

/// The span of a task, and what goes back with its result: the request that the task says it goes back to, in a span of the
/// agent's own. `correlation_id`: that of the answer it came in, for a control plane that does not say.
pub(super) fn scope_of(payload: &TaskPayload, correlation_id: &str) -> (Span, Origin) {
    let said = payload.origin.as_ref();
    let trace = said.and_then(|said| Trace::parse(said.traceparent.as_deref()?)).map(Trace::child);
    let origin = Origin {
        correlation_id: said.map_or_else(|| correlation_id.to_owned(), |said| said.correlation_id.clone()),
        traceparent: trace.map(Trace::traceparent),
        tracestate: said.and_then(|said| said.tracestate.clone()),
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

fn code_of(error: &OpenError) -> &'static str {
    match error {
        OpenError::Signature(SignatureError::UnknownKey) => "task_key_unknown",
        OpenError::Signature(SignatureError::Mismatch) => "task_signature_invalid",
        OpenError::NotATask { .. } => "not_a_task",
        OpenError::UnknownKind { .. } => "task_kind_unknown",
        OpenError::Malformed(_) => "task_malformed",
    }
}

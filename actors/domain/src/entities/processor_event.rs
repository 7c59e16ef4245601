//! An event of the payment processor, received by webhook (decisions 6, *Webhook*; the design is in deploy/decisions/0029).
//!
//! ```text
//! received ──worked on──▶ processed ◀── where nothing follows from its type, at once
//!    └─failed─▶ retrying ─┘   └─too often─▶ dead, or overdue ──an operator──▶ retrying, dismissed
//! ```
//!
//! The processor resends an event until it is answered 200, and occasionally after that: the entity's id is derived from the processor's,
//! so that there is one entity however often it arrives. The payment decides what follows from the event; here is stored that it was
//! received, and whether it was processed.

#[cfg(test)]
mod tests;

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::Action;
use crate::event::Event;
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{EntityKind, EntityRef, ProcessorEventId};
use crate::policy::{PolicyKey, Scopes};
use crate::resend_timer::ResendTimer;
use crate::state_machine::{self, Deadline, Machine, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What follows inside the control plane takes milliseconds; after this time an operator should look.
const OVERDUE_AFTER: TimeDelta = TimeDelta::hours(1);
/// How long the body is stored after processing: as long as the processor shows its events.
pub const BODY_RETENTION: TimeDelta = TimeDelta::days(30);
/// The bound of a stored reason, in characters.
const MAX_REASON_CHARS: usize = 500;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessorEvent {
    pub id: ProcessorEventId,
    /// The processor's id (`evt_…`).
    pub event_id: String,
    /// The processor's type, `payment_intent.succeeded` for example.
    pub event_type: String,
    /// The processor's id of the object that it is about.
    pub object_id: Option<String>,
    /// The processor's time of the event.
    pub occurred_at: Option<Timestamp>,
    pub received_at: Timestamp,
    /// SHA-256 of the content, which distinguishes another event under the same id.
    pub digest: String,
    /// The body as received, sealed, in base64: it may contain names and addresses. `None` once it is removed.
    pub body_enc: Option<String>,
    /// The number of failed attempts, since it was received or an operator retried it.
    pub attempts: u32,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    pub phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[strum_discriminants(
    name(PhaseName),
    doc = "The name of its state.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    /// Not processed yet.
    Received {
        again: ResendTimer,
    },
    /// Processing failed, and is retried.
    Retrying {
        again: ResendTimer,
    },
    /// Processing failed too often: an operator has to retry or dismiss it.
    Dead {
        since: Timestamp,
    },
    Processed {
        at: Timestamp,
        outcome: ProcessingOutcome,
    },
    /// An operator has dismissed it.
    Dismissed {
        at: Timestamp,
        reason: String,
    },
}

/// The outcome of its processing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum ProcessingOutcome {
    /// A payment of the service received it.
    #[serde(rename = "told")]
    Applied,
    /// It concerns an object that was not created by the service.
    NotOurs,
    /// Nothing follows from events of its type.
    NothingToDo,
}

impl ProcessingOutcome {
    pub const ALL: [Self; 3] = [Self::Applied, Self::NotOurs, Self::NothingToDo];

    #[must_use]
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

/// The commands of a processor event.
pub type Command = state_machine::AnyCommand<Request, state_machine::NoCommand, Fact, Maintenance>;

state_machine::impl_command_from!(Request, Fact, Maintenance);

/// What operators ask of a processor event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Request {
    /// An operator retries it.
    Retry { reason: String },
    /// An operator dismisses it.
    Dismiss { reason: String },
}

impl state_machine::Request for Request {
    fn action(&self) -> Action {
        match self {
            Self::Retry { .. } | Self::Dismiss { .. } => Action::SettleProcessorEvents,
        }
    }
}

/// What the webhook and the payments worker report to a processor event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// It was received, with a valid signature. Its name between members is that of earlier releases.
    #[serde(rename = "receive")]
    #[strum(serialize = "receive")]
    Received {
        event_id: String,
        event_type: String,
        object_id: Option<String>,
        occurred_at: Option<Timestamp>,
        digest: String,
        body_enc: String,
        /// Nothing follows from events of its type: there is nothing to process.
        #[serde(default)]
        nothing_follows: bool,
    },
    /// It was processed, or it concerns no payment.
    Processed { outcome: ProcessingOutcome },
    /// Processing failed.
    Failed { why: String },
}

/// What the service does to a processor event by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Maintenance {
    /// The same body, sealed under another key of the key ring.
    Reseal {
        body_enc: String,
    },
    Tick,
}

impl state_machine::Maintenance for Maintenance {
    const TICK: Self = Self::Tick;
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// It is stored; `is_new`: by this command.
    #[serde(rename = "kept")]
    Stored {
        is_new: bool,
    },
    Shown {
        event: Box<ProcessorEvent>,
    },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such event of the payment processor")]
    NotFound,
    #[error("another event with this id is stored")]
    Differs,
    #[error("an event that is {state} waits for no operator")]
    WrongState { state: PhaseName },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("event of the payment processor"),
            Self::Differs => Explanation::invalid_request(
                "Another event with this id is stored already; an event's id is never used twice.",
            )
            .detail("field", "id"),
            Self::WrongState { state } => Explanation::conflict(format!(
                "The event is {state}: only one that is dead, retrying or overdue waits for an operator."
            ))
            .detail("state", state.into_str()),
        }
    }
}

impl Machine for ProcessorEvent {
    const KIND: EntityKind = EntityKind::ProcessorEvent;
    /// The webhook's body of up to 256 KiB, packed and sealed.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I8];
    const ENDED_STATES: &'static [&'static str] = &["processed", "dismissed"];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (Some(event), Command::Request(request)) => event.execute(request, ctx),
            (Some(event), Command::Fact(fact)) => event.apply(fact, ctx),
            (Some(event), Command::Maintenance(Maintenance::Reseal { body_enc })) => Ok(event.resealed(body_enc)),
            (Some(event), Command::Maintenance(Maintenance::Tick)) => Ok(event.tick(ctx)),
            (None, Command::Fact(fact)) => Self::begin(fact, ctx),
            (None, Command::Maintenance(Maintenance::Tick)) => Ok(Transition::stay(Reply::Done)),
            (None, Command::Request(_) | Command::Maintenance(Maintenance::Reseal { .. })) => Err(Rejection::NotFound),
        }
    }

    fn state(&self) -> &'static str {
        self.phase.into_str()
    }

    fn deadline(&self) -> Option<Deadline> {
        match self.phase {
            Phase::Received { .. } | Phase::Retrying { .. } => Some(Deadline::new(
                self.received_at + OVERDUE_AFTER,
                "the payment processor's event waits to be processed",
            )),
            // Overdue from its start on: no retry happens by itself.
            Phase::Dead { since } => {
                Some(Deadline::new(since, "an operator is to have it tried again or to dismiss it"))
            }
            Phase::Processed { .. } | Phase::Dismissed { .. } => None,
        }
    }

    fn timer(&self) -> Option<Timestamp> {
        match self.phase {
            Phase::Received { again } | Phase::Retrying { again } => Some(again.at),
            Phase::Dead { .. } => None,
            Phase::Processed { at, .. } | Phase::Dismissed { at, .. } => {
                self.body_enc.as_ref().map(|_| at + BODY_RETENTION)
            }
        }
    }

    fn is_transient(&self) -> bool {
        self.is_open()
    }

    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([(Invariant::I8, self.has_deadline_where_transient())])
    }
}

impl ProcessorEvent {
    fn begin(fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Received { event_id, event_type, object_id, occurred_at, digest, body_enc, nothing_follows } => {
                let phase = match nothing_follows {
                    true => Phase::Processed { at: ctx.now, outcome: ProcessingOutcome::NothingToDo },
                    false => Phase::Received { again: ResendTimer::first(ctx.now) },
                };
                let event = Self {
                    id: ProcessorEventId(ctx.id),
                    event_id,
                    event_type,
                    object_id,
                    occurred_at,
                    received_at: ctx.now,
                    digest,
                    body_enc: Some(body_enc),
                    attempts: 0,
                    last_error: None,
                    phase,
                };
                let due = (!nothing_follows).then(|| event.due());
                Ok(Transition::to(event, Reply::Stored { is_new: true }, "the payment processor sent it")
                    .with(due, None))
            }
            Fact::Processed { .. } | Fact::Failed { .. } => Err(Rejection::NotFound),
        }
    }

    fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Retry { reason } => self.retry(&reason, ctx),
            Request::Dismiss { reason } => self.dismiss(reason, ctx),
        }
    }

    fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match fact {
            Fact::Received { digest, .. } if digest == self.digest => {
                Ok(Transition::stay(Reply::Stored { is_new: false }))
            }
            Fact::Received { .. } => Err(Rejection::Differs),
            Fact::Processed { outcome } => Ok(self.processed(outcome, ctx)),
            Fact::Failed { why } => Ok(self.failed(&why, ctx)),
        }
    }

    /// The outcome counts, even where the attempts were given up in the meantime.
    fn processed(&self, outcome: ProcessingOutcome, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match self.phase {
            Phase::Received { .. } | Phase::Retrying { .. } | Phase::Dead { .. } => {
                let next = Self { phase: Phase::Processed { at: ctx.now, outcome }, ..self.clone() };
                Transition::to(next, Reply::Done, "it was processed")
            }
            Phase::Processed { .. } | Phase::Dismissed { .. } => Transition::stay(Reply::Done),
        }
    }

    fn failed(&self, why: &str, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let (Phase::Received { again } | Phase::Retrying { again }) = self.phase else {
            return Transition::stay(Reply::Done);
        };
        let most = ctx.policy.int(PolicyKey::BillingWebhookMaxAttempts, &Scopes::global(), ctx.now);
        let attempts = self.attempts.saturating_add(1);
        let (phase, so) = if i64::from(attempts) < most {
            (Phase::Retrying { again: again.next(ctx.now) }, "its processing failed, and is retried".to_owned())
        } else {
            (Phase::Dead { since: ctx.now }, format!("{attempts} attempts failed: an operator has to act"))
        };
        let last_error = Some(why.chars().take(MAX_REASON_CHARS).collect());
        Transition::to(Self { phase, attempts, last_error, ..self.clone() }, Reply::Done, so)
    }

    fn retry(&self, reason: &str, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        self.check_awaits_operator(ctx)?;
        let again = ResendTimer::first(ctx.now);
        let next = Self { phase: Phase::Retrying { again }, attempts: 0, ..self.clone() };
        let reply = next.shown();
        Ok(Transition::to(next, reply, "an operator retries it")
            .event(self.due())
            .audit(self.audit(AuditAction::ProcessorEventsRetry, reason)))
    }

    fn dismiss(&self, reason: String, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        self.check_awaits_operator(ctx)?;
        let audit = self.audit(AuditAction::ProcessorEventsDismiss, &reason);
        let next = Self { phase: Phase::Dismissed { at: ctx.now, reason }, ..self.clone() };
        let reply = next.shown();
        // What waits for the operator's decision at the payment ends with it.
        Ok(Transition::to(next, reply, "an operator has dismissed it").event(self.due()).audit(audit))
    }

    /// An event whose processing neither succeeds nor fails, since its body cannot be opened for example, waits for an operator once it is
    /// overdue.
    fn check_awaits_operator(&self, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        match self.phase {
            Phase::Retrying { .. } | Phase::Dead { .. } => Ok(()),
            Phase::Received { .. } if ctx.now >= self.received_at + OVERDUE_AFTER => Ok(()),
            Phase::Received { .. } | Phase::Processed { .. } | Phase::Dismissed { .. } => {
                Err(Rejection::WrongState { state: PhaseName::from(&self.phase) })
            }
        }
    }

    fn resealed(&self, body_enc: String) -> Transition<Self> {
        if self.body_enc.is_none() {
            return Transition::stay(Reply::Done);
        }
        let next = Self { body_enc: Some(body_enc), ..self.clone() };
        Transition::to(next, Reply::Done, "the key at rest was rotated")
    }

    fn tick(&self, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let resent = |phase| {
            let next = Self { phase, ..self.clone() };
            Transition::to(next, Reply::Done, "it is not processed yet").event(self.due())
        };
        match self.phase {
            Phase::Received { again } if again.is_due(ctx.now) => {
                resent(Phase::Received { again: again.next(ctx.now) })
            }
            Phase::Retrying { again } if again.is_due(ctx.now) => {
                resent(Phase::Retrying { again: again.next(ctx.now) })
            }
            Phase::Processed { at, .. } | Phase::Dismissed { at, .. }
                if self.body_enc.is_some() && ctx.now >= at + BODY_RETENTION =>
            {
                let next = Self { body_enc: None, ..self.clone() };
                Transition::to(next, Reply::Done, "its body is no longer needed")
            }
            Phase::Received { .. }
            | Phase::Retrying { .. }
            | Phase::Dead { .. }
            | Phase::Processed { .. }
            | Phase::Dismissed { .. } => Transition::stay(Reply::Done),
        }
    }

    /// True while it is to be processed, or an operator has to decide.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        match self.phase {
            Phase::Received { .. } | Phase::Retrying { .. } | Phase::Dead { .. } => true,
            Phase::Processed { .. } | Phase::Dismissed { .. } => false,
        }
    }

    const fn due(&self) -> Event {
        Event::ProcessorEventDue { processor_event_id: self.id }
    }

    fn shown(&self) -> Reply {
        Reply::Shown { event: Box::new(self.clone()) }
    }

    fn audit(&self, action: AuditAction, reason: &str) -> AuditRecord {
        let target = EntityRef { kind: EntityKind::ProcessorEvent, id: self.id.0 };
        let metadata = json!({
            "event_id": self.event_id,
            "event_type": self.event_type,
            "reason": reason,
        });
        AuditRecord::new(action, target, metadata)
    }
}

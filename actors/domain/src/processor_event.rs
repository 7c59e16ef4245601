//! What the payment processor told us, once (decisions 6, *Webhook*; the design is in deploy/decisions/0032).
//!
//! ```text
//! received ──worked on──▶ processed ◀── where nothing follows from its type, at once
//!    └─failed─▶ retrying ─┘   └─too often─▶ dead ──an operator──▶ retrying, dismissed
//! ```
//!
//! The processor sends an event until it is answered 200, and after that now and then once more: the entity's id is made of the processor's,
//! so that however often it comes there is one. What it says of a payment is the payment's to judge; here is kept that it was said, and
//! whether somebody has listened.

#[cfg(test)]
mod tests;

use crate::again::Again;
use crate::audit::{Audit, AuditAction};
use crate::authz::Action;
use crate::event::Event;
use crate::id::{EntityRef, Kind, ProcessorEventId};
use crate::machine::{self, Ctx, Deadline, Keys, Machine, Step, Timestamp};
use crate::policy::{Key, Scopes};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What follows inside of the control plane takes milliseconds; after that somebody should look.
const OVERDUE_AFTER: TimeDelta = TimeDelta::hours(1);
/// How long the body is kept after nobody needs it any more: as long as the processor shows its events.
pub const BODY_KEPT_FOR: TimeDelta = TimeDelta::days(30);
/// What is kept of a reason, in characters.
const LONGEST_REASON: usize = 500;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessorEvent {
    pub id: ProcessorEventId,
    /// The processor's own (`evt_…`).
    pub event_id: String,
    /// As the processor calls it, `payment_intent.succeeded` for example.
    pub event_type: String,
    /// What it is about, by the processor's id.
    pub object_id: Option<String>,
    /// When the processor says it came about.
    pub occurred_at: Option<Timestamp>,
    pub received_at: Timestamp,
    /// SHA-256 of what it says, by which another event under the same id is told apart.
    pub digest: String,
    /// The body as it came, sealed, in base64: there may be names and addresses in it. `None` once it is forgotten.
    pub body_enc: Option<String>,
    /// How often it was worked on in vain, since it was received or an operator had it tried anew.
    pub attempts: u32,
    /// Why the last attempt came to nothing.
    pub last_error: Option<String>,
    pub phase: Phase,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    /// Nobody has worked on it to an end.
    Received {
        again: Again,
    },
    /// It was worked on in vain, and is tried again.
    Retrying {
        again: Again,
    },
    /// It was tried in vain so often that an operator has to say what becomes of it.
    Dead {
        since: Timestamp,
    },
    Processed {
        at: Timestamp,
        outcome: Outcome,
    },
    /// An operator has said that it is nothing.
    Dismissed {
        at: Timestamp,
        reason: String,
    },
}

/// What it came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// A payment of ours has heard it.
    Told,
    /// It concerns something that was not made here.
    NotOurs,
    /// Nothing follows from events of its type.
    NothingToDo,
}

impl Outcome {
    pub const ALL: [Self; 3] = [Self::Told, Self::NotOurs, Self::NothingToDo];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Told => "told",
            Self::NotOurs => "not_ours",
            Self::NothingToDo => "nothing_to_do",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// It came in, with a signature that holds.
    Receive {
        event_id: String,
        event_type: String,
        object_id: Option<String>,
        occurred_at: Option<Timestamp>,
        digest: String,
        body_enc: String,
        /// Nothing follows from events of its type: there is nothing to work on.
        #[serde(default)]
        nothing_follows: bool,
    },
    /// Whoever it concerns has heard it, or it concerns nobody.
    Processed {
        outcome: Outcome,
    },
    /// It could not be carried out as it stands.
    Failed {
        why: String,
    },
    /// An operator has it worked on anew.
    Retry {
        reason: String,
    },
    /// An operator says that nothing is to follow from it.
    Dismiss {
        reason: String,
    },
    /// The same body under another key of the key ring.
    Reseal {
        body_enc: String,
    },
    Tick,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Receive { .. } => "receive",
            Self::Processed { .. } => "processed",
            Self::Failed { .. } => "failed",
            Self::Retry { .. } => "retry",
            Self::Dismiss { .. } => "dismiss",
            Self::Reseal { .. } => "reseal",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        match self {
            Self::Retry { .. } | Self::Dismiss { .. } => Action::SettleProcessorEvents,
            Self::Receive { .. } | Self::Processed { .. } | Self::Failed { .. } | Self::Reseal { .. } | Self::Tick => {
                Action::Advance
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// It is kept; `is_new`: since now.
    Kept {
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
    #[error("there is no such event of the processor's")]
    NotFound,
    #[error("another event came under this id before")]
    Differs,
    #[error("an event that is {state} waits for no operator")]
    WrongState { state: String },
}

impl Machine for ProcessorEvent {
    const KIND: Kind = Kind::ProcessorEvent;
    /// The webhook's body of up to 256 KiB, packed and sealed.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let Some(event) = state else { return Self::begin(command, ctx) };
        match command {
            Command::Receive { digest, .. } if digest == event.digest => Ok(Step::stay(Reply::Kept { is_new: false })),
            Command::Receive { .. } => Err(Rejection::Differs),
            Command::Processed { outcome } => Ok(event.processed(outcome, ctx)),
            Command::Failed { why } => Ok(event.failed(&why, ctx)),
            Command::Retry { reason } => event.retry(&reason, ctx),
            Command::Dismiss { reason } => event.dismiss(reason, ctx),
            Command::Reseal { body_enc } => Ok(event.resealed(body_enc)),
            Command::Tick => Ok(event.tick(ctx)),
        }
    }

    fn state(&self) -> &'static str {
        match self.phase {
            Phase::Received { .. } => "received",
            Phase::Retrying { .. } => "retrying",
            Phase::Dead { .. } => "dead",
            Phase::Processed { .. } => "processed",
            Phase::Dismissed { .. } => "dismissed",
        }
    }

    fn deadline(&self) -> Option<Deadline> {
        match self.phase {
            Phase::Received { .. } | Phase::Retrying { .. } => {
                Some(Deadline::new(self.received_at + OVERDUE_AFTER, "what the payment processor said is to be heeded"))
            }
            // Overdue from its beginning on: nothing goes on by itself.
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
                self.body_enc.as_ref().map(|_| at + BODY_KEPT_FOR)
            }
        }
    }

    fn keys(&self) -> Keys {
        Keys::default()
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl ProcessorEvent {
    fn begin(command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match command {
            Command::Receive { event_id, event_type, object_id, occurred_at, digest, body_enc, nothing_follows } => {
                let phase = match nothing_follows {
                    true => Phase::Processed { at: ctx.now, outcome: Outcome::NothingToDo },
                    false => Phase::Received { again: Again::first(ctx.now) },
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
                let step = Step::to(event, Reply::Kept { is_new: true }, "the payment processor said it");
                Ok(due.into_iter().fold(step, Step::event))
            }
            Command::Tick => Ok(Step::stay(Reply::Done)),
            Command::Processed { .. }
            | Command::Failed { .. }
            | Command::Retry { .. }
            | Command::Dismiss { .. }
            | Command::Reseal { .. } => Err(Rejection::NotFound),
        }
    }

    /// What is carried out is carried out, whoever had given it up meanwhile.
    fn processed(&self, outcome: Outcome, ctx: &Ctx<'_>) -> Step<Self> {
        match self.phase {
            Phase::Received { .. } | Phase::Retrying { .. } | Phase::Dead { .. } => {
                let next = Self { phase: Phase::Processed { at: ctx.now, outcome }, ..self.clone() };
                Step::to(next, Reply::Done, "it was heeded")
            }
            Phase::Processed { .. } | Phase::Dismissed { .. } => Step::stay(Reply::Done),
        }
    }

    fn failed(&self, why: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let (Phase::Received { again } | Phase::Retrying { again }) = self.phase else {
            return Step::stay(Reply::Done);
        };
        let most = ctx.policy.int(Key::BillingWebhookMaxAttempts, &Scopes::global(), ctx.now);
        let attempts = self.attempts.saturating_add(1);
        let (phase, so) = if i64::from(attempts) < most {
            (Phase::Retrying { again: again.next(ctx.now) }, "it could not be carried out, and is tried again")
        } else {
            (Phase::Dead { since: ctx.now }, "it was tried in vain too often")
        };
        let last_error = Some(why.chars().take(LONGEST_REASON).collect());
        Step::to(Self { phase, attempts, last_error, ..self.clone() }, Reply::Done, so)
    }

    fn retry(&self, reason: &str, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        self.waits_for_an_operator()?;
        let again = Again::first(ctx.now);
        let next = Self { phase: Phase::Retrying { again }, attempts: 0, ..self.clone() };
        let reply = next.shown();
        Ok(Step::to(next, reply, "an operator has it tried again")
            .event(self.due())
            .audit(self.audit(AuditAction::ProcessorEventsRetry, reason)))
    }

    fn dismiss(&self, reason: String, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        self.waits_for_an_operator()?;
        let audit = self.audit(AuditAction::ProcessorEventsDismiss, &reason);
        let next = Self { phase: Phase::Dismissed { at: ctx.now, reason }, ..self.clone() };
        let reply = next.shown();
        Ok(Step::to(next, reply, "an operator has dismissed it").audit(audit))
    }

    fn waits_for_an_operator(&self) -> Result<(), Rejection> {
        match self.phase {
            Phase::Retrying { .. } | Phase::Dead { .. } => Ok(()),
            Phase::Received { .. } | Phase::Processed { .. } | Phase::Dismissed { .. } => {
                Err(Rejection::WrongState { state: self.state().to_owned() })
            }
        }
    }

    fn resealed(&self, body_enc: String) -> Step<Self> {
        if self.body_enc.is_none() {
            return Step::stay(Reply::Done);
        }
        let next = Self { body_enc: Some(body_enc), ..self.clone() };
        Step::to(next, Reply::Done, "the key at rest was rotated")
    }

    fn tick(&self, ctx: &Ctx<'_>) -> Step<Self> {
        let said_again = |phase| {
            let next = Self { phase, ..self.clone() };
            Step::to(next, Reply::Done, "nobody has heeded it yet").event(self.due())
        };
        match self.phase {
            Phase::Received { again } if again.is_due(ctx.now) => {
                said_again(Phase::Received { again: again.next(ctx.now) })
            }
            Phase::Retrying { again } if again.is_due(ctx.now) => {
                said_again(Phase::Retrying { again: again.next(ctx.now) })
            }
            Phase::Processed { at, .. } | Phase::Dismissed { at, .. }
                if self.body_enc.is_some() && ctx.now >= at + BODY_KEPT_FOR =>
            {
                let next = Self { body_enc: None, ..self.clone() };
                Step::to(next, Reply::Done, "nobody needs its body any more")
            }
            Phase::Received { .. }
            | Phase::Retrying { .. }
            | Phase::Dead { .. }
            | Phase::Processed { .. }
            | Phase::Dismissed { .. } => Step::stay(Reply::Done),
        }
    }

    /// True while something is still to follow from it, or an operator to say what.
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

    fn audit(&self, action: AuditAction, reason: &str) -> Audit {
        let target = EntityRef { kind: Kind::ProcessorEvent, id: self.id.0 };
        let metadata = json!({
            "event_id": self.event_id,
            "event_type": self.event_type,
            "reason": reason,
        });
        Audit::new(action, target, metadata)
    }
}

//! What is asked and what can come back.

use crate::place::command_id;
use domain::{CommandId, EventId, Machine, Permit, Principal, Timestamp};
use serde::{Deserialize, Serialize};
use telemetry::Trace;

/// Everything about a command but the command: who asks, until when the answer is of use, and what makes it repeatable.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Asked {
    pub by: Principal,
    pub correlation_id: String,
    /// The trace that it belongs to (W3C Trace Context).
    pub traceparent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
    /// Checked again when the command is taken out of the mailbox: nobody waits for it after that. By the clock of this process: a
    /// command for another member carries the time that remains.
    pub deadline: Timestamp,
    pub command: Option<CommandKey>,
    /// Releases, operators and sagas under way: let in where new requests are turned away.
    pub urgent: bool,
    /// Asked by the thousand, with nobody waiting: what comes of it is written behind what somebody waits for.
    #[serde(default)]
    pub patient: bool,
}

impl Asked {
    /// Asked under `permit`, with an answer wanted until `deadline`.
    #[must_use]
    pub fn new(permit: &Permit, correlation_id: impl Into<String>, deadline: Timestamp) -> Self {
        Self {
            by: permit.principal().clone(),
            correlation_id: correlation_id.into(),
            traceparent: None,
            tracestate: None,
            deadline,
            command: None,
            urgent: false,
            patient: false,
        }
    }

    #[must_use]
    pub fn once(mut self, key: CommandKey) -> Self {
        self.command = Some(key);
        self
    }

    #[must_use]
    pub const fn urgently(mut self) -> Self {
        self.urgent = true;
        self
    }

    #[must_use]
    pub const fn patiently(mut self) -> Self {
        self.patient = true;
        self
    }

    /// As part of this trace; a state without a parent says nothing.
    #[must_use]
    pub fn traced(mut self, traceparent: Option<String>, tracestate: Option<String>) -> Self {
        self.tracestate = tracestate.filter(|_| traceparent.is_some());
        self.traceparent = traceparent;
        self
    }

    /// The span that asks, where it is in a trace.
    #[must_use]
    pub fn trace(&self) -> Option<Trace> {
        self.traceparent.as_deref().and_then(Trace::parse)
    }
}

/// What makes a command the same command when it comes again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandKey {
    pub id: CommandId,
    /// SHA-256 of the request: another request under the same id is refused.
    pub digest: [u8; 32],
    /// Keep the reply, for one who asks again.
    pub keep_reply: bool,
    /// The outbox row that this command carries out.
    pub consumes: Option<EventId>,
}

impl CommandKey {
    /// A command that somebody outside may send again.
    #[must_use]
    pub const fn repeatable(id: CommandId, digest: [u8; 32]) -> Self {
        Self { id, digest, keep_reply: true, consumes: None }
    }

    /// A command that only its directory sends again, after a change of owner. Its reply is not stored.
    #[must_use]
    pub(crate) const fn internal(chance: u128) -> Self {
        let id = CommandId(uuid::Builder::from_random_bytes(chance.to_be_bytes()).into_uuid());
        Self { id, digest: [0; 32], keep_reply: false, consumes: None }
    }

    /// The command that carries an event out, by its name: what follows from an event may turn out differently when it is worked on
    /// again, and the one must not pass for the other.
    #[must_use]
    pub fn of_event(event: EventId, command: &str) -> Self {
        let id = command_id(&[b"event", event.0.as_bytes(), command.as_bytes()]);
        Self { id, digest: [0; 32], keep_reply: false, consumes: Some(event) }
    }
}

/// An answer, and whether it was given before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered<R> {
    pub reply: R,
    /// True where the command had been carried out before and this is its first reply.
    pub replayed: bool,
    /// True where this command was committed: `false` where nothing had to change, or it was carried out before.
    pub written: bool,
    /// The entity's version after the command.
    pub version: i64,
}

pub type Answer<M> = Result<Answered<<M as Machine>::Reply>, AskError<<M as Machine>::Rejection>>;

/// Why there is no reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum AskError<J> {
    /// The machine said no. Nothing changed.
    #[error("{0}")]
    Rejected(J),
    /// The asker may not ask this. Nothing changed.
    #[error("not allowed")]
    Denied,
    /// The same command is being carried out at this moment.
    #[error("the same command is in progress")]
    InProgress,
    /// The command was carried out before, and nobody kept its reply.
    #[error("the command was carried out before")]
    AlreadyDone,
    /// Another request came under the same command id before. Nothing changed.
    #[error("the command id was used for another request")]
    Reused,
    /// A name that must be unique is taken. Nothing changed.
    #[error("the database refused: {constraint}")]
    Taken { constraint: String },
    /// Too much is waiting in front of the entity or its shard. Nothing changed.
    #[error("too many commands are waiting")]
    Overloaded,
    /// The entity failed too often or its snapshot cannot be read; an operator must look. Nothing changed.
    #[error("parked: {reason}")]
    Parked { reason: String },
    /// Certainly not carried out; asking again may succeed.
    #[error("unavailable: {reason}")]
    Unavailable { reason: String },
    /// It may or may not have been carried out; asking again with the same command id is safe.
    #[error("the outcome is unknown: {reason}")]
    Unknown { reason: String },
    /// The machine broke while deciding. Nothing changed.
    #[error("the machine failed: {reason}")]
    Broken { reason: String },
    /// The shard lives elsewhere. The directory retries; nobody else sees this.
    #[error("not the owner")]
    NotOwner,
}

//! The context of a command, and its results.

use crate::sharding::command_id;
use domain::state_machine::RequestOrigin;
use domain::{CommandId, EventId, Machine, Permit, Principal, Timestamp};
use serde::{Deserialize, Serialize};
use telemetry::SpanContext;

/// Everything about a command but the command: the caller, the deadline of its reply, and its idempotency key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CommandContext {
    pub by: Principal,
    #[serde(flatten)]
    pub origin: RequestOrigin,
    /// Checked again when the command leaves the mailbox: after the deadline no caller waits. By the clock of this process; a command
    /// that is forwarded carries the remaining time.
    pub deadline: Timestamp,
    pub command: Option<CommandKey>,
    /// Releases, operators and sagas in progress: admitted where new requests are shed.
    pub urgent: bool,
    /// One of thousands, without a waiting caller: its commit comes after those for which a caller waits.
    #[serde(default)]
    pub patient: bool,
}

impl CommandContext {
    /// A context under `permit`, outside of any trace, with a deadline for the reply.
    #[must_use]
    pub fn new(permit: &Permit, correlation_id: impl Into<String>, deadline: Timestamp) -> Self {
        Self::from_origin(permit, RequestOrigin::untraced(correlation_id), deadline)
    }

    /// A context for what `origin` caused.
    #[must_use]
    pub fn from_origin(permit: &Permit, origin: RequestOrigin, deadline: Timestamp) -> Self {
        Self { by: permit.principal().clone(), origin, deadline, command: None, urgent: false, patient: false }
    }

    #[must_use]
    pub fn with_key(mut self, key: CommandKey) -> Self {
        self.command = Some(key);
        self
    }

    #[must_use]
    pub const fn urgent(mut self) -> Self {
        self.urgent = true;
        self
    }

    #[must_use]
    pub const fn patient(mut self) -> Self {
        self.patient = true;
        self
    }

    /// The caller's span, where it is in a trace.
    #[must_use]
    pub fn trace(&self) -> Option<SpanContext> {
        self.origin.traceparent.as_deref().and_then(SpanContext::parse)
    }
}

/// The identity of a command, by which a resent one is recognized.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandKey {
    pub id: CommandId,
    /// SHA-256 of the request: another request under the same id is refused.
    pub digest: [u8; 32],
    /// Store the reply, to answer a resent command with it.
    pub keep_reply: bool,
    /// What the answer to the request shows beside the reply, as JSON ([`CommandRecord`](domain::commit::CommandRecord)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<String>,
    /// The outbox row that this command settles.
    pub consumes: Option<EventId>,
}

impl CommandKey {
    /// A command that an external client may resend.
    #[must_use]
    pub const fn repeatable(id: CommandId, digest: [u8; 32]) -> Self {
        Self { id, digest, keep_reply: true, resolved: None, consumes: None }
    }

    /// A command that only its directory resends, after a change of owner. Its reply is not stored.
    #[must_use]
    pub(crate) const fn internal(chance: u128) -> Self {
        let id = CommandId(uuid::Builder::from_random_bytes(chance.to_be_bytes()).into_uuid());
        Self { id, digest: [0; 32], keep_reply: false, resolved: None, consumes: None }
    }

    /// The command that reacts to an event, by name: a reaction may come out differently when the event is redelivered, and the two
    /// commands must not be taken for each other.
    #[must_use]
    pub fn for_event(event: EventId, command: &str) -> Self {
        let id = command_id(&[b"event", event.0.as_bytes(), command.as_bytes()]);
        Self { id, digest: [0; 32], keep_reply: false, resolved: None, consumes: Some(event) }
    }
}

/// A reply, and whether it is a replay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandReply<R> {
    pub reply: R,
    /// True where the command was executed before and this is its first reply.
    pub replayed: bool,
    /// True where this command was committed; `false` where nothing had to change, or where it is a replay.
    pub written: bool,
    /// The entity's version after the command.
    pub version: i64,
}

pub type AskResult<M> = Result<CommandReply<<M as Machine>::Reply>, AskError<<M as Machine>::Rejection>>;

/// Why there is no reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum AskError<J> {
    /// The machine refused. Nothing changed.
    #[error("{0}")]
    Rejected(J),
    /// The caller has no permission. Nothing changed.
    #[error("not allowed")]
    Denied,
    /// The same command is in flight.
    #[error("the same command is in progress")]
    InProgress,
    /// The command was executed before, and its reply is not stored.
    #[error("the command was carried out before")]
    AlreadyDone,
    /// Another request used the same command id before. Nothing changed.
    #[error("the command id was used for another request")]
    Reused,
    /// A unique name is taken. Nothing changed.
    #[error("the database refused: {constraint}")]
    Taken { constraint: String },
    /// The mailbox of the entity or the queue of its shard is full. Nothing changed.
    #[error("too many commands are waiting")]
    Overloaded,
    /// The entity failed too often or its snapshot cannot be read; it waits for an operator. Nothing changed.
    #[error("parked: {reason}")]
    Parked { reason: String },
    /// Certainly not executed; a retry may succeed.
    #[error("unavailable: {reason}")]
    Unavailable { reason: String },
    /// It may have been executed; a retry with the same command id is safe.
    #[error("the outcome is unknown: {reason}")]
    Unknown { reason: String },
    /// The machine panicked while deciding. Nothing changed.
    #[error("the machine failed: {reason}")]
    Broken { reason: String },
    /// Another member owns the shard. The directory retries; no other caller sees this.
    #[error("not the owner")]
    NotOwner,
}

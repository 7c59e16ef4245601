//! What the shell passes to the store, and what the store returns. Plain data, so that a simulation can replace Postgres.

pub use crate::precondition::Precondition;

use crate::audit::AuditRecord;
use crate::event::Event;
use crate::id::{CommandId, EntityRef, EventId, Shard};
use crate::ledger::Posting;
use crate::state_machine::{IndexKeys, RequestOrigin};
use crate::summand::Summand;
use crate::time::Timestamp;
use std::collections::BTreeMap;
use uuid::Uuid;

/// The number of an ownership of a shard. Every takeover raises it, every commit checks it, and it is never lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub i64);

/// One transition, ready to be made durable: the snapshot and everything that is written together with it.
#[derive(Clone, Debug)]
pub struct Commit {
    pub entity: EntityRef,
    pub shard: Shard,
    pub epoch: Epoch,
    /// The version that the decision was made from; 0 creates.
    pub expected_version: i64,
    /// The next state, as JSON.
    pub snapshot: String,
    pub from_state: Option<&'static str>,
    pub to_state: &'static str,
    pub keys: IndexKeys,
    pub claims: SetChange,
    pub terms: SetChange,
    /// By how much the sums of its kind change.
    pub summands: Vec<Summand>,
    /// The entity's next wake-up, and what it waits for.
    pub timer: Option<Timer>,
    pub at: Timestamp,
    pub command_name: &'static str,
    pub why: String,
    /// As the audit log names an actor.
    pub actor: String,
    pub origin: RequestOrigin,
    pub audit: Vec<AuditRecord>,
    pub outbox: Vec<(EventId, Event)>,
    /// Rows of the ledger, for the entity that is a billing account.
    pub postings: Vec<Posting>,
    pub command: Option<CommandRecord>,
    /// Versions of other entities that must still hold.
    pub requires: Vec<Precondition>,
    /// No caller waits for this commit, and there may be thousands at once: it is written after the commits that a caller waits for.
    pub patient: bool,
}

/// The prefix of the history's reason, where a transition only records that a command was refused.
pub const REFUSED: &str = "refused: ";

/// What a transition changes of its entity's claims ([`Machine::claims`](crate::Machine::claims)) or terms
/// ([`Machine::terms`](crate::Machine::terms)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetChange {
    pub added: Vec<String>,
    pub dropped: Vec<String>,
}

/// A due time in the deadline index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timer {
    /// The next tick.
    pub wake_at: Timestamp,
    /// The state's deadline, where it has one: past it the entity is overdue.
    pub deadline_at: Option<Timestamp>,
    pub reason: String,
}

/// What identifies a repeated command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandRecord {
    pub id: CommandId,
    /// SHA-256 of the request: another request under the same id is refused.
    pub digest: [u8; 32],
    /// The reply as JSON, returned when the command is repeated. `None` where no caller repeats it.
    pub reply: Option<String>,
    /// What the answer to the request shows beside the reply, as it was read before the command, as JSON. `None` where the reply suffices.
    pub resolved: Option<String>,
    /// The outbox row that this command handles; the same commit deletes it.
    pub consumes: Option<EventId>,
}

/// The result of a [`Commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[derive(strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum CommitOutcome {
    /// Durable.
    Applied,
    /// The version of the entity, or of an entity that the transition requires, differs: the entity must be loaded and the command decided
    /// again.
    Conflict,
    /// Other entities hold values that the transition claims; nothing was written.
    Claimed { holders: BTreeMap<String, Uuid> },
    /// The command id was used before; nothing was written.
    Duplicate(CompletedCommand),
    /// The shard is not owned under this epoch any more; nothing was written.
    Fenced,
    /// A constraint of the database forbids it (a name that is taken); nothing was written.
    Refused { constraint: String },
    /// Nothing was written, for certain; the store could not be reached or is overloaded.
    NotApplied { reason: String },
    /// It may or may not have been written.
    Unknown { reason: String },
}

/// A command that was carried out before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletedCommand {
    pub entity: Uuid,
    pub digest: [u8; 32],
    pub reply: Option<String>,
}

/// An entity as it was last committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub version: i64,
    pub body: String,
}

//! What the shell hands to the store, and what the store answers. Plain data, so that a simulation can stand in for Postgres.

use crate::audit::Audit;
use crate::event::Event;
use crate::id::{CommandId, EntityRef, EventId, Shard};
use crate::ledger::Posting;
use crate::machine::{Keys, Timestamp};
use std::collections::BTreeMap;
use uuid::Uuid;

/// An owner's term over a shard. Raised by every takeover, checked by every commit, never lowered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub i64);

/// One transition, ready to be made durable: the snapshot and everything that is written with it or not at all.
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
    pub keys: Keys,
    pub claims: SetChange,
    pub terms: SetChange,
    /// When the entity wants to be woken, and why it is waiting.
    pub timer: Option<Timer>,
    pub at: Timestamp,
    pub command_name: &'static str,
    pub why: String,
    /// As the audit log names an actor.
    pub actor: String,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    pub tracestate: Option<String>,
    pub audit: Vec<Audit>,
    pub outbox: Vec<(EventId, Event)>,
    /// Rows of the ledger, for the entity that is a billing account.
    pub postings: Vec<Posting>,
    pub command: Option<CommandRecord>,
    /// Others that must not have changed.
    pub rests_on: Vec<Footing>,
    /// Nobody waits for it, and there may be thousands at once: written behind what somebody waits for.
    pub patient: bool,
}

/// How the history begins to say why, where a transition keeps that a command was refused, and nothing of the command.
pub const REFUSED: &str = "refused: ";

/// Another entity at the version at which it was read. A transition that rests on it is written only while it is still at that
/// version; otherwise it is a [`Outcome::Conflict`], and nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Footing {
    pub entity: Uuid,
    pub version: i64,
}

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
    /// The state's end, where it has one: past it the entity is overdue.
    pub deadline_at: Option<Timestamp>,
    pub reason: String,
}

/// What makes a repeated command recognisable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandRecord {
    pub id: CommandId,
    /// SHA-256 of the request: another request under the same id is refused.
    pub digest: [u8; 32],
    /// The reply as JSON, given again to a repetition. `None` where nobody will ask again.
    pub reply: Option<String>,
    /// The outbox row that this command carries out; it goes in the same commit.
    pub consumes: Option<EventId>,
}

/// What became of a [`Commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Durable.
    Applied,
    /// The entity's version is another, or that of something that the transition rests on: it must be loaded and the command
    /// decided again.
    Conflict,
    /// Other entities have names that the transition claims; nothing was written.
    Claimed { holders: BTreeMap<String, Uuid> },
    /// The command id was used before; nothing was written.
    Duplicate(Done),
    /// The shard is no longer ours under this epoch; nothing was written.
    Fenced,
    /// A rule of the database forbids it (a name that is taken); nothing was written.
    Refused { constraint: String },
    /// Certainly nothing was written; the store could not be reached or is overloaded.
    NotApplied { reason: String },
    /// It may or may not have been written.
    Unknown { reason: String },
}

/// A command that was carried out before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
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

//! The versions of other entities that a decision is based on.

use uuid::Uuid;

/// Another entity at the version at which it was read. A transition that requires it commits only while the entity is still at that
/// version; otherwise the result is [`CommitOutcome::Conflict`](crate::commit::CommitOutcome::Conflict), and nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Precondition {
    pub entity: Uuid,
    pub version: i64,
}

//! What the shell requires of its environment, as traits: the store, the other members, and effects after a commit.

use domain::commit::{CompletedCommand, Epoch, Snapshot};
use domain::policy::PolicyBook;
use domain::{CommandId, Commit, CommitOutcome, Effect, EntityRef, Shard, Timestamp};
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;

/// Where transitions become durable.
pub trait Store: Send + Sync + 'static {
    /// The last committed snapshot, or `None` where the entity was never created. No commit of the entity is in flight when this
    /// returns: one may outlive its caller, and a decision from the snapshot must not be overtaken by it.
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>>;
    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome>;
    /// A command that was executed before.
    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>>;
    /// Marks an entity as parked, for the next owner of its shard. A mark of operation beside its state; without it the next owner
    /// finds out by itself.
    fn park(&self, entity: EntityRef, reason: String) -> BoxFuture<'_, Result<(), StoreReadError>> {
        let _ = (entity, reason);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("the store cannot be read: {reason}")]
pub struct StoreReadError {
    pub reason: String,
    /// True where the store holds a snapshot that no member has committed: reading it again ends the same way.
    pub is_altered: bool,
}

impl StoreReadError {
    /// The store cannot be reached at the moment.
    #[must_use]
    pub const fn unavailable(reason: String) -> Self {
        Self { reason, is_altered: false }
    }
}

/// The other members of the cluster.
pub trait Remote: Send + Sync + 'static {
    /// Sends a command to the owner of `shard`. Returns before `timeout` where that owner loses the shard.
    fn request(&self, shard: Shard, payload: Vec<u8>, timeout: Duration)
    -> BoxFuture<'_, Result<Vec<u8>, RemoteError>>;
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
    /// No member serves the shard at this moment; nothing was delivered.
    #[error("no member serves the shard")]
    NoResponders,
    /// It was sent; the outcome is unknown.
    #[error("no answer in time")]
    TimedOut,
    /// It was sent to an owner that has lost the shard since; the outcome is unknown, and that owner commits nothing more.
    #[error("the shard's owner has changed")]
    OwnerChanged,
    /// It could not be sent.
    #[error("the bus cannot be reached: {0}")]
    Unreachable(String),
}

/// Effects of a commit. Any of them may be lost.
pub trait Effects: Send + Sync + 'static {
    fn perform(&self, effect: Effect);
}

/// The time, randomness and policy that a decision is given.
pub trait Environment: Send + Sync + 'static {
    fn now(&self) -> Timestamp;
    fn seed(&self) -> u128;
    fn policy(&self) -> Arc<PolicyBook>;
    /// Whether this member's lease is fresh. Only then may it reply from memory: after that another member may own its shards, and its
    /// memory may be stale. What was committed is true in any case.
    fn may_answer_from_memory(&self) -> bool {
        true
    }
}

/// The term under which a member owns a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    pub shard: Shard,
    pub epoch: Epoch,
}

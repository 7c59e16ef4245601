//! What the shell needs of the world, as traits: the store, the other members, and what is done at once after a commit.

use domain::commit::{Done, Epoch, Snapshot};
use domain::policy::PolicyBook;
use domain::{CommandId, Commit, Effect, EntityRef, Outcome, Shard, Timestamp};
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;

/// Where transitions become durable.
pub trait Store: Send + Sync + 'static {
    /// The last committed snapshot, or `None` where the entity was never created. Nothing of the entity that was handed over before is
    /// under way any more: who asked for it may be gone, and what is decided from the snapshot must not be overtaken by it.
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreError>>;
    fn commit(&self, commit: Commit) -> BoxFuture<'_, Outcome>;
    /// A command that was carried out before.
    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<Done>, StoreError>>;
    /// Marks an entity as parked, for whoever owns its shard next. A mark of operation beside its state; where none is kept, the next
    /// owner finds out by itself.
    fn park(&self, entity: EntityRef, reason: String) -> BoxFuture<'_, Result<(), StoreError>> {
        let _ = (entity, reason);
        Box::pin(std::future::ready(Ok(())))
    }
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("the store cannot be read: {reason}")]
pub struct StoreError {
    pub reason: String,
    /// True where the store holds what no member has committed: reading it again ends the same way.
    pub is_altered: bool,
}

impl StoreError {
    /// The store cannot be asked at the moment.
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
    /// Nobody serves the shard at this moment; nothing was delivered.
    #[error("nobody serves the shard")]
    NoResponders,
    /// It was sent; what became of it is not known.
    #[error("no answer in time")]
    TimedOut,
    /// It was sent to an owner that has lost the shard since; what became of it is not known, and that owner commits nothing more.
    #[error("the shard's owner has changed")]
    OwnerChanged,
    /// It could not be sent.
    #[error("the bus cannot be reached: {0}")]
    Unreachable(String),
}

/// What is worth doing at once when a commit stands. All of it may be lost.
pub trait Effects: Send + Sync + 'static {
    fn perform(&self, effect: Effect);
}

/// Time, chance and policy, as they are given to a decision.
pub trait World: Send + Sync + 'static {
    fn now(&self) -> Timestamp;
    fn seed(&self) -> u128;
    fn policy(&self) -> Arc<PolicyBook>;
    /// Whether this member's renewal is fresh. Only then may it answer from its memory: after that its shards may be another's,
    /// and what it remembers may be old. What was committed is true in any case.
    fn may_answer_from_memory(&self) -> bool {
        true
    }
}

/// A shard's term, as its owner holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    pub shard: Shard,
    pub epoch: Epoch,
}

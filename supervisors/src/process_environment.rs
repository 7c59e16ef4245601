//! The environment of this process's entities (clock, randomness, policy), and the adapter between the shell's store and Postgres.

use crate::cluster::ClusterView;
use crate::metrics::EventMetrics;
use actors::ports::{Environment, Store, StoreReadError};
use actors::sharding::shard_of;
use arc_swap::ArcSwap;
use chrono::{DurationRound, TimeDelta, Utc};
use domain::commit::{CompletedCommand, Snapshot};
use domain::policy::PolicyBook;
use domain::{CommandId, Commit, CommitOutcome, EntityRef, Timestamp};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::loader::LoadError;
use persistence::{Cluster, Committer, Loader, Reads};
use prometheus::IntCounter;
use std::sync::Arc;
use tokio::sync::Notify;

/// The clock, the random numbers, the policy values as they were last read, and this member's lease.
pub struct ProcessEnvironment {
    policy: ArcSwap<PolicyBook>,
    /// Notified when the policy values are to be read at once.
    pub policy_written: Notify,
    view: Arc<ClusterView>,
}

impl ProcessEnvironment {
    #[must_use]
    pub fn new(view: Arc<ClusterView>) -> Self {
        Self { policy: ArcSwap::default(), policy_written: Notify::new(), view }
    }

    /// Replaces the policy values.
    pub fn set_policy_book(&self, book: PolicyBook) {
        self.policy.store(Arc::new(book));
    }
}

impl Environment for ProcessEnvironment {
    /// To the microsecond, as Postgres stores it: a decided time and the same time read back are equal.
    fn now(&self) -> Timestamp {
        let now = Utc::now();
        now.duration_trunc(TimeDelta::microseconds(1)).unwrap_or(now)
    }

    fn seed(&self) -> u128 {
        rand::random()
    }

    fn policy(&self) -> Arc<PolicyBook> {
        self.policy.load_full()
    }

    fn may_answer_from_memory(&self) -> bool {
        self.view.has_fresh_lease()
    }
}

/// The store of the entities: Postgres through the committer, the loader and the read pool.
pub struct PgStore {
    pub committer: Committer,
    pub reads: Reads,
    pub loader: Loader,
    /// Notified when a commit was fenced, since another member owns its shard: the ownership table is to be read at once.
    pub fenced: Arc<Notify>,
    pub metrics: EventMetrics,
    /// Stores which entities are parked.
    pub cluster: Cluster,
}

impl Store for PgStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move {
            if !self.committer.wait_settled(entity.id, shard_of(entity.id)).await {
                return Err(StoreReadError::unavailable(
                    "the fate of a transition that was sent is not known yet".to_owned(),
                ));
            }
            self.loader.load(entity).await.map_err(|error| match error {
                LoadError::Store(error) => store_error(&error),
                LoadError::Ended => StoreReadError::unavailable(error.to_string()),
            })
        }
        .boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        async move {
            let counters = self.metrics.counters_for(&commit);
            let outcome = self.committer.commit(commit).await;
            match &outcome {
                CommitOutcome::Applied => counters.iter().for_each(IntCounter::inc),
                CommitOutcome::Fenced => self.fenced.notify_one(),
                CommitOutcome::Conflict
                | CommitOutcome::Claimed { .. }
                | CommitOutcome::Duplicate(_)
                | CommitOutcome::Refused { .. }
                | CommitOutcome::NotApplied { .. }
                | CommitOutcome::Unknown { .. } => {}
            }
            outcome
        }
        .boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>> {
        async move { self.reads.command(id).await.map_err(|error| store_error(&error)) }.boxed()
    }

    fn park(&self, entity: EntityRef, reason: String) -> BoxFuture<'_, Result<(), StoreReadError>> {
        async move { self.cluster.park(entity, shard_of(entity.id), &reason).await.map_err(|error| store_error(&error)) }
            .boxed()
    }
}

fn store_error(error: &persistence::StoreError) -> StoreReadError {
    StoreReadError { reason: format!("{error}: {}", error.source), is_altered: error.seal_refused().is_some() }
}

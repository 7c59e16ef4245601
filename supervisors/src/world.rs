//! Time, chance and policy as this process knows them, and the adapter between the shell's store and Postgres.

use crate::cluster::View;
use crate::figures::EventFigures;
use actors::place::shard_of;
use actors::ports::{Store, StoreError, World};
use arc_swap::ArcSwap;
use chrono::{DurationRound, TimeDelta, Utc};
use domain::commit::{Done, Snapshot};
use domain::policy::PolicyBook;
use domain::{CommandId, Commit, EntityRef, Outcome, Timestamp};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::loader::LoadError;
use persistence::{Cluster, Committer, Loader, Reads};
use prometheus::IntCounter;
use std::sync::Arc;
use tokio::sync::Notify;

/// The clock, the dice, the policy values as they were read last, and this member's lease.
pub struct Here {
    policy: ArcSwap<PolicyBook>,
    /// Told when the policy values should be read now.
    pub policy_written: Notify,
    view: Arc<View>,
}

impl Here {
    #[must_use]
    pub fn new(view: Arc<View>) -> Self {
        Self { policy: ArcSwap::default(), policy_written: Notify::new(), view }
    }

    /// Replaces the policy values.
    pub fn learn(&self, book: PolicyBook) {
        self.policy.store(Arc::new(book));
    }
}

impl World for Here {
    /// To the microsecond, as Postgres keeps it: what is decided and what is read back are equal.
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
        self.view.is_fresh()
    }
}

/// Postgres, as the shell sees it.
pub struct Durable {
    pub committer: Committer,
    pub reads: Reads,
    pub loader: Loader,
    /// Told when a commit found that its shard is another's: the books should be read now.
    pub fenced: Arc<Notify>,
    pub told: EventFigures,
    /// Keeps what is parked.
    pub cluster: Cluster,
}

impl Store for Durable {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreError>> {
        async move {
            if !self.committer.certain(entity.id, shard_of(entity.id)).await {
                return Err(StoreError::unavailable(
                    "the fate of a transition that was sent is not known yet".to_owned(),
                ));
            }
            self.loader.load(entity).await.map_err(|error| match error {
                LoadError::Store(error) => unreadable(&error),
                LoadError::Ended => StoreError::unavailable(error.to_string()),
            })
        }
        .boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Outcome> {
        async move {
            let told = self.told.of(&commit);
            let outcome = self.committer.commit(commit).await;
            match &outcome {
                Outcome::Applied => told.iter().for_each(IntCounter::inc),
                Outcome::Fenced => self.fenced.notify_one(),
                Outcome::Conflict
                | Outcome::Claimed { .. }
                | Outcome::Duplicate(_)
                | Outcome::Refused { .. }
                | Outcome::NotApplied { .. }
                | Outcome::Unknown { .. } => {}
            }
            outcome
        }
        .boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<Done>, StoreError>> {
        async move { self.reads.command(id).await.map_err(|error| unreadable(&error)) }.boxed()
    }

    fn park(&self, entity: EntityRef, reason: String) -> BoxFuture<'_, Result<(), StoreError>> {
        async move { self.cluster.park(entity, shard_of(entity.id), &reason).await.map_err(|error| unreadable(&error)) }
            .boxed()
    }
}

fn unreadable(error: &persistence::StoreError) -> StoreError {
    StoreError { reason: format!("{error}: {}", error.source), is_altered: error.seal_refused().is_some() }
}

//! The adapter between the shell's store and Postgres: entities are loaded and commits are written through the crate `persistence`.

use crate::metrics::EventMetrics;
use actors::sharding::shard_of;
use actors::shell_dependencies::{Store, StoreReadError};
use domain::commit::{CompletedCommand, Snapshot};
use domain::{CommandId, Commit, CommitOutcome, EntityRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::loader::LoadError;
use persistence::{Cluster, Committer, Loader, Reads};
use std::sync::Arc;
use tokio::sync::Notify;

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
                    "the outcome of a transition that was sent is not known yet".to_owned(),
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
            let observations = self.metrics.observations_of(&commit);
            let outcome = self.committer.commit(commit).await;
            match &outcome {
                CommitOutcome::Applied => observations.record(),
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

//! The shell's store over a real Postgres.

use actors::interfaces::{Store, StoreReadError};
use domain::commit::{CompletedCommand, Snapshot};
use domain::{CommandId, Commit, CommitOutcome, EntityRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use persistence::{Committer, Reads};
pub(crate) struct PgTestStore {
    pub(crate) committer: Committer,
    pub(crate) reads: Reads,
}

impl Store for PgTestStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move { self.reads.snapshot(entity).await.map_err(unreadable) }.boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        self.committer.commit(commit).boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>> {
        async move { self.reads.command(id).await.map_err(unreadable) }.boxed()
    }
}

fn unreadable(error: persistence::StoreError) -> StoreReadError {
    StoreReadError::unavailable(error.to_string())
}

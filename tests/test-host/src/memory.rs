//! A store in memory, for tests that read nothing but through the machines.

use actors::shell_dependencies::{Store, StoreReadError};
use domain::commit::{CompletedCommand, Snapshot};
use domain::{CommandId, Commit, CommitOutcome, EntityRef};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The duration of a commit, so that concurrent ones overlap.
const COMMIT_TIME: Duration = Duration::from_millis(2);

/// Snapshots and completed commands, with the rules of the database: one effect for each command id, versions in order.
#[derive(Default)]
pub struct MemoryStore {
    state: Mutex<StoredState>,
    loses_response: AtomicBool,
}

#[derive(Default)]
struct StoredState {
    entities: BTreeMap<EntityRef, Snapshot>,
    commands: BTreeMap<CommandId, CompletedCommand>,
}

impl MemoryStore {
    /// Applies the next commit, and loses its response.
    pub fn lose_next_response(&self) {
        self.loses_response.store(true, Ordering::SeqCst);
    }

    /// Whether the next response will be lost.
    #[must_use]
    pub fn loses_next_response(&self) -> bool {
        self.loses_response.load(Ordering::SeqCst)
    }
}

impl Store for MemoryStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move { Ok(self.state.lock().unwrap().entities.get(&entity).cloned()) }.boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        async move {
            tokio::time::sleep(COMMIT_TIME).await;
            let mut state = self.state.lock().unwrap();
            if let Some(done) = commit.command.as_ref().and_then(|command| state.commands.get(&command.id)) {
                return CommitOutcome::Duplicate(done.clone());
            }
            let version = state.entities.get(&commit.entity).map_or(0, |snapshot| snapshot.version);
            if version != commit.expected_version {
                return CommitOutcome::Conflict;
            }
            if let Some(command) = commit.command {
                let done = CompletedCommand { entity: commit.entity.id, digest: command.digest, reply: command.reply };
                state.commands.insert(command.id, done);
            }
            state.entities.insert(commit.entity, Snapshot { version: version + 1, body: commit.snapshot });
            if self.loses_response.swap(false, Ordering::SeqCst) {
                return CommitOutcome::Unknown { reason: "the connection broke".to_owned() };
            }
            CommitOutcome::Applied
        }
        .boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>> {
        async move { Ok(self.state.lock().unwrap().commands.get(&id).cloned()) }.boxed()
    }
}

//! A store in memory, for tests that read nothing but through the machines.

use actors::interfaces::{Store, StoreReadError};
use domain::commit::{CompletedCommand, Snapshot};
use domain::{CommandId, Commit, CommitOutcome, EntityRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Default)]
pub(super) struct MemoryStore {
    state: Mutex<MemoryState>,
    /// The response to the next commit is lost.
    pub(super) loses_a_response: AtomicBool,
}

#[derive(Default)]
struct MemoryState {
    entities: BTreeMap<EntityRef, Snapshot>,
    commands: BTreeMap<CommandId, CompletedCommand>,
}

impl Store for MemoryStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move { Ok(self.state.lock().unwrap().entities.get(&entity).cloned()) }.boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        async move {
            // As long as a commit takes, so that concurrent ones overlap.
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
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
            if self.loses_a_response.swap(false, Ordering::SeqCst) {
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

//! A store in memory, for tests that read nothing but through the machines.

use actors::ports::{Store, StoreError};
use domain::commit::{Done, Snapshot};
use domain::{CommandId, Commit, EntityRef, Outcome};
use futures::FutureExt;
use futures::future::BoxFuture;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

#[derive(Default)]
pub(super) struct Memory {
    books: Mutex<Books>,
    /// The answer to the next commit is lost on its way.
    pub(super) loses_an_answer: AtomicBool,
}

#[derive(Default)]
struct Books {
    entities: BTreeMap<EntityRef, Snapshot>,
    commands: BTreeMap<CommandId, Done>,
}

impl Store for Memory {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreError>> {
        async move { Ok(self.books.lock().unwrap().entities.get(&entity).cloned()) }.boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Outcome> {
        async move {
            // As long as a commit takes, so that what runs in parallel meets.
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            let mut books = self.books.lock().unwrap();
            if let Some(done) = commit.command.as_ref().and_then(|command| books.commands.get(&command.id)) {
                return Outcome::Duplicate(done.clone());
            }
            let version = books.entities.get(&commit.entity).map_or(0, |snapshot| snapshot.version);
            if version != commit.expected_version {
                return Outcome::Conflict;
            }
            if let Some(command) = commit.command {
                let done = Done { entity: commit.entity.id, digest: command.digest, reply: command.reply };
                books.commands.insert(command.id, done);
            }
            books.entities.insert(commit.entity, Snapshot { version: version + 1, body: commit.snapshot });
            if self.loses_an_answer.swap(false, Ordering::SeqCst) {
                return Outcome::Unknown { reason: "the connection broke".to_owned() };
            }
            Outcome::Applied
        }
        .boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<Done>, StoreError>> {
        async move { Ok(self.books.lock().unwrap().commands.get(&id).cloned()) }.boxed()
    }
}

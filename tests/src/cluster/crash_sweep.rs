//! Kills of a replica at chosen commits, before they are durable or after, when their responses are lost.

use super::db_lock::{DbLock, StatementFate, WRITES};
use super::{TestCluster, WAIT_TIMEOUT};
use std::time::Duration;

/// A commit at which the replica is killed.
#[derive(Clone, Debug)]
pub struct KillPoint {
    pub kind: String,
    pub command: String,
    /// It is left out where it has happened more often than this before its turn: some commits do not wait for each other.
    pub at_most: Option<i64>,
}

impl TestCluster {
    /// Waits until a commit is blocked by this lock, kills the first replica, which has sent it, and decides what becomes of it.
    pub async fn kill_while_writing(&mut self, lock: DbLock, fate: StatementFate) {
        self.kill_while_writing_within(lock, fate, WAIT_TIMEOUT).await;
    }

    async fn kill_while_writing_within(&mut self, lock: DbLock, fate: StatementFate, limit: Duration) {
        lock.expect_blocked_within(WRITES, limit).await;
        self.kill9_replica(0);
        lock.unlock_after_crash(WRITES, fate).await;
    }

    /// Sends the request, and kills the replica, which owns every entity, at each of these commits in turn. Each has to be due within the
    /// limit.
    pub async fn request_with_kills<T: Send + 'static>(
        &mut self,
        request: impl Future<Output = T> + Send + 'static,
        kills: Vec<KillPoint>,
        fate: StatementFate,
        limit: Duration,
    ) -> T {
        let mut kills = kills.into_iter();
        let mut next = self.lock_next(&mut kills).await;
        let answered = tokio::spawn(request);
        while let Some(lock) = next {
            self.kill_while_writing_within(lock, fate, limit).await;
            self.expect_every_gpu_held_once().await;
            // No replica runs that could commit it before it is locked.
            next = self.lock_next(&mut kills).await;
            self.restart_replica(0).await;
        }
        answered.await.expect("the request is answered in the end")
    }

    async fn lock_next(&self, kills: &mut impl Iterator<Item = KillPoint>) -> Option<DbLock> {
        for KillPoint { kind, command, at_most } in kills {
            let lock = self.lock_commits_of(&kind, &command).await;
            let Some(most) = at_most else { return Some(lock) };
            if self.count_transitions(&kind, &command).await <= most {
                return Some(lock);
            }
            lock.unlock().await;
        }
        None
    }
}

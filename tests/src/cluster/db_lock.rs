//! Locks on a row, a table or the commits of a command, so that a test can kill a replica in the middle of a write and then roll the write
//! back or let it commit.

use super::{TestCluster, WAIT_TIMEOUT};
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The commit of a batch of transitions, as `pg_stat_activity` shows it.
pub const WRITES: &str = "-- One batch of transitions%";

/// Every commit shares an advisory lock by the name of its command, which a test can take exclusively.
const COMMIT_GATE: [&str; 2] = [
    "CREATE FUNCTION commit_gate() RETURNS trigger LANGUAGE plpgsql AS \
     $$ BEGIN PERFORM pg_advisory_xact_lock_shared(hashtext(NEW.kind || ' ' || NEW.command)); RETURN NULL; END $$",
    "CREATE TRIGGER commit_gate AFTER INSERT ON history FOR EACH ROW EXECUTE FUNCTION commit_gate()",
];

/// A lock that is held until it is released.
pub struct DbLock {
    holder: Transaction<'static, Postgres>,
    holder_pid: i32,
    pool: PgPool,
    /// The entity whose timer was delayed.
    delayed_timer: Option<Uuid>,
}

/// What happens to a blocked statement whose client is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatementFate {
    /// It was a read without a write.
    ReadOnly,
    /// It is rolled back.
    RolledBack,
    /// It commits, and no client gets the response.
    Committed,
}

impl TestCluster {
    /// Locks the row of this entity; other entities are not affected.
    pub async fn lock_entity(&self, id: Uuid) -> DbLock {
        DbLock::by(&self.pool, format!("SELECT FROM entity WHERE id = '{id}' FOR UPDATE")).await
    }

    /// As [`TestCluster::lock_entity`], with the entity's timer delayed while it is locked.
    pub async fn lock_entity_without_timer(&self, id: Uuid) -> DbLock {
        let lock = self.lock_entity(id).await;
        let later = "UPDATE deadline SET wake_at = now() + interval '1 hour' WHERE entity = $1";
        sqlx::query(later).bind(id).execute(&self.pool).await.expect("the deadline can be moved");
        DbLock { delayed_timer: Some(id), ..lock }
    }

    /// Blocks the commits of this command at entities of this kind: their statements have written all of it, and do not commit.
    pub async fn lock_commits_of(&self, kind: &str, command: &str) -> DbLock {
        let is_made = "SELECT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'commit_gate')";
        // Making it again would wait for a commit that is blocked.
        if !sqlx::query_scalar::<_, bool>(is_made).fetch_one(&self.pool).await.expect("it answers") {
            for statement in COMMIT_GATE {
                sqlx::raw_sql(statement).execute(&self.pool).await.expect("a trigger can be made");
            }
        }
        DbLock::by(&self.pool, format!("SELECT pg_advisory_xact_lock(hashtext('{kind} {command}'))")).await
    }

    /// Locks a table against reads.
    pub async fn lock_table(&self, name: &'static str) -> DbLock {
        DbLock::by(&self.pool, format!("LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")).await
    }
}

impl DbLock {
    async fn by(pool: &PgPool, statement: String) -> Self {
        let mut holder = pool.begin().await.expect("a transaction");
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&mut *holder).await.expect("the lock is free in time");
        let holder_pid =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *holder).await.expect("it answers");
        Self { holder, holder_pid, pool: pool.clone(), delayed_timer: None }
    }

    /// The connection that holds the lock: no other can read a locked table.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.holder
    }

    /// Waits until a statement with this beginning is blocked.
    pub async fn expect_blocked(&self, statement: &str) {
        self.expect_blocked_within(statement, WAIT_TIMEOUT).await;
    }

    /// The same, for what a lease of a dead worker may hold up.
    pub async fn expect_blocked_within(&self, statement: &str, limit: Duration) {
        self.wait_until_blocked(statement, 1, limit).await;
    }

    /// Waits until this many statements are blocked.
    pub async fn expect_blocked_count(&self, statement: &str, many: usize) {
        self.wait_until_blocked(statement, many, WAIT_TIMEOUT).await;
    }

    async fn wait_until_blocked(&self, statement: &str, many: usize, limit: Duration) {
        let until = Instant::now() + limit;
        while self.blocked_backends(statement).await.len() < many {
            if Instant::now() >= until {
                let activity = self.activity().await;
                panic!("{many} do not wait with {statement} within {limit:?}: {activity:#?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Releases the lock.
    pub async fn unlock(self) {
        self.holder.rollback().await.expect("the lock is given back");
    }

    /// Releases the lock after the client of the blocked statement has died.
    pub async fn unlock_after_crash(self, statement: &str, fate: StatementFate) {
        let waiting = self.blocked_backends(statement).await;
        // One that has reached its statement timeout meanwhile is rolled back.
        assert!(fate != StatementFate::Committed || !waiting.is_empty(), "{statement} has given up meanwhile");
        if fate == StatementFate::RolledBack {
            for backend in &waiting {
                let ended: bool = sqlx::query_scalar("SELECT pg_terminate_backend($1, 60000)")
                    .bind(backend)
                    .fetch_one(&self.pool)
                    .await
                    .expect("a backend can be ended");
                assert!(ended, "{statement}");
            }
        }
        self.holder.rollback().await.expect("the lock is given back");
        let until = Instant::now() + WAIT_TIMEOUT;
        let gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY($1)";
        while sqlx::query_scalar::<_, i64>(gone).bind(&waiting).fetch_one(&self.pool).await.expect("it answers") > 0 {
            assert!(Instant::now() < until, "what was sent has not ended within {WAIT_TIMEOUT:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if let Some(id) = self.delayed_timer {
            let now =
                "UPDATE deadline SET wake_at = now() WHERE entity = $1 AND wake_at > now() + interval '30 minutes'";
            sqlx::query(now).bind(id).execute(&self.pool).await.expect("the deadline can be moved");
        }
    }

    /// What every backend of this database does.
    async fn activity(&self) -> Vec<String> {
        sqlx::query_scalar(
            "SELECT concat_ws(' ', pid, state, wait_event_type, wait_event, left(query, 100)) FROM pg_stat_activity \
             WHERE datname = current_database() ORDER BY pid",
        )
        .fetch_all(&self.pool)
        .await
        .unwrap_or_default()
    }

    /// The Postgres backends with such a statement that are blocked by this lock.
    async fn blocked_backends(&self, statement: &str) -> Vec<i32> {
        sqlx::query_scalar(
            "SELECT pid FROM pg_stat_activity WHERE query LIKE $1 AND $2 = ANY(pg_blocking_pids(pid)) \
             AND wait_event_type = 'Lock'",
        )
        .bind(statement)
        .bind(self.holder_pid)
        .fetch_all(&self.pool)
        .await
        .expect("the activity can be read")
    }
}

//! A row or a table of the store that a test holds, so that a replica can be made to die at a write, and the write to come to nothing or not.

use super::{PATIENCE, World};
use sqlx::{PgConnection, PgPool, Postgres, Transaction};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// A transition on its way into the store, as the server's activity shows it.
pub const WRITES: &str = "-- One batch of transitions%";

/// Held until it is given back.
pub struct Held {
    holder: Transaction<'static, Postgres>,
    holder_pid: i32,
    pool: PgPool,
    /// Whose timer was put off.
    untimed: Option<Uuid>,
}

/// What becomes of a statement whose sender is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It was a read.
    Nothing,
    /// It never happens.
    CutOff,
    /// It happens all the same, and nobody is told.
    Written,
}

impl World {
    /// Nobody changes this entity; what does not concern it goes on.
    pub async fn hold(&self, id: Uuid) -> Held {
        Held::by(&self.pool, format!("SELECT FROM entity WHERE id = '{id}' FOR UPDATE")).await
    }

    /// The same, and its own timer does not come while it is held.
    pub async fn hold_untimed(&self, id: Uuid) -> Held {
        let held = self.hold(id).await;
        let later = "UPDATE deadline SET wake_at = now() + interval '1 hour' WHERE entity = $1";
        sqlx::query(later).bind(id).execute(&self.pool).await.expect("the deadline can be moved");
        Held { untimed: Some(id), ..held }
    }

    /// Nobody reads this table.
    pub async fn hold_table(&self, name: &'static str) -> Held {
        Held::by(&self.pool, format!("LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE")).await
    }
}

impl Held {
    async fn by(pool: &PgPool, statement: String) -> Self {
        let mut holder = pool.begin().await.expect("a transaction");
        sqlx::query(sqlx::AssertSqlSafe(statement)).execute(&mut *holder).await.expect("the lock is free in time");
        let holder_pid =
            sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *holder).await.expect("it answers");
        Self { holder, holder_pid, pool: pool.clone(), untimed: None }
    }

    /// Who holds a table is the only one who can read it.
    pub fn reader(&mut self) -> &mut PgConnection {
        &mut self.holder
    }

    /// Until a statement that begins like this waits.
    pub async fn expect_waiting(&self, statement: &str) {
        self.expect_so_many_waiting(statement, 1).await;
    }

    /// Until so many do.
    pub async fn expect_so_many_waiting(&self, statement: &str, many: usize) {
        let until = Instant::now() + PATIENCE;
        while self.waiting(statement).await.len() < many {
            assert!(Instant::now() < until, "{many} do not wait with {statement} within {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Gives it back to those who live.
    pub async fn let_go(self) {
        self.holder.rollback().await.expect("the lock is given back");
    }

    /// Gives it back, when whoever sent the statement is dead.
    pub async fn give_back(self, statement: &str, then: Then) {
        let waiting = self.waiting(statement).await;
        assert!(!waiting.is_empty(), "{statement} has given up meanwhile");
        if then == Then::CutOff {
            for backend in &waiting {
                let ended: bool = sqlx::query_scalar("SELECT pg_terminate_backend($1, 5000)")
                    .bind(backend)
                    .fetch_one(&self.pool)
                    .await
                    .expect("a backend can be ended");
                assert!(ended, "{statement}");
            }
        }
        self.holder.rollback().await.expect("the lock is given back");
        let until = Instant::now() + PATIENCE;
        let gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY($1)";
        while sqlx::query_scalar::<_, i64>(gone).bind(&waiting).fetch_one(&self.pool).await.expect("it answers") > 0 {
            assert!(Instant::now() < until, "what was sent has not ended within {PATIENCE:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if let Some(id) = self.untimed {
            let now =
                "UPDATE deadline SET wake_at = now() WHERE entity = $1 AND wake_at > now() + interval '30 minutes'";
            sqlx::query(now).bind(id).execute(&self.pool).await.expect("the deadline can be moved");
        }
    }

    /// The server's processes that wait for this with such a statement.
    async fn waiting(&self, statement: &str) -> Vec<i32> {
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

//! The read pool: connections for statements outside a transaction.
//!
//! The library's pool pings a connection after each use, which costs one round trip for every read. Here a connection is returned only
//! when its statement was answered to the end, so that no ping is needed; one whose reader was dropped during the statement is closed.
//! Few are opened at once, since a handshake is the most expensive part of a connection, and a waiting reader takes one that is
//! returned meanwhile; one whose opener was dropped is opened all the same, for the next reader. Otherwise an overloaded machine would
//! begin handshakes and give them up, and never have a connection.

use super::{session, takes_writes};
use crate::ended_sessions;
use sqlx::postgres::{PgConnection, PgPool, PgRow};
use sqlx::{Execute, Executor as _, Postgres};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

/// At each return, one connection that was idle for so long is closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// How many are opened at once, and the timeout of an opening whose reader was dropped.
const CONCURRENT_OPENS: usize = 2;
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Clones share the connections.
#[derive(Clone, Debug)]
pub(crate) struct ReadPool {
    /// Its options are those of a connection that is opened.
    source: PgPool,
    permits: Arc<Semaphore>,
    openings: Arc<Semaphore>,
    acquire_timeout: Duration,
    /// The last used one is at the end, and is used next.
    idle: Arc<Mutex<Vec<IdleConnection>>>,
    /// A connection was returned.
    returned: Arc<Notify>,
}

#[derive(Debug)]
struct IdleConnection {
    connection: PgConnection,
    opened_at: Instant,
    since: Instant,
}

/// A connection, and its permit.
struct PooledConnection {
    connection: PgConnection,
    opened_at: Instant,
    _permit: OwnedSemaphorePermit,
}

impl ReadPool {
    /// As many as the pool may have, opened on demand with the pool's options.
    pub(crate) fn like(pool: &PgPool) -> Self {
        let bounds = pool.options();
        Self {
            source: pool.clone(),
            permits: Arc::new(Semaphore::new(bounds.get_max_connections() as usize)),
            openings: Arc::new(Semaphore::new(CONCURRENT_OPENS)),
            acquire_timeout: bounds.get_acquire_timeout(),
            idle: Arc::default(),
            returned: Arc::default(),
        }
    }

    pub(crate) async fn fetch_all<'q>(
        &self,
        query: impl Execute<'q, Postgres> + 'q,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let mut pooled = self.acquire().await?;
        let rows = pooled.connection.fetch_all(query).await;
        self.release(pooled, rows.as_ref().err());
        rows
    }

    pub(crate) async fn fetch_optional<'q>(
        &self,
        query: impl Execute<'q, Postgres> + 'q,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let mut pooled = self.acquire().await?;
        let row = pooled.connection.fetch_optional(query).await;
        self.release(pooled, row.as_ref().err());
        row
    }

    async fn acquire(&self) -> Result<PooledConnection, sqlx::Error> {
        let pooled = async {
            let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| sqlx::Error::PoolClosed)?;
            loop {
                while let Some(IdleConnection { mut connection, opened_at, since }) = self.pop_idle() {
                    // One whose server has restarted or become a standby is closed.
                    if ended_sessions::has_ended(opened_at) {
                        continue;
                    }
                    if since.elapsed() < super::IDLE || matches!(takes_writes(&mut connection).await, Ok(true)) {
                        return Ok(PooledConnection { connection, opened_at, _permit: permit });
                    }
                }
                tokio::select! {
                    biased;
                    () = self.returned.notified() => {}
                    open_permit = Arc::clone(&self.openings).acquire_owned() => {
                        return self.open(permit, open_permit.map_err(|_| sqlx::Error::PoolClosed)?).await;
                    }
                }
            }
        };
        timeout(self.acquire_timeout, pooled).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
    }

    async fn open(
        &self,
        permit: OwnedSemaphorePermit,
        open_permit: OwnedSemaphorePermit,
    ) -> Result<PooledConnection, sqlx::Error> {
        let (opened, waits) = oneshot::channel();
        let pool = self.clone();
        tokio::spawn(async move {
            let opening = timeout(OPEN_TIMEOUT, session::connect(&pool.source.connect_options())).await;
            drop(open_permit);
            let pooled = opening.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map(|connection| PooledConnection {
                connection,
                opened_at: Instant::now(),
                _permit: permit,
            });
            if let Err(Ok(pooled)) = opened.send(pooled) {
                pool.release(pooled, None);
            }
        });
        waits.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
    }

    fn pop_idle(&self) -> Option<IdleConnection> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// A read fails only where something is wrong with the connection or the server.
    fn release(&self, pooled: PooledConnection, failed: Option<&sqlx::Error>) {
        if failed.is_none() {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            let PooledConnection { connection, opened_at, .. } = pooled;
            idle.push(IdleConnection { connection, opened_at, since: Instant::now() });
            if idle.first().is_some_and(|oldest| oldest.since.elapsed() > IDLE_TIMEOUT) {
                idle.remove(0);
            }
            drop(idle);
            self.returned.notify_one();
        }
    }
}

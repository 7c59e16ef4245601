//! Connections for statements that stand alone, kept between them.
//!
//! The library's pool asks a connection whether it lives after each use, which costs one way to the server and back for every read. Here
//! a connection comes back only when its statement was answered to the end, so that there is nothing to ask; one whose reader went away
//! in the middle is closed. Few are opened at once, since a handshake is the dearest part of a short life, and whoever waits takes one that
//! comes back meanwhile; one whose opener went away is opened all the same, and is there for the next. Otherwise a machine that is short
//! of time would begin handshakes and give them up, and never have a connection.

use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgRow};
use sqlx::{Connection as _, Execute, Executor as _, Postgres};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;

/// Of those that nobody has needed for so long, one is closed at each turn.
const RESTED: Duration = Duration::from_secs(300);

/// How many are opened at once, and how long one may take that nobody waits for any more.
const OPENINGS: usize = 2;
const OPENS_WITHIN: Duration = Duration::from_secs(10);

/// Clones share the connections.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    options: Arc<PgConnectOptions>,
    places: Arc<Semaphore>,
    openings: Arc<Semaphore>,
    patience: Duration,
    /// The one that was used last is at the end, and is used next.
    resting: Arc<Mutex<Vec<Resting>>>,
    /// One has come back.
    returned: Arc<Notify>,
}

#[derive(Debug)]
struct Resting {
    connection: PgConnection,
    since: Instant,
}

/// A connection, and the place that it takes.
struct Lent {
    connection: PgConnection,
    _place: OwnedSemaphorePermit,
}

impl Kept {
    /// As many as the pool may have, opened as the pool opens its own, when they are first needed.
    pub(crate) fn like(pool: &PgPool) -> Self {
        let bounds = pool.options();
        Self {
            options: pool.connect_options(),
            places: Arc::new(Semaphore::new(bounds.get_max_connections() as usize)),
            openings: Arc::new(Semaphore::new(OPENINGS)),
            patience: bounds.get_acquire_timeout(),
            resting: Arc::default(),
            returned: Arc::default(),
        }
    }

    pub(crate) async fn fetch_all<'q>(
        &self,
        query: impl Execute<'q, Postgres> + 'q,
    ) -> Result<Vec<PgRow>, sqlx::Error> {
        let mut lent = self.lend().await?;
        let rows = lent.connection.fetch_all(query).await;
        self.take_back(lent, rows.as_ref().err());
        rows
    }

    pub(crate) async fn fetch_optional<'q>(
        &self,
        query: impl Execute<'q, Postgres> + 'q,
    ) -> Result<Option<PgRow>, sqlx::Error> {
        let mut lent = self.lend().await?;
        let row = lent.connection.fetch_optional(query).await;
        self.take_back(lent, row.as_ref().err());
        row
    }

    async fn lend(&self) -> Result<Lent, sqlx::Error> {
        let lent = async {
            let place = Arc::clone(&self.places).acquire_owned().await.map_err(|_| sqlx::Error::PoolClosed)?;
            loop {
                while let Some(Resting { mut connection, since }) = self.wake_one() {
                    if since.elapsed() < super::IDLE || connection.ping().await.is_ok() {
                        return Ok(Lent { connection, _place: place });
                    }
                }
                tokio::select! {
                    biased;
                    () = self.returned.notified() => {}
                    turn = Arc::clone(&self.openings).acquire_owned() => {
                        return self.open(place, turn.map_err(|_| sqlx::Error::PoolClosed)?).await;
                    }
                }
            }
        };
        timeout(self.patience, lent).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
    }

    async fn open(&self, place: OwnedSemaphorePermit, turn: OwnedSemaphorePermit) -> Result<Lent, sqlx::Error> {
        let (opened, waits) = oneshot::channel();
        let kept = self.clone();
        tokio::spawn(async move {
            let opening = timeout(OPENS_WITHIN, PgConnection::connect_with(&kept.options)).await;
            drop(turn);
            let lent =
                opening.unwrap_or(Err(sqlx::Error::PoolTimedOut)).map(|connection| Lent { connection, _place: place });
            if let Err(Ok(lent)) = opened.send(lent) {
                kept.take_back(lent, None);
            }
        });
        waits.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
    }

    fn wake_one(&self) -> Option<Resting> {
        self.resting.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Reads do not fail but where something is wrong with the connection or the server.
    fn take_back(&self, lent: Lent, failed: Option<&sqlx::Error>) {
        if failed.is_none() {
            let mut resting = self.resting.lock().unwrap_or_else(PoisonError::into_inner);
            resting.push(Resting { connection: lent.connection, since: Instant::now() });
            if resting.first().is_some_and(|oldest| oldest.since.elapsed() > RESTED) {
                resting.remove(0);
            }
            drop(resting);
            self.returned.notify_one();
        }
    }
}

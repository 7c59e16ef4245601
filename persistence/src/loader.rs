//! The group loader, the committer's counterpart: entities that are requested at the moment are read with one query. There is no timer.
//! A single request is read at once; while a query is in flight, further requests collect for the next.

use crate::error::StoreError;
use crate::queries::Reads;
use domain::commit::Snapshot;
use domain::id::EntityRef;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;

/// Queries in flight at most. A slow load delays only those of its own lane.
pub const LANES: usize = 4;

/// Entities in one query: some milliseconds of the database's time.
const BATCH_MAX: usize = 256;

/// The timeout of a query. A server that does not answer must not block a lane.
const QUERY_TIMEOUT: Duration = Duration::from_secs(3);

/// Loads that may wait in a lane; over it a load waits for room.
const QUEUE_BOUND: usize = 4096;

type LoadResult = Result<Option<Snapshot>, Arc<StoreError>>;

struct Load {
    entity: EntityRef,
    answer: oneshot::Sender<LoadResult>,
}

/// A handle; clones share the lanes.
#[derive(Clone, Debug)]
pub struct Loader {
    reads: Reads,
    lanes: Arc<[Lane]>,
    next: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Lane {
    loads: mpsc::Sender<Load>,
    /// Outlives the task that serves it.
    queue: Arc<Mutex<mpsc::Receiver<Load>>>,
}

/// The lane ended during the load.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
    #[error("the loader ended")]
    Ended,
}

impl Loader {
    /// Starts the lanes, each as a task without a supervisor.
    #[must_use]
    pub fn start(reads: &Reads) -> Self {
        let loader = Self::new(reads);
        for lane in &*loader.lanes {
            tokio::spawn(serve(reads.clone(), Arc::clone(&lane.queue)));
        }
        loader
    }

    /// A loader whose lanes are run by [`Loader::run_lane`].
    #[must_use]
    pub fn new(reads: &Reads) -> Self {
        let lane = |_| {
            let (loads, queue) = mpsc::channel(QUEUE_BOUND);
            Lane { loads, queue: Arc::new(Mutex::new(queue)) }
        };
        Self { reads: reads.clone(), lanes: (0..LANES).map(lane).collect(), next: Arc::default() }
    }

    /// Runs one of the [`LANES`] for as long as it is polled. When it is dropped or panics, it can be restarted: its queue is still there.
    pub async fn run_lane(&self, number: usize) {
        if let Some(lane) = self.lanes.get(number) {
            serve(self.reads.clone(), Arc::clone(&lane.queue)).await;
        }
    }

    /// The last committed snapshot, read after this call. `None`: there is no entity of this id and kind.
    ///
    /// # Errors
    /// [`LoadError`]
    pub async fn load(&self, entity: EntityRef) -> Result<Option<Snapshot>, LoadError> {
        let lane = self.next.fetch_add(1, Ordering::Relaxed) % self.lanes.len();
        let (answer, answered) = oneshot::channel();
        self.lanes[lane].loads.send(Load { entity, answer }).await.map_err(|_| LoadError::Ended)?;
        Ok(answered.await.map_err(|_| LoadError::Ended)??)
    }
}

async fn serve(reads: Reads, queue: Arc<Mutex<mpsc::Receiver<Load>>>) {
    let mut queue = queue.lock().await;
    let mut loads = Vec::with_capacity(BATCH_MAX);
    while queue.recv_many(&mut loads, BATCH_MAX).await > 0 {
        // Loads whose caller no longer waits are dropped.
        loads.retain(|load| !load.answer.is_closed());
        answer(&reads, std::mem::take(&mut loads)).await;
    }
}

/// An unreadable snapshot fails no other: each is then read alone, unless the database is unavailable.
async fn answer(reads: &Reads, loads: Vec<Load>) {
    let entities: Vec<_> = loads.iter().map(|load| load.entity).collect();
    match read(reads, &entities).await {
        Ok(found) => send_snapshots(loads, &found),
        Err(error) if loads.len() > 1 && !error.is_unavailable() => {
            for load in loads {
                let alone = read(reads, &[load.entity]).await;
                // The caller may have stopped waiting.
                let _ = load.answer.send(alone.map(|mut found| found.remove(&load.entity)).map_err(Arc::new));
            }
        }
        Err(error) => {
            let error = Arc::new(error);
            for load in loads {
                let _ = load.answer.send(Err(Arc::clone(&error)));
            }
        }
    }
}

/// A connection whose query timed out is closed.
async fn read(reads: &Reads, entities: &[EntityRef]) -> Result<HashMap<EntityRef, Snapshot>, StoreError> {
    let late = || Err(StoreError { doing: "loading entities", source: sqlx::Error::PoolTimedOut });
    timeout(QUERY_TIMEOUT, reads.snapshots(entities)).await.unwrap_or_else(|_| late())
}

fn send_snapshots(loads: Vec<Load>, found: &HashMap<EntityRef, Snapshot>) {
    for load in loads {
        let _ = load.answer.send(Ok(found.get(&load.entity).cloned()));
    }
}

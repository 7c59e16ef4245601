//! The group loader, the committer's counterpart: entities that are asked for *now* are read with one query. There is no timer. One that
//! is asked for alone is read at once; while a query is under way, what is asked for gathers for the next.

use crate::error::StoreError;
use crate::read::Reads;
use domain::commit::Snapshot;
use domain::id::EntityRef;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::timeout;

/// Queries under way at most. A load that is slow keeps those of its own lane waiting.
pub const LANES: usize = 4;

/// Entities in one query: some milliseconds of the database's time.
const IN_ONE: usize = 256;

/// How long a query may take. A server that does not answer must not keep a lane for itself.
const WITHIN: Duration = Duration::from_secs(3);

/// Loads that may wait in a lane; over it a load waits for its place.
const QUEUE: usize = 4096;

type Answer = Result<Option<Snapshot>, Arc<StoreError>>;

struct Load {
    entity: EntityRef,
    answer: oneshot::Sender<Answer>,
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

/// The lane ended with the load in hand.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Store(#[from] Arc<StoreError>),
    #[error("the loader ended")]
    Ended,
}

impl Loader {
    /// Starts the lanes, each as a task that nothing looks after.
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
            let (loads, queue) = mpsc::channel(QUEUE);
            Lane { loads, queue: Arc::new(Mutex::new(queue)) }
        };
        Self { reads: reads.clone(), lanes: (0..LANES).map(lane).collect(), next: Arc::default() }
    }

    /// Runs one of the [`LANES`] for as long as it is polled. When it is dropped or panics, it can be run again: what waits is still there.
    pub async fn run_lane(&self, number: usize) {
        if let Some(lane) = self.lanes.get(number) {
            serve(self.reads.clone(), Arc::clone(&lane.queue)).await;
        }
    }

    /// The entity as it was committed last: read after this was asked for. `None`: there is none of this id and kind.
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
    let mut loads = Vec::with_capacity(IN_ONE);
    while queue.recv_many(&mut loads, IN_ONE).await > 0 {
        // Who does not wait any more need not be read for.
        loads.retain(|load| !load.answer.is_closed());
        answer(&reads, std::mem::take(&mut loads)).await;
    }
}

/// One that cannot be read takes no other with it: then each is read alone, unless it is the database that cannot be reached.
async fn answer(reads: &Reads, loads: Vec<Load>) {
    let entities: Vec<_> = loads.iter().map(|load| load.entity).collect();
    match read(reads, &entities).await {
        Ok(found) => tell(loads, &found),
        Err(error) if loads.len() > 1 && !error.is_unavailable() => {
            for load in loads {
                let alone = read(reads, &[load.entity]).await;
                // The asker may be gone: then nobody is told.
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

/// A connection whose query was given up is closed.
async fn read(reads: &Reads, entities: &[EntityRef]) -> Result<HashMap<EntityRef, Snapshot>, StoreError> {
    let late = || Err(StoreError { doing: "loading entities", source: sqlx::Error::PoolTimedOut });
    timeout(WITHIN, reads.snapshots(entities)).await.unwrap_or_else(|_| late())
}

fn tell(loads: Vec<Load>, found: &HashMap<EntityRef, Snapshot>) {
    for load in loads {
        let _ = load.answer.send(Ok(found.get(&load.entity).cloned()));
    }
}

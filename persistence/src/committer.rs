//! The group committer: everything that is waiting *now* becomes durable in one statement (design 5).
//!
//! Two workers with a connection each; every shard belongs to one of them, so that a shard's transitions are numbered and made
//! durable by one hand. Whoever runs a worker ([`Committer::run_lane`]) may start it again after a panic: what waits stays, what was being
//! written is [`Outcome::Unknown`]. There is no timer: while one batch is being committed, the next one fills. A transition is in a batch
//! whole or not at all, and one that fails takes no other with it. What can wait (`Commit::patient`) is written in batches of its own, by
//! turns with what somebody waits for.
//!
//! | the store says | the outcome |
//! | --- | --- |
//! | written | [`Outcome::Applied`] |
//! | another version, or the id is taken | [`Outcome::Conflict`] |
//! | the command id was used | [`Outcome::Duplicate`] |
//! | another entity has a name that is claimed | [`Outcome::Claimed`] |
//! | the shard has another owner or epoch | [`Outcome::Fenced`] |
//! | a rule of the database forbids it | the batch is halved until it stands alone: [`Outcome::Refused`], the rest commits |
//! | any other error, the connection alive | rolled back: [`Outcome::NotApplied`] (deadlocks are tried again first) |
//! | no connection, queue full, shutting down | never sent: [`Outcome::NotApplied`] |
//! | the connection lost or silent after sending | [`Outcome::Unknown`], and the backend is ended before the next batch |

mod batch;
mod metrics;
mod queues;
mod sequence;
mod under_way;
mod worker;

pub use metrics::CommitterMetrics;
pub use sequence::Sequences;
pub use worker::WorkerStatus;

use crate::outbox::OutboxRow;
use crate::seal::Seals;
use batch::Job;
use domain::commit::{Commit, Outcome};
use domain::id::{MemberId, Shard};
use futures::FutureExt;
use queues::{Queues, Ways};
use sqlx::PgPool;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep};
use under_way::UnderWay;
use uuid::Uuid;
use worker::Worker;

/// How long the fate of what is under way is waited for.
const CERTAIN_WITHIN: Duration = Duration::from_secs(2);
/// How often it is looked at. It is waited for seldom: after a lost connection, and where an entity was stopped in the middle.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// How the committer is set up.
#[derive(Clone, Debug)]
pub struct CommitterConfig {
    /// Who we are to the shard table: a batch commits only where this member owns the shard.
    pub member: MemberId,
    /// Workers, each with a connection of its own.
    pub workers: usize,
    /// Transitions that may wait at one worker; over it a commit is [`Outcome::NotApplied`]. Those that can wait have as many places.
    pub queue: usize,
    /// Transitions in one statement, at most.
    pub batch: usize,
    /// Postings in a statement of transitions that can wait, so that it keeps nobody else waiting for long.
    pub patient_postings: usize,
    /// After this the server gives a batch up.
    pub statement_timeout: Duration,
    /// What snapshots are sealed with. `None`: by nothing, in tests of what has no keys.
    pub seals: Option<Seals>,
    /// The shards' counters. A committer that is started anew under the same epochs must be given the same ones.
    pub sequences: Sequences,
    /// Called by a worker when the database has answered a batch and nobody has been told. Tests stop or fail a worker there.
    pub answered: Option<fn()>,
}

impl CommitterConfig {
    #[must_use]
    pub fn new(member: MemberId) -> Self {
        Self {
            member,
            workers: 2,
            queue: 8192,
            batch: 512,
            patient_postings: 2048,
            statement_timeout: Duration::from_secs(5),
            seals: None,
            sequences: Sequences::default(),
            answered: None,
        }
    }
}

/// A handle; clones share the workers.
#[derive(Clone)]
pub struct Committer {
    inner: Arc<Inner>,
}

struct Inner {
    lanes: Vec<Lane>,
    under_way: UnderWay,
    seals: Option<Seals>,
    metrics: CommitterMetrics,
    stop: watch::Sender<bool>,
}

struct Lane {
    jobs: Ways,
    status: Arc<Mutex<WorkerStatus>>,
    /// Outlives the task that runs it.
    worker: Arc<tokio::sync::Mutex<(Worker, Queues)>>,
}

impl Committer {
    /// Starts the workers, each as a task that nothing looks after.
    #[must_use]
    pub fn start(
        pool: &PgPool,
        config: CommitterConfig,
        metrics: CommitterMetrics,
        published: mpsc::Sender<OutboxRow>,
    ) -> Self {
        let committer = Self::new(pool, config, metrics, published);
        for lane in &committer.inner.lanes {
            tokio::spawn(run(Arc::clone(&lane.worker), committer.inner.stop.subscribe()));
        }
        committer
    }

    /// A committer whose workers are run by [`Committer::run_lane`]. They connect with the pool's options, on connections of their own.
    ///
    /// What was applied is handed to `published`, so that it need not be read back; what does not fit is left to the poll for orphans.
    #[must_use]
    pub fn new(
        pool: &PgPool,
        config: CommitterConfig,
        metrics: CommitterMetrics,
        published: mpsc::Sender<OutboxRow>,
    ) -> Self {
        let (stop, _) = watch::channel(false);
        let options = pool.connect_options();
        let mut lanes = Vec::new();
        for number in 0..config.workers.max(1) {
            let (jobs, queues) = queues::queues(&config);
            let status = Arc::new(Mutex::new(WorkerStatus::default()));
            let worker =
                Worker::new(number, &options, config.clone(), metrics.clone(), published.clone(), Arc::clone(&status));
            lanes.push(Lane { jobs, status, worker: Arc::new(tokio::sync::Mutex::new((worker, queues))) });
        }
        let under_way = UnderWay::default();
        Self { inner: Arc::new(Inner { lanes, under_way, seals: config.seals, metrics, stop }) }
    }

    /// Runs one worker until [`Committer::close`]; one that runs already is waited for first. When it is dropped or panics, it can be run
    /// again: what waits is still there.
    pub async fn run_lane(&self, number: usize) {
        if let Some(lane) = self.inner.lanes.get(number) {
            run(Arc::clone(&lane.worker), self.inner.stop.subscribe()).await;
        }
    }

    /// Makes one transition durable, together with what else is waiting, and says what became of it.
    pub async fn commit(&self, commit: Commit) -> Outcome {
        let (shard, patient) = (commit.shard, commit.patient);
        let (answer, outcome) = oneshot::channel();
        let outcome = match Job::new(commit, answer, self.inner.seals.as_ref(), &self.inner.under_way) {
            Err(refused) => refused,
            Ok(job) => match self.lane(shard).jobs.of(patient).try_send(job) {
                Ok(()) => {
                    self.inner.metrics.waiting.inc();
                    // The worker ended while it wrote the transition.
                    outcome
                        .await
                        .unwrap_or_else(|_| Outcome::Unknown { reason: "the committer's worker ended".to_owned() })
                }
                Err(mpsc::error::TrySendError::Full(_)) => not_applied("the commit queue is full"),
                Err(mpsc::error::TrySendError::Closed(_)) => not_applied("the committer is shut down"),
            },
        };
        self.inner.metrics.count(&outcome);
        outcome
    }

    /// Waits until the store holds of the entity what it will hold: nothing of it is on its way from here, and no batch of its lane is
    /// of unknown fate. `false` where that is not so in time. To be asked before the entity is read to be decided on: what was handed
    /// over outlives the one who did so.
    pub async fn certain(&self, entity: Uuid, shard: Shard) -> bool {
        let in_doubt = || self.lane(shard).status.lock().unwrap_or_else(PoisonError::into_inner).in_doubt;
        let until = Instant::now() + CERTAIN_WITHIN;
        while self.inner.under_way.has(entity) || in_doubt() {
            if Instant::now() >= until {
                return false;
            }
            sleep(LOOK_EVERY).await;
        }
        true
    }

    /// What each worker is doing, for the supervision tree.
    #[must_use]
    pub fn workers(&self) -> Vec<WorkerStatus> {
        let read = |lane: &Lane| {
            let mut status = lane.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
            (status.waiting, status.bound) = lane.jobs.filled();
            status
        };
        self.inner.lanes.iter().map(read).collect()
    }

    /// Takes nothing more, commits what is waiting, and ends.
    pub async fn close(&self) {
        self.inner.stop.send_replace(true);
        for lane in &self.inner.lanes {
            // A worker that runs ends first; what it has left, or one that does not run, is drained here.
            let draining = AssertUnwindSafe(run(Arc::clone(&lane.worker), self.inner.stop.subscribe()));
            if draining.catch_unwind().await.is_err() {
                tracing::error!("a committer worker panicked while it was drained; what it wrote last is unknown");
            }
        }
    }

    fn lane(&self, shard: Shard) -> &Lane {
        &self.inner.lanes[usize::from(shard.0) % self.inner.lanes.len()]
    }
}

async fn run(worker: Arc<tokio::sync::Mutex<(Worker, Queues)>>, stop: watch::Receiver<bool>) {
    let (worker, queues) = &mut *worker.lock().await;
    worker.run(queues, stop).await;
}

fn not_applied(reason: &str) -> Outcome {
    Outcome::NotApplied { reason: reason.to_owned() }
}

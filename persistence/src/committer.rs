//! The group committer: everything that waits at the moment becomes durable in one statement (design 5).
//!
//! Two workers (lanes) with a connection each; every shard belongs to one of them, so that a shard's transitions are numbered and
//! committed by one worker. A supervisor runs a worker ([`Committer::run_lane`]) and may restart it after a panic: the queue stays, the
//! batch in flight is [`CommitOutcome::Unknown`]. There is no timer: while one batch is being committed, the next one fills. A
//! transition is in a batch whole or not at all, and one that fails takes no other with it. Patient transitions (`Commit::patient`) are
//! written in batches of their own, alternating with those for which a caller waits.
//!
//! | the response of the database | the outcome |
//! | --- | --- |
//! | written | [`CommitOutcome::Applied`] |
//! | another version, or the id is taken | [`CommitOutcome::Conflict`] |
//! | the command id was used | [`CommitOutcome::Duplicate`] |
//! | another entity holds a claimed name | [`CommitOutcome::Claimed`] |
//! | the shard has another owner or epoch | [`CommitOutcome::Fenced`] |
//! | a constraint refuses it | the batch is halved until the transition is alone: [`CommitOutcome::Refused`], the rest commits |
//! | only another session can write it (the server is read-only, for example) | tried once more on a new one, else [`CommitOutcome::NotApplied`] |
//! | any other error, the connection alive | rolled back: [`CommitOutcome::NotApplied`] (deadlocks are retried first) |
//! | no connection, queue full, shutting down | not sent: [`CommitOutcome::NotApplied`] |
//! | the connection lost, or no response in time | [`CommitOutcome::Unknown`], and the backend is ended before the next batch |
//!
//! A commit waits for the synchronous standby, which no timeout of the server ends. One that is given up is *unknown*, and stays in doubt
//! until the server has committed another one with its standby: ending the backend makes the transition visible, not durable.

mod acknowledged_commits;
mod batch;
mod batch_statistics;
mod in_flight;
mod lane;
mod queues;
mod sequence;

pub use acknowledged_commits::LostCommit;
pub use batch_statistics::CommitterMetrics;
pub use lane::LaneStatus;
pub use sequence::Sequences;

use crate::outbox::OutboxRow;
use crate::snapshot_seal::SnapshotSealer;
use acknowledged_commits::LostCommits;
use batch::Job;
use domain::commit::{Commit, CommitOutcome};
use domain::id::{MemberId, Shard};
use futures::FutureExt;
use in_flight::InFlightCommits;
use lane::Worker;
use queues::{QueueSenders, Queues};
use sqlx::PgPool;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

/// How long a load waits for commits in flight.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval of that check. It is rarely needed: after a lost connection, and where an actor was stopped during a commit.
const SETTLE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The settings of the committer.
#[derive(Clone, Debug)]
pub struct CommitterConfig {
    /// The member id in the shard table: a batch commits only where this member owns the shard.
    pub member: MemberId,
    /// Workers, each with a connection of its own.
    pub workers: usize,
    /// Transitions that may wait at one worker; over it a commit is [`CommitOutcome::NotApplied`]. Patient ones have an equal bound.
    pub queue: usize,
    /// Transitions in one statement, at most.
    pub batch: usize,
    /// Postings in a statement of patient transitions, so that it delays no other batch for long.
    pub patient_postings: usize,
    /// The server cancels a batch after this.
    pub statement_timeout: Duration,
    /// Seals snapshots. `None`: they are not sealed, in tests without keys.
    pub seals: Option<SnapshotSealer>,
    /// The shards' counters. A committer that is restarted under the same epochs must get the same ones.
    pub sequences: Sequences,
    /// Called by a worker when the database has answered a batch and no caller has its outcome. Tests stop or fail a worker there.
    pub on_response: Option<fn()>,
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
            on_response: None,
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
    in_flight: InFlightCommits,
    lost: Arc<LostCommits>,
    seals: Option<SnapshotSealer>,
    metrics: CommitterMetrics,
    stop: watch::Sender<bool>,
}

struct Lane {
    jobs: QueueSenders,
    status: Arc<Mutex<LaneStatus>>,
    /// Outlives the task that runs it.
    worker: Arc<tokio::sync::Mutex<(Worker, Queues)>>,
}

impl Committer {
    /// Starts the workers, each as a task without a supervisor.
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
    /// Applied events are sent to `published`, so that they need not be read back; those over its bound are left to the outbox poll.
    #[must_use]
    pub fn new(
        pool: &PgPool,
        config: CommitterConfig,
        metrics: CommitterMetrics,
        published: mpsc::Sender<OutboxRow>,
    ) -> Self {
        let (stop, _) = watch::channel(false);
        let lost = Arc::new(LostCommits::default());
        let mut lanes = Vec::new();
        for number in 0..config.workers.max(1) {
            let (jobs, queues) = queues::queues(&config);
            let status = Arc::new(Mutex::new(LaneStatus::default()));
            let shared = (Arc::clone(&status), Arc::clone(&lost));
            let worker = Worker::new(number, pool, config.clone(), metrics.clone(), published.clone(), shared);
            lanes.push(Lane { jobs, status, worker: Arc::new(tokio::sync::Mutex::new((worker, queues))) });
        }
        let in_flight = InFlightCommits::default();
        Self { inner: Arc::new(Inner { lanes, in_flight, lost, seals: config.seals, metrics, stop }) }
    }

    /// Runs one worker until [`Committer::close`]; a running one is awaited first. When it is dropped or panics, it can be restarted:
    /// its queue is still there.
    pub async fn run_lane(&self, number: usize) {
        if let Some(lane) = self.inner.lanes.get(number) {
            run(Arc::clone(&lane.worker), self.inner.stop.subscribe()).await;
        }
    }

    /// Commits one transition, in a batch with what else is waiting.
    pub async fn commit(&self, commit: Commit) -> CommitOutcome {
        let (shard, patient) = (commit.shard, commit.patient);
        let (answer, outcome) = oneshot::channel();
        let outcome = match Job::new(commit, answer, self.inner.seals.as_ref(), &self.inner.in_flight) {
            Err(refused) => refused,
            Ok(job) => match self.lane(shard).jobs.of(patient).try_send(job) {
                Ok(()) => {
                    self.inner.metrics.waiting.inc();
                    // The worker ended while it wrote the batch.
                    outcome.await.unwrap_or_else(|_| CommitOutcome::Unknown {
                        reason: "the committer's worker ended".to_owned(),
                    })
                }
                Err(mpsc::error::TrySendError::Full(_)) => not_applied("the commit queue is full"),
                Err(mpsc::error::TrySendError::Closed(_)) => not_applied("the committer is shut down"),
            },
        };
        self.inner.metrics.count(&outcome);
        outcome
    }

    /// Waits until no commit of the entity is in flight from here, and no batch of its lane has an unknown outcome, and none of its commits was
    /// lost. Returns `false`
    /// where that takes too long. To be called before a load of the entity for a decision: a commit may outlive its caller.
    pub async fn wait_settled(&self, entity: Uuid, shard: Shard) -> bool {
        let in_doubt = || self.lane(shard).status.lock().unwrap_or_else(PoisonError::into_inner).in_doubt;
        let until = Instant::now() + SETTLE_TIMEOUT;
        while self.inner.in_flight.has(entity) || in_doubt() || self.inner.lost.has(entity) {
            if Instant::now() >= until {
                return false;
            }
            sleep(SETTLE_POLL_INTERVAL).await;
        }
        true
    }

    /// Waits for entities whose acknowledged transitions the database does not have, after a failover that lost commits. Until
    /// [`Committer::resolve_lost`] none of them is loaded or committed.
    pub async fn wait_lost(&self) -> Vec<LostCommit> {
        self.inner.lost.wait().await
    }

    /// The entity is parked: from here on the host refuses its commands, until an operator has decided.
    pub fn resolve_lost(&self, entity: Uuid) {
        self.inner.lost.resolve(entity);
    }

    /// The status of each worker, for the supervision tree.
    #[must_use]
    pub fn workers(&self) -> Vec<LaneStatus> {
        let read = |lane: &Lane| {
            let mut status = lane.status.lock().unwrap_or_else(PoisonError::into_inner).clone();
            (status.waiting, status.bound) = lane.jobs.depth();
            status
        };
        self.inner.lanes.iter().map(read).collect()
    }

    /// Refuses new commits, commits the queues, and ends.
    pub async fn close(&self) {
        self.inner.stop.send_replace(true);
        for lane in &self.inner.lanes {
            // A running worker ends first; the rest of its queue, or that of one that does not run, is drained here.
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

fn not_applied(reason: &str) -> CommitOutcome {
    CommitOutcome::NotApplied { reason: reason.to_owned() }
}

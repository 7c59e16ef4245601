//! A lane: the worker that empties its queues, a connection of its own, and the classification of errors.

use super::acknowledged_commits::{AcknowledgedCommits, LostCommit, LostCommits};
use super::batch::{BATCH, Batch};
use super::queues::Queues;
use super::{CommitterConfig, CommitterMetrics};
use crate::ended_sessions;
use crate::outage_log::OutageLog;
use crate::outbox::OutboxRow;
use crate::pool::{session, takes_writes};
use domain::commit::CommitOutcome;
use domain::state_machine::Timestamp;
use rand::RngExt;
use sqlx::postgres::{PgConnectOptions, PgDatabaseError, PgPool, PgRow, PgSeverity};
use sqlx::{Connection, Executor, PgConnection};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

/// How long a connection may take to open, and a lost one's backend to end.
const CONNECT: Duration = Duration::from_secs(3);
/// The pause after the first failed connection attempt; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is checked before a batch is sent on it: a batch that dies in flight is *unknown*.
const IDLE: Duration = Duration::from_millis(500);
/// How often an idle worker checks its connection.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long the client waits for a response beyond the server's own timeout.
const GRACE: Duration = Duration::from_secs(1);
/// How often a batch that lost a deadlock is retried.
const RETRIES: u32 = 5;

/// The status of a lane.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneStatus {
    pub connected: bool,
    /// Transitions in its queues, and the bound.
    pub waiting: usize,
    pub bound: usize,
    pub batches: u64,
    /// A batch was sent and not answered, and may still be executed.
    pub in_doubt: bool,
    pub last_error: Option<String>,
    pub last_error_at: Option<Timestamp>,
}

impl LaneStatus {
    /// Why the lane has no connection after it was refused or lost one. It tries again by itself.
    #[must_use]
    pub fn outage(&self) -> Option<&str> {
        if self.connected { None } else { self.last_error.as_deref() }
    }
}

pub(super) struct Worker {
    number: usize,
    config: CommitterConfig,
    /// A connection is opened with its options.
    pool: PgPool,
    metrics: CommitterMetrics,
    published: mpsc::Sender<OutboxRow>,
    status: Arc<Mutex<LaneStatus>>,
    acknowledged: AcknowledgedCommits,
    lost: Arc<LostCommits>,
    link: ConnectionState,
    /// From a failed attempt to connect until one succeeds.
    outage: OutageLog,
}

/// The connection, or the time of the next attempt.
enum ConnectionState {
    Connected {
        connection: PgConnection,
        backend: Backend,
        used_at: Instant,
    },
    /// `doubtful` may still commit what was sent to them.
    Disconnected {
        until: Instant,
        pause: Duration,
        doubtful: Vec<Backend>,
    },
}

/// A server process; its start time distinguishes it from a later one with the same process id.
#[derive(Clone, Debug)]
struct Backend {
    pid: i32,
    started_at: String,
}

/// A sent batch. Dropped without a response, by a panic or a stop, it is in doubt before any caller sees an outcome.
struct SentBatch<'a> {
    status: &'a Mutex<LaneStatus>,
    is_answered: bool,
}

impl SentBatch<'_> {
    fn answered(mut self) {
        self.is_answered = true;
    }
}

impl Drop for SentBatch<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.status.lock().unwrap_or_else(PoisonError::into_inner).in_doubt = true;
        }
    }
}

/// Transitions that left the queue, subtracted from the gauge when they are done, however that ends.
struct WaitingGuard {
    waiting: prometheus::IntGauge,
    count: i64,
}

impl Drop for WaitingGuard {
    fn drop(&mut self) {
        self.waiting.sub(self.count);
    }
}

/// Why a statement wrote nothing, or may have written.
enum BatchError {
    /// A constraint, or a value that the database rejects.
    Constraint(String),
    /// A deadlock or the like: a retry may succeed.
    Retryable(String),
    /// Rolled back; the connection is alive.
    RolledBack(String),
    /// Rolled back, and only another session can succeed: the server is read-only, for example.
    SessionEnded(String),
    /// No answer.
    Unknown(String),
}

impl Worker {
    pub(super) fn new(
        number: usize,
        pool: &PgPool,
        config: CommitterConfig,
        metrics: CommitterMetrics,
        published: mpsc::Sender<OutboxRow>,
        (status, lost): (Arc<Mutex<LaneStatus>>, Arc<LostCommits>),
    ) -> Self {
        let acknowledged = AcknowledgedCommits::default();
        let link = disconnected(Vec::new());
        let outage = OutageLog::new();
        Self { number, config, pool: pool.clone(), metrics, published, status, acknowledged, lost, link, outage }
    }

    /// Runs until `stop` is set and the queues are empty. Restarted after a panic, it continues with the queues.
    pub(super) async fn run(&mut self, queues: &mut Queues, mut stop: watch::Receiver<bool>) {
        self.discard_interrupted_connection();
        loop {
            if queues.len() == 0 {
                let resolves_at = self.resolves_at();
                let more = tokio::select! {
                    biased;
                    // The outcome of the last batch is resolved, and a lost one is found, even when no further batch comes.
                    () = sleep_until(resolves_at.unwrap_or_else(Instant::now)), if resolves_at.is_some() => None,
                    _ = stop.wait_for(|stop| *stop), if !queues.are_closed() => {
                        queues.close();
                        continue;
                    }
                    more = queues.wait() => Some(more),
                };
                match more {
                    // It logs its own failure.
                    None => drop(self.connect().await),
                    Some(false) => break,
                    Some(true) => {}
                }
            }
            let (batch, taken) = queues.take();
            let _taken =
                WaitingGuard { waiting: self.metrics.waiting.clone(), count: i64::try_from(taken).unwrap_or(0) };
            self.commit(batch).await;
        }
        if let ConnectionState::Connected { connection, .. } =
            std::mem::replace(&mut self.link, disconnected(Vec::new()))
        {
            // The server notices a closed socket as well.
            let _ = timeout(GRACE, connection.close()).await;
        }
    }

    /// Discards a connection on which a batch was interrupted, and ends its backend before the next batch: the batch may still be
    /// executed.
    fn discard_interrupted_connection(&mut self) {
        let in_doubt = self.status.lock().unwrap_or_else(PoisonError::into_inner).in_doubt;
        if let ConnectionState::Connected { backend, .. } = &self.link
            && in_doubt
        {
            self.link = disconnected(vec![backend.clone()]);
            self.failed("the worker ended while it wrote a batch");
        }
    }

    /// Commits the batch, halving it where a constraint refuses a part of it.
    async fn commit(&mut self, batch: Batch) {
        let mut parts = VecDeque::from([(batch, 0_u32)]);
        while let Some((part, tries)) = parts.pop_front() {
            if part.len() == 0 {
                continue;
            }
            if let Err(reason) = self.connect().await {
                part.answer(&CommitOutcome::NotApplied { reason });
                continue;
            }
            // A new connection is what finds them.
            let part = part.without_lost(&self.lost);
            if part.len() == 0 {
                continue;
            }
            match self.write(&part).await {
                Ok(answer) => {
                    let rows = part.settle(&answer, &mut self.acknowledged);
                    self.publish(rows);
                }
                Err(BatchError::Constraint(rule)) if part.len() > 1 => {
                    tracing::debug!(transitions = part.len(), rule, "a batch is halved");
                    self.metrics.bisections.inc();
                    let (left, right) = part.halve();
                    parts.push_front((right, 0));
                    parts.push_front((left, 0));
                }
                // A race for a command id or a claimed name: the next attempt finds it committed, or the holder.
                Err(BatchError::Constraint(rule))
                    if matches!(rule.as_str(), "command_pkey" | "claim_pkey") && tries < RETRIES =>
                {
                    parts.push_front((part, tries + 1));
                }
                Err(BatchError::Constraint(constraint)) => part.answer(&CommitOutcome::Refused { constraint }),
                Err(BatchError::Retryable(reason)) if tries < RETRIES => {
                    tracing::debug!(reason, "a batch is tried again");
                    parts.push_front((part, tries + 1));
                }
                // The server is usually healthy, and the session older than its last change.
                Err(BatchError::SessionEnded(_)) if tries == 0 => parts.push_front((part, 1)),
                Err(
                    BatchError::Retryable(reason) | BatchError::RolledBack(reason) | BatchError::SessionEnded(reason),
                ) => {
                    part.answer(&CommitOutcome::NotApplied { reason });
                }
                Err(BatchError::Unknown(reason)) => part.answer(&CommitOutcome::Unknown { reason }),
            }
        }
    }

    fn publish(&self, rows: Vec<OutboxRow>) {
        // Closed: the relay runs in another process, and reads the outbox.
        let is_full = |row| matches!(self.published.try_send(row), Err(TrySendError::Full(_)));
        let unpublished = rows.into_iter().map(is_full).filter(|full| *full).count();
        self.metrics.unpublished.inc_by(unpublished as u64);
    }

    async fn write(&mut self, batch: &Batch) -> Result<Vec<PgRow>, BatchError> {
        let ConnectionState::Connected { connection, used_at, backend } = &mut self.link else {
            return Err(BatchError::RolledBack("the database is not connected".to_owned()));
        };
        let began = Instant::now();
        let sent = SentBatch { status: &self.status, is_answered: false };
        let answer = timeout(self.config.statement_timeout + GRACE, batch.write(self.config.member, connection)).await;
        *used_at = Instant::now();
        self.metrics.batch.observe(batch.len() as f64);
        self.metrics.seconds.observe(began.elapsed().as_secs_f64());
        if let Some(on_response) = self.config.on_response {
            on_response();
        }
        sent.answered();
        let batch_error = match answer {
            Ok(Ok(rows)) => {
                self.note(|status| status.batches += 1);
                return Ok(rows);
            }
            Ok(Err(error)) => {
                ended_sessions::observe(&error);
                classify(&error)
            }
            Err(_) => BatchError::Unknown("the database did not answer in time".to_owned()),
        };
        match &batch_error {
            BatchError::Constraint(_) | BatchError::Retryable(_) => {}
            BatchError::RolledBack(reason) => {
                let reason = reason.clone();
                tracing::warn!(
                    reason,
                    transitions = batch.len(),
                    correlation_ids = batch.correlation_ids(),
                    "a batch was rolled back"
                );
                self.failed(&reason);
            }
            BatchError::Unknown(reason) => {
                let reason = reason.clone();
                tracing::warn!(
                    reason,
                    transitions = batch.len(),
                    correlation_ids = batch.correlation_ids(),
                    "the outcome of a batch is unknown"
                );
                self.link = disconnected(vec![backend.clone()]);
                self.note(|status| status.in_doubt = true);
                self.failed(&reason);
            }
            BatchError::SessionEnded(reason) => {
                let reason = reason.clone();
                tracing::warn!(
                    reason,
                    transitions = batch.len(),
                    "a batch was rolled back, and its connection is closed"
                );
                self.link = disconnected(Vec::new());
                self.failed(&reason);
            }
        }
        Err(batch_error)
    }

    /// When an idle worker looks at its connection: to end the backend of a batch with an unknown outcome, to find acknowledged transitions
    /// that a failover lost before their entities are answered for from memory, and to be connected again before the first batch after an
    /// outage.
    fn resolves_at(&self) -> Option<Instant> {
        match &self.link {
            ConnectionState::Disconnected { until, doubtful, .. } => {
                let wanted = !doubtful.is_empty() || !self.acknowledged.is_empty() || self.outage.is_ongoing();
                wanted.then_some(*until)
            }
            ConnectionState::Connected { used_at, .. } => {
                (!self.acknowledged.is_empty()).then_some(*used_at + IDLE_CHECK_INTERVAL)
            }
        }
    }

    /// Ensures a live connection, or says why there is none.
    async fn connect(&mut self) -> Result<(), String> {
        if let ConnectionState::Connected { connection, used_at, backend } = &mut self.link
            && used_at.elapsed() > IDLE
        {
            // No batch is in flight on it, so nothing is lost with it.
            if matches!(timeout(CONNECT, takes_writes(connection)).await, Ok(Ok(true))) {
                *used_at = Instant::now();
            } else {
                self.link = disconnected(vec![backend.clone()]);
            }
        }
        let (until, pause, mut doubtful) = match &self.link {
            ConnectionState::Connected { .. } => return Ok(()),
            ConnectionState::Disconnected { until, pause, doubtful } => (*until, *pause, doubtful.clone()),
        };
        if Instant::now() < until {
            return Err("the database cannot be reached".to_owned());
        }
        let options = session_options(&self.pool.connect_options(), self.number, self.config.statement_timeout);
        let opened = timeout(CONNECT, open(&options, &mut doubtful, &mut self.acknowledged)).await;
        let error = match opened {
            Ok(Ok((connection, backend, lost))) => {
                self.report_lost(&lost);
                self.metrics.connections.inc();
                self.link = ConnectionState::Connected { connection, backend, used_at: Instant::now() };
                self.note(|status| (status.connected, status.in_doubt) = (true, false));
                if let Some(lasted) = self.outage.ended(std::time::Instant::now()) {
                    let (lane, seconds) = (self.number, lasted.as_secs_f64());
                    tracing::info!(lane, seconds, "the committer has a connection again");
                }
                return Ok(());
            }
            Ok(Err(error)) => format!("the database cannot be reached: {error}"),
            Err(_) => "the database cannot be reached in time".to_owned(),
        };
        // Jitter, so that the members do not reconnect all at once.
        let wait = pause.mul_f64(rand::rng().random_range(0.5..1.0));
        self.link =
            ConnectionState::Disconnected { until: Instant::now() + wait, pause: (pause * 2).min(PAUSE_MAX), doubtful };
        if let Some(failures) = self.outage.failed(std::time::Instant::now()) {
            tracing::warn!(error, lane = self.number, failures, "the committer has no connection");
        }
        self.failed(&error);
        Err(error)
    }

    /// Before any further batch of the entities, and before any of them is loaded.
    fn report_lost(&self, lost: &[LostCommit]) {
        self.lost.add(lost);
        self.metrics.lost.inc_by(lost.len() as u64);
        for LostCommit { entity, acknowledged, stored, .. } in lost {
            tracing::error!(
                resource_name = %entity,
                error_code = "commit_lost",
                acknowledged,
                stored,
                "an acknowledged transition of {entity} is not in the database"
            );
        }
    }

    fn failed(&self, reason: &str) {
        let connected = matches!(self.link, ConnectionState::Connected { .. });
        self.note(|status| {
            status.connected = connected;
            status.last_error = Some(reason.to_owned());
            status.last_error_at = Some(chrono::Utc::now());
        });
    }

    fn note(&self, change: impl FnOnce(&mut LaneStatus)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The settings of a committer's session. One generic plan with hints: small batches spend no time on planning, large ones never get a
/// nested loop over their own arrays, and statistics of an empty table have no influence.
fn session_options(options: &PgConnectOptions, number: usize, statement_timeout: Duration) -> PgConnectOptions {
    let name = format!("{} committer {number}", options.get_application_name().unwrap_or("gpuaas"));
    let statement_timeout = statement_timeout.as_millis().to_string();
    options.clone().application_name(&name).options([
        ("statement_timeout", statement_timeout.as_str()),
        // An acknowledged transition is never lost (I1), whatever the server's default.
        ("synchronous_commit", "on"),
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_nestloop", "off"),
        ("enable_mergejoin", "off"),
        ("enable_seqscan", "off"),
        ("jit", "off"),
        ("work_mem", "64MB"),
    ])
}

/// Not connected, with an attempt at once.
fn disconnected(doubtful: Vec<Backend>) -> ConnectionState {
    ConnectionState::Disconnected { until: Instant::now(), pause: PAUSE_MIN, doubtful }
}

/// Opens a connection, with the statement prepared. First the backends of lost connections are ended: their batches are then either
/// committed or never will be, and cannot follow what is sent from here on. Also returns what the database has lost.
async fn open(
    options: &PgConnectOptions,
    doubtful: &mut Vec<Backend>,
    acknowledged: &mut AcknowledgedCommits,
) -> Result<(PgConnection, Backend, Vec<LostCommit>), sqlx::Error> {
    let mut connection = session::connect(options).await?;
    if !takes_writes(&mut connection).await? {
        return Err(sqlx::Error::Protocol(
            "the server takes no writes: it is a standby, or set to read-only".to_owned(),
        ));
    }
    let (pids, starts): (Vec<i32>, Vec<&str>) =
        doubtful.iter().map(|backend| (backend.pid, backend.started_at.as_str())).unzip();
    if !doubtful.is_empty() {
        let ended: Option<bool> = sqlx::query_scalar(
            "SELECT bool_and(pg_terminate_backend(activity.pid, 2000)) FROM pg_stat_activity AS activity
             JOIN unnest($1::int[], $2::text[]) AS doubtful (pid, started_at)
               ON doubtful.pid = activity.pid AND doubtful.started_at = activity.backend_start::text",
        )
        .bind(pids)
        .bind(starts)
        .fetch_one(&mut connection)
        .await?;
        if ended == Some(false) {
            return Err(sqlx::Error::Protocol("a backend of the last connection does not end".to_owned()));
        }
    }
    let (pid, started_at) =
        sqlx::query_as("SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()")
            .fetch_one(&mut connection)
            .await?;
    let backend = Backend { pid, started_at };
    if !doubtful.is_empty() {
        // Given up while it waits, this one is ended by the next attempt: there are never more than two.
        *doubtful = vec![backend.clone()];
        wait_replicated(&mut connection).await?;
    }
    let lost = acknowledged.take_lost(&mut connection).await?;
    connection.prepare(sqlx::SqlSafeStr::into_sql_str(BATCH)).await?;
    Ok((connection, backend, lost))
}

/// Commits a transaction that changes nothing, and so waits until all earlier ones are with the synchronous standby. A transition whose
/// backend was ended while it waited is visible, and would be lost with the primary.
async fn wait_replicated(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    connection.execute("SELECT pg_logical_emit_message(true, 'gpuaas', '')").await.map(drop)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "not our enum: whatever is new there is unknown here")]
fn classify(error: &sqlx::Error) -> BatchError {
    match error {
        sqlx::Error::Database(database) => {
            let Some(postgres) = database.try_downcast_ref::<PgDatabaseError>() else {
                return BatchError::Unknown(database.to_string());
            };
            let reason = format!("{} ({})", postgres.message(), postgres.code());
            match postgres.severity() {
                // The backend ended; it may have committed before.
                PgSeverity::Fatal | PgSeverity::Panic => BatchError::Unknown(reason),
                PgSeverity::Error
                | PgSeverity::Warning
                | PgSeverity::Notice
                | PgSeverity::Debug
                | PgSeverity::Info
                | PgSeverity::Log => match postgres.code().get(..2) {
                    // Integrity constraints; values that no column takes; limits of size.
                    Some("22" | "23" | "54") => {
                        BatchError::Constraint(postgres.constraint().map_or(reason, str::to_owned))
                    }
                    Some("40") => BatchError::Retryable(reason),
                    // A pooler's report that it lost the server, which may have committed.
                    Some("08") => BatchError::Unknown(reason),
                    _ if ended_sessions::ends_sessions(error) => BatchError::SessionEnded(reason),
                    _ => BatchError::RolledBack(reason),
                },
            }
        }
        // Raised before anything was sent.
        sqlx::Error::Encode(error) => BatchError::Constraint(error.to_string()),
        error => BatchError::Unknown(error.to_string()),
    }
}

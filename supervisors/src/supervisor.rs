//! Runs the rows of the supervision tree as ractor actors under one root. A worker that ends is restarted after a pause; one that
//! keeps ending is parked and shown; its siblings run on.

mod spec;

pub use spec::{ALWAYS, BOUNDED, ReadinessRule, RestartPolicy, ShutdownStep, WorkerQueue, WorkerSpec};

use crate::mutex::lock;
use chrono::Utc;
use domain::{Timestamp, retry};
use edge::app_state::runtime_interface::WorkerState;
use futures::FutureExt;
use futures::future::BoxFuture;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

/// The task of a worker; each restart creates it again.
pub type WorkerTask = Arc<dyn Fn() -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync>;

/// The task of a worker over a shared value, for every start.
pub fn task<T, F>(shared: &T, run: impl Fn(T) -> F + Send + Sync + 'static) -> WorkerTask
where
    T: Clone + Send + Sync + 'static,
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let shared = shared.clone();
    Arc::new(move || run(shared.clone()).boxed())
}

/// A worker as an operator sees it.
#[derive(Clone, Debug)]
pub struct WorkerRow {
    pub spec: WorkerSpec,
    pub state: WorkerState,
    pub since: Timestamp,
    pub restarts: u64,
    pub last_error: Option<String>,
    /// The row has a task, or a row below it does.
    pub restartable: bool,
}

/// The supervision tree of this process.
#[derive(Clone)]
pub struct Supervisor {
    root: ActorRef<RootMessage>,
    table: WorkerTable,
}

struct WorkerEntry {
    spec: WorkerSpec,
    work: Option<WorkerTask>,
    actor: Option<ActorRef<TaskExit>>,
    state: WorkerState,
    since: Timestamp,
    /// An operator has requested a restart: the end that follows counts as no failure.
    restart_requested: bool,
    recent: VecDeque<Instant>,
    restarts: u64,
    last_error: Option<String>,
}

/// A message to the root.
pub enum RootMessage {
    Start(&'static str),
}

impl Supervisor {
    /// An empty tree.
    ///
    /// # Errors
    /// Where the root cannot be started.
    pub async fn start() -> anyhow::Result<Self> {
        let table = Arc::new(Mutex::new(BTreeMap::new()));
        let (root, _) = Actor::spawn(None, Root, Arc::clone(&table)).await?;
        Ok(Self { root, table })
    }

    /// Adds a row that only groups others.
    pub fn group(&self, spec: WorkerSpec) {
        lock(&self.table).insert(spec.name, WorkerEntry::new(spec, None));
    }

    /// Adds a row and starts its task.
    pub fn add(&self, spec: WorkerSpec, work: WorkerTask) {
        lock(&self.table).insert(spec.name, WorkerEntry::new(spec, Some(work)));
        self.request_start(spec.name);
    }

    /// Restarts a worker and everything below it, in whatever state they are, at an operator's request. `false` where no row of that name
    /// has a task.
    #[must_use]
    pub fn restart(&self, name: &str) -> bool {
        let mut table = lock(&self.table);
        let mut starting = Vec::new();
        for name in &subtree(&table, name) {
            let Some(entry) = table.get_mut(name).filter(|entry| entry.work.is_some()) else { continue };
            entry.recent.clear();
            match &entry.actor {
                // Its exit starts it again.
                Some(actor) => {
                    entry.restart_requested = true;
                    actor.stop(Some("restarted by an operator".to_owned()));
                }
                None => entry.enter(WorkerState::BackingOff),
            }
            starting.push(*name);
        }
        drop(table);
        // A worker that still runs is skipped here, and started when it has ended.
        starting.iter().for_each(|name| self.request_start(name));
        !starting.is_empty()
    }

    /// Stops everything at or below `name`, children first.
    pub async fn stop(&self, name: &str) {
        let stopping: Vec<_> = {
            let mut table = lock(&self.table);
            let names = subtree(&table, name);
            let stop = |name: &&'static str| {
                let entry = table.get_mut(name)?;
                entry.enter(WorkerState::Stopped);
                entry.work = None;
                entry.actor.take()
            };
            names.iter().rev().filter_map(stop).collect()
        };
        for actor in stopping {
            if let Err(error) = actor.stop_and_wait(None, Some(Duration::from_secs(5))).await {
                tracing::warn!(%error, "a worker did not stop in time");
            }
        }
    }

    /// The parent of the shards' supervisors.
    #[must_use]
    pub fn root(&self) -> ActorCell {
        self.root.get_cell()
    }

    /// Every row, in the order of its name.
    #[must_use]
    pub fn rows(&self) -> Vec<WorkerRow> {
        let table = lock(&self.table);
        let works = |name: &&'static str| table.get(name).is_some_and(|entry| entry.work.is_some());
        table.values().map(|entry| entry.row(subtree(&table, entry.spec.name).iter().any(works))).collect()
    }

    fn request_start(&self, name: &'static str) {
        if self.root.cast(RootMessage::Start(name)).is_err() {
            tracing::error!(name, "the root supervisor is gone");
        }
    }
}

impl WorkerEntry {
    fn new(spec: WorkerSpec, work: Option<WorkerTask>) -> Self {
        Self {
            spec,
            work,
            actor: None,
            state: WorkerState::Running,
            since: Utc::now(),
            restart_requested: false,
            recent: VecDeque::new(),
            restarts: 0,
            last_error: None,
        }
    }

    fn enter(&mut self, state: WorkerState) {
        self.state = state;
        self.since = Utc::now();
    }

    /// Records an exit and returns the pause before the restart; `None` where the worker is parked.
    fn record_exit(&mut self, error: String) -> Option<Duration> {
        let RestartPolicy { pause, longest, intensity, window } = self.spec.restart;
        let now = Instant::now();
        self.actor = None;
        self.restarts += 1;
        if std::mem::take(&mut self.restart_requested) {
            self.enter(WorkerState::BackingOff);
            return Some(Duration::ZERO);
        }
        self.last_error = Some(error);
        self.recent.retain(|at| now.duration_since(*at) < window);
        self.recent.push_back(now);
        if self.recent.len() >= intensity {
            self.enter(WorkerState::Parked);
            return None;
        }
        self.enter(WorkerState::BackingOff);
        let failures = u32::try_from(self.recent.len()).unwrap_or(u32::MAX);
        Some(retry::pause(pause, failures, longest))
    }

    fn row(&self, restartable: bool) -> WorkerRow {
        let (spec, state, since, restarts, last_error) =
            (self.spec, self.state, self.since, self.restarts, self.last_error.clone());
        WorkerRow { spec, state, since, restarts, last_error, restartable }
    }
}

type WorkerEntries = BTreeMap<&'static str, WorkerEntry>;
type WorkerTable = Arc<Mutex<WorkerEntries>>;

/// The row of this name and everything below it, parents first.
fn subtree(table: &WorkerEntries, name: &str) -> Vec<&'static str> {
    let mut found: Vec<_> = table.get(name).map(|entry| entry.spec.name).into_iter().collect();
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        found.extend(table.values().filter(|entry| entry.spec.parent == parent).map(|entry| entry.spec.name));
        next += 1;
    }
    found
}

/// The root of the tree.
struct Root;

impl Actor for Root {
    type Msg = RootMessage;
    type State = WorkerTable;
    type Arguments = WorkerTable;

    async fn pre_start(&self, _: ActorRef<RootMessage>, table: WorkerTable) -> Result<WorkerTable, ActorProcessingErr> {
        Ok(table)
    }

    async fn handle(
        &self,
        myself: ActorRef<RootMessage>,
        RootMessage::Start(name): RootMessage,
        table: &mut WorkerTable,
    ) -> Result<(), ActorProcessingErr> {
        let work = {
            let mut table = lock(table);
            let Some(entry) = table.get_mut(name).filter(|entry| entry.actor.is_none()) else { return Ok(()) };
            if entry.work.is_some() {
                entry.enter(WorkerState::Running);
            }
            entry.work.clone()
        };
        let Some(work) = work else { return Ok(()) };
        match Actor::spawn_linked(None, Worker { name }, work, myself.get_cell()).await {
            Ok((actor, _)) => {
                if let Some(entry) = lock(table).get_mut(name) {
                    // It may have been stopped while it was being started.
                    if entry.work.is_none() {
                        actor.stop(None);
                    } else {
                        entry.actor = Some(actor);
                    }
                }
            }
            Err(error) => handle_exit(&myself, table, name, error.to_string()),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<RootMessage>,
        event: SupervisionEvent,
        table: &mut WorkerTable,
    ) -> Result<(), ActorProcessingErr> {
        let (cell, error) = match event {
            SupervisionEvent::ActorFailed(cell, error) => (cell, error.to_string()),
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                (cell, reason.unwrap_or_else(|| "it ended".to_owned()))
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => return Ok(()),
        };
        let of = |entry: &WorkerEntry| entry.actor.as_ref().is_some_and(|actor| actor.get_id() == cell.get_id());
        let found = lock(table).values().find(|entry| of(entry)).map(|entry| entry.spec.name);
        // A shard's supervisor ends when its shard is released; that is no failure.
        let Some(name) = found else { return Ok(()) };
        handle_exit(&myself, table, name, error);
        Ok(())
    }
}

fn handle_exit(root: &ActorRef<RootMessage>, table: &WorkerTable, name: &'static str, error: String) {
    let mut table = lock(table);
    let Some(entry) = table.get_mut(name).filter(|entry| entry.work.is_some()) else { return };
    let restart_requested = entry.restart_requested;
    match entry.record_exit(error.clone()) {
        Some(pause) if restart_requested => {
            tracing::info!(worker = name, "{name} is restarted by an operator");
            root.send_after(pause, move || RootMessage::Start(name));
        }
        Some(pause) => {
            tracing::warn!(worker = name, error, "{name} ended; it is started again in {pause:?}");
            root.send_after(pause, move || RootMessage::Start(name));
        }
        None => tracing::error!(worker = name, error, "{name} ended too often and is parked"),
    }
}

/// The actor of one row: it lives as long as its task.
struct Worker {
    name: &'static str,
}

/// The task has ended, for this reason.
pub(crate) struct TaskExit(String);

impl Actor for Worker {
    type Msg = TaskExit;
    /// Dropping it ends the task, however the actor ended.
    type State = AbortOnDropHandle<()>;
    type Arguments = WorkerTask;

    async fn pre_start(
        &self,
        myself: ActorRef<TaskExit>,
        begin: WorkerTask,
    ) -> Result<AbortOnDropHandle<()>, ActorProcessingErr> {
        let name = self.name;
        let work = async move {
            let how = match AssertUnwindSafe(begin()).catch_unwind().await {
                Ok(Ok(())) => "it came to an end".to_owned(),
                Ok(Err(error)) => format!("{error:#}"),
                Err(panic) => format!("it panicked: {}", panic_text(&*panic)),
            };
            tracing::debug!(worker = name, "{how}");
            let _ = myself.cast(TaskExit(how));
        };
        Ok(AbortOnDropHandle::new(tokio::spawn(work.instrument(tracing::error_span!("worker", service = name)))))
    }

    async fn handle(
        &self,
        _: ActorRef<TaskExit>,
        TaskExit(how): TaskExit,
        _: &mut AbortOnDropHandle<()>,
    ) -> Result<(), ActorProcessingErr> {
        Err(how.into())
    }
}

/// `ok`, or the failed workers without which this process cannot serve: those that are parked, and those that do not run and must. Other
/// workers are given time to recover.
#[must_use]
pub fn workers_check(rows: &[WorkerRow]) -> String {
    let fails = |row: &&WorkerRow| match row.state {
        WorkerState::Parked => row.spec.readiness != ReadinessRule::NotNeeded,
        WorkerState::BackingOff | WorkerState::Stopped => row.spec.readiness == ReadinessRule::MustRun,
        WorkerState::Running | WorkerState::Idle => false,
    };
    let failing: Vec<_> =
        rows.iter().filter(fails).map(|row| format!("{} is {}", row.spec.name, row.state.name())).collect();
    if failing.is_empty() { "ok".to_owned() } else { failing.join(", ") }
}

/// The message of a panic.
#[must_use]
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a value that is not text")
}

#[cfg(test)]
#[allow(clippy::panic)]
mod tests;

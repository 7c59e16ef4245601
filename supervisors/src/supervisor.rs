//! Hosts the rows of [`crate::tree`] as ractor actors under one root. A worker that ends is started again after a pause; one that
//! keeps ending is parked and shown; its siblings live on.

use crate::tree::{Restart, Row};
use chrono::Utc;
use domain::Timestamp;
use edge::runtime::WorkerState;
use futures::FutureExt;
use futures::future::BoxFuture;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument as _;

/// What a worker does, started anew at each restart.
pub type Work = Arc<dyn Fn() -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync>;

/// A worker as an operator sees it.
#[derive(Clone, Debug)]
pub struct WorkerRow {
    pub row: Row,
    pub state: WorkerState,
    pub since: Timestamp,
    pub restarts: u64,
    pub last_error: Option<String>,
    /// It works, or something below it does.
    pub restartable: bool,
}

/// The whole tree of this process.
#[derive(Clone)]
pub struct Supervisor {
    root: ActorRef<Order>,
    book: Book,
}

struct Entry {
    row: Row,
    work: Option<Work>,
    actor: Option<ActorRef<Finished>>,
    state: WorkerState,
    since: Timestamp,
    /// An operator has ended it: that is no failure.
    told_to: bool,
    recent: VecDeque<Instant>,
    restarts: u64,
    last_error: Option<String>,
}

/// What the root is told.
pub enum Order {
    Start(&'static str),
}

impl Supervisor {
    /// An empty tree.
    ///
    /// # Errors
    /// Where the root cannot be started.
    pub async fn start() -> anyhow::Result<Self> {
        let book = Arc::new(Mutex::new(BTreeMap::new()));
        let (root, _) = Actor::spawn(None, Root, Arc::clone(&book)).await?;
        Ok(Self { root, book })
    }

    /// Adds a row that only groups others.
    pub fn group(&self, row: Row) {
        lock(&self.book).insert(row.name, Entry::new(row, None));
    }

    /// Adds a row and starts its work.
    pub fn add(&self, row: Row, work: Work) {
        lock(&self.book).insert(row.name, Entry::new(row, Some(work)));
        self.order(row.name);
    }

    /// An operator has looked: starts a worker and what hangs below it anew, whatever it was doing. `false` where there is nothing of
    /// that name that runs.
    #[must_use]
    pub fn restart(&self, name: &str) -> bool {
        let mut book = lock(&self.book);
        let mut starting = Vec::new();
        for name in &below(&book, name) {
            let Some(entry) = book.get_mut(name).filter(|entry| entry.work.is_some()) else { continue };
            entry.recent.clear();
            match &entry.actor {
                // Its end is what starts it again.
                Some(actor) => {
                    entry.told_to = true;
                    actor.stop(Some("restarted by an operator".to_owned()));
                }
                None => entry.enter(WorkerState::BackingOff),
            }
            starting.push(*name);
        }
        drop(book);
        // Whoever still runs is passed over, and started when it has ended.
        starting.iter().for_each(|name| self.order(name));
        !starting.is_empty()
    }

    /// Stops everything at or below `name`, children first.
    pub async fn stop(&self, name: &str) {
        let stopping: Vec<_> = {
            let mut book = lock(&self.book);
            let names = below(&book, name);
            let stop = |name: &&'static str| {
                let entry = book.get_mut(name)?;
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

    /// Under whom the shards' supervisors run.
    #[must_use]
    pub fn root(&self) -> ActorCell {
        self.root.get_cell()
    }

    /// Every row, in the order of its name.
    #[must_use]
    pub fn rows(&self) -> Vec<WorkerRow> {
        let book = lock(&self.book);
        let works = |name: &&'static str| book.get(name).is_some_and(|entry| entry.work.is_some());
        book.values().map(|entry| entry.row(below(&book, entry.row.name).iter().any(works))).collect()
    }

    fn order(&self, name: &'static str) {
        if self.root.cast(Order::Start(name)).is_err() {
            tracing::error!(name, "the root supervisor is gone");
        }
    }
}

impl Entry {
    fn new(row: Row, work: Option<Work>) -> Self {
        Self {
            row,
            work,
            actor: None,
            state: WorkerState::Running,
            since: Utc::now(),
            told_to: false,
            recent: VecDeque::new(),
            restarts: 0,
            last_error: None,
        }
    }

    fn enter(&mut self, state: WorkerState) {
        self.state = state;
        self.since = Utc::now();
    }

    /// Notes an end and says when to start again; `None` where it is parked.
    fn ended(&mut self, error: String) -> Option<Duration> {
        let Restart { pause, longest, intensity, window } = self.row.restart;
        let now = Instant::now();
        self.actor = None;
        self.restarts += 1;
        if std::mem::take(&mut self.told_to) {
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
        let doublings = u32::try_from(self.recent.len() - 1).unwrap_or(0).min(16);
        Some((pause * 2_u32.pow(doublings)).min(longest))
    }

    fn row(&self, restartable: bool) -> WorkerRow {
        let (row, state, since, restarts, last_error) =
            (self.row, self.state, self.since, self.restarts, self.last_error.clone());
        WorkerRow { row, state, since, restarts, last_error, restartable }
    }
}

type Entries = BTreeMap<&'static str, Entry>;
type Book = Arc<Mutex<Entries>>;

/// What is called so and everything below it, from above to below.
fn below(book: &Entries, name: &str) -> Vec<&'static str> {
    let mut found: Vec<_> = book.get(name).map(|entry| entry.row.name).into_iter().collect();
    let mut next = 0;
    while let Some(parent) = found.get(next).copied() {
        found.extend(book.values().filter(|entry| entry.row.under == parent).map(|entry| entry.row.name));
        next += 1;
    }
    found
}

/// The root of the tree.
struct Root;

impl Actor for Root {
    type Msg = Order;
    type State = Book;
    type Arguments = Book;

    async fn pre_start(&self, _: ActorRef<Order>, book: Book) -> Result<Book, ActorProcessingErr> {
        Ok(book)
    }

    async fn handle(
        &self,
        myself: ActorRef<Order>,
        Order::Start(name): Order,
        book: &mut Book,
    ) -> Result<(), ActorProcessingErr> {
        let work = {
            let mut book = lock(book);
            let Some(entry) = book.get_mut(name).filter(|entry| entry.actor.is_none()) else { return Ok(()) };
            if entry.work.is_some() {
                entry.enter(WorkerState::Running);
            }
            entry.work.clone()
        };
        let Some(work) = work else { return Ok(()) };
        match Actor::spawn_linked(None, Worker { name }, work, myself.get_cell()).await {
            Ok((actor, _)) => {
                if let Some(entry) = lock(book).get_mut(name) {
                    // It may have been told to stop while it was started.
                    if entry.work.is_none() {
                        actor.stop(None);
                    } else {
                        entry.actor = Some(actor);
                    }
                }
            }
            Err(error) => ended(&myself, book, name, error.to_string()),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<Order>,
        event: SupervisionEvent,
        book: &mut Book,
    ) -> Result<(), ActorProcessingErr> {
        let (cell, error) = match event {
            SupervisionEvent::ActorFailed(cell, error) => (cell, error.to_string()),
            SupervisionEvent::ActorTerminated(cell, _, reason) => {
                (cell, reason.unwrap_or_else(|| "it ended".to_owned()))
            }
            SupervisionEvent::ActorStarted(_) | SupervisionEvent::ProcessGroupChanged(_) => return Ok(()),
        };
        let of = |entry: &Entry| entry.actor.as_ref().is_some_and(|actor| actor.get_id() == cell.get_id());
        let found = lock(book).values().find(|entry| of(entry)).map(|entry| entry.row.name);
        // The shards' supervisors end when their shard goes; that is no failure.
        let Some(name) = found else { return Ok(()) };
        ended(&myself, book, name, error);
        Ok(())
    }
}

fn ended(root: &ActorRef<Order>, book: &Book, name: &'static str, error: String) {
    let mut book = lock(book);
    let Some(entry) = book.get_mut(name).filter(|entry| entry.work.is_some()) else { return };
    let told_to = entry.told_to;
    match entry.ended(error.clone()) {
        Some(pause) if told_to => {
            tracing::info!(worker = name, "{name} is started anew, as an operator wants it");
            root.send_after(pause, move || Order::Start(name));
        }
        Some(pause) => {
            tracing::warn!(worker = name, error, "{name} ended; it is started again in {pause:?}");
            root.send_after(pause, move || Order::Start(name));
        }
        None => tracing::error!(worker = name, error, "{name} ended too often and is parked"),
    }
}

/// One row's actor: it lives as long as its work.
struct Worker {
    name: &'static str,
}

/// The work has come to its end.
pub(crate) struct Finished(String);

impl Actor for Worker {
    type Msg = Finished;
    /// Dropping it ends the work, however the actor ended.
    type State = AbortOnDropHandle<()>;
    type Arguments = Work;

    async fn pre_start(
        &self,
        myself: ActorRef<Finished>,
        begin: Work,
    ) -> Result<AbortOnDropHandle<()>, ActorProcessingErr> {
        let name = self.name;
        let work = async move {
            let how = match AssertUnwindSafe(begin()).catch_unwind().await {
                Ok(Ok(())) => "it came to an end".to_owned(),
                Ok(Err(error)) => format!("{error:#}"),
                Err(panic) => format!("it panicked: {}", panic_text(&*panic)),
            };
            tracing::debug!(worker = name, "{how}");
            let _ = myself.cast(Finished(how));
        };
        Ok(AbortOnDropHandle::new(tokio::spawn(work.instrument(tracing::error_span!("worker", service = name)))))
    }

    async fn handle(
        &self,
        _: ActorRef<Finished>,
        Finished(how): Finished,
        _: &mut AbortOnDropHandle<()>,
    ) -> Result<(), ActorProcessingErr> {
        Err(how.into())
    }
}

/// What a panic said.
#[must_use]
pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("something without words")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::config::Role;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const PATIENT: Restart = Restart {
        pause: Duration::from_millis(1),
        longest: Duration::from_millis(4),
        intensity: 3,
        window: Duration::from_secs(60),
    };

    fn row(name: &'static str, under: &'static str) -> Row {
        Row { name, under, roles: &Role::ALL, restart: PATIENT, what: "a test's worker" }
    }

    fn counting(runs: &Arc<AtomicUsize>, end: fn() -> anyhow::Result<()>) -> Work {
        let runs = Arc::clone(runs);
        Arc::new(move || {
            runs.fetch_add(1, Ordering::SeqCst);
            async move { end() }.boxed()
        })
    }

    fn endless() -> Work {
        Arc::new(|| std::future::pending().boxed())
    }

    async fn until(supervisor: &Supervisor, name: &str, state: WorkerState) -> WorkerRow {
        for _ in 0..2000 {
            let found = supervisor.rows().into_iter().find(|row| row.row.name == name).unwrap();
            if found.state == state {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        panic!("{name} is not {state:?}: {:?}", supervisor.rows());
    }

    #[tokio::test]
    async fn what_keeps_ending_is_parked_with_its_error_and_its_sibling_lives_on() {
        let supervisor = Supervisor::start().await.unwrap();
        let runs = Arc::default();
        supervisor.add(row("sound", "root"), endless());
        supervisor.add(row("broken", "root"), counting(&runs, || anyhow::bail!("out of paper")));
        let parked = until(&supervisor, "broken", WorkerState::Parked).await;
        assert_eq!(parked.last_error.as_deref(), Some("out of paper"));
        assert_eq!(runs.load(Ordering::SeqCst), 3);
        until(&supervisor, "sound", WorkerState::Running).await;
    }

    #[tokio::test]
    async fn a_panic_is_a_failure_like_any_other() {
        let supervisor = Supervisor::start().await.unwrap();
        supervisor.add(row("frail", "root"), counting(&Arc::default(), || panic!("cannot go on")));
        let parked = until(&supervisor, "frail", WorkerState::Parked).await;
        assert!(parked.last_error.unwrap().contains("cannot go on"));
    }

    #[tokio::test]
    async fn an_operator_starts_a_parked_worker_again() {
        let supervisor = Supervisor::start().await.unwrap();
        let runs = Arc::default();
        supervisor.add(row("broken", "root"), counting(&runs, || anyhow::bail!("still")));
        until(&supervisor, "broken", WorkerState::Parked).await;
        assert!(supervisor.restart("broken"));
        until(&supervisor, "broken", WorkerState::Parked).await;
        assert!(runs.load(Ordering::SeqCst) > 3);
        assert!(!supervisor.restart("nobody"));
    }

    #[tokio::test]
    async fn an_operator_starts_a_running_worker_anew_however_often_and_a_group_with_all_that_hangs_below_it() {
        let supervisor = Supervisor::start().await.unwrap();
        let runs: [Arc<AtomicUsize>; 2] = Default::default();
        supervisor.group(row("group", "root"));
        for (name, runs) in ["one", "other"].into_iter().zip(&runs) {
            let runs = Arc::clone(runs);
            supervisor.add(
                row(name, "group"),
                Arc::new(move || {
                    runs.fetch_add(1, Ordering::SeqCst);
                    std::future::pending().boxed()
                }),
            );
        }
        let ran = async |which: usize, times: usize| {
            for _ in 0..2000 {
                if runs[which].load(Ordering::SeqCst) == times {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            panic!("{which} ran {} times", runs[which].load(Ordering::SeqCst));
        };
        ran(0, 1).await;
        // More often than it may fail.
        for restarts in 1..=2 * PATIENT.intensity {
            until(&supervisor, "one", WorkerState::Running).await;
            assert!(supervisor.restart("one"));
            ran(0, 1 + restarts).await;
        }
        ran(1, 1).await;
        until(&supervisor, "one", WorkerState::Running).await;
        assert!(supervisor.restart("group"));
        ran(0, 2 + 2 * PATIENT.intensity).await;
        ran(1, 2).await;
        let rows = supervisor.rows();
        assert!(rows.iter().all(|row| row.restartable && row.last_error.is_none()), "{rows:?}");
        supervisor.stop("group").await;
        assert!(!supervisor.restart("group"), "what was stopped in the end stays stopped");
        assert!(supervisor.rows().iter().all(|row| !row.restartable));
    }

    #[tokio::test]
    async fn stopping_a_group_stops_what_hangs_below_it_and_drops_its_work() {
        struct Held(Arc<AtomicUsize>);
        impl Drop for Held {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let supervisor = Supervisor::start().await.unwrap();
        let held = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&held);
        supervisor.group(row("group", "root"));
        supervisor.add(
            row("child", "group"),
            Arc::new(move || {
                counter.fetch_add(1, Ordering::SeqCst);
                let held = Held(Arc::clone(&counter));
                async move {
                    let _held = held;
                    std::future::pending().await
                }
                .boxed()
            }),
        );
        until(&supervisor, "child", WorkerState::Running).await;
        while held.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        supervisor.stop("group").await;
        until(&supervisor, "child", WorkerState::Stopped).await;
        assert_eq!(held.load(Ordering::SeqCst), 0);
    }
}

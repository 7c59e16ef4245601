//! What the supervisor knows of a worker: its place in the tree, its restart rule, and when it is needed.

use domain::event::Stream;
use std::time::Duration;

/// A worker that runs as long as the process, or a group of workers.
#[derive(Clone, Copy, Debug)]
pub struct WorkerSpec {
    pub name: &'static str,
    pub parent: &'static str,
    pub restart: RestartPolicy,
    pub readiness: ReadinessRule,
    pub stop: ShutdownStep,
    pub queue: WorkerQueue,
    pub description: &'static str,
}

/// What happens when a worker ends, in whatever way: it is meant to run for ever.
#[derive(Clone, Copy, Debug)]
pub struct RestartPolicy {
    /// The pause before a restart; it doubles with each failure within [`RestartPolicy::window`], up to `longest`.
    pub pause: Duration,
    pub longest: Duration,
    /// This many failures within the window park the worker: it is shown, and not restarted until an operator does so. Its siblings run on.
    pub intensity: usize,
    pub window: Duration,
}

/// For workers that depend on something outside this process, and must recover by themselves whenever that does.
pub const ALWAYS: RestartPolicy = RestartPolicy {
    pause: Duration::from_millis(100),
    longest: Duration::from_secs(2),
    intensity: usize::MAX,
    window: Duration::from_secs(60),
};

/// For workers inside this process: one that keeps failing has a fault that a restart does not repair.
pub const BOUNDED: RestartPolicy = RestartPolicy {
    pause: Duration::from_millis(50),
    longest: Duration::from_secs(1),
    intensity: 10,
    window: Duration::from_secs(60),
};

/// Whether a process serves without the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadinessRule {
    /// Never: while it does not run, a part of all commands is blocked.
    MustRun,
    /// For the time of a restart: the process is not ready while the worker is parked.
    MustNotPark,
    /// For a long time.
    NotNeeded,
}

/// When the ordered shutdown stops a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownStep {
    Edge,
    Reactions,
    Accrual,
    Membership,
    Entities,
    OutboxRelay,
    Notifications,
    Policy,
    Keys,
    Metrics,
    Store,
    Cluster,
    TraceExport,
    /// Together with its parent, before it.
    WithParent,
}

impl ShutdownStep {
    /// The order of the shutdown.
    pub const ORDER: [Self; 13] = [
        Self::Edge,
        Self::Reactions,
        Self::Accrual,
        Self::Membership,
        Self::Entities,
        Self::OutboxRelay,
        Self::Notifications,
        Self::Policy,
        Self::Keys,
        Self::Metrics,
        Self::Store,
        Self::Cluster,
        Self::TraceExport,
    ];
}

/// The queue in front of a worker, as operators see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerQueue {
    /// None that is shown.
    Hidden,
    /// Commits that wait for this lane of the committer.
    CommitterLane(usize),
    /// Committed events that wait for the relay.
    Committed,
    /// The lag of the consumer of this stream.
    Consumer(Stream),
}

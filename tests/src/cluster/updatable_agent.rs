//! Fake agents that update themselves: each executes `agent.update` as a test wants it, and counts what it was ordered. Without a package or a
//! finalizer, it is the cheapest node of a rollout, of which benchmarks run many.

use super::client::send_request;
use super::fake_agent::FakeAgent;
use super::{NodeHandle, TestCluster, WAIT_TIMEOUT};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use uuid::Uuid;
use wire::task::{Task, TaskPayload, TaskResult};

/// The pause before a request that failed is sent again.
const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// Far below the time after which a node counts as offline.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(10);
/// One wait for tasks.
const POLL_SECONDS: u32 = 20;

/// The fake agents of several nodes.
pub struct UpdatableFleet {
    pub nodes: Vec<NodeHandle>,
    pub shared: Arc<FleetBehavior>,
    /// Dropped with the fleet.
    _running: JoinSet<()>,
}

/// What the agents do, and what they did.
pub struct FleetBehavior {
    /// Each update takes a permit and keeps it; without one it hangs.
    gate: Semaphore,
    /// Nodes whose updates are rolled back.
    fails: Mutex<BTreeSet<Uuid>>,
    /// Nodes whose validations fail.
    unfit: Mutex<BTreeSet<Uuid>>,
    /// The updates that began, in their order.
    begun: Mutex<Vec<Uuid>>,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    ended: AtomicUsize,
    /// How long an update takes beside its wait for a permit.
    takes_ms: AtomicU64,
}

impl FleetBehavior {
    fn new(permits: usize) -> Self {
        Self {
            gate: Semaphore::new(permits),
            fails: Mutex::default(),
            unfit: Mutex::default(),
            begun: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
            takes_ms: AtomicU64::new(0),
        }
    }

    /// Lets so many more updates end.
    pub fn finish(&self, updates: usize) {
        self.gate.add_permits(updates);
    }

    /// The machine of this node passes no validation.
    pub fn fail_validations(&self, node: Uuid) {
        lock(&self.unfit).insert(node);
    }

    /// Updates of this node are rolled back.
    pub fn fail(&self, node: Uuid) {
        self.fails.lock().unwrap_or_else(PoisonError::into_inner).insert(node);
    }

    /// The nodes whose updates began, in their order.
    pub fn begun(&self) -> Vec<Uuid> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Each update takes so long.
    pub fn take_for_each(&self, time: Duration) {
        self.takes_ms.store(u64::try_from(time.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    /// The updates whose result was answered.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    /// The most updates that were in progress at once.
    pub fn most_in_flight(&self) -> usize {
        self.most_in_flight.load(Ordering::SeqCst)
    }

    /// Waits until so many updates have begun in all.
    pub async fn expect_begun(&self, count: usize) -> Vec<Uuid> {
        let until = Instant::now() + WAIT_TIMEOUT;
        loop {
            let begun = self.begun();
            if begun.len() >= count {
                return begun;
            }
            assert!(Instant::now() < until, "{} of {count} updates have begun", begun.len());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl UpdatableFleet {
    /// Registers and enrolls `count` nodes of the SKU, each with a running agent. `permits` updates end by themselves.
    pub async fn start(cluster: &mut TestCluster, sku: &str, count: usize, permits: usize) -> Self {
        let shared = Arc::new(FleetBehavior::new(permits));
        let (mut nodes, mut running) = (Vec::new(), JoinSet::new());
        for _ in 0..count {
            let (node, agent) = enroll(cluster, sku).await;
            nodes.push(node);
            running.spawn(agent.serve(Arc::clone(&shared)));
        }
        for node in &nodes {
            node.expect_state("active").await;
        }
        Self { nodes, shared, _running: running }
    }

    /// The fleet of agents that are enrolled already.
    #[must_use]
    pub fn of(agents: Vec<(NodeHandle, UpdatableAgent)>, permits: usize) -> Self {
        let shared = Arc::new(FleetBehavior::new(permits));
        let (mut nodes, mut running) = (Vec::new(), JoinSet::new());
        for (node, agent) in agents {
            nodes.push(node);
            running.spawn(agent.serve(Arc::clone(&shared)));
        }
        Self { nodes, shared, _running: running }
    }
}

/// A node with an agent that is enrolled and not running yet: its first poll makes the node active.
pub async fn enroll(cluster: &mut TestCluster, sku: &str) -> (NodeHandle, UpdatableAgent) {
    let node = cluster.register(sku).await;
    let bundle = cluster.bundle(&node).await;
    let agent = UpdatableAgent::new(FakeAgent::enroll(&bundle, super::GPUS).await);
    agent.heartbeat().await;
    (node, agent)
}

/// A fake agent, with the version that it runs.
pub struct UpdatableAgent {
    agent: FakeAgent,
    digest: Mutex<String>,
    /// The results of the tasks that it was given: a task that comes again is reported again.
    results: Mutex<BTreeMap<Uuid, TaskResult>>,
    /// The updates that have begun.
    started: Mutex<BTreeSet<Uuid>>,
}

impl UpdatableAgent {
    /// The agent runs the version whose digest has only zeros.
    #[must_use]
    pub fn new(agent: FakeAgent) -> Self {
        Self { agent, digest: Mutex::new(digest('0')), results: Mutex::default(), started: Mutex::default() }
    }

    /// Sends a heartbeat with the version that it runs; a lost one is sent again.
    pub async fn heartbeat(&self) {
        let mut body = self.agent.heartbeat_body();
        body["task_types"] = json!(["agent.update", "node.validate"]);
        body["package_digest"] = json!(*lock(&self.digest));
        self.send_until_answered("heartbeat", &body).await;
    }

    async fn send_until_answered(&self, path: &str, body: &Value) {
        loop {
            let sent = send_request(self.agent.request(Method::POST, path).json(body)).await;
            // Another answer is final: a result that has come before, for example.
            if sent.is_ok_and(|answer| !answer.status.is_server_error()) {
                return;
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    async fn serve(self, shared: Arc<FleetBehavior>) {
        let this = Arc::new(self);
        let heartbeats = async {
            loop {
                // Spread out, as the heartbeats of machines are.
                tokio::time::sleep(HEARTBEAT_INTERVAL.mul_f64(0.5 + rand::random::<f64>() / 2.0)).await;
                this.heartbeat().await;
            }
        };
        let tasks = async {
            let mut executing = JoinSet::new();
            loop {
                match this.agent.poll(POLL_SECONDS).await {
                    Ok(answer) if answer.status.as_u16() == 200 => {
                        let task = this.agent.opened(answer);
                        executing.spawn(Arc::clone(&this).execute(task, Arc::clone(&shared)));
                    }
                    Ok(answer) if answer.status.as_u16() == 204 => {}
                    Ok(_) | Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
                }
            }
        };
        tokio::join!(heartbeats, tasks);
    }

    async fn execute(self: Arc<Self>, task: TaskPayload, shared: Arc<FleetBehavior>) {
        let known = lock(&self.results).get(&task.task_id).cloned();
        let is_update = matches!(task.task, Task::UpdateAgent(_));
        if is_update && !lock(&self.started).insert(task.task_id) && known.is_none() {
            // It was sent again, since the answer to a poll was lost. Its execution will report it.
            return;
        }
        let result = match (known, &task.task) {
            // It is reported again.
            (Some(result), _) => result,
            (None, Task::UpdateAgent(update)) => self.update(&task, &update.digest.to_string(), &shared).await,
            (None, Task::Validate { .. }) if lock(&shared.unfit).contains(&self.agent.node_id) => {
                self.agent.failure(&task)
            }
            (None, _) => self.agent.success(&task),
        };
        let body = serde_json::to_value(&result).unwrap();
        self.send_until_answered(&format!("tasks/{}/result", task.task_id), &body).await;
        if is_update {
            shared.ended.fetch_add(1, Ordering::SeqCst);
        }
    }

    async fn update(&self, task: &TaskPayload, to: &str, shared: &FleetBehavior) -> TaskResult {
        let node = self.agent.node_id;
        lock(&shared.begun).push(node);
        let in_flight = shared.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
        shared.most_in_flight.fetch_max(in_flight, Ordering::SeqCst);
        shared.gate.acquire().await.unwrap().forget();
        tokio::time::sleep(Duration::from_millis(shared.takes_ms.load(Ordering::SeqCst))).await;
        let fails = lock(&shared.fails).contains(&node);
        let result = if fails {
            self.agent.failure(task)
        } else {
            *lock(&self.digest) = to.to_owned();
            self.heartbeat().await;
            self.agent.success(task)
        };
        lock(&self.results).insert(task.task_id, result.clone());
        // Before the report, since the next update may begin as soon as that is committed.
        shared.in_flight.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

/// A package's digest of this digit alone.
#[must_use]
pub fn digest(digit: char) -> String {
    format!("sha256:{}", digit.to_string().repeat(64))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

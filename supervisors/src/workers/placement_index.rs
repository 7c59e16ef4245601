//! The index of free GPUs in the memory of each process that places allocations (decision 0094): what feeds it, and what checks it.
//!
//! ```text
//! a node's commit ──▶ node-capacity ──▶ gpuaas.placement.nodes ──▶ placement-feed ──▶ FreeGpuIndex ◀── checks: Postgres
//! ```
//!
//! A message may be lost, repeated or late. So the index is compared with Postgres when a process starts, when a message is missing in a
//! feed, after a reconnection, periodically, and before a request is refused.

mod feed;
mod free_gpus;

pub use free_gpus::{FreeGpuIndex, SearchOutcome};

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use async_nats::HeaderMap;
use domain::NodeId;
use domain::node::Node;
use domain::placement::NodeCapacity;
use feed::{CapacityMessage, CommittedCapacity, FeedPositions, MAX_NODES};
use futures::StreamExt;
use persistence::Reads;
use persistence::outage_log::RetryLog;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;

const SUBJECT: &str = "gpuaas.placement.nodes";

/// How often the index is compared with Postgres where nothing calls for it.
const CHECK_INTERVAL: Duration = Duration::from_secs(15);

/// How often the age of the last check and the connection to NATS are looked at.
const TICK: Duration = Duration::from_secs(1);

/// Missing messages within this time call for one check.
const COALESCE_FOR: Duration = Duration::from_millis(100);

/// Changes within this time are published together.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(5);

/// The checks.
pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let shared = (Arc::clone(&parts.free_gpus), parts.stages.membership.bus.clone());
    Ok(task(&shared, |(free_gpus, bus)| run(free_gpus, bus)))
}

/// The receiver of what others publish.
pub(super) fn start_listener(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let shared = (Arc::clone(&parts.free_gpus), parts.stages.membership.bus.clone());
    Ok(task(&shared, |(free_gpus, bus)| listen(free_gpus, bus)))
}

/// The publisher of this member's nodes.
pub(super) fn start_publisher(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, actors, .. } = &parts.stages;
    let publisher = CapacityPublisher {
        host: Arc::clone(&actors.host),
        reads: storage.reads.clone(),
        bus: membership.bus.clone(),
        free_gpus: Arc::clone(&parts.free_gpus),
    };
    Ok(task(&Arc::new(publisher), |publisher| async move { publisher.run().await }))
}

/// Compares the index with Postgres, when called for and periodically, and reads nodes again that have refused unexpectedly.
///
/// # Errors
/// Never; while Postgres cannot be read the index stays as it is.
pub async fn run(free_gpus: Arc<FreeGpuIndex>, bus: Bus) -> anyhow::Result<()> {
    tokio::join!(check_periodically(&free_gpus, || bus.is_connected()), free_gpus.reread_doubted());
    Ok(())
}

async fn check_periodically(free_gpus: &FreeGpuIndex, is_bus_connected: impl Fn() -> bool) {
    let mut ticker = interval(TICK);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut checked_at, mut was_connected): (Option<Instant>, bool) = (None, false);
    let retries = RetryLog::new("compare the index of free GPUs with the database");
    loop {
        tokio::select! {
            () = free_gpus.check_requested() => {}
            _ = ticker.tick() => {
                let is_connected = is_bus_connected();
                let is_back = is_connected && !was_connected;
                was_connected = is_connected;
                if !is_back && checked_at.is_some_and(|at| at.elapsed() < CHECK_INTERVAL) {
                    continue;
                }
            }
        }
        let began = Instant::now();
        if retries.observe(free_gpus.check_all().await).is_some() {
            checked_at = Some(began);
        }
        tokio::time::sleep(COALESCE_FOR.max(began.elapsed())).await;
    }
}

/// Receives what commits have made of nodes, of any member.
///
/// # Errors
/// Where the subscription ends.
pub async fn listen(free_gpus: Arc<FreeGpuIndex>, bus: Bus) -> anyhow::Result<()> {
    let mut messages = bus.broadcasts(SUBJECT).await?;
    // Messages before the subscription are not received.
    free_gpus.request_check();
    let mut positions = FeedPositions::default();
    while let Some((_, message)) = messages.next().await {
        match strict_json::from_slice::<CapacityMessage>(&message.payload) {
            Ok(CapacityMessage { feed, sequence, nodes }) => {
                free_gpus.apply(nodes.into_iter().map(|node| (node.version, node.capacity)));
                if positions.is_gap(feed, sequence) {
                    free_gpus.note_gap();
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a message about free GPUs is not one that this release understands");
                free_gpus.note_gap();
            }
        }
    }
    anyhow::bail!("the subscription ended")
}

/// Publishes the free GPUs of this member's nodes after their commits.
struct CapacityPublisher {
    host: Arc<Host>,
    reads: Reads,
    bus: Bus,
    /// This process's own, which needs no message.
    free_gpus: Arc<FreeGpuIndex>,
}

impl CapacityPublisher {
    async fn run(&self) -> anyhow::Result<()> {
        let (feed, mut sequence) = (Uuid::new_v4(), 0);
        loop {
            let changes = self.host.changed_nodes().next().await;
            // A number that is never sent: the receivers miss it, and read all.
            sequence += u64::from(changes.is_incomplete);
            let changed: Vec<NodeId> = changes.nodes.into_iter().collect();
            for some in changed.chunks(MAX_NODES) {
                let (nodes, is_complete) = self.committed(some).await;
                sequence += u64::from(!is_complete);
                self.free_gpus.apply(nodes.iter().map(|node| (node.version, node.capacity.clone())));
                sequence += 1;
                let message = serde_json::to_vec(&CapacityMessage { feed, sequence, nodes })?;
                // One that is not sent is missed when the next one arrives.
                self.bus.notify(SUBJECT, None, HeaderMap::new(), message).await;
            }
            tokio::time::sleep(PUBLISH_INTERVAL).await;
        }
    }

    /// What is committed of these nodes, and whether all of them could be read.
    async fn committed(&self, nodes: &[NodeId]) -> (Vec<CommittedCapacity>, bool) {
        let (mut found, mut elsewhere) = (Vec::with_capacity(nodes.len()), Vec::new());
        for node_id in nodes {
            match self.host.committed_state::<Node>(node_id.0) {
                Some((node, version)) => found.push(CommittedCapacity { version, capacity: NodeCapacity::of(&node) }),
                // The next commit is in flight, or the actor has left.
                None => elsewhere.push(*node_id),
            }
        }
        if elsewhere.is_empty() {
            return (found, true);
        }
        match self.reads.node_rows(&elsewhere).await {
            Ok(rows) => {
                found.extend(
                    rows.iter()
                        .map(|row| CommittedCapacity { version: row.version, capacity: free_gpus::capacity(row) }),
                );
                (found, true)
            }
            Err(error) => {
                tracing::debug!(%error, "could not read changed nodes");
                (found, false)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_host::CapturedLog;

    #[tokio::test(start_paused = true)]
    async fn checks_that_fail_each_second_in_an_outage_log_one_line() {
        let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy("postgres://nobody@127.0.0.1:1/none").unwrap();
        pool.close().await;
        let free_gpus = FreeGpuIndex::new(&prometheus::Registry::new(), Reads::new(pool)).unwrap();
        let (log, logging) = CapturedLog::start();
        let outage = tokio::time::timeout(Duration::from_secs(30), check_periodically(&free_gpus, || true));
        assert!(outage.await.is_err(), "it goes on");
        drop(logging);
        let lines = log.messages();
        let warnings: Vec<_> = lines.iter().filter(|(level, _)| level == "WARN").collect();
        let [(_, warning)] = warnings[..] else { panic!("{lines:?}") };
        assert!(warning.contains("could not compare the index of free GPUs with the database"), "{warning}");
    }
}

//! Reads metrics periodically that are too expensive to read at each scrape.

use super::WorkerDependencies;
use super::event_reactions::consumer_name;
use crate::cluster::bus::Bus;
use crate::cluster::stream_copies;
use crate::metrics::certificate_log::CertificateLog;
use crate::metrics::{ConsumerLag, ProcessMetrics};
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use async_nats::jetstream;
use chrono::Utc;
use domain::Shard;
use domain::event::Stream;
use persistence::outage_log::RetryLog;
use persistence::{Reads, StoreError};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval, timeout};

const INTERVAL: Duration = Duration::from_secs(5);

/// Balances are compared with the ledger once in this many rounds: each account is read.
const ROUNDS_PER_LEDGER_CHECK: usize = 12;

/// Totals are read once in this many rounds.
const ROUNDS_PER_GPU_COUNT: usize = 3;

/// How long JetStream may take to answer for a consumer's lag.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, actors, services, .. } = &parts.stages;
    let metrics = Arc::clone(&services.operator_view.metrics);
    let shared = (metrics, Arc::clone(&actors.host), storage.reads.clone(), membership.bus.clone());
    Ok(task(&shared, |(metrics, host, reads, bus)| run(metrics, host, reads, bus)))
}

/// Reads, periodically.
///
/// # Errors
/// Never; a metric that cannot be read keeps its last value, and its age shows.
pub async fn run(metrics: Arc<ProcessMetrics>, host: Arc<Host>, reads: Reads, bus: Bus) -> anyhow::Result<()> {
    let mut ticker = interval(INTERVAL);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut certificates = CertificateLog::default();
    let [counts, ledger, backups, inventory, standbys] = [
        "read the metrics",
        "compare balances with the ledger",
        "read the ages of backups",
        "read the metrics of the inventory",
        "read the standbys",
    ]
    .map(RetryLog::new);
    for turns in (0..ROUNDS_PER_LEDGER_CHECK).cycle() {
        ticker.tick().await;
        certificates.record(metrics.entity_totals.certificate_ends(), Utc::now());
        let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        let read = tokio::try_join!(reads.waiting_counts(&shards), reads.outbox_backlog(&shards));
        if let Some((waiting, pending)) = counts.observe(read) {
            metrics.set_shard_gauges(&waiting, &pending);
        }
        // Not in the first round: no shard is open yet.
        if turns == 1 {
            if let Some(micro) = ledger.observe(reads.ledger_difference(&shards).await) {
                metrics.set_ledger_difference(micro);
            }
            if let Some(times) = backups.observe(reads.backup_times().await) {
                metrics.backups.set(&times);
            }
        }
        if turns % ROUNDS_PER_GPU_COUNT == 1
            && inventory.observe(read_totals(&metrics, &reads, &shards, turns == 1).await).is_some()
        {
            metrics.mark_inventory_read();
        }
        if let Some(status) = standbys.observe(reads.replication_status().await) {
            metrics.replication.set_database(status);
        }
        for stream in Stream::ALL {
            // Failures are not logged here, since they would repeat every few seconds; the lost connection was logged once.
            if let (true, Ok(Ok(lag))) = (bus.is_connected(), timeout(REPLY_TIMEOUT, lag(&bus, stream)).await) {
                metrics.set_consumer_lag(stream, lag);
            }
            if let (true, Ok(Ok(missing))) = (bus.is_connected(), timeout(REPLY_TIMEOUT, missing(&bus, stream)).await) {
                metrics.replication.set_missing_copies(stream, missing);
            }
        }
    }
    Ok(())
}

/// Reads what there is of entities and GPUs, and, where it is wanted, of money and of what concerns nodes: for these, each account and node is
/// read.
async fn read_totals(
    metrics: &ProcessMetrics,
    reads: &Reads,
    shards: &[Shard],
    wants_all: bool,
) -> Result<(), StoreError> {
    metrics.entity_totals.set_entities(&reads.counts().await?);
    metrics.entity_totals.set_gpus(&reads.gpu_use(shards).await?);
    if wants_all {
        metrics.entity_totals.set_accounts(&reads.account_sums(shards).await?);
        metrics.entity_totals.set_node_concerns(&reads.node_concerns(shards).await?);
    }
    Ok(())
}

/// The lag of a stream's consumer.
async fn lag(bus: &Bus, stream: Stream) -> anyhow::Result<ConsumerLag> {
    let context = jetstream::new(bus.client().clone());
    let consumer: jetstream::consumer::PullConsumer =
        context.get_consumer_from_stream(consumer_name(stream), stream.name()).await?;
    let info = consumer.cached_info();
    Ok(ConsumerLag { waiting: info.num_pending, in_flight: info.num_ack_pending as u64 })
}

/// How many copies of a stream are missing.
async fn missing(bus: &Bus, stream: Stream) -> anyhow::Result<usize> {
    let found = jetstream::new(bus.client().clone()).get_stream(stream.name()).await?;
    Ok(stream_copies::missing(found.cached_info(), bus.stream_copies()))
}

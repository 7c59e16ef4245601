//! Reads metrics periodically that are too expensive to read at each scrape.

use super::WorkerDependencies;
use super::reactor::consumer_name;
use crate::cluster::bus::Bus;
use crate::metrics::{ConsumerLag, ProcessMetrics};
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use async_nats::jetstream;
use domain::event::Stream;
use persistence::Reads;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{MissedTickBehavior, interval, timeout};

const INTERVAL: Duration = Duration::from_secs(5);

/// Balances are compared with the ledger once in this many rounds: each account is read.
const ROUNDS_PER_LEDGER_CHECK: usize = 12;

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
    for turns in (0..ROUNDS_PER_LEDGER_CHECK).cycle() {
        ticker.tick().await;
        let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        match tokio::try_join!(reads.waiting_counts(&shards), reads.outbox_backlog(&shards)) {
            Ok((standing, pending)) => metrics.set_shard_gauges(&standing, &pending),
            Err(error) => tracing::warn!(error = %error, "could not read the metrics"),
        }
        // Not in the first round: no shard is open yet.
        if turns == 1 {
            match reads.ledger_difference(&shards).await {
                Ok(micro) => metrics.set_ledger_difference(micro),
                Err(error) => tracing::warn!(error = %error, "could not compare balances with the ledger"),
            }
        }
        for stream in Stream::ALL {
            // Failures are not logged here, since they would repeat every few seconds; the lost connection was logged once.
            if let (true, Ok(Ok(lag))) = (bus.is_connected(), timeout(REPLY_TIMEOUT, lag(&bus, stream)).await) {
                metrics.set_consumer_lag(stream, lag);
            }
        }
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

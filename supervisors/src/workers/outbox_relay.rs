//! Publishes committed events: outbox rows become CloudEvents on JetStream (specification, *Events*; CloudEvents 1.0, JSON format).
//!
//! The committer passes fresh rows in the order of their commits; rows that are lost on the way are found by the poll
//! (`workers::event_reactions`). JetStream acknowledges before it has synced, so that an event with a reaction stays in the outbox until its
//! reaction is committed; only the others are deleted at the acknowledgement.

use super::WorkerDependencies;
use crate::cluster::bus::Bus;
use crate::cluster::stream_copies::open_stream;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use async_nats::jetstream::stream::{Config, DiscardPolicy, RetentionPolicy, StorageType};
use async_nats::{HeaderMap, jetstream};
use domain::choreography::Reaction;
use domain::event::Stream;
use domain::{EventId, Shard};
use futures::FutureExt as _;
use persistence::outage_log::{RetryLog, chain};
use persistence::{Outbox, OutboxRow};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{JoinHandle, JoinSet};

/// Events that are published and not acknowledged. The client blocks at 5,000.
const MAX_UNACKNOWLEDGED: usize = 1024;

/// Events that are taken from the queue at once.
const BATCH_SIZE: usize = 128;

/// How long the streams retain events. Whatever must happen is in the outbox; no consumer lags by a day.
const STREAM_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, .. } = &parts.stages;
    let (outbox, rows) = (Outbox::new(storage.pool.clone()), Arc::clone(&storage.committed_rows));
    let relay = Arc::new(OutboxRelay::new(membership.bus.clone(), outbox, rows));
    Ok(task(&relay, |relay| async move { relay.run().await }))
}

/// The relay of one process.
pub struct OutboxRelay {
    bus: Bus,
    outbox: Outbox,
    rows: Arc<Mutex<mpsc::Receiver<OutboxRow>>>,
    settling: Arc<RetryLog>,
    publishing: Arc<RetryLog>,
}

impl OutboxRelay {
    #[must_use]
    pub fn new(bus: Bus, outbox: Outbox, rows: Arc<Mutex<mpsc::Receiver<OutboxRow>>>) -> Self {
        let [settling, publishing] =
            ["settle published events", "publish events"].map(|doing| Arc::new(RetryLog::new(doing)));
        Self { bus, outbox, rows, settling, publishing }
    }

    /// Publishes until the committer is closed.
    ///
    /// # Errors
    /// Where the streams cannot be made.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut context = jetstream::new(self.bus.client().clone());
        context.set_timeout(Duration::from_secs(5));
        make_streams(&context, self.bus.stream_copies()).await?;
        let mut rows = self.rows.lock().await;
        let mut acknowledgements: JoinSet<Option<EventId>> = JoinSet::new();
        let mut settled: Vec<EventId> = Vec::new();
        // Rows are deleted concurrently with publishing, all acknowledged ones at once.
        let mut settling: Option<JoinHandle<()>> = None;
        let mut taken = Vec::with_capacity(BATCH_SIZE);
        loop {
            if settling.is_none() && !settled.is_empty() {
                let (outbox, retries) = (self.outbox.clone(), Arc::clone(&self.settling));
                settling = Some(tokio::spawn(settle(outbox, std::mem::take(&mut settled), retries)));
            }
            tokio::select! {
                biased;
                Some(acknowledged) = acknowledgements.join_next() => {
                    settled.extend(acknowledged.ok().flatten());
                    // Further acknowledgements go into the same statement.
                    while let Some(acknowledged) = acknowledgements.try_join_next() {
                        settled.extend(acknowledged.ok().flatten());
                    }
                }
                () = settling.as_mut().map_or_else(|| std::future::pending().right_future(), |it| it.map(drop).left_future()) => {
                    settling = None;
                }
                count = rows.recv_many(&mut taken, BATCH_SIZE), if acknowledgements.len() < MAX_UNACKNOWLEDGED => {
                    if count == 0 {
                        return Ok(());
                    }
                    // Without NATS the poll finds and processes them.
                    let published = if self.bus.is_connected() { count } else { 0 };
                    for row in taken.drain(..).take(published) {
                        self.publish(&context, row, &mut acknowledgements).await;
                    }
                }
            }
        }
    }

    /// Publishes one row. Its task in `acknowledgements` ends at the broker's acknowledgement, and returns the id of a row to delete.
    async fn publish(
        &self,
        context: &jetstream::Context,
        row: OutboxRow,
        acknowledgements: &mut JoinSet<Option<EventId>>,
    ) {
        let (id, may_go) = (row.id, row.event.reaction() == Reaction::Nothing);
        let (mut headers, event) = (headers(&row), cloud_event(&row));
        self.bus.stamp_event(row.event.subject(), &event, &mut headers);
        let sent = context.publish_with_headers(row.event.subject(), headers, event.into()).await;
        let retries = Arc::clone(&self.publishing);
        let lost = move |retries: &RetryLog, error: &(dyn std::error::Error + 'static)| {
            let correlation_id = row.origin.correlation_id.as_str();
            tracing::debug!(correlation_id, event.id = %id, %error, "an event was not published; the poll finds it");
            retries.failed(&chain(error));
        };
        let acknowledgement = match sent {
            Ok(acknowledgement) => acknowledgement,
            Err(error) => return lost(&retries, &error),
        };
        acknowledgements.spawn(async move {
            match acknowledgement.await {
                Ok(_) => {
                    retries.succeeded();
                    may_go.then_some(id)
                }
                Err(error) => {
                    lost(&retries, &error);
                    None
                }
            }
        });
    }
}

/// Rows that are not settled stay, and are published again, which is harmless.
async fn settle(outbox: Outbox, settled: Vec<EventId>, retries: Arc<RetryLog>) {
    let _ = retries.observe(outbox.settle(&settled).await);
}

/// The headers that every message carries.
#[must_use]
pub fn headers(row: &OutboxRow) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", row.id.to_string());
    headers.insert("x-correlation-id", row.origin.correlation_id.as_str());
    if let Some(traceparent) = &row.origin.traceparent {
        headers.insert("traceparent", traceparent.as_str());
    }
    if let Some(tracestate) = &row.origin.tracestate {
        headers.insert("tracestate", tracestate.as_str());
    }
    headers
}

/// A row as a CloudEvent.
#[must_use]
pub fn cloud_event(row: &OutboxRow) -> String {
    let Shard(shard) = row.shard;
    json!({
        "specversion": "1.0",
        "id": row.id,
        "source": format!("/gpuaas/shards/{shard}"),
        "type": row.event.subject(),
        "subject": row.event.about().to_string(),
        "time": row.created_at,
        "datacontenttype": "application/json",
        "correlationid": row.origin.correlation_id,
        "epoch": row.epoch,
        "sequence": format!("{:020}", row.seq),
        "data": row.event,
    })
    .to_string()
}

/// Creates missing streams, with so many copies. To be called before publishing or consuming.
///
/// # Errors
/// Where JetStream cannot be reached, or its cluster is too small.
pub async fn make_streams(context: &jetstream::Context, copies: usize) -> anyhow::Result<()> {
    for stream in Stream::ALL {
        let config = Config {
            name: stream.name().to_owned(),
            subjects: stream.subjects().iter().map(|subject| (*subject).to_owned()).collect(),
            retention: RetentionPolicy::Limits,
            storage: StorageType::File,
            discard: DiscardPolicy::Old,
            max_age: STREAM_RETENTION,
            duplicate_window: Duration::from_secs(120),
            ..Config::default()
        };
        open_stream(context, config, copies).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use domain::commit::Epoch;
    use domain::state_machine::RequestOrigin;
    use domain::{AllocationId, Event, Timestamp};
    use uuid::Uuid;

    #[test]
    fn outbox_row_becomes_a_cloud_event_with_its_headers() {
        let row = OutboxRow {
            id: EventId(Uuid::from_u128(1)),
            shard: Shard(17),
            epoch: Epoch(3),
            seq: 42,
            event: Event::AllocationRequested { allocation_id: AllocationId(Uuid::from_u128(2)) },
            origin: RequestOrigin {
                correlation_id: "abc".to_owned(),
                traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned()),
                tracestate: Some("vendor=1".to_owned()),
            },
            created_at: Timestamp::UNIX_EPOCH,
        };
        let event: serde_json::Value = serde_json::from_str(&cloud_event(&row)).unwrap();
        for (name, value) in [
            ("specversion", "1.0"),
            ("id", "00000000-0000-0000-0000-000000000001"),
            ("source", "/gpuaas/shards/17"),
            ("type", "provisioning.requested"),
            ("subject", "allocation/00000000-0000-0000-0000-000000000002"),
            ("correlationid", "abc"),
            ("sequence", "00000000000000000042"),
        ] {
            assert_eq!(event[name], value, "{name}");
        }
        assert_eq!(event["data"]["allocation_id"], "00000000-0000-0000-0000-000000000002");
        let headers = headers(&row);
        assert_eq!(headers.get("Nats-Msg-Id").unwrap().as_str(), "00000000-0000-0000-0000-000000000001");
        assert_eq!(headers.get("x-correlation-id").unwrap().as_str(), "abc");
        assert!(headers.get("traceparent").is_some());
        assert_eq!(headers.get("tracestate").unwrap().as_str(), "vendor=1");
    }
}

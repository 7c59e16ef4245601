//! What outlives the database: the events on NATS, what nodes have recorded, and the payment processor's books.

use super::losses::{ProcessorsMoney, PublishedEvent, TenantOnNode};
use crate::cluster::nats;
use anyhow::Context as _;
use async_nats::jetstream::{self, consumer::pull::OrderedConfig};
use chrono::{DateTime, TimeDelta, Utc};
use domain::event::Stream;
use domain::{Event, Shard};
use edge::payment_processor::{Processor, ProcessorPaymentStatus};
use futures::StreamExt as _;
use secrecy::SecretString;
use serde::Deserialize;
use std::path::Path;
use std::time::Duration;
use tokio::time::timeout;
use uuid::Uuid;

/// How long NATS may be silent while its streams are read.
const SILENCE: Duration = Duration::from_secs(20);

/// Events that are read at most: the streams of a day.
const MAX_EVENTS: usize = 5_000_000;

/// Records of nodes that are read at most, and the size of one.
const MAX_RECORDS: usize = 100_000;
const MAX_RECORD_BYTES: u64 = 1024 * 1024;

/// Before the restored end, since clocks differ and a payment may have been on its way.
const OVERLAP: TimeDelta = TimeDelta::hours(1);

#[derive(Deserialize)]
struct CloudEvent {
    source: String,
    time: DateTime<Utc>,
    epoch: i64,
    sequence: String,
    data: Event,
}

/// Every event on the bus, and the number of messages that are none.
///
/// # Errors
/// Where NATS cannot be reached, or its user may not read the streams.
pub async fn events(url: &SecretString, ca: Option<&Path>) -> anyhow::Result<(Vec<PublishedEvent>, u64)> {
    let client = nats::connect(url, ca, "gpuaas-recover-report").await?;
    let context = jetstream::new(client);
    let (mut events, mut strange) = (Vec::new(), 0);
    for stream in Stream::ALL {
        let name = stream.name();
        let opened = timeout(SILENCE, context.get_stream(name)).await.context("NATS does not answer")?;
        let mut stream = opened.with_context(|| {
            format!("the stream {name} cannot be read: give --nats-url of an operator's user who may read streams")
        })?;
        if stream.info().await?.state.messages == 0 {
            continue;
        }
        let consumer = timeout(SILENCE, stream.create_consumer(OrderedConfig::default())).await;
        let consumer = consumer.context("NATS does not answer")?.with_context(|| {
            format!("the stream {name} cannot be read: give --nats-url of an operator's user who may read streams")
        })?;
        let mut messages = consumer.messages().await?;
        while let Some(message) = timeout(SILENCE, messages.next()).await.context("NATS does not answer")? {
            let message = message?;
            match parse(&message.payload) {
                Some(event) => events.push(event),
                None => strange += 1,
            }
            anyhow::ensure!(events.len() <= MAX_EVENTS, "there are more than {MAX_EVENTS} events");
            if message.info().map_err(|error| anyhow::anyhow!("{error}"))?.pending == 0 {
                break;
            }
        }
    }
    Ok((events, strange))
}

fn parse(payload: &[u8]) -> Option<PublishedEvent> {
    let CloudEvent { source, time, epoch, sequence, data } = strict_json::from_slice(payload).ok()?;
    let shard = source.strip_prefix("/gpuaas/shards/")?.parse().map(Shard).ok()?;
    Some(PublishedEvent { shard, epoch, seq: sequence.parse().ok()?, at: time, event: data })
}

/// The record that an agent has of a tenant (`allocations/ID/allocation.json` in its state).
#[derive(Deserialize)]
struct AgentRecord {
    allocation_id: Uuid,
    provisioned_at: DateTime<Utc>,
}

/// The tenants in copies of nodes' state: a folder for each node, which has its `allocations`.
///
/// # Errors
/// Names the file that cannot be read.
pub fn tenants(folder: &Path) -> anyhow::Result<Vec<TenantOnNode>> {
    let mut found = Vec::new();
    let read = |path: &Path| std::fs::read_dir(path).with_context(|| path.display().to_string());
    for node in read(folder)? {
        let node = node?;
        let allocations = node.path().join("allocations");
        anyhow::ensure!(
            allocations.is_dir(),
            "{} has no folder `allocations` of a node's state",
            node.path().display()
        );
        for allocation in read(&allocations)? {
            let path = allocation?.path().join("allocation.json");
            // A folder without a record is of a clean-up that has ended.
            let Ok(metadata) = std::fs::metadata(&path) else { continue };
            anyhow::ensure!(metadata.len() <= MAX_RECORD_BYTES, "{} is too large for a record", path.display());
            let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
            let record: AgentRecord =
                strict_json::from_slice(&text).with_context(|| format!("{} is no record", path.display()))?;
            found.push(TenantOnNode {
                node: node.file_name().to_string_lossy().into_owned(),
                allocation_id: record.allocation_id,
                at: record.provisioned_at,
            });
            anyhow::ensure!(found.len() <= MAX_RECORDS, "there are more than {MAX_RECORDS} records");
        }
    }
    Ok(found)
}

/// The payments that were made at the processor since about then and are paid, and whether there may be more.
///
/// # Errors
/// Where the processor cannot be asked.
pub async fn money(processor: &dyn Processor, since: DateTime<Utc>) -> anyhow::Result<(Vec<ProcessorsMoney>, bool)> {
    let listing = processor.payments_since(since - OVERLAP).await?;
    let paid = listing.found.into_iter().filter(|it| matches!(it.status, ProcessorPaymentStatus::Paid { .. }));
    let money = paid.map(|it| ProcessorsMoney {
        processor_id: it.processor_id,
        payment_id: it.payment_id.map(|id| id.0),
        amount_minor: it.amount_minor,
        currency: it.currency.as_str().to_owned(),
    });
    Ok((money.collect(), listing.is_cut || !listing.unread.is_empty()))
}

//! Events whose reaction is overdue: the owner of a shard polls its outbox for them, so that a loss of NATS costs nothing but time.

use super::WorkerDependencies;
use super::event_delivery::{Disposition, EventDelivery};
use super::event_reactions::{MAX_CONCURRENT, Reactor};
use super::polling_loop::{self, PollLoopConfig};
use crate::cluster::bus::Bus;
use crate::mutex::lock;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use actors::Host;
use domain::EventId;
use domain::choreography::Reaction;
use futures::FutureExt;
use persistence::OutboxRow;
use persistence::outage_log::RetryLog;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often the owner of a shard polls for overdue events, and how many it reads of each shard.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
const EVENTS_PER_SHARD: u32 = 64;

/// The age from which an event without a committed reaction is found by the poll. JetStream usually delivers it within a millisecond.
const ORPHANED_AFTER: Duration = Duration::from_secs(3);

/// The same while NATS cannot be reached: then the poll is the only way.
const ORPHANED_AFTER_WITHOUT_NATS: Duration = Duration::from_millis(100);

/// How long an event that cannot be parsed is skipped. A newer release may have settled it by then, or this one been replaced.
const UNREADABLE_RETRY_AFTER: Duration = Duration::from_secs(60);

/// The poll for overdue events.
pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, actors, .. } = &parts.stages;
    let relay = storage.committed.clone();
    let shared = (parts.reactor.clone(), membership.bus.clone(), Arc::clone(&actors.host), relay);
    Ok(task(&shared, |(reactor, bus, host, relay)| async move { reactor.poll(&bus, &host, &relay).await }))
}

impl Reactor {
    /// Processes events of this member's shards whose reaction is overdue.
    ///
    /// # Errors
    /// Never; what fails is retried by the next poll.
    pub async fn poll(&self, bus: &Bus, host: &Arc<Host>, relay: &mpsc::Sender<OutboxRow>) -> anyhow::Result<()> {
        let unreadable: Arc<Mutex<UnreadableEvents>> = Arc::default();
        let find_due = |excluded: Vec<EventId>| {
            let (reactor, bus, host, unreadable) =
                (self.clone(), bus.clone(), Arc::clone(host), Arc::clone(&unreadable));
            async move { reactor.overdue(&bus, &host, excluded, &unreadable).await }.boxed()
        };
        let work = |row: OutboxRow| {
            let (reactor, bus, relay) = (self.clone(), bus.clone(), relay.clone());
            async move { reactor.process_overdue(row, &bus, &relay).await }
        };
        // Each poll is bounded per shard: the total number says nothing.
        let config = PollLoopConfig { interval: POLL_INTERVAL, concurrency: MAX_CONCURRENT, page_size: usize::MAX };
        polling_loop::run(config, find_due, work).await;
        Ok(())
    }

    async fn overdue(
        &self,
        bus: &Bus,
        host: &Host,
        mut excluded: Vec<EventId>,
        unreadable: &Mutex<UnreadableEvents>,
    ) -> Vec<(EventId, OutboxRow)> {
        excluded.extend(lock(unreadable).excluded(Instant::now()));
        let shards: Vec<_> = host.terms().iter().map(|term| term.shard).collect();
        let age = if bus.is_connected() { ORPHANED_AFTER } else { ORPHANED_AFTER_WITHOUT_NATS };
        static RETRIES: RetryLog = RetryLog::new("look for orphaned events");
        let read = self.context.reads.orphaned_events(&shards, age, &excluded, EVENTS_PER_SHARD).await;
        let Some(orphans) = RETRIES.observe(read) else { return Vec::new() };
        lock(unreadable).add(orphans.foreign, Instant::now());
        orphans.rows.into_iter().map(|row| (row.id, row)).collect()
    }

    /// Whether the row is settled.
    async fn process_overdue(&self, row: OutboxRow, bus: &Bus, relay: &mpsc::Sender<OutboxRow>) -> bool {
        if row.event.reaction() == Reaction::Nothing {
            if bus.is_connected() {
                // Where the queue is full, the poll finds the row again, as it does without an acknowledgement of the broker.
                let _ = relay.try_send(row);
            }
            return false;
        }
        let delivery = EventDelivery { id: row.id, event: row.event, origin: row.origin };
        match self.react(&delivery).await {
            Disposition::Settled => true,
            Disposition::Later { why } => {
                tracing::warn!(
                    correlation_id = delivery.origin.correlation_id, resource_name = %delivery.event.about(), event.id = %delivery.id,
                    event.subject = delivery.event.subject(), why, "an event's effect is overdue"
                );
                false
            }
        }
    }
}

/// Events that this release cannot parse: they are retried periodically, and block no later ones.
#[derive(Default)]
struct UnreadableEvents {
    ids: BTreeSet<EventId>,
    since: Option<Instant>,
}

impl UnreadableEvents {
    fn excluded(&mut self, now: Instant) -> impl Iterator<Item = EventId> {
        if self.since.is_some_and(|since| now.duration_since(since) >= UNREADABLE_RETRY_AFTER) {
            *self = Self::default();
        }
        self.ids.iter().copied()
    }

    fn add(&mut self, ids: Vec<EventId>, now: Instant) {
        if !ids.is_empty() {
            self.since.get_or_insert(now);
            self.ids.extend(ids);
        }
    }
}

//! Feeds the relay with the events of shards whose owners have no relay of their own: where the roles `entities` and `outbox-relay` run
//! in separate processes. The events are read from Postgres in the order of their commits; such shards are divided among the relays.

use super::WorkerDependencies;
use crate::cluster::ClusterView;
use crate::process_roles::ProcessRole;
use crate::startup::Stages;
use crate::supervisor::{WorkerTask, task};
use domain::Shard;
use domain::choreography::Reaction;
use persistence::outage_log::RetryLog;
use persistence::queries::OutboxCursor;
use persistence::{OutboxRow, Reads};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often the outbox is read.
const INTERVAL: Duration = Duration::from_millis(100);
const EVENTS_PER_SHARD: u32 = 256;

/// An event without a reaction stays until the broker has acknowledged it: after this time it is published again.
const REPUBLISH_AFTER: Duration = Duration::from_secs(3);

pub(super) fn start(parts: &WorkerDependencies) -> anyhow::Result<WorkerTask> {
    let Stages { storage, membership, .. } = &parts.stages;
    let (view, reads, relay) = (Arc::clone(&membership.view), storage.reads.clone(), storage.committed.clone());
    Ok(task(&Arc::new(OutboxPoll { view, reads, relay }), |poll| async move { poll.run().await }))
}

/// Reads the outbox for the relay of this process.
pub struct OutboxPoll {
    pub view: Arc<ClusterView>,
    pub reads: Reads,
    pub relay: mpsc::Sender<OutboxRow>,
}

impl OutboxPoll {
    /// # Errors
    /// Never; what fails is retried by the next poll.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut ticker = tokio::time::interval(INTERVAL);
        ticker.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut cursors, mut looked_at) = (BTreeMap::new(), Instant::now());
        let retries = RetryLog::new("read committed events");
        loop {
            ticker.tick().await;
            let _ = retries.observe(self.poll_once(&mut cursors, &mut looked_at).await);
        }
    }

    async fn poll_once(
        &self,
        cursors: &mut BTreeMap<Shard, OutboxCursor>,
        looked_at: &mut Instant,
    ) -> Result<(), persistence::StoreError> {
        let mine = self.view.shards_without(ProcessRole::OutboxRelay);
        // A shard that returns is read from its start: another relay had it in the meantime.
        cursors.retain(|shard, _| mine.contains(shard));
        for shard in &mine {
            cursors.entry(*shard).or_insert(OutboxCursor::start(*shard));
        }
        if cursors.is_empty() {
            return Ok(());
        }
        let from: Vec<_> = cursors.values().copied().collect();
        for row in self.reads.events_after(&from, EVENTS_PER_SHARD).await?.rows {
            let at = OutboxCursor { shard: row.shard, epoch: row.epoch, seq: row.seq };
            // The queue is full: the row is read again by the next poll.
            let Ok(()) = self.relay.try_send(row) else { return Ok(()) };
            cursors.insert(at.shard, at);
        }
        if looked_at.elapsed() >= REPUBLISH_AFTER {
            *looked_at = Instant::now();
            // Events with a reaction are found by the poll of the shard's owner.
            let unsettled = self.reads.orphaned_events(&mine, REPUBLISH_AFTER, &[], EVENTS_PER_SHARD).await?.rows;
            for row in unsettled.into_iter().filter(|row| row.event.reaction() == Reaction::Nothing) {
                let _ = self.relay.try_send(row);
            }
        }
        Ok(())
    }
}

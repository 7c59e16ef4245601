//! Feeds the relay with the events of shards whose owners have no relay of their own: where the roles `entities` and `outbox-relay` run
//! in processes apart. The events are read from Postgres in the order of their commits; such shards are divided among the relays.

use crate::cluster::View;
use crate::config::Role;
use domain::Shard;
use domain::event::Reaction;
use persistence::read::OutboxCursor;
use persistence::{OutboxRow, Reads};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often the outbox is read.
const TURN: Duration = Duration::from_millis(100);
const IN_ONE_SHARD: u32 = 256;

/// An event from which nothing follows stays until the broker has acknowledged it: after so long it is published again.
const AGAIN_AFTER: Duration = Duration::from_secs(3);

/// Reads the outbox for the relay of this process.
pub struct OutboxPoll {
    pub view: Arc<View>,
    pub reads: Reads,
    pub relay: mpsc::Sender<OutboxRow>,
}

impl OutboxPoll {
    /// # Errors
    /// Never; what fails is tried again at the next turn.
    pub async fn run(&self) -> anyhow::Result<()> {
        let mut turn = tokio::time::interval(TURN);
        turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut cursors, mut looked_at) = (BTreeMap::new(), Instant::now());
        loop {
            turn.tick().await;
            if let Err(error) = self.turn(&mut cursors, &mut looked_at).await {
                tracing::warn!(error = %error, "could not read committed events");
            }
        }
    }

    async fn turn(
        &self,
        cursors: &mut BTreeMap<Shard, OutboxCursor>,
        looked_at: &mut Instant,
    ) -> Result<(), persistence::StoreError> {
        let mine = self.view.shards_without(Role::OutboxRelay);
        // A shard that comes back is read from its beginning: another relay had it meanwhile.
        cursors.retain(|shard, _| mine.contains(shard));
        for shard in &mine {
            cursors.entry(*shard).or_insert(OutboxCursor::start(*shard));
        }
        if cursors.is_empty() {
            return Ok(());
        }
        let from: Vec<_> = cursors.values().copied().collect();
        for row in self.reads.events_after(&from, IN_ONE_SHARD).await?.rows {
            let at = OutboxCursor { shard: row.shard, epoch: row.epoch, seq: row.seq };
            // Full: it is read again at the next turn.
            let Ok(()) = self.relay.try_send(row) else { return Ok(()) };
            cursors.insert(at.shard, at);
        }
        if looked_at.elapsed() >= AGAIN_AFTER {
            *looked_at = Instant::now();
            // What follows from the others is found by the poll of the shard's owner.
            let unsettled = self.reads.orphans(&mine, AGAIN_AFTER, &[], IN_ONE_SHARD).await?.rows;
            for row in unsettled.into_iter().filter(|row| row.event.reaction() == Reaction::Nothing) {
                let _ = self.relay.try_send(row);
            }
        }
        Ok(())
    }
}

//! The shards in this process's hands, each with a supervisor of its own for its entities.

use super::Host;
use super::failures::Exit;
use crate::place::shard_of;
use crate::ports::Term;
use domain::{Shard, Timestamp};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// A shard in this process's hands.
pub(super) struct OwnedShard {
    pub(super) term: Term,
    pub(super) since: Timestamp,
    pub(super) closing: AtomicBool,
    pub(super) waiting: Arc<AtomicUsize>,
    pub(super) supervisor: ActorRef<()>,
}

impl Host {
    /// Takes a shard into this process's hands, under the term that the database granted.
    ///
    /// # Errors
    /// When the shard's supervisor cannot be started.
    pub async fn open(self: &Arc<Self>, term: Term, parent: Option<ActorCell>) -> Result<(), ractor::SpawnErr> {
        let shard = ShardSupervisor { host: Arc::clone(self) };
        let (supervisor, _) = match parent {
            Some(parent) => Actor::spawn_linked(None, shard, (), parent).await?,
            None => Actor::spawn(None, shard, ()).await?,
        };
        let owned = OwnedShard {
            term,
            since: self.world.now(),
            closing: AtomicBool::new(false),
            waiting: Arc::default(),
            supervisor,
        };
        // What lived under an earlier term cannot commit under this one.
        self.lose(term.shard);
        self.shards.insert(term.shard, Arc::new(owned));
        Ok(())
    }

    /// Gives a shard out of this process's hands: no new commands, those under way are answered (at most for `grace`), then its
    /// entities are gone from here.
    pub async fn close(&self, shard: Shard, grace: Duration) {
        let Some(owned) = self.shards.get(&shard).map(|owned| Arc::clone(&owned)) else { return };
        owned.closing.store(true, Ordering::SeqCst);
        let end = Instant::now() + grace;
        while owned.waiting.load(Ordering::SeqCst) > 0 && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        self.drop_shard(shard, &owned);
    }

    /// The shard was taken by another member: whatever is under way here cannot be committed any more.
    pub fn lose(&self, shard: Shard) {
        if let Some(owned) = self.shards.get(&shard).map(|owned| Arc::clone(&owned)) {
            owned.closing.store(true, Ordering::SeqCst);
            self.drop_shard(shard, &owned);
        }
    }

    fn drop_shard(&self, shard: Shard, owned: &Arc<OwnedShard>) {
        self.shards.remove_if(&shard, |_, now| Arc::ptr_eq(now, owned));
        let mut leaving = Vec::new();
        self.awake.retain(|_, awake| {
            let stays = !Arc::ptr_eq(&awake.owned, owned);
            if !stays {
                leaving.push(awake.cell.clone());
            }
            stays
        });
        for cell in leaving {
            cell.stop(None);
        }
        // Whoever owns the shard next makes its own experience.
        self.failures.retain(|entity, _| shard_of(entity.id) != shard);
        owned.supervisor.stop(None);
    }

    /// The term under which this process owns `shard`.
    #[must_use]
    pub fn term(&self, shard: Shard) -> Option<Term> {
        self.shards.get(&shard).filter(|owned| !owned.closing.load(Ordering::SeqCst)).map(|owned| owned.term)
    }

    /// The shards that are open here.
    #[must_use]
    pub fn terms(&self) -> Vec<Term> {
        let mut terms: Vec<_> = self.shards.iter().map(|owned| owned.term).collect();
        terms.sort_by_key(|term| term.shard);
        terms
    }
}

/// The supervisor of one shard's entities: one child's end is that child's alone.
struct ShardSupervisor {
    host: Arc<Host>,
}

impl Actor for ShardSupervisor {
    type Msg = ();
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<()>,
        event: SupervisionEvent,
        (): &mut (),
    ) -> Result<(), ActorProcessingErr> {
        match event {
            SupervisionEvent::ActorFailed(cell, error) => {
                let found = self.host.awake.iter().find(|awake| awake.actor == cell.get_id()).map(|awake| *awake.key());
                if let Some(entity) = found {
                    self.host.left(entity, cell.get_id(), Exit::Died { reason: error.to_string() });
                }
            }
            SupervisionEvent::ActorStarted(_)
            | SupervisionEvent::ActorTerminated(..)
            | SupervisionEvent::ProcessGroupChanged(_) => {}
        }
        Ok(())
    }
}

//! The owned shards, each with a supervisor for its entities.

use super::Host;
use super::failures::ActorExit;
use crate::ports::Term;
use crate::sharding::shard_of;
use domain::{Shard, Timestamp};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// A shard that this process owns.
pub(super) struct OwnedShard {
    pub(super) term: Term,
    pub(super) since: Timestamp,
    pub(super) closing: AtomicBool,
    pub(super) waiting: Arc<AtomicUsize>,
    pub(super) supervisor: ActorRef<()>,
}

impl Host {
    /// Opens a shard under the term that the database granted.
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
            since: self.environment.now(),
            closing: AtomicBool::new(false),
            waiting: Arc::default(),
            supervisor,
        };
        // Actors of an earlier term cannot commit under this one.
        self.lose(term.shard);
        self.shards.insert(term.shard, Arc::new(owned));
        Ok(())
    }

    /// Closes a shard: no new commands, those in flight are answered (at most for `grace`), then its entities are removed from here.
    pub async fn close(&self, shard: Shard, grace: Duration) {
        let Some(owned) = self.shards.get(&shard).map(|owned| Arc::clone(&owned)) else { return };
        owned.closing.store(true, Ordering::SeqCst);
        let end = Instant::now() + grace;
        while owned.waiting.load(Ordering::SeqCst) > 0 && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        self.drop_shard(shard, &owned);
    }

    /// The shard was taken over by another member: what is in flight here cannot be committed any more.
    pub fn lose(&self, shard: Shard) {
        if let Some(owned) = self.shards.get(&shard).map(|owned| Arc::clone(&owned)) {
            owned.closing.store(true, Ordering::SeqCst);
            self.drop_shard(shard, &owned);
        }
    }

    fn drop_shard(&self, shard: Shard, owned: &Arc<OwnedShard>) {
        self.shards.remove_if(&shard, |_, now| Arc::ptr_eq(now, owned));
        let mut leaving = Vec::new();
        self.active.retain(|_, activation| {
            let stays = !Arc::ptr_eq(&activation.owned, owned);
            if !stays {
                leaving.push(activation.cell.clone());
            }
            stays
        });
        for cell in leaving {
            cell.stop(None);
        }
        // The next owner records failures of its own.
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

/// The supervisor of one shard's entities: the end of one child affects no other.
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
                let found = self
                    .host
                    .active
                    .iter()
                    .find(|activation| activation.actor == cell.get_id())
                    .map(|activation| *activation.key());
                if let Some(entity) = found {
                    self.host.actor_exited(entity, cell.get_id(), ActorExit::Crashed { reason: error.to_string() });
                }
            }
            SupervisionEvent::ActorStarted(_)
            | SupervisionEvent::ActorTerminated(..)
            | SupervisionEvent::ProcessGroupChanged(_) => {}
        }
        Ok(())
    }
}

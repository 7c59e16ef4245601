//! The owned shards, each with a supervisor for its entities.

use super::failures::ActorExit;
use super::{Host, handover};
use crate::sharding::shard_of;
use crate::shell_dependencies::Term;
use domain::{Shard, Timestamp};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A shard that this process owns.
pub(super) type OwnedShard = handover::OwnedShard<ShardGrant>;

/// The term that was granted, and the supervisor of its entities.
pub(super) struct ShardGrant {
    pub(super) term: Term,
    pub(super) since: Timestamp,
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
        let grant = ShardGrant { term, since: self.environment.now(), supervisor };
        // Actors of an earlier term cannot commit under this one.
        self.lose(term.shard);
        self.handover.open(term.shard, grant);
        Ok(())
    }

    /// Closes a shard: no new commands, those in flight are answered (at most for `grace`), then its entities are removed from here.
    pub async fn close(&self, shard: Shard, grace: Duration) {
        let Some(owned) = self.handover.begin_closing(shard) else { return };
        let end = Instant::now() + grace;
        while !owned.is_drained() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        self.drop_shard(shard, &owned);
    }

    /// The shard was taken over by another member: what is in flight here cannot be committed any more.
    pub fn lose(&self, shard: Shard) {
        if let Some(owned) = self.handover.begin_closing(shard) {
            self.drop_shard(shard, &owned);
        }
    }

    fn drop_shard(&self, shard: Shard, owned: &Arc<OwnedShard>) {
        for cell in self.handover.remove_shard(shard, owned, |active| active.cell.clone()) {
            cell.stop(None);
        }
        // The next owner records failures of its own.
        self.failures.retain(|entity, _| shard_of(entity.id) != shard);
        owned.grant.supervisor.stop(None);
    }

    /// The term under which this process owns `shard`.
    #[must_use]
    pub fn term(&self, shard: Shard) -> Option<Term> {
        self.handover.owned(shard).filter(|owned| !owned.is_closing()).map(|owned| owned.grant.term)
    }

    /// The shards that are open here.
    #[must_use]
    pub fn terms(&self) -> Vec<Term> {
        let mut terms: Vec<_> = self.handover.shards.iter().map(|owned| owned.grant.term).collect();
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
                    .handover
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

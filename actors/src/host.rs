//! The entities of the shards that this process owns: woken by the first command, asleep when nobody needs them, with a bound in
//! front of every mailbox, and parked where they fail too often.

mod awake;
mod failures;
mod rows;
mod shard;
mod slot;
#[cfg(test)]
mod tests;

pub(crate) use awake::{Facts, Memory};
pub(crate) use failures::Exit;
pub use rows::{EntityRow, EntityStatus, Figures, ShardRow};
pub use slot::Slot;

use crate::ask::{Answer, AskError, Asked};
use crate::entity::{Entity, Message, Start, Waiter};
use crate::place::shard_of;
use crate::ports::{Effects, Store, World};
use crate::shell::Ask;
use crate::watch::{Watch, Watches};
use awake::{Awake, Found, mailbox_of, put_to_sleep};
use dashmap::DashMap;
use domain::machine::Command as _;
use domain::{CommandId, EntityRef, Machine, Shard};
use failures::Failures;
use ractor::{ActorRef, ActorRuntime, ActorStatus};
use shard::OwnedShard;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tracing::Span;
use uuid::Uuid;

/// Bounds and rules of the host.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// Commands that may wait in front of one entity. Urgent ones have as many places again.
    pub per_entity: usize,
    /// Commands that may wait in one shard, likewise.
    pub per_shard: usize,
    /// An entity that was not needed for so long is put to sleep.
    pub sleep_after: Duration,
    /// So many failures of its own within [`HostConfig::window`] park an entity.
    pub intensity: usize,
    pub window: Duration,
    /// The pause after a first failure; it doubles with each further one, up to the longest. Whoever was lost with the store is wanted
    /// soon after it is back.
    pub backoff: Duration,
    pub longest_backoff: Duration,
}

impl Default for HostConfig {
    fn default() -> Self {
        Self {
            per_entity: 256,
            per_shard: 4096,
            sleep_after: Duration::from_secs(60),
            intensity: 5,
            window: Duration::from_secs(60),
            backoff: Duration::from_millis(50),
            longest_backoff: Duration::from_secs(1),
        }
    }
}

/// Everything that lives here.
pub struct Host {
    config: HostConfig,
    store: Arc<dyn Store>,
    effects: Arc<dyn Effects>,
    world: Arc<dyn World>,
    shards: DashMap<Shard, Arc<OwnedShard>>,
    awake: DashMap<EntityRef, Awake>,
    failures: DashMap<EntityRef, Failures>,
    in_flight: Arc<DashMap<CommandId, ()>>,
    watches: Watches,
    tokens: AtomicU64,
    restarts: AtomicU64,
}

impl Host {
    #[must_use]
    pub fn new(
        config: HostConfig,
        store: Arc<dyn Store>,
        effects: Arc<dyn Effects>,
        world: Arc<dyn World>,
    ) -> Arc<Self> {
        Arc::new(Self {
            config,
            store,
            effects,
            world,
            shards: DashMap::new(),
            awake: DashMap::new(),
            failures: DashMap::new(),
            in_flight: Arc::default(),
            watches: Watches::default(),
            tokens: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
        })
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(crate) fn effects(&self) -> &dyn Effects {
        &*self.effects
    }

    pub(crate) fn world(&self) -> &dyn World {
        &*self.world
    }

    /// Waits for changes of an entity that lives here.
    #[must_use]
    pub fn watch(&self, entity: EntityRef) -> Watch {
        self.watches.watch(entity)
    }

    pub(crate) fn changed(&self, entity: EntityRef) {
        self.watches.changed(entity);
    }

    /// Asks an entity that lives here.
    pub async fn ask<M: Machine>(self: &Arc<Self>, id: Uuid, command: M::Command, asked: Asked) -> Answer<M> {
        let entity = EntityRef { kind: M::KIND, id };
        let (deadline, now) = (asked.deadline, self.world.now());
        let Ok(patience) = (deadline - now).to_std() else {
            return Err(AskError::Unavailable { reason: "the time for an answer has passed".to_owned() });
        };
        let answered = self.put::<M>(entity, command, asked)?;
        match tokio::time::timeout(patience, answered).await {
            Ok(Ok(answer)) => answer,
            // The actor ended with the command in its hands: its shard was taken, or an operator restarted it.
            Ok(Err(_)) => Err(AskError::Unknown { reason: "the entity left while it was asked".to_owned() }),
            Err(_) => Err(AskError::Unknown { reason: "no answer in time".to_owned() }),
        }
    }

    fn put<M: Machine>(
        self: &Arc<Self>,
        entity: EntityRef,
        command: M::Command,
        asked: Asked,
    ) -> Result<oneshot::Receiver<Answer<M>>, AskError<M::Rejection>> {
        let shard = shard_of(entity.id);
        let owned = self.shards.get(&shard).map(|owned| Arc::clone(&owned)).ok_or(AskError::NotOwner)?;
        if !self.world.may_answer_from_memory() {
            return Err(AskError::NotOwner);
        }
        let lane = if asked.urgent { 2 } else { 1 };
        let mut slot = Slot::in_shard(&owned.waiting, self.config.per_shard * lane).ok_or(AskError::Overloaded)?;
        // Checked after the place is taken: whoever closes the shard waits for those who hold one.
        if owned.closing.load(Ordering::SeqCst) {
            return Err(AskError::NotOwner);
        }
        if let Some(key) = &asked.command {
            if self.in_flight.insert(key.id, ()).is_some() {
                return Err(AskError::InProgress);
            }
            slot.command = Some((Arc::clone(&self.in_flight), key.id));
        }
        let (mailbox, facts) = self.wake::<M>(entity, &owned, command.creates())?;
        let slot = slot.and_in_front_of(&facts.waiting, self.config.per_entity * lane).ok_or(AskError::Overloaded)?;
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let ask = Box::new(Ask { token, command, asked });
        if mailbox.cast(Message::Ask(ask, Waiter { answer, slot, span: Span::current() })).is_err() {
            self.forget_if_gone(entity, &mailbox);
            return Err(AskError::NotOwner);
        }
        Ok(answered)
    }

    /// The entity as it was committed last, where it is awake here and this process may answer from its memory; `None` says only
    /// that the store has to be asked.
    #[must_use]
    pub fn remembered<M: Machine>(&self, id: Uuid) -> Option<(Arc<M>, i64)> {
        let awake = self.awake.get(&EntityRef { kind: M::KIND, id })?;
        let settled = awake.memory.downcast_ref::<Memory<M>>()?.get()?;
        // Asked after it was read: what was true under a fresh renewal is an answer.
        let ours = !awake.owned.closing.load(Ordering::SeqCst) && self.world.may_answer_from_memory();
        ours.then_some(settled)
    }

    /// The entity's mailbox, with an actor behind it. `new`: the command that wakes it makes it.
    fn wake<M: Machine>(
        self: &Arc<Self>,
        entity: EntityRef,
        owned: &Arc<OwnedShard>,
        new: bool,
    ) -> Result<Found<M>, AskError<M::Rejection>> {
        let other_kind = || AskError::Unavailable { reason: "the entity is of another kind".to_owned() };
        if let Some(awake) = self.awake.get(&entity) {
            return mailbox_of::<M>(&awake).ok_or_else(other_kind);
        }
        self.may_wake(entity)?;
        let found = match self.awake.entry(entity) {
            dashmap::Entry::Occupied(first) => mailbox_of::<M>(first.get()).ok_or_else(other_kind)?,
            // It stands in the directory before it runs: it cannot leave before it has come.
            dashmap::Entry::Vacant(vacant) => {
                let facts = Arc::new(Facts::new(self.world.now()));
                let memory = Arc::new(Memory::<M>::new());
                let start = Start {
                    id: entity.id,
                    term: owned.term,
                    host: Arc::clone(self),
                    facts: Arc::clone(&facts),
                    memory: Arc::clone(&memory),
                    new,
                };
                let supervisor = owned.supervisor.get_cell();
                let spawned = ActorRuntime::spawn_linked_instant(None, Entity::<M>::new(), start, supervisor);
                let (mailbox, _) = spawned.map_err(|error| AskError::Unavailable { reason: error.to_string() })?;
                vacant.insert(Awake {
                    owned: Arc::clone(owned),
                    actor: mailbox.get_id(),
                    cell: mailbox.get_cell(),
                    mailbox: Arc::new(mailbox.clone()),
                    facts: Arc::clone(&facts),
                    memory,
                    put_to_sleep: put_to_sleep::<M>,
                });
                (mailbox, facts)
            }
        };
        // Whoever took the shard meanwhile has swept the directory before the entity stood in it.
        if owned.closing.load(Ordering::SeqCst) {
            self.awake.remove_if(&entity, |_, awake| awake.actor == found.0.get_id());
            found.0.stop(None);
            return Err(AskError::NotOwner);
        }
        Ok(found)
    }

    /// An actor that was killed with its supervisor, or never came to run, left without a word.
    fn forget_if_gone<M: Machine>(&self, entity: EntityRef, mailbox: &ActorRef<Message<M>>) {
        if mailbox.get_status() == ActorStatus::Stopped {
            self.awake.remove_if(&entity, |_, awake| awake.actor == mailbox.get_id());
        }
    }

    /// Whether the entity has an actor.
    #[must_use]
    pub fn is_awake(&self, entity: EntityRef) -> bool {
        self.awake.contains_key(&entity)
    }

    /// Puts an entity to sleep, unless somebody is asking it something. For whoever has woken many.
    pub fn put_to_sleep(&self, entity: EntityRef) {
        if let Some(awake) = self.awake.get(&entity) {
            (awake.put_to_sleep)(&*awake.mailbox);
        }
    }

    /// Puts to sleep what nobody needed for [`HostConfig::sleep_after`], and forgets failures that are long past.
    pub fn rest(&self) {
        for awake in &self.awake {
            if awake.facts.rested_for(self.config.sleep_after) {
                (awake.put_to_sleep)(&*awake.mailbox);
            }
        }
        let window = self.config.window * 10;
        self.failures.retain(|_, failures| failures.matters(window));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

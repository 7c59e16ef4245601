//! The entities of the shards that this process owns: woken by the first command, asleep when nobody needs them, with a bound in
//! front of every mailbox, and parked where they fail too often.

use crate::ask::{Answer, AskError, Asked};
use crate::entity::{Entity, Message, Start, Waiter};
use crate::place::shard_of;
use crate::ports::{Effects, Store, Term, World};
use crate::shell::{Ask, Input};
use crate::watch::{Watch, Watches};
use dashmap::DashMap;
use domain::commit::Epoch;
use domain::machine::Command as _;
use domain::{CommandId, EntityRef, Kind, Machine, Shard, Timestamp};
use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, ActorRuntime, ActorStatus, SupervisionEvent};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;
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
    /// So many failures within [`HostConfig::window`] park an entity.
    pub intensity: usize,
    pub window: Duration,
    /// The pause after a first failure; it doubles with each further one.
    pub backoff: Duration,
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

/// A shard in this process's hands.
struct OwnedShard {
    term: Term,
    since: Timestamp,
    closing: AtomicBool,
    waiting: Arc<AtomicUsize>,
    supervisor: ActorRef<()>,
}

/// An entity that has an actor.
struct Awake {
    /// Under which term of its shard it was woken.
    owned: Arc<OwnedShard>,
    actor: ActorId,
    cell: ActorCell,
    /// `ActorRef<Message<M>>` of the entity's machine.
    mailbox: Arc<dyn Any + Send + Sync>,
    facts: Arc<Facts>,
    /// `Arc<Memory<M>>` of the entity's machine.
    memory: Arc<dyn Any + Send + Sync>,
    put_to_sleep: fn(&(dyn Any + Send + Sync)),
}

/// An entity's mailbox, and what stands in front of it.
type Found<M> = (ActorRef<Message<M>>, Arc<Facts>);

/// What an awake entity is, for those who read past its mailbox: its last committed state and version; nothing while a commit is
/// under way, since the store may then be ahead.
pub(crate) struct Memory<M>(Mutex<Option<(Arc<M>, i64)>>);

impl<M> Memory<M> {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn set(&self, settled: Option<(Arc<M>, i64)>) {
        *lock(&self.0) = settled;
    }
}

/// What an operator sees of an entity that is awake.
pub struct Facts {
    pub waiting: Arc<AtomicUsize>,
    woken_at: Timestamp,
    used: Mutex<Instant>,
    version: AtomicI64,
    seen: Mutex<Seen>,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    state: Option<String>,
    deadline_at: Option<Timestamp>,
    waits_for: Option<String>,
}

impl Facts {
    fn new(now: Timestamp) -> Self {
        Self {
            waiting: Arc::default(),
            woken_at: now,
            used: Mutex::new(Instant::now()),
            version: AtomicI64::new(0),
            seen: Mutex::default(),
        }
    }

    pub(crate) fn note<M: Machine>(&self, state: Option<&M>, version: i64) {
        *lock(&self.used) = Instant::now();
        if self.version.swap(version, Ordering::Relaxed) != version {
            let deadline = state.and_then(Machine::deadline);
            *lock(&self.seen) = Seen {
                state: state.map(|state| state.state().to_owned()),
                deadline_at: deadline.as_ref().map(|deadline| deadline.at),
                waits_for: deadline.map(|deadline| deadline.reason),
            };
        }
    }

    /// `failed`: what is known of its failures.
    fn row(&self, entity: EntityRef, failed: Option<&EntityRow>) -> EntityRow {
        let seen = lock(&self.seen).clone();
        EntityRow {
            kind: entity.kind,
            id: entity.id,
            shard: shard_of(entity.id),
            status: "awake".to_owned(),
            state: seen.state,
            since: Some(self.woken_at),
            version: self.version.load(Ordering::Relaxed),
            mailbox_depth: self.waiting.load(Ordering::Relaxed),
            restarts: failed.map_or(0, |failed| failed.restarts),
            last_error: failed.and_then(|failed| failed.last_error.clone()),
            deadline_at: seen.deadline_at,
            waits_for: seen.waits_for,
        }
    }
}

/// How often an entity failed lately, and whether it is parked for it.
#[derive(Debug, Default)]
struct Failures {
    recent: VecDeque<Instant>,
    total: u64,
    last_error: String,
    last_at: Option<Timestamp>,
    parked: Option<String>,
}

/// How an entity's actor came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Asleep,
    Died { reason: String },
    Parked { reason: String },
}

/// An entity as the supervision tree shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EntityRow {
    pub kind: Kind,
    pub id: Uuid,
    pub shard: Shard,
    /// `awake`, `backing_off` or `parked`.
    pub status: String,
    pub state: Option<String>,
    pub since: Option<Timestamp>,
    pub version: i64,
    pub mailbox_depth: usize,
    pub restarts: u64,
    pub last_error: Option<String>,
    pub deadline_at: Option<Timestamp>,
    pub waits_for: Option<String>,
}

/// A shard as the supervision tree shows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ShardRow {
    pub shard: Shard,
    pub epoch: Epoch,
    pub since: Timestamp,
    pub closing: bool,
    pub mailbox_depth: usize,
}

/// A place in the bounds in front of a shard and an entity of it, and in the set of commands that are under way. Free again on
/// drop.
pub struct Slot {
    shard: Arc<AtomicUsize>,
    entity: Option<Arc<AtomicUsize>>,
    command: Option<(Arc<DashMap<CommandId, ()>>, CommandId)>,
}

impl Slot {
    /// Counted before it is compared: of two that come for the last place, one at most stays.
    fn in_shard(waiting: &Arc<AtomicUsize>, bound: usize) -> Option<Self> {
        let before = waiting.fetch_add(1, Ordering::SeqCst);
        let slot = Self { shard: Arc::clone(waiting), entity: None, command: None };
        (before < bound).then_some(slot)
    }

    fn and_in_front_of(mut self, waiting: &Arc<AtomicUsize>, bound: usize) -> Option<Self> {
        let before = waiting.fetch_add(1, Ordering::SeqCst);
        self.entity = Some(Arc::clone(waiting));
        (before < bound).then_some(self)
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some((in_flight, id)) = &self.command {
            in_flight.remove(id);
        }
        if let Some(entity) = &self.entity {
            entity.fetch_sub(1, Ordering::SeqCst);
        }
        // Last: whoever closes the shard waits for it.
        self.shard.fetch_sub(1, Ordering::SeqCst);
    }
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
        if mailbox.cast(Message::Ask(ask, Waiter { answer, slot })).is_err() {
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
        let settled = lock(&awake.memory.downcast_ref::<Memory<M>>()?.0).clone()?;
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

    /// An entity that failed lately is left alone for a while, and one that failed too often until an operator has looked.
    fn may_wake<J>(&self, entity: EntityRef) -> Result<(), AskError<J>> {
        let Some(failures) = self.failures.get(&entity) else { return Ok(()) };
        if let Some(reason) = &failures.parked {
            return Err(AskError::Parked { reason: reason.clone() });
        }
        let pause = failures.pause(&self.config);
        match failures.recent.back() {
            Some(last) if last.elapsed() < pause => {
                Err(AskError::Unavailable { reason: format!("the entity failed: {}", failures.last_error) })
            }
            Some(_) | None => Ok(()),
        }
    }

    pub(crate) fn left(&self, entity: EntityRef, actor: ActorId, exit: Exit) {
        // Noted before it is out of the directory, so that nobody wakes it in between.
        match exit {
            Exit::Asleep => {}
            Exit::Died { reason } => self.failed(entity, reason, false),
            Exit::Parked { reason } => self.failed(entity, reason, true),
        }
        self.awake.remove_if(&entity, |_, awake| awake.actor == actor);
    }

    fn failed(&self, entity: EntityRef, reason: String, park: bool) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
        let mut failures = self.failures.entry(entity).or_default();
        let now = Instant::now();
        failures.recent.retain(|at| now.duration_since(*at) < self.config.window);
        failures.recent.push_back(now);
        failures.total += 1;
        failures.last_at = Some(self.world.now());
        failures.last_error.clone_from(&reason);
        if park || failures.recent.len() >= self.config.intensity {
            tracing::error!(entity.kind = %entity.kind, entity.id = %entity.id, error = %reason, "{entity} is parked");
            failures.parked = Some(reason.clone());
            let store = Arc::clone(&self.store);
            tokio::spawn(async move {
                if let Err(error) = store.park(entity, reason).await {
                    tracing::warn!(%entity, %error, "that the entity is parked is known here alone");
                }
            });
        } else {
            tracing::warn!(entity.kind = %entity.kind, entity.id = %entity.id, error = %reason, "{entity} failed");
        }
    }

    /// The entity was parked by an earlier owner of its shard, and nobody has restarted it.
    pub fn keep_parked(&self, entity: EntityRef, reason: String) {
        let mut failures = self.failures.entry(entity).or_default();
        failures.last_at = Some(self.world.now());
        failures.last_error.clone_from(&reason);
        failures.parked = Some(reason);
    }

    /// An operator has looked: the entity's failures are forgotten and its actor, if it has one, is started anew. `false` where
    /// nothing of it is known here.
    #[must_use]
    pub fn restart(&self, entity: EntityRef) -> bool {
        let forgotten = self.failures.remove(&entity).is_some();
        let stopped = self.awake.remove(&entity).map(|(_, awake)| awake.cell.stop(Some("restart".to_owned())));
        forgotten || stopped.is_some()
    }

    /// Puts to sleep what nobody needed for [`HostConfig::sleep_after`], and forgets failures that are long past.
    pub fn rest(&self) {
        for awake in &self.awake {
            if lock(&awake.facts.used).elapsed() >= self.config.sleep_after {
                (awake.put_to_sleep)(&*awake.mailbox);
            }
        }
        let window = self.config.window;
        self.failures.retain(|_, failures| {
            failures.parked.is_some() || failures.recent.back().is_some_and(|last| last.elapsed() < window * 10)
        });
    }

    /// Every entity that is awake, backing off or parked here, in order.
    #[must_use]
    pub fn entities(&self) -> Vec<EntityRow> {
        // One map after the other: holding both could wait for one who holds them the other way round.
        let failed = self.failures.iter().map(|failures| (*failures.key(), failures.row(*failures.key())));
        let mut rows: BTreeMap<_, _> = failed.collect();
        for awake in &self.awake {
            let row = awake.facts.row(*awake.key(), rows.get(awake.key()));
            rows.insert(*awake.key(), row);
        }
        rows.into_values().collect()
    }

    /// One entity as it stands here; `None` where it is asleep.
    #[must_use]
    pub fn entity(&self, entity: EntityRef) -> Option<EntityRow> {
        let failed = self.failures.get(&entity).map(|failures| failures.row(entity));
        let awake = self.awake.get(&entity).map(|awake| awake.facts.row(entity, failed.as_ref()));
        awake.or(failed)
    }

    /// The shards in this process's hands, in order.
    #[must_use]
    pub fn shards(&self) -> Vec<ShardRow> {
        let mut rows: Vec<_> = self
            .shards
            .iter()
            .map(|owned| ShardRow {
                shard: owned.term.shard,
                epoch: owned.term.epoch,
                since: owned.since,
                closing: owned.closing.load(Ordering::Relaxed),
                mailbox_depth: owned.waiting.load(Ordering::Relaxed),
            })
            .collect();
        rows.sort_by_key(|row| row.shard);
        rows
    }

    /// How often an entity's actor ended in failure since the process began.
    #[must_use]
    pub fn failures_total(&self) -> u64 {
        self.restarts.load(Ordering::Relaxed)
    }
}

impl Failures {
    fn pause(&self, config: &HostConfig) -> Duration {
        let doublings = u32::try_from(self.recent.len().saturating_sub(1)).unwrap_or(0).min(10);
        config.backoff * 2_u32.pow(doublings)
    }

    fn row(&self, entity: EntityRef) -> EntityRow {
        EntityRow {
            kind: entity.kind,
            id: entity.id,
            shard: shard_of(entity.id),
            status: if self.parked.is_some() { "parked" } else { "backing_off" }.to_owned(),
            state: None,
            since: self.last_at,
            version: 0,
            mailbox_depth: 0,
            restarts: self.total,
            last_error: Some(self.last_error.clone()),
            deadline_at: None,
            waits_for: self.parked.clone().map(|reason| format!("an operator: {reason}")),
        }
    }
}

fn mailbox_of<M: Machine>(awake: &Awake) -> Option<Found<M>> {
    let mailbox = awake.mailbox.downcast_ref::<ActorRef<Message<M>>>()?;
    Some((mailbox.clone(), Arc::clone(&awake.facts)))
}

fn put_to_sleep<M: Machine>(mailbox: &(dyn Any + Send + Sync)) {
    if let Some(mailbox) = mailbox.downcast_ref::<ActorRef<Message<M>>>() {
        // One that is gone sleeps already.
        let _ = mailbox.cast(Message::Tell(Box::new(Input::Sleep)));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

#[cfg(test)]
mod tests;

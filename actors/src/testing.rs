//! Test support of this crate: a counter as a small machine, an in-memory store that can fail in every way that a real one can, and an
//! environment whose clock is tokio's.

use crate::command_context::{CommandContext, CommandKey};
use crate::sharding::{command_id, digest_of};
use crate::shell_dependencies::{Effects, Environment, Store, StoreReadError, Term};
use chrono::TimeDelta;
use domain::authz::{CallerIdentity, TokenRole};
use domain::commit::{CompletedCommand, Epoch, Snapshot};
use domain::explanation::Explanation;
use domain::policy::PolicyBook;
use domain::{
    Action, CommandId, Commit, Deadline, Effect, EntityKind, EntityRef, Event, Machine, NodeId, TransitionContext,
};
use domain::{CommitOutcome, Principal, Shard, SkuId, Timestamp, Transition};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;
use tokio::sync::RwLock;
use tokio::time::Instant;
use uuid::Uuid;

/// A counter that stores what it counted. It uses the kind of a SKU, since kinds are a closed list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counter {
    pub(crate) tickets: Vec<u64>,
    pub(crate) waits_until: Option<Timestamp>,
    /// Every later decision panics.
    pub(crate) poisoned: bool,
    #[serde(serialize_with = "unless_spoiled")]
    pub(crate) spoiled: bool,
}

fn unless_spoiled<S: Serializer>(spoiled: &bool, serializer: S) -> Result<S::Ok, S::Error> {
    if *spoiled {
        return Err(serde::ser::Error::custom("spoiled"));
    }
    serializer.serialize_bool(false)
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Count {
    /// Counts the ticket, however often it is sent.
    Add(u64),
    /// Refuses a ticket that it has counted.
    AddOnce(u64),
    /// As `Add`, with a reply that is stored for every sender.
    AddAndStore(u64),
    Read,
    Wait(Timestamp),
    Poison,
    Spoil,
    Tick,
}

impl domain::state_machine::Command for Count {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        match self {
            Self::Add(_) => "add",
            Self::AddOnce(_) => "add_once",
            Self::AddAndStore(_) => "add_and_store",
            Self::Read => "read",
            Self::Wait(_) => "wait",
            Self::Poison => "poison",
            Self::Spoil => "spoil",
            Self::Tick => "tick",
        }
    }

    fn action(&self) -> Action {
        Action::Advance
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Refusal {
    #[error("ticket {0} was counted")]
    Counted(u64),
}

impl domain::state_machine::Rejection for Refusal {
    fn explain(self) -> Explanation {
        Explanation::conflict(self.to_string())
    }
}

impl Machine for Counter {
    const KIND: EntityKind = EntityKind::Sku;
    type Command = Count;
    type Reply = usize;
    type Rejection = Refusal;

    fn decide(state: Option<&Self>, command: Count, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Refusal> {
        let mut next = state.cloned().unwrap_or_default();
        assert!(!next.poisoned, "poisoned");
        match command {
            Count::AddOnce(ticket) if next.tickets.contains(&ticket) => return Err(Refusal::Counted(ticket)),
            Count::Add(ticket) | Count::AddOnce(ticket) | Count::AddAndStore(ticket) => {
                next.tickets.push(ticket);
                let count = next.tickets.len();
                let event =
                    Event::SkuStateChanged { sku_id: SkuId(ctx.id), from: None, to: format!("counted {ticket}") };
                let effect = Effect::WakeNode(NodeId(Uuid::from_u128(ticket.into())));
                let step = Transition::to(next, count, "counted").event(event).effect(effect);
                return Ok(Transition { stores_reply: matches!(command, Count::AddAndStore(_)), ..step });
            }
            Count::Read | Count::Tick => return Ok(Transition::stay(next.tickets.len())),
            Count::Wait(until) => next.waits_until = Some(until),
            Count::Poison => next.poisoned = true,
            Count::Spoil => next.spoiled = true,
        }
        let count = next.tickets.len();
        Ok(Transition::to(next, count, "changed"))
    }

    fn decide_without(
        state: Option<&Self>,
        command: Count,
        holders: &BTreeMap<String, Uuid>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Refusal> {
        match command {
            Count::Add(ticket) if holders.contains_key(&format!("ticket/{ticket}")) => {
                let counter = state.cloned().unwrap_or_default();
                let count = counter.tickets.len();
                Ok(Transition::to(counter, count, "left out"))
            }
            other => Self::decide(state, other, ctx),
        }
    }

    fn state(&self) -> &'static str {
        if self.poisoned { "poisoned" } else { "counting" }
    }

    fn deadline(&self) -> Option<Deadline> {
        self.waits_until.map(|at| Deadline::new(at, "no member has counted"))
    }
}

pub(crate) fn worker() -> Principal {
    Principal::system("test")
}

pub(crate) fn user(user_id: &str, roles: &[TokenRole]) -> Principal {
    Principal::Caller(CallerIdentity::new(user_id, roles.iter().copied()))
}

/// A command by a worker, good until `deadline`.
pub(crate) fn context(deadline: Timestamp) -> CommandContext {
    let permit = domain::authz::authorize(&worker(), Action::Advance).unwrap();
    CommandContext::new(&permit, "correlation", deadline)
}

/// A command key for an `Idempotency-Key`.
pub(crate) fn key(name: &str) -> CommandKey {
    CommandKey::repeatable(command_id(&[name.as_bytes()]), digest_of(&[name.as_bytes()]))
}

pub(crate) fn term(shard: Shard, epoch: i64) -> Term {
    Term { shard, epoch: Epoch(epoch) }
}

/// What Postgres would store.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoredState {
    pub(crate) entities: BTreeMap<EntityRef, Snapshot>,
    pub(crate) commands: BTreeMap<CommandId, CompletedCommand>,
    pub(crate) claims: BTreeMap<String, Uuid>,
    /// Shards without an entry accept every epoch.
    pub(crate) epochs: BTreeMap<Shard, Epoch>,
    pub(crate) commits: Vec<Commit>,
}

impl StoredState {
    pub(crate) fn commit(&mut self, commit: &Commit) -> CommitOutcome {
        if self.epochs.get(&commit.shard).is_some_and(|epoch| *epoch != commit.epoch) {
            return CommitOutcome::Fenced;
        }
        if let Some(done) = commit.command.as_ref().and_then(|command| self.commands.get(&command.id)) {
            return CommitOutcome::Duplicate(done.clone());
        }
        let version = self.entities.get(&commit.entity).map_or(0, |snapshot| snapshot.version);
        if version != commit.expected_version {
            return CommitOutcome::Conflict;
        }
        let added = commit.claims.added.iter();
        let holders: BTreeMap<_, _> = added
            .filter_map(|name| self.claims.get(name).map(|holder| (name.clone(), *holder)))
            .filter(|(_, holder)| *holder != commit.entity.id)
            .collect();
        if !holders.is_empty() {
            return CommitOutcome::Claimed { holders };
        }
        self.claims.retain(|name, _| !commit.claims.dropped.contains(name));
        self.claims.extend(commit.claims.added.iter().map(|name| (name.clone(), commit.entity.id)));
        self.entities.insert(commit.entity, Snapshot { version: version + 1, body: commit.snapshot.clone() });
        if let Some(command) = &commit.command {
            let done =
                CompletedCommand { entity: commit.entity.id, digest: command.digest, reply: command.reply.clone() };
            self.commands.insert(command.id, done);
        }
        self.commits.push(commit.clone());
        CommitOutcome::Applied
    }

    pub(crate) fn counter(&self, id: Uuid) -> Counter {
        let entity = EntityRef { kind: EntityKind::Sku, id };
        self.entities.get(&entity).map(|snapshot| serde_json::from_str(&snapshot.body).unwrap()).unwrap_or_default()
    }

    /// Another writer changes the counter: its version rises, and what it has counted stays.
    pub(crate) fn write_concurrently(&mut self, entity: EntityRef) {
        let body = serde_json::to_string(&Counter::default()).unwrap();
        self.entities.entry(entity).or_insert(Snapshot { version: 0, body }).version += 1;
    }
}

/// The fault of one access to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreFault {
    None,
    /// Another writer comes first.
    ConcurrentWrite,
    /// The store cannot be reached: nothing is read, nothing is written.
    Unreachable,
    /// The response to a commit is lost, and it was not committed.
    LostBefore,
    /// The response to a commit is lost, and it was committed.
    LostAfter,
    /// A constraint of the database refuses it.
    ConstraintViolated,
    /// The store panics.
    Panics,
}

/// An in-memory store. Each access takes `delay` and meets the next of `faults`.
#[derive(Default)]
pub(crate) struct MemoryStore {
    pub(crate) stored: Mutex<StoredState>,
    pub(crate) faults: Mutex<VecDeque<StoreFault>>,
    pub(crate) delay: Mutex<Duration>,
    /// While a test holds it for writing, loads or commits block.
    pub(crate) loads: RwLock<()>,
    pub(crate) commits: RwLock<()>,
    pub(crate) loaded: Mutex<usize>,
}

impl MemoryStore {
    pub(crate) fn inject_faults(&self, faults: impl IntoIterator<Item = StoreFault>) {
        self.faults.lock().unwrap().extend(faults);
    }

    async fn next_fault(&self) -> StoreFault {
        let delay = *self.delay.lock().unwrap();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let fault = self.faults.lock().unwrap().pop_front().unwrap_or(StoreFault::None);
        assert!(!matches!(fault, StoreFault::Panics), "the store is broken");
        fault
    }

    fn read<T>(fault: StoreFault, found: Option<T>) -> Result<Option<T>, StoreReadError> {
        match fault {
            StoreFault::Unreachable | StoreFault::LostBefore | StoreFault::LostAfter => {
                Err(StoreReadError::unavailable("unreachable".to_owned()))
            }
            StoreFault::None | StoreFault::ConcurrentWrite | StoreFault::ConstraintViolated | StoreFault::Panics => {
                Ok(found)
            }
        }
    }
}

impl Store for MemoryStore {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreReadError>> {
        async move {
            let _open = self.loads.read().await;
            let fault = self.next_fault().await;
            *self.loaded.lock().unwrap() += 1;
            Self::read(fault, self.stored.lock().unwrap().entities.get(&entity).cloned())
        }
        .boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, CommitOutcome> {
        async move {
            let _open = self.commits.read().await;
            let fault = self.next_fault().await;
            let mut stored = self.stored.lock().unwrap();
            let lost = || CommitOutcome::Unknown { reason: "the connection broke".to_owned() };
            match fault {
                StoreFault::None => stored.commit(&commit),
                StoreFault::ConcurrentWrite => {
                    stored.write_concurrently(commit.entity);
                    stored.commit(&commit)
                }
                StoreFault::Unreachable | StoreFault::Panics => {
                    CommitOutcome::NotApplied { reason: "unreachable".to_owned() }
                }
                StoreFault::LostBefore => lost(),
                StoreFault::LostAfter => {
                    stored.commit(&commit);
                    lost()
                }
                StoreFault::ConstraintViolated => CommitOutcome::Refused { constraint: "unique_name".to_owned() },
            }
        }
        .boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<CompletedCommand>, StoreReadError>> {
        async move {
            let fault = self.next_fault().await;
            Self::read(fault, self.stored.lock().unwrap().commands.get(&id).cloned())
        }
        .boxed()
    }
}

/// Records the effects.
#[derive(Default)]
pub(crate) struct EffectLog(pub(crate) Mutex<Vec<Effect>>);

impl Effects for EffectLog {
    fn perform(&self, effect: Effect) {
        self.0.lock().unwrap().push(effect);
    }
}

/// An environment whose time is tokio's, so that a test can pause it.
pub(crate) struct TestEnvironment {
    began: Instant,
    policy: Arc<PolicyBook>,
    seed: Mutex<u128>,
    pub(crate) lease_expired: Mutex<bool>,
    ahead: Mutex<TimeDelta>,
}

impl TestEnvironment {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            policy: Arc::default(),
            seed: Mutex::new(1),
            lease_expired: Mutex::new(false),
            ahead: Mutex::default(),
        }
    }

    /// Advances the clock.
    pub(crate) fn step(&self, by: TimeDelta) {
        *self.ahead.lock().unwrap() += by;
    }
}

impl Environment for TestEnvironment {
    fn now(&self) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000, 0).unwrap() + self.began.elapsed() + *self.ahead.lock().unwrap()
    }

    fn seed(&self) -> u128 {
        let mut seed = self.seed.lock().unwrap();
        *seed = seed.wrapping_mul(0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645).wrapping_add(1);
        *seed
    }

    fn policy(&self) -> Arc<PolicyBook> {
        Arc::clone(&self.policy)
    }

    fn may_answer_from_memory(&self) -> bool {
        !*self.lease_expired.lock().unwrap()
    }
}

/// Expected panics print one line, without a backtrace.
pub(crate) fn shorten_panic_output() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            eprintln!("panicked at {place}: {}", panic.payload_as_str().unwrap_or("a value that is not text"));
        }));
    });
}

//! What the tests of this crate share: a machine small enough to count with, a store in memory that can fail in every way that
//! a real one can, and a world whose clock is tokio's.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::ask::{Asked, CommandKey};
use crate::place::{command_id, digest_of};
use crate::ports::{Effects, Store, StoreError, Term, World};
use chrono::TimeDelta;
use domain::authz::{Caller, Role};
use domain::commit::{Done, Epoch, Snapshot};
use domain::policy::PolicyBook;
use domain::{Action, CommandId, Commit, Ctx, Deadline, Effect, EntityRef, Event, Keys, Kind, Machine, NodeId};
use domain::{Outcome, Principal, Shard, SkuId, Step, Timestamp};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;
use tokio::sync::RwLock;
use tokio::time::Instant;
use uuid::Uuid;

/// A counter that remembers what it counted. It takes the place of a SKU, since kinds are a closed list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counter {
    pub(crate) tickets: Vec<u64>,
    pub(crate) waits_until: Option<Timestamp>,
    /// Every decision from here panics.
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
    /// Counts the ticket, however often it comes.
    Add(u64),
    /// Refuses a ticket that it has counted.
    AddOnce(u64),
    Read,
    Wait(Timestamp),
    Poison,
    Spoil,
    Tick,
}

impl domain::machine::Command for Count {
    fn name(&self) -> &'static str {
        match self {
            Self::Add(_) => "add",
            Self::AddOnce(_) => "add_once",
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

impl Machine for Counter {
    const KIND: Kind = Kind::Sku;
    type Command = Count;
    type Reply = usize;
    type Rejection = Refusal;

    fn decide(state: Option<&Self>, command: Count, ctx: &Ctx<'_>) -> Result<Step<Self>, Refusal> {
        let mut next = state.cloned().unwrap_or_default();
        assert!(!next.poisoned, "poisoned");
        match command {
            Count::AddOnce(ticket) if next.tickets.contains(&ticket) => return Err(Refusal::Counted(ticket)),
            Count::Add(ticket) | Count::AddOnce(ticket) => {
                next.tickets.push(ticket);
                let count = next.tickets.len();
                let event =
                    Event::SkuStateChanged { sku_id: SkuId(ctx.id), from: None, to: format!("counted {ticket}") };
                let effect = Effect::WakeNode(NodeId(Uuid::from_u128(ticket.into())));
                return Ok(Step::to(next, count, "counted").event(event).effect(effect));
            }
            Count::Read | Count::Tick => return Ok(Step::stay(next.tickets.len())),
            Count::Wait(until) => next.waits_until = Some(until),
            Count::Poison => next.poisoned = true,
            Count::Spoil => next.spoiled = true,
        }
        let count = next.tickets.len();
        Ok(Step::to(next, count, "changed"))
    }

    fn decide_without(
        state: Option<&Self>,
        command: Count,
        holders: &BTreeMap<String, Uuid>,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Refusal> {
        match command {
            Count::Add(ticket) if holders.contains_key(&format!("ticket/{ticket}")) => {
                let counter = state.cloned().unwrap_or_default();
                let count = counter.tickets.len();
                Ok(Step::to(counter, count, "left out"))
            }
            other => Self::decide(state, other, ctx),
        }
    }

    fn state(&self) -> &'static str {
        if self.poisoned { "poisoned" } else { "counting" }
    }

    fn deadline(&self) -> Option<Deadline> {
        self.waits_until.map(|at| Deadline::new(at, "nobody has counted"))
    }

    fn keys(&self) -> Keys {
        Keys::default()
    }

    fn tick() -> Count {
        Count::Tick
    }
}

pub(crate) fn worker() -> Principal {
    Principal::system("test")
}

pub(crate) fn user(user_id: &str, roles: &[Role]) -> Principal {
    Principal::Caller(Caller {
        user_id: user_id.to_owned(),
        roles: roles.iter().copied().collect(),
        org_id: None,
        project_id: None,
        plan: None,
        grant: None,
        service_account: None,
    })
}

/// A command by a worker, good until `deadline`.
pub(crate) fn asked(deadline: Timestamp) -> Asked {
    let permit = domain::authz::authorize(&worker(), Action::Advance).unwrap();
    Asked::new(&permit, "correlation", deadline)
}

/// What a client sends as its `Idempotency-Key`.
pub(crate) fn key(name: &str) -> CommandKey {
    CommandKey::repeatable(command_id(&[name.as_bytes()]), digest_of(&[name.as_bytes()]))
}

pub(crate) fn term(shard: Shard, epoch: i64) -> Term {
    Term { shard, epoch: Epoch(epoch) }
}

/// What Postgres would hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Books {
    pub(crate) entities: BTreeMap<EntityRef, Snapshot>,
    pub(crate) commands: BTreeMap<CommandId, Done>,
    pub(crate) claims: BTreeMap<String, Uuid>,
    /// Shards without an entry take every epoch.
    pub(crate) epochs: BTreeMap<Shard, Epoch>,
    pub(crate) commits: Vec<Commit>,
}

impl Books {
    pub(crate) fn commit(&mut self, commit: &Commit) -> Outcome {
        if self.epochs.get(&commit.shard).is_some_and(|epoch| *epoch != commit.epoch) {
            return Outcome::Fenced;
        }
        if let Some(done) = commit.command.as_ref().and_then(|command| self.commands.get(&command.id)) {
            return Outcome::Duplicate(done.clone());
        }
        let version = self.entities.get(&commit.entity).map_or(0, |snapshot| snapshot.version);
        if version != commit.expected_version {
            return Outcome::Conflict;
        }
        let added = commit.claims.added.iter();
        let holders: BTreeMap<_, _> = added
            .filter_map(|name| self.claims.get(name).map(|holder| (name.clone(), *holder)))
            .filter(|(_, holder)| *holder != commit.entity.id)
            .collect();
        if !holders.is_empty() {
            return Outcome::Claimed { holders };
        }
        self.claims.retain(|name, _| !commit.claims.dropped.contains(name));
        self.claims.extend(commit.claims.added.iter().map(|name| (name.clone(), commit.entity.id)));
        self.entities.insert(commit.entity, Snapshot { version: version + 1, body: commit.snapshot.clone() });
        if let Some(command) = &commit.command {
            let done = Done { entity: commit.entity.id, digest: command.digest, reply: command.reply.clone() };
            self.commands.insert(command.id, done);
        }
        self.commits.push(commit.clone());
        Outcome::Applied
    }

    pub(crate) fn counter(&self, id: Uuid) -> Counter {
        let entity = EntityRef { kind: Kind::Sku, id };
        self.entities.get(&entity).map(|snapshot| serde_json::from_str(&snapshot.body).unwrap()).unwrap_or_default()
    }

    /// Somebody else writes the counter: its version moves, and what it has counted does not.
    pub(crate) fn disturb(&mut self, entity: EntityRef) {
        let body = serde_json::to_string(&Counter::default()).unwrap();
        self.entities.entry(entity).or_insert(Snapshot { version: 0, body }).version += 1;
    }
}

/// What goes wrong with one access to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Another writer comes first.
    Disturbed,
    /// The store cannot be reached: nothing is read, nothing is written.
    Unreachable,
    /// The answer to a commit is lost, and it was not written.
    LostBefore,
    /// The answer to a commit is lost, and it was written.
    LostAfter,
    /// A constraint forbids it.
    Forbidden,
    /// The store's own code breaks.
    Panics,
}

/// A store in memory. What is asked of it takes `delay` and meets the next of `faults`.
#[derive(Default)]
pub(crate) struct Ledger {
    pub(crate) books: Mutex<Books>,
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    pub(crate) delay: Mutex<Duration>,
    /// Held for writing by a test, it holds loads or commits back.
    pub(crate) loads: RwLock<()>,
    pub(crate) commits: RwLock<()>,
    pub(crate) loaded: Mutex<usize>,
}

impl Ledger {
    pub(crate) fn meets(&self, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().unwrap().extend(faults);
    }

    async fn takes_its_time(&self) -> Fault {
        let delay = *self.delay.lock().unwrap();
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let fault = self.faults.lock().unwrap().pop_front().unwrap_or(Fault::None);
        assert!(!matches!(fault, Fault::Panics), "the store is broken");
        fault
    }

    fn read<T>(fault: Fault, found: Option<T>) -> Result<Option<T>, StoreError> {
        match fault {
            Fault::Unreachable | Fault::LostBefore | Fault::LostAfter => {
                Err(StoreError::unavailable("unreachable".to_owned()))
            }
            Fault::None | Fault::Disturbed | Fault::Forbidden | Fault::Panics => Ok(found),
        }
    }
}

impl Store for Ledger {
    fn load(&self, entity: EntityRef) -> BoxFuture<'_, Result<Option<Snapshot>, StoreError>> {
        async move {
            let _open = self.loads.read().await;
            let fault = self.takes_its_time().await;
            *self.loaded.lock().unwrap() += 1;
            Self::read(fault, self.books.lock().unwrap().entities.get(&entity).cloned())
        }
        .boxed()
    }

    fn commit(&self, commit: Commit) -> BoxFuture<'_, Outcome> {
        async move {
            let _open = self.commits.read().await;
            let fault = self.takes_its_time().await;
            let mut books = self.books.lock().unwrap();
            let lost = || Outcome::Unknown { reason: "the connection broke".to_owned() };
            match fault {
                Fault::None => books.commit(&commit),
                Fault::Disturbed => {
                    books.disturb(commit.entity);
                    books.commit(&commit)
                }
                Fault::Unreachable | Fault::Panics => Outcome::NotApplied { reason: "unreachable".to_owned() },
                Fault::LostBefore => lost(),
                Fault::LostAfter => {
                    books.commit(&commit);
                    lost()
                }
                Fault::Forbidden => Outcome::Refused { constraint: "unique_name".to_owned() },
            }
        }
        .boxed()
    }

    fn command(&self, id: CommandId) -> BoxFuture<'_, Result<Option<Done>, StoreError>> {
        async move {
            let fault = self.takes_its_time().await;
            Self::read(fault, self.books.lock().unwrap().commands.get(&id).cloned())
        }
        .boxed()
    }
}

/// Keeps what was performed.
#[derive(Default)]
pub(crate) struct Performed(pub(crate) Mutex<Vec<Effect>>);

impl Effects for Performed {
    fn perform(&self, effect: Effect) {
        self.0.lock().unwrap().push(effect);
    }
}

/// A world whose time is tokio's, so that a test can pause it.
pub(crate) struct Clockwork {
    began: Instant,
    policy: Arc<PolicyBook>,
    seed: Mutex<u128>,
    pub(crate) lease_is_over: Mutex<bool>,
    ahead: Mutex<TimeDelta>,
}

impl Clockwork {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            policy: Arc::default(),
            seed: Mutex::new(1),
            lease_is_over: Mutex::new(false),
            ahead: Mutex::default(),
        }
    }

    /// Puts the clock `by` so much ahead.
    pub(crate) fn step(&self, by: TimeDelta) {
        *self.ahead.lock().unwrap() += by;
    }
}

impl World for Clockwork {
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
        !*self.lease_is_over.lock().unwrap()
    }
}

/// Panics that a test means to happen are one line, without a backtrace.
pub(crate) fn panics_are_short() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            eprintln!("panicked at {place}: {}", panic.payload_as_str().unwrap_or("without words"));
        }));
    });
}

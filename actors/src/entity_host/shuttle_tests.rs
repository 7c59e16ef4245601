//! The hand-over under many schedules of threads, by shuttle: `handover.rs` with shuttle's primitives, and the real shell over a store in
//! memory. The mailbox is a model of ractor's, and [`World::ask`] and [`Actor::exit`] follow `Host::enqueue` and `ActorState::exit`.
//!
//! In every schedule: an entity has one actor in a term, each command is executed once, a command that meets a passivation or an outage
//! reaches the next activation, and a shard that is closed has answered what it admitted.

use crate::command_context::{AskError, AskResult};
use crate::entity_shell::{CommandRequest, Input, InputContext, Output, Shell};
use crate::shell_dependencies::{StoreReadError, Term};
use crate::testing::{Count, Counter, StoredState, context, key, term};
use domain::commit::Epoch;
use domain::policy::PolicyBook;
use domain::{CommitOutcome, EntityKind, EntityRef, Shard, Timestamp};
use handover::{Activated, Handover, NotAdmitted, OwnedShard, Slot};
use shuttle::rand::{Rng as _, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::sync::{Arc, Condvar, Mutex, mpsc};
use shuttle::thread;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use uuid::Uuid;

#[path = "shuttle_tests/shuttle_primitives.rs"]
mod concurrency_primitives;
#[path = "handover.rs"]
#[allow(clippy::duplicate_mod, dead_code, unreachable_pub)]
mod handover;

const COUNTER: EntityRef = EntityRef { kind: EntityKind::Sku, id: Uuid::from_u128(7) };
const SHARD: Shard = Shard(3);
/// The tickets of the callers: two send the same command.
const TICKETS: &[u64] = &[1, 2, 3, 1];
const BOUND: usize = 16;

type Answer = mpsc::Sender<AskResult<Counter>>;

enum Message {
    Ask(Box<CommandRequest<Counter>>, Answer, Slot),
    Input(Input<Counter>),
}

/// An actor as its directory and its senders see it.
#[derive(Clone)]
struct Actor {
    id: u64,
    owned: Arc<OwnedShard<Term>>,
    waiting: Arc<AtomicUsize>,
    mailbox: Arc<Mailbox>,
    /// Whether it decides nothing more.
    ended: Arc<AtomicBool>,
}

impl Activated for Actor {
    type Grant = Term;
    type ActorId = u64;

    fn owned(&self) -> &Arc<OwnedShard<Term>> {
        &self.owned
    }

    fn actor(&self) -> u64 {
        self.id
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MailboxState {
    Open,
    /// It accepts nothing more, and what is in it is handled.
    Draining,
    /// What is in it is dropped.
    Stopped,
}

/// As ractor's.
struct Mailbox {
    inner: Mutex<(MailboxState, VecDeque<Message>)>,
    changed: Condvar,
}

impl Mailbox {
    fn new() -> Arc<Self> {
        Arc::new(Self { inner: Mutex::new((MailboxState::Open, VecDeque::new())), changed: Condvar::new() })
    }

    /// Whether it accepts the message.
    fn cast(&self, message: Message) -> bool {
        let mut inner = self.inner.lock().unwrap();
        if inner.0 != MailboxState::Open {
            // The message is dropped after the lock: its slot is freed.
            drop(inner);
            return false;
        }
        inner.1.push_back(message);
        self.changed.notify_all();
        true
    }

    fn end(&self, state: MailboxState) {
        let mut inner = self.inner.lock().unwrap();
        let dropped = if state == MailboxState::Stopped { std::mem::take(&mut inner.1) } else { VecDeque::new() };
        if inner.0 != MailboxState::Stopped {
            inner.0 = state;
        }
        self.changed.notify_all();
        drop(inner);
        drop(dropped);
    }

    fn next(&self) -> Option<Message> {
        let mut inner = self.inner.lock().unwrap();
        loop {
            match (inner.0, inner.1.pop_front()) {
                (MailboxState::Stopped, _) | (MailboxState::Draining, None) => return None,
                (_, Some(message)) => return Some(message),
                (MailboxState::Open, None) => inner = self.changed.wait(inner).unwrap(),
            }
        }
    }
}

/// Postgres, with the commits that are in flight to it.
#[derive(Default)]
struct StoreState {
    stored: StoredState,
    in_flight: usize,
}

struct World {
    handover: Handover<Actor>,
    store: Mutex<StoreState>,
    settled: Condvar,
    /// The actors that may decide, by their term.
    deciding: Mutex<BTreeMap<Epoch, usize>>,
    /// The terms that ended by a close that waited.
    closed: Mutex<BTreeSet<Epoch>>,
    actors: AtomicUsize,
    /// Whether responses of the store are lost.
    has_outages: bool,
}

fn now() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

impl World {
    fn new(has_outages: bool) -> Arc<Self> {
        Arc::new(Self {
            handover: Handover::new(),
            store: Mutex::default(),
            settled: Condvar::new(),
            deciding: Mutex::default(),
            closed: Mutex::default(),
            actors: AtomicUsize::new(0),
            has_outages,
        })
    }

    /// The database grants the next term, which fences the one before.
    fn grant(&self) -> Term {
        let mut store = self.store.lock().unwrap();
        let epoch = Epoch(store.stored.epochs.get(&SHARD).map_or(1, |epoch| epoch.0 + 1));
        store.stored.epochs.insert(SHARD, epoch);
        term(SHARD, epoch.0)
    }

    /// As `Host::close`, without a limit to its patience.
    fn close(&self) {
        let Some(owned) = self.handover.begin_closing(SHARD) else { return };
        while !owned.is_drained() {
            thread::yield_now();
        }
        self.closed.lock().unwrap().insert(owned.grant.epoch);
        self.drop_shard(&owned);
    }

    fn lose(&self) {
        if let Some(owned) = self.handover.begin_closing(SHARD) {
            self.drop_shard(&owned);
        }
    }

    fn drop_shard(&self, owned: &Arc<OwnedShard<Term>>) {
        for actor in self.handover.remove_shard(SHARD, owned, Actor::clone) {
            self.stop(&actor);
        }
    }

    fn stop(&self, actor: &Actor) {
        self.ended(actor);
        actor.mailbox.end(MailboxState::Stopped);
    }

    /// It decides nothing more.
    fn ended(&self, actor: &Actor) {
        if !actor.ended.swap(true, Ordering::SeqCst) {
            *self.deciding.lock().unwrap().get_mut(&actor.owned.grant.epoch).unwrap() -= 1;
        }
    }

    fn passivate(&self) {
        let mailbox = self.handover.active.get(&COUNTER).map(|actor| Arc::clone(&actor.mailbox));
        if let Some(mailbox) = mailbox {
            mailbox.cast(Message::Input(Input::Passivate));
        }
    }

    /// As `Host::enqueue`, and the wait for the answer.
    fn ask(self: &Arc<Self>, ticket: u64) -> AskResult<Counter> {
        let owned = self.handover.owned(SHARD).ok_or(AskError::NotOwner)?;
        let key = key(&ticket.to_string());
        let slot = self.handover.admit(&owned, BOUND, Some(key.id)).map_err(|refused| match refused {
            NotAdmitted::Overloaded => AskError::Overloaded,
            NotAdmitted::Closing => AskError::NotOwner,
            NotAdmitted::InProgress => AskError::InProgress,
        })?;
        let handle = |actor: &Actor| Ok(actor.clone());
        let found = self.handover.activate(COUNTER, &owned, handle, || Ok(()), || Ok(self.start(&owned)))?;
        let actor = found.ok_or(AskError::NotOwner)?;
        let slot = slot.and_in_entity(&actor.waiting, BOUND).ok_or(AskError::Overloaded)?;
        let (answer, answered) = mpsc::channel();
        let context = context(now()).with_key(key);
        let request = CommandRequest { token: thread_rng().r#gen(), command: Count::Add(ticket), context };
        if !actor.mailbox.cast(Message::Ask(Box::new(request), answer, slot)) {
            if actor.mailbox.inner.lock().unwrap().0 == MailboxState::Stopped {
                self.handover.remove(COUNTER, &actor.id);
            }
            return Err(AskError::NotOwner);
        }
        answered.recv().unwrap_or_else(|_| {
            let is_closed = self.closed.lock().unwrap().contains(&owned.grant.epoch);
            assert!(!is_closed, "a close that waits has answered every command");
            Err(AskError::Unknown { reason: "the entity left while it was asked".to_owned() })
        })
    }

    fn start(self: &Arc<Self>, owned: &Arc<OwnedShard<Term>>) -> Actor {
        let actor = Actor {
            id: self.actors.fetch_add(1, Ordering::SeqCst) as u64,
            owned: Arc::clone(owned),
            waiting: Arc::default(),
            mailbox: Mailbox::new(),
            ended: Arc::default(),
        };
        let mut deciding = self.deciding.lock().unwrap();
        let count = deciding.entry(owned.grant.epoch).or_default();
        *count += 1;
        assert!(*count == 1, "an entity has one actor in a term");
        drop(deciding);
        let (world, running) = (Arc::clone(self), actor.clone());
        thread::spawn(move || running.run(&world));
        actor
    }

    /// Runs the access to the store beside the mailbox, and sends its result into it.
    fn send_result(self: &Arc<Self>, actor: &Actor, access: impl FnOnce(&Self) -> Input<Counter> + Send + 'static) {
        let (world, mailbox) = (Arc::clone(self), Arc::clone(&actor.mailbox));
        thread::spawn(move || {
            mailbox.cast(Message::Input(access(&world)));
        });
    }

    fn commit(&self, commit: &domain::Commit) -> CommitOutcome {
        let is_lost = self.has_outages && thread_rng().gen_range(0..8) == 0;
        let is_written = !is_lost || thread_rng().r#gen();
        let mut store = self.store.lock().unwrap();
        let outcome = if is_written { store.stored.commit(commit) } else { CommitOutcome::Conflict };
        store.in_flight -= 1;
        self.settled.notify_all();
        if is_lost { CommitOutcome::Unknown { reason: "the connection broke".to_owned() } } else { outcome }
    }
}

impl Actor {
    fn run(&self, world: &Arc<World>) {
        let (mut shell, load) = Shell::<Counter>::start(COUNTER.id, self.owned.grant);
        let (policy, mut waiters) = (PolicyBook::default(), BTreeMap::new());
        self.execute(world, vec![load], &mut waiters);
        while let Some(message) = self.mailbox.next() {
            let input = match message {
                Message::Ask(request, answer, slot) => {
                    waiters.insert(request.token, (answer, slot));
                    Input::Ask(*request)
                }
                Message::Input(input) => input,
            };
            let outputs = shell.on(input, InputContext { at: now(), seed: 1, policy: &policy });
            self.execute(world, outputs, &mut waiters);
        }
    }

    fn execute(&self, world: &Arc<World>, outputs: Vec<Output<Counter>>, waiters: &mut BTreeMap<u64, (Answer, Slot)>) {
        for output in outputs {
            match output {
                // It waits until no commit is in flight, as the store promises.
                Output::Load => world.send_result(self, |world| {
                    let mut store = world.store.lock().unwrap();
                    while store.in_flight > 0 {
                        store = world.settled.wait(store).unwrap();
                    }
                    Input::Loaded(Ok::<_, StoreReadError>(store.stored.entities.get(&COUNTER).cloned()))
                }),
                Output::Commit(commit) => {
                    world.store.lock().unwrap().in_flight += 1;
                    world.send_result(self, move |world| Input::Committed(world.commit(&commit)));
                }
                Output::LookUp(id) => world.send_result(self, move |world| {
                    Input::LookedUp(Ok(world.store.lock().unwrap().stored.commands.get(&id).cloned()))
                }),
                Output::Reply(token, reply) => {
                    if let Some((answer, slot)) = waiters.remove(&token) {
                        drop(slot);
                        let _ = answer.send(reply);
                    }
                }
                Output::Perform(_) => {}
                Output::Passivate | Output::StoreOutage(_) => self.exit(world),
                Output::Crash(reason) | Output::Park(reason) => panic!("{reason}"),
            }
        }
    }

    /// As `ActorState::exit`: it leaves the directory, and then drains its mailbox.
    fn exit(&self, world: &World) {
        world.ended(self);
        world.handover.remove(COUNTER, &self.id);
        self.mailbox.end(MailboxState::Draining);
    }
}

/// What happens to the entity while it is asked.
#[derive(Clone, Copy)]
enum Disturbance {
    Passivation,
    /// The shard is closed, and comes back under the next term.
    Close,
    /// Another member has taken the shard over, and it comes back.
    Takeover,
}

/// Callers send commands until they are answered, while the entity is disturbed.
fn story(tickets: &[u64], disturbances: &[Disturbance], has_outages: bool) {
    let world = World::new(has_outages);
    world.handover.open(SHARD, world.grant());
    let callers = tickets.iter().map(|ticket| {
        let (world, ticket) = (Arc::clone(&world), *ticket);
        thread::spawn(move || {
            loop {
                match world.ask(ticket) {
                    Ok(_) => break,
                    Err(
                        AskError::NotOwner
                        | AskError::InProgress
                        | AskError::Unavailable { .. }
                        | AskError::Unknown { .. },
                    ) => thread::yield_now(),
                    Err(other) => panic!("{ticket}: {other:?}"),
                }
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    for disturbance in disturbances {
        match disturbance {
            Disturbance::Passivation => world.passivate(),
            Disturbance::Close => {
                world.close();
                world.handover.open(SHARD, world.grant());
            }
            Disturbance::Takeover => {
                let term = world.grant();
                world.lose();
                world.handover.open(SHARD, term);
            }
        }
        thread::yield_now();
    }
    for caller in callers {
        caller.join().unwrap();
    }
    let mut counted = world.store.lock().unwrap().stored.counter(COUNTER.id).tickets;
    counted.sort_unstable();
    let sent: BTreeSet<u64> = tickets.iter().copied().collect();
    assert!(counted.iter().eq(&sent), "each command is executed once: {counted:?}");
    assert!(world.handover.owned(SHARD).unwrap().is_drained(), "no slot is taken");
    // The threads of the actors end, so that the schedule does.
    world.lose();
}

/// Runs the story under this many random schedules, and as many of the PCT scheduler, which preempts rarely.
fn explore(iterations: usize, tickets: &'static [u64], disturbances: &'static [Disturbance], has_outages: bool) {
    let schedulers: [Box<dyn Scheduler + Send>; 2] =
        [Box::new(RandomScheduler::new(iterations)), Box::new(PctScheduler::new(3, iterations))];
    for scheduler in schedulers {
        let mut config = shuttle::Config::new();
        // The shell and its JSON need more than the default of 32 KiB.
        config.stack_size = 256 * 1024;
        shuttle::Runner::new(scheduler, config).run(move || story(tickets, disturbances, has_outages));
    }
}

/// `SHUTTLE_ITERATIONS` sets another number.
fn iterations(default: usize) -> usize {
    std::env::var("SHUTTLE_ITERATIONS").ok().and_then(|it| it.parse().ok()).unwrap_or(default)
}

#[test]
fn command_that_meets_a_passivation_reaches_the_next_activation() {
    const TWICE: &[Disturbance] = &[Disturbance::Passivation, Disturbance::Passivation];
    explore(iterations(200), TICKETS, TWICE, false);
}

#[test]
fn closed_shard_has_answered_every_admitted_command() {
    // Few threads, so that more schedules meet the moments around the close.
    explore(iterations(1500), &[1], &[Disturbance::Close], false);
    explore(iterations(100), TICKETS, &[Disturbance::Close, Disturbance::Passivation, Disturbance::Close], false);
}

#[test]
fn commands_are_executed_once_across_takeovers_and_lost_responses() {
    const ALL: &[Disturbance] = &[Disturbance::Takeover, Disturbance::Passivation, Disturbance::Close];
    explore(iterations(200), TICKETS, ALL, true);
}

//! Whatever happens in whatever order (I1): what was acknowledged is in the store, nothing is in it twice, and every ask gets
//! exactly one answer.

use super::*;
use crate::command_context::CommandKey;
use crate::sharding::{command_id, digest_of};
use crate::testing::{Count, Counter, Refusal, StoredState, context, term};
use domain::commit::Epoch;
use domain::{EntityKind, Shard};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const COUNTER: EntityRef = EntityRef { kind: EntityKind::Sku, id: Uuid::from_u128(7) };
const SHARD: Shard = Shard(3);

/// One step of the simulation.
#[derive(Clone, Debug)]
enum Move {
    Ask(TestCommand),
    /// The pending request to the store ends, like this.
    Deliver(End),
    /// A commit whose response was lost earlier arrives at the store.
    ArriveLate,
    Passivate,
    /// So many seconds pass.
    Pass(i64),
    /// Another member takes over the shard; a shell that is started from here has the new epoch.
    TakeOver,
}

#[derive(Clone, Debug)]
struct TestCommand {
    /// The ticket; requests with the same one are the same command.
    ticket: u64,
    once: bool,
    /// With a command id; without one, each request is a command of its own.
    keyed: bool,
    keep_reply: bool,
    read: bool,
    patience: i64,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Well,
    /// Another writer comes first.
    ConcurrentWrite,
    NotApplied,
    Refused,
    LostAfter,
    LostBefore,
    /// Lost now, written later, perhaps during the life of the next shell.
    LostForNow,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let asking = (0..6_u64, any::<bool>(), any::<bool>(), any::<bool>(), 0..5_u8, 0..6_i64).prop_map(
        |(ticket, once, keyed, keep_reply, read, patience)| {
            Move::Ask(TestCommand { ticket, once, keyed, keep_reply, read: read == 0, patience })
        },
    );
    let end = prop_oneof![
        8 => Just(End::Well),
        2 => Just(End::ConcurrentWrite),
        1 => Just(End::NotApplied),
        1 => Just(End::Refused),
        1 => Just(End::LostAfter),
        1 => Just(End::LostBefore),
        1 => Just(End::LostForNow),
    ];
    let one = prop_oneof![
        8 => asking,
        12 => end.prop_map(Move::Deliver),
        1 => Just(Move::ArriveLate),
        1 => Just(Move::Passivate),
        1 => (1..4_i64).prop_map(Move::Pass),
        1 => Just(Move::TakeOver),
    ];
    prop::collection::vec(one, 1..120)
}

/// A request of the shell to the store.
#[derive(Debug)]
enum StoreRequest {
    Load,
    Commit(Box<Commit>),
    LookUp(CommandId),
}

/// The shell, the store, and all requests and replies.
struct Simulation {
    stored: StoredState,
    shell: Option<Shell<Counter>>,
    pending: Option<StoreRequest>,
    late: Vec<Commit>,
    epoch: i64,
    now: i64,
    token: u64,
    /// The ticket and the command id of each request; a command without an id has a ticket of its own.
    asks: BTreeMap<u64, (u64, Option<CommandId>, bool)>,
    answers: BTreeMap<u64, AskResult<Counter>>,
    policy: PolicyBook,
}

impl Simulation {
    fn new() -> Self {
        Self {
            stored: StoredState { epochs: [(SHARD, Epoch(1))].into(), ..StoredState::default() },
            shell: None,
            pending: None,
            late: Vec::new(),
            epoch: 1,
            now: 1_000,
            token: 0,
            asks: BTreeMap::new(),
            answers: BTreeMap::new(),
            policy: PolicyBook::default(),
        }
    }

    fn apply(&mut self, one: Move) {
        match one {
            Move::Ask(asking) => self.ask(&asking),
            Move::Deliver(end) => self.deliver(end),
            Move::ArriveLate => {
                if let Some(commit) = self.late.pop() {
                    self.stored.commit(&commit);
                }
            }
            Move::Passivate => self.input(Input::Passivate),
            Move::Pass(seconds) => self.now += seconds,
            Move::TakeOver => {
                self.epoch += 1;
                self.stored.epochs.insert(SHARD, Epoch(self.epoch));
            }
        }
    }

    fn ask(&mut self, asking: &TestCommand) {
        self.token += 1;
        let token = self.token;
        let ticket = if asking.keyed { asking.ticket } else { 1_000 + token };
        let command = match (asking.read, asking.once) {
            (true, _) => Count::Read,
            (false, true) => Count::AddOnce(ticket),
            (false, false) => Count::Add(ticket),
        };
        let mut about = context(self.at() + chrono::TimeDelta::seconds(asking.patience));
        // The same ticket with another command is another request under the same id.
        let id = command_id(&[b"ticket", &ticket.to_be_bytes()]);
        if asking.keyed && !asking.read {
            let digest = digest_of(&[command_name(&command)]);
            about.command = Some(CommandKey { keep_reply: asking.keep_reply, ..CommandKey::repeatable(id, digest) });
        }
        self.asks.insert(token, (ticket, about.command.as_ref().map(|key| key.id), asking.read));
        if self.shell.is_none() {
            // Every other shell assumes that there is no counter yet, rightly or not.
            if token.is_multiple_of(2) {
                self.shell = Some(Shell::start_new(COUNTER.id, term(SHARD, self.epoch)));
            } else {
                let (shell, output) = Shell::start(COUNTER.id, term(SHARD, self.epoch));
                self.shell = Some(shell);
                self.execute(vec![output]);
            }
        }
        self.input(Input::Ask(CommandRequest { token, command, context: about }));
    }

    fn at(&self) -> Timestamp {
        Timestamp::from_timestamp(self.now, 0).unwrap()
    }

    fn input(&mut self, input: Input<Counter>) {
        let at = self.at();
        let Some(shell) = &mut self.shell else { return };
        let outputs = shell.on(input, InputContext { at, seed: u128::from(self.token) << 70, policy: &self.policy });
        self.execute(outputs);
    }

    fn execute(&mut self, outputs: Vec<Output<Counter>>) {
        for output in outputs {
            match output {
                Output::Load => self.set_pending(StoreRequest::Load),
                Output::Commit(commit) => self.set_pending(StoreRequest::Commit(commit)),
                Output::LookUp(id) => self.set_pending(StoreRequest::LookUp(id)),
                Output::Reply(token, answer) => self.answered(token, answer),
                // It follows a reply that is checked against the store.
                Output::Perform(_) => {}
                Output::Passivate | Output::Crash(_) | Output::StoreOutage(_) => {
                    assert!(self.pending.is_none(), "it left while it waits for {:?}", self.pending);
                    self.shell = None;
                }
                Output::Park(reason) => panic!("{reason}"),
            }
        }
    }

    fn set_pending(&mut self, pending: StoreRequest) {
        let before = self.pending.replace(pending);
        assert!(before.is_none(), "it waits for two things: {before:?} and {:?}", self.pending);
    }

    fn answered(&mut self, token: u64, answer: AskResult<Counter>) {
        let (ticket, _, read) = self.asks[&token];
        match &answer {
            Ok(_) if read => {}
            // Persist, then reply.
            Ok(answered) => {
                assert_eq!(self.times_counted(ticket), 1, "{ticket} is acknowledged");
                assert_ne!(answered.written, answered.replayed);
            }
            // Refused since this or another request counted the ticket.
            Err(AskError::Rejected(Refusal::Counted(counted))) => assert_eq!(self.times_counted(*counted), 1),
            Err(_) => {}
        }
        assert!(self.answers.insert(token, answer).is_none(), "{token} is answered twice");
    }

    fn times_counted(&self, ticket: u64) -> usize {
        self.stored.counter(COUNTER.id).tickets.iter().filter(|counted| **counted == ticket).count()
    }

    fn deliver(&mut self, end: End) {
        let unreachable = || StoreReadError::unavailable("unreachable".to_owned());
        let reads = matches!(end, End::Well | End::ConcurrentWrite | End::Refused);
        match self.pending.take() {
            None => {}
            Some(StoreRequest::Load) if reads => {
                let found = self.stored.entities.get(&COUNTER).cloned();
                self.input(Input::Loaded(Ok(found)));
            }
            Some(StoreRequest::LookUp(id)) if reads => {
                let found = self.stored.commands.get(&id).cloned();
                self.input(Input::LookedUp(Ok(found)));
            }
            Some(StoreRequest::Load) => self.input(Input::Loaded(Err(unreachable()))),
            Some(StoreRequest::LookUp(_)) => self.input(Input::LookedUp(Err(unreachable()))),
            Some(StoreRequest::Commit(commit)) => {
                let outcome = self.commit(*commit, end);
                self.input(Input::Committed(outcome));
            }
        }
    }

    fn commit(&mut self, commit: Commit, end: End) -> CommitOutcome {
        let lost = CommitOutcome::Unknown { reason: "the connection broke".to_owned() };
        match end {
            End::Well => self.stored.commit(&commit),
            End::ConcurrentWrite => {
                self.stored.write_concurrently(COUNTER);
                self.stored.commit(&commit)
            }
            End::NotApplied => CommitOutcome::NotApplied { reason: "full".to_owned() },
            End::Refused => CommitOutcome::Refused { constraint: "name".to_owned() },
            End::LostBefore => lost,
            End::LostAfter => {
                self.stored.commit(&commit);
                lost
            }
            End::LostForNow => {
                self.late.push(commit);
                lost
            }
        }
    }

    /// Completes all requests, then checks the invariants.
    fn settle(&mut self) {
        while self.pending.is_some() {
            self.deliver(End::Well);
        }
        while let Some(commit) = self.late.pop() {
            self.stored.commit(&commit);
        }
        assert_eq!(self.asks.keys().collect::<Vec<_>>(), self.answers.keys().collect::<Vec<_>>());
        let tickets = self.stored.counter(COUNTER.id).tickets;
        let distinct: BTreeSet<_> = tickets.iter().collect();
        assert_eq!(distinct.len(), tickets.len(), "counted twice: {tickets:?}");
        assert_eq!(self.stored.commits.len(), tickets.len());
        for (ticket, answers) in self.answers_by_ticket() {
            let done = answers.iter().any(|answer| answer.is_ok() || matches!(answer, Err(AskError::AlreadyDone)));
            let unknown = answers.iter().any(|answer| matches!(answer, Err(AskError::Unknown { .. })));
            match self.times_counted(ticket) {
                0 => assert!(!done, "ticket {ticket} was acknowledged and lost: {answers:?}"),
                _ => assert!(done || unknown, "ticket {ticket} was counted, and every reply denies it: {answers:?}"),
            }
        }
    }

    fn answers_by_ticket(&self) -> BTreeMap<u64, Vec<&AskResult<Counter>>> {
        let mut by_ticket = BTreeMap::<_, Vec<_>>::new();
        for (token, answer) in &self.answers {
            let (ticket, _, read) = self.asks[token];
            if !read {
                by_ticket.entry(ticket).or_default().push(answer);
            }
        }
        by_ticket
    }
}

fn command_name(command: &Count) -> &'static [u8] {
    domain::state_machine::Command::name(command).as_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn acknowledged_commands_are_executed_once_and_every_request_is_answered_once(moves in moves()) {
        let mut simulation = Simulation::new();
        for one in moves {
            simulation.apply(one);
        }
        simulation.settle();
    }
}

mod refusals;
mod repetitions;
mod store_outcomes;

use super::*;
use crate::command_context::CommandKey;
use crate::testing::{Count, Counter, Refusal, StoredState, context, key, shorten_panic_output, term, user, worker};
use domain::authz::{TokenRole, authorize};
use domain::tenant::{self, Tenant};
use domain::{EntityKind, NodeId, Principal, Shard};
use domain::{allocation::Allocation, node::Node};

const COUNTER: Uuid = Uuid::from_u128(7);

fn at(second: i64) -> Timestamp {
    Timestamp::from_timestamp(second, 0).unwrap()
}

/// A shell and the instant at which it is driven.
struct Bench<M: Machine> {
    shell: Shell<M>,
    now: Timestamp,
    policy: PolicyBook,
}

impl<M: Machine> Bench<M> {
    fn starting() -> Self {
        shorten_panic_output();
        let (shell, load) = Shell::start(COUNTER, term(Shard(3), 9));
        assert!(matches!(load, Output::Load));
        Self { shell, now: at(100), policy: PolicyBook::default() }
    }

    /// Activated by a command that creates the entity.
    fn assuming_absence() -> Self {
        shorten_panic_output();
        Self { shell: Shell::start_new(COUNTER, term(Shard(3), 9)), now: at(100), policy: PolicyBook::default() }
    }

    /// The outputs, each as one line.
    fn on(&mut self, input: Input<M>) -> Vec<String> {
        self.raw(input).iter().map(line::<M>).collect()
    }

    fn raw(&mut self, input: Input<M>) -> Vec<Output<M>> {
        self.shell.on(input, InputContext { at: self.now, seed: 42, policy: &self.policy })
    }

    fn ask(&mut self, token: u64, command: M::Command) -> Vec<String> {
        self.on(Input::Ask(CommandRequest { token, command, context: context(at(200)) }))
    }

    fn ask_once(&mut self, token: u64, command: M::Command, key: CommandKey) -> Vec<String> {
        self.on(Input::Ask(CommandRequest { token, command, context: context(at(200)).with_key(key) }))
    }
}

impl Bench<Counter> {
    /// Loaded, with two tickets counted, at version 5.
    fn ready() -> Self {
        let mut bench = Self::starting();
        assert_eq!(bench.on(loaded(5, &[1, 2])), NOTHING);
        bench
    }
}

const NOTHING: [&str; 0] = [];

fn line<M: Machine>(output: &Output<M>) -> String {
    match output {
        Output::Load => "load".to_owned(),
        Output::Commit(commit) => format!("commit {} from {}", commit.command_name, commit.expected_version),
        Output::LookUp(_) => "look up".to_owned(),
        Output::Reply(token, Ok(CommandReply { reply, replayed, written, version })) => {
            let how = match (replayed, written) {
                (false, true) => "written",
                (false, false) => "unchanged",
                (true, false) => "replayed",
                (true, true) => "impossible",
            };
            format!("{token}: {reply:?} {how} at {version}")
        }
        Output::Reply(token, Err(error)) => format!("{token}: {error}"),
        Output::Perform(effect) => match effect {
            Effect::WakeNode(NodeId(id)) => format!("wake {}", id.as_u128()),
            Effect::CloseNode(NodeId(id)) => format!("close {}", id.as_u128()),
            Effect::WakeTerminal(id) => format!("wake terminal {}", id.0.as_u128()),
            Effect::ReadPolicy => "read policy".to_owned(),
            Effect::ReadKeys => "read keys".to_owned(),
        },
        Output::Passivate => "sleep".to_owned(),
        Output::Crash(reason) => format!("die: {reason}"),
        Output::StoreOutage(reason) => format!("lose: {reason}"),
        Output::Park(reason) => format!("park: {reason}"),
    }
}

fn loaded(version: i64, tickets: &[u64]) -> Input<Counter> {
    let counter = Counter { tickets: tickets.to_vec(), ..Counter::default() };
    Input::Loaded(Ok(Some(Snapshot { version, body: serde_json::to_string(&counter).unwrap() })))
}

fn done(key: &CommandKey, reply: Option<&str>) -> CompletedCommand {
    CompletedCommand { entity: COUNTER, digest: key.digest, reply: reply.map(str::to_owned) }
}

fn unreachable() -> StoreReadError {
    StoreReadError::unavailable("unreachable".to_owned())
}

#[test]
fn command_is_answered_only_after_load_and_commit() {
    let mut bench = Bench::starting();
    assert_eq!(bench.ask(1, Count::Add(3)), NOTHING);
    assert_eq!(bench.on(loaded(5, &[1, 2])), ["commit add from 5"]);
    assert_eq!(bench.shell.version(), 5);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Applied)), ["1: 3 written at 6", "wake 3"]);
    assert_eq!(bench.shell.version(), 6);
    assert_eq!(bench.shell.state().unwrap().tickets, [1, 2, 3]);
}

#[test]
fn command_for_an_entity_that_does_not_exist_is_decided_without_a_state() {
    let mut bench = Bench::<Counter>::starting();
    assert_eq!(bench.on(Input::Loaded(Ok(None))), NOTHING);
    assert_eq!(bench.ask(1, Count::Add(1)), ["commit add from 0"]);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Applied)), ["1: 1 written at 1", "wake 1"]);
}

#[test]
fn a_command_that_changes_nothing_is_answered_without_a_commit() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Read), ["1: 2 unchanged at 5"]);
}

#[test]
fn commands_are_answered_in_order_of_arrival() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.ask(2, Count::Read), NOTHING);
    assert_eq!(bench.ask(3, Count::Add(4)), NOTHING);
    assert_eq!(bench.ask(4, Count::Read), NOTHING);
    let applied = bench.on(Input::Committed(CommitOutcome::Applied));
    assert_eq!(applied, ["1: 3 written at 6", "wake 3", "2: 3 unchanged at 6", "commit add from 6"]);
    let applied = bench.on(Input::Committed(CommitOutcome::Applied));
    assert_eq!(applied, ["3: 4 written at 7", "wake 4", "4: 4 unchanged at 7"]);
}

#[test]
fn commit_contains_all_rows_of_the_transition() {
    let mut bench = Bench::ready();
    let by = worker();
    let mut context = context(at(200));
    context.origin.traceparent = Some("00-trace".to_owned());
    let event = EventId(Uuid::from_u128(77));
    let ask = CommandRequest {
        token: 1,
        command: Count::Add(3),
        context: context.with_key(CommandKey::for_event(event, "add")),
    };
    let outputs = bench.raw(Input::Ask(ask));
    let [Output::Commit(commit)] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!(commit.entity, EntityRef { kind: EntityKind::Sku, id: COUNTER });
    assert_eq!((commit.shard, commit.epoch.0, commit.expected_version), (Shard(3), 9, 5));
    assert_eq!((commit.from_state, commit.to_state), (Some("counting"), "counting"));
    assert_eq!((commit.at, commit.why.as_str()), (at(100), "counted"));
    assert_eq!((commit.actor.clone(), commit.origin.correlation_id.as_str()), (by.to_string(), "correlation"));
    assert_eq!(commit.origin.traceparent.as_deref(), Some("00-trace"));
    let command = commit.command.as_ref().unwrap();
    assert_eq!(command.id, CommandKey::for_event(event, "add").id);
    assert_eq!((command.consumes, &command.reply), (Some(event), &None));
    assert_eq!(commit.outbox.len(), 1);
    assert_eq!(commit.outbox[0].0.0.get_version_num(), 7);
    let next: Counter = serde_json::from_str(&commit.snapshot).unwrap();
    assert_eq!(next.tickets, [1, 2, 3]);
}

#[test]
fn timer_row_has_the_wake_up_time_and_the_deadline_with_its_reason() {
    let mut bench = Bench::ready();
    let ask = CommandRequest { token: 1, command: Count::Wait(at(500)), context: context(at(200)) };
    let outputs = bench.raw(Input::Ask(ask));
    let [Output::Commit(commit)] = outputs.as_slice() else { panic!("{outputs:?}") };
    let reason = "no member has counted".to_owned();
    assert_eq!(commit.timer, Some(Timer { wake_at: at(500), deadline_at: Some(at(500)), reason }));
}

#[test]
fn snapshot_that_no_member_committed_parks_the_entity() {
    let mut bench = Bench::<Counter>::starting();
    assert_eq!(bench.ask(1, Count::Read), NOTHING);
    let altered = StoreReadError { reason: "the row was altered".to_owned(), is_altered: true };
    let output = bench.on(Input::Loaded(Err(altered)));
    assert_eq!(output, ["1: parked: the row was altered", "park: the row was altered"]);
}

#[test]
fn a_snapshot_that_cannot_be_read_parks_the_entity() {
    let mut bench = Bench::<Counter>::starting();
    assert_eq!(bench.ask(1, Count::Read), NOTHING);
    let outputs = bench.raw(Input::Loaded(Ok(Some(Snapshot { version: 5, body: "{\"tickets\":1}".into() }))));
    assert!(
        matches!(outputs.as_slice(), [Output::Reply(1, Err(AskError::Parked { .. })), Output::Park(_)]),
        "{outputs:?}"
    );
    assert_eq!(bench.ask(2, Count::Read), ["2: not the owner"]);
}

#[test]
fn only_an_idle_entity_is_passivated() {
    let mut loading = Bench::<Counter>::starting();
    assert_eq!(loading.on(Input::Passivate), NOTHING);
    assert_eq!(loading.on(loaded(5, &[])), NOTHING);
    assert_eq!(loading.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(loading.on(Input::Passivate), NOTHING);
    assert_eq!(loading.on(Input::Committed(CommitOutcome::Applied)), ["1: 1 written at 6", "wake 3"]);
    assert_eq!(loading.on(Input::Passivate), ["sleep"]);
    assert_eq!(loading.on(Input::Passivate), NOTHING);
    assert_eq!(loading.ask(2, Count::Read), ["2: not the owner"]);
}

/// Unexpected inputs: a snapshot, an outcome and a lookup result, in every phase that did not ask for them.
#[test]
fn input_that_the_phase_does_not_expect_is_ignored() {
    type Setup = fn(&mut Bench<Counter>);
    let phases: [(&str, Setup, &[&str]); 5] = [
        ("loading", |_| {}, &["loaded"]),
        ("ready", |bench| drop(bench.on(loaded(5, &[1, 2]))), &[]),
        (
            "committing",
            |bench| {
                bench.on(loaded(5, &[1, 2]));
                bench.ask(1, Count::Add(3));
            },
            &["committed"],
        ),
        (
            "looking",
            |bench| {
                bench.on(loaded(5, &[1, 2]));
                bench.ask_once(1, Count::AddOnce(2), key("k"));
            },
            &["looked"],
        ),
        (
            "over",
            |bench| {
                bench.on(loaded(5, &[1, 2]));
                bench.on(Input::Passivate);
            },
            &[],
        ),
    ];
    for (phase, reach, awaited) in phases {
        for (name, stray) in [
            ("loaded", loaded as fn(i64, &[u64]) -> Input<Counter>),
            ("committed", |_, _| Input::Committed(CommitOutcome::Applied)),
            ("looked", |_, _| Input::LookedUp(Ok(None))),
        ] {
            if awaited.contains(&name) {
                continue;
            }
            let mut bench = Bench::starting();
            reach(&mut bench);
            let before = format!("{:?}", bench.shell);
            assert_eq!(bench.on(stray(99, &[9])), NOTHING, "{name} while {phase}");
            assert_eq!(format!("{:?}", bench.shell), before, "{name} while {phase}");
        }
    }
}

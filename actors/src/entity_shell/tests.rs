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
fn reply_is_stored_for_a_repeatable_command_only() {
    let mut bench = Bench::ready();
    let ask = CommandRequest { token: 1, command: Count::Add(3), context: context(at(200)).with_key(key("k")) };
    let outputs = bench.raw(Input::Ask(ask));
    let [Output::Commit(commit)] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!(commit.command.as_ref().unwrap().reply.as_deref(), Some("3"));
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
fn transition_to_a_snapshot_over_the_bound_is_refused_and_the_entity_stays_active() {
    let mut bench = Bench::starting();
    // Twenty digits and a comma each: the next one exceeds the bound.
    let tickets = vec![u64::MAX; Counter::SNAPSHOT_MOST / 21];
    assert_eq!(bench.on(loaded(5, &tickets)), NOTHING);
    let refused = bench.ask(1, Count::Add(u64::MAX));
    assert!(refused[0].starts_with("1: the machine failed: the next state of the sku has"), "{refused:?}");
    assert!(refused[0].contains("over its bound of 65536"), "{refused:?}");
    assert!(bench.ask(2, Count::Read)[0].starts_with("2: "), "reads are still served");
}

#[test]
fn claim_that_another_entity_holds_is_dropped_and_retried_a_bounded_number_of_times() {
    let claimed =
        || Input::Committed(CommitOutcome::Claimed { holders: [("ticket/3".to_owned(), Uuid::from_u128(9))].into() });
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    let outputs = bench.raw(claimed());
    let [Output::Commit(commit)] = outputs.as_slice() else { panic!("{outputs:?}") };
    let next: Counter = serde_json::from_str(&commit.snapshot).unwrap();
    assert_eq!(next.tickets, [1, 2], "the counter leaves the other one's ticket out");
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Applied)), ["1: 2 written at 6"]);

    assert_eq!(bench.ask(2, Count::Add(4)), ["commit add from 6"]);
    for _ in 0..3 {
        assert_eq!(bench.on(claimed()), ["commit add from 6"]);
    }
    let given_back = bench.on(claimed());
    assert!(given_back[0].starts_with("2: unavailable"), "{given_back:?}");
}

#[test]
fn conflict_reloads_and_retries_the_command_before_later_ones() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.ask(2, Count::Read), NOTHING);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Conflict)), ["load"]);
    assert_eq!(bench.on(loaded(6, &[1, 2, 9])), ["commit add from 6"]);
    let applied = bench.on(Input::Committed(CommitOutcome::Applied));
    assert_eq!(applied, ["1: 4 written at 7", "wake 3", "2: 4 unchanged at 7"]);
}

#[test]
fn command_that_arrives_during_a_reload_waits_for_it() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Conflict)), ["load"]);
    assert_eq!(bench.ask(2, Count::Read), NOTHING);
    assert_eq!(bench.on(loaded(6, &[9])), ["commit add from 6"]);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Applied)).len(), 3);
}

#[test]
fn command_is_refused_after_three_reloads_and_the_next_has_three_of_its_own() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.ask(2, Count::Add(4)), NOTHING);
    for version in 6..9 {
        assert_eq!(bench.on(Input::Committed(CommitOutcome::Conflict)), ["load"]);
        assert_eq!(bench.on(loaded(version, &[])), [format!("commit add from {version}")]);
    }
    let given_back = bench.on(Input::Committed(CommitOutcome::Conflict));
    assert_eq!(
        given_back,
        ["1: unavailable: the entity keeps changing under the command", "commit add from 8"],
        "the second command meets the state as it was loaded last"
    );
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Conflict)), ["load"]);
    assert_eq!(bench.on(loaded(9, &[])), ["commit add from 9"]);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Applied)), ["2: 1 written at 10", "wake 4"]);
}

#[test]
fn duplicate_command_gets_the_first_reply_and_has_no_effects() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask_once(1, Count::Add(3), key("k")), ["commit add from 5"]);
    let duplicate = CommitOutcome::Duplicate(done(&key("k"), Some("2")));
    assert_eq!(bench.on(Input::Committed(duplicate)), ["1: 2 replayed at 5"]);
    assert_eq!(bench.shell.version(), 5);
    assert_eq!(bench.ask(2, Count::Read), ["2: 2 unchanged at 5"]);
}

#[test]
fn another_request_under_a_used_command_id_is_refused() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask_once(1, Count::Add(3), key("k")), ["commit add from 5"]);
    let other = CompletedCommand { digest: [9; 32], ..done(&key("k"), Some("2")) };
    let reused = bench.on(Input::Committed(CommitOutcome::Duplicate(other)));
    assert_eq!(reused, ["1: the command id was used for another request"]);
}

#[test]
fn duplicate_command_without_a_stored_reply_is_already_done() {
    let mut bench = Bench::ready();
    let event = CommandKey::for_event(EventId(Uuid::from_u128(77)), "step");
    assert_eq!(bench.ask_once(1, Count::Add(3), event.clone()), ["commit add from 5"]);
    let duplicate = CommitOutcome::Duplicate(done(&event, None));
    assert_eq!(bench.on(Input::Committed(duplicate)), ["1: the command was carried out before"]);
}

#[test]
fn reply_that_the_machine_stores_is_found_under_the_id_of_its_command_or_a_new_one() {
    let mut bench = Bench::ready();
    let mut stored = |token, context| {
        let ask = CommandRequest { token, command: Count::AddAndStore(token), context };
        let record = match bench.raw(Input::Ask(ask)).as_slice() {
            [Output::Commit(commit)] => commit.command.clone().unwrap(),
            other => panic!("{other:?}"),
        };
        bench.on(Input::Committed(CommitOutcome::Applied));
        record
    };
    let event = CommandKey::for_event(EventId(Uuid::from_u128(77)), "step");
    let named = stored(3, context(at(200)).with_key(event.clone()));
    assert_eq!((named.id, named.reply.as_deref(), named.consumes), (event.id, Some("3"), event.consumes));
    let unnamed = stored(4, context(at(200)));
    assert_eq!((unnamed.reply.as_deref(), unnamed.consumes), (Some("4"), None));
    assert_ne!(unnamed.id, named.id);
    // What the answer shows beside the reply is stored with either.
    let shown = CommandKey { resolved: Some("{}".to_owned()), ..key("k") };
    assert_eq!(stored(5, context(at(200)).with_key(shown)).resolved.as_deref(), Some("{}"));
}

#[test]
fn stored_reply_that_cannot_be_decoded_is_an_unknown_outcome() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask_once(1, Count::Add(3), key("k")), ["commit add from 5"]);
    let answers = bench.raw(Input::Committed(CommitOutcome::Duplicate(done(&key("k"), Some("{")))));
    assert!(matches!(answers.as_slice(), [Output::Reply(1, Err(AskError::Unknown { .. }))]), "{answers:?}");
}

#[test]
fn refusal_by_the_store_is_answered_and_the_entity_stays_active() {
    let refusals = [
        (CommitOutcome::Refused { constraint: "unique_name".into() }, "1: the database refused: unique_name"),
        (CommitOutcome::NotApplied { reason: "full".into() }, "1: unavailable: full"),
    ];
    for (outcome, answer) in refusals {
        let mut bench = Bench::ready();
        assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
        assert_eq!(bench.ask(2, Count::Read), NOTHING);
        assert_eq!(bench.on(Input::Committed(outcome)), [answer, "2: 2 unchanged at 5"]);
    }
}

#[test]
fn fenced_shell_ends_and_answers_not_owner() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.ask(2, Count::Read), NOTHING);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Fenced)), ["1: not the owner", "2: not the owner", "sleep"]);
    assert_eq!(bench.ask(3, Count::Read), ["3: not the owner"]);
}

#[test]
fn unknown_outcome_is_answered_as_unknown_and_ends_the_shell() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.ask(2, Count::Read), NOTHING);
    let died = bench.on(Input::Committed(CommitOutcome::Unknown { reason: "broke".into() }));
    assert_eq!(
        died,
        [
            "1: the outcome is unknown: broke",
            "2: unavailable: the entity is being reloaded",
            "lose: a commit's outcome is unknown: broke"
        ]
    );
    assert_eq!(bench.ask(3, Count::Read), ["3: not the owner"]);
}

#[test]
fn a_rejection_is_an_answer() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::AddOnce(2)), ["1: ticket 2 was counted"]);
    let event = CommandKey::for_event(EventId(Uuid::from_u128(77)), "step");
    assert_eq!(bench.ask_once(2, Count::AddOnce(2), event), ["2: ticket 2 was counted"]);
    assert_eq!(bench.ask(3, Count::Read), ["3: 2 unchanged at 5"]);
}

#[test]
fn repeated_command_that_is_rejected_now_gets_its_first_reply() {
    let cases = [
        (Ok(Some(done(&key("k"), Some("2")))), "1: 2 replayed at 5"),
        (
            Ok(Some(CompletedCommand { digest: [9; 32], ..done(&key("k"), None) })),
            "1: the command id was used for another request",
        ),
        (Ok(None), "1: ticket 2 was counted"),
        (Err(unreachable()), "1: unavailable: the store cannot be read: unreachable"),
    ];
    for (found, answer) in cases {
        let mut bench = Bench::ready();
        assert_eq!(bench.ask_once(1, Count::AddOnce(2), key("k")), ["look up"]);
        assert_eq!(bench.ask(2, Count::Read), NOTHING);
        assert_eq!(bench.on(Input::Passivate), NOTHING);
        assert_eq!(bench.on(Input::LookedUp(found)), [answer, "2: 2 unchanged at 5"]);
    }
}

#[test]
fn repeated_command_that_changes_nothing_gets_its_first_reply() {
    let cases = [
        (Ok(Some(done(&key("k"), Some("1")))), "1: 1 replayed at 5"),
        (
            Ok(Some(CompletedCommand { digest: [9; 32], ..done(&key("k"), None) })),
            "1: the command id was used for another request",
        ),
        (Ok(None), "1: 2 unchanged at 5"),
        (Err(unreachable()), "1: unavailable: the store cannot be read: unreachable"),
    ];
    for (found, answer) in cases {
        let mut bench = Bench::ready();
        assert_eq!(bench.ask_once(1, Count::Read, key("k")), ["look up"]);
        assert_eq!(bench.on(Input::LookedUp(found)), [answer]);
    }
    // A command that reacts to an event has no reader of its reply.
    let event = CommandKey::for_event(EventId(Uuid::from_u128(77)), "step");
    assert_eq!(Bench::ready().ask_once(1, Count::Read, event), ["1: 2 unchanged at 5"]);
}

#[test]
fn command_past_its_deadline_is_not_executed() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.ask(2, Count::Add(4)), NOTHING);
    assert_eq!(bench.ask(3, Count::Read), NOTHING);
    bench.now = at(200);
    bench.shell.waiting[0].context.deadline = at(199);
    let applied = bench.on(Input::Committed(CommitOutcome::Applied));
    let too_late = "2: unavailable: the command waited longer than its asker";
    assert_eq!(applied, ["1: 3 written at 6", "wake 3", too_late, "3: 3 unchanged at 6"]);
}

#[test]
fn permission_is_checked_where_the_command_is_decided() {
    let mut bench = Bench::ready();
    let strangers = [user("ann", &[TokenRole::Admin]), Principal::Node(NodeId(COUNTER))];
    for by in strangers {
        let context = CommandContext { by, ..context(at(200)) };
        assert_eq!(
            bench.on(Input::Ask(CommandRequest { token: 1, command: Count::Add(3), context })),
            ["1: not allowed"]
        );
    }
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
fn failed_load_is_answered_as_unavailable_and_ends_the_shell() {
    let mut bench = Bench::<Counter>::starting();
    assert_eq!(bench.ask(1, Count::Read), NOTHING);
    let why = "the store cannot be read: unreachable";
    let died = bench.on(Input::Loaded(Err(unreachable())));
    assert_eq!(died, [format!("1: unavailable: {why}"), format!("lose: {why}")]);
}

#[test]
fn conflict_whose_reload_fails_is_answered_as_unavailable() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Add(3)), ["commit add from 5"]);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Conflict)), ["load"]);
    let why = "the store cannot be read: unreachable";
    let died = bench.on(Input::Loaded(Err(unreachable())));
    assert_eq!(died, [format!("1: unavailable: {why}"), format!("lose: {why}")]);
}

#[test]
fn panic_of_the_machine_loses_no_reply_to_a_committed_command() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Poison), ["commit poison from 5"]);
    assert_eq!(bench.ask(2, Count::Add(3)), NOTHING);
    assert_eq!(bench.ask(3, Count::Add(4)), NOTHING);
    let died = bench.on(Input::Committed(CommitOutcome::Applied));
    assert_eq!(
        died,
        [
            "1: 2 written at 6",
            "2: the machine failed: add panicked: poisoned",
            "3: unavailable: the entity is being reloaded",
            "die: add panicked: poisoned"
        ]
    );
}

#[test]
fn next_state_that_cannot_be_encoded_is_refused() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Spoil), ["1: the machine failed: the next state cannot be serialized: spoiled"]);
    assert_eq!(bench.ask(2, Count::Add(3)), ["commit add from 5"]);
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

/// The real machines through the same shell: a repeated request for an allocation, and an unregistered node.
#[test]
fn repeated_request_for_an_allocation_gets_the_first_reply() {
    let mut bench = Bench::<Allocation>::starting();
    let mut stored = StoredState::default();
    let permit = authorize(&user("ann", &[TokenRole::User]), domain::Action::Rent).unwrap();
    let context = CommandContext::new(&permit, "c", at(200)).with_key(key("create"));
    let request = domain::allocation::Request::Create(Box::new(crate::directory::tests::request()));
    let command = domain::allocation::Command::from(request);
    bench.on(Input::Loaded(Ok(None)));
    let ask = |token| CommandRequest { token, command: command.clone(), context: context.clone() };
    let outputs = bench.raw(Input::Ask(ask(1)));
    let [Output::Commit(commit)] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!((commit.from_state, commit.to_state), (None, "requested"));
    assert!(commit.timer.is_some());
    assert_eq!(stored.commit(commit), CommitOutcome::Applied);
    let answers = bench.raw(Input::Committed(CommitOutcome::Applied));
    let [Output::Reply(1, Ok(first))] = answers.as_slice() else { panic!("{answers:?}") };

    assert_eq!(bench.on(Input::Ask(ask(2))), ["look up"], "it exists: perhaps because of this very command");
    let answers = bench.raw(Input::LookedUp(Ok(stored.commands.get(&key("create").id).cloned())));
    let [Output::Reply(2, Ok(second))] = answers.as_slice() else { panic!("{answers:?}") };
    assert_eq!((&second.reply, second.replayed), (&first.reply, true));
}

#[test]
fn unregistered_node_is_not_found() {
    let mut bench = Bench::<Node>::starting();
    bench.on(Input::Loaded(Ok(None)));
    assert_eq!(bench.ask(1, domain::node::Command::TICK), ["1: there is no such node"]);
}

#[test]
fn idle_counter_rejects_a_counted_ticket() {
    let mut bench = Bench::ready();
    let outputs =
        bench.raw(Input::Ask(CommandRequest { token: 1, command: Count::AddOnce(1), context: context(at(200)) }));
    let [Output::Reply(1, Err(AskError::Rejected(refusal)))] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!(*refusal, Refusal::Counted(1));
}

#[test]
fn creating_command_is_committed_without_a_load() {
    let mut bench = Bench::<Counter>::assuming_absence();
    assert_eq!(bench.ask(1, Count::Add(1)), ["commit add from 0"]);
    assert!(bench.shell.committed_state().is_none(), "the store may be ahead");
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Applied)), ["1: 1 written at 1", "wake 1"]);
    assert_eq!(bench.ask(2, Count::Read), ["2: 1 unchanged at 1"]);
    assert_eq!(
        bench.shell.committed_state().map(|(counter, version)| (counter.tickets.clone(), version)),
        Some((vec![1], 1))
    );
}

#[test]
fn wrong_assumption_of_absence_is_found_by_the_commit_or_by_a_load() {
    let mut bench = Bench::<Counter>::assuming_absence();
    assert_eq!(bench.ask(1, Count::Read), ["load"]);
    assert_eq!(bench.on(loaded(5, &[1, 2])), ["1: 2 unchanged at 5"]);

    let mut bench = Bench::<Counter>::assuming_absence();
    assert_eq!(bench.ask_once(1, Count::AddOnce(1), key("k")), ["commit add_once from 0"]);
    assert_eq!(bench.on(Input::Committed(CommitOutcome::Conflict)), ["load"]);
    assert_eq!(bench.on(loaded(5, &[1, 2])).len(), 1, "it is looked whether that was this command");
}

/// A tenant with one key; the command that registers it is refused from then on, and that is audited, once a minute.
fn tenant() -> (Bench<Tenant>, tenant::Command) {
    let add = tenant::Command::from(tenant::Request::AddKey {
        user_id: "ann".into(),
        name: "laptop".into(),
        key_type: "ssh-ed25519".into(),
        public_key: "ssh-ed25519 AAAA".into(),
        fingerprint: "SHA256:x".into(),
    });
    let mut bench = Bench::<Tenant>::starting();
    assert_eq!(bench.on(Input::Loaded(Ok(None))), NOTHING);
    assert_eq!(bench.ask_as_ann(1, add.clone(), None), ["commit add_key from 0"]);
    bench.on(Input::Committed(CommitOutcome::Applied));
    (bench, add)
}

impl Bench<Tenant> {
    fn ask_as_ann(&mut self, token: u64, command: tenant::Command, key: Option<CommandKey>) -> Vec<String> {
        let context = CommandContext { by: user("ann", &[TokenRole::User]), command: key, ..context(at(200)) };
        self.on(Input::Ask(CommandRequest { token, command, context }))
    }
}

#[test]
fn audited_refusal_is_answered_after_its_commit() {
    let (mut bench, add) = tenant();
    let context = CommandContext { by: user("ann", &[TokenRole::User]), ..context(at(200)) };
    let out = bench.raw(Input::Ask(CommandRequest { token: 2, command: add.clone(), context }));
    let [Output::Commit(commit)] = out.as_slice() else { panic!("{out:?}") };
    assert_eq!((commit.audit.len(), commit.audit[0].action.as_str()), (1, "ssh_keys.create"));
    assert_eq!(commit.audit[0].metadata["result"], "refused");
    assert!(commit.command.is_none() && commit.outbox.is_empty(), "nothing of the command is committed");
    let replies = bench.on(Input::Committed(CommitOutcome::Applied));
    assert_eq!(replies.len(), 1);
    assert!(replies[0].starts_with("2: the key is registered already"), "{replies:?}");
    assert_eq!(bench.shell.version(), 2);
    // Another refusal in the same minute costs no commit.
    let replies = bench.ask_as_ann(3, add.clone(), None);
    assert!(replies[0].starts_with("3: the key is registered already"), "{replies:?}");
    bench.now += chrono::TimeDelta::minutes(1);
    assert_eq!(bench.ask_as_ann(4, add, None), ["commit add_key from 2"]);
}

#[test]
fn refused_repetition_of_an_executed_command_gets_its_first_reply() {
    let (mut bench, add) = tenant();
    let key = key("add");
    assert_eq!(bench.ask_as_ann(2, add, Some(key.clone())), ["look up"]);
    let reply = serde_json::to_string(&tenant::Reply::Done).unwrap();
    assert_eq!(bench.on(Input::LookedUp(Ok(Some(done(&key, Some(&reply)))))), ["2: Done replayed at 1"]);
}

#[test]
fn audited_refusal_without_a_commit_is_not_answered_as_refused() {
    let (mut bench, add) = tenant();
    for (outcome, expected) in [
        (CommitOutcome::NotApplied { reason: "down".into() }, "2: unavailable: down"),
        (CommitOutcome::Unknown { reason: "cut".into() }, "2: the outcome is unknown: cut"),
    ] {
        assert_eq!(bench.ask_as_ann(2, add.clone(), None), ["commit add_key from 1"]);
        assert_eq!(bench.on(Input::Committed(outcome))[0], expected);
    }
}

/// Secret fields of a reply are not stored, whatever machine they come from.
#[test]
fn stored_reply_has_no_secrets() {
    let stored =
        redacted_reply(&serde_json::json!({"node": {"token": {"secret": "S"}, "name": "n"}, "access_token": "S"}))
            .unwrap();
    assert!(!stored.contains("\"S\"") && stored.contains("[redacted]") && stored.contains("\"n\""), "{stored}");
}

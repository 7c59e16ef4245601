//! Commands that are refused, and refusals that are audited.

use super::*;

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
fn a_rejection_is_an_answer() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::AddOnce(2)), ["1: ticket 2 was counted"]);
    let event = CommandKey::for_event(EventId(Uuid::from_u128(77)), "step");
    assert_eq!(bench.ask_once(2, Count::AddOnce(2), event), ["2: ticket 2 was counted"]);
    assert_eq!(bench.ask(3, Count::Read), ["3: 2 unchanged at 5"]);
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
fn next_state_that_cannot_be_encoded_is_refused() {
    let mut bench = Bench::ready();
    assert_eq!(bench.ask(1, Count::Spoil), ["1: the machine failed: the next state cannot be serialized: spoiled"]);
    assert_eq!(bench.ask(2, Count::Add(3)), ["commit add from 5"]);
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

//! Commands that arrive again under their id, and the replies that are stored for them.

use super::*;

#[test]
fn reply_is_stored_for_a_repeatable_command_only() {
    let mut bench = Bench::ready();
    let ask = CommandRequest { token: 1, command: Count::Add(3), context: context(at(200)).with_key(key("k")) };
    let outputs = bench.raw(Input::Ask(ask));
    let [Output::Commit(commit)] = outputs.as_slice() else { panic!("{outputs:?}") };
    assert_eq!(commit.command.as_ref().unwrap().reply.as_deref(), Some("3"));
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

/// Secret fields of a reply are not stored, whatever machine they come from.
#[test]
fn stored_reply_has_no_secrets() {
    let stored =
        redacted_reply(&serde_json::json!({"node": {"token": {"secret": "S"}, "name": "n"}, "access_token": "S"}))
            .unwrap();
    assert!(!stored.contains("\"S\"") && stored.contains("[redacted]") && stored.contains("\"n\""), "{stored}");
}

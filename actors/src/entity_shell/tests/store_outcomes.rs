//! What the store answers: loads that fail, conflicts, refusals, and outcomes that are not known.

use super::*;

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

//! The commands of every machine by their sort, and that each sort reads the JSON of its own commands alone.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use domain::state_machine::{AnyCommand, Command, CommandSort};
use domain::{
    Machine, allocation, billing_account, browser_session, key_set, node, notification_endpoint, payment,
    processor_event, rollout, tenant, terminal_session,
};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// The names that the JSON of a sort has, as its decoder lists them where it finds another.
fn names_in_json<C: CommandSort>() -> Vec<String> {
    let refused = serde_json::from_value::<C>(json!({ "command": "?" })).unwrap_err().to_string();
    let names = refused.split('`').skip(1).step_by(2).skip(1).map(str::to_owned);
    names.collect()
}

/// The rows of a machine whose command is of these sorts.
fn rows<
    M: Machine<Command = AnyCommand<R, I, F, S>>,
    R: CommandSort,
    I: CommandSort,
    F: CommandSort,
    S: CommandSort,
>() -> String {
    assert_eq!(names_in_json::<R>(), R::TAGS, "{} requests", M::KIND);
    assert_eq!(names_in_json::<I>(), I::TAGS, "{} instructions", M::KIND);
    assert_eq!(names_in_json::<F>(), F::TAGS, "{} facts", M::KIND);
    assert_eq!(names_in_json::<S>(), S::TAGS, "{} maintenance", M::KIND);
    let all: BTreeSet<_> = [R::TAGS, I::TAGS, F::TAGS, S::TAGS].concat().into_iter().collect();
    assert_eq!(
        all.len(),
        R::TAGS.len() + I::TAGS.len() + F::TAGS.len() + S::TAGS.len(),
        "a command of {} is of two sorts",
        M::KIND
    );
    let mut rows = String::new();
    for (sort, names) in
        [("requests", R::TAGS), ("instructions", I::TAGS), ("facts", F::TAGS), ("maintenance", S::TAGS)]
    {
        if names.is_empty() {
            continue;
        }
        writeln!(rows, "{} {sort}: {}", M::KIND, names.join(", ")).unwrap();
    }
    rows
}

#[test]
fn commands_by_sort_are_as_reviewed() {
    let table = [
        rows::<node::Node, _, _, _, _>(),
        rows::<allocation::Allocation, _, _, _, _>(),
        rows::<tenant::Tenant, _, _, _, _>(),
        rows::<terminal_session::TerminalSession, _, _, _, _>(),
        rows::<browser_session::BrowserSession, _, _, _, _>(),
        rows::<key_set::KeySet, _, _, _, _>(),
        rows::<billing_account::BillingAccount, _, _, _, _>(),
        rows::<processor_event::ProcessorEvent, _, _, _, _>(),
        rows::<payment::Payment, _, _, _, _>(),
        rows::<notification_endpoint::NotificationEndpoint, _, _, _, _>(),
        rows::<rollout::Rollout, _, _, _, _>(),
    ];
    insta::assert_snapshot!(table.join("\n"));
}

/// What other parts of the service send: the kind of the entity, and the command as it is between members. These lines change only with a
/// release that reads both forms.
const ENCODING: &str = include_str!("commands/encoding.txt");

/// Reads and writes the commands of a machine in [`ENCODING`], which has every instruction and fact of it.
fn check_encoding<
    M: Machine<Command = AnyCommand<R, I, F, S>>,
    R: CommandSort,
    I: CommandSort,
    F: CommandSort,
    S: CommandSort,
>() {
    let of_kind = |line: &&'static str| line.split_once(' ').is_some_and(|(kind, _)| kind == M::KIND.to_string());
    let lines = ENCODING.lines().filter(of_kind).map(|line| &line[M::KIND.to_string().len() + 1..]);
    let mut found = BTreeSet::new();
    for line in lines {
        let command: M::Command = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(serde_json::to_string(&command).unwrap(), line);
        found.insert(line.split('"').nth(3).unwrap());
    }
    assert_eq!(found, I::TAGS.iter().chain(F::TAGS).copied().collect(), "commands to {}", M::KIND);
}

#[test]
fn commands_between_members_have_the_encoding_of_the_previous_release() {
    check_encoding::<node::Node, _, _, _, _>();
    check_encoding::<allocation::Allocation, _, _, _, _>();
    check_encoding::<tenant::Tenant, _, _, _, _>();
    check_encoding::<terminal_session::TerminalSession, _, _, _, _>();
    check_encoding::<browser_session::BrowserSession, _, _, _, _>();
    check_encoding::<key_set::KeySet, _, _, _, _>();
    check_encoding::<billing_account::BillingAccount, _, _, _, _>();
    check_encoding::<processor_event::ProcessorEvent, _, _, _, _>();
    check_encoding::<payment::Payment, _, _, _, _>();
    check_encoding::<notification_endpoint::NotificationEndpoint, _, _, _, _>();
    check_encoding::<rollout::Rollout, _, _, _, _>();
}

#[test]
fn command_is_read_by_its_name_wherever_that_is_among_its_fields() {
    let allocation_id = domain::AllocationId(uuid::Uuid::from_u128(7));
    let unreserve = node::Command::from(node::Instruction::Unreserve { allocation_id });
    let id = allocation_id.0;
    for text in [
        format!(r#"{{"command":"unreserve","allocation_id":"{id}"}}"#),
        format!(r#"{{"allocation_id":"{id}","command":"unreserve"}}"#),
        format!(r#"{{"unknown":[{{}}],"allocation_id":"{id}","command":"unreserve","more":null}}"#),
    ] {
        assert_eq!(serde_json::from_str::<node::Command>(&text).unwrap(), unreserve, "{text}");
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::from_value::<node::Command>(value).unwrap(), unreserve, "{text}");
    }
    assert_eq!(
        serde_json::to_string(&unreserve).unwrap(),
        format!(r#"{{"command":"unreserve","allocation_id":"{id}"}}"#)
    );
    assert_eq!(serde_json::to_string(&node::Command::TICK).unwrap(), r#"{"command":"tick"}"#);
    assert_eq!(serde_json::from_str::<node::Command>(r#"{"command":"tick"}"#).unwrap(), node::Command::TICK);
}

#[test]
fn unreadable_command_is_refused_with_the_field_at_fault() {
    let refused = |value: Value| serde_json::from_value::<allocation::Command>(value).unwrap_err().to_string();
    assert_eq!(refused(json!({})), "missing field `command`");
    assert_eq!(refused(json!({ "command": 7 })), "`command` must be a string");
    assert_eq!(refused(json!({ "command": "poll" })), "no command is named `poll`");
    assert_eq!(refused(json!({ "command": "cleaned", "attempt": 1 })), "missing field `node_id`");
    assert_eq!(
        refused(json!({ "command": "over_quota", "limit": "x" })),
        "invalid type: string \"x\", expected i64",
        "a field after the name"
    );
    assert_eq!(
        refused(json!({ "attempt": "x", "command": "cleaned", "node_id": uuid::Uuid::nil() })),
        "invalid type: string \"x\", expected u32",
        "a field before the name"
    );
    let twice = serde_json::from_str::<allocation::Command>(r#"{"command":"tick","command":"uncover"}"#);
    assert!(twice.unwrap_err().to_string().starts_with("duplicate field `command`"));
    assert!(refused(json!(["tick"])).contains("a command, named by its field `command`"));
}

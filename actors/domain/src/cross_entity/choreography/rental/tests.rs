//! The rental's table against the events, the commands and the policies that it names.

use super::*;
use crate::state_machine::{AnyCommand, CommandSort};
use crate::{Machine, allocation, billing_account, node, tenant};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// The kind of a machine's entity, and the names of its commands in JSON.
fn commands<
    M: Machine<Command = AnyCommand<R, I, F, S>>,
    R: CommandSort,
    I: CommandSort,
    F: CommandSort,
    S: CommandSort,
>() -> (EntityKind, BTreeSet<&'static str>) {
    (M::KIND, R::TAGS.iter().chain(I::TAGS).chain(F::TAGS).chain(S::TAGS).copied().collect())
}

/// The command that follows, with the kind of its entity.
fn command_of(reaction: &Reaction) -> Option<(EntityKind, &'static str)> {
    match reaction {
        Reaction::Allocation(_, fact) => Some((EntityKind::Allocation, fact.tag())),
        Reaction::Node(_, instruction) => Some((EntityKind::Node, instruction.tag())),
        Reaction::Tenant { instruction, .. } => Some((EntityKind::Tenant, instruction.tag())),
        Reaction::Billing { instruction, .. } => Some((EntityKind::BillingAccount, instruction.tag())),
        Reaction::Nothing | Reaction::Place(_) | Reaction::CloseTerminals { .. } => None,
        Reaction::Terminal(..)
        | Reaction::Payment(..)
        | Reaction::CallProcessor(_)
        | Reaction::ApplyProcessorEvent(_)
        | Reaction::ResolveSshKeys { .. }
        | Reaction::SendSshKeys { .. }
        | Reaction::DriveMachine(_)
        | Reaction::CloseBrowserTerminals { .. }
        | Reaction::CloseNodeTerminals { .. }
        | Reaction::Rollout(..)
        | Reaction::FindRolloutNodes(_) => panic!("{reaction:?} is no part of a rental"),
    }
}

/// What follows from the sample of a row's event.
fn sampled(row: &EventConsequences) -> Consequences {
    let found: Vec<_> = Event::samples().iter().filter_map(|event| row.of(event)).collect();
    let [consequences] = found.as_slice() else { panic!("{} is the subject of {} events", row.subject, found.len()) };
    consequences.clone()
}

/// The number of the first commit after that one with this command.
fn number_after(before: usize, command: (EntityKind, &str)) -> Option<usize> {
    let numbered = COMMITS.iter().zip(1_usize..);
    let mut later = numbered.filter(|(commit, number)| (commit.entity, commit.command) == command && *number > before);
    later.next().map(|(_, number)| number)
}

#[test]
fn every_row_has_the_subject_of_its_event_and_is_what_the_reactions_perform() {
    for row in events() {
        let event = Event::samples().into_iter().find(|event| event.subject() == row.subject);
        let event = event.unwrap_or_else(|| panic!("{} is the subject of no event", row.subject));
        assert_eq!(event.consequences(), sampled(row), "{}", row.subject);
    }
}

#[test]
fn every_command_is_one_of_its_entity() {
    let known = BTreeMap::from([
        commands::<allocation::Allocation, _, _, _, _>(),
        commands::<node::Node, _, _, _, _>(),
        commands::<tenant::Tenant, _, _, _, _>(),
        commands::<billing_account::BillingAccount, _, _, _, _>(),
    ]);
    for commit in COMMITS {
        assert!(known[&commit.entity].contains(commit.command), "{} {}", commit.entity, commit.command);
    }
}

#[test]
fn every_reaction_of_the_table_follows_from_an_earlier_commit() {
    let mut reached = BTreeSet::new();
    for (commit, number) in COMMITS.iter().zip(1_usize..) {
        for row in commit.events {
            if let Some(command) = command_of(&sampled(row).reaction) {
                let next = number_after(number, command);
                reached.insert(next.unwrap_or_else(|| panic!("{} leads to no later commit: {command:?}", row.subject)));
            }
        }
        if commit.sender == RentalSender::Reaction {
            assert!(
                reached.contains(&number),
                "nothing leads to commit {number}: {} {}",
                commit.entity,
                commit.command
            );
        }
    }
}

#[test]
fn commits_of_a_rental_are_as_reviewed() {
    let (mut page, mut deadline) = (String::new(), None);
    for (half, title) in [(RentalHalf::Rent, "To the GPUs"), (RentalHalf::Release, "To the proven clean-up")] {
        writeln!(page, "### {title}\n").unwrap();
        for (commit, number) in COMMITS.iter().zip(1_usize..).filter(|(commit, _)| commit.half == half) {
            let sender = match commit.sender {
                RentalSender::User => "the user",
                RentalSender::Placement => "the placement",
                RentalSender::Reaction => "the reaction to an event",
                RentalSender::Agent => "the agent, with its result",
            };
            writeln!(page, "{number}. **`{}`: `{}`**, sent by {sender}.", commit.entity, commit.command).unwrap();
            for row in commit.events {
                let reaction = sampled(row).reaction;
                let follows = match command_of(&reaction) {
                    Some((entity, command)) => {
                        format!("`{entity}`: `{command}` ({})", number_after(number, (entity, command)).unwrap())
                    }
                    None if matches!(reaction, Reaction::Place(_)) => "the placement (2 to 4)".to_owned(),
                    None if matches!(reaction, Reaction::CloseTerminals { .. }) => {
                        "the terminals are closed".to_owned()
                    }
                    None => "for observers".to_owned(),
                };
                writeln!(page, "    - `{}` → {follows}", row.subject).unwrap();
            }
            if let Some(RentalDeadline { policy, outcome }) = commit.deadline.filter(|it| Some(*it) != deadline) {
                writeln!(page, "    - Deadline from here on: `{}`; then {outcome}.", policy.name()).unwrap();
            }
            deadline = commit.deadline;
            writeln!(page, "    - A crash here: {}", commit.after_crash).unwrap();
        }
        writeln!(page).unwrap();
    }
    writeln!(page, "### What else may happen\n\n| event | when | what follows |\n| --- | --- | --- |").unwrap();
    for exception in &EXCEPTIONS {
        let follows = match command_of(&sampled(&exception.event).reaction) {
            Some((entity, command)) => format!("`{entity}`: `{command}`"),
            None => "the user is notified".to_owned(),
        };
        writeln!(page, "| `{}` | {} | {follows} |", exception.event.subject, exception.when).unwrap();
    }
    insta::assert_snapshot!(page);
}

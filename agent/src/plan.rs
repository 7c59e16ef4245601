//! What to do with a task that came in, given what the journal knows of it. Pure: the same question has the same answer.

use wire::task::TaskResult;

use crate::journal::{Phase, Record};

/// The decision.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// Do it. Its effect did not happen, or may happen again, or the control plane asks for another attempt.
    Execute,
    /// This attempt, or a later one, is being executed or reported at this moment.
    UnderWay,
    /// Its effect has happened: send the stored result again, and do nothing else.
    Resend(TaskResult),
    /// An older attempt than the one this agent has begun.
    Stale { begun: u32 },
    /// It began in an earlier life of the agent, its end is unknown, and its type must not happen twice (I5).
    OutcomeUnknown,
}

/// Decides about attempt `attempt` of a task. `under_way` says whether this process executes or reports the recorded attempt.
#[must_use]
pub fn plan(attempt: u32, idempotent: bool, record: Option<&Record>, under_way: bool) -> Plan {
    let Some(record) = record else { return Plan::Execute };
    if attempt > record.attempt {
        return Plan::Execute;
    }
    if under_way {
        return Plan::UnderWay;
    }
    match &record.phase {
        Phase::Done(result) | Phase::Reported(result) => Plan::Resend(result.clone()),
        Phase::Accepted | Phase::Started if attempt < record.attempt => Plan::Stale { begun: record.attempt },
        Phase::Started if !idempotent => Plan::OutcomeUnknown,
        Phase::Accepted | Phase::Started => Plan::Execute,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use proptest::prelude::*;
    use uuid::Uuid;
    use wire::task::{Task, TaskPayload, TaskStatus};

    use super::*;

    fn result(attempt: u32) -> TaskResult {
        TaskResult {
            attempt,
            status: TaskStatus::Succeeded,
            output: serde_json::Map::new(),
            error: None,
            proof: None,
            started_at: chrono::DateTime::UNIX_EPOCH,
            finished_at: chrono::DateTime::UNIX_EPOCH,
        }
    }

    fn record(attempt: u32, phase: Phase) -> Record {
        let payload = TaskPayload {
            node_id: Uuid::nil(),
            task_id: Uuid::nil(),
            attempt,
            issued_at: chrono::DateTime::UNIX_EPOCH,
            expires_at: chrono::DateTime::UNIX_EPOCH,
            origin: None,
            task: Task::Validate {},
        };
        Record { attempt, payload, phase }
    }

    #[test]
    fn every_case_of_the_table() {
        use Plan::{Execute, OutcomeUnknown, Resend, Stale, UnderWay};
        let accepted = || Some(record(2, Phase::Accepted));
        let started = || Some(record(2, Phase::Started));
        let done = || Some(record(2, Phase::Done(result(2))));
        let reported = || Some(record(2, Phase::Reported(result(2))));
        let (yes, no) = (true, false);
        // attempt, idempotent, record, under way, plan
        let table = [
            (1, yes, None, no, Execute),
            (1, no, None, no, Execute),
            (1, yes, accepted(), no, Stale { begun: 2 }),
            (2, yes, accepted(), no, Execute),
            (2, no, accepted(), no, Execute),
            (2, yes, accepted(), yes, UnderWay),
            (3, yes, accepted(), yes, Execute),
            (1, yes, started(), no, Stale { begun: 2 }),
            (2, yes, started(), no, Execute),
            (2, no, started(), no, OutcomeUnknown),
            (3, no, started(), no, Execute),
            (1, yes, started(), yes, UnderWay),
            (2, yes, started(), yes, UnderWay),
            (3, yes, started(), yes, Execute),
            (1, yes, done(), no, Resend(result(2))),
            (2, no, done(), no, Resend(result(2))),
            (2, yes, done(), yes, UnderWay),
            (3, yes, done(), no, Execute),
            (1, yes, reported(), no, Resend(result(2))),
            (2, yes, reported(), no, Resend(result(2))),
            (3, no, reported(), no, Execute),
        ];
        for (row, (attempt, idempotent, record, under_way, expected)) in table.into_iter().enumerate() {
            assert_eq!(plan(attempt, idempotent, record.as_ref(), under_way), expected, "row {row}");
        }
    }

    fn any_record() -> impl Strategy<Value = Record> {
        (0..6_u32, 0..4_u8).prop_map(|(attempt, phase)| {
            let phase = match phase {
                0 => Phase::Accepted,
                1 => Phase::Started,
                2 => Phase::Done(result(attempt)),
                _ => Phase::Reported(result(attempt)),
            };
            record(attempt, phase)
        })
    }

    proptest! {
        #[test]
        fn a_finished_attempt_is_never_executed_again(
            record in any_record(), attempt in 0..6_u32, idempotent: bool, under_way: bool,
        ) {
            let finished = matches!(record.phase, Phase::Done(_) | Phase::Reported(_));
            if finished && attempt <= record.attempt {
                prop_assert_ne!(plan(attempt, idempotent, Some(&record), under_way), Plan::Execute);
            }
        }

        #[test]
        fn what_must_not_happen_twice_is_never_begun_twice_in_one_attempt(
            record in any_record(), under_way: bool,
        ) {
            if record.phase != Phase::Accepted {
                prop_assert_ne!(plan(record.attempt, false, Some(&record), under_way), Plan::Execute);
            }
        }

        #[test]
        fn a_higher_attempt_is_always_executed(record in any_record(), idempotent: bool, under_way: bool) {
            prop_assert_eq!(plan(record.attempt + 1, idempotent, Some(&record), under_way), Plan::Execute);
        }
    }
}

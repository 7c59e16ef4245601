//! What to do with a received task, given the journal's record of it. Pure: the same input has the same result.

use wire::task::TaskResult;

use crate::task_journal::{Phase, TaskRecord};

/// The decision.
#[derive(Debug, Clone, PartialEq)]
pub enum TaskPlan {
    /// Execute it. Its effect did not happen, or may be repeated, or the control plane requests another attempt.
    Execute,
    /// This attempt, or a later one, is being executed or reported at this moment.
    InFlight,
    /// Its effect has happened: resend the stored result, and do nothing else.
    Resend(TaskResult),
    /// An older attempt than the one that this agent has started.
    Stale { begun: u32 },
    /// It was started by an earlier process of the agent, its outcome is unknown, and its type must not be executed twice (I5).
    OutcomeUnknown,
}

/// Decides about attempt `attempt` of a task. `in_flight` says whether this process executes or reports the recorded attempt.
#[must_use]
pub fn plan(attempt: u32, idempotent: bool, record: Option<&TaskRecord>, in_flight: bool) -> TaskPlan {
    let Some(record) = record else { return TaskPlan::Execute };
    if attempt > record.attempt {
        return TaskPlan::Execute;
    }
    if in_flight {
        return TaskPlan::InFlight;
    }
    match &record.phase {
        Phase::Done(result) | Phase::Reported(result) => TaskPlan::Resend(result.clone()),
        Phase::Accepted | Phase::Started if attempt < record.attempt => TaskPlan::Stale { begun: record.attempt },
        Phase::Started if !idempotent => TaskPlan::OutcomeUnknown,
        Phase::Accepted | Phase::Started => TaskPlan::Execute,
    }
}

#[cfg(test)]
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

    fn record(attempt: u32, phase: Phase) -> TaskRecord {
        let payload = TaskPayload {
            node_id: Uuid::nil(),
            task_id: Uuid::nil(),
            attempt,
            issued_at: chrono::DateTime::UNIX_EPOCH,
            expires_at: chrono::DateTime::UNIX_EPOCH,
            origin: None,
            task: Task::Validate { load: None },
        };
        TaskRecord { attempt, payload, phase }
    }

    #[test]
    fn every_case_of_the_table() {
        use TaskPlan::{Execute, InFlight, OutcomeUnknown, Resend, Stale};
        let accepted = || Some(record(2, Phase::Accepted));
        let started = || Some(record(2, Phase::Started));
        let done = || Some(record(2, Phase::Done(result(2))));
        let reported = || Some(record(2, Phase::Reported(result(2))));
        let (yes, no) = (true, false);
        // attempt, idempotent, record, in flight, plan
        let table = [
            (1, yes, None, no, Execute),
            (1, no, None, no, Execute),
            (1, yes, accepted(), no, Stale { begun: 2 }),
            (2, yes, accepted(), no, Execute),
            (2, no, accepted(), no, Execute),
            (2, yes, accepted(), yes, InFlight),
            (3, yes, accepted(), yes, Execute),
            (1, yes, started(), no, Stale { begun: 2 }),
            (2, yes, started(), no, Execute),
            (2, no, started(), no, OutcomeUnknown),
            (3, no, started(), no, Execute),
            (1, yes, started(), yes, InFlight),
            (2, yes, started(), yes, InFlight),
            (3, yes, started(), yes, Execute),
            (1, yes, done(), no, Resend(result(2))),
            (2, no, done(), no, Resend(result(2))),
            (2, yes, done(), yes, InFlight),
            (3, yes, done(), no, Execute),
            (1, yes, reported(), no, Resend(result(2))),
            (2, yes, reported(), no, Resend(result(2))),
            (3, no, reported(), no, Execute),
        ];
        for (row, (attempt, idempotent, record, in_flight, expected)) in table.into_iter().enumerate() {
            assert_eq!(plan(attempt, idempotent, record.as_ref(), in_flight), expected, "row {row}");
        }
    }

    fn any_record() -> impl Strategy<Value = TaskRecord> {
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
            record in any_record(), attempt in 0..6_u32, idempotent: bool, in_flight: bool,
        ) {
            let finished = matches!(record.phase, Phase::Done(_) | Phase::Reported(_));
            if finished && attempt <= record.attempt {
                prop_assert_ne!(plan(attempt, idempotent, Some(&record), in_flight), TaskPlan::Execute);
            }
        }

        #[test]
        fn non_idempotent_task_is_never_started_twice_in_one_attempt(
            record in any_record(), in_flight: bool,
        ) {
            if record.phase != Phase::Accepted {
                prop_assert_ne!(plan(record.attempt, false, Some(&record), in_flight), TaskPlan::Execute);
            }
        }

        #[test]
        fn a_higher_attempt_is_always_executed(record in any_record(), idempotent: bool, in_flight: bool) {
            prop_assert_eq!(plan(record.attempt + 1, idempotent, Some(&record), in_flight), TaskPlan::Execute);
        }
    }
}

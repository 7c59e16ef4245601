//! What a node's history says of an agent's report: the task, then what came of it.

use crate::id::TaskId;

/// The reason that is kept of a report's transition.
pub(super) fn why(task_id: TaskId, outcome: &str) -> String {
    format!("task {task_id}: {outcome}")
}

/// The task and the outcome in the reason of a report's transition. A reason without a task is one of an earlier release.
#[must_use]
pub fn read(why: &str) -> (Option<TaskId>, &str) {
    let parts = why.strip_prefix("task ").and_then(|rest| rest.split_once(": "));
    let parts = parts.and_then(|(id, outcome)| Some((TaskId(id.parse().ok()?), outcome)));
    parts.map_or((None, why), |(id, outcome)| (Some(id), outcome))
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn task_of_a_report_is_read_from_its_reason() {
        let id = TaskId(Uuid::from_u128(7));
        assert_eq!(read(&why(id, "node.reboot failed (x): y: z")), (Some(id), "node.reboot failed (x): y: z"));
        for earlier in ["the agent did node.validate", "task force: failed", ""] {
            assert_eq!(read(earlier), (None, earlier));
        }
    }
}

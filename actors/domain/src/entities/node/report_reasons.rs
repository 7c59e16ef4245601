//! The history's reason of a task result: the task, then its outcome.

use crate::id::TaskId;

/// The stored reason of a result's transition.
pub(super) fn why(task_id: TaskId, outcome: &str) -> String {
    format!("task {task_id}: {outcome}")
}

/// The task and the outcome in the reason of a result's transition. A reason without a task is from an earlier release.
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

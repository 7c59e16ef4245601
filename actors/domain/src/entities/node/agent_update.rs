//! The update of a node's agent: one task at a time, whose result is reported by the agent that runs afterwards.

use super::{CommandName, Node, NodeTask, NodeTaskPhase, Rejection, TaskOutcome};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::RolloutId;
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::state_machine::{Transition, TransitionContext};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What a task `agent.update` orders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentUpdate {
    pub digest: PackageDigest,
    /// Also a version that was rolled back on this machine.
    pub force: bool,
    /// Policy `node.update_commit_seconds` at the order.
    pub commit_seconds: u32,
    /// The rollout that ordered it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout_id: Option<RolloutId>,
}

impl Node {
    pub(super) fn order_update(
        &self,
        digest: PackageDigest,
        force: bool,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        if self.life.has_no_identity() || self.life.is_gone() {
            return Err(self.wrong_state(CommandName::UpdateAgent));
        }
        if let Some(task) = self.latest_update().filter(|task| !task.has_ended()) {
            return Err(Rejection::UpdateInProgress { task_id: task.work.task_id });
        }
        let commit = ctx.policy.int(PolicyKey::NodeUpdateCommit, &Scopes::global(), ctx.now);
        let commit_seconds = u32::try_from(commit).unwrap_or(u32::MAX);
        let update = AgentUpdate { digest: digest.clone(), force, commit_seconds, rollout_id: None };
        let (next, task_id) = self.with_task(TaskType::AgentUpdate, Some(update), ctx)?;
        let metadata = json!({ "task_id": task_id, "digest": digest, "forced": force, "reason": reason });
        let audit = self.audit(AuditAction::NodesUpdateAgent, metadata);
        Ok(next.task_transition(task_id, format!("the update of its agent was ordered: {reason}")).audit(audit))
    }

    /// The latest update of its agent that is remembered: open, or with its result.
    #[must_use]
    pub fn latest_update(&self) -> Option<&NodeTask> {
        // Ids ascend with time.
        self.tasks.values().rev().find(|task| task.task_type == TaskType::AgentUpdate)
    }

    /// What follows from the result of an update.
    pub(super) fn update_event(&self, task: &NodeTask, verdict: &TaskOutcome) -> Option<Event> {
        let AgentUpdate { digest, rollout_id, .. } = task.update.clone()?;
        let node_id = self.id;
        Some(match verdict {
            TaskOutcome::Succeeded { .. } => Event::AgentUpdated { node_id, digest, rollout_id },
            TaskOutcome::Failed { code, .. } => {
                Event::AgentUpdateFailed { node_id, digest, reason: super::tenancy::reason_code(code), rollout_id }
            }
        })
    }
}

impl NodeTask {
    /// The result of an update that failed: its code and its message.
    #[must_use]
    pub fn failure(&self) -> Option<(&str, &str)> {
        match &self.phase {
            NodeTaskPhase::Ended { verdict: TaskOutcome::Failed { code, message }, .. } => Some((code, message)),
            NodeTaskPhase::Ended { verdict: TaskOutcome::Succeeded { .. }, .. }
            | NodeTaskPhase::Open
            | NodeTaskPhase::AwaitsOperator { .. } => None,
        }
    }
}

//! The task types that the node's agent supports. A task of another type is not dispatched: agents from before the type would skip it
//! silently, and it would be offered for ever.

use super::{AgentContact, Node, TaskKind};
use crate::task_type::TaskType;

impl AgentContact {
    /// Whether the agent supports tasks of this type: as it reports, or else as agents of its protocol do.
    #[must_use]
    pub fn supports(&self, task_type: TaskType) -> bool {
        match &self.task_types {
            Some(names) => names.contains(task_type.name()),
            None => task_type.since().is_some_and(|since| since <= self.protocol),
        }
    }
}

impl TaskKind {
    #[must_use]
    pub const fn task_type(&self) -> TaskType {
        match self {
            Self::Provision { .. } => TaskType::AllocationProvision,
            Self::ReconcileLogins { .. } => TaskType::SshKeysReconcile,
            Self::Release { .. } => TaskType::AllocationRelease,
            Self::OpenTerminal { .. } => TaskType::TerminalOpen,
            Self::OfNode { task_type, .. } => *task_type,
        }
    }
}

impl Node {
    /// Why a task of this type waits, in a sentence for an operator, where the agent of the last contact does not support it.
    #[must_use]
    pub fn lacks_task_type(&self, task_type: TaskType) -> Option<String> {
        let seen = self.seen.as_ref().filter(|seen| !seen.supports(task_type))?;
        let (version, protocol) = (&seen.agent_version, seen.protocol);
        Some(format!("the agent (version {version}, protocol {protocol}) has no task {task_type}: upgrade it"))
    }
}

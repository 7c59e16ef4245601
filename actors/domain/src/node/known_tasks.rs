//! Which types of task the node's agent does. One that it does not know is not handed to it: agents of before such a type was thought of
//! pass over it without a word, and would be offered it for ever.

use super::{Node, Seen, What};
use crate::task_type::TaskType;

impl Seen {
    /// Whether the agent does tasks of this type: as it says itself, or else as agents of its protocol do.
    #[must_use]
    pub fn does(&self, task_type: TaskType) -> bool {
        match &self.task_types {
            Some(names) => names.contains(task_type.name()),
            None => task_type.since().is_some_and(|since| since <= self.protocol),
        }
    }
}

impl What {
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
    /// Why a task of this type waits, in a sentence for an operator, where the agent that was heard last does not do it.
    #[must_use]
    pub fn withholds(&self, task_type: TaskType) -> Option<String> {
        let seen = self.seen.as_ref().filter(|seen| !seen.does(task_type))?;
        let (version, protocol) = (&seen.agent_version, seen.protocol);
        Some(format!("the agent (version {version}, protocol {protocol}) has no task {task_type}: upgrade it"))
    }
}

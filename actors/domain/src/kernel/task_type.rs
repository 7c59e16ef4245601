//! Every task type of agents, as one table: its name on the wire, and what happens with a dispatched task that has no result in time
//! (decisions 4, *Task types*; specification, *Limits*).

use serde::{Deserialize, Serialize};
use std::fmt;

/// What happens with an overdue task without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum StaleTaskAction {
    /// Its effect may happen twice: it is dispatched again with a higher attempt.
    Requeue,
    /// No client waits for it any more.
    Expire,
    /// Its effect must not happen twice, and it is unknown whether it happened: an operator checks and resumes it.
    AwaitOperator,
}

impl StaleTaskAction {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        self.into_str()
    }
}

macro_rules! task_types {
    ($($variant:ident $name:literal $when_stale:ident: $what:literal;)+) => {
        /// A type of task.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum TaskType {
            $(#[doc = $what] #[serde(rename = $name)] $variant,)+
        }

        impl TaskType {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            #[must_use]
            pub const fn when_stale(self) -> StaleTaskAction {
                match self { $(Self::$variant => StaleTaskAction::$when_stale),+ }
            }

            /// What the agent does.
            #[must_use]
            pub const fn what(self) -> &'static str {
                match self { $(Self::$variant => $what),+ }
            }
        }
    };
}

task_types! {
    AllocationProvision "allocation.provision" Requeue: "makes a tenant's place";
    AllocationRelease "allocation.release" Requeue: "removes a tenant's place and proves that nothing is left";
    SshKeysReconcile "ssh_keys.reconcile" Requeue: "writes the keys that open a tenant's login";
    NodeValidate "node.validate" Requeue: "looks whether the machine is fit for tenants";
    DiagnosticsCollect "diagnostics.collect" Requeue: "says how the machine and its tenants stand";
    TerminalOpen "terminal.open" Expire: "opens a tenant's terminal";
    AgentUpdate "agent.update" AwaitOperator: "replaces the agent";
    NodeReboot "node.reboot" AwaitOperator: "restarts the machine";
    NodeGpuReset "node.gpu_reset" Requeue: "resets a GPU that no tenant holds";
}

impl TaskType {
    /// The first protocol whose agents support it, where they do not report their task types; `None` where such an agent never does.
    #[must_use]
    pub const fn since(self) -> Option<u16> {
        match self {
            Self::AllocationProvision | Self::AllocationRelease | Self::NodeValidate => Some(1),
            Self::DiagnosticsCollect | Self::TerminalOpen | Self::NodeReboot | Self::SshKeysReconcile => Some(3),
            Self::AgentUpdate | Self::NodeGpuReset => None,
        }
    }

    /// The types that an administrator orders for a node. The others follow from actions on allocations, and from orders of their own.
    pub const ORDERED: [Self; 3] = [Self::NodeValidate, Self::DiagnosticsCollect, Self::NodeReboot];

    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|task_type| task_type.name() == name)
    }
}

impl fmt::Display for TaskType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    #[test]
    fn the_table_of_task_types_is_as_reviewed() {
        let mut table = String::new();
        for task_type in TaskType::ALL {
            let (name, stale, what) = (task_type.name(), task_type.when_stale().as_str(), task_type.what());
            let ordered = if TaskType::ORDERED.contains(task_type) { " (ordered by administrators)" } else { "" };
            let since = task_type.since().map_or_else(|| "never".to_owned(), |since| since.to_string());
            writeln!(table, "{name}: {stale}; {what}{ordered}; {since}").unwrap();
            assert_eq!(serde_json::to_string(task_type).unwrap(), format!("{name:?}"));
            assert_eq!(TaskType::parse(name), Some(*task_type));
        }
        insta::assert_snapshot!(table, @r"
        allocation.provision: requeue; makes a tenant's place; 1
        allocation.release: requeue; removes a tenant's place and proves that nothing is left; 1
        ssh_keys.reconcile: requeue; writes the keys that open a tenant's login; 3
        node.validate: requeue; looks whether the machine is fit for tenants (ordered by administrators); 1
        diagnostics.collect: requeue; says how the machine and its tenants stand (ordered by administrators); 3
        terminal.open: expire; opens a tenant's terminal; 3
        agent.update: await_operator; replaces the agent; never
        node.reboot: await_operator; restarts the machine (ordered by administrators); 3
        node.gpu_reset: requeue; resets a GPU that no tenant holds; never
        ");
    }
}

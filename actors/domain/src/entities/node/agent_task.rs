//! The tasks of an agent, and their results: what the edge signs, dispatches and receives.

use crate::hardware::Placement;
use crate::id::{AllocationId, RolloutId, TaskId, TerminalSessionId};
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::reason_code;
use crate::recording::RecordingTerms;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{RequestOrigin, Timestamp, TransitionContext};
use crate::task_type::TaskType;
use crate::validation::ValidationLevel;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};

/// A task without a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingTask {
    pub task_id: TaskId,
    pub attempt: u32,
    pub ordered_at: Timestamp,
    pub deadline_at: Timestamp,
    /// The request that caused it: the agent's log lines and its result carry its ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<RequestOrigin>,
}

/// A task as the edge signs it for the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentTask {
    pub work: PendingTask,
    pub what: TaskKind,
}

impl AgentTask {
    /// The allocation of the task, if any.
    #[must_use]
    pub const fn allocation_id(&self) -> Option<AllocationId> {
        match &self.what {
            TaskKind::Provision { place, .. }
            | TaskKind::ReconcileLogins { place, .. }
            | TaskKind::Release { place }
            | TaskKind::OpenTerminal { place, .. } => Some(place.allocation_id),
            TaskKind::OfNode { .. } => None,
        }
    }
}

/// A tenant's place on the node, as the agent creates and removes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantSlot {
    pub allocation_id: AllocationId,
    pub placed: Placement,
    pub sku: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum TaskKind {
    Provision {
        place: TenantSlot,
        keys: Vec<AuthorizedKey>,
    },
    ReconcileLogins {
        place: TenantSlot,
        keys: Vec<AuthorizedKey>,
    },
    Release {
        place: TenantSlot,
    },
    /// A task of the node itself, ordered by an administrator while the machine was in this boot.
    OfNode {
        task_type: TaskType,
        boot_id: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        update: Option<AgentUpdate>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        validation: Option<ValidationOrder>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu_uuid: Option<String>,
    },
    OpenTerminal {
        place: TenantSlot,
        session_id: TerminalSessionId,
        ends_at: Timestamp,
        #[serde(default)]
        recording: RecordingTerms,
    },
}

/// The outcome of a task, as the agent reports it. The edge has verified the signature of a clean-up proof before it passes `proof`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "snake_case")]
pub enum TaskOutcome {
    Succeeded {
        /// A release succeeds only with a verified proof that nothing is left.
        proof: Option<AllocationId>,
    },
    Failed {
        code: String,
        message: String,
    },
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

/// The load of a task `node.validate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValidationOrder {
    pub level: ValidationLevel,
    /// How long all loads of a deep validation may take together.
    pub load_seconds: u32,
}

impl ValidationOrder {
    /// A validation of this level, as the policy of this moment has it.
    pub(super) fn new(level: ValidationLevel, ctx: &TransitionContext<'_>) -> Self {
        let load_seconds = match level {
            ValidationLevel::Quick => 0,
            ValidationLevel::Deep => {
                let seconds = ctx.policy.int(PolicyKey::NodeDeepValidation, &Scopes::global(), ctx.now);
                u32::try_from(seconds).unwrap_or(u32::MAX)
            }
        };
        Self { level, load_seconds }
    }

    pub(super) fn load_time(&self) -> TimeDelta {
        TimeDelta::seconds(self.load_seconds.into())
    }
}

/// The agent's cause, where it is a code: an event carries no free text of an agent. That is in the history.
pub(super) fn reason_code(code: &str) -> String {
    if reason_code::is_snake_case(code) { code.to_owned() } else { "agent_error".to_owned() }
}

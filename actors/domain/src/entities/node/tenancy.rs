//! The allocations on the node's GPUs, and the tasks that set tenants up and clean them up.

use super::{AgentUpdate, Evacuation, HoldSshAccess, Node, Phase, Reply, TerminalTask, ValidationOrder};
use crate::event::Event;
use crate::hardware::Placement;
use crate::id::{AllocationId, TaskId, TerminalSessionId};
use crate::reason_code;
use crate::recording::RecordingTerms;
use crate::resend_timer::ResendTimer;
use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{RequestOrigin, Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

mod clean_up;
mod reservation;
mod tenant_tasks;

/// One allocation's hold on GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub placed: Placement,
    pub keys: Vec<AuthorizedKey>,
    /// The revision of the keys, and what the agent has written of it.
    #[serde(default)]
    pub logins: HoldSshAccess,
    pub phase: HoldPhase,
    /// When the node asks the allocation again whether it wants the hold.
    #[serde(default)]
    pub again: Option<ResendTimer>,
    /// Terminal sessions that the agent is to start.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub terminals: BTreeMap<TerminalSessionId, TerminalTask>,
    /// What the last clean-up attempt left, as the agent describes it.
    #[serde(default)]
    pub remains: Option<String>,
    /// The machine is reinstalled after this tenant.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reimages: bool,
    /// Its tenant is asked to leave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evacuation: Option<Evacuation>,
}

impl Hold {
    /// No allocation is asked about an abandoned tenant: its clean-up stays dispatched to the agent.
    const fn active_resend_timer(&self) -> Option<ResendTimer> {
        match self.phase {
            HoldPhase::Abandoned { .. } => None,
            HoldPhase::Reserved
            | HoldPhase::Provisioning { .. }
            | HoldPhase::Ready
            | HoldPhase::SetupFailed { .. }
            | HoldPhase::Releasing { .. }
            | HoldPhase::ReleaseFailed { .. } => self.again,
        }
    }
}

/// The phase of a tenant on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "snake_case")]
pub enum HoldPhase {
    /// The devices are reserved; the agent has no task yet.
    Reserved,
    Provisioning {
        work: PendingTask,
    },
    Ready,
    /// The agent could not set the tenant up. What it did stays until the allocation requests the clean-up.
    SetupFailed {
        reason: String,
        detail: String,
    },
    Releasing {
        work: PendingTask,
    },
    /// The clean-up failed; the next attempt comes from the allocation.
    ReleaseFailed {
        work: PendingTask,
    },
    /// A tenant without an allocation, and without a clean-up proof: released by force, or set up for an allocation that does not want it.
    /// The clean-up stays dispatched to the agent.
    Abandoned {
        work: PendingTask,
    },
}

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

impl Node {
    /// Whether it serves its tenants. A quarantined node only cleans up.
    const fn in_service(&self) -> bool {
        matches!(self.life, Phase::Active | Phase::Offline | Phase::Draining { .. })
    }

    /// The first allocation that is on the node. An abandoned tenant belongs to none.
    pub(super) fn in_use(&self) -> Option<AllocationId> {
        self.holds
            .iter()
            .find(|(_, hold)| !matches!(hold.phase, HoldPhase::Abandoned { .. }))
            .map(|(allocation_id, _)| *allocation_id)
    }

    fn has_unproven(&self) -> bool {
        self.holds
            .values()
            .any(|hold| matches!(hold.phase, HoldPhase::ReleaseFailed { .. } | HoldPhase::Abandoned { .. }))
    }

    /// When it asks next whether one of its holds is still wanted.
    pub(super) fn next_resend_at(&self) -> Option<Timestamp> {
        self.holds.values().filter_map(Hold::active_resend_timer).map(|again| again.at).min()
    }

    /// Messages between a node and an allocation may have been lost. So the node periodically publishes its holds; the allocation answers
    /// if it does not want them.
    pub(super) fn confirm_holds(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = step.next.clone().unwrap_or_else(|| self.clone());
        let mut asked = Vec::new();
        for (allocation_id, hold) in &mut next.holds {
            if let Some(again) = hold.active_resend_timer().filter(|again| again.is_due(ctx.now)) {
                hold.again = Some(again.next(ctx.now));
                let (allocation_id, placed) = (*allocation_id, hold.placed.clone());
                asked.push(Event::DevicesReserved { node_id: self.id, allocation_id, placed });
            }
        }
        if asked.is_empty() {
            return step;
        }
        let why =
            if step.next.is_some() { step.why.clone() } else { "asking whether its tenants are wanted".to_owned() };
        asked.into_iter().fold(Transition { next: Some(next), why, ..step }, Transition::event)
    }

    fn is_in(&self, allocation_id: AllocationId, phase: &HoldPhase) -> bool {
        self.holds.get(&allocation_id).is_some_and(|hold| hold.phase == *phase)
    }

    pub(super) fn with_phase(
        &self,
        allocation_id: AllocationId,
        phase: HoldPhase,
        why: impl Into<String>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        if let Some(hold) = next.holds.get_mut(&allocation_id) {
            hold.phase = phase;
        }
        Transition::to(next, Reply::Done, why)
    }
}

/// The agent's cause, where it is a code: an event carries no free text of an agent. That is in the history.
pub(super) fn reason_code(code: &str) -> String {
    if reason_code::is_snake_case(code) { code.to_owned() } else { "agent_error".to_owned() }
}

/// The login of an allocation on its node: short enough for every system, and derived from the id alone so that it is unique.
#[must_use]
pub fn user_name(allocation_id: AllocationId) -> String {
    let id = allocation_id.0.as_simple().to_string();
    format!("gpu-{}", &id[id.len() - 16..])
}

//! The node's part in a rollout: one update, however often it is ordered, and an answer to every order.

use super::{AgentUpdate, Node, NodeSoak, NodeTaskPhase, Phase, Reply, TaskOutcome};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::{RolloutId, TaskId};
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::rollout_outcome::{RolloutOutcome, SkipReason, failure};
use crate::state_machine::{Effect, Transition, TransitionContext};
use crate::task_type::TaskType;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The bound of rollouts that are remembered. One runs at a time, so that an order of an earlier one can only be late.
const MAX_REMEMBERED: usize = 4;

/// A rollout that has ordered an update of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRollout {
    pub rollout_id: RolloutId,
    /// `None` while the update has no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<RolloutOutcome>,
    /// While the rollout watches the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soak: Option<NodeSoak>,
}

/// What a rollout orders of a node.
pub(super) struct RolloutUpdate {
    pub(super) rollout_id: RolloutId,
    pub(super) digest: PackageDigest,
    pub(super) soaks: bool,
    pub(super) includes_held: bool,
}

/// The term of every node that a rollout has ordered an update of.
#[must_use]
pub fn rollout_term(rollout_id: RolloutId) -> String {
    format!("rollout/{rollout_id}")
}

impl Node {
    /// Why a rollout of this version does not update the node; `None` where it does. Silence of a held node shows only at the order.
    #[must_use]
    pub fn rollout_skip(&self, digest: &PackageDigest, includes_held: bool) -> Option<SkipReason> {
        match &self.life {
            Phase::Active => {}
            // It was held while it was offline, and no state shows that it is back.
            Phase::Quarantined { was }
                if includes_held
                    && self.is_held_by_faults_alone()
                    && matches!(**was, Phase::Active | Phase::Offline) => {}
            Phase::Registered | Phase::BootstrapIssued { .. } | Phase::Enrolling { .. } => {
                return Some(SkipReason::NotActive);
            }
            Phase::Offline => return Some(SkipReason::Offline),
            Phase::Draining { .. } => return Some(SkipReason::Draining),
            Phase::Quarantined { .. } => return Some(SkipReason::Quarantined),
            Phase::Retired => return Some(SkipReason::Retired),
            Phase::Removing { .. } | Phase::Removed => return Some(SkipReason::Removed),
        }
        if self.latest_update().is_some_and(|task| !task.has_ended()) {
            return Some(SkipReason::UpdateInProgress);
        }
        match self.seen.as_ref().and_then(|seen| seen.package_digest.as_ref()) {
            Some(in_use) if in_use == digest => Some(SkipReason::UpToDate),
            Some(_) => self.lacks_task_type(TaskType::AgentUpdate).map(|_| SkipReason::Unsupported),
            // No package installed it, and so it would refuse the task.
            None => Some(SkipReason::Unsupported),
        }
    }

    /// True where every hold is of an author whose fault another version of the agent may end, or may have caused.
    fn is_held_by_faults_alone(&self) -> bool {
        self.quarantine_holds().iter().all(|hold| hold.author.is_of_a_fault())
    }

    /// An order of a rollout, perhaps a repeated one.
    pub(super) fn update_for_rollout(&self, order: &RolloutUpdate, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let rollout_id = order.rollout_id;
        match self.rollouts.iter().find(|known| known.rollout_id == rollout_id) {
            Some(NodeRollout { outcome: Some(outcome), .. }) => self.answer_rollout(rollout_id, outcome.clone()),
            Some(NodeRollout { outcome: None, .. }) if self.has_open_update(rollout_id) => {
                Transition::stay(Reply::Done)
            }
            // The task is gone without a result.
            Some(NodeRollout { outcome: None, .. }) => {
                let outcome = match self.rollout_skip(&order.digest, order.includes_held) {
                    Some(reason @ SkipReason::Removed) => RolloutOutcome::Skipped { reason },
                    Some(_) | None => RolloutOutcome::Failed { reason: failure::NO_RESULT.to_owned() },
                };
                let mut next = self.clone();
                next.record_rollout(rollout_id, Some(outcome.clone()));
                next.answer_rollout(rollout_id, outcome)
            }
            None => self.begin_rollout_update(order, ctx),
        }
    }

    fn begin_rollout_update(&self, order: &RolloutUpdate, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let RolloutUpdate { rollout_id, ref digest, soaks, includes_held } = *order;
        let mut next = self.clone();
        let commit = ctx.policy.int(PolicyKey::NodeUpdateCommit, &Scopes::global(), ctx.now);
        let update = AgentUpdate {
            digest: digest.clone(),
            force: false,
            commit_seconds: u32::try_from(commit).unwrap_or(u32::MAX),
            rollout_id: Some(rollout_id),
        };
        let is_held = matches!(self.life, Phase::Quarantined { .. });
        let is_silent = || self.seen.as_ref().is_none_or(|seen| seen.silent_at <= ctx.now);
        let begun = match self.rollout_skip(digest, includes_held) {
            Some(reason) => Err(reason),
            // No timer watches the contact of a node in quarantine.
            None if is_held && is_silent() => Err(SkipReason::Offline),
            None => next.add_task(TaskType::AgentUpdate, Some(update), ctx).ok_or(SkipReason::TooManyTasks),
        };
        let task_id = match begun {
            Ok(task_id) => task_id,
            Err(reason) => {
                // It is remembered, so that a late repetition of the order begins nothing.
                let outcome = RolloutOutcome::Skipped { reason };
                next.record_rollout(rollout_id, Some(outcome.clone()));
                return next.answer_rollout(rollout_id, outcome);
            }
        };
        next.record_rollout(rollout_id, None);
        if let Some(known) = next.rollouts.last_mut().filter(|_| soaks) {
            known.soak = Some(NodeSoak { since: ctx.now, fault: None });
        }
        let metadata = json!({ "task_id": task_id, "digest": digest, "forced": false, "rollout_id": rollout_id });
        let audit = self.audit(AuditAction::NodesUpdateAgent, metadata);
        let why = format!("rollout {rollout_id} ordered the update of its agent");
        Transition::to(next, Reply::Done, why).audit(audit).effect(Effect::WakeNode(self.id))
    }

    /// Remembers the result of a task where a rollout has ordered it.
    pub(super) fn end_rollout_update(&mut self, task_id: TaskId, verdict: &TaskOutcome) {
        let Some(rollout_id) = self.rollout_of(task_id) else { return };
        let outcome = match verdict {
            TaskOutcome::Succeeded { .. } => RolloutOutcome::Updated,
            TaskOutcome::Failed { code, .. } => RolloutOutcome::of_failure(code),
        };
        self.record_rollout(rollout_id, Some(outcome));
    }

    /// A task has no result in time: its rollout counts it as failed.
    pub(super) fn stall_rollout_update(&mut self, task_id: TaskId) -> Option<Event> {
        let rollout_id = self.rollout_of(task_id)?;
        let outcome = RolloutOutcome::Failed { reason: failure::NO_RESULT.to_owned() };
        self.record_rollout(rollout_id, Some(outcome.clone()));
        Some(Event::RolloutNodeEnded { node_id: self.id, rollout_id, outcome })
    }

    fn rollout_of(&self, task_id: TaskId) -> Option<RolloutId> {
        self.tasks.get(&task_id)?.update.as_ref()?.rollout_id
    }

    fn has_open_update(&self, rollout_id: RolloutId) -> bool {
        self.tasks.values().any(|task| {
            let is_of_it = task.update.as_ref().is_some_and(|update| update.rollout_id == Some(rollout_id));
            is_of_it && matches!(task.phase, NodeTaskPhase::Open | NodeTaskPhase::AwaitsOperator { .. })
        })
    }

    fn record_rollout(&mut self, rollout_id: RolloutId, outcome: Option<RolloutOutcome>) {
        match self.rollouts.iter_mut().find(|known| known.rollout_id == rollout_id) {
            Some(known) => known.outcome = outcome,
            None => self.rollouts.push(NodeRollout { rollout_id, outcome, soak: None }),
        }
        let surplus = self.rollouts.len().saturating_sub(MAX_REMEMBERED);
        self.rollouts.drain(..surplus);
    }

    fn answer_rollout(&self, rollout_id: RolloutId, outcome: RolloutOutcome) -> Transition<Self> {
        let event = Event::RolloutNodeEnded { node_id: self.id, rollout_id, outcome };
        Transition::to(self.clone(), Reply::Done, format!("rollout {rollout_id} was answered")).event(event)
    }
}

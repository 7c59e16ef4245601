//! The node's part in a rollout: one update, however often it is ordered, an answer to every order, and one report of a fault in its soak
//! (decision 0058).

use super::{AgentUpdate, Node, NodeRollout, Phase, Reply, TaskSubject};
use crate::audit::AuditAction;
use crate::event::Event;
use crate::id::RolloutId;
use crate::package_digest::PackageDigest;
use crate::policy::{PolicyKey, Scopes};
use crate::rollout_outcome::{RolloutOutcome, SkipReason, failure};
use crate::state_machine::{Effect, Timestamp, Transition, TransitionContext};
use crate::task_type::TaskType;
use serde_json::json;

/// What a rollout orders of a node.
pub(super) struct RolloutUpdate {
    pub(super) rollout_id: RolloutId,
    pub(super) digest: PackageDigest,
    pub(super) soaks: bool,
    pub(super) includes_held: bool,
}

impl Node {
    /// Why a rollout of this version does not update the node; `None` where it does. Silence of a held node shows only at the order.
    #[must_use]
    pub fn rollout_skip(&self, digest: &PackageDigest, includes_held: bool) -> Option<SkipReason> {
        match &self.lifecycle.phase {
            Phase::Active => {}
            // It was held while it was offline, and no state shows that it is back.
            Phase::Quarantined { was }
                if includes_held
                    && self.lifecycle.is_held_by_faults_alone()
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
        if self.tasks.latest_update().is_some_and(|task| !task.has_ended()) {
            return Some(SkipReason::UpdateInProgress);
        }
        match self.agent.contact.as_ref().and_then(|seen| seen.package_digest.as_ref()) {
            Some(in_use) if in_use == digest => Some(SkipReason::UpToDate),
            Some(_) => self.agent.lacks_task_type(TaskType::AgentUpdate).map(|_| SkipReason::Unsupported),
            // No package installed it, and so it would refuse the task.
            None => Some(SkipReason::Unsupported),
        }
    }

    /// An order of a rollout, perhaps a repeated one.
    pub(super) fn update_for_rollout(&self, order: &RolloutUpdate, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let rollout_id = order.rollout_id;
        match self.agent.rollout(rollout_id) {
            Some(NodeRollout { outcome: Some(outcome), .. }) => self.answer_rollout(rollout_id, outcome.clone()),
            Some(NodeRollout { outcome: None, .. }) if self.tasks.has_open_update_of(rollout_id) => {
                Transition::stay(Reply::Done)
            }
            // The task is gone without a result.
            Some(NodeRollout { outcome: None, .. }) => {
                let outcome = match self.rollout_skip(&order.digest, order.includes_held) {
                    Some(reason @ SkipReason::Removed) => RolloutOutcome::Skipped { reason },
                    Some(_) | None => RolloutOutcome::Failed { reason: failure::NO_RESULT.to_owned() },
                };
                let mut next = self.clone();
                next.agent.record_rollout(rollout_id, Some(outcome.clone()));
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
        let is_held = matches!(self.lifecycle.phase, Phase::Quarantined { .. });
        let begun = match self.rollout_skip(digest, includes_held) {
            Some(reason) => Err(reason),
            // No timer watches the contact of a node in quarantine.
            None if is_held && self.agent.is_silent(ctx.now) => Err(SkipReason::Offline),
            None => next
                .add_task(TaskType::AgentUpdate, TaskSubject { update: Some(update), ..TaskSubject::default() }, ctx)
                .ok_or(SkipReason::TooManyTasks),
        };
        let task_id = match begun {
            Ok(task_id) => task_id,
            Err(reason) => {
                // It is remembered, so that a late repetition of the order begins nothing.
                let outcome = RolloutOutcome::Skipped { reason };
                next.agent.record_rollout(rollout_id, Some(outcome.clone()));
                return next.answer_rollout(rollout_id, outcome);
            }
        };
        next.agent.record_rollout(rollout_id, None);
        if soaks {
            next.agent.begin_soak(ctx.now);
        }
        let metadata = json!({ "task_id": task_id, "digest": digest, "forced": false, "rollout_id": rollout_id });
        let audit = self.audit(AuditAction::NodesUpdateAgent, metadata);
        let why = format!("rollout {rollout_id} ordered the update of its agent");
        Transition::to(next, Reply::Done, why).audit(audit).effect(Effect::WakeNode(self.id))
    }

    fn answer_rollout(&self, rollout_id: RolloutId, outcome: RolloutOutcome) -> Transition<Self> {
        let event = Event::RolloutNodeEnded { node_id: self.id, rollout_id, outcome };
        Transition::to(self.clone(), Reply::Done, format!("rollout {rollout_id} was answered")).event(event)
    }

    /// The rollout asks whether the node is in order, perhaps once more.
    pub(super) fn check_for_rollout(&self, rollout_id: RolloutId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        next.note_rollout_fault(ctx);
        let fault = next.agent.end_soak(rollout_id);
        let why = fault.as_ref().map_or_else(
            || format!("rollout {rollout_id} was answered: the node is in order"),
            |fault| format!("rollout {rollout_id} was answered: {fault}"),
        );
        let event = Event::RolloutNodeSoaked { node_id: self.id, rollout_id, fault };
        Transition::to(next, Reply::Done, why).event(event)
    }

    /// The transition, with a fault that it has shown in the soak of a rollout.
    pub(super) fn watched_for_rollout(&self, step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let Some(mut next) = step.next.clone() else { return step };
        match next.note_rollout_fault(ctx) {
            Some(event) => Transition { next: Some(next), ..step }.event(event),
            None => step,
        }
    }

    fn note_rollout_fault(&mut self, ctx: &TransitionContext<'_>) -> Option<Event> {
        let since = self.agent.soaks_since()?;
        let fault = self.fault_since(since, ctx.now)?;
        let rollout_id = self.agent.record_soak_fault(&fault)?;
        Some(Event::RolloutNodeSoaked { node_id: self.id, rollout_id, fault: Some(fault) })
    }

    /// The fault of a machine that is in service.
    fn fault_since(&self, since: Timestamp, now: Timestamp) -> Option<String> {
        match self.lifecycle.phase {
            Phase::Active | Phase::Draining { .. } | Phase::Quarantined { .. } => {}
            Phase::Offline => return Some(failure::OFFLINE.to_owned()),
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => return None,
        }
        if let Some(finding) = self.health.rollout_fault_since(since) {
            return Some(finding);
        }
        // In these states no timer watches its contact.
        let is_silent = self.agent.silent_since(now).is_some();
        (is_silent || self.agent.unmonitored_since().is_some()).then(|| failure::OFFLINE.to_owned())
    }
}

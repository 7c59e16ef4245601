//! The soak of a rollout at a node that has its version: a fault of the machine is reported to the rollout once, until it has asked whether the
//! node is in order (decision 0058).

use super::{Node, NodeFinding, Phase, Reply};
use crate::event::Event;
use crate::finding::FindingClass;
use crate::id::RolloutId;
use crate::rollout_outcome::{RolloutOutcome, failure};
use crate::state_machine::{Timestamp, Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// The classes of findings that stop a rollout.
const STOPPING: [FindingClass; 3] = [FindingClass::Evacuate, FindingClass::BillingCredit, FindingClass::Quarantine];

/// The watch over a node for a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSoak {
    /// When the update was ordered. What was found before is no consequence of it.
    pub since: Timestamp,
    /// The first fault since then: `offline`, or the finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

impl Node {
    /// The rollout asks whether the node is in order, perhaps once more.
    pub(super) fn check_for_rollout(&self, rollout_id: RolloutId, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        next.note_rollout_fault(ctx);
        let known = next.rollouts.iter_mut().find(|known| known.rollout_id == rollout_id);
        let fault = known.and_then(|known| {
            let fault = known.soak.as_ref()?.fault.clone();
            if fault.is_none() {
                known.soak = None;
            }
            fault
        });
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
        // One rollout at a time has not ended.
        let index = self.rollouts.len().checked_sub(1)?;
        let known = &self.rollouts[index];
        let soak = known.soak.as_ref().filter(|soak| soak.fault.is_none())?;
        if known.outcome != Some(RolloutOutcome::Updated) {
            return None;
        }
        let fault = self.fault_since(soak.since, ctx.now)?;
        let known = &mut self.rollouts[index];
        known.soak.as_mut()?.fault = Some(fault.clone());
        Some(Event::RolloutNodeSoaked { node_id: self.id, rollout_id: known.rollout_id, fault: Some(fault) })
    }

    /// The fault of a machine that is in service.
    fn fault_since(&self, since: Timestamp, now: Timestamp) -> Option<String> {
        match self.life {
            Phase::Active | Phase::Draining { .. } | Phase::Quarantined { .. } => {}
            Phase::Offline => return Some(failure::OFFLINE.to_owned()),
            Phase::Registered
            | Phase::BootstrapIssued { .. }
            | Phase::Enrolling { .. }
            | Phase::Retired
            | Phase::Removing { .. }
            | Phase::Removed => return None,
        }
        let stops =
            |known: &&NodeFinding| known.opened_at >= since && STOPPING.into_iter().any(|class| known.has(class));
        if let Some(known) = self.findings.iter().find(stops) {
            return Some(format!("{}/{}", known.reported.probe, known.reported.code));
        }
        // In these states no timer watches its contact.
        let is_silent = self.seen.as_ref().is_some_and(|seen| seen.silent_at <= now);
        (is_silent || self.unmonitored_since().is_some()).then(|| failure::OFFLINE.to_owned())
    }
}

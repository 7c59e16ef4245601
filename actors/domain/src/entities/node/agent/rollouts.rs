//! The rollouts that have ordered an update of the agent, and the watch over the node after it (decision 0058).

use super::Agent;
use crate::id::RolloutId;
use crate::rollout_outcome::RolloutOutcome;
use crate::state_machine::Timestamp;
use serde::{Deserialize, Serialize};

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

/// The watch over a node for a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSoak {
    /// When the update was ordered. What was found before is no consequence of it.
    pub since: Timestamp,
    /// The first fault since then: `offline`, or the finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

/// The term of every node that a rollout has ordered an update of.
#[must_use]
pub fn rollout_term(rollout_id: RolloutId) -> String {
    format!("rollout/{rollout_id}")
}

impl Agent {
    pub(in crate::entities::node) fn rollout(&self, rollout_id: RolloutId) -> Option<&NodeRollout> {
        self.rollouts.iter().find(|known| known.rollout_id == rollout_id)
    }

    pub(in crate::entities::node) fn record_rollout(&mut self, rollout_id: RolloutId, outcome: Option<RolloutOutcome>) {
        match self.rollouts.iter_mut().find(|known| known.rollout_id == rollout_id) {
            Some(known) => known.outcome = outcome,
            None => self.rollouts.push(NodeRollout { rollout_id, outcome, soak: None }),
        }
        let surplus = self.rollouts.len().saturating_sub(MAX_REMEMBERED);
        self.rollouts.drain(..surplus);
    }

    /// The rollout that was recorded last watches the node from here on.
    pub(in crate::entities::node) fn begin_soak(&mut self, now: Timestamp) {
        if let Some(known) = self.rollouts.last_mut() {
            known.soak = Some(NodeSoak { since: now, fault: None });
        }
    }

    /// Since when the agent is watched for a rollout that knows of no fault. One rollout at a time has not ended.
    pub(in crate::entities::node) fn soaks_since(&self) -> Option<Timestamp> {
        let known = self.rollouts.last().filter(|known| known.outcome == Some(RolloutOutcome::Updated))?;
        known.soak.as_ref().filter(|soak| soak.fault.is_none()).map(|soak| soak.since)
    }

    /// Records the fault of the soak that [`Agent::soaks_since`] is about. Returns its rollout.
    pub(in crate::entities::node) fn record_soak_fault(&mut self, fault: &str) -> Option<RolloutId> {
        let known = self.rollouts.last_mut()?;
        known.soak.as_mut()?.fault = Some(fault.to_owned());
        Some(known.rollout_id)
    }

    /// The fault of the rollout's soak. A soak without one ends.
    pub(in crate::entities::node) fn end_soak(&mut self, rollout_id: RolloutId) -> Option<String> {
        let known = self.rollouts.iter_mut().find(|known| known.rollout_id == rollout_id)?;
        let fault = known.soak.as_ref()?.fault.clone();
        if fault.is_none() {
            known.soak = None;
        }
        fault
    }
}

//! The soak after a wave: its nodes have the version and are watched, and nothing begins meanwhile (decision 0058).
//!
//! A node reports a fault by itself. When the time is over each node of the wave is asked, until it answers, so that a report that was lost or is
//! late holds the next wave up.

use super::{EndedNode, MAX_NAMED, Phase, Reply, Rollout};
use crate::audit::{AuditAction, AuditRecord};
use crate::event::Event;
use crate::id::NodeId;
use crate::resend_timer::ResendTimer;
use crate::state_machine::{Deadline, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;

/// How long the nodes of a wave may take to answer.
const ANSWERS_OVERDUE_AFTER: TimeDelta = TimeDelta::minutes(10);
/// The bound of a stored code, in characters.
const MAX_REASON_CHARS: usize = 64;

/// A soak, of the nodes of [`Rollout::soaking`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Soak {
    Watching {
        until: Timestamp,
    },
    /// The time is over, and these nodes have not answered whether they are in order.
    Asking {
        unanswered: BTreeMap<NodeId, ResendTimer>,
    },
}

impl Rollout {
    /// The nodes that the soaks before the present wave have shown to be in order. Without soaks, all that have the version.
    fn settled(&self) -> u32 {
        self.updated.saturating_sub(u32::try_from(self.soaking.len()).unwrap_or(u32::MAX))
    }

    /// True until the canaries have succeeded, and their soak has ended.
    #[must_use]
    pub fn is_in_canary(&self) -> bool {
        self.settled() < self.order.canary
    }

    /// How many nodes of the present wave have not succeeded.
    pub(super) fn missing_in_wave(&self) -> u32 {
        let canaries = self.order.canary.saturating_sub(self.settled());
        let wave = if canaries > 0 { canaries } else { self.order.max_unavailable };
        wave.saturating_sub(u32::try_from(self.soaking.len()).unwrap_or(u32::MAX))
    }

    /// Until when the last wave is watched.
    #[must_use]
    pub const fn soaks_until(&self) -> Option<Timestamp> {
        match &self.soak {
            Some(Soak::Watching { until }) => Some(*until),
            Some(Soak::Asking { .. }) | None => None,
        }
    }

    pub(super) fn begin_soak_after_wave(&mut self, ctx: &TransitionContext<'_>) {
        let has_no_more = self.feed.is_exhausted && self.waiting.is_empty();
        let is_over = self.in_flight.is_empty() && (self.missing_in_wave() == 0 || has_no_more);
        if self.soak.is_none() && !self.soaking.is_empty() && is_over {
            let until = ctx.now + TimeDelta::seconds(self.order.soak_seconds.into());
            self.soak = Some(Soak::Watching { until });
        }
    }

    /// Asks the nodes of the wave once the time is over, and again those that have not answered.
    pub(super) fn ask_soaked_nodes(&mut self, ctx: &TransitionContext<'_>) -> Vec<Event> {
        if self.phase != Phase::Running {
            return Vec::new();
        }
        let rollout_id = self.id;
        let due = |node_id: &NodeId| Event::RolloutCheckDue { rollout_id, node_id: *node_id };
        match &mut self.soak {
            Some(Soak::Watching { until }) if ctx.now >= *until => {
                let asked = self.soaking.iter().map(|node_id| (*node_id, ResendTimer::first(ctx.now)));
                self.soak = Some(Soak::Asking { unanswered: asked.collect() });
                self.soaking.iter().map(due).collect()
            }
            Some(Soak::Asking { unanswered }) => {
                let late = unanswered.iter_mut().filter(|(_, timer)| timer.is_due(ctx.now));
                let again = |(node_id, timer): (&NodeId, &mut ResendTimer)| {
                    *timer = timer.next(ctx.now);
                    due(node_id)
                };
                late.map(again).collect()
            }
            Some(Soak::Watching { .. }) | None => Vec::new(),
        }
    }

    /// When the soak goes on. Only that of a running rollout does.
    pub(super) fn soak_timer(&self) -> Option<Timestamp> {
        if self.phase != Phase::Running {
            return None;
        }
        match self.soak.as_ref()? {
            Soak::Watching { until } => Some(*until),
            Soak::Asking { unanswered } => unanswered.values().map(|timer| timer.at).min(),
        }
    }

    pub(super) fn soak_deadline(&self) -> Option<Deadline> {
        if self.phase != Phase::Running {
            return None;
        }
        match self.soak.as_ref()? {
            Soak::Watching { until } => {
                Some(Deadline::new(*until + ANSWERS_OVERDUE_AFTER, "the soak of its last wave has not ended"))
            }
            Soak::Asking { unanswered } => {
                let (node_id, timer) = unanswered.iter().min_by_key(|(_, timer)| timer.since())?;
                let why = format!("node {node_id} has not answered whether it is in order after its update");
                Some(Deadline::new(timer.since() + ANSWERS_OVERDUE_AFTER, why))
            }
        }
    }

    /// A node reports a fault, or answers.
    pub(super) fn node_soaked(
        &self,
        node_id: NodeId,
        fault: Option<String>,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let mut next = self.clone();
        let (mut events, mut audit) = (Vec::new(), None);
        let why = match fault {
            None => {
                let Some(Soak::Asking { unanswered }) = &mut next.soak else { return Transition::stay(Reply::Done) };
                if unanswered.remove(&node_id).is_none() {
                    return Transition::stay(Reply::Done);
                }
                next.soaking.remove(&node_id);
                format!("node {node_id} is in order after its update")
            }
            Some(fault) => {
                // Its fault may arrive before the result of its update.
                if next.soaking.remove(&node_id) {
                    next.updated = next.updated.saturating_sub(1);
                } else if next.in_flight.remove(&node_id).is_none() {
                    return Transition::stay(Reply::Done);
                }
                if let Some(Soak::Asking { unanswered }) = &mut next.soak {
                    unanswered.remove(&node_id);
                }
                (events, audit) = next.count_failed(node_id, &fault, ctx);
                format!("node {node_id} is not in order after its update: {fault}")
            }
        };
        if next.soaking.is_empty() {
            next.soak = None;
        }
        events.extend(next.advance(ctx));
        Transition::to(next, Reply::Done, why).with(events, audit)
    }

    /// A node failed: nothing more begins until an administrator resumes the rollout.
    pub(super) fn count_failed(
        &mut self,
        node_id: NodeId,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> (Vec<Event>, Option<AuditRecord>) {
        let reason: String = reason.chars().take(MAX_REASON_CHARS).collect();
        self.failed += 1;
        if self.failures.len() < MAX_NAMED {
            self.failures.push(EndedNode { node_id, reason: reason.clone() });
        }
        match self.phase {
            Phase::Running | Phase::Paused => {
                self.enter(Phase::Stopped { node_id, reason: reason.clone() }, ctx);
                let audit = self.audit(AuditAction::RolloutsStop, json!({ "node_id": node_id, "code": reason }));
                (vec![Event::RolloutStopped { rollout_id: self.id, node_id, reason }], Some(audit))
            }
            Phase::Stopped { .. } | Phase::Aborting | Phase::Aborted | Phase::Completed => (Vec::new(), None),
        }
    }
}

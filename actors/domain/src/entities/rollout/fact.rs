//! What the provisioning worker and the nodes report to a rollout.

use super::{EndedNode, FeedPosition, MAX_NAMED, Phase, Reply, Rollout};
use crate::id::NodeId;
use crate::rollout_outcome::{RolloutOutcome, SkipReason};
use crate::state_machine::{Transition, TransitionContext};
use serde::{Deserialize, Serialize};

/// What the provisioning worker and the nodes report to a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Fact {
    /// The next nodes of its selector.
    NodesFound { page: Box<NodesPage> },
    /// A node's part has ended.
    NodeEnded { node_id: NodeId, outcome: RolloutOutcome },
    /// What a node has shown after its update: a fault, as soon as it has one; or, when it was asked, that it is in order.
    NodeSoaked {
        node_id: NodeId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<String>,
    },
}

/// A page of the nodes of a selector, in the order of their places.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodesPage {
    /// The place after which the page begins.
    pub after: Option<FeedPosition>,
    pub nodes: Vec<RolloutCandidate>,
    /// Where the next page begins; `None` where there is none.
    pub next: Option<FeedPosition>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutCandidate {
    pub node_id: NodeId,
    /// Why it need not be asked: it was in this state when the page was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip: Option<SkipReason>,
}

impl Rollout {
    pub(super) fn apply(&self, fact: Fact, ctx: &TransitionContext<'_>) -> Transition<Self> {
        match fact {
            Fact::NodesFound { page } => self.nodes_found(*page, ctx),
            Fact::NodeEnded { node_id, outcome } => self.node_ended(node_id, outcome, ctx),
            Fact::NodeSoaked { node_id, fault } => self.node_soaked(node_id, fault, ctx),
        }
    }

    fn nodes_found(&self, page: NodesPage, ctx: &TransitionContext<'_>) -> Transition<Self> {
        // A page that was asked for twice is counted once.
        let is_next = self.feed.due.is_some() && page.after == self.feed.after;
        if !is_next || matches!(self.phase, Phase::Aborting) || self.has_ended() {
            return Transition::stay(Reply::Done);
        }
        let mut next = self.clone();
        next.feed.due = None;
        next.feed.is_exhausted = page.next.is_none();
        next.feed.after = page.next.or(page.after);
        let found = page.nodes.len();
        for RolloutCandidate { node_id, skip } in page.nodes {
            match skip {
                Some(reason) => next.count_skipped(node_id, reason),
                None => next.waiting.push_back(node_id),
            }
        }
        let follows = next.advance(ctx);
        Transition::to(next, Reply::Done, format!("{found} more nodes of its selector")).with(follows, None)
    }

    fn node_ended(&self, node_id: NodeId, outcome: RolloutOutcome, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let mut next = self.clone();
        // A repeated message, or the late result of an update that has counted as failed.
        if next.in_flight.remove(&node_id).is_none() {
            return Transition::stay(Reply::Done);
        }
        let (mut events, mut audit) = (Vec::new(), None);
        let why = match outcome {
            RolloutOutcome::Updated => {
                next.updated += 1;
                if next.order.soak_seconds > 0 {
                    next.soaking.insert(node_id);
                }
                format!("node {node_id} was updated")
            }
            RolloutOutcome::Skipped { reason } => {
                next.count_skipped(node_id, reason);
                format!("node {node_id} was skipped: {}", reason.name())
            }
            RolloutOutcome::Failed { reason } => {
                (events, audit) = next.count_failed(node_id, &reason, ctx);
                format!("the update of node {node_id} failed: {reason}")
            }
        };
        events.extend(next.advance(ctx));
        Transition::to(next, Reply::Done, why).with(events, audit)
    }

    fn count_skipped(&mut self, node_id: NodeId, reason: SkipReason) {
        self.skipped += 1;
        if self.skips.len() < MAX_NAMED {
            self.skips.push(EndedNode { node_id, reason: reason.name().to_owned() });
        }
    }
}

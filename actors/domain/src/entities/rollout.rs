//! A rollout: one version of the agent's package for many nodes, first for the canaries, then for the others (decision 0055).
//!
//! ```text
//! running ⇄ paused          running, paused ──a node fails──▶ stopped ──resume──▶ running
//!    ├─ every node has ended ──▶ completed
//!    └─ abort (paused and stopped ones too) ──▶ aborting ── those in flight have ended ──▶ aborted
//! ```
//!
//! It holds no list of its nodes, which may be ten thousand: it is given the nodes of its selector in pages, and stores the page that waits,
//! the nodes in flight, counters, and the first nodes that failed or were skipped. Each order and each page is resent until it is answered; the
//! node starts one update for a rollout, however often it is ordered.
//!
//! After the canaries, and after each wave, the nodes that have the version are watched for a time before the next ones begin ([`soak`]).
//!
//! At most one rollout has not ended. Its claim enforces that.

mod fact;
mod progress;
mod request;
mod soak;
#[cfg(test)]
mod tests;

use crate::audit::{AuditAction, AuditRecord};
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{EntityKind, EntityRef, NodeId, RolloutId, SkuId};
use crate::package_digest::PackageDigest;
use crate::resend_timer::ResendTimer;
use crate::state_machine::{self, Deadline, Machine, TickOnly, Timestamp, Transition, TransitionContext};
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use uuid::Uuid;

pub use fact::{Fact, NodesPage, RolloutCandidate};
pub use request::{CommandName, Request};
pub use soak::Soak;

/// The bound of nodes under update at once.
pub const MAX_UNAVAILABLE: u32 = 200;
/// The bound of nodes that are selected by their ids.
pub const MAX_NODE_IDS: usize = 500;
/// The bound of nodes in one page.
pub const PAGE: usize = 100;
/// The bound of failed nodes that are named, and of skipped ones.
pub const MAX_NAMED: usize = 50;

/// What every rollout claims until it has ended.
const CLAIM: &str = "rollout/active";
/// How long the nodes of a page may take to be read.
const PAGE_OVERDUE_AFTER: TimeDelta = TimeDelta::minutes(10);

/// The state of a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    pub id: RolloutId,
    pub order: RolloutOrder,
    /// As the audit log names an actor.
    pub created_by: String,
    pub created_at: Timestamp,
    pub phase: Phase,
    pub entered_at: Timestamp,
    /// How long a node may take from its order to its result, by the policies at the creation.
    pub result_within_seconds: u32,
    pub feed: Feed,
    /// Nodes of the selector whose update was not ordered yet.
    pub waiting: VecDeque<NodeId>,
    /// Nodes whose update was ordered and has no result, and when each is ordered again.
    pub in_flight: BTreeMap<NodeId, ResendTimer>,
    pub updated: u32,
    pub failed: u32,
    pub skipped: u32,
    /// The first nodes that failed.
    pub failures: Vec<EndedNode>,
    /// The first nodes that were skipped.
    pub skips: Vec<EndedNode>,
    /// The nodes of the present wave that have the version. They are watched until its soak has ended. Without soaks there are none.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub soaking: BTreeSet<NodeId>,
    /// The soak of the last wave: nothing begins meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soak: Option<Soak>,
}

/// What an administrator orders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutOrder {
    pub digest: PackageDigest,
    /// How many nodes have to succeed before the others begin.
    pub canary: u32,
    /// The bound of nodes under update at once.
    pub max_unavailable: u32,
    /// How long the nodes of a wave are watched before the next wave begins; 0: not at all, and there are no waves.
    #[serde(default)]
    pub soak_seconds: u32,
    /// Also nodes in quarantine, where a finding, drift or a validation holds them and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub includes_held: bool,
    pub selector: NodeSelector,
    pub reason: String,
}

/// The nodes of a rollout: those that match every field that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSelector {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sku_id: Option<SkuId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub region_code: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_ids: Option<BTreeSet<NodeId>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[strum_discriminants(
    name(PhaseName),
    doc = "The name of its state.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    Running,
    /// By an administrator. Updates in flight go on.
    Paused,
    /// Since this node failed: its update, or the node in the soak after it. Updates in flight go on.
    Stopped {
        node_id: NodeId,
        reason: String,
    },
    /// Aborted, while updates are in flight.
    Aborting,
    Aborted,
    Completed,
}

/// How far the nodes of the selector were read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feed {
    /// The last node that was read.
    pub after: Option<FeedPosition>,
    pub is_exhausted: bool,
    /// A page that was asked for.
    pub due: Option<ResendTimer>,
}

/// A node's place in the order in which nodes are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FeedPosition {
    pub created_at: Timestamp,
    pub node_id: NodeId,
}

/// A node that failed or was skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedNode {
    pub node_id: NodeId,
    /// A code.
    pub reason: String,
}

/// The commands of a rollout.
pub type Command = state_machine::AnyCommand<Request, state_machine::NoCommand, Fact>;

state_machine::impl_command_from!(Request, Fact);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Rollout { rollout: Box<Rollout> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("there is no such rollout")]
    NotFound,
    #[error("the rollout exists already")]
    Exists,
    #[error("rollout {rollout_id} has not ended")]
    OtherUnfinished { rollout_id: RolloutId },
    #[error("a rollout that is {state} cannot {command}")]
    WrongState { state: PhaseName, command: CommandName },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("rollout"),
            Self::Exists => Explanation::conflict("The rollout exists already."),
            Self::OtherUnfinished { rollout_id } => Explanation::conflict(format!(
                "Rollout {rollout_id} has not ended, and there is one at a time; wait for its end, or abort it."
            ))
            .detail("rollout_id", rollout_id.to_string()),
            Self::WrongState { state, command } => {
                let (done, which) = match command {
                    CommandName::Create => ("created again", "it exists."),
                    CommandName::Pause => ("paused", "only one that is running can be."),
                    CommandName::Resume => ("resumed", "only one that is paused or stopped can be."),
                    CommandName::Abort => ("aborted", "it has ended."),
                };
                Explanation::conflict(format!("A rollout that is {state} cannot be {done}; {which}"))
                    .detail("state", state.into_str())
            }
        }
    }
}

impl Machine for Rollout {
    const KIND: EntityKind = EntityKind::Rollout;
    /// The most node ids, nodes in flight, waiting and named ones.
    const SNAPSHOT_MOST: usize = 128 * 1024;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I8];
    const ENDED_STATES: &'static [&'static str] = &["completed", "aborted"];
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Request(Request::Create { order })) => Ok(Self::create(*order, ctx)),
            (None, _) => Err(Rejection::NotFound),
            (Some(rollout), Command::Request(request)) => rollout.execute(request, ctx),
            (Some(rollout), Command::Fact(fact)) => Ok(rollout.apply(fact, ctx)),
            (Some(rollout), Command::Maintenance(TickOnly::Tick)) => Ok(rollout.tick(ctx)),
        }
    }

    fn decide_without(
        state: Option<&Self>,
        command: Command,
        holders: &BTreeMap<String, Uuid>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match holders.values().next() {
            Some(holder) => Err(Rejection::OtherUnfinished { rollout_id: RolloutId(*holder) }),
            None => Self::decide(state, command, ctx),
        }
    }

    fn state(&self) -> &'static str {
        self.phase.into_str()
    }

    fn deadline(&self) -> Option<Deadline> {
        let result_within = TimeDelta::seconds(self.result_within_seconds.into());
        let oldest = self.in_flight.iter().min_by_key(|(_, timer)| timer.since());
        let of_update = oldest.map(|(node_id, timer)| {
            Deadline::new(timer.since() + result_within, format!("the update of node {node_id} has no result"))
        });
        let of_page = self
            .feed
            .due
            .filter(|_| self.phase == Phase::Running)
            .map(|due| Deadline::new(due.since() + PAGE_OVERDUE_AFTER, "the nodes of the rollout were not read"));
        let of_phase = match &self.phase {
            // Overdue from its start on: only an administrator moves it on.
            Phase::Stopped { node_id, reason } => Some(Deadline::new(
                self.entered_at,
                format!("node {node_id} failed ({reason}): resume the rollout or abort it"),
            )),
            Phase::Running | Phase::Paused | Phase::Aborting | Phase::Aborted | Phase::Completed => None,
        };
        [of_update, of_page, of_phase, self.soak_deadline()].into_iter().flatten().min_by_key(|deadline| deadline.at)
    }

    fn timer(&self) -> Option<Timestamp> {
        let of_updates = self.in_flight.values().map(|timer| timer.at);
        of_updates.chain(self.page_due().map(|timer| timer.at)).chain(self.soak_timer()).min()
    }

    fn claims(&self) -> BTreeSet<String> {
        if self.has_ended() { BTreeSet::new() } else { [CLAIM.to_owned()].into() }
    }

    fn is_transient(&self) -> bool {
        match self.phase {
            Phase::Running | Phase::Stopped { .. } | Phase::Aborting => true,
            Phase::Paused | Phase::Aborted | Phase::Completed => false,
        }
    }

    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([(Invariant::I8, self.has_deadline_where_transient())])
    }
}

impl Rollout {
    #[must_use]
    pub const fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Aborted | Phase::Completed)
    }

    fn shown(&self) -> Reply {
        Reply::Rollout { rollout: Box::new(self.clone()) }
    }

    fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> AuditRecord {
        AuditRecord::new(action, EntityRef { kind: EntityKind::Rollout, id: self.id.0 }, metadata)
    }
}

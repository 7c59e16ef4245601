//! An allocation: GPUs of one node that one user rents, and the saga that provisions and releases it (specification, *States and
//! transitions*; decisions 5).
//!
//! ```text
//! requested ──reserved──▶ provisioning ──provisioned──▶ active ──release──▶ releasing ──cleaned──▶ released
//!     │                        └────failed, overdue, release────────────────▶│   ▲                    ▲
//!     └──no capacity, cancelled, overdue───────────────────────────────────  │   │retry               │
//!                                                                            ▼   │                    │
//!                                                                       release_failed ──force─────────┘
//! ```
//!
//! The allocation sends requests to a node through its events, and receives the results through commands that are facts. It never reads a
//! node itself. `releasing` ends in `released` only on the node's clean-up proof, or by an administrator's force.

mod billing;
mod fact;
mod name_and_labels;
mod request;
mod saga;
mod ssh_access;
mod status_history;
#[cfg(test)]
mod tests;

use crate::account_holder::Holder;
use crate::audit::{AuditAction, AuditRecord, RefusalAudit};
use crate::authz::ResourceOwner;
use crate::event::Event;
use crate::explanation::Explanation;
pub use crate::hardware::Placement;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{AllocationId, EntityKind, EntityRef, NodeId, SkuId, SshKeyId};
use crate::metadata::{self, Metadata};
use crate::money::Price;
use crate::policy::{FULL_REIMAGE, PolicyKey, Scopes};
use crate::resend_timer::ResendTimer;
pub use crate::ssh_key::AuthorizedKey;
use crate::state_machine::{
    self, AuditedRefusal, Deadline, IndexKeys, Machine, Timestamp, Transition, TransitionContext,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

pub use fact::Fact;
pub use request::{CommandName, Request};
pub use ssh_access::SshAccess;
pub use status_history::{AllocationFailure, FailureCode, StatusEntry, StatusReason};

/// An allocation and the state of its saga.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    pub id: AllocationId,
    pub asked: AllocationRequest,
    pub requested_at: Timestamp,
    pub phase: Phase,
    /// Why it failed, where it did.
    pub failure: Option<AllocationFailure>,
    pub history: Vec<StatusEntry>,
    pub active_at: Option<Timestamp>,
    pub release_requested_at: Option<Timestamp>,
    /// A critical fault of its node: from then on it is not billed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<NodeFault>,
    /// When it resends what was not answered.
    #[serde(default)]
    pub again: Option<ResendTimer>,
    /// The SSH keys that open it, once they differ from those of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logins: Option<SshAccess>,
    /// Its name and labels.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
    #[serde(default)]
    pub refusals: RefusalAudit,
    /// The version with which its user is answered: the first in which it is placed, queued or refused. That version's reply is stored with
    /// its commit. `None` before, and in allocations that an earlier release placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answered_in: Option<i64>,
}

/// A user's request, with the price resolved, which must not change later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationRequest {
    #[serde(flatten)]
    pub owner: ResourceOwner,
    pub sku_id: SkuId,
    pub sku: String,
    pub region_code: Option<String>,
    pub node_id: Option<NodeId>,
    pub gpu_count: u32,
    /// The SSH keys that open it at first.
    pub ssh_keys: Vec<AuthorizedKey>,
    /// True where no key was named: the user's default key opens it, whichever that is.
    #[serde(default)]
    pub follows_default: bool,
    /// The revision of the user's keys at which they were read.
    #[serde(default)]
    pub logins_revision: u64,
    pub isolation_model: String,
    pub price: Price,
    /// How long to wait for capacity; `None`: answer at once.
    pub queue_seconds: Option<u32>,
    /// The request as received, sealed by the edge (AES-256-GCM envelope, base64). It is stored and never served.
    #[serde(default)]
    pub scheduler_request_enc: Option<String>,
    /// The allocation's first metadata; empty once the allocation has it.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
}

/// A critical fault of its machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFault {
    pub at: Timestamp,
    pub reason: String,
}

/// The six states, each with the data that exists only in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::EnumDiscriminants)]
#[strum_discriminants(
    name(PhaseName),
    doc = "The name of an allocation's state.",
    derive(Serialize, Deserialize, strum::Display, strum::IntoStaticStr),
    strum(serialize_all = "snake_case", const_into_str),
    serde(rename_all = "snake_case")
)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Phase {
    Requested {
        until: Timestamp,
        /// When capacity is searched again, for a request that queues.
        look_again_at: Option<Timestamp>,
    },
    Provisioning {
        node_id: NodeId,
        placed: Placement,
        until: Timestamp,
    },
    Active {
        node_id: NodeId,
        placed: Placement,
    },
    Releasing {
        node_id: NodeId,
        placed: Placement,
        attempt: u32,
        until: Timestamp,
    },
    ReleaseFailed {
        node_id: NodeId,
        placed: Placement,
        attempt: u32,
        reason: String,
        next: ReleaseRetry,
    },
    Released {
        at: Timestamp,
        last: Option<(NodeId, Placement)>,
    },
}

/// What a failed release waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReleaseRetry {
    /// The next attempt.
    RetryAt(Timestamp),
    /// The attempts are used up and the node is fenced: an administrator's `retry-release` or `force-release` is needed. The instant is
    /// the start of the wait.
    Operator(Timestamp),
}

/// The commands of an allocation.
pub type Command = state_machine::AnyCommand<Request, state_machine::NoCommand, Fact, Maintenance>;

state_machine::impl_command_from!(Request, Fact, Maintenance);

/// What the service does to an allocation by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Maintenance {
    /// The request as received, sealed under another key.
    Reseal {
        scheduler_request_enc: String,
    },
    Tick,
}

impl state_machine::Maintenance for Maintenance {
    const TICK: Self = Self::Tick;
}

/// Why a command was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    /// Also where the caller must not learn that the allocation exists.
    #[error("there is no such allocation")]
    NotFound,
    #[error("the allocation exists already")]
    Exists,
    #[error("an allocation in state {state} cannot {command}")]
    WrongState { state: PhaseName, command: CommandName },
    #[error("gpu_count must be between 1 and {max}")]
    GpuCount { max: u32 },
    #[error("queue_seconds must be between 0 and {max}")]
    QueueSeconds { max: i64 },
    #[error("its user has no key {id}")]
    KeyUnknown { id: SshKeyId },
    #[error("the user's keys have changed since they were read")]
    KeysMoved,
    #[error("the allocation is at another version than the one in If-Match")]
    VersionDiffers,
    #[error("an allocation has at most {max} labels")]
    TooManyLabels { max: usize },
    #[error("the keys that open an allocation have at most {max} bytes together")]
    KeysTooLong { max: usize },
}

/// The term of every allocation that is or was on the node.
#[must_use]
pub fn node_term(node_id: NodeId) -> String {
    format!("node/{node_id}")
}

/// The most GPUs that one allocation may ask for: more than any machine holds.
pub const MAX_GPUS: u32 = 64;

/// The interval at which a queued request searches for capacity.
pub const CAPACITY_RETRY_INTERVAL: chrono::TimeDelta = chrono::TimeDelta::seconds(2);

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::NotFound => Explanation::not_found("allocation"),
            Self::Exists => Explanation::conflict("The allocation exists already."),
            Self::WrongState { state, command: CommandName::ChooseLogins } => Explanation::conflict(format!(
                "An allocation that is {state} admits no logins; its keys cannot be changed any more."
            ))
            .detail("state", state.into_str()),
            Self::WrongState { state, command: CommandName::Revise } => Explanation::conflict(format!(
                "An allocation that is {state} keeps the name and the labels that it had at its end."
            ))
            .detail("state", state.into_str()),
            Self::WrongState { state, command } => {
                let how = if command == CommandName::ForceRelease { "by force" } else { "by another try" };
                Explanation::conflict(format!(
                    "An allocation that is {state} cannot be released {how}; this is a way out of release_failed alone."
                ))
                .detail("state", state.into_str())
            }
            Self::GpuCount { max } => {
                Explanation::invalid(format!("`gpu_count` must be a whole number from 1 to {max}."), "gpu_count")
            }
            Self::QueueSeconds { max } => Explanation::invalid(
                format!("`queue_seconds` must be a whole number from 0 to {max}."),
                "queue_seconds",
            )
            .limited_by(PolicyKey::AllocationQueueMax, max),
            Self::KeyUnknown { id } => Explanation::invalid(
                format!("{id} is not a key of the allocation's user; GET /api/v1/ssh-keys lists theirs."),
                "ssh_key_ids",
            ),
            Self::KeysMoved => Explanation::temporary("The user's keys change at this moment; ask again."),
            Self::VersionDiffers => Explanation::conflict(
                "The allocation has changed since the version in If-Match; read it again and repeat your change on it.",
            )
            .detail("field", "If-Match"),
            Self::TooManyLabels { max } => metadata::too_many_labels("allocation", max),
            Self::KeysTooLong { max } => Explanation::invalid(
                format!("The keys have more than {max} bytes together; choose fewer, or keys of type ssh-ed25519, which are short."),
                "ssh_key_ids",
            )
            .detail("limit_bytes", max),
        }
    }
}

impl Machine for Allocation {
    const KIND: crate::EntityKind = crate::EntityKind::Allocation;
    /// Thirty-two SSH keys (requested and resolved), thirty-two history entries, and thirty-two labels (requested and current).
    const SNAPSHOT_MOST: usize = 160 * 1024;
    const INVARIANTS: &'static [Invariant] = &[Invariant::I8];
    const ENDED_STATES: &'static [&'static str] = &["released"];
    type Command = Command;
    /// The allocation after the command.
    type Reply = Box<Self>;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (None, Command::Request(Request::Create(request))) => Self::create(*request, ctx),
            (None, _) => Err(Rejection::NotFound),
            (Some(it), Command::Request(request)) => {
                it.execute(request, ctx).map(|step| it.answering_its_user(step, ctx))
            }
            (Some(it), Command::Fact(fact)) => Ok(it.answering_its_user(it.apply(fact, ctx), ctx)),
            (Some(it), Command::Maintenance(Maintenance::Reseal { scheduler_request_enc })) => {
                Ok(it.resealed(scheduler_request_enc))
            }
            (Some(it), Command::Maintenance(Maintenance::Tick)) => Ok(it.answering_its_user(it.tick(ctx), ctx)),
        }
    }

    /// Mutations of keys are audited with their result, refusals too (specification, *Audit log entry*).
    fn audit_refusal(
        &self,
        command: &Command,
        rejection: &Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        self.audit_refused_choice(command, rejection, ctx)
    }

    fn state(&self) -> &'static str {
        self.phase.name()
    }

    fn deadline(&self) -> Option<Deadline> {
        match &self.phase {
            Phase::Requested { until, .. } => {
                Some(Deadline::new(*until, "no node has reserved the GPUs: waiting for capacity"))
            }
            Phase::Provisioning { node_id, until, .. } => {
                Some(Deadline::new(*until, format!("node {node_id} has not confirmed that the tenant is set up")))
            }
            Phase::Releasing { node_id, attempt, until, .. } => {
                Some(Deadline::new(*until, format!("node {node_id} has not proved the clean-up (attempt {attempt})")))
            }
            Phase::ReleaseFailed { node_id, next: ReleaseRetry::RetryAt(at), reason, .. } => {
                Some(Deadline::new(*at, format!("clean-up on node {node_id} failed ({reason}): waiting to try again")))
            }
            Phase::ReleaseFailed { node_id, next: ReleaseRetry::Operator(since), reason, .. } => Some(Deadline::new(
                *since,
                format!("clean-up on node {node_id} failed too often ({reason}): needs retry-release or force-release"),
            )),
            Phase::Active { .. } | Phase::Released { .. } => None,
        }
    }

    fn timer(&self) -> Option<Timestamp> {
        let end = match &self.phase {
            // The search for capacity replaces the resend.
            Phase::Requested { until, look_again_at: Some(look) } => return Some(*look.min(until)),
            // Only an operator ends this state.
            Phase::ReleaseFailed { next: ReleaseRetry::Operator(_), .. } => None,
            Phase::Requested { look_again_at: None, .. }
            | Phase::Provisioning { .. }
            | Phase::Active { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. }
            | Phase::Released { .. } => self.deadline().map(|deadline| deadline.at),
        };
        let again = self.again.map(|again| again.at);
        end.into_iter().chain(again).min()
    }

    fn keys(&self) -> IndexKeys {
        IndexKeys {
            owner: Some(self.asked.owner.user_id.to_string()),
            sku: Some(self.asked.sku_id.0),
            unique_name: None,
        }
    }

    fn terms(&self) -> BTreeSet<String> {
        let mut terms = self.metadata.terms();
        terms.extend(self.placement().map(|(node_id, _)| node_term(node_id)));
        terms
    }

    fn is_transient(&self) -> bool {
        match self.phase {
            Phase::Requested { .. }
            | Phase::Provisioning { .. }
            | Phase::Releasing { .. }
            | Phase::ReleaseFailed { .. } => true,
            Phase::Active { .. } | Phase::Released { .. } => false,
        }
    }

    fn violations(&self, _: &[HistoryEntry]) -> Vec<Invariant> {
        Invariant::violated([(Invariant::I8, self.has_deadline_where_transient())])
    }
}

impl Phase {
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.into_str()
    }
}

impl Allocation {
    fn execute(&self, request: Request, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        match request {
            Request::Create(_) => Err(Rejection::Exists),
            Request::Release { issue } => self.release(issue, ctx),
            Request::Revise { metadata, if_version } => self.revise(metadata, if_version, ctx),
            Request::RetryRelease { reason } => self.retry_release(&reason, ctx),
            Request::ForceRelease { reason } => self.force_release(&reason, ctx),
            Request::ChooseLogins { chosen, keys, logins_revision } => {
                self.choose_logins(chosen, keys, logins_revision, ctx)
            }
        }
    }

    /// The scopes in which its policies are resolved.
    #[must_use]
    pub fn scopes(&self) -> Scopes {
        self.asked.scopes()
    }

    /// The node and placement that it has, or had last.
    #[must_use]
    pub const fn placement(&self) -> Option<(NodeId, &Placement)> {
        match &self.phase {
            Phase::Provisioning { node_id, placed, .. }
            | Phase::Active { node_id, placed }
            | Phase::Releasing { node_id, placed, .. }
            | Phase::ReleaseFailed { node_id, placed, .. }
            | Phase::Released { last: Some((node_id, placed)), .. } => Some((*node_id, placed)),
            Phase::Requested { .. } | Phase::Released { last: None, .. } => None,
        }
    }

    /// True while its user waits for the first answer to the request: it is neither placed nor queued nor refused.
    #[must_use]
    pub const fn is_unanswered(&self) -> bool {
        matches!(self.phase, Phase::Requested { look_again_at: None, .. })
    }

    /// The time of its last change of state.
    #[must_use]
    pub fn state_entered_at(&self) -> Timestamp {
        self.history.last().map_or(self.requested_at, |entry| entry.at)
    }

    /// The transition `step` from here, with its reply kept where it is the answer to the user's request.
    fn answering_its_user(&self, mut step: Transition<Self>, ctx: &TransitionContext<'_>) -> Transition<Self> {
        if self.is_unanswered()
            && let Some(next) = step.next.as_mut().filter(|next| !next.is_unanswered())
        {
            next.answered_in = Some(ctx.version + 1);
            *step.reply = next.clone();
            step.stores_reply = true;
        }
        step
    }

    /// The number of the clean-up attempt, 0 before the first.
    #[must_use]
    pub const fn attempt(&self) -> u32 {
        match &self.phase {
            Phase::Releasing { attempt, .. } | Phase::ReleaseFailed { attempt, .. } => *attempt,
            Phase::Requested { .. } | Phase::Provisioning { .. } | Phase::Active { .. } | Phase::Released { .. } => 0,
        }
    }

    /// All that is known of the time in which it was used.
    fn usage(&self) -> Event {
        let (holder, until) = (self.asked.holder(), self.billed_to());
        Event::UsageChanged { allocation_id: self.id, holder, from: self.active_at, until }
    }

    /// The usage of an allocation that was never active and never will be.
    fn never_used(&self) -> Event {
        let until = Some(self.requested_at);
        Event::UsageChanged { allocation_id: self.id, holder: self.asked.holder(), from: None, until }
    }

    fn transition(self, why: impl Into<String>) -> Transition<Self> {
        let reply = Box::new(self.clone());
        Transition::to(self, reply, why)
    }

    fn stay(&self) -> Transition<Self> {
        Transition::stay(Box::new(self.clone()))
    }

    /// The state stays, and an event is published: the allocation is written, so that the event is not lost.
    fn unchanged(&self, why: impl Into<String>) -> Transition<Self> {
        self.clone().transition(why)
    }

    fn wrong_state(&self, command: CommandName) -> Rejection {
        Rejection::WrongState { state: PhaseName::from(&self.phase), command }
    }

    fn audit(&self, action: AuditAction, metadata: serde_json::Value) -> AuditRecord {
        AuditRecord::new(action, EntityRef { kind: EntityKind::Allocation, id: self.id.0 }, metadata)
    }
}

impl AllocationRequest {
    /// It has a whole node, whose machine is reinstalled after it.
    #[must_use]
    pub fn is_reimaged_after(&self) -> bool {
        self.isolation_model == FULL_REIMAGE
    }

    /// The account holder who pays.
    #[must_use]
    pub fn holder(&self) -> Holder {
        Holder::paying_for(&self.owner.user_id, self.owner.org_id.as_ref())
    }

    #[must_use]
    pub fn scopes(&self) -> Scopes {
        Scopes::from(&self.owner)
    }
}

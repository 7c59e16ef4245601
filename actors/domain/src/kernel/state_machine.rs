//! What every entity is: a pure state machine, and the context that it decides in.

mod command;

pub use crate::time::Timestamp;
pub(crate) use command::impl_command_from;
pub use command::{
    AnyCommand, Command, CommandSort, FIRST_ENCODING, Maintenance, NoCommand, Request, TickOnly,
    VERSIONED_SKU_REVISIONS,
};

use crate::audit::AuditRecord;
use crate::authz::Principal;
use crate::event::Event;
use crate::explanation::Explanation;
use crate::history::{HistoryEntry, Invariant};
use crate::id::{EntityKind, NodeId, TerminalSessionId};
use crate::ledger::Posting;
use crate::policy::PolicyBook;
use crate::precondition::Precondition;
use crate::summand::Summand;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use uuid::Uuid;

/// An entity's state machine. `decide` is all of its behaviour: no await, no clock, no randomness.
///
/// An entity that was never created has no state: `decide(None, …)` creates it, and rejects a command that cannot create.
pub trait Machine: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static {
    const KIND: EntityKind;
    /// The bound of the entity's snapshot as JSON, in bytes. A transition to a larger snapshot is not carried out. The machine bounds what
    /// grows in it by itself, so that this bound is never reached.
    const SNAPSHOT_MOST: usize = 64 * 1024;
    /// The states that nothing follows. An entity that has long been in one of them is removed (policy `retention.ended_entities_months`).
    /// Empty where entities of the kind stay.
    const ENDED_STATES: &'static [&'static str] = &[];
    type Command: Command;
    type Reply: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static;
    type Rejection: Rejection;
    /// The invariants that [`Machine::violations`] judges.
    const INVARIANTS: &'static [Invariant] = &[];

    /// The transition that `command` causes in `state`.
    ///
    /// A rejection is a reply: nothing changed, and it says why.
    fn decide(
        state: Option<&Self>,
        command: Self::Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Self::Rejection>;

    /// As [`Machine::decide`], after the store refused the first decision because other entities hold values that it claims. `holders` are
    /// those values and the entities that hold them. The new decision must not claim them.
    ///
    /// # Errors
    /// As [`Machine::decide`].
    fn decide_without(
        state: Option<&Self>,
        command: Self::Command,
        holders: &BTreeMap<String, Uuid>,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Self::Rejection> {
        let _ = holders;
        Self::decide(state, command, ctx)
    }

    /// The state and the audit record to write with a refusal, where it has to be audited. Nothing else may change with it, and the
    /// machine bounds how often it happens ([`RefusalAudit`](crate::audit::RefusalAudit)): a refusal that is not audited costs no commit.
    fn audit_refusal(
        &self,
        command: &Self::Command,
        rejection: &Self::Rejection,
        ctx: &TransitionContext<'_>,
    ) -> Option<AuditedRefusal<Self>> {
        let _ = (command, rejection, ctx);
        None
    }

    /// The state's name in the API and in the history.
    fn state(&self) -> &'static str;

    /// Until when this state may last, and what it waits for. `None`: the state may last for ever.
    fn deadline(&self) -> Option<Deadline> {
        None
    }

    /// True in a state that has to end (I8).
    fn is_transient(&self) -> bool {
        false
    }

    /// I8: a transient state has a deadline with a reason that an operator can read.
    fn has_deadline_where_transient(&self) -> bool {
        match self.deadline() {
            Some(deadline) => !deadline.reason.is_empty() && deadline.at < Timestamp::MAX_UTC,
            None => !self.is_transient(),
        }
    }

    /// The invariants among [`Machine::INVARIANTS`] that the entity violates. Given its last transitions, in their order.
    fn violations(&self, recorded: &[HistoryEntry]) -> Vec<Invariant> {
        let _ = recorded;
        Vec::new()
    }

    /// When the machine needs its next `Tick`, at the latest at its deadline.
    fn timer(&self) -> Option<Timestamp> {
        self.deadline().map(|deadline| deadline.at)
    }

    /// The keys by which the entity is found, beside its id. They are fixed at creation, so that no index slows an update down.
    fn keys(&self) -> IndexKeys {
        IndexKeys::default()
    }

    /// Values that no other entity of any kind may have while this one has them; each commit keeps them unique. They begin with what they
    /// name, as `gpu/`.
    fn claims(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// The terms by which lists find the entity and that change during its life, such as its labels. Several entities may have the same
    /// term; each commit updates the index of terms.
    fn terms(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// What the entity adds to the sums of its kind; each commit writes the difference. `None` where it is in no sum.
    fn summand(&self) -> Option<Summand> {
        None
    }

    /// The command that makes the machine check its whole state and emit what is missing.
    fn tick() -> Self::Command {
        Self::Command::TICK
    }
}

/// Why a command was refused.
pub trait Rejection: std::error::Error + Clone + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Its code and its remedy, for users and administrators.
    fn explain(self) -> Explanation;
}

/// The time by which a state must have been left. A state past its deadline is overdue and is shown to operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadline {
    pub at: Timestamp,
    /// What the entity waits for, for operators to read.
    pub reason: String,
}

impl Deadline {
    pub fn new(at: Timestamp, reason: impl Into<String>) -> Self {
        Self { at, reason: reason.into() }
    }
}

/// The index keys of an entity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IndexKeys {
    /// The user who owns it, or the account holder.
    pub owner: Option<String>,
    /// The SKU that it belongs to.
    pub sku: Option<Uuid>,
    /// A name that is unique among the entities of the kind.
    pub unique_name: Option<String>,
}

/// The context of a decision.
#[derive(Clone, Debug)]
pub struct TransitionContext<'a> {
    pub now: Timestamp,
    pub policy: &'a PolicyBook,
    pub by: &'a Principal,
    pub correlation_id: &'a str,
    /// The trace that the command belongs to.
    pub trace: TraceContext<'a>,
    /// Randomness, given from outside: ids that a transition creates are derived from it.
    pub seed: u128,
    /// The id of the entity.
    pub id: Uuid,
    /// The version that the decision is made from; 0 before the entity exists.
    pub version: i64,
}

/// The trace that a command belongs to (W3C Trace Context). It is passed on and not interpreted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceContext<'a> {
    /// `traceparent`
    pub parent: Option<&'a str>,
    /// `tracestate`
    pub state: Option<&'a str>,
}

/// The request that caused something: it travels with commands and events, and is stored where its consequences outlive its commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct RequestOrigin {
    pub correlation_id: String,
    /// The trace that it belongs to (W3C Trace Context).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

impl RequestOrigin {
    /// A request outside of any trace.
    #[must_use]
    pub fn untraced(correlation_id: impl Into<String>) -> Self {
        Self { correlation_id: correlation_id.into(), traceparent: None, tracestate: None }
    }

    /// Sets the trace; a `tracestate` without a `traceparent` is dropped.
    #[must_use]
    pub fn traced(mut self, traceparent: Option<String>, tracestate: Option<String>) -> Self {
        self.tracestate = tracestate.filter(|_| traceparent.is_some());
        self.traceparent = traceparent;
        self
    }

    #[must_use]
    pub fn trace(&self) -> TraceContext<'_> {
        TraceContext { parent: self.traceparent.as_deref(), state: self.tracestate.as_deref() }
    }
}

#[cfg(test)]
impl<'a> TransitionContext<'a> {
    /// The context of a decision in a test: outside of any trace, of an entity with the nil id at version 1.
    pub(crate) fn in_test(now: Timestamp, policy: &'a PolicyBook, by: &'a Principal) -> Self {
        let (correlation_id, trace) = ("c", TraceContext::default());
        Self { now, policy, by, correlation_id, trace, seed: 1, id: Uuid::nil(), version: 1 }
    }
}

impl TransitionContext<'_> {
    /// The request that caused this command.
    #[must_use]
    pub fn origin(&self) -> RequestOrigin {
        RequestOrigin {
            correlation_id: self.correlation_id.to_owned(),
            traceparent: self.trace.parent.map(str::to_owned),
            tracestate: self.trace.state.map(str::to_owned),
        }
    }

    /// The `n`th new id of this transition, a UUIDv7 at [`TransitionContext::now`].
    #[must_use]
    pub fn new_id(&self, n: u64) -> Uuid {
        let millis = u64::try_from(self.now.timestamp_millis()).unwrap_or(0);
        // Odd multipliers are bijections on the seed's bits, so the ids of one transition differ.
        let mixed = self.seed ^ (u128::from(n) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        let mut random = [0; 10];
        random.copy_from_slice(&mixed.to_be_bytes()[..10]);
        uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
    }
}

/// The outcome of a command: the next state, what is published and written with it, and the reply.
#[derive(Clone, Debug)]
pub struct Transition<M: Machine> {
    /// `None`: nothing changes and nothing is written; only the reply is sent.
    pub next: Option<M>,
    /// Events for other parts of the system; stored in the outbox by the same commit.
    pub events: Vec<Event>,
    /// Who did what; stored in the audit log by the same commit.
    pub audit: Vec<AuditRecord>,
    /// Postings to the ledger; written by the same commit.
    pub postings: Vec<Posting>,
    /// Effects that are triggered after the commit, and that may be lost.
    pub effects: Vec<Effect>,
    /// Versions of other entities that the decision was based on and that must not have changed when it commits.
    pub requires: Vec<Precondition>,
    pub reply: M::Reply,
    /// The reply is stored with the commit for a day, also where a worker sent the command: a request that waits for this transition is answered from it,
    /// and so is each repetition of the request.
    pub stores_reply: bool,
    /// Stored in the history: why the entity is in its state.
    pub why: String,
}

/// The state and the audit record that are written with a refusal.
#[derive(Clone, Debug)]
pub struct AuditedRefusal<M> {
    pub next: M,
    pub audit: AuditRecord,
}

impl<M: Machine> Transition<M> {
    /// The entity changes to `next`.
    pub fn to(next: M, reply: M::Reply, why: impl Into<String>) -> Self {
        Self { next: Some(next), why: why.into(), ..Self::stay(reply) }
    }

    /// Nothing changes; only the reply is sent.
    pub fn stay(reply: M::Reply) -> Self {
        Self {
            next: None,
            events: Vec::new(),
            audit: Vec::new(),
            postings: Vec::new(),
            effects: Vec::new(),
            requires: Vec::new(),
            reply,
            stores_reply: false,
            why: String::new(),
        }
    }

    #[must_use]
    pub fn event(mut self, event: Event) -> Self {
        debug_assert!(event.has_valid_reason(), "a reason that is no code of the table `reason_code`: {event:?}");
        self.events.push(event);
        self
    }

    #[must_use]
    pub fn audit(mut self, audit: AuditRecord) -> Self {
        self.audit.push(audit);
        self
    }

    /// With all of these.
    #[must_use]
    pub(crate) fn with(
        self,
        events: impl IntoIterator<Item = Event>,
        audits: impl IntoIterator<Item = AuditRecord>,
    ) -> Self {
        let step = events.into_iter().fold(self, Self::event);
        audits.into_iter().fold(step, Self::audit)
    }

    #[must_use]
    pub fn posting(mut self, posting: Posting) -> Self {
        self.postings.push(posting);
        self
    }

    #[must_use]
    pub fn precondition(mut self, precondition: Precondition) -> Self {
        self.requires.push(precondition);
        self
    }

    #[must_use]
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effects.push(effect);
        self
    }
}

/// The effects that a transition may ask of the running processes. Each of them may be lost: what must not be lost is an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A long poll of this node has tasks to fetch.
    WakeNode(NodeId),
    /// The node's identity is revoked: its connections are closed on every replica.
    CloseNode(NodeId),
    /// Every connection of this session reads the session again: it may be closed, or another connection may have replaced it.
    WakeTerminal(TerminalSessionId),
    /// This process reloads the policy values now; the other processes are notified by the event.
    ReadPolicy,
    /// This process reloads the keys in force now; the other processes are notified by the event.
    ReadKeys,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_one_transition_are_version_seven_and_distinct() {
        let policy = PolicyBook::default();
        let by = Principal::system("test");
        let ctx = TransitionContext {
            seed: 7,
            version: 0,
            ..TransitionContext::in_test(Timestamp::UNIX_EPOCH, &policy, &by)
        };
        let ids: BTreeSet<_> = (0..1000).map(|n| ctx.new_id(n)).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.get_version_num() == 7));
    }
}

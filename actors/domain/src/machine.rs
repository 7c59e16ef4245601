//! What every entity is: a pure state machine, and what it is told about the world when it decides.

use crate::audit::Audit;
use crate::authz::{Action, Principal};
use crate::commit::Footing;
use crate::event::Event;
use crate::id::{Kind, NodeId, TerminalSessionId};
use crate::ledger::Posting;
use crate::policy::PolicyBook;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use uuid::Uuid;

/// An instant, in UTC.
pub type Timestamp = DateTime<Utc>;

/// An entity's machine. `decide` is the whole of its behaviour: no await, no clock, no chance.
///
/// An entity that was never created has no state: `decide(None, …)` is where it is born, and a command that cannot create
/// is rejected there.
pub trait Machine: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + Sync + 'static {
    const KIND: Kind;
    /// Bytes of the entity's snapshot as JSON. A transition to a larger one is not carried out. The machine bounds what grows in it by
    /// itself, so that nobody meets this bound.
    const SNAPSHOT_MOST: usize = 64 * 1024;
    type Command: Command;
    type Reply: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static;
    type Rejection: std::error::Error + Clone + Serialize + DeserializeOwned + Send + Sync + 'static;

    /// What follows from `command` in `state`.
    ///
    /// # Errors
    /// A rejection is an answer: nothing changed, and it says why.
    fn decide(state: Option<&Self>, command: Self::Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Self::Rejection>;

    /// As [`Machine::decide`], after the store refused what was decided: other entities have names that it claims. `holders` are those
    /// names and the entities that have them. What is decided now must not claim them.
    ///
    /// # Errors
    /// As [`Machine::decide`].
    fn decide_without(
        state: Option<&Self>,
        command: Self::Command,
        holders: &BTreeMap<String, Uuid>,
        ctx: &Ctx<'_>,
    ) -> Result<Step<Self>, Self::Rejection> {
        let _ = holders;
        Self::decide(state, command, ctx)
    }

    /// What is kept of a refusal, where it has to be audited. Nothing else may change with it, and the machine bounds it
    /// ([`Refusals`](crate::audit::Refusals)): a refusal that is not kept costs no commit.
    fn audit_refusal(
        &self,
        command: &Self::Command,
        rejection: &Self::Rejection,
        ctx: &Ctx<'_>,
    ) -> Option<Refused<Self>> {
        let _ = (command, rejection, ctx);
        None
    }

    /// The state's name, as the API and the history show it.
    fn state(&self) -> &'static str;

    /// Until when this state may last, and what it is waiting for. `None`: the state may last for ever.
    fn deadline(&self) -> Option<Deadline>;

    /// When the machine wants its next `Tick`; at the latest at its deadline.
    fn timer(&self) -> Option<Timestamp> {
        self.deadline().map(|deadline| deadline.at)
    }

    /// What it is found by, beside its id. Fixed at creation, so that no index hinders an update.
    fn keys(&self) -> Keys;

    /// Names that no other entity of any kind may have while this one has them; each commit keeps them unique. They begin with what
    /// they name, as `gpu/`.
    fn claims(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// What lists find it by that changes in its life, as its labels. Others may have the same; each commit keeps the index of them.
    fn terms(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// The command that makes the machine look at its whole state and emit what is missing.
    fn tick() -> Self::Command;
}

/// A command names itself (for the history) and what the one who asks must be allowed to do.
pub trait Command: Clone + fmt::Debug + Serialize + DeserializeOwned + Send + 'static {
    fn name(&self) -> &'static str;
    fn action(&self) -> Action;

    /// True of a command that makes the entity: under a new id there is nothing to load before it.
    fn creates(&self) -> bool {
        false
    }
}

/// The end that a state must not outlive unseen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadline {
    pub at: Timestamp,
    /// What is being waited for, in an operator's words.
    pub reason: String,
}

impl Deadline {
    pub fn new(at: Timestamp, reason: impl Into<String>) -> Self {
        Self { at, reason: reason.into() }
    }
}

/// What an entity is found by.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// The user whom it belongs to.
    pub owner: Option<String>,
    /// The catalog entry that it is one of.
    pub sku: Option<Uuid>,
    /// A name that no other entity of the kind may have.
    pub unique_name: Option<String>,
}

/// What a machine is told when it decides.
#[derive(Clone, Debug)]
pub struct Ctx<'a> {
    pub now: Timestamp,
    pub policy: &'a PolicyBook,
    pub by: &'a Principal,
    pub correlation_id: &'a str,
    /// The trace that the command belongs to.
    pub trace: Trace<'a>,
    /// Chance, given from outside: ids that a transition makes are derived from it.
    pub seed: u128,
    /// The id of the entity that decides.
    pub id: Uuid,
    /// The version it decides from; 0 before it exists.
    pub version: i64,
}

/// The trace that a command belongs to (W3C Trace Context), carried on and not looked into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trace<'a> {
    /// `traceparent`
    pub parent: Option<&'a str>,
    /// `tracestate`
    pub state: Option<&'a str>,
}

/// The request that something goes back to, kept where its consequences outlive its commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Origin {
    pub correlation_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracestate: Option<String>,
}

impl Ctx<'_> {
    /// What this command goes back to.
    #[must_use]
    pub fn origin(&self) -> Origin {
        Origin {
            correlation_id: self.correlation_id.to_owned(),
            traceparent: self.trace.parent.map(str::to_owned),
            tracestate: self.trace.state.map(str::to_owned),
        }
    }

    /// The `n`th new id of this transition, a UUIDv7 at [`Ctx::now`].
    #[must_use]
    pub fn new_id(&self, n: u64) -> Uuid {
        let millis = u64::try_from(self.now.timestamp_millis()).unwrap_or(0);
        // Odd multipliers are bijections on the seed's bits: ids of one transition never meet.
        let mixed = self.seed ^ (u128::from(n) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835);
        let mut random = [0; 10];
        random.copy_from_slice(&mixed.to_be_bytes()[..10]);
        uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
    }
}

/// What follows from a command: the next state, what is said of it, and the answer.
#[derive(Clone, Debug)]
pub struct Step<M: Machine> {
    /// `None`: nothing changed, nothing is written, the answer alone is given.
    pub next: Option<M>,
    /// What other parts of the system must hear; kept in the outbox by the same commit.
    pub events: Vec<Event>,
    /// What was done by whom; kept in the audit log by the same commit.
    pub audit: Vec<Audit>,
    /// What moves in the ledger; written by the same commit.
    pub postings: Vec<Posting>,
    /// What is worth doing at once when the commit stands, and harmless to lose.
    pub effects: Vec<Effect>,
    /// Others that the decision looked at and that must not have changed when it is committed.
    pub rests_on: Vec<Footing>,
    pub reply: M::Reply,
    /// Kept in the history: why the entity is where it is.
    pub why: String,
}

/// What is written with a refusal.
#[derive(Clone, Debug)]
pub struct Refused<M> {
    pub next: M,
    pub audit: Audit,
}

impl<M: Machine> Step<M> {
    /// The entity moves on to `next`.
    pub fn to(next: M, reply: M::Reply, why: impl Into<String>) -> Self {
        Self { next: Some(next), why: why.into(), ..Self::stay(reply) }
    }

    /// Nothing changes; only the answer is given.
    pub fn stay(reply: M::Reply) -> Self {
        Self {
            next: None,
            events: Vec::new(),
            audit: Vec::new(),
            postings: Vec::new(),
            effects: Vec::new(),
            rests_on: Vec::new(),
            reply,
            why: String::new(),
        }
    }

    #[must_use]
    pub fn event(mut self, event: Event) -> Self {
        self.events.push(event);
        self
    }

    #[must_use]
    pub fn audit(mut self, audit: Audit) -> Self {
        self.audit.push(audit);
        self
    }

    #[must_use]
    pub fn posting(mut self, posting: Posting) -> Self {
        self.postings.push(posting);
        self
    }

    #[must_use]
    pub fn resting_on(mut self, footing: Footing) -> Self {
        self.rests_on.push(footing);
        self
    }

    #[must_use]
    pub fn effect(mut self, effect: Effect) -> Self {
        self.effects.push(effect);
        self
    }
}

/// The closed vocabulary of what a transition asks of this moment's world. All of it may be lost: what must not be lost is
/// an [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A parked poll of this node has something to fetch.
    WakeNode(NodeId),
    /// The node's identity is void: its connections are closed on every replica.
    CloseNode(NodeId),
    /// Whoever holds an end of this session looks at it: it may be over, or somebody else's.
    WakeTerminal(TerminalSessionId),
    /// This process should read the policy values now; the others hear of it by the event.
    ReadPolicy,
    /// This process should read the keys in force now; the others hear of it by the event.
    ReadKeys,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_one_transition_are_version_seven_and_never_meet() {
        let policy = PolicyBook::default();
        let by = Principal::system("test");
        let ctx = Ctx {
            now: DateTime::UNIX_EPOCH,
            policy: &policy,
            by: &by,
            correlation_id: "c",
            trace: Trace::default(),
            seed: 7,
            id: Uuid::nil(),
            version: 0,
        };
        let ids: BTreeSet<_> = (0..1000).map(|n| ctx.new_id(n)).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.get_version_num() == 7));
    }
}

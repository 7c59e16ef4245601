//! The policy values of one scope, written by administrators (specification, *Policy value*).
//!
//! Superseded values leave the state: they remain in the history and the audit log. The state has the values in force and the future ones.

use crate::audit::{AuditAction, AuditRecord};
use crate::authz::Action;
use crate::event::Event;
use crate::explanation::{Explanation, RejectionCode};
use crate::id::{EntityKind, EntityRef, PolicyId, PolicyValueId};
use crate::policy::{CrossingBounds, ORDERED, PolicyBook, PolicyKey, PolicyScope, PolicyValue, ValueBounds};
use crate::state_machine::{self, Effect, Machine, Timestamp, Transition, TransitionContext};
use chrono::{SubsecRound as _, TimeDelta};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// How far in the past `effective_at` may be and still mean now: for clock differences and latency.
const EFFECTIVE_AT_TOLERANCE: TimeDelta = TimeDelta::seconds(60);
/// How far in the future it may be.
const EFFECTIVE_AT_HORIZON: TimeDelta = TimeDelta::days(3660);
/// The bounds of future values in one scope: of one key, and of all keys.
const MAX_PENDING_PER_KEY: usize = 20;
const MAX_PENDING: usize = 200;
/// The bound of scopes with values of their own. Every process reads all of them.
const MAX_SCOPES: usize = 10_000;

/// The state: the values of one scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeValues {
    pub scope: PolicyScope,
    /// By key and effective time. Keys of another release stay as they are.
    pub values: Vec<PolicyVersion>,
}

/// One version of a value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyVersion {
    pub id: PolicyValueId,
    pub key: String,
    pub value: PolicyValue,
    pub effective_at: Timestamp,
    pub reason: String,
    /// The value that would be in force in this scope from then on without this one.
    pub old_value: Option<PolicyValue>,
    pub written_by: String,
    pub written_at: Timestamp,
}

/// A value to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyWrite {
    pub scope: PolicyScope,
    pub key: PolicyKey,
    pub value: PolicyValue,
    /// `None`: at once.
    pub effective_at: Option<Timestamp>,
    pub reason: String,
    pub expected: ExpectedValue,
}

/// The value that the writer expects to replace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpectedValue {
    Anything,
    /// No value in this scope.
    Nothing,
    This(PolicyValue),
}

/// The revocation of a value, after which the less specific one is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRevocation {
    pub key: PolicyKey,
    /// The effective time of the value to revoke. `None`: the value in force.
    pub effective_at: Option<Timestamp>,
    pub reason: String,
    pub expected: ExpectedValue,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Write(Box<PolicyWrite>),
    TakeBack(PolicyRevocation),
    Tick,
}

impl state_machine::Command for Command {
    const TICK: Self = Self::Tick;

    fn name(&self) -> &'static str {
        self.into_str()
    }

    fn action(&self) -> Action {
        match self {
            Self::Write(_) | Self::TakeBack(_) => Action::ManagePolicy,
            Self::Tick => Action::Advance,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    Written { scope: PolicyScope, written: Box<PolicyVersion> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("nothing was ever written for this scope")]
    NotFound,
    #[error("{} has no such value in this scope", key.name())]
    NotSet { key: PolicyKey },
    #[error("{} does not admit {value}", key.name())]
    OutOfBounds { key: PolicyKey, value: PolicyValue },
    #[error("{} has no value for {scope}", key.name())]
    Scope { key: PolicyKey, scope: PolicyScope },
    #[error("{} would be over {} from {} on", low.name(), high.name(), crossing.at)]
    Crosses { key: PolicyKey, low: PolicyKey, high: PolicyKey, crossing: CrossingBounds },
    #[error("the value is another")]
    Differs { key: PolicyKey, current: Option<PolicyValue> },
    #[error("effective_at lies in the past")]
    Past { now: Timestamp },
    #[error("effective_at lies too far ahead")]
    TooFarAhead { latest: Timestamp },
    #[error("{limit} values lie ahead")]
    TooManyAhead { limit: usize },
    #[error("{limit} scopes have values of their own")]
    TooManyScopes { limit: usize },
}

impl state_machine::Rejection for Rejection {
    fn explain(self) -> Explanation {
        match self {
            Self::OutOfBounds { key, value } => not_admitted(key, &value.to_string()),
            Self::Scope { key, scope } => {
                let kinds = key.applies_to().scope_kinds();
                Explanation::invalid_request(format!(
                    "{} cannot be set in scope `{}`: {}. Set it in one of the scopes {} (`global` is an \
                 empty `scope`).",
                    key.name(),
                    scope.kind(),
                    key.applies_to().reason(),
                    kinds.join(", ")
                ))
                .detail("field", "scope")
                .detail("key", key.name())
                .detail("scopes", json!(kinds))
            }
            Self::Crosses { key, low, high, crossing } => {
                let CrossingBounds { at, low: smallest, high: largest, with } = crossing;
                let (low, high) = (low.name(), high.name());
                let message = format!(
                    "With this value {low} ({smallest}) would be over {high} ({largest}) from {at} on, \
                 for the users to which the values of scope {with} also apply; change the other one first."
                );
                policy_out_of_bounds(key, message)
                    .detail("crosses", json!({ low: smallest, high: largest, "at": at, "scope_kind": with.kind() }))
            }
            Self::Differs { key, current } => {
                let now = current.as_ref().map_or_else(|| "not set".to_owned(), ToString::to_string);
                Explanation::conflict(format!(
                    "`old_value` is not what {} would be without this write: in this scope it is {now}. \
                 Look at it again and repeat.",
                    key.name()
                ))
                .detail("field", "old_value")
                .detail("current_value", json!(current))
            }
            Self::NotSet { key } => Explanation::new(
                RejectionCode::NotFound,
                format!(
                    "There is no such value of {} in this scope; GET /api/v1/admin/policy-values lists \
                 what is set.",
                    key.name()
                ),
            ),
            Self::Past { now } => Explanation::invalid(
                format!(
                    "`effective_at` lies in the past (it is {now}); leave it out to set the value at \
                 once."
                ),
                "effective_at",
            ),
            Self::TooFarAhead { latest } => {
                Explanation::invalid(format!("`effective_at` must be at {latest} at the latest."), "effective_at")
            }
            Self::TooManyAhead { limit } => Explanation::conflict(format!(
                "{limit} values lie ahead, which is the most; wait until one is in force, or \
                 overwrite one under its effective_at."
            )),
            Self::TooManyScopes { limit } => Explanation::conflict(format!(
                "{limit} scopes have values of their own, which is the most; set this one for a plan \
                 or an organisation."
            )),
            rejection @ Self::NotFound => Explanation::unexpected(&rejection),
        }
    }
}

/// An invalid value of a policy key, and the valid ones.
pub fn not_admitted(key: PolicyKey, value: &str) -> Explanation {
    let takes = match key.bounds() {
        ValueBounds::Int { min, max, .. } => format!("a whole number from {min} to {max}"),
        ValueBounds::Enum { of, .. } => format!("one of {}", of.join(", ")),
        ValueBounds::Bool { .. } => "true or false".to_owned(),
    };
    policy_out_of_bounds(key, format!("{value} is no value of {}; it takes {takes}.", key.name()))
}

fn policy_out_of_bounds(key: PolicyKey, message: String) -> Explanation {
    Explanation::new(RejectionCode::PolicyOutOfBounds, message)
        .detail("field", "value")
        .detail("key", key.name())
        .detail("bounds", bounds_of(key))
        .detail("default", json!(key.default_value()))
}

/// The valid values of a key, in the API's notation.
#[must_use]
pub fn bounds_of(key: PolicyKey) -> serde_json::Value {
    match key.bounds() {
        ValueBounds::Int { min, max, .. } => json!({ "min": min, "max": max }),
        ValueBounds::Enum { of, .. } => json!({ "enum": of }),
        ValueBounds::Bool { .. } => json!({ "enum": [true, false] }),
    }
}

impl Machine for ScopeValues {
    const KIND: EntityKind = EntityKind::Policy;
    /// A value in force of each key and 200 future ones, each with its reason.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(
        state: Option<&Self>,
        command: Command,
        ctx: &TransitionContext<'_>,
    ) -> Result<Transition<Self>, Rejection> {
        match (state, command) {
            (Some(values), Command::Write(new)) => values.write(*new, ctx),
            (Some(values), Command::TakeBack(what)) => values.revoke(what, ctx),
            (None, Command::TakeBack(what)) => Err(Rejection::NotSet { key: what.key }),
            (None, Command::Write(_)) if ctx.policy.scopes() >= MAX_SCOPES => {
                Err(Rejection::TooManyScopes { limit: MAX_SCOPES })
            }
            // A scope's entity is created with its first value.
            (None, Command::Write(new)) => Self { scope: new.scope.clone(), values: Vec::new() }.write(*new, ctx),
            (None, Command::Tick) => Err(Rejection::NotFound),
            (Some(_), Command::Tick) => Ok(Transition::stay(Reply::Done)),
        }
    }

    fn state(&self) -> &'static str {
        "present"
    }
}

impl ScopeValues {
    /// The value in force in this scope at `at`.
    fn of_key_at(&self, key: &str, at: Timestamp) -> Option<&PolicyVersion> {
        let so_far = self.values.iter().filter(|written| written.key == key && written.effective_at <= at);
        so_far.max_by_key(|written| written.effective_at)
    }

    /// The time of a write, never before the last one: a shard may move to a member whose clock is slightly behind, and a later write has
    /// to win.
    fn now(&self, clock: Timestamp) -> Timestamp {
        let written = self.values.iter().map(|written| written.written_at);
        written.filter(|at| *at <= clock + EFFECTIVE_AT_TOLERANCE).fold(clock, Ord::max)
    }

    fn write(&self, new: PolicyWrite, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let PolicyWrite { scope: _, key, value, effective_at, reason, expected } = new;
        if !key.admits(&value) {
            return Err(Rejection::OutOfBounds { key, value });
        }
        if !key.can_be_set_for(&self.scope) {
            return Err(Rejection::Scope { key, scope: self.scope.clone() });
        }
        let now = self.now(ctx.now);
        let effective_at = effective_instant(effective_at, now)?;
        let old_value = self.of_key_at(key.name(), effective_at).map(|written| written.value.clone());
        expected.check(key, old_value.as_ref())?;
        let written = PolicyVersion {
            id: PolicyValueId(ctx.new_id(0)),
            key: key.name().to_owned(),
            value,
            effective_at,
            reason,
            old_value,
            written_by: ctx.by.to_string(),
            written_at: now,
        };
        let next = self.with(written.clone(), now);
        next.keep_within_bounds(key, now)?;
        next.keep_order(key, effective_at, ctx)?;
        Ok(next.written(key, written, ctx))
    }

    fn revoke(&self, what: PolicyRevocation, ctx: &TransitionContext<'_>) -> Result<Transition<Self>, Rejection> {
        let PolicyRevocation { key, effective_at, reason, expected } = what;
        let now = self.now(ctx.now);
        let in_force = self.of_key_at(key.name(), now);
        let found = match effective_at.map(|at| at.trunc_subsecs(6)) {
            Some(at) if at > now => self.of_key_at(key.name(), at).filter(|written| written.effective_at == at),
            Some(at) => in_force.filter(|written| written.effective_at == at),
            None => in_force,
        };
        let taken = found.cloned().ok_or(Rejection::NotSet { key })?;
        expected.check(key, Some(&taken.value))?;
        let from = taken.effective_at.max(now);
        let mut next = self.clone();
        // The values that the revoked one superseded are removed with it: they do not return.
        let goes = |at: Timestamp| at == taken.effective_at || (at < taken.effective_at && from == now);
        next.values.retain(|written| written.key != taken.key || !goes(written.effective_at));
        next.keep_order(key, from, ctx)?;
        Ok(next.revoked(key, &taken, &reason, ctx))
    }

    fn with(&self, written: PolicyVersion, now: Timestamp) -> Self {
        let mut next = self.clone();
        next.values.retain(|before| before.key != written.key || before.effective_at != written.effective_at);
        next.values.push(written);
        next.values.sort_by(|a, b| (&a.key, a.effective_at).cmp(&(&b.key, b.effective_at)));
        let in_force = next.clone();
        next.values.retain(|value| {
            value.effective_at > now
                || in_force.of_key_at(&value.key, now).is_some_and(|holds| holds.effective_at == value.effective_at)
        });
        next
    }

    fn keep_within_bounds(&self, key: PolicyKey, now: Timestamp) -> Result<(), Rejection> {
        let ahead = self.values.iter().filter(|written| written.effective_at > now);
        let of_key = ahead.clone().filter(|written| written.key == key.name()).count();
        for (count, limit) in [(of_key, MAX_PENDING_PER_KEY), (ahead.count(), MAX_PENDING)] {
            if count > limit {
                return Err(Rejection::TooManyAhead { limit });
            }
        }
        Ok(())
    }

    /// Checks the order of bounding keys. Simultaneous writes in two scopes are not compared: each is checked against the values that are
    /// known of the others.
    fn keep_order(&self, key: PolicyKey, from: Timestamp, ctx: &TransitionContext<'_>) -> Result<(), Rejection> {
        for (low, high) in ORDERED.into_iter().filter(|(low, high)| [low, high].contains(&&key)) {
            let mut book = ctx.policy.without_scope([low, high], &self.scope);
            self.enter(&mut book);
            if let Some(crossing) = book.crossing((low, high), &self.scope, from) {
                return Err(Rejection::Crosses { key, low, high, crossing });
            }
        }
        Ok(())
    }

    fn written(self, key: PolicyKey, written: PolicyVersion, ctx: &TransitionContext<'_>) -> Transition<Self> {
        let metadata = json!({
            "policy_key": written.key,
            "scope": self.scope,
            "old_value": written.old_value,
            "new_value": written.value,
            "effective_at": written.effective_at,
            "reason": written.reason,
        });
        let audit =
            AuditRecord::new(AuditAction::PoliciesWrite, EntityRef { kind: EntityKind::Policy, id: ctx.id }, metadata);
        let event = Event::PolicyWritten {
            policy_id: PolicyId(ctx.id),
            value_id: written.id,
            policy: key,
            effective_at: written.effective_at,
        };
        let why = format!("{} is {} from {} on", written.key, written.value, written.effective_at);
        let reply = Reply::Written { scope: self.scope.clone(), written: Box::new(written) };
        Transition::to(self, reply, why).audit(audit).event(event).effect(Effect::ReadPolicy)
    }

    fn revoked(
        self,
        key: PolicyKey,
        taken: &PolicyVersion,
        reason: &str,
        ctx: &TransitionContext<'_>,
    ) -> Transition<Self> {
        let metadata = json!({
            "policy_key": taken.key,
            "scope": self.scope,
            "old_value": taken.value,
            "new_value": null,
            "effective_at": taken.effective_at,
            "reason": reason,
        });
        let audit = AuditRecord::new(
            AuditAction::PoliciesTakeBack,
            EntityRef { kind: EntityKind::Policy, id: ctx.id },
            metadata,
        );
        let event = Event::PolicyWritten {
            policy_id: PolicyId(ctx.id),
            value_id: taken.id,
            policy: key,
            effective_at: taken.effective_at.max(ctx.now),
        };
        let why = format!("{} is not {} from {} on", taken.key, taken.value, taken.effective_at);
        Transition::to(self, Reply::Done, why).audit(audit).event(event).effect(Effect::ReadPolicy)
    }

    /// Enters all values into a book. Values that this release does not know or admit are left out, and returned by their key: the less
    /// specific value is in force there.
    pub fn enter(&self, book: &mut PolicyBook) -> Vec<&str> {
        let mut enter = |written: &PolicyVersion| {
            let key = PolicyKey::parse(&written.key)?;
            book.set(key, self.scope.clone(), written.effective_at, written.value.clone()).ok()
        };
        self.values.iter().filter(|written| enter(written).is_none()).map(|written| written.key.as_str()).collect()
    }
}

impl ExpectedValue {
    fn check(self, key: PolicyKey, current: Option<&PolicyValue>) -> Result<(), Rejection> {
        let holds = match &self {
            Self::Anything => true,
            Self::Nothing => current.is_none(),
            Self::This(expected) => current == Some(expected),
        };
        if holds { Ok(()) } else { Err(Rejection::Differs { key, current: current.cloned() }) }
    }
}

/// The effective time of a value, with the precision of Postgres.
fn effective_instant(asked: Option<Timestamp>, now: Timestamp) -> Result<Timestamp, Rejection> {
    let Some(asked) = asked.map(|at| at.trunc_subsecs(6)) else { return Ok(now) };
    if asked < now - EFFECTIVE_AT_TOLERANCE {
        return Err(Rejection::Past { now });
    }
    let latest = now + EFFECTIVE_AT_HORIZON;
    if asked > latest { Err(Rejection::TooFarAhead { latest }) } else { Ok(asked.max(now)) }
}

#[cfg(test)]
mod tests;

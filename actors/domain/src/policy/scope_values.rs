//! The policy values of one scope, written by administrators (specification, *Policy value*).
//!
//! What is superseded leaves the state: it stands in the history and the audit log. What is kept is what is in force and what
//! will be.

use super::{Crossing, Key, ORDERED, PolicyBook, Scope, Value};
use crate::audit::{Audit, AuditAction};
use crate::authz::Action;
use crate::event::Event;
use crate::id::{EntityRef, Kind, PolicyId, PolicyValueId};
use crate::machine::{self, Ctx, Deadline, Effect, Keys, Machine, Step, Timestamp};
use chrono::{SubsecRound as _, TimeDelta};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// How far back `effective_at` may lie and still mean now: for the clock of whoever asks, and the way.
const LATENESS: TimeDelta = TimeDelta::seconds(60);
/// How far ahead it may lie.
const FORESIGHT: TimeDelta = TimeDelta::days(3660);
/// Values of one key that may lie ahead in one scope, and of all keys.
const AHEAD_OF_KEY: usize = 20;
const AHEAD: usize = 200;
/// Scopes with values of their own. Every process reads all of them.
const SCOPES: usize = 10_000;

/// The state: what is set in one scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeValues {
    pub scope: Scope,
    /// By key and the instant from which they hold. Keys of another release stay as they are.
    pub values: Vec<Written>,
}

/// One value, as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    pub id: PolicyValueId,
    pub key: String,
    pub value: Value,
    pub effective_at: Timestamp,
    pub reason: String,
    /// What would hold for this scope itself from then on, if this had not been written.
    pub old_value: Option<Value>,
    pub written_by: String,
    pub written_at: Timestamp,
}

/// A value to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewValue {
    pub scope: Scope,
    pub key: Key,
    pub value: Value,
    /// `None`: at once.
    pub effective_at: Option<Timestamp>,
    pub reason: String,
    pub expected: Expected,
}

/// What the writer believes to replace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Expected {
    Anything,
    /// Nothing is set in this scope.
    Nothing,
    This(Value),
}

/// A value to be taken back, so that the less specific one holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeBack {
    pub key: Key,
    /// Which one of the key's values: the one that holds from this instant on. `None`: the one in force.
    pub effective_at: Option<Timestamp>,
    pub reason: String,
    pub expected: Expected,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    Write(Box<NewValue>),
    TakeBack(TakeBack),
    Tick,
}

impl machine::Command for Command {
    fn name(&self) -> &'static str {
        match self {
            Self::Write(_) => "write",
            Self::TakeBack(_) => "take_back",
            Self::Tick => "tick",
        }
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
    Written { scope: Scope, written: Box<Written> },
    Done,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(tag = "rejection", rename_all = "snake_case")]
pub enum Rejection {
    #[error("nothing was ever written for this scope")]
    NotFound,
    #[error("{} has no such value in this scope", key.name())]
    NotSet { key: Key },
    #[error("{} does not admit {value}", key.name())]
    OutOfBounds { key: Key, value: Value },
    #[error("{} has no value for {scope}", key.name())]
    Scope { key: Key, scope: Scope },
    #[error("{} cannot be {value} yet", key.name())]
    NotBuilt { key: Key, value: Value },
    #[error("{} would be over {} from {} on", low.name(), high.name(), crossing.at)]
    Crosses { key: Key, low: Key, high: Key, crossing: Crossing },
    #[error("the value is another")]
    Differs { key: Key, current: Option<Value> },
    #[error("effective_at lies in the past")]
    Past { now: Timestamp },
    #[error("effective_at lies too far ahead")]
    TooFarAhead { latest: Timestamp },
    #[error("{limit} values lie ahead")]
    TooManyAhead { limit: usize },
    #[error("{limit} scopes have values of their own")]
    TooManyScopes { limit: usize },
}

impl Machine for ScopeValues {
    const KIND: Kind = Kind::Policy;
    /// A value in force of each key and 200 ahead, each with its reason.
    const SNAPSHOT_MOST: usize = 512 * 1024;
    type Command = Command;
    type Reply = Reply;
    type Rejection = Rejection;

    fn decide(state: Option<&Self>, command: Command, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        match (state, command) {
            (Some(values), Command::Write(new)) => values.write(*new, ctx),
            (Some(values), Command::TakeBack(what)) => values.take_back(what, ctx),
            (None, Command::TakeBack(what)) => Err(Rejection::NotSet { key: what.key }),
            (None, Command::Write(_)) if ctx.policy.scopes() >= SCOPES => {
                Err(Rejection::TooManyScopes { limit: SCOPES })
            }
            // A scope comes to be with its first value.
            (None, Command::Write(new)) => Self { scope: new.scope.clone(), values: Vec::new() }.write(*new, ctx),
            (None, Command::Tick) => Err(Rejection::NotFound),
            (Some(_), Command::Tick) => Ok(Step::stay(Reply::Done)),
        }
    }

    fn state(&self) -> &'static str {
        "present"
    }

    fn deadline(&self) -> Option<Deadline> {
        None
    }

    fn keys(&self) -> Keys {
        Keys::default()
    }

    fn tick() -> Command {
        Command::Tick
    }
}

impl ScopeValues {
    /// What holds in this scope at `at`, by what is written so far.
    fn of_key_at(&self, key: &str, at: Timestamp) -> Option<&Written> {
        let so_far = self.values.iter().filter(|written| written.key == key && written.effective_at <= at);
        so_far.max_by_key(|written| written.effective_at)
    }

    /// Never before the last write: a shard may come to a member whose clock is a little behind, and what is written later has to win.
    fn now(&self, clock: Timestamp) -> Timestamp {
        let written = self.values.iter().map(|written| written.written_at);
        written.filter(|at| *at <= clock + LATENESS).fold(clock, Ord::max)
    }

    fn write(&self, new: NewValue, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let NewValue { scope: _, key, value, effective_at, reason, expected } = new;
        if !key.admits(&value) {
            return Err(Rejection::OutOfBounds { key, value });
        }
        if !key.can_be_set_for(&self.scope) {
            return Err(Rejection::Scope { key, scope: self.scope.clone() });
        }
        if key.is_not_built(&value) {
            return Err(Rejection::NotBuilt { key, value });
        }
        let now = self.now(ctx.now);
        let effective_at = instant(effective_at, now)?;
        let old_value = self.of_key_at(key.name(), effective_at).map(|written| written.value.clone());
        expected.check(key, old_value.as_ref())?;
        let written = Written {
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
        Ok(next.said(key, written, ctx))
    }

    fn take_back(&self, what: TakeBack, ctx: &Ctx<'_>) -> Result<Step<Self>, Rejection> {
        let TakeBack { key, effective_at, reason, expected } = what;
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
        // With the one in force go those that it superseded: they do not come back.
        let goes = |at: Timestamp| at == taken.effective_at || (at < taken.effective_at && from == now);
        next.values.retain(|written| written.key != taken.key || !goes(written.effective_at));
        next.keep_order(key, from, ctx)?;
        Ok(next.said_of_taken(key, &taken, &reason, ctx))
    }

    fn with(&self, written: Written, now: Timestamp) -> Self {
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

    fn keep_within_bounds(&self, key: Key, now: Timestamp) -> Result<(), Rejection> {
        let ahead = self.values.iter().filter(|written| written.effective_at > now);
        let of_key = ahead.clone().filter(|written| written.key == key.name()).count();
        for (count, limit) in [(of_key, AHEAD_OF_KEY), (ahead.count(), AHEAD)] {
            if count > limit {
                return Err(Rejection::TooManyAhead { limit });
            }
        }
        Ok(())
    }

    /// What is set in two scopes at the same moment is not compared: each is checked against what is known of the others.
    fn keep_order(&self, key: Key, from: Timestamp, ctx: &Ctx<'_>) -> Result<(), Rejection> {
        for (low, high) in ORDERED.into_iter().filter(|(low, high)| [low, high].contains(&&key)) {
            let mut book = ctx.policy.of_others([low, high], &self.scope);
            self.enter(&mut book);
            if let Some(crossing) = book.crossing((low, high), &self.scope, from) {
                return Err(Rejection::Crosses { key, low, high, crossing });
            }
        }
        Ok(())
    }

    fn said(self, key: Key, written: Written, ctx: &Ctx<'_>) -> Step<Self> {
        let metadata = json!({
            "policy_key": written.key,
            "scope": self.scope,
            "old_value": written.old_value,
            "new_value": written.value,
            "effective_at": written.effective_at,
            "reason": written.reason,
        });
        let audit = Audit::new(AuditAction::PoliciesWrite, EntityRef { kind: Kind::Policy, id: ctx.id }, metadata);
        let event = Event::PolicyWritten {
            policy_id: PolicyId(ctx.id),
            value_id: written.id,
            policy: key,
            effective_at: written.effective_at,
        };
        let why = format!("{} is {} from {} on", written.key, written.value, written.effective_at);
        let reply = Reply::Written { scope: self.scope.clone(), written: Box::new(written) };
        Step::to(self, reply, why).audit(audit).event(event).effect(Effect::ReadPolicy)
    }

    fn said_of_taken(self, key: Key, taken: &Written, reason: &str, ctx: &Ctx<'_>) -> Step<Self> {
        let metadata = json!({
            "policy_key": taken.key,
            "scope": self.scope,
            "old_value": taken.value,
            "new_value": null,
            "effective_at": taken.effective_at,
            "reason": reason,
        });
        let audit = Audit::new(AuditAction::PoliciesTakeBack, EntityRef { kind: Kind::Policy, id: ctx.id }, metadata);
        let event = Event::PolicyWritten {
            policy_id: PolicyId(ctx.id),
            value_id: taken.id,
            policy: key,
            effective_at: taken.effective_at.max(ctx.now),
        };
        let why = format!("{} is not {} from {} on", taken.key, taken.value, taken.effective_at);
        Step::to(self, Reply::Done, why).audit(audit).event(event).effect(Effect::ReadPolicy)
    }

    /// Enters everything into a book. What this release does not know or admit is left out, and returned by its key: the less
    /// specific value holds there.
    pub fn enter(&self, book: &mut PolicyBook) -> Vec<&str> {
        let mut enter = |written: &Written| {
            let key = Key::parse(&written.key)?;
            book.set(key, self.scope.clone(), written.effective_at, written.value.clone()).ok()
        };
        self.values.iter().filter(|written| enter(written).is_none()).map(|written| written.key.as_str()).collect()
    }
}

impl Expected {
    fn check(self, key: Key, current: Option<&Value>) -> Result<(), Rejection> {
        let holds = match &self {
            Self::Anything => true,
            Self::Nothing => current.is_none(),
            Self::This(expected) => current == Some(expected),
        };
        if holds { Ok(()) } else { Err(Rejection::Differs { key, current: current.cloned() }) }
    }
}

/// From when on the value holds, as Postgres keeps times.
fn instant(asked: Option<Timestamp>, now: Timestamp) -> Result<Timestamp, Rejection> {
    let Some(asked) = asked.map(|at| at.trunc_subsecs(6)) else { return Ok(now) };
    if asked < now - LATENESS {
        return Err(Rejection::Past { now });
    }
    let latest = now + FORESIGHT;
    if asked > latest { Err(Rejection::TooFarAhead { latest }) } else { Ok(asked.max(now)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

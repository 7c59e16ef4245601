//! What holds for whom, and since when.

use super::{AppliesTo, Bounds, Key, Value};
use crate::authz::{Caller, Principal};
use crate::machine::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Whom a value is for. Resolution goes from the most specific to the global one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    UserId(String),
    ProjectId(String),
    OrgId(String),
    Plan(String),
    Global,
}

impl Scope {
    /// Which kind of scope, as the API names it.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::UserId(_) => "user_id",
            Self::ProjectId(_) => "project_id",
            Self::OrgId(_) => "org_id",
            Self::Plan(_) => "plan",
            Self::Global => "global",
        }
    }

    /// Whose, where it is somebody's.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::UserId(id) | Self::ProjectId(id) | Self::OrgId(id) | Self::Plan(id) => Some(id),
            Self::Global => None,
        }
    }
}

/// The scope's one name, from which the id of its values follows: `user_id:ann`, `global`.
impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id() {
            Some(id) => write!(f, "{}:{id}", self.kind()),
            None => f.write_str(self.kind()),
        }
    }
}

/// The scopes that apply to one request, most specific first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scopes {
    pub user_id: Option<String>,
    pub project_id: Option<String>,
    pub org_id: Option<String>,
    pub plan: Option<String>,
}

impl Scopes {
    /// Where nobody in particular is concerned: the global value.
    #[must_use]
    pub fn global() -> Self {
        Self::default()
    }

    /// Of those that decide about such a key. An account is the organization's wherever a token names one.
    fn most_specific_first(&self, applies_to: AppliesTo) -> impl Iterator<Item = Scope> {
        let is_of_an_org = matches!(applies_to, AppliesTo::AccountHolder) && self.org_id.is_some();
        let named = [
            self.user_id.clone().filter(|_| !is_of_an_org).map(Scope::UserId),
            self.project_id.clone().map(Scope::ProjectId),
            self.org_id.clone().map(Scope::OrgId),
            self.plan.clone().map(Scope::Plan),
        ];
        let named = named.into_iter().flatten().chain([Scope::Global]);
        named.filter(move |scope| applies_to.scope_kinds().contains(&scope.kind()))
    }

    /// Somebody who is in both scopes, if anybody can be.
    fn of_both(one: &Scope, other: &Scope) -> Option<Self> {
        let mut scopes = Self::default();
        for scope in [one, other] {
            let (place, id) = match scope {
                Scope::UserId(id) => (&mut scopes.user_id, id),
                Scope::ProjectId(id) => (&mut scopes.project_id, id),
                Scope::OrgId(id) => (&mut scopes.org_id, id),
                Scope::Plan(id) => (&mut scopes.plan, id),
                Scope::Global => continue,
            };
            if place.replace(id.clone()).is_some_and(|before| before != *id) {
                return None;
            }
        }
        Some(scopes)
    }
}

impl From<&Caller> for Scopes {
    fn from(caller: &Caller) -> Self {
        Self {
            user_id: Some(caller.user_id.clone()),
            project_id: caller.project_id.clone(),
            org_id: caller.org_id.clone(),
            plan: caller.plan.clone(),
        }
    }
}

impl From<&Principal> for Scopes {
    fn from(principal: &Principal) -> Self {
        match principal {
            Principal::Caller(caller) => Self::from(caller),
            Principal::Node(_) | Principal::System(_) => Self::global(),
        }
    }
}

/// A value that holds, and by what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    pub value: Value,
    /// The scope that won and since when its value holds; `None` where it is the catalog's default.
    pub by: Option<(Scope, Timestamp)>,
}

/// A value that a key cannot have, or cannot have there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    #[error("{} does not admit {value:?}; it takes {:?}", key.name(), key.bounds())]
    Value { key: Key, value: Value },
    #[error("{} has no value for {scope}: {}", key.name(), key.applies_to().reason())]
    Scope { key: Key, scope: Scope },
}

/// Two keys that bound each other, crossing for somebody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crossing {
    pub at: Timestamp,
    pub low: i64,
    pub high: i64,
    /// The other scope whose value takes part.
    pub with: Scope,
}

/// Every value that holds or will, by scope, key and the instant from which it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyBook {
    values: BTreeMap<Scope, BTreeMap<Key, BTreeMap<Timestamp, Value>>>,
}

impl PolicyBook {
    /// Enters a value. What the key does not admit is not entered.
    ///
    /// # Errors
    /// [`NotAdmitted`]
    pub fn set(&mut self, key: Key, scope: Scope, effective_at: Timestamp, value: Value) -> Result<(), NotAdmitted> {
        if !key.admits(&value) {
            return Err(NotAdmitted::Value { key, value });
        }
        if !key.can_be_set_for(&scope) {
            return Err(NotAdmitted::Scope { key, scope });
        }
        self.values.entry(scope).or_default().entry(key).or_default().insert(effective_at, value);
        Ok(())
    }

    /// How many scopes have values of their own.
    #[must_use]
    pub fn scopes(&self) -> usize {
        self.values.len()
    }

    /// The value that holds at `now` for `scopes`, and what it comes from.
    #[must_use]
    pub fn look_up(&self, key: Key, scopes: &Scopes, now: Timestamp) -> Resolved {
        let in_force = |scope: Scope| {
            let of_key = self.values.get(&scope)?.get(&key)?;
            let (since, value) = of_key.range(..=now).next_back()?;
            Some(Resolved { value: value.clone(), by: Some((scope, *since)) })
        };
        let found = scopes.most_specific_first(key.applies_to()).find_map(in_force);
        found.unwrap_or_else(|| Resolved { value: key.default_value(), by: None })
    }

    /// The value that holds at `now` for `scopes`, and the scope that won.
    #[must_use]
    pub fn resolve(&self, key: Key, scopes: &Scopes, now: Timestamp) -> (Value, Option<Scope>) {
        let Resolved { value, by } = self.look_up(key, scopes, now);
        (value, by.map(|(scope, _)| scope))
    }

    /// The value of an integer key.
    #[must_use]
    pub fn int(&self, key: Key, scopes: &Scopes, now: Timestamp) -> i64 {
        match (self.resolve(key, scopes, now).0, key.bounds()) {
            (Value::Int(value), _) => value,
            (Value::Bool(_) | Value::Text(_), Bounds::Int { default, .. }) => default,
            (Value::Bool(_) | Value::Text(_), Bounds::Enum { .. } | Bounds::Bool { .. }) => 0,
        }
    }

    /// The value of a key that is counted in seconds.
    #[must_use]
    pub fn seconds(&self, key: Key, scopes: &Scopes, now: Timestamp) -> TimeDelta {
        TimeDelta::seconds(self.int(key, scopes, now))
    }

    /// The value of a switch.
    #[must_use]
    pub fn is_on(&self, key: Key, scopes: &Scopes, now: Timestamp) -> bool {
        self.resolve(key, scopes, now).0 == Value::Bool(true)
    }

    /// The value of a text key.
    #[must_use]
    pub fn text(&self, key: Key, scopes: &Scopes, now: Timestamp) -> String {
        match self.resolve(key, scopes, now).0 {
            Value::Text(text) => text,
            Value::Int(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
        }
    }

    /// The first instant from `from` on at which somebody to whom `scope` applies would have a `low` over their `high`.
    ///
    /// Whatever scopes a caller has, the two values come from two of them: so pairs of scopes are all that has to be looked at.
    #[must_use]
    pub fn crossing(&self, (low, high): (Key, Key), scope: &Scope, from: Timestamp) -> Option<Crossing> {
        let concerned = |values: &BTreeMap<Key, _>| values.contains_key(&low) || values.contains_key(&high);
        let others = self.values.iter().filter(|(_, values)| concerned(values)).map(|(other, _)| other);
        let crossings = others.chain([&Scope::Global]).filter_map(|other| {
            let caller = Scopes::of_both(scope, other)?;
            let changes = [scope, other, &Scope::Global].into_iter().filter_map(|scope| self.values.get(scope));
            let changes = changes.flat_map(|values| [low, high].into_iter().filter_map(|key| values.get(&key)));
            let instants: BTreeSet<_> =
                changes.flat_map(BTreeMap::keys).copied().filter(|at| *at > from).chain([from]).collect();
            instants.into_iter().find_map(|at| {
                let (low, high) = (self.int(low, &caller, at), self.int(high, &caller, at));
                (low > high).then(|| Crossing { at, low, high, with: other.clone() })
            })
        });
        crossings.min_by_key(|crossing| crossing.at)
    }

    /// The book without what is set in `scope` for these keys, and of the others nothing but these.
    #[must_use]
    pub(super) fn of_others(&self, keys: [Key; 2], scope: &Scope) -> Self {
        let kept = |values: &BTreeMap<Key, BTreeMap<Timestamp, Value>>| {
            let of_keys = keys.iter().filter_map(|key| Some((*key, values.get(key)?.clone())));
            Some(of_keys.collect::<BTreeMap<_, _>>()).filter(|values| !values.is_empty())
        };
        let others = self.values.iter().filter(|(other, _)| *other != scope);
        Self { values: others.filter_map(|(other, values)| Some((other.clone(), kept(values)?))).collect() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::billing_account::Holder;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(second, 0).unwrap()
    }

    #[test]
    fn the_most_specific_scope_wins_and_says_so() {
        let mut book = PolicyBook::default();
        let key = Key::AllocationMaxConcurrent;
        book.set(key, Scope::Global, at(0), Value::Int(10)).unwrap();
        book.set(key, Scope::Plan("pro".into()), at(0), Value::Int(20)).unwrap();
        book.set(key, Scope::UserId("ann".into()), at(0), Value::Int(30)).unwrap();
        let ann = Scopes { user_id: Some("ann".into()), plan: Some("pro".into()), ..Scopes::default() };
        let bob = Scopes { user_id: Some("bob".into()), plan: Some("pro".into()), ..Scopes::default() };
        assert_eq!(book.resolve(key, &ann, at(1)), (Value::Int(30), Some(Scope::UserId("ann".into()))));
        assert_eq!(book.resolve(key, &bob, at(1)), (Value::Int(20), Some(Scope::Plan("pro".into()))));
        assert_eq!(book.int(key, &Scopes::global(), at(1)), 10);
    }

    #[test]
    fn a_value_holds_from_its_second_and_not_before() {
        let mut book = PolicyBook::default();
        let key = Key::NodeOfflineAfter;
        book.set(key, Scope::Global, at(100), Value::Int(30)).unwrap();
        assert_eq!(book.int(key, &Scopes::global(), at(99)), 90);
        assert_eq!(book.int(key, &Scopes::global(), at(100)), 30);
    }

    #[test]
    fn what_a_key_does_not_admit_is_not_entered() {
        let mut book = PolicyBook::default();
        let wrong = [Value::Int(9), Value::Int(3601), Value::Text("30".into()), Value::Bool(true)];
        for value in wrong {
            assert!(book.set(Key::NodeOfflineAfter, Scope::Global, at(0), value).is_err());
        }
        assert_eq!(book, PolicyBook::default());
    }

    #[test]
    fn what_wins_says_since_when_and_a_default_says_that_it_is_one() {
        let mut book = PolicyBook::default();
        let (key, ann) = (Key::NodeOfflineAfter, Scopes { user_id: Some("ann".into()), ..Scopes::default() });
        assert_eq!(book.look_up(key, &ann, at(0)), Resolved { value: Value::Int(90), by: None });
        book.set(key, Scope::Global, at(5), Value::Int(30)).unwrap();
        let resolved = book.look_up(key, &ann, at(9));
        assert_eq!(resolved, Resolved { value: Value::Int(30), by: Some((Scope::Global, at(5))) });
    }

    #[test]
    fn value_in_a_scope_that_nothing_reads_is_not_entered_and_never_wins() {
        let mut book = PolicyBook::default();
        let (window, offline) = (Key::BillingWindow, Key::NodeOfflineAfter);
        for scope in [Scope::ProjectId("p".into()), Scope::Plan("pro".into())] {
            let refused = book.set(window, scope.clone(), at(0), Value::Int(7));
            assert_eq!(refused, Err(NotAdmitted::Scope { key: window, scope }));
        }
        assert!(book.set(offline, Scope::UserId("ann".into()), at(0), Value::Int(30)).is_err());
        assert_eq!(book, PolicyBook::default());
    }

    #[test]
    fn account_of_an_organization_is_resolved_for_the_organization_whoever_rents() {
        let mut book = PolicyBook::default();
        let (window, ssh_keys) = (Key::BillingWindow, Key::SshKeyMaxPerUser);
        let (user, org) = (Scope::UserId("ann".into()), Scope::OrgId("acme".into()));
        for key in [window, ssh_keys] {
            book.set(key, user.clone(), at(0), Value::Int(30)).unwrap();
            book.set(key, org.clone(), at(0), Value::Int(90)).unwrap();
        }
        let ann = Scopes { user_id: Some("ann".into()), plan: Some("pro".into()), ..Scopes::default() };
        let ann_at_acme = Scopes { org_id: Some("acme".into()), ..ann.clone() };
        for scopes in [&ann, &ann_at_acme] {
            let holder = Holder::paying_for("ann", scopes.org_id.as_deref());
            assert_eq!(book.resolve(window, scopes, at(1)), book.resolve(window, &holder.scopes(), at(1)));
        }
        assert_eq!(book.resolve(window, &ann_at_acme, at(1)), (Value::Int(90), Some(org)));
        assert_eq!(book.resolve(ssh_keys, &ann_at_acme, at(1)), (Value::Int(30), Some(user)));
    }

    const DEPOSITS: (Key, Key) = (Key::BillingMinimumDeposit, Key::BillingMaximumDeposit);

    #[test]
    fn two_keys_cross_only_for_somebody_who_can_exist_and_at_their_first_instant() {
        let (user, bob) = (Scope::UserId("ann".into()), Scope::UserId("bob".into()));
        let org = Scope::OrgId("acme".into());
        let mut book = PolicyBook::default();
        book.set(DEPOSITS.0, user.clone(), at(10), Value::Int(5000)).unwrap();
        book.set(DEPOSITS.1, bob, at(0), Value::Int(2000)).unwrap();
        assert_eq!(book.crossing(DEPOSITS, &user, at(0)), None, "nobody is both ann and bob");
        book.set(DEPOSITS.1, org.clone(), at(20), Value::Int(4000)).unwrap();
        let crossing = Crossing { at: at(20), low: 5000, high: 4000, with: org.clone() };
        assert_eq!(book.crossing(DEPOSITS, &user, at(0)), Some(crossing));
        let from_the_other_side = book.crossing(DEPOSITS, &org, at(0)).unwrap();
        assert_eq!((from_the_other_side.at, from_the_other_side.with), (at(20), user.clone()));
        // Her own maximum comes before the one of her organisation.
        book.set(DEPOSITS.1, user.clone(), at(15), Value::Int(6000)).unwrap();
        assert_eq!(book.crossing(DEPOSITS, &user, at(0)), None);
        assert_eq!(book.crossing(DEPOSITS, &org, at(0)), None);
    }
}

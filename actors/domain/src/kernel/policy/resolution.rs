//! Resolution of policy values by scope and time.

use super::{AppliesTo, PolicyKey, PolicyValue, ValueBounds};
use crate::authz::{CallerIdentity, Principal, ResourceOwner};
use crate::finding::RuleOverrides;
use crate::hardware::ExpectedHardware;
use crate::id::{OrgId, ProjectId, SkuId, UserId};
use crate::time::Timestamp;
use crate::validation::ValidationMinimums;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The scope of a value. Resolution goes from the most specific to the global one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum PolicyScope {
    UserId(UserId),
    ProjectId(ProjectId),
    OrgId(OrgId),
    Plan(String),
    Global,
}

impl PolicyScope {
    /// The kind of the scope, as the API names it.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        self.into_str()
    }

    /// The id of the user, project, organization or plan; `None` for the global scope.
    #[must_use]
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::UserId(id) => Some(id.as_str()),
            Self::ProjectId(id) => Some(id.as_str()),
            Self::OrgId(id) => Some(id.as_str()),
            Self::Plan(id) => Some(id),
            Self::Global => None,
        }
    }
}

/// The scope's one name, from which the id of its values follows: `user_id:ann`, `global`.
impl fmt::Display for PolicyScope {
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
    pub user_id: Option<UserId>,
    pub project_id: Option<ProjectId>,
    pub org_id: Option<OrgId>,
    pub plan: Option<String>,
}

impl Scopes {
    /// The global scope alone.
    #[must_use]
    pub fn global() -> Self {
        Self::default()
    }

    /// The scopes that such a key is resolved in. An account belongs to the organization wherever a token names one: none of its users has
    /// a value of their own there. A recipient is a user also as a member of an organization.
    fn by_specificity(&self, applies_to: AppliesTo) -> impl Iterator<Item = PolicyScope> {
        let is_of_an_org = matches!(applies_to, AppliesTo::AccountHolder) && self.org_id.is_some();
        let named = [
            self.user_id.clone().filter(|_| !is_of_an_org).map(PolicyScope::UserId),
            self.project_id.clone().map(PolicyScope::ProjectId),
            self.org_id.clone().map(PolicyScope::OrgId),
            self.plan.clone().map(PolicyScope::Plan),
        ];
        let named = named.into_iter().flatten().chain([PolicyScope::Global]);
        named.filter(move |scope| applies_to.scope_kinds().contains(&scope.kind()))
    }

    /// The scopes of a subject that is in both scopes, if one can exist.
    fn of_both(one: &PolicyScope, other: &PolicyScope) -> Option<Self> {
        let mut scopes = Self::default();
        for scope in [one, other] {
            match scope {
                PolicyScope::UserId(id) => scopes.user_id = Some(id.clone()),
                PolicyScope::ProjectId(id) => scopes.project_id = Some(id.clone()),
                PolicyScope::OrgId(id) => scopes.org_id = Some(id.clone()),
                PolicyScope::Plan(id) => scopes.plan = Some(id.clone()),
                PolicyScope::Global => {}
            }
        }
        // A subject has one id of each kind.
        (one == other || one.kind() != other.kind()).then_some(scopes)
    }
}

impl From<&ResourceOwner> for Scopes {
    fn from(owner: &ResourceOwner) -> Self {
        let ResourceOwner { user_id, org_id, project_id, plan } = owner.clone();
        Self { user_id: Some(user_id), project_id, org_id, plan }
    }
}

impl From<&CallerIdentity> for Scopes {
    fn from(caller: &CallerIdentity) -> Self {
        Self::from(&ResourceOwner::from(caller))
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

/// A value in force, and its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResolvedPolicy {
    pub value: PolicyValue,
    /// The scope that won and since when its value is in force; `None` where it is the catalog's default.
    pub by: Option<(PolicyScope, Timestamp)>,
}

/// A value that a key does not admit, or not in this scope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyValueError {
    #[error("{} does not admit {value:?}; it takes {:?}", key.name(), key.bounds())]
    Value { key: PolicyKey, value: PolicyValue },
    #[error("{} has no value for {scope}: {}", key.name(), key.applies_to().reason())]
    Scope { key: PolicyKey, scope: PolicyScope },
}

/// Two keys that bound each other, with crossing values for a subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrossingBounds {
    pub at: Timestamp,
    pub low: i64,
    pub high: i64,
    /// The other scope whose value is involved.
    pub with: PolicyScope,
}

/// Every value that is or will be in force, by scope, key and effective time; and the overrides of health findings, the expected hardware and
/// the minimums of SKUs, which every process reads with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyBook {
    values: BTreeMap<PolicyScope, BTreeMap<PolicyKey, BTreeMap<Timestamp, PolicyValue>>>,
    health_rules: RuleOverrides,
    expected_hardware: BTreeMap<SkuId, ExpectedHardware>,
    minimums: BTreeMap<SkuId, ValidationMinimums>,
}

impl PolicyBook {
    /// Enters a value. A value that the key does not admit is not entered.
    ///
    /// # Errors
    /// [`PolicyValueError`]
    pub fn set(
        &mut self,
        key: PolicyKey,
        scope: PolicyScope,
        effective_at: Timestamp,
        value: PolicyValue,
    ) -> Result<(), PolicyValueError> {
        if !key.admits(&value) {
            return Err(PolicyValueError::Value { key, value });
        }
        if !key.can_be_set_for(&scope) {
            return Err(PolicyValueError::Scope { key, scope });
        }
        self.values.entry(scope).or_default().entry(key).or_default().insert(effective_at, value);
        Ok(())
    }

    /// The overrides of the table of health findings.
    #[must_use]
    pub const fn health_rules(&self) -> &RuleOverrides {
        &self.health_rules
    }

    pub fn set_health_rules(&mut self, overrides: RuleOverrides) {
        self.health_rules = overrides;
    }

    /// What the machines of a SKU must have; `None` where nothing is expected of them.
    #[must_use]
    pub fn expected_hardware(&self, sku: SkuId) -> Option<&ExpectedHardware> {
        self.expected_hardware.get(&sku)
    }

    pub fn set_expected_hardware(&mut self, expected: BTreeMap<SkuId, ExpectedHardware>) {
        self.expected_hardware = expected;
    }

    /// What a validation of a machine of this SKU has to reach.
    #[must_use]
    pub fn minimums(&self, sku_id: SkuId) -> &ValidationMinimums {
        static NONE: ValidationMinimums = ValidationMinimums(BTreeMap::new());
        self.minimums.get(&sku_id).unwrap_or(&NONE)
    }

    pub fn set_minimums(&mut self, sku_id: SkuId, minimums: ValidationMinimums) {
        self.minimums.insert(sku_id, minimums);
    }

    /// How many scopes have values of their own.
    #[must_use]
    pub fn scopes(&self) -> usize {
        self.values.len()
    }

    /// The value in force at `now` for `scopes`, and its origin.
    #[must_use]
    pub fn look_up(&self, key: PolicyKey, scopes: &Scopes, now: Timestamp) -> ResolvedPolicy {
        let in_force = |scope: PolicyScope| {
            let of_key = self.values.get(&scope)?.get(&key)?;
            let (since, value) = of_key.range(..=now).next_back()?;
            Some(ResolvedPolicy { value: value.clone(), by: Some((scope, *since)) })
        };
        let found = scopes.by_specificity(key.applies_to()).find_map(in_force);
        found.unwrap_or_else(|| ResolvedPolicy { value: key.default_value(), by: None })
    }

    /// The value in force at `now` for `scopes`, and the scope that won.
    #[must_use]
    pub fn resolve(&self, key: PolicyKey, scopes: &Scopes, now: Timestamp) -> (PolicyValue, Option<PolicyScope>) {
        let ResolvedPolicy { value, by } = self.look_up(key, scopes, now);
        (value, by.map(|(scope, _)| scope))
    }

    /// The value of an integer key.
    #[must_use]
    pub fn int(&self, key: PolicyKey, scopes: &Scopes, now: Timestamp) -> i64 {
        match (self.resolve(key, scopes, now).0, key.bounds()) {
            (PolicyValue::Int(value), _) => value,
            (PolicyValue::Bool(_) | PolicyValue::Text(_), ValueBounds::Int { default, .. }) => default,
            (PolicyValue::Bool(_) | PolicyValue::Text(_), ValueBounds::Enum { .. } | ValueBounds::Bool { .. }) => 0,
        }
    }

    /// The value of a key that is counted in seconds.
    #[must_use]
    pub fn seconds(&self, key: PolicyKey, scopes: &Scopes, now: Timestamp) -> TimeDelta {
        TimeDelta::seconds(self.int(key, scopes, now))
    }

    /// The value of a switch.
    #[must_use]
    pub fn is_on(&self, key: PolicyKey, scopes: &Scopes, now: Timestamp) -> bool {
        self.resolve(key, scopes, now).0 == PolicyValue::Bool(true)
    }

    /// The value of a text key.
    #[must_use]
    pub fn text(&self, key: PolicyKey, scopes: &Scopes, now: Timestamp) -> String {
        match self.resolve(key, scopes, now).0 {
            PolicyValue::Text(text) => text,
            PolicyValue::Int(value) => value.to_string(),
            PolicyValue::Bool(value) => value.to_string(),
        }
    }

    /// The first instant from `from` on at which a subject of `scope` would have a `low` above its `high`.
    ///
    /// Whatever scopes a caller has, the two values come from two of them: so only pairs of scopes have to be checked.
    #[must_use]
    pub fn crossing(
        &self,
        (low, high): (PolicyKey, PolicyKey),
        scope: &PolicyScope,
        from: Timestamp,
    ) -> Option<CrossingBounds> {
        let concerned = |values: &BTreeMap<PolicyKey, _>| values.contains_key(&low) || values.contains_key(&high);
        let others = self.values.iter().filter(|(_, values)| concerned(values)).map(|(other, _)| other);
        let crossings = others.chain([&PolicyScope::Global]).filter_map(|other| {
            let caller = Scopes::of_both(scope, other)?;
            let changes = [scope, other, &PolicyScope::Global].into_iter().filter_map(|scope| self.values.get(scope));
            let changes = changes.flat_map(|values| [low, high].into_iter().filter_map(|key| values.get(&key)));
            let instants: BTreeSet<_> =
                changes.flat_map(BTreeMap::keys).copied().filter(|at| *at > from).chain([from]).collect();
            instants.into_iter().find_map(|at| {
                let (low, high) = (self.int(low, &caller, at), self.int(high, &caller, at));
                (low > high).then(|| CrossingBounds { at, low, high, with: other.clone() })
            })
        });
        crossings.min_by_key(|crossing| crossing.at)
    }

    /// The book without the values of these keys in `scope`, and with no other keys.
    #[must_use]
    pub(crate) fn without_scope(&self, keys: [PolicyKey; 2], scope: &PolicyScope) -> Self {
        let kept = |values: &BTreeMap<PolicyKey, BTreeMap<Timestamp, PolicyValue>>| {
            let of_keys = keys.iter().filter_map(|key| Some((*key, values.get(key)?.clone())));
            Some(of_keys.collect::<BTreeMap<_, _>>()).filter(|values| !values.is_empty())
        };
        let others = self.values.iter().filter(|(other, _)| *other != scope);
        let values = others.filter_map(|(other, values)| Some((other.clone(), kept(values)?))).collect();
        Self { values, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account_holder::Holder;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(second, 0).unwrap()
    }

    #[test]
    fn most_specific_scope_wins_and_is_named() {
        let mut book = PolicyBook::default();
        let key = PolicyKey::AllocationMaxConcurrent;
        book.set(key, PolicyScope::Global, at(0), PolicyValue::Int(10)).unwrap();
        book.set(key, PolicyScope::Plan("pro".into()), at(0), PolicyValue::Int(20)).unwrap();
        book.set(key, PolicyScope::UserId("ann".into()), at(0), PolicyValue::Int(30)).unwrap();
        let ann = Scopes { user_id: Some("ann".into()), plan: Some("pro".into()), ..Scopes::default() };
        let bob = Scopes { user_id: Some("bob".into()), plan: Some("pro".into()), ..Scopes::default() };
        assert_eq!(book.resolve(key, &ann, at(1)), (PolicyValue::Int(30), Some(PolicyScope::UserId("ann".into()))));
        assert_eq!(book.resolve(key, &bob, at(1)), (PolicyValue::Int(20), Some(PolicyScope::Plan("pro".into()))));
        assert_eq!(book.int(key, &Scopes::global(), at(1)), 10);
    }

    #[test]
    fn value_is_in_force_from_its_effective_time() {
        let mut book = PolicyBook::default();
        let key = PolicyKey::NodeOfflineAfter;
        book.set(key, PolicyScope::Global, at(100), PolicyValue::Int(30)).unwrap();
        assert_eq!(book.int(key, &Scopes::global(), at(99)), 90);
        assert_eq!(book.int(key, &Scopes::global(), at(100)), 30);
    }

    #[test]
    fn inadmissible_value_is_not_entered() {
        let mut book = PolicyBook::default();
        let wrong =
            [PolicyValue::Int(9), PolicyValue::Int(3601), PolicyValue::Text("30".into()), PolicyValue::Bool(true)];
        for value in wrong {
            assert!(book.set(PolicyKey::NodeOfflineAfter, PolicyScope::Global, at(0), value).is_err());
        }
        assert_eq!(book, PolicyBook::default());
    }

    #[test]
    fn resolved_value_names_its_effective_time_or_that_it_is_the_default() {
        let mut book = PolicyBook::default();
        let (key, ann) = (PolicyKey::NodeOfflineAfter, Scopes { user_id: Some("ann".into()), ..Scopes::default() });
        assert_eq!(book.look_up(key, &ann, at(0)), ResolvedPolicy { value: PolicyValue::Int(90), by: None });
        book.set(key, PolicyScope::Global, at(5), PolicyValue::Int(30)).unwrap();
        let resolved = book.look_up(key, &ann, at(9));
        assert_eq!(resolved, ResolvedPolicy { value: PolicyValue::Int(30), by: Some((PolicyScope::Global, at(5))) });
    }

    #[test]
    fn value_in_an_inapplicable_scope_is_not_entered_and_never_wins() {
        let mut book = PolicyBook::default();
        let (window, offline) = (PolicyKey::BillingWindow, PolicyKey::NodeOfflineAfter);
        let scope = PolicyScope::ProjectId("p".into());
        let refused = book.set(window, scope.clone(), at(0), PolicyValue::Int(7));
        assert_eq!(refused, Err(PolicyValueError::Scope { key: window, scope }));
        assert!(book.set(offline, PolicyScope::UserId("ann".into()), at(0), PolicyValue::Int(30)).is_err());
        assert_eq!(book, PolicyBook::default());
    }

    #[test]
    fn account_of_an_organization_is_resolved_for_the_organization() {
        let mut book = PolicyBook::default();
        let (window, ssh_keys) = (PolicyKey::BillingWindow, PolicyKey::SshKeyMaxPerUser);
        let (user, org) = (PolicyScope::UserId("ann".into()), PolicyScope::OrgId("acme".into()));
        for key in [window, ssh_keys] {
            book.set(key, user.clone(), at(0), PolicyValue::Int(30)).unwrap();
            book.set(key, org.clone(), at(0), PolicyValue::Int(90)).unwrap();
        }
        let ann = Scopes { user_id: Some("ann".into()), plan: Some("pro".into()), ..Scopes::default() };
        let ann_at_acme = Scopes { org_id: Some("acme".into()), ..ann.clone() };
        for scopes in [&ann, &ann_at_acme] {
            let holder = Holder::paying_for(&"ann".into(), scopes.org_id.as_ref());
            let of_the_account = holder.scopes(scopes.plan.as_deref());
            assert_eq!(book.resolve(window, scopes, at(1)), book.resolve(window, &of_the_account, at(1)));
        }
        assert_eq!(book.resolve(window, &ann_at_acme, at(1)), (PolicyValue::Int(90), Some(org)));
        assert_eq!(book.resolve(ssh_keys, &ann_at_acme, at(1)), (PolicyValue::Int(30), Some(user)));
    }

    const DEPOSITS: (PolicyKey, PolicyKey) = (PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit);

    #[test]
    fn bounding_keys_cross_only_for_a_possible_subject_at_the_first_instant() {
        let (user, bob) = (PolicyScope::UserId("ann".into()), PolicyScope::UserId("bob".into()));
        let org = PolicyScope::OrgId("acme".into());
        let mut book = PolicyBook::default();
        book.set(DEPOSITS.0, user.clone(), at(10), PolicyValue::Int(5000)).unwrap();
        book.set(DEPOSITS.1, bob, at(0), PolicyValue::Int(2000)).unwrap();
        assert_eq!(book.crossing(DEPOSITS, &user, at(0)), None, "no user is both ann and bob");
        book.set(DEPOSITS.1, org.clone(), at(20), PolicyValue::Int(4000)).unwrap();
        let crossing = CrossingBounds { at: at(20), low: 5000, high: 4000, with: org.clone() };
        assert_eq!(book.crossing(DEPOSITS, &user, at(0)), Some(crossing));
        let from_the_other_side = book.crossing(DEPOSITS, &org, at(0)).unwrap();
        assert_eq!((from_the_other_side.at, from_the_other_side.with), (at(20), user.clone()));
        // A user's own maximum precedes the one of the organization.
        book.set(DEPOSITS.1, user.clone(), at(15), PolicyValue::Int(6000)).unwrap();
        assert_eq!(book.crossing(DEPOSITS, &user, at(0)), None);
        assert_eq!(book.crossing(DEPOSITS, &org, at(0)), None);
    }
}

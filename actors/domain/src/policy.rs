//! Business values: the catalog of keys (decisions 7, *Policy keys*) and their scoped resolution. A machine reads a value at the
//! moment of use, through `Ctx::policy`.

use crate::authz::Caller;
use crate::machine::Timestamp;
use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A value by its key's type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    Bool(bool),
    Int(i64),
    Text(String),
}

/// What a key admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bounds {
    /// Inclusive.
    Int {
        default: i64,
        min: i64,
        max: i64,
    },
    Enum {
        default: &'static str,
        of: &'static [&'static str],
    },
    Bool {
        default: bool,
    },
}

macro_rules! policy_keys {
    ($($variant:ident = $name:literal: $bounds:expr, $meaning:literal;)+) => {
        /// A key of the policy catalog.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum Key {
            $(#[doc = $meaning] $variant,)+
        }

        impl Key {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            #[must_use]
            pub const fn bounds(self) -> Bounds {
                match self { $(Self::$variant => $bounds),+ }
            }

            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning),+ }
            }
        }
    };
}

const fn int(default: i64, min: i64, max: i64) -> Bounds {
    Bounds::Int { default, min, max }
}

const fn one_of(default: &'static str, of: &'static [&'static str]) -> Bounds {
    Bounds::Enum { default, of }
}

const fn switch(default: bool) -> Bounds {
    Bounds::Bool { default }
}

policy_keys! {
    BillingLowBalanceThreshold = "billing.low_balance_threshold_minor": int(500, 0, 10_000_000), "Minor units below which a warning fires.";
    BillingWindow = "billing.window_seconds": int(60, 1, 3600), "Length of a billing window.";
    BillingMinimumDeposit = "billing.minimum_deposit_minor": int(1000, 50, 1_000_000), "Smallest checkout amount.";
    BillingMaximumDeposit = "billing.maximum_deposit_minor": int(100_000, 100, 100_000_000), "Largest checkout amount.";
    BillingDepletionGrace = "billing.depletion_grace_seconds": int(0, 0, 86_400), "How long an uncovered allocation runs on.";
    AllocationMaxConcurrent = "allocation.max_concurrent_per_user": int(50, 0, 10_000), "Allocations that one user may hold at once.";
    AllocationRefundWindow = "allocation.refund_window_days": int(30, 0, 365), "Refund eligibility.";
    AllocationIsolationModel = "allocation.isolation_model": one_of("user-revoke", &["user-revoke", "full-reimage"]), "How a node is cleaned after a tenant.";
    AllocationProvisioningTimeout = "allocation.provisioning_timeout_seconds": int(600, 5, 86_400), "How long provisioning may take.";
    AllocationReleaseTimeout = "allocation.release_timeout_seconds": int(600, 5, 86_400), "How long one clean-up attempt may take.";
    AllocationReleaseMaxAttempts = "allocation.release_max_attempts": int(10, 1, 1000), "Clean-up attempts before the node is fenced.";
    AllocationReleaseBackoffMax = "allocation.release_backoff_max_seconds": int(300, 1, 86_400), "Cap of the pause between clean-up attempts.";
    AllocationQueueMax = "allocation.queue_max_seconds": int(86_400, 0, 604_800), "Longest time that a request may wait for capacity.";
    RateLimitApi = "rate_limit.api_requests_per_minute": int(120, 1, 1_000_000), "Requests per user.";
    RateLimitTerminalToken = "rate_limit.terminal_token_requests_per_minute": int(10, 1, 100_000), "Terminal token minting.";
    RateLimitFinancial = "rate_limit.financial_requests_per_minute": int(30, 1, 100_000), "Payments, refunds, balance.";
    RateLimitAdminOverview = "rate_limit.admin_overview_requests_per_minute": int(600, 1, 1_000_000), "Admin overview polling.";
    TerminalSessionMaxTtl = "terminal.session_max_ttl_seconds": int(14_400, 60, 86_400), "Longest terminal session.";
    TerminalRecordingEnabled = "terminal.recording_enabled": switch(true), "Sessions are recorded.";
    TerminalRecordingMode = "terminal.recording_mode": one_of("best-effort", &["best-effort", "strict"]), "What happens when recording fails.";
    NotificationLowBalance = "notification.low_balance_enabled": switch(true), "Low-balance alerts.";
    NotificationBalanceDepleted = "notification.balance_depleted_enabled": switch(true), "Depletion alerts.";
    AuthServiceAccountTokenTtl = "auth.service_account_token_ttl_seconds": int(900, 60, 86_400), "Life of a service account's access token.";
    AuthServiceAccountsPerUser = "auth.service_accounts_per_user": int(20, 0, 500), "Service accounts that one user may have.";
    AuthServiceAccountKeysMax = "auth.service_account_keys_max": int(5, 2, 20), "Keys that are valid at once for one service account.";
    MaasEnabled = "maas.enabled": switch(false), "Bare-metal provider integration.";
    NodeEnrollmentTokenTtl = "node.enrollment_token_ttl_seconds": int(3600, 5, 86_400), "Life of an enrollment token.";
    NodeMaxRecoveries = "node.max_recoveries": int(5, 0, 1000), "Recoveries of one identity.";
    NodeOfflineAfter = "node.offline_after_seconds": int(90, 10, 3600), "Silence after which a node counts as offline.";
    NodeCertificateTtl = "node.certificate_ttl_seconds": int(86_400, 30, 2_592_000), "Life of a node certificate.";
    NodeDrainOverdue = "node.drain_overdue_seconds": int(86_400, 60, 2_592_000), "How long a drain may take before it shows as overdue.";
    SkuApprovalTtl = "sku.approval_ttl_seconds": int(86_400, 5, 2_592_000), "How long one approval of a SKU's change waits for the second.";
}

impl Key {
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|key| key.name() == name)
    }

    #[must_use]
    pub fn default_value(self) -> Value {
        match self.bounds() {
            Bounds::Int { default, .. } => Value::Int(default),
            Bounds::Enum { default, .. } => Value::Text(default.to_owned()),
            Bounds::Bool { default } => Value::Bool(default),
        }
    }

    /// True where `value` is of the key's type and inside its bounds.
    #[must_use]
    pub fn admits(self, value: &Value) -> bool {
        match (self.bounds(), value) {
            (Bounds::Int { min, max, .. }, Value::Int(value)) => (min..=max).contains(value),
            (Bounds::Enum { of, .. }, Value::Text(value)) => of.contains(&value.as_str()),
            (Bounds::Bool { .. }, Value::Bool(_)) => true,
            (Bounds::Int { .. } | Bounds::Enum { .. } | Bounds::Bool { .. }, _) => false,
        }
    }
}

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

    fn most_specific_first(&self) -> impl Iterator<Item = Scope> {
        let named = [
            self.user_id.clone().map(Scope::UserId),
            self.project_id.clone().map(Scope::ProjectId),
            self.org_id.clone().map(Scope::OrgId),
            self.plan.clone().map(Scope::Plan),
        ];
        named.into_iter().flatten().chain([Scope::Global])
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

/// Every value that was ever set, by key, scope and the instant from which it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyBook {
    values: BTreeMap<(Key, Scope), BTreeMap<Timestamp, Value>>,
}

impl PolicyBook {
    /// Enters a value. What the key does not admit is not entered.
    ///
    /// # Errors
    /// [`OutOfBounds`] where the value is of another type or outside the key's bounds.
    pub fn set(&mut self, key: Key, scope: Scope, effective_at: Timestamp, value: Value) -> Result<(), OutOfBounds> {
        if !key.admits(&value) {
            return Err(OutOfBounds { key, value });
        }
        self.values.entry((key, scope)).or_default().insert(effective_at, value);
        Ok(())
    }

    /// The value that holds at `now` for `scopes`, and the scope that won.
    #[must_use]
    pub fn resolve(&self, key: Key, scopes: &Scopes, now: Timestamp) -> (Value, Option<Scope>) {
        for scope in scopes.most_specific_first() {
            let in_force = self
                .values
                .get(&(key, scope.clone()))
                .and_then(|history| history.range(..=now).next_back())
                .map(|(_, value)| value.clone());
            if let Some(value) = in_force {
                return (value, Some(scope));
            }
        }
        (key.default_value(), None)
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

    /// The value of a text key.
    #[must_use]
    pub fn text(&self, key: Key, scopes: &Scopes, now: Timestamp) -> String {
        match self.resolve(key, scopes, now).0 {
            Value::Text(text) => text,
            Value::Int(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} does not admit {value:?}; it takes {:?}", key.name(), key.bounds())]
pub struct OutOfBounds {
    pub key: Key,
    pub value: Value,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(second, 0).unwrap()
    }

    #[test]
    fn the_catalog_is_as_reviewed() {
        let mut table = String::new();
        for key in Key::ALL {
            writeln!(table, "{} {:?}", key.name(), key.bounds()).unwrap();
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn every_default_lies_within_its_own_bounds() {
        for key in Key::ALL {
            assert!(key.admits(&key.default_value()), "{}", key.name());
            assert_eq!(Key::parse(key.name()), Some(*key));
        }
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
}

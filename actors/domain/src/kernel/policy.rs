//! Policies: the catalog of keys (decisions 7, *Policy keys*). A state machine reads a value at the moment of use, through
//! `TransitionContext::policy`: a [`PolicyBook`], which resolves it for its subject. Values are written through the state machine of their
//! scope, `policy_values::ScopeValues`.

mod applies_to;
mod resolution;

pub use applies_to::AppliesTo;
pub use resolution::{CrossingBounds, PolicyBook, PolicyScope, PolicyValueError, ResolvedPolicy, Scopes};

use serde::{Deserialize, Serialize};
use std::fmt;

/// A value of the key's type.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PolicyValue {
    Bool(bool),
    Int(i64),
    Text(String),
}

/// In JSON: 120, true, "user-revoke".
impl fmt::Display for PolicyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(f),
            Self::Int(value) => value.fmt(f),
            Self::Text(value) => write!(f, "{value:?}"),
        }
    }
}

/// The values that a key admits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueBounds {
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

/// The subjects that a row applies to: the callers of requests, where it does not say.
macro_rules! applies_to {
    () => {
        AppliesTo::Caller
    };
    ($applies_to:ident) => {
        AppliesTo::$applies_to
    };
}

macro_rules! policy_keys {
    ($($variant:ident = $name:literal $(for $applies_to:ident)?: $bounds:expr, $meaning:literal;)+) => {
        /// A key of the policy catalog.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(into = "&'static str", try_from = "String")]
        pub enum PolicyKey {
            $(#[doc = $meaning] $variant,)+
        }

        impl PolicyKey {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// The subject that notifies every process that a value of the key was written (specification, *Events*).
            #[must_use]
            pub const fn invalidation(self) -> &'static str {
                match self { $(Self::$variant => concat!("policy.invalidate.", $name)),+ }
            }

            #[must_use]
            pub const fn bounds(self) -> ValueBounds {
                match self { $(Self::$variant => $bounds),+ }
            }

            /// The subject for which its values are resolved, which determines the scopes in which it may be set.
            #[must_use]
            pub const fn applies_to(self) -> AppliesTo {
                match self { $(Self::$variant => applies_to!($($applies_to)?)),+ }
            }

            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning),+ }
            }
        }
    };
}

const fn int(default: i64, min: i64, max: i64) -> ValueBounds {
    ValueBounds::Int { default, min, max }
}

const fn one_of(default: &'static str, of: &'static [&'static str]) -> ValueBounds {
    ValueBounds::Enum { default, of }
}

const fn switch(default: bool) -> ValueBounds {
    ValueBounds::Bool { default }
}

policy_keys! {
    BillingLowBalanceThreshold = "billing.low_balance_threshold_minor" for AccountHolder: int(500, 0, 10_000_000), "Minor units below which a warning fires.";
    BillingWindow = "billing.window_seconds" for AccountHolder: int(60, 1, 3600), "Length of a billing window.";
    BillingMinimumDeposit = "billing.minimum_deposit_minor": int(1000, 50, 1_000_000), "Smallest amount of one payment.";
    BillingMaximumDeposit = "billing.maximum_deposit_minor": int(100_000, 100, 100_000_000), "Largest amount of one payment.";
    BillingOpenPaymentsPerUser = "billing.open_payments_per_user": int(20, 1, 1000), "Open payments that one user may have at once.";
    BillingDepletionGrace = "billing.depletion_grace_seconds" for AccountHolder: int(300, 0, 86_400), "How long allocations run on after the balance is used up.";
    BillingAdjustmentMax = "billing.adjustment_max_minor" for AccountHolder: int(100_000, 1, 100_000_000), "Largest amount that an operator may credit or debit at once.";
    BillingWebhookMaxAttempts = "billing.webhook_max_attempts" for Service: int(16, 1, 100), "Attempts to process an event of the payment processor before it waits for an operator.";
    AllocationMaxConcurrent = "allocation.max_concurrent_per_user": int(50, 0, 10_000), "Allocations that one user may hold at once.";
    AllocationRefundWindow = "allocation.refund_window_days": int(30, 0, 365), "How long after a payment, or the end of an allocation, a refund is possible.";
    AllocationIsolationModel = "allocation.isolation_model": one_of("user-revoke", &["user-revoke", FULL_REIMAGE]), "How a node is cleaned after a tenant.";
    AllocationProvisioningTimeout = "allocation.provisioning_timeout_seconds": int(600, 5, 86_400), "How long provisioning may take.";
    AllocationReleaseTimeout = "allocation.release_timeout_seconds": int(600, 5, 86_400), "How long one clean-up attempt may take.";
    AllocationReleaseMaxAttempts = "allocation.release_max_attempts": int(10, 1, 1000), "Clean-up attempts before the node is fenced.";
    AllocationReleaseBackoffMax = "allocation.release_backoff_max_seconds": int(300, 1, 86_400), "Cap of the pause between clean-up attempts.";
    AllocationQueueMax = "allocation.queue_max_seconds": int(86_400, 0, 604_800), "Longest time that a request may wait for capacity.";
    AllocationEventStreams = "allocation.event_streams_per_user": int(128, 1, 4096), "Streams of allocations' transitions that one user may have open.";
    RateLimitApi = "rate_limit.api_requests_per_minute": int(120, 1, 1_000_000), "Requests per user.";
    RateLimitTerminalToken = "rate_limit.terminal_token_requests_per_minute": int(10, 1, 100_000), "Terminal token minting.";
    RateLimitFinancial = "rate_limit.financial_requests_per_minute": int(30, 1, 100_000), "Payments, refunds, balance.";
    RateLimitAdminOverview = "rate_limit.admin_overview_requests_per_minute": int(600, 1, 1_000_000), "Admin overview polling.";
    RateLimitEnrollment = "rate_limit.enrollment_requests_per_minute" for Service: int(1200, 1, 1_000_000), "Requests without a certificate to the node API, per address; a balancer in front is one address.";
    RateLimitNodeRequests = "rate_limit.node_requests_per_minute" for Service: int(6000, 600, 1_000_000), "Heartbeats, waits, results and terminal streams of one node, at each replica.";
    RateLimitNodeRenewals = "rate_limit.node_renewals_per_minute" for Service: int(20, 4, 1000), "Certificate renewals of one node, at each replica.";
    RateLimitNodeRecordings = "rate_limit.node_recording_requests_per_minute" for Service: int(12_000, 600, 1_000_000), "Chunks of terminal recordings of one node, at each replica.";
    RateLimitNodeLogPushes = "rate_limit.node_log_pushes_per_minute" for Service: int(600, 10, 100_000), "Batches of log lines of one node, at each replica.";
    RateLimitAuthenticationFailures = "rate_limit.authentication_failures_per_minute" for Service: int(600, 10, 1_000_000), "Refused access tokens and secrets of payments, per address; callers with a valid one are not limited.";
    TerminalSessionMaxTtl = "terminal.session_max_ttl_seconds": int(14_400, 60, 86_400), "Longest terminal session.";
    TerminalDetachedTtl = "terminal.detached_ttl_seconds": int(900, 0, 86_400), "How long a detached terminal session waits for a new connection.";
    TerminalTokenTtl = "terminal.token_ttl_seconds": int(60, 5, 600), "How long a terminal token can be used.";
    TerminalReauthorize = "terminal.reauthorize_after_seconds": int(0, 0, 86_400), "Age at which a connection is closed, give or take 15 s, so that its user reconnects with a valid access token; 0: never.";
    TerminalSessionsPerAllocation = "terminal.sessions_per_allocation": int(10, 1, 50), "Terminal sessions that may be open on one allocation at once.";
    TerminalRecordingEnabled = "terminal.recording_enabled": switch(true), "Whether the output of terminal sessions is recorded; the input never is.";
    TerminalRecordingMode = "terminal.recording_mode": one_of("best-effort", &["best-effort", "strict"]), "When recording fails: the session continues and the recording says what is missing (best-effort), or nothing is shown that is not recorded (strict).";
    TerminalRecordingMaxSession = "terminal.recording_max_session_mib": int(64, 1, 4096), "Longest recording of one session.";
    TerminalRecordingMaxUser = "terminal.recording_max_user_mib": int(4096, 1, 1_048_576), "Stored recordings of one user; over it recording fails.";
    TerminalRecordingMaxTotal = "terminal.recording_max_total_mib": int(65_536, 1, 16_777_216), "Stored recordings of all users; over it recording fails.";
    TerminalRecordingRetention = "terminal.recording_retention_days": int(30, 1, 3650), "How long a recording is kept after its session.";
    NotificationLowBalance = "notification.low_balance_enabled" for Recipient: switch(true), "Whether users are notified of a low balance.";
    NotificationBalanceDepleted = "notification.balance_depleted_enabled" for Recipient: switch(true), "Whether users are notified of a depleted balance.";
    NotificationEndpoints = "notification.endpoints_per_holder" for Recipient: int(5, 0, 50), "Webhooks and e-mail addresses that a user, or an organization, may have beside the address of the access token.";
    NotificationEmail = "notification.email_enabled" for Recipient: switch(true), "E-mail about balances that run low and machines that fail.";
    NotificationDeliveryMaxAttempts = "notification.delivery_max_attempts" for Recipient: int(8, 1, 10), "Attempts at one message to a webhook or an e-mail address before it is a dead letter.";
    NotificationConnections = "notification.connections_per_user": int(32, 1, 1000), "Connections for notifications that one user may have open.";
    AuthServiceAccountTokenTtl = "auth.service_account_token_ttl_seconds": int(900, 60, 86_400), "Life of a service account's access token.";
    AuthServiceAccountsPerUser = "auth.service_accounts_per_user": int(20, 0, 500), "Service accounts that one user may have.";
    AuthServiceAccountKeysMax = "auth.service_account_keys_max": int(5, 2, 20), "Keys that are valid at once for one service account.";
    AuthBrowserSessionIdle = "auth.browser_session_idle_seconds": int(28_800, 60, 604_800), "How long a login to the web console lasts without a request.";
    AuthBrowserSessionMaxTtl = "auth.browser_session_max_ttl_seconds": int(86_400, 60, 2_592_000), "Longest login to the web console.";
    AuthBrowserSessionsPerUser = "auth.browser_sessions_per_user": int(20, 1, 500), "Logins to the web console that one user may have at once; the next one ends the oldest.";
    SshKeyMaxPerUser = "ssh_key.max_per_user": int(100, 1, 1000), "SSH keys that one user may have registered at once.";
    MaasEnabled = "maas.enabled": switch(false), "Whether machines of the bare-metal provider can be registered.";
    MaasDeployTimeout = "maas.deploy_timeout_seconds" for Service: int(3600, 5, 86_400), "How long the bare-metal provider may take to deploy a machine, and the new system to enroll and to be validated.";
    MaasReleaseTimeout = "maas.release_timeout_seconds" for Service: int(21_600, 5, 604_800), "How long the bare-metal provider may take to release a machine and erase its disks before it shows as overdue.";
    NodeEnrollmentTokenTtl = "node.enrollment_token_ttl_seconds" for Service: int(3600, 5, 86_400), "Life of an enrollment token.";
    NodeMaxRecoveries = "node.max_recoveries" for Service: int(5, 0, 1000), "Recoveries of one identity.";
    NodeOfflineAfter = "node.offline_after_seconds" for Service: int(90, 10, 3600), "Silence after which a node counts as offline.";
    NodeCertificateTtl = "node.certificate_ttl_seconds" for Service: int(86_400, 30, 2_592_000), "Life of a node certificate.";
    NodeEvacuate = "node.evacuate_seconds" for Service: int(86_400, 5, 2_592_000), "How long a tenant may stay on a GPU or a machine that a health finding takes out of service.";
    NodeRepairAttempts = "node.repair_attempts" for Service: int(2, 0, 10), "Reboots within a day by which a node without tenants is repaired before an operator takes over; 0: operators repair.";
    NodeRepairDelay = "node.repair_delay_seconds" for Service: int(60, 0, 3600), "How long heartbeats have had a finding before the reset or the reboot that repairs it begins; the last one still has it.";
    NodeTaskTimeout = "node.task_timeout_seconds" for Service: int(600, 5, 86_400), "How long an agent may take to report the result of a task of the node itself.";
    NodeDeepValidation = "node.deep_validation_seconds" for Service: int(300, 30, 3600), "How long all tests of a deep validation may take together.";
    NodeUpdateCommit = "node.update_commit_seconds" for Service: int(120, 10, 3600), "How long an updated agent may take until the control plane answers it; then the previous version is restored.";
    NodeDrainOverdue = "node.drain_overdue_seconds" for Service: int(86_400, 60, 2_592_000), "How long a drain may take before it shows as overdue.";
    KeysTaskGrace = "keys.task_grace_seconds" for Service: int(3600, 5, 2_592_000), "How long a task-signing key is trusted after its successor is active; a task may be begun for 600 s.";
    KeysRenewalSpread = "keys.renewal_spread_seconds" for Service: int(600, 1, 86_400), "Over how long nodes spread the renewal of their certificates when their authority is retired.";
    KeysRotationOverdue = "keys.rotation_overdue_seconds" for Service: int(604_800, 60, 31_536_000), "How long a key may wait for the next step of its rotation before it shows as overdue.";
    RetentionHistory = "retention.history_months" for Service: int(13, 2, 1200), "Months for which the transitions of entities are kept.";
    RetentionAudit = "retention.audit_months" for Service: int(24, 2, 1200), "Months for which the audit log is kept.";
    RetentionEndedEntities = "retention.ended_entities_months" for Service: int(13, 13, 1200), "Months for which allocations, sessions, rollouts and events that have ended are kept; longer than a refund may be asked for.";
    RetentionFleetHistory = "retention.fleet_history_months" for Service: int(25, 1, 120), "Months for which the hours of the fleet are kept: GPUs, rentals and revenue over time.";
    RetentionCommandIds = "retention.command_ids_hours" for Service: int(24, 24, 720), "Hours for which the ids of commands, and the stored answers to an Idempotency-Key, are kept.";
    SkuApprovalTtl = "sku.approval_ttl_seconds" for Service: int(86_400, 5, 2_592_000), "How long one approval of a SKU's change waits for the second.";
}

/// The isolation model that reimages a node after each tenant.
pub const FULL_REIMAGE: &str = "full-reimage";

/// Keys that bound each other: the first never exceeds the second, for any subject at any time.
pub const ORDERED: [(PolicyKey, PolicyKey); 1] = [(PolicyKey::BillingMinimumDeposit, PolicyKey::BillingMaximumDeposit)];

impl From<PolicyKey> for &'static str {
    fn from(key: PolicyKey) -> Self {
        key.name()
    }
}

impl TryFrom<String> for PolicyKey {
    type Error = UnknownPolicyKey;

    fn try_from(name: String) -> Result<Self, UnknownPolicyKey> {
        Self::parse(&name).ok_or(UnknownPolicyKey(name))
    }
}

/// A key that this release does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no policy key {0:?}")]
pub struct UnknownPolicyKey(String);

impl PolicyKey {
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|key| key.name() == name)
    }

    #[must_use]
    pub fn default_value(self) -> PolicyValue {
        match self.bounds() {
            ValueBounds::Int { default, .. } => PolicyValue::Int(default),
            ValueBounds::Enum { default, .. } => PolicyValue::Text(default.to_owned()),
            ValueBounds::Bool { default } => PolicyValue::Bool(default),
        }
    }

    /// The longest time that a key in seconds admits.
    #[must_use]
    pub const fn longest(self) -> chrono::TimeDelta {
        match self.bounds() {
            ValueBounds::Int { max, .. } => chrono::TimeDelta::seconds(max),
            ValueBounds::Enum { .. } | ValueBounds::Bool { .. } => chrono::TimeDelta::zero(),
        }
    }

    /// The largest number that a key admits.
    #[must_use]
    pub const fn most(self) -> i64 {
        match self.bounds() {
            ValueBounds::Int { max, .. } => max,
            ValueBounds::Enum { .. } | ValueBounds::Bool { .. } => 0,
        }
    }

    /// True where `value` is of the key's type and inside its bounds.
    #[must_use]
    pub fn admits(self, value: &PolicyValue) -> bool {
        match (self.bounds(), value) {
            (ValueBounds::Int { min, max, .. }, PolicyValue::Int(value)) => (min..=max).contains(value),
            (ValueBounds::Enum { of, .. }, PolicyValue::Text(value)) => of.contains(&value.as_str()),
            (ValueBounds::Bool { .. }, PolicyValue::Bool(_)) => true,
            (ValueBounds::Int { .. } | ValueBounds::Enum { .. } | ValueBounds::Bool { .. }, _) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    /// The rows of the table in `deploy/docs/src/reference/policies.md`.
    #[test]
    fn the_catalog_is_as_reviewed() {
        let mut table = String::new();
        for key in PolicyKey::ALL {
            let values = match key.bounds() {
                ValueBounds::Int { min, max, .. } => format!("{min} to {max}"),
                ValueBounds::Enum { of, .. } => of.join(", "),
                ValueBounds::Bool { .. } => "true, false".to_owned(),
            };
            let subject = match key.applies_to() {
                AppliesTo::Caller => "caller",
                AppliesTo::AccountHolder => "holder",
                AppliesTo::Recipient => "recipient",
                AppliesTo::Service => "service",
            };
            let default = key.default_value().to_string().replace('"', "");
            writeln!(table, "| `{}` | {default} | {values} | {subject} | {} |", key.name(), key.meaning()).unwrap();
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn every_default_lies_within_its_own_bounds() {
        for key in PolicyKey::ALL {
            assert!(key.admits(&key.default_value()), "{}", key.name());
            assert_eq!(PolicyKey::parse(key.name()), Some(*key));
            assert_eq!(key.invalidation(), format!("policy.invalidate.{}", key.name()));
            let written = serde_json::to_string(key).unwrap();
            assert_eq!(
                (written.as_str(), serde_json::from_str::<PolicyKey>(&written).unwrap()),
                (&*format!("{:?}", key.name()), *key)
            );
        }
    }
}

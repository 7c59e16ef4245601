//! The decisions of the control plane, as pure functions.
//!
//! Everything here is a value or a function over values: no runtime, no clock, no randomness, no environment, no input or output
//! (`clippy.toml` beside this crate bans them). A state machine is given its state, a command and a [`TransitionContext`], and returns a
//! [`Transition`] or a rejection. The crates above store, publish and wait.

#![forbid(unsafe_code)]
// A match over our own enums lists every variant, so that a new variant has to be considered in each place.
#![deny(clippy::wildcard_enum_match_arm)]
// No decision awaits anything, so nothing here is `async`.
#![deny(clippy::unused_async, clippy::disallowed_methods, clippy::disallowed_types)]

// By this name the fixtures of other crates, which the tests of this one share, know it.
#[cfg(test)]
extern crate self as domain;

mod cross_entity;
mod kernel;

#[cfg(test)]
#[path = "../../../tests/test-host/src/node_fixture.rs"]
#[allow(dead_code, unreachable_pub, reason = "it is written for tests of other crates, too")]
mod node_fixture;

/// The middle floor: one state machine for each kind of entity. An entity uses the kernel and no other entity: what it needs of another one
/// comes with a command or goes out as an event.
mod entities {
    pub mod allocation;
    pub mod announcement;
    pub mod billing_account;
    pub mod browser_session;
    pub mod health_rules;
    pub mod key_set;
    pub mod node;
    pub mod notification_endpoint;
    pub mod payment;
    pub mod policy_values;
    pub mod processor_event;
    pub mod restart_record;
    pub mod role_bindings;
    pub mod rollout;
    pub mod service_account;
    pub mod sku;
    pub mod tenant;
    pub mod terminal_session;
}

pub use cross_entity::{choreography, invariants, notification, placement};
pub use entities::{
    allocation, announcement, billing_account, browser_session, health_rules, key_set, node, notification_endpoint,
    payment, policy_values, processor_event, restart_record, role_bindings, rollout, service_account, sku, tenant,
    terminal_session,
};
pub use kernel::{
    account_holder, audit, authz, commit, event, explanation, finding, gcra, hardware, history, id, key_purpose,
    ledger, metadata, money, package_digest, policy, precondition, reason_code, recording, redact, resend_timer, retry,
    rollout_outcome, ssh_key, state_machine, summand, task_type, time, validation,
};

pub use authz::{Action, Permit, Principal};
pub use commit::{Commit, CommitOutcome};
pub use event::Event;
pub use id::{
    AllocationId, AnnouncementId, BillingAccountId, BindingId, BrowserSessionId, CommandId, EntityKind, EntityRef,
    EventId, FindingId, HealthRulesId, KeySetId, MemberId, NodeId, NotificationEndpointId, OrgId, PaymentId, PolicyId,
    PolicyValueId, ProcessorEventId, ProjectId, RefundId, RolloutId, ServiceAccountId, ServiceAccountKeyId, Shard,
    SkuId, SshKeyId, TaskId, TerminalSessionId, TokenId, UserId,
};
pub use package_digest::PackageDigest;
pub use state_machine::{
    Deadline, Effect, IndexKeys, Machine, RequestOrigin, Timestamp, Transition, TransitionContext,
};
pub use task_type::TaskType;

/// A function over an entity whose kind is known only at run time. See [`EntityKind::visit`].
pub trait Visitor {
    type Output;
    fn visit<M: Machine>(self) -> Self::Output;
}

impl EntityKind {
    /// Calls `visitor` with the kind's state machine.
    pub fn visit<V: Visitor>(self, visitor: V) -> V::Output {
        match self {
            Self::Node => visitor.visit::<node::Node>(),
            Self::Allocation => visitor.visit::<allocation::Allocation>(),
            Self::Sku => visitor.visit::<sku::Sku>(),
            Self::Tenant => visitor.visit::<tenant::Tenant>(),
            Self::Bindings => visitor.visit::<role_bindings::RoleBindings>(),
            Self::ServiceAccount => visitor.visit::<service_account::ServiceAccount>(),
            Self::Policy => visitor.visit::<policy_values::ScopeValues>(),
            Self::HealthRules => visitor.visit::<health_rules::HealthRules>(),
            Self::Rollout => visitor.visit::<rollout::Rollout>(),
            Self::TerminalSession => visitor.visit::<terminal_session::TerminalSession>(),
            Self::BrowserSession => visitor.visit::<browser_session::BrowserSession>(),
            Self::KeySet => visitor.visit::<key_set::KeySet>(),
            Self::BillingAccount => visitor.visit::<billing_account::BillingAccount>(),
            Self::Announcement => visitor.visit::<announcement::Announcement>(),
            Self::Payment => visitor.visit::<payment::Payment>(),
            Self::ProcessorEvent => visitor.visit::<processor_event::ProcessorEvent>(),
            Self::NotificationEndpoint => visitor.visit::<notification_endpoint::NotificationEndpoint>(),
            Self::Runtime => visitor.visit::<restart_record::RestartRecord>(),
        }
    }
    /// The states of the kind that nothing follows, as [`Machine::ENDED_STATES`] names them.
    #[must_use]
    pub fn ended_states(self) -> &'static [&'static str] {
        struct EndedStates;
        impl Visitor for EndedStates {
            type Output = &'static [&'static str];
            fn visit<M: Machine>(self) -> Self::Output {
                M::ENDED_STATES
            }
        }
        self.visit(EndedStates)
    }
}

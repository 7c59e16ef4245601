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

mod choreography;
mod entities;
mod kernel;

pub use choreography::{invariant, kinds, notification, placement, reactions};
pub use entities::{
    allocation, announcement, billing_account, key_set, node, notification_endpoint, payment, policy_values,
    processor_event, role_bindings, runtime, service_account, sku, tenant, terminal_session,
};
pub use kernel::{
    audit, authz, commit, event, hardware, holder, id, key_purpose, ledger, machine, metadata, money, policy,
    precondition, rate_cell, recording, redact, retry, ssh_key, task_type, time,
};

pub use authz::{Action, Permit, Principal};
pub use commit::{Commit, CommitOutcome};
pub use event::Event;
pub use id::{
    AllocationId, AnnouncementId, BillingAccountId, BindingId, CommandId, EntityKind, EntityRef, EventId, KeySetId,
    MemberId, NodeId, NotificationEndpointId, PaymentId, PolicyId, PolicyValueId, ProcessorEventId, RefundId,
    ServiceAccountId, ServiceAccountKeyId, Shard, SkuId, SshKeyId, TaskId, TerminalSessionId, TokenId,
};
pub use machine::{Deadline, Effect, IndexKeys, Machine, RequestOrigin, Timestamp, Transition, TransitionContext};
pub use task_type::TaskType;

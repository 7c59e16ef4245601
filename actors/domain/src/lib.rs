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

pub mod allocation;
pub mod announcement;
pub mod audit;
pub mod authz;
pub mod billing_account;
pub mod commit;
pub mod event;
pub mod id;
pub mod invariant;
pub mod key_set;
pub mod ledger;
pub mod machine;
pub mod metadata;
pub mod money;
pub mod node;
pub mod notification;
pub mod notification_endpoint;
pub mod payment;
pub mod placement;
pub mod policy;
pub mod processor_event;
pub mod rate_limit;
pub mod recording;
pub mod redact;
pub mod resend_timer;
pub mod role_bindings;
pub mod runtime;
pub mod service_account;
pub mod sku;
pub mod task_type;
pub mod tenant;
pub mod terminal_session;

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

//! The decisions of the control plane, as pure functions.
//!
//! Everything here is a value or a function over values: no runtime, no clock, no chance, no environment, no input or
//! output (`clippy.toml` beside this crate bans them). A machine is given its state, a command and a [`Ctx`], and answers
//! with a [`Step`] or a rejection. Who stores, speaks and waits is the business of the crates above.

#![forbid(unsafe_code)]
// Over our own enums a match names the whole world: a new variant must be thought about everywhere.
#![deny(clippy::wildcard_enum_match_arm)]
// `async` has no place in a decision; nothing here could be awaited.
#![deny(clippy::unused_async, clippy::disallowed_methods, clippy::disallowed_types)]

pub mod again;
pub mod allocation;
pub mod announcement;
pub mod audit;
pub mod authz;
pub mod billing_account;
pub mod bindings;
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
pub mod runtime;
pub mod service_account;
pub mod sku;
pub mod task_type;
pub mod tenant;
pub mod terminal_session;

pub use authz::{Action, Permit, Principal};
pub use commit::{Commit, Outcome};
pub use event::Event;
pub use id::{
    AllocationId, AnnouncementId, BillingAccountId, BindingId, CommandId, EntityRef, EventId, KeySetId, Kind, MemberId,
    NodeId, NotificationEndpointId, PaymentId, PolicyId, PolicyValueId, ProcessorEventId, RefundId, ServiceAccountId,
    ServiceAccountKeyId, Shard, SkuId, SshKeyId, TaskId, TerminalSessionId, TokenId,
};
pub use machine::{Ctx, Deadline, Effect, Keys, Machine, Origin, Step, Timestamp};
pub use task_type::TaskType;

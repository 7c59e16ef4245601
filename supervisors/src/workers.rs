//! The workers beside the entities, one file each.

pub mod accrual;
pub mod audit_seal;
pub mod auditor;
pub mod housekeeping;
pub mod keys;
pub mod metrics;
pub mod notification_delivery;
pub mod notification_queue;
pub mod notifications;
pub mod outbox_poll;
pub mod payments;
pub mod policy;
pub mod poll_loop;
pub mod provisioning;
pub mod reactor;
pub mod recordings;
pub mod relay;
pub mod rewrap;
mod ssh_access;
mod terminals;
pub mod timers;

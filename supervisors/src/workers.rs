//! What runs beside the entities: one file per worker.

pub mod accrual;
pub mod audit_seal;
pub mod auditor;
pub mod figures;
pub mod housekeeping;
pub mod keys;
mod logins;
pub mod notification_delivery;
pub mod notification_queue;
pub mod notifications;
pub mod outbox_poll;
pub mod pace;
pub mod payments;
pub mod policy;
pub mod provisioning;
pub mod reactor;
pub mod recordings;
pub mod relay;
pub mod rewrap;
mod terminals;
pub mod timers;

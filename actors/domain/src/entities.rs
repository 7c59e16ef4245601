//! The middle floor: one state machine for each kind of entity. An entity uses the kernel and no other entity: what it needs of another one
//! comes with a command or goes out as an event.

pub mod allocation;
pub mod announcement;
pub mod billing_account;
pub mod key_set;
pub mod node;
pub mod notification_endpoint;
pub mod payment;
pub mod policy_values;
pub mod processor_event;
pub mod role_bindings;
pub mod runtime;
pub mod service_account;
pub mod sku;
pub mod tenant;
pub mod terminal_session;

//! Requests and connections to hosts that others name, and the addresses that are allowed for them.

pub mod alertmanager;
pub(crate) mod email_address;
pub mod host_address;
pub mod http_client;
pub mod log_store;
pub mod maas;
pub mod node_probe;
pub mod package_registry;
pub mod service_access;

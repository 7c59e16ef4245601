//! Real servers on this machine, for `gpuaas dev` and for tests: Postgres, NATS, an identity provider, a payment processor, and a balancer in
//! front of the replicas.
//!
//! Each server is a value that starts it, knows its address, and stops it when it is dropped. A child process stops even when this one is
//! killed ([`process`]).

pub mod balancer;
pub mod identity;
pub mod nats;
pub mod payment_processor;
pub mod pki;
pub mod ports;
pub mod postgres;
pub mod private_files;
pub mod process;
pub mod settings;
pub mod test_database;

//! Real servers on this machine, for `gpuaas dev` and for tests.
//!
//! Each server is a value that starts it, knows its address, and stops it when it is dropped. A child process stops even when this one is
//! killed.
//!
//! | module | what |
//! | --- | --- |
//! | [`postgres`], [`test_database`] | Postgres; a migrated database of it for one test |
//! | [`nats`] | NATS with JetStream |
//! | [`identity`] | an identity provider |
//! | [`payment_processor`] | localstripe, which has Stripe's API |
//! | [`balancer`] | a TCP balancer in front of the replicas |
//! | [`process`], [`ports`], [`pki`], [`private_files`], [`settings`] | what they share: child processes, ports, certificates, files, settings |

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

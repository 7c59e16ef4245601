//! The whole service, as its users, operators and nodes meet it: real processes, real Postgres and NATS, agents over mutual TLS.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cluster;
mod enrollment;
mod faults;
mod foreign_provider;
mod harness;
mod input;
mod main_job;
mod openapi;
mod platform_roles;
mod probe;
mod release;
mod service_accounts;
mod tasks;
mod tidy;

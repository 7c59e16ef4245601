//! The whole service, as its users, operators and nodes meet it: real processes, real Postgres and NATS, agents over mutual TLS.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod audit;
mod cluster;
mod docs_page;
mod enrollment;
mod faults;
mod foreign_provider;
mod generated_client;
mod harness;
mod input;
mod main_job;
mod observability;
mod openapi;
mod platform_roles;
mod policy;
mod probe;
mod rate_limit;
mod release;
mod schemathesis;
mod secrets;
mod service_accounts;
mod sweep;
mod tasks;
mod terminal;
mod tidy;
mod tool;

//! The whole service, as its users, operators and nodes meet it: real processes, real Postgres and NATS, agents over mutual TLS.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cluster;
mod docs_page;
mod enrollment;
mod faults;
mod foreign_provider;
mod generated_client;
mod harness;
mod input;
mod main_job;
mod openapi;
mod probe;
mod release;
mod schemathesis;
mod service_accounts;
mod sweep;
mod tasks;
mod tidy;
mod tool;

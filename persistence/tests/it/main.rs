//! The store against a real Postgres: every statement of this crate runs here.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod audit;
mod auditor_reads;
mod cluster;
mod commits;
mod faults;
mod keys;
mod lease;
mod ledger;
mod reads;
mod recordings;
mod reference_model;
mod schema;
mod test_store;

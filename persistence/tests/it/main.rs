//! The store against a real Postgres: every statement of this crate runs here.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod audit;
mod cluster;
mod commits;
mod faults;
mod inspect;
mod keys;
mod lease;
mod ledger;
mod model;
mod reads;
mod recordings;
mod schema;
mod test_store;

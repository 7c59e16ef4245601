//! The store against a real Postgres: every statement of this crate runs here.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod altered_rows;
mod audit;
mod auditor_reads;
mod commits;
mod ended_sessions;
mod entity_sums;
mod entity_totals;
mod faults;
mod fleet_history;
mod keys;
mod ledger;
mod membership;
mod migrate;
mod pool;
mod query_plans;
mod reads;
mod recordings;
mod reference_model;
mod retention;
mod schema;
mod test_store;
mod work_lease;

//! The node API over real TLS, with real certificates and the real machines; where results are proved, on a real Postgres.
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub(crate) mod agent;
mod enrolling;
mod forwarding;
mod generations;
mod identity;
mod recovering;
mod reporting;
mod store;
mod waiting;
mod world;

//! The public API as it is served: its router over the actors and a real Postgres, with an identity provider on loopback.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod allocations;
mod audit;
mod billing;
mod contract;
mod errors;
mod inputs;
mod keys;
mod nodes;
mod overview;
mod payment_page;
mod payments;
mod people;
mod platform_roles;
mod policies;
mod refunds;
mod repetitions;
mod service_accounts;
mod service_tokens;
mod skus;
mod ssh_keys;
mod statements;
mod terminal_page;
mod till;
mod webhooks;
mod world;

//! What is true, on Postgres: group commit, outbox, reads, cluster ownership, sealed secrets and the schema.
//!
//! Two ways in. [`committer::Committer`] is the only one that writes an entity's state, history, audit, events and command ids:
//! all of a transition or none of it, many transitions in one statement. Everything else reads ([`read`]), keeps the cluster's
//! own books ([`cluster`], with the marks of what is parked), stores answers for repetitions ([`answers`]) or cleans up ([`outbox`],
//! [`sweep`]).
//!
//! Statements are checked against a real server by this crate's tests, not by macros at compile time
//! (`deploy/decisions/0002-sql-checked-by-tests.md`).

#![forbid(unsafe_code)]

pub mod answers;
pub mod audit;
pub mod cluster;
pub mod committer;
pub mod envelope;
pub mod error;
pub mod lease;
pub mod loader;
pub mod migrate;
pub mod outbox;
mod parked;
pub mod pool;
pub mod read;
pub mod recordings;
pub mod rewrap;
pub mod seal;
pub mod secrets;
pub mod sweep;

pub use answers::Answers;
pub use cluster::Cluster;
pub use committer::{Committer, CommitterConfig};
pub use error::StoreError;
pub use lease::{Lease, Leases};
pub use loader::Loader;
pub use outbox::{Outbox, OutboxRow};
pub use read::Reads;
pub use recordings::Recordings;
pub use seal::Seals;
pub use secrets::Secrets;

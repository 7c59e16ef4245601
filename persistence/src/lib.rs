//! The store on Postgres: group commit, outbox, reads, shard ownership, sealed secrets and the schema.
//!
//! [`committer::Committer`] alone writes an entity's state, history, audit records, events and command ids: all of a transition or none
//! of it, many transitions in one statement. The other modules read ([`read`]), store members and shard ownership ([`cluster`], with
//! the marks of parked entities), store responses for replays ([`idempotency`]) or remove what is obsolete ([`outbox`], [`sweep`]).
//!
//! Statements are checked against a real server by this crate's tests, not by macros at compile time
//! (`deploy/decisions/0002-sql-checked-by-tests.md`).

#![forbid(unsafe_code)]

pub mod audit;
pub mod cluster;
pub mod committer;
pub mod envelope_encryption;
pub mod error;
pub mod idempotency;
pub mod key_rewrap;
pub mod lease;
pub mod loader;
pub mod migrate;
pub mod outbox;
mod parked_entities;
pub mod pool;
pub mod queries;
pub mod recordings;
pub mod secrets;
pub mod snapshot_seal;
pub mod table_maintenance;

pub use cluster::Cluster;
pub use committer::{Committer, CommitterConfig};
pub use error::StoreError;
pub use idempotency::IdempotencyRecords;
pub use lease::{Lease, Leases};
pub use loader::Loader;
pub use outbox::{Outbox, OutboxRow};
pub use queries::Reads;
pub use recordings::Recordings;
pub use secrets::Secrets;
pub use snapshot_seal::SnapshotSealer;

//! The store on Postgres: group commit, outbox, reads, shard ownership, sealed secrets and the schema.
//!
//! [`committer::Committer`] alone writes an entity's state, history, audit records, events and command ids: all of a transition or none
//! of it, many transitions in one statement. The other modules read ([`queries`], [`loader`]), store members and shard ownership
//! ([`membership`], with the marks of parked entities), store responses for replays ([`idempotency`]) or remove what is obsolete
//! ([`outbox`], [`table_maintenance`], [`retention`]), or compare the sums of entities with them ([`entity_sums`]).
//!
//! Statements are checked against a real server by this crate's tests, not by macros at compile time
//! (`deploy/decisions/0002-sql-checked-by-tests.md`).

#![forbid(unsafe_code)]

pub mod audit;
pub mod committer;
pub mod entity_sums;
pub mod envelope_encryption;
pub mod error;
pub mod fleet_history;
pub mod idempotency;
pub mod key_rewrap;
pub mod loader;
pub mod membership;
pub mod migrate;
pub mod outage_log;
pub mod outbox;
mod parked_entities;
pub mod pool;
pub mod queries;
pub mod recordings;
pub mod recovery_mark;
pub mod retention;
pub mod secrets;
pub mod snapshot_seal;
pub mod table_maintenance;
pub mod table_sizes;
pub mod work_lease;

pub use committer::{Committer, CommitterConfig};
pub use error::StoreError;
pub use fleet_history::FleetHistory;
pub use idempotency::IdempotencyRecords;
pub use loader::Loader;
pub use membership::Cluster;
pub use outbox::{Outbox, OutboxRow};
pub use queries::Reads;
pub use recordings::Recordings;
pub use recovery_mark::RecoveryMarks;
pub use secrets::Secrets;
pub use snapshot_seal::SnapshotSealer;
pub use work_lease::{Lease, Leases};

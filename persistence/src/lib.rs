//! The store on Postgres: group commit, outbox, reads, shard ownership, sealed secrets and the schema.
//!
//! [`committer::Committer`] alone writes an entity's state, history, audit records, events and command ids: all of a transition or none
//! of it, many transitions in one statement.
//!
//! | module | what |
//! | --- | --- |
//! | [`committer`], [`loader`] | writes transitions, and reads entities: each what waits at the moment, in one statement |
//! | [`outbox`], [`idempotency`], [`provider_logouts`] | events that are not settled; responses for repeated requests; logouts at the identity provider |
//! | [`queries`] | reads past the mailboxes |
//! | [`membership`], `shard_numbers`, `parked_entities`, [`work_lease`] | members and who owns which shard; shards as they are stored; entities that wait for an operator; leases of work that one member does at a time |
//! | [`entity_sums`], [`fleet_history`] | what entities add up to; the fleet hour by hour |
//! | [`audit`], [`snapshot_seal`], [`recovery_mark`] | the hash chain of the audit log; seals of snapshots; how far commits have come, to recognize a restored database |
//! | [`envelope_encryption`], [`secrets`], [`key_rewrap`], [`recordings`] | values sealed under the key ring: how, the service's own, their rewrap, recordings of terminals |
//! | [`retention`], [`month_removal`], [`table_maintenance`], [`table_sizes`] | removal by age; of a month of a log; sweeps; growth of the tables |
//! | [`migrate`], [`pool`], `ended_sessions` | the schema; connections; which errors end them |
//! | [`error`], [`outage_log`], [`metrics`] | errors of statements; log lines of an outage; metrics, also of the crates above |
//!
//! Statements are checked against a real server by this crate's tests, not by macros at compile time
//! (`deploy/decisions/0002-sql-checked-by-tests.md`).

#![forbid(unsafe_code)]

pub mod audit;
pub mod committer;
mod ended_sessions;
pub mod entity_sums;
pub mod envelope_encryption;
pub mod error;
pub mod fleet_history;
pub mod idempotency;
pub mod key_rewrap;
pub mod loader;
pub mod membership;
pub mod metrics;
pub mod migrate;
pub mod month_removal;
pub mod outage_log;
pub mod outbox;
mod parked_entities;
pub mod pool;
pub mod provider_logouts;
pub mod queries;
pub mod recordings;
pub mod recovery_mark;
pub mod retention;
pub mod secrets;
mod shard_numbers;
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
pub use provider_logouts::ProviderLogouts;
pub use queries::Reads;
pub use recordings::Recordings;
pub use recovery_mark::RecoveryMarks;
pub use secrets::Secrets;
pub use snapshot_seal::SnapshotSealer;
pub use work_lease::{Lease, Leases};

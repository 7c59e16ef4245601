//! The audit log's hash chain (decisions 7): audit rows are sealed a moment after their commit, outside the hot statement, into one
//! SHA-256 chain per shard, whose heads are signed and stored elsewhere as well. [`seal`] extends the chains, [`verify`] recomputes
//! them, [`drop_month`] removes old months without breaking them.
//!
//! The threat model is in `deploy/decisions/0008-audit-chain.md`.

mod chain;
mod retention;
mod seal;
mod verify;

pub use chain::{AuditKey, AuditKeys, ChainHead, InvalidAuditKey, SignedHead};
pub use retention::{DropMonthError, DroppedMonth, drop_month};
pub use seal::{BrokenChain, SealRun, Sealer};
pub use verify::{AuditFinding, AuditReport, AuditVerification, FindingKind, verify};

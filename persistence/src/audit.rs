//! The audit log's chain (decisions 7): what was written is sealed a moment later, outside the hot statement, into one SHA-256
//! chain per shard, whose heads are signed and kept apart. [`seal`] extends the chains, [`verify`] recomputes them, [`forget`] lets
//! old months go without breaking them.
//!
//! Who can hide what from whom is said in `deploy/decisions/0008-the-audit-chain.md`.

mod chain;
mod forget;
mod seal;
mod verify;

pub use chain::{AuditKey, AuditKeys, BadKey, Head, SignedHead};
pub use forget::{ForgetError, Forgotten, forget};
pub use seal::{Broken, Sealer, Turn};
pub use verify::{Finding, Kind, Report, Verify, verify};

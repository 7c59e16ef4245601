//! Messages between a node's agent and the control plane, and the signatures on them.
//!
//! Everything here is a plain value that serialises to `snake_case` JSON. Fields that a newer peer adds are ignored by an
//! older one; [`PROTOCOL`] says which generation a peer speaks. What is signed is always a byte string that travels
//! unaltered inside an [`Envelope`], so that nobody has to agree on a canonical JSON (DSSE v1).
//!
//! | module | on the wire |
//! | --- | --- |
//! | [`bundle`] | what an operator installs on a node: the bootstrap bundle and its environment file |
//! | [`enroll`] | first identity and its renewal |
//! | [`inventory`] | what the node is made of |
//! | [`heartbeat`] | liveness, telemetry, health, and the verifier sets that follow |
//! | [`task`] | signed tasks and their results |
//! | [`keys`] | whose task signatures an agent accepts, and how that changes |
//! | [`proof`] | the signed report that a tenant's traces are gone |
//! | [`terminal`] | a terminal's two ends |
//! | [`recording`] | what is recorded of a terminal |
//! | [`error`] | the error envelope of every refused request |

mod base64_bytes;
pub mod bundle;
pub mod enroll;
pub mod envelope;
pub mod error;
pub mod heartbeat;
pub mod inventory;
pub mod keys;
pub mod proof;
pub mod recording;
pub mod secret;
pub mod task;
pub mod terminal;

pub use envelope::Envelope;
pub use keys::{PublicKey, VerifierSet, Verifiers};
pub use secret::Token;

/// The protocol generation that this crate speaks.
pub const PROTOCOL: u16 = 3;

/// The oldest generation that a server of this generation still accepts; an older agent gets 426 `upgrade_required`.
pub const OLDEST_PROTOCOL: u16 = 1;

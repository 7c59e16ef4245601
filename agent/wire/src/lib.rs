//! Messages between a node's agent and the control plane, and the signatures on them.
//!
//! Everything here is a plain value that serialises to `snake_case` JSON. Fields that a newer peer adds are ignored by an older one;
//! [`PROTOCOL`] is the generation of a peer's protocol. Signed content is always a byte string that is transmitted unaltered inside a
//! [`SignedEnvelope`], so that no canonical JSON is needed (DSSE v1).
//!
//! | module | on the wire |
//! | --- | --- |
//! | [`bundle`] | what an operator installs on a node: the bootstrap bundle and its environment file |
//! | [`enroll`] | first identity and its renewal |
//! | [`inventory`] | the node's hardware and software |
//! | [`heartbeat`] | liveness, telemetry, health, and newer verifier sets |
//! | [`finding`] | what the agent's health probes found |
//! | [`task`] | signed tasks and their results |
//! | [`verifier_set`] | the keys whose task signatures an agent accepts, and their rotation |
//! | [`cleanup_proof`] | the clean-up proof: the signed report that nothing of a tenant is left |
//! | [`terminal`] | the messages of a terminal session |
//! | [`recording`] | the recording of a terminal session |
//! | [`log_gateway_access`] | the token with which a node pushes its logs |
//! | [`package`] | the names of the agent's package in a registry |
//! | [`error`] | the error envelope of every refused request |
//! | [`validation`] | the validation of a machine with load: its order, and its report |
//! | [`envelope`] | signed byte strings, in the form of DSSE v1 |
//! | [`secret`] | secrets that are transmitted |
//! | [`address`] | addresses as settings name them |
//! | [`base64_bytes`] | byte strings in JSON |

pub mod address;
mod base64_bytes;
pub mod bundle;
pub mod cleanup_proof;
pub mod enroll;
pub mod envelope;
pub mod error;
pub mod finding;
pub mod heartbeat;
pub mod inventory;
pub mod log_gateway_access;
pub mod package;
pub mod recording;
pub mod secret;
pub mod task;
pub mod terminal;
pub mod validation;
pub mod verifier_set;

pub use envelope::SignedEnvelope;
pub use secret::SecretToken;
pub use verifier_set::{PublicKey, VerifierSet, Verifiers};

/// The protocol generation of this crate.
pub const PROTOCOL: u16 = 3;

/// The oldest generation that a server of this generation still accepts; an older agent gets 426 `upgrade_required`.
pub const OLDEST_PROTOCOL: u16 = 1;

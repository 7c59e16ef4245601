//! How a node gets its identity, and keeps it.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::inventory::Inventory;
use crate::keys::{PublicKey, VerifierSet};
use crate::secret::Token;

/// Body of `POST /internal/v1/nodes/{id}/enroll`. The token is spent by the first such request that succeeds; the same
/// request sent again (same key in the CSR) is answered with the same certificate.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EnrollRequest {
    pub enrollment_token: Token,
    /// PKCS #10, PEM. Only its public key and its signature count.
    pub csr_pem: String,
    /// Ed25519 key that signs clean-up proofs and, after an expired certificate, the recovery of the identity.
    pub recovery_public_key: PublicKey,
    pub boot_id: Uuid,
    pub agent_version: String,
    pub protocol: u16,
    /// Highest verifier set the agent has accepted; the bundle's keys are 0.
    #[serde(default)]
    pub verifier_set_version: u64,
    pub inventory: Inventory,
}

/// Body of `POST /internal/v1/nodes/{id}/certificate/renew`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewRequest {
    /// PKCS #10, PEM, with a key of its own.
    pub csr_pem: String,
}

/// Answer to an enrollment (201) and to a renewal (200).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrollAnswer {
    /// The node's client certificate.
    pub certificate_pem: String,
    /// Its issuers, up to but without the root's own issuer; may be empty.
    pub chain_pem: String,
    /// End of the certificate's validity.
    pub not_after: DateTime<Utc>,
    pub recovery: Recovery,
    /// Verifier sets that the agent may not know yet, lowest version first.
    #[serde(default)]
    pub verifier_sets: Vec<VerifierSet>,
}

/// What the agent needs to recover an expired identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// Generation of the node's identity; the first is 1.
    pub identity_generation: u64,
    /// Recoveries left before an operator has to look.
    pub remaining: u32,
}

//! How a node gets its identity, and keeps it.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use ed25519_dalek::{Signature, Signer as _, SigningKey};
use sha2::{Digest as _, Sha256};

use crate::inventory::NodeInventory;
use crate::secret::SecretToken;
use crate::verifier_set::{PublicKey, VerifierSet};

/// The domain separator of a signed recovery, so that its signature is valid for nothing else.
const RECOVERY_DOMAIN: &[u8] = b"gpuaas-recovery-v1\0";

/// Body of `POST /internal/v1/nodes/{id}/enroll`. The token is spent by the first such request that succeeds, and no other one does:
/// an agent that lost the answer recovers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EnrollRequest {
    pub enrollment_token: SecretToken,
    /// PKCS #10, PEM. Only its public key and its signature count.
    pub csr_pem: String,
    /// Ed25519 key that signs clean-up proofs and, after an expired certificate, the recovery of the identity.
    pub recovery_public_key: PublicKey,
    pub boot_id: Uuid,
    pub agent_version: String,
    pub protocol: u16,
    /// Highest verifier set that the agent has accepted; the bundle's keys are version 0.
    #[serde(default)]
    pub verifier_set_version: u64,
    pub inventory: NodeInventory,
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
    pub recovery: RecoveryState,
    /// Verifier sets that the agent may not have yet, lowest version first.
    #[serde(default)]
    pub verifier_sets: Vec<VerifierSet>,
    /// All authorities that certify nodes, PEM; more than one during a rotation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_ca_bundle_pem: Option<String>,
}

/// Answer to `GET /internal/v1/nodes/{id}/recover/nonce` (200).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonceAnswer {
    /// To be signed as it is.
    pub nonce: String,
    pub expires_at: DateTime<Utc>,
    /// The clock by which a certificate's validity is judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_time: Option<DateTime<Utc>>,
    /// The key identifiers (RFC 5280, section 4.2.1.2) of the authorities whose certificates are accepted, lower-case hexadecimal. If a
    /// certificate by one of them is refused, a recovery does not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_authorities: Option<Vec<String>>,
}

/// Body of `POST /internal/v1/nodes/{id}/recover`. If its answer is lost, it is retried with the same CSR and a new nonce.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RecoverRequest {
    /// The token that was spent at enrollment.
    pub enrollment_token: SecretToken,
    /// As in the last answer to a request with this token; 1 if none was received, which is taken for the generation of the enrollment.
    pub identity_generation: u64,
    pub nonce: String,
    /// PKCS #10, PEM.
    pub csr_pem: String,
    /// Ed25519 by the recovery key, over [`recovery_bytes`].
    #[serde(with = "crate::base64_bytes")]
    pub nonce_signature: Vec<u8>,
    pub boot_id: Uuid,
    pub agent_version: String,
    pub protocol: u16,
    #[serde(default)]
    pub verifier_set_version: u64,
}

impl RecoverRequest {
    /// Signs the request with the node's recovery key.
    pub fn sign(&mut self, node_id: Uuid, key: &SigningKey) {
        self.nonce_signature = key.sign(&self.bytes(node_id)).to_bytes().to_vec();
    }

    /// Whether it was signed for this node with the key that `key` belongs to.
    #[must_use]
    pub fn is_signed_by(&self, node_id: Uuid, key: &PublicKey) -> bool {
        Signature::from_slice(&self.nonce_signature)
            .is_ok_and(|signature| key.verifying_key().verify_strict(&self.bytes(node_id), &signature).is_ok())
    }

    fn bytes(&self, node_id: Uuid) -> Vec<u8> {
        recovery_bytes(node_id, &self.nonce, &self.csr_pem, self.identity_generation)
    }
}

/// The bytes that a recovery signs: a prefix, the node's id (16 bytes), the nonce with its length before it (4 bytes, big-endian),
/// SHA-256 of the CSR's PEM text, and the identity generation (8 bytes, big-endian).
#[must_use]
pub fn recovery_bytes(node_id: Uuid, nonce: &str, csr_pem: &str, identity_generation: u64) -> Vec<u8> {
    let length = u32::try_from(nonce.len()).unwrap_or(u32::MAX);
    [
        RECOVERY_DOMAIN,
        node_id.as_bytes(),
        &length.to_be_bytes(),
        nonce.as_bytes(),
        &Sha256::digest(csr_pem.as_bytes()),
        &identity_generation.to_be_bytes(),
    ]
    .concat()
}

/// What the agent needs to recover an expired identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecoveryState {
    /// Generation of the node's identity; the first is 1.
    pub identity_generation: u64,
    /// Recoveries left before an operator has to act.
    pub remaining: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_signature_covers_node_nonce_request_and_generation() {
        let key = SigningKey::from_bytes(&[1; 32]);
        let node = Uuid::from_u128(5);
        let mut signed = RecoverRequest {
            enrollment_token: SecretToken::new("t"),
            identity_generation: 1,
            nonce: "n".into(),
            csr_pem: "csr".into(),
            nonce_signature: Vec::new(),
            boot_id: Uuid::nil(),
            agent_version: "1".into(),
            protocol: 3,
            verifier_set_version: 0,
        };
        assert!(!signed.is_signed_by(node, &PublicKey::from(&key)));
        signed.sign(node, &key);
        assert!(signed.is_signed_by(node, &PublicKey::from(&key)));
        assert!(!signed.is_signed_by(Uuid::from_u128(6), &PublicKey::from(&key)));
        assert!(!signed.is_signed_by(node, &PublicKey::from(&SigningKey::from_bytes(&[2; 32]))));
        let altered = [
            RecoverRequest { identity_generation: 2, ..signed.clone() },
            RecoverRequest { nonce: "m".into(), ..signed.clone() },
            RecoverRequest { csr_pem: "other".into(), ..signed.clone() },
            RecoverRequest { nonce_signature: vec![0; 64], ..signed.clone() },
            RecoverRequest { nonce_signature: vec![0; 63], ..signed },
        ];
        assert!(altered.iter().all(|request| !request.is_signed_by(node, &PublicKey::from(&key))));
    }
}

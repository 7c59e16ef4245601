//! Signed byte strings in the form of DSSE v1 (Dead Simple Signing Envelope): the signature covers the payload's type and
//! its exact bytes, so that no side has to re-serialise anything.

use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};

/// A payload, its type, and its signatures. Verify before reading it: [`crate::Verifiers::verify`] for tasks,
/// [`SignedEnvelope::verify_with`] for one known key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedEnvelope {
    /// Media type of the payload; signed too, so that one type of message never passes for another.
    pub payload_type: String,
    #[serde(with = "crate::base64_bytes")]
    pub payload: Vec<u8>,
    pub signatures: Vec<KeySignature>,
}

/// One signature and the id of the key that made it. The id only helps to find the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySignature {
    pub key_id: String,
    /// 64 bytes of Ed25519 (RFC 8032).
    #[serde(with = "crate::base64_bytes")]
    pub signature: Vec<u8>,
}

/// No trusted key made any of the signatures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeSignatureError {
    #[error("the envelope carries no signature by a key that is trusted here")]
    UnknownKey,
    #[error("the signature does not match the payload: it was altered, or signed by another key")]
    Mismatch,
}

impl SignedEnvelope {
    /// Signs `payload` with one key.
    #[must_use]
    pub fn sign(key: &SigningKey, key_id: &str, payload_type: &str, payload: Vec<u8>) -> Self {
        let signature = KeySignature::over(key, key_id, payload_type, &payload);
        Self { payload_type: payload_type.to_owned(), payload, signatures: vec![signature] }
    }

    /// The payload, if any of the signatures was made by `key`.
    ///
    /// # Errors
    /// [`EnvelopeSignatureError::Mismatch`] when none was.
    pub fn verify_with(&self, key: &VerifyingKey) -> Result<&[u8], EnvelopeSignatureError> {
        let signed = pae(&self.payload_type, &self.payload);
        if self.signatures.iter().any(|signature| signature.is_by(key, &signed)) {
            Ok(&self.payload)
        } else {
            Err(EnvelopeSignatureError::Mismatch)
        }
    }
}

impl KeySignature {
    /// Signs the pre-authentication encoding of (`payload_type`, `payload`).
    #[must_use]
    pub fn over(key: &SigningKey, key_id: &str, payload_type: &str, payload: &[u8]) -> Self {
        Self { key_id: key_id.to_owned(), signature: key.sign(&pae(payload_type, payload)).to_bytes().to_vec() }
    }

    /// Whether `key` made this signature over `signed`, by the strict rules (no weak keys, no malleable signatures).
    pub(crate) fn is_by(&self, key: &VerifyingKey, signed: &[u8]) -> bool {
        ed25519_dalek::Signature::from_slice(&self.signature)
            .is_ok_and(|signature| key.verify_strict(signed, &signature).is_ok())
    }
}

/// DSSE's pre-authentication encoding: `DSSEv1 LEN(type) type LEN(body) body`, lengths in decimal, one space between.
#[must_use]
pub fn pae(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut encoded = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    encoded.extend_from_slice(payload);
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pre_authentication_encoding_is_the_one_of_the_dsse_specification() {
        // The example of the DSSE v1 protocol document.
        assert_eq!(
            pae("http://example.com/HelloWorld", b"hello world"),
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
    }

    #[test]
    fn a_payload_is_not_accepted_under_another_type() {
        let key = SigningKey::from_bytes(&[7; 32]);
        let mut envelope = SignedEnvelope::sign(&key, "k", "application/a", b"{}".to_vec());
        assert_eq!(envelope.verify_with(&key.verifying_key()), Ok(&b"{}"[..]));
        envelope.payload_type = "application/b".to_owned();
        assert_eq!(envelope.verify_with(&key.verifying_key()), Err(EnvelopeSignatureError::Mismatch));
    }

    #[test]
    fn signatures_of_the_wrong_length_are_refused_and_do_not_panic() {
        let key = SigningKey::from_bytes(&[7; 32]);
        let mut envelope = SignedEnvelope::sign(&key, "k", "t", b"x".to_vec());
        for length in [0, 1, 63, 65, 4096] {
            envelope.signatures[0].signature = vec![0; length];
            assert!(envelope.verify_with(&key.verifying_key()).is_err());
        }
    }
}

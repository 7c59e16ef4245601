//! The keys that sign the access tokens of service accounts.

use super::signers::{SignerKeyNames, in_use};
use super::{KeysError, StoredPrivateKey};
use chrono::{DateTime, Utc};
use domain::key_set::{KeySet, KeySetPurpose};
use ed25519_dalek::{SigningKey, VerifyingKey};
use persistence::{Reads, Secrets};
use sha2::{Digest as _, Sha256};

pub(super) const SECRET_NAMES: SignerKeyNames = SignerKeyNames {
    purpose: KeySetPurpose::ServiceTokens,
    prefix: "service_token_signing/",
    first: "service_token_signing/active",
    // Never the name of a key of the identity provider, whose tokens come in the same header.
    id_of: |key| format!("gpuaas-{}", hex::encode(&Sha256::digest(key.verifying_key().as_bytes())[..8])),
};

/// The keys of service accounts' tokens. A staged key is accepted too: another replica may use it a moment earlier.
pub struct ServiceKeys {
    pub set: KeySet,
    pub(super) held: Vec<StoredPrivateKey<SigningKey>>,
}

impl ServiceKeys {
    pub(super) async fn read(secrets: &Secrets, reads: &Reads) -> Result<Self, KeysError> {
        let (set, held) = SECRET_NAMES.read(secrets, reads).await?;
        Ok(Self { set, held })
    }

    /// One key that was never rotated, for tests.
    #[must_use]
    pub fn with_first_key(key: SigningKey, at: DateTime<Utc>) -> Self {
        let (set, held) = SECRET_NAMES.with_first_key(key, at);
        Self { set, held }
    }

    /// The key that signs, with its id. There is one wherever the keys could be read.
    #[must_use]
    pub fn signing(&self) -> Option<(&str, &SigningKey)> {
        in_use(&self.set, &self.held).next().map(|(_, held)| (held.id.as_str(), &held.key))
    }

    /// Whether a key of this id is or was one of the service's own.
    #[must_use]
    pub fn is_ours(&self, id: &str) -> bool {
        self.set.key(id).is_some()
    }

    /// The key of this id, where tokens by it are accepted.
    #[must_use]
    pub fn trusted(&self, id: &str) -> Option<VerifyingKey> {
        in_use(&self.set, &self.held).find(|(_, held)| held.id == id).map(|(_, held)| held.key.verifying_key())
    }
}

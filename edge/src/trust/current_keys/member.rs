//! The keys that authenticate the messages between members.

use super::signers::{SignerKeyNames, in_use};
use super::{KeysError, StoredPrivateKey};
use chrono::{DateTime, Utc};
use domain::key_set::{KeySet, KeySetPurpose};
use ed25519_dalek::SigningKey;
use persistence::{Reads, Secrets};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

pub(super) const SECRET_NAMES: SignerKeyNames = SignerKeyNames {
    purpose: KeySetPurpose::MemberMessages,
    prefix: "member_messages/",
    first: "member_messages/active",
    id_of: |key| hex::encode(&Sha256::digest(key.verifying_key().as_bytes())[..8]),
};

/// The label that the HMAC keys are derived with.
const DERIVED_FOR: &[u8] = b"gpuaas member messages v1";

/// A key of HMAC-SHA256.
pub type MacKey = Zeroizing<[u8; 32]>;

/// The keys of the members' messages. They are stored as seeds of Ed25519, as the other keys that are rotated; the keys of the HMAC are
/// derived from them, and the public halves are only their names.
pub struct MemberKeys {
    pub set: KeySet,
    pub(super) held: Vec<StoredPrivateKey<SigningKey>>,
    /// By id, the active one first. A staged key is trusted: another member may use it a moment earlier.
    derived: Vec<(String, MacKey)>,
}

impl MemberKeys {
    pub(super) async fn read(secrets: &Secrets, reads: &Reads) -> Result<Self, KeysError> {
        let (set, held) = SECRET_NAMES.read(secrets, reads).await?;
        Ok(Self::of(set, held))
    }

    fn of(set: KeySet, held: Vec<StoredPrivateKey<SigningKey>>) -> Self {
        let derived = in_use(&set, &held).map(|(_, held)| (held.id.clone(), derived(&held.key))).collect();
        Self { set, held, derived }
    }

    /// One key that was never rotated, for tests.
    #[must_use]
    pub fn with_first_key(key: SigningKey, at: DateTime<Utc>) -> Self {
        let (set, held) = SECRET_NAMES.with_first_key(key, at);
        Self::of(set, held)
    }

    /// The key that is used, with its id. There is one wherever the keys could be read.
    #[must_use]
    pub fn active(&self) -> Option<(&str, &MacKey)> {
        self.derived.first().map(|(id, key)| (id.as_str(), key))
    }

    /// The key of this id, where messages by it are accepted.
    #[must_use]
    pub fn trusted(&self, id: &str) -> Option<&MacKey> {
        self.derived.iter().find(|(known, _)| known == id).map(|(_, key)| key)
    }
}

fn derived(key: &SigningKey) -> MacKey {
    let seed = Zeroizing::new(key.to_bytes());
    Zeroizing::new(Sha256::new().chain_update(DERIVED_FOR).chain_update(seed.as_slice()).finalize().into())
}

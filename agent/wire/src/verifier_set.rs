//! The verifier set: the keys whose signatures an agent accepts on tasks, and its rotation, which never cuts off an agent.
//!
//! The keys of the bootstrap bundle are version 0. Each later [`VerifierSet`] is itself signed by a key of the set before it, and only
//! higher versions are accepted, so that neither a stranger nor a replay can change the trust.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use ed25519_dalek::{SigningKey, VerifyingKey};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use sha2::{Digest as _, Sha256};

use crate::base64_bytes;
use crate::envelope::{EnvelopeSignatureError, KeySignature, SignedEnvelope, pae};

/// Payload type of verifier sets.
pub const VERIFIER_SET_TYPE: &str = "application/vnd.gpuaas.verifier-set+json";

/// An Ed25519 public key; base64 of its 32 bytes in text. Points that are invalid or of small order do not parse.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey(VerifyingKey);

/// The text is not the base64 of a usable Ed25519 public key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the base64 of the 32 bytes of an Ed25519 public key")]
pub struct PublicKeyError;

impl PublicKey {
    /// The key for verifying with.
    #[must_use]
    pub fn verifying_key(&self) -> &VerifyingKey {
        &self.0
    }

    /// The 32 bytes of RFC 8032.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// The key's id, derived from the key: the first 16 hexadecimal digits of its SHA-256.
    #[must_use]
    pub fn key_id(&self) -> String {
        hex::encode(&Sha256::digest(self.to_bytes())[..8])
    }
}

impl TryFrom<&[u8]> for PublicKey {
    type Error = PublicKeyError;

    fn try_from(bytes: &[u8]) -> Result<Self, PublicKeyError> {
        let bytes: [u8; 32] = bytes.try_into().map_err(|_| PublicKeyError)?;
        let key = VerifyingKey::from_bytes(&bytes).map_err(|_| PublicKeyError)?;
        if key.is_weak() { Err(PublicKeyError) } else { Ok(Self(key)) }
    }
}

impl From<&SigningKey> for PublicKey {
    fn from(key: &SigningKey) -> Self {
        Self(key.verifying_key())
    }
}

impl FromStr for PublicKey {
    type Err = PublicKeyError;

    fn from_str(text: &str) -> Result<Self, PublicKeyError> {
        Self::try_from(base64_bytes::decode(text).map_err(|_| PublicKeyError)?.as_slice())
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&base64_bytes::encode(&self.to_bytes()))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({self})")
    }
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The status of a key in its rotation. An agent accepts signatures by all three; they differ for the signer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum KeyStatus {
    /// Signs tasks.
    Active,
    /// Will sign tasks once every agent has it.
    Staged,
    /// Signed tasks that may still be in flight.
    Grace,
}

impl KeyStatus {
    fn as_str(self) -> &'static str {
        self.into_str()
    }
}

/// A key and its status in the rotation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifierKey {
    pub key_id: String,
    pub public_key: PublicKey,
    pub status: KeyStatus,
}

impl VerifierKey {
    /// A key under its derived id.
    #[must_use]
    pub fn new(public_key: PublicKey, status: KeyStatus) -> Self {
        Self { key_id: public_key.key_id(), public_key, status }
    }
}

/// One version of the keys whose tasks an agent executes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifierSet {
    /// Incremented by each rotation. 0 is the bundle's, which is not signed.
    pub version: u64,
    pub keys: Vec<VerifierKey>,
    /// Over [`VerifierSet::signed_bytes`] as [`VERIFIER_SET_TYPE`], by keys of the set before this one.
    #[serde(default)]
    pub signatures: Vec<KeySignature>,
}

/// Why a verifier set is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    #[error("verifier set {version} has no active key")]
    NoActiveKey { version: u64 },
    #[error("verifier set {version} names key {key_id:?} twice")]
    DuplicateKey { version: u64, key_id: String },
    #[error("verifier set {offered} is not newer than set {current}")]
    NotNewer { offered: u64, current: u64 },
    #[error("verifier set {version} is not signed by a key of set {trusted_version}")]
    Untrusted {
        version: u64,
        trusted_version: u64,
        #[source]
        source: EnvelopeSignatureError,
    },
    #[error("entry {position} of the task-signing keys is not [key_id:][status:]base64 of an Ed25519 public key")]
    Entry { position: usize },
}

impl VerifierSet {
    /// A set of the given version, signed by keys of its predecessor.
    ///
    /// # Errors
    /// [`SetError`] when the set has no active key or an id twice.
    pub fn sign(version: u64, keys: Vec<VerifierKey>, signers: &[(&str, &SigningKey)]) -> Result<Self, SetError> {
        let mut set = Self { version, keys, signatures: Vec::new() };
        set.validate()?;
        let bytes = set.signed_bytes();
        set.signatures =
            signers.iter().map(|(id, key)| KeySignature::over(key, id, VERIFIER_SET_TYPE, &bytes)).collect();
        Ok(set)
    }

    /// The bytes under the signatures: compact JSON of exactly `version` and `keys` (`key_id`, `public_key`, `status`), in
    /// that order.
    #[must_use]
    pub fn signed_bytes(&self) -> Vec<u8> {
        let keys: Vec<String> = self
            .keys
            .iter()
            .map(|key| {
                format!(
                    r#"{{"key_id":{},"public_key":"{}","status":"{}"}}"#,
                    serde_json::Value::from(key.key_id.as_str()),
                    key.public_key,
                    key.status.as_str()
                )
            })
            .collect();
        format!(r#"{{"version":{},"keys":[{}]}}"#, self.version, keys.join(",")).into_bytes()
    }

    /// Whether `next` may follow this set: well-formed, newer, and signed by a key of this one.
    ///
    /// # Errors
    /// [`SetError`] says which of these fails.
    pub fn accept_next(&self, next: &Self) -> Result<(), SetError> {
        next.validate()?;
        if next.version <= self.version {
            return Err(SetError::NotNewer { offered: next.version, current: self.version });
        }
        let signed = pae(VERIFIER_SET_TYPE, &next.signed_bytes());
        self.find_signer(&next.signatures, &signed).map(|_| ()).map_err(|source| SetError::Untrusted {
            version: next.version,
            trusted_version: self.version,
            source,
        })
    }

    /// Reads the text of `SVC_TASK_SIGNING_PUBKEYS` as version 0: entries separated by commas, each `[key_id:][status:]base64`. Without a
    /// status a key is active, without an id it has [`PublicKey::key_id`].
    ///
    /// # Errors
    /// [`SetError`] when an entry does not parse or the set has no active key.
    pub fn from_env_value(text: &str) -> Result<Self, SetError> {
        let keys = text
            .split(',')
            .map(str::trim)
            .filter(|entry| !entry.is_empty())
            .enumerate()
            .map(|(index, entry)| parse_entry(entry).ok_or(SetError::Entry { position: index + 1 }))
            .collect::<Result<Vec<_>, _>>()?;
        let set = Self { version: 0, keys, signatures: Vec::new() };
        set.validate()?;
        Ok(set)
    }

    /// The keys as [`VerifierSet::from_env_value`] reads them; version and signatures are not part of it.
    #[must_use]
    pub fn to_env_value(&self) -> String {
        let entries: Vec<String> =
            self.keys.iter().map(|key| format!("{}:{}:{}", key.key_id, key.status.as_str(), key.public_key)).collect();
        entries.join(",")
    }

    fn validate(&self) -> Result<(), SetError> {
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.keys.iter().find(|key| !seen.insert(key.key_id.as_str())) {
            return Err(SetError::DuplicateKey { version: self.version, key_id: twice.key_id.clone() });
        }
        if self.keys.iter().any(|key| key.status == KeyStatus::Active) {
            Ok(())
        } else {
            Err(SetError::NoActiveKey { version: self.version })
        }
    }

    fn find_signer(&self, signatures: &[KeySignature], signed: &[u8]) -> Result<&VerifierKey, EnvelopeSignatureError> {
        let mut failure = EnvelopeSignatureError::UnknownKey;
        for signature in signatures {
            let Some(key) = self.keys.iter().find(|key| key.key_id == signature.key_id) else {
                continue;
            };
            if signature.is_by(key.public_key.verifying_key(), signed) {
                return Ok(key);
            }
            failure = EnvelopeSignatureError::Mismatch;
        }
        Err(failure)
    }
}

fn parse_entry(entry: &str) -> Option<VerifierKey> {
    let parts: Vec<&str> = entry.split(':').collect();
    let (key_id, status, key) = match parts.as_slice() {
        [key] => (None, None, *key),
        [first, key] => match parse_status(first) {
            Some(status) => (None, Some(status), *key),
            None => (Some(*first), None, *key),
        },
        [key_id, status, key] => (Some(*key_id), Some(parse_status(status)?), *key),
        _ => return None,
    };
    let mut parsed = VerifierKey::new(key.parse().ok()?, status.unwrap_or(KeyStatus::Active));
    if let Some(key_id) = key_id.filter(|id| !id.is_empty()) {
        parsed.key_id = key_id.to_owned();
    }
    Some(parsed)
}

fn parse_status(text: &str) -> Option<KeyStatus> {
    [KeyStatus::Active, KeyStatus::Staged, KeyStatus::Grace].into_iter().find(|status| status.as_str() == text)
}

/// The set that an agent trusts at the moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Verifiers {
    current: VerifierSet,
}

impl Verifiers {
    /// Trusts `set` without a signature: the bundle's keys, or what this agent stored after accepting it.
    ///
    /// # Errors
    /// [`SetError`] when the set has no active key or an id twice.
    pub fn trusting(set: VerifierSet) -> Result<Self, SetError> {
        set.validate()?;
        Ok(Self { current: set })
    }

    /// The current set.
    #[must_use]
    pub fn current(&self) -> &VerifierSet {
        &self.current
    }

    /// Its version, as sent in heartbeats.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.current.version
    }

    /// The payload, if a trusted key (active, staged or grace) signed it. The caller still has to compare `payload_type`.
    ///
    /// # Errors
    /// [`EnvelopeSignatureError`] when no trusted key did.
    pub fn verify(&self, envelope: &SignedEnvelope) -> Result<Vec<u8>, EnvelopeSignatureError> {
        let signed = pae(&envelope.payload_type, &envelope.payload);
        self.current.find_signer(&envelope.signatures, &signed)?;
        Ok(envelope.payload.clone())
    }

    /// Follows a chain of newer sets, lowest version first, each accepted by the one before. Versions that are known already are skipped,
    /// and so are sets from before this agent's bundle, which keys that it never had have signed. Returns whether the trust changed.
    ///
    /// # Errors
    /// [`SetError`] of the first refused set above the version that was reached: trust that the control plane has and this agent lacks.
    /// What was accepted stays.
    pub fn follow(&mut self, sets: &[VerifierSet]) -> Result<bool, SetError> {
        let before = self.version();
        let mut ordered: Vec<&VerifierSet> = sets.iter().filter(|set| set.version > before).collect();
        ordered.sort_by_key(|set| set.version);
        let mut refused = Vec::new();
        for set in ordered {
            match self.current.accept_next(set) {
                Ok(()) => self.current = set.clone(),
                Err(error) => refused.push((set.version, error)),
            }
        }
        match refused.into_iter().find(|(version, _)| *version > self.version()) {
            Some((_, error)) => Err(error),
            None => Ok(self.version() > before),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seed: u8) -> SigningKey {
        SigningKey::from_bytes(&[seed; 32])
    }

    fn listed(seed: u8, status: KeyStatus) -> VerifierKey {
        VerifierKey::new(PublicKey::from(&key(seed)), status)
    }

    fn id(seed: u8) -> String {
        PublicKey::from(&key(seed)).key_id()
    }

    /// A set of one active key, signed by the key of another seed.
    fn set(version: u64, active: u8, signer: u8) -> VerifierSet {
        VerifierSet::sign(version, vec![listed(active, KeyStatus::Active)], &[(&id(signer), &key(signer))]).unwrap()
    }

    fn trusting(seed: u8) -> Verifiers {
        Verifiers::trusting(set(0, seed, seed)).unwrap()
    }

    #[test]
    fn agent_that_missed_several_rotations_follows_the_chain_in_any_order() {
        let mut verifiers = trusting(1);
        let chain = [set(5, 4, 3), set(1, 2, 1), set(2, 3, 2)];
        assert_eq!(verifiers.follow(&chain), Ok(true));
        assert_eq!(verifiers.version(), 5);
        let task = SignedEnvelope::sign(&key(4), &id(4), "t", b"x".to_vec());
        assert_eq!(verifiers.verify(&task), Ok(b"x".to_vec()));
        let old = SignedEnvelope::sign(&key(1), &id(1), "t", b"x".to_vec());
        assert_eq!(verifiers.verify(&old), Err(EnvelopeSignatureError::UnknownKey));
    }

    #[test]
    fn verifier_set_signed_by_a_stranger_is_refused_and_earlier_sets_stay() {
        let mut verifiers = trusting(1);
        let refused = verifiers.follow(&[set(1, 2, 1), set(2, 9, 9)]).unwrap_err();
        assert!(matches!(refused, SetError::Untrusted { version: 2, trusted_version: 1, .. }), "{refused}");
        assert_eq!(verifiers.version(), 1);
    }

    #[test]
    fn a_set_that_skips_a_link_of_the_chain_is_refused() {
        assert!(trusting(1).follow(&[set(2, 3, 2)]).is_err());
    }

    #[test]
    fn agent_with_a_newer_bundle_skips_older_rotations() {
        // The bundle holds the key of set 2; sets 1 and 2 were signed before it was made.
        let mut verifiers = trusting(3);
        assert_eq!(verifiers.follow(&[set(1, 2, 1), set(2, 3, 2), set(3, 4, 3)]), Ok(true));
        assert_eq!(verifiers.version(), 3);
    }

    #[test]
    fn older_or_equal_version_is_never_accepted() {
        let current = set(3, 1, 1);
        for offered in [0, 2, 3] {
            assert_eq!(current.accept_next(&set(offered, 2, 1)), Err(SetError::NotNewer { offered, current: 3 }));
        }
        let mut verifiers = Verifiers::trusting(current).unwrap();
        assert_eq!(verifiers.follow(&[set(2, 2, 1)]), Ok(false));
        assert_eq!(verifiers.version(), 3);
    }

    #[test]
    fn a_set_whose_keys_or_version_were_altered_after_signing_is_refused() {
        let verifiers = trusting(1);
        let mut keys = set(1, 2, 1);
        keys.keys[0].public_key = PublicKey::from(&key(9));
        let mut status = set(1, 2, 1);
        status.keys.push(listed(9, KeyStatus::Grace));
        let mut version = set(1, 2, 1);
        version.version = 7;
        for altered in [keys, status, version] {
            assert!(matches!(
                verifiers.current().accept_next(&altered),
                Err(SetError::Untrusted { source: EnvelopeSignatureError::Mismatch, .. })
            ));
        }
    }

    #[test]
    fn staged_and_grace_keys_are_trusted_like_the_active_one() {
        let keys = vec![listed(1, KeyStatus::Active), listed(2, KeyStatus::Staged), listed(3, KeyStatus::Grace)];
        let verifiers = Verifiers::trusting(VerifierSet::sign(1, keys, &[]).unwrap()).unwrap();
        for seed in [1, 2, 3] {
            assert!(verifiers.verify(&SignedEnvelope::sign(&key(seed), &id(seed), "t", b"x".to_vec())).is_ok());
        }
        // A trusted key id on a stranger's signature.
        let forged = SignedEnvelope::sign(&key(9), &id(1), "t", b"x".to_vec());
        assert_eq!(verifiers.verify(&forged), Err(EnvelopeSignatureError::Mismatch));
    }

    #[test]
    fn verifier_set_without_an_active_key_or_with_a_duplicate_id_is_refused() {
        let none = VerifierSet::sign(1, vec![listed(1, KeyStatus::Staged)], &[]);
        assert_eq!(none, Err(SetError::NoActiveKey { version: 1 }));
        let twice = VerifierSet::sign(1, vec![listed(1, KeyStatus::Active), listed(1, KeyStatus::Grace)], &[]);
        assert!(matches!(twice, Err(SetError::DuplicateKey { .. })));
    }

    #[test]
    fn the_environment_value_is_read_back_as_it_was_written() {
        let keys = vec![listed(1, KeyStatus::Active), listed(2, KeyStatus::Staged), listed(3, KeyStatus::Grace)];
        let set = VerifierSet { version: 0, keys, signatures: Vec::new() };
        assert_eq!(VerifierSet::from_env_value(&set.to_env_value()), Ok(set.clone()));

        let bare =
            VerifierSet::from_env_value(&format!(" {} , staged:{}", set.keys[0].public_key, set.keys[1].public_key));
        assert_eq!(bare.unwrap().keys, set.keys[..2]);
        let named = VerifierSet::from_env_value(&format!("primary:{}", set.keys[0].public_key)).unwrap();
        assert_eq!(named.keys[0].key_id, "primary");
    }

    #[test]
    fn a_key_list_that_does_not_parse_says_which_entry() {
        let good = PublicKey::from(&key(1));
        let bad = VerifierSet::from_env_value(&format!("{good},nonsense"));
        assert_eq!(bad, Err(SetError::Entry { position: 2 }));
        assert_eq!(VerifierSet::from_env_value(""), Err(SetError::NoActiveKey { version: 0 }));
    }

    #[test]
    fn weak_and_short_public_keys_do_not_parse() {
        let zero = base64_bytes::encode(&[0; 32]);
        let one = base64_bytes::encode(&{
            let mut identity = [0; 32];
            identity[0] = 1;
            identity
        });
        for text in [zero.as_str(), one.as_str(), "", "AAAA", "not base64!"] {
            assert_eq!(text.parse::<PublicKey>(), Err(PublicKeyError), "{text}");
        }
    }
}

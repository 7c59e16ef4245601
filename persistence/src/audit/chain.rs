//! The hashed and signed forms of rows, links and heads, byte by byte.

use crate::error::damaged;
use domain::id::Shard;
use domain::state_machine::Timestamp;
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::collections::BTreeMap;
use uuid::Uuid;

/// A link of a chain, or the digest of a row.
pub(super) type Hash = [u8; 32];

/// The columns of the audit table, as statements select them: all of them are hashed.
pub(super) const COLUMNS: &str =
    "shard, epoch, seq, actor, action, target_kind, target_id, correlation_id, metadata::text AS metadata, at";

/// An audit row as it is hashed.
pub(super) struct HashedRow {
    pub(super) shard: i16,
    pub(super) place: RowPosition,
    actor: String,
    action: String,
    target_kind: String,
    target_id: Uuid,
    correlation_id: String,
    /// As Postgres prints a `jsonb`: the same value has the same text.
    metadata: String,
    pub(super) at: Timestamp,
}

/// The position of a row in the order of its shard's commits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct RowPosition {
    pub(super) epoch: i64,
    pub(super) seq: i64,
}

impl HashedRow {
    pub(super) fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            shard: row.try_get("shard")?,
            place: RowPosition { epoch: row.try_get("epoch")?, seq: row.try_get("seq")? },
            actor: row.try_get("actor")?,
            action: row.try_get("action")?,
            target_kind: row.try_get("target_kind")?,
            target_id: row.try_get("target_id")?,
            correlation_id: row.try_get("correlation_id")?,
            metadata: row.try_get("metadata")?,
            at: row.try_get("at")?,
        })
    }

    /// SHA-256 of every column. Texts are length-prefixed, so that no two rows have the same input.
    pub(super) fn digest(&self) -> Hash {
        let mut hash = Sha256::new();
        hash.update(b"gpuaas audit row v1");
        hash.update(self.shard.to_be_bytes());
        hash.update(self.place.epoch.to_be_bytes());
        hash.update(self.place.seq.to_be_bytes());
        hash.update(self.at.timestamp_micros().to_be_bytes());
        hash.update(self.target_id.as_bytes());
        for text in [&self.actor, &self.action, &self.target_kind, &self.correlation_id, &self.metadata] {
            hash.update((text.len() as u64).to_be_bytes());
            hash.update(text.as_bytes());
        }
        hash.finalize().into()
    }
}

/// The first link of a shard's chain.
pub(super) fn genesis(shard: Shard) -> Hash {
    let mut hash = Sha256::new();
    hash.update(b"gpuaas audit chain v1");
    hash.update([shard.0]);
    hash.finalize().into()
}

/// The link after `before`.
pub(super) fn link(before: &Hash, number: i64, row: &Hash) -> Hash {
    let mut hash = Sha256::new();
    hash.update(b"gpuaas audit link v1");
    hash.update(before);
    hash.update(number.to_be_bytes());
    hash.update(row);
    hash.finalize().into()
}

/// The head of a shard's chain at an instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainHead {
    pub shard: Shard,
    /// The number of sealed rows by then.
    pub number: i64,
    /// The position of the last of them.
    pub epoch: i64,
    pub seq: i64,
    #[serde(with = "hex::serde")]
    pub hash: [u8; 32],
    pub sealed_at: Timestamp,
}

impl ChainHead {
    pub(super) const fn position(&self) -> RowPosition {
        RowPosition { epoch: self.epoch, seq: self.seq }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"gpuaas audit head v1\0".to_vec();
        bytes.push(self.shard.0);
        for number in [self.number, self.epoch, self.seq, self.sealed_at.timestamp_micros()] {
            bytes.extend_from_slice(&number.to_be_bytes());
        }
        bytes.extend_from_slice(&self.hash);
        bytes
    }
}

/// A head that may be published and stored anywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedHead {
    #[serde(flatten)]
    pub head: ChainHead,
    pub key_id: String,
    /// Ed25519.
    #[serde(with = "hex::serde")]
    pub signature: [u8; 64],
}

impl SignedHead {
    pub(super) const COLUMNS: &str = "shard, number, epoch, seq, hash, sealed_at, key_id, signature";

    pub(crate) fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        let head = ChainHead {
            shard: Shard(u8::try_from(row.try_get::<i16, _>("shard")?).map_err(damaged)?),
            number: row.try_get("number")?,
            epoch: row.try_get("epoch")?,
            seq: row.try_get("seq")?,
            hash: array(row.try_get("hash")?),
            sealed_at: row.try_get("sealed_at")?,
        };
        Ok(Self { head, key_id: row.try_get("key_id")?, signature: array(row.try_get("signature")?) })
    }
}

/// Bytes of another length were not written by this code: they match nothing.
pub(super) fn array<const N: usize>(bytes: Vec<u8>) -> [u8; N] {
    bytes.try_into().unwrap_or([0; N])
}

/// The control plane's key for heads and checkpoints.
pub struct AuditKey {
    key: SigningKey,
    id: String,
}

impl AuditKey {
    #[must_use]
    pub fn new(key: SigningKey) -> Self {
        let id = id_of(&key.verifying_key());
        Self { key, id }
    }

    /// In hexadecimal, as an auditor pins it.
    #[must_use]
    pub fn public_key(&self) -> String {
        hex::encode(self.key.verifying_key().as_bytes())
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn sign(&self, bytes: &[u8]) -> [u8; 64] {
        self.key.sign(bytes).to_bytes()
    }

    pub(super) fn sign_head(&self, head: ChainHead) -> SignedHead {
        let signature = self.sign(&head.bytes());
        SignedHead { head, key_id: self.id.clone(), signature }
    }
}

/// The public keys that may have signed.
#[derive(Clone, Debug, Default)]
pub struct AuditKeys(BTreeMap<String, VerifyingKey>);

/// A text is not an Ed25519 public key.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no Ed25519 public key in 64 hexadecimal digits")]
pub struct InvalidAuditKey(String);

impl AuditKeys {
    #[must_use]
    pub fn of(key: &AuditKey) -> Self {
        let public = key.key.verifying_key();
        Self([(id_of(&public), public)].into())
    }

    /// Public keys in hexadecimal.
    ///
    /// # Errors
    /// [`InvalidAuditKey`]
    pub fn parse<'a>(texts: impl IntoIterator<Item = &'a str>) -> Result<Self, InvalidAuditKey> {
        let read = |text: &str| {
            let bytes: [u8; 32] = hex::decode(text.trim()).ok()?.try_into().ok()?;
            VerifyingKey::from_bytes(&bytes).ok()
        };
        let keys = texts.into_iter().map(|text| read(text).ok_or_else(|| InvalidAuditKey(text.to_owned())));
        let keys: Vec<_> = keys.collect::<Result<_, _>>()?;
        Ok(Self(keys.into_iter().map(|key| (id_of(&key), key)).collect()))
    }

    /// Whether the head was signed by one of these keys.
    #[must_use]
    pub fn signed(&self, head: &SignedHead) -> bool {
        self.verify(&head.key_id, &head.head.bytes(), &head.signature)
    }

    pub(super) fn verify(&self, key_id: &str, bytes: &[u8], signature: &[u8; 64]) -> bool {
        let Some(key) = self.0.get(key_id) else { return false };
        key.verify_strict(bytes, &Signature::from_bytes(signature)).is_ok()
    }
}

fn id_of(key: &VerifyingKey) -> String {
    hex::encode(&Sha256::digest(key.as_bytes())[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> ChainHead {
        let sealed_at = Timestamp::from_timestamp_micros(1_750_000_000_123_456).unwrap();
        ChainHead { shard: Shard(7), number: 3, epoch: 2, seq: 9, hash: [5; 32], sealed_at }
    }

    #[test]
    fn signed_head_survives_json_and_any_change_breaks_its_signature() {
        let key = AuditKey::new(SigningKey::from_bytes(&[1; 32]));
        let keys = AuditKeys::parse([key.public_key().as_str()]).unwrap();
        let signed = key.sign_head(head());
        let back: SignedHead = serde_json::from_str(&serde_json::to_string(&signed).unwrap()).unwrap();
        assert_eq!(back, signed);
        assert!(keys.signed(&back));
        let changes: [fn(&mut ChainHead); 6] = [
            |head| head.shard = Shard(8),
            |head| head.number = 4,
            |head| head.epoch = 3,
            |head| head.seq = 8,
            |head| head.hash[31] ^= 1,
            |head| head.sealed_at += chrono::TimeDelta::microseconds(1),
        ];
        for change in changes {
            let mut changed = signed.clone();
            change(&mut changed.head);
            assert!(!keys.signed(&changed));
        }
        assert!(!AuditKeys::of(&AuditKey::new(SigningKey::from_bytes(&[2; 32]))).signed(&signed));
    }

    #[test]
    fn malformed_audit_key_is_refused() {
        for bad in ["", "00", "zz", &"f".repeat(63), &"0".repeat(66)] {
            assert!(AuditKeys::parse([bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn chains_of_two_shards_begin_differently_and_a_link_covers_its_number() {
        assert_ne!(genesis(Shard(0)), genesis(Shard(1)));
        assert_ne!(link(&[0; 32], 1, &[1; 32]), link(&[0; 32], 2, &[1; 32]));
    }
}

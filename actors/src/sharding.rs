//! Sharding: the shard of an entity id, fixed for ever (design 6), and ids that derive from commands and names.

use domain::{CommandId, Shard, Timestamp};
use sha2::{Digest, Sha256};
use uuid::Uuid;

/// The last 62 bits of a UUID: everything after the variant, where a UUIDv7 is random.
const LAST_62_BITS: u128 = (1 << 62) - 1;

/// The shard of an entity: the first byte of SHA-256 over the last 62 bits of its id, big-endian.
#[must_use]
pub fn shard_of(id: Uuid) -> Shard {
    let tail = u64::try_from(id.as_u128() & LAST_62_BITS).unwrap_or_default();
    Shard(Sha256::digest(tail.to_be_bytes())[0])
}

/// The id of the entity that a command creates: a UUIDv7 of this moment whose last 62 bits derive from the command id, so that a
/// repeated creation reaches the first one in the same shard.
#[must_use]
pub fn id_created_by(command: CommandId, now: Timestamp) -> Uuid {
    let digest = Sha256::digest(command.0.as_bytes());
    let mut random = [0; 10];
    random.copy_from_slice(&digest[..10]);
    let millis = u64::try_from(now.timestamp_millis()).unwrap_or(0);
    uuid::Builder::from_unix_timestamp_millis(millis, &random).into_uuid()
}

/// The id of a command: a hash of its identity, for example principal, route and `Idempotency-Key`.
#[must_use]
pub fn command_id(parts: &[&[u8]]) -> CommandId {
    CommandId(uuid::Builder::from_custom_bytes(digest_of(parts)[..16].try_into().unwrap_or_default()).into_uuid())
}

/// The id of the single entity of a name, for example of a user's tenant.
#[must_use]
pub fn id_of_name(kind: domain::EntityKind, name: &str) -> Uuid {
    command_id(&[b"entity", kind.as_str().as_bytes(), name.as_bytes()]).0
}

/// SHA-256 over length-prefixed parts, so that no two lists of parts have the same input.
#[must_use]
pub fn digest_of(parts: &[&[u8]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_creation_has_the_shard_of_the_first() {
        let command = command_id(&[b"user", b"POST /allocations", b"key-1"]);
        let first = id_created_by(command, Timestamp::from_timestamp(1_000, 0).unwrap());
        let later = id_created_by(command, Timestamp::from_timestamp(9_000, 0).unwrap());
        assert_ne!(first, later);
        assert_eq!(shard_of(first), shard_of(later));
        assert_eq!(first.get_version_num(), 7);
    }

    #[test]
    fn the_shard_of_an_id_never_changes() {
        // Golden: ids in a database were placed by this function.
        let id = Uuid::parse_str("01890a5d-ac96-774b-bcce-b302099a8057").unwrap();
        assert_eq!(shard_of(id), Shard(Sha256::digest(0x3cce_b302_099a_8057_u64.to_be_bytes())[0]));
    }

    #[test]
    fn the_shards_are_evenly_filled() {
        let mut counts = [0_u32; Shard::COUNT];
        for n in 0..256_000_u128 {
            let id = id_created_by(CommandId(Uuid::from_u128(n)), Timestamp::UNIX_EPOCH);
            counts[usize::from(shard_of(id).0)] += 1;
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }
}

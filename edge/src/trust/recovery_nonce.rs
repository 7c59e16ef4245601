//! Recovery nonces. They are issued without being stored, so that a request for one costs nothing. A spent nonce is recorded in the node's
//! state, from the commit that spent it until it would have expired.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, TimeDelta, Utc};
use domain::node::Nonce;
use hmac::digest::InvalidLength;
use hmac::{Hmac, KeyInit as _, Mac as _};
use rand::Rng as _;
use secrecy::{ExposeSecret as _, SecretSlice};
use sha2::Sha256;
use uuid::Uuid;

/// How long a nonce is valid.
const LIFETIME: TimeDelta = TimeDelta::minutes(5);

const RANDOM_LEN: usize = 16;
const EXPIRY_LEN: usize = 8;
const TAG_LEN: usize = 32;

/// Makes nonces and verifies them, on every replica alike.
#[derive(Clone)]
pub struct Nonces(Hmac<Sha256>);

impl Nonces {
    /// `key`: 32 random bytes, the same in every replica.
    ///
    /// # Errors
    /// Never in practice: HMAC accepts keys of every length (RFC 2104).
    pub fn new(key: &SecretSlice<u8>) -> Result<Self, InvalidLength> {
        Hmac::new_from_slice(key.expose_secret()).map(Self)
    }

    /// A nonce for one node, good from `now` for five minutes.
    #[must_use]
    pub fn mint(&self, node_id: Uuid, now: DateTime<Utc>) -> Nonce {
        let until = now + LIFETIME;
        let mut bytes = vec![0; RANDOM_LEN];
        rand::rng().fill_bytes(&mut bytes);
        bytes.extend(until.timestamp_micros().to_be_bytes());
        let tag = self.mac(node_id, &bytes).finalize().into_bytes();
        bytes.extend(tag);
        Nonce { value: URL_SAFE_NO_PAD.encode(bytes), until }
    }

    /// Verifies a presented nonce: it was minted for this node by this cluster. Its expiry is checked by the state machine.
    #[must_use]
    pub fn read(&self, node_id: Uuid, shown: &str) -> Option<Nonce> {
        let bytes =
            URL_SAFE_NO_PAD.decode(shown).ok().filter(|bytes| bytes.len() == RANDOM_LEN + EXPIRY_LEN + TAG_LEN)?;
        let (stamped, tag) = bytes.split_at(RANDOM_LEN + EXPIRY_LEN);
        self.mac(node_id, stamped).verify_slice(tag).ok()?;
        let until = DateTime::from_timestamp_micros(i64::from_be_bytes(stamped[RANDOM_LEN..].try_into().ok()?))?;
        Some(Nonce { value: shown.to_owned(), until })
    }

    fn mac(&self, node_id: Uuid, stamped: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        mac.update(node_id.as_bytes());
        mac.update(stamped);
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nonces(key: u8) -> Nonces {
        Nonces::new(&SecretSlice::from(vec![key; 32])).unwrap()
    }

    #[test]
    fn nonce_verifies_on_every_replica_for_its_own_node() {
        let (node, now) = (Uuid::from_u128(1), DateTime::from_timestamp(1_800_000_000, 0).unwrap());
        let minted = nonces(1).mint(node, now);
        assert_eq!(minted.until, now + LIFETIME);
        assert_eq!(nonces(1).read(node, &minted.value), Some(minted.clone()));
        assert_eq!(nonces(1).read(Uuid::from_u128(2), &minted.value), None);
        assert_eq!(nonces(2).read(node, &minted.value), None);
        assert_ne!(nonces(1).mint(node, now), minted);
    }

    #[test]
    fn altered_nonce_is_refused() {
        let minted = nonces(1).mint(Uuid::nil(), Utc::now()).value;
        let bytes = URL_SAFE_NO_PAD.decode(&minted).unwrap();
        for index in 0..bytes.len() {
            let mut altered = bytes.clone();
            altered[index] ^= 1;
            assert_eq!(nonces(1).read(Uuid::nil(), &URL_SAFE_NO_PAD.encode(altered)), None);
        }
        for text in ["", "x", "*", &minted[1..], &format!("{minted}AA"), &"A".repeat(100_000)] {
            assert_eq!(nonces(1).read(Uuid::nil(), text), None);
        }
    }
}

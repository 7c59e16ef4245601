//! The stored signing keys of one purpose: a sealed seed each, under a name of its own.

use super::{KeysError, NewKeyMaterial, StoredPrivateKey, damaged, stored};
use chrono::{DateTime, Utc};
use domain::key_set::{KeySet, KeySetPurpose, NewKey, Phase};
use ed25519_dalek::{SecretKey as Seed, SigningKey};
use persistence::secrets::Secret;
use persistence::{Reads, Secrets};
use rand::Rng as _;
use secrecy::{ExposeSecret as _, SecretBox, SecretSlice};
use serde_json::json;
use wire::PublicKey;

/// The names of the secrets of a purpose's keys.
pub(super) struct SignerKeyNames {
    pub(super) purpose: KeySetPurpose,
    /// The prefix of the names.
    pub(super) prefix: &'static str,
    /// The name of the one that the cluster began with.
    pub(super) first: &'static str,
    pub(super) id_of: fn(&SigningKey) -> String,
}

impl SignerKeyNames {
    /// The set and its private keys; where there is none the first key is made.
    pub(super) async fn read(
        &self,
        secrets: &Secrets,
        reads: &Reads,
    ) -> Result<(KeySet, Vec<StoredPrivateKey<SigningKey>>), KeysError> {
        let stored = stored(reads, self.purpose).await?;
        if stored.is_none() {
            secrets.get_or_create(self.first, || (stored_form(&random_seed()), json!({}))).await?;
        }
        let held = secrets.list(self.prefix).await?;
        let held = held.iter().map(|secret| self.signer(secret)).collect::<Result<Vec<_>, _>>()?;
        let founded = || {
            let first = held.iter().find(|held| held.secret == self.first);
            let first = first.ok_or_else(|| damaged(self.purpose, "there is none"))?;
            Ok::<_, KeysError>(KeySet::founded(self.purpose, self.new_key(&first.key), first.made_at))
        };
        let set = stored.map_or_else(founded, Ok)?;
        if in_use(&set, &held).next().is_none_or(|(phase, _)| phase != Phase::Active) {
            return Err(damaged(self.purpose, "the private half of the active key is missing"));
        }
        Ok((set, held))
    }

    /// One key that was never rotated.
    pub(super) fn with_first_key(
        &self,
        key: SigningKey,
        at: DateTime<Utc>,
    ) -> (KeySet, Vec<StoredPrivateKey<SigningKey>>) {
        let set = KeySet::founded(self.purpose, self.new_key(&key), at);
        (set, vec![StoredPrivateKey { id: (self.id_of)(&key), key, secret: self.first.to_owned(), made_at: at }])
    }

    /// A key that is to be staged.
    pub(super) fn generate(&self) -> NewKeyMaterial {
        let seed = random_seed();
        let key = self.new_key(&SigningKey::from_bytes(seed.expose_secret()));
        NewKeyMaterial { value: stored_form(&seed), public: json!({}), key }
    }

    fn new_key(&self, key: &SigningKey) -> NewKey {
        NewKey { id: (self.id_of)(key), public: PublicKey::from(key).to_string() }
    }

    fn signer(&self, secret: &Secret) -> Result<StoredPrivateKey<SigningKey>, KeysError> {
        let seed: &[u8; 32] = secret
            .value
            .expose_secret()
            .try_into()
            .map_err(|_| damaged(self.purpose, format!("{} has a wrong length", secret.name)))?;
        let key = SigningKey::from_bytes(seed);
        Ok(StoredPrivateKey { id: (self.id_of)(&key), key, secret: secret.name.clone(), made_at: secret.created_at })
    }
}

/// The loaded private keys that are trusted: the active one first, then the others, newest first.
pub(super) fn in_use<'a>(
    set: &'a KeySet,
    held: &'a [StoredPrivateKey<SigningKey>],
) -> impl Iterator<Item = (Phase, &'a StoredPrivateKey<SigningKey>)> {
    let trusted = set.keys.iter().rev().filter(|key| key.state.phase() != Phase::Retired);
    let mut signers: Vec<_> =
        trusted.filter_map(|key| Some((key.state.phase(), held.iter().find(|held| held.id == key.id)?))).collect();
    signers.sort_by_key(|(phase, _)| *phase != Phase::Active);
    signers.into_iter()
}

fn random_seed() -> SecretBox<Seed> {
    SecretBox::init_with_mut(|seed: &mut Seed| rand::rng().fill_bytes(seed))
}

/// In the stored form of secrets.
fn stored_form(seed: &SecretBox<Seed>) -> SecretSlice<u8> {
    SecretSlice::from(seed.expose_secret().to_vec())
}

//! Signing keys of one purpose, as they are kept: a seed each, sealed, under a name of its own.

use super::{Held, KeysError, Made, damaged, stored};
use chrono::{DateTime, Utc};
use domain::key_set::{KeySet, NewKey, Phase, Purpose};
use ed25519_dalek::{SecretKey as Seed, SigningKey};
use persistence::secrets::Secret;
use persistence::{Reads, Secrets};
use rand::Rng as _;
use secrecy::{ExposeSecret as _, SecretBox, SecretSlice};
use serde_json::json;
use wire::PublicKey;

/// Where the keys of a purpose lie, and what they are called.
pub(super) struct Kept {
    pub(super) purpose: Purpose,
    /// What their names begin with.
    pub(super) names: &'static str,
    /// The name of the one that the cluster began with.
    pub(super) first: &'static str,
    pub(super) id_of: fn(&SigningKey) -> String,
}

impl Kept {
    /// The set and its private halves; where there is none the first key is made.
    pub(super) async fn read(
        &self,
        secrets: &Secrets,
        reads: &Reads,
    ) -> Result<(KeySet, Vec<Held<SigningKey>>), KeysError> {
        let stored = stored(reads, self.purpose).await?;
        if stored.is_none() {
            secrets.get_or_create(self.first, || (kept(&random_seed()), json!({}))).await?;
        }
        let held = secrets.list(self.names).await?;
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
    pub(super) fn founded(&self, key: SigningKey, at: DateTime<Utc>) -> (KeySet, Vec<Held<SigningKey>>) {
        let set = KeySet::founded(self.purpose, self.new_key(&key), at);
        (set, vec![Held { id: (self.id_of)(&key), key, secret: self.first.to_owned(), made_at: at }])
    }

    /// A key that is to be staged.
    pub(super) fn made(&self) -> Made {
        let seed = random_seed();
        let key = self.new_key(&SigningKey::from_bytes(seed.expose_secret()));
        Made { value: kept(&seed), public: json!({}), key }
    }

    fn new_key(&self, key: &SigningKey) -> NewKey {
        NewKey { id: (self.id_of)(key), public: PublicKey::from(key).to_string() }
    }

    fn signer(&self, secret: &Secret) -> Result<Held<SigningKey>, KeysError> {
        let seed: &[u8; 32] = secret
            .value
            .expose_secret()
            .try_into()
            .map_err(|_| damaged(self.purpose, format!("{} has a wrong length", secret.name)))?;
        let key = SigningKey::from_bytes(seed);
        Ok(Held { id: (self.id_of)(&key), key, secret: secret.name.clone(), made_at: secret.created_at })
    }
}

/// Private halves that are here, of keys that are trusted: the active one first, then the others, newest first.
pub(super) fn in_use<'a>(
    set: &'a KeySet,
    held: &'a [Held<SigningKey>],
) -> impl Iterator<Item = (Phase, &'a Held<SigningKey>)> {
    let trusted = set.keys.iter().rev().filter(|key| key.standing.phase() != Phase::Retired);
    let mut signers: Vec<_> =
        trusted.filter_map(|key| Some((key.standing.phase(), held.iter().find(|held| held.id == key.id)?))).collect();
    signers.sort_by_key(|(phase, _)| *phase != Phase::Active);
    signers.into_iter()
}

fn random_seed() -> SecretBox<Seed> {
    SecretBox::init_with_mut(|seed: &mut Seed| rand::rng().fill_bytes(seed))
}

/// In the form in which secrets are kept.
fn kept(seed: &SecretBox<Seed>) -> SecretSlice<u8> {
    SecretSlice::from(seed.expose_secret().to_vec())
}

//! Seals of stored snapshots: a MAC under a key that Postgres holds only sealed binds a snapshot to the member that committed it.
//!
//! An attacker who can write rows and has no key ring could otherwise change an entity: which token a node admits, which task its agent gets.
//! A member refuses to decide from such a row, so nothing that follows from it is signed (`deploy/decisions/0033`).
//!
//! The MAC is over the snapshot's content, whose form Postgres changes (`jsonb`): members of objects by name, numbers by value.

use domain::id::EntityRef;
use domain::state_machine::Timestamp;
use hmac::{Hmac, KeyInit as _, Mac as _};
use prometheus::{IntCounterVec, Opts, Registry};
use secrecy::{ExposeSecret, SecretSlice};
use serde_json::Value;
use sha2::Sha256;
use sqlx::{PgPool, Row};
use std::fmt;
use std::sync::Arc;
use uuid::Uuid;

/// Bytes before the MAC: the version that it is made for.
const VERSION: usize = 8;
/// Rows that are sealed in one batch.
const ROWS_PER_BATCH: i64 = 500;

/// Seals snapshots and checks them. Clones share the key.
#[derive(Clone)]
pub struct SnapshotSealer(Arc<Inner>);

struct Inner {
    mac: Hmac<Sha256>,
    accepts_unsealed_until: Option<Timestamp>,
    refused: IntCounterVec,
}

/// Why a stored snapshot is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealRefusal {
    #[error("the stored snapshot has no seal: no member of this release has committed it")]
    Unsealed,
    #[error("the stored snapshot is not the one that a member committed: the row was altered")]
    Altered,
}

/// The key has a wrong length.
#[derive(Debug, thiserror::Error)]
#[error("the key that seals snapshots has a wrong length")]
pub struct InvalidKeyLength;

impl SnapshotSealer {
    /// `accepts_unsealed_until`: until when rows of the release before are accepted, which does not seal.
    ///
    /// # Errors
    /// [`InvalidKeyLength`] unless the key has 32 bytes.
    pub fn new(key: &SecretSlice<u8>, accepts_unsealed_until: Option<Timestamp>) -> Result<Self, InvalidKeyLength> {
        let key = key.expose_secret();
        if key.len() != 32 {
            return Err(InvalidKeyLength);
        }
        let mac = Hmac::new_from_slice(key).map_err(|_| InvalidKeyLength)?;
        let opts = Opts::new("snapshots_refused_total", "Stored snapshots whose seal does not hold, by kind and why");
        let refused = IntCounterVec::new(opts, &["kind", "why"]).map_err(|_| InvalidKeyLength)?;
        for kind in domain::EntityKind::ALL {
            for why in ["unsealed", "altered"] {
                // So that a rate is defined from the first refusal on.
                refused.with_label_values(&[kind.as_str(), why]).inc_by(0);
            }
        }
        Ok(Self(Arc::new(Inner { mac, accepts_unsealed_until, refused })))
    }

    /// # Errors
    /// Where the registry has a metric of this name already.
    pub fn register(&self, registry: &Registry) -> prometheus::Result<()> {
        registry.register(Box::new(self.0.refused.clone()))
    }

    /// The seal of a snapshot at a version, to be stored with it.
    ///
    /// # Errors
    /// Where the snapshot is not JSON.
    pub fn seal(&self, entity: EntityRef, version: i64, snapshot: &str) -> Result<Vec<u8>, serde_json::Error> {
        let mac = self.mac_of(entity, version, &serde_json::from_str(snapshot)?);
        Ok([version.to_be_bytes().as_slice(), &mac.finalize().into_bytes()].concat())
    }

    /// Checks a snapshot that was read.
    ///
    /// # Errors
    /// [`SealRefusal`], which is logged and counted.
    pub fn check(&self, entity: EntityRef, version: i64, body: &str, seal: Option<&[u8]>) -> Result<(), SealRefusal> {
        let why = match self.verify(entity, version, body, seal) {
            Ok(()) => return Ok(()),
            Err(SealRefusal::Unsealed)
                if self.0.accepts_unsealed_until.is_some_and(|until| chrono::Utc::now() < until) =>
            {
                return Ok(());
            }
            Err(why) => why,
        };
        let label = match why {
            SealRefusal::Unsealed => "unsealed",
            SealRefusal::Altered => "altered",
        };
        self.0.refused.with_label_values(&[entity.kind.as_str(), label]).inc();
        tracing::error!(
            resource_name = %entity,
            error_code = "snapshot_refused",
            version,
            "{entity} is not decided on: {why}. See the runbook ops.snapshot.altered."
        );
        Err(why)
    }

    fn verify(&self, entity: EntityRef, version: i64, body: &str, seal: Option<&[u8]>) -> Result<(), SealRefusal> {
        let (of, mac) = seal.and_then(|seal| seal.split_at_checked(VERSION)).ok_or(SealRefusal::Unsealed)?;
        if of != version.to_be_bytes() {
            return Err(SealRefusal::Unsealed);
        }
        let body = serde_json::from_str(body).map_err(|_| SealRefusal::Altered)?;
        self.mac_of(entity, version, &body).verify_slice(mac).map_err(|_| SealRefusal::Altered)
    }

    fn mac_of(&self, entity: EntityRef, version: i64, body: &Value) -> Hmac<Sha256> {
        let mut mac = self.0.mac.clone();
        mac.update(b"gpuaas snapshot 1");
        text(&mut mac, entity.kind.as_str());
        mac.update(entity.id.as_bytes());
        mac.update(&version.to_be_bytes());
        value(&mut mac, body);
        mac
    }

    /// Seals what an operator vouches for: one entity as it is stored, or every one that has no seal for its version. Returns how many
    /// were sealed.
    ///
    /// # Errors
    /// Where the database cannot be reached, or a snapshot is not JSON.
    pub async fn adopt(&self, pool: &PgPool, only: Option<Uuid>) -> Result<u64, sqlx::Error> {
        let (mut sealed, mut after) = (0, Uuid::nil());
        loop {
            let rows = sqlx::query(
                "SELECT id, kind, version, body::text, seal FROM entity
                 WHERE id > $1 AND ($2::uuid IS NULL OR id = $2) ORDER BY id LIMIT $3",
            )
            .bind(after)
            .bind(only)
            .bind(ROWS_PER_BATCH)
            .fetch_all(pool)
            .await?;
            let Some(last) = rows.last() else { return Ok(sealed) };
            after = last.try_get(0)?;
            for row in &rows {
                let (id, version, seal): (Uuid, i64, Option<Vec<u8>>) =
                    (row.try_get(0)?, row.try_get(2)?, row.try_get(4)?);
                let Some(kind) = domain::EntityKind::parse(row.try_get(1)?) else { continue };
                let (entity, body): (_, &str) = (EntityRef { kind, id }, row.try_get(3)?);
                let verified = self.verify(entity, version, body, seal.as_deref());
                if verified.is_ok() || (only.is_none() && verified == Err(SealRefusal::Altered)) {
                    continue;
                }
                let seal = self.seal(entity, version, body).map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
                // A commit meanwhile has its own seal.
                let written = sqlx::query("UPDATE entity SET seal = $3 WHERE id = $1 AND version = $2")
                    .bind(id)
                    .bind(version)
                    .bind(seal)
                    .execute(pool)
                    .await?;
                sealed += written.rows_affected();
            }
        }
    }
}

impl fmt::Debug for SnapshotSealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Seals")
    }
}

/// A value in canonical form, whatever its spelling: its type, length and content.
fn value(mac: &mut Hmac<Sha256>, it: &Value) {
    match it {
        Value::Null => mac.update(b"n"),
        Value::Bool(false) => mac.update(b"f"),
        Value::Bool(true) => mac.update(b"t"),
        Value::Number(it) => number(mac, it),
        Value::String(it) => {
            mac.update(b"s");
            text(mac, it);
        }
        Value::Array(items) => {
            mac.update(b"a");
            length(mac, items.len());
            items.iter().for_each(|item| value(mac, item));
        }
        Value::Object(members) => {
            mac.update(b"o");
            length(mac, members.len());
            let mut members: Vec<_> = members.iter().collect();
            members.sort_unstable_by_key(|(name, _)| *name);
            for (name, member) in members {
                text(mac, name);
                value(mac, member);
            }
        }
    }
}

/// Postgres changes the spelling of numbers: 1e16 comes back as 10000000000000000, which parses as another type. Whole ones are hashed
/// by their digits, on which both types agree, the others to twelve digits.
fn number(mac: &mut Hmac<Sha256>, it: &serde_json::Number) {
    // What parses as a whole number: 64 bits, with a sign or without.
    let whole = -9_223_372_036_854_775_808.0..18_446_744_073_709_551_616.0;
    let (kind, digits): (&[u8], String) = match it.as_f64() {
        Some(float) if it.is_f64() && float == 0.0 => (b"i", "0".to_owned()),
        Some(float) if it.is_f64() && float.fract() == 0.0 && whole.contains(&float) => (b"i", float.to_string()),
        Some(float) if it.is_f64() => (b"d", format!("{float:.11e}")),
        Some(_) | None => (b"i", it.to_string()),
    };
    mac.update(kind);
    text(mac, &digits);
}

fn text(mac: &mut Hmac<Sha256>, it: &str) {
    length(mac, it.len());
    mac.update(it.as_bytes());
}

fn length(mac: &mut Hmac<Sha256>, length: usize) {
    mac.update(&(length as u64).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::{TimeDelta, Utc};
    use domain::EntityKind;
    use proptest::prelude::*;

    fn seals(until: Option<Timestamp>) -> SnapshotSealer {
        SnapshotSealer::new(&SecretSlice::from(vec![7; 32]), until).unwrap()
    }

    fn node(n: u128) -> EntityRef {
        EntityRef { kind: EntityKind::Node, id: Uuid::from_u128(n) }
    }

    #[test]
    fn snapshot_is_accepted_in_any_spelling_and_refused_with_any_other_content() {
        let (seals, stored) = (seals(None), r#"{"b": [1, 2.50, 1e16, "\u00e4"], "a": {"x": null, "y": true}}"#);
        let seal = seals.seal(node(1), 3, stored).unwrap();
        let respelled = r#"{"a":{"y":true,"x":null},"b":[1.0,2.5,10000000000000000,"ä"]}"#;
        assert_eq!(seals.check(node(1), 3, respelled, Some(&seal)), Ok(()));
        for altered in [
            r#"{"b": [1, 2.50, 1e16, "\u00e4"], "a": {"x": null, "y": false}}"#,
            r#"{"b": [1, 2.50, 1e16, "\u00e5"], "a": {"x": null, "y": true}}"#,
            r#"{"b": [2.50, 1, 1e16, "\u00e4"], "a": {"x": null, "y": true}}"#,
            r#"{"b": [1, 2.50, 1e16, "\u00e4"], "a": {"x": null, "y": true}, "c": 1}"#,
            r#"{"b": [1, 2.50, 1e16, "\u00e4"]}"#,
            "{",
        ] {
            assert_eq!(seals.check(node(1), 3, altered, Some(&seal)), Err(SealRefusal::Altered), "{altered}");
        }
        assert_eq!(seals.check(node(2), 3, stored, Some(&seal)), Err(SealRefusal::Altered), "of another entity");
        let kind = EntityRef { kind: EntityKind::Sku, id: Uuid::from_u128(1) };
        assert_eq!(seals.check(kind, 3, stored, Some(&seal)), Err(SealRefusal::Altered), "of another kind");
        let mut moved = seal.clone();
        moved[..VERSION].copy_from_slice(&4_i64.to_be_bytes());
        assert_eq!(seals.check(node(1), 4, stored, Some(&moved)), Err(SealRefusal::Altered), "of another version");
        let other = SnapshotSealer::new(&SecretSlice::from(vec![8; 32]), None).unwrap();
        assert_eq!(other.check(node(1), 3, stored, Some(&seal)), Err(SealRefusal::Altered), "under another key");
    }

    #[test]
    fn snapshot_without_a_seal_is_refused_unless_the_release_before_still_runs() {
        let later = Some(Utc::now() + TimeDelta::hours(1));
        let before = seals(None).seal(node(1), 2, "{}").unwrap();
        for seal in [None, Some(&b"x"[..]), Some(before.as_slice())] {
            assert_eq!(seals(None).check(node(1), 3, "{}", seal), Err(SealRefusal::Unsealed));
            assert_eq!(seals(Some(Utc::now())).check(node(1), 3, "{}", seal), Err(SealRefusal::Unsealed));
            assert_eq!(seals(later).check(node(1), 3, "{}", seal), Ok(()));
        }
        assert_eq!(seals(later).check(node(1), 2, "[]", Some(&before)), Err(SealRefusal::Altered));
    }

    /// A quick parser reads this as the number beside it, and Postgres gives it back as a whole number, which every parser reads exactly.
    #[test]
    fn large_float_is_sealed_by_its_exact_value() {
        let seals = seals(None);
        let seal = seals.seal(node(1), 1, "1.4727287635488061e19").unwrap();
        assert_eq!(seals.check(node(1), 1, "14727287635488061000", Some(&seal)), Ok(()));
    }

    proptest! {
        #[test]
        fn numbers_are_distinguished_by_value(a in any::<i32>(), b in any::<i32>()) {
            let seals = seals(None);
            let seal = seals.seal(node(1), 1, &a.to_string()).unwrap();
            prop_assert_eq!(seals.check(node(1), 1, &format!("{b}.0"), Some(&seal)).is_ok(), a == b);
        }

        /// Money is counted in millionths: no two amounts are the same.
        #[test]
        fn large_whole_numbers_are_distinguished_to_the_last_digit(a in any::<i64>()) {
            let seals = seals(None);
            let seal = seals.seal(node(1), 1, &a.to_string()).unwrap();
            prop_assert!(seals.check(node(1), 1, &a.to_string(), Some(&seal)).is_ok());
            prop_assert!(seals.check(node(1), 1, &a.wrapping_add(1).to_string(), Some(&seal)).is_err());
        }

        /// As Postgres spells them out.
        #[test]
        fn floats_are_the_same_in_either_spelling(float in any::<f64>()) {
            prop_assume!(float.is_finite());
            let seals = seals(None);
            let seal = seals.seal(node(1), 1, &serde_json::to_string(&float).unwrap()).unwrap();
            prop_assert!(seals.check(node(1), 1, &format!("{float}"), Some(&seal)).is_ok(), "{float:e}");
        }
    }
}

//! What is sealed under which key of the key ring, and the way to another: everything that is sealed, wherever it lies.
//!
//! Two tables hold sealed values, `secret` and `recording` (of each recording its own key, under which its chunks are sealed), whose rows are
//! sealed anew here, each by itself; and so do entities ([`IN_ENTITIES`]): those are only found here, and sealed anew by a command like every
//! other change. So a run that is interrupted anywhere goes on with what is left.

use crate::envelope::{EnvelopeError, KeyRing, Place};
use crate::error::{Doing, StoreError};
use crate::recordings::key_place;
use crate::secrets::{SecretError, place};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::{EntityRef, Kind};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

const RECORDINGS_AT_ONCE: i64 = 200;

/// The first characters of a sealed value in base64, which hold the id of its key, whatever that is.
const HEAD: i32 = 92;

/// A value of an entity that is sealed, in base64.
#[derive(Clone, Copy, Debug)]
pub struct SealedField {
    pub kind: Kind,
    /// Where it lies in the entity's body.
    path: &'static [&'static str],
}

/// What entities hold that is sealed: allocations the request as it came in, what the payment processor said as it came, and the secrets that
/// sign webhooks.
pub const IN_ENTITIES: [SealedField; 4] = [
    SealedField { kind: Kind::Allocation, path: &["asked", "scheduler_request_enc"] },
    SealedField { kind: Kind::ProcessorEvent, path: &["body_enc"] },
    SealedField { kind: Kind::NotificationEndpoint, path: &["secret_enc"] },
    SealedField { kind: Kind::NotificationEndpoint, path: FORMER_SECRET },
];

const FORMER_SECRET: &[&str] = &["former_secret", "secret_enc"];

impl SealedField {
    /// True of the secret that signed webhooks before the present one.
    #[must_use]
    pub fn is_former_secret(&self) -> bool {
        self.path == FORMER_SECRET
    }

    fn place<'a>(&self, row: &'a str) -> Place<'a> {
        Place { table: "entity", column: self.path.last().copied().unwrap_or_default(), row }
    }
}

/// What the body of the payment processor's event is sealed for, by the entity's id.
#[must_use]
pub const fn body_place(row: &str) -> Place<'_> {
    Place { table: "entity", column: "body_enc", row }
}

/// What a secret that signs webhooks is sealed for, by the endpoint's id.
#[must_use]
pub const fn webhook_secret_place(row: &str) -> Place<'_> {
    Place { table: "entity", column: "secret_enc", row }
}

/// How many values are sealed under a key.
pub type Sealed = BTreeMap<String, u64>;

/// Everything that is sealed, and the ring to seal with.
#[derive(Clone, Debug)]
pub struct Rewrap {
    pool: PgPool,
    ring: Arc<KeyRing>,
}

/// An entity's value that another key than the active one has sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outdated {
    pub entity: EntityRef,
    /// Base64.
    pub sealed: String,
}

/// The key ring does not fit what is sealed.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "{count} values are sealed under key {id:?}, which the key ring lacks: put its line back into the file of SVC_KEK_FILE; it may \
         leave when `gpuctl keys list` shows nothing under it"
    )]
    Missing { id: String, count: u64 },
    #[error(
        "secret {name:?} does not open with key {id:?} of the key ring: this is another key under the same id; put the right one into \
         the file of SVC_KEK_FILE"
    )]
    Wrong { id: String, name: String },
}

impl Rewrap {
    #[must_use]
    pub const fn new(pool: PgPool, ring: Arc<KeyRing>) -> Self {
        Self { pool, ring }
    }

    /// The id of the key that seals.
    #[must_use]
    pub fn active(&self) -> &str {
        self.ring.active()
    }

    /// How many values are sealed under each key.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn sealed(&self) -> Result<Sealed, StoreError> {
        let rows = sqlx::query(
            "SELECT key_id, count(*) AS count FROM (
                 SELECT key_id FROM secret
                 UNION ALL
                 SELECT key_id FROM recording
                 UNION ALL
                 SELECT convert_from(substring(bytes FROM 3 FOR get_byte(bytes, 1)), 'UTF8')
                 FROM (
                     SELECT decode(left(body #>> '{asked,scheduler_request_enc}', $1), 'base64') AS bytes FROM entity
                     WHERE kind = 'allocation' AND body #>> '{asked,scheduler_request_enc}' IS NOT NULL
                     UNION ALL
                     SELECT decode(left(body #>> '{body_enc}', $1), 'base64') FROM entity
                     WHERE kind = 'processor_event' AND body #>> '{body_enc}' IS NOT NULL
                     UNION ALL
                     SELECT decode(left(body #>> '{secret_enc}', $1), 'base64') FROM entity
                     WHERE kind = 'notification_endpoint' AND body #>> '{secret_enc}' IS NOT NULL
                     UNION ALL
                     SELECT decode(left(body #>> '{former_secret,secret_enc}', $1), 'base64') FROM entity
                     WHERE kind = 'notification_endpoint' AND body #>> '{former_secret,secret_enc}' IS NOT NULL
                 ) AS in_entities
             ) AS sealed GROUP BY key_id",
        )
        .bind(HEAD)
        .fetch_all(&self.pool)
        .await
        .doing("counting sealed values")?;
        let counted = |row: &PgRow| Ok((row.try_get("key_id")?, row.try_get::<i64, _>("count")?.unsigned_abs()));
        rows.iter().map(counted).collect::<Result<_, sqlx::Error>>().doing("counting sealed values")
    }

    /// Whether everything that is sealed can be opened, as far as that can be told without opening all of it: every key is there that
    /// something is sealed under, and each of the service's own secrets opens.
    ///
    /// # Errors
    /// [`Unfit`] names the key and says what to do.
    pub async fn check(&self) -> Result<(), Unfit> {
        let lacking = self.sealed().await?.into_iter().find(|(id, _)| !self.ring.has(id));
        if let Some((id, count)) = lacking {
            return Err(Unfit::Missing { id, count });
        }
        let rows = sqlx::query("SELECT name, key_id, sealed FROM secret").fetch_all(&self.pool).await;
        for row in rows.doing("reading secrets")? {
            let read = |row: &PgRow| Ok((row.try_get("name")?, row.try_get("key_id")?, row.try_get("sealed")?));
            let (name, id, sealed): (String, String, Vec<u8>) = read(&row).doing("reading secrets")?;
            if self.ring.open(&place(&name), &sealed).is_err() {
                return Err(Unfit::Wrong { id, name });
            }
        }
        Ok(())
    }

    /// Seals the service's own secrets anew that another key than the active one has sealed. Answers how many there were. Of several
    /// members that do it at once each row is written by one.
    ///
    /// # Errors
    /// [`SecretError`]; what was sealed anew before stays so.
    pub async fn secrets(&self) -> Result<u64, SecretError> {
        const DOING: &str = "sealing secrets anew";
        let rows = sqlx::query("SELECT name, sealed FROM secret WHERE key_id <> $1 ORDER BY name")
            .bind(self.ring.active())
            .fetch_all(&self.pool)
            .await
            .doing(DOING)?;
        let mut sealed_anew = 0;
        for row in rows {
            let (name, sealed): (String, Vec<u8>) =
                (row.try_get("name").doing(DOING)?, row.try_get("sealed").doing(DOING)?);
            let anew = self.ring.reseal(&place(&name), &sealed);
            let anew = anew.map_err(|source| SecretError::Sealed { name: name.clone(), source })?;
            let written = sqlx::query("UPDATE secret SET sealed = $1, key_id = $2 WHERE name = $3 AND sealed = $4")
                .bind(anew)
                .bind(self.ring.active())
                .bind(&name)
                .bind(sealed)
                .execute(&self.pool)
                .await
                .doing(DOING)?;
            sealed_anew += written.rows_affected();
        }
        Ok(sealed_anew)
    }

    /// Seals the keys of recordings anew that another key than the active one has sealed, some at a time. Answers how many there were.
    ///
    /// # Errors
    /// [`SecretError`]; what was sealed anew before stays so.
    pub async fn recordings(&self) -> Result<u64, SecretError> {
        const DOING: &str = "sealing the keys of recordings anew";
        let (mut sealed_anew, mut after) = (0, Uuid::nil());
        loop {
            let rows = sqlx::query(
                "SELECT session_id, key_enc FROM recording WHERE key_id <> $1 AND session_id > $2 ORDER BY session_id LIMIT $3",
            )
            .bind(self.ring.active())
            .bind(after)
            .bind(RECORDINGS_AT_ONCE)
            .fetch_all(&self.pool)
            .await
            .doing(DOING)?;
            if rows.is_empty() {
                return Ok(sealed_anew);
            }
            for row in rows {
                let (session, sealed): (Uuid, Vec<u8>) =
                    (row.try_get("session_id").doing(DOING)?, row.try_get("key_enc").doing(DOING)?);
                let name = session.to_string();
                let anew = self.ring.reseal(&key_place(&name), &sealed);
                let anew = anew.map_err(|source| SecretError::Sealed { name: format!("recording {name}"), source })?;
                let written = sqlx::query(
                    "UPDATE recording SET key_enc = $1, key_id = $2 WHERE session_id = $3 AND key_enc = $4",
                )
                .bind(anew)
                .bind(self.ring.active())
                .bind(session)
                .bind(sealed)
                .execute(&self.pool)
                .await
                .doing(DOING)?;
                sealed_anew += written.rows_affected();
                after = session;
            }
        }
    }

    /// Entities whose value another key than the active one has sealed, in the order of their ids, after `after`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn outdated(
        &self,
        field: SealedField,
        after: Option<Uuid>,
        limit: u32,
    ) -> Result<Vec<Outdated>, StoreError> {
        const DOING: &str = "reading sealed values of entities";
        let (kind, mark) = (field.kind, self.ring.mark());
        let rows = sqlx::query(
            "SELECT id, body #>> $2 AS sealed FROM entity
             WHERE kind = $1 AND body #>> $2 IS NOT NULL AND id > $3
               AND substring(decode(left(body #>> $2, $4), 'base64') FROM 1 FOR $5) <> $6
             ORDER BY id LIMIT $7",
        )
        .bind(kind.as_str())
        .bind(field.path)
        .bind(after.unwrap_or(Uuid::nil()))
        .bind(HEAD)
        .bind(i32::try_from(mark.len()).unwrap_or(i32::MAX))
        .bind(mark)
        .bind(i64::from(limit))
        .fetch_all(&self.pool)
        .await;
        let outdated = |row: &PgRow| {
            Ok(Outdated { entity: EntityRef { kind, id: row.try_get("id")? }, sealed: row.try_get("sealed")? })
        };
        rows.doing(DOING)?.iter().map(outdated).collect::<Result<_, sqlx::Error>>().doing(DOING)
    }

    /// The same value, sealed under the active key.
    ///
    /// # Errors
    /// [`EnvelopeError`]
    pub fn reseal(&self, field: SealedField, outdated: &Outdated) -> Result<String, EnvelopeError> {
        let row = outdated.entity.id.to_string();
        let sealed = STANDARD.decode(&outdated.sealed).map_err(|_| EnvelopeError::Refused)?;
        Ok(STANDARD.encode(self.ring.reseal(&field.place(&row), &sealed)?))
    }
}

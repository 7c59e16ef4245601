//! Which values are sealed under which key of the key ring, and how they are rewrapped: everything that is sealed, wherever it is stored.
//!
//! Two tables hold sealed values, `secret` and `recording` (of each recording its own data key, under which its chunks are sealed),
//! whose rows are rewrapped here, each by itself. So do entities ([`SEALED_FIELDS`]): those are only found here, and rewrapped by a
//! command like every other change. So a run that is interrupted anywhere continues with the rest.

use crate::envelope_encryption::{EnvelopeError, KeyRing, SealContext};
use crate::error::{OperationContext, StoreError};
use crate::recordings::key_context;
use crate::secrets::{SecretError, Secrets, secret_context};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use domain::{EntityKind, EntityRef};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

const RECORDINGS_PER_BATCH: i64 = 200;

/// The first characters of a sealed value in base64, which hold the id of its key, of any length.
const PREFIX_CHARS: i32 = 92;

/// A sealed field of an entity, in base64.
#[derive(Clone, Copy, Debug)]
pub struct SealedField {
    pub kind: EntityKind,
    /// Its path in the entity's body.
    path: &'static [&'static str],
}

/// The sealed fields of entities: of allocations the original request, of processor events the original body, the secrets that sign
/// webhooks, and the identity provider's tokens of browser sessions.
pub const SEALED_FIELDS: [SealedField; 5] = [
    SealedField { kind: EntityKind::Allocation, path: &["asked", "scheduler_request_enc"] },
    SealedField { kind: EntityKind::ProcessorEvent, path: &["body_enc"] },
    SealedField { kind: EntityKind::NotificationEndpoint, path: &["secret_enc"] },
    SealedField { kind: EntityKind::NotificationEndpoint, path: FORMER_SECRET },
    SealedField { kind: EntityKind::BrowserSession, path: &["tokens_enc"] },
];

const FORMER_SECRET: &[&str] = &["former_secret", "secret_enc"];

impl SealedField {
    /// True of the secret that signed webhooks before the current one.
    #[must_use]
    pub fn is_former_secret(&self) -> bool {
        self.path == FORMER_SECRET
    }

    fn context<'a>(&self, row: &'a str) -> SealContext<'a> {
        SealContext { table: "entity", column: self.path.last().copied().unwrap_or_default(), row }
    }
}

/// The seal context of a processor event's body, by the entity's id.
#[must_use]
pub const fn body_context(row: &str) -> SealContext<'_> {
    SealContext { table: "entity", column: "body_enc", row }
}

/// The seal context of a secret that signs webhooks, by the endpoint's id.
#[must_use]
pub const fn webhook_secret_context(row: &str) -> SealContext<'_> {
    SealContext { table: "entity", column: "secret_enc", row }
}

/// The seal context of the identity provider's tokens, by the browser session's id.
#[must_use]
pub const fn session_tokens_context(row: &str) -> SealContext<'_> {
    SealContext { table: "entity", column: "tokens_enc", row }
}

/// The number of sealed values by key.
pub type SealedCounts = BTreeMap<String, u64>;

/// Everything that is sealed, with the ring that seals.
#[derive(Clone, Debug)]
pub struct Rewrap {
    pool: PgPool,
    ring: Arc<KeyRing>,
}

impl Secrets {
    /// Everything that is sealed, here and in other tables.
    #[must_use]
    pub fn rewrap(&self) -> Rewrap {
        Rewrap::new(self.pool.clone(), Arc::clone(&self.ring))
    }
}

/// An entity's value that is sealed under another key than the active one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutdatedValue {
    pub entity: EntityRef,
    /// Base64.
    pub sealed: String,
}

/// The key ring does not fit the sealed values.
#[derive(Debug, thiserror::Error)]
pub enum KeyRingMismatch {
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

    /// Counts the sealed values under each key.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn sealed(&self) -> Result<SealedCounts, StoreError> {
        let rows = sqlx::query(
            "SELECT key_id, count(*) AS count FROM (
                 SELECT key_id FROM secret
                 UNION ALL
                 SELECT key_id FROM recording
                 UNION ALL
                 SELECT convert_from(substring(bytes FROM 3 FOR get_byte(bytes, 1)), 'UTF8')
                 FROM (
                     SELECT decode(left(entity.body #>> field.path::text[], $1), 'base64') AS bytes
                     FROM entity JOIN unnest($2::text[], $3::text[]) AS field (kind, path) ON entity.kind = field.kind
                 ) AS in_entities
                 WHERE bytes IS NOT NULL
             ) AS sealed GROUP BY key_id",
        )
        .bind(PREFIX_CHARS)
        .bind(SEALED_FIELDS.map(|field| field.kind.as_str()))
        .bind(SEALED_FIELDS.map(|field| format!("{{{}}}", field.path.join(","))))
        .fetch_all(&self.pool)
        .await
        .doing("counting sealed values")?;
        let counted = |row: &PgRow| Ok((row.try_get("key_id")?, row.try_get::<i64, _>("count")?.unsigned_abs()));
        rows.iter().map(counted).collect::<Result<_, sqlx::Error>>().doing("counting sealed values")
    }

    /// Whether everything that is sealed can be opened, as far as that is known without opening all of it: the ring has every key that
    /// a value is sealed under, and each of the service's own secrets opens.
    ///
    /// # Errors
    /// [`KeyRingMismatch`] names the key and the remedy.
    pub async fn check(&self) -> Result<(), KeyRingMismatch> {
        let lacking = self.sealed().await?.into_iter().find(|(id, _)| !self.ring.has(id));
        if let Some((id, count)) = lacking {
            return Err(KeyRingMismatch::Missing { id, count });
        }
        let rows = sqlx::query("SELECT name, key_id, sealed FROM secret").fetch_all(&self.pool).await;
        for row in rows.doing("reading secrets")? {
            let read = |row: &PgRow| Ok((row.try_get("name")?, row.try_get("key_id")?, row.try_get("sealed")?));
            let (name, id, sealed): (String, String, Vec<u8>) = read(&row).doing("reading secrets")?;
            if self.ring.open(&secret_context(&name), &sealed).is_err() {
                return Err(KeyRingMismatch::Wrong { id, name });
            }
        }
        Ok(())
    }

    /// Rewraps the service's own secrets that are sealed under another key than the active one. Returns how many there were. Of several
    /// members that do so at once, one writes each row.
    ///
    /// # Errors
    /// [`SecretError`]; what was rewrapped before stays so.
    pub async fn secrets(&self) -> Result<u64, SecretError> {
        const DOING: &str = "rewrapping secrets";
        let rows = sqlx::query("SELECT name, sealed FROM secret WHERE key_id <> $1 ORDER BY name")
            .bind(self.ring.active())
            .fetch_all(&self.pool)
            .await
            .doing(DOING)?;
        let mut rewrapped_rows = 0;
        for row in rows {
            let (name, sealed): (String, Vec<u8>) =
                (row.try_get("name").doing(DOING)?, row.try_get("sealed").doing(DOING)?);
            let rewrapped = self.ring.reseal(&secret_context(&name), &sealed);
            let rewrapped = rewrapped.map_err(|source| SecretError::Sealed { name: name.clone(), source })?;
            let written = sqlx::query("UPDATE secret SET sealed = $1, key_id = $2 WHERE name = $3 AND sealed = $4")
                .bind(rewrapped)
                .bind(self.ring.active())
                .bind(&name)
                .bind(sealed)
                .execute(&self.pool)
                .await
                .doing(DOING)?;
            rewrapped_rows += written.rows_affected();
        }
        Ok(rewrapped_rows)
    }

    /// Rewraps the keys of recordings that are sealed under another key than the active one, in batches. Returns how many there were.
    ///
    /// # Errors
    /// [`SecretError`]; what was rewrapped before stays so.
    pub async fn recordings(&self) -> Result<u64, SecretError> {
        const DOING: &str = "rewrapping the keys of recordings";
        let (mut rewrapped_rows, mut after) = (0, Uuid::nil());
        loop {
            let rows = sqlx::query(
                "SELECT session_id, key_enc FROM recording WHERE key_id <> $1 AND session_id > $2 ORDER BY session_id LIMIT $3",
            )
            .bind(self.ring.active())
            .bind(after)
            .bind(RECORDINGS_PER_BATCH)
            .fetch_all(&self.pool)
            .await
            .doing(DOING)?;
            if rows.is_empty() {
                return Ok(rewrapped_rows);
            }
            for row in rows {
                let (session, sealed): (Uuid, Vec<u8>) =
                    (row.try_get("session_id").doing(DOING)?, row.try_get("key_enc").doing(DOING)?);
                let name = session.to_string();
                let rewrapped = self.ring.reseal(&key_context(&name), &sealed);
                let rewrapped =
                    rewrapped.map_err(|source| SecretError::Sealed { name: format!("recording {name}"), source })?;
                let written = sqlx::query(
                    "UPDATE recording SET key_enc = $1, key_id = $2 WHERE session_id = $3 AND key_enc = $4",
                )
                .bind(rewrapped)
                .bind(self.ring.active())
                .bind(session)
                .bind(sealed)
                .execute(&self.pool)
                .await
                .doing(DOING)?;
                rewrapped_rows += written.rows_affected();
                after = session;
            }
        }
    }

    /// Entities whose value is sealed under another key than the active one, in the order of their ids, after `after`.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn outdated(
        &self,
        field: SealedField,
        after: Option<Uuid>,
        limit: u32,
    ) -> Result<Vec<OutdatedValue>, StoreError> {
        const DOING: &str = "reading sealed values of entities";
        let (kind, mark) = (field.kind, self.ring.active_prefix());
        let rows = sqlx::query(
            "SELECT id, body #>> $2 AS sealed FROM entity
             WHERE kind = $1 AND body #>> $2 IS NOT NULL AND id > $3
               AND substring(decode(left(body #>> $2, $4), 'base64') FROM 1 FOR $5) <> $6
             ORDER BY id LIMIT $7",
        )
        .bind(kind.as_str())
        .bind(field.path)
        .bind(after.unwrap_or_default())
        .bind(PREFIX_CHARS)
        .bind(i32::try_from(mark.len()).unwrap_or(i32::MAX))
        .bind(mark)
        .bind(i64::from(limit))
        .fetch_all(&self.pool)
        .await;
        let outdated = |row: &PgRow| {
            Ok(OutdatedValue { entity: EntityRef { kind, id: row.try_get("id")? }, sealed: row.try_get("sealed")? })
        };
        rows.doing(DOING)?.iter().map(outdated).collect::<Result<_, sqlx::Error>>().doing(DOING)
    }

    /// The value, rewrapped under the active key.
    ///
    /// # Errors
    /// [`EnvelopeError`]
    pub fn reseal(&self, field: SealedField, outdated: &OutdatedValue) -> Result<String, EnvelopeError> {
        let row = outdated.entity.id.to_string();
        let sealed = STANDARD.decode(&outdated.sealed).map_err(|_| EnvelopeError::Refused)?;
        Ok(STANDARD.encode(self.ring.reseal(&field.context(&row), &sealed)?))
    }
}

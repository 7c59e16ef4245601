//! Secrets of the control plane itself: the node authority's, the task signers' and the TLS tickets' keys. Sealed at rest
//! ([`crate::envelope_encryption`]), with their public parts (certificates, public keys) beside.

use crate::envelope_encryption::{EnvelopeError, KeyRing, SealContext};
use crate::error::{OperationContext, StoreError};
use crate::recordings::Recordings;
use domain::state_machine::Timestamp;
use secrecy::{ExposeSecret, SecretSlice};
use sqlx::postgres::PgRow;
use sqlx::{PgPool, Row};
use std::sync::Arc;

/// A named secret, open.
#[derive(Debug)]
pub struct Secret {
    pub name: String,
    pub value: SecretSlice<u8>,
    /// Its public part.
    pub public: serde_json::Value,
    /// The key of the key ring that it is sealed under.
    pub key_id: String,
    pub created_at: Timestamp,
}

#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("secret {name:?} does not open")]
    Sealed {
        name: String,
        #[source]
        source: EnvelopeError,
    },
}

/// The named secrets of this cluster.
#[derive(Clone, Debug)]
pub struct Secrets {
    pub(crate) pool: PgPool,
    pub(crate) ring: Arc<KeyRing>,
}

impl Secrets {
    #[must_use]
    pub const fn new(pool: PgPool, ring: Arc<KeyRing>) -> Self {
        Self { pool, ring }
    }

    /// The recordings of terminal sessions.
    #[must_use]
    pub fn recordings(&self) -> Recordings {
        Recordings::new(self.pool.clone(), Arc::clone(&self.ring))
    }

    /// The secret of that name, where there is one.
    ///
    /// # Errors
    /// [`SecretError::Sealed`] where the key ring does not open it.
    pub async fn get(&self, name: &str) -> Result<Option<Secret>, SecretError> {
        let row = sqlx::query("SELECT name, key_id, sealed, public, created_at FROM secret WHERE name = $1")
            .bind(name)
            .fetch_optional(&self.pool)
            .await
            .doing("reading a secret")?;
        row.map(|row| self.open(&row)).transpose()
    }

    /// The secret of that name; where there is none, `make` creates it (value and public part). Of several members that do so at once,
    /// one succeeds, and all get its secret.
    ///
    /// # Errors
    /// [`SecretError`]
    pub async fn get_or_create(
        &self,
        name: &str,
        make: impl FnOnce() -> (SecretSlice<u8>, serde_json::Value),
    ) -> Result<Secret, SecretError> {
        if let Some(secret) = self.get(name).await? {
            return Ok(secret);
        }
        let (value, public) = make();
        let sealed = |source| SecretError::Sealed { name: name.to_owned(), source };
        let bytes = self.ring.seal(&secret_context(name), value.expose_secret()).map_err(sealed)?;
        sqlx::query(
            "INSERT INTO secret (name, key_id, sealed, public) VALUES ($1, $2, $3, $4) ON CONFLICT (name) DO NOTHING",
        )
        .bind(name)
        .bind(self.ring.active())
        .bind(bytes)
        .bind(public)
        .execute(&self.pool)
        .await
        .doing("writing a secret")?;
        let secret = self.get(name).await?;
        secret.ok_or(StoreError { doing: "reading a secret back", source: sqlx::Error::RowNotFound }.into())
    }

    /// Stores a new secret.
    ///
    /// # Errors
    /// [`SecretError::Store`] also where there is one of that name.
    pub async fn create(
        &self,
        name: &str,
        value: &SecretSlice<u8>,
        public: serde_json::Value,
    ) -> Result<(), SecretError> {
        let sealed = |source| SecretError::Sealed { name: name.to_owned(), source };
        let bytes = self.ring.seal(&secret_context(name), value.expose_secret()).map_err(sealed)?;
        sqlx::query("INSERT INTO secret (name, key_id, sealed, public) VALUES ($1, $2, $3, $4)")
            .bind(name)
            .bind(self.ring.active())
            .bind(bytes)
            .bind(public)
            .execute(&self.pool)
            .await
            .doing("writing a secret")?;
        Ok(())
    }

    /// Deletes a secret. A missing one is no error.
    ///
    /// # Errors
    /// [`SecretError::Store`]
    pub async fn destroy(&self, name: &str) -> Result<(), SecretError> {
        sqlx::query("DELETE FROM secret WHERE name = $1")
            .bind(name)
            .execute(&self.pool)
            .await
            .doing("deleting a secret")?;
        Ok(())
    }

    /// The secrets whose names have this prefix, by name.
    ///
    /// # Errors
    /// [`SecretError::Sealed`] where the key ring does not open one of them.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Secret>, SecretError> {
        let rows = sqlx::query(
            "SELECT name, key_id, sealed, public, created_at FROM secret WHERE starts_with(name, $1) ORDER BY name",
        )
        .bind(prefix)
        .fetch_all(&self.pool)
        .await
        .doing("listing secrets")?;
        rows.iter().map(|row| self.open(row)).collect()
    }

    fn open(&self, row: &PgRow) -> Result<Secret, SecretError> {
        const DOING: &str = "reading a secret";
        let name: String = row.try_get("name").doing(DOING)?;
        let sealed: Vec<u8> = row.try_get("sealed").doing(DOING)?;
        let value = self.ring.open(&secret_context(&name), &sealed);
        let value = value.map_err(|source| SecretError::Sealed { name: name.clone(), source })?;
        Ok(Secret {
            value,
            public: row.try_get("public").doing(DOING)?,
            key_id: row.try_get("key_id").doing(DOING)?,
            created_at: row.try_get("created_at").doing(DOING)?,
            name,
        })
    }
}

pub(crate) const fn secret_context(name: &str) -> SealContext<'_> {
    SealContext { table: "secret", column: "sealed", row: name }
}

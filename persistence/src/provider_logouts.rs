//! The last logout of each user and session at the identity provider, as logout tokens reported it (OpenID Connect Back-Channel Logout 1.0).
//!
//! A login that is completed while the logout token is processed has no session yet that could be ended: it looks here. The rows are in the
//! table of commands, under ids of their own, and are removed with the others a day later: a login takes seconds (decisions/0110).

use crate::error::{OperationContext, StoreError};
use crate::pool::ReadPool;
use chrono::{DateTime, Utc};
use domain::CommandId;
use serde::{Deserialize, Serialize};
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

/// A logout that the provider reported.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
pub struct ProviderLogout {
    /// When the logout token was issued, by the provider's clock.
    #[serde(with = "chrono::serde::ts_microseconds")]
    pub issued_at: DateTime<Utc>,
    /// When a replica received it first.
    #[serde(with = "chrono::serde::ts_microseconds")]
    pub received_at: DateTime<Utc>,
    /// The hash of the token's `jti`, in hexadecimal digits.
    pub token_sha256: String,
}

/// The stored logouts.
#[derive(Clone, Debug)]
pub struct ProviderLogouts {
    connections: ReadPool,
}

impl ProviderLogouts {
    pub(crate) const fn new(connections: ReadPool) -> Self {
        Self { connections }
    }

    /// Stores the logout of the user or session of this id, unless one is stored that was issued at the same time or later.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn record(&self, id: CommandId, logout: &ProviderLogout) -> Result<(), StoreError> {
        let query = sqlx::query(
            "INSERT INTO command (id, entity, shard, digest, reply)
             VALUES ($1, '00000000-0000-0000-0000-000000000000', 0, $2, $3)
             ON CONFLICT (id) DO UPDATE SET reply = EXCLUDED.reply, created_at = now()
             WHERE (command.reply->>'issued_at')::bigint < (EXCLUDED.reply->>'issued_at')::bigint
             RETURNING id",
        );
        let row = self.connections.fetch_optional(query.bind(id.0).bind([0_u8; 32]).bind(Json(logout))).await;
        row.map(drop).doing("storing a logout at the identity provider")
    }

    /// The latest of the logouts of these users and sessions.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn latest(&self, ids: &[CommandId]) -> Result<Option<ProviderLogout>, StoreError> {
        let ids: Vec<_> = ids.iter().map(|id| id.0).collect();
        let rows =
            self.connections.fetch_all(sqlx::query("SELECT reply FROM command WHERE id = ANY ($1)").bind(ids)).await;
        let logout = |row: PgRow| row.try_get::<Json<ProviderLogout>, _>(0).map(|Json(logout)| logout);
        let logouts: Result<Vec<_>, _> = rows.and_then(|rows| rows.into_iter().map(logout).collect());
        logouts.map(|logouts| logouts.into_iter().max()).doing("reading logouts at the identity provider")
    }
}

//! Parked entities: no owner of their shard activates them until an operator restarts them. A mark beside the state of the entity, not
//! a part of it.

use crate::error::{OperationContext, StoreError, damaged};
use crate::membership::Cluster;
use domain::id::{EntityKind, EntityRef, Shard};
use sqlx::Row;
use uuid::Uuid;

/// The stored length of an error: an operator reads it, and it has any origin.
const LONGEST_REASON: usize = 2000;

impl Cluster {
    /// Marks an entity as parked.
    ///
    /// # Errors
    /// [`StoreError`]; the next owner of its shard then finds out by itself.
    pub async fn park(&self, entity: EntityRef, shard: Shard, reason: &str) -> Result<(), StoreError> {
        let reason: String = reason.chars().filter(|it| *it != '\0').take(LONGEST_REASON).collect();
        sqlx::query(
            "INSERT INTO parked (entity, kind, shard, reason) VALUES ($1, $2, $3, $4)
             ON CONFLICT (entity) DO UPDATE SET reason = excluded.reason",
        )
        .bind(entity.id)
        .bind(entity.kind.as_str())
        .bind(i16::from(shard.0))
        .bind(reason)
        .execute(&self.pool)
        .await
        .map(drop)
        .doing("parking an entity")
    }

    /// Removes the mark.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn unpark(&self, entity: EntityRef) -> Result<(), StoreError> {
        let done = sqlx::query("DELETE FROM parked WHERE entity = $1").bind(entity.id).execute(&self.pool).await;
        done.map(drop).doing("taking an entity's mark away")
    }

    /// The parked entities of these shards, and why. Kinds that only another release knows are left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn parked(&self, shards: &[Shard]) -> Result<Vec<(EntityRef, String)>, StoreError> {
        let shards: Vec<_> = shards.iter().map(|shard| i16::from(shard.0)).collect();
        let rows = sqlx::query("SELECT entity, kind, reason FROM parked WHERE shard = ANY ($1) ORDER BY entity")
            .bind(shards)
            .fetch_all(&self.pool)
            .await
            .doing("reading parked entities")?;
        let read = |row: &sqlx::postgres::PgRow| -> Result<Option<(EntityRef, String)>, sqlx::Error> {
            let kind = EntityKind::parse(row.try_get::<&str, _>("kind")?);
            let (id, reason): (Uuid, String) = (row.try_get("entity")?, row.try_get("reason")?);
            Ok(kind.map(|kind| (EntityRef { kind, id }, reason)))
        };
        let read: Result<Vec<_>, _> = rows.iter().map(read).collect();
        Ok(read.map_err(damaged).doing("reading parked entities")?.into_iter().flatten().collect())
    }
}

//! Entities by deadline, for the supervision tree.

use super::entity::kind;
use super::{PAGE_MAX, Reads};
use crate::error::{OperationContext, StoreError};
use crate::shard_numbers::shard;
use domain::id::{EntityKind, EntityRef, Shard};
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};

/// An entity, its state, and its timer and deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingEntity {
    pub entity: EntityRef,
    pub shard: Shard,
    pub version: i64,
    pub state: String,
    pub updated_at: Timestamp,
    /// The time of its next tick, where it has one.
    pub wake_at: Option<Timestamp>,
    pub deadline_at: Option<Timestamp>,
    pub reason: Option<String>,
}

/// The position of an entity in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingPosition {
    pub deadline_at: Option<Timestamp>,
    pub id: uuid::Uuid,
}

/// A filter of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingFilter {
    pub kind: Option<EntityKind>,
    pub state: Option<String>,
    /// Those whose deadline has passed at this instant.
    pub overdue_at: Option<Timestamp>,
    /// These, with or without a deadline.
    pub ids: Option<Vec<uuid::Uuid>>,
    /// Those that follow this one.
    pub after: Option<WaitingPosition>,
}

const COLUMNS: &str = "
    SELECT entity.id, entity.kind, entity.shard, entity.version, entity.state, entity.updated_at, deadline.wake_at, deadline.deadline_at,
           deadline.reason";

impl Reads {
    /// Entities by deadline, the nearest first, and those without one after them, the oldest first. With neither kind, state nor ids: only
    /// those that have a deadline. Of `ids`, those without a deadline are in the order of their ids.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn waiting(&self, filter: &WaitingFilter, limit: u32) -> Result<Vec<WaitingEntity>, StoreError> {
        // One more than a page shows whether there is another page.
        let limit = i64::from(limit.clamp(1, PAGE_MAX + 1));
        let mut rows = Vec::new();
        if let Some(ids) = &filter.ids {
            return self.read_waiting(among(filter, ids, limit)).await;
        }
        if filter.after.is_none_or(|after| after.deadline_at.is_some()) {
            rows = self.read_waiting(with_deadline(filter, limit)).await?;
        }
        let has_others = filter.overdue_at.is_none() && (filter.kind.is_some() || filter.state.is_some());
        let room = limit.saturating_sub(i64::try_from(rows.len()).unwrap_or(i64::MAX));
        if has_others && room > 0 {
            rows.extend(self.read_waiting(without_deadline(filter, room)).await?);
        }
        Ok(rows)
    }

    async fn read_waiting(&self, mut query: QueryBuilder<Postgres>) -> Result<Vec<WaitingEntity>, StoreError> {
        let rows = query.build().fetch_all(&self.pool).await;
        rows.and_then(|rows| rows.iter().map(waiting).collect()).doing("reading what waits")
    }
}

/// The kinds that are asked for: all that this release knows, where the filter names none.
fn kinds(filter: &WaitingFilter) -> Vec<&'static str> {
    filter.kind.map_or(EntityKind::ALL.to_vec(), |kind| vec![kind]).into_iter().map(EntityKind::as_str).collect()
}

/// Entities that have a deadline, in the order of the deadline index.
fn with_deadline(filter: &WaitingFilter, limit: i64) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new(COLUMNS);
    query.push(" FROM deadline JOIN entity ON entity.id = deadline.entity WHERE deadline.deadline_at IS NOT NULL");
    query.push(" AND entity.kind = ANY (").push_bind(kinds(filter)).push(")");
    if let Some(state) = &filter.state {
        query.push(" AND entity.state = ").push_bind(state);
    }
    if let Some(at) = filter.overdue_at {
        query.push(" AND deadline.deadline_at < ").push_bind(at);
    }
    if let Some(WaitingPosition { deadline_at: Some(at), id }) = filter.after {
        query.push(" AND (deadline.deadline_at, deadline.entity) > (").push_bind(at).push(", ").push_bind(id).push(")");
    }
    query.push(" ORDER BY deadline.deadline_at, deadline.entity LIMIT ").push_bind(limit);
    query
}

/// Entities that have none, oldest first: of each kind in the order of its list.
fn without_deadline(filter: &WaitingFilter, limit: i64) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new("SELECT found.* FROM unnest(");
    query.push_bind(kinds(filter)).push(") AS wanted (kind) CROSS JOIN LATERAL (").push(COLUMNS);
    query.push(", entity.created_at FROM entity LEFT JOIN deadline ON deadline.entity = entity.id");
    query.push(" WHERE entity.kind = wanted.kind AND deadline.deadline_at IS NULL");
    if let Some(state) = &filter.state {
        query.push(" AND entity.state = ").push_bind(state);
    }
    if let Some(WaitingPosition { deadline_at: None, id }) = filter.after {
        // After one that was removed meanwhile, the list begins again.
        query.push(" AND (entity.created_at, entity.id) > (coalesce((SELECT created_at FROM entity WHERE id = ");
        query.push_bind(id).push("), '-infinity'), ").push_bind(id).push(")");
    }
    query.push(" ORDER BY entity.created_at, entity.id LIMIT ").push_bind(limit);
    query.push(") AS found ORDER BY created_at, id LIMIT ").push_bind(limit);
    query
}

/// Those of these entities that the filter admits.
fn among(filter: &WaitingFilter, ids: &[uuid::Uuid], limit: i64) -> QueryBuilder<Postgres> {
    let mut query = QueryBuilder::new(COLUMNS);
    query.push(" FROM entity LEFT JOIN deadline ON deadline.entity = entity.id WHERE entity.id = ANY (");
    query.push_bind(ids).push(") AND entity.kind = ANY (").push_bind(kinds(filter)).push(")");
    if let Some(state) = &filter.state {
        query.push(" AND entity.state = ").push_bind(state);
    }
    if let Some(at) = filter.overdue_at {
        query.push(" AND deadline.deadline_at < ").push_bind(at);
    }
    match filter.after {
        Some(WaitingPosition { deadline_at: Some(at), id }) => {
            query.push(" AND ((deadline.deadline_at, entity.id) > (").push_bind(at).push(", ").push_bind(id);
            query.push(") OR deadline.deadline_at IS NULL)");
        }
        Some(WaitingPosition { deadline_at: None, id }) => {
            query.push(" AND deadline.deadline_at IS NULL AND entity.id > ").push_bind(id);
        }
        None => {}
    }
    query.push(" ORDER BY deadline.deadline_at NULLS LAST, entity.id LIMIT ").push_bind(limit);
    query
}

fn waiting(row: &PgRow) -> Result<WaitingEntity, sqlx::Error> {
    Ok(WaitingEntity {
        entity: EntityRef { kind: kind(row)?, id: row.try_get("id")? },
        shard: shard(row)?,
        version: row.try_get("version")?,
        state: row.try_get("state")?,
        updated_at: row.try_get("updated_at")?,
        wake_at: row.try_get("wake_at")?,
        deadline_at: row.try_get("deadline_at")?,
        reason: row.try_get("reason")?,
    })
}

//! Entities by deadline, for the supervision tree.

use super::entity::{kind, shard};
use super::{PAGE_MAX, Reads};
use crate::error::{OperationContext, StoreError};
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

impl Reads {
    /// Entities by deadline, the nearest first. With neither kind, state nor ids: only those that have a deadline.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn waiting(&self, filter: &WaitingFilter, limit: u32) -> Result<Vec<WaitingEntity>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(
            "SELECT entity.id, entity.kind, entity.shard, entity.version, entity.state, entity.updated_at,
                    deadline.wake_at, deadline.deadline_at, deadline.reason
             FROM entity LEFT JOIN deadline ON deadline.entity = entity.id WHERE entity.kind = ANY (",
        );
        let kinds: Vec<&str> = EntityKind::ALL.iter().map(|kind| kind.as_str()).collect();
        query.push_bind(kinds).push(")");
        if let Some(kind) = filter.kind {
            query.push(" AND entity.kind = ").push_bind(kind.as_str());
        }
        if let Some(state) = &filter.state {
            query.push(" AND entity.state = ").push_bind(state);
        }
        if let Some(ids) = &filter.ids {
            query.push(" AND entity.id = ANY (").push_bind(ids).push(")");
        }
        if let Some(at) = filter.overdue_at {
            query.push(" AND deadline.deadline_at < ").push_bind(at);
        } else if filter.kind.is_none() && filter.state.is_none() && filter.ids.is_none() {
            query.push(" AND deadline.deadline_at IS NOT NULL");
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
        query.push(" ORDER BY deadline.deadline_at NULLS LAST, entity.id LIMIT ");
        // One more than a page shows whether there is another page.
        query.push_bind(i64::from(limit.clamp(1, PAGE_MAX + 1)));
        let rows = query.build().fetch_all(&self.pool).await;
        rows.and_then(|rows| rows.iter().map(waiting).collect()).doing("reading what waits")
    }
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

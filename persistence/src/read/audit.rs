//! The audit log, newest first.

use super::entity::shard;
use super::{Page, Reads, one_more};
use crate::error::{Doing, StoreError};
use domain::commit::Epoch;
use domain::id::Shard;
use domain::machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};
use uuid::Uuid;

/// Who did what to whom.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditRow {
    pub place: AuditPlace,
    pub actor: String,
    pub action: String,
    /// A kind's name; of any release.
    pub target_kind: String,
    pub target_id: Uuid,
    pub correlation_id: String,
    pub metadata: serde_json::Value,
}

/// Where a row stands: by time, and within an instant by the order of its shard's commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AuditPlace {
    pub at: Timestamp,
    pub shard: Shard,
    pub epoch: Epoch,
    pub seq: i64,
}

/// Which rows. What is `None` admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    pub actor: Option<String>,
    pub action: Option<String>,
    pub target: Option<Uuid>,
    /// From this instant on.
    pub from: Option<Timestamp>,
    /// Before this instant.
    pub until: Option<Timestamp>,
}

impl Reads {
    /// The rows that the filter admits, newest first; `before` is the row after which the page begins.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn audit(
        &self,
        filter: &AuditFilter,
        before: Option<AuditPlace>,
        limit: u32,
    ) -> Result<Page<AuditRow, AuditPlace>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(
            "SELECT shard, epoch, seq, actor, action, target_kind, target_id, correlation_id, metadata, at FROM audit WHERE true",
        );
        if let Some(actor) = &filter.actor {
            query.push(" AND actor = ").push_bind(actor);
        }
        if let Some(action) = &filter.action {
            query.push(" AND action = ").push_bind(action);
        }
        if let Some(target) = filter.target {
            query.push(" AND target_id = ").push_bind(target);
        }
        if let Some(from) = filter.from {
            query.push(" AND at >= ").push_bind(from);
        }
        if let Some(until) = filter.until {
            query.push(" AND at < ").push_bind(until);
        }
        if let Some(before) = before {
            query.push(" AND (at, shard, epoch, seq) < (").push_bind(before.at).push(", ");
            query.push_bind(i16::from(before.shard.0)).push(", ").push_bind(before.epoch.0).push(", ");
            query.push_bind(before.seq).push(")");
        }
        query.push(" ORDER BY at DESC, shard DESC, epoch DESC, seq DESC LIMIT ").push_bind(one_more(limit));
        let rows = query.build().fetch_all(&self.pool).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(audit_row).collect());
        Ok(Page::of(rows.doing("reading the audit log")?, limit, |row: &AuditRow| row.place))
    }
}

fn audit_row(row: &PgRow) -> Result<AuditRow, sqlx::Error> {
    let (epoch, seq) = (Epoch(row.try_get("epoch")?), row.try_get("seq")?);
    Ok(AuditRow {
        place: AuditPlace { at: row.try_get("at")?, shard: shard(row)?, epoch, seq },
        actor: row.try_get("actor")?,
        action: row.try_get("action")?,
        target_kind: row.try_get("target_kind")?,
        target_id: row.try_get("target_id")?,
        correlation_id: row.try_get("correlation_id")?,
        metadata: row.try_get("metadata")?,
    })
}

//! The audit log, newest first.

use super::{Reads, RowPage, one_more};
use crate::audit::SignedHead;
use crate::error::{OperationContext, StoreError};
use crate::shard_numbers::shard;
use domain::commit::Epoch;
use domain::id::Shard;
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};
use uuid::Uuid;

/// An audit row: who did what to which entity.
#[derive(Clone, Debug, PartialEq)]
pub struct AuditRow {
    pub place: AuditPosition,
    pub actor: String,
    pub action: String,
    /// A kind's name; of any release.
    pub target_kind: String,
    pub target_id: Uuid,
    pub correlation_id: String,
    pub metadata: serde_json::Value,
    /// `None` until it is sealed, within a second.
    pub seal: Option<AuditRowSeal>,
}

/// A row's position in its shard's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditRowSeal {
    pub number: i64,
    pub hash: [u8; 32],
}

/// The position of a row: by time, and within an instant by the order of its shard's commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct AuditPosition {
    pub at: Timestamp,
    pub shard: Shard,
    pub epoch: Epoch,
    pub seq: i64,
}

/// A filter of rows. A field that is `None` admits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AuditFilter {
    pub actor: Option<String>,
    pub action: Option<String>,
    pub target_kind: Option<String>,
    pub target: Option<Uuid>,
    pub correlation_id: Option<String>,
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
        before: Option<AuditPosition>,
        limit: u32,
    ) -> Result<RowPage<AuditRow, AuditPosition>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(
            "SELECT shard, epoch, seq, actor, action, target_kind, target_id, correlation_id, metadata, at, number, hash
             FROM audit LEFT JOIN audit_seal USING (shard, epoch, seq) WHERE true",
        );
        if let Some(actor) = &filter.actor {
            query.push(" AND actor = ").push_bind(actor);
        }
        if let Some(action) = &filter.action {
            query.push(" AND action = ").push_bind(action);
        }
        if let Some(kind) = &filter.target_kind {
            query.push(" AND target_kind = ").push_bind(kind);
        }
        if let Some(target) = filter.target {
            query.push(" AND target_id = ").push_bind(target);
        }
        if let Some(correlation_id) = &filter.correlation_id {
            query.push(" AND correlation_id = ").push_bind(correlation_id);
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
        Ok(RowPage::of(rows.doing("reading the audit log")?, limit, |row: &AuditRow| row.place))
    }
}

impl Reads {
    /// The newest signed head of every shard that has one.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn audit_heads(&self) -> Result<Vec<SignedHead>, StoreError> {
        let rows = sqlx::query(
            "SELECT head.* FROM generate_series(0, 255) AS one (shard) CROSS JOIN LATERAL (
                 SELECT shard, number, epoch, seq, hash, sealed_at, key_id, signature FROM audit_head
                 WHERE audit_head.shard = one.shard ORDER BY number DESC LIMIT 1
             ) AS head ORDER BY shard",
        )
        .fetch_all(&self.pool)
        .await;
        let heads: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(SignedHead::of).collect());
        heads.doing("reading the heads of the audit log")
    }
}

fn audit_row(row: &PgRow) -> Result<AuditRow, sqlx::Error> {
    let (epoch, seq) = (Epoch(row.try_get("epoch")?), row.try_get("seq")?);
    let seal = match row.try_get::<Option<i64>, _>("number")? {
        None => None,
        Some(number) => {
            let hash: Vec<u8> = row.try_get("hash")?;
            // Of another length: the row was altered, and `gpuaas audit verify` reports it.
            Some(AuditRowSeal { number, hash: hash.try_into().unwrap_or([0; 32]) })
        }
    };
    Ok(AuditRow {
        place: AuditPosition { at: row.try_get("at")?, shard: shard(row)?, epoch, seq },
        actor: row.try_get("actor")?,
        action: row.try_get("action")?,
        target_kind: row.try_get("target_kind")?,
        target_id: row.try_get("target_id")?,
        correlation_id: row.try_get("correlation_id")?,
        metadata: row.try_get("metadata")?,
        seal,
    })
}

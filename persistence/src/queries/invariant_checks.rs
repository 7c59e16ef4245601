//! Reads of the auditor and of metrics: entities with the rows beside them, from one snapshot of the database.

use super::entity::{Cursor, kind};
use super::{Reads, RowPage, one_more};
use crate::error::{OperationContext, StoreError};
use crate::pool::begin;
use crate::shard_numbers::numbers;
use domain::commit::REFUSED;
use domain::id::{BillingAccountId, EntityKind, EntityRef, Shard};
use domain::invariants::HistoryEntry;
use domain::money::MicroAmount;
use domain::state_machine::Timestamp;
use serde::Deserialize;
use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{Acquire as _, Postgres, Row, Transaction};
use std::collections::BTreeMap;
use std::time::Duration;
use uuid::Uuid;

/// The last versions of an entity's history that are inspected.
const HISTORY_WINDOW: i64 = 50;

/// A transition's audit row is looked up for so long; later an operator may have dropped its month.
const AUDIT_WINDOW: Duration = Duration::from_secs(60 * 60);

/// An entity, with its history and deadline row.
#[derive(Clone, Debug, PartialEq)]
pub struct InspectedEntity {
    pub entity: EntityRef,
    pub version: i64,
    /// JSON.
    pub body: String,
    /// The last transitions of the history, in order.
    pub recorded: Vec<HistoryEntry>,
    /// Whether the deadline index has its deadline.
    pub deadline_is_indexed: bool,
    created_at: Timestamp,
}

/// Counts of waiting entities in some shards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitingCounts {
    /// Allocations that wait for a node.
    pub requested: u64,
    /// Entities past their deadline.
    pub overdue: BTreeMap<EntityKind, u64>,
}

/// The outbox backlog of some shards.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OutboxBacklog {
    pub rows: u64,
    /// Age of the oldest row, by the database's clock; zero where there is none.
    pub oldest: Duration,
}

/// Reads in one database snapshot.
pub struct Inspection {
    transaction: Transaction<'static, Postgres>,
}

impl Reads {
    /// # Errors
    /// [`StoreError`]
    pub async fn inspect(&self) -> Result<Inspection, StoreError> {
        let begun = begin(&self.pool, "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY").await;
        Ok(Inspection { transaction: begun.doing("beginning an inspection")? })
    }

    /// Counts waiting entities: those without a node in the index of states, and those past their deadline in the deadline index.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn waiting_counts(&self, shards: &[Shard]) -> Result<WaitingCounts, StoreError> {
        const DOING: &str = "counting what waits";
        let requested: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM entity WHERE kind = 'allocation' AND state = 'requested' AND shard = ANY ($1)",
        )
        .bind(numbers(shards))
        .fetch_one(&self.pool)
        .await
        .doing(DOING)?;
        let rows = sqlx::query(
            "SELECT kind, count(*) AS overdue FROM deadline WHERE deadline_at < now() AND shard = ANY ($1) GROUP BY kind",
        )
        .bind(numbers(shards))
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        let mut standing = WaitingCounts { requested: requested.unsigned_abs(), ..WaitingCounts::default() };
        for row in &rows {
            // Kinds of a newer release are left out.
            let Ok(kind) = kind(row) else { continue };
            let count = row.try_get::<i64, _>("overdue").map(i64::unsigned_abs).doing(DOING)?;
            standing.overdue.insert(kind, count);
        }
        Ok(standing)
    }

    /// The outbox of these shards.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn outbox_backlog(&self, shards: &[Shard]) -> Result<OutboxBacklog, StoreError> {
        let (rows, oldest): (i64, f64) = sqlx::query_as(
            "SELECT count(*), coalesce(greatest(extract(epoch FROM now() - min(written_at)), 0), 0)::float8
             FROM outbox WHERE shard = ANY ($1)",
        )
        .bind(numbers(shards))
        .fetch_one(&self.pool)
        .await
        .doing("measuring the outbox")?;
        Ok(OutboxBacklog { rows: rows.unsigned_abs(), oldest: Duration::try_from_secs_f64(oldest).unwrap_or_default() })
    }
}

impl Inspection {
    /// Entities of a kind in these shards, oldest first.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn entities(
        &mut self,
        kind: EntityKind,
        shards: &[Shard],
        after: Option<Cursor>,
        limit: u32,
    ) -> Result<RowPage<InspectedEntity, Cursor>, StoreError> {
        let after = after.unwrap_or(Cursor { created_at: Timestamp::UNIX_EPOCH, id: Uuid::nil() });
        let rows = sqlx::query(
            // An audit row has the number after its transition's, and the same instant.
            "SELECT entity.id, entity.kind, entity.version, entity.body::text, entity.created_at,
                    (SELECT coalesce(jsonb_agg(jsonb_build_object(
                                'version', step.version, 'command', step.command, 'actor', step.actor,
                                'to_state', step.to_state, 'refused', starts_with(step.why, $7),
                                'audited', CASE WHEN step.at > now() - make_interval(secs => $8) THEN EXISTS(
                                    SELECT FROM audit WHERE audit.at = step.at AND audit.shard = step.shard
                                    AND audit.epoch = step.epoch AND audit.seq = step.seq + 1) END
                            ) ORDER BY step.version), '[]')
                     FROM history AS step
                     WHERE step.entity = entity.id AND step.version > entity.version - $6) AS recorded,
                    EXISTS(SELECT FROM deadline WHERE deadline.entity = entity.id AND deadline.deadline_at IS NOT NULL) AS indexed
             FROM entity
             WHERE kind = $1 AND shard = ANY ($2) AND (created_at, id) > ($3, $4) ORDER BY created_at, id LIMIT $5",
        )
        .bind(kind.as_str())
        .bind(numbers(shards))
        .bind(after.created_at)
        .bind(after.id)
        .bind(one_more(limit))
        .bind(HISTORY_WINDOW)
        .bind(REFUSED)
        .bind(AUDIT_WINDOW.as_secs_f64())
        .fetch_all(&mut *self.transaction)
        .await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(inspected).collect());
        let place = |row: &InspectedEntity| Cursor { created_at: row.created_at, id: row.entity.id };
        Ok(RowPage::of(rows.doing("inspecting entities")?, limit, place))
    }

    /// The bodies of those of these entities that exist.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn bodies(&mut self, kind: EntityKind, ids: &[Uuid]) -> Result<Vec<String>, StoreError> {
        let rows = sqlx::query_scalar("SELECT body::text FROM entity WHERE id = ANY ($1) AND kind = $2")
            .bind(ids)
            .bind(kind.as_str())
            .fetch_all(&mut *self.transaction)
            .await;
        rows.doing("inspecting entities")
    }
}

impl Inspection {
    /// The sum of an account's entries in `prepaid`, and how many postings it has.
    ///
    /// # Errors
    /// [`StoreError`]. A timeout leaves the inspection usable: other accounts can still be read.
    pub async fn sum_of_entries(&mut self, account: BillingAccountId) -> Result<(MicroAmount, i64), StoreError> {
        const DOING: &str = "adding up an account's entries";
        let mut alone = self.transaction.begin().await.doing(DOING)?;
        let sum: Result<(i64, i64), _> = sqlx::query_as(
            "SELECT coalesce(sum(CASE WHEN debit = 'prepaid' THEN -amount WHEN credit = 'prepaid' THEN amount END), 0)::bigint,
                    count(*)
             FROM ledger WHERE account = $1",
        )
        .bind(account.0)
        .fetch_one(&mut *alone)
        .await;
        alone.rollback().await.doing(DOING)?;
        sum.map(|(sum, postings)| (MicroAmount::of(sum), postings)).doing(DOING)
    }
}

/// A transition in the statement's JSON.
#[derive(Deserialize)]
struct HistoryStep {
    version: i64,
    command: String,
    actor: String,
    to_state: String,
    refused: bool,
    audited: Option<bool>,
}

impl From<HistoryStep> for HistoryEntry {
    fn from(step: HistoryStep) -> Self {
        let HistoryStep { version, command, actor, to_state, refused, audited } = step;
        Self { version, command, actor, to_state, refused, audited }
    }
}

fn inspected(row: &PgRow) -> Result<InspectedEntity, sqlx::Error> {
    Ok(InspectedEntity {
        entity: EntityRef { kind: kind(row)?, id: row.try_get("id")? },
        version: row.try_get("version")?,
        body: row.try_get("body")?,
        recorded: row.try_get::<Json<Vec<HistoryStep>>, _>("recorded")?.0.into_iter().map(HistoryEntry::from).collect(),
        deadline_is_indexed: row.try_get("indexed")?,
        created_at: row.try_get("created_at")?,
    })
}

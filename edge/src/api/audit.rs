//! The audit log: who did what to which target, and the position of each row in its shard's hash chain (decisions 7).

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use domain::Shard;
use domain::commit::Epoch;
use persistence::queries::{AuditFilter, AuditPosition, AuditRow};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::request_context::{Authorized, ReadAudit};
use super::request_fields::{ActorName, AuditName, instant_or_none};
use crate::app_state::AppState;
use crate::http::error::ApiError;
use crate::http::pagination::{Items, Listing, Order, PageQuery, Position};

/// A filter of the log; absent fields admit all rows.
#[derive(Debug, Deserialize, Serialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AuditLogFilter {
    /// Who did it: `user:…`, `node:…`, `service-account:…` or `system:…`.
    #[param(inline)]
    actor: Option<ActorName>,
    /// What was done, such as `nodes.retire`.
    #[param(inline)]
    action: Option<AuditName>,
    /// The kind of what it was done to, such as `node`.
    #[param(inline)]
    target_kind: Option<AuditName>,
    /// The id of what it was done to.
    target_id: Option<Uuid>,
    /// The request that led to it.
    #[param(inline)]
    correlation_id: Option<AuditName>,
    /// From this instant on.
    #[serde(default, deserialize_with = "instant_or_none")]
    from: Option<DateTime<Utc>>,
    /// Before this instant.
    #[serde(default, deserialize_with = "instant_or_none")]
    until: Option<DateTime<Utc>>,
}

/// One row.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AuditEntry {
    /// `user:…`, `node:…`, `service-account:…` or `system:…`.
    actor: String,
    action: String,
    target: AuditTarget,
    /// Identifiers, reasons, old and new values.
    #[schema(value_type = Object)]
    metadata: serde_json::Value,
    correlation_id: String,
    at: DateTime<Utc>,
    chain: ChainPosition,
}

#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AuditTarget {
    kind: String,
    id: Uuid,
}

/// The position of the row in the hash chain of its shard.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChainPlace)]
pub(super) struct ChainPosition {
    shard: u8,
    epoch: i64,
    seq: i64,
    /// Its number in the chain; null until it is sealed, within a second.
    number: Option<i64>,
    /// The chain's SHA-256 after this row, in hexadecimal; null until it is sealed.
    hash: Option<String>,
}

/// The audit log, newest first.
#[utoipa::path(
    get,
    path = "/",
    params(AuditLogFilter, PageQuery),
    responses((status = 200, description = "A page of the log.", body = Items<AuditEntry>)),
)]
pub(super) async fn log(
    _: Authorized<ReadAudit>,
    State(app): State<AppState>,
    listing: Listing<AuditLogFilter>,
) -> Result<Json<Items<AuditEntry>>, ApiError> {
    let page = listing.page("audit-log", "", Order::NewestFirst)?;
    let given = &listing.filter;
    let filter = AuditFilter {
        actor: given.actor.as_ref().map(|actor| actor.to_string()),
        action: given.action.as_ref().map(|action| action.to_string()),
        target_kind: given.target_kind.as_ref().map(|kind| kind.to_string()),
        target: given.target_id,
        correlation_id: given.correlation_id.as_ref().map(|id| id.to_string()),
        from: given.from,
        until: given.until,
    };
    let rows = u32::try_from(page.rows_to_read()).unwrap_or(u32::MAX);
    let found = app.reads.audit(&filter, page.after.map(place), rows).await?;
    Ok(Json(page.answer(found.items, |row| position(row.place), entry)))
}

fn entry(row: AuditRow) -> AuditEntry {
    let AuditPosition { at, shard, epoch, seq } = row.place;
    let (number, hash) = row.seal.map(|seal| (seal.number, hex::encode(seal.hash))).unzip();
    AuditEntry {
        actor: row.actor,
        action: row.action,
        target: AuditTarget { kind: row.target_kind, id: row.target_id },
        metadata: row.metadata,
        correlation_id: row.correlation_id,
        at,
        chain: ChainPosition { shard: shard.0, epoch: epoch.0, seq, number, hash },
    }
}

const SEQ_BITS: u32 = 56;
const EPOCH_BITS: u32 = 64;

/// A row's position as page tokens hold it: shard, epoch and sequence in the 128 bits of an id.
fn position(place: AuditPosition) -> Position {
    let (epoch, seq) = (place.epoch.0.cast_unsigned(), place.seq.cast_unsigned());
    let shard = u128::from(place.shard.0) << (EPOCH_BITS + SEQ_BITS);
    let id = shard | u128::from(epoch) << SEQ_BITS | u128::from(seq) & ((1 << SEQ_BITS) - 1);
    Position { created_at: place.at, id: Uuid::from_u128(id) }
}

fn place(position: Position) -> AuditPosition {
    let [shard, epoch @ .., s0, s1, s2, s3, s4, s5, s6] = *position.id.as_bytes();
    AuditPosition {
        at: position.created_at,
        shard: Shard(shard),
        epoch: Epoch(i64::from_be_bytes(epoch)),
        seq: i64::from_be_bytes([0, s0, s1, s2, s3, s4, s5, s6]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audit_position_survives_the_page_token() {
        for (shard, epoch, seq) in [(0, 0, 0), (255, i64::MAX, (1 << 56) - 1), (7, 29_000_000 << 32 | 5, 123_456)] {
            let at = DateTime::UNIX_EPOCH;
            let there = AuditPosition { at, shard: Shard(shard), epoch: Epoch(epoch), seq };
            assert_eq!(place(position(there)), there);
        }
    }
}

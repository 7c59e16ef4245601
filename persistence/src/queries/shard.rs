//! The reads of a shard's owner: due timers, unsettled events, overdue entities, and terminals whose gateway has ended.

use super::entity::kind;
use super::{PAGE_MAX, Reads};
use crate::error::{OperationContext, StoreError, damaged};
use crate::outbox::OutboxRow;
use crate::shard_numbers::{numbers, shard};
use domain::commit::Epoch;
use domain::id::{EntityKind, EntityRef, EventId, MemberId, Shard, TerminalSessionId};
use domain::state_machine::{RequestOrigin, Timestamp};
use domain::terminal_session;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::time::Duration;
use uuid::Uuid;

/// An entity with a timer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueTimer {
    pub entity: EntityRef,
    pub shard: Shard,
    /// The time of its next tick.
    pub wake_at: Timestamp,
    /// The deadline of its state, where it has one.
    pub deadline_at: Option<Timestamp>,
    pub reason: String,
}

/// Entities past their deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverdueEntities {
    /// Of all kinds, including rows beyond the limit.
    pub count: u64,
    /// The longest overdue first.
    pub rows: Vec<DueTimer>,
}

/// Events in the outbox that are not settled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnsettledEvents {
    pub rows: Vec<OutboxRow>,
    /// Events that this release cannot decode: they are left to the release that wrote them.
    pub foreign: Vec<EventId>,
}

impl Reads {
    /// Entities of these shards and kinds whose tick is due at `now`, without those of `except`, longest due first.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn due_timers(
        &self,
        shards: &[Shard],
        kinds: &[EntityKind],
        now: Timestamp,
        except: &[Uuid],
        limit: u32,
    ) -> Result<Vec<DueTimer>, StoreError> {
        let rows = sqlx::query(
            "SELECT entity, kind, shard, wake_at, deadline_at, reason FROM deadline
             WHERE shard = ANY ($1) AND wake_at <= $2 AND kind = ANY ($3) AND entity <> ALL ($5)
             ORDER BY wake_at, entity LIMIT $4",
        )
        .bind(numbers(shards))
        .bind(now)
        .bind(kinds.iter().map(|kind| kind.as_str()).collect::<Vec<_>>())
        .bind(i64::from(limit))
        .bind(except)
        .fetch_all(&self.pool)
        .await;
        rows.and_then(|rows| rows.iter().map(due).collect()).doing("reading due deadlines")
    }

    /// Every entity whose deadline has passed at `now`, in all shards.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn overdue(&self, now: Timestamp, limit: u32) -> Result<OverdueEntities, StoreError> {
        let rows = sqlx::query(
            "SELECT entity, kind, shard, wake_at, deadline_at, reason, count(*) OVER () AS count FROM deadline
             WHERE deadline_at < $1 AND kind = ANY ($2) ORDER BY deadline_at, entity LIMIT $3",
        )
        .bind(now)
        .bind(kinds())
        .bind(i64::from(limit.clamp(1, PAGE_MAX)))
        .fetch_all(&self.pool)
        .await
        .doing("reading what is overdue")?;
        let count = rows.first().map(|row| row.try_get::<i64, _>("count")).transpose();
        let rows: Result<Vec<_>, _> = rows.iter().map(due).collect();
        let doing = "reading what is overdue";
        Ok(OverdueEntities { count: count.doing(doing)?.unwrap_or(0).unsigned_abs(), rows: rows.doing(doing)? })
    }

    /// Events of these shards that have been unsettled for longer than `age` (by the database's clock): in the order of each shard's
    /// commits, at most `each` of a shard, without those of `except`. Undecodable events count too: name them in `except`, lest they
    /// hide later ones.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn orphaned_events(
        &self,
        shards: &[Shard],
        age: Duration,
        except: &[EventId],
        each: u32,
    ) -> Result<UnsettledEvents, StoreError> {
        // By shard, so that the index gives the order and a long backlog is not sorted each time.
        let rows = sqlx::query(
            "SELECT row.* FROM unnest($1::smallint[]) AS owned (shard)
             CROSS JOIN LATERAL (
                 SELECT id, shard, epoch, seq, event::text, correlation_id, traceparent, tracestate, created_at FROM outbox
                 WHERE outbox.shard = owned.shard AND written_at < clock_timestamp() - make_interval(secs => $2)
                   AND id <> ALL ($4)
                 ORDER BY epoch, seq LIMIT $3
             ) AS row",
        )
        .bind(numbers(shards))
        .bind(age.as_secs_f64())
        .bind(i64::from(each))
        .bind(except.iter().map(|id| id.0).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await
        .doing("reading orphaned events")?;
        read_rows(&rows, "reading orphaned events")
    }

    /// The members that have connections of terminal sessions, and are not in the table of members or are among `ended`. It looks up one term
    /// for each member with connections, however many it has. The table is read in the same snapshot: a member is in it before it admits a connection.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn ended_gateways(&self, ended: &[MemberId]) -> Result<Vec<MemberId>, StoreError> {
        // From each term to the next one that differs. Ids are hexadecimal: in every collation they are before the letter g.
        let terms: Vec<String> = sqlx::query_scalar(
            "WITH RECURSIVE gateway (term) AS (
                 (SELECT term FROM term WHERE term > $1 AND term < $1 || 'g' ORDER BY term LIMIT 1)
                 UNION ALL
                 SELECT (SELECT next.term FROM term AS next WHERE next.term > gateway.term AND next.term < $1 || 'g' ORDER BY next.term LIMIT 1)
                 FROM gateway WHERE gateway.term IS NOT NULL
             )
             SELECT term FROM gateway WHERE term IS NOT NULL AND NOT EXISTS (
                 SELECT 1 FROM member WHERE $1 || member.id::text = gateway.term AND member.id <> ALL ($2)
             )",
        )
        .bind(terminal_session::GATEWAY_TERM)
        .bind(ended.iter().map(|member| member.0).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .await
        .doing("reading the gateways that have ended")?;
        Ok(terms.iter().filter_map(|term| terminal_session::gateway_of_term(term)).collect())
    }

    /// The terminal sessions of these shards that have their connection at one of these members, without those of `except`, unordered.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn terminals_at(
        &self,
        gateways: &[MemberId],
        shards: &[Shard],
        except: &[TerminalSessionId],
        limit: u32,
    ) -> Result<Vec<GatewayConnection>, StoreError> {
        // A member of the release before that changes a session leaves its term: the snapshot decides.
        let rows = sqlx::query(
            "SELECT entity.id, entity.body ->> 'attachments' AS attachment FROM term JOIN entity ON entity.id = term.entity
             WHERE term.term = ANY ($1) AND term.term = $5 || (entity.body #>> '{phase,gateway}')
               AND entity.kind = 'terminal_session' AND entity.state = 'attached' AND entity.shard = ANY ($2) AND entity.id <> ALL ($3)
             LIMIT $4",
        )
        .bind(gateways.iter().map(|member| terminal_session::gateway_term(*member)).collect::<Vec<_>>())
        .bind(numbers(shards))
        .bind(except.iter().map(|session| session.0).collect::<Vec<_>>())
        .bind(i64::from(limit))
        .bind(terminal_session::GATEWAY_TERM)
        .fetch_all(&self.pool)
        .await
        .doing("reading terminals of ended gateways")?;
        let connection = |row: &PgRow| -> Result<Option<GatewayConnection>, sqlx::Error> {
            // A number that cannot be read is one that no release has written.
            let attachment = row.try_get::<Option<String>, _>("attachment")?.and_then(|number| number.parse().ok());
            let session = TerminalSessionId(row.try_get("id")?);
            Ok(attachment.map(|attachment| GatewayConnection { session, attachment }))
        };
        let found: Result<Vec<_>, _> = rows.iter().map(connection).collect();
        Ok(found.doing("reading terminals of ended gateways")?.into_iter().flatten().collect())
    }
}

/// A connection of a terminal session, at its gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayConnection {
    pub session: TerminalSessionId,
    /// The number of the connection.
    pub attachment: u32,
}

/// The position up to which a shard's events were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutboxCursor {
    pub shard: Shard,
    pub epoch: Epoch,
    pub seq: i64,
}

impl OutboxCursor {
    /// Before every event of the shard.
    #[must_use]
    pub const fn start(shard: Shard) -> Self {
        Self { shard, epoch: Epoch(i64::MIN), seq: i64::MIN }
    }
}

impl Reads {
    /// The unsettled events after these positions, in the order of each shard's commits, at most `each` of a shard. Within a shard no
    /// event is committed later at an earlier position: a cursor misses nothing.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn events_after(&self, cursors: &[OutboxCursor], each: u32) -> Result<UnsettledEvents, StoreError> {
        const DOING: &str = "reading committed events";
        let rows = sqlx::query(
            "SELECT row.* FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) AS owned (shard, epoch, seq)
             CROSS JOIN LATERAL (
                 SELECT id, shard, epoch, seq, event::text, correlation_id, traceparent, tracestate, created_at FROM outbox
                 WHERE outbox.shard = owned.shard AND (outbox.epoch, outbox.seq) > (owned.epoch, owned.seq)
                 ORDER BY epoch, seq LIMIT $4
             ) AS row",
        )
        .bind(cursors.iter().map(|at| i16::from(at.shard.0)).collect::<Vec<_>>())
        .bind(cursors.iter().map(|at| at.epoch.0).collect::<Vec<_>>())
        .bind(cursors.iter().map(|at| at.seq).collect::<Vec<_>>())
        .bind(i64::from(each))
        .fetch_all(&self.pool)
        .await
        .doing(DOING)?;
        read_rows(&rows, DOING)
    }
}

fn read_rows(rows: &[PgRow], doing: &'static str) -> Result<UnsettledEvents, StoreError> {
    let mut orphans = UnsettledEvents::default();
    for row in rows {
        match outbox_row(row) {
            Ok(row) => orphans.rows.push(row),
            Err(error) => {
                let id = EventId(row.try_get("id").doing(doing)?);
                tracing::warn!(event.id = %id, %error, "an event in the outbox cannot be read by this release");
                orphans.foreign.push(id);
            }
        }
    }
    Ok(orphans)
}

fn kinds() -> Vec<&'static str> {
    EntityKind::ALL.iter().map(|kind| kind.as_str()).collect()
}

fn due(row: &PgRow) -> Result<DueTimer, sqlx::Error> {
    Ok(DueTimer {
        entity: EntityRef { kind: kind(row)?, id: row.try_get("entity")? },
        shard: shard(row)?,
        wake_at: row.try_get("wake_at")?,
        deadline_at: row.try_get("deadline_at")?,
        reason: row.try_get("reason")?,
    })
}

fn outbox_row(row: &PgRow) -> Result<OutboxRow, sqlx::Error> {
    Ok(OutboxRow {
        id: EventId(row.try_get("id")?),
        shard: shard(row)?,
        epoch: Epoch(row.try_get("epoch")?),
        seq: row.try_get("seq")?,
        event: serde_json::from_str(row.try_get("event")?).map_err(damaged)?,
        origin: RequestOrigin {
            correlation_id: row.try_get("correlation_id")?,
            traceparent: row.try_get("traceparent")?,
            tracestate: row.try_get("tracestate")?,
        },
        created_at: row.try_get("created_at")?,
    })
}

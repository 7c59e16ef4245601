//! Entities, their lists and their histories.

use super::{Reads, RowPage, one_more};
use crate::error::{OperationContext, StoreError, damaged};
use crate::shard_numbers::shard;
use crate::snapshot_seal::SealRefusal;
use domain::commit::{CompletedCommand, Epoch, Snapshot};
use domain::id::{CommandId, EntityKind, EntityRef, NodeId, Shard, SkuId};
use domain::state_machine::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Postgres, QueryBuilder, Row};
use std::collections::{BTreeSet, HashMap, HashSet};
use uuid::Uuid;

/// An entity as it was last committed.
#[derive(Clone, Debug, PartialEq)]
pub struct EntityRow {
    pub entity: EntityRef,
    pub version: i64,
    pub state: String,
    /// JSON.
    pub body: String,
    pub owner: Option<String>,
    pub sku: Option<Uuid>,
    pub unique_name: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

/// One entity of a list. Its place in the list does not depend on its seal, so that the pages are the same with a refused row among them.
#[derive(Clone, Debug, PartialEq)]
pub struct ListedEntity {
    pub entity: EntityRef,
    pub created_at: Timestamp,
    /// Its row, where the seal holds. A refusal is logged and counted.
    pub row: Result<EntityRow, SealRefusal>,
}

/// The version of a node, as placement compares it with its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeVersionRow {
    pub node: NodeId,
    pub version: i64,
}

/// A node, as placement reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRow {
    pub node: NodeId,
    pub sku: SkuId,
    pub version: i64,
    /// It was committed more than a second before it was read: its message has arrived, or is lost.
    pub is_settled: bool,
    /// JSON.
    pub body: String,
}

/// A filter of the entities of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListFilter {
    pub owner: Option<String>,
    /// Those in one of these states; all where this is empty.
    pub states: Vec<String>,
    pub sku: Option<Uuid>,
    /// Those that have all of these terms ([`domain::Machine::terms`]).
    pub terms: Vec<String>,
    /// The newest first, in place of the oldest.
    pub is_newest_first: bool,
}

/// A position in a list of entities: the row after which the page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cursor {
    pub created_at: Timestamp,
    pub id: Uuid,
}

/// One transition of an entity.
#[derive(Clone, Debug, PartialEq)]
pub struct HistoryRow {
    pub entity: Uuid,
    /// The version that it led to.
    pub version: i64,
    pub shard: Shard,
    pub epoch: Epoch,
    pub seq: i64,
    pub command: String,
    pub command_id: Option<CommandId>,
    pub from_state: Option<String>,
    pub to_state: String,
    pub why: String,
    pub actor: String,
    pub correlation_id: String,
    pub at: Timestamp,
}

/// The number of entities of a kind in a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateCount {
    pub kind: EntityKind,
    pub state: String,
    pub count: u64,
}

/// The references to a SKU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkuReferences {
    /// Nodes that are not removed.
    pub nodes: u64,
    /// Allocations that are not released.
    pub allocations: u64,
}

const COLUMNS: &str =
    "SELECT id, kind, version, state, body::text, owner, sku, unique_name, created_at, updated_at, seal FROM entity";

impl Reads {
    /// The snapshots that shells load, of the entities that exist.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn snapshots(&self, entities: &[EntityRef]) -> Result<HashMap<EntityRef, Snapshot>, StoreError> {
        // One lookup for each: a plan for the list that was made while the table was small would scan the table as long as it is cached.
        let query = sqlx::query(
            "SELECT found.id, found.kind, found.version, found.body::text, found.seal
             FROM unnest($1::uuid[]) AS wanted (id)
             CROSS JOIN LATERAL (SELECT id, kind, version, body, seal FROM entity WHERE id = wanted.id LIMIT 1) AS found",
        )
        .bind(entities.iter().map(|entity| entity.id).collect::<Vec<_>>());
        let rows = self.read_pool.fetch_all(query).await.doing("loading entities")?;
        // An entity of another kind is not the requested one.
        let wanted: HashSet<_> = entities.iter().copied().collect();
        let mut found = HashMap::with_capacity(rows.len());
        for row in &rows {
            let (entity, snapshot) = snapshot_row(row).doing("loading entities")?;
            if let Some(entity) = entity.filter(|entity| wanted.contains(entity)) {
                self.check(entity, &snapshot, row.try_get(4)).doing("loading entities")?;
                found.insert(entity, snapshot);
            }
        }
        Ok(found)
    }

    fn check(
        &self,
        entity: EntityRef,
        snapshot: &Snapshot,
        seal: Result<Option<Vec<u8>>, sqlx::Error>,
    ) -> Result<(), sqlx::Error> {
        let Some(seals) = &self.seals else { return Ok(()) };
        seals.check(entity, snapshot.version, &snapshot.body, seal?.as_deref()).map_err(damaged)
    }

    /// As [`Self::snapshots`], of one entity.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn snapshot(&self, entity: EntityRef) -> Result<Option<Snapshot>, StoreError> {
        let query = sqlx::query("SELECT version, body::text, seal FROM entity WHERE id = $1 AND kind = $2")
            .bind(entity.id)
            .bind(entity.kind.as_str());
        let row = self.read_pool.fetch_optional(query).await;
        let snapshot = |row: PgRow| {
            let snapshot = Snapshot { version: row.try_get(0)?, body: row.try_get(1)? };
            self.check(entity, &snapshot, row.try_get(2))?;
            Ok(snapshot)
        };
        row.and_then(|row| row.map(snapshot).transpose()).doing("loading an entity")
    }

    /// The snapshots of a kind, of the entities that satisfy `condition`, for a cache that decisions are made from. One whose seal does
    /// not hold is left out: an attacker who can alter a row can delete it as well.
    pub(super) async fn intact_bodies(
        &self,
        kind: EntityKind,
        condition: &str,
        doing: &'static str,
    ) -> Result<Vec<(Uuid, String)>, StoreError> {
        let mut query =
            QueryBuilder::<Postgres>::new("SELECT id, kind, version, body::text, seal FROM entity WHERE kind = ");
        query.push_bind(kind.as_str()).push(condition);
        let rows = query.build().fetch_all(&self.pool).await.doing(doing)?;
        let mut intact = Vec::with_capacity(rows.len());
        for row in &rows {
            let (entity, snapshot) = snapshot_row(row).doing(doing)?;
            if let Some(entity) = entity
                && self.check(entity, &snapshot, row.try_get(4)).is_ok()
            {
                intact.push((entity.id, snapshot.body));
            }
        }
        Ok(intact)
    }

    /// The entity as it was last committed. Its seal is checked, since decisions are made from it.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn entity(&self, entity: EntityRef) -> Result<Option<EntityRow>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(COLUMNS);
        query.push(" WHERE id = ").push_bind(entity.id).push(" AND kind = ").push_bind(entity.kind.as_str());
        let row = self.read_pool.fetch_optional(query.build()).await;
        row.and_then(|row| row.as_ref().map(|row| self.checked_row(row)).transpose()).doing("reading an entity")
    }

    fn checked_row(&self, row: &PgRow) -> Result<EntityRow, sqlx::Error> {
        let found = entity_row(row)?;
        let snapshot = Snapshot { version: found.version, body: found.body };
        self.check(found.entity, &snapshot, row.try_get("seal"))?;
        Ok(EntityRow { body: snapshot.body, ..found })
    }

    fn listed_row(&self, row: &PgRow) -> Result<ListedEntity, sqlx::Error> {
        let found = entity_row(row)?;
        let seal: Option<Vec<u8>> = row.try_get("seal")?;
        let checked =
            self.seals.as_ref().map(|seals| seals.check(found.entity, found.version, &found.body, seal.as_deref()));
        let (entity, created_at) = (found.entity, found.created_at);
        Ok(ListedEntity { entity, created_at, row: checked.unwrap_or(Ok(())).map(|()| found) })
    }

    /// The entities of one kind that exist, unordered. One whose seal does not hold is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn entities(&self, kind: EntityKind, ids: &[Uuid]) -> Result<Vec<EntityRow>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new(COLUMNS);
        query.push(" WHERE id = ANY (").push_bind(ids).push(") AND kind = ").push_bind(kind.as_str());
        let rows = query.build().fetch_all(&self.pool).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(|row| self.listed_row(row)).collect());
        Ok(rows.doing("reading entities")?.into_iter().filter_map(|listed| listed.row.ok()).collect())
    }

    /// Those of these entities whose seals hold.
    pub(super) async fn intact(&self, kind: EntityKind, ids: &HashSet<Uuid>) -> Result<HashSet<Uuid>, StoreError> {
        if self.seals.is_none() || ids.is_empty() {
            return Ok(ids.clone());
        }
        let ids: Vec<Uuid> = ids.iter().copied().collect();
        Ok(self.entities(kind, &ids).await?.into_iter().map(|row| row.entity.id).collect())
    }

    /// Entities of a kind, in the filter's order, with their seals checked. The columns that a filter selects by are not sealed: who can write rows
    /// can hide an entity from a list, as by deleting it.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn list(
        &self,
        kind: EntityKind,
        filter: &ListFilter,
        after: Option<Cursor>,
        limit: u32,
    ) -> Result<RowPage<ListedEntity, Cursor>, StoreError> {
        let mut query = QueryBuilder::<Postgres>::new("");
        // Of each state by itself, since an index has the order of the list within one state.
        let states: BTreeSet<_> = filter.states.iter().map(String::as_str).collect();
        if states.len() < 2 {
            push_list(&mut query, kind, filter, states.first().copied(), after, limit);
        } else {
            for (n, state) in states.into_iter().enumerate() {
                query.push(if n == 0 { "(" } else { ") UNION ALL (" });
                push_list(&mut query, kind, filter, Some(state), after, limit);
            }
            query.push(") ORDER BY ").push(order_of(filter)).push(" LIMIT ").push_bind(one_more(limit));
        }
        let rows = self.read_pool.fetch_all(query.build()).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(|row| self.listed_row(row)).collect());
        let place = |row: &ListedEntity| Cursor { created_at: row.created_at, id: row.entity.id };
        Ok(RowPage::of(rows.doing("listing entities")?, limit, place))
    }

    /// The versions of a SKU's nodes in `state`, unordered: a check of placement's index.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn node_versions(&self, sku: SkuId, state: &str) -> Result<Vec<NodeVersionRow>, StoreError> {
        let rows = sqlx::query("SELECT id, version FROM entity WHERE kind = 'node' AND sku = $1 AND state = $2")
            .bind(sku.0)
            .bind(state)
            .fetch_all(&self.pool)
            .await;
        let row = |row: &PgRow| Ok(NodeVersionRow { node: NodeId(row.try_get(0)?), version: row.try_get(1)? });
        rows.and_then(|rows| rows.iter().map(row).collect()).doing("reading the versions of a SKU's nodes")
    }

    /// Those of these nodes that exist and have a SKU, unordered, for placement's index. Their seals are not checked: the node's own actor decides.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn node_rows(&self, nodes: &[NodeId]) -> Result<Vec<NodeRow>, StoreError> {
        let ids: Vec<Uuid> = nodes.iter().map(|node| node.0).collect();
        // One lookup for each, whatever the plan was made for.
        let rows = sqlx::query(
            "SELECT found.id, found.sku, found.version, found.updated_at < now() - interval '1 second', found.body::text
             FROM unnest($1::uuid[]) AS wanted (id)
             CROSS JOIN LATERAL (
                 SELECT id, sku, version, updated_at, body FROM entity
                 WHERE id = wanted.id AND kind = 'node' AND sku IS NOT NULL LIMIT 1
             ) AS found",
        )
        .bind(ids)
        .fetch_all(&self.pool)
        .await;
        let row = |row: &PgRow| {
            Ok(NodeRow {
                node: NodeId(row.try_get(0)?),
                sku: SkuId(row.try_get(1)?),
                version: row.try_get(2)?,
                is_settled: row.try_get(3)?,
                body: row.try_get(4)?,
            })
        };
        rows.and_then(|rows| rows.iter().map(row).collect()).doing("reading nodes")
    }

    /// All SKUs, unordered.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn sku_ids(&self) -> Result<Vec<SkuId>, StoreError> {
        let ids: Result<Vec<Uuid>, _> =
            sqlx::query_scalar("SELECT id FROM entity WHERE kind = 'sku'").fetch_all(&self.pool).await;
        Ok(ids.doing("reading the SKUs")?.into_iter().map(SkuId).collect())
    }

    /// The references to a SKU. Allocations are counted on the SKU's nodes, or, while they wait for one, in the deadline index; so
    /// released ones, whose number is unbounded, are not read.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn sku_references(&self, sku: SkuId) -> Result<SkuReferences, StoreError> {
        let row: Result<(i64, i64, i64), _> = sqlx::query_as(
            "SELECT count(*), coalesce(sum(held.count), 0)::bigint,
                    (SELECT count(*) FROM deadline JOIN entity AS waiting ON waiting.id = deadline.entity
                     WHERE deadline.kind = 'allocation' AND waiting.sku = $1 AND waiting.state = 'requested')
             FROM entity AS node CROSS JOIN LATERAL (
                 SELECT count(*) FROM jsonb_each(node.body->'holds') AS hold WHERE hold.value->'phase'->>'phase' <> 'abandoned'
             ) AS held
             WHERE node.kind = 'node' AND node.sku = $1 AND node.state <> 'removed'",
        )
        .bind(sku.0)
        .fetch_one(&self.pool)
        .await;
        let (nodes, held, waiting) = row.doing("counting who refers to a SKU")?;
        Ok(SkuReferences { nodes: nodes.unsigned_abs(), allocations: (held + waiting).unsigned_abs() })
    }

    /// The entity of a kind with this unique name, or this id in text form (a node's or allocation's `sku` is either). Its seal is checked
    /// as by [`Self::entity`].
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn find_by_name(&self, kind: EntityKind, name_or_id: &str) -> Result<Option<EntityRow>, StoreError> {
        if let Ok(id) = Uuid::parse_str(name_or_id)
            && let Some(row) = self.entity(EntityRef { kind, id }).await?
        {
            return Ok(Some(row));
        }
        let mut query = QueryBuilder::<Postgres>::new(COLUMNS);
        query.push(" WHERE kind = ").push_bind(kind.as_str()).push(" AND unique_name = ").push_bind(name_or_id);
        let row = self.read_pool.fetch_optional(query.build()).await;
        row.and_then(|row| row.as_ref().map(|row| self.checked_row(row)).transpose()).doing("reading an entity by name")
    }

    /// The transitions of an entity, newest first; `before` is the version after which the page begins.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn history(
        &self,
        entity: Uuid,
        before: Option<i64>,
        limit: u32,
    ) -> Result<RowPage<HistoryRow, i64>, StoreError> {
        let query = sqlx::query(
            "SELECT entity, version, shard, epoch, seq, command, command_id, from_state, to_state, why, actor,
                    correlation_id, at
             FROM history WHERE entity = $1 AND version < $2 ORDER BY version DESC LIMIT $3",
        )
        .bind(entity)
        .bind(before.unwrap_or(i64::MAX))
        .bind(one_more(limit));
        let rows = self.read_pool.fetch_all(query).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(history_row).collect());
        Ok(RowPage::of(rows.doing("reading a history")?, limit, |row| row.version))
    }

    /// The transitions of an entity by one command, newest first; `before` is the version after which the page begins.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn history_of_command(
        &self,
        entity: Uuid,
        command: &str,
        before: Option<i64>,
        limit: u32,
    ) -> Result<RowPage<HistoryRow, i64>, StoreError> {
        let query = sqlx::query(
            "SELECT entity, version, shard, epoch, seq, command, command_id, from_state, to_state, why, actor,
                    correlation_id, at
             FROM history WHERE entity = $1 AND command = $2 AND version < $3 ORDER BY version DESC LIMIT $4",
        )
        .bind(entity)
        .bind(command)
        .bind(before.unwrap_or(i64::MAX))
        .bind(one_more(limit));
        let rows = query.fetch_all(&self.pool).await;
        let rows: Result<Vec<_>, _> = rows.and_then(|rows| rows.iter().map(history_row).collect());
        Ok(RowPage::of(rows.doing("reading a history by command")?, limit, |row| row.version))
    }

    /// A command that was executed within the last day.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn command(&self, id: CommandId) -> Result<Option<CompletedCommand>, StoreError> {
        let query = sqlx::query("SELECT entity, digest, reply::text FROM command WHERE id = $1").bind(id.0);
        let row = self.read_pool.fetch_optional(query).await;
        let done = |row: PgRow| {
            Ok(CompletedCommand { entity: row.try_get(0)?, digest: row.try_get(1)?, reply: row.try_get(2)? })
        };
        row.and_then(|row| row.map(done).transpose()).doing("reading a command")
    }

    /// The reply of the command that led an entity to this version, as JSON, where it was stored: within the last day.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn reply_at(&self, entity: Uuid, version: i64) -> Result<Option<String>, StoreError> {
        let query = sqlx::query(
            "SELECT command.reply::text FROM history JOIN command ON command.id = history.command_id
             WHERE history.entity = $1 AND history.version = $2 AND command.entity = $1",
        );
        let row = self.read_pool.fetch_optional(query.bind(entity).bind(version)).await;
        let reply = |row: PgRow| row.try_get::<Option<String>, _>(0);
        let reply = row.and_then(|row| row.map(reply).transpose()).doing("reading the reply of a transition")?;
        Ok(reply.flatten())
    }

    /// The number of payments into the account of `holder` that wait for `payer` to pay them.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn open_payments(&self, holder: &str, payer: &str) -> Result<i64, StoreError> {
        sqlx::query_scalar(
            "SELECT count(*) FROM entity
             WHERE kind = 'payment' AND owner = $1 AND state IN ('created', 'open') AND body->>'payer' = $2",
        )
        .bind(holder)
        .bind(payer)
        .fetch_one(&self.pool)
        .await
        .doing("counting open payments")
    }

    /// The number of entities by kind and state. Kinds of a newer release are left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn counts(&self) -> Result<Vec<StateCount>, StoreError> {
        let rows: Vec<(String, String, i64)> =
            // One row per state, and those of the commits since the last compaction.
            sqlx::query_as(
                "SELECT kind, state, sum(change)::bigint FROM entity_count
                 GROUP BY kind, state HAVING sum(change) > 0 ORDER BY kind, state",
            )
            .fetch_all(&self.pool)
            .await
            .doing("counting entities")?;
        let known = |(kind, state, count): (String, String, i64)| {
            Some(StateCount { kind: EntityKind::parse(&kind)?, state, count: count.unsigned_abs() })
        };
        Ok(rows.into_iter().filter_map(known).collect())
    }
}

/// A page of the entities that the filter admits, in one of its states or in any.
fn push_list(
    query: &mut QueryBuilder<Postgres>,
    kind: EntityKind,
    filter: &ListFilter,
    state: Option<&str>,
    after: Option<Cursor>,
    limit: u32,
) {
    query.push(COLUMNS).push(" WHERE kind = ").push_bind(kind.as_str());
    if let Some(state) = state {
        query.push(" AND state = ").push_bind(state);
    }
    if let Some(owner) = &filter.owner {
        query.push(" AND owner = ").push_bind(owner);
    }
    if let Some(sku) = filter.sku {
        query.push(" AND sku = ").push_bind(sku);
    }
    for term in &filter.terms {
        query.push(" AND id IN (SELECT entity FROM term WHERE term = ").push_bind(term).push(")");
    }
    if let Some(after) = after {
        query.push(if filter.is_newest_first { " AND (created_at, id) < (" } else { " AND (created_at, id) > (" });
        query.push_bind(after.created_at).push(", ").push_bind(after.id).push(")");
    }
    query.push(" ORDER BY ").push(order_of(filter)).push(" LIMIT ").push_bind(one_more(limit));
}

const fn order_of(filter: &ListFilter) -> &'static str {
    if filter.is_newest_first { "created_at DESC, id DESC" } else { "created_at, id" }
}

/// A kind that a newer release writes.
#[derive(Debug, thiserror::Error)]
#[error("this release knows no kind {0:?}")]
struct UnknownKind(String);

pub(super) fn kind(row: &PgRow) -> Result<EntityKind, sqlx::Error> {
    let kind: String = row.try_get("kind")?;
    EntityKind::parse(&kind).ok_or_else(|| damaged(UnknownKind(kind)))
}

fn snapshot_row(row: &PgRow) -> Result<(Option<EntityRef>, Snapshot), sqlx::Error> {
    let (id, kind): (Uuid, &str) = (row.try_get(0)?, row.try_get(1)?);
    // A kind that a newer release writes is not a requested one.
    let entity = EntityKind::parse(kind).map(|kind| EntityRef { kind, id });
    Ok((entity, Snapshot { version: row.try_get(2)?, body: row.try_get(3)? }))
}

fn entity_row(row: &PgRow) -> Result<EntityRow, sqlx::Error> {
    Ok(EntityRow {
        entity: EntityRef { kind: kind(row)?, id: row.try_get("id")? },
        version: row.try_get("version")?,
        state: row.try_get("state")?,
        body: row.try_get("body")?,
        owner: row.try_get("owner")?,
        sku: row.try_get("sku")?,
        unique_name: row.try_get("unique_name")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}

fn history_row(row: &PgRow) -> Result<HistoryRow, sqlx::Error> {
    Ok(HistoryRow {
        entity: row.try_get("entity")?,
        version: row.try_get("version")?,
        shard: shard(row)?,
        epoch: Epoch(row.try_get("epoch")?),
        seq: row.try_get("seq")?,
        command: row.try_get("command")?,
        command_id: row.try_get::<Option<Uuid>, _>("command_id")?.map(CommandId),
        from_state: row.try_get("from_state")?,
        to_state: row.try_get("to_state")?,
        why: row.try_get("why")?,
        actor: row.try_get("actor")?,
        correlation_id: row.try_get("correlation_id")?,
        at: row.try_get("at")?,
    })
}

//! Nodes and past allocations that are inserted: copies of snapshots that the service itself has committed, with ids and GPUs of their own,
//! and sealed as it seals.
//!
//! A copy of a node has one GPU rented and the others free, so that placement has it among its candidates. No user rents it in the benchmark,
//! which asks for whole nodes: it has no agent.

use anyhow::{Context, ensure};
use chrono::{DateTime, Utc};
use domain::allocation::Allocation;
use domain::id::{EntityKind, EntityRef, Shard};
use domain::node::Node;
use domain::{Machine, Visitor};
use persistence::envelope_encryption::KeyRing;
use persistence::{Secrets, SnapshotSealer, entity_sums, table_maintenance};
use serde_json::{Value, json};
use sqlx::{PgPool, Row};
use std::collections::BTreeMap;
use std::sync::Arc;
use tests::bench::rentals::SKU;
use tests::cluster::{REGION, TestCluster, id_of};
use uuid::Uuid;

/// Past allocations of each node.
pub(crate) const PAST_PER_NODE: usize = 10;

/// Rows of one statement.
const BATCH: usize = 2_000;

/// Makes copies.
pub(crate) struct FleetGenerator {
    pool: PgPool,
    seals: SnapshotSealer,
    node: Template,
    past: Template,
    /// How many of either were made.
    nodes: usize,
    allocations: usize,
    /// The last number in the history of each shard, in an epoch of its own.
    seqs: BTreeMap<Shard, i64>,
}

/// A committed snapshot.
struct Template {
    kind: EntityKind,
    state: String,
    owner: Option<String>,
    sku: Option<Uuid>,
    /// JSON.
    body: String,
    /// What a copy has of its own: ids, and UUIDs of GPUs.
    own: Vec<Uuid>,
}

struct Copied {
    id: Uuid,
    body: String,
    seal: Vec<u8>,
}

impl FleetGenerator {
    /// Rents one GPU for the template of a node, and releases it for that of a past allocation.
    pub(crate) async fn learn(cluster: &TestCluster) -> anyhow::Result<Self> {
        let wanted = json!({ "sku": SKU, "region_code": REGION, "gpu_count": 1 });
        let allocation = id_of(&cluster.user.post("/api/v1/allocations", &wanted).await.created());
        let path = format!("/api/v1/allocations/{allocation}");
        let rented = cluster.user.wait_until(&path, "it is active", |it| it["state"] == "active").await;
        let text = rented.to_string();
        let holder = "SELECT id FROM entity WHERE kind = 'node' AND body -> 'holds' ? $1";
        let node: Uuid = sqlx::query_scalar(holder)
            .bind(allocation.to_string())
            .fetch_one(&cluster.pool)
            .await
            .with_context(|| text)?;
        let mut node = Template::read(&cluster.pool, Node::KIND, node).await?;
        node.own.push(allocation);
        cluster.user.post(&format!("{path}/release"), &json!({})).await.ok();
        cluster.user.wait_until(&path, "it is released", |it| it["state"] == "released").await;
        let past = Template::read(&cluster.pool, Allocation::KIND, allocation).await?;
        let ring = KeyRing::load(&cluster.settings.key_ring_path)?;
        let secrets = Secrets::new(cluster.pool.clone(), Arc::new(ring));
        let seals = supervisors::cluster_keys::seals(&secrets, None).await?;
        let pool = cluster.pool.clone();
        Ok(Self { pool, seals, node, past, nodes: 0, allocations: 0, seqs: BTreeMap::new() })
    }

    /// Inserts until there are so many nodes, with their past allocations, and counts them.
    pub(crate) async fn grow_to(&mut self, nodes: usize) -> anyhow::Result<()> {
        let (nodes, past) =
            (nodes.saturating_sub(self.nodes), (nodes * PAST_PER_NODE).saturating_sub(self.allocations));
        (self.nodes, self.allocations) = (self.nodes + nodes, self.allocations + past);
        for (is_node, count) in [(true, nodes), (false, past)] {
            for first in (0..count).step_by(BATCH) {
                self.insert(is_node, BATCH.min(count - first)).await?;
            }
        }
        table_maintenance::correct_counts(&self.pool).await?;
        entity_sums::correct(&self.pool, &Shard::all().collect::<Vec<_>>()).await?;
        sqlx::query("VACUUM ANALYZE entity, history").execute(&self.pool).await?;
        Ok(())
    }

    async fn insert(&mut self, is_node: bool, count: usize) -> anyhow::Result<()> {
        let template = if is_node { &self.node } else { &self.past };
        let copies: Vec<Copied> = (0..count).map(|_| template.copy(&self.seals)).collect::<anyhow::Result<_>>()?;
        let shards: Vec<Shard> = copies.iter().map(|copy| actors::sharding::shard_of(copy.id)).collect();
        let mut seqs = Vec::with_capacity(count);
        for shard in &shards {
            let seq = self.seqs.entry(*shard).or_default();
            *seq += 1;
            seqs.push(*seq);
        }
        let template = if is_node { &self.node } else { &self.past };
        let at: DateTime<Utc> = Utc::now();
        sqlx::query(
            "WITH copied AS (
                 INSERT INTO entity (id, kind, shard, version, state, body, seal, owner, sku, created_at, updated_at)
                 SELECT id, $5, shard, 1, $6, body::jsonb, seal, $7, $8, $9, $9
                 FROM unnest($1::uuid[], $2::smallint[], $3::text[], $4::bytea[]) AS copy (id, shard, body, seal)
             )
             INSERT INTO history (entity, version, kind, shard, epoch, seq, command, to_state, why, actor, correlation_id, at)
             SELECT id, 1, $5, shard, -1, seq, 'generate', $6, 'copied for a benchmark', 'system:bench', 'bench', $9
             FROM unnest($1::uuid[], $2::smallint[], $10::bigint[]) AS copy (id, shard, seq)",
        )
        .bind(copies.iter().map(|copy| copy.id).collect::<Vec<_>>())
        .bind(shards.iter().map(|shard| i16::from(shard.0)).collect::<Vec<_>>())
        .bind(copies.iter().map(|copy| copy.body.as_str()).collect::<Vec<_>>())
        .bind(copies.iter().map(|copy| copy.seal.as_slice()).collect::<Vec<_>>())
        .bind(template.kind.as_str())
        .bind(&template.state)
        .bind(&template.owner)
        .bind(template.sku)
        .bind(at)
        .bind(seqs)
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}

impl Template {
    async fn read(pool: &PgPool, kind: EntityKind, id: Uuid) -> anyhow::Result<Self> {
        let row = sqlx::query("SELECT state, owner, sku, body::text FROM entity WHERE id = $1 AND kind = $2");
        let row = row.bind(id).bind(kind.as_str()).fetch_one(pool).await?;
        let body: String = row.try_get(3)?;
        let mut own = vec![id];
        own.extend(gpus(&serde_json::from_str(&body)?));
        Ok(Self { kind, state: row.try_get(0)?, owner: row.try_get(1)?, sku: row.try_get(2)?, body, own })
    }

    fn copy(&self, seals: &SnapshotSealer) -> anyhow::Result<Copied> {
        let mut body = self.body.clone();
        let mut first = None;
        for old in &self.own {
            let new = Uuid::now_v7();
            first = first.or(Some(new));
            body = body.replace(&old.to_string(), &new.to_string());
        }
        let id = first.context("a template has its own id")?;
        self.kind.visit(IsValid(&body))?;
        let seal = seals.seal(EntityRef { kind: self.kind, id }, 1, &body)?;
        Ok(Copied { id, body, seal })
    }
}

/// The UUIDs of a node's GPUs.
fn gpus(body: &Value) -> Vec<Uuid> {
    let gpus = body["inventory"]["gpus"].as_array().into_iter().flatten();
    gpus.filter_map(|gpu| gpu["uuid"].as_str()?.strip_prefix("GPU-")?.parse().ok()).collect()
}

/// Whether a snapshot is one of its state machine, which breaks no invariant.
struct IsValid<'a>(&'a str);

impl Visitor for IsValid<'_> {
    type Output = anyhow::Result<()>;

    fn visit<M: Machine>(self) -> Self::Output {
        let entity: M = serde_json::from_str(self.0)?;
        let violations = entity.violations(&[]);
        ensure!(violations.is_empty(), "the copy of a {} breaks {violations:?}", M::KIND.as_str());
        Ok(())
    }
}

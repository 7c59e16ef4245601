//! Counts of GPUs, and of those that can be rented; the nodes by SKU and region.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use domain::id::{EntityKind, NodeId, SkuId};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

/// The GPUs of one SKU in one region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCount {
    pub sku_id: SkuId,
    pub sku: String,
    pub region_code: String,
    /// Neither removed nor being removed.
    pub nodes: u64,
    pub total: u64,
    /// Held by an allocation, or without a clean-up proof after one.
    pub held: u64,
    /// The GPUs that new allocations can get in total.
    pub free: u64,
    /// The most that one of them can get: the most free GPUs of one node.
    pub largest_free: u64,
    /// Whether new allocations may use this SKU: it is active or deprecated.
    pub is_rentable: bool,
}

/// The nodes whose snapshots the statements below fail on. No row fails this one.
const UNREADABLE_NODES: &str = "
    SELECT id FROM entity
    WHERE kind = 'node' AND state NOT IN ('removing', 'removed') AND sku IS NOT NULL AND NOT coalesce(
        jsonb_typeof(body #> '{registration,sku,name}') = 'string'
        AND jsonb_typeof(body #> '{registration,region_code}') = 'string'
        AND body #>> '{registration,gpus_total}' ~ '^[0-9]{1,9}$'
        AND coalesce(jsonb_typeof(body -> 'holds'), 'object') = 'object'
        AND NOT jsonb_path_exists(body, '$.holds.* ? (@.placed.devices.type() != \"array\")')
        AND coalesce(jsonb_typeof(body #> '{inventory,gpus}'), 'null') IN ('array', 'null')
        AND coalesce(jsonb_typeof(body #> '{inventory,isolates_devices}'), 'null') IN ('boolean', 'null'),
        false
    )";

/// A node with what its load is added up by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetNodeRow {
    pub node: NodeId,
    pub state: String,
    pub sku_id: SkuId,
    pub sku: String,
    pub region_code: String,
}

impl Reads {
    /// All nodes that are neither removed nor being removed, in order of SKU and region. One that cannot be read is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn fleet_nodes(&self) -> Result<Vec<FleetNodeRow>, StoreError> {
        match self.fleet_nodes_except(&[]).await {
            // An altered row fails the whole read.
            Err(error) if !error.is_unavailable() => self.fleet_nodes_except(&self.unreadable_nodes().await?).await,
            rows => rows,
        }
    }

    async fn fleet_nodes_except(&self, unreadable: &[Uuid]) -> Result<Vec<FleetNodeRow>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, state, sku, registration #>> '{sku,name}' AS name, registration ->> 'region_code' AS region
             FROM (
             SELECT id, state, sku, body -> 'registration' AS registration
             FROM entity
             WHERE kind = 'node' AND state NOT IN ('removing', 'removed') AND sku IS NOT NULL AND id <> ALL ($1)
             OFFSET 0
             ) AS node
             ORDER BY name, region, id",
        )
        .bind(unreadable)
        .fetch_all(&self.pool)
        .await;
        let row = |row: &PgRow| {
            Ok(FleetNodeRow {
                node: NodeId(row.try_get("id")?),
                state: row.try_get("state")?,
                sku_id: SkuId(row.try_get("sku")?),
                sku: row.try_get("name")?,
                region_code: row.try_get("region")?,
            })
        };
        rows.and_then(|rows| rows.iter().map(row).collect()).doing("reading the nodes of the fleet")
    }

    /// The nodes that counts leave out. One whose seal does not hold is logged and counted as refused, as in a list; another is logged.
    async fn unreadable_nodes(&self) -> Result<Vec<Uuid>, StoreError> {
        let unreadable: Vec<Uuid> = sqlx::query_scalar(UNREADABLE_NODES)
            .fetch_all(&self.pool)
            .await
            .doing("finding nodes that cannot be read")?;
        for row in self.entities(EntityKind::Node, &unreadable).await? {
            let node_id = row.entity.id;
            tracing::warn!(node.id = %node_id, "node {node_id} cannot be read; the GPUs of the fleet are counted without it");
        }
        Ok(unreadable)
    }

    /// GPUs by SKU and region, of all nodes that are neither removed nor being removed.
    ///
    /// A node's free GPUs are those that its machine would allocate (`Node::gpus_free`): of an active node, without a tenant whose
    /// clean-up is not proved, and, where it cannot isolate tenants, without any tenant.
    ///
    /// A node that cannot be read is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn gpus(&self) -> Result<Vec<GpuCount>, StoreError> {
        match self.gpus_except(&[]).await {
            // An altered row fails the whole statement.
            Err(error) if !error.is_unavailable() => self.gpus_except(&self.unreadable_nodes().await?).await,
            counts => counts,
        }
    }

    async fn gpus_except(&self, unreadable: &[Uuid]) -> Result<Vec<GpuCount>, StoreError> {
        let rows = sqlx::query(
            "SELECT counted.*, coalesce(sku.state IN ('active', 'deprecated'), false) AS is_rentable
             FROM (
             SELECT sku, min(body #>> '{registration,sku,name}') AS name, body #>> '{registration,region_code}' AS region,
                    count(*) AS nodes, sum((body #>> '{registration,gpus_total}')::bigint)::bigint AS total,
                    sum(tenants.held)::bigint AS held,
                    coalesce(sum(greatest(inventory.gpus - tenants.held, 0)) FILTER (
                        WHERE state = 'active' AND tenants.unproven = 0 AND (tenants.count = 0 OR inventory.isolates)
                    ), 0)::bigint AS free,
                    coalesce(max(greatest(inventory.gpus - tenants.held, 0)) FILTER (
                        WHERE state = 'active' AND tenants.unproven = 0 AND (tenants.count = 0 OR inventory.isolates)
                    ), 0)::bigint AS largest_free
             FROM entity
             CROSS JOIN LATERAL (
                 SELECT count(*) AS count,
                        count(*) FILTER (
                            WHERE hold.value #>> '{phase,phase}' IN ('release_failed', 'abandoned')
                        ) AS unproven,
                        coalesce(sum(jsonb_array_length(hold.value #> '{placed,devices}')), 0) AS held
                 FROM jsonb_each(body->'holds') AS hold
             ) AS tenants
             CROSS JOIN LATERAL (
                 SELECT coalesce(jsonb_array_length(nullif(body #> '{inventory,gpus}', 'null')), 0) AS gpus,
                        coalesce((body #>> '{inventory,isolates_devices}')::boolean, false) AS isolates
             ) AS inventory
             WHERE kind = 'node' AND state NOT IN ('removing', 'removed') AND sku IS NOT NULL AND id <> ALL ($1)
             GROUP BY sku, body #>> '{registration,region_code}'
             ) AS counted
             LEFT JOIN entity AS sku ON sku.id = counted.sku AND sku.kind = 'sku'
             ORDER BY name, region",
        )
        .bind(unreadable)
        .fetch_all(&self.pool)
        .await;
        rows.and_then(|rows| rows.iter().map(gpu_count).collect()).doing("counting GPUs")
    }
}

fn gpu_count(row: &PgRow) -> Result<GpuCount, sqlx::Error> {
    let number = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs);
    Ok(GpuCount {
        sku_id: SkuId(row.try_get("sku")?),
        sku: row.try_get("name")?,
        region_code: row.try_get("region")?,
        nodes: number("nodes")?,
        total: number("total")?,
        held: number("held")?,
        free: number("free")?,
        largest_free: number("largest_free")?,
        is_rentable: row.try_get("is_rentable")?,
    })
}

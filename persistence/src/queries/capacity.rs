//! The nodes of the fleet by SKU and region.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use domain::id::{EntityKind, NodeId, SkuId};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

/// The nodes whose snapshots the statement below may fail on. No row fails this one.
const UNREADABLE_NODES: &str = "
    SELECT id FROM entity
    WHERE kind = 'node' AND state NOT IN ('removing', 'removed') AND sku IS NOT NULL AND NOT coalesce(
        jsonb_typeof(body #> '{registration,sku,name}') = 'string'
        AND jsonb_typeof(body #> '{registration,region_code}') = 'string',
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

    /// The nodes that are left out. One whose seal does not hold is logged and counted as refused, as in a list; another is logged.
    async fn unreadable_nodes(&self) -> Result<Vec<Uuid>, StoreError> {
        let unreadable: Vec<Uuid> = sqlx::query_scalar(UNREADABLE_NODES)
            .fetch_all(&self.pool)
            .await
            .doing("finding nodes that cannot be read")?;
        for row in self.entities(EntityKind::Node, &unreadable).await? {
            let node_id = row.entity.id;
            tracing::warn!(node.id = %node_id, "node {node_id} cannot be read; the load of the fleet is added up without it");
        }
        Ok(unreadable)
    }
}

//! The nodes of the fleet by SKU and region.

use super::Reads;
use crate::error::{OperationContext, StoreError};
use domain::id::{EntityKind, NodeId, SkuId};
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::collections::HashSet;
use uuid::Uuid;

/// Those of some nodes whose snapshots the statement below may fail on. No row fails this one.
const UNREADABLE_NODES: &str = "
    SELECT id FROM entity
    WHERE id = ANY ($1) AND kind = 'node' AND sku IS NOT NULL AND NOT coalesce(
        jsonb_typeof(body #> '{registration,sku,name}') = 'string'
        AND jsonb_typeof(body #> '{registration,region_code}') = 'string',
        false
    )";

/// What the load of a node is added up by. It is fixed as the node is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetNodeRow {
    pub node: NodeId,
    pub sku_id: SkuId,
    pub sku: String,
    pub region_code: String,
}

impl Reads {
    /// The states of all nodes that are neither removed nor being removed, unordered. No snapshot is read.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn node_states(&self) -> Result<Vec<(NodeId, String)>, StoreError> {
        let states: Result<Vec<(Uuid, String)>, _> =
            sqlx::query_as("SELECT id, state FROM entity WHERE kind = 'node' AND state NOT IN ('removing', 'removed')")
                .fetch_all(&self.pool)
                .await;
        let states = states.doing("reading the states of the fleet's nodes")?;
        Ok(states.into_iter().map(|(id, state)| (NodeId(id), state)).collect())
    }

    /// SKU and region of these nodes, unordered. One that cannot be read is left out.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn fleet_nodes(&self, nodes: &[NodeId]) -> Result<Vec<FleetNodeRow>, StoreError> {
        let mut ids: Vec<Uuid> = nodes.iter().map(|node| node.0).collect();
        match self.readable_fleet_nodes(&ids).await {
            // An altered row fails the whole read.
            Err(error) if !error.is_unavailable() => {
                let unreadable = self.unreadable_nodes(&ids).await?;
                ids.retain(|id| !unreadable.contains(id));
                self.readable_fleet_nodes(&ids).await
            }
            rows => rows,
        }
    }

    async fn readable_fleet_nodes(&self, nodes: &[Uuid]) -> Result<Vec<FleetNodeRow>, StoreError> {
        let rows = sqlx::query(
            "SELECT id, sku, registration #>> '{sku,name}' AS name, registration ->> 'region_code' AS region
             FROM (
             SELECT id, sku, body -> 'registration' AS registration
             FROM entity
             WHERE id = ANY ($1) AND kind = 'node' AND sku IS NOT NULL
             OFFSET 0
             ) AS node",
        )
        .bind(nodes)
        .fetch_all(&self.pool)
        .await;
        let row = |row: &PgRow| {
            Ok(FleetNodeRow {
                node: NodeId(row.try_get("id")?),
                sku_id: SkuId(row.try_get("sku")?),
                sku: row.try_get("name")?,
                region_code: row.try_get("region")?,
            })
        };
        rows.and_then(|rows| rows.iter().map(row).collect()).doing("reading nodes of the fleet")
    }

    /// The nodes that are left out. One whose seal does not hold is logged and counted as refused, as in a list; another is logged.
    async fn unreadable_nodes(&self, nodes: &[Uuid]) -> Result<HashSet<Uuid>, StoreError> {
        let unreadable: Vec<Uuid> = sqlx::query_scalar(UNREADABLE_NODES)
            .bind(nodes)
            .fetch_all(&self.pool)
            .await
            .doing("finding nodes that cannot be read")?;
        for row in self.entities(EntityKind::Node, &unreadable).await? {
            let node_id = row.entity.id;
            tracing::warn!(node.id = %node_id, "node {node_id} cannot be read; the load of the fleet is added up without it");
        }
        Ok(unreadable.into_iter().collect())
    }
}

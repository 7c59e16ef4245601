//! SKU and region of each node, by which loads are added up. They are read from the store now and then: a request reads memory alone.

use chrono::{DateTime, TimeDelta, Utc};
use domain::NodeId;
use persistence::queries::FleetNodeRow;
use persistence::{Reads, StoreError};
use std::sync::Arc;
use tokio::sync::Mutex;
use uuid::Uuid;

/// After this time the nodes are read again. A worker does so before, so that a request waits only where none runs.
const MAX_AGE: TimeDelta = TimeDelta::seconds(30);

/// A node that is neither removed nor being removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetNode {
    pub id: NodeId,
    pub sku_id: Uuid,
    pub sku: Arc<str>,
    pub region_code: Arc<str>,
    /// Whether its agent is expected to send heartbeats: it is active or draining, or offline since it sends none.
    pub is_expected: bool,
}

/// The nodes as they were read last. Clones share them.
#[derive(Clone)]
pub struct FleetDirectory {
    reads: Reads,
    last: Arc<Mutex<Option<ReadNodes>>>,
}

/// The nodes, and when they were read.
type ReadNodes = (DateTime<Utc>, Arc<[FleetNode]>);

impl FleetDirectory {
    #[must_use]
    pub fn new(reads: Reads) -> Self {
        Self { reads, last: Arc::default() }
    }

    /// The nodes, at most 30 s old.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn nodes(&self, now: DateTime<Utc>) -> Result<Arc<[FleetNode]>, StoreError> {
        // Concurrent requests wait for the same query.
        let mut last = self.last.lock().await;
        if let Some((read_at, nodes)) = &*last
            && (now - *read_at).abs() < MAX_AGE
        {
            return Ok(Arc::clone(nodes));
        }
        let nodes = self.read().await?;
        *last = Some((now, Arc::clone(&nodes)));
        Ok(nodes)
    }

    /// Reads the nodes; requests go on with the last ones until they are here.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn refresh(&self, now: DateTime<Utc>) -> Result<Arc<[FleetNode]>, StoreError> {
        let nodes = self.read().await?;
        *self.last.lock().await = Some((now, Arc::clone(&nodes)));
        Ok(nodes)
    }

    async fn read(&self) -> Result<Arc<[FleetNode]>, StoreError> {
        let rows = self.reads.fleet_nodes().await?;
        // In order of SKU and region, so that equal names are beside each other and are stored once.
        let mut names: (Arc<str>, Arc<str>) = ("".into(), "".into());
        let node = |row: FleetNodeRow| {
            if *names.0 != *row.sku {
                names.0 = row.sku.as_str().into();
            }
            if *names.1 != *row.region_code {
                names.1 = row.region_code.as_str().into();
            }
            FleetNode {
                id: row.node,
                sku_id: row.sku_id.0,
                sku: Arc::clone(&names.0),
                region_code: Arc::clone(&names.1),
                is_expected: matches!(row.state.as_str(), "active" | "draining" | "offline"),
            }
        };
        Ok(rows.into_iter().map(node).collect())
    }
}

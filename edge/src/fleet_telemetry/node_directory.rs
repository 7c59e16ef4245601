//! SKU and region of each node, by which loads are added up. They are read from the store periodically, so that a request reads memory alone: of
//! a node that is known its state alone, since SKU and region never change.

use chrono::{DateTime, TimeDelta, Utc};
use domain::NodeId;
use persistence::{Reads, StoreError};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::Mutex;
use uuid::Uuid;

/// After this time the nodes are read again. A worker does so before, so that a request waits only where none runs.
const MAX_AGE: TimeDelta = TimeDelta::seconds(30);
/// Nodes whose SKU and region one statement reads.
const PAGE_SIZE: usize = 10_000;

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
        let known = last.as_ref().map_or(&[][..], |(_, nodes)| &nodes[..]);
        let nodes = self.read(known).await?;
        *last = Some((now, Arc::clone(&nodes)));
        Ok(nodes)
    }

    /// Reads the nodes; requests go on with the last ones until they are here.
    ///
    /// # Errors
    /// [`StoreError`]
    pub async fn refresh(&self, now: DateTime<Utc>) -> Result<Arc<[FleetNode]>, StoreError> {
        let known = self.last.lock().await.as_ref().map(|(_, nodes)| Arc::clone(nodes));
        let nodes = self.read(known.as_deref().unwrap_or_default()).await?;
        *self.last.lock().await = Some((now, Arc::clone(&nodes)));
        Ok(nodes)
    }

    /// The states of all nodes, and SKU and region of those that were not known.
    async fn read(&self, known: &[FleetNode]) -> Result<Arc<[FleetNode]>, StoreError> {
        let states = self.reads.node_states().await?;
        let known: HashMap<NodeId, &FleetNode> = known.iter().map(|node| (node.id, node)).collect();
        let unknown: Vec<NodeId> = states.iter().map(|(id, _)| *id).filter(|id| !known.contains_key(id)).collect();
        let mut names = Names::default();
        for node in known.values() {
            names.0.extend([Arc::clone(&node.sku), Arc::clone(&node.region_code)]);
        }
        let mut new = HashMap::new();
        for page in unknown.chunks(PAGE_SIZE) {
            for row in self.reads.fleet_nodes(page).await? {
                let (sku, region_code) = (names.shared(&row.sku), names.shared(&row.region_code));
                let node = FleetNode { id: row.node, sku_id: row.sku_id.0, sku, region_code, is_expected: false };
                new.insert(row.node, node);
            }
        }
        let node = |(id, state): (NodeId, String)| {
            let node = new.get(&id).or_else(|| known.get(&id).copied())?;
            let is_expected = matches!(state.as_str(), "active" | "draining" | "offline");
            Some(FleetNode { is_expected, ..node.clone() })
        };
        Ok(states.into_iter().filter_map(node).collect())
    }
}

/// The names of SKUs and regions, each stored once.
#[derive(Default)]
struct Names(HashSet<Arc<str>>);

impl Names {
    fn shared(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.0.get(name) {
            return Arc::clone(known);
        }
        let name: Arc<str> = name.into();
        self.0.insert(Arc::clone(&name));
        name
    }
}

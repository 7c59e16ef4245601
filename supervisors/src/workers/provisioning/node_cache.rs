//! A cache of the nodes of each SKU for placements. Concurrent placements share one snapshot, and a snapshot reads only the nodes that
//! have changed since the one before.
//!
//! A snapshot may be some milliseconds old. That costs a refusal at worst: only the node's own mailbox reserves (I2).

use dashmap::DashMap;
use domain::node::Node;
use domain::placement::Candidate;
use domain::{AllocationId, NodeId, SkuId};
use persistence::queries::NodeRow;
use persistence::{Reads, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// The state of nodes that may take a tenant.
const SCHEDULABLE: &str = "active";

/// How long a snapshot is used at least.
const MIN_FRESHNESS: Duration = Duration::from_millis(10);
/// A snapshot is used for this multiple of the time that it took to read: a large fleet is not read without pause.
const FRESHNESS_FACTOR: u32 = 4;

#[derive(Default)]
pub(super) struct Fleet {
    skus: DashMap<SkuId, Arc<Mutex<SkuNodes>>>,
}

/// The nodes of a SKU at the last snapshot.
#[derive(Default)]
struct SkuNodes {
    /// The time before the read, and the time until which the snapshot is used.
    at: Option<(Instant, Instant)>,
    by_id: BTreeMap<NodeId, CachedNode>,
}

struct CachedNode {
    version: i64,
    /// `None` for a node that cannot be parsed: it is parked and shown; the others can be rented.
    capacity: Option<NodeCapacity>,
}

struct NodeCapacity {
    region_code: String,
    gpus_free: u32,
    gpus_withheld: u32,
    is_reimageable: bool,
    holders: BTreeSet<AllocationId>,
}

/// The candidates, and the time from which they were read.
pub(super) struct FleetSnapshot {
    pub(super) candidates: Vec<Candidate>,
    pub(super) at: Instant,
}

impl Fleet {
    /// The nodes of the SKU for a placement of `allocation`, read not before `since`.
    pub(super) async fn snapshot(
        &self,
        reads: &Reads,
        sku: SkuId,
        allocation: AllocationId,
        since: Option<Instant>,
    ) -> Result<FleetSnapshot, StoreError> {
        let nodes = Arc::clone(&self.skus.entry(sku).or_default());
        let mut nodes = nodes.lock().await;
        let began = Instant::now();
        let at = match nodes.at {
            Some((at, good_until)) if began < good_until && since.is_none_or(|since| at >= since) => at,
            Some(_) | None => {
                let known = nodes.by_id.iter().map(|(node, cached)| (*node, cached.version));
                let rows = reads.nodes_of_sku(sku, SCHEDULABLE, known).await?;
                nodes.refresh(rows);
                nodes.at = Some((began, began + MIN_FRESHNESS.max(began.elapsed() * FRESHNESS_FACTOR)));
                began
            }
        };
        Ok(FleetSnapshot { candidates: nodes.candidates(allocation), at })
    }

    /// Records a node's reservation in the cache, so that the next placement sees it.
    pub(super) async fn record_reservation(&self, sku: SkuId, node: NodeId, allocation: AllocationId, gpus: u32) {
        let Some(nodes) = self.skus.get(&sku).map(|nodes| Arc::clone(&nodes)) else { return };
        if let Some(capacity) = nodes.lock().await.by_id.get_mut(&node).and_then(|cached| cached.capacity.as_mut())
            && capacity.holders.insert(allocation)
        {
            capacity.gpus_free = capacity.gpus_free.saturating_sub(gpus);
        }
    }
}

impl SkuNodes {
    fn refresh(&mut self, rows: Vec<NodeRow>) {
        let mut before = std::mem::take(&mut self.by_id);
        for NodeRow { node, version, body } in rows {
            let capacity = match body {
                Some(body) => serde_json::from_str::<Node>(&body).ok().map(|node| NodeCapacity {
                    region_code: node.registration.region_code.clone(),
                    gpus_free: node.gpus_free(),
                    gpus_withheld: node.gpus_withheld(),
                    is_reimageable: node.is_reimageable_as_a_whole(),
                    holders: node.holds.keys().copied().collect(),
                }),
                None => before.remove(&node).and_then(|cached| cached.capacity),
            };
            self.by_id.insert(node, CachedNode { version, capacity });
        }
    }

    fn candidates(&self, allocation: AllocationId) -> Vec<Candidate> {
        let candidate = |(node, cached): (&NodeId, &CachedNode)| {
            cached.capacity.as_ref().map(|capacity| Candidate {
                node_id: *node,
                region_code: capacity.region_code.clone(),
                gpus_free: capacity.gpus_free,
                gpus_withheld: capacity.gpus_withheld,
                is_reimageable: capacity.is_reimageable,
                holds_it: capacity.holders.contains(&allocation),
            })
        };
        self.by_id.iter().filter_map(candidate).collect()
    }
}

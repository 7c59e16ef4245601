//! The nodes of each SKU as placements see them. Placements that come at once share one look, and a look reads only the nodes that
//! have changed since the one before.
//!
//! What is seen here may be some milliseconds old. That costs a refusal at worst: the node's own mailbox alone reserves (I2).

use dashmap::DashMap;
use domain::node::Node;
use domain::placement::Candidate;
use domain::{AllocationId, NodeId, SkuId};
use persistence::read::NodeRow;
use persistence::{Reads, StoreError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

/// The nodes that may take a tenant.
const SCHEDULABLE: &str = "active";

/// How long a look is good for at least.
const FRESH: Duration = Duration::from_millis(10);
/// A look that took long is good for so many times as long: a large fleet is not read without pause.
const FRESH_FOR: u32 = 4;

#[derive(Default)]
pub(super) struct Fleet {
    skus: DashMap<SkuId, Arc<Mutex<Seen>>>,
}

/// The nodes of a SKU at the last look.
#[derive(Default)]
struct Seen {
    /// From before the look, and until when it is good.
    at: Option<(Instant, Instant)>,
    nodes: BTreeMap<NodeId, Sight>,
}

struct Sight {
    version: i64,
    /// `None` of a node that cannot be read: it is parked and shown; the others can be rented.
    room: Option<Room>,
}

struct Room {
    region_code: String,
    gpus_free: u32,
    gpus_withheld: u32,
    holders: BTreeSet<AllocationId>,
}

/// What was seen, and from which instant on it was so.
pub(super) struct Look {
    pub(super) candidates: Vec<Candidate>,
    pub(super) at: Instant,
}

impl Fleet {
    /// The nodes of the SKU, seen not before `since`, for a placement of `allocation`.
    pub(super) async fn look(
        &self,
        reads: &Reads,
        sku: SkuId,
        allocation: AllocationId,
        since: Option<Instant>,
    ) -> Result<Look, StoreError> {
        let seen = Arc::clone(&self.skus.entry(sku).or_default());
        let mut seen = seen.lock().await;
        let began = Instant::now();
        let at = match seen.at {
            Some((at, good_until)) if began < good_until && since.is_none_or(|since| at >= since) => at,
            Some(_) | None => {
                let known = seen.nodes.iter().map(|(node, sight)| (*node, sight.version));
                let rows = reads.nodes_of_sku(sku, SCHEDULABLE, known).await?;
                seen.learn(rows);
                seen.at = Some((began, began + FRESH.max(began.elapsed() * FRESH_FOR)));
                began
            }
        };
        Ok(Look { candidates: seen.candidates(allocation), at })
    }

    /// A node has reserved: whoever looks next sees it, also where the look is an old one.
    pub(super) async fn reserved(&self, sku: SkuId, node: NodeId, allocation: AllocationId, gpus: u32) {
        let Some(seen) = self.skus.get(&sku).map(|seen| Arc::clone(&seen)) else { return };
        if let Some(room) = seen.lock().await.nodes.get_mut(&node).and_then(|sight| sight.room.as_mut())
            && room.holders.insert(allocation)
        {
            room.gpus_free = room.gpus_free.saturating_sub(gpus);
        }
    }
}

impl Seen {
    fn learn(&mut self, rows: Vec<NodeRow>) {
        let mut before = std::mem::take(&mut self.nodes);
        for NodeRow { node, version, body } in rows {
            let room = match body {
                Some(body) => serde_json::from_str::<Node>(&body).ok().map(|node| Room {
                    region_code: node.registration.region_code.clone(),
                    gpus_free: node.gpus_free(),
                    gpus_withheld: node.gpus_withheld(),
                    holders: node.holds.keys().copied().collect(),
                }),
                None => before.remove(&node).and_then(|sight| sight.room),
            };
            self.nodes.insert(node, Sight { version, room });
        }
    }

    fn candidates(&self, allocation: AllocationId) -> Vec<Candidate> {
        let candidate = |(node, sight): (&NodeId, &Sight)| {
            sight.room.as_ref().map(|room| Candidate {
                node_id: *node,
                region_code: room.region_code.clone(),
                gpus_free: room.gpus_free,
                gpus_withheld: room.gpus_withheld,
                holds_it: room.holders.contains(&allocation),
            })
        };
        self.nodes.iter().filter_map(candidate).collect()
    }
}

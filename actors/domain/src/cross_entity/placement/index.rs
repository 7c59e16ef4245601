//! The index of free GPUs: nodes by SKU, region and number of free GPUs. Choosing a node costs O(log n) of the nodes of its SKU.
//!
//! It is fed by messages that may be lost, repeated, late or out of order, and by reads of the database. A node's version orders them: what is
//! older than the index is ignored, whichever way it came. An index that is wrong costs a refusal of a node, and never a double
//! reservation.

use super::{NodeCapacity, PlacementRequest, RegionCapacity, suggestion};
use crate::id::{AllocationId, NodeId, SkuId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlacementIndex {
    nodes: BTreeMap<NodeId, IndexedNode>,
    skus: BTreeMap<SkuId, SkuIndex>,
    /// The nodes that hold devices for an allocation. Two do so while one of them is not wanted.
    holders: BTreeSet<(AllocationId, NodeId)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct IndexedNode {
    version: i64,
    capacity: NodeCapacity,
    certainty: Certainty,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Certainty {
    /// It was committed in this version.
    Committed,
    /// It was committed, and a reservation has been made since whose commit is not known here.
    Estimated,
    /// The node has refused what the index expected: it is proposed to no request until its next commit is known.
    Doubted,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SkuIndex {
    nodes: BTreeSet<NodeId>,
    /// Those that have refused what the index expected: few, among however many nodes.
    doubted: BTreeSet<NodeId>,
    regions: BTreeMap<String, RegionIndex>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct RegionIndex {
    /// The nodes with free GPUs.
    by_free: BTreeSet<FreeNode>,
    /// Those of them that are free as a whole, and can be reimaged after a tenant.
    whole: BTreeSet<FreeNode>,
    /// The sum of what health alerts withhold.
    gpus_withheld: u64,
}

/// A node by the number of its free GPUs; equal ones in an order that says nothing about them.
type FreeNode = (u32, u64, NodeId);

/// What an update did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexUpdate {
    /// The index has this version or a later one.
    Known,
    /// The version is new, and the capacity is the same.
    Same,
    /// The capacity is another one.
    Changed,
}

/// The version of a node in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexedVersion {
    pub node_id: NodeId,
    pub version: i64,
    /// The index has what this version committed, and nothing that it made of it since.
    pub is_certain: bool,
    /// The index would propose the node, or shows GPUs of it.
    pub has_gpus: bool,
    /// It holds devices for an allocation.
    pub is_held: bool,
}

impl PlacementIndex {
    /// Notes what a commit of the node has made of it.
    pub fn apply(&mut self, version: i64, capacity: NodeCapacity) -> IndexUpdate {
        let before = self.nodes.get(&capacity.node_id);
        let update = match before {
            Some(before) if version < before.version => IndexUpdate::Known,
            Some(before) if version == before.version && before.certainty == Certainty::Committed => IndexUpdate::Known,
            Some(before) if before.certainty == Certainty::Doubted || before.capacity != capacity => {
                IndexUpdate::Changed
            }
            Some(_) => IndexUpdate::Same,
            None => IndexUpdate::Changed,
        };
        if update != IndexUpdate::Known {
            self.insert(IndexedNode { version, capacity, certainty: Certainty::Committed });
        }
        update
    }

    /// As [`Self::apply`], where the database has gone back to an earlier version: it was restored, or its failover lost commits.
    pub fn reset(&mut self, version: i64, capacity: NodeCapacity) {
        self.insert(IndexedNode { version, capacity, certainty: Certainty::Committed });
    }

    /// Removes a node that does not exist any more, unless it was seen in another version than this one since.
    pub fn remove(&mut self, node_id: NodeId, version: i64) {
        if self.nodes.get(&node_id).is_some_and(|node| node.version == version) {
            self.take(node_id);
        }
    }

    /// Counts a reservation of which the commit is not known here yet, so that the next request asks another node.
    pub fn record_reservation(&mut self, node_id: NodeId, allocation_id: AllocationId, gpu_count: u32) {
        if let Some(mut node) = self.take(node_id) {
            if node.capacity.holders.insert(allocation_id) {
                node.capacity.gpus_free = node.capacity.gpus_free.saturating_sub(gpu_count);
                node.capacity.is_reimageable = false;
                if node.certainty == Certainty::Committed {
                    node.certainty = Certainty::Estimated;
                }
            }
            self.insert(node);
        }
    }

    /// The node has refused a request that it has room for by this index. It is proposed to none until [`Self::apply`] says what it has.
    pub fn doubt(&mut self, node_id: NodeId) {
        if let Some(node) = self.take(node_id) {
            self.insert(IndexedNode { certainty: Certainty::Doubted, ..node });
        }
    }

    /// The versions of a SKU's nodes, in order of their ids, from the one that follows `after` on.
    pub fn versions(&self, sku_id: SkuId, after: Option<NodeId>) -> impl Iterator<Item = IndexedVersion> + '_ {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let nodes = self.skus.get(&sku_id).into_iter().flat_map(move |sku| sku.nodes.range((from, Bound::Unbounded)));
        nodes.filter_map(|node_id| self.version(*node_id))
    }

    /// The version of a node.
    #[must_use]
    pub fn version(&self, node_id: NodeId) -> Option<IndexedVersion> {
        self.nodes.get(&node_id).map(|node| IndexedVersion {
            node_id,
            version: node.version,
            is_certain: node.certainty == Certainty::Committed,
            has_gpus: node.is_shown() && (node.capacity.gpus_free > 0 || node.capacity.gpus_withheld > 0),
            is_held: !node.capacity.holders.is_empty(),
        })
    }

    /// How many nodes it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// The node to ask next: one that holds devices for the allocation already, then the tightest fit, so that large requests find room
    /// later. Equal fits are taken in an order of the allocation's own, so that simultaneous requests do not all ask the same node. Those
    /// that were `asked` are passed over.
    #[must_use]
    pub fn next(&self, wanted: &PlacementRequest<'_>, asked: &BTreeSet<NodeId>) -> Option<NodeId> {
        let named = |node_id| {
            let fits = |node: &&NodeCapacity| wanted.admits(node) && wanted.has_room(node) && !asked.contains(&node_id);
            self.named(node_id).filter(fits).map(|node| node.node_id)
        };
        self.next_holder(wanted, asked).or_else(|| match wanted.node_id {
            Some(node_id) => named(node_id),
            None => self.tightest(wanted, asked),
        })
    }

    fn next_holder(&self, wanted: &PlacementRequest<'_>, asked: &BTreeSet<NodeId>) -> Option<NodeId> {
        let allocation_id = wanted.allocation_id;
        let first = (allocation_id, NodeId(uuid::Uuid::nil()));
        let holders = self.holders.range(first..).take_while(|(holder, _)| *holder == allocation_id);
        let meant = |node_id: &NodeId| self.nodes.get(node_id).is_some_and(|node| wanted.admits(&node.capacity));
        holders.map(|(_, node_id)| *node_id).find(|node_id| !asked.contains(node_id) && meant(node_id))
    }

    /// Whether a node may have room that is doubted, since it has refused another request: it has to be read before this one is refused.
    #[must_use]
    pub fn is_room_doubted(&self, wanted: &PlacementRequest<'_>, asked: &BTreeSet<NodeId>) -> bool {
        let doubted = self.skus.get(&wanted.sku_id).into_iter().flat_map(|sku| &sku.doubted);
        doubted.filter_map(|node_id| self.nodes.get(node_id)).any(|IndexedNode { capacity, .. }| {
            wanted.admits(capacity) && wanted.has_room(capacity) && !asked.contains(&capacity.node_id)
        })
    }

    /// The node, where it is not doubted.
    fn named(&self, node_id: NodeId) -> Option<&NodeCapacity> {
        self.nodes.get(&node_id).filter(|node| node.is_shown()).map(|node| &node.capacity)
    }

    fn tightest(&self, wanted: &PlacementRequest<'_>, asked: &BTreeSet<NodeId>) -> Option<NodeId> {
        let sku = self.skus.get(&wanted.sku_id)?;
        let start = rank(wanted.allocation_id.0);
        let (one, all) = match wanted.region_code {
            Some(region) => (sku.regions.get(region), None),
            None => (None, Some(sku.regions.values())),
        };
        let regions = one.into_iter().chain(all.into_iter().flatten());
        let best = regions.filter_map(|region| region.tightest(wanted, start, asked));
        // Of several regions the tightest fit, and of equal ones the next in the allocation's order.
        best.min_by_key(|(free, rank, _)| (*free, rank.wrapping_sub(start))).map(|(_, _, node_id)| node_id)
    }

    /// An alternative for a request that no node has room for, in a sentence for the user.
    #[must_use]
    pub fn suggestion(&self, wanted: &PlacementRequest<'_>) -> String {
        let most = |nodes: &BTreeSet<FreeNode>| nodes.last().map_or(0, |(free, _, _)| *free);
        let regions = self.skus.get(&wanted.sku_id).into_iter().flat_map(|sku| &sku.regions);
        let regions: Vec<_> = regions
            .map(|(region_code, region)| RegionCapacity {
                region_code,
                largest_free: most(&region.by_free),
                largest_whole: most(&region.whole),
                gpus_withheld: region.gpus_withheld,
            })
            .collect();
        let named = wanted.node_id.and_then(|node_id| self.named(node_id));
        suggestion(&regions, named, wanted)
    }

    fn insert(&mut self, node: IndexedNode) {
        let node_id = node.capacity.node_id;
        self.take(node_id);
        let sku = self.skus.entry(node.capacity.sku_id).or_default();
        sku.nodes.insert(node_id);
        if !node.is_shown() {
            sku.doubted.insert(node_id);
        }
        if node.is_shown() && (node.capacity.gpus_free > 0 || node.capacity.gpus_withheld > 0) {
            let region = sku.regions.entry(node.capacity.region_code.clone()).or_default();
            region.gpus_withheld += u64::from(node.capacity.gpus_withheld);
            if node.capacity.gpus_free > 0 {
                let free = free_node(&node.capacity);
                region.by_free.insert(free);
                if node.capacity.is_reimageable {
                    region.whole.insert(free);
                }
            }
        }
        self.holders.extend(node.capacity.holders.iter().map(|allocation_id| (*allocation_id, node_id)));
        self.nodes.insert(node_id, node);
    }

    fn take(&mut self, node_id: NodeId) -> Option<IndexedNode> {
        let node = self.nodes.remove(&node_id)?;
        for allocation_id in &node.capacity.holders {
            self.holders.remove(&(*allocation_id, node_id));
        }
        if let Some(sku) = self.skus.get_mut(&node.capacity.sku_id) {
            sku.nodes.remove(&node_id);
            sku.doubted.remove(&node_id);
            if let Some(region) = sku.regions.get_mut(&node.capacity.region_code).filter(|_| node.is_shown()) {
                let free = free_node(&node.capacity);
                region.by_free.remove(&free);
                region.whole.remove(&free);
                region.gpus_withheld = region.gpus_withheld.saturating_sub(u64::from(node.capacity.gpus_withheld));
                if region.by_free.is_empty() && region.gpus_withheld == 0 {
                    sku.regions.remove(&node.capacity.region_code);
                }
            }
            if sku.nodes.is_empty() {
                self.skus.remove(&node.capacity.sku_id);
            }
        }
        Some(node)
    }
}

impl IndexedNode {
    fn is_shown(&self) -> bool {
        self.certainty != Certainty::Doubted
    }
}

impl RegionIndex {
    /// The tightest fit that was not asked, of equal ones the first from `start`.
    fn tightest(&self, wanted: &PlacementRequest<'_>, start: u64, asked: &BTreeSet<NodeId>) -> Option<FreeNode> {
        let nodes = if wanted.reimages { &self.whole } else { &self.by_free };
        let mut free = wanted.gpu_count.max(1);
        loop {
            // A node has a bounded number of GPUs: so many steps at most.
            (free, _, _) = *nodes.range((free, 0, FIRST_NODE_ID)..).next()?;
            if wanted.reimages && free != wanted.gpu_count {
                return None;
            }
            let after = (free.checked_add(1)?, 0, FIRST_NODE_ID);
            let (upper, lower) = (
                nodes.range((free, start, FIRST_NODE_ID)..after),
                nodes.range((free, 0, FIRST_NODE_ID)..(free, start, FIRST_NODE_ID)),
            );
            if let Some(found) = upper.chain(lower).find(|(_, _, node_id)| !asked.contains(node_id)) {
                return Some(*found);
            }
            (free, _, _) = after;
        }
    }
}

/// The lowest id, where a range of nodes begins.
const FIRST_NODE_ID: NodeId = NodeId(uuid::Uuid::nil());

fn free_node(capacity: &NodeCapacity) -> FreeNode {
    (capacity.gpus_free, rank(capacity.node_id.0), capacity.node_id)
}

/// A place that does not depend on when the id was made. The multiplier is that of Fibonacci hashing (Knuth, TAOCP 3, 6.4).
fn rank(id: uuid::Uuid) -> u64 {
    let (high, low) = id.as_u64_pair();
    let mixed = (high ^ low.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod property_tests;

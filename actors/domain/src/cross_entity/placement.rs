//! Placement of an allocation: on the requested node, or best fit over the nodes of the SKU and region. The choice is a proposal from an index
//! in memory, which may be some milliseconds old; the node's own actor decides whether it reserves (design, I2).

mod index;
#[cfg(test)]
mod tests;

pub use index::{IndexUpdate, IndexedVersion, PlacementIndex};

use crate::id::{AllocationId, NodeId, SkuId};
use crate::node::Node;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What placement knows of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCapacity {
    pub node_id: NodeId,
    pub sku_id: SkuId,
    pub region_code: String,
    pub gpus_free: u32,
    /// GPUs that would be free without an alert of the node's agent that prevents new allocations.
    pub gpus_withheld: u32,
    /// It is free as a whole, and can be reimaged after a tenant.
    pub is_reimageable: bool,
    /// The allocations that it holds devices for.
    pub holders: BTreeSet<AllocationId>,
}

impl NodeCapacity {
    #[must_use]
    pub fn of(node: &Node) -> Self {
        Self {
            node_id: node.id,
            sku_id: node.machine.registration.sku.sku_id,
            region_code: node.machine.registration.region_code.clone(),
            gpus_free: node.gpus_free(),
            gpus_withheld: node.gpus_withheld(),
            is_reimageable: node.is_reimageable_as_a_whole(),
            holders: node.tenancy.holds.keys().copied().collect(),
        }
    }

    /// Of a node that takes no allocation, or that cannot be read.
    #[must_use]
    pub const fn none(node_id: NodeId, sku_id: SkuId) -> Self {
        Self {
            node_id,
            sku_id,
            region_code: String::new(),
            gpus_free: 0,
            gpus_withheld: 0,
            is_reimageable: false,
            holders: BTreeSet::new(),
        }
    }
}

/// The requirements of a placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementRequest<'a> {
    pub allocation_id: AllocationId,
    pub sku_id: SkuId,
    pub node_id: Option<NodeId>,
    pub region_code: Option<&'a str>,
    pub gpu_count: u32,
    /// The whole node, which is reimaged afterwards.
    pub reimages: bool,
}

impl PlacementRequest<'_> {
    /// Whether the request admits the node: by its SKU, and the node and the region that it names.
    fn admits(&self, node: &NodeCapacity) -> bool {
        self.sku_id == node.sku_id
            && self.node_id.is_none_or(|node_id| node_id == node.node_id)
            && self.region_code.is_none_or(|region| region == node.region_code)
    }

    /// Whether the node has room for it.
    const fn has_room(&self, node: &NodeCapacity) -> bool {
        if self.reimages {
            node.is_reimageable && node.gpus_free == self.gpu_count
        } else {
            node.gpus_free >= self.gpu_count && node.gpus_free > 0
        }
    }
}

/// What one region has of a SKU.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RegionCapacity<'a> {
    region_code: &'a str,
    /// The most free GPUs of one node.
    largest_free: u32,
    /// The same, of a node that is free as a whole and can be reimaged after a tenant.
    largest_whole: u32,
    /// GPUs that health alerts withhold.
    gpus_withheld: u64,
}

/// An alternative, in a sentence for the user, and the GPUs that a fault withholds, in another. `named`: the node that the request names.
fn suggestion(regions: &[RegionCapacity<'_>], named: Option<&NodeCapacity>, wanted: &PlacementRequest<'_>) -> String {
    if wanted.reimages {
        return suggestion_of_whole_nodes(regions);
    }
    let withheld: u64 = match wanted.node_id {
        Some(_) => named.filter(|node| wanted.admits(node)).map_or(0, |node| u64::from(node.gpus_withheld)),
        None => {
            let meant = |it: &&RegionCapacity<'_>| wanted.region_code.is_none_or(|region| region == it.region_code);
            regions.iter().filter(meant).map(|it| it.gpus_withheld).sum()
        }
    };
    let alternative = alternative(regions, named, wanted);
    match withheld {
        0 => alternative,
        1 => format!("{alternative} 1 GPU would be free, but a health alert of its node prevents new allocations."),
        more => {
            format!(
                "{alternative} {more} GPUs would be free, but health alerts of their nodes prevent new allocations."
            )
        }
    }
}

/// The alternative to an allocation that is isolated by reimage.
fn suggestion_of_whole_nodes(regions: &[RegionCapacity<'_>]) -> String {
    match regions.iter().filter(|it| it.largest_whole > 0).max_by_key(|it| it.largest_whole) {
        Some(best) => format!(
            "The policy allocation.isolation_model is full-reimage for you: a whole node is allocated, such as one with {} GPUs in \
             region {}; ask for that many.",
            best.largest_whole, best.region_code
        ),
        None => "The policy allocation.isolation_model is full-reimage for you, and no node of this SKU that can be reimaged is free as a \
                 whole; wait with queue_seconds, or have an administrator set the policy to user-revoke."
            .to_owned(),
    }
}

fn alternative(regions: &[RegionCapacity<'_>], named: Option<&NodeCapacity>, wanted: &PlacementRequest<'_>) -> String {
    let most = |here: &dyn Fn(&&RegionCapacity<'_>) -> bool| {
        regions.iter().filter(here).max_by_key(|it| it.largest_free).filter(|best| best.largest_free > 0)
    };
    if let Some(region) = wanted.region_code
        && let Some(elsewhere) = most(&|it| it.region_code != region && it.largest_free >= wanted.gpu_count)
    {
        return format!("Region {} has room for {} of this SKU.", elsewhere.region_code, gpus(wanted.gpu_count));
    }
    // A node has room that refused: it has taken another tenant since, or is out of service.
    let refused = match wanted.node_id {
        Some(_) => named.filter(|node| wanted.admits(node)).map(|node| (&*node.region_code, node.gpus_free)),
        None => {
            let here = |it: &&RegionCapacity<'_>| wanted.region_code.is_none_or(|region| region == it.region_code);
            most(&here).map(|best| (best.region_code, best.largest_free))
        }
    };
    if let Some((region, free)) = refused.filter(|(_, free)| *free >= wanted.gpu_count) {
        return format!(
            "A node of this SKU in region {region} has {} free, which could not be reserved at this moment; try again.",
            gpus(free)
        );
    }
    match most(&|_| true) {
        Some(best) if wanted.node_id.is_some() && best.largest_free >= wanted.gpu_count => {
            "Another node of this SKU has room; leave node_id out.".to_owned()
        }
        Some(best) => format!(
            "The largest block of free GPUs of this SKU is {}, in region {}; ask for fewer, or wait with queue_seconds.",
            best.largest_free, best.region_code
        ),
        None => "No GPU of this SKU is free; wait with queue_seconds, or try again later.".to_owned(),
    }
}

fn gpus(count: u32) -> String {
    if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") }
}

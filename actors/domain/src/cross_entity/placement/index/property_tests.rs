//! The index against a naive model: the committed nodes as a list that is searched whole. Messages are lost, repeated and out of order.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;
use uuid::Uuid;

const REGIONS: [&str; 3] = ["a", "b", "c"];
const NODES: u128 = 6;
const ALLOCATIONS: u128 = 4;

#[derive(Clone, Debug)]
enum Step {
    /// The node commits this; `true`: its message arrives.
    Commit(u128, NodeCapacity, bool),
    /// The message of a commit, by its number, arrives late or again.
    Redeliver(prop::sample::Index),
    Refuse(u128),
    Reserve(u128, u128, u32),
    /// A check reads the node from the database.
    Check(u128),
}

fn sku(n: u128) -> SkuId {
    SkuId(Uuid::from_u128(n))
}

fn node_id(n: u128) -> NodeId {
    NodeId(Uuid::from_u128(n))
}

fn allocation_id(n: u128) -> AllocationId {
    AllocationId(Uuid::from_u128(n))
}

prop_compose! {
    fn capacity_of(n: u128)(
        sku_of in 0u128..2, region in 0usize..3, free in 0u32..9, withheld in 0u32..3, whole: bool,
        holders in prop::collection::btree_set(0u128..ALLOCATIONS, 0..3),
    ) -> NodeCapacity {
        NodeCapacity {
            node_id: node_id(n),
            sku_id: sku(sku_of),
            region_code: REGIONS[region].to_owned(),
            gpus_free: free,
            gpus_withheld: withheld,
            is_reimageable: whole && free > 0,
            holders: holders.into_iter().map(allocation_id).collect(),
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..NODES, any::<bool>()).prop_flat_map(|(n, arrives)| {
            capacity_of(n).prop_map(move |capacity| Step::Commit(n, capacity, arrives))
        }),
        2 => any::<prop::sample::Index>().prop_map(Step::Redeliver),
        1 => (0..NODES).prop_map(Step::Refuse),
        1 => (0..NODES, 0..ALLOCATIONS, 1u32..9).prop_map(|(n, allocation, gpus)| Step::Reserve(n, allocation, gpus)),
        1 => (0..NODES).prop_map(Step::Check),
    ]
}

prop_compose! {
    fn request()(
        allocation in 0u128..ALLOCATIONS, sku_of in 0u128..2, named in prop::option::weighted(0.2, 0..NODES),
        region in prop::option::of(0usize..3), gpu_count in 1u32..10, reimages: bool,
    ) -> PlacementRequest<'static> {
        PlacementRequest {
            allocation_id: allocation_id(allocation),
            sku_id: sku(sku_of),
            node_id: named.map(node_id),
            region_code: region.map(|region| REGIONS[region]),
            gpu_count,
            reimages,
        }
    }
}

/// The committed nodes, and all messages that their commits have sent.
#[derive(Default)]
struct Committed {
    nodes: BTreeMap<NodeId, (i64, NodeCapacity)>,
    messages: Vec<(i64, NodeCapacity)>,
}

impl Committed {
    /// The nodes that fit, by holder and size: a scan of all.
    fn fitting(&self, wanted: &PlacementRequest<'_>) -> BTreeMap<NodeId, (bool, u32)> {
        let capacities = self.nodes.values().map(|(_, capacity)| capacity);
        let named = capacities.filter(|node| {
            node.sku_id == wanted.sku_id
                && wanted.node_id.is_none_or(|it| it == node.node_id)
                && wanted.region_code.is_none_or(|it| it == node.region_code)
        });
        let fits = |node: &&NodeCapacity| {
            let whole = node.is_reimageable && node.gpus_free == wanted.gpu_count;
            let room = if wanted.reimages { whole } else { node.gpus_free >= wanted.gpu_count };
            room || node.holders.contains(&wanted.allocation_id)
        };
        let key = |node: &NodeCapacity| (!node.holders.contains(&wanted.allocation_id), node.gpus_free);
        named.filter(fits).map(|node| (node.node_id, key(node))).collect()
    }
}

fn run(index: &mut PlacementIndex, committed: &mut Committed, step: Step) {
    match step {
        Step::Commit(n, capacity, arrives) => {
            let version = committed.nodes.get(&node_id(n)).map_or(1, |(version, _)| version + 1);
            committed.nodes.insert(node_id(n), (version, capacity.clone()));
            committed.messages.push((version, capacity.clone()));
            if arrives {
                index.apply(version, capacity);
            }
        }
        Step::Redeliver(which) => {
            if !committed.messages.is_empty() {
                let (version, capacity) = which.get(&committed.messages).clone();
                index.apply(version, capacity);
            }
        }
        Step::Refuse(n) => index.doubt(node_id(n)),
        Step::Reserve(n, allocation, gpus) => index.record_reservation(node_id(n), allocation_id(allocation), gpus),
        Step::Check(n) => {
            if let Some((version, capacity)) = committed.nodes.get(&node_id(n)).cloned() {
                index.apply(version, capacity);
            }
        }
    }
}

/// All nodes in the order in which the index would ask them.
fn order(index: &PlacementIndex, wanted: &PlacementRequest<'_>) -> Vec<NodeId> {
    let (mut asked, mut order) = (BTreeSet::new(), Vec::new());
    while let Some(node_id) = index.next(wanted, &asked) {
        assert!(asked.insert(node_id), "{node_id} is asked twice");
        order.push(node_id);
    }
    order
}

/// Whether a node that has refused has room by what is known of it: a scan of all.
fn has_doubted_room(index: &PlacementIndex, wanted: &PlacementRequest<'_>) -> bool {
    let fits = |node: &IndexedNode| wanted.admits(&node.capacity) && wanted.has_room(&node.capacity);
    index.nodes.values().any(|node| node.certainty == Certainty::Doubted && fits(node))
}

fn rebuilt(index: &PlacementIndex) -> PlacementIndex {
    let mut other = PlacementIndex::default();
    for node in index.nodes.values().rev() {
        other.insert(node.clone());
    }
    other
}

proptest! {
    #[test]
    fn versions_that_are_read_in_pages_are_those_of_all_nodes(
        nodes in prop::collection::vec((0..NODES).prop_flat_map(capacity_of), 0..20), page in 1usize..4,
    ) {
        let mut index = PlacementIndex::default();
        for capacity in nodes {
            index.apply(1, capacity);
        }
        let of_sku: Vec<_> = index.nodes.values().filter(|node| node.capacity.sku_id == sku(0)).map(|node| node.capacity.node_id).collect();
        let mut read: Vec<NodeId> = Vec::new();
        loop {
            let page: Vec<_> = index.versions(sku(0), read.last().copied()).take(page).map(|known| known.node_id).collect();
            if page.is_empty() {
                break;
            }
            read.extend(page);
        }
        prop_assert_eq!(read, of_sku);
    }

    #[test]
    fn index_asks_the_nodes_of_a_full_scan_once_it_was_checked(
        steps in prop::collection::vec(step(), 0..60), wanted in prop::collection::vec(request(), 8),
    ) {
        let (mut index, mut committed) = (PlacementIndex::default(), Committed::default());
        for step in steps {
            run(&mut index, &mut committed, step);
            prop_assert_eq!(&rebuilt(&index), &index, "its parts agree");
            for (node_id, node) in &index.nodes {
                prop_assert!(node.version <= committed.nodes[node_id].0, "no version is invented");
                let is_committed = committed.messages.contains(&(node.version, node.capacity.clone()));
                prop_assert!(is_committed || node.certainty != Certainty::Committed, "what is certain was committed");
            }
            for wanted in &wanted {
                let none = BTreeSet::new();
                prop_assert_eq!(index.is_room_doubted(wanted, &none), has_doubted_room(&index, wanted), "{:?}", wanted);
            }
        }
        // A check reads all.
        for (version, capacity) in committed.nodes.values() {
            index.apply(*version, capacity.clone());
        }
        for wanted in &wanted {
            let (asked, fitting) = (order(&index, wanted), committed.fitting(wanted));
            let keys: Vec<_> = asked.iter().map(|node_id| fitting.get(node_id)).collect();
            prop_assert!(keys.iter().all(Option::is_some) && keys.len() == fitting.len(), "{:?} of {:?}", asked, fitting);
            // Holders come in no order among themselves.
            let others: Vec<_> = keys.iter().flatten().map(|(not_holder, free)| (not_holder, if *not_holder { *free } else { 0 })).collect();
            prop_assert!(others.is_sorted(), "holders first, then the tightest: {:?}", keys);
        }
    }

    #[test]
    fn messages_in_any_order_end_in_the_same_index(
        steps in prop::collection::vec((0..NODES).prop_flat_map(capacity_of), 1..20),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..60),
    ) {
        let (mut in_order, mut committed) = (PlacementIndex::default(), Committed::default());
        for capacity in steps {
            let n = capacity.node_id.0.as_u128();
            run(&mut in_order, &mut committed, Step::Commit(n, capacity, true));
        }
        let mut shuffled = PlacementIndex::default();
        let repeated = places.iter().map(|place| place.get(&committed.messages));
        for (version, capacity) in repeated.chain(committed.messages.iter().rev()) {
            shuffled.apply(*version, capacity.clone());
        }
        prop_assert_eq!(shuffled, in_order);
    }
}

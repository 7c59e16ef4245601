use super::*;
use std::collections::BTreeSet;
use uuid::Uuid;

const SKU: SkuId = SkuId(Uuid::from_u128(0x5));
const ALLOCATION: AllocationId = AllocationId(Uuid::from_u128(0xA));

fn node(n: u128, region: &str, free: u32) -> NodeCapacity {
    NodeCapacity { region_code: region.into(), gpus_free: free, ..NodeCapacity::none(NodeId(Uuid::from_u128(n)), SKU) }
}

fn withheld(n: u128, region: &str, gpus: u32) -> NodeCapacity {
    NodeCapacity { gpus_withheld: gpus, ..node(n, region, 0) }
}

fn wanted(gpu_count: u32) -> PlacementRequest<'static> {
    PlacementRequest {
        allocation_id: ALLOCATION,
        sku_id: SKU,
        node_id: None,
        region_code: None,
        gpu_count,
        reimages: false,
    }
}

fn index(nodes: &[NodeCapacity]) -> PlacementIndex {
    let mut index = PlacementIndex::default();
    for node in nodes {
        index.apply(1, node.clone());
    }
    index
}

fn order(nodes: &[NodeCapacity], wanted: &PlacementRequest<'_>) -> Vec<NodeId> {
    let (index, mut asked, mut order) = (index(nodes), BTreeSet::new(), Vec::new());
    while let Some(node_id) = index.next(wanted, &asked) {
        asked.insert(node_id);
        order.push(node_id);
    }
    order
}

fn suggested(nodes: &[NodeCapacity], wanted: &PlacementRequest<'_>) -> String {
    index(nodes).suggestion(wanted)
}

#[test]
fn the_tightest_fit_is_asked_first() {
    let nodes = [node(1, "a", 8), node(2, "a", 2), node(3, "b", 4)];
    assert_eq!(order(&nodes, &wanted(3)), [nodes[2].node_id, nodes[0].node_id]);
}

#[test]
fn node_that_holds_the_allocation_is_asked_first() {
    let mut nodes = [node(1, "a", 4), node(2, "a", 0)];
    nodes[1].holders.insert(ALLOCATION);
    assert_eq!(order(&nodes, &wanted(4)), [nodes[1].node_id, nodes[0].node_id]);
}

#[test]
fn only_the_named_node_is_asked() {
    let nodes = [node(1, "a", 4), node(2, "a", 4)];
    let named = PlacementRequest { node_id: Some(nodes[1].node_id), ..wanted(1) };
    assert_eq!(order(&nodes, &named), [nodes[1].node_id]);
}

#[test]
fn only_nodes_of_the_sku_and_the_region_are_asked() {
    let other = NodeCapacity { sku_id: SkuId(Uuid::from_u128(0x6)), ..node(1, "a", 4) };
    let nodes = [other, node(2, "b", 4), node(3, "a", 4)];
    let here = PlacementRequest { region_code: Some("a"), ..wanted(1) };
    assert_eq!(order(&nodes, &here), [nodes[2].node_id]);
}

#[test]
fn whole_node_of_the_exact_size_is_asked_for_an_allocation_that_reimages() {
    let whole = |n, free| NodeCapacity { is_reimageable: true, ..node(n, "a", free) };
    let nodes = [whole(1, 8), whole(2, 4), node(3, "a", 4)];
    let reimaged = PlacementRequest { reimages: true, ..wanted(4) };
    assert_eq!(order(&nodes, &reimaged), [nodes[1].node_id]);
    assert_eq!(order(&nodes, &PlacementRequest { reimages: true, ..wanted(2) }), []);
}

#[test]
fn simultaneous_requests_ask_different_nodes_first() {
    let nodes: Vec<_> = (0..64).map(|n| node(n, "a", 8)).collect();
    let index = index(&nodes);
    let first = |n: u128| {
        let allocation_id = AllocationId(Uuid::from_u128(n << 64));
        index.next(&PlacementRequest { allocation_id, ..wanted(8) }, &BTreeSet::new())
    };
    let distinct: BTreeSet<_> = (0..64).map(first).collect();
    // By chance it is one half: a node is as likely as the gap before it is wide.
    assert!(distinct.len() > 20, "64 requests ask {} nodes first", distinct.len());
}

#[test]
fn refused_node_is_asked_again_after_a_newer_commit_alone() {
    let one = node(1, "a", 8);
    let mut index = index(std::slice::from_ref(&one));
    let next = |index: &PlacementIndex| index.next(&wanted(1), &BTreeSet::new());
    index.doubt(one.node_id);
    assert_eq!(next(&index), None);
    assert!(index.version(one.node_id).is_some_and(|it| !it.is_certain), "a check reads it");
    assert_eq!(index.apply(0, one.clone()), IndexUpdate::Known);
    assert_eq!(next(&index), None, "an older message says nothing");
    assert_eq!(index.apply(2, NodeCapacity { gpus_free: 1, ..one.clone() }), IndexUpdate::Changed);
    assert_eq!(next(&index), Some(one.node_id));
}

#[test]
fn reservation_counts_before_its_commit_is_known() {
    let one = node(1, "a", 4);
    let mut index = index(std::slice::from_ref(&one));
    index.record_reservation(one.node_id, ALLOCATION, 3);
    // A repeated attempt of the same allocation takes no more.
    index.record_reservation(one.node_id, ALLOCATION, 3);
    let other = PlacementRequest { allocation_id: AllocationId(Uuid::from_u128(0xB)), ..wanted(1) };
    assert_eq!(index.next(&other, &BTreeSet::new()), Some(one.node_id));
    assert_eq!(index.next(&PlacementRequest { gpu_count: 2, ..other.clone() }, &BTreeSet::new()), None);
    let committed = NodeCapacity { gpus_free: 0, holders: [ALLOCATION].into(), ..one };
    assert_eq!(index.apply(2, committed), IndexUpdate::Changed);
    assert_eq!(index.next(&other, &BTreeSet::new()), None);
}

#[test]
fn the_suggestion_names_another_region_that_has_room() {
    let here = PlacementRequest { region_code: Some("a"), ..wanted(4) };
    assert!(suggested(&[node(1, "a", 1), node(2, "b", 8)], &here).contains("Region b"));
}

#[test]
fn the_suggestion_never_asks_for_fewer_than_are_free() {
    let nodes = [node(1, "a", 8), node(2, "b", 2)];
    // The node has room by the index, and has refused.
    let expected =
        "A node of this SKU in region a has 8 GPUs free, which could not be reserved at this moment; try again.";
    assert_eq!(suggested(&nodes, &wanted(3)), expected);
    let named = PlacementRequest { node_id: Some(nodes[1].node_id), ..wanted(3) };
    assert_eq!(suggested(&nodes, &named), "Another node of this SKU has room; leave node_id out.");
    let same = PlacementRequest { node_id: Some(nodes[0].node_id), ..wanted(3) };
    assert!(suggested(&nodes, &same).contains("try again"), "{}", suggested(&nodes, &same));
    let more = suggested(&nodes, &wanted(9));
    assert!(more.starts_with("The largest block of free GPUs of this SKU is 8, in region a; ask for fewer"), "{more}");
}

#[test]
fn refusal_names_the_gpus_that_health_alerts_withhold() {
    let alone = [withheld(1, "a", 1)];
    assert_eq!(
        suggested(&alone, &wanted(1)),
        "No GPU of this SKU is free; wait with queue_seconds, or try again later. 1 GPU would be free, but a health alert of its \
         node prevents new allocations."
    );
    let among = [withheld(1, "a", 4), node(2, "a", 2), withheld(3, "b", 3)];
    let text = suggested(&among, &wanted(4));
    assert!(text.starts_with("The largest block of free GPUs of this SKU is 2, in region a;"), "{text}");
    assert!(
        text.ends_with("7 GPUs would be free, but health alerts of their nodes prevent new allocations."),
        "{text}"
    );
    // Nodes outside the request are not mentioned.
    let here = PlacementRequest { region_code: Some("b"), ..wanted(4) };
    assert!(suggested(&among, &here).contains(" 3 GPUs would be free"), "{}", suggested(&among, &here));
    let named = PlacementRequest { node_id: Some(among[1].node_id), ..wanted(4) };
    assert!(!suggested(&among, &named).contains("would be free"), "{}", suggested(&among, &named));
    let faulty = PlacementRequest { node_id: Some(among[0].node_id), ..wanted(4) };
    assert!(suggested(&among, &faulty).contains(" 4 GPUs would be free"), "{}", suggested(&among, &faulty));
}

#[test]
fn suggestion_for_an_allocation_that_reimages_names_a_whole_node() {
    let reimaged = PlacementRequest { reimages: true, ..wanted(2) };
    let nodes = [NodeCapacity { is_reimageable: true, ..node(1, "a", 4) }, node(2, "b", 8)];
    assert!(suggested(&nodes, &reimaged).contains("one with 4 GPUs in region a"), "{}", suggested(&nodes, &reimaged));
    assert!(suggested(&nodes[1..], &reimaged).contains("is free as a whole"), "{}", suggested(&nodes[1..], &reimaged));
}

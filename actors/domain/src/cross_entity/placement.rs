//! Placement of an allocation: on the requested node, or best fit over the nodes of the SKU and region. The choice is a proposal; the
//! node's own actor decides whether it reserves (design, I2).

use crate::id::NodeId;
use crate::node::Node;

/// A node as a candidate of a placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub node_id: NodeId,
    pub region_code: String,
    pub gpus_free: u32,
    /// GPUs that would be free without an alert of the node's agent that prevents new allocations.
    pub gpus_withheld: u32,
    /// It is free as a whole, and can be reimaged after a tenant.
    pub is_reimageable: bool,
    /// It holds devices for this allocation already, from an earlier attempt.
    pub holds_it: bool,
}

impl Candidate {
    #[must_use]
    pub fn of(node: &Node, allocation_id: crate::AllocationId) -> Self {
        Self {
            node_id: node.id,
            region_code: node.registration.region_code.clone(),
            gpus_free: node.gpus_free(),
            gpus_withheld: node.gpus_withheld(),
            is_reimageable: node.is_reimageable_as_a_whole(),
            holds_it: node.holds.contains_key(&allocation_id),
        }
    }
}

/// The requirements of a placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementRequest<'a> {
    pub node_id: Option<NodeId>,
    pub region_code: Option<&'a str>,
    pub gpu_count: u32,
    /// The whole node, which is reimaged afterwards.
    pub reimages: bool,
}

impl PlacementRequest<'_> {
    /// Whether the candidate meets the requirements, apart from free GPUs.
    fn fits(&self, candidate: &Candidate) -> bool {
        (candidate.holds_it || !self.reimages || (candidate.is_reimageable && candidate.gpus_free == self.gpu_count))
            && self.node_id.is_none_or(|node_id| node_id == candidate.node_id)
            && self.region_code.is_none_or(|region| region == candidate.region_code)
    }
}

/// The nodes to ask, in this order: one that holds devices for the allocation already, then the tightest fit, so that large requests find
/// room later. Equal fits are ordered by `spread`, so that simultaneous requests do not all ask the same node.
#[must_use]
pub fn order(candidates: &[Candidate], wanted: &PlacementRequest<'_>, spread: u128) -> Vec<NodeId> {
    let mut fitting: Vec<_> = candidates
        .iter()
        .filter(|candidate| candidate.holds_it || candidate.gpus_free >= wanted.gpu_count)
        .filter(|candidate| wanted.fits(candidate))
        .collect();
    fitting.sort_by_key(|candidate| {
        (!candidate.holds_it, candidate.gpus_free, candidate.node_id.0.as_u128().wrapping_mul(spread | 1))
    });
    fitting.into_iter().map(|candidate| candidate.node_id).collect()
}

/// An alternative, in a sentence for the user, and the GPUs that a fault withholds, in another.
#[must_use]
pub fn suggestion(candidates: &[Candidate], wanted: &PlacementRequest<'_>) -> String {
    if wanted.reimages {
        return suggestion_of_whole_nodes(candidates);
    }
    let withheld: u32 = candidates.iter().filter(|it| wanted.fits(it)).map(|it| it.gpus_withheld).sum();
    let instead = instead(candidates, wanted);
    match withheld {
        0 => instead,
        1 => format!("{instead} 1 GPU would be free, but a health alert of its node prevents new allocations."),
        more => {
            format!("{instead} {more} GPUs would be free, but health alerts of their nodes prevent new allocations.")
        }
    }
}

/// The alternative to an allocation that is isolated by reimage.
fn suggestion_of_whole_nodes(candidates: &[Candidate]) -> String {
    let whole = candidates.iter().filter(|candidate| candidate.is_reimageable);
    match whole.max_by_key(|candidate| candidate.gpus_free) {
        Some(best) => format!(
            "The policy allocation.isolation_model is full-reimage for you: a whole node is allocated, such as one with {} GPUs in \
             region {}; ask for that many.",
            best.gpus_free, best.region_code
        ),
        None => "The policy allocation.isolation_model is full-reimage for you, and no node of this SKU that can be reimaged is free as a \
                 whole; wait with queue_seconds, or have an administrator set the policy to user-revoke."
            .to_owned(),
    }
}

fn instead(candidates: &[Candidate], wanted: &PlacementRequest<'_>) -> String {
    let most = |here: &dyn Fn(&&Candidate) -> bool| {
        candidates.iter().filter(here).max_by_key(|candidate| candidate.gpus_free).filter(|best| best.gpus_free > 0)
    };
    if let Some(region) = wanted.region_code
        && let Some(elsewhere) =
            most(&|candidate| candidate.region_code != region && candidate.gpus_free >= wanted.gpu_count)
    {
        return format!("Region {} has room for {} of this SKU.", elsewhere.region_code, gpus(wanted.gpu_count));
    }
    match most(&|_| true) {
        // The node has taken another tenant since, or is out of service.
        Some(best) if best.gpus_free >= wanted.gpu_count && wanted.fits(best) => format!(
            "A node of this SKU in region {} has {} free, which could not be reserved at this moment; try again.",
            best.region_code,
            gpus(best.gpus_free)
        ),
        Some(best) if wanted.node_id.is_some() && best.gpus_free >= wanted.gpu_count => {
            "Another node of this SKU has room; leave node_id out.".to_owned()
        }
        Some(best) => format!(
            "The largest block of free GPUs of this SKU is {}, in region {}; ask for fewer, or wait with queue_seconds.",
            best.gpus_free, best.region_code
        ),
        None => "No GPU of this SKU is free; wait with queue_seconds, or try again later.".to_owned(),
    }
}

fn gpus(count: u32) -> String {
    if count == 1 { "1 GPU".to_owned() } else { format!("{count} GPUs") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use uuid::Uuid;

    fn node(n: u128, region: &str, free: u32) -> Candidate {
        Candidate {
            node_id: NodeId(Uuid::from_u128(n)),
            region_code: region.into(),
            gpus_free: free,
            gpus_withheld: 0,
            is_reimageable: false,
            holds_it: false,
        }
    }

    fn wanted(gpu_count: u32) -> PlacementRequest<'static> {
        PlacementRequest { node_id: None, region_code: None, gpu_count, reimages: false }
    }

    #[test]
    fn the_tightest_fit_is_asked_first() {
        let candidates = [node(1, "a", 8), node(2, "a", 2), node(3, "a", 4)];
        let order = order(&candidates, &wanted(3), 1);
        assert_eq!(order, [candidates[2].node_id, candidates[0].node_id]);
    }

    #[test]
    fn node_that_holds_the_allocation_is_asked_first() {
        let mut candidates = [node(1, "a", 4), node(2, "a", 0)];
        candidates[1].holds_it = true;
        assert_eq!(order(&candidates, &wanted(4), 1).first(), Some(&candidates[1].node_id));
    }

    #[test]
    fn only_the_named_node_is_asked() {
        let candidates = [node(1, "a", 4), node(2, "a", 4)];
        let named = PlacementRequest { node_id: Some(candidates[1].node_id), ..wanted(1) };
        assert_eq!(order(&candidates, &named, 1), [candidates[1].node_id]);
    }

    #[test]
    fn the_suggestion_names_another_region_that_has_room() {
        let candidates = [node(1, "a", 1), node(2, "b", 8)];
        let here = PlacementRequest { region_code: Some("a"), ..wanted(4) };
        assert!(suggestion(&candidates, &here).contains("Region b"));
    }

    #[test]
    fn the_suggestion_never_asks_for_fewer_than_are_free() {
        let candidates = [node(1, "a", 8), node(2, "b", 2)];
        // The node had room at the snapshot, and has refused.
        let text = suggestion(&candidates, &wanted(3));
        let expected =
            "A node of this SKU in region a has 8 GPUs free, which could not be reserved at this moment; try again.";
        assert_eq!(text, expected);
        let named = PlacementRequest { node_id: Some(candidates[1].node_id), ..wanted(3) };
        assert_eq!(suggestion(&candidates, &named), "Another node of this SKU has room; leave node_id out.");
        let same = PlacementRequest { node_id: Some(candidates[0].node_id), ..wanted(3) };
        assert!(suggestion(&candidates, &same).contains("try again"), "{}", suggestion(&candidates, &same));
        let more = suggestion(&candidates, &wanted(9));
        assert!(
            more.starts_with("The largest block of free GPUs of this SKU is 8, in region a; ask for fewer"),
            "{more}"
        );
    }

    #[test]
    fn refusal_names_the_gpus_that_health_alerts_withhold() {
        let withheld = |n, region, gpus| Candidate { gpus_withheld: gpus, ..node(n, region, 0) };
        let alone = [withheld(1, "a", 1)];
        assert_eq!(
            suggestion(&alone, &wanted(1)),
            "No GPU of this SKU is free; wait with queue_seconds, or try again later. 1 GPU would be free, but a health alert of its \
             node prevents new allocations."
        );
        let among = [withheld(1, "a", 4), node(2, "a", 2), withheld(3, "b", 3)];
        let text = suggestion(&among, &wanted(4));
        assert!(text.starts_with("The largest block of free GPUs of this SKU is 2, in region a;"), "{text}");
        assert!(
            text.ends_with("7 GPUs would be free, but health alerts of their nodes prevent new allocations."),
            "{text}"
        );
        // Candidates outside the request are not mentioned.
        let here = PlacementRequest { region_code: Some("b"), ..wanted(4) };
        assert!(suggestion(&among, &here).contains(" 3 GPUs would be free"), "{}", suggestion(&among, &here));
        let named = PlacementRequest { node_id: Some(among[1].node_id), ..wanted(4) };
        assert!(!suggestion(&among, &named).contains("would be free"), "{}", suggestion(&among, &named));
    }

    proptest! {
        #[test]
        fn only_nodes_with_room_are_asked_and_each_once(
            free in prop::collection::vec(0u32..9, 0..20), count in 1u32..9, spread: u128
        ) {
            let candidates: Vec<_> = free.iter().zip(1u128..).map(|(free, n)| node(n, "a", *free)).collect();
            let asked = order(&candidates, &wanted(count), spread);
            let with_room = candidates.iter().filter(|c| c.gpus_free >= count).count();
            prop_assert_eq!(asked.len(), with_room);
            let unique: std::collections::BTreeSet<_> = asked.iter().collect();
            prop_assert_eq!(unique.len(), asked.len());
        }
    }
}

//! Detects a partitioned member: one that reaches Postgres, and that the others do not receive over NATS, while some of them receive
//! each other (design 6). Its entities cannot be reached, so that it must not own any.
//!
//! Every member writes in its heartbeat in Postgres which members it receives over NATS, itself among them: that it receives itself
//! shows that its own link works. From all these rows each member computes the graph of connections. A member that is partitioned
//! withdraws itself; the others read so in Postgres, and no member decides it about another (`deploy/decisions/0005`).

use domain::MemberId;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Four heartbeats: a member without a message for so long counts as not received.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a member must be partitioned, or connected again, before its status changes. After a restart of the NATS server the members
/// reconnect one after the other, and no shard should move for that.
const STABLE_FOR: Duration = Duration::from_secs(3);

/// The members that each living member receives, by its own row. Members that have not written so (yet, or in an earlier release) are
/// absent.
pub type ConnectivityGraph = BTreeMap<MemberId, BTreeSet<MemberId>>;

/// Whether `me` is partitioned while others receive each other. `None` where that is undecided, and every member keeps its status: no
/// member receives any, since NATS is down for all; or the cluster has split into equal parts.
#[must_use]
pub fn is_partitioned(me: MemberId, graph: &ConnectivityGraph) -> Option<bool> {
    let own = graph.contains_key(&me).then(|| component_of(me, graph))?;
    let size = |component: &BTreeSet<MemberId>| if exchanges_messages(component, graph) { component.len() } else { 0 };
    // Each component once: with each of its members they would cost the third power of the members.
    let mut left: BTreeSet<MemberId> = graph.keys().filter(|id| !own.contains(id)).copied().collect();
    let mut largest = 0;
    while let Some(member) = left.first() {
        let component = component_of(*member, graph);
        left.retain(|id| !component.contains(id));
        largest = largest.max(size(&component));
    }
    match largest.cmp(&size(&own)) {
        Ordering::Greater => Some(true),
        Ordering::Less => Some(false),
        Ordering::Equal => None,
    }
}

/// The connected component of a member: those that reach each other, directly or through others, where each link works both ways.
fn component_of(member: MemberId, graph: &ConnectivityGraph) -> BTreeSet<MemberId> {
    let receives = |a: &MemberId, b: &MemberId| graph.get(a).is_some_and(|received| received.contains(b));
    let mut component = BTreeSet::from([member]);
    let mut newest = vec![member];
    while let Some(next) = newest.pop() {
        let joined = graph.keys().filter(|id| receives(&next, id) && receives(id, &next) && !component.contains(id));
        newest.extend(joined.copied().collect::<Vec<_>>());
        component.extend(newest.iter().copied());
    }
    component
}

fn exchanges_messages(component: &BTreeSet<MemberId>, graph: &ConnectivityGraph) -> bool {
    let receives_itself = |id: &MemberId| graph.get(id).is_some_and(|received| received.contains(id));
    component.len() > 1 || component.iter().any(receives_itself)
}

/// A member's own status: it changes only after the observation was the same for [`STABLE_FOR`].
#[derive(Debug, Default)]
pub struct PartitionDetector {
    partitioned: bool,
    differs_since: Option<Instant>,
}

impl PartitionDetector {
    /// Takes in an observation; returns whether the member withdraws itself.
    pub fn observe(&mut self, partitioned: Option<bool>, now: Instant) -> bool {
        if partitioned.is_none_or(|partitioned| partitioned == self.partitioned) {
            self.differs_since = None;
        } else if now.duration_since(*self.differs_since.get_or_insert(now)) >= STABLE_FOR {
            (self.partitioned, self.differs_since) = (!self.partitioned, None);
        }
        self.partitioned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    fn id(n: u128) -> MemberId {
        MemberId(Uuid::from_u128(n))
    }

    /// `graph_of(&[(1, &[1, 2]), …])`: member 1 receives itself and 2.
    fn graph_of(who: &[(u128, &[u128])]) -> ConnectivityGraph {
        who.iter().map(|(me, received)| (id(*me), received.iter().map(|n| id(*n)).collect())).collect()
    }

    fn partitioned_members(graph: &ConnectivityGraph) -> Vec<u128> {
        graph.keys().filter(|id| is_partitioned(**id, graph) == Some(true)).map(|id| id.0.as_u128()).collect()
    }

    #[test]
    fn member_unheard_by_a_connected_majority_is_partitioned() {
        assert_eq!(partitioned_members(&graph_of(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[])])), [3]);
        assert_eq!(
            partitioned_members(&graph_of(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[3])])),
            [3],
            "it exchanges messages with itself alone"
        );
        assert_eq!(
            partitioned_members(&graph_of(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[1, 2])])),
            [3],
            "it receives and is not received"
        );
        assert_eq!(partitioned_members(&graph_of(&[(1, &[1]), (2, &[])])), [2], "of two, the one whose link is dead");
    }

    #[test]
    fn outage_of_nats_for_all_partitions_no_member() {
        for graph in [graph_of(&[(1, &[]), (2, &[]), (3, &[])]), graph_of(&[(1, &[])])] {
            assert!(graph.keys().all(|id| is_partitioned(*id, &graph).is_none()));
        }
    }

    #[test]
    fn split_into_equal_parts_partitions_no_member() {
        assert!(partitioned_members(&graph_of(&[(1, &[1, 2]), (2, &[1, 2]), (3, &[3, 4]), (4, &[3, 4])])).is_empty());
        assert!(partitioned_members(&graph_of(&[(1, &[1]), (2, &[2])])).is_empty());
    }

    #[test]
    fn member_without_a_list_of_received_members_is_undecided() {
        let graph = graph_of(&[(1, &[1, 2]), (2, &[1, 2])]);
        assert_eq!(is_partitioned(id(3), &graph), None);
    }

    #[test]
    fn short_silence_does_not_change_the_partition_status() {
        let (mut detector, begin) = (PartitionDetector::default(), Instant::now());
        let mut observe =
            |partitioned, half_steady| detector.observe(partitioned, begin + STABLE_FOR / 2 * half_steady);
        assert!(!observe(Some(true), 0));
        assert!(!observe(Some(true), 1));
        assert!(!observe(Some(false), 1));
        assert!(!observe(Some(true), 2), "the time starts again");
        assert!(observe(Some(true), 4));
        assert!(observe(None, 9), "a partitioned member stays so while its status is undecided");
        assert!(observe(Some(false), 10));
        assert!(!observe(Some(false), 12));
    }

    #[test]
    fn some_member_is_never_partitioned_for_any_graph_of_four() {
        for bits in (0..1_u32 << 16).step_by(5) {
            let received = |me: u32| (0..4).filter(move |other| bits >> (me * 4 + other) & 1 == 1);
            let graph: ConnectivityGraph =
                (0..4).map(|me| (id(me.into()), received(me).map(|other| id(other.into())).collect())).collect();
            assert!(partitioned_members(&graph).len() < 4, "{graph:?}");
        }
    }
}

//! Which of its free GPUs a node gives to an allocation (decision 0113).

use super::ReportedGpu;
use crate::hardware::{GpuDevice, GpuLocality};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// So many of the free GPUs, in the order of their index; all of them, if there are less. They are of one NVLink domain on one NUMA node, else of
/// one domain, else of one NUMA node, where any has enough free ones; of several, the one with the fewest, so that larger ones stay whole.
pub(super) fn closest(free: Vec<&ReportedGpu>, count: usize) -> Vec<GpuDevice> {
    let near = smallest_group(&free, |at| Some((at.nvlink_domain, at.numa_node)), count)
        .or_else(|| smallest_group(&free, linked, count).map(|group| largest_first(group, socket)))
        .or_else(|| smallest_group(&free, socket, count).map(|group| largest_first(group, linked)))
        .unwrap_or_else(|| largest_first(free, linked));
    let device = |gpu: &ReportedGpu| GpuDevice { index: gpu.index, uuid: gpu.uuid.clone() };
    let mut devices: Vec<_> = near.into_iter().take(count).map(device).collect();
    devices.sort_unstable();
    devices
}

/// What GPUs have in common; `None` where they are in no group.
type Key = (Option<u32>, Option<u32>);

fn linked(at: GpuLocality) -> Option<Key> {
    at.nvlink_domain.map(|domain| (Some(domain), None))
}

fn socket(at: GpuLocality) -> Option<Key> {
    at.numa_node.map(|node| (None, Some(node)))
}

fn groups<'a>(gpus: &[&'a ReportedGpu], key: fn(GpuLocality) -> Option<Key>) -> BTreeMap<Key, Vec<&'a ReportedGpu>> {
    let mut groups: BTreeMap<Key, Vec<&ReportedGpu>> = BTreeMap::new();
    for gpu in gpus {
        if let Some(key) = key(gpu.locality) {
            groups.entry(key).or_default().push(gpu);
        }
    }
    groups
}

/// The smallest group that has so many.
fn smallest_group<'a>(
    gpus: &[&'a ReportedGpu],
    key: fn(GpuLocality) -> Option<Key>,
    count: usize,
) -> Option<Vec<&'a ReportedGpu>> {
    groups(gpus, key).into_values().filter(|group| group.len() >= count).min_by_key(Vec::len)
}

/// The largest group first, so that the first ones are of few groups. Those in no group are last.
fn largest_first(mut gpus: Vec<&ReportedGpu>, key: fn(GpuLocality) -> Option<Key>) -> Vec<&ReportedGpu> {
    let sizes: BTreeMap<Key, usize> = groups(&gpus, key).into_iter().map(|(key, group)| (key, group.len())).collect();
    gpus.sort_by_key(|gpu| key(gpu.locality).map_or((Reverse(0), None), |key| (Reverse(sizes[&key]), Some(key))));
    gpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn gpu(index: u32, nvlink_domain: Option<u32>, numa_node: Option<u32>) -> ReportedGpu {
        let locality = GpuLocality { numa_node, nvlink_domain };
        ReportedGpu { index, uuid: format!("GPU-{index}"), model: "H100".into(), memory_mib: 80_000, locality }
    }

    /// The indexes of the chosen GPUs out of these free ones: index, NVLink domain, NUMA node.
    fn chosen(free: &[(u32, Option<u32>, Option<u32>)], count: usize) -> Vec<u32> {
        let free: Vec<_> = free.iter().map(|(index, domain, node)| gpu(*index, *domain, *node)).collect();
        closest(free.iter().collect(), count).into_iter().map(|device| device.index).collect()
    }

    #[test]
    fn gpus_whose_topology_is_unknown_are_given_in_the_order_of_their_index() {
        assert_eq!(chosen(&[(1, None, None), (2, None, None), (5, None, None)], 2), [1, 2]);
    }

    #[test]
    fn two_gpus_are_a_bridged_pair_and_one_is_taken_out_of_no_whole_pair() {
        let pairs = [(0, Some(0), Some(0)), (2, Some(2), Some(0)), (3, Some(2), Some(0)), (4, Some(4), Some(1))];
        assert_eq!(chosen(&pairs, 2), [2, 3]);
        assert_eq!(chosen(&pairs, 1), [0]);
        assert_eq!(chosen(&pairs, 3), [0, 2, 3], "they are on one socket");
    }

    #[test]
    fn behind_switches_that_connect_all_gpus_those_of_one_socket_are_given_together() {
        let socket_of = |index| Some(u32::from(index >= 4));
        let free = [0, 1, 2, 5, 6].map(|index| (index, Some(0), socket_of(index)));
        assert_eq!(chosen(&free, 2), [5, 6], "the smaller group");
        assert_eq!(chosen(&free, 3), [0, 1, 2]);
        assert_eq!(chosen(&free, 4), [0, 1, 2, 5], "as many as possible of one socket");
    }

    #[test]
    fn gpus_without_links_are_of_one_socket_where_it_has_enough() {
        assert_eq!(chosen(&[(0, None, Some(0)), (4, None, Some(1)), (5, None, Some(1))], 2), [4, 5]);
    }

    proptest! {
        #[test]
        fn chosen_gpus_are_free_and_of_one_group_where_any_has_enough(
            places in prop::collection::vec((prop::option::of(0_u32..3), prop::option::of(0_u32..2)), 0..16),
            count in 0_usize..17,
        ) {
            let free: Vec<_> = (0..).zip(&places).map(|(index, (domain, node))| gpu(index, *domain, *node)).collect();
            let given = closest(free.iter().collect(), count);
            prop_assert_eq!(given.len(), count.min(free.len()));
            prop_assert!(given.is_sorted_by(|one, next| one.index < next.index));
            let given: BTreeSet<_> = given.into_iter().map(|device| device.uuid).collect();
            let of_given = free.iter().filter(|gpu| given.contains(&gpu.uuid)).map(|gpu| gpu.locality);
            prop_assert_eq!(of_given.clone().count(), given.len());
            let keys: [fn(GpuLocality) -> Option<Key>; 3] =
                [|at| Some((at.nvlink_domain, at.numa_node)), linked, socket];
            let has_enough = |key: &fn(GpuLocality) -> Option<Key>| {
                groups(&free.iter().collect::<Vec<_>>(), *key).values().any(|group| group.len() >= count)
            };
            if let Some(key) = keys.into_iter().find(has_enough).filter(|_| count > 0) {
                let groups: BTreeSet<_> = of_given.map(key).collect();
                prop_assert_eq!(groups.len(), 1, "{:?}", groups);
            }
        }
    }
}

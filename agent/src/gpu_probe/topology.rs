//! What GPUs are near to in the machine: NUMA nodes as the kernel has them, and NVLinks as the driver has them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nvml_wrapper::Device;

use super::child::address_of;

/// The kernel's folder of each device, by its address with the function.
pub(super) const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// A GPU with what is at the other ends of its active NVLinks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LinkedGpu {
    pub(super) index: u32,
    /// `domain:bus:device`.
    pub(super) address: String,
    /// The addresses of GPUs or switches.
    pub(super) remotes: BTreeSet<String>,
}

/// The NUMA node of a GPU's slot; `None` where the kernel knows of none.
pub(super) fn numa_node(address: &str, devices: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(devices.join(format!("{address}.0/numa_node"))).ok()?;
    // A machine with one node says -1.
    text.trim().parse().ok()
}

/// What is at the other ends of these links. The driver does not say it of every link.
pub(super) fn remotes(device: &Device<'_>, active: &[u32]) -> BTreeSet<String> {
    let remote = |link: &u32| device.link_wrapper_for(*link).remote_pci_info().ok().map(|pci| address_of(&pci));
    active.iter().filter_map(remote).collect()
}

/// Of each GPU with links the lowest index of those that it is connected with, directly or over others.
pub(super) fn nvlink_domains(gpus: &[LinkedGpu]) -> BTreeMap<u32, u32> {
    let mut lowest: BTreeMap<&str, u32> = BTreeMap::new();
    let mut is_settled = false;
    while !is_settled {
        is_settled = true;
        for gpu in gpus {
            let ends = || std::iter::once(&gpu.address).chain(&gpu.remotes).map(String::as_str);
            let least = ends().filter_map(|end| lowest.get(end).copied()).fold(gpu.index, u32::min);
            for end in ends() {
                is_settled &= lowest.insert(end, least) == Some(least);
            }
        }
    }
    let of = |gpu: &LinkedGpu| Some((gpu.index, *lowest.get(gpu.address.as_str())?));
    gpus.iter().filter(|gpu| !gpu.remotes.is_empty()).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domains(gpus: &[(&str, &[&str])]) -> Vec<(u32, u32)> {
        let owned = |text: &&str| (*text).to_owned();
        let gpu = |(index, (address, remotes)): (u32, &(&str, &[&str]))| LinkedGpu {
            index,
            address: owned(address),
            remotes: remotes.iter().map(owned).collect(),
        };
        let gpus: Vec<_> = (0..).zip(gpus).map(gpu).collect();
        nvlink_domains(&gpus).into_iter().collect()
    }

    #[test]
    fn bridged_pairs_are_domains_and_a_gpu_without_links_is_in_none() {
        let pairs = [("a", &["c"][..]), ("b", &[]), ("c", &["a"]), ("d", &["e"]), ("e", &["d"])];
        assert_eq!(domains(&pairs), [(0, 0), (2, 0), (3, 3), (4, 3)]);
    }

    #[test]
    fn gpus_on_the_same_switch_and_those_in_a_ring_are_one_domain() {
        let switched = [("a", &["s1", "s2"][..]), ("b", &["s2"]), ("c", &["s1"])];
        assert_eq!(domains(&switched), [(0, 0), (1, 0), (2, 0)]);
        let ring = [("a", &["d", "b"][..]), ("b", &["a", "c"]), ("c", &["b", "d"]), ("d", &["c", "a"])];
        assert_eq!(domains(&ring), [(0, 0), (1, 0), (2, 0), (3, 0)]);
    }

    #[test]
    fn chain_whose_end_is_read_first_and_a_gpu_between_that_cannot_be_read_are_one_domain() {
        assert_eq!(domains(&[("d", &["c"]), ("a", &["b"]), ("c", &["b"])]), [(0, 0), (1, 0), (2, 0)]);
        assert_eq!(domains(&[("a", &["lost"]), ("b", &["lost"])]), [(0, 0), (1, 0)]);
    }

    #[test]
    fn numa_node_is_that_of_the_slot_and_unknown_where_the_kernel_knows_none() {
        let folder = tempfile::tempdir().unwrap();
        for (address, text) in [("0000:3b:00", "1\n"), ("0000:5e:00", "-1\n"), ("0000:86:00", "odd\n")] {
            let device = folder.path().join(format!("{address}.0"));
            std::fs::create_dir(&device).unwrap();
            std::fs::write(device.join("numa_node"), text).unwrap();
        }
        let of = |address| numa_node(address, folder.path());
        assert_eq!(["0000:3b:00", "0000:5e:00", "0000:86:00", "0000:d8:00"].map(of), [Some(1), None, None, None]);
    }
}

//! Where the GPUs are that the driver does not read: the kernel module lists all that it has, by PCI address.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::UnreadableGpu;

/// A folder for each GPU, named by its address with the function.
pub(super) const DRIVER_GPUS: &str = "/proc/driver/nvidia/gpus";

/// A GPU that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unreadable {
    pub(super) index: u32,
    /// `domain:bus:device`, where the driver says that much of it.
    pub(super) address: Option<String>,
    pub(super) error: String,
}

/// With their errors for operators. The driver orders its GPUs by address: where as many addresses are left as GPUs, each is known.
pub(super) fn described(
    unreadable: &[Unreadable],
    read: &BTreeSet<String>,
    lost: u32,
    driver: &Path,
) -> Vec<UnreadableGpu> {
    let mut left = addresses(driver);
    left.retain(|address| !read.contains(address));
    left.retain(|address| unreadable.iter().all(|gpu| gpu.address.as_ref() != Some(address)));
    let without = unreadable.iter().filter(|gpu| gpu.address.is_none()).count();
    let is_known = lost == 0 && without == left.len();
    let mut in_order = left.iter();
    let described = unreadable.iter().map(|Unreadable { index, address, error }| {
        let pci_address = match address {
            Some(address) => Some(address),
            None if is_known => in_order.next(),
            None => None,
        };
        let why = match pci_address {
            Some(address) => format!("GPU {index} at {address}: {error}"),
            None if left.is_empty() => format!("GPU {index}: {error}"),
            None => {
                let left = left.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
                format!("GPU {index}, which is one of those at {left}: {error}")
            }
        };
        UnreadableGpu { index: *index, pci_address: pci_address.cloned(), why }
    });
    described.collect()
}

fn addresses(driver: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(driver).into_iter().flatten().flatten();
    let address = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        name.split_once('.').map(|(address, _function)| address.to_ascii_lowercase())
    };
    entries.filter_map(address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreadable(index: u32, address: Option<&str>) -> Unreadable {
        Unreadable { index, address: address.map(str::to_owned), error: "an internal driver error occurred".to_owned() }
    }

    #[test]
    fn gpu_that_cannot_be_read_is_named_by_its_address_where_anything_tells_it() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["0000:1B:00.0", "0000:3b:00.0", "0000:5e:00.0"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let read = |addresses: &[&str]| addresses.iter().map(|it| (*it).to_owned()).collect::<BTreeSet<_>>();
        let texts = |described: Vec<UnreadableGpu>| described.into_iter().map(|gpu| gpu.why).collect::<Vec<_>>();
        let of = |gpus: &[Unreadable], known: &[&str], lost| {
            texts(described(gpus, &read(known), lost, folder.path())).join("; ")
        };
        let error = "an internal driver error occurred";
        assert_eq!(of(&[unreadable(1, Some("0000:3b:00"))], &[], 0), format!("GPU 1 at 0000:3b:00: {error}"));
        let left = of(&[unreadable(1, None)], &["0000:1b:00", "0000:5e:00"], 0);
        assert_eq!(left, format!("GPU 1 at 0000:3b:00: {error}"));
        let two = of(&[unreadable(0, None), unreadable(2, None)], &["0000:3b:00"], 0);
        assert_eq!(two, format!("GPU 0 at 0000:1b:00: {error}; GPU 2 at 0000:5e:00: {error}"));
        // A lost GPU has no index.
        let one_of = of(&[unreadable(1, None)], &["0000:1b:00"], 1);
        assert_eq!(one_of, format!("GPU 1, which is one of those at 0000:3b:00, 0000:5e:00: {error}"));
        let unknown = described(&[unreadable(1, None)], &read(&[]), 0, &folder.path().join("none"));
        assert_eq!((&unknown[0].pci_address, texts(unknown.clone())), (&None, vec![format!("GPU 1: {error}")]));
        let derived = described(&[unreadable(1, None)], &read(&["0000:1b:00", "0000:5e:00"]), 0, folder.path());
        assert_eq!(derived[0].pci_address.as_deref(), Some("0000:3b:00"));
    }
}

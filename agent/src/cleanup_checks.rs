//! The checks of a clean-up that every executor makes, whatever isolation it enforces, and their findings.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};
use wire::inventory::DeviceRef;

use crate::gpus::{DeviceUse, Gpus, MemoryUse};

/// Whether any process still computes on the devices: a finding for each. What only the `killed` hold, which wait in the kernel, is the
/// hardware's to free.
#[must_use]
pub fn check_device_processes(gpus: &Gpus, devices: &[DeviceRef], killed: &BTreeSet<u32>) -> Vec<CleanupFinding> {
    check_removed(gpus, devices, CleanupCheck::GpuProcesses, |uuid| match gpus.device_use(uuid) {
        DeviceUse::Idle => (FindingOutcome::Gone, None),
        DeviceUse::BusyWith(pids) if pids.iter().all(|pid| killed.contains(pid)) => {
            let detail = format!("{uuid} is held by processes {pids:?}, which are killed and wait in the kernel");
            (FindingOutcome::Unknown, Some(detail))
        }
        DeviceUse::BusyWith(pids) => (FindingOutcome::Present, Some(format!("{uuid} is used by processes {pids:?}"))),
        DeviceUse::Unknown(why) => (FindingOutcome::Unknown, Some(format!("{uuid}: {why}"))),
    })
}

/// Whether the devices' memory is still in use: a finding for each.
#[must_use]
pub fn check_device_memory(gpus: &Gpus, devices: &[DeviceRef]) -> Vec<CleanupFinding> {
    check_removed(gpus, devices, CleanupCheck::GpuMemory, |uuid| match gpus.memory_use(uuid) {
        MemoryUse::DriverOnly => (FindingOutcome::Gone, None),
        MemoryUse::NotReported => (
            FindingOutcome::Gone,
            Some(format!("{uuid} does not report its memory; no process is left that could hold any")),
        ),
        MemoryUse::Held { mib } => (FindingOutcome::Present, Some(format!("{uuid} holds {mib} MiB"))),
        MemoryUse::Unknown(why) => (FindingOutcome::Unknown, Some(format!("{uuid}: {why}"))),
    })
}

fn check_removed(
    gpus: &Gpus,
    devices: &[DeviceRef],
    what: CleanupCheck,
    at: impl Fn(&str) -> (FindingOutcome, Option<String>),
) -> Vec<CleanupFinding> {
    let simulated = match gpus {
        Gpus::Simulated(_) => Some("simulated devices run no processes"),
        Gpus::Absent { .. } => Some("the node has no GPU driver"),
        Gpus::Nvml(_) => None,
    };
    let finding = |looked_for: &str, (outcome, detail): (FindingOutcome, Option<String>)| CleanupFinding {
        what,
        looked_for: looked_for.to_owned(),
        outcome,
        detail: detail.or_else(|| simulated.map(str::to_owned)),
    };
    if devices.is_empty() {
        return vec![finding("", (FindingOutcome::Gone, Some("the allocation has no device".to_owned())))];
    }
    devices.iter().map(|device| finding(&device.uuid, at(&device.uuid))).collect()
}

/// The finding of a check: nothing, these paths, or that the check failed.
pub fn finding(what: CleanupCheck, looked_for: String, found: io::Result<Vec<String>>) -> CleanupFinding {
    let (outcome, detail) = match found {
        Ok(left) if left.is_empty() => (FindingOutcome::Gone, None),
        Ok(left) => (FindingOutcome::Present, Some(left.join(", "))),
        Err(error) => (FindingOutcome::Unknown, Some(error.to_string())),
    };
    CleanupFinding { what, looked_for, outcome, detail }
}

/// Whether anything is at `path`.
#[must_use]
pub fn check_path_removed(what: CleanupCheck, path: &Path) -> CleanupFinding {
    let found = match path.symlink_metadata() {
        Ok(_) => Ok(vec![path.display().to_string()]),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    finding(what, path.display().to_string(), found)
}

//! The checks of a clean-up that every executor makes, whatever isolation it enforces, and their findings.

use std::io;
use std::path::Path;

use wire::cleanup_proof::{CleanupCheck, CleanupFinding, FindingOutcome};
use wire::inventory::DeviceRef;

use crate::gpus::{DeviceUse, Gpus, MemoryUse};

/// Whether any process still computes on the devices.
#[must_use]
pub fn check_device_processes(gpus: &Gpus, devices: &[DeviceRef]) -> CleanupFinding {
    check_removed(gpus, devices, CleanupCheck::GpuProcesses, |uuid| match gpus.device_use(uuid) {
        DeviceUse::Idle => (FindingOutcome::Gone, None),
        DeviceUse::BusyWith(pids) => (FindingOutcome::Present, Some(format!("{uuid} is used by processes {pids:?}"))),
        DeviceUse::Unknown(why) => (FindingOutcome::Unknown, Some(format!("{uuid}: {why}"))),
    })
}

/// Whether the devices' memory is still in use.
#[must_use]
pub fn check_device_memory(gpus: &Gpus, devices: &[DeviceRef]) -> CleanupFinding {
    check_removed(gpus, devices, CleanupCheck::GpuMemory, |uuid| match gpus.memory_use(uuid) {
        MemoryUse::DriverOnly => (FindingOutcome::Gone, None),
        MemoryUse::Held { mib } => (FindingOutcome::Present, Some(format!("{uuid} holds {mib} MiB"))),
        MemoryUse::Unknown(why) => (FindingOutcome::Unknown, Some(format!("{uuid}: {why}"))),
    })
}

/// The worst outcome over the devices.
fn check_removed(
    gpus: &Gpus,
    devices: &[DeviceRef],
    what: CleanupCheck,
    at: impl Fn(&str) -> (FindingOutcome, Option<String>),
) -> CleanupFinding {
    let looked_for = devices.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>().join(" ");
    let (outcomes, details): (Vec<_>, Vec<_>) = devices.iter().map(|device| at(&device.uuid)).unzip();
    let outcome = [FindingOutcome::Present, FindingOutcome::Unknown].into_iter().find(|worse| outcomes.contains(worse));
    let mut details: Vec<String> = details.into_iter().flatten().collect();
    if details.is_empty() {
        match gpus {
            Gpus::Simulated(_) => details.push("simulated devices run no processes".to_owned()),
            Gpus::Absent { .. } => details.push("the node has no GPU driver".to_owned()),
            Gpus::Nvml(_) => {}
        }
    }
    let detail = (!details.is_empty()).then(|| details.join("; "));
    CleanupFinding { what, looked_for, outcome: outcome.unwrap_or(FindingOutcome::Gone), detail }
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

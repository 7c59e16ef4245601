//! The node's hardware and its load.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use sysinfo::{Disks, System};
use uuid::Uuid;
use wire::heartbeat::{GpuTelemetry, Telemetry};
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, IMAGE_DIGEST_FILE, InstalledSystem, NodeInventory};

use crate::atomic_file::{self, FileError};

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;
/// As much as the control plane accepts of a machine id or an image's digest.
const MAX_SYSTEM_TEXT: u64 = 128;

/// Reads the node's hardware and software; `gpus` are listed already.
#[must_use]
pub fn read(
    gpus: Vec<GpuInfo>,
    gpu_source: GpuSource,
    driver_version: Option<String>,
    executor: ExecutorKind,
    ssh_host_key_fingerprint: Option<String>,
) -> NodeInventory {
    let system = system();
    let cpus = system.as_ref().map_or(&[][..], |system| system.cpus());
    NodeInventory {
        hostname: System::host_name().unwrap_or_else(|_| "unknown".to_owned()),
        kernel: System::kernel_version().unwrap_or_else(|_| "unknown".to_owned()),
        cpu_model: cpus.first().map_or_else(|| "unknown".to_owned(), |cpu| cpu.brand().trim().to_owned()),
        cpu_cores: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        memory_mib: system.as_ref().map_or(0, |system| system.total_memory() / MIB),
        storage_gib: disk_space().map_or(0, |(total, _)| total / GIB),
        gpus,
        gpu_source,
        driver_version,
        executor,
        ssh_host_key_fingerprint,
        system: Some(installed_system(Path::new("/"))),
    }
}

/// What distinguishes the installation below `root` from another one. What cannot be read is not there.
fn installed_system(root: &Path) -> InstalledSystem {
    let first_line = |path: &str| {
        let file = File::open(root.join(path.trim_start_matches('/'))).ok()?;
        let mut text = String::new();
        file.take(MAX_SYSTEM_TEXT).read_to_string(&mut text).ok()?;
        let line = text.lines().next().unwrap_or_default().trim();
        (!line.is_empty()).then(|| line.to_owned())
    };
    InstalledSystem { machine_id: first_line("/etc/machine-id"), image_digest: first_line(IMAGE_DIGEST_FILE) }
}

/// The kernel's boot id.
///
/// # Errors
/// [`FileError`] when the kernel does not provide it.
pub fn boot_id() -> Result<Uuid, FileError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = atomic_file::read_if_there(path)?.unwrap_or_default();
    text.trim().parse().map_err(|error| FileError::at("read", path)(std::io::Error::other(error)))
}

/// Measures load between calls.
pub struct LoadMeter(Mutex<Option<System>>);

impl Default for LoadMeter {
    fn default() -> Self {
        Self(Mutex::new(system()))
    }
}

impl LoadMeter {
    /// Load since the last call (processors) and at this moment (everything else); that of the GPUs is given.
    #[must_use]
    pub fn read(&self, gpus: Vec<GpuTelemetry>) -> Telemetry {
        let mut system = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(system) = system.as_mut() {
            system.refresh_cpu_usage();
            system.refresh_memory();
        }
        Telemetry {
            cpu_percent: system.as_ref().map(System::global_cpu_usage),
            memory_used_mib: system.as_ref().map(|system| system.used_memory() / MIB),
            storage_used_gib: disk_space().map(|(total, available)| total.saturating_sub(available) / GIB),
            gpus,
        }
    }
}

fn system() -> Option<System> {
    let mut system = System::new().ok()?;
    system.refresh_cpu_all();
    system.refresh_memory();
    Some(system)
}

/// Bytes in total and available, each file system counted once.
fn disk_space() -> Option<(u64, u64)> {
    let disks = Disks::new_with_refreshed_list().ok()?;
    let by_device: BTreeMap<_, _> =
        disks.iter().map(|disk| (disk.name().to_owned(), (disk.total_space(), disk.available_space()))).collect();
    Some(by_device.values().fold((0, 0), |sum, disk| (sum.0 + disk.0, sum.1 + disk.1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inventory_of_this_machine_is_plausible() {
        let inventory = read(Vec::new(), GpuSource::None, None, ExecutorKind::Sandbox, None);
        assert!(inventory.cpu_cores > 0 && inventory.memory_mib > 0, "{inventory:?}");
        assert!(boot_id().is_ok());
    }

    #[test]
    fn installation_is_identified_by_its_machine_id_and_the_digest_that_its_image_carries() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(installed_system(root.path()), InstalledSystem { machine_id: None, image_digest: None });
        std::fs::create_dir_all(root.path().join("etc/gpuaas")).unwrap();
        std::fs::write(root.path().join("etc/machine-id"), "0f\n").unwrap();
        std::fs::write(root.path().join("etc/gpuaas/image-digest"), "sha256:1\nmore\n").unwrap();
        let system = installed_system(root.path());
        assert_eq!((system.machine_id.as_deref(), system.image_digest.as_deref()), (Some("0f"), Some("sha256:1")));
        std::fs::write(root.path().join("etc/machine-id"), "\n").unwrap();
        assert_eq!(installed_system(root.path()).machine_id, None, "an image without a machine id");
    }
}

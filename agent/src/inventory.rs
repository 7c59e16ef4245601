//! The node's hardware and its load.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use sysinfo::System;
use wire::heartbeat::{GpuTelemetry, Telemetry};
use wire::inventory::{ExecutorKind, GpuInfo, GpuSource, IMAGE_DIGEST_FILE, InstalledSystem, NodeInventory};

use crate::bounded_reading::BoundedReading;
use crate::finding_log::{Condition, late_readings};
use crate::ssh;
use crate::storage::{Space, Storage};

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;
/// As much as the control plane accepts of a machine id or an image's digest.
const MAX_SYSTEM_TEXT: u64 = 128;

/// The readings of the hardware, the software and the load. Each has a thread of its own: what does not answer is as it was before, and
/// unknown where it never answered.
pub struct InventoryReadings {
    /// The public key of the sshd that admits tenants; `None` where they do not log in by SSH.
    public_host_key: Option<PathBuf>,
    system: BoundedReading<SystemInventory>,
    ssh_host_key: BoundedReading<Option<String>>,
    load: BoundedReading<SystemLoad>,
    meter: Arc<LoadMeter>,
    storage: Storage,
    /// As configured.
    tenant_devices: Vec<String>,
    last: LastInventory,
}

/// As last read.
#[derive(Debug, Default)]
struct LastInventory {
    system: SystemInventory,
    ssh_host_key: Option<String>,
    load: SystemLoad,
    space: Option<Space>,
}

/// What the system says of itself and its processors.
#[derive(Debug, Clone)]
struct SystemInventory {
    hostname: String,
    kernel: String,
    cpu_model: String,
    cpu_cores: u32,
    memory_mib: u64,
    /// `None` where it was not read.
    installed: Option<InstalledSystem>,
}

impl Default for SystemInventory {
    fn default() -> Self {
        let unknown = || "unknown".to_owned();
        let (hostname, kernel, cpu_model) = (unknown(), unknown(), unknown());
        Self { hostname, kernel, cpu_model, cpu_cores: 0, memory_mib: 0, installed: None }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct SystemLoad {
    cpu_percent: Option<f32>,
    memory_used_mib: Option<u64>,
}

impl InventoryReadings {
    /// Of this machine, whose tenants are admitted by an sshd with this public key, if by any, and get these device nodes beside their GPUs.
    #[must_use]
    pub fn new(public_host_key: Option<PathBuf>, tenant_devices: &[PathBuf]) -> Self {
        Self {
            public_host_key,
            system: BoundedReading::of("the system's name, processors, memory and machine id"),
            ssh_host_key: BoundedReading::of("the host key of SSH"),
            load: BoundedReading::of("the load of processors and memory"),
            meter: Arc::new(LoadMeter::default()),
            storage: Storage::default(),
            tenant_devices: tenant_devices.iter().map(|path| path.display().to_string()).collect(),
            last: LastInventory::default(),
        }
    }

    /// Reads all of it. Takes no longer than a moment, whatever does not answer.
    pub async fn read(&mut self) {
        let (meter, host_key) = (Arc::clone(&self.meter), self.public_host_key.clone());
        let (system, ssh_host_key, load, space) = tokio::join!(
            self.system.read(read_system),
            self.ssh_host_key.read(move || host_key.and_then(|public| ssh::host_key_fingerprint(&public))),
            self.load.read(move || meter.read()),
            self.storage.read(),
        );
        let last = &mut self.last;
        last.system = system.fresh().unwrap_or_else(|| last.system.clone());
        last.ssh_host_key = ssh_host_key.fresh().unwrap_or_else(|| last.ssh_host_key.clone());
        last.load = load.fresh().unwrap_or(last.load);
        last.space = space;
    }

    /// The inventory as last read, with these GPUs.
    #[must_use]
    pub fn inventory(
        &self,
        gpus: Vec<GpuInfo>,
        (gpu_source, driver_version): (GpuSource, Option<String>),
        executor: ExecutorKind,
    ) -> NodeInventory {
        let SystemInventory { hostname, kernel, cpu_model, cpu_cores, memory_mib, installed } =
            self.last.system.clone();
        NodeInventory {
            hostname,
            kernel,
            cpu_model,
            cpu_cores,
            memory_mib,
            storage_gib: self.last.space.map_or(0, |space| space.total / GIB),
            gpus,
            gpu_source,
            driver_version,
            executor,
            ssh_host_key_fingerprint: self.last.ssh_host_key.clone(),
            system: installed,
            tenant_devices: self.tenant_devices.clone(),
        }
        .within_bounds()
    }

    /// The load as last read; that of the GPUs is given.
    #[must_use]
    pub fn telemetry(&self, gpus: Vec<GpuTelemetry>) -> Telemetry {
        let LastInventory { load, space, .. } = &self.last;
        Telemetry {
            cpu_percent: load.cpu_percent,
            memory_used_mib: load.memory_used_mib,
            storage_used_gib: space.map(|space| space.total.saturating_sub(space.available) / GIB),
            gpus,
        }
    }

    /// What does not answer.
    #[must_use]
    pub fn conditions(&self) -> Vec<Condition> {
        let late = [
            self.system.late_since().map(|_| self.system.subject()),
            self.ssh_host_key.late_since().map(|_| self.ssh_host_key.subject()),
            self.load.late_since().map(|_| self.load.subject()),
        ];
        let of_inventory = late_readings("inventory", late.into_iter().flatten());
        of_inventory.into_iter().chain(late_readings("storage", self.storage.late())).collect()
    }
}

fn read_system() -> SystemInventory {
    let system = system();
    let cpus = system.as_ref().map_or(&[][..], |system| system.cpus());
    let unknown = SystemInventory::default();
    SystemInventory {
        hostname: System::host_name().unwrap_or(unknown.hostname),
        kernel: System::kernel_version().unwrap_or(unknown.kernel),
        cpu_model: cpus.first().map_or(unknown.cpu_model, |cpu| cpu.brand().trim().to_owned()),
        cpu_cores: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        memory_mib: system.as_ref().map_or(0, |system| system.total_memory() / MIB),
        installed: Some(installed_system(Path::new("/"))),
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

/// Measures load between calls.
#[derive(Default)]
struct LoadMeter(Mutex<Option<System>>);

impl LoadMeter {
    /// Load since the last call (processors; since an instant ago at the first) and at this moment (memory).
    fn read(&self) -> SystemLoad {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match known.as_mut() {
            Some(system) => {
                system.refresh_cpu_usage();
                system.refresh_memory();
            }
            None => *known = system(),
        }
        SystemLoad {
            cpu_percent: known.as_ref().map(System::global_cpu_usage),
            memory_used_mib: known.as_ref().map(|system| system.used_memory() / MIB),
        }
    }
}

fn system() -> Option<System> {
    let mut system = System::new().ok()?;
    system.refresh_cpu_all();
    system.refresh_memory();
    Some(system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_inventory_of_this_machine_is_plausible() {
        let mut readings = InventoryReadings::new(None, &[PathBuf::from("/dev/fuse")]);
        let unread = readings.inventory(Vec::new(), (GpuSource::None, None), ExecutorKind::Sandbox);
        assert_eq!((unread.hostname.as_str(), unread.cpu_cores, unread.system), ("unknown", 0, None));
        readings.read().await;
        let inventory = readings.inventory(Vec::new(), (GpuSource::None, None), ExecutorKind::Sandbox);
        assert_eq!((unread.tenant_devices, inventory.tenant_devices.len()), (vec!["/dev/fuse".to_owned()], 1));
        assert!(inventory.cpu_cores > 0 && inventory.memory_mib > 0, "{inventory:?}");
        assert_eq!((inventory.system, readings.conditions()), (Some(installed_system(Path::new("/"))), Vec::new()));
        let load = readings.telemetry(Vec::new());
        assert!(load.memory_used_mib > Some(0) && load.storage_used_gib.is_some(), "{load:?}");
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

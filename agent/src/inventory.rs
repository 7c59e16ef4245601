//! What the node is made of, how loaded it is, and whether something is missing.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use chrono::{DateTime, Utc};
use sysinfo::{Disks, System};
use uuid::Uuid;
use wire::heartbeat::{Alert, Classification, Health, HealthStatus, Telemetry};
use wire::inventory::{ExecutorKind, Gpu, Inventory};

use crate::gpus::Gpus;
use crate::store::{self, StoreError};

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;

/// Reads the node's hardware and software. A GPU list that cannot be read is empty here and an alert in [`assess`].
#[must_use]
pub fn read(gpus: &Gpus, executor: ExecutorKind, ssh_host_key_fingerprint: Option<String>) -> Inventory {
    let system = system();
    let cpus = system.as_ref().map_or(&[][..], |system| system.cpus());
    Inventory {
        hostname: System::host_name().unwrap_or_else(|_| "unknown".to_owned()),
        kernel: System::kernel_version().unwrap_or_else(|_| "unknown".to_owned()),
        cpu_model: cpus.first().map_or_else(|| "unknown".to_owned(), |cpu| cpu.brand().trim().to_owned()),
        cpu_cores: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        memory_mib: system.as_ref().map_or(0, |system| system.total_memory() / MIB),
        storage_gib: disk_space().map_or(0, |(total, _)| total / GIB),
        gpus: gpus.list().unwrap_or_default(),
        gpu_source: gpus.source(),
        executor,
        ssh_host_key_fingerprint,
    }
}

/// The kernel's id of this boot.
///
/// # Errors
/// [`StoreError`] where the kernel does not say.
pub fn boot_id() -> Result<Uuid, StoreError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = store::read_if_there(path)?.unwrap_or_default();
    text.trim().parse().map_err(|error| StoreError::at("read", path)(std::io::Error::other(error)))
}

/// Measures load between calls.
pub struct Meter(Mutex<Option<System>>);

impl Default for Meter {
    fn default() -> Self {
        Self(Mutex::new(system()))
    }
}

impl Meter {
    /// Load since the last call (processors) and at this moment (everything else).
    #[must_use]
    pub fn read(&self, gpus: &Gpus) -> Telemetry {
        let mut system = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(system) = system.as_mut() {
            system.refresh_cpu_usage();
            system.refresh_memory();
        }
        Telemetry {
            cpu_percent: system.as_ref().map(System::global_cpu_usage),
            memory_used_mib: system.as_ref().map(|system| system.used_memory() / MIB),
            storage_used_gib: disk_space().map(|(total, available)| total.saturating_sub(available) / GIB),
            gpus: gpus.telemetry(),
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

/// What is missing of the GPUs that the node had when the agent started. `since` remembers when each was first missed.
#[must_use]
pub fn assess(had: &[Gpu], has: &[Gpu], since: &mut BTreeMap<String, DateTime<Utc>>, now: DateTime<Utc>) -> Health {
    let missing = |gpu: &&Gpu| !has.iter().any(|other| other.uuid == gpu.uuid);
    since.retain(|uuid, _| had.iter().filter(missing).any(|gpu| gpu.uuid == *uuid));
    let alerts: Vec<Alert> = had
        .iter()
        .filter(missing)
        .map(|gpu| Alert {
            probe_id: "gpu.missing".to_owned(),
            target: gpu.uuid.clone(),
            since: *since.entry(gpu.uuid.clone()).or_insert(now),
            classifications: vec![Classification::PreventAllocation, Classification::BillingCredit],
            message: format!("the driver no longer lists GPU {} ({})", gpu.index, gpu.model),
            tenant_message: "A GPU of this node has failed.".to_owned(),
        })
        .collect();
    Health { status: if alerts.is_empty() { HealthStatus::Ok } else { HealthStatus::Critical }, alerts }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    fn gpu(index: u32) -> Gpu {
        Gpu { index, uuid: format!("GPU-{index}"), vendor: "NVIDIA".into(), model: "H100".into(), memory_mib: 1 }
    }

    #[test]
    fn a_gpu_that_vanishes_is_an_alert_from_its_first_absence_until_it_is_back() {
        let had = [gpu(0), gpu(1)];
        let (mut since, start) = (BTreeMap::new(), Utc::now());
        assert_eq!(assess(&had, &had, &mut since, start).status, HealthStatus::Ok);
        let later = start + TimeDelta::minutes(1);
        let _ = assess(&had, &had[..1], &mut since, start);
        let health = assess(&had, &had[..1], &mut since, later);
        assert_eq!(health.status, HealthStatus::Critical);
        assert_eq!((health.alerts[0].target.as_str(), health.alerts[0].since), ("GPU-1", start));
        assert!(assess(&had, &had, &mut since, later).alerts.is_empty());
        assert!(since.is_empty());
    }

    #[test]
    fn the_inventory_of_this_machine_is_plausible() {
        let inventory = read(&Gpus::Absent { why: String::new() }, ExecutorKind::Sandbox, None);
        assert!(inventory.cpu_cores > 0 && inventory.memory_mib > 0, "{inventory:?}");
        assert!(boot_id().is_ok());
    }
}

//! The node's hardware, its load, and missing hardware.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use chrono::{DateTime, Utc};
use sysinfo::{Disks, System};
use uuid::Uuid;
use wire::heartbeat::{Alert, Classification, HealthLevel, HealthReport, Telemetry};
use wire::inventory::{ExecutorKind, GpuInfo, NodeInventory};

use crate::atomic_file::{self, FileError};
use crate::gpus::Gpus;

const MIB: u64 = 1024 * 1024;
const GIB: u64 = 1024 * MIB;

/// The inventory as it was read.
#[derive(Debug)]
pub struct InventoryReading {
    /// Without GPUs if their list could not be read.
    pub inventory: NodeInventory,
    /// Why the list of GPUs could not be read.
    pub unreadable: Option<String>,
}

/// Reads the node's hardware and software.
#[must_use]
pub fn read(gpus: &Gpus, executor: ExecutorKind, ssh_host_key_fingerprint: Option<String>) -> InventoryReading {
    let system = system();
    let (listed, unreadable) = match gpus.list() {
        Ok(listed) => (listed, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let cpus = system.as_ref().map_or(&[][..], |system| system.cpus());
    let inventory = NodeInventory {
        hostname: System::host_name().unwrap_or_else(|_| "unknown".to_owned()),
        kernel: System::kernel_version().unwrap_or_else(|_| "unknown".to_owned()),
        cpu_model: cpus.first().map_or_else(|| "unknown".to_owned(), |cpu| cpu.brand().trim().to_owned()),
        cpu_cores: u32::try_from(cpus.len()).unwrap_or(u32::MAX),
        memory_mib: system.as_ref().map_or(0, |system| system.total_memory() / MIB),
        storage_gib: disk_space().map_or(0, |(total, _)| total / GIB),
        gpus: listed,
        gpu_source: gpus.source(),
        executor,
        ssh_host_key_fingerprint,
    };
    InventoryReading { inventory, unreadable }
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

/// This many consecutive heartbeats without a list of GPUs are a fault of the machine. Fewer are a transient failure of the driver: as a
/// fault they would stop the charge of its allocations from then on to their end.
const UNREADABLE_HEARTBEATS: u32 = 3;

/// The health of the GPUs, from heartbeat to heartbeat.
#[derive(Debug)]
pub struct GpuMonitor {
    /// The GPUs at the agent's start; if they could not be read then, the first list that was read.
    had: Vec<GpuInfo>,
    /// The list that was read last.
    last: Vec<GpuInfo>,
    missing_since: BTreeMap<String, DateTime<Utc>>,
    unreadable: Option<Unreadable>,
}

/// Since when the list cannot be read, and in how many attempts.
#[derive(Clone, Copy, Debug)]
struct Unreadable {
    since: DateTime<Utc>,
    heartbeats: u32,
}

impl GpuMonitor {
    /// Monitors the GPUs that the node had at the agent's start.
    #[must_use]
    pub fn of(had: &[GpuInfo]) -> Self {
        Self { had: had.to_vec(), last: had.to_vec(), missing_since: BTreeMap::new(), unreadable: None }
    }

    /// The machine's health by a reading. If the GPUs could not be read, the last list is reported, together with an alert that says so.
    #[must_use]
    pub fn assess_reading(&mut self, reading: InventoryReading, now: DateTime<Utc>) -> (NodeInventory, HealthReport) {
        let InventoryReading { mut inventory, unreadable } = reading;
        let Some(why) = unreadable else {
            self.unreadable = None;
            if self.had.is_empty() {
                self.had.clone_from(&inventory.gpus);
            }
            self.last.clone_from(&inventory.gpus);
            let health = assess(&self.had, &inventory.gpus, &mut self.missing_since, now);
            return (inventory, health);
        };
        let before = self.unreadable.unwrap_or(Unreadable { since: now, heartbeats: 0 });
        let unreadable = Unreadable { heartbeats: before.heartbeats.saturating_add(1), ..before };
        self.unreadable = Some(unreadable);
        inventory.gpus.clone_from(&self.last);
        let mut health = assess(&self.had, &self.last, &mut self.missing_since, now);
        health.status = health.status.max(unreadable.status());
        health.alerts.push(unreadable.alert(&why));
        (inventory, health)
    }
}

impl Unreadable {
    const fn status(self) -> HealthLevel {
        if self.heartbeats < UNREADABLE_HEARTBEATS { HealthLevel::Warning } else { HealthLevel::Critical }
    }

    fn alert(self, why: &str) -> Alert {
        let mut classifications = vec![Classification::PreventAllocation];
        classifications.push(match self.status() {
            HealthLevel::Critical => Classification::BillingCredit,
            HealthLevel::Ok | HealthLevel::Warning => Classification::Warn,
        });
        Alert {
            probe_id: "gpu.unreadable".to_owned(),
            target: "gpus".to_owned(),
            since: self.since,
            classifications,
            message: format!("the driver does not list the GPUs ({why}); shown are those that it listed last"),
            tenant_message: "The GPUs of this node cannot be looked at.".to_owned(),
        }
    }
}

/// The GPUs that are missing. `since` remembers when each was first missed.
fn assess(
    had: &[GpuInfo],
    has: &[GpuInfo],
    since: &mut BTreeMap<String, DateTime<Utc>>,
    now: DateTime<Utc>,
) -> HealthReport {
    let missing = |gpu: &&GpuInfo| !has.iter().any(|other| other.uuid == gpu.uuid);
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
    HealthReport { status: if alerts.is_empty() { HealthLevel::Ok } else { HealthLevel::Critical }, alerts }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    fn gpu(index: u32) -> GpuInfo {
        GpuInfo { index, uuid: format!("GPU-{index}"), vendor: "NVIDIA".into(), model: "H100".into(), memory_mib: 1 }
    }

    #[test]
    fn vanished_gpu_is_an_alert_until_it_returns() {
        let had = [gpu(0), gpu(1)];
        let (mut since, start) = (BTreeMap::new(), Utc::now());
        assert_eq!(assess(&had, &had, &mut since, start).status, HealthLevel::Ok);
        let later = start + TimeDelta::minutes(1);
        let _ = assess(&had, &had[..1], &mut since, start);
        let health = assess(&had, &had[..1], &mut since, later);
        assert_eq!(health.status, HealthLevel::Critical);
        assert_eq!((health.alerts[0].target.as_str(), health.alerts[0].since), ("GPU-1", start));
        assert!(assess(&had, &had, &mut since, later).alerts.is_empty());
        assert!(since.is_empty());
    }

    /// A reading of a machine with these GPUs, or without an answer of its driver.
    fn reading(listed: Result<&[GpuInfo], &str>) -> InventoryReading {
        let InventoryReading { inventory, .. } =
            read(&Gpus::Absent { why: String::new() }, ExecutorKind::Sandbox, None);
        match listed {
            Ok(gpus) => {
                InventoryReading { inventory: NodeInventory { gpus: gpus.to_vec(), ..inventory }, unreadable: None }
            }
            Err(why) => InventoryReading { inventory, unreadable: Some(why.to_owned()) },
        }
    }

    #[test]
    fn unresponsive_driver_is_a_fault_only_after_several_heartbeats() {
        let had = [gpu(0), gpu(1)];
        let (mut monitor, start) = (GpuMonitor::of(&had), Utc::now());
        let heartbeat_at = |n: i64| start + TimeDelta::seconds(30 * n);
        for (n, wanted) in [(0, HealthLevel::Warning), (1, HealthLevel::Warning), (2, HealthLevel::Critical)] {
            let (inventory, health) = monitor.assess_reading(reading(Err("Timeout")), heartbeat_at(n));
            assert_eq!((health.status, &inventory.gpus[..]), (wanted, &had[..]), "as it was read last");
            assert_eq!((health.alerts[0].probe_id.as_str(), health.alerts[0].since), ("gpu.unreadable", start));
        }
        assert_eq!(monitor.assess_reading(reading(Ok(&had)), heartbeat_at(3)).1.status, HealthLevel::Ok);
        // The next failure is counted from its own beginning.
        assert_eq!(monitor.assess_reading(reading(Err("Timeout")), heartbeat_at(4)).1.status, HealthLevel::Warning);
    }

    #[test]
    fn missing_gpu_stays_missing_while_the_driver_does_not_answer() {
        let had = [gpu(0), gpu(1)];
        let (mut monitor, now) = (GpuMonitor::of(&had), Utc::now());
        assert_eq!(monitor.assess_reading(reading(Ok(&had[..1])), now).1.status, HealthLevel::Critical);
        let (inventory, health) = monitor.assess_reading(reading(Err("Timeout")), now);
        assert_eq!((health.status, health.alerts.len(), inventory.gpus.len()), (HealthLevel::Critical, 2, 1));
    }

    #[test]
    fn first_list_of_a_driver_that_was_unresponsive_at_start_is_the_baseline() {
        let (mut monitor, now) = (GpuMonitor::of(&[]), Utc::now());
        let _ = monitor.assess_reading(reading(Err("Timeout")), now);
        assert_eq!(monitor.assess_reading(reading(Ok(&[gpu(0)])), now).1.status, HealthLevel::Ok);
        assert_eq!(monitor.assess_reading(reading(Ok(&[])), now).1.status, HealthLevel::Critical);
    }

    #[test]
    fn the_inventory_of_this_machine_is_plausible() {
        let InventoryReading { inventory, unreadable } =
            read(&Gpus::Absent { why: String::new() }, ExecutorKind::Sandbox, None);
        assert_eq!(unreadable, None);
        assert!(inventory.cpu_cores > 0 && inventory.memory_mib > 0, "{inventory:?}");
        assert!(boot_id().is_ok());
    }
}

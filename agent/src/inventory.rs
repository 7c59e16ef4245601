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

/// What was found in the machine.
#[derive(Debug)]
pub struct Look {
    /// Without GPUs where their list could not be read.
    pub inventory: Inventory,
    /// Why it could not.
    pub unreadable: Option<String>,
}

/// Reads the node's hardware and software.
#[must_use]
pub fn read(gpus: &Gpus, executor: ExecutorKind, ssh_host_key_fingerprint: Option<String>) -> Look {
    let system = system();
    let (listed, unreadable) = match gpus.list() {
        Ok(listed) => (listed, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let cpus = system.as_ref().map_or(&[][..], |system| system.cpus());
    let inventory = Inventory {
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
    Look { inventory, unreadable }
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

/// So many heartbeats in a row without a list of GPUs are a fault of the machine. Fewer are the driver's hiccup: whoever rents there would
/// not pay for it, from then on to the end.
const UNREADABLE_BEATS: u32 = 3;

/// What is judged of the GPUs, from heartbeat to heartbeat.
#[derive(Debug)]
pub struct Watch {
    /// What the node had when the agent started; where that could not be read, what was read first.
    had: Vec<Gpu>,
    /// What was read last.
    last: Vec<Gpu>,
    missing_since: BTreeMap<String, DateTime<Utc>>,
    unreadable: Option<Unreadable>,
}

/// Since when the list cannot be read, and how often that was tried.
#[derive(Clone, Copy, Debug)]
struct Unreadable {
    since: DateTime<Utc>,
    beats: u32,
}

impl Watch {
    /// Of the GPUs that the node had at the agent's start.
    #[must_use]
    pub fn of(had: &[Gpu]) -> Self {
        Self { had: had.to_vec(), last: had.to_vec(), missing_since: BTreeMap::new(), unreadable: None }
    }

    /// What a look says of the machine's health. Of GPUs that could not be read nothing is known: they are reported as they were read last,
    /// beside an alert that says so.
    #[must_use]
    pub fn judge(&mut self, look: Look, now: DateTime<Utc>) -> (Inventory, Health) {
        let Look { mut inventory, unreadable } = look;
        let Some(why) = unreadable else {
            self.unreadable = None;
            if self.had.is_empty() {
                self.had.clone_from(&inventory.gpus);
            }
            self.last.clone_from(&inventory.gpus);
            let health = assess(&self.had, &inventory.gpus, &mut self.missing_since, now);
            return (inventory, health);
        };
        let before = self.unreadable.unwrap_or(Unreadable { since: now, beats: 0 });
        let unreadable = Unreadable { beats: before.beats.saturating_add(1), ..before };
        self.unreadable = Some(unreadable);
        inventory.gpus.clone_from(&self.last);
        let mut health = assess(&self.had, &self.last, &mut self.missing_since, now);
        health.status = health.status.max(unreadable.status());
        health.alerts.push(unreadable.alert(&why));
        (inventory, health)
    }
}

impl Unreadable {
    const fn status(self) -> HealthStatus {
        if self.beats < UNREADABLE_BEATS { HealthStatus::Warning } else { HealthStatus::Critical }
    }

    fn alert(self, why: &str) -> Alert {
        let mut classifications = vec![Classification::PreventAllocation];
        classifications.push(match self.status() {
            HealthStatus::Critical => Classification::BillingCredit,
            HealthStatus::Ok | HealthStatus::Warning => Classification::Warn,
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

/// What is missing of the GPUs that the node had. `since` remembers when each was first missed.
fn assess(had: &[Gpu], has: &[Gpu], since: &mut BTreeMap<String, DateTime<Utc>>, now: DateTime<Utc>) -> Health {
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

    /// What is found of a machine with these GPUs, or without an answer of its driver.
    fn look(listed: Result<&[Gpu], &str>) -> Look {
        let Look { inventory, .. } = read(&Gpus::Absent { why: String::new() }, ExecutorKind::Sandbox, None);
        match listed {
            Ok(gpus) => Look { inventory: Inventory { gpus: gpus.to_vec(), ..inventory }, unreadable: None },
            Err(why) => Look { inventory, unreadable: Some(why.to_owned()) },
        }
    }

    #[test]
    fn a_driver_that_does_not_answer_is_a_fault_only_after_some_heartbeats() {
        let had = [gpu(0), gpu(1)];
        let (mut watch, start) = (Watch::of(&had), Utc::now());
        let beat = |n: i64| start + TimeDelta::seconds(30 * n);
        for (n, wanted) in [(0, HealthStatus::Warning), (1, HealthStatus::Warning), (2, HealthStatus::Critical)] {
            let (inventory, health) = watch.judge(look(Err("Timeout")), beat(n));
            assert_eq!((health.status, &inventory.gpus[..]), (wanted, &had[..]), "as it was read last");
            assert_eq!((health.alerts[0].probe_id.as_str(), health.alerts[0].since), ("gpu.unreadable", start));
        }
        assert_eq!(watch.judge(look(Ok(&had)), beat(3)).1.status, HealthStatus::Ok);
        // The next hiccup is counted from its own beginning.
        assert_eq!(watch.judge(look(Err("Timeout")), beat(4)).1.status, HealthStatus::Warning);
    }

    #[test]
    fn a_gpu_that_is_missing_stays_so_while_the_driver_does_not_answer() {
        let had = [gpu(0), gpu(1)];
        let (mut watch, now) = (Watch::of(&had), Utc::now());
        assert_eq!(watch.judge(look(Ok(&had[..1])), now).1.status, HealthStatus::Critical);
        let (inventory, health) = watch.judge(look(Err("Timeout")), now);
        assert_eq!((health.status, health.alerts.len(), inventory.gpus.len()), (HealthStatus::Critical, 2, 1));
    }

    #[test]
    fn where_the_driver_did_not_answer_at_the_start_what_it_says_first_is_what_the_node_has() {
        let (mut watch, now) = (Watch::of(&[]), Utc::now());
        let _ = watch.judge(look(Err("Timeout")), now);
        assert_eq!(watch.judge(look(Ok(&[gpu(0)])), now).1.status, HealthStatus::Ok);
        assert_eq!(watch.judge(look(Ok(&[])), now).1.status, HealthStatus::Critical);
    }

    #[test]
    fn the_inventory_of_this_machine_is_plausible() {
        let Look { inventory, unreadable } = read(&Gpus::Absent { why: String::new() }, ExecutorKind::Sandbox, None);
        assert_eq!(unreadable, None);
        assert!(inventory.cpu_cores > 0 && inventory.memory_mib > 0, "{inventory:?}");
        assert!(boot_id().is_ok());
    }
}

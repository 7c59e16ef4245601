//! Bounds of what one tenant may take of the machine: memory, processes and processor time, in proportion to its GPUs.
//!
//! A drop-in of the slice of its sessions, beside the one of its devices ([`super::device_guard`], which also has systemd read it and
//! removes both at the release). Only with systemd and control groups of version 2: nothing else bounds the sum of a user's processes. The
//! disk is not bounded.

use std::fs;
use std::path::PathBuf;

use super::accounts::TenantAccount;
use crate::atomic_file;
use crate::executor::TaskFailure;

const FILE: &str = "60-limits.conf";
/// The controllers of the machine's control groups, with version 2.
const CONTROLLERS: &str = "/sys/fs/cgroup/cgroup.controllers";
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];
const MEMORY: &str = "/proc/meminfo";
/// The default of what stays for the machine itself: this part of its memory.
const RESERVED_PART: u64 = 16;
/// Where the kernel begins to slow a tenant down, in percent of where it ends its programs.
const HIGH: u64 = 95;
/// Of one GPU, as systemd's default of a slice is 100.
const CPU_WEIGHT: u64 = 100;
const MAX_CPU_WEIGHT: u64 = 10_000;

/// An operator's settings of the bounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitSettings {
    pub is_on: bool,
    /// Memory that no tenant gets; `None`: a sixteenth.
    pub reserved_memory_mib: Option<u64>,
    /// Processes and threads for each GPU.
    pub tasks_per_gpu: u64,
}

impl Default for LimitSettings {
    fn default() -> Self {
        Self { is_on: true, reserved_memory_mib: None, tasks_per_gpu: 16_384 }
    }
}

/// Why tenants are not bounded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnboundedTenants {
    #[error("SVC_NODE_AGENT_TENANT_LIMITS is off")]
    Off,
    #[error("systemd does not run")]
    NoSystemd,
    #[error("the machine has no control groups of version 2 with cpu, memory and pids")]
    NoControlGroups,
    #[error("{MEMORY} does not say how much memory the machine has")]
    NoMemory,
}

/// The bounds of one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    memory_bytes: u64,
    tasks: u64,
    cpu_weight: u64,
}

/// See the module's documentation.
pub struct TenantLimits {
    settings: LimitSettings,
    /// The folder of slice configuration until the next boot, where bounds hold.
    slices: Result<PathBuf, UnboundedTenants>,
    memory_bytes: u64,
}

impl TenantLimits {
    /// `slices`: the folder of slice configuration, where systemd runs.
    #[must_use]
    pub fn of_this_machine(settings: LimitSettings, slices: Option<PathBuf>) -> Self {
        let memory = fs::read_to_string(MEMORY).ok().and_then(|text| total_memory(&text));
        let controllers = fs::read_to_string(CONTROLLERS).unwrap_or_default();
        let slices = match slices {
            _ if !settings.is_on => Err(UnboundedTenants::Off),
            None => Err(UnboundedTenants::NoSystemd),
            Some(_) if !has_controllers(&controllers) => Err(UnboundedTenants::NoControlGroups),
            Some(_) if memory.is_none() => Err(UnboundedTenants::NoMemory),
            Some(folder) => Ok(folder),
        };
        Self { settings, slices, memory_bytes: memory.unwrap_or_default() }
    }

    /// Whether tenants are bounded.
    ///
    /// # Errors
    /// [`UnboundedTenants`].
    pub fn check(&self) -> Result<(), UnboundedTenants> {
        self.slices.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// Writes the bounds of a tenant that holds this many of the machine's GPUs. Returns whether systemd has to reload afterwards.
    ///
    /// # Errors
    /// `node_storage`.
    pub fn write(&self, account: &TenantAccount, held: usize, gpus: usize) -> Result<bool, TaskFailure> {
        let Ok(slices) = &self.slices else { return Ok(false) };
        let path = slices.join(format!("user-{}.slice.d", account.uid)).join(FILE);
        let text = self.share(held, gpus).as_drop_in();
        Ok(atomic_file::write_if_changed(&path, text.as_bytes())?)
    }

    fn share(&self, held: usize, gpus: usize) -> Share {
        let (held, gpus) = (to_count(held).max(1), to_count(gpus).max(1));
        let held = held.min(gpus);
        let reserved = self.settings.reserved_memory_mib.map(|mib| mib.saturating_mul(1 << 20));
        let reserved = reserved.unwrap_or(self.memory_bytes / RESERVED_PART);
        let shared = self.memory_bytes.saturating_sub(reserved);
        Share {
            // Never 0, with which no program starts.
            memory_bytes: (shared / gpus * held).max(1 << 20),
            tasks: self.settings.tasks_per_gpu.saturating_mul(held),
            cpu_weight: (CPU_WEIGHT * held).min(MAX_CPU_WEIGHT),
        }
    }
}

impl Share {
    fn as_drop_in(self) -> String {
        let Self { memory_bytes, tasks, cpu_weight } = self;
        let high = memory_bytes / 100 * HIGH;
        format!("[Slice]\nMemoryHigh={high}\nMemoryMax={memory_bytes}\nTasksMax={tasks}\nCPUWeight={cpu_weight}\n")
    }
}

fn to_count(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// proc_meminfo(5), in bytes.
fn total_memory(text: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn has_controllers(text: &str) -> bool {
    NEEDED.iter().all(|needed| text.split_whitespace().any(|there| there == *needed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn limits(memory_bytes: u64, reserved_memory_mib: Option<u64>) -> TenantLimits {
        let settings = LimitSettings { reserved_memory_mib, ..LimitSettings::default() };
        TenantLimits { settings, slices: Err(UnboundedTenants::NoSystemd), memory_bytes }
    }

    #[test]
    fn tenants_of_all_gpus_together_leave_the_reserve_to_the_machine() {
        let limits = limits(1024 * GIB, None);
        for held in 1..=8 {
            let (one, others) = (limits.share(held, 8), limits.share(8 - held, 8));
            let both = one.memory_bytes + if held == 8 { 0 } else { others.memory_bytes };
            assert_eq!(both, 960 * GIB, "{held} of 8");
            assert_eq!((one.tasks, one.cpu_weight), (16_384 * held as u64, 100 * held as u64));
        }
    }

    #[test]
    fn share_is_never_empty_whatever_is_reserved() {
        assert_eq!(limits(GIB, Some(4096)).share(1, 8).memory_bytes, 1 << 20);
        assert_eq!(limits(8 * GIB, Some(u64::MAX)).share(1, 1).memory_bytes, 1 << 20);
        let more_than_there_are = limits(8 * GIB, Some(0)).share(3, 2);
        assert_eq!(more_than_there_are.memory_bytes, 8 * GIB);
    }

    #[test]
    fn drop_in_bounds_memory_processes_and_processor_time() {
        let text = limits(16 * GIB, Some(0)).share(1, 2).as_drop_in();
        assert_eq!(text, "[Slice]\nMemoryHigh=8160437775\nMemoryMax=8589934592\nTasksMax=16384\nCPUWeight=100\n");
    }

    #[test]
    fn systemd_reads_the_drop_in_without_a_complaint() {
        let folder = tempfile::tempdir().unwrap();
        let slice = folder.path().join("user-80001.slice");
        fs::write(&slice, "[Slice]\n").unwrap();
        let limits = TenantLimits { slices: Ok(folder.path().to_owned()), ..limits(16 * GIB, None) };
        let account = TenantAccount { name: "gpu-1".into(), uid: 80_001 };
        assert!(limits.write(&account, 1, 2).unwrap(), "systemd has to read it");
        assert!(!limits.write(&account, 1, 2).unwrap(), "the same again is not written");
        assert!(folder.path().join("user-80001.slice.d").join(FILE).exists());
        let ran = std::process::Command::new("systemd-analyze").arg("verify").arg(slice).output();
        let ran = ran.expect("systemd-analyze is installed");
        let printed = [ran.stdout, ran.stderr].map(|output| String::from_utf8_lossy(&output).into_owned()).concat();
        assert_eq!(printed, "");
    }

    #[test]
    fn memory_and_controllers_are_read_as_the_kernel_writes_them() {
        assert_eq!(total_memory("MemTotal:       49368368 kB\nMemFree:        1 kB\n"), Some(49_368_368 * 1024));
        assert_eq!(total_memory("MemFree:        1 kB\n"), None);
        assert!(has_controllers("cpuset cpu io memory hugetlb pids rdma misc\n"));
        assert!(!has_controllers("cpuset io memory") && !has_controllers(""));
    }

    #[test]
    fn machine_without_systemd_or_with_bounds_switched_off_says_why() {
        let off = LimitSettings { is_on: false, ..LimitSettings::default() };
        assert_eq!(TenantLimits::of_this_machine(off, Some("/run".into())).check(), Err(UnboundedTenants::Off));
        let without = TenantLimits::of_this_machine(LimitSettings::default(), None);
        assert_eq!(without.check(), Err(UnboundedTenants::NoSystemd));
    }
}
